"""How long a lab takes from the command to ready, and from ``lab down`` to nothing left; what a meshed pod weighs."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lab.fabric import paths

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = 3
PODS = 20

TWENTY = f"""
apiVersion: v1
kind: ConfigMap
metadata: {{name: istio, namespace: istio-system}}
data:
  mesh: |
    enableAutoMtls: false
    defaultConfig:
      discoveryAddress: istiod.istio-system.svc:15010
      controlPlaneAuthPolicy: NONE
      proxyMetadata: {{ISTIO_META_DNS_CAPTURE: "true"}}
---
apiVersion: security.istio.io/v1
kind: PeerAuthentication
metadata: {{name: default, namespace: istio-system}}
spec: {{mtls: {{mode: DISABLE}}}}
---
apiVersion: v1
kind: Namespace
metadata: {{name: shop, labels: {{istio-injection: enabled}}}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {{name: web, namespace: shop}}
spec:
  replicas: {PODS}
  selector: {{matchLabels: {{app: web}}}}
  template:
    metadata: {{labels: {{app: web}}}}
    spec: {{containers: [{{name: app, ports: [{{name: http, containerPort: 8080}}]}}]}}
---
apiVersion: v1
kind: Service
metadata: {{name: web, namespace: shop}}
spec: {{selector: {{app: web}}, ports: [{{name: http, port: 8080}}]}}
"""


def main() -> dict[str, Any]:
    """Seconds to bring up and take down the quickstart and a mesh of twenty meshed pods; the goals: 3 s and 1 s."""
    results = {"quickstart": _measure(str(ROOT / "topologies/quickstart.yaml"))}
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "twenty.yaml")
        file.write_text(TWENTY)
        results[f"pods_{PODS}"] = _measure(str(file), rounds=1)
    print(f"{'':12} {'up (s)':>8} {'down (s)':>8} {'agent PSS (MB)':>15} {'Envoy PSS (MB)':>15}")
    for name, figures in results.items():
        print(
            f"{name:12} {figures['up_seconds']:8.2f} {figures['down_seconds']:8.2f} "
            f"{figures['agent_pss_mb']:15.1f} {figures['envoy_pss_mb']:15.1f}"
        )
    return results


def _measure(file: str, rounds: int = ROUNDS) -> dict[str, Any]:
    """The median of several rounds; the whole commands, interpreter start and all."""
    name = f"bench-{os.getpid()}"
    ups, downs, info = [], [], {}
    for _ in range(rounds):
        start = time.perf_counter()
        done = _lab("up", file, "--name", name, "-d", "--json")
        ups.append(time.perf_counter() - start)
        try:
            info = json.loads(done.stdout)
            weights = {who: _pss(info, who) for who in ("agent", "envoy")}
        finally:
            start = time.perf_counter()
            _lab("down", name)
            downs.append(time.perf_counter() - start)
        assert not paths.run_dir(name).exists()
    return {
        "pods": len(info["pods"]),
        "iptables": info["iptables"],
        "up_seconds": statistics.median(ups),
        "down_seconds": statistics.median(downs),
        "agent_pss_mb": weights["agent"],
        "envoy_pss_mb": weights["envoy"],
    }


def _lab(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lab", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )


def _pss(info: dict[str, Any], who: str) -> float:
    """Mean proportional set size of one kind of process (proc(5): smaps_rollup), in MB."""
    texts = [Path(f"/proc/{pod['pids'][who]}/smaps_rollup").read_text() for pod in info["pods"] if pod["pids"].get(who)]
    lines = [line for text in texts for line in text.splitlines() if line.startswith("Pss:")]
    return statistics.mean(int(line.split()[1]) / 1024 for line in lines)


if __name__ == "__main__":
    main()

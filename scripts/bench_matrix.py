"""How long ``lab matrix`` and ``lab diff`` take for a mesh of 20 pods with proxies and 40 targets.

As a user types them: the whole process, from exec to exit, of manifests. Cold: nothing is remembered of an earlier run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PODS, SERVICES, NAMESPACES = 20, 16, 4
GOAL_S = 3.0

_HEAD = """\
apiVersion: v1
kind: Namespace
metadata: {name: istio-system}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: istio, namespace: istio-system}
data: {mesh: "{outboundTrafficPolicy: {mode: %s}, defaultConfig: {proxyMetadata: {ISTIO_META_DNS_CAPTURE: 'true'}}}"}
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: vendor, namespace: istio-system}
spec:
  hosts: [api.vendor.example]
  resolution: DNS
  ports: [{number: 80, name: http, protocol: HTTP}, {number: 443, name: tls, protocol: TLS}]
---
apiVersion: sidecarlab.dev/v1alpha1
kind: ExternalHost
metadata: {name: vendor}
spec: {hosts: [api.vendor.example], ports: [{port: 80, protocol: http}, {port: 443, protocol: tls}]}
---
apiVersion: sidecarlab.dev/v1alpha1
kind: ExternalHost
metadata: {name: unknown}
spec: {hosts: [unknown.example], ports: [{port: 80, protocol: http}, {port: 9000, protocol: tcp}]}
"""
_NAMESPACE = """\
---
apiVersion: v1
kind: Namespace
metadata: {name: ns%d, labels: {istio-injection: enabled}}
"""
_POD = """\
---
apiVersion: v1
kind: Pod
metadata: {name: app%d, namespace: ns%d, labels: {app: app%d}}
spec: {containers: [{name: app, ports: [{name: http, containerPort: 8080}]}]}
"""
_SERVICE = """\
---
apiVersion: v1
kind: Service
metadata: {name: app%d, namespace: ns%d}
spec: {selector: {app: app%d}, ports: [{name: http, port: 8080}]}
"""


def main(rounds: int = 5) -> dict[str, Any]:
    """Measures, prints a table and gives ``{"rows": [...], "met": bool}``; times are seconds.

    Rows: ``what``, ``fields`` (flows predicted), ``best_s``, ``cpu_s`` (of the best run), ``goal_s``, ``met``. The best run counts:
    others on the machine only make it slower.
    """
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        one, other = Path(directory) / "allow.yaml", Path(directory) / "only.yaml"
        one.write_text(mesh("ALLOW_ANY"))
        other.write_text(mesh("REGISTRY_ONLY"))
        cold, warm = {"SIDECARLAB_CACHE": "off"}, {"XDG_CACHE_HOME": directory}
        fields = PODS * (PODS + SERVICES + 4)
        rows.append(_row("matrix, cold", fields, ["matrix", str(one)], cold, rounds, GOAL_S))
        _timed(["matrix", str(one)], warm)
        rows.append(_row("matrix, again", fields, ["matrix", str(one)], warm, rounds, GOAL_S))
        rows.append(_row("diff, cold", 2 * fields, ["diff", str(one), str(other)], cold, rounds, None))
    print(f"{'':16}{'fields':>8}{'best s':>9}{'cpu s':>9}{'goal s':>9}")
    for row in rows:
        goal = f"{row['goal_s']:9.1f}" if row["goal_s"] else f"{'-':>9}"
        print(f"{row['what']:16}{row['fields']:8}{row['best_s']:9.2f}{row['cpu_s']:9.2f}{goal}")
    return {"rows": rows, "met": all(row["met"] for row in rows)}


def mesh(policy: str) -> str:
    """The manifests."""
    parts = [_HEAD % policy, *(_NAMESPACE % n for n in range(NAMESPACES))]
    parts += [_POD % (n, n % NAMESPACES, n) for n in range(PODS)]
    parts += [_SERVICE % (n, n % NAMESPACES, n) for n in range(SERVICES)]
    return "".join(parts)


def _row(
    what: str, fields: int, args: list[str], environ: dict[str, str], rounds: int, goal: float | None
) -> dict[str, Any]:
    best, cpu = min(_timed(args, environ) for _ in range(rounds))
    return {
        "what": what,
        "fields": fields,
        "best_s": round(best, 3),
        "cpu_s": round(cpu, 3),
        "goal_s": goal,
        "met": goal is None or best <= goal,
    }


def _timed(args: list[str], environ: dict[str, str]) -> tuple[float, float]:
    """Seconds of a whole run, and of the processor's."""
    before = os.times()
    start = time.perf_counter()
    command = [sys.executable, "-m", "lab", *args]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environ}, stdout=subprocess.DEVNULL, check=False)
    took = time.perf_counter() - start
    if done.returncode not in (0, 1):
        raise RuntimeError(f"lab {args[0]} ended with {done.returncode}")
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return took, spent


if __name__ == "__main__":
    main()

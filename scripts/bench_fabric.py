"""How long the fabric of a lab takes: namespaces, links, routes and service rules, up and down."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

RUNS = 5


def main() -> dict[str, float]:
    """Seconds, median of several runs; needs root.

    Keys: ``import_s``, and ``up_N_pods_s``, ``down_N_pods_s`` for N pods (with N/2.5 services of two or three pods
    each, and two external hosts).
    """
    measured = {"import_s": statistics.median(_import_seconds() for _ in range(RUNS))}
    for pods, runs in ((5, RUNS), (100, 3)):
        times = [_up_and_down(pods, f"bench-fabric-{os.getpid()}") for _ in range(runs)]
        measured[f"up_{pods}_pods_s"] = statistics.median(up for up, _ in times)
        measured[f"down_{pods}_pods_s"] = statistics.median(down for _, down in times)
    for key, seconds in measured.items():
        print(f"{key:<16} {seconds:7.3f}")
    return {key: round(value, 4) for key, value in measured.items()}


def _import_seconds() -> float:
    """In a fresh interpreter, without what its own start takes."""
    script = "import time; t = time.perf_counter(); import lab.fabric.build; print(time.perf_counter() - t)"
    return float(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)


def _up_and_down(pods: int, name: str) -> tuple[float, float]:
    from lab.fabric import build, record
    from lab.fabric.plan import plan
    from lab.manifests import load

    mesh = load.load_text(_manifests(pods))
    kept = record.Record.create(name)
    try:
        begin = time.perf_counter()
        build.build(plan(mesh), kept)
        up = time.perf_counter() - begin
    finally:
        kept.close()
        begin = time.perf_counter()
        record.down(name)
        down = time.perf_counter() - begin
    return up, down


def _manifests(pods: int) -> str:
    objects = ["apiVersion: v1\nkind: Namespace\nmetadata: {name: bench}"]
    objects += [
        f"apiVersion: v1\nkind: Pod\nmetadata: {{name: p{n}, namespace: bench, labels: {{app: a{n * 2 // 5}}}}}\n"
        "spec: {containers: [{name: app, ports: [{containerPort: 8080}]}]}"
        for n in range(pods)
    ]
    objects += [
        f"apiVersion: v1\nkind: Service\nmetadata: {{name: s{n}, namespace: bench}}\n"
        f"spec: {{selector: {{app: a{n}}}, ports: [{{name: http, port: 80, targetPort: 8080}}]}}"
        for n in range(pods * 2 // 5)
    ]
    objects += [
        f"apiVersion: sidecarlab.dev/v1alpha1\nkind: ExternalHost\nmetadata: {{name: x{n}}}\n"
        f"spec: {{hosts: [x{n}.example], ports: [{{port: 80, protocol: http}}]}}"
        for n in range(2)
    ]
    return "\n---\n".join(objects)


if __name__ == "__main__":
    main()

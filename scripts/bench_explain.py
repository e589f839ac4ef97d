"""How long ``lab explain`` takes: on manifests, and on an Envoy config_dump as large as a mesh of a thousand services makes it."""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RUNS = 7
DUMP_BYTES = 20_000_000
_QUESTION = ["--from", "frontend.frontend", "--to", "catalog.catalog:8080"]
_OTHER = ["--from", "frontend.frontend", "--to", "payments.payments:8080"]


def main() -> dict[str, float]:
    """Seconds, median of several runs, of the whole command.

    Keys: ``quickstart_first_s`` (manifests never seen before; the programs are compiled, as set-up leaves them),
    ``quickstart_other_s`` (seen, but this flow was never asked for) and ``quickstart_again_s`` (the same question again), each
    with the CPU's seconds of it in ``..._cpu_s``; ``config_dump_s`` and ``config_dump_mb``.
    """
    measured: dict[str, float] = {}
    files = ["-f", str(ROOT / "topologies" / "quickstart.yaml")]
    with tempfile.TemporaryDirectory() as directory:
        cache = Path(directory, "cache")
        caches = [cache / str(n) for n in range(RUNS)]  # one a run, so that each finds what its row says
        for key, question in (
            ("quickstart_first", _QUESTION),
            ("quickstart_other", _OTHER),
            ("quickstart_again", _QUESTION),
        ):
            runs = [_explain([*files, *question], one) for one in caches]
            measured[f"{key}_s"] = statistics.median(wall for wall, _ in runs)
            measured[f"{key}_cpu_s"] = statistics.median(cpu for _, cpu in runs)
        dump = Path(directory, "config_dump.json")
        host = _write_dump(dump)
        asked = ["--config-dump", str(dump), "--to", f"{host}:8080"]
        measured["config_dump_s"] = statistics.median(_explain(asked, cache)[0] for _ in range(3))
        measured["config_dump_mb"] = dump.stat().st_size / 1e6
    for key, value in measured.items():
        print(f"{key:<24} {value:7.3f}")
    return {key: round(value, 4) for key, value in measured.items()}


def _explain(arguments: list[str], cache: Path) -> tuple[float, float]:
    """Wall and CPU seconds of one run, with what it remembers in ``cache``."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "lab", "explain", *arguments],
        check=True,
        stdout=subprocess.DEVNULL,
        cwd=ROOT,
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
    )
    wall = time.perf_counter() - begin
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _write_dump(file: Path) -> str:
    """A config_dump of at least `DUMP_BYTES`, laid out as Envoy's admin port does; the host of one of its services."""
    from lab.discovery import snapshot
    from lab.manifests import load

    services = 500
    while True:
        mesh = load.load_text(_manifests(services))
        client = mesh.pod("client.bench")
        assert client is not None
        found = snapshot.to_json(snapshot.generate(mesh, snapshot.node_for_pod(mesh, client)))
        file.write_text(json.dumps({"configs": _sections(found)}, indent=1))
        if file.stat().st_size >= DUMP_BYTES:
            return f"s{services - 1}.bench.svc.cluster.local"
        services = services * DUMP_BYTES // file.stat().st_size + 50


def _sections(found: dict[str, Any]) -> list[dict[str, Any]]:
    kind = "type.googleapis.com/envoy.admin.v3.{}ConfigDump"
    return [
        {"@type": kind.format("Clusters"), "dynamic_active_clusters": [{"cluster": c} for c in found["clusters"]]},
        {
            "@type": kind.format("Listeners"),
            "dynamic_listeners": [{"name": x["name"], "active_state": {"listener": x}} for x in found["listeners"]],
        },
        {"@type": kind.format("Routes"), "dynamic_route_configs": [{"route_config": r} for r in found["routes"]]},
        {
            "@type": kind.format("Endpoints"),
            "dynamic_endpoint_configs": [{"endpoint_config": e} for e in found["endpoints"]],
        },
    ]


def _manifests(services: int) -> str:
    objects = [
        "apiVersion: v1\nkind: Namespace\nmetadata: {name: bench, labels: {istio-injection: enabled}}",
        *(
            f"apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: bench, labels: {{app: {name}}}}}\n"
            "spec: {containers: [{name: app, ports: [{containerPort: 8080}]}]}"
            for name in ("client", "server")
        ),
    ]
    objects += [
        f"apiVersion: v1\nkind: Service\nmetadata: {{name: s{n}, namespace: bench}}\n"
        "spec: {selector: {app: server}, ports: [{name: http, port: 8080}, {name: tcp, port: 9000, targetPort: 8080}]}"
        for n in range(services)
    ]
    return "\n---\n".join(objects)


if __name__ == "__main__":
    main()

"""The evidence log: one JSON line per flow with every key that the probe joins on."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import select
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.discovery import snapshot
from lab.manifests import load

pytestmark = pytest.mark.root

KEYS = {
    "kind", "time", "listener", "filter_chain", "route_config", "virtual_host", "route_name", "cluster", "endpoint",
    "upstream_local", "downstream_local", "downstream_remote", "downstream_direct_local", "stream_id", "code", "flags",
    "details", "termination", "upstream_failure", "method", "path", "authority", "protocol", "sni", "tls_version",
    "peer_san", "upstream_tls_version", "upstream_peer_san", "bytes_received", "bytes_sent", "duration", "request_id",
}  # fmt: skip

# an HTTP listener on a real port, so that the flow needs no redirect
MESH = """
apiVersion: v1
kind: Namespace
metadata: {name: a, labels: {istio-injection: enabled}}
---
apiVersion: v1
kind: Pod
metadata: {name: client, namespace: a, labels: {app: client}}
spec: {containers: [{name: app, ports: [{containerPort: 8080}]}]}
---
apiVersion: v1
kind: Service
metadata: {name: client, namespace: a}
spec:
  selector: {app: client}
  ports: [{name: http, port: 8080}]
---
apiVersion: networking.istio.io/v1
kind: Sidecar
metadata: {name: real-socket, namespace: a}
spec:
  outboundTrafficPolicy: {mode: REGISTRY_ONLY}
  egress:
  - {port: {number: 8080, protocol: HTTP, name: http}, captureMode: NONE, hosts: ["./*"]}
  - hosts: ["./*"]
"""


class Evidence:
    """The log as a FIFO: a line can be waited for."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self._text = ""
        self.lines: list[dict[str, Any]] = []

    def close(self) -> None:
        os.close(self._fd)

    def wait(self, wanted: Callable[[dict[str, Any]], bool], timeout: float = 10) -> dict[str, Any]:
        """The first line for which ``wanted`` holds."""
        deadline = time.monotonic() + timeout
        while True:
            for line in self.lines:
                if wanted(line):
                    return line
            assert select.select([self._fd], [], [], max(0, deadline - time.monotonic()))[0], self.lines
            *complete, self._text = (self._text + os.read(self._fd, 65536).decode()).split("\n")
            self.lines.extend(json.loads(line) for line in complete)


@pytest.fixture
def evidence(tmp_path: Path) -> Iterator[tuple[Path, Evidence]]:
    path = tmp_path / "evidence"
    log = Evidence(path)
    yield path, log
    log.close()


async def inside(pid: int, code: str) -> str:
    process = await asyncio.create_subprocess_exec(
        "nsenter", "-n", "-t", str(pid), "python3", "-c", code, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    return out.decode()


def test_http_and_blackhole_flows_leave_a_full_line(
    run_envoy: Callable[..., Any], evidence: tuple[Path, Evidence]
) -> None:
    path, log = evidence
    mesh = load.load_text(MESH, "evidence.yaml")
    pod = mesh.pod("client.a")
    assert pod is not None
    plain = snapshot.node_for_pod(mesh, pod)
    node = dataclasses.replace(plain, metadata={**plain.metadata, "SIDECARLAB_EVIDENCE": str(path)})

    async def scenario() -> None:
        async with run_envoy(mesh, node) as envoy:
            await envoy.acked("CDS", "LDS", "RDS")
            blocked = await inside(
                envoy.pid,
                "import http.client; c = http.client.HTTPConnection('127.0.0.1', 8080); "
                "c.request('GET', '/x', headers={'Host': 'unknown.example'}); print(c.getresponse().status)",
            )
            assert blocked.strip() == "502"
            await inside(envoy.pid, "import socket; s = socket.create_connection(('127.0.0.1', 15001)); s.recv(1)")
            http = await asyncio.to_thread(log.wait, lambda line: line["kind"] == "http")
            tcp = await asyncio.to_thread(log.wait, lambda line: line["kind"] == "tcp")
        assert set(http) == KEYS
        assert set(tcp) == KEYS
        assert http["listener"] == "127.0.0.1_8080"
        assert (http["route_config"], http["virtual_host"], http["route_name"]) == ("8080", "block_all", "block_all")
        assert (http["code"], http["cluster"], http["authority"]) == (502, None, "unknown.example")
        assert (tcp["listener"], tcp["filter_chain"]) == ("virtualOutbound", "virtualOutbound-blackhole")
        assert (tcp["cluster"], tcp["flags"], tcp["route_config"]) == ("BlackHoleCluster", "UH", None)
        assert tcp["downstream_local"] == "127.0.0.1:15001"

    asyncio.run(scenario())

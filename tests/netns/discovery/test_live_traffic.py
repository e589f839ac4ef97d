"""Two Envoys on what discovery made for them, and real requests through both.

Interception is NONE (every listener is a real socket), so that the flows need no rules: the app calls 127.0.0.1:8080, its
Envoy calls the server's Envoy on the pod address, and that one calls the server app on loopback.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import select
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from lab.discovery import snapshot
from lab.manifests import load, model

pytestmark = pytest.mark.root

MESH = """
apiVersion: v1
kind: Namespace
metadata: {name: a, labels: {istio-injection: enabled}}
---
apiVersion: v1
kind: Namespace
metadata: {name: b, labels: {istio-injection: enabled}}
---
apiVersion: v1
kind: Pod
metadata: {name: client, namespace: a, labels: {app: client}, annotations: {sidecar.istio.io/interceptionMode: NONE}}
spec: {serviceAccountName: client, containers: [{name: app, ports: [{containerPort: 8080}]}]}
status: {podIP: 10.1.0.1}
---
apiVersion: v1
kind: Pod
metadata: {name: server, namespace: b, labels: {app: server, version: v1}, annotations: {sidecar.istio.io/interceptionMode: NONE}}
spec: {serviceAccountName: server, containers: [{name: app, ports: [{containerPort: 8080}]}]}
status: {podIP: 10.2.0.1}
---
apiVersion: v1
kind: Service
metadata: {name: server, namespace: b}
spec: {selector: {app: server}, ports: [{name: http, port: 8080}]}
---
apiVersion: networking.istio.io/v1
kind: Sidecar
metadata: {name: real, namespace: b}
spec:
  ingress: [{port: {number: 8080, protocol: HTTP, name: http}, bind: 10.2.0.1, defaultEndpoint: 127.0.0.1:9090}]
  egress: [{hosts: ["~/*"]}]  # or both Envoys would listen on 127.0.0.1:8080
---
"""

STRICT = """
apiVersion: security.istio.io/v1
kind: PeerAuthentication
metadata: {name: default, namespace: istio-system}
spec: {mtls: {mode: STRICT}}
---
"""

APP = """
import http.server, json, time, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        if self.path.startswith("/delay/"):
            time.sleep(float(self.path.rpartition("/")[2]))
        body = json.dumps({"path": self.path, "headers": {k.lower(): v for k, v in self.headers.items()}}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *a): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 9090), Handler)
print("ready", flush=True)
server.serve_forever()
"""

CALL = """
import http.client, json, sys
host, port, path, authority = sys.argv[1:]
try:
    c = http.client.HTTPConnection(host, int(port), timeout=20)
    c.request("GET", path, headers={"Host": authority})
    r = c.getresponse()
    body = r.read().decode()
    print(json.dumps({"status": r.status, "body": json.loads(body) if body.startswith("{") else body}))
except (OSError, http.client.HTTPException) as e:
    print(json.dumps({"status": None, "body": type(e).__name__}))
"""

HOST = "server.b.svc.cluster.local"


def rule(kind: str, spec: str) -> str:
    return f"apiVersion: networking.istio.io/v1\nkind: {kind}\nmetadata: {{name: x, namespace: a}}\nspec: {spec}\n---\n"


class Log:
    """An evidence log as a FIFO."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path, self._text, self.lines = path, "", list[dict[str, Any]]()
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)

    def _wait(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + 20
        while True:
            for index, line in enumerate(self.lines):
                if wanted(line):
                    return self.lines.pop(index)
            assert select.select([self._fd], [], [], max(0, deadline - time.monotonic()))[0], self.lines
            *complete, self._text = (self._text + os.read(self._fd, 65536).decode()).split("\n")
            self.lines.extend(json.loads(line) for line in complete)

    async def line(self, **values: Any) -> dict[str, Any]:
        """The next line that has these values."""
        return await asyncio.to_thread(self._wait, lambda found: all(found.get(k) == v for k, v in values.items()))

    def close(self) -> None:
        os.close(self._fd)


class Pair:
    """The client's and the server's Envoy, and the server app behind it."""

    def __init__(self, client: Any, server: Any, client_log: Log, server_log: Log) -> None:
        self.client, self.server, self.client_log, self.server_log = client, server, client_log, server_log

    async def call(self, path: str = "/", *, host: str = "127.0.0.1", authority: str = HOST) -> dict[str, Any]:
        process = await asyncio.create_subprocess_exec(
            "nsenter", "-n", "-t", str(self.client.pid), "python3", "-c", CALL, host, "8080", path, authority,
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, _ = await process.communicate()
        return dict(json.loads(out))

    async def push(self, mesh: model.Mesh) -> None:
        """A live change, until both Envoys have taken it."""
        await self.client.server.push(mesh)
        assert await self.client.server.settled(20)
        for status in self.client.server.status()["proxies"].values():
            assert status["nack"] is None


def mesh_of(*extra: str) -> model.Mesh:
    return load.load_text(MESH + "".join(extra), "live.yaml")


@pytest.fixture
def logs(tmp_path: Path) -> Any:
    found = (Log(tmp_path / "client.log"), Log(tmp_path / "server.log"))
    yield found
    for log in found:
        log.close()


@contextlib.asynccontextmanager
async def pair(run_envoy: Callable[..., Any], logs: tuple[Log, Log], mesh: model.Mesh) -> AsyncIterator[Pair]:
    nodes = []
    for name, log in (("client.a", logs[0]), ("server.b", logs[1])):
        pod = mesh.pod(name)
        assert pod is not None
        node = snapshot.node_for_pod(mesh, pod)
        nodes.append(dataclasses.replace(node, metadata={**node.metadata, "SIDECARLAB_EVIDENCE": str(log.path)}))
    async with (
        run_envoy(mesh, nodes[0], addresses=("10.1.0.1", "10.2.0.1")) as client,
        run_envoy(mesh, nodes[1], beside=client) as server,
    ):
        app = await asyncio.create_subprocess_exec(
            "nsenter", "-n", "-t", str(client.pid), "python3", "-c", APP, stdout=asyncio.subprocess.PIPE
        )
        try:
            assert app.stdout is not None
            assert await asyncio.wait_for(app.stdout.readline(), 20) == b"ready\n"
            await client.acked("CDS", "EDS", "LDS", "RDS")
            await server.acked("CDS", "LDS")
            yield Pair(client, server, *logs)
        finally:
            app.kill()
            await app.wait()


def run(run_envoy: Callable[..., Any], logs: Any, scenario: Callable[[Pair], Any], *extra: str) -> None:
    async def whole() -> None:
        async with asyncio.timeout(90), pair(run_envoy, logs, mesh_of(*extra)) as both:
            await scenario(both)

    asyncio.run(whole())


def test_mtls_identities_on_both_sides_and_strict_live(run_envoy: Callable[..., Any], logs: Any) -> None:
    async def scenario(both: Pair) -> None:
        answer = await both.call("/hello")
        assert answer["status"] == 200
        assert "URI=spiffe://cluster.local/ns/a/sa/client" in answer["body"]["headers"]["x-forwarded-client-cert"]
        outbound = await both.client_log.line(path="/hello")
        assert outbound["cluster"] == f"outbound|8080||{HOST}"
        assert (outbound["upstream_tls_version"], outbound["upstream_peer_san"]) == (
            "TLSv1.3",
            "spiffe://cluster.local/ns/b/sa/server",
        )
        inbound = await both.server_log.line(path="/hello")
        assert (inbound["listener"], inbound["cluster"]) == ("10.2.0.1_8080", "inbound|8080||")
        assert (inbound["tls_version"], inbound["peer_san"]) == ("TLSv1.3", "spiffe://cluster.local/ns/a/sa/client")

        # a client without a sidecar is let in while the mode is PERMISSIVE, and not any more under STRICT
        assert (await both.call("/plain", host="10.2.0.1"))["status"] == 200
        assert (await both.server_log.line(path="/plain"))["tls_version"] is None
        await both.push(mesh_of(STRICT))
        assert (await both.call("/again"))["status"] == 200
        assert (await both.call("/plain", host="10.2.0.1"))["status"] is None
        refused = await both.server_log.line(kind="listener")
        assert (refused["flags"], refused["details"]) == ("NR", "filter_chain_not_found")

    run(run_envoy, logs, scenario)


def test_pools_of_either_side_overflow(run_envoy: Callable[..., Any], logs: Any) -> None:
    pool = rule(
        "DestinationRule",
        f"{{host: {HOST}, trafficPolicy: {{connectionPool: {{tcp: {{maxConnections: 1}}, http: {{http1MaxPendingRequests: 1}}}}}}}}",
    )
    narrow = MESH.replace(
        "defaultEndpoint: 127.0.0.1:9090",
        "defaultEndpoint: 127.0.0.1:9090, connectionPool: {tcp: {maxConnections: 1}, http: {http1MaxPendingRequests: 1}}",
    )

    async def scenario(both: Pair) -> None:
        answers = await asyncio.gather(*(both.call("/delay/1") for _ in range(5)))
        assert sorted(a["status"] for a in answers)[:2] == [200, 200]
        assert sorted(a["status"] for a in answers)[2:] == [503, 503, 503]
        line = await both.client_log.line(flags="UO")
        assert (line["code"], line["details"]) == (503, "upstream_reset_before_response_started{overflow}")

        # the client's pool is wide again, the server's is narrow: the overflow is the server's
        await both.push(load.load_text(narrow, "narrow.yaml"))
        answers = await asyncio.gather(*(both.call("/delay/1") for _ in range(5)))
        assert 503 in {a["status"] for a in answers}
        assert (await both.server_log.line(flags="UO"))["cluster"] == "inbound|8080||"

    run(run_envoy, logs, scenario, pool)


RULES = rule(
    "VirtualService",
    f"""
  hosts: [{HOST}]
  http:
  - {{match: [{{uri: {{prefix: /slow}}}}], timeout: 0.2s, rewrite: {{uri: /delay/2}}, route: [{{destination: {{host: {HOST}}}}}]}}
  - {{match: [{{uri: {{prefix: /fault}}}}], fault: {{abort: {{percentage: {{value: 100}}, httpStatus: 418}}}}, route: [{{destination: {{host: {HOST}}}}}]}}
  - {{match: [{{uri: {{prefix: /subset}}}}], route: [{{destination: {{host: {HOST}, subset: nobody}}}}]}}
  - {{match: [{{uri: {{prefix: /moved}}}}], redirect: {{uri: /new, authority: new.example, redirectCode: 308}}}}
  - {{match: [{{uri: {{exact: /headers}}}}], headers: {{request: {{set: {{x-lab: yes}}}}}}, rewrite: {{uri: /seen, authority: other.example}},
     route: [{{destination: {{host: {HOST}}}}}]}}
""".replace("x-lab: yes", "x-lab: 'yes'"),
)


def test_rules_of_a_virtual_service(run_envoy: Callable[..., Any], logs: Any) -> None:
    async def scenario(both: Pair) -> None:
        assert (await both.call("/slow"))["status"] == 504
        assert (await both.client_log.line(code=504))["flags"] == "UT"
        assert (await both.call("/fault"))["status"] == 418
        fault = await both.client_log.line(code=418)
        assert (fault["flags"], fault["details"]) == ("FI", "fault_filter_abort")
        assert (await both.call("/subset"))["status"] == 503
        missing = await both.client_log.line(flags="NC")
        assert (missing["details"], missing["cluster"]) == ("cluster_not_found", None)
        assert (await both.call("/moved"))["status"] == 308
        seen = (await both.call("/headers"))["body"]
        assert (seen["path"], seen["headers"]["x-lab"], seen["headers"]["host"]) == ("/seen", "yes", "other.example")
        assert (await both.call("/nothing"))["status"] == 404
        assert (await both.client_log.line(code=404))["flags"] == "NR"

    run(run_envoy, logs, scenario, RULES)


def test_endpoints_come_and_go_live(run_envoy: Callable[..., Any], logs: Any) -> None:
    async def scenario(both: Pair) -> None:
        mesh = mesh_of()
        assert (await both.call())["status"] == 200
        unready = dataclasses.replace(
            mesh, pods=tuple(dataclasses.replace(p, ready=p.name != "server.b") for p in mesh.pods)
        )
        await both.push(unready)
        assert both.client.server.last_push["resources"] == {"EDS": 1}
        answer = await both.call("/sick")
        assert (answer["status"], answer["body"]) == (503, "no healthy upstream")
        assert (await both.client_log.line(path="/sick"))["flags"] == "UH"
        await both.push(mesh)
        assert (await both.call())["status"] == 200

    run(run_envoy, logs, scenario)

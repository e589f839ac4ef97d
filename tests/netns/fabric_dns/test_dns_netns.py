"""Cluster DNS as the node runs it: on its address and port 53, from manifests, reloaded while it serves."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dns.message
import dns.query
import dns.rcode
import pytest
from pyroute2 import NetNS, netns

pytestmark = pytest.mark.root

DEADLINE = 15.0
ADDRESSES = ("10.96.0.10", "10.244.0.7")
MAIN = "import json, sys; from lab.fabric import dns; sys.exit(dns.main(json.loads(sys.argv[1])))"
MANIFEST = """\
apiVersion: v1
kind: Namespace
metadata: {name: shop}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec:
  clusterIP: 10.96.1.1
  selector: {app: web}
  ports: [{name: http, port: 80}]
---
apiVersion: v1
kind: Service
metadata: {name: db, namespace: shop}
spec:
  clusterIP: None
  selector: {app: db}
  ports: [{name: tcp-sql, port: 5432}]
---
apiVersion: v1
kind: Pod
metadata: {name: db-0, namespace: shop, labels: {app: db}}
spec:
  hostname: first
  subdomain: db
  containers: [{name: app, ports: [{containerPort: 5432}]}]
status: {podIP: 10.244.0.9}
---
apiVersion: v1
kind: Service
metadata: {name: vendor, namespace: shop}
spec: {type: ExternalName, externalName: api.vendor.example}
---
apiVersion: sidecarlab.dev/v1alpha1
kind: ExternalHost
metadata: {name: vendor}
spec:
  hosts: [api.vendor.example]
  addresses: [203.0.113.5, 203.0.113.6]
  ports: [{port: 80, protocol: http}]
"""


@pytest.fixture(scope="module")
def namespace() -> Iterator[str]:
    name = f"slt-{os.getpid()}-dns"
    with NetNS(name, flags=os.O_CREAT) as ns:
        loopback = ns.link_lookup(ifname="lo")[0]
        ns.link("set", index=loopback, state="up")
        for address in ADDRESSES:
            ns.addr("add", index=loopback, address=address, prefixlen=32)
    yield name
    netns.remove(name)


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """This thread, and what it starts, in a network namespace."""
    netns.pushns(namespace)
    try:
        yield
    finally:
        netns.popns()


class Node:
    """Cluster DNS in the namespace; without ``listen`` it takes the address that the manifests give it."""

    def __init__(self, namespace: str, path: Path) -> None:
        self.namespace = namespace
        self.manifests = path / "manifests"
        self.manifests.mkdir()
        (self.manifests / "mesh.yaml").write_text(MANIFEST)
        self.log = path / "queries.jsonl"
        self.control = str(path / "dns.sock")
        params = {"manifests": str(self.manifests), "log": str(self.log), "socket": self.control, "name": "dns"}
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready:
            ready.bind(str(path / "notify"))
            ready.settimeout(DEADLINE)
            with inside(namespace):
                self.process = subprocess.Popen(
                    [sys.executable, "-c", MAIN, json.dumps(params)],
                    env={**os.environ, "NOTIFY_SOCKET": str(path / "notify")},
                    stderr=subprocess.PIPE,
                    text=True,
                )
            try:
                self._wait(ready)
            except BaseException:
                self.close()
                raise

    def _wait(self, ready: socket.socket) -> None:
        ended = os.pidfd_open(self.process.pid)
        try:
            readable, _, _ = select.select([ready, ended], [], [], DEADLINE)
        finally:
            os.close(ended)
        assert ready in readable, self.process.communicate()[1] if readable else "not ready in time"
        assert ready.recv(100) == b"READY=1"

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()

    def ask(
        self, name: str, rdtype: str = "A", transport: str = "udp", source: str = "10.244.0.7"
    ) -> dns.message.Message:
        query = dns.message.make_query(name, rdtype)
        send = dns.query.udp if transport == "udp" else dns.query.tcp
        with inside(self.namespace):
            return send(query, "10.96.0.10", DEADLINE, 53, source)

    def op(self, op: str) -> dict[str, object]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(DEADLINE)
            sock.connect(self.control)
            sock.sendall(json.dumps({"op": op}).encode() + b"\n")
            answer: dict[str, object] = json.loads(sock.makefile().readline())
            return answer

    def queries(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@pytest.fixture
def node(namespace: str, tmp_path: Path) -> Iterator[Node]:
    running = Node(namespace, tmp_path)
    yield running
    running.close()


def data(answer: dns.message.Message) -> list[str]:
    return [record.to_text() for rrset in answer.answer for record in rrset]


@pytest.mark.parametrize("transport", ["udp", "tcp"])
def test_names_of_the_manifests(node: Node, transport: str) -> None:
    assert data(node.ask("web.shop.svc.cluster.local", transport=transport)) == ["10.96.1.1"]
    assert data(node.ask("first.db.shop.svc.cluster.local", transport=transport)) == ["10.244.0.9"]
    assert data(node.ask("_tcp-sql._tcp.db.shop.svc.cluster.local", "SRV", transport)) == [
        "0 100 5432 first.db.shop.svc.cluster.local."
    ]
    vendor = node.ask("vendor.shop.svc.cluster.local", transport=transport)
    assert [*data(vendor)[:1], *sorted(data(vendor)[1:])] == ["api.vendor.example.", "203.0.113.5", "203.0.113.6"]
    assert len(data(node.ask("istiod.istio-system.svc.cluster.local", transport=transport))) == 1
    assert node.ask("unknown.example", transport=transport).rcode() == dns.rcode.NXDOMAIN
    assert {(q["src"], q["transport"]) for q in node.queries()} == {("10.244.0.7", transport)}


def test_a_reload_over_the_control_socket(node: Node) -> None:
    assert node.op("status")["serial"] == 1
    (node.manifests / "mesh.yaml").write_text(MANIFEST.replace("10.96.1.1", "10.96.1.2"))
    answer = node.op("reload")
    assert (answer["ok"], answer["serial"]) == (True, 2)
    assert data(node.ask("web.shop.svc.cluster.local")) == ["10.96.1.2"]


def test_bad_manifests_keep_the_old_names(node: Node) -> None:
    (node.manifests / "mesh.yaml").write_text("kind: Nonsense\n")
    answer = node.op("reload")
    assert answer["ok"] is False
    assert "mesh.yaml:1" in str(answer["error"])
    assert data(node.ask("web.shop.svc.cluster.local")) == ["10.96.1.1"]


def test_an_unknown_request_is_answered(node: Node) -> None:
    assert node.op("dance") == {
        "ok": False,
        "error": 'unknown request b\'{"op": "dance"}\\n\': ops are status and reload',
    }


def test_sighup_reloads_and_says_so(node: Node) -> None:
    assert node.process.stderr is not None
    (node.manifests / "mesh.yaml").write_text(MANIFEST.replace("10.96.1.1", "10.96.1.3"))
    node.process.send_signal(signal.SIGHUP)
    assert node.process.stderr.readline().startswith("reloaded: serial 2, ")
    assert data(node.ask("web.shop.svc.cluster.local")) == ["10.96.1.3"]
    (node.manifests / "mesh.yaml").unlink()
    node.process.send_signal(signal.SIGHUP)
    assert node.process.stderr.readline().startswith("error: no manifests")
    assert data(node.ask("web.shop.svc.cluster.local")) == ["10.96.1.3"]


def test_it_ends_on_sigterm_and_removes_its_socket(node: Node) -> None:
    node.process.terminate()
    assert node.process.wait(DEADLINE) == 0
    assert not os.path.exists(node.control)


@pytest.mark.skipif(shutil.which("dig") is None, reason="dig is not installed (package bind9-dnsutils)")
def test_dig_inside_the_namespace(node: Node) -> None:
    for transport in ("+notcp", "+tcp"):
        command = ["dig", "@10.96.0.10", "+short", "+tries=1", transport, "api.vendor.example"]
        with inside(node.namespace):
            done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=True)
        assert sorted(done.stdout.split()) == ["203.0.113.5", "203.0.113.6"]


@pytest.mark.parametrize(
    ("params", "line"),
    [
        ({"manifests": "/none.yaml"}, "error: no such file: /none.yaml"),
        ({}, "error: bad DNS parameter: manifests"),
        ({"manifests": ".", "listen": "here"}, "error: bad DNS parameter: listen"),
        (
            {"manifests": "MANIFESTS", "listen": "192.0.2.1"},
            "error: cannot listen: DNS on 192.0.2.1 port 53: Cannot assign",
        ),
        ({"manifests": "MANIFESTS", "log": "/none/log"}, "error: cannot write the query log: /none/log"),
    ],
)
def test_errors_are_one_line(tmp_path: Path, params: dict[str, object], line: str) -> None:
    (tmp_path / "mesh.yaml").write_text(MANIFEST)
    params = {key: str(tmp_path) if value == "MANIFESTS" else value for key, value in params.items()}
    done = subprocess.run(
        [sys.executable, "-c", MAIN, json.dumps(params)], capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith(line)
    assert done.stderr.count("\n") == 1

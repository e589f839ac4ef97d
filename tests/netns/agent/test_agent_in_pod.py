"""A whole agent with a real Envoy in a pod's namespace: as 1337, no capabilities, read-only root."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agent_place import CLUSTER, DEADLINE, DISCOVERY, DNS, EXTENSION, LISTENER, NAME_TABLE, ROOT, Namespace, Pod, World
from google.protobuf import json_format

from agent.protos import nds_pb2

pytestmark = pytest.mark.root

MakeWorld = Callable[..., World]

TABLE = {
    "table": {
        "productpage.ns1.svc.cluster.local": {
            "ips": ["10.96.1.1"], "registry": "Kubernetes", "shortname": "productpage", "namespace": "ns1",
        },
        "reviews.ns2.svc.cluster.local": {
            "ips": ["10.96.1.2"], "registry": "Kubernetes", "shortname": "reviews", "namespace": "ns2",
        },
        "headless.ns1.svc.cluster.local": {
            "ips": ["10.244.9.1", "10.244.9.2", "10.244.9.3"],
            "registry": "Kubernetes", "shortname": "headless", "namespace": "ns1",
        },
        "dual.ns1.svc.cluster.local": {
            "ips": ["10.96.1.4", "2001:db8::4"], "registry": "Kubernetes", "shortname": "dual", "namespace": "ns1",
        },
        "many.ns1.svc.cluster.local": {
            "ips": [f"10.244.7.{n}" for n in range(1, 43)],
            "registry": "Kubernetes", "shortname": "many", "namespace": "ns1",
        },
        "api.vendor.example": {"ips": ["240.240.0.1"], "registry": "External"},
        "*.wild.example": {"ips": ["240.240.0.2"], "registry": "External"},
    }
}  # fmt: skip
ZONE = {"remote.example.": "192.0.2.80", "remote.example.ns2.svc.cluster.local.": "192.0.2.81"}


def push_table(world: World, table: dict[str, object] | None = None) -> None:
    json_format.ParseDict(table or TABLE, nds_pb2.NameTable())
    world.peer.send(op="resources", type=NAME_TABLE, resources={"": table or TABLE})


def ready_pod(world: World, **env: str) -> Pod:
    push_table(world)
    pod = world.pod()
    pod.start_agent(env).wait_ready()
    return pod


def http_status(pod: Pod, port: int, path: str = "/healthz/ready", address: str = "127.0.0.1") -> int:
    with pod.namespace.entered():
        sock = socket.create_connection((address, port), timeout=DEADLINE)
    with sock:
        sock.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
    return int(answer.split()[1])


def test_an_agent_from_start_to_end(world: MakeWorld) -> None:
    here = world()
    push_table(here)
    pod = here.pod()
    agent = pod.start_agent()
    agent.wait_ready()
    assert http_status(pod, 15021) == 200
    assert http_status(pod, 15020) == 200
    assert http_status(pod, 15021, address=pod.address) == 200
    assert http_status(pod, 15090, "/stats/prometheus") == 200

    for pid in (agent.pid, agent.envoy_pid()):
        status = Path(f"/proc/{pid}/status").read_text()
        assert re.search(r"^Uid:\s+1337\s+1337\s+1337\s+1337$", status, re.MULTILINE)
        assert re.search(r"^Gid:\s+1337\s+1337\s+1337\s+1337$", status, re.MULTILINE)
        for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
            assert f"{kind}:\t0000000000000000" in status
        assert "NoNewPrivs:\t1" in status

    request = here.peer.wait("request", type="Cluster")
    assert request["node"] == f"sidecar~{pod.address}~client.ns1~ns1.svc.cluster.local"
    run = pod.directory / "run"
    assert (run / "etc/istio/proxy/envoy-rev.json").exists()
    assert (run / "etc/istio/proxy").stat().st_mode & 0o777 in (0o700, 0o750)
    assert (run / "etc/istio/proxy/XDS").stat().st_mode & 0o777 == 0o666

    envoy = os.pidfd_open(agent.envoy_pid())
    assert agent.stop() == 0
    assert select.select([envoy], [], [], 0)[0], "Envoy outlived the agent"
    os.close(envoy)
    assert not (run / "etc/istio/proxy/envoy-rev.json").exists()
    assert not (run / "etc/istio/proxy/XDS").exists()
    assert "Envoy aborted normally" in agent.text()


@pytest.mark.parametrize("number", [signal.SIGKILL], ids=["kill -9"])
def test_no_orphan_envoy(world: MakeWorld, number: int) -> None:
    pod = ready_pod(world())
    agent = pod.agents[0]
    envoy = os.pidfd_open(agent.envoy_pid())
    agent.stop(number)
    assert select.select([envoy], [], [], DEADLINE)[0], "Envoy outlived the agent"
    os.close(envoy)


def test_an_envoy_that_dies_ends_the_agent_with_its_reason(world: MakeWorld) -> None:
    pod = ready_pod(world())
    agent = pod.agents[0]
    os.kill(agent.envoy_pid(), signal.SIGSEGV)
    assert agent.process.wait(DEADLINE) == 0
    assert "Envoy exited with error: signal: segmentation fault" in agent.text()


def records(output: str) -> list[str]:
    return sorted(line for line in output.splitlines() if line and not line.startswith(";"))


@pytest.mark.parametrize("transport", ["+notcp", "+tcp"])
def test_dig(world: MakeWorld, transport: str) -> None:
    here = world(zone=ZONE)
    pod = ready_pod(here)

    def dig(*arguments: str) -> str:
        return pod.dig(transport, *arguments)

    full = dig("productpage.ns1.svc.cluster.local")
    assert "status: NOERROR" in full
    assert re.search(r"flags: qr aa rd;", full)
    assert "ANSWER: 1" in full
    assert "EDNS" not in full
    for name in ("productpage", "productpage.ns1", "productpage.ns1.svc", "PRODUCTPAGE.ns1.svc.cluster.local"):
        assert dig("+short", name).split() == ["10.96.1.1"]
    assert dig("+short", "reviews.ns2").split() == ["10.96.1.2"]
    assert "NXDOMAIN" in dig("reviews")
    assert dig("+short", "api.vendor.example").split() == ["240.240.0.1"]
    assert dig("+short", "api.vendor.example.ns1.svc.cluster.local").split() == ["api.vendor.example.", "240.240.0.1"]
    assert dig("+short", "deep.down.wild.example").split() == ["240.240.0.2"]
    assert "NXDOMAIN" in dig("wild.example")
    assert sorted(dig("+short", "headless").split()) == ["10.244.9.1", "10.244.9.2", "10.244.9.3"]
    assert dig("+short", "AAAA", "dual.ns1").split() == ["2001:db8::4"]
    empty = dig("AAAA", "productpage")
    assert "status: NOERROR" in empty
    assert "ANSWER: 0" in empty
    assert "AUTHORITY: 0" in empty
    assert dig("+short", "remote.example").split() == ["192.0.2.80"]
    assert "status: NXDOMAIN" in dig("SRV", "_http._tcp.productpage.ns1.svc.cluster.local")
    sources = {event["transport"] for event in here.peer.drain() if event["event"] == "dns"}
    assert sources == {"tcp" if transport == "+tcp" else "udp"}


def test_dig_sizes(world: MakeWorld) -> None:
    pod = ready_pod(world())
    cut = pod.dig("+noedns", "+ignore", "many.ns1")
    assert re.search(r"flags: qr aa tc rd;", cut)
    size = re.search(r"MSG SIZE\s+rcvd: (\d+)", cut)
    assert size is not None
    assert int(size[1]) <= 512
    whole = pod.dig("+noedns", "+short", "many.ns1")
    assert len(set(whole.split())) == 42
    assert len(set(pod.dig("+bufsize=4096", "+ignore", "+short", "many.ns1").split())) == 42


def test_dig_order_changes(world: MakeWorld) -> None:
    pod = ready_pod(world())
    orders = {tuple(pod.dig("+short", "headless.ns1").split()) for _ in range(12)}
    assert len(orders) > 1
    assert {frozenset(order) for order in orders} == {frozenset(("10.244.9.1", "10.244.9.2", "10.244.9.3"))}


def capture_dns(pod: Pod) -> None:
    """The rules of the init container, with DNS capture."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "init", "-p", "15001", "-z", "15006", "-u", "1337", "-g", "1337"]
    command += ["-m", "REDIRECT", "-i", "*", "-x", "", "-b", "*", "-d", "15090,15021,15020", "--redirect-dns"]
    done = subprocess.run(
        ["ip", "netns", "exec", pod.namespace.name, *command],
        env=environment, capture_output=True, text=True, timeout=DEADLINE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def getent(pod: Pod, database: str, name: str) -> list[str]:
    done = pod.namespace.run("getent", database, name, check=False)
    return sorted({line.split()[0] for line in done.stdout.splitlines()})


def test_getent_through_captured_dns(world: MakeWorld) -> None:
    here = world(zone=ZONE)
    pod = ready_pod(here)
    capture_dns(pod)
    for name in ("productpage", "productpage.ns1", "productpage.ns1.svc", "productpage.ns1.svc.cluster.local"):
        assert getent(pod, "ahostsv4", name) == ["10.96.1.1"], name
        assert getent(pod, "ahosts", name) == ["10.96.1.1"], name
    assert getent(pod, "ahostsv4", "reviews.ns2") == ["10.96.1.2"]
    assert getent(pod, "ahostsv4", "reviews") == []
    assert getent(pod, "ahostsv4", "api.vendor.example") == ["240.240.0.1"]
    assert getent(pod, "ahostsv4", "any.wild.example") == ["240.240.0.2"]
    assert getent(pod, "ahosts", "headless") == ["10.244.9.1", "10.244.9.2", "10.244.9.3"]
    assert getent(pod, "ahosts", "dual") == ["10.96.1.4", "2001:db8::4"]
    assert len(getent(pod, "ahostsv4", "many")) == 42
    assert getent(pod, "ahostsv4", "nowhere.example") == []
    here.peer.drain()
    assert getent(pod, "ahostsv4", "remote.example") == ["192.0.2.80"]
    forwarded = [event for event in here.peer.drain() if event["event"] == "dns"]
    assert forwarded[0]["name"] == "remote.example.ns1.svc.cluster.local."
    assert forwarded[-1]["name"] == "remote.example."
    assert {event["source"] for event in forwarded} == {pod.address}
    short = pod.dig("+short", "productpage.ns1", server=DNS, port=53)
    assert short.split() == ["10.96.1.1"]


def test_a_killed_agent_fails_closed_and_a_new_one_takes_over(world: MakeWorld) -> None:
    here = world(zone=ZONE)
    pod = ready_pod(here)
    capture_dns(pod)
    rules = pod.namespace.run("iptables-save").stdout
    assert getent(pod, "ahostsv4", "productpage") == ["10.96.1.1"]
    pod.agents[0].stop(signal.SIGKILL)
    assert "status:" not in pod.dig("+time=1", "remote.example", server=DNS, port=53)
    with pod.namespace.entered(), pytest.raises(ConnectionRefusedError):
        socket.create_connection((here_address(here), 15010), timeout=DEADLINE)
    uncaptured = pod.namespace.run(
        "setpriv", "--reuid", "1337", "--regid", "1337", "--clear-groups",
        "dig", f"@{DNS}", "+short", "+tries=1", "remote.example", check=False,
    )  # fmt: skip
    assert uncaptured.stdout.split() == ["192.0.2.80"]
    pod.start_agent().wait_ready()
    assert getent(pod, "ahostsv4", "productpage") == ["10.96.1.1"]
    assert getent(pod, "ahostsv4", "remote.example") == ["192.0.2.80"]
    assert strip_counters(pod.namespace.run("iptables-save").stdout) == strip_counters(rules)


def here_address(world: World) -> str:
    from agent_place import DISCOVERY

    assert world.node
    return DISCOVERY


def strip_counters(saved: str) -> list[str]:
    return [re.sub(r"\[\d+:\d+\]", "", line) for line in saved.splitlines() if not line.startswith("#")]


def test_an_outage_of_discovery_costs_no_request_and_ends_with_a_push(world: MakeWorld) -> None:
    here = world()
    push_table(here)
    here.peer.send(op="resources", type=CLUSTER, resources={"app": cluster("app", "127.0.0.1", 8080)})
    here.peer.send(op="resources", type=LISTENER, resources={"web": http_listener("web", 9000, "app", None)})
    pod = here.pod()
    with backend(pod):
        pod.start_agent().wait_ready()
        load = Load(pod, 9000)
        load.wait_for(50)
        here.peer.stop()
        before = load.wait_for(400)
        assert pod.dig("+short", "productpage").split() == ["10.96.1.1"]
        assert http_status(pod, 15021) == 200
        here.restart_peer()
        changed = {"table": {"fresh.example": {"ips": ["192.0.2.99"], "registry": "External"}}}
        here.peer.send(op="resources", type=CLUSTER, resources={"app": cluster("app", "127.0.0.1", 8080)})
        here.peer.send(op="resources", type=LISTENER, resources={"web": http_listener("web", 9000, "app", None)})
        push_table(here, changed)
        acknowledged = here.peer.wait("request", type="NameTable")
        while not acknowledged["nonce"]:
            acknowledged = here.peer.wait("request", type="NameTable")
        assert pod.dig("+short", "fresh.example").split() == ["192.0.2.99"]
        load.wait_for(before + 50)
        assert set(load.stop()) == {200}


class Load:
    """Requests one after the other, each on a connection of its own, until it is stopped."""

    def __init__(self, pod: Pod, port: int) -> None:
        self._statuses: list[int] = []
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, args=(pod, port))
        self._thread.start()

    def _run(self, pod: Pod, port: int) -> None:
        while not self._stopped:
            try:
                status = http_status(pod, port, "/")
            except OSError:
                status = 0
            with self._changed:
                self._statuses.append(status)
                self._changed.notify_all()

    def wait_for(self, count: int) -> int:
        """Waits until that many requests are done; the number done."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._statuses) >= count, DEADLINE)
            return len(self._statuses)

    def stop(self) -> list[int]:
        self._stopped = True
        self._thread.join(DEADLINE)
        return self._statuses


def backend(pod: Pod) -> contextlib.AbstractContextManager[None]:
    """An HTTP server on 127.0.0.1:8080 of a pod."""
    return serving(pod.namespace, "127.0.0.1", 8080, b"ok")


@contextlib.contextmanager
def serving(namespace: Namespace, address: str, port: int, body: bytes) -> Iterator[None]:
    """An HTTP server that gives this body for every path but /absent."""
    command = [sys.executable, "-c", BACKEND, address, str(port), body.hex()]
    process = namespace.popen(*command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield
    finally:
        process.kill()
        process.wait(DEADLINE)
        process.stdout.close()


BACKEND = """
import http.server, sys
address, port, body = sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3])
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        found = body if self.path != "/absent" else b""
        self.send_response(200 if found else 404)
        self.send_header("Content-Length", str(len(found))); self.end_headers(); self.wfile.write(found)
server = http.server.ThreadingHTTPServer((address, port), Handler)
print("listening", flush=True)
server.serve_forever()
"""


def module() -> bytes:
    """The smallest module that Envoy takes for a proxy-wasm one: memory, malloc and the name of its ABI."""

    def section(number: int, content: bytes) -> bytes:
        return bytes([number, len(content)]) + content

    def export(name: str, kind: int, index: int) -> bytes:
        return bytes([len(name)]) + name.encode() + bytes([kind, index])

    types = b"\x02" + b"\x60\x00\x00" + b"\x60\x01\x7f\x01\x7f"  # () -> (), (i32) -> i32
    exports = export("memory", 2, 0) + export("proxy_abi_version_0_2_1", 0, 0) + export("malloc", 0, 1)
    bodies = b"\x02" + b"\x02\x00\x0b" + b"\x05\x00\x41\x80\x08\x0b"  # nothing; return 1024
    parts = (1, types), (3, b"\x02\x00\x01"), (5, b"\x01\x00\x01"), (7, b"\x03" + exports), (10, bodies)
    return b"\0asm\1\0\0\0" + b"".join(section(number, content) for number, content in parts)


def extension(url: str, *, opened: bool) -> dict[str, object]:
    """An extension configuration with a remote module, as istiod writes it."""
    remote = {"http_uri": {"uri": url, "timeout": "10s", "cluster": "_"}, "sha256": "nil"}
    policy = "FAIL_OPEN" if opened else "FAIL_CLOSED"
    vm = {"runtime": "envoy.wasm.runtime.v8", "code": {"remote": remote}}
    wasm = {"@type": WASM, "config": {"name": "ns1.plugin", "vm_config": vm, "failure_policy": policy}}
    return {"ns1.plugin": {"name": "ns1.plugin", "typed_config": wasm}}


WASM = "type.googleapis.com/envoy.extensions.filters.http.wasm.v3.Wasm"
RBAC = "type.googleapis.com/envoy.extensions.filters.http.rbac.v3.RBAC"


def test_a_wasm_extension_reaches_envoy_as_a_file_or_as_its_failure_policy(world: MakeWorld) -> None:
    here = world()
    push_table(here)
    listener = http_listener("web", 9000, "app", None)
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]  # type: ignore[index]
    source = {"ads": {}, "resource_api_version": "V3", "initial_fetch_timeout": "0s"}
    manager["http_filters"].insert(
        0, {"name": "ns1.plugin", "config_discovery": {"config_source": source, "type_urls": [WASM, RBAC]}}
    )
    site = f"http://{DISCOVERY}:8000"

    def push(path: str, *, opened: bool) -> None:
        here.peer.drain()
        here.peer.send(op="resources", type=EXTENSION, resources=extension(site + path, opened=opened))
        answer = here.peer.wait("request", type="TypedExtensionConfig")
        while not answer["nonce"]:
            answer = here.peer.wait("request", type="TypedExtensionConfig")
        assert answer["error"] == ""

    here.peer.send(op="resources", type=CLUSTER, resources={"app": cluster("app", "127.0.0.1", 8080)})
    here.peer.send(op="resources", type=EXTENSION, resources=extension(f"{site}/absent", opened=False))
    here.peer.send(op="resources", type=LISTENER, resources={"web": listener})
    pod = here.pod()
    with backend(pod), serving(here.node, DISCOVERY, 8000, module()):
        pod.start_agent().wait_ready()
        assert http_status(pod, 9000, "/") == 403
        push("/absent", opened=True)
        assert http_status(pod, 9000, "/") == 200
        push("/absent", opened=False)
        assert http_status(pod, 9000, "/") == 403
        push("/module", opened=False)
        assert http_status(pod, 9000, "/") == 200
    (file,) = (pod.directory / "run/var/lib/istio/data").rglob("*.wasm")
    assert file.read_bytes() == module()
    dump = pod.namespace.run("curl", "-s", "http://127.0.0.1:15000/config_dump").stdout
    assert f"{file.parent.name}/{file.name}" in dump
    assert site not in dump


def test_a_nack_is_one_line_of_the_agents_log(world: MakeWorld) -> None:
    here = world()
    pod = ready_pod(here)
    bad = {"name": "bad", "connect_timeout": "1s", "type": "EDS", "lb_policy": "ROUND_ROBIN"}
    here.peer.send(op="resources", type=CLUSTER, resources={"bad": bad})
    nack = here.peer.wait("request", type="Cluster")
    while not nack["error"]:
        nack = here.peer.wait("request", type="Cluster")
    lines = [line for line in pod.agents[0].text().splitlines() if "nack type=Cluster" in line]
    assert len(lines) == 1
    assert 'error="' in lines[0]
    assert "bad" in lines[0]


def test_start_up_needs_little(world: MakeWorld) -> None:
    pod = ready_pod(world())
    agent = pod.agents[0]
    metrics = pod.namespace.run("curl", "-s", "http://127.0.0.1:15020/stats/prometheus").stdout
    assert re.search(r"^istio_agent_startup_duration_seconds [0-9.]+$", metrics, re.MULTILINE)
    assert re.search(r"^envoy_server_live\{\} 1$|^envoy_server_live 1$", metrics, re.MULTILINE)
    threads = [int(thread) for thread in os.listdir(f"/proc/{agent.pid}/task")]
    assert len(threads) < 40


def test_mtls_certificates_rotate_without_a_failed_request(world: MakeWorld) -> None:
    """Two Envoys speak mutual TLS with certificates of 4 s for some rotations; no request may fail."""
    here = world(lifetime=4)
    env = {"SECRET_TTL": "4s", "CA_ADDR": "10.96.0.11:15010", "ISTIO_META_DNS_CAPTURE": "false"}
    env["ECC_SIGNATURE_ALGORITHM"] = "ECDSA"
    server, client = here.pod(), here.pod()
    here.peer.send(op="resources", type=CLUSTER, resources=mtls_clusters(server.address))
    here.peer.send(op="resources", type=LISTENER, resources=mtls_listeners())
    with backend(server):
        for pod in (server, client):
            pod.start_agent(env)
        for pod in (server, client):
            pod.agents[0].wait_ready()
        here.peer.drain()
        load = Load(client, 9000)
        issued = 0
        while issued < 6:
            issued += here.peer.wait("csr")["event"] == "csr"
        done = load.wait_for(20)
        load.wait_for(done + 5)
        assert set(load.stop()) == {200}
        with client.namespace.entered(), socket.create_connection((server.address, 8443), timeout=DEADLINE) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert plain.recv(100) == b"", "the server answered without TLS"


def sds(name: str) -> dict[str, object]:
    return {
        "name": name,
        "sds_config": {
            "api_config_source": {
                "api_type": "GRPC",
                "grpc_services": [{"envoy_grpc": {"cluster_name": "sds-grpc"}}],
                "set_node_on_first_message_only": True,
                "transport_api_version": "V3",
            },
            "resource_api_version": "V3",
        },
    }


COMMON = {
    "tls_certificate_sds_secret_configs": [sds("default")],
    "combined_validation_context": {
        "default_validation_context": {},
        "validation_context_sds_secret_config": sds("ROOTCA"),
    },
}
TLS = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3."


def cluster(name: str, address: str, port: int) -> dict[str, object]:
    endpoint = {"endpoint": {"address": {"socket_address": {"address": address, "port_value": port}}}}
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "2s",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": [endpoint]}]},
    }


def mtls_clusters(address: str) -> dict[str, object]:
    secure = cluster("secure", address, 8443)
    secure["transport_socket"] = {
        "name": "tls",
        "typed_config": {"@type": f"{TLS}UpstreamTlsContext", "common_tls_context": COMMON},
    }
    secure["max_requests_per_connection"] = 1
    return {"secure": secure, "app": cluster("app", "127.0.0.1", 8080)}


def http_listener(name: str, port: int, target: str, transport: dict[str, object] | None) -> dict[str, object]:
    hcm = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": name,
        "route_config": {
            "virtual_hosts": [
                {"name": "all", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": {"cluster": target}}]}
            ]
        },
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"},
            }
        ],
    }
    filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": hcm}]
    chain: dict[str, object] = {"filters": filters}
    if transport is not None:
        chain["transport_socket"] = {"name": "tls", "typed_config": transport}
    address = {"socket_address": {"address": "0.0.0.0", "port_value": port}}
    return {"name": name, "address": address, "filter_chains": [chain]}


def mtls_listeners() -> dict[str, object]:
    mutual: dict[str, object] = {
        "@type": f"{TLS}DownstreamTlsContext",
        "common_tls_context": COMMON,
        "require_client_certificate": True,
    }
    return {
        "plain": http_listener("plain", 9000, "secure", None),
        "tls": http_listener("tls", 8443, "app", mutual),
    }


def test_an_override_is_merged_into_the_bootstrap(world: MakeWorld) -> None:
    here = world()
    push_table(here)
    pod = here.pod()
    run = pod.directory / "run"
    run.mkdir()
    endpoint = "{endpoint: {address: {socket_address: {address: $(HOST_IP), port_value: 9411}}}}"
    (run / "override.yaml").write_text(
        "static_resources:\n  clusters:\n  - name: mine\n    connect_timeout: 1s\n"
        f"    load_assignment: {{cluster_name: mine, endpoints: [{{lb_endpoints: [{endpoint}]}}]}}\n"
    )
    pod.start_agent({"ISTIO_BOOTSTRAP_OVERRIDE": "override.yaml", "HOST_IP": "192.0.2.9"}).wait_ready()
    clusters = pod.namespace.run("curl", "-s", "http://127.0.0.1:15000/clusters").stdout
    assert "mine::192.0.2.9:9411::" in clusters
    assert "xds-grpc::" in clusters
    assert http_status(pod, 15021) == 200


def test_json_logs_of_both(world: MakeWorld) -> None:
    here = world()
    push_table(here)
    pod = here.pod()
    agent = pod.start_agent(arguments=["--log_as_json", "--proxyLogLevel=info"])
    agent.wait_ready()
    scopes = set()
    for line in agent.text().splitlines():
        entry = json.loads(line)
        scopes.add(entry.get("scope", "default").split()[0])
    assert {"default", "xdsproxy", "dns", "envoy"} <= scopes


WAITING = """
import subprocess, sys, time
sys.path.insert(0, sys.argv[1])
from ipaddress import ip_address
from agent import network

looks = []
def read():
    looks.append(time.monotonic())
    if len(looks) == 2:
        subprocess.run(["ip", "addr", "add", "10.0.0.9/32", "dev", "lo"], check=True)
    address = "10.0.0.9" if len(looks) > 2 else "0.0.0.0"
    return [network.InterfaceAddress("eth0", network.IFF_UP, ip_address(address))]

found = network.settled_addresses(read, limit=20.0)
assert str(found[0].address) == "10.0.0.9", "the kernel's word was not waited for"
assert len(looks) == 3, looks
"""


def test_an_interface_that_is_being_set_up_is_waited_for_without_polling() -> None:
    root = Path(__file__).parents[3]
    command = ["unshare", "--net", "--", sys.executable, "-c", WAITING, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr

"""``lab trace`` and ``lab capture`` on a real mesh, on every back end."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from scapy.layers.inet import IP, TCP
from scapy.layers.l2 import Ether
from scapy.utils import RawPcapNgReader

from lab import cli, lifecycle, tracing, verify
from lab.asking import Question
from lab.fabric import paths
from lab.manifests.load import load
from lab.probe.hops import STEPS
from lab.probe.journal import Journal
from lab.runtime import enter, files
from lab.trace.client import Client

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[3]
CATALOG = "catalog.catalog:8080"
BACKENDS = ("legacy", "nft", "native-nft")

MORE = """
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: limits, namespace: catalog}
spec:
  host: catalog.catalog.svc.cluster.local
  trafficPolicy:
    connectionPool: {tcp: {maxConnections: 7}}
    outlierDetection: {consecutive5xxErrors: 3}
---
apiVersion: networking.istio.io/v1
kind: Sidecar
metadata: {name: default, namespace: observability}
spec:
  outboundTrafficPolicy: {mode: REGISTRY_ONLY}
  egress: [{hosts: ["*/*"]}]
"""


Lab = Callable[..., tuple[int, str, str]]

one_back_end = pytest.mark.parametrize("running", BACKENDS[:1], indirect=True)
"""For what no back end has a part in."""


@dataclass(frozen=True)
class Running:
    name: str
    backend: str

    def trace(self, source: str, to: str, protocol: str = "http", uid: int = 1000, **more: Any) -> tracing.Traced:
        question = Question(to=to, source=source, protocol=protocol, uid=uid, **more)  # type: ignore[arg-type]
        return tracing.trace(self.name, question, timeout=5, log=print)


@pytest.fixture(scope="module", params=BACKENDS)
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    more = tmp_path_factory.mktemp("manifests") / "more.yaml"
    more.write_text(MORE)
    name = f"slt-{os.getpid()}-trace-{request.param}"
    mesh = load([str(ROOT / "topologies/quickstart.yaml"), str(more)], name=name)
    with lifecycle.running(mesh, iptables=request.param):
        yield Running(name, request.param)


@pytest.fixture
def lab(capsys: pytest.CaptureFixture[str]) -> Lab:
    """A command line of `lab`: its exit code, its standard output and error."""

    def run(*args: str) -> tuple[int, str, str]:
        code = cli.main(args)
        out, err = capsys.readouterr()
        return code, out, err

    return run


def steps(traced: tracing.Traced) -> dict[str, Any]:
    return {h.step: h for h in traced.hops}


def proofs(hop: Any, source: str) -> list[str]:
    return [d.text for d in hop.details if d.source == source]


# --- trace ----------------------------------------------------------------------------------


def test_a_request_through_the_mesh_shows_the_nine_steps_with_their_evidence(running: Running) -> None:
    traced = running.trace("frontend.frontend", CATALOG)
    found = steps(traced)
    assert traced.exit_code == 0
    assert traced.sentence.startswith(
        "frontend.frontend (uid 1000) to catalog.catalog:8080 (http): captured to 15001, "
    )
    assert traced.sentence.endswith("catalog.catalog captures it to 15006, it works (200).")
    assert list(found) == [*STEPS, "wire", "outcome"]
    assert [s for s in STEPS if not found[s].happened] == []

    assert found["lookup"].text.endswith("10.96.20.30, captured to 15053, answered by agent")
    assert any("zone 2" in text for text in proofs(found["lookup"], "conntrack"))
    assert any("10.96.20.30" in text for text in proofs(found["lookup"], "name-table"))
    assert "10.96.20.30:8080 (VIP of catalog.catalog)" in found["vip"].text

    hits = proofs(found["iptables"], "nftrace")
    redirect = {"native-nft": "redirect to :15001"}.get(running.backend, "-j REDIRECT --to-ports 15001")
    assert all(f" {running.backend} " in f" {text.split(': ')[1]} " for text in hits)
    assert any(redirect in text for text in hits)
    assert redirect in found["iptables"].text
    assert any("answers come from 127.0.0.1:15001" in text for text in proofs(found["iptables"], "conntrack"))

    assert found["virtualOutbound"].text == "listener virtualOutbound accepts it on 15001"
    assert proofs(found["virtualOutbound"], "access-log") == ["accepted on 127.0.0.1:15001"]
    assert any("SO_ORIGINAL_DST is 10.96.20.30:8080" in t for t in proofs(found["original-destination"], "conntrack"))
    assert "listener 0.0.0.0_8080" in found["original-destination"].text
    assert "virtual host catalog.catalog.svc.cluster.local:8080, route default" in found["route"].text
    assert found["cluster"].text == "outbound|8080||catalog.catalog.svc.cluster.local"

    endpoint = found["endpoint"]
    assert "(pod catalog.catalog)" in endpoint.text
    assert "TLSv1.3, peer spiffe://cluster.local/ns/catalog/sa/catalog" in endpoint.text
    settings = " ".join(proofs(endpoint, "config_dump"))
    assert "DestinationRule limits.catalog" in settings
    assert "max_connections 7" in settings
    assert "outlier detection" in settings
    assert "no outlier detection" not in settings
    assert any("1337" in text and "return" in text.lower() for text in proofs(endpoint, "nftrace"))

    far = found["far-pod"]
    assert far.place == "catalog.catalog"
    assert far.text.startswith("captured to 15006 by ")
    assert far.text.endswith("inbound|8080||, the app sees 127.0.0.6")
    assert any("15006" in text for text in proofs(far, "conntrack"))
    assert any("spiffe://cluster.local/ns/frontend/sa/frontend" in text for text in proofs(far, "access-log"))
    assert any(text.startswith("header x-request-id: ") for text in proofs(far, "app"))
    assert any("127.0.0.6" in text for text in proofs(far, "nftrace")), "its Envoy's own packet to the app"
    assert proofs(found["wire"], "veth")


@one_back_end
def test_a_kept_connection_is_told_from_a_new_one(running: Running) -> None:
    """Each of Envoy's workers has a pool of its own: with enough requests one must find a connection that is open."""
    kept = [False]
    while not kept[-1] and len(kept) <= 2 * (os.cpu_count() or 1) + 2:
        found = steps(running.trace("frontend.frontend", CATALOG))
        kept.append(found["endpoint"].text.endswith("over a connection that was open before"))
        opened = any("flags S" in text for text in proofs(found["wire"], "veth"))
        assert kept[-1] is not opened, "the wire has a SYN of it"
        ages = [text for text in proofs(found["far-pod"], "nftrace") if "opened for" in text]
        assert len(ages) == 1
        assert (ages == ["opened for this flow"]) <= opened
    assert any(kept)


@one_back_end
def test_what_the_far_envoy_answers_is_not_said_to_be_the_app(running: Running) -> None:
    """Bytes that are no HTTP, to a port where the far Envoy expects HTTP: it answers 400, and any bytes are an answer."""
    traced = running.trace("frontend.frontend", CATALOG, "tcp")
    assert traced.verdict.inbound is not None
    assert traced.verdict.inbound.response_flags == "DPE"
    assert traced.sentence.endswith("catalog.catalog's Envoy answers itself, its app is not reached (flags DPE).")


@one_back_end
def test_a_flow_to_the_own_envoy_is_not_redirected(running: Running) -> None:
    found = steps(running.trace("frontend.frontend", "127.0.0.1:15000"))
    assert found["cluster"].text.startswith("it is not redirected to Envoy: ")
    assert found["far-pod"].text == "it ended in this pod itself"
    assert found["outcome"].text == "ok 200"


def test_uid_1337_meets_no_envoy_and_the_node_translates_the_vip(running: Running) -> None:
    found = steps(running.trace("frontend.frontend", CATALOG, uid=1337))
    assert "not captured by" in found["iptables"].text
    assert "1337" in found["iptables"].text
    assert [s for s in STEPS if not found[s].happened] == list(STEPS[3:8])
    assert "not captured, answered by cluster-dns" in found["lookup"].text
    assert any(text.startswith("the node makes it tcp ") for text in proofs(found["far-pod"], "conntrack"))


@one_back_end
def test_a_blocked_host_ends_in_the_black_hole(running: Running) -> None:
    traced = running.trace("tracing.observability", "unknown.example:9000", "tcp")
    found = steps(traced)
    assert found["cluster"].text == "BlackHoleCluster, flags UH (no healthy upstream)"
    assert not found["endpoint"].happened
    assert not found["far-pod"].happened
    assert found["wire"].text == "nothing of it left tracing.observability"
    assert traced.verdict.outcome is not None
    assert (traced.verdict.outcome.result, traced.exit_code) == ("closed", 0)


@one_back_end
def test_a_name_that_nobody_has_ends_at_the_lookup(running: Running) -> None:
    found = steps(running.trace("frontend.frontend", "nowhere.example:80"))
    assert found["lookup"].text == "A nowhere.example.: NXDOMAIN, captured to 15053, answered by cluster-dns"
    assert proofs(found["lookup"], "dns-log"), "the agent asked on"
    assert [s for s in STEPS if found[s].happened] == ["lookup"]


@one_back_end
@pytest.mark.parametrize(
    ("source", "outcome"),
    [("legacy.legacy", "unreachable: Network is unreachable"), ("frontend.frontend", "http-error 503")],
)
def test_what_nobody_has_is_ended_by_the_node_s_rule(running: Running, source: str, outcome: str) -> None:
    """Also the connection of an Envoy that failed, whose line names no address of its own."""
    found = steps(running.trace(source, "198.51.100.7:80"))
    assert proofs(found["far-pod"], "nftrace") == [
        "the node ends it: native-nft sidecarlab-services unrouted 1: ip daddr != @outside4 reject with icmp net-unreachable"
    ]
    assert found["outcome"].text == outcome


@one_back_end
def test_a_pod_without_sidecar_meets_rules_at_the_far_end_only(running: Running) -> None:
    found = steps(running.trace("legacy.legacy", CATALOG))
    assert found["iptables"].text == "not captured: no rule was asked"
    assert [s for s in STEPS if not found[s].happened] == list(STEPS[3:8])
    assert "captured to 15006" in found["far-pod"].text


@one_back_end
def test_the_verb_prints_the_sentence_first_and_gives_json(running: Running, lab: Lab) -> None:
    where = ("--from", "frontend/frontend", "--to", CATALOG)
    code, out, _ = lab(
        "trace", running.name, *where, "--path", "/status/404", "--header", "x-tried: yes", "--as", "1001", "--json"
    )
    document = json.loads(out)
    assert (code, document["outcome"]["status"], document["from"]["uid"]) == (0, 404, 1001)
    assert [h["number"] for h in document["hops"]] == [1, 2, 3, 4, 5, 6, 7, 8, 9, None, None]
    assert document["hops"][8]["step"] == "far-pod"
    assert {"text": "header x-tried: yes", "source": "app"} in document["hops"][8]["details"]
    assert (document["missing"], document["lab"], document["proof"]) == ({}, running.name, "observed")
    told = lab("trace", "--lab", running.name, *where)[1].splitlines()
    assert told[0].endswith("it works (200).")
    assert told[1].startswith("1.   lookup ")


@one_back_end
@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("trace", "--from", "nobody.x", "--to", CATALOG), 'there is no pod "nobody.x"'),
        (("trace", "--from", "frontend.frontend", "--to", "catalog.catalog", "--protocol", "tcp"), "needs a port"),
        (("trace", "--from", "frontend.frontend", "--to", CATALOG, "--as", "nobody"), "unknown user 'nobody'"),
        (("trace", "other", "--from", "frontend.frontend", "--to", CATALOG), "two labs: other and "),
        (("capture", "nobody.x"), "no pod 'nobody.x'"),
        (("capture", "frontend.frontend", "-i", "eth7"), "frontend.frontend has no interface 'eth7'"),
        (("capture", "frontend.frontend", "--filter", "prt 80"), '"prt" is not understood'),
        (("capture", "frontend.frontend", "-w", "/nonexistent/x"), "/nonexistent/x: No such file or directory"),
        (("capture", "frontend.frontend", "-w", "/dev/full"), "/dev/full: No space left on device. Give it a place"),
        (("capture", "frontend.frontend", "-w", "-", "--json"), "both --json and -w -"),
    ],
)
def test_what_cannot_be_is_one_line(running: Running, lab: Lab, command: tuple[str, ...], said: str) -> None:
    code, out, err = lab(*command, "--lab", running.name)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


@one_back_end
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_trace_that_is_ended_in_its_middle_leaves_nothing(running: Running, number: signal.Signals) -> None:
    before, known = planted(running), marked(running)
    command = [sys.executable, "-m", "lab", "trace", running.name, "--from", "frontend.frontend", "--to", CATALOG]
    path = f"/delay/30?{number.name}"
    with subprocess.Popen(
        [*command, "--path", path, "--timeout", "60"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            asyncio.run(_arrived(running, path))
            made = marked(running) - known
            assert made, "driver and judge run"
            process.send_signal(number)
            process.communicate(timeout=20)
            assert process.returncode != 0
        finally:
            process.kill()
    for pid in made:
        _ends(pid)
    assert marked(running) - known == set()
    asyncio.run(_noticed(running))
    assert planted(running) == before
    with verify.alone(running.name, pytest.fail):  # it would say that it has to wait
        pass


async def _noticed(running: Running) -> None:
    """Until the observer has seen the end of every connection that ended before."""
    client = await Client.connect(str(files.observer_socket(running.name)))
    await client.ask(op="status")
    await client.close()


async def _arrived(running: Running, path: str) -> None:
    """Until the app has the request."""
    journal = Journal()
    try:
        log = files.echo(running.name, "catalog.catalog")
        journal.follow(log)
        assert await journal.find(log, lambda line: line.get("path") == path, 0, 20), "the request does not come"
    finally:
        journal.close()


def marked(running: Running) -> set[int]:
    """Processes that carry the lab's mark."""
    info = lifecycle.inspect(running.name)
    mark = f"{paths.ENV_MARK}={enter.find(running.name, 'frontend.frontend').mark}".encode()
    assert info["name"] == running.name
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.add(int(entry.name))
            except OSError:
                continue
    return found


def _ends(pid: int) -> None:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([fd], [], [], 20)[0], f"process {pid} lives on"
    finally:
        os.close(fd)


def planted(running: Running) -> dict[str, str]:
    """All rules, sockets' tables and sysctls of tracing in the namespaces that a flow passes."""
    found = {}
    for place in ("frontend.frontend", "catalog.catalog", paths.NODE, paths.OUTSIDE):
        commands = [["nft", "-a", "-s", "list", "ruleset"], ["ip", "-o", "link", "show"]]
        if running.backend == "legacy" and "." in place:
            commands.append(["iptables-legacy-save"])
        with enter.netns(paths.netns_path(running.name, place)):
            for command in commands:
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                text = [line for line in done.stdout.splitlines() if not line.startswith("#")]
                found[f"{place} {command[0]}"] = "\n".join(line.split("[")[0] for line in text)
    return found


# --- capture --------------------------------------------------------------------------------


@contextmanager
def capturing(running: Running, pod: str, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A capture that has begun."""
    command = [sys.executable, "-m", "lab", "capture", pod, "--lab", running.name, *options]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        assert process.stderr.readline().startswith(b"capturing on "), process.stderr.read()
        yield process
    finally:
        process.kill()
        process.communicate()


def end(process: subprocess.Popen[bytes]) -> tuple[str, str]:
    """What Ctrl-C gives."""
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    return out.decode(), err.decode()


def read_back(file: Path) -> list[tuple[str, Any, str]]:
    """Interface, packet and comment of each packet, as scapy reads the file."""
    found = []
    for data, meta in RawPcapNgReader(str(file)):
        assert meta.comments is not None
        assert len(meta.comments) == 1
        found.append((meta.ifname.decode(), Ether(data), meta.comments[0].decode()))
    return found


def test_both_ends_of_a_request_are_captured_with_their_hops(running: Running, tmp_path: Path) -> None:
    one, other = tmp_path / "frontend.pcapng", tmp_path / "catalog.pcapng"
    with (
        capturing(running, "frontend.frontend", "-w", str(one)) as near,
        capturing(running, "catalog/catalog", "-w", str(other), "--filter", "tcp and not port 15000") as far,
    ):
        traced = running.trace("frontend.frontend", CATALOG)
        told, _ = end(near)[1], end(far)
    assert f" packets to {one}" in told
    port = traced.verdict.source_port
    packets = read_back(one)
    app = [(i, p, c) for i, p, c in packets if TCP in p and p[TCP].sport == port]
    assert app, "the app's own packets"
    rule = {"native-nft": "istio-redirect"}.get(running.backend, "nat ISTIO_REDIRECT 1")
    for interface, packet, comment in app:
        assert (interface, packet[IP].dst, packet[TCP].dport) == ("lo", "127.0.0.1", 15001)
        assert "10.96.20.30:8080 (VIP of catalog.catalog): DNAT to 15001 (Envoy)" in comment
        assert rule in comment
    answers = [c for i, p, c in packets if TCP in p and p[TCP].dport == port]
    assert answers
    assert all("Envoy (15001) -> " in c and "answers as 10.96.20.30:8080" in c for c in answers)
    assert any("HTTP/1.1 200 OK" in c for c in answers)
    upstream = [c for i, p, c in packets if i == "eth0" and TCP in p and p[TCP].dport == 8080 and TCP in p]
    assert upstream
    assert all(c.startswith("Envoy (uid 1337) -> endpoint 10.244.2.") for c in upstream)
    assert any(", mTLS" in c for c in upstream)
    lookups = [c for i, p, c in packets if i == "lo" and ": DNAT to 15053 (agent), zone 2" in c]
    assert any("DNS A catalog.catalog" in c for c in lookups)

    arrived = read_back(other)
    assert all(TCP in p for _, p, _ in arrived), "the filter keeps TCP alone"
    inbound = [c for i, p, c in arrived if i == "eth0" and p[TCP].dport == 8080]
    assert inbound
    assert all(c.startswith("inbound: 10.244.1.") and "arrives at 15006 (Envoy), DNAT by" in c for c in inbound)
    served = [(p, c) for i, p, c in arrived if i == "lo" and p[TCP].dport == 8080]
    assert {p[IP].src for p, _ in served} == {"127.0.0.6"}
    assert all(
        c.startswith("Envoy (uid 1337) -> app (uid 1000), port 8080: the app sees 127.0.0.6:") for _, c in served
    )
    assert any("; GET / HTTP/1.1 [" in c for _, c in served)


@one_back_end
def test_lines_and_json_say_the_same_of_a_pod_without_sidecar(running: Running) -> None:
    with (
        capturing(running, "legacy.legacy", "-i", "eth0", "--filter", "dst port 8080") as text,
        capturing(running, "legacy.legacy", "--filter", "dst port 8080", "--count", "1", "--json") as document,
    ):
        traced = running.trace("legacy.legacy", CATALOG)
        out, _ = document.communicate(timeout=20)
        lines = end(text)[0].splitlines()
    told = json.loads(out)
    assert (document.returncode, told["count"], told["dropped"], told["file"]) == (0, 1, 0, None)
    (packet,) = told["packets"]
    assert (packet["flags"], packet["sport"], packet["dst"]) == ("S", traced.verdict.source_port, "10.96.20.30")
    said = "a process of the app's user (uid 1000) -> 10.96.20.30:8080 (VIP of catalog.catalog): not captured; SYN ["
    assert packet["comment"].startswith(said)
    assert f" {packet['src']}:{packet['sport']} > 10.96.20.30:8080 S  # {said}" in lines[0]


_AT_ONCE = """
import socket
for _ in range(20):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.sendto(b"gone", ("198.51.100.7", 4000))
"""


@one_back_end
@pytest.mark.parametrize(
    ("pod", "user", "who"),
    [
        ("frontend.frontend", "app", "a process of the app's user (uid 1000)"),
        ("frontend.frontend", "proxy", "a process of the proxy's user (uid 1337)"),
        ("frontend.frontend", "4321", "a process (uid 4321)"),
        ("legacy.legacy", "app", "a process of the app's user (uid 1000)"),
    ],
)
def test_the_sender_is_known_of_a_socket_that_is_closed_at_once(
    running: Running, pod: str, user: str, who: str
) -> None:
    with capturing(running, pod, "--filter", "udp and dst port 4000", "--count", "20", "--json") as process:
        where = ["--lab", running.name, pod, "--as", user]
        command = [sys.executable, "-m", "lab", "exec", *where, "--", sys.executable, "-c", _AT_ONCE]
        subprocess.run(command, cwd=ROOT, check=True, timeout=20)
        document = json.loads(process.communicate(timeout=20)[0])
    comments = [p["comment"] for p in document["packets"]]
    assert len(comments) == 20
    assert [c for c in comments if not c.startswith(f"{who} -> 198.51.100.7:4000")] == []
    assert any("nflog" in c for c in comments), "none was too short for the list of sockets"


@one_back_end
def test_a_capture_ends_with_its_reader(running: Running) -> None:
    with capturing(running, "frontend.frontend", "-w", "-") as process:
        assert process.stdout is not None
        assert process.stdout.read(4) == b"\x0a\x0d\x0d\x0a"
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read().endswith(b" packets; who read the packets has gone\n")
        assert process.wait(20) == 0

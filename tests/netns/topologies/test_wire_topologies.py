"""What the topologies' own tests cannot say, because it takes the bytes on a pod's link, or several flows: with real labs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from lab import lifecycle
from lab.fabric import paths, plan
from lab.lifecycle import Lab
from lab.manifests.load import load
from lab.manifests.model import FlowFrom, FlowTo, Mesh, Meta, TrafficTest
from lab.probe import flows, packets, runner
from lab.runtime import enter
from lab.verdict import Verdict

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[3]
SECRET = "what-nobody-else-may-read"


@contextmanager
def running(topology: str) -> Iterator[tuple[Lab, Mesh]]:
    mesh = load([ROOT / "topologies" / f"{topology}.yaml"], name=f"slt-{os.getpid()}-{topology}")
    with lifecycle.running(mesh) as lab:
        yield lab, mesh


@pytest.fixture(scope="module")
def mtls() -> Iterator[tuple[Lab, Mesh]]:
    with running("mtls-strict") as started:
        yield started


def on_the_wire(lab: Lab, mesh: Mesh, test: TrafficTest) -> tuple[Verdict, bytes]:
    """Runs a test; its verdict, and all that crossed its pod's link meanwhile."""
    with enter.netns(paths.netns_path(lab.name, paths.NODE)):
        packets.know_interfaces()
        tap = packets.Tap(iface=plan.node_interface(test.flow_from.pod))
    try:
        tap.ins.setblocking(False)
        (verdict,) = runner.run_tests(lab.name, mesh, [test])
        seen = b""
        while True:
            try:
                packet = tap.recv()
            except BlockingIOError:
                return verdict, seen
            if packet is not None:
                seen += bytes(packet)
    finally:
        tap.close()


def request(host: str, **more: object) -> TrafficTest:
    to = FlowTo(host, 8080, headers={"x-secret": SECRET}, **more)
    return TrafficTest(Meta(f"to-{host}"), FlowFrom(pod="client.clients"), to, {"outcome": {"result": "ok"}})


@pytest.mark.parametrize("host", ["server.strict", "server.permissive"])
def test_between_meshed_pods_nothing_is_in_plaintext(mtls: tuple[Lab, Mesh], host: str) -> None:
    verdict, seen = on_the_wire(*mtls, request(host))
    assert verdict.passed, verdict.differences
    assert verdict.far_side is not None
    assert verdict.far_side["headers"]["x-secret"] == SECRET, "it did arrive"
    assert b"\x16\x03\x01" in seen, "no TLS handshake was seen"
    assert SECRET.encode() not in seen


@pytest.mark.parametrize("host", ["server.disabled", "legacy.plain"])
def test_where_mutual_tls_is_off_the_same_eyes_see_plaintext(mtls: tuple[Lab, Mesh], host: str) -> None:
    verdict, seen = on_the_wire(*mtls, request(host))
    assert verdict.passed, verdict.differences
    assert SECRET.encode() in seen


def test_bytes_of_a_tcp_connection_are_encrypted_too(mtls: tuple[Lab, Mesh]) -> None:
    test = replace(request("server.strict"), to=FlowTo("server.strict", 9000, "tcp"))
    verdict, seen = on_the_wire(*mtls, test)
    assert verdict.passed, verdict.differences
    assert verdict.far_side is not None
    assert verdict.far_side["received"] == len(flows.TCP_LINE), "they did arrive"
    assert flows.TCP_LINE.strip() not in seen


def test_the_server_is_told_who_the_client_is(mtls: tuple[Lab, Mesh]) -> None:
    (verdict,) = runner.run_tests(mtls[0].name, mtls[1], [request("server.strict")])
    assert verdict.far_side is not None
    told = verdict.far_side["headers"]["x-forwarded-client-cert"].split(";")
    assert "URI=spiffe://cluster.local/ns/clients/sa/client" in told
    assert "By=spiffe://cluster.local/ns/strict/sa/server" in told


def test_each_request_has_a_connection_of_its_own_where_the_pool_says_so() -> None:
    with running("connection-pools") as (lab, mesh):
        tests = {t.meta.name: t for t in mesh.tests}
        # Each of Envoy's workers has a pool of its own; of more requests than workers, two share a connection.
        many = len(os.sched_getaffinity(0)) + 2

        def ports(name: str) -> list[int]:
            again = [replace(tests[name], meta=Meta(f"{name}-{i}")) for i in range(many)]
            verdicts = runner.run_tests(lab.name, mesh, again)
            assert all(v.passed for v in verdicts), [v.differences for v in verdicts]
            return [p.sport for v in verdicts if v.wire for p in v.wire.packets]

        limited, free = ports("one-request-per-connection"), ports("many-requests-per-connection")
        assert len(set(limited)) == many, limited
        assert len(free) == many
        assert len(set(free)) < many, free

"""Verdicts on a running lab, where topologies alone do not lead: pooled connections, retries, blindness, wrong use."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab import lifecycle
from lab.errors import InputError, ObservationError
from lab.fabric import paths
from lab.lifecycle import Lab
from lab.manifests.load import load
from lab.manifests.model import FlowFrom, FlowTo, Mesh, Meta, Retry, TrafficTest
from lab.probe import crew, report, runner
from lab.runtime import files
from lab.trace.client import Client
from lab.verdict import Verdict

pytestmark = pytest.mark.root

TOPOLOGY = Path(__file__).parents[3] / "topologies" / "quickstart.yaml"
FRONTEND = "frontend.frontend"


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return load([TOPOLOGY], name=f"slt-{os.getpid()}-verdicts")


@pytest.fixture(scope="module")
def lab(mesh: Mesh) -> Iterator[Lab]:
    with lifecycle.running(mesh) as running:
        yield running


def flow(name: str, to: FlowTo, expect: dict[str, object] | None = None, **more: object) -> TrafficTest:
    pod = str(more.pop("pod", FRONTEND))
    return TrafficTest(Meta(name), FlowFrom(pod=pod), to, expect or {}, **more)


def run(lab: Lab, mesh: Mesh, *tests: TrafficTest, **options: object) -> list[Verdict]:
    return runner.run_tests(lab.name, mesh, tests, **options)


CATALOG = FlowTo("catalog.catalog", 8080)


def test_a_request_on_a_pooled_connection_is_still_traced_to_its_syn(lab: Lab, mesh: Mesh) -> None:
    # Each of Envoy's workers has a pool of its own; of more requests than workers, two share a connection.
    many = len(os.sched_getaffinity(0)) + 2
    verdicts = run(lab, mesh, *(flow(f"again-{i}", CATALOG) for i in range(many)))
    assert len({v.source_port for v in verdicts}) == many
    assert len({v.wire.packets for v in verdicts if v.wire}) < many, "no connection was used twice"
    for verdict in verdicts:
        assert verdict.inbound is not None
        assert (verdict.inbound.captured, verdict.inbound.redirected_to) == (True, 15006)
        assert verdict.inbound.rule is not None
        assert verdict.inbound.rule.chain == "ISTIO_IN_REDIRECT"
        assert verdict.inbound.peer_seen_by_app == "127.0.0.6"


def test_requests_that_share_a_connection_keep_their_own_lines(lab: Lab, mesh: Mesh) -> None:
    to = {code: FlowTo("catalog.catalog", 8080, path=f"/status/{code}") for code in (200, 404, 418, 500)}
    verdicts = run(lab, mesh, *(flow(str(code), where) for code, where in to.items()))
    for verdict in verdicts:
        assert verdict.outcome is not None
        assert str(verdict.outcome.status) == verdict.test
        assert verdict.inbound is not None
        assert verdict.inbound.listener == "virtualInbound"


def test_every_key_with_a_value_names_its_source(lab: Lab, mesh: Mesh) -> None:
    (verdict,) = run(lab, mesh, flow("sources", CATALOG))
    told = verdict.to_dict()
    for part in ("dns", "outbound", "inbound"):
        for key in ("captured", "redirected_to", "rule"):
            assert told[part][key] is not None
            assert f"{part}.{key}" in verdict.evidence
    assert verdict.evidence["outbound.rule"] == "nftrace"
    assert verdict.evidence["outbound.redirected_to"] == "conntrack"
    assert {"envoy", "wire", "outcome", "inbound.peer_seen_by_app"} <= verdict.evidence.keys()


def test_a_silent_server_is_a_timeout_and_says_where_it_got(lab: Lab, mesh: Mesh) -> None:
    slow = FlowTo("catalog.catalog", 8080, path="/delay/30")
    (verdict,) = run(lab, mesh, flow("slow", slow, timeout=0.5))
    assert verdict.outcome is not None
    assert verdict.outcome.result == "timeout"
    assert verdict.envoy is not None
    assert verdict.envoy.response_flags == "DC"
    assert verdict.inbound is not None
    assert verdict.inbound.captured is True


def test_a_test_that_fails_is_tried_as_often_as_it_says(lab: Lab, mesh: Mesh) -> None:
    queries = files.dns_queries(lab.name)
    name = "never.nowhere.example"
    wrong = flow("retry", FlowTo(name, 0, "dns"), {"outcome": {"result": "ok"}}, retry=Retry(3, 0.01))
    (verdict,) = run(lab, mesh, wrong)
    assert verdict.passed is False
    asked = [
        line for line in queries.read_text().splitlines() if f'"{name}"' in line.replace(f'"{name}."', f'"{name}"')
    ]
    assert len(asked) == 3


def test_verdicts_come_one_by_one_in_the_end_in_order(lab: Lab, mesh: Mesh) -> None:
    seen: list[str] = []
    tests = [
        flow(f"t{i}", FlowTo("10.96.20.30" if i % 2 else "203.0.113.20", 8080, "icmp"), timeout=0.3) for i in range(4)
    ]
    verdicts = run(lab, mesh, *tests, on_verdict=lambda v: seen.append(v.test))
    assert [v.test for v in verdicts] == ["t0", "t1", "t2", "t3"]
    assert sorted(seen) == ["t0", "t1", "t2", "t3"]


def test_it_runs_beside_a_loop_and_with_a_crew_launched_before(lab: Lab, mesh: Mesh) -> None:
    async def inside() -> list[Verdict]:
        return run(lab, mesh, flow("loop", CATALOG, {"outcome": {"status": 200}}), launched=crew.launch())

    assert [v.passed for v in asyncio.run(inside())] == [True]


def test_a_pod_that_nobody_observes_is_skipped_by_name(lab: Lab, mesh: Mesh) -> None:
    async def ask(**question: object) -> None:
        client = await Client.connect(str(files.observer_socket(lab.name)))
        await client.ask(**question)
        await client.close()

    asyncio.run(ask(op="detach", place=FRONTEND))
    try:
        verdicts = run(lab, mesh, flow("blind", CATALOG, {"outbound": {"captured": True}}))
    finally:
        netns = str(paths.netns_path(lab.name, FRONTEND))
        asyncio.run(ask(op="attach", place=FRONTEND, netns=netns))
    assert verdicts[0].passed is None
    assert "frontend.frontend" in (verdicts[0].skipped or "")
    assert report.exit_code(verdicts) == 3


def test_a_flow_from_nowhere_is_wrong_use(lab: Lab, mesh: Mesh) -> None:
    with pytest.raises(InputError, match=r'there is no pod "ghost\.ghost"'):
        run(lab, mesh, flow("ghost", CATALOG, pod="ghost.ghost"))
    with pytest.raises(InputError, match="slt-none"):
        runner.run_tests("slt-none", mesh, [flow("no lab", CATALOG)])


def test_without_an_observer_there_are_no_verdicts(lab: Lab, mesh: Mesh) -> None:
    socket = files.observer_socket(lab.name)
    hidden = socket.with_name("hidden.sock")
    socket.rename(hidden)
    try:
        with pytest.raises(ObservationError, match="observer does not answer"):
            run(lab, mesh, flow("dark", CATALOG))
    finally:
        hidden.rename(socket)

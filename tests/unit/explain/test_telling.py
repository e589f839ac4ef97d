"""What a prediction says of the rules and programs that a flow meets."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from lab.explain import telling
from lab.explaining import MeshWorld, predict
from lab.manifests.load import load
from lab.manifests.model import FlowFrom, FlowTo, Meta, TrafficTest

QUICKSTART = Path(__file__).parents[3] / "topologies" / "quickstart.yaml"
CATALOG = "10.244.2.1"


@cache
def world() -> MeshWorld:
    return MeshWorld(load([QUICKSTART]))


def hops(host: str, port: int, protocol: str) -> tuple[telling.Hop, ...]:
    test = TrafficTest(Meta("t"), FlowFrom(pod="frontend.frontend"), FlowTo(host, port, protocol), {})  # type: ignore[arg-type]
    return telling.hops(predict(world(), test).journeys[0])


def test_a_jump_into_a_chain_without_a_match_says_so() -> None:
    first = hops(CATALOG, 0, "icmp")[0]
    nothing = "-j ISTIO_REDIRECT  [no rule of ISTIO_REDIRECT matches]"
    assert [line for line in first.details if "ISTIO_REDIRECT" in line] == [
        f"nat ISTIO_OUTPUT 10: -A ISTIO_OUTPUT {nothing}"
    ]


def test_a_jump_into_a_chain_with_a_match_says_nothing() -> None:
    first = hops(CATALOG, 8080, "http")[0]
    (jump,) = [line for line in first.details if line.endswith("-j ISTIO_REDIRECT")]
    assert jump == "nat ISTIO_OUTPUT 10: -A ISTIO_OUTPUT -j ISTIO_REDIRECT"


def test_no_port_answers_an_echo_request() -> None:
    last = hops(CATALOG, 0, "icmp")[-1]
    assert (last.kind, last.place, last.text) == ("kernel", "catalog.catalog", "the kernel answers the echo request")


def test_a_hook_without_a_match_has_nothing_to_tell() -> None:
    test = TrafficTest(Meta("t"), FlowFrom(pod="legacy.legacy"), FlowTo(CATALOG, 8080), {})
    sent = telling.hops(predict(world(), test).journeys[0])[0]
    assert (sent.place, sent.details) == ("legacy.legacy", ())


def test_administration_pages_that_always_answer_are_known_and_others_are_not_guessed() -> None:
    own = replace(FlowTo("127.0.0.1", 15000), path="/")
    for path, result in (("/", "ok"), ("/config_dump", "ok"), ("/drain_listeners", None)):
        test = TrafficTest(Meta("t"), FlowFrom(pod="frontend.frontend"), replace(own, path=path), {})
        verdict = predict(world(), test).verdict
        assert (verdict.outcome.result if verdict.outcome else None) == result
        assert bool(verdict.undecided) is (result is None)

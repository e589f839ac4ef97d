"""What a prediction says would change it: sentences that can be read, and only changes that help or take a flow elsewhere."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from lab import whatif
from lab.explain.explained import Explained
from lab.explaining import MeshWorld, predict
from lab.manifests.load import load
from lab.manifests.model import FlowFrom, FlowTo, Meta, TrafficTest

ROOT = Path(__file__).parents[3]


@cache
def world(name: str) -> MeshWorld:
    return MeshWorld(load([ROOT / "topologies" / f"{name}.yaml"]))


def told(name: str, source: str, host: str, port: int, protocol: str = "http", uid: int = 1000) -> Explained:
    test = TrafficTest(Meta("t"), FlowFrom(pod=source, uid=uid), FlowTo(host, port, protocol), {})  # type: ignore[arg-type]
    found = predict(world(name), test)
    changes = whatif.counterfactuals(world(name), test, found)
    return Explained(found.verdict, found.journeys, found.questions, counterfactuals=changes)


EXCLUDED = "(traffic.sidecar.istio.io/excludeOutboundPorts of payments.payments)"


@pytest.mark.parametrize(
    ("topology", "flow", "sentences"),
    [
        (
            "registry-only",
            ("frontend.frontend", "unknown.example", 80),
            [
                "it would not be captured, and would work (200) if its uid were 1337",
                "it would work (200) if a ServiceEntry declared unknown.example with port 80",
                "it would work (200) if the outboundTrafficPolicy were ALLOW_ANY",
            ],
        ),
        (
            "registry-only",
            ("payments.payments", "unknown.example", 9000, "tcp"),
            [
                "it would be captured (to 15001), and would be closed without an answer"
                f" if port 9000 were not excluded {EXCLUDED}",
            ],
        ),
        (
            "quickstart",
            ("frontend.frontend", "legacy.legacy", 8080),
            [
                "it would not be captured if its uid were 1337",
                "legacy.legacy would capture it (to 15006) if legacy.legacy had a sidecar",
            ],
        ),
        (
            "mtls-strict",
            ("legacy.plain", "server.strict", 8080),
            [
                "it would be captured (to 15001), and would work (200) if legacy.plain had a sidecar",
                "it would work (200) if PeerAuthentication istio-system/default were PERMISSIVE",
            ],
        ),
        (
            "export-to",
            ("stranger.stranger", "private.owner", 8080),
            # No ServiceEntry is proposed for what a Service is: it would lead nowhere.
            [
                "it would not be captured, and would work (200) if its uid were 1337",
                "it would work (200) if exportTo of Service owner/private included stranger",
                "it would work (200) if the outboundTrafficPolicy were ALLOW_ANY",
            ],
        ),
    ],
)
def test_changes_read_as_sentences(topology: str, flow: tuple[str, str, int], sentences: list[str]) -> None:
    assert [c.sentence for c in told(topology, *flow).counterfactuals] == sentences


SENTENCE = re.compile(
    r"(it|its lookup|[\w.-]+) would (not be captured|be captured|capture it|not capture it|work|get |be |find |go to cluster )"
    r".* if (its uid|port|the range|the outboundTrafficPolicy|exportTo|Sidecar|discoverySelectors|a ServiceEntry|"
    r"PeerAuthentication|there were no|pod|[\w.-]+ had a sidecar)"
)


@pytest.mark.parametrize("name", ["quickstart", "result-matrix", "virtual-service", "sidecar-scoping"])
def test_every_change_of_a_topology_is_a_sentence_and_helps(name: str) -> None:
    found = 0
    for test in world(name).mesh.tests[::3]:
        prediction = predict(world(name), test)
        outcome = prediction.verdict.outcome
        for change in whatif.counterfactuals(world(name), test, prediction):
            found += 1
            assert SENTENCE.match(change.sentence), change.sentence
            if outcome is not None and outcome.result != "ok" and not re.search("capture", change.effect):
                assert re.match("it would (work|go to)", change.effect), change.sentence
    assert found > 3


def test_an_error_of_grpc_is_told_as_its_status_and_not_as_an_http_one() -> None:
    found = told("registry-only", "frontend.frontend", world("registry-only").mesh.pods[3].ip, 4317, "grpc")
    assert found.to_json()["sentence"].endswith("it gets an error (gRPC status 14).")

"""Expectations are subsets; a difference says where and what."""

from __future__ import annotations

import pytest

from lab.probe.expect import differences

ACTUAL = {
    "outbound": {"captured": True, "redirected_to": 15001, "rule": {"chain": "ISTIO_REDIRECT", "position": 1}},
    "envoy": {"route": "80", "cluster": None},
    "inbound": None,
    "dns": {"answers": ["10.0.0.1", "10.0.0.2"]},
    "wire": {"packets": [{"src": "a", "dport": 1}, {"src": "b", "dport": 2}]},
    "outcome": {"result": "http-error", "status": 502},
}


@pytest.mark.parametrize(
    "expected",
    [
        {},
        {"outbound": {"captured": True}},
        {"outbound": {"rule": {"position": 1}}, "outcome": {"status": 502}},
        {"envoy": {"cluster": None}},
        {"inbound": None},
        {"dns": {"answers": ["10.0.0.2", "10.0.0.1"]}},
        {"wire": {"packets": [{"src": "b"}, {"dport": 1}]}},
        {"outcome": {"status": 502.0}},
    ],
)
def test_what_holds(expected: dict[str, object]) -> None:
    assert differences(expected, ACTUAL) == []


@pytest.mark.parametrize(
    ("expected", "path", "part"),
    [
        ({"outbound": {"captured": False}}, "outbound.captured", "expected false, got true"),
        ({"outbound": {"captured": 1}}, "outbound.captured", "expected 1, got true"),
        ({"outbound": {"rule": {"chain": "X"}}}, "outbound.rule.chain", 'expected "X", got "ISTIO_REDIRECT"'),
        ({"outbound": {"rule": None}}, "outbound.rule", "expected null"),
        ({"envoy": {"route": 80}}, "envoy.route", "a number, not text: see the quotes"),
        ({"envoy": None}, "envoy", "expected null"),
        ({"inbound": {"captured": False}}, "inbound", "there is none (null)"),
        ({"inbound": {"cluster": None}}, "inbound", "there is none (null)"),
        ({"dns": {"answers": ["10.0.0.1"]}}, "dns.answers", '["10.0.0.2"] is too much'),
        ({"dns": {"answers": ["10.0.0.1", "10.0.0.2", "10.0.0.3"]}}, "dns.answers", '["10.0.0.3"] is missing'),
        ({"dns": {"answers": "10.0.0.1"}}, "dns.answers", "got"),
        ({"wire": {"packets": []}}, "wire.packets", "too much"),
        ({"wire": {"packets": [{"src": "a"}, {"src": "c"}]}}, "wire.packets", "missing"),
        ({"outcome": {"statut": 1}}, "outcome.statut", 'did you mean "status"'),
        ({"outcome": ["ok"]}, "outcome", "expected"),
    ],
)
def test_what_differs_is_named(expected: dict[str, object], path: str, part: str) -> None:
    ((where, text),) = differences(expected, ACTUAL)
    assert where == path
    assert part in text


def test_every_difference_is_told() -> None:
    expected = {"outbound": {"captured": False, "redirected_to": None}, "outcome": {"result": "ok"}}
    assert [d[0] for d in differences(expected, ACTUAL)] == [
        "outbound.captured",
        "outbound.redirected_to",
        "outcome.result",
    ]


@pytest.mark.parametrize(
    ("backend", "text", "differs"),
    [
        ("legacy", "-A X -j RETURN", False),
        ("nft", "-A X -j RETURN", False),
        ("nft", "counter return", True),
        ("native-nft", "return", False),
        ("native-nft", "-A X -j RETURN", True),
    ],
)
def test_a_rule_is_compared_in_the_words_of_its_back_end(backend: str, text: str, differs: bool) -> None:
    expected = {"rule": {"text": "-A X -j RETURN", "native_nft": {"text": "return"}}}
    assert bool(differences(expected, {"rule": {"backend": backend, "text": text}})) is differs


def test_a_rule_expected_in_other_words_only_does_not_pass_unseen() -> None:
    actual = {"rule": {"backend": "native-nft", "text": "return"}}
    found = differences({"rule": {"text": "-A X -j RETURN"}}, actual)
    assert [path for path, _ in found] == ["rule"]
    assert "native_nft" in found[0][1]
    assert differences({"rule": {"backend": "native-nft"}}, actual) == []

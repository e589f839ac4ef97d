"""Comparing, skipping and choosing tests: what needs no lab."""

from __future__ import annotations

import pytest

from lab.errors import InputError
from lab.manifests.model import FlowFrom, FlowTo, Meta, TrafficTest
from lab.probe import report
from lab.probe.runner import compared, select
from lab.verdict import From, Outbound, Outcome, Rule, To, Verdict

RULE = Rule("ipv4", "legacy", "nat", "OUTPUT", 1, "-A OUTPUT -p tcp -j RETURN")


def verdict(expected: dict[str, object], **more: object) -> Verdict:
    return Verdict(
        test="t",
        proof="observed",
        source=From("a.a", 1000),
        to=To("h", "10.0.0.1", 80, "http"),
        outcome=Outcome("ok", 200),
        outbound=Outbound(False, None, RULE),
        expected=expected,
        **more,
    )


def test_a_verdict_that_holds_passes() -> None:
    assert compared(verdict({"outcome": {"result": "ok"}})).passed is True


def test_a_difference_fails_and_says_why() -> None:
    v = compared(verdict({"outbound": {"captured": True}}))
    assert v.passed is False
    assert v.differences == ("outbound.captured: expected true, got false",)


def test_what_this_kernel_cannot_show_is_skipped_by_name() -> None:
    v = compared(verdict({"outbound": {"rule": {"chain": "X"}}}), {"trace": "no nf_tables here"})
    assert v.passed is None
    assert v.skipped == "no nf_tables here"


def test_a_failure_elsewhere_is_not_hidden_by_what_cannot_be_seen() -> None:
    expected = {"outbound": {"rule": {"chain": "X"}}, "outcome": {"status": 404}}
    assert compared(verdict(expected), {"trace": "no nf_tables here"}).passed is False


def test_what_could_be_seen_all_the_same_passes() -> None:
    assert compared(verdict({"outcome": {"result": "ok"}}), {"trace": "no nf_tables here"}).passed is True


def named(name: str) -> TrafficTest:
    return TrafficTest(Meta(name), FlowFrom(pod="a.a"), FlowTo("h"), expect={})


def test_tests_are_chosen_by_glob() -> None:
    tests = [named("dns-udp"), named("dns-tcp"), named("http")]
    assert [t.meta.name for t in select(tests, "dns-*")] == ["dns-udp", "dns-tcp"]
    assert select(tests, None) == tests
    with pytest.raises(InputError, match=r"nothing to run: nope: no test is called so: dns-udp"):
        select(tests, "nope")
    with pytest.raises(InputError, match="no TrafficTest"):
        select([], None)


VERDICTS = [
    compared(verdict({})),
    compared(verdict({"outbound": {"captured": True}})),
    compared(verdict({"outbound": {"rule": {"chain": "X"}}}), {"trace": "no <trace> & no log"}),
]


def test_the_summary_and_its_exit_code() -> None:
    assert report.summary(VERDICTS) == {"passed": 1, "failed": 1, "skipped": 1}
    assert report.exit_code(VERDICTS) == 1
    assert report.exit_code(VERDICTS[:1]) == 0
    assert report.exit_code([VERDICTS[0], VERDICTS[2]]) == 3
    assert report.backends(VERDICTS) == ["legacy"]


def test_the_json_document() -> None:
    document = report.to_json("lab", VERDICTS)
    assert list(document) == ["lab", "verdicts", "summary"]
    first = document["verdicts"][0]
    assert {"test", "proof", "from", "to", "source_port", "dns", "outbound", "envoy", "inbound", "tls", "wire"} <= set(
        first
    )
    assert {"outcome", "evidence", "expected", "pass"} <= set(first)
    assert [v["pass"] for v in document["verdicts"]] == [True, False, None]


def test_the_junit_report() -> None:
    from xml.etree import ElementTree

    suite = ElementTree.fromstring(report.junit("lab", VERDICTS)).find("testsuite")
    assert suite is not None
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("3", "1", "1")
    ok, failed, skipped = suite.findall("testcase")
    assert ok.find("failure") is None
    failure = failed.find("failure")
    assert failure is not None
    assert failure.get("message") == "outbound.captured: expected true, got false"
    assert "OUTPUT rule 1: -A OUTPUT -p tcp -j RETURN" in (failure.text or "")
    why = skipped.find("skipped")
    assert why is not None
    assert why.get("message") == "no <trace> & no log"


def test_the_table_shows_every_verdict_and_every_reason() -> None:
    from rich.console import Console

    console = Console(width=200, file=open("/dev/null", "w"), record=True)  # noqa: SIM115
    console.print(report.table(VERDICTS))
    console.file.close()
    text = console.export_text()
    for part in ("a.a -> http h:80", "direct", "ok 200", "FAIL", "skip", "outbound.captured: expected true, got false"):
        assert part in text

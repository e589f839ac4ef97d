"""Comparing, skipping and choosing tests: what needs no lab."""

from __future__ import annotations

import dataclasses

import pytest

from lab.errors import InputError
from lab.manifests.model import FlowFrom, FlowTo, Meta, TrafficTest
from lab.probe import report
from lab.probe.runner import compared, select
from lab.verdict import Dns, Envoy, From, Inbound, Outbound, Outcome, Rule, To, Verdict

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
    with pytest.raises(InputError) as error:
        select(tests, "nope*")
    assert str(error.value) == (
        'nothing to run: no test has a name that matches "nope*". The names are: dns-udp, dns-tcp, http.'
    )
    with pytest.raises(InputError, match="no TrafficTest"):
        select([], None)


@pytest.mark.parametrize(("only", "near"), [("dns", "dns-udp or dns-tcp"), ("htpp", "http"), ("http-*", "http")])
def test_a_name_that_is_nearly_right_is_named(only: str, near: str) -> None:
    with pytest.raises(InputError) as error:
        select([named("dns-udp"), named("dns-tcp"), named("http")], only)
    assert str(error.value).endswith(f"Did you mean {near}?")


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


def test_a_failure_tells_of_what_differs_and_nothing_else() -> None:
    v = compared(
        verdict(
            {"outbound": {"captured": True}},
            dns=Dns(True, 15053, "agent", ("10.0.0.1",), RULE),
            envoy=Envoy(response_flags="UH", details="no_healthy_upstream"),
            inbound=Inbound("b.b", True, 15006, RULE),
        )
    )
    assert report.why(v) == ["outbound was decided by nat OUTPUT rule 1: -A OUTPUT -p tcp -j RETURN"]
    other = compared(dataclasses.replace(v, expected={"outcome": {"status": 503}}))
    assert report.why(other) == ["the client's Envoy: flags UH, no_healthy_upstream"]
    neither = compared(dataclasses.replace(v, expected={"source_port": 1}))
    assert report.why(neither) == []


def test_no_table_is_no_rule() -> None:
    none = Rule("ipv4", None, "nat", "OUTPUT", None, "-P OUTPUT ACCEPT")
    v = compared(dataclasses.replace(verdict({"outbound": {"captured": True}}), outbound=Outbound(False, None, none)))
    assert report.why(v) == ["outbound met no rule: there is no table, which is as -P OUTPUT ACCEPT"]


@pytest.mark.parametrize(
    ("to", "result"),
    [
        (To("nowhere.example", None, 80, "http"), "unreachable"),
        (To("nowhere.example", "10.96.0.10", 53, "dns"), "no-answer"),
    ],
)
def test_a_name_that_does_not_exist_is_called_so(to: To, result: str) -> None:
    v = dataclasses.replace(verdict({}), to=to, outcome=Outcome(result), dns=Dns(rcode="NXDOMAIN", answers=()))  # type: ignore[arg-type]
    assert f"{result}: NXDOMAIN" in shown([compared(v)])
    found = dataclasses.replace(v, to=To("h", "10.0.0.1", 80, "http"))
    assert "NXDOMAIN" not in shown([compared(found)])


def test_the_table_shows_every_verdict_and_every_reason() -> None:
    text = shown(VERDICTS)
    for part in ("a.a -> http h:80", "direct", "ok 200", "FAIL", "skip", "outbound.captured: expected true, got false"):
        assert part in text


def shown(verdicts: list[Verdict]) -> str:
    """The table as text."""
    from rich.console import Console

    console = Console(width=200, file=open("/dev/null", "w"), record=True)  # noqa: SIM115
    console.print(report.table(verdicts))
    console.file.close()
    return console.export_text()

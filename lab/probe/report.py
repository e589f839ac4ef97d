"""Verdicts for people and for machines: a table, JSON, JUnit."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from lab.verdict import Verdict

if TYPE_CHECKING:
    from rich.console import Group


def summary(verdicts: Sequence[Verdict]) -> dict[str, int]:
    """How many passed, failed, were skipped."""
    return {
        "passed": sum(v.passed is True for v in verdicts),
        "failed": sum(v.passed is False for v in verdicts),
        "skipped": sum(v.passed is None for v in verdicts),
    }


def exit_code(verdicts: Sequence[Verdict]) -> int:
    """0 all hold; 1 one failed; 3 one could not be observed (1 wins)."""
    counts = summary(verdicts)
    return 1 if counts["failed"] else 3 if counts["skipped"] else 0


def to_json(lab: str, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """The document of ``lab verify --json``."""
    return {"lab": lab, "verdicts": [v.to_dict() for v in verdicts], "summary": summary(verdicts)}


def table(verdicts: Sequence[Verdict], title: str | None = None) -> Group:
    """One row a test, and below the rows why tests failed or were skipped. For a terminal (rich)."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("test", "flow", "outbound", "envoy", "inbound", "outcome", ""):
        rows.add_column(name, overflow="fold")
    reasons: list[Text] = []
    for v in verdicts:
        mark = {True: Text("ok", "green"), False: Text("FAIL", "bold red"), None: Text("skip", "yellow")}[v.passed]
        cells = [v.test, _flow(v), _outbound(v), _envoy(v), _inbound(v), _outcome(v)]
        rows.add_row(*(Text(c) for c in cells), mark)
        if v.passed is None:
            reasons.append(Text(f"skip {v.test}: {v.skipped}", "yellow"))
        elif not v.passed:
            reasons.append(Text(f"FAIL {v.test}", "bold red"))
            reasons += [Text(f"  {difference}", "red") for difference in v.differences]
            reasons += [Text(f"  {line}", "dim") for line in why(v)]
    return Group(rows, *reasons)


def junit(lab: str, verdicts: Sequence[Verdict]) -> str:
    """A JUnit report: one test case a verdict, whose standard output is the whole verdict as JSON."""
    counts = summary(verdicts)
    suite = ElementTree.Element(
        "testsuite",
        name=lab,
        tests=str(len(verdicts)),
        failures=str(counts["failed"]),
        errors="0",
        skipped=str(counts["skipped"]),
        time=f"{sum(v.seconds for v in verdicts):.3f}",
    )
    for v in verdicts:
        case = ElementTree.SubElement(suite, "testcase", name=v.test, classname=lab, time=f"{v.seconds:.3f}")
        if v.passed is False:
            text = "\n".join([*v.differences, *why(v)])
            ElementTree.SubElement(
                case, "failure", message=_xml(v.differences[0] if v.differences else "")
            ).text = _xml(text)
        elif v.passed is None:
            ElementTree.SubElement(case, "skipped", message=_xml(v.skipped or ""))
        ElementTree.SubElement(case, "system-out").text = _xml(json.dumps(v.to_dict(), default=str))
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def backends(verdicts: Sequence[Verdict]) -> list[str]:
    """The iptables back ends whose rules were seen."""
    found = {r.backend for v in verdicts for part in (v.dns, v.outbound, v.inbound) if part and (r := part.rule)}
    return sorted(b for b in found if b)


def _flow(v: Verdict) -> str:
    source = v.source.pod or v.source.external or "?"
    if v.source.uid != 1000:
        source += f" as {v.source.uid}"
    if v.source.spoof:
        source += f" spoofing {v.source.spoof}"
    port = f":{v.to.port}" if v.to.port else ""
    host = f"[{v.to.host}]" if ":" in v.to.host else v.to.host
    return f"{source} -> {v.to.protocol} {host}{port}"


def _outbound(v: Verdict) -> str:
    lookup = v.to.protocol in ("dns", "dns-tcp")
    part = v.dns if lookup else v.outbound
    if part is None:
        return "-"
    where = _where(part.captured, part.redirected_to)
    return f"{where}, by {v.dns.answered_by}" if lookup and v.dns and v.dns.answered_by else where


def _inbound(v: Verdict) -> str:
    if v.inbound is None:
        return "-"
    where = f"{v.inbound.pod}: {_where(v.inbound.captured, v.inbound.redirected_to)}"
    return f"{where}, {v.inbound.cluster}" if v.inbound.cluster else where


def _where(captured: bool | None, port: int | None) -> str:
    return "not seen" if captured is None else f"captured to {port}" if captured else "direct"


def _envoy(v: Verdict) -> str:
    if v.envoy is None:
        return "-"
    what = v.envoy.cluster or v.envoy.route_name or v.envoy.filter_chain or "?"
    flags = v.envoy.response_flags
    return f"{what} {flags}" if flags and flags != "-" else what


def _outcome(v: Verdict) -> str:
    if v.outcome is None:
        return "-"
    if v.outcome.status:
        return f"{v.outcome.result} {v.outcome.status}"
    lookup = v.to.protocol in ("dns", "dns-tcp")
    if v.dns and v.dns.rcode not in (None, "NOERROR") and (lookup or v.to.address is None):
        return f"{v.outcome.result}: {v.dns.rcode}"  # the server did answer; there is no such name
    return v.outcome.result


def why(v: Verdict) -> list[str]:
    """What a reader of a failure wants to know next: the rules that decided, and what sender and Envoy said; only of the
    parts of the verdict that differ, or that decide those."""
    differing = {re.split(r"[.:]", difference)[0] for difference in v.differences}

    def matters(*parts: str) -> bool:
        return not differing.isdisjoint(parts) or not differing

    found = []
    rules = (
        ("dns", v.dns, matters("dns", "to")),
        ("outbound", v.outbound, matters("outbound", "wire")),
        ("inbound", v.inbound, matters("inbound")),
    )
    for name, part, asked in rules:
        if asked and part and part.rule and part.rule.backend is None:
            found.append(f"{name} met no rule: there is no table, which is as {part.rule.text}")
        elif asked and part and part.rule:
            where = f"{part.rule.table} {part.rule.chain}"
            position = f" rule {part.rule.position}" if part.rule.position else ""
            found.append(f"{name} was decided by {where}{position}: {part.rule.text}")
    proxies = (
        ("the client's Envoy", v.envoy, matters("envoy", "outcome", "tls", "far_side")),
        ("the Envoy of the pod that was reached", v.inbound, matters("inbound", "outcome", "tls", "far_side")),
    )
    for name, proxy, asked in proxies:
        if asked and proxy and (proxy.details or proxy.response_flags not in (None, "-")):
            found.append(f"{name}: flags {proxy.response_flags}, {proxy.details or 'no details'}")
    if matters("envoy", "wire", "outcome") and v.envoy and v.envoy.upstream and v.envoy.upstream.captured:
        port = v.envoy.upstream.redirected_to
        text = v.envoy.upstream.rule.text if v.envoy.upstream.rule else "an unknown rule"
        found.append(f"the client's Envoy: its own connection was captured to {port} again, by {text}")
    if matters("outcome", "to", "far_side") and v.outcome and v.outcome.error:
        found.append(f"the sender: {v.outcome.error}")
    return found


def _xml(text: str) -> str:
    """Without the control characters that XML cannot carry."""
    return "".join(c for c in text if c in "\t\n\r" or ord(c) >= 32)

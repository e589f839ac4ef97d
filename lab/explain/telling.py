"""A prediction in words: one sentence, then its hops in the order in which the flow meets them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

from lab.explain.envoy import Decision
from lab.explain.journey import Journey
from lab.explain.packet import endpoint
from lab.explain.predict import CHANCE, Question
from lab.explain.walk import Fate, Pass, Step
from lab.verdict import Inbound, Verdict

_WORDS = {
    "ok": "it works",
    "http-error": "it gets an HTTP error",
    "closed": "the connection opens and is closed without an answer",
    "refused": "the connection is refused",
    "timeout": "nothing answers in time",
    "no-answer": "nothing answers",
    "unreachable": "the destination is unreachable",
}


class Hop(NamedTuple):
    """One thing that the flow meets. ``why`` says what was looked at there and not taken."""

    kind: str
    place: str
    text: str
    details: tuple[str, ...] = ()
    why: tuple[str, ...] = ()


def sentence(verdict: Verdict, journeys: Sequence[Journey] = ()) -> str:
    """The verdict in one sentence."""
    source, to = verdict.source, verdict.to
    who = f"{source.pod} (uid {source.uid})" if source.pod else source.external or "a client outside"
    host = to.host or "this machine"
    target = host if to.port is None else f"{host}:{to.port}" if ":" not in host else endpoint(host, to.port)
    head = f"{who} to {target} ({to.protocol}): "
    parts = list(_courses(verdict))
    end = _end(verdict)
    if end:
        parts.append(end)
    if verdict.undecided and all(u.startswith(CHANCE) for u in verdict.undecided):
        parts.append("; ".join(verdict.undecided))
    elif verdict.undecided:
        parts.insert(0, "undecided" if verdict.outcome is None else "in part undecided")
        parts.append(f"not known: {'; '.join(verdict.undecided)}")
    elif len({(j.result, j.status) for j in journeys}) > 1:
        parts.append("or it ends otherwise")
    return f"{head}{', '.join(parts)}."


def _courses(verdict: Verdict) -> Iterator[str]:
    out, envoy, inbound = verdict.outbound, verdict.envoy, verdict.inbound
    if verdict.to.protocol in ("dns", "dns-tcp") and verdict.dns is not None:
        dns = verdict.dns
        if dns.captured is not None:
            yield f"captured to {dns.redirected_to}" if dns.captured else "not captured"
        if dns.answered_by:
            yield f"answered by {dns.answered_by}"
        if dns.answers:
            yield f"{', '.join(dns.answers)}"
        return
    if out is not None and out.captured is not None:
        yield f"captured to {out.redirected_to}" if out.captured else "not captured"
    if envoy is not None:
        if envoy.cluster:
            yield f"cluster {envoy.cluster}" + (f" at {envoy.endpoint}" if envoy.endpoint else "")
        elif envoy.virtual_host:
            yield f"virtual host {envoy.virtual_host}"
        elif envoy.listener:
            yield f"listener {envoy.listener}"
    if inbound is not None and inbound.pod:
        where = (
            f"{inbound.pod} captures it to {inbound.redirected_to}"
            if inbound.captured
            else f"{inbound.pod} does not capture it"
        )
        yield where if inbound.captured is not None else f"reaches {inbound.pod}"
    elif verdict.wire is not None and verdict.wire.left_pod and envoy is None:
        yield "leaves the pod"
    elif verdict.wire is not None and verdict.wire.left_pod is False and inbound is None:
        yield "nothing leaves the pod"


def _end(verdict: Verdict) -> str:
    outcome = verdict.outcome
    if outcome is None:
        return "" if verdict.undecided else "what answers there is not known from here"
    text = _WORDS[outcome.result]
    far = verdict.inbound
    if outcome.result == "ok" and outcome.status is None and far is not None and far.captured and _failed(far):
        # Bytes came back to a client that takes any for an answer; the app never saw its own.
        text = f"{far.pod}'s Envoy answers itself, its app is not reached (flags {far.response_flags})"
    if outcome.grpc_status:
        text = f"it gets an error (gRPC status {outcome.grpc_status})"
    elif outcome.status is not None:
        text += f" ({outcome.status})"
    flags = verdict.envoy.response_flags if verdict.envoy else None
    if flags and flags != "-":
        text += f", flags {flags}"
    return text if not outcome.error else f"{text}: {outcome.error}"


def _failed(far: Inbound) -> bool:
    return far.cluster is None and far.peer_seen_by_app is None and far.response_flags not in (None, "", "-")


def hops(journey: Journey | None, questions: Sequence[Question] = ()) -> tuple[Hop, ...]:
    """Every hop of one course, in order."""
    found = list(_lookups(questions))
    now = journey
    while now is not None:
        found += _of(now)
        now = now.next
    return tuple(found)


def _lookups(questions: Sequence[Question]) -> Iterator[Hop]:
    for number, question in enumerate(questions, 1):
        place = "resolver"
        if question.doubts:
            yield Hop(
                "lookup", place, f"{question.type} {question.name} at {question.server}: undecided", question.doubts
            )
            continue
        where = f"captured to {question.port}" if question.port is not None else "not captured"
        answer = (
            ", ".join(question.answers)
            or (question.rcode if question.rcode != "NOERROR" else "no such record")
            or question.error
        )
        by = f", answered by {question.answered_by}" if question.answered_by else ""
        details: list[str] = []
        if number == len(questions):  # the rules are the same for every name that was tried
            details += _decided(question.fate, "output")
            if question.forwarded is not None:
                details += [f"the agent asks {question.server} itself:", *_decided(question.forwarded, "output")]
        yield Hop(
            "lookup",
            place,
            f"{question.type} {question.name}: {where}{by}: {answer}",
            tuple(details),
            _unmatched(question.fate),
        )


def _of(journey: Journey) -> Iterator[Hop]:
    if journey.sent is not None:
        yield _rules(journey.start, journey.sent, "output", journey.packet.uid)
    transit = journey.transit
    if transit is not None:
        translated = (
            transit.fate is not None
            and transit.fate.passes
            and any(s.matched and s.rule is not None and s.rule.decides for p in transit.fate.passes for s in p.steps)
        )
        if transit.reached is None and transit.result is not None:
            yield Hop("node", "node", f"goes no further: {transit.why or transit.result}", _all_decided(transit.fate))
        elif transit.reached is not None and translated:
            yield Hop("node", "node", f"{transit.packet.shown()}", _all_decided(transit.fate))
    if journey.received is not None and journey.reached is not None:
        yield _rules(journey.reached, journey.received, "prerouting", None)
    if journey.decision is not None:
        yield from _envoy(journey)
    elif journey.reached is not None and journey.result != "unknown":
        yield _program(journey)
    elif journey.doubts:
        yield Hop("unknown", journey.reached or journey.start, "undecided", journey.doubts)


def _rules(place: str, fate: Fate, hook: str, uid: int | None) -> Hop:
    first = next((p for p in fate.passes if p.hook == hook), None)
    if first is None:
        return Hop("rules", place, f"{fate.end} {fate.why}".strip())
    who = f" from uid {uid}" if uid is not None else ""
    text = f"{hook}: {first.before.shown()}{who}"
    after = fate.packet
    if fate.end == "delivered":
        if after.tproxy is not None:
            text += f", given to port {after.tproxy} by TPROXY"
        elif (after.dst, after.dport) != (first.before.dst, first.before.dport):
            text += f", redirected to {endpoint(after.dst, after.dport)}"
        else:
            text += ", delivered here"
    elif fate.end == "left":
        text += f", leaves by {after.oif}"
    else:
        text += f", {fate.end}: {fate.why}" if fate.why else f", {fate.end}"
    details = (*_decided(fate, hook), *(f"assumed: {a}" for a in fate.assumed))
    return Hop("rules", place, text, details, _unmatched(fate))


def _decided(fate: Fate, hook: str) -> Iterator[str]:
    """The rules that matched at a hook, in order."""
    for passed in fate.passes:
        if passed.hook == hook:
            yield from _steps(passed)


def _all_decided(fate: Fate | None) -> tuple[str, ...]:
    if fate is None:
        return ()
    return tuple(line for p in fate.passes for line in _steps(p, policies=False))


def _steps(passed: Pass, *, policies: bool = True) -> Iterator[str]:
    """What matched at a hook; a jump that led to nothing says so."""
    met = [s for s in passed.steps if s.matched]
    for step, after in zip_longest(met, met[1:]):
        if not (policies and _worth(step)) and step.rule is None:
            continue
        word, _, chain = step.effect.partition(" ")
        inside = after is not None and after.rule is not None and (after.table, after.chain) == (step.table, chain)
        empty = word in ("jump", "goto") and not inside
        yield _step(step) + (f"  [no rule of {chain} matches]" if empty else "")


def _worth(step: Step) -> bool:
    """A policy is worth a line in the table that could have changed something."""
    return step.rule is not None or step.base.kind == "nat" or step.base.policy == "drop"


def _step(step: Step) -> str:
    position = f" {step.rule.position}" if step.rule is not None else ""
    effect = f"  [{step.effect}]" if step.effect and not step.effect.startswith(("jump", "goto")) else ""
    return f"{step.table.name} {step.chain}{position}: {step.text}{effect}"


def _unmatched(fate: Fate) -> tuple[str, ...]:
    return tuple(
        f"{p.hook} {s.table.name} {s.chain} {s.rule.position}: {s.rule.text}: "
        + "; ".join(f"{text} ({found})" for text, found in s.failed)
        for p in fate.passes
        for s in p.steps
        if not s.matched and s.rule is not None
    )


def _envoy(journey: Journey) -> Iterator[Hop]:
    decision = journey.decision
    assert decision is not None
    place = journey.reached or journey.start
    why = tuple(f"{p.what} {p.name or '(unnamed)'}: {p.why}" for p in decision.passed)
    chain = decision.filter_chain or ("none" if decision.flags == "NR" and not decision.http else "(unnamed)")
    heard = f"hears {decision.detected}" + (", ends its TLS" if decision.tls else "")
    chains = tuple(w for w in why if w.startswith("filter chain"))
    yield Hop("listener", place, f"listener {decision.listener}, filter chain {chain}", (heard,), chains)
    if decision.http and decision.route is not None:
        route = decision.route_name or "(unnamed)"
        text = f"route configuration {decision.route}: virtual host {decision.virtual_host or 'none'}, route {route}"
        yield Hop("route", place, text, (), tuple(w for w in why if not w.startswith("filter chain")))
    if decision.cluster is not None and (decision.upstream is not None or decision.flags != "-"):
        yield Hop("cluster", place, f"cluster {decision.cluster}", _cluster_details(decision, journey))
    if decision.upstream is None or journey.endpoint is None:
        ends = f"answers {decision.answer}" if decision.answer is not None else "closes the connection"
        ends = "waits for bytes that do not come" if decision.waits else ends
        if decision.doubts and decision.answer is None and not decision.closed:
            ends = "undecided"
        yield Hop(
            "envoy",
            place,
            f"Envoy {ends}, flags {journey.flags or '-'}",
            tuple(filter(None, (journey.details, *decision.doubts))),
        )


def _cluster_details(decision: Decision, journey: Journey) -> tuple[str, ...]:
    found: list[str] = []
    upstream = decision.upstream
    if upstream is None:
        return ("no healthy endpoint",) if decision.flags == "UH" else ()
    found.append(
        f"type {upstream.kind}, {len(upstream.endpoints)} endpoint{'s' if len(upstream.endpoints) != 1 else ''}"
    )
    if journey.endpoint is not None:
        tls = journey.endpoint.tls
        spoken = f"TLS, SNI {tls.sni or 'none'}, ALPN {','.join(tls.alpn) or 'none'}" if tls else "plain text"
        found.append(f"endpoint {journey.endpoint} ({spoken})")
    source = upstream.source(journey.endpoint.address) if journey.endpoint else ""
    if source:
        found.append(f"its connection comes from {source}")
    return tuple(found)


def _program(journey: Journey) -> Hop:
    place = journey.reached or journey.start
    if journey.packet.proto in (1, 58):
        return Hop("kernel", place, "the kernel answers the echo request")
    if journey.result == "refused":
        return Hop("program", place, f"nothing listens on port {journey.port or journey.packet.dport}")
    said = f"a program ({journey.speaks}) on port {journey.port}" if journey.speaks else f"port {journey.port}"
    answer = f"answers {journey.status}" if journey.status is not None else f"ends it: {journey.result}"
    if journey.result == "ok" and journey.status is None:
        answer = "answers"
    details = (f"it sees {journey.peer} as its peer",) if journey.peer else ()
    return Hop("program", place, f"{said} {answer}", details)


def text(
    verdict: Verdict, journeys: Sequence[Journey], questions: Sequence[Question], *, why: bool = False
) -> Iterator[str]:
    """All of it for a terminal, one line after the other."""
    yield sentence(verdict, journeys)
    for number, hop in enumerate(hops(journeys[0] if journeys else None, questions), 1):
        yield f"{number:3}. {hop.kind:8} {hop.place}: {hop.text}"
        for line in hop.details:
            yield f"       {line}"
        if why:
            for line in hop.why:
                yield f"       - {line}"
    if len(journeys) > 1:
        yield f"{len(journeys)} courses are possible:"
        for journey in journeys:
            yield f"  {_course(journey)}"


def _course(journey: Journey) -> str:
    where = []
    if journey.decision is not None and journey.decision.cluster:
        where.append(journey.decision.cluster)
    if journey.endpoint is not None:
        where.append(str(journey.endpoint))
    where.append(journey.last.reached or "nowhere")
    assumed = f" if {'; '.join(journey.doubts)}" if journey.doubts else ""
    status = f" {journey.status}" if journey.status is not None else ""
    return f"{journey.chance:6.1%}  {' -> '.join(where)}: {journey.result}{status}{assumed}"


def brief(hop: Hop) -> Hop:
    """A hop without what was passed by."""
    return hop._replace(why=())

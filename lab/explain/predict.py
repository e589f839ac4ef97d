"""From followed journeys to the verdict: the same type that a probe fills by observation. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from lab.explain.journey import Journey
from lab.explain.packet import loopback
from lab.explain.ruleset import Reject
from lab.explain.ruleset import Verdict as Word
from lab.explain.walk import Fate, Step
from lab.verdict import Dns, Envoy, Forwarded, From, Inbound, Outbound, Outcome, Rule, Tls, To, Verdict, Wire

TLS_VERSION = "TLSv1.3"
"""What two Envoys of one mesh agree on: both offer 1.2 and 1.3."""

_BUILT_IN: Mapping[str, str] = {
    "prerouting": "PREROUTING",
    "input": "INPUT",
    "forward": "FORWARD",
    "output": "OUTPUT",
    "postrouting": "POSTROUTING",
}


class Question(NamedTuple):
    """One DNS question and what became of it. ``fate`` is that of its packet; ``forwarded`` of the agent's own."""

    name: str
    type: str
    server: str
    fate: Fate
    port: int | None
    answered_by: str | None
    rcode: str | None
    answers: tuple[str, ...]
    forwarded: Fate | None = None
    error: str | None = None
    doubts: tuple[str, ...] = ()


class Flow(NamedTuple):
    """What was asked: the two ends as the verdict names them. ``timeout`` in seconds; ``observed``: the source is a pod;
    ``several``: the host has addresses of which any may be taken."""

    source: From
    to: To
    test: str = ""
    timeout: float = 5.0
    observed: bool = True
    is_lookup: bool = False
    pods: frozenset[str] = frozenset()
    several: bool = False


def deciding(fate: Fate, hook: str) -> Rule | None:
    """The rule that decided at a hook, as `lab.trace.rules.decide` finds it in the kernel's own report.

    The last rule of the nat table that matched and ended a chain; a rule of any table that dropped the packet goes first; in
    ``prerouting`` without one, that of mangle. None decided: the policy.
    """
    passed = next((p for p in fate.passes if p.hook == hook), None)
    if passed is None:
        return None
    met = [s for s in passed.steps if s.matched]
    family = passed.before.family
    nat = [s for s in met if s.base.kind == "nat"]
    dropped = next((s for s in reversed(met) if _drops(s)), None)
    if dropped is not None:
        return rule(dropped)
    mangle = [s for s in met if s.base.kind != "nat" and "mangle" in s.table.name] if hook == "prerouting" else []
    for steps in (nat, mangle):
        decided = next((s for s in reversed(steps) if s.decided), None)
        if decided is not None:
            return rule(decided)
    if nat:
        return rule(nat[-1]) if nat[-1].rule is None else _policy(nat[-1])
    name = _BUILT_IN[hook]
    return Rule(family, None, "nat", name, None, f"-P {name} ACCEPT")


def _drops(step: Step) -> bool:
    if step.rule is None:
        return False
    return any(isinstance(p, Reject) or (isinstance(p, Word) and p.kind == "drop") for p in step.rule.parts)


def rule(step: Step) -> Rule:
    """The contract's form of a step."""
    if step.rule is None:
        return _policy(step)
    table = step.table
    return Rule(table.family, table.backend, table.name, step.rule.chain, step.rule.position, step.rule.text)


def _policy(step: Step) -> Rule:
    return Rule(step.table.family, step.table.backend, step.table.name, step.chain, None, step.base.shown)


def verdict(
    flow: Flow,
    journeys: Sequence[Journey],
    questions: Sequence[Question] = (),
    expected: Mapping[str, Any] | None = None,
    unresolved: str | None = None,
) -> Verdict:
    """The predicted verdict of a flow; what its possible courses do not agree on is None and named in ``undecided``.

    Args:
        journeys: all courses of the connection; none for a lookup, or for a name without an address.
        questions: the lookups before it, in order; the last one answered.
        unresolved: why the host's name has no address.
    """
    dns = _dns(questions)
    doubts = [d for q in questions for d in q.doubts]
    if not journeys:
        outcome = _lookup_outcome(questions) if flow.is_lookup else None
        if unresolved is not None:
            outcome = Outcome("unreachable", error=unresolved)
        outbound = _outbound_of_question(questions[-1]) if flow.is_lookup and questions and flow.observed else None
        wire = Wire(left_pod=_question_left(questions[-1]), seen_at="node") if flow.is_lookup and questions else None
        if unresolved is not None and not flow.is_lookup:
            wire = None
        parts = [Verdict("", "predicted", flow.source, flow.to, outcome, dns=dns, outbound=outbound, wire=wire)]
    else:
        parts = [_one(flow, journey, dns) for journey in journeys]
        doubts += [d for j in journeys if j.result == "unknown" or len(journeys) > 1 for d in j.doubts]
    merged, differing = _merge(parts)
    undecided = list(dict.fromkeys(doubts)) if differing or merged.outcome is None else []
    if differing and len(journeys) > 1 and not undecided:
        undecided = [_by_chance(journeys)]
    if flow.is_lookup and questions and questions[-1].doubts:
        undecided = list(questions[-1].doubts)
    return dataclasses.replace(
        merged, test=flow.test, evidence=_sources(merged), expected=dict(expected or {}), undecided=tuple(undecided)
    )


def _one(flow: Flow, journey: Journey, dns: Dns | None) -> Verdict:
    captured = journey.captured_at_start
    out = None
    if flow.observed:
        found = deciding(journey.sent, "output") if journey.sent else None
        out = Outbound(captured, journey.port if captured else None, found)
        if journey.sent is not None and journey.sent.end == "undecided":
            out = Outbound(None, None, None)
    by_envoy = journey if captured and journey.decision is not None and journey.decision.logged else None
    far = journey.next if captured else journey
    told = journey.peer is not None and (flow.to.protocol != "grpc" or journey.last.speaks == "grpc")
    inbound = _inbound(flow, far, captured, told) if far is not None else None
    return Verdict(
        test=flow.test,
        proof="predicted",
        source=flow.source,
        to=dataclasses.replace(flow.to, address=journey.packet.dst) if flow.several else flow.to,
        outcome=_outcome(flow, journey),
        dns=dns,
        outbound=out,
        envoy=_envoy(by_envoy) if by_envoy else None,
        inbound=inbound,
        tls=_tls(journey if captured else None, far),
        wire=_wire(journey),
        far_side=_far_side(journey) if told else None,
    )


def _far_side(journey: Journey) -> dict[str, Any] | None:
    """What the program at the end would report of the flow, as far as paper knows it."""
    last = journey.last
    fate = last.received or last.sent
    if last.served is None or not last.served.told or fate is None or last.reached is None or journey.peer is None:
        return None
    name = last.reached.removeprefix("ext-")
    found: dict[str, Any] = {
        "app": name.partition(".")[0],
        "pod": name,
        "peer": {"address": journey.peer},
        "local": {"address": fate.packet.dst, "port": fate.packet.dport},
    }
    if last.request is not None and last.speaks in ("http", "https", "auto", "grpc"):
        found |= {"method": last.request.method, "path": last.request.path, "host": last.request.authority}
    return found


def _envoy(journey: Journey) -> Envoy:
    decision = journey.decision
    assert decision is not None
    return Envoy(
        listener=decision.listener,
        filter_chain=decision.filter_chain,
        route=decision.route,
        virtual_host=decision.virtual_host,
        route_name=decision.route_name,
        cluster=decision.cluster,
        endpoint=str(journey.endpoint) if journey.endpoint else None,
        response_flags=journey.flags,
        details=journey.details,
        upstream=_upstream(journey.next),
    )


def _upstream(onward: Journey | None) -> Outbound | None:
    if onward is None or onward.sent is None or onward.sent.end == "undecided":
        return None
    captured = onward.captured_at_start and onward.sent.packet.tproxy is None
    return Outbound(captured, onward.port if captured else None, deciding(onward.sent, "output"))


def _inbound(flow: Flow, far: Journey, captured_before: bool, answered: bool) -> Inbound | None:
    if far.reached is None or far.reached not in flow.pods or (far.local and loopback(far.packet.dst)):
        return None
    fate, hook = (far.sent, "output") if far.local else (far.received, "prerouting")
    if far.local and fate is not None and fate.packet.tproxy is not None:
        hook = "prerouting"
    if fate is None:
        return None
    if captured_before and far.local and not far.captured:
        return None  # the proxy's own helper, e.g. its DNS server
    decision = far.decision if far.captured and far.decision is not None and far.decision.logged else None
    return Inbound(
        pod=far.reached,
        captured=far.captured,
        redirected_to=far.port if far.captured else None,
        rule=deciding(fate, hook),
        listener=decision.listener if decision else None,
        filter_chain=decision.filter_chain if decision else None,
        cluster=decision.cluster if decision else None,
        peer_seen_by_app=far.peer if answered and far.last.reached == far.reached else None,
        route=decision.route if decision else None,
        route_name=decision.route_name if decision else None,
        endpoint=str(far.endpoint) if decision and far.endpoint else None,
        response_flags=far.flags if decision else None,
        details=far.details if decision else None,
    )


def _tls(near: Journey | None, far: Journey | None) -> Tls:
    server = far.decision if far is not None and far.captured else None
    ended = server is not None and server.tls
    client = near.endpoint.tls if near is not None and near.endpoint is not None else None
    spoken = client is not None and near is not None and not (near.details or "").startswith("the server")
    identity = None
    if near is not None and spoken and ended and far is not None:
        identity = far.identity or None
    return Tls(
        TLS_VERSION if ended else None, TLS_VERSION if spoken and (ended or _answers_tls(far)) else None, identity
    )


def _answers_tls(far: Journey | None) -> bool:
    return far is not None and far.last.speaks in ("https", "tls") and far.last.result == "ok"


def _wire(journey: Journey) -> Wire | None:
    left = _left(journey)
    return Wire(left_pod=left, seen_at="node") if left is not None else None


def _left(journey: Journey) -> bool | None:
    """Whether the flow, or what a proxy that captured it makes of it, leaves the place where it began."""
    now: Journey | None = journey
    while now is not None and now.start == journey.start:
        if now.sent is not None and now.sent.end == "undecided":
            return None
        if now.sent is not None and now.sent.end == "left":
            return True
        now = now.next if now.captured else None
    return None if journey.result == "unknown" and journey.next is None and journey.decision is not None else False


def _outcome(flow: Flow, journey: Journey) -> Outcome | None:
    result = journey.result
    if result == "unknown":
        return None
    if result == "loop":
        return Outcome("timeout", error="the proxy gets its own connection back, again and again")
    if result == "timeout" or result == "silence" or journey.delay >= flow.timeout:
        return Outcome("timeout")
    if result == "tls-refused" or result == "reset" or result == "stream-reset":
        return Outcome("closed")
    if result == "ok":
        status, grpc = journey.status, journey.grpc_status
        if not _understood(flow, journey):
            served = journey.last.served
            return Outcome("closed" if served is not None and served.ends else "timeout")
        if flow.to.protocol in ("http", "tls") and status is None and journey.peer is None:
            return Outcome("closed")  # after bytes that are no answer
        failed = (status is not None and status >= 400) or (flow.to.protocol == "grpc" and grpc != 0)
        return Outcome("http-error" if failed else "ok", status, grpc_status=grpc)
    return Outcome(result)


def _understood(flow: Flow, journey: Journey) -> bool:
    """Whether the answer is one that the client can read: a gRPC client goes on waiting for frames behind bytes that are none."""
    return flow.to.protocol != "grpc" or journey.status is not None


def _dns(questions: Sequence[Question]) -> Dns | None:
    if not questions:
        return None
    last = questions[-1]
    forwarded = None
    if last.forwarded is not None:
        passed = last.forwarded.passes[0].before
        forwarded = Forwarded(
            server=passed.dst,
            captured=False,
            zone=last.forwarded.packet.zone or 0,
            rule=deciding(last.forwarded, "output"),
        )
    captured = last.port is not None
    known = last.fate.end != "undecided"
    return Dns(
        captured=captured if known else None,
        redirected_to=last.port,
        answered_by=last.answered_by,
        answers=last.answers if last.rcode is not None else None,
        rule=deciding(last.fate, "output"),
        server=last.server,
        name=last.name.rstrip("."),
        rcode=last.rcode,
        zone=(last.fate.packet.zone or 0) if known else None,
        forwarded=forwarded,
    )


def _lookup_outcome(questions: Sequence[Question]) -> Outcome | None:
    if not questions:
        return None
    last = questions[-1]
    if last.doubts:
        return None
    if last.rcode is None:
        return Outcome(last.error or "no-answer")  # type: ignore[arg-type]
    if last.rcode == "NOERROR" and last.answers:
        return Outcome("ok")
    return Outcome("no-answer", error=last.rcode if last.rcode != "NOERROR" else "no such record")


def _outbound_of_question(question: Question) -> Outbound:
    captured = question.port is not None
    return Outbound(captured, question.port, deciding(question.fate, "output"))


def _question_left(question: Question) -> bool:
    return question.fate.end == "left" or question.forwarded is not None


CHANCE = "by chance"


def _by_chance(journeys: Sequence[Journey]) -> str:
    """Between what weights and load balancers choose."""
    ends = dict.fromkeys(
        " at ".join(filter(None, (j.decision.cluster if j.decision else None, str(j.endpoint) if j.endpoint else None)))
        or j.last.reached
        or "?"
        for j in journeys
    )
    return f"{CHANCE} one of {', '.join(ends)}"


T = TypeVar("T")


def _merge(parts: Sequence[Verdict]) -> tuple[Verdict, list[str]]:
    """What all agree on, and the keys on which they do not."""
    differing: list[str] = []
    first = parts[0]
    if len(parts) == 1:
        return first, []
    changes: dict[str, Any] = {}
    for name in ("to", "outbound", "envoy", "inbound", "tls", "wire", "outcome", "far_side"):
        values = [getattr(p, name) for p in parts]
        changes[name] = _agreed(values, name, differing)
    return dataclasses.replace(first, **changes), differing


def _agreed(values: Sequence[Any], path: str, differing: list[str]) -> Any:
    if all(v == values[0] for v in values[1:]):
        return values[0]
    kinds = {type(v) for v in values}
    if len(kinds) == 1 and dataclasses.is_dataclass(values[0]) and not isinstance(values[0], Rule | Outcome):
        return dataclasses.replace(
            values[0],  # type: ignore[type-var]
            **{
                f.name: _agreed([getattr(v, f.name) for v in values], f"{path}.{f.name}", differing)
                for f in dataclasses.fields(values[0])
            },
        )
    differing.append(path)
    return None


def _sources(verdict: Verdict) -> dict[str, str]:
    """Where each key of a prediction comes from."""
    found: dict[str, str] = {}
    if verdict.dns is not None:
        found["dns"] = "rules" if verdict.dns.answered_by is None else "rules, names"
    if verdict.outbound is not None:
        found["outbound"] = "rules"
    if verdict.envoy is not None:
        found["envoy"] = "xds"
    if verdict.inbound is not None:
        found["inbound"] = "rules, xds" if verdict.inbound.listener else "rules"
    if verdict.tls != Tls():
        found["tls"] = "xds"
    if verdict.wire is not None:
        found["wire"] = "rules"
    if verdict.outcome is not None:
        found["outcome"] = "journey"
    return found


def distribution(journeys: Iterable[Journey]) -> list[dict[str, Any]]:
    """The courses as plain data, each with its chance: where the flow is not the same every time."""
    found: dict[tuple[Any, ...], float] = {}
    for j in journeys:
        cluster = j.decision.cluster if j.decision else None
        endpoint = str(j.endpoint) if j.endpoint else None
        reached = j.last.reached
        key = (cluster, endpoint, reached, j.result, j.status)
        found[key] = found.get(key, 0.0) + j.chance
    names = ("cluster", "endpoint", "reached", "result", "status")
    return [{**dict(zip(names, key, strict=True)), "chance": round(chance, 6)} for key, chance in found.items()]

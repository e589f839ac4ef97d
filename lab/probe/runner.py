"""Runs TrafficTests on a running lab and gives a verdict for each."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lab.errors import InputError, LabError, ObservationError
from lab.fabric import paths
from lab.manifests.model import Mesh, TrafficTest
from lab.probe import evidence_log, expect, join
from lab.probe.crew import Launched, Where
from lab.probe.evidence_log import EnvoyLine
from lab.probe.flights import Flight
from lab.probe.ground import Ground, open_ground
from lab.probe.join import Facts, Far
from lab.probe.journal import Line
from lab.probe.orders import Order, Sent
from lab.probe.wire import Seen
from lab.trace.client import Sighting
from lab.trace.flows import Flow
from lab.trace.index import Entry
from lab.trace.rules import Listing
from lab.verdict import From, To, Verdict

T = TypeVar("T")

_AT_ONCE = 8
_FENCE = 2.0  # seconds until a fence counts as lost
_LINE = (0.5, 2.0)  # seconds until Envoy's line counts as missing; it is written within a millisecond of a flow's end

_NEEDS = {
    "trace": ("rule",),
    "legacy": ("rule",),
    "conntrack": ("captured", "redirected_to", "zone", "answered_by"),
    "wire": ("wire",),
}
"""Kinds of evidence, and the parts of a verdict that come from them alone."""


def run_tests(
    name: str,
    mesh: Mesh,
    tests: Sequence[TrafficTest],
    *,
    on_verdict: Callable[[Verdict], None] | None = None,
    at_once: int = _AT_ONCE,
    launched: Launched | None = None,
) -> list[Verdict]:
    """Runs tests on the running lab ``name``; verdicts in the order of the tests.

    Args:
        on_verdict: called with each verdict as soon as it is there (from another thread if a loop is running here).
        at_once: how many flows may be under way; those of one pod to one host never are at the same time.
        launched: driver and judge, if they were started earlier (`lab.probe.crew.launch`); they are ended.

    Raises:
        InputError: no such lab, or a test names a place that it does not have.
        ObservationError: those who watch do not answer.
    """
    return _outside_of_loops(run(name, mesh, tests, on_verdict=on_verdict, at_once=at_once, launched=launched))


async def run(
    name: str,
    mesh: Mesh,
    tests: Sequence[TrafficTest],
    *,
    on_verdict: Callable[[Verdict], None] | None = None,
    at_once: int = _AT_ONCE,
    launched: Launched | None = None,
) -> list[Verdict]:
    """`run_tests` for callers with an event loop."""
    ground = await open_ground(name, mesh, [t.flow_from for t in tests], launched)
    return await run_on(ground, tests, on_verdict=on_verdict, at_once=at_once)


async def run_on(
    ground: Ground,
    tests: Sequence[TrafficTest],
    *,
    on_verdict: Callable[[Verdict], None] | None = None,
    at_once: int = _AT_ONCE,
) -> list[Verdict]:
    """Runs tests on an opened ground, and closes it. Arguments and errors as of `run_tests`."""
    places = asyncio.Semaphore(at_once)
    alone: defaultdict[tuple[object, str], asyncio.Lock] = defaultdict(asyncio.Lock)

    async def one(test: TrafficTest) -> Verdict:
        # Two flows from one pod to one host could be taken for each other on the wire, where only addresses are seen.
        async with alone[(ground.source(test.flow_from).place, test.to.host)], places:
            verdict = await _attempts(ground, test)
        if on_verdict is not None:
            on_verdict(verdict)
        return verdict

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(t)) for t in tests]
        return [t.result() for t in tasks]
    except* LabError as errors:
        raise errors.exceptions[0] from None
    finally:
        await ground.close()


async def _attempts(ground: Ground, test: TrafficTest) -> Verdict:
    for attempt in range(max(1, test.retry.attempts)):
        if attempt:
            await asyncio.sleep(test.retry.interval)
        verdict = await judge(ground, test)
        if verdict.passed is not False:
            break
    return verdict


async def judge(ground: Ground, test: TrafficTest) -> Verdict:
    """Runs one test once and compares."""
    began = time.monotonic()
    try:
        facts = await gather(ground, test)
    except ObservationError as e:
        return _unseen(test, str(e), time.monotonic() - began)
    facts = dataclasses.replace(facts, seconds=time.monotonic() - began)
    return compared(join.verdict(facts), missing_evidence(facts))


def compared(verdict: Verdict, missing: dict[str, str] | None = None) -> Verdict:
    """The verdict with ``passed`` set, by what its test expects.

    Args:
        missing: kinds of evidence that this kernel cannot give, with the reason; a difference in nothing but keys that need
            them is no failure: the test is skipped, and says why.
    """
    found = expect.differences(verdict.expected, verdict.to_dict())
    blind = {key: why for kind, why in (missing or {}).items() for key in _NEEDS.get(kind, ())}
    unseen = [path for path, _ in found if blind.keys() & set(path.split("."))]
    if found and len(unseen) == len(found):
        reasons = sorted({blind[key] for path in unseen for key in blind.keys() & set(path.split("."))})
        return dataclasses.replace(verdict, passed=None, skipped="; ".join(reasons))
    return dataclasses.replace(verdict, passed=not found, differences=tuple(expect.sentence(*d) for d in found))


async def gather(ground: Ground, test: TrafficTest) -> Facts:
    """Sends the flow of a test and collects what everybody saw of it.

    Raises:
        ObservationError: someone who watches does not answer.
    """
    source = ground.source(test.flow_from)
    with ground.flights.begin(source.place) as flight:
        return await _gather(ground, test, source, flight)


async def _gather(ground: Ground, test: TrafficTest, source: Where, flight: Flight) -> Facts:
    pod = source.place if source.place in ground.observed else None
    if pod is None and test.flow_from.pod:
        why = "the lab's observer has lost it"
        raise ObservationError("the pod is not observed", source.place, why, "Take the lab down and up again")
    marks = ground.marks()
    since = time.time()
    sent = await ground.crew.send(source, Order.of(test))
    fence = _fence(sent)
    flow = join.flow_of(sent)
    query = join.query_flow(sent.queries[-1]) if sent.queries else None
    same = query is not None and query == flow  # the test is a lookup
    flight.claim(flow, *(join.query_flow(q) for q in sent.queries))
    fenced = fence is not None and await ground.crew.fence_seen(source.place, fence[1], _FENCE)
    outbound = await _sighting(ground, pod, flow, fence)
    dns = outbound if same else await _sighting(ground, pod, query, fence)
    forwarded = await _forwarded(ground, pod, sent, query, since)
    addresses = ground.addresses(source.place)
    out = join.translate(outbound, flow, Listing(), addresses, "output") if flow else None
    captured = bool(out and out.captured)
    line = None
    # The kernel resets what answers a crafted SYN, so Envoy never sees a connection and has nothing to write.
    patience = 0.0 if test.to.crafted else min(max(test.timeout, _LINE[0]), _LINE[1])
    if pod and flow and out and captured and not same:
        line = await _line(ground, pod, flow, out.entry, marks, patience)
    further = None if same or flow is None else join.onward(line, flow, captured)
    flight.claim(further, forwarded[0] if forwarded else None)
    tried = None if further else join.tried(line)
    flight.tried.update({tried} if tried else ())
    flight.settled.set()
    upstream = await _sighting(ground, pod, further, fence) if captured else None
    seen = [s for s in (outbound, dns, forwarded[1] if forwarded else None, upstream) if s]
    listing = await ground.listing(source.place, [p for s in seen for p in s.packets]) if pod else Listing()
    far = await _far(ground, source, further, line, marks, patience) if further else None
    own = (flow, forwarded[0] if same and forwarded else further)
    wire = await _wire(ground, flight, since, *own, tried, lookup=same)
    if not wire and not fenced:
        wire = None  # that nothing was seen proves nothing then
    held = captured and line is None and not same and sent.result == "timeout"
    if not wire and held and (not test.to.silent or await _strays(ground, flight, since)):
        wire = None  # whose Envoy's connections were cannot be told before it writes its line
    return Facts(
        test=test,
        sent=sent,
        addresses=addresses,
        cluster_dns=ground.resolver,
        place=source.place,
        observed=pod is not None,
        dns=dns,
        forwarded=forwarded,
        outbound=outbound,
        listing=listing,
        line=line,
        upstream=upstream,
        far=far,
        wire=wire,
        wire_at=ground.routers.get(source.place, paths.NODE),
    )


def _fence(sent: Sent) -> tuple[Flow, str] | None:
    if sent.fence is None:
        return None
    f = sent.fence
    return Flow("udp", str(f["src"]), int(f["sport"]), str(f["dst"]), int(f["dport"])), str(f["token"])


async def _sighting(
    ground: Ground, place: str | None, flow: Flow | None, fence: tuple[Flow, str] | None
) -> Sighting | None:
    if place is None or flow is None:
        return None
    return await ground.observer.flow(
        place, flow.proto, flow.src, flow.sport, flow.dst, flow.dport, wait=_FENCE, fence=fence[0] if fence else None
    )


async def _forwarded(
    ground: Ground, pod: str | None, sent: Sent, query: Flow | None, since: float
) -> tuple[Flow, Sighting] | None:
    """The agent's own question for the last of the app's, and what the pod's kernel said of it."""
    if pod is None or query is None:
        return None
    flow = await ground.forwarded(pod, sent.queries[-1], query, since)
    sighting = await _sighting(ground, pod, flow, None)
    return (flow, sighting) if flow and sighting else None


async def _line(
    ground: Ground,
    pod: str,
    flow: Flow,
    entry: Entry | None,
    marks: dict[Path, int],
    wait: float,
    request_id: str | None = None,
) -> EnvoyLine | None:
    """What a pod's Envoy wrote of a captured flow; of one request, if its id is known, for a connection carries many."""
    path = ground.evidence_file(pod)
    if path not in marks:
        return None
    remote = evidence_log.written(*join.seen_by_envoy(flow, entry))

    def is_it(line: Line) -> bool:
        if line.get("downstream_remote") != remote:
            return False
        parsed = evidence_log.parse(line)
        # Of a connection that was not taken as HTTP, or not taken at all, there is one line and no id.
        return join.belongs(parsed, flow, entry) and (
            parsed.request_id is None or request_id in (None, parsed.request_id)
        )

    found = await ground.journal.find(path, is_it, marks[path], wait)
    return evidence_log.parse(found) if found else None


async def _far(
    ground: Ground, source: Where, flow: Flow, client: EnvoyLine | None, marks: dict[Path, int], patience: float
) -> Far | None:
    """What the pod that the flow reached saw of it; None if it went to no pod."""
    local = ground.pod_of(flow.dst) == source.place  # not by a service address that leads back to where it began
    if paths.NODE in ground.observed:
        at_node = await ground.observer.flow(paths.NODE, flow.proto, flow.src, flow.sport, flow.dst, flow.dport)
        flow = join.behind_node(flow, at_node.conntrack)
    pod = ground.pod_of(flow.dst)
    if pod is None:
        return None
    sighting = None
    listing = Listing()
    if pod in ground.observed:
        towards = await ground.fence_towards(pod)
        sighting = await _sighting(ground, pod, flow, (towards, "") if towards else None)
        if sighting:
            listing = await ground.listing(pod, sighting.packets)
    addresses = ground.addresses(pod)
    found = join.arrival(sighting, flow, listing, addresses, local=local)
    line = None
    if found.captured:
        request_id = client.request_id if client else None
        line = await _line(ground, pod, flow, found.entry, marks, patience, request_id)
    return Far(pod, flow, addresses, local, sighting, listing, line)


async def _wire(
    ground: Ground,
    flight: Flight,
    since: float,
    flow: Flow | None,
    further: Flow | None,
    tried: tuple[str, int] | None,
    *,
    lookup: bool,
) -> list[Seen] | None:
    """What left the source's link for this flow: its own packets, Envoy's (or the agent's) for it, and whatever else began
    to go to its destination (or where Envoy ``tried`` to connect) meanwhile and is nobody else's.

    Of a lookup only its own and the agent's question count: others ask the same server for reasons of their own.
    """
    if flow is None:
        return []
    own = dict.fromkeys(f for f in (flow, further) if f)
    which: list[dict[str, object]] = [{"outgoing": False, "since": since, **dataclasses.asdict(f)} for f in own]
    ends = [] if lookup else list(dict.fromkeys([(flow.dst, flow.dport), tried or (flow.dst, flow.dport)]))
    which += [{"outgoing": False, "since": since, "proto": flow.proto, "dst": dst, "dport": port} for dst, port in ends]
    found = await ground.crew.find(flight.place, which)
    found, others = found[: len(own)], [s for seen in found[len(own) :] for s in seen]
    begun = [s for s in others if s.flow not in own and s.first >= since and ("S" in s.flags or s.flow.proto != "tcp")]
    if begun:
        claimed = await ground.flights.of_others(flight)
        begun = [s for s in begun if s.flow not in claimed and not ground.explained(flight.place, s.flow)]
    return [s for seen in found for s in seen] + begun


async def _strays(ground: Ground, flight: Flight, since: float) -> bool:
    """Whether any connection left the source's link that nobody has claimed.

    For a client that sent nothing Envoy can only have opened a new one: to an endpoint that its line would name, and that
    line is written when the connection ends, which a server that hears of no end may never do.
    """
    fabric = ground.mesh.fabric
    (seen,) = await ground.crew.find(flight.place, [{"outgoing": False, "since": since, "proto": "tcp"}])
    own = {*flight.flows, *await ground.flights.of_others(flight)}
    tried = await ground.flights.tried_by_others(flight)
    begun = [s.flow for s in seen if s.first >= since and "S" in s.flags and s.flow not in own]
    return any(
        flow.dst not in (fabric.discovery, fabric.dns)
        and (flow.dst, flow.dport) not in tried
        and not ground.explained(flight.place, flow)
        for flow in begun
    )


def missing_evidence(facts: Facts) -> dict[str, str]:
    """Kinds of evidence that could not be had where this flow passed."""
    missing: dict[str, str] = {}
    if facts.wire is None:
        missing["wire"] = (
            f"the Envoy of {facts.place} still holds the connection and has written nothing of it"
            if facts.line is None and facts.sent.result == "timeout"
            else f"the fence after the flow was not seen on the link of {facts.place}"
        )
    for sighting in (facts.outbound, facts.dns, facts.far.sighting if facts.far else None):
        if sighting is not None:
            missing |= sighting.missing
            if not sighting.complete and sighting.lost:
                missing["trace"] = missing["conntrack"] = f"the kernel dropped events ({sighting.lost} overruns)"
    return missing


def _unseen(test: TrafficTest, why: str, seconds: float) -> Verdict:
    flow_from = test.flow_from
    return Verdict(
        test=test.meta.name,
        proof="observed",
        source=From(flow_from.pod or None, flow_from.uid, flow_from.external or None, flow_from.spoof or None),
        to=To(test.to.host, None, test.to.port, test.to.protocol),
        outcome=None,
        expected=test.expect,
        skipped=why,
        seconds=round(seconds, 3),
    )


def _outside_of_loops(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end, in a thread of its own if this one has a running loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    result: list[T] = []
    error: list[BaseException] = []

    def in_thread() -> None:
        try:
            result.append(asyncio.run(work))
        except BaseException as e:
            error.append(e)

    thread = threading.Thread(target=in_thread, name="probe")
    thread.start()
    thread.join()
    if error:
        raise error[0]
    return result[0]


def select(tests: Sequence[TrafficTest], only: str | None) -> list[TrafficTest]:
    """The tests whose name matches a glob.

    Raises:
        InputError: none does.
    """
    import difflib
    from fnmatch import fnmatchcase

    chosen = [t for t in tests if only is None or fnmatchcase(t.meta.name, only)]
    if chosen:
        return chosen
    if not tests:
        raise InputError("nothing to run", why="the manifests have no TrafficTest", next_step="Write one.")
    names = [t.meta.name for t in tests]
    word = (only or "").strip("*?")
    near = [n for n in names if word and word in n] or difflib.get_close_matches(word, names, 3)
    some = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    hint = f"Did you mean {' or '.join(near[:3])}?" if near else f"The names are: {some}."
    raise InputError("nothing to run", why=f'no test has a name that matches "{only}"', next_step=hint)

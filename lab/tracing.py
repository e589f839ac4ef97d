"""``lab trace``: one real flow in a running lab, and every hop of it with its evidence.

The flow is sent and judged by the machinery of ``lab verify`` (`lab.probe.runner`); what is added is asked of the same observer and
of the proxies' own configuration. Nothing stays planted: the observer of each pod runs as long as the lab does, packets report the
node's rules as long as the connection to the observer lasts, and driver and judge are processes that end with the channel to
this one, however it ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lab import lifecycle, proxyconfig
from lab.asking import Question, as_test
from lab.errors import LabError, ObservationError
from lab.explain import telling
from lab.fabric import paths
from lab.probe import hops as told
from lab.probe import join, names, runner
from lab.probe.ground import open_ground
from lab.trace.rules import Listing
from lab.verify import alone

if TYPE_CHECKING:
    from lab.manifests.model import Mesh, TrafficTest
    from lab.probe.ground import Ground
    from lab.probe.hops import Hop, More
    from lab.probe.join import Facts
    from lab.trace.client import Sighting
    from lab.trace.flows import Flow
    from lab.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Traced:
    """A flow with all that was seen of it. ``missing``: kinds of evidence that could not be had, and why."""

    lab: str
    verdict: Verdict
    hops: tuple[Hop, ...]
    missing: Mapping[str, str]

    @property
    def exit_code(self) -> int:
        """0: the flow was followed to its end, whatever that is; 3: something of it could not be observed."""
        return ObservationError.exit_code if self.missing else 0

    @property
    def sentence(self) -> str:
        return telling.sentence(self.verdict)

    def to_json(self) -> dict[str, Any]:
        """The verdict's object with ``lab``, ``sentence``, ``hops`` and ``missing`` added."""
        return {
            "lab": self.lab,
            "sentence": self.sentence,
            **self.verdict.to_dict(),
            "hops": [hop.to_json() for hop in self.hops],
            "missing": dict(self.missing),
        }

    def lines(self) -> Iterator[str]:
        """For a terminal; the first line is the verdict in one sentence."""
        yield self.sentence
        yield from told.lines(self.hops)
        yield from (f"not observed: {kind}: {why}" for kind, why in self.missing.items())


def trace(name: str, question: Question, *, timeout: float, log: Callable[[str], None]) -> Traced:
    """Sends the flow in the running lab ``name`` and tells what became of it.

    Args:
        timeout: seconds for the whole flow: lookup, connection and answer.
        log: gets a line when something takes its time.

    Raises:
        InputError: no such lab, pod or external host, or nothing sensible was typed.
        ObservationError: those who watch do not answer.
    """
    mesh = lifecycle.stored_mesh(name)
    test = as_test(mesh, question, "trace", timeout)
    with alone(name, log):
        return asyncio.run(_trace(name, mesh, test))


async def _trace(name: str, mesh: Mesh, test: TrafficTest) -> Traced:
    ground = await open_ground(name, mesh, [test.flow_from], trace_node=True)
    try:
        began = time.monotonic()
        facts = await runner.gather(ground, test)
        facts = replace(facts, seconds=time.monotonic() - began)
        more = await _more(name, ground, facts)
    finally:
        await ground.close()
    verdict = join.verdict(facts)
    return Traced(name, verdict, tuple(told.hops(facts, verdict, more)), runner.missing_evidence(facts))


async def _more(name: str, ground: Ground, facts: Facts) -> More:
    """What a reader wants to see beyond the verdict's facts."""
    here = facts.place if facts.place in ground.observed else None
    flow = join.flow_of(facts.sent)
    on = None
    if flow is not None and facts.test.to.protocol not in ("dns", "dns-tcp"):
        captured = join.translate(facts.outbound, flow, facts.listing, facts.addresses, "output").captured
        tried = join.tried(facts.line) if captured else None
        on = join.onward(facts.line, flow, captured) or next(
            (seen.flow for seen in facts.wire or () if (seen.flow.dst, seen.flow.dport) == tried), None
        )
    far = facts.far
    to_app = join.onward(far.line, None, True) if far and far.line else None
    node = await _seen(ground, paths.NODE if paths.NODE in ground.observed else None, on)
    client, server = await asyncio.gather(
        asyncio.to_thread(_config, ground.mesh, name, facts.place),
        asyncio.to_thread(_config, ground.mesh, name, far.pod if far and far.line else None),
    )
    return told.More(
        names=names.of(ground.mesh),
        course=await ground.observer.flow(here, flow.proto, flow.src, flow.sport) if here and flow else None,
        questions=[await _seen(ground, here, join.query_flow(query)) for query in facts.sent.queries[:-1]],
        node=node,
        node_rules=await ground.listing(paths.NODE, node.packets) if node is not None else Listing(),
        app=await _seen(ground, far.pod if far and far.pod in ground.observed else None, to_app),
        client=client,
        server=server,
    )


async def _seen(ground: Ground, place: str | None, flow: Flow | None) -> Sighting | None:
    if place is None or flow is None:
        return None
    return await ground.observer.flow(place, flow.proto, flow.src, flow.sport, flow.dst, flow.dport)


def _config(mesh: Mesh, lab: str, place: str | None) -> Mapping[str, Any] | None:
    """The configuration of a place's proxy; None if it has none, or does not tell."""
    pod = mesh.pod(place) if place else None
    if pod is None or not pod.injected:
        return None
    with suppress(LabError):
        return proxyconfig.from_proxy(lab, pod.name, "all")
    return None

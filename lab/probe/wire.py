"""What the judge saw on one link, found again by flow. Pure: no sockets, no scapy."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from lab.trace.flows import Flow


@dataclass(slots=True)
class Seen:
    """Packets of one flow in one direction: ``outgoing`` from the router to the place. Times are seconds since the epoch."""

    flow: Flow
    outgoing: bool
    first: float
    last: float
    count: int = 1
    flags: str = ""


class Link:
    """What passed one interface, the newest ``limit`` flows."""

    def __init__(self, limit: int = 20_000) -> None:
        self._limit = limit
        self._seen: OrderedDict[tuple[Flow, bool], Seen] = OrderedDict()
        self.fences: OrderedDict[str, float] = OrderedDict()

    def add(self, flow: Flow, outgoing: bool, when: float, flags: str = "") -> None:
        """Takes one packet; ``flags`` are TCP's, collected."""
        seen = self._seen.get((flow, outgoing))
        if seen is None:
            self._seen[(flow, outgoing)] = Seen(flow, outgoing, when, when, flags=flags)
            if len(self._seen) > self._limit:
                self._seen.popitem(last=False)
            return
        self._seen.move_to_end((flow, outgoing))
        seen.last = when
        seen.count += 1
        seen.flags += "".join(f for f in flags if f not in seen.flags)

    def add_fence(self, token: str, when: float) -> None:
        self.fences[token] = when
        if len(self.fences) > self._limit:
            self.fences.popitem(last=False)

    def find(
        self,
        *,
        since: float = 0.0,
        outgoing: bool | None = None,
        proto: str | None = None,
        src: str | None = None,
        sport: int | None = None,
        dst: str | None = None,
        dport: int | None = None,
    ) -> list[Seen]:
        """Flows with a packet after ``since`` that match all that is given, in the order of their first packet."""
        wanted = {"proto": proto, "src": src, "sport": sport, "dst": dst, "dport": dport}
        asked = {k: v for k, v in wanted.items() if v is not None}
        found = [
            s
            for s in self._seen.values()
            if s.last >= since
            and outgoing in (None, s.outgoing)
            and all(getattr(s.flow, k) == v for k, v in asked.items())
        ]
        return sorted(found, key=lambda s: s.first)

"""Who sent what: flows under way at the same time from the same place must not be taken for each other's.

The judge sees addresses, not causes. A packet to a test's destination belongs to that test unless another one claims it, so a
test that wonders about a packet waits until those beside it have claimed theirs. Claiming never waits, hence nobody waits
for each other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from lab.trace.flows import Flow

_REMEMBERED = 1000


@dataclass(eq=False)
class Flight:
    """One test under way. ``settled`` once it knows all flows that are its own.

    ``tried``: where its Envoy tried in vain to connect, by flows whose own ports nobody told.
    """

    place: str
    flows: set[Flow] = field(default_factory=set)
    tried: set[tuple[str, int]] = field(default_factory=set)
    settled: asyncio.Event = field(default_factory=asyncio.Event)

    def claim(self, *flows: Flow | None) -> None:
        self.flows.update(f for f in flows if f is not None)


class Flights:
    """All tests of a run, those under way and the latest that are over."""

    def __init__(self) -> None:
        self._known: deque[Flight] = deque(maxlen=_REMEMBERED)

    @contextmanager
    def begin(self, place: str) -> Iterator[Flight]:
        """A test that sends from ``place``; it is settled at the latest when the block ends."""
        flight = Flight(place)
        self._known.append(flight)
        try:
            yield flight
        finally:
            flight.settled.set()

    async def of_others(self, own: Flight) -> set[Flow]:
        """What the other tests at the same place have claimed, once all that are under way now have."""
        others = [f for f in self._known if f is not own and f.place == own.place]
        for flight in others:
            await flight.settled.wait()
        return set().union(*(f.flows for f in others))

    async def tried_by_others(self, own: Flight) -> set[tuple[str, int]]:
        """Where the others' Envoy tried in vain to connect; as `of_others`."""
        await self.of_others(own)
        return set().union(*(f.tried for f in self._known if f is not own and f.place == own.place))

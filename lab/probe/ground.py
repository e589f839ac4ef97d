"""Where the tests of one lab take place: its places, and the connections to those who watch them."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from lab.errors import InputError, LabError
from lab.fabric import paths, plan, record
from lab.manifests.model import FlowFrom, Mesh
from lab.probe import evidence_log
from lab.probe.crew import Crew, Launched, Where, launch
from lab.probe.flights import Flights
from lab.probe.journal import Journal, Line
from lab.probe.orders import Order, Query, Sent
from lab.probe.wire import Seen
from lab.runtime import files
from lab.trace import rules
from lab.trace.client import Client, Sighting
from lab.trace.flows import Flow
from lab.trace.index import Packet
from lab.trace.rules import Listing


class Sender(Protocol):
    """Who sends flows and sniffs links: `lab.probe.crew.Crew` where places are the lab's own namespaces."""

    async def send(self, where: Where, order: Order) -> Sent: ...

    async def fence_seen(self, place: str, token: str, wait: float = 2.0) -> bool: ...

    async def find(self, place: str, which: Sequence[Mapping[str, object]]) -> list[list[Seen]]: ...

    async def close(self) -> None: ...


class Watcher(Protocol):
    """Who tells what the kernel said of a flow: `lab.trace.client.Client` for one observer of all places."""

    async def flow(
        self,
        place: str,
        proto: str,
        src: str,
        sport: int,
        dst: str | None = None,
        dport: int | None = None,
        *,
        wait: float = 0.0,
        fence: Flow | None = None,
    ) -> Sighting: ...

    async def close(self) -> None: ...


@dataclass
class Ground(ABC):
    """A running mesh, opened for tests; `close` ends it.

    ``observed`` are the places whose kernel is watched, ``routers`` where the other end of a place's link is sniffed,
    ``resolver`` the cluster's own DNS server.
    """

    name: str
    mesh: Mesh
    crew: Sender
    observer: Watcher
    journal: Journal
    observed: frozenset[str]
    resolver: str
    routers: dict[str, str] = field(default_factory=dict)
    flights: Flights = field(default_factory=Flights)

    def source(self, flow_from: FlowFrom) -> Where:
        """The place where a flow begins.

        Raises:
            InputError: the mesh has no such pod or external host.
        """
        if flow_from.external:
            return self.where(paths.external_place(flow_from.external))
        pod = self.mesh.pod(flow_from.pod)
        if pod is None:
            raise InputError(f'there is no pod "{flow_from.pod}"', f"lab {self.name}")
        return self.where(pod.name)

    def pod_of(self, address: str) -> str | None:
        """The pod that has an address."""
        return next((p.name for p in self.mesh.pods if address in p.ips), None)

    def addresses(self, place: str) -> frozenset[str]:
        """The addresses of a place."""
        for pod in self.mesh.pods:
            if pod.name == place:
                return frozenset(pod.ips)
        for host in self.mesh.external_hosts:
            if paths.external_place(host.meta.name) == place:
                return frozenset(host.addresses)
        return frozenset()

    def explained(self, pod: str, flow: Flow) -> bool:
        """Whether the pod's Envoy wrote that this connection of its own was for something else.

        (A line about the flow in question was looked for before: its connection is not asked about.)
        """
        path = self.evidence_file(pod)
        if not path.parent.is_dir():
            return False
        here = evidence_log.written(flow.src, flow.sport)
        return any(line.get("upstream_local") == here for line in self.journal.lines(path))

    def marks(self) -> dict[Path, int]:
        """Where every file that may tell of a flow ends now."""
        files = [self.evidence_file(p.name) for p in self.mesh.pods if p.injected]
        return {path: self.journal.mark(path) for path in files if path.parent.is_dir()}

    @abstractmethod
    def where(self, place: str) -> Where:
        """A place as driver and judge need it."""

    @abstractmethod
    def evidence_file(self, pod: str) -> Path:
        """Where a pod's Envoy writes its evidence."""

    @abstractmethod
    async def forwarded(self, pod: str, asked: Query, own: Flow, since: float) -> Flow | None:
        """The flow of the question that a pod's agent asked because the app asked ``asked`` (the flow ``own``); None if
        it asked none. ``since``: before the app asked, seconds since the epoch."""

    @abstractmethod
    async def fence_towards(self, pod: str) -> Flow | None:
        """Sends a fence to a pod; None if it cannot be sent."""

    @abstractmethod
    async def listing(self, place: str, packets: Iterable[Packet]) -> Listing:
        """The rules of a place now, as far as these packets met them."""

    async def close(self) -> None:
        await self.observer.close()
        self.journal.close()
        await self.crew.close()


@dataclass
class LabGround(Ground):
    """A lab of this machine: one observer, driver and judge for all places. Make it with `open_ground`."""

    crew: Crew

    def where(self, place: str) -> Where:
        return Where(
            place=place,
            netns=str(paths.netns_path(self.name, place)),
            lab=self.name,
            whole=True,
            router=str(paths.netns_path(self.name, self.routers.get(place, paths.NODE))),
            interface=plan.node_interface(place),
        )

    def evidence_file(self, pod: str) -> Path:
        return files.evidence(self.name, pod)

    def marks(self) -> dict[Path, int]:
        log = files.dns_queries(self.name)
        return {**super().marks(), log: self.journal.mark(log)}

    async def forwarded(self, pod: str, asked: Query, own: Flow, since: float) -> Flow | None:
        name = asked.name.rstrip(".").lower()
        addresses = self.addresses(pod)

        def is_it(line: Line) -> bool:
            same = str(line.get("name", "")).rstrip(".").lower() == name and line.get("type") == asked.type
            same = same and float(line.get("time", 0)) >= since
            return same and line.get("src") in addresses and line.get("sport") != own.sport

        # Cluster DNS logs a question before it answers it, so nothing need be waited for.
        log = files.dns_queries(self.name)
        line = await self.journal.find(log, is_it, 0, 0.0)
        if line is None:
            return None
        return Flow(str(line.get("transport", "udp")), str(line["src"]), int(line["sport"]), self.resolver, 53)

    async def fence_towards(self, pod: str) -> Flow | None:
        address = next(iter(sorted(self.addresses(pod))), None)
        if address is None:
            return None
        try:
            return await self.crew.send_fence(paths.netns_path(self.name, paths.NODE), address)
        except LabError:
            return None

    async def listing(self, place: str, packets: Iterable[Packet]) -> Listing:
        wanted = rules.wanted(packets)
        if not wanted:
            return Listing()
        return await asyncio.to_thread(rules.take, paths.netns_path(self.name, place), wanted)


async def open_ground(
    name: str,
    mesh: Mesh,
    sources: Iterable[FlowFrom],
    launched: Launched | None = None,
    *,
    trace_node: bool = False,
) -> Ground:
    """Connects to a running lab's observer, and to driver and judge (``launched`` earlier, or now).

    With ``trace_node`` packets report the node's rules too, and not only their connections, until the ground is closed.

    Raises:
        InputError: no such lab, or a test begins where there is nothing.
        ObservationError: the observer, the driver or the judge does not answer.
    """
    known = record.open(name)
    try:
        mark = known.id
    finally:
        known.close()
    crew = Crew(launched or launch(mark))
    observer: Client | None = None
    try:
        observer = await Client.connect(str(files.observer_socket(name)))
        observed = set((await observer.ask(op="status"))["places"])
        if trace_node or paths.NODE not in observed:
            netns = str(paths.netns_path(name, paths.NODE))
            await observer.ask(op="attach", place=paths.NODE, netns=netns, trace=trace_node, while_connected=trace_node)
        ground = LabGround(name, mesh, crew, observer, Journal(), frozenset(observed | {paths.NODE}), mesh.fabric.dns)
        ground.routers.update((place.name, place.router) for place in plan.plan(mesh).places)
        await crew.ready()
        await crew.watch([ground.source(s) for s in dict.fromkeys(sources)])
    except BaseException:
        if observer is not None:
            await observer.close()
        await crew.close()
        raise
    return ground

"""Where the tests of one lab take place: its places, and the connections to those who watch them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from lab.errors import InputError, LabError
from lab.fabric import paths, plan, record
from lab.manifests.model import FlowFrom, Mesh
from lab.probe import evidence_log
from lab.probe.crew import Crew, Launched, Where, launch
from lab.probe.flights import Flights
from lab.probe.journal import Journal
from lab.runtime import files
from lab.trace import rules
from lab.trace.client import Client
from lab.trace.flows import Flow
from lab.trace.index import Packet
from lab.trace.rules import Listing


@dataclass
class Ground:
    """A running lab, opened for tests. Make it with `open_ground`, end it with `close`."""

    name: str
    mesh: Mesh
    crew: Crew
    observer: Client
    journal: Journal
    observed: frozenset[str]
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

    def where(self, place: str) -> Where:
        return Where(
            place=place,
            netns=str(paths.netns_path(self.name, place)),
            lab=self.name,
            whole=True,
            router=str(paths.netns_path(self.name, self.routers.get(place, paths.NODE))),
            interface=plan.node_interface(place),
        )

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

    def evidence_file(self, pod: str) -> Path:
        return files.evidence(self.name, pod)

    def dns_log(self) -> Path:
        return files.dns_queries(self.name)

    def explained(self, pod: str, flow: Flow) -> bool:
        """Whether the pod's Envoy wrote that this connection of its own was for something else.

        (A line about the flow in question was looked for before: its connection is not asked about.)
        """
        path = self.evidence_file(pod)
        if not path.parent.is_dir():
            return False
        here = evidence_log.written(flow.src, flow.sport)
        return any(line.get("upstream_local") == here for line in self.journal.lines(path))

    async def fence_towards(self, pod: str) -> Flow | None:
        """Sends a fence from the node to a pod; None if it cannot be sent."""
        address = next(iter(sorted(self.addresses(pod))), None)
        if address is None:
            return None
        try:
            return await self.crew.send_fence(paths.netns_path(self.name, paths.NODE), address)
        except LabError:
            return None

    async def listing(self, place: str, packets: Iterable[Packet]) -> Listing:
        """The rules of a place now, as far as these packets met them."""
        wanted = rules.wanted(packets)
        if not wanted:
            return Listing()
        return await asyncio.to_thread(rules.take, paths.netns_path(self.name, place), wanted)

    async def close(self) -> None:
        await self.observer.close()
        self.journal.close()
        await self.crew.close()


async def open_ground(name: str, mesh: Mesh, sources: Iterable[FlowFrom], launched: Launched | None = None) -> Ground:
    """Connects to a running lab's observer, and to driver and judge (``launched`` earlier, or now).

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
        if paths.NODE not in observed:
            netns = str(paths.netns_path(name, paths.NODE))
            await observer.ask(op="attach", place=paths.NODE, netns=netns, trace=False)
        ground = Ground(name, mesh, crew, observer, Journal(), frozenset(observed | {paths.NODE}))
        ground.routers.update((place.name, place.router) for place in plan.plan(mesh).places)
        await crew.ready()
        await crew.watch([ground.source(s) for s in dict.fromkeys(sources)])
    except BaseException:
        if observer is not None:
            await observer.close()
        await crew.close()
        raise
    return ground

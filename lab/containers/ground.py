"""A mesh of containers, opened for tests: each pod's prober answers on its Unix socket in a shared volume."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.containers import paths
from lab.errors import LabError, ObservationError
from lab.manifests.model import Mesh, Pod
from lab.probe import fence
from lab.probe.crew import Where
from lab.probe.ground import Ground
from lab.probe.journal import Journal
from lab.probe.orders import Order, Query, Sent
from lab.probe.wire import Seen
from lab.trace import rules
from lab.trace.client import Client, Sighting
from lab.trace.flows import Flow
from lab.trace.index import Packet
from lab.trace.rules import Listing

_HEALTH_PORT = 15021
_PAUSE = 0.1


class Probers:
    """All probers of a mesh, as the one driver, sniffer and observer that tests know."""

    def __init__(self, clients: Mapping[str, Client]) -> None:
        self._clients = clients

    def of(self, place: str) -> Client:
        """Raises ObservationError: that place has no prober."""
        client = self._clients.get(place)
        if client is None:
            known = f"probers: {', '.join(sorted(self._clients))}"
            raise ObservationError(
                "nobody sends or watches there", place, f"it has no prober; {known}", "Name one of them"
            )
        return client

    async def send(self, where: Where, order: Order) -> Sent:
        answer = await self.of(where.place).ask(op="send", order=order.to_json())
        return Sent.from_json(answer["sent"])

    async def fence_seen(self, place: str, token: str, wait: float = 2.0) -> bool:
        return bool((await self.of(place).ask(op="fence", token=token, wait=wait))["seen"])

    async def find(self, place: str, which: Sequence[Mapping[str, object]]) -> list[list[Seen]]:
        answer = await self.of(place).ask(op="find", which=list(which))
        return [[Seen(**{**s, "flow": Flow(**s["flow"])}) for s in found] for found in answer["found"]]

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
    ) -> Sighting:
        return await self.of(place).flow(place, proto, src, sport, dst, dport, wait=wait, fence=fence)

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()


@dataclass
class ContainerGround(Ground):
    """Make it with `open_ground`."""

    crew: Probers

    def where(self, place: str) -> Where:
        return Where(place, "")

    def evidence_file(self, pod: str) -> Path:
        return paths.evidence_file(pod)

    async def forwarded(self, pod: str, asked: Query, own: Flow, since: float) -> Flow | None:
        answer = await self.crew.of(pod).ask(op="questions", name=asked.name, type=asked.type, since=since)
        found: list[dict[str, Any]] = [q for q in answer["questions"] if q["sport"] != own.sport]
        if not found:
            return None
        last = found[-1]
        return Flow(str(last["proto"]), str(last["src"]), int(last["sport"]), str(last["server"]), 53)

    async def fence_towards(self, pod: str) -> Flow | None:
        address = next(iter(sorted(self.addresses(pod))))
        try:
            sent = fence.send(address)
        except OSError:
            return None
        return Flow(*fence.flow_of(sent))

    async def listing(self, place: str, packets: Iterable[Packet]) -> Listing:
        wanted = rules.wanted(packets)
        if not wanted:
            return Listing()
        answer = await self.crew.of(place).ask(op="listing", what=sorted(wanted))
        return rules.parse(answer["texts"])

    async def close(self) -> None:
        self.journal.close()
        await self.crew.close()


async def open_ground(mesh: Mesh, wait: float, log: Callable[[str], None]) -> ContainerGround:
    """Connects to the probers of all pods, and waits until the pods are ready.

    A pod that is not ready in time is no reason not to look: its flows' verdicts say what becomes of them.

    Args:
        wait: for how long, in seconds.
        log: gets a line for each pod that is not ready.

    Raises:
        ObservationError: a pod has no prober, or its prober has ended.
    """
    clients: dict[str, Client] = {}
    lacks: dict[str, str] = {}

    async def ready(pod: Pod) -> None:
        lacks[pod.name] = "its prober does not answer"
        client = clients[pod.name] = await _connected(pod)
        while found := await _lacks(pod, client):
            lacks[pod.name] = found
            await asyncio.sleep(_PAUSE)
        del lacks[pod.name]

    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(wait):
                await asyncio.gather(*(ready(pod) for pod in mesh.pods))
        for name in lacks:
            if name not in clients:
                raise ObservationError(
                    f"pod {name} cannot be watched", why=lacks[name], next_step="See docker compose logs"
                )
    except LabError:
        for client in clients.values():
            await client.close()
        raise
    for name, what in lacks.items():
        log(f"pod {name} is not ready after {wait:g} s: {what}")
    probers = Probers(clients)
    routers = {pod.name: "eth0" for pod in mesh.pods}
    return ContainerGround(mesh.name, mesh, probers, probers, Journal(), frozenset(clients), "", routers)


async def _connected(pod: Pod) -> Client:
    while True:
        with suppress(LabError):
            return await Client.connect(str(paths.prober_socket(pod.name)))
        await asyncio.sleep(_PAUSE)


async def _lacks(pod: Pod, client: Client) -> str:
    """What a pod still lacks before flows may be sent; nothing once it is ready."""
    wanted = {port.port for container in pod.containers for port in container.ports if port.protocol == "TCP"}
    closed = sorted(wanted - set((await client.ask(op="listening"))["ports"]))
    if closed:
        return f"its app does not listen on {', '.join(map(str, closed))}"
    if pod.injected and (await client.ask(op="status-code", port=_HEALTH_PORT, path="/healthz/ready"))["code"] != 200:
        return f"its proxy does not say on port {_HEALTH_PORT} that it is ready"
    return ""

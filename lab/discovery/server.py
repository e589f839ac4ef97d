"""The discovery server: ADS over gRPC, its control socket, and the entry that the lab's zygote forks.

Sources: istio/istio: pilot/pkg/xds/discovery.go (debounce, push queue), pilot/pkg/bootstrap/server.go (ports).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
from envoy.service.discovery.v3 import discovery_pb2

from lab.discovery import xds
from lab.discovery.node import Node
from lab.discovery.proxy import proxy_for
from lab.discovery.push_context import PushContext
from lab.discovery.resources import View, short
from lab.errors import InputError
from lab.manifests import model

log = logging.getLogger("discovery")

ADS_SERVICE = "envoy.service.discovery.v3.AggregatedDiscoveryService"
PLAINTEXT_PORT = 15010
DEBOUNCE_AFTER = 0.1
DEBOUNCE_MAX = 10.0
"""PILOT_DEBOUNCE_AFTER and PILOT_DEBOUNCE_MAX, seconds (istio/istio: pilot/pkg/features)."""


@dataclass(slots=True, eq=False)
class Connection:
    """One ADS stream that is open, and the lock that keeps its responses in order."""

    stream: xds.Stream
    write: Callable[[bytes], Any]
    peer: str
    since: float
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def node(self) -> Node | None:
        return self.stream.node

    def status(self) -> dict[str, Any]:
        """Per type what was sent, acknowledged and refused; ``nack`` is the first refusal."""
        types, nack = {}, None
        for watch in self.stream.watches.values():
            name = short(watch.type_url)
            types[name] = {
                "version": watch.version_sent,
                "acked": watch.version_acked,
                "resources": len(watch.sent),
                "pushes": watch.pushes,
                "settled": watch.settled,
            }
            if watch.error:
                types[name]["error"] = watch.error
                nack = nack or {"type": name, "error": watch.error}
        return {
            "node": self.node.id if self.node else "",
            "flavour": self.stream.flavour,
            "peer": self.peer,
            "types": types,
            "nack": nack,
        }


class DiscoveryServer:
    """Holds the current push context and every open stream; pushes what changed when the mesh changes."""

    def __init__(
        self, mesh: model.Mesh, *, debounce_after: float = DEBOUNCE_AFTER, debounce_max: float = DEBOUNCE_MAX
    ) -> None:
        self.push_context = PushContext(mesh)
        self.connections: list[Connection] = []
        self._after, self._max = debounce_after, debounce_max
        self._counter = 0
        self.version = self._next_version()
        self._pending: model.Mesh | None = None
        self._first_event = 0.0
        self._last_event = 0.0
        self._debounce: asyncio.Task[None] | None = None
        self._acked = asyncio.Condition()
        self.last_push: dict[str, Any] = {}

    def _next_version(self) -> str:
        self._counter += 1
        return f"{datetime.now(UTC).isoformat().replace('+00:00', 'Z')}/{self._counter}"

    # --- streams ------------------------------------------------------------------------------

    async def delta(self, requests: AsyncIterator[Any], context: Any) -> None:
        await self._serve("delta", requests, context)

    async def sotw(self, requests: AsyncIterator[Any], context: Any) -> None:
        await self._serve("sotw", requests, context)

    async def _serve(self, flavour: xds.Flavour, requests: AsyncIterator[Any], context: Any) -> None:
        stream = xds.Stream(flavour, self.version)
        connection = Connection(stream, context.write, context.peer(), time.time())
        try:
            async for request in requests:
                try:
                    if not stream.identify(request):
                        continue
                    await self._handle(connection, request)
                except xds.ProtocolError as e:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(e))
        finally:
            if connection in self.connections:
                self.connections.remove(connection)
            await self._notify()

    async def _handle(self, connection: Connection, request: Any) -> None:
        stream = connection.stream
        assert stream.node is not None
        async with connection.lock:
            if stream.view is None:
                stream.view = View(proxy_for(self.push_context, stream.node))
                stream.version = self.version
                self.connections.append(connection)
                log.info("connected node=%s flavour=%s peer=%s", stream.node.id, stream.flavour, connection.peer)
            if request.HasField("error_detail"):
                log.error(
                    "nack node=%s type=%s error=%r",
                    stream.node.id,
                    short(request.type_url),
                    request.error_detail.message,
                )
            for response in stream.request(request):
                await connection.write(response.body)
        await self._notify()

    async def _notify(self) -> None:
        async with self._acked:
            self._acked.notify_all()

    # --- pushes -------------------------------------------------------------------------------

    def update(self, mesh: model.Mesh) -> None:
        """Takes a changed mesh; it is pushed after a quiet moment (or at the latest after the maximum)."""
        now = asyncio.get_running_loop().time()
        if self._pending is None:
            self._first_event = now
        self._last_event = now
        self._pending = mesh
        if self._debounce is None:
            self._debounce = asyncio.get_running_loop().create_task(self._debounced())

    async def _debounced(self) -> None:
        loop = asyncio.get_running_loop()
        while self._pending is not None:
            due = min(self._last_event + self._after, self._first_event + self._max)
            wait = due - loop.time()
            if wait > 0:
                await asyncio.sleep(wait)
                continue
            mesh, self._pending = self._pending, None
            await self.push(mesh)
        self._debounce = None
        await self._notify()

    async def push(self, mesh: model.Mesh) -> None:
        """Computes the new context and sends every stream what changed for it."""
        started = time.monotonic()
        context, hosts = self.push_context.advance(mesh)
        self.push_context = context
        self.version = self._next_version()
        sent: dict[str, int] = {}
        for connection in list(self.connections):
            async with connection.lock:
                stream = connection.stream
                assert stream.node is not None
                view = View(proxy_for(context, stream.node))
                if hosts is None or stream.node.name in context.added_pods:
                    responses = stream.push(view, self.version)
                else:
                    responses = stream.push_endpoints(view, self.version, hosts)
                for response in responses:
                    sent[short(response.type_url)] = sent.get(short(response.type_url), 0) + response.resources
                    with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
                        await connection.write(response.body)
        self.last_push = {
            "version": self.version,
            "kind": "full" if hosts is None else "endpoints",
            "seconds": time.monotonic() - started,
            "connections": len(self.connections),
            "resources": sent,
        }
        log.info("pushed %s", json.dumps(self.last_push))
        await self._notify()

    # --- questions ----------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "proxies": {c.node.id: c.status() for c in self.connections if c.node is not None},
            "last_push": self.last_push,
        }

    def nack_of(self, connection: Connection) -> bool:
        return any(w.error for w in connection.stream.watches.values())

    async def wait_for(self, predicate: Callable[[], bool], timeout: float) -> bool:
        """Waits until ``predicate()`` holds; it is asked after every request, push and disconnect. False at the deadline."""
        try:
            async with asyncio.timeout(timeout), self._acked:
                await self._acked.wait_for(predicate)
        except TimeoutError:
            return False
        return True

    def is_settled(self, nodes: set[str] | None = None) -> bool:
        """Nothing is pending, the given nodes are connected, and every response was answered by ACK or NACK."""
        if self._pending is not None or self._debounce is not None:
            return False
        if nodes and not nodes <= {c.node.id for c in self.connections if c.node}:
            return False
        return all(w.settled for c in self.connections for w in c.stream.watches.values())

    async def settled(self, timeout: float, nodes: set[str] | None = None) -> bool:
        """Waits for :meth:`is_settled`."""
        return await self.wait_for(lambda: self.is_settled(nodes), timeout)

    def grpc_handlers(self) -> Any:
        """ADS as a generic handler: responses are serialised already."""
        handlers = {
            "StreamAggregatedResources": grpc.stream_stream_rpc_method_handler(
                self.sotw, discovery_pb2.DiscoveryRequest.FromString, bytes
            ),
            "DeltaAggregatedResources": grpc.stream_stream_rpc_method_handler(
                self.delta, discovery_pb2.DeltaDiscoveryRequest.FromString, bytes
            ),
        }
        return grpc.method_handlers_generic_handler(ADS_SERVICE, handlers)


GRPC_OPTIONS = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 15_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_concurrent_streams", 100_000),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),
)


async def start(server: DiscoveryServer, address: str) -> Any:
    """Starts plaintext gRPC on ``IP:PORT`` or ``unix:PATH``. Raises InputError if the address is taken."""
    grpc_server = grpc.aio.server(options=GRPC_OPTIONS)
    grpc_server.add_generic_rpc_handlers((server.grpc_handlers(),))
    try:
        grpc_server.add_insecure_port(address)
    except RuntimeError as e:
        raise InputError("cannot listen for xDS", address, str(e), "Is another control plane there?") from None
    await grpc_server.start()
    return grpc_server


def join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# --- control socket -----------------------------------------------------------------------------------


class Control:
    """JSON lines over a Unix socket: status, reload, wait."""

    def __init__(self, server: DiscoveryServer, load: Callable[[], model.Mesh]) -> None:
        self.server, self.load = server, load

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                try:
                    request = json.loads(line)
                    answer = await self.answer(request)
                except (ValueError, KeyError, TypeError) as e:
                    answer = {"error": f"bad request: {e}"}
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        op = request["op"]
        if op == "status":
            return self.server.status()
        if op == "reload":
            try:
                mesh = await asyncio.to_thread(self.load)
            except InputError as e:
                return {"error": str(e)}
            self.server.update(mesh)
            return {"ok": True}
        if op == "wait":
            nodes = set(request.get("nodes") or ())
            settled = await self.server.settled(float(request.get("timeout", 10.0)), nodes)
            return {"settled": settled, **self.server.status()}
        return {"error": f"unknown op {op!r}"}


def notify_ready() -> None:
    """READY=1 to NOTIFY_SOCKET (sd_notify(3)), if there is one."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s, contextlib.suppress(OSError):
        s.sendto(b"READY=1", "\0" + path[1:] if path.startswith("@") else path)


async def serve(load: Callable[[], model.Mesh], listen: str, control: str) -> None:
    """Runs discovery until SIGTERM or SIGINT."""
    server = DiscoveryServer(load())
    grpc_server = await start(server, join(listen, PLAINTEXT_PORT))
    sockets: list[asyncio.Server] = []
    if control:
        sockets.append(await asyncio.start_unix_server(Control(server, load).serve, control))
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    notify_ready()
    await stop.wait()
    for one in sockets:
        one.close()
    await grpc_server.stop(grace=None)


def main(params: dict[str, Any]) -> int:
    """Entry of the lab's discovery process.

    params: ``mesh`` (directory of manifests), ``listen`` (IP), ``socket`` (control socket path), ``name`` (lab).
    """
    from lab.manifests import stored

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    name = str(params.get("name") or "lab")

    def load() -> model.Mesh:
        return stored.load(str(params["mesh"]), name)

    control = str(params.get("socket") or "")
    if control:
        Path(control).unlink(missing_ok=True)
    asyncio.run(serve(load, str(params["listen"]), control))
    return 0

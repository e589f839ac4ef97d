"""ADS: every open stream, and pushes of what changed when the mesh changes.

Sources: istio/istio: pilot/pkg/xds/discovery.go (debounce, push queue), pilot/pkg/xds/ads.go, pilot/pkg/xds/delta.go.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import grpc
from envoy.service.discovery.v3 import discovery_pb2

from lab.discovery import xds
from lab.discovery.auth import Authenticator, Forbidden, Unauthenticated, authorize
from lab.discovery.metrics import Metrics
from lab.discovery.node import Node
from lab.discovery.proxy import proxy_for
from lab.discovery.push_context import PushContext
from lab.discovery.resources import DEBUG, View, delta_response, short, sotw_response
from lab.manifests import model

log = logging.getLogger("ads")

SERVICE = "envoy.service.discovery.v3.AggregatedDiscoveryService"
DEBOUNCE_AFTER = 0.1
DEBOUNCE_MAX = 10.0
"""PILOT_DEBOUNCE_AFTER and PILOT_DEBOUNCE_MAX, seconds (istio/istio: pilot/pkg/features)."""


@dataclass(slots=True, eq=False)
class Connection:
    """One ADS stream that is open, the lock that keeps its responses in order, and what it is still to be pushed.

    Every stream has a pusher of its own, so that a proxy that does not read holds up nobody else. Pushes that come
    while it writes are merged: the next one is of the newest context, full if any of them was.
    """

    stream: xds.Stream
    write: Callable[[bytes], Any]
    peer: str
    since: float
    identities: tuple[str, ...] = ()
    behind_since: float = 0.0  # monotonic time of the change that it has not acknowledged yet, 0 if none
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    full: bool = False
    hosts: frozenset[str] = frozenset()
    pushing: bool = False
    pusher: asyncio.Task[None] | None = None
    handler: asyncio.Task[Any] | None = None

    def mark(self, hosts: frozenset[str] | None) -> None:
        """Asks for a push: of the endpoints of some hosts, or (None) of everything."""
        self.full = self.full or hosts is None
        self.hosts = self.hosts | (hosts or frozenset())
        self.wake.set()

    def take(self) -> frozenset[str] | None:
        """What has been asked for since the last time."""
        hosts = None if self.full else self.hosts
        self.full, self.hosts = False, frozenset()
        self.wake.clear()
        return hosts

    @property
    def settled(self) -> bool:
        """Nothing is to be pushed, and the proxy has answered everything."""
        return not self.wake.is_set() and not self.pushing and all(w.settled for w in self.stream.watches.values())

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
        self,
        mesh: model.Mesh,
        *,
        authenticator: Authenticator | None = None,
        metrics: Metrics | None = None,
        debounce_after: float = DEBOUNCE_AFTER,
        debounce_max: float = DEBOUNCE_MAX,
    ) -> None:
        self.metrics = metrics or Metrics()
        self._authenticator = authenticator
        self.push_context = self._context(lambda: PushContext(mesh))
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
        self._push_started = 0.0

    def _context(self, build: Callable[[], PushContext]) -> PushContext:
        started = time.monotonic()
        context = build()
        self.metrics.observe("pilot_pushcontext_init_seconds", time.monotonic() - started)
        self.metrics.gauge("pilot_services", len(context.registry.services))
        return context

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
        connection = Connection(stream, context.write, context.peer(), time.time(), handler=asyncio.current_task())
        if self._authenticator is not None and self._authenticator.secure(connection.peer):
            try:
                connection.identities = tuple(self._authenticator.identify(context))
            except Unauthenticated as e:
                log.warning("refused peer=%s: %s", connection.peer, e)
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"authentication failure: {e}")
        try:
            async for request in requests:
                try:
                    if not stream.identify(request):
                        continue
                    await self._handle(connection, request)
                except xds.ProtocolError as e:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(e))
                except (Forbidden, Unauthenticated) as e:
                    log.warning("refused peer=%s: %s", connection.peer, e)
                    await context.abort(e.code, str(e))
        except grpc.aio.InternalError:
            pass  # the peer went away while something was written to it
        finally:
            if connection.pusher is not None:
                connection.pusher.cancel()
            if connection in self.connections:
                self.connections.remove(connection)
                self.metrics.gauge("pilot_xds", len(self.connections))
                log.info("disconnected node=%s", stream.node.id if stream.node else "")
            await self._notify()

    async def _handle(self, connection: Connection, request: Any) -> None:
        stream = connection.stream
        assert stream.node is not None
        async with connection.lock:
            if stream.view is None:
                if connection.identities:
                    authorize(stream.node, connection.identities)
                stream.view = View(proxy_for(self.push_context, stream.node))
                stream.version = self.version
                self.connections.append(connection)
                connection.pusher = asyncio.get_running_loop().create_task(self._push_loop(connection))
                self.metrics.gauge("pilot_xds", len(self.connections))
                log.info("connected node=%s flavour=%s peer=%s", stream.node.id, stream.flavour, connection.peer)
            if request.HasField("error_detail"):
                self._count_nack(stream.node, request)
                log.error(
                    "nack node=%s type=%s error=%r",
                    stream.node.id,
                    short(request.type_url),
                    request.error_detail.message,
                )
            if request.type_url.startswith(DEBUG):
                await self._debug(connection, request)
                return
            for response in stream.request(request):
                self.metrics.count("pilot_xds_pushes", type=short(response.type_url).lower())
                await self._write(connection, response)
            if connection.behind_since and all(w.settled for w in stream.watches.values()):
                now = time.monotonic()
                self.metrics.observe("pilot_proxy_convergence_time", now - connection.behind_since)
                connection.behind_since = 0.0
        await self._notify()

    async def _debug(self, connection: Connection, request: Any) -> None:
        """Answers a debug question; it starts no watch, and an acknowledgement of the answer is not another question."""
        from lab.discovery import debug_stream  # most meshes are never asked

        if request.response_nonce:
            return
        delta = connection.stream.flavour == "delta"
        names = list(request.resource_names_subscribe if delta else request.resource_names)
        resources = debug_stream.answer(self, connection, request.type_url, names)
        nonce = f"{self.version}{uuid.uuid4()}"
        if delta:
            body = delta_response(request.type_url, self.version, nonce, resources, ())
        else:
            body = sotw_response(request.type_url, self.version, nonce, resources)
        await connection.write(body)

    async def _write(self, connection: Connection, response: xds.Response) -> None:
        await connection.write(response.body)
        watch = connection.stream.watches.get(response.type_url)
        if watch is not None:
            watch.sent_at = time.time()

    def _count_nack(self, node: Node, request: Any) -> None:
        kind = short(request.type_url).lower()
        self.metrics.count("pilot_total_xds_rejects", type=kind)
        self.metrics.count(f"pilot_xds_{kind}_reject", node=node.id, err=str(request.error_detail.code))

    async def _notify(self) -> None:
        async with self._acked:
            self._acked.notify_all()

    # --- pushes -------------------------------------------------------------------------------

    def update(self, mesh: model.Mesh) -> None:
        """Takes a changed mesh; it is pushed after a quiet moment (or at the latest after the maximum)."""
        now = asyncio.get_running_loop().time()
        self.metrics.count("pilot_inbound_updates", type="config")
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
            self.metrics.observe("pilot_debounce_time", loop.time() - self._first_event)
            await self.push(mesh)
        self._debounce = None
        await self._notify()

    async def push(self, mesh: model.Mesh) -> None:
        """Computes the new context and has every stream sent what changed for it (it does not wait for that)."""
        started = time.monotonic()
        hosts: frozenset[str] | None = None

        def advance() -> PushContext:
            nonlocal hosts
            context, hosts = self.push_context.advance(mesh)
            return context

        context = self.push_context = self._context(advance)
        self.metrics.count("pilot_push_triggers", type="config" if hosts is None else "endpoint")
        self.version = self._next_version()
        self.last_push = {
            "version": self.version,
            "kind": "full" if hosts is None else "endpoints",
            "seconds": 0.0,
            "connections": len(self.connections),
            "resources": {},
        }
        self._push_started = started
        for connection in self.connections:
            new = connection.node is not None and connection.node.name in context.added_pods
            connection.mark(None if new else hosts)
        log.info("pushing version=%s kind=%s to=%d", self.version, self.last_push["kind"], len(self.connections))
        await self._notify()

    async def _push_loop(self, connection: Connection) -> None:
        while True:
            await connection.wake.wait()
            connection.pushing = True
            try:
                async with connection.lock:
                    await self._push_one(connection, connection.take())
            except Exception:
                # the proxy would wait for ever: end its stream, so that it comes back and asks anew
                log.exception("push failed node=%s", connection.node.id if connection.node else "")
                if connection.handler is not None:
                    connection.handler.cancel()
                return
            finally:
                connection.pushing = False
            await self._notify()

    async def _push_one(self, connection: Connection, hosts: frozenset[str] | None) -> None:
        stream, context = connection.stream, self.push_context
        assert stream.node is not None
        view = View(proxy_for(context, stream.node))
        if hosts is None:
            responses = stream.push(view, self.version)
        else:
            responses = stream.push_endpoints(view, self.version, hosts)
        if responses and not connection.behind_since:
            connection.behind_since = self._push_started
        sent = self.last_push["resources"]
        for response in responses:
            kind = short(response.type_url)
            self.metrics.count("pilot_xds_pushes", type=kind.lower())
            sent[kind] = sent.get(kind, 0) + response.resources
            with contextlib.suppress(grpc.RpcError, grpc.aio.InternalError, asyncio.InvalidStateError):
                await self._write(connection, response)
        self.last_push["seconds"] = time.monotonic() - self._push_started
        self.metrics.observe("pilot_xds_push_time", self.last_push["seconds"])

    # --- questions ----------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "proxies": {c.node.id: c.status() for c in self.connections if c.node is not None},
            "last_push": self.last_push,
        }

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
        return all(c.settled for c in self.connections)

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
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

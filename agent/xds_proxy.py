"""The xDS proxy: each stream of Envoy on ``<configPath>/XDS`` gets its own connection to discovery.

Messages pass as bytes; they are parsed only to see their type, nonce and error. The agent adds requests of its own to
the stream (name table, ProxyConfig, health) and consumes the answers.

Source: istio/istio: pkg/istio-agent/xds_proxy.go, pkg/istio-agent/xds_proxy_delta.go.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from agent.errors import AgentError
from agent.metrics import Metrics
from agent.reflection import Reflection

log = logging.getLogger("xdsproxy")

SERVICE = "envoy.service.discovery.v3.AggregatedDiscoveryService"
TYPE_PREFIX = "type.googleapis.com/"
LISTENER_TYPE = TYPE_PREFIX + "envoy.config.listener.v3.Listener"
CLUSTER_TYPE = TYPE_PREFIX + "envoy.config.cluster.v3.Cluster"
NAME_TABLE_TYPE = TYPE_PREFIX + "istio.networking.nds.v1.NameTable"
PROXY_CONFIG_TYPE = TYPE_PREFIX + "istio.mesh.v1alpha1.ProxyConfig"
HEALTH_TYPE = TYPE_PREFIX + "istio.v1.HealthInformation"
_FORWARDED = (TYPE_PREFIX + "envoy.",)
_FORWARDED_EXACT = frozenset((TYPE_PREFIX + "istio.workload.Workload",))
EXTENSION_TYPE = TYPE_PREFIX + "envoy.config.core.v3.TypedExtensionConfig"
DEBUG_PREFIX = "istio.io/debug"

INTERNAL = 13
SLOW_SEND_SECONDS = 10.0
INT_MAX = (1 << 31) - 1  # of gRPC's options


@dataclass(frozen=True)
class HealthEvent:
    """The last result of the workload's health check; `message` is empty if it is healthy."""

    healthy: bool
    message: str = ""


@dataclass(frozen=True)
class Flavour:
    """One of the two forms of ADS. The messages are loaded with the first use: while Envoy starts."""

    method: str
    delta: bool

    @functools.cached_property
    def request(self) -> type[Any]:
        """The request's message type."""
        from envoy.service.discovery.v3 import discovery_pb2

        found: type[Any] = discovery_pb2.DeltaDiscoveryRequest if self.delta else discovery_pb2.DiscoveryRequest
        return found

    @functools.cached_property
    def response(self) -> type[Any]:
        """The response's message type."""
        from envoy.service.discovery.v3 import discovery_pb2

        found: type[Any] = discovery_pb2.DeltaDiscoveryResponse if self.delta else discovery_pb2.DiscoveryResponse
        return found

    def subscription(self, type_url: str) -> bytes:
        """A first request of the agent: no node, no version, no names."""
        data: bytes = self.request(type_url=type_url).SerializeToString()
        return data

    def acknowledgement(self, response: Any, error: str = "", version: str = "") -> bytes:
        """ACK, or with `error` NACK (of what came after `version`), of a response that Envoy does not get."""
        request = self.request(type_url=response.type_url, response_nonce=response.nonce)
        if error:
            request.error_detail.code, request.error_detail.message = INTERNAL, error
            if version and not self.delta:
                request.version_info = version
        elif not self.delta:
            request.version_info = response.version_info
        data: bytes = request.SerializeToString()
        return data

    def health(self, event: HealthEvent) -> bytes:
        request = self.request(type_url=HEALTH_TYPE)
        if not event.healthy:
            request.error_detail.code, request.error_detail.message = INTERNAL, event.message
        data: bytes = request.SerializeToString()
        return data

    def first_resource(self, response: Any) -> Any:
        """The first resource as Any, None if there is none."""
        if not response.resources:
            return None
        return response.resources[0].resource if self.delta else response.resources[0]


SOTW = Flavour("StreamAggregatedResources", delta=False)
DELTA = Flavour("DeltaAggregatedResources", delta=True)


def short_type(type_url: str) -> str:
    """``type.googleapis.com/envoy.config.cluster.v3.Cluster`` -> ``Cluster``."""
    return type_url.rpartition("/")[2].rpartition(".")[2] or type_url


def is_forwarded(type_url: str) -> bool:
    """True for types that Envoy gets; everything else that no handler takes is dropped."""
    return type_url.startswith(_FORWARDED) or type_url in _FORWARDED_EXACT


@dataclass
class Upstream:
    """How to reach discovery: made anew for every stream.

    Args:
        close: for the end.
        problem: why there is no connection, where that is known better than gRPC knows it; else empty.
    """

    address: str
    connect: Callable[[], grpc.aio.Channel]
    metadata: Callable[[], Sequence[tuple[str, str | bytes]]]
    close: Callable[[], Awaitable[None]] | None = None
    problem: Callable[[], str] = str


Handler = Callable[[bytes], Awaitable[None] | None]
Converter = Callable[[list[Any]], Awaitable[list[Any]]]
"""Any messages of extension configurations to those that Envoy is to get; a ValueError is a NACK."""


@dataclass
class _Stream:
    """One pairing of a stream of Envoy with one of discovery."""

    number: int
    flavour: Flavour
    requests: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    initial_sent: bool = False
    debug: asyncio.Future[Any] | None = None
    debug_type: str = ""
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)  # gRPC takes one message at a time
    converting: asyncio.Lock = field(default_factory=asyncio.Lock)  # extensions reach Envoy in their order
    conversions: set[asyncio.Task[None]] = field(default_factory=set)


class StreamEnded(Exception):
    """Discovery ended the stream; carries the status that Envoy must see."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code, self.details = code, details


class XdsProxy:
    """The server on the Unix socket and its pairings.

    Args:
        path: of the socket.
        upstream: discovery.
        metrics: counters.
        handlers: type URL -> what consumes the first resource's bytes; an exception is a NACK.
        on_request: called for each request of Envoy with type URL, nonce and error text.
        convert: what extension configurations go through, None if they pass as they are.
    """

    def __init__(
        self,
        path: str,
        upstream: Upstream,
        metrics: Metrics,
        handlers: Mapping[str, Handler],
        on_request: Callable[[str, str, str], None] = lambda *_: None,
        convert: Converter | None = None,
    ) -> None:
        self._path, self._upstream, self._metrics, self._handlers = path, upstream, metrics, dict(handlers)
        self._on_request, self._convert = on_request, convert
        self._extension_version = ""  # the last that Envoy acknowledged
        self._server: grpc.aio.Server | None = None
        self._current: _Stream | None = None
        self._count = 0
        self._health: HealthEvent | None = None
        self.nacks: dict[str, str] = {}

    async def start(self, options: Sequence[tuple[str, Any]]) -> None:
        """Listens; a stale socket is removed.

        Raises:
            OSError: the socket cannot be made.
        """
        self._server = await serve_unix(
            self._path,
            SERVICE,
            {
                SOTW.method: functools.partial(self._serve, SOTW),
                DELTA.method: functools.partial(self._serve, DELTA),
            },
            options,
            (Reflection(SERVICE),),
        )
        log.info("Initializing with upstream address %r", self._upstream.address)

    async def stop(self) -> None:
        if self._current is not None:
            self._current.closed.set()
        if self._server is not None:
            await self._server.stop(None)
            self._server = None
        if self._upstream.close is not None:
            await self._upstream.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    @property
    def connected(self) -> bool:
        """True while a stream to discovery is open."""
        return self._current is not None

    def send_health(self, event: HealthEvent) -> None:
        """Tells discovery about the workload's health, now if connected, and again on each reconnection."""
        self._health = event
        stream = self._current
        if stream is not None and stream.initial_sent:
            stream.requests.put_nowait(stream.flavour.health(event))

    async def debug(self, type_url: str, resource_names: Sequence[str], timeout: float) -> Any:
        """Asks discovery a debug question on the current stream.

        Returns:
            The response message.

        Raises:
            ConnectionError: no stream, another question is in progress, or discovery refused it by ending the stream.
            TimeoutError: no answer within `timeout` seconds.
        """
        stream = self._current
        if stream is None or not stream.initial_sent:
            raise ConnectionError("the proxy is not connected to discovery")
        if stream.debug is not None:
            raise ConnectionError("another debug request is in progress")
        request = stream.flavour.request(type_url=type_url)
        if stream.flavour.delta:
            request.resource_names_subscribe.extend(resource_names)
        else:
            request.resource_names.extend(resource_names)
        stream.debug, stream.debug_type = asyncio.get_running_loop().create_future(), type_url
        try:
            stream.requests.put_nowait(request.SerializeToString())
            return await asyncio.wait_for(stream.debug, timeout)
        finally:
            stream.debug = None

    async def _serve(self, flavour: Flavour, requests: AsyncIterator[bytes], context: Any) -> None:
        self._count += 1
        stream = _Stream(self._count, flavour)
        if self._current is not None:
            log.warning("registered overlapping stream; closing previous")
            self._current.closed.set()
        self._current = stream
        reason = "the stream to discovery ended"
        try:
            await self._pair(stream, requests, context)
        except StreamEnded as ended:
            reason += f": {ended.code.name}: {ended.details}"
            await context.abort(ended.code, ended.details)
        finally:
            if stream.debug is not None and not stream.debug.done():
                stream.debug.set_exception(ConnectionError(reason))
            stream.closed.set()
            if self._current is stream:
                self._current = None

    async def _pair(self, stream: _Stream, requests: AsyncIterator[bytes], context: Any) -> None:
        try:
            channel = self._upstream.connect()
        except AgentError as error:
            self._metrics.istiod_connection_failures.value += 1
            log.error("failed to connect to upstream %s: %s", self._upstream.address, error)
            raise StreamEnded(grpc.StatusCode.UNAVAILABLE, str(error)) from None
        tasks: list[asyncio.Task[None]] = []
        try:
            method = channel.stream_stream(f"/{SERVICE}/{stream.flavour.method}")
            call = method(metadata=tuple(self._upstream.metadata()))
            log.debug("connecting to upstream XDS server: %s", self._upstream.address)
            tasks = [
                asyncio.create_task(self._read_downstream(stream, requests)),
                asyncio.create_task(self._write_upstream(stream, call)),
                asyncio.create_task(self._read_upstream(stream, call, context)),
                asyncio.create_task(_closed(stream)),
            ]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task in done:
                    task.result()
        finally:
            tasks += stream.conversions
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await channel.close(None)

    async def _read_downstream(self, stream: _Stream, requests: AsyncIterator[bytes]) -> None:
        """Envoy -> queue. The queue has no bound: each side may block on sending until the other receives."""
        flavour = stream.flavour
        async for data in requests:
            try:
                request = flavour.request.FromString(data)
            except DecodeError:
                raise StreamEnded(grpc.StatusCode.INTERNAL, "malformed discovery request") from None
            self._metrics.xds_proxy_requests.value += 1
            self._metrics.pilot_xds_recv_max.value = max(self._metrics.pilot_xds_recv_max.value, len(data))
            self._observe(request)
            stream.requests.put_nowait(data)
            if not stream.initial_sent and request.type_url == LISTENER_TYPE:
                stream.initial_sent = True
                for own in self._own_requests(flavour):
                    stream.requests.put_nowait(own)
        self._metrics.envoy_connection_terminations.add("cancelled")

    def _own_requests(self, flavour: Flavour) -> list[bytes]:
        requests = [
            flavour.subscription(type_url)
            for type_url in (NAME_TABLE_TYPE, PROXY_CONFIG_TYPE)
            if type_url in self._handlers
        ]
        if self._health is not None:
            requests.append(flavour.health(self._health))
        return requests

    def _observe(self, request: Any) -> None:
        error = request.error_detail.message if request.HasField("error_detail") else ""
        if error:
            text = " ".join(error.split())
            self.nacks[request.type_url] = text
            self._metrics.pilot_total_xds_rejects.add(request.type_url)
            log.warning('nack type=%s error="%s"', short_type(request.type_url), text.replace('"', "'"))
        elif request.response_nonce:
            self.nacks.pop(request.type_url, None)
            if request.type_url == EXTENSION_TYPE:
                self._extension_version = getattr(request, "version_info", "")
        self._on_request(request.type_url, request.response_nonce, error)

    async def _write_upstream(self, stream: _Stream, call: Any) -> None:
        while True:
            data = await stream.requests.get()
            try:
                await call.write(data)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
                # The reader sees why the stream ended.
                await stream.closed.wait()
                return

    async def _read_upstream(self, stream: _Stream, call: Any, context: Any) -> None:
        flavour = stream.flavour
        connected = False
        try:
            while (data := await call.read()) is not grpc.aio.EOF:
                if not connected:
                    connected = True
                    log.info("connected to upstream XDS server: %s", self._upstream.address)
                await self._response(stream, flavour, data, context)
        except grpc.aio.AioRpcError as error:
            details = ("" if connected else self._upstream.problem()) or error.details() or ""
            self._upstream_failed(error.code(), details, connected)
            raise StreamEnded(error.code(), details) from None
        code = await call.code()
        details = await call.details() or ""
        if code is not grpc.StatusCode.OK:
            self._upstream_failed(code, details, connected)
            raise StreamEnded(code, details)
        log.debug("upstream closed the stream")

    def _upstream_failed(self, code: grpc.StatusCode, details: str, connected: bool) -> None:
        expected = is_expected_end(code, details)
        if connected or expected:
            self._metrics.istiod_connection_terminations.add("cancelled" if expected else "error")
        else:
            self._metrics.istiod_connection_failures.value += 1
        level = logging.DEBUG if expected and connected else logging.WARNING
        log.log(level, "upstream [%d] %s: %s", self._count, code.name, " ".join(details.split()))

    async def _response(self, stream: _Stream, flavour: Flavour, data: bytes, context: Any) -> None:
        try:
            response = flavour.response.FromString(data)
        except DecodeError:
            raise StreamEnded(grpc.StatusCode.INTERNAL, "malformed discovery response") from None
        self._metrics.xds_proxy_responses.value += 1
        type_url = response.type_url
        handler = self._handlers.get(type_url)
        if handler is not None:
            await self._consume(stream, flavour, response, handler)
        elif type_url == EXTENSION_TYPE and self._convert is not None:
            # A download must not hold up what else discovery has to say.
            task = asyncio.create_task(self._converted(stream, flavour, response, self._convert, context))
            stream.conversions.add(task)
            task.add_done_callback(stream.conversions.discard)
        elif is_forwarded(type_url):
            await self._forward(stream, type_url, data, context)
        elif stream.debug is not None and type_url == stream.debug_type:
            if not stream.debug.done():
                stream.debug.set_result(response)
        else:
            log.error("Skipping unexpected response type %s", type_url)

    async def _forward(self, stream: _Stream, type_url: str, data: bytes, context: Any) -> None:
        started = asyncio.get_running_loop().time()
        async with stream.writing:
            await context.write(data)
        elapsed = asyncio.get_running_loop().time() - started
        self._metrics.pilot_xds_send_time.observe(elapsed)
        if elapsed > SLOW_SEND_SECONDS:
            log.warning("sending %s to Envoy took %.1fs", short_type(type_url), elapsed)

    async def _converted(
        self, stream: _Stream, flavour: Flavour, response: Any, convert: Converter, context: Any
    ) -> None:
        """Forwards extension configurations as they were converted, or refuses them in Envoy's place."""
        async with stream.converting:
            places = [item.resource if flavour.delta else item for item in response.resources]
            try:
                converted = await convert(places)
            except ValueError as problem:
                log.error("cannot convert %s: %s", short_type(response.type_url), problem)
                version = self._extension_version
                stream.requests.put_nowait(flavour.acknowledgement(response, str(problem), version))
                return
            for place, resource in zip(places, converted, strict=True):
                if resource is not place:
                    place.CopyFrom(resource)
            with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
                await self._forward(stream, response.type_url, response.SerializeToString(), context)

    async def _consume(self, stream: _Stream, flavour: Flavour, response: Any, handler: Handler) -> None:
        resource = flavour.first_resource(response)
        if resource is None:
            # Without a resource there is nothing to apply; Istio's agent does not acknowledge it either.
            return
        error = ""
        try:
            result = handler(resource.value)
            if result is not None:
                await result
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
            log.error("failed to apply %s: %s", short_type(response.type_url), error)
        stream.requests.put_nowait(flavour.acknowledgement(response, error))


async def _closed(stream: _Stream) -> None:
    await stream.closed.wait()


_EXPECTED_TEXTS = ("client disconnected", "error reading from server: EOF", "transport is closing", "Socket closed")


def is_expected_end(code: grpc.StatusCode, details: str) -> bool:
    """True if a stream's end is no error in the metrics.

    Source: istio/istio: pilot/pkg/grpc/grpc.go (IsExpectedGRPCError).
    """
    if code in (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED):
        return True
    if code is grpc.StatusCode.UNAVAILABLE and any(text in details for text in _EXPECTED_TEXTS):
        return True
    return "RST_STREAM with error code 0" in details or ("GOAWAY" in details and "NO_ERROR" in details)


async def serve_unix(
    path: str,
    service: str,
    methods: Mapping[str, Callable[[AsyncIterator[bytes], Any], Awaitable[None]]],
    options: Sequence[tuple[str, Any]],
    more: Sequence[grpc.GenericRpcHandler] = (),
) -> grpc.aio.Server:
    """A gRPC server of bidirectional byte streams, and of `more`, on a Unix socket (mode 0666, directory 0750).

    Raises:
        OSError: the socket cannot be made.
    """
    directory = os.path.dirname(path)
    if directory:
        os.makedirs(directory, mode=0o750, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    server = grpc.aio.server(options=options)
    handlers = {name: grpc.stream_stream_rpc_method_handler(behaviour) for name, behaviour in methods.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers), *more))
    try:
        server.add_insecure_port(f"unix:{path}")
    except RuntimeError as error:
        raise OSError(f"failed to listen on {path}: {error}") from None
    await server.start()
    os.chmod(path, 0o666)
    return server


def server_options(
    environment_streams: int, receive_limit: int, interval: float, timeout: float
) -> list[tuple[str, Any]]:
    """gRPC options of the agent's servers; `interval` and `timeout` are keepalive seconds."""
    return [
        ("grpc.max_concurrent_streams", min(environment_streams, INT_MAX)),
        ("grpc.max_receive_message_length", min(receive_limit, INT_MAX)),
        ("grpc.keepalive_time_ms", int(interval * 1000)),
        ("grpc.keepalive_timeout_ms", int(timeout * 1000)),
        ("grpc.http2.min_ping_interval_without_data_ms", 15000),
        ("grpc.so_reuseport", 0),
    ]


def channel_options(interval: float, timeout: float) -> list[tuple[str, Any]]:
    """gRPC options of the agent's client channels: each is its own TCP connection."""
    return [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.max_receive_message_length", INT_MAX),
        ("grpc.keepalive_time_ms", int(interval * 1000)),
        ("grpc.keepalive_timeout_ms", int(timeout * 1000)),
        ("grpc.http2.lookahead_bytes", 1024 * 1024),
        ("grpc.enable_retries", 0),
    ]

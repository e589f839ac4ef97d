"""The xDS proxy between a real gRPC client (as Envoy) and a real gRPC server (as discovery) (spec: agent 9)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import uvloop
from envoy.service.discovery.v3 import discovery_pb2
from free_ports import free_port
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import status_pb2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.debug_port import DebugPort, readable
from agent.http_client import Target, fetch
from agent.metrics import Metrics
from agent.protos import nds_pb2, proxy_config_pb2
from agent.xds_proxy import (
    CLUSTER_TYPE,
    DELTA,
    EXTENSION_TYPE,
    HEALTH_TYPE,
    LISTENER_TYPE,
    NAME_TABLE_TYPE,
    PROXY_CONFIG_TYPE,
    SERVICE,
    SOTW,
    Converter,
    Flavour,
    Handler,
    HealthEvent,
    Upstream,
    XdsProxy,
    channel_options,
    is_expected_end,
    is_forwarded,
    server_options,
    short_type,
)

DEADLINE = 10.0
Json = dict[str, Any]


def run(job: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(DEADLINE):
            await job()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(limited())


class Discovery:
    """A gRPC server that shows what it gets and sends what it is told, one stream at a time."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        self.streams: asyncio.Queue[tuple[int, Any, Flavour]] = asyncio.Queue()
        self.peers: list[str] = []
        self.metadata: list[dict[str, str]] = []
        self.ends: dict[int, asyncio.Future[tuple[grpc.StatusCode, str] | None]] = {}

    async def __aenter__(self) -> Discovery:
        self.server = grpc.aio.server()
        handlers = {
            flavour.method: grpc.stream_stream_rpc_method_handler(self._handler(flavour)) for flavour in (SOTW, DELTA)
        }
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop(None)

    def _handler(self, flavour: Flavour) -> Any:
        async def handle(requests: AsyncIterator[bytes], context: Any) -> None:
            number = len(self.peers)
            self.peers.append(context.peer())
            self.metadata.append(dict(context.invocation_metadata()))
            self.ends[number] = asyncio.get_running_loop().create_future()
            await self.streams.put((number, context, flavour))

            async def read() -> None:
                async for data in requests:
                    await self.requests.put((number, flavour.request.FromString(data)))

            reader = asyncio.create_task(read())
            await asyncio.wait({reader, self.ends[number]}, return_when=asyncio.FIRST_COMPLETED)
            reader.cancel()
            if self.ends[number].done():
                end = self.ends[number].result()
                if end is not None:
                    await context.abort(*end)

        return handle

    async def request(self) -> Any:
        return (await self.requests.get())[1]


class Rig:
    """Envoy, the proxy and discovery."""

    def __init__(
        self,
        tmp_path: Path,
        handlers: dict[str, Handler] | None = None,
        metadata: Any = None,
        convert: Converter | None = None,
    ) -> None:
        self.path, self.convert = str(tmp_path / "XDS"), convert
        self.discovery = Discovery()
        self.metrics = Metrics()
        self.handlers = handlers or {}
        self.seen: list[tuple[str, str, str]] = []
        self.call_metadata = metadata or (lambda: [("clusterid", "Kubernetes")])

    async def __aenter__(self) -> Rig:
        await self.discovery.__aenter__()
        address = f"127.0.0.1:{self.discovery.port}"
        upstream = Upstream(
            address,
            lambda: grpc.aio.insecure_channel(address, options=channel_options(30, 10)),
            lambda: self.call_metadata(),
        )
        self.proxy = XdsProxy(
            self.path,
            upstream,
            self.metrics,
            self.handlers,
            lambda *event: self.seen.append(event),
            self.convert,
        )
        await self.proxy.start(server_options(100, 4 << 20, 30, 10))
        self.channel = grpc.aio.insecure_channel(f"unix:{self.path}", options=[("grpc.use_local_subchannel_pool", 1)])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close(None)
        await self.proxy.stop()
        await self.discovery.__aexit__()

    def envoy(self, flavour: Flavour = DELTA) -> Any:
        return self.channel.stream_stream(f"/{SERVICE}/{flavour.method}")()

    async def connected(self, flavour: Flavour = DELTA) -> tuple[Any, int, Any]:
        """Envoy's call, and discovery's end of it, after the cluster and listener requests."""
        call = self.envoy(flavour)
        for type_url in (CLUSTER_TYPE, LISTENER_TYPE):
            await call.write(flavour.request(type_url=type_url).SerializeToString())
        number, context, _ = await self.discovery.streams.get()
        for type_url in (CLUSTER_TYPE, LISTENER_TYPE):
            assert (await self.discovery.request()).type_url == type_url
        return call, number, context


def response(flavour: Flavour, type_url: str, nonce: str, *resources: AnyMessage) -> bytes:
    message = flavour.response(type_url=type_url, nonce=nonce)
    for resource in resources:
        if flavour.delta:
            message.resources.add(name="r").resource.CopyFrom(resource)
        else:
            message.resources.add().CopyFrom(resource)
    if not flavour.delta:
        message.version_info = "v1"
    data: bytes = message.SerializeToString()
    return data


def packed(message: Any) -> AnyMessage:
    result = AnyMessage()
    result.Pack(message)
    return result


FLAVOURS = pytest.mark.parametrize("flavour", [SOTW, DELTA], ids=["sotw", "delta"])


@FLAVOURS
def test_messages_pass_unchanged_in_both_directions(tmp_path: Path, flavour: Flavour) -> None:
    async def job() -> None:
        async with Rig(tmp_path) as rig:
            call = rig.envoy(flavour)
            request = flavour.request(type_url=CLUSTER_TYPE, response_nonce="n")
            request.node.id = "sidecar~1.2.3.4~a.b~c"
            await call.write(request.SerializeToString())
            _, context, used = await rig.discovery.streams.get()
            assert used is flavour
            assert await rig.discovery.request() == request
            sent = response(flavour, CLUSTER_TYPE, "1", packed(nds_pb2.NameTable()))
            await context.write(sent)
            assert await call.read() == sent
            assert rig.metrics.xds_proxy_requests.value == 1
            assert rig.metrics.xds_proxy_responses.value == 1
            call.cancel()

    run(job)


def test_each_stream_has_its_own_connection(tmp_path: Path) -> None:
    async def job() -> None:
        async with Rig(tmp_path) as rig:
            for _ in range(3):
                call, _, _ = await rig.connected()
                call.cancel()
            assert len(set(rig.discovery.peers)) == 3

    run(job)


def test_metadata_of_a_call(tmp_path: Path) -> None:
    async def job() -> None:
        tokens = iter(("first", "second"))

        def metadata() -> list[tuple[str, str]]:
            return [("clusterid", "c1"), ("authorization", f"Bearer {next(tokens)}"), ("x-mine", "1")]

        async with Rig(tmp_path, metadata=metadata) as rig:
            for token in ("first", "second"):
                call, _, _ = await rig.connected()
                found = rig.discovery.metadata[-1]
                assert (found["clusterid"], found["authorization"], found["x-mine"]) == ("c1", f"Bearer {token}", "1")
                call.cancel()

    run(job)


@FLAVOURS
def test_what_the_agent_asks_for_itself(tmp_path: Path, flavour: Flavour) -> None:
    async def job() -> None:
        tables: list[nds_pb2.NameTable] = []
        handlers: dict[str, Handler] = {
            NAME_TABLE_TYPE: lambda data: tables.append(nds_pb2.NameTable.FromString(data)),
            PROXY_CONFIG_TYPE: lambda data: None,
        }
        async with Rig(tmp_path, handlers) as rig:
            rig.proxy.send_health(HealthEvent(False, "down"))
            call, _, context = await rig.connected(flavour)
            own = [await rig.discovery.request() for _ in range(3)]
            assert [request.type_url for request in own] == [NAME_TABLE_TYPE, PROXY_CONFIG_TYPE, HEALTH_TYPE]
            assert own[0] == flavour.request(type_url=NAME_TABLE_TYPE)
            assert own[2].error_detail.code == 13
            assert own[2].error_detail.message == "down"

            table = nds_pb2.NameTable()
            table.table["a.example"].ips.append("1.2.3.4")
            await context.write(response(flavour, NAME_TABLE_TYPE, "7", packed(table), packed(nds_pb2.NameTable())))
            ack = await rig.discovery.request()
            expected = flavour.request(type_url=NAME_TABLE_TYPE, response_nonce="7")
            if flavour is SOTW:
                expected.version_info = "v1"
            assert ack == expected
            assert tables == [table]

            await context.write(response(flavour, NAME_TABLE_TYPE, "8"))
            rig.proxy.send_health(HealthEvent(True))
            healthy = await rig.discovery.request()
            assert healthy == flavour.request(type_url=HEALTH_TYPE)
            await context.write(response(flavour, CLUSTER_TYPE, "9"))
            assert flavour.response.FromString(await call.read()).type_url == CLUSTER_TYPE
            call.cancel()

    run(job)


def test_own_requests_follow_the_first_listener_request_only(tmp_path: Path) -> None:
    async def job() -> None:
        async with Rig(tmp_path, {NAME_TABLE_TYPE: lambda data: None}) as rig:
            call = rig.envoy()
            rig.proxy.send_health(HealthEvent(True))
            for type_url in (CLUSTER_TYPE, LISTENER_TYPE, LISTENER_TYPE, CLUSTER_TYPE):
                await call.write(DELTA.request(type_url=type_url).SerializeToString())
            types = [(await rig.discovery.request()).type_url for _ in range(6)]
            assert types.count(NAME_TABLE_TYPE) == types.count(HEALTH_TYPE) == 1
            assert types[0] == CLUSTER_TYPE
            assert types.index(LISTENER_TYPE) < types.index(NAME_TABLE_TYPE) < types.index(HEALTH_TYPE)
            call.cancel()

    run(job)


@FLAVOURS
def test_a_handler_that_fails_is_a_nack(tmp_path: Path, flavour: Flavour) -> None:
    async def job() -> None:
        def fails(_: bytes) -> None:
            raise ValueError("bad table")

        async with Rig(tmp_path, {NAME_TABLE_TYPE: fails}) as rig:
            call, _, context = await rig.connected(flavour)
            await rig.discovery.request()
            await context.write(response(flavour, NAME_TABLE_TYPE, "5", packed(nds_pb2.NameTable())))
            nack = await rig.discovery.request()
            assert (nack.response_nonce, nack.error_detail.code) == ("5", 13)
            assert "bad table" in nack.error_detail.message
            call.cancel()

    run(job)


def test_other_types_are_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def job() -> None:
        async with Rig(tmp_path) as rig:
            call, _, context = await rig.connected()
            await context.write(response(DELTA, "type.googleapis.com/istio.nonsense", "1"))
            await context.write(response(DELTA, NAME_TABLE_TYPE, "2", packed(nds_pb2.NameTable())))
            await context.write(response(DELTA, "type.googleapis.com/istio.workload.Workload", "3"))
            received = DELTA.response.FromString(await call.read())
            assert received.nonce == "3"
            call.cancel()

    run(job)
    assert "Skipping unexpected response type type.googleapis.com/istio.nonsense" in caplog.text


def test_discoverys_error_reaches_envoy(tmp_path: Path) -> None:
    async def job() -> None:
        async with Rig(tmp_path) as rig:
            call, number, _ = await rig.connected()
            rig.discovery.ends[number].set_result((grpc.StatusCode.PERMISSION_DENIED, "not you"))
            assert await call.code() is grpc.StatusCode.PERMISSION_DENIED
            assert await call.details() == "not you"
            assert rig.metrics.istiod_connection_failures.value == 1

    run(job)


def test_a_clean_end_reaches_envoy(tmp_path: Path) -> None:
    async def job() -> None:
        async with Rig(tmp_path) as rig:
            call, number, _ = await rig.connected()
            rig.discovery.ends[number].set_result(None)
            assert await call.code() is grpc.StatusCode.OK

    run(job)


def test_an_unreachable_discovery_is_a_stream_error(tmp_path: Path) -> None:
    async def job() -> None:
        async with Rig(tmp_path) as rig:
            await rig.discovery.server.stop(None)
            call = rig.envoy()
            await call.write(DELTA.request(type_url=CLUSTER_TYPE).SerializeToString())
            assert await call.code() is grpc.StatusCode.UNAVAILABLE

    run(job)


def test_envoys_end_closes_the_upstream(tmp_path: Path) -> None:
    async def job() -> None:
        async with Rig(tmp_path) as rig:
            call, _, context = await rig.connected()
            gone = asyncio.Event()
            context.add_done_callback(lambda _: gone.set())
            call.cancel()
            await gone.wait()

    run(job)


def test_a_new_stream_closes_the_previous_one(tmp_path: Path) -> None:
    async def job() -> None:
        async with Rig(tmp_path) as rig:
            first, _, _ = await rig.connected()
            second, _, context = await rig.connected()
            assert await first.code() is grpc.StatusCode.OK
            await context.write(response(DELTA, CLUSTER_TYPE, "1"))
            assert DELTA.response.FromString(await second.read()).nonce == "1"
            second.cancel()

    run(job)


def test_a_nack_is_one_line_with_envoys_words(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def job() -> None:
        async with Rig(tmp_path) as rig:
            call, _, _ = await rig.connected()
            nack = DELTA.request(type_url=LISTENER_TYPE, response_nonce="3")
            nack.error_detail.CopyFrom(status_pb2.Status(code=13, message='Error adding "x":\n  no such filter'))
            await call.write(nack.SerializeToString())
            assert await rig.discovery.request() == nack
            assert rig.proxy.nacks == {LISTENER_TYPE: 'Error adding "x": no such filter'}
            assert rig.seen[-1] == (LISTENER_TYPE, "3", 'Error adding "x":\n  no such filter')
            await call.write(DELTA.request(type_url=LISTENER_TYPE, response_nonce="4").SerializeToString())
            await rig.discovery.request()
            assert rig.proxy.nacks == {}
            call.cancel()

    with caplog.at_level(logging.WARNING, "xdsproxy"):
        run(job)
    assert "nack type=Listener error=\"Error adding 'x': no such filter\"" in caplog.messages


def test_a_big_push_passes(tmp_path: Path) -> None:
    async def job() -> None:
        async with Rig(tmp_path) as rig:
            rig.channel = grpc.aio.insecure_channel(
                f"unix:{rig.path}",
                options=[("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)],
            )
            call, _, context = await rig.connected()
            big = AnyMessage(type_url=CLUSTER_TYPE, value=b"x" * (16 << 20))
            await context.write(response(DELTA, CLUSTER_TYPE, "1", big))
            assert len(await call.read()) > 16 << 20
            call.cancel()

    run(job)


def test_many_requests_without_a_reader_do_not_block(tmp_path: Path) -> None:
    async def job() -> None:
        async with Rig(tmp_path) as rig:
            call = rig.envoy()
            for number in range(2000):
                request = DELTA.request(type_url=CLUSTER_TYPE, response_nonce=str(number))
                await call.write(request.SerializeToString())
            for number in range(2000):
                assert (await rig.discovery.request()).response_nonce == str(number)
            call.cancel()

    run(job)


@given(data=st.binary(max_size=200))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_bytes_of_envoy_crash_or_hang_the_request_path(tmp_path: Path, data: bytes) -> None:
    async def job() -> None:
        async with Rig(tmp_path) as rig:
            call = rig.envoy()
            await call.write(data)
            try:
                await call.write(DELTA.request(type_url=CLUSTER_TYPE, response_nonce="end").SerializeToString())
            except grpc.aio.AioRpcError:  # the stream had been ended by then
                assert await call.code() is grpc.StatusCode.INTERNAL
                return
            reader = asyncio.ensure_future(_until(rig, "end"))
            ended = asyncio.ensure_future(call.code())
            done, pending = await asyncio.wait({reader, ended}, return_when=asyncio.FIRST_COMPLETED)
            assert done
            if ended in done:
                assert ended.result() is grpc.StatusCode.INTERNAL
            for task in pending:
                task.cancel()
            call.cancel()

    run(job)


async def _until(rig: Rig, nonce: str) -> None:
    while (await rig.discovery.request()).response_nonce != nonce:
        pass


@FLAVOURS
def test_extensions_are_converted_in_their_order_and_hold_up_nothing(tmp_path: Path, flavour: Flavour) -> None:
    async def job() -> None:
        gate = asyncio.Event()
        name = AnyMessage(type_url="a", value=b"converted")

        async def convert(resources: list[Any]) -> list[Any]:
            await gate.wait()
            return [name if resource.type_url == "a" else resource for resource in resources]

        async with Rig(tmp_path, convert=convert) as rig:
            call, _, context = await rig.connected(flavour)
            first, second = AnyMessage(type_url="a", value=b"1"), AnyMessage(type_url="b", value=b"2")
            await context.write(response(flavour, EXTENSION_TYPE, "1", first, second))
            await context.write(response(flavour, EXTENSION_TYPE, "2", second))
            await context.write(response(flavour, CLUSTER_TYPE, "3"))
            assert flavour.response.FromString(await call.read()).nonce == "3"
            gate.set()
            assert await call.read() == response(flavour, EXTENSION_TYPE, "1", name, second)
            assert await call.read() == response(flavour, EXTENSION_TYPE, "2", second)
            call.cancel()

    run(job)


@FLAVOURS
def test_extensions_that_cannot_be_converted_are_refused_by_the_agent(tmp_path: Path, flavour: Flavour) -> None:
    async def job() -> None:
        async def convert(resources: list[Any]) -> list[Any]:
            if len(resources) > 1:
                raise ValueError("no code")
            return resources

        async with Rig(tmp_path, convert=convert) as rig:
            call, _, context = await rig.connected(flavour)
            good = AnyMessage(type_url="a", value=b"1")
            await context.write(response(flavour, EXTENSION_TYPE, "1", good))
            assert await call.read() == response(flavour, EXTENSION_TYPE, "1", good)
            ack = flavour.request(type_url=EXTENSION_TYPE, response_nonce="1")
            if not flavour.delta:
                ack.version_info = "v1"
            await call.write(ack.SerializeToString())
            assert await rig.discovery.request() == ack
            await context.write(response(flavour, EXTENSION_TYPE, "2", good, good))
            nack = await rig.discovery.request()
            assert (nack.response_nonce, nack.error_detail.code, nack.error_detail.message) == ("2", 13, "no code")
            assert getattr(nack, "version_info", "v1") == "v1"
            await context.write(response(flavour, CLUSTER_TYPE, "3"))
            assert flavour.response.FromString(await call.read()).nonce == "3"
            call.cancel()

    run(job)


def test_debug_questions_ride_the_stream(tmp_path: Path) -> None:
    async def job() -> None:
        async with Rig(tmp_path) as rig:
            debug = DebugPort(rig.proxy, "127.0.0.1", str(tmp_path / "DEBUG"))
            port = free_port()
            await debug.start(port)

            async def get(path: str) -> Any:
                return await fetch(Target("127.0.0.1", port), "GET", path, timeout=DEADLINE)

            assert (await get("/debug/syncz")).status == 503
            assert (await get("/other")).status == 404
            call, _, context = await rig.connected()
            answer = asyncio.ensure_future(get("/debug/config_dump?resourceName=a.b"))
            question = await rig.discovery.request()
            assert question.type_url == "istio.io/debug/config_dump"
            assert list(question.resource_names_subscribe) == ["a.b"]
            body = AnyMessage(type_url="istio.io/debug", value=json.dumps({"clusters": [1]}).encode())
            await context.write(response(DELTA, question.type_url, "1", body))
            result = await answer
            assert result.status == 200
            assert json.loads(result.body) == {
                "versionInfo": "",
                "typeUrl": "istio.io/debug/config_dump",
                "nonce": "1",
                "resources": [{"@type": "istio.io/debug", "value": {"clusters": [1]}}],
            }
            answer = asyncio.ensure_future(get("/debug?resourceName=ndsz%3FproxyID%3Da.b"))
            question = await rig.discovery.request()
            assert question.type_url == "istio.io/debug"
            assert list(question.resource_names_subscribe) == ["ndsz?proxyID=a.b"]
            await context.write(response(DELTA, "istio.io/debug/config_dump", "2", body))  # late, and not asked for now
            await context.write(response(DELTA, question.type_url, "3", body))
            assert json.loads((await answer).body)["nonce"] == "3"
            await debug.stop()
            call.cancel()

    run(job)


@contextlib.asynccontextmanager
async def debug_channel(rig: Rig, tmp_path: Path) -> AsyncIterator[tuple[int, Any]]:
    """The debug port of an agent, and a gRPC channel to it."""
    debug, port = DebugPort(rig.proxy, "127.0.0.1", str(tmp_path / "DEBUG")), free_port()
    await debug.start(port)
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)])
    try:
        yield port, channel
    finally:
        await channel.close(None)
        await debug.stop()
        assert not (tmp_path / "DEBUG").exists()


@FLAVOURS
def test_debug_questions_over_grpc(tmp_path: Path, flavour: Flavour) -> None:
    async def job() -> None:
        async with Rig(tmp_path) as rig, debug_channel(rig, tmp_path) as (port, channel):
            sotw = channel.stream_stream(f"/{SERVICE}/{SOTW.method}")
            question = SOTW.request(type_url="istio.io/debug/syncz", resource_names=["a.b"])
            call = sotw()
            await call.write(question.SerializeToString())
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.UNKNOWN
            assert caught.value.details() == "the proxy is not connected to discovery"
            envoy, _, context = await rig.connected(flavour)
            for nonce in ("1", "2"):
                call = sotw()
                await call.write(question.SerializeToString())
                asked = await rig.discovery.request()
                names = asked.resource_names_subscribe if flavour.delta else asked.resource_names
                assert (asked.type_url, list(names)) == ("istio.io/debug/syncz", ["a.b"])
                body = AnyMessage(type_url="istio.io/debug", value=b"{}")
                await context.write(response(flavour, asked.type_url, nonce, body))
                answer = SOTW.response.FromString(await call.read())
                assert (answer.type_url, answer.nonce, list(answer.resources)) == (asked.type_url, nonce, [body])
                assert await call.code() is grpc.StatusCode.OK  # one question a stream
            page = await fetch(Target("127.0.0.1", port), "GET", "/other", timeout=DEADLINE)
            assert page.status == 404
            envoy.cancel()

    run(job)


def test_other_streams_on_the_debug_port(tmp_path: Path) -> None:
    async def job() -> None:
        async with Rig(tmp_path) as rig, debug_channel(rig, tmp_path) as (_, channel):
            for type_url in (CLUSTER_TYPE, "istio.io/debug"):
                call = channel.stream_stream(f"/{SERVICE}/{SOTW.method}")()
                await call.write(SOTW.request(type_url=type_url).SerializeToString())
                assert await call.read() is grpc.aio.EOF
                assert await call.code() is grpc.StatusCode.OK
            call = channel.stream_stream(f"/{SERVICE}/{DELTA.method}")()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.UNKNOWN, "not implemented")
            call = channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")()
            await call.write(b"\x3a\x00")  # list_services
            assert SERVICE.encode() in await call.read()
            call.cancel()

    run(job)


def test_the_first_bytes_on_the_debug_port_may_come_one_by_one(tmp_path: Path) -> None:
    async def job() -> None:
        async with Rig(tmp_path) as rig, debug_channel(rig, tmp_path) as (port, _):
            settings = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
            for start, answer in (
                (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings, settings[3:4]),
                (b"PUT / HTTP/1.1\r\nHost: x\r\n\r\n", b"HTTP/1.1 404"),
            ):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for byte in start:
                    writer.write(bytes((byte,)))
                    await asyncio.sleep(0)
                if start.startswith(b"PUT"):
                    writer.write_eof()
                got = await reader.readexactly(12)
                assert answer in got
                writer.close()

    run(job)


def test_a_debug_question_that_discovery_refuses_is_told(tmp_path: Path) -> None:
    async def job() -> None:
        async with Rig(tmp_path) as rig:
            _, number, _ = await rig.connected()
            answer = asyncio.ensure_future(rig.proxy.debug("istio.io/debug/syncz", [], DEADLINE))
            await rig.discovery.request()
            rig.discovery.ends[number].set_result((grpc.StatusCode.UNAUTHENTICATED, "authentication required"))
            with pytest.raises(ConnectionError, match="UNAUTHENTICATED: authentication required"):
                await answer

    run(job)


def test_debug_answers_are_readable() -> None:
    table = nds_pb2.NameTable()
    table.table["a"].ips.append("1.1.1.1")
    message = discovery_pb2.DiscoveryResponse(type_url="t")
    message.resources.add().Pack(table)
    message.resources.add(type_url="istio.io/debug", value=b"plain text")
    message.resources.add(type_url="type.googleapis.com/envoy.nothing.v3.Nothing", value=b"\xff")
    assert readable(message)["resources"] == [
        {"@type": NAME_TABLE_TYPE, "table": {"a": {"ips": ["1.1.1.1"]}}},
        {"@type": "istio.io/debug", "value": "plain text"},
        {"@type": "type.googleapis.com/envoy.nothing.v3.Nothing", "value": "/w=="},
    ]


def test_debug_answers_of_types_that_are_not_loaded_yet() -> None:
    """In a process of its own: which messages this one knows depends on the tests before."""
    done = subprocess.run([sys.executable, "-c", NESTED], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        {
            "@type": "type.googleapis.com/envoy.config.cluster.v3.Cluster",
            "name": "a",
            "transportSocket": {
                "typedConfig": {"@type": f"type.googleapis.com/{TLS_CONTEXT}", "sni": "b"},
            },
        }
    ]


TLS_CONTEXT = "envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext"
# The bytes of Cluster{name: a, transport_socket: {typed_config: UpstreamTlsContext{sni: b}}}.
NESTED = f"""
import json
from envoy.service.discovery.v3 import discovery_pb2
from google.protobuf.any_pb2 import Any
from google.protobuf import descriptor_pool
from agent.debug_port import readable
try:
    descriptor_pool.Default().FindMessageTypeByName("{TLS_CONTEXT}")
except KeyError:
    pass
else:
    raise SystemExit("the type is known already")
def field(number, data):
    key = number << 3 | 2
    return (bytes([key & 0x7F | 0x80, key >> 7]) if key > 127 else bytes([key])) + bytes([len(data)]) + data
context = Any(type_url="type.googleapis.com/{TLS_CONTEXT}", value=field(2, b"b")).SerializeToString()
cluster = field(1, b"a") + field(24, field(3, context))
message = discovery_pb2.DiscoveryResponse()
message.resources.add(type_url="type.googleapis.com/envoy.config.cluster.v3.Cluster", value=cluster)
print(json.dumps(readable(message)["resources"]))
"""


def test_type_names() -> None:
    assert short_type(CLUSTER_TYPE) == "Cluster"
    assert short_type("istio.io/debug/syncz") == "syncz"
    assert is_forwarded(CLUSTER_TYPE)
    assert not is_forwarded(PROXY_CONFIG_TYPE)
    assert proxy_config_pb2.ProxyConfig.DESCRIPTOR.full_name == "istio.mesh.v1alpha1.ProxyConfig"


@pytest.mark.parametrize(
    ("code", "details", "expected"),
    [
        (grpc.StatusCode.CANCELLED, "", True),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "", True),
        (grpc.StatusCode.UNAVAILABLE, "transport is closing", True),
        (grpc.StatusCode.UNAVAILABLE, "connection refused", False),
        (grpc.StatusCode.INTERNAL, "stream terminated by RST_STREAM with error code 0", True),
        (grpc.StatusCode.PERMISSION_DENIED, "", False),
    ],
)
def test_expected_ends(code: grpc.StatusCode, details: str, expected: bool) -> None:
    assert is_expected_end(code, details) is expected


def test_limits_beyond_what_grpc_takes_are_no_limits() -> None:
    options = dict(server_options(1 << 40, 1 << 40, 30.0, 10.0))
    assert options["grpc.max_concurrent_streams"] == options["grpc.max_receive_message_length"] == (1 << 31) - 1


def test_a_debug_port_that_is_none_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    port = DebugPort(XdsProxy.__new__(XdsProxy), "127.0.0.1", "")
    asyncio.run(port.start(99999))
    assert "Error listening on debug port 99999: bind(): port must be 0-65535" in caplog.text

"""HTTP probes over HTTP/2 and over connections that are kept; the application is an Envoy (spec: agent 14.4)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import h2.config
import h2.connection
import h2.errors
import h2.events
import pytest
import uvloop
from agent_authority import Issuer
from free_ports import free_port

import agent.http2
from agent.admin import parse_stats
from agent.app_probe import AppProber
from agent.envoy import find_binary
from agent.http import Response
from agent.http_client import HTTPError, Target, fetch
from agent.http_server import Request
from agent.probe_config import parse_probers

DEADLINE = 20.0
BODY = "y" * 20000


def run(job: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(DEADLINE):
            await job()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(limited())


def certificate(tmp_path: Path) -> Path:
    key, chain = Issuer().pair("app")
    (tmp_path / "pem").write_bytes(key + chain)
    return tmp_path / "pem"


class Application:
    """An Envoy that answers over TLS, over HTTP/2 if the client wants it, and counts."""

    def __init__(self, admin: int) -> None:
        self._admin = Target("127.0.0.1", admin)

    async def count(self, name: str) -> int:
        text = (await fetch(self._admin, "GET", "/stats?filter=^http.app.", timeout=DEADLINE)).body.decode()
        return parse_stats(text)[f"http.app.{name}"]


@contextlib.asynccontextmanager
async def application(tmp_path: Path, port: int, admin: int) -> AsyncIterator[Application]:
    pem = {"filename": str(certificate(tmp_path))}
    paths = {"/ok": (200, BODY), "/bad": (418, "teapot")}
    routes = [
        {"match": {"path": path}, "direct_response": {"status": status, "body": {"inline_string": body}}}
        for path, (status, body) in paths.items()
    ]
    moved = {"host_redirect": "127.0.0.1", "port_redirect": port, "path_redirect": "/bad"}
    away = [{"match": {"path": "/moved"}, "redirect": moved}]
    here = [{"match": {"path": "/bad"}, "direct_response": {"status": 418, "body": {"inline_string": "teapot"}}}]
    manager = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "app",
        "http_filters": [
            {
                "name": "router",
                "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"},
            }
        ],
        "route_config": {
            "max_direct_response_body_size_bytes": 65536,
            "virtual_hosts": [
                {"name": "app", "domains": [f"app.example:{port}"], "routes": routes + away},
                # Where it was told to go it asks for by that name (net/http: Client.do).
                {"name": "moved", "domains": [f"127.0.0.1:{port}"], "routes": here},
            ],
        },
    }
    tls = {
        "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
        "common_tls_context": {
            "alpn_protocols": ["h2", "http/1.1"],
            "tls_certificates": [{"certificate_chain": pem, "private_key": pem}],
        },
    }

    def address(number: int) -> dict[str, Any]:
        return {"socket_address": {"address": "127.0.0.1", "port_value": number}}

    bootstrap = {
        "admin": {"address": address(admin)},
        "static_resources": {
            "listeners": [
                {
                    "name": "app",
                    "address": address(port),
                    "filter_chains": [
                        {
                            "filters": [{"name": "http", "typed_config": manager}],
                            "transport_socket": {"name": "tls", "typed_config": tls},
                        }
                    ],
                }
            ]
        },
    }
    (tmp_path / "envoy.json").write_text(json.dumps(bootstrap))
    command = [find_binary("/usr/local/bin/envoy"), "-c", str(tmp_path / "envoy.json"), "--disable-hot-restart"]
    process = await asyncio.create_subprocess_exec(
        *command, "--concurrency", "1", "-l", "info", stderr=asyncio.subprocess.PIPE
    )
    try:
        assert process.stderr is not None
        while b"starting main dispatch loop" not in await process.stderr.readline():
            assert process.returncode is None
        yield Application(admin)
    finally:
        process.kill()
        await process.wait()


def prober(port: int, path: str, scheme: str = "HTTPS", timeout: int = 5, **settings: Any) -> AppProber:
    action = {"port": port, "path": path, "scheme": scheme}
    probers = parse_probers(json.dumps({"/app-health/a/livez": {"httpGet": action, "timeoutSeconds": timeout}}))
    return AppProber(probers, "127.0.0.1", 15020, ipv6=False, **settings)


async def probe(prober: AppProber, *headers: tuple[str, str]) -> Response:
    sent = [("Host", "app.example:15020"), ("User-Agent", "kube-probe/1.30"), *headers]
    return await prober.serve(Request("GET", "/app-health/a/livez", "", sent, "10.0.0.1"))


@pytest.mark.parametrize("http2", [True, False])
@pytest.mark.parametrize("keep", [True, False])
def test_protocol_and_connections_of_https_probes(tmp_path: Path, http2: bool, keep: bool) -> None:
    async def job() -> None:
        port = free_port()
        async with application(tmp_path, port, free_port()) as app:
            total = 0
            for path, status, size in (("/ok", 200, 10240), ("/bad", 418, 6), ("/moved", 418, 6)):
                prober_ = prober(port, path, http2=http2, keep=keep)
                for _ in range(3):
                    answer = await probe(prober_)
                    assert (answer.status, len(answer.body)) == (status, size), path
                requests = 6 if path == "/moved" else 3
                total += 1 if keep else requests
                prober_.close()
            speaks, silent = ("http2", "http1") if http2 else ("http1", "http2")
            assert await app.count(f"downstream_cx_{speaks}_total") == total
            assert await app.count(f"downstream_cx_{silent}_total") == 0
            assert await app.count("downstream_rq_total") == 12

    run(job)


def test_a_probe_that_asks_for_a_close_is_not_kept(tmp_path: Path) -> None:
    async def job() -> None:
        port = free_port()
        async with application(tmp_path, port, free_port()) as app:
            for http2 in (True, False):
                prober_ = prober(port, "/ok", http2=http2, keep=True)
                for _ in range(2):
                    assert (await probe(prober_, ("Connection", "close"))).status == 200
            assert await app.count("downstream_cx_total") == 4

    run(job)


Serve = Callable[[h2.connection.H2Connection, h2.events.Event, asyncio.StreamWriter], None]


@contextlib.asynccontextmanager
async def odd_application(tmp_path: Path, serve: Serve) -> AsyncIterator[tuple[int, list[int]]]:
    """An HTTP/2 server that does with each event what it is told; its port, and the number of its connections."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate(tmp_path))
    context.set_alpn_protocols(["h2"])
    connections: list[int] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(len(connections) + 1)
        config = h2.config.H2Configuration(client_side=False, header_encoding="utf-8")
        connection = h2.connection.H2Connection(config)
        connection.initiate_connection()
        writer.write(connection.data_to_send())
        while data := await reader.read(65536):
            for event in connection.receive_data(data):
                serve(connection, event, writer)
            if writer.is_closing():
                return
            writer.write(connection.data_to_send())

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1], connections
    finally:
        server.close()


def answer(connection: h2.connection.H2Connection, stream: int) -> None:
    connection.send_headers(stream, [(":status", "204")], end_stream=True)


def test_a_server_that_says_goodbye_is_asked_on_a_new_connection(tmp_path: Path) -> None:
    def serve(connection: h2.connection.H2Connection, event: h2.events.Event, _: asyncio.StreamWriter) -> None:
        if isinstance(event, h2.events.RequestReceived):
            answer(connection, event.stream_id)
            # The last stream that it will answer: the probe after this one has to go elsewhere.
            connection.close_connection(last_stream_id=event.stream_id)

    async def job() -> None:
        async with odd_application(tmp_path, serve) as (port, connections):
            kept = prober(port, "/", keep=True)
            assert [(await probe(kept)).status for _ in range(3)] == [204] * 3
            assert connections == [1, 2, 3]

    run(job)


def test_a_server_that_refuses_a_kept_connection_is_asked_on_a_new_one(tmp_path: Path) -> None:
    def serve(connection: h2.connection.H2Connection, event: h2.events.Event, _: asyncio.StreamWriter) -> None:
        if isinstance(event, h2.events.RequestReceived):
            if event.stream_id == 1:
                answer(connection, event.stream_id)
            else:
                connection.reset_stream(event.stream_id, h2.errors.ErrorCodes.REFUSED_STREAM)

    async def job() -> None:
        async with odd_application(tmp_path, serve) as (port, connections):
            kept = prober(port, "/", keep=True)
            assert [(await probe(kept)).status for _ in range(3)] == [204] * 3
            assert connections == [1, 2, 3]

    run(job)


def reset(connection: h2.connection.H2Connection, event: h2.events.Event, _: asyncio.StreamWriter) -> None:
    if isinstance(event, h2.events.RequestReceived):
        connection.reset_stream(event.stream_id, h2.errors.ErrorCodes.INTERNAL_ERROR)


def rubbish(_: h2.connection.H2Connection, event: h2.events.Event, writer: asyncio.StreamWriter) -> None:
    if isinstance(event, h2.events.RequestReceived):
        writer.write(b"\x00\x00\x04\x01\x05\x00\x00\x00\x01" + b"\xff" * 4)  # headers that no table unpacks


def hang_up(_: h2.connection.H2Connection, event: h2.events.Event, writer: asyncio.StreamWriter) -> None:
    if isinstance(event, h2.events.RequestReceived):
        writer.close()


@pytest.mark.parametrize("serve", [reset, rubbish, hang_up])
def test_a_server_that_does_not_answer_fails_the_probe(
    tmp_path: Path, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async def job() -> None:
        async with odd_application(tmp_path, serve) as (port, connections):
            assert (await probe(prober(port, "/"))).status == 500
            assert connections == [1]
            assert "Request to probe app failed: http2: " in caplog.text

    run(job)


def test_a_silent_server_is_asked_for_a_sign_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent.http2, "READ_IDLE_SECONDS", 0.05)
    pings: list[int] = []

    def serve(connection: h2.connection.H2Connection, event: h2.events.Event, _: asyncio.StreamWriter) -> None:
        if isinstance(event, h2.events.PingReceived):  # h2 answers it by itself
            pings.append(1)
            if len(pings) == 3:
                answer(connection, 1)

    async def job() -> None:
        async with odd_application(tmp_path, serve) as (port, _):
            assert (await probe(prober(port, "/", timeout=0))).status == 204
            assert len(pings) == 3

    run(job)


def test_a_dead_server_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("READ_IDLE_SECONDS", "PING_SECONDS"):
        monkeypatch.setattr(agent.http2, name, 0.05)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65536):
            pass

    async def job() -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate(tmp_path))
        context.set_alpn_protocols(["h2"])
        server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
        target = Target("127.0.0.1", server.sockets[0].getsockname()[1])
        client = prober(target.port, "/")._clients["/app-health/a/livez"]
        with pytest.raises(HTTPError, match="http2: client connection lost"):
            await client.get(Target(target.host, target.port, tls=client.tls), "/", [("Host", "a")], 10)
        server.close()

    run(job)


def test_plain_connections_are_kept_too(tmp_path: Path) -> None:
    connections: list[int] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(1)
        for last in (False, True):
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"connection: close" not in head.lower()
            # The second time it closes without saying so: the next probe finds that out.
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 20000\r\n\r\n" + b"z" * 20000)
            if last:
                writer.close()

    async def job() -> None:
        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        kept = prober(server.sockets[0].getsockname()[1], "/", scheme="HTTP", keep=True)
        for _ in range(6):
            response = await probe(kept)
            assert (response.status, len(response.body)) == (200, 10240)
        assert len(connections) == 3
        kept.close()
        server.close()

    run(job)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("scheme", ["HTTP", "HTTPS"])
def test_a_body_without_end_is_no_failure(tmp_path: Path, scheme: str, keep: bool) -> None:
    def serve(connection: h2.connection.H2Connection, event: h2.events.Event, _: asyncio.StreamWriter) -> None:
        if isinstance(event, h2.events.RequestReceived):
            connection.send_headers(event.stream_id, [(":status", "200")])
        if isinstance(event, h2.events.RequestReceived | h2.events.WindowUpdated):
            while room := min(connection.local_flow_control_window(1), 16384):
                connection.send_data(1, b"z" * room)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"z" * 65536)
                await writer.drain()

    async def ask(port: int) -> None:
        answer = await probe(prober(port, "/", scheme=scheme, keep=keep))
        assert (answer.status, len(answer.body)) == (200, 10240)

    async def job() -> None:
        if scheme == "HTTPS":
            async with odd_application(tmp_path, serve) as (port, _):
                await ask(port)
            return
        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        await ask(server.sockets[0].getsockname()[1])
        server.close()

    run(job)

"""Application probes that the kubelet sends to the agent (``/app-health/...``, ``/app-lifecycle/...``).

Each goes to the pod's own address from 127.0.0.6 (::6), which the traffic rules let through.

Source: istio/istio: pilot/cmd/pilot-agent/status/server.go (handleAppProbe), pilot/cmd/pilot-agent/status/dialer_others.go.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import socket
import ssl
import struct
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from agent.errors import AgentError

if TYPE_CHECKING:
    from aiohttp import web

log = logging.getLogger("probes")

_PATH = re.compile(r"/(app-health|app-lifecycle)/[^/]+/(livez|readyz|startupz|prestopz|poststartz)")
BODY_LIMIT = 10 * 1024
MAX_REDIRECTS = 10
# A second in TIME_WAIT instead of sixty.
_LINGER = struct.pack("ii", 1, 1)


@dataclass(frozen=True)
class Prober:
    """One probe; `kind` is ``httpGet``, ``tcpSocket`` or ``grpc``; `timeout` in seconds, 0 as Kubernetes wrote it."""

    kind: str
    port: int
    path: str = "/"
    https: bool = False
    service: str = ""
    timeout: int = 0


def parse_probers(text: str) -> dict[str, Prober]:
    """The map of ``ISTIO_KUBE_APP_PROBERS``.

    Raises:
        AgentError: not JSON, a path that is no probe's, not exactly one kind, or a port that is no integer.
    """
    if not text:
        return {}
    try:
        raw = json.loads(text)
        if not isinstance(raw, dict):
            raise ValueError("not an object")
    except ValueError as error:
        raise AgentError("failed to decode app prober", error) from None
    return {path: _prober(path, value) for path, value in raw.items()}


def _prober(path: str, raw: Any) -> Prober:
    if _PATH.fullmatch(path) is None:
        raise AgentError(f"invalid path {path}", f"must be in form of regex pattern ^{_PATH.pattern}$")
    kinds = [kind for kind in ("httpGet", "tcpSocket", "grpc") if isinstance(raw, dict) and raw.get(kind) is not None]
    if len(kinds) != 1:
        raise AgentError(f"invalid prober type for {path}", "must be one of type httpGet, tcpSocket or gRPC")
    action = raw[kinds[0]]
    port = action.get("port") if isinstance(action, dict) else None
    if isinstance(port, bool) or not isinstance(port, int):
        raise AgentError(f"invalid prober config for {path}", "the port must be int type")
    target = str(action.get("path") or "/")
    return Prober(
        kind=kinds[0],
        port=port,
        path=target if target.startswith("/") else f"/{target}",
        https=str(action.get("scheme", "")) == "HTTPS",
        service=str(action.get("service") or ""),
        timeout=int(raw.get("timeoutSeconds") or 0),
    )


class AppProber:
    """Runs probes.

    Args:
        probers: by path.
        destination: the pod's address, or ``localhost``.
        status_port: the agent's own, replaced in forwarded Host headers.
        ipv6: bind ``::6`` instead of 127.0.0.6.
        keepalive: keep connections of HTTP probes.
    """

    def __init__(
        self, probers: Mapping[str, Prober], destination: str, status_port: int, *, ipv6: bool, keepalive: bool = False
    ) -> None:
        self._probers, self._destination, self._status_port = probers, destination, status_port
        self._source = "::6" if ipv6 else "127.0.0.6"
        self._keepalive = keepalive
        self._sessions: dict[str, Any] = {}

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()
        self._sessions.clear()

    async def serve(self, request: web.BaseRequest) -> web.Response:
        from aiohttp import web

        prober = self._probers.get(request.path)
        if prober is None:
            log.error("Prober does not exists url %s", request.path)
            return web.Response(status=400, text=f"app prober config does not exists for {request.path}")
        if prober.kind == "httpGet":
            return await self._http(prober, request)
        probe = self._tcp if prober.kind == "tcpSocket" else self._grpc
        return web.Response(status=200 if await probe(prober, request.headers.get("User-Agent", "")) else 500)

    def _session(self, path: str) -> Any:
        from aiohttp import ClientSession, DummyCookieJar, TCPConnector

        if path not in self._sessions:
            connector = TCPConnector(
                local_addr=(self._source, 0), ssl=_unverified(), force_close=not self._keepalive, ttl_dns_cache=0
            )
            self._sessions[path] = ClientSession(
                connector=connector, cookie_jar=DummyCookieJar(), auto_decompress=False, trust_env=False
            )
        return self._sessions[path]

    async def _http(self, prober: Prober, request: web.BaseRequest) -> web.Response:
        from aiohttp import ClientError, ClientTimeout, web
        from multidict import CIMultiDict

        headers = CIMultiDict((name, value) for name, value in request.headers.items() if name.lower() != "connection")
        headers["Host"] = self._host(request.host, prober.port)
        scheme = "https" if prober.https else "http"
        host = f"[{self._destination}]" if ":" in self._destination else self._destination
        url = f"{scheme}://{host}:{prober.port}{prober.path}"
        session = self._session(request.path)
        try:
            async with asyncio.timeout(prober.timeout or None):
                for _ in range(MAX_REDIRECTS):
                    async with session.get(
                        url, headers=headers, allow_redirects=False, timeout=ClientTimeout(total=None)
                    ) as response:
                        location = response.headers.get("Location", "")
                        if 300 <= response.status < 400 and location:
                            target = response.url.join(type(response.url)(location))
                            if target.host == urlsplit(url).hostname:
                                url = str(target)
                                continue
                        if 300 <= response.status < 400:
                            return web.Response(status=200)
                        body = await response.content.read(BODY_LIMIT)
                        return web.Response(status=response.status, body=body)
            raise ClientError("stopped after 10 redirects")
        except (ClientError, TimeoutError, OSError, ValueError) as error:
            log.error(
                "Request to probe app failed: %s, original URL path = %s, app URL path = %s",
                error or "timeout",
                request.path,
                prober.path,
            )
            return web.Response(status=500)

    def _host(self, host: str, port: int) -> str:
        name, separator, own = host.rpartition(":")
        return f"{name}:{port}" if separator and own == str(self._status_port) else host

    def _connect_socket(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._source else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER)
        try:
            sock.bind((self._source, 0))
        except OSError:
            sock.close()
            raise
        return sock

    async def _open(self, prober: Prober) -> socket.socket:
        sock = self._connect_socket()
        destination = self._destination
        if destination == "localhost":
            destination = "::1" if ":" in self._source else "127.0.0.1"
        try:
            await asyncio.get_running_loop().sock_connect(sock, (destination, prober.port))
        except BaseException:
            sock.close()
            raise
        return sock

    async def _tcp(self, prober: Prober, _agent: str) -> bool:
        try:
            async with asyncio.timeout(prober.timeout or None):
                sock = await self._open(prober)
            sock.close()
        except (OSError, TimeoutError):
            return False
        return True

    async def _grpc(self, prober: Prober, agent: str) -> bool:
        import grpc
        import grpc.aio

        if prober.timeout <= 0:
            log.error("grpc request not finished within timeout: timeoutSeconds is 0")
            return False
        options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
        if agent:
            options.append(("grpc.primary_user_agent", agent))  # type: ignore[arg-type]
        try:
            async with asyncio.timeout(prober.timeout), self._relay(prober) as address:
                async with grpc.aio.insecure_channel(address, options=options) as channel:
                    check = channel.unary_unary("/grpc.health.v1.Health/Check")
                    answer = await check(_health_request(prober.service), timeout=prober.timeout)
        except grpc.aio.AioRpcError as error:
            log.error("grpc probe failed: %s %s", error.code().name, error.details())
            return False
        except (OSError, TimeoutError) as error:
            log.error("grpc probe failed: %s", error or "timeout")
            return False
        return answer == _SERVING

    @contextlib.asynccontextmanager
    async def _relay(self, prober: Prober) -> AsyncIterator[str]:
        """A Unix socket that leads to the application: gRPC cannot choose a connection's source address."""
        tasks: list[asyncio.Task[None]] = []

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                far_reader, far_writer = await asyncio.open_connection(sock=await self._open(prober))
            except OSError:
                writer.close()
                return
            tasks.append(asyncio.create_task(_copy(reader, far_writer)))
            tasks.append(asyncio.create_task(_copy(far_reader, writer)))

        with tempfile.TemporaryDirectory(dir=None) as directory:
            path = os.path.join(directory, "probe")
            server = await asyncio.start_unix_server(accept, path)
            try:
                yield f"unix:{path}"
            finally:
                server.close()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


# grpc.health.v1.HealthCheckResponse{status: SERVING} (grpc/grpc-proto: grpc/health/v1/health.proto).
_SERVING = b"\x08\x01"


def _health_request(service: str) -> bytes:
    """grpc.health.v1.HealthCheckRequest: field 1 is the service's name."""
    from google.protobuf.wrappers_pb2 import StringValue

    data: bytes = StringValue(value=service).SerializeToString()
    return data


def _unverified() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context

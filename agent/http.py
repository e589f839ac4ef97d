"""HTTP/1.1 for the status server, Envoy's admin interface, scrapes and probes: h11 on the agent's event loop.

A web framework would cost more memory and start-up time than the rest of the agent's code together; h11 itself is
loaded with the first exchange.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
import os
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import unquote

if TYPE_CHECKING:
    import h11

log = logging.getLogger("default")

Headers = Sequence[tuple[str, str]]

READ_SIZE = 65536
REQUEST_BODY_LIMIT = 1 << 20
GZIP_MINIMUM = 1024
IDLE_SECONDS = 60.0
_REASONS = {200: "OK", 400: "Bad Request", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed"}
# One second in TIME_WAIT instead of sixty, as Kubernetes' own probes.
LINGER = struct.pack("ii", 1, 1)


def header(headers: Headers, name: str) -> str:
    """The first value of a header, empty if there is none; `name` in lower case."""
    return next((value for key, value in headers if key.lower() == name), "")


@dataclass(frozen=True)
class Request:
    """A request to the server; `path` is decoded, `query` is not."""

    method: str
    path: str
    query: str
    headers: Headers
    peer: str
    body: bytes = b""

    def header(self, name: str) -> str:
        return header(self.headers, name)


@dataclass(frozen=True)
class Response:
    """An answer, sent or received."""

    status: int
    body: bytes = b""
    headers: Headers = field(default_factory=tuple)

    def header(self, name: str) -> str:
        return header(self.headers, name)


def text_response(status: int, text: str, *headers: tuple[str, str]) -> Response:
    """A response with a line of text."""
    return Response(status, text.encode(), (("Content-Type", "text/plain; charset=utf-8"), *headers))


Handler = Callable[[Request], Awaitable[Response]]


class Server:
    """Serves one socket."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, sock: socket.socket) -> None:
        """Listens on a bound socket and owns it from then on."""
        self._server = await asyncio.start_server(self._accept, sock=sock)

    async def stop(self) -> None:
        """Closes the socket and every connection."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        import h11

        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._connection(reader, writer)
        except (h11.RemoteProtocolError, ConnectionError, TimeoutError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        import h11

        connection = h11.Connection(h11.SERVER)
        peer = str(writer.get_extra_info("peername")[0])
        while True:
            try:
                request = await _read_request(connection, reader, peer)
            except h11.RemoteProtocolError as error:
                writer.write(_encode(connection, text_response(error.error_status_hint, f"{error}\n"), "GET"))
                return
            if request is None:
                return
            try:
                response = await self._handler(request)
            except Exception:
                log.exception("failed to handle %s %s", request.method, request.path)
                response = Response(500)
            writer.write(_encode(connection, _compressed(request, response), request.method))
            await writer.drain()
            if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                return
            connection.start_next_cycle()


async def _event(connection: h11.Connection, reader: asyncio.StreamReader) -> object:
    import h11

    while (event := connection.next_event()) is h11.NEED_DATA:
        connection.receive_data(await reader.read(READ_SIZE))
    return event


async def _read_request(connection: h11.Connection, reader: asyncio.StreamReader, peer: str) -> Request | None:
    import h11

    async with asyncio.timeout(IDLE_SECONDS):
        first = await _event(connection, reader)
        if not isinstance(first, h11.Request):
            return None
        body = b""
        while isinstance(event := await _event(connection, reader), h11.Data):
            body += event.data
            if len(body) > REQUEST_BODY_LIMIT:
                raise h11.RemoteProtocolError("request body too large", error_status_hint=413)
        if not isinstance(event, h11.EndOfMessage):
            return None
    path, _, query = first.target.decode("latin-1").partition("?")
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in first.headers.raw_items()]
    return Request(first.method.decode("latin-1"), unquote(path), query, headers, peer, body)


def _compressed(request: Request, response: Response) -> Response:
    if len(response.body) < GZIP_MINIMUM or "gzip" not in request.header("accept-encoding"):
        return response
    headers = (*response.headers, ("Content-Encoding", "gzip"), ("Vary", "Accept-Encoding"))
    return Response(response.status, gzip.compress(response.body, 5), headers)


def _encode(connection: h11.Connection, response: Response, method: str) -> bytes:
    import h11

    headers = [*response.headers, ("Content-Length", str(len(response.body)))]
    head = h11.Response(status_code=response.status, headers=headers, reason=_REASONS.get(response.status, "").encode())
    parts = [connection.send(head)]
    if response.body and method != "HEAD":
        parts.append(connection.send(h11.Data(data=response.body)))
    parts.append(connection.send(h11.EndOfMessage()))
    return b"".join(part for part in parts if part)


class HTTPError(Exception):
    """No usable answer."""


@dataclass(frozen=True)
class Target:
    """Where a request goes.

    Args:
        host: an address, or ``localhost`` for either loopback address.
        port: TCP port.
        source: local address to bind; empty for the kernel's choice.
        tls: context, None for plain text.
    """

    host: str
    port: int
    source: str = ""
    tls: ssl.SSLContext | None = None

    @property
    def authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


async def connect(target: Target) -> socket.socket:
    """A connected non-blocking socket.

    Raises:
        OSError: no connection.
    """
    loop = asyncio.get_running_loop()
    hosts = ["127.0.0.1", "::1"] if target.host == "localhost" else [target.host]
    if target.source and len(hosts) > 1:
        hosts = [host for host in hosts if (":" in host) == (":" in target.source)]
    problem: OSError | None = None
    for host in hosts:
        sock = socket.socket(
            socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK
        )
        try:
            if target.source:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER)
                sock.bind((target.source, 0))
            await loop.sock_connect(sock, (host, target.port))
            return sock
        except OSError as error:
            sock.close()
            problem = error
        except BaseException:
            sock.close()
            raise
    raise problem or OSError("no address")


async def fetch(
    target: Target,
    method: str,
    path: str,
    headers: Iterable[tuple[str, str]] = (),
    *,
    timeout: float | None,
    limit: int | None = None,
    cut: bool = False,
) -> Response:
    """One request on a connection of its own.

    Args:
        path: with its query, already encoded.
        headers: ``Host`` is added if it is not among them.
        timeout: seconds for the whole exchange, None for no limit.
        limit: bytes of the body; beyond them it is an error, or with `cut` the rest is not read.

    Raises:
        HTTPError: no whole answer.
    """
    import h11

    try:
        async with asyncio.timeout(timeout):
            sock = await connect(target)
            reader, writer = await asyncio.open_connection(
                sock=sock, ssl=target.tls, server_hostname=target.host if target.tls is not None else None
            )
            try:
                return await _exchange(reader, writer, target, method, path, list(headers), limit, cut)
            finally:
                writer.close()
    except TimeoutError:
        raise HTTPError(f"no answer within {timeout:g}s" if timeout else "connection timed out") from None
    except OSError as error:
        raise HTTPError(os.strerror(error.errno).lower() if error.errno else str(error)) from None
    except h11.ProtocolError as error:
        raise HTTPError(str(error)) from None


async def _exchange(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    target: Target,
    method: str,
    path: str,
    headers: list[tuple[str, str]],
    limit: int | None,
    cut: bool,
) -> Response:
    import h11

    connection = h11.Connection(h11.CLIENT)
    if not header(headers, "host"):
        headers.append(("Host", target.authority))
    request = h11.Request(method=method, target=path, headers=[*headers, ("Connection", "close")])
    writer.write((connection.send(request) or b"") + (connection.send(h11.EndOfMessage()) or b""))
    event = await _event(connection, reader)
    while isinstance(event, h11.InformationalResponse):
        event = await _event(connection, reader)
    if not isinstance(event, h11.Response):
        raise HTTPError("connection closed without an answer")
    parts: list[bytes] = []
    size = 0
    while isinstance(data := await _event(connection, reader), h11.Data):
        parts.append(bytes(data.data))
        size += len(data.data)
        if limit is not None and size > limit:
            if not cut:
                raise HTTPError(f"response exceeds {limit} bytes")
            break
    body = b"".join(parts)
    received = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in event.headers.raw_items()]
    return Response(event.status_code, body if limit is None else body[:limit], received)

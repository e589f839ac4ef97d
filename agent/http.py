"""HTTP/1.1 for the status server, Envoy's admin interface, scrapes and probes: h11 on the agent's event loop.

A web framework would cost more memory and start-up time than the rest of the agent's code together; h11 itself is
loaded with the first exchange.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
import ssl
import struct
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

if TYPE_CHECKING:
    import h11

log = logging.getLogger("default")

Headers = Sequence[tuple[str, str]]

READ_SIZE = 65536
REQUEST_BODY_LIMIT = 1 << 20
GZIP_MINIMUM = 1024
IDLE_SECONDS = 60.0
# Printable ASCII goes as it is; nothing is encoded twice.
_IN_URLS = "".join(map(chr, range(33, 127)))
_REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
}
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
    """An answer, sent or received.

    Args:
        stream: more of the body, sent as it comes.
        close: called when it has been sent, or cannot be.
    """

    status: int
    body: bytes = b""
    headers: Headers = field(default_factory=tuple)
    stream: AsyncIterator[bytes] | None = None
    close: Callable[[], Awaitable[None]] | None = None

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
        self._server = await asyncio.start_server(self.accept, sock=sock)

    async def stop(self) -> None:
        """Closes the socket and every connection."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection and closes it."""
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
            await _send(connection, writer, request, response)
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
    # A target may be a whole URL (RFC 9112, 3.2.2).
    target = re.sub("^https?://[^/?]*", "", first.target.decode("latin-1"))
    path, _, query = target.partition("?")
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in first.headers.raw_items()]
    return Request(first.method.decode("latin-1"), unquote(path), query, headers, peer, body)


async def _send(connection: h11.Connection, writer: asyncio.StreamWriter, request: Request, response: Response) -> None:
    try:
        compressed = _accepts_gzip(request) and (response.stream is not None or len(response.body) >= GZIP_MINIMUM)
        if response.stream is None and not compressed:
            writer.write(_encode(connection, response, request.method))
        else:
            await _send_pieces(connection, writer, request, response, compressed)
        await writer.drain()
    finally:
        if response.close is not None:
            await response.close()


async def _send_pieces(
    connection: h11.Connection, writer: asyncio.StreamWriter, request: Request, response: Response, compressed: bool
) -> None:
    """A body of unknown length: chunked, or for HTTP/1.0 up to the end of the connection."""
    import h11

    headers = list(response.headers)
    if compressed:
        headers += [("Content-Encoding", "gzip"), ("Vary", "Accept-Encoding")]
    reason = _REASONS.get(response.status, "").encode()
    writer.write(connection.send(h11.Response(status_code=response.status, headers=headers, reason=reason)) or b"")
    if request.method != "HEAD":
        packer = zlib.compressobj(5, zlib.DEFLATED, zlib.MAX_WBITS | 16) if compressed else None
        async for piece in _pieces(response):
            data = piece if packer is None else packer.compress(piece)
            if data:
                writer.write(connection.send(h11.Data(data=data)) or b"")
                await writer.drain()
            # Compressing is work, and DNS questions may be waiting.
            await asyncio.sleep(0)
        if packer is not None:
            writer.write(connection.send(h11.Data(data=packer.flush())) or b"")
    writer.write(connection.send(h11.EndOfMessage()) or b"")


async def _pieces(response: Response) -> AsyncIterator[bytes]:
    for start in range(0, len(response.body), READ_SIZE):
        yield response.body[start : start + READ_SIZE]
    if response.stream is not None:
        async for piece in response.stream:
            yield piece


def _accepts_gzip(request: Request) -> bool:
    for item in request.header("accept-encoding").split(","):
        coding, _, parameters = item.partition(";")
        if coding.strip().lower() == "gzip":
            return re.fullmatch(r"\s*q\s*=\s*0(\.0*)?\s*", parameters) is None
    return False


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
    if not 0 < target.port <= 65535:
        raise OSError(f"invalid port {target.port}")
    # As for Go, no host is this one.
    hosts = ["127.0.0.1", "::1"] if target.host in ("", "localhost") else [target.host]
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


@dataclass(frozen=True)
class Incoming:
    """An answer whose body is still to come.

    As with Go, `pieces` are unpacked if they come in gzip and the request did not speak of encodings.
    """

    status: int
    headers: Headers
    pieces: AsyncIterator[bytes]

    def header(self, name: str) -> str:
        return header(self.headers, name)


@contextlib.contextmanager
def _told(timeout: float | None) -> Iterator[None]:
    """What can go wrong in an exchange as an HTTPError."""
    import h11

    try:
        yield
    except TimeoutError:
        raise HTTPError(f"no answer within {timeout:g}s" if timeout else "connection timed out") from None
    except OSError as error:
        known = error.errno is not None and error.errno > 0  # those of getaddrinfo are below 0
        raise HTTPError(os.strerror(error.errno or 0).lower() if known else error.strerror or str(error)) from None
    except (h11.ProtocolError, UnicodeError, zlib.error) as error:
        raise HTTPError(str(error)) from None


@contextlib.asynccontextmanager
async def exchange(
    target: Target, method: str, path: str, headers: Iterable[tuple[str, str]] = (), *, timeout: float | None
) -> AsyncIterator[Incoming]:
    """One request on a connection of its own; the body of the answer is read as it is asked for.

    Args:
        path: with its query; what cannot stand in a URL as it is gets percent-encoded.
        headers: ``Host`` is added if it is not among them.
        timeout: seconds for the whole exchange, None for no limit.

    Raises:
        HTTPError: no answer, or (from ``pieces``) not a whole one.
    """
    import h11

    deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
    sent = list(headers)
    with _told(timeout):
        async with asyncio.timeout_at(deadline):
            sock = await connect(target)
            reader, writer = await asyncio.open_connection(
                sock=sock, ssl=target.tls, server_hostname=target.host if target.tls is not None else None
            )
    try:
        with _told(timeout):
            async with asyncio.timeout_at(deadline):
                connection = h11.Connection(h11.CLIENT)
                first = await _ask(connection, reader, writer, target, method, path, sent)
        received = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in first.headers.raw_items()]
        pieces = _body(connection, reader, timeout, deadline)
        if not header(sent, "accept-encoding") and header(received, "content-encoding").lower() == "gzip":
            pieces = _unpacked(pieces)
        yield Incoming(first.status_code, received, pieces)
    finally:
        writer.close()


async def _ask(
    connection: h11.Connection,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    target: Target,
    method: str,
    path: str,
    headers: list[tuple[str, str]],
) -> h11.Response:
    """Sends the request; the head of the final answer."""
    import h11

    if not header(headers, "host"):
        headers.append(("Host", target.authority))
    path = quote(path, safe=_IN_URLS, errors="surrogateescape")
    request = h11.Request(method=method, target=path, headers=[*headers, ("Connection", "close")])
    writer.write((connection.send(request) or b"") + (connection.send(h11.EndOfMessage()) or b""))
    event = await _event(connection, reader)
    while isinstance(event, h11.InformationalResponse):
        event = await _event(connection, reader)
    if not isinstance(event, h11.Response):
        raise HTTPError("connection closed without an answer")
    return event


async def _body(
    connection: h11.Connection, reader: asyncio.StreamReader, timeout: float | None, deadline: float | None
) -> AsyncIterator[bytes]:
    import h11

    while True:
        with _told(timeout):
            async with asyncio.timeout_at(deadline):
                event = await _event(connection, reader)
        if not isinstance(event, h11.Data):
            return
        yield bytes(event.data)


async def _unpacked(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """What is in gzip, in pieces no larger than those that came in from elsewhere."""
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 16)
    async for piece in pieces:
        while piece:
            with _told(None):
                data = unpacker.decompress(piece, READ_SIZE)
            if data:
                yield data
            piece = unpacker.unconsumed_tail
    if not unpacker.eof:
        raise HTTPError("gzip data ends too early")


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
    """One request on a connection of its own, as `exchange`, with the whole body.

    Args:
        limit: bytes of the body; beyond them it is an error, or with `cut` the rest is not read.

    Raises:
        HTTPError: no whole answer.
    """
    async with exchange(target, method, path, headers, timeout=timeout) as incoming:
        parts: list[bytes] = []
        size = 0
        async for piece in incoming.pieces:
            parts.append(piece)
            size += len(piece)
            if limit is not None and size > limit:
                if not cut:
                    raise HTTPError(f"response exceeds {limit} bytes")
                break
        body = b"".join(parts)
        return Response(incoming.status, body if limit is None else body[:limit], incoming.headers)

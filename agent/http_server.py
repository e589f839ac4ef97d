"""The HTTP/1.1 server of the status and debug ports."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import unquote

from agent.http import READ_SIZE, Headers, Response, header, next_event

if TYPE_CHECKING:
    import h11

log = logging.getLogger("default")

REQUEST_BODY_LIMIT = 1 << 20
LENGTH_LIMIT = 1 << 63
"""What no Content-Length reaches (Go: net/http, parseContentLength); a body of such a length would never end."""
GZIP_MINIMUM = 1024
IDLE_SECONDS = 60.0
_REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
}


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


async def _read_request(connection: h11.Connection, reader: asyncio.StreamReader, peer: str) -> Request | None:
    import h11

    async with asyncio.timeout(IDLE_SECONDS):
        first = await next_event(connection, reader)
        if not isinstance(first, h11.Request):
            return None
        if any(name == b"content-length" and int(value) >= LENGTH_LIMIT for name, value in first.headers):
            raise h11.RemoteProtocolError("bad Content-Length", error_status_hint=400)
        body = b""
        while isinstance(event := await next_event(connection, reader), h11.Data):
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

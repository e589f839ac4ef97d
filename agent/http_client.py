"""HTTP/1.1 requests to Envoy's admin interface, to what is scraped and to what is probed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import struct
import zlib
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote

from agent.http import READ_SIZE, Headers, Response, header, next_event

if TYPE_CHECKING:
    import h11

# Printable ASCII goes as it is; nothing is encoded twice.
_IN_URLS = "".join(map(chr, range(33, 127)))
# One second in TIME_WAIT instead of sixty, as Kubernetes' own probes.
LINGER = struct.pack("ii", 1, 1)


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
    event = await next_event(connection, reader)
    while isinstance(event, h11.InformationalResponse):
        event = await next_event(connection, reader)
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
                event = await next_event(connection, reader)
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

"""The HTTP client of one application probe, as Go's: HTTP/2 where TLS agrees on it, connections kept if that is wanted.

Source: istio/istio: pilot/cmd/pilot-agent/status/server.go (NewServer, setTransportDefaults); Go: net/http Transport.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import ssl
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote

from agent.http import Response, header
from agent.http_client import HTTPError, Target, connect

if TYPE_CHECKING:
    import h11

    from agent.http2 import HTTP2Connection

log = logging.getLogger("probes")

READ_SIZE = 65536
HANDSHAKE_SECONDS = 10.0
IDLE_SECONDS = 90.0
IDLE_CONNECTIONS = 2  # for each address
THROWN_AWAY = 1 << 20  # bytes of a body that are read for the sake of the connection
_IN_URLS = "".join(map(chr, range(33, 127)))  # printable ASCII goes as it is

Headers = Sequence[tuple[str, str]]


@dataclass
class _Connection:
    """A connection to an application: `two` of HTTP/2, else `one`."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    one: h11.Connection | None = None
    two: HTTP2Connection | None = None
    used: bool = False
    ends: asyncio.TimerHandle | None = None

    @property
    def usable(self) -> bool:
        return not (self.reader.at_eof() or self.writer.is_closing()) and (self.two is None or self.two.usable)

    def close(self) -> None:
        if self.ends is not None:
            self.ends.cancel()
        self.writer.close()


class ProbeClient:
    """Sends the requests of one probe.

    Args:
        http2: offer HTTP/2 when TLS begins.
        keep: leave connections open for the next request.
    """

    def __init__(self, *, http2: bool = True, keep: bool = False) -> None:
        self._http2, self._keep = http2, keep
        self._idle: dict[tuple[str, int, bool], list[_Connection]] = {}

    @functools.cached_property
    def tls(self) -> ssl.SSLContext:
        """TLS of HTTPS probes: as the kubelet, it takes every certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        if self._http2:
            context.set_alpn_protocols(["h2", "http/1.1"])
        return context

    def close(self) -> None:
        """Closes idle connections."""
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle.clear()

    async def get(self, target: Target, path: str, headers: Headers, limit: int) -> Response:
        """The answer to a GET with at most `limit` bytes of its body.

        Args:
            target: with `tls` for HTTPS.
            path: what cannot stand in a URL as it is gets percent-encoded.
            headers: with ``Host``.

        Raises:
            HTTPError: no usable answer.
        """
        wish = header(headers, "connection").lower()
        keep = self._keep and "close" not in [token.strip() for token in wish.split(",")]
        path = quote(path, safe=_IN_URLS, errors="surrogateescape")
        while True:
            connection = self._kept(target) or await self._open(target)
            try:
                answer = await self._ask(connection, target, path, headers, limit, keep)
            except (OSError, EOFError) as error:
                connection.close()
                # The server may have closed it just now: then the request was for nobody.
                if connection.used:
                    continue
                raise HTTPError(str(error) or "connection closed without an answer") from None
            except BaseException:
                connection.close()
                raise
            connection.used = True
            self._put_back(connection, target, keep)
            return answer

    async def _ask(
        self, connection: _Connection, target: Target, path: str, headers: Headers, limit: int, keep: bool
    ) -> Response:
        if connection.two is not None:
            authority, thrown_away = header(headers, "host") or target.authority, THROWN_AWAY if keep else 0
            answer = await connection.two.get(authority, path, headers, limit, thrown_away)
        else:
            sent = headers if keep else [*_without(headers, "connection"), ("Connection", "close")]
            answer = await _http1(connection, path, sent, limit, keep)
        packed = header(answer.headers, "content-encoding").lower() == "gzip"
        return _unpacked(answer, limit) if packed and not header(headers, "accept-encoding") else answer

    async def _open(self, target: Target) -> _Connection:
        try:
            sock = await connect(target)
            reader, writer = await asyncio.open_connection(
                sock=sock,
                ssl=target.tls,
                server_hostname=target.host if target.tls is not None else None,
                ssl_handshake_timeout=HANDSHAKE_SECONDS if target.tls is not None and self._http2 else None,
            )
        except OSError as error:
            raise HTTPError(str(error.strerror or error).lower()) from None
        tls = writer.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() == "h2":
            from agent.http2 import HTTP2Connection

            return _Connection(reader, writer, two=HTTP2Connection(reader, writer))
        import h11

        return _Connection(reader, writer, one=h11.Connection(h11.CLIENT))

    def _kept(self, target: Target) -> _Connection | None:
        connections = self._idle.get(_key(target), [])
        while connections:
            connection = connections.pop()
            if connection.usable:
                if connection.ends is not None:
                    connection.ends.cancel()
                return connection
            connection.close()
        return None

    def _put_back(self, connection: _Connection, target: Target, keep: bool) -> None:
        connections = self._idle.setdefault(_key(target), [])
        if not keep or not connection.usable or len(connections) >= IDLE_CONNECTIONS or not _ready(connection.one):
            connection.close()
            return
        connections.append(connection)
        # Without the defaults for HTTP/2 there is no limit.
        if self._http2:
            connection.ends = asyncio.get_running_loop().call_later(
                IDLE_SECONDS, self._expired, connections, connection
            )

    @staticmethod
    def _expired(connections: list[_Connection], connection: _Connection) -> None:
        with contextlib.suppress(ValueError):
            connections.remove(connection)
        connection.close()


def _key(target: Target) -> tuple[str, int, bool]:
    return target.host, target.port, target.tls is not None


def _without(headers: Iterable[tuple[str, str]], name: str) -> Headers:
    return [(key, value) for key, value in headers if key.lower() != name]


def _ready(one: h11.Connection | None) -> bool:
    """Makes a connection of HTTP/1.1 ready for the next request; False if there can be none."""
    import h11

    if one is None:
        return True
    if one.our_state is not h11.DONE or one.their_state is not h11.DONE:
        return False
    one.start_next_cycle()
    return True


async def _http1(connection: _Connection, path: str, headers: Headers, limit: int, keep: bool) -> Response:
    """One exchange.

    Raises:
        EOFError, OSError: the connection ended before an answer began.
        HTTPError: no whole answer.
    """
    import h11

    one = connection.one
    assert one is not None
    try:
        request = h11.Request(method="GET", target=path, headers=list(headers))
        connection.writer.write((one.send(request) or b"") + (one.send(h11.EndOfMessage()) or b""))
        head: h11.Response | None = None
        body, size = b"", 0
        while True:
            event = one.next_event()
            if event is h11.NEED_DATA:
                data = await connection.reader.read(READ_SIZE)
                if not data and head is None:
                    raise EOFError
                one.receive_data(data)
            elif isinstance(event, h11.Response):
                head = event
            elif isinstance(event, h11.Data):
                body += bytes(event.data)[: limit - len(body)]
                size += len(event.data)
                if size > limit + (THROWN_AWAY if keep else 0):
                    break
            elif not isinstance(event, h11.InformationalResponse):
                break
    except h11.ProtocolError as error:
        raise HTTPError(str(error)) from None
    if head is None:
        raise EOFError
    received = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in head.headers.raw_items()]
    return Response(head.status_code, body, received)


def _unpacked(answer: Response, limit: int) -> Response:
    try:
        body = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(answer.body, limit)
    except zlib.error as error:
        raise HTTPError(str(error)) from None
    return Response(answer.status, body, _without(answer.headers, "content-encoding"))

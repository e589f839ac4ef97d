"""TCP ports of the echo app: every accepted connection is logged, then spoken to as its port says.

The accept loop is ours (not ``loop.create_server``), because a connection whose TLS handshake fails, or which never
sends a byte, is evidence too.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket
import ssl
import struct
import weakref
from collections.abc import Callable
from typing import cast

from lab.apps.events import EventLog
from lab.apps.ports import EchoConfig, EchoPort
from lab.apps.report import Endpoint, endpoint, flow, line, tls

ProtocolFactory = Callable[[], asyncio.Protocol]
HANDSHAKE_TIMEOUT = 10.0  # seconds

# The longest HTTP method of the IANA registry has 17 letters; then comes a space (RFC 9112, 3).
_HTTP = re.compile(rb"[A-Z]{3,17}(-[A-Z]{1,12})? ")
_HTTP_SO_FAR = re.compile(rb"[A-Z-]{0,30}")


class Echo(asyncio.Protocol):
    """Answers the first bytes with one JSON line about the connection, then echoes all that comes, the first bytes included."""

    def __init__(self, config: EchoConfig, log: EventLog, protocol: str) -> None:
        self._config, self._log, self._protocol = config, log, protocol
        self._transport: asyncio.Transport | None = None
        self._told = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        transport = self._transport
        if transport is None:
            return
        if not self._told:
            self._told = True
            told = {
                **flow(
                    self._config,
                    endpoint(transport.get_extra_info("peername")),
                    endpoint(transport.get_extra_info("sockname")),
                    tls(transport.get_extra_info("ssl_object")),
                ),
                "received": len(data),
            }
            self._log.write("bytes", {"protocol": self._protocol, **told})
            transport.write(line(told))
        transport.write(data)

    def pause_writing(self) -> None:
        # A client that does not read stops being read: its own back-pressure.
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def connection_lost(self, _exc: Exception | None) -> None:
        self._transport = None


class Detect(asyncio.Protocol):
    """Hands a connection to HTTP if its first bytes begin a request line, else to the TCP echo."""

    def __init__(self, http: ProtocolFactory, tcp: ProtocolFactory) -> None:
        self._http, self._tcp = http, tcp
        self._transport: asyncio.Transport | None = None
        self._seen = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._seen += data
        if _HTTP.match(self._seen):
            self._become(self._http())
        elif not _HTTP_SO_FAR.fullmatch(self._seen):
            self._become(self._tcp())

    def eof_received(self) -> bool:
        if self._seen and self._transport is not None:
            transport = self._transport
            self._become(self._tcp())
            transport.close()
        return False

    def _become(self, protocol: asyncio.Protocol) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.set_protocol(protocol)
            protocol.connection_made(transport)
            protocol.data_received(self._seen)


class StreamListener:
    """One listening address and port."""

    def __init__(
        self,
        config: EchoConfig,
        port: EchoPort,
        log: EventLog,
        factory: ProtocolFactory,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._config, self._port, self._log = config, port, log
        self._factory, self._context = factory, context
        self._socket: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._opening: set[asyncio.Task[None]] = set()
        self._transports: weakref.WeakSet[asyncio.Transport] = weakref.WeakSet()

    def start(self, address: str) -> Endpoint:
        """Listens on an address.

        Returns:
            where it listens (the kernel's choice for port 0).

        Raises:
            OSError: the address cannot be had.
        """
        sock = bound(address, self._port.port, socket.SOCK_STREAM)
        sock.listen(1024)
        self._socket = sock
        self._accepting = asyncio.get_running_loop().create_task(self._accept(sock))
        where = endpoint(sock.getsockname())
        if where is None:
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
        return where

    async def stop(self) -> None:
        """Stops listening and aborts what is open."""
        tasks = [t for t in (self._accepting, *self._opening) if t is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()
        for transport in list(self._transports):
            transport.abort()

    async def _accept(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(sock)
            except OSError as e:
                if e.errno in (errno.EBADF, errno.EINVAL, errno.ENOTSOCK):
                    raise
                # Else the peer went away before the accept (accept(2)), or descriptors ran out until connections end.
                if e.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    await asyncio.sleep(0.1)
                continue
            task = loop.create_task(self._open(connection))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            told = flow(self._config, endpoint(connection.getpeername()), endpoint(connection.getsockname()))
        except OSError:
            connection.close()  # reset before we looked: there is no peer to name
            return
        told["protocol"] = self._port.protocol
        self._log.write("connection", told)
        try:
            transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
                self._factory,
                connection,
                ssl=self._context,
                ssl_handshake_timeout=HANDSHAKE_TIMEOUT if self._context else None,
            )
        except (OSError, ssl.SSLError) as e:
            self._log.write("tls-error", {**told, "error": str(e) or type(e).__name__})
            connection.close()
        else:
            self._transports.add(transport)


def bound(address: str, port: int, kind: socket.SocketKind) -> socket.socket:
    """A non-blocking socket bound to an address; an IPv6 one takes no IPv4.

    Raises:
        OSError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, kind | socket.SOCK_CLOEXEC)
    try:
        sock.setblocking(False)
        if kind == socket.SOCK_STREAM:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((address, port))
    except OSError:
        sock.close()
        raise
    return sock


def reset(transport: asyncio.Transport) -> None:
    """Ends a connection by RST."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()

"""The TLS of port 15012: ends TLS with an *optional* client certificate and hands the bytes to gRPC.

gRPC for Python can require a client certificate or not ask for one, but not take one if it is there, which is what
istiod does. So TLS ends here; each connection goes on to gRPC from an abstract Unix address of its own (which gRPC
shows as the peer), and that address leads back to what the certificate said.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import ssl
from collections.abc import Sequence

from lab.discovery.ca import CertificateAuthority

_CHUNK = 256 * 1024


def _load_chain(context: ssl.SSLContext, key: str, chain: str) -> None:
    """ssl reads certificates from files only: give it one that is nowhere."""
    descriptor = os.memfd_create("server-certificate")
    try:
        os.write(descriptor, (key + chain).encode())
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def server_context(authority: CertificateAuthority, names: Sequence[str]) -> ssl.SSLContext:
    """TLS 1.2+, h2, a certificate for ``names``, client certificates of the mesh's CA welcome."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    context.verify_mode = ssl.CERT_OPTIONAL
    context.load_verify_locations(cadata=authority.root_pem)
    _load_chain(context, *authority.issue_server(names))
    return context


class SecurePort:
    """Accepts TLS connections and relays them to ``target``, an abstract Unix address of the gRPC server."""

    def __init__(self, context: ssl.SSLContext, target: str) -> None:
        self._context, self._target = context, target
        self._peers: dict[str, tuple[str, ...]] = {}
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def certificate_identities(self, peer: str) -> tuple[str, ...] | None:
        """SPIFFE ids of the client certificate of a gRPC peer; empty without certificate, None for a foreign peer."""
        return self._peers.get(peer.removeprefix("unix-abstract:"))

    async def start(self, host: str, port: int) -> int:
        """Listens; returns the bound port. Raises OSError if the address is taken."""
        self._server = await asyncio.start_server(self._accept, host, port, ssl=self._context, limit=_CHUNK)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        # nobody can guess the name, so nobody else on the machine can be taken for this connection
        name = f"sidecarlab-{secrets.token_hex(16)}"
        certificate = writer.get_extra_info("peercert") or {}
        self._peers[name] = tuple(value for kind, value in certificate.get("subjectAltName", ()) if kind == "URI")
        forth: asyncio.StreamWriter | None = None
        try:
            back, forth = await self._connect(name)
            async with asyncio.TaskGroup() as group:
                group.create_task(_pump(reader, forth))
                group.create_task(_pump(back, writer))
        except* (OSError, ssl.SSLError):
            pass  # either side went away
        finally:
            self._peers.pop(name, None)
            self._tasks.discard(task)
            if forth is not None:
                forth.transport.abort()
            # no polite end of TLS: what was to be sent is sent, and the peer of a dead stream may never answer
            writer.transport.abort()

    async def _connect(self, name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to gRPC from the abstract address ``name``."""
        inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            inner.setblocking(False)
            inner.bind("\0" + name)
            await asyncio.get_running_loop().sock_connect(inner, "\0" + self._target)
        except BaseException:
            inner.close()
            raise
        # from here on the socket belongs to the transport alone
        return await asyncio.open_unix_connection(sock=inner, limit=_CHUNK)


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Copies until either side ends; that ends the other direction too, as gRPC has no half-closed connections."""
    while data := await source.read(_CHUNK):
        sink.write(data)
        await sink.drain()
    raise ConnectionResetError

"""TLS under a policy for gRPC, which has no setting for versions and key exchanges: gRPC speaks to a Unix socket, and
what lies behind it does the TLS with OpenSSL.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio
from cryptography import x509
from cryptography.hazmat.bindings.openssl.binding import Binding
from cryptography.hazmat.primitives import serialization
from OpenSSL import SSL, crypto

from agent.compliance import CIPHERS, SUITES, Policy
from agent.errors import AgentError
from agent.proxy_config import split_host_port

log = logging.getLogger("xdsproxy")

READ_SIZE = 65536
HANDSHAKE_SECONDS = 20.0

Identity = tuple[bytes | None, bytes | None]  # key and certificate chain, PEM


class RelayError(Exception):
    """No TLS with the server; one line."""


class TLSRelay:
    """Carries connections to a Unix socket on to a server over TLS.

    Args:
        path: of the socket; only the agent's own user may use it.
        address: ``host:port`` of the server.
        name: that its certificate must have.
        policy: what TLS may be.
        roots: PEM certificates that it may come from, read for each connection.
        identity: the client's own, likewise.
    """

    def __init__(
        self,
        path: str,
        address: str,
        name: str,
        policy: Policy,
        roots: Callable[[], bytes | None],
        identity: Callable[[], Identity],
    ) -> None:
        self._path, self._address, self._name, self._policy = path, address, name, policy
        self._roots, self._identity = roots, identity
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.problem = ""
        """Why there was no TLS the last time; gRPC sees no more of that than a connection that was reset."""

    def channel(self, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
        """A gRPC channel through the relay, which listens from the first one on.

        Raises:
            AgentError: the socket cannot be made, or there are no roots.
        """
        self._roots()
        if self._listener is None:
            try:
                self._listen()
            except OSError as error:
                raise AgentError(f"failed to listen on {self._path}", error.strerror) from None
        more = [("grpc.default_authority", self._name), ("grpc.http2_scheme", "https")]
        return grpc.aio.insecure_channel(f"unix:{self._path}", options=[*options, *more])

    def _listen(self) -> None:
        directory = os.path.dirname(self._path)
        if directory:
            os.makedirs(directory, mode=0o750, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._listener.bind(self._path)
        # Nobody can connect before it listens.
        os.chmod(self._path, 0o600)
        self._listener.listen()
        self._spawn(self._accept(self._listener))

    def _spawn(self, job: Any) -> None:
        task = asyncio.get_running_loop().create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Ends every connection and removes the socket."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            near, _ = await loop.sock_accept(listener)
            self._spawn(self._carry(near))

    async def _carry(self, near: socket.socket) -> None:
        """One connection. Until TLS stands nothing is read from gRPC, which so sees a failure to connect as one."""
        with near:
            try:
                async with asyncio.timeout(HANDSHAKE_SECONDS):
                    far = await self._connect()
            except (RelayError, AgentError, TimeoutError) as error:
                self.problem = f"no TLS with {self._address}: {str(error) or 'no answer'}"
                log.warning("%s", self.problem)
                return
            self.problem = ""
            with far.socket:
                ways = [asyncio.create_task(way) for way in (far.send_from(near), far.receive_to(near))]
                try:
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for way in ways:
                        way.cancel()
                    await asyncio.gather(*ways, return_exceptions=True)

    async def _connect(self) -> _Secured:
        context = _context(self._policy, self._roots(), self._identity())
        far = _Secured(await _dial(self._address), context, self._name)
        try:
            await far.handshake()
        except BaseException:
            far.socket.close()
            raise
        return far


class _Secured:
    """TLS over a TCP connection."""

    def __init__(self, sock: socket.socket, context: SSL.Context, name: str) -> None:
        self.socket, self._name = sock, name
        self._tls = SSL.Connection(context, None)
        self._tls.set_connect_state()
        if not _is_address(name):
            self._tls.set_tlsext_host_name(name.encode("idna"))
        self._writing = asyncio.Lock()

    async def handshake(self) -> None:
        """Raises RelayError."""
        try:
            while True:
                try:
                    self._tls.do_handshake()
                    break
                except SSL.WantReadError:
                    await self._flush()
                    if not await self._feed():
                        raise RelayError("the server closed the connection") from None
            await self._flush()
        except SSL.Error as error:
            with contextlib.suppress(OSError):
                await self._flush()  # the alert
            raise RelayError(_reason(error)) from None
        except OSError as error:
            raise RelayError(error.strerror or str(error)) from None
        certificate = self._tls.get_peer_certificate(as_cryptography=True)
        if certificate is None or not is_for(certificate, self._name):
            raise RelayError(f"the server's certificate is not for {self._name}")
        if self._tls.get_alpn_proto_negotiated() != b"h2":
            raise RelayError("the server does not speak HTTP/2")

    async def send_from(self, near: socket.socket) -> None:
        """Copies to the server until `near` or the server ends."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError, SSL.Error):
            while data := await loop.sock_recv(near, READ_SIZE):
                self._tls.sendall(data)
                await self._flush()

    async def receive_to(self, near: socket.socket) -> None:
        """Copies from the server until it or `near` ends."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError, SSL.Error):
            while True:
                try:
                    await loop.sock_sendall(near, self._tls.recv(READ_SIZE))
                except SSL.WantReadError:
                    await self._flush()
                    if not await self._feed():
                        return

    async def _feed(self) -> bool:
        data = await asyncio.get_running_loop().sock_recv(self.socket, READ_SIZE)
        if data:
            self._tls.bio_write(data)
        return bool(data)

    async def _flush(self) -> None:
        async with self._writing:
            while True:
                try:
                    data = self._tls.bio_read(READ_SIZE)
                except SSL.WantReadError:
                    return
                await asyncio.get_running_loop().sock_sendall(self.socket, data)


async def _dial(address: str) -> socket.socket:
    """A TCP connection to ``host:port``.

    Raises:
        RelayError: there is none.
    """
    loop = asyncio.get_running_loop()
    problem: OSError | None = None
    try:
        host, port = split_host_port(address)
        places = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise RelayError(getattr(error, "strerror", None) or str(error)) from None
    for family, kind, protocol, _, place in places:
        sock = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
        try:
            await loop.sock_connect(sock, place)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
        except OSError as error:
            sock.close()
            problem = error
        except BaseException:
            sock.close()
            raise
    raise RelayError(os.strerror(problem.errno) if problem and problem.errno else "no address")


def _context(policy: Policy, roots: bytes | None, identity: Identity) -> SSL.Context:
    context = SSL.Context(SSL.TLS_CLIENT_METHOD)
    context.set_min_proto_version(policy.minimum)
    context.set_max_proto_version(policy.maximum)
    context.set_cipher_list(CIPHERS.encode())
    context.set_tls13_ciphersuites(SUITES.encode())
    # pyOpenSSL has a name for one elliptic curve only.
    if Binding.lib.SSL_CTX_set1_curves_list(context._context, policy.groups.encode()) != 1:
        raise RelayError(f"this OpenSSL has no key exchange {policy.groups}")
    context.set_alpn_protos([b"h2"])
    context.set_verify(SSL.VERIFY_PEER)
    try:
        store = context.get_cert_store()
        assert store is not None
        # As for Go, whatever is trusted ends a chain.
        store.set_flags(crypto.X509StoreFlags.PARTIAL_CHAIN)
        for root in x509.load_pem_x509_certificates(roots or b""):
            store.add_cert(crypto.X509.from_cryptography(root))
        key, chain = identity
        if key and chain:
            leaf, *more = x509.load_pem_x509_certificates(chain)
            private: Any = serialization.load_pem_private_key(key, None)
            context.use_privatekey(private)
            context.use_certificate(leaf)
            for certificate in more:
                context.add_extra_chain_cert(certificate)
    except (ValueError, TypeError, SSL.Error, crypto.Error) as error:
        raise RelayError(f"unusable certificates: {error}") from None
    return context


def is_for(certificate: x509.Certificate, name: str) -> bool:
    """True if one of a certificate's alternative names is `name`; ``*`` stands for its first label (RFC 6125)."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return False
    if _is_address(name):
        return ipaddress.ip_address(name) in names.get_values_for_type(x509.IPAddress)
    wanted = name.rstrip(".").lower()
    rest = wanted.partition(".")[2]
    return any(
        found.rstrip(".").lower() in ((wanted, f"*.{rest}") if rest else (wanted,))
        for found in names.get_values_for_type(x509.DNSName)
    )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _reason(error: SSL.Error) -> str:
    """What OpenSSL says, in its last words."""
    details = error.args[0] if error.args else []
    texts = [str(entry[-1]) for entry in details] if isinstance(details, list) else [str(details)]
    return "; ".join(texts) or type(error).__name__

"""The DNS server on 15053, UDP and TCP.

Source: istio/istio: pkg/dns/client/dns.go, pkg/dns/client/proxy.go.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from agent import paths
from agent.dns.forward import Address, Forwarder
from agent.dns.message import (
    FORMERR,
    REFUSED,
    SERVFAIL,
    TCP_MAXIMUM,
    LocalAnswer,
    Query,
    Verdict,
    error_reply,
    local_answer,
    parse_query,
)
from agent.dns.resolv_conf import ResolvConf, parse_resolv_conf
from agent.dns.table import LookupTable, ProxyNames, build_in_steps
from agent.environment import parse_int
from agent.errors import AgentError
from agent.metrics import Metrics
from agent.protos import nds_pb2
from agent.proxy_config import split_host_port

log = logging.getLogger("dns")

DEFAULT_ADDRESS = "localhost:15053"
ANY_IPV6 = "::"
CACHE_LIMIT = 32768
# Datagrams per turn of the event loop: enough to spread its cost, few enough not to starve the rest of the agent.
BATCH = 64
TCP_IDLE_SECONDS = 8.0
# Entries of a new table between two turns of the event loop: some 5 ms.
TABLE_STEP = 200


@dataclass(frozen=True)
class DNSOptions:
    """What the server is started with.

    Args:
        address: ``DNS_PROXY_ADDR``.
        names: namespace and domain of the proxy; its search list comes from resolv.conf.
        parallel: ``DNS_FORWARD_PARALLEL``.
        timeout: seconds, ``DNS_FORWARD_TIMEOUT``.
        resolv_conf: path.
        root: True if the process runs as root.
    """

    address: str
    names: ProxyNames
    parallel: bool = False
    timeout: float = 5.0
    resolv_conf: str = paths.RESOLV_CONF
    root: bool = False


def listen_addresses(address: str, servers: Sequence[str]) -> list[Address]:
    """Where to listen; ``localhost`` becomes the loopback of each family that resolv.conf names a server of.

    No host, or ``::``, means every address of both families, as for Go.

    Raises:
        AgentError: not ``host:port``.
    """
    try:
        host, port_text = split_host_port(address)
        port = parse_int(port_text)
        if not 0 <= port <= 65535:
            raise ValueError
    except ValueError:
        raise AgentError("dns address must be a valid host:port", address) from None
    if host in ("", ANY_IPV6):
        return [("0.0.0.0", port), (ANY_IPV6, port)]
    if host != "localhost":
        return [(host, port)]
    versions = {ipaddress.ip_address(server).version for server in servers if _is_address(server)}
    found = [("127.0.0.1", 4), ("::1", 6)]
    return [(loopback, port) for loopback, version in found if version in versions] or [("localhost", port)]


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


class DNSServer:
    """Answers local names from the table and forwards the rest."""

    def __init__(self, options: DNSOptions, metrics: Metrics) -> None:
        """Reads resolv.conf.

        Raises:
            AgentError: resolv.conf cannot be read, or the address is malformed.
        """
        self._metrics = metrics
        address, path = options.address or DEFAULT_ADDRESS, options.resolv_conf
        self._answer_before_table = False
        if address.endswith(":53"):
            if options.root:
                self._answer_before_table = True
                if os.path.exists(paths.ROOT_RESOLV_CONF):
                    path = paths.ROOT_RESOLV_CONF
            else:
                log.error("DNS address :53 and not running as root, use default")
                address = DEFAULT_ADDRESS
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                conf = parse_resolv_conf(file.read())
        except OSError as error:
            raise AgentError(f"failed to load {path}", error.strerror) from None
        self.addresses = listen_addresses(address, conf.servers)
        self._names = ProxyNames(options.names.namespace, options.names.domain, conf.search)
        self._forwarder = Forwarder(self._upstreams(conf), options.timeout, options.parallel, metrics)
        self._table: LookupTable | None = None
        self.name_table: nds_pb2.NameTable | None = None
        self._cache: dict[bytes, LocalAnswer] = {}
        self._sockets: list[socket.socket] = []
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    def _upstreams(self, conf: ResolvConf) -> list[Address]:
        own = set(self.addresses)
        upstreams = [(server, 53) for server in conf.servers]
        loops = [server for server in upstreams if server in own]
        if loops:
            log.error("resolv.conf names this DNS server itself, not forwarding to %s", loops)
        return [server for server in upstreams if server not in own]

    @property
    def ready(self) -> bool:
        """True once a table has come."""
        return self._table is not None

    def check_ready(self) -> str:
        """Empty once a table has come, else the reason for readiness to fail."""
        return "" if self.ready else "istio DNS is not ready: no name table received"

    @property
    def names(self) -> ProxyNames:
        return self._names

    async def update(self, table: nds_pb2.NameTable) -> None:
        """Replaces the name table; questions are answered from the old one until the new one is complete."""
        built = LookupTable()
        for _ in build_in_steps(table, self._names, built, TABLE_STEP):
            await asyncio.sleep(0)
        self._table = built
        self.name_table = table
        self._cache = {}
        log.debug("updated lookup table with %d hosts", len(built.hosts))

    async def start(self) -> None:
        """Listens on every address, UDP and TCP.

        Raises:
            AgentError: an address cannot be used.
        """
        for host, port in self.addresses:
            try:
                await self._listen(host, port)
            except OSError as error:
                if host == ANY_IPV6 and error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                    continue  # a machine without IPv6
                raise AgentError(f"failed to listen on DNS address {host}:{port}", error.strerror or error) from None

    async def _listen(self, host: str, port: int) -> None:
        loop = asyncio.get_running_loop()
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        udp = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._sockets.append(udp)
        udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        if family is socket.AF_INET6:
            # Beside 0.0.0.0; asyncio does so for TCP.
            udp.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        udp.bind(address)
        loop.add_reader(udp.fileno(), self._readable, udp)
        log.info("Starting local udp DNS server on %s:%d", host, port)
        self._servers.append(
            await asyncio.start_server(self._serve_tcp, host, port, family=family, limit=TCP_MAXIMUM + 2)
        )
        log.info("Starting local tcp DNS server on %s:%d", host, port)

    async def stop(self) -> None:
        """Closes every socket; questions under way stay unanswered."""
        loop = asyncio.get_running_loop()
        for sock in self._sockets:
            loop.remove_reader(sock.fileno())
            sock.close()
        self._sockets.clear()
        for server in self._servers:
            server.close()
        for writer in list(self._writers):
            writer.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _readable(self, sock: socket.socket) -> None:
        receive, send, cache = sock.recvfrom, sock.sendto, self._cache
        count = 0
        try:
            while count < BATCH:
                data, peer = receive(4096)
                count += 1
                answer = cache.get(data[2:])
                if answer is None:
                    self._datagram(sock, data, peer)
                    cache = self._cache
                    continue
                try:
                    send(data[:2] + (answer.fixed or answer.reply()), peer)
                except OSError:
                    # As a full buffer in the network: the client asks again.
                    continue
        except BlockingIOError:
            pass
        except OSError as error:
            log.debug("udp: %s", error)
        self._metrics.dns_requests_total.value += count

    def _datagram(self, sock: socket.socket, data: bytes, peer: Address) -> None:
        query = parse_query(data)
        reply = self._immediate(data, query, query.udp_size, peer)
        if reply is None:
            task = asyncio.get_running_loop().create_task(self._forward_udp(sock, data, query, peer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif reply:
            with contextlib.suppress(OSError):
                sock.sendto(reply, peer)

    def _immediate(self, data: bytes, query: Query, size: int, peer: Address) -> bytes | None:
        """The reply that needs no upstream; empty for none at all, None if the query must be forwarded."""
        if query.verdict is Verdict.MALFORMED:
            self._metrics.dns_malformed_total.value += 1
            return b""
        if query.verdict is Verdict.IGNORED:
            return b""
        if query.verdict is Verdict.REJECTED:
            return error_reply(data, query, query.rcode or FORMERR)
        if query.verdict is Verdict.NO_QUESTION:
            return error_reply(data, query, SERVFAIL)
        if self._table is None:
            if not self._answer_before_table:
                return error_reply(data, query, SERVFAIL)
        elif (answer := local_answer(query, self._table, size)) is not None:
            if query.plain and size == query.udp_size:
                if len(self._cache) >= CACHE_LIMIT:
                    self._cache = {}
                self._cache[data[2:]] = answer
            return data[:2] + answer.reply()
        if peer[:2] in self._forwarder.in_flight:
            log.warning("refusing a query that this server sent itself: it is redirected back to it")
            return error_reply(data, query, REFUSED)
        return None

    async def _forward(self, data: bytes, query: Query, tcp: bool, size: int) -> bytes:
        reply = await self._forwarder.ask(data, tcp, size)
        return error_reply(data, query, SERVFAIL) if reply is None else reply

    async def _forward_udp(self, sock: socket.socket, data: bytes, query: Query, peer: Address) -> None:
        reply = await self._forward(data, query, False, query.udp_size)
        with contextlib.suppress(OSError):
            sock.sendto(reply, peer)

    async def _serve_tcp(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        peer: Address = writer.get_extra_info("peername")[:2]
        try:
            while True:
                async with asyncio.timeout(TCP_IDLE_SECONDS):
                    (length,) = struct.unpack("!H", await reader.readexactly(2))
                    data = await reader.readexactly(length)
                self._metrics.dns_requests_total.value += 1
                query = parse_query(data)
                reply = self._immediate(data, query, TCP_MAXIMUM, peer)
                if reply is None:
                    reply = await self._forward(data, query, True, TCP_MAXIMUM)
                if not reply:
                    break
                writer.write(struct.pack("!H", len(reply)) + reply)
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

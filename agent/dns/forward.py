"""Forwarding to the servers of resolv.conf, over the transport of the client.

Source: istio/istio: pkg/dns/client/dns.go (queryUpstream, queryUpstreamParallel); miekg/dns: client.go.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import struct
import time
from collections.abc import Sequence

from agent.dns.message import parse_message
from agent.metrics import Metrics

log = logging.getLogger("dns")

Address = tuple[str, int]


class UpstreamError(Exception):
    """A server gave no usable reply."""


class Forwarder:
    """Asks upstream servers.

    Args:
        servers: addresses with ports; never those that this process serves itself.
        timeout: seconds for each server.
        parallel: ask all at once instead of one after the other.
        metrics: counters.
    """

    def __init__(self, servers: Sequence[Address], timeout: float, parallel: bool, metrics: Metrics) -> None:
        self.servers, self._timeout, self._parallel, self._metrics = tuple(servers), timeout, parallel, metrics
        # Local addresses of queries under way: a query that arrives from one of them has come back to us.
        self.in_flight: set[Address] = set()

    async def ask(self, query: bytes, tcp: bool, size: int) -> bytes | None:
        """The first well-formed reply, whatever its code; None if no server gave one.

        Args:
            query: passed on unchanged.
            tcp: the client's transport.
            size: bytes that a UDP reply may have.
        """
        self._metrics.dns_upstream_requests_total.value += 1
        started = time.monotonic()
        ask = self._ask_all if self._parallel else self._ask_in_turn
        reply = await ask(query, tcp, size)
        self._metrics.dns_upstream_request_duration_seconds.observe(time.monotonic() - started)
        if reply is None:
            self._metrics.dns_upstream_failures_total.value += 1
        return reply

    async def _ask_in_turn(self, query: bytes, tcp: bool, size: int) -> bytes | None:
        for server in random.sample(self.servers, len(self.servers)):
            try:
                return await self._exchange(server, query, tcp, size)
            except (OSError, UpstreamError) as error:
                log.info("upstream failure: %s:%d: %s", *server, error)
        return None

    async def _ask_all(self, query: bytes, tcp: bool, size: int) -> bytes | None:
        tasks = {asyncio.create_task(self._exchange(server, query, tcp, size)) for server in self.servers}
        try:
            while tasks:
                done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    error = task.exception()
                    if error is None:
                        return task.result()
                    log.info("parallel querying upstream failure: %s", error)
            return None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _exchange(self, server: Address, query: bytes, tcp: bool, size: int) -> bytes:
        try:
            async with asyncio.timeout(self._timeout):
                exchange = self._exchange_tcp if tcp else self._exchange_udp
                return await exchange(server, query, size)
        except TimeoutError:
            raise UpstreamError(f"no reply within {self._timeout:g}s") from None

    async def _exchange_udp(self, server: Address, query: bytes, size: int) -> bytes:
        loop = asyncio.get_running_loop()
        family = socket.AF_INET6 if ":" in server[0] else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
            sock.connect(server)
            local: Address = sock.getsockname()[:2]
            self.in_flight.add(local)
            try:
                sock.send(query)
                while True:
                    reply = await loop.sock_recv(sock, TOO_LONG)
                    if reply[:2] != query[:2]:
                        continue
                    # What does not fit the buffer is cut off, and then does not parse.
                    if len(reply) > size or parse_message(reply) is None:
                        raise UpstreamError(f"bad reply of {len(reply)} bytes")
                    return reply
            finally:
                self.in_flight.discard(local)

    async def _exchange_tcp(self, server: Address, query: bytes, size: int) -> bytes:
        reader, writer = await asyncio.open_connection(*server)
        local: Address = writer.get_extra_info("sockname")[:2]
        self.in_flight.add(local)
        try:
            writer.write(struct.pack("!H", len(query)) + query)
            try:
                (length,) = struct.unpack("!H", await reader.readexactly(2))
                reply = await reader.readexactly(length)
            except asyncio.IncompleteReadError:
                raise UpstreamError("connection closed without a whole reply") from None
            if len(reply) > size or reply[:2] != query[:2] or parse_message(reply) is None:
                raise UpstreamError(f"bad reply of {len(reply)} bytes")
            return reply
        finally:
            self.in_flight.discard(local)
            writer.close()


TOO_LONG = 65536

"""The name of a flow: its 5-tuple, read from packet headers."""

from __future__ import annotations

import ipaddress
import socket
import struct
from dataclasses import dataclass

PROTOCOLS = {1: "icmp", 6: "tcp", 17: "udp", 58: "icmpv6"}
"""IP protocol numbers by the names used here; others keep their number as text."""


@dataclass(frozen=True, slots=True)
class Flow:
    """A 5-tuple. Addresses are canonical text; of an ICMP flow ``sport`` is the identifier and ``dport`` 0."""

    proto: str
    src: str
    sport: int
    dst: str
    dport: int

    @property
    def family(self) -> str:
        return "ipv6" if ":" in self.dst else "ipv4"

    def reversed(self) -> Flow:
        """The flow of the answers (an echo reply carries the identifier of its request)."""
        if self.proto.startswith("icmp"):
            return Flow(self.proto, self.dst, self.sport, self.src, self.dport)
        return Flow(self.proto, self.dst, self.dport, self.src, self.sport)


def protocol_name(number: int) -> str:
    return PROTOCOLS.get(number, str(number))


def parse_headers(network: bytes, transport: bytes | None = None) -> Flow | None:
    """The flow of a packet, or None if these bytes are no whole IP header.

    Args:
        network: bytes from the IP header on (the transport header may follow in it).
        transport: the transport header, where the kernel gives it apart.
    """
    if len(network) < 20:
        return None
    if network[0] >> 4 == 4:
        number = network[9]
        src, dst = socket.inet_ntop(socket.AF_INET, network[12:16]), socket.inet_ntop(socket.AF_INET, network[16:20])
        rest = network[(network[0] & 0xF) * 4 :] if transport is None else transport
    elif network[0] >> 4 == 6 and len(network) >= 40:
        number, rest = _skip_extensions(network, transport)
        src, dst = (str(ipaddress.IPv6Address(network[a : a + 16])) for a in (8, 24))
    else:
        return None
    name = protocol_name(number)
    if name in ("tcp", "udp") and len(rest) >= 4:
        sport, dport = struct.unpack_from(">HH", rest)
        return Flow(name, src, sport, dst, dport)
    if name in ("icmp", "icmpv6") and len(rest) >= 6:
        return Flow(name, src, struct.unpack_from(">H", rest, 4)[0], dst, 0)
    return Flow(name, src, 0, dst, 0)


def _skip_extensions(network: bytes, transport: bytes | None) -> tuple[int, bytes]:
    number, offset = network[6], 40
    while number in (0, 43, 60) and offset + 8 <= len(network):  # hop-by-hop, routing, destination options
        number, offset = network[offset], offset + (network[offset + 1] + 1) * 8
    return number, network[offset:] if transport is None else transport

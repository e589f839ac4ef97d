"""What a captured packet's headers say. Pure: bytes in, fields out; a truncated packet gives what there is."""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

from lab.trace.flows import Flow, parse_headers

IPV4, IPV6, ARP = 0x0800, 0x86DD, 0x0806
_ETHERNET = 14
_FLAGS = "FSRPAUEC"
_EXTENSIONS = (0, 43, 60)  # hop-by-hop, routing, destination options: as lab.trace.flows skips them


class Decoded(NamedTuple):
    """``kind`` is the Ethernet type; ``flags`` are TCP's by letter; ``icmp`` is (type, code); ``payload`` is TCP's, UDP's or ICMP's."""

    kind: int
    flow: Flow | None = None
    flags: str = ""
    icmp: tuple[int, int] | None = None
    payload: bytes = b""

    @property
    def begins(self) -> bool:
        """Whether this is a connection's first packet: a SYN without ACK."""
        return "S" in self.flags and "A" not in self.flags


def decode(data: bytes) -> Decoded:
    """A packet with its Ethernet header."""
    if len(data) < _ETHERNET:
        return Decoded(0)
    (kind,) = struct.unpack_from(">H", data, 12)
    network = data[_ETHERNET:]
    flow = parse_headers(network) if kind in (IPV4, IPV6) else None
    if flow is None:
        return Decoded(kind)
    transport = network[_header_length(network) :]
    if flow.proto == "tcp" and len(transport) >= 20:
        flags = "".join(name for bit, name in enumerate(_FLAGS) if transport[13] & 1 << bit)
        size = _length(network, transport)
        return Decoded(kind, flow, flags, None, transport[(transport[12] >> 4) * 4 : size])
    if flow.proto == "udp":
        return Decoded(kind, flow, payload=transport[8 : _length(network, transport)])
    if flow.proto in ("icmp", "icmpv6") and len(transport) >= 2:
        return Decoded(kind, flow, icmp=(transport[0], transport[1]), payload=transport[8:])
    return Decoded(kind, flow)


def arp(data: bytes) -> str:
    """An ARP packet in words (RFC 826); empty if it is none for IPv4 over Ethernet."""
    body = data[_ETHERNET:]
    if len(body) < 28 or body[:6] != b"\x00\x01\x08\x00\x06\x04":
        return ""
    sender, target = socket.inet_ntoa(body[14:18]), socket.inet_ntoa(body[24:28])
    return f"{sender} asks who has {target}" if body[6:8] == b"\0\x01" else f"{sender} is at {body[8:14].hex(':')}"


def _header_length(network: bytes) -> int:
    if network[0] >> 4 == 4:
        return (network[0] & 0xF) * 4
    number, offset = network[6], 40
    while number in _EXTENSIONS and offset + 8 <= len(network):
        number, offset = network[offset], offset + (network[offset + 1] + 1) * 8
    return offset


def _length(network: bytes, transport: bytes) -> int:
    """Bytes of the transport part that are no Ethernet padding; a length of 0 is that of a packet to be segmented later."""
    total = int(struct.unpack_from(">H", network, 2 if network[0] >> 4 == 4 else 4)[0])
    if not total:
        return len(transport)
    whole = total if network[0] >> 4 == 4 else total + 40
    return max(0, min(len(transport), whole - (len(network) - len(transport))))

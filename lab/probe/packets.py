"""scapy, as far as probes use it. Importing this module costs most of a second: only driver and judge do.

scapy keeps one global configuration; it is set here and nowhere else.
"""

from __future__ import annotations

import logging
import socket
from typing import Any

logging.getLogger("scapy").setLevel(logging.ERROR)

from scapy.arch.linux import L2ListenSocket  # noqa: E402
from scapy.config import conf  # noqa: E402
from scapy.contrib.http2 import H2Frame, HPackHdrTable  # noqa: E402
from scapy.layers.dns import DNS, DNSQR  # noqa: E402
from scapy.layers.http import HTTP, HTTPRequest  # noqa: E402
from scapy.layers.inet import ICMP, IP, TCP, UDP, ICMPerror, IPerror, TCPerror, UDPerror  # noqa: E402
from scapy.layers.inet6 import ICMPv6EchoReply, ICMPv6EchoRequest, IPv6  # noqa: E402
from scapy.layers.l2 import Ether  # noqa: E402
from scapy.packet import Packet, Raw  # noqa: E402
from scapy.supersocket import SimpleSocket  # noqa: E402

__all__ = [
    "DNS",
    "DNSQR",
    "HTTP",
    "ICMP",
    "IP",
    "TCP",
    "UDP",
    "Ether",
    "H2Frame",
    "HPackHdrTable",
    "HTTPRequest",
    "ICMPerror",
    "ICMPv6EchoReply",
    "ICMPv6EchoRequest",
    "IPerror",
    "IPv6",
    "Packet",
    "Raw",
    "TCPerror",
    "Tap",
    "UDPerror",
    "conf",
    "know_interfaces",
    "put",
]

conf.verb = 0
conf.sniff_promisc = False
conf.use_pcap = False
conf.bufsize = 16 << 20  # bytes that may wait in one sniffing socket


class Tap(L2ListenSocket):  # type: ignore[misc]
    """A sniffer on one interface of the current namespace. After `recv`, ``outgoing`` says whether the interface sent
    that packet (else it received it)."""

    outgoing = False

    def recv_raw(self, x: int = 0xFFFF) -> tuple[Any, bytes | None, Any]:
        data, address, timestamp = self._recv_raw(self.ins, x)
        self.outgoing = address[2] == socket.PACKET_OUTGOING
        return self.LL, data, timestamp


def put(sock: socket.socket, packet: Packet) -> None:
    """Sends a packet of scapy through a socket of the kernel.

    Raises:
        OSError: as the socket's own send.
    """
    wrapped = SimpleSocket(sock)
    try:
        wrapped.send(packet)
    finally:
        wrapped.closed = True  # or the wrapper's end would close the socket


def know_interfaces() -> None:
    """Makes scapy's list of interfaces that of the current namespace (it is kept per process)."""
    conf.ifaces.reload()

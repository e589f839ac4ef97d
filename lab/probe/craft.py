"""Hand-made packets: what a kernel socket cannot send, sent so that netfilter still sees whose it is.

A raw IP socket opened under the test's fsuid: the packet goes through OUTPUT with that owner. (scapy's default for layer 3 on
Linux is AF_PACKET, which skips OUTPUT; and the kernel itself resets the answer to a crafted SYN, so no connection comes of it.)
"""

from __future__ import annotations

import ctypes
import os
import random
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from lab.probe import packets
from lab.probe.orders import Order, Sent
from lab.trace.owner_table import CRAFTED_ID

_UNREACHABLE_PORT = 3


@contextmanager
def as_owner(uid: int) -> Iterator[None]:
    """Sockets opened meanwhile belong to ``uid`` and the group of that number (setfsuid(2)); capabilities stay."""
    libc = ctypes.CDLL(None)
    libc.setfsgid(ctypes.c_int(uid))
    libc.setfsuid(ctypes.c_int(uid))
    try:
        yield
    finally:
        libc.setfsuid(ctypes.c_int(os.geteuid()))
        libc.setfsgid(ctypes.c_int(os.getegid()))


def send(order: Order, address: str, deadline: float) -> Sent:
    """Sends one crafted packet and waits for what answers it.

    Outcome: ``ok`` for an answer (SYN-ACK, datagram, echo reply), ``refused`` for a RST or "port unreachable", ``unreachable``
    for other ICMP errors, ``no-answer`` if none of these came back to this namespace; of a spoofed packet nothing can.

    Args:
        deadline: of time.monotonic().
    """
    sent = Sent("no-answer", proto=order.protocol if order.protocol in ("udp", "icmp") else "tcp")
    sent.address, sent.port = address, order.port if sent.proto != "icmp" else 0
    if ":" in address:
        sent.result, sent.error = "unreachable", "crafted packets are IPv4 only"
        return sent
    number = random.SystemRandom().randrange(20000, 30000)
    sent.src, sent.sport = order.spoof or _source(address), number
    packet = _packet(order, sent)
    with ExitStack() as stack:
        replies = _listen(stack, sent)
        with as_owner(order.uid):
            out = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW))
        # Packets of one processor stay in order up to the link's other end, where the fence is waited for.
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        try:
            out.sendto(bytes(packet), (address, 0))
        except OSError as e:
            sent.result, sent.error = "unreachable", e.strerror or str(e)
            return sent
        if not order.spoof:
            _wait(sent, replies, deadline)
    return sent


def _source(address: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((address, 9))
        return str(s.getsockname()[0])


def _packet(order: Order, sent: Sent) -> Any:
    ip = packets.IP(src=sent.src, dst=sent.address, id=CRAFTED_ID, flags="DF")
    payload = packets.Raw(b"sidecarlab crafted\n")
    if sent.proto == "udp":
        return ip / packets.UDP(sport=sent.sport, dport=order.port) / payload
    if sent.proto == "icmp":
        return ip / packets.ICMP(type=8, id=sent.sport, seq=1) / payload
    return ip / packets.TCP(
        sport=sent.sport, dport=order.port, flags=order.flags, seq=random.SystemRandom().randrange(1 << 32)
    )


def _listen(stack: ExitStack, sent: Sent) -> dict[int, tuple[socket.socket, Callable[[Any], str | None]]]:
    """Raw sockets that get copies of what may answer, each with the one who reads it."""

    def tcp(packet: Any) -> str | None:
        segment = packet.getlayer(packets.TCP)
        if segment is None or (segment.sport, segment.dport) != (sent.port, sent.sport):
            return None
        sent.replies.append(f"tcp {segment.flags}")
        return "refused" if "R" in segment.flags else "ok"

    def udp(packet: Any) -> str | None:
        datagram = packet.getlayer(packets.UDP)
        if datagram is None or (datagram.sport, datagram.dport) != (sent.port, sent.sport):
            return None
        sent.replies.append("udp")
        return "ok"

    def icmp(packet: Any) -> str | None:
        message = packet.getlayer(packets.ICMP)
        if message is None:
            return None
        if message.type == 0 and sent.proto == "icmp" and message.id == sent.sport:
            sent.replies.append("icmp echo-reply")
            return "ok"
        inner = message.getlayer(packets.IPerror)
        if inner is None or (inner.dst, inner.id) != (sent.address, CRAFTED_ID) or _port(inner) != sent.sport:
            return None
        sent.replies.append(f"icmp {message.type}/{message.code}")
        return "refused" if (message.type, message.code) == (3, _UNREACHABLE_PORT) else "unreachable"

    readers: dict[int, Callable[[Any], str | None]] = {socket.IPPROTO_ICMP: icmp}
    if sent.proto == "tcp":
        readers[socket.IPPROTO_TCP] = tcp
    elif sent.proto == "udp":
        readers[socket.IPPROTO_UDP] = udp
    sockets: dict[int, tuple[socket.socket, Callable[[Any], str | None]]] = {}
    for number, reader in readers.items():
        s = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_RAW, number))
        s.setblocking(False)
        sockets[s.fileno()] = (s, reader)
    return sockets


def _port(inner: Any) -> int | None:
    """The source port, or the identifier, of the packet that an ICMP error complains about."""
    segment = inner.getlayer(packets.TCPerror) or inner.getlayer(packets.UDPerror)
    if segment is not None:
        return int(segment.sport)
    ping = inner.getlayer(packets.ICMPerror)
    return None if ping is None else int(ping.id)


def _wait(sent: Sent, sockets: dict[int, tuple[socket.socket, Callable[[Any], str | None]]], deadline: float) -> None:
    while (left := deadline - time.monotonic()) > 0:
        for fd in select.select(list(sockets), [], [], left)[0]:
            s, reader = sockets[fd]
            result = reader(packets.IP(s.recv(65535)))
            if result is not None:
                sent.result = result
                return
    sent.error = "no answer came back"

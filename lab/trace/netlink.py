"""Netfilter's netlink, as much as evidence needs: sockets inside a namespace, messages, attributes.

pyroute2 builds the messages that we send (see ``owner_table``). What is received is taken apart here: a decoded
pyroute2 message costs 0.2 ms (measured), and hundreds arrive for one traced connection on the machine that is observed.
Layouts: include/uapi/linux/netlink.h, include/uapi/linux/netfilter/nfnetlink.h.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress

NLMSG_ERROR = 2
NLMSG_DONE = 3
NLM_F_REQUEST = 0x1
NLM_F_ACK = 0x4
NLM_F_DUMP = 0x300

SUBSYS_CTNETLINK = 1
SUBSYS_ULOG = 4
SUBSYS_NFTABLES = 10

GROUP_CONNTRACK_NEW = 1
GROUP_CONNTRACK_UPDATE = 2
GROUP_CONNTRACK_DESTROY = 3
GROUP_NFTRACE = 9

_HEADER = struct.Struct("=IHHII")
_NFGEN = struct.Struct(">BBH")
_ATTRIBUTE = struct.Struct("=HH")
_TYPE_MASK = 0x3FFF  # without NLA_F_NESTED and NLA_F_NET_BYTEORDER
_NESTED = 0x8000

_NETLINK_NETFILTER = 12
_SOL_NETLINK = 270
_ADD_MEMBERSHIP = 1
_SO_RCVBUFFORCE = 33

Attributes = dict[int, bytes]


class NetlinkError(OSError):
    """The kernel refused a request; ``errno`` says why."""


def message(kind: int, flags: int, family: int, body: bytes = b"", *, res_id: int = 0, seq: int = 0) -> bytes:
    """One nfnetlink request. ``kind`` is ``subsystem << 8 | message``; ``res_id`` e.g. the NFLOG group."""
    body = _NFGEN.pack(family, 0, res_id) + body
    return _HEADER.pack(_HEADER.size + len(body), kind, flags | NLM_F_REQUEST, seq, 0) + body


def attribute(kind: int, value: bytes, *, nested: bool = False) -> bytes:
    """One attribute, padded to four bytes."""
    size = _ATTRIBUTE.size + len(value)
    return _ATTRIBUTE.pack(size, kind | (_NESTED if nested else 0)) + value + b"\0" * (-size % 4)


def attributes(data: bytes) -> Attributes:
    """The attributes of one level, by type; a nested one's value can be given to this again.

    A truncated last attribute is left out: the kernel never sends one, and evidence must not come from half a value.
    """
    found: Attributes = {}
    offset, end = 0, len(data)
    while offset + 4 <= end:
        size, kind = _ATTRIBUTE.unpack_from(data, offset)
        if size < 4 or offset + size > end:
            break
        found[kind & _TYPE_MASK] = data[offset + 4 : offset + size]
        offset += (size + 3) & ~3
    return found


def messages(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """``(type, sequence, payload)`` of each message in what one recv gave."""
    offset, end = 0, len(data)
    while offset + 16 <= end:
        size, kind, _, seq, _ = _HEADER.unpack_from(data, offset)
        if size < 16 or offset + size > end:
            break
        yield kind, seq, data[offset + 16 : offset + size]
        offset += (size + 3) & ~3


def family_and_attributes(payload: bytes) -> tuple[int, Attributes]:
    """The nfgenmsg's family and the attributes after it."""
    return payload[0], attributes(payload[4:])


def string(value: bytes) -> str:
    return value.rstrip(b"\0").decode("utf-8", "replace")


def number(value: bytes) -> int:
    """A big-endian unsigned number of any width, as netfilter writes them."""
    return int.from_bytes(value, "big")


def open_socket(receive_buffer: int = 0) -> socket.socket:
    """A NETLINK_NETFILTER socket in the calling thread's network namespace.

    Args:
        receive_buffer: bytes; beyond the system's limit too, so that a burst of events is not lost.
    """
    s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_NETFILTER)
    if receive_buffer:
        s.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, receive_buffer)
    s.bind((0, 0))
    return s


def join(s: socket.socket, groups: Sequence[int]) -> None:
    """Subscribes to multicast groups (enum nfnetlink_groups)."""
    for group in groups:
        s.setsockopt(_SOL_NETLINK, _ADD_MEMBERSHIP, group)


def request(s: socket.socket, data: bytes, acks: int, timeout: float = 5.0) -> None:
    """Sends messages and waits for ``acks`` acknowledgements.

    To be used before the socket joins groups: what else arrives meanwhile is dropped.

    Raises:
        NetlinkError: one of them was refused.
        TimeoutError: the kernel did not answer.
    """
    s.settimeout(timeout)
    s.send(data)
    while acks > 0:
        for kind, _, payload in messages(s.recv(1 << 16)):
            if kind == NLMSG_ERROR:
                acks -= 1
                try:
                    _raise(payload)
                except NetlinkError:
                    _drain(s)  # answers to the other messages, which the next request would take for its own
                    raise


def _drain(s: socket.socket) -> None:
    s.setblocking(False)
    with suppress(BlockingIOError):
        while s.recv(1 << 16):
            pass


def dump(s: socket.socket, kind: int, family: int, body: bytes = b"", timeout: float = 5.0) -> list[tuple[int, bytes]]:
    """All ``(type, payload)`` that a dump request gives.

    Raises:
        NetlinkError: the request was refused, or the dump was interrupted by a change four times over (EINTR).
    """
    for _ in range(4):
        try:
            return _dump(s, kind, family, body, timeout)
        except NetlinkError as e:
            if e.errno != errno.EINTR:
                raise
    raise NetlinkError(errno.EINTR, os.strerror(errno.EINTR))


def _dump(s: socket.socket, kind: int, family: int, body: bytes, timeout: float) -> list[tuple[int, bytes]]:
    s.settimeout(timeout)
    s.send(message(kind, NLM_F_DUMP, family, body))
    found: list[tuple[int, bytes]] = []
    interrupted = False
    while True:
        data = s.recv(1 << 18)
        interrupted |= bool(_HEADER.unpack_from(data)[2] & 0x10)  # NLM_F_DUMP_INTR
        for got, _, payload in messages(data):
            if got == NLMSG_DONE:
                if interrupted:
                    raise NetlinkError(errno.EINTR, os.strerror(errno.EINTR))
                return found
            if got == NLMSG_ERROR:
                _raise(payload)
            found.append((got, payload))


def _raise(payload: bytes) -> None:
    (code,) = struct.unpack_from("=i", payload)
    if code:
        raise NetlinkError(-code, os.strerror(-code))

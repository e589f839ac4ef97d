"""Whose a connection is: the kernel's own list of sockets, with uid and inode. sock_diag(7), include/uapi/linux/inet_diag.h."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from lab.trace import netlink
from lab.trace.flows import Flow

_NETLINK_SOCK_DIAG = 4
_BY_FAMILY = 20
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI48x")
_ANSWER = struct.Struct("=BBBB2s2s16s16sI8xIIIII")
_LISTEN, _CLOSE = 10, 7
_PROTOCOLS = {"tcp": socket.IPPROTO_TCP, "udp": socket.IPPROTO_UDP}
_ANY = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class Socket:
    """One socket. ``waits``: it listens, or is a datagram socket without a peer."""

    local: tuple[str, int]
    remote: tuple[str, int]
    waits: bool
    uid: int
    inode: int


class Diag:
    """Asks the kernel of one network namespace; made while the calling thread is in it."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG)

    def all(self, proto: str) -> list[Socket]:
        """Sockets of ``tcp`` or ``udp``, of both families; those that belong to nobody any more (TIME_WAIT) are left out.

        Raises:
            OSError: the kernel refuses.
        """
        number = _PROTOCOLS.get(proto)
        if number is None:
            return []
        return [s for family in (socket.AF_INET, socket.AF_INET6) for s in self._dump(family, number)]

    def _dump(self, family: int, number: int) -> Iterator[Socket]:
        body = _REQUEST.pack(family, number, 0, 0, 0xFFFFFFFF)
        flags = netlink.NLM_F_REQUEST | netlink.NLM_F_DUMP
        self._socket.settimeout(2.0)
        self._socket.send(_HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, flags, 0, 0) + body)
        while True:
            for kind, _, payload in netlink.messages(self._socket.recv(1 << 18)):
                if kind == netlink.NLMSG_DONE:
                    return
                if kind == netlink.NLMSG_ERROR:
                    code = -int(struct.unpack_from("=i", payload)[0])
                    raise OSError(code, os.strerror(code))
                found = decode(payload)
                if found is not None:
                    yield found

    def close(self) -> None:
        self._socket.close()


def decode(payload: bytes) -> Socket | None:
    """One ``inet_diag_msg``; None for a socket without an inode: nobody's (any more)."""
    family, state, _, _, sport, dport, src, dst, _, _, _, _, uid, inode = _ANSWER.unpack_from(payload)
    if not inode:
        return None
    local = (_address(family, src), int.from_bytes(sport, "big"))
    remote = (_address(family, dst), int.from_bytes(dport, "big"))
    return Socket(local, remote, state == _LISTEN or (state == _CLOSE and not remote[1]), uid, inode)


def sender(found: Sequence[Socket], flow: Flow) -> Socket | None:
    """The socket that a flow comes from, as that socket has it: before any translation of the destination."""
    here, there = ends(flow)
    same = [s for s in found if s.local == here]
    exact = next((s for s in same if s.remote == there), None)
    if exact is None and flow.proto == "udp":  # sent without being connected
        exact = next(
            (s for s in found if s.waits and s.local[1] == flow.sport and s.local[0] in (flow.src, *_ANY)), None
        )
    return exact


def receiver(
    found: Sequence[Socket], local: tuple[str, int], remote: tuple[str, int], holders: Container[int] = ()
) -> Socket | None:
    """The socket that a flow goes to; while nobody holds it yet (it waits to be accepted) the one that listens there."""
    exact = next((s for s in found if s.local == local and s.remote == remote), None)
    if exact is not None and exact.inode in holders:
        return exact
    waiting = [s for s in found if s.waits and s.local[1] == local[1] and s.local[0] in (local[0], *_ANY)]
    return next((s for s in waiting if s.local[0] == local[0]), waiting[0] if waiting else exact)


def ends(flow: Flow) -> tuple[tuple[str, int], tuple[str, int]]:
    return (flow.src, flow.sport), (flow.dst, flow.dport)


def inodes(pids: Mapping[str, int]) -> dict[int, str]:
    """The sockets that processes hold, by inode: which of them (proc(5), /proc/PID/fd)."""
    found: dict[int, str] = {}
    for name, pid in pids.items():
        with suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with suppress(OSError, ValueError):
                    target = os.readlink(entry.path)
                    if target.startswith("socket:["):
                        found[int(target[8:-1])] = name
    return found


def _address(family: int, raw: bytes) -> str:
    if family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, raw[:4])
    address = ipaddress.IPv6Address(raw)
    return str(address.ipv4_mapped or address)

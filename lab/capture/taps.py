"""Sees the packets of one interface, as they are before (inward) and after (outward) netfilter: packet(7).

A tap is a socket: it ends with whoever holds it, and plants nothing.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

_ETH_P_ALL = 3
_SOL_PACKET = 263
_PACKET_STATISTICS = 6
_SO_TIMESTAMPNS = 35
_SO_RCVBUFFORCE = 33
_TIMESPEC = struct.Struct("=qq")
_BUFFER = 32 << 20  # bytes that may wait
_LONGEST = 1 << 17  # bytes of a packet: a GSO packet on lo has 64 KiB and its headers

Direction = Literal["in", "out", "lo"]


@dataclass(frozen=True, slots=True)
class Frame:
    """One packet with its Ethernet header. ``when``: nanoseconds since the epoch, by the kernel. On lo it goes both ways."""

    interface: str
    direction: Direction
    when: int
    data: bytes


@dataclass(eq=False)
class Tap:
    """An open tap. ``received`` and ``dropped``: counted by the kernel, as of the last `count`."""

    interface: str
    socket: socket.socket
    received: int = 0
    dropped: int = 0
    loopback: bool = field(default=False)

    def read(self, most: int) -> Iterator[Frame]:
        """What waits, ``most`` packets at a time.

        Raises:
            OSError: ENETDOWN, the interface is gone.
        """
        for _ in range(most):
            try:
                data, controls, _, address = self.socket.recvmsg(_LONGEST, 64)
            except BlockingIOError:
                return
            outgoing = address[2] == socket.PACKET_OUTGOING
            if self.loopback and outgoing:
                continue  # the same packet comes again, inward
            direction: Direction = "lo" if self.loopback else "out" if outgoing else "in"
            yield Frame(self.interface, direction, _time(controls), data)

    def count(self) -> None:
        """Brings the counters up to date (reading them resets the kernel's)."""
        with suppress(OSError):
            got, lost = struct.unpack("=II", self.socket.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8))
            self.received += got
            self.dropped += lost

    def close(self) -> None:
        self.socket.close()


def interfaces() -> list[str]:
    """The interfaces of the calling thread's network namespace."""
    return [name for _, name in socket.if_nameindex()]


def open_tap(interface: str) -> Tap:
    """A tap on an interface of the calling thread's network namespace.

    Raises:
        OSError: there is no such interface, or no right to look (CAP_NET_RAW).
    """
    # Protocol 0 until it is bound: nothing of other interfaces gets in.
    s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, 0)
    try:
        s.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        with suppress(PermissionError):
            s.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER)
        s.bind((interface, _ETH_P_ALL))
    except OSError:
        s.close()
        raise
    return Tap(interface, s, loopback=interface == "lo")


def is_gone(error: OSError) -> bool:
    """Whether a tap's error says that its interface is no more."""
    return error.errno in (errno.ENETDOWN, errno.ENODEV, errno.ENXIO)


def _time(controls: list[tuple[int, int, bytes]]) -> int:
    for level, kind, value in controls:
        if level == socket.SOL_SOCKET and kind == _SO_TIMESTAMPNS:
            seconds, nanoseconds = _TIMESPEC.unpack(value[:16])
            return int(seconds) * 1_000_000_000 + int(nanoseconds)
    return 0

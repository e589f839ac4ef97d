"""Packets with comments as a pcapng file. Pure: values in, whole blocks out.

draft-ietf-opsawg-pcapng: section 4.1 (Section Header Block), 4.2 (Interface Description), 4.3 (Enhanced Packet), 4.6 (Interface
Statistics), 3.5 (options). Times are nanoseconds since the epoch. (scapy's writer has microseconds made of floats, and neither
descriptions nor statistics.)
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

LINKTYPE_ETHERNET = 1
SNAPLEN = 1 << 18
"""Bytes of a packet that are kept; what loopback carries is never longer."""

_SECTION, _INTERFACE, _STATISTICS, _PACKET = 0x0A0D0D0A, 1, 5, 6
_BYTE_ORDER = 0x1A2B3C4D
_END, _COMMENT = 0, 1
_HARDWARE_OS, _APPLICATION = 3, 4
_IF_NAME, _IF_DESCRIPTION, _IF_TSRESOL = 2, 3, 9
_EPB_FLAGS = 2
_STARTED, _ENDED, _RECEIVED, _DROPPED = 2, 3, 4, 5
_NANOSECONDS = b"\x09"
_LONGEST = 0xFFFF  # bytes of an option's value

INBOUND, OUTBOUND = 1, 2
"""Directions (epb_flags, bits 0 and 1); 0 is unknown, as on lo, where a packet goes both ways."""


def section(application: str, system: str, comment: str) -> bytes:
    """The Section Header Block: a file begins with one."""
    body = struct.pack("=IHHq", _BYTE_ORDER, 1, 0, -1)
    return _block(
        _SECTION, body, [(_COMMENT, _text(comment)), (_HARDWARE_OS, _text(system)), (_APPLICATION, _text(application))]
    )


def interface(name: str, description: str) -> bytes:
    """The Interface Description Block of an Ethernet interface; interfaces count from 0 in the order of their blocks."""
    body = struct.pack("=HHI", LINKTYPE_ETHERNET, 0, SNAPLEN)
    options = [(_IF_NAME, _text(name)), (_IF_DESCRIPTION, _text(description)), (_IF_TSRESOL, _NANOSECONDS)]
    return _block(_INTERFACE, body, options)


def packet(number: int, when: int, data: bytes, length: int, direction: int, comment: str) -> bytes:
    """An Enhanced Packet Block.

    Args:
        number: of its interface.
        length: of the packet on the wire; ``data`` may be less.
    """
    body = struct.pack("=IIIII", number, when >> 32, when & 0xFFFFFFFF, len(data), length) + _padded(data)
    return _block(_PACKET, body, [(_COMMENT, _text(comment)), (_EPB_FLAGS, struct.pack("=I", direction))])


def statistics(number: int, started: int, ended: int, received: int, dropped: int) -> bytes:
    """The Interface Statistics Block: how many packets came, and how many of these found no room and were lost."""
    body = struct.pack("=III", number, ended >> 32, ended & 0xFFFFFFFF)
    options = [(_STARTED, _time(started)), (_ENDED, _time(ended))]
    options += [(_RECEIVED, struct.pack("=Q", received)), (_DROPPED, struct.pack("=Q", dropped))]
    return _block(_STATISTICS, body, options)


def _block(kind: int, body: bytes, options: Iterable[tuple[int, bytes]]) -> bytes:
    packed = b"".join(struct.pack("=HH", code, len(value)) + _padded(value) for code, value in options)
    body += packed + struct.pack("=HH", _END, 0)
    size = len(body) + 12
    return struct.pack("=II", kind, size) + body + struct.pack("=I", size)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)


def _text(text: str) -> bytes:
    return text.encode()[:_LONGEST].decode(errors="ignore").encode()  # never half a character


def _time(when: int) -> bytes:
    return struct.pack("=II", when >> 32, when & 0xFFFFFFFF)

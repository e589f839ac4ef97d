"""Fence packets: once one was seen, whatever was sent before it on the same path has been seen too.

A fence is a UDP datagram to the discard port whose payload is a token. It goes to the next router (its port is closed;
the answer does not matter), so it crosses the same link as everything else that leaves.
"""

from __future__ import annotations

import secrets
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

DISCARD = 9
PREFIX = b"sidecarlab-fence-"


def send(destination: str, token: str | None = None) -> dict[str, object]:
    """Sends a fence from the current network namespace.

    Returns:
        its 5-tuple (``proto``, ``src``, ``sport``, ``dst``, ``dport``) and ``token``.

    Raises:
        OSError: no way to the destination.
    """
    token = token or secrets.token_hex(8)
    family = socket.AF_INET6 if ":" in destination else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as s:
        s.connect((destination, DISCARD))
        src, sport = s.getsockname()[:2]
        with suppress(ConnectionRefusedError):
            s.send(PREFIX + token.encode())
    return {"proto": "udp", "src": src, "sport": sport, "dst": destination, "dport": DISCARD, "token": token}


def token_of(payload: bytes) -> str | None:
    """The token in a datagram's payload, if it is a fence."""
    return payload[len(PREFIX) :].decode("ascii", "replace") if payload.startswith(PREFIX) else None


def gateway(routes: str | None = None) -> str | None:
    """The IPv4 default gateway of the current namespace, or None.

    Args:
        routes: text of /proc/net/route, for tests.
    """
    text = Path("/proc/thread-self/net/route").read_text() if routes is None else routes
    for line in text.splitlines()[1:]:
        words = line.split()
        if len(words) > 2 and words[1] == "00000000" and words[2] != "00000000":
            return socket.inet_ntoa(struct.pack("=I", int(words[2], 16)))
    return None


def flow_of(fence: Mapping[str, object]) -> tuple[str, str, int, str, int]:
    """The 5-tuple of what `send` returned."""
    return str(fence["proto"]), str(fence["src"]), int(str(fence["sport"])), str(fence["dst"]), DISCARD

"""Ports that a test may listen on later, for what cannot be told "any port" or must have one number for UDP and TCP."""

from __future__ import annotations

import os
import socket
from pathlib import Path

_first, _last = 20000, int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
# Two test runs on one machine start at different places.
_next = os.getpid() * 97


def free_port() -> int:
    """A port, free now for UDP and TCP on all of IPv4, below those that the kernel gives to clients and to port 0.

    A number from the kernel's own range may belong to some connection by the time that the test binds it. None is given
    twice until all others have been.

    Raises:
        RuntimeError: all of them are taken.
    """
    global _next
    for _ in range(_last - _first):
        _next += 1
        port = _first + _next % (_last - _first)
        if _is_free(port):
            return port
    raise RuntimeError(f"no port between {_first} and {_last} is free")


def _is_free(port: int) -> bool:
    with socket.socket() as tcp, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        try:
            tcp.bind(("", port))
            udp.bind(("", port))
        except OSError:
            return False
    return True

"""Telling a supervisor about the agent's state: systemd's protocol of ``NOTIFY_SOCKET`` (sd_notify(3))."""

from __future__ import annotations

import socket


def notify(path: str, message: str) -> None:
    """Sends one datagram, e.g. ``READY=1``; does nothing if `path` is empty.

    Raises:
        OSError: nobody listens.
    """
    if not path:
        return
    address = "\0" + path[1:] if path.startswith("@") else path
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.connect(address)
        sock.sendall(message.encode())

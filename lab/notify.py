"""Tells the one who started us that we are ready, the way systemd's services do (sd_notify(3))."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping


def ready(environ: Mapping[str, str] | None = None) -> bool:
    """Sends ``READY=1`` to the datagram socket named by ``NOTIFY_SOCKET``.

    A leading ``@`` means Linux's abstract name space. Without the variable nothing is sent.

    Returns:
        whether a message was sent.

    Raises:
        OSError: the socket is named but cannot be reached.
    """
    address = (os.environ if environ is None else environ).get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.connect(address)
        sock.send(b"READY=1")
    return True

"""Messages between the supervisor, the zygote and the first process of a place.

One JSON object a packet over a SOCK_SEQPACKET socket pair, with file descriptors beside it. Such a pair has no name:
nobody else can speak on it, and its other end's death is an end of file.
"""

from __future__ import annotations

import array
import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

Message = dict[str, Any]

_LARGEST = 1 << 20
_SO_SNDBUFFORCE = 32
_MOST_FDS = 8


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends, closed on exec."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    for end in ends:
        # Root may go beyond net.core.wmem_max: an environment with a whole mesh configuration must fit in one packet.
        with suppress(PermissionError):
            end.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _LARGEST)
    return ends


def send(sock: socket.socket, message: Mapping[str, object], fds: Sequence[int] = ()) -> None:
    """Sends one message.

    Raises:
        OSError: the other end is gone, or the message is larger than a packet (about 1 MiB).
    """
    socket.send_fds(sock, [json.dumps(message, separators=(",", ":")).encode()], list(fds), socket.MSG_NOSIGNAL)


def receive(sock: socket.socket) -> tuple[Message, list[int]] | None:
    """The next message and its descriptors (closed on exec, the caller's to close); None at the end of file.

    Raises:
        OSError: e.g. BlockingIOError on a socket that does not wait.
    """
    # Not socket.recv_fds: that of Python 3.11 forgets its flags, and the descriptors would outlive an exec.
    try:
        data, ancillary, flags, _ = sock.recvmsg(_LARGEST, socket.CMSG_SPACE(_MOST_FDS * 4), socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        return None
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        for fd in fds:
            os.close(fd)
        raise OSError("a message was cut short")
    return (cast(Message, json.loads(data)), fds.tolist()) if data else None

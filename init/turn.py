"""One run at a time in a network namespace.

A run reads the rules, decides, and changes them. Two at once would take each other's guard rules away, or each report
success for rules that the other has changed. So a run first binds a name in the abstract space of Unix sockets, which
the kernel keeps for each network namespace by itself. That needs no file (a container may have a read-only root and no
/run) and is let go when the last process that has the socket ends, however it ends. Commands inherit the socket: one
that goes on after its run was killed still keeps the next run waiting.

Any process of the network namespace can take the name, an application too: no rule is changed then, and the error says
who has it. Istio's own istio-iptables does not know the name; only the xtables lock stands between it and a run.

Source: unix(7), network_namespaces(7).
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import InitError, LockHeld
from .log import Log

NAME = "\0sidecarlab-init"
WAITING = 4096
"""Runs that can wait at the same time before they poll; the kernel's own limit is net.core.somaxconn."""

PAUSE = 0.01
"""Seconds until the next try where the kernel announces nothing, or announces an end that is none."""

_UNSEEN = "held by a process that cannot be seen from this pid namespace"
_SILENT = "its holder does not listen, so the kernel does not tell who it is"
_CROWDED = "so many wait for it that the kernel does not tell who holds it"


@contextmanager
def taken(wait: float, log: Log) -> Iterator[None]:
    """Keeps the network namespace of this process for the body.

    Args:
        wait: how long to wait for another run, seconds.

    Raises:
        LockHeld: another run did not end in that time; names its pid.
        InitError: the kernel gives no such socket.
    """
    deadline = time.monotonic() + wait
    try:
        mine = _bound(deadline, wait, log)
    except OSError as error:
        raise InitError("cannot keep other runs out of this network namespace", error.strerror or str(error)) from None
    with mine:
        yield


def _bound(deadline: float, wait: float, log: Log) -> socket.socket:
    holder, told = "", set[str]()
    while True:
        mine = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            mine.bind(NAME)
            mine.listen(WAITING)
            mine.set_inheritable(True)
            return mine
        except OSError as error:
            mine.close()
            if error.errno != errno.EADDRINUSE:
                raise
        holder = _wait_for_its_end(deadline, log, told) or holder
        if time.monotonic() >= deadline:
            raise LockHeld(
                f"cannot get the lock of this network namespace in {wait:g}s",
                holder or _CROWDED,
                "End that process or raise --lock-wait",
            )


def _wait_for_its_end(deadline: float, log: Log, told: set[str]) -> str:
    """Waits until the socket that has the name is closed, or the deadline; says who has it, empty if that is not told.

    Args:
        told: holders that the log names already.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.setblocking(False)
        try:
            other.connect(NAME)
        except BlockingIOError:
            # As many wait as can.
            _pause(deadline)
            return ""
        except ConnectionRefusedError:
            _pause(deadline)
            return _SILENT
        pid, _, _ = struct.unpack("=iII", other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        holder = _named(pid) or _UNSEEN
        if holder in told:
            # Its socket is still there: it accepts and closes, which no run does.
            _pause(deadline)
        left = deadline - time.monotonic()
        if left > 0:
            if holder not in told:
                told.add(holder)
                log.info(f"waiting for another run in this network namespace: {holder}")
            ended = select.poll()
            # No run accepts or answers: the only event is its end.
            ended.register(other, 0)
            ended.poll(left * 1000)
    return holder


def _pause(deadline: float) -> None:
    select.select([], [], [], min(PAUSE, max(0.0, deadline - time.monotonic())))


def _named(pid: int) -> str:
    """``pid`` is the run that took the lock; 0 if it lives in a pid namespace that this one does not see."""
    if not pid:
        return ""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return f"held by a command that pid {pid} has left"
    except PermissionError:
        pass
    return f"held by pid {pid}"

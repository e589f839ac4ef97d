"""The xtables lock: one file that everyone who changes legacy tables locks with flock(2).

Source: iptables: iptables/xshared.c (xtables_lock), XTABLES_LOCKFILE since 1.8.6.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

DEFAULT = "/run/xtables.lock"


def path(environ: Mapping[str, str]) -> str:
    """The lock file that iptables would use."""
    return environ.get("XTABLES_LOCKFILE", "") or DEFAULT


class CannotOpen(Exception):
    """The lock file cannot be opened: a read-only /run, no permission."""


@contextmanager
def locked(name: str, wait: float) -> Iterator[None]:
    """Holds the lock for the body.

    Args:
        name: the lock file, created if it does not exist.
        wait: how long to wait for another holder, seconds.

    Raises:
        TimeoutError: another process kept it.
        CannotOpen: the file cannot be opened.
    """
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise CannotOpen(error.strerror or str(error)) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _wait(descriptor, wait)
        yield
    finally:
        os.close(descriptor)


def holder(name: str) -> int:
    """The pid that holds the lock, or 0 if none is seen from here (another pid namespace)."""
    try:
        status = os.stat(name)
        with open("/proc/locks") as locks:
            lines = locks.read().splitlines()
    except OSError:
        return 0
    wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    for line in lines:
        fields = line.split()
        if fields[1:2] == ["->"] or len(fields) < 6:
            continue
        if fields[1] == "FLOCK" and fields[5] == wanted and fields[4].isdigit():
            return int(fields[4])
    return 0


def _wait(descriptor: int, wait: float) -> None:
    """flock has no time-out: a thread waits for it, and lets go again if it comes too late."""
    import threading

    got = threading.Event()

    def block() -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        got.set()

    threading.Thread(target=block, daemon=True, name="xtables-lock").start()
    if not got.wait(wait):
        raise TimeoutError("the xtables lock is held")

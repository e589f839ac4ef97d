"""Passing a terminal and signals through to a process in a place."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

    from lab.runtime.enter import Child

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def forwarding(child: Child) -> Iterator[None]:
    """Signals that this process gets go to the child instead; only a main thread can do that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def pass_on(number: int, _frame: FrameType | None) -> None:
        child.signal(number)

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(start: Callable[[int], Child]) -> int:
    """Runs ``start(terminal)`` on a new pseudo-terminal joined to ours (stdin and stdout), and returns its exit code.

    Keys go through raw, so Ctrl-C is the child's; a change of our window's size is passed on.
    """
    master, slave = os.openpty()
    wake_out, wake_in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    _copy_size(slave)
    before = termios.tcgetattr(0)
    resize = signal.signal(signal.SIGWINCH, lambda *_: os.write(wake_in, b"w"))
    try:
        tty.setraw(0)
        child = start(slave)
        os.close(slave)
        slave = -1
        with forwarding(child):
            _relay(master, child, wake_out)
            return child.wait()
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)
        signal.signal(signal.SIGWINCH, resize)
        for fd in (master, wake_out, wake_in, *([slave] if slave >= 0 else [])):
            os.close(fd)


def _relay(master: int, child: Child, wake: int) -> None:
    poll = select.poll()
    for fd in (0, master, child.pidfd, wake):
        poll.register(fd, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if wake in ready:
            os.read(wake, 64)
            _copy_size(master)
        if 0 in ready:
            keys = os.read(0, 4096)
            if keys:
                os.write(master, keys)
            else:
                poll.unregister(0)
        if master in ready and not _copy(master):
            poll.unregister(master)
        if child.pidfd in ready:
            break
    rest = select.poll()
    rest.register(master, select.POLLIN)
    while rest.poll(0) and _copy(master):  # what it wrote last
        pass


def _copy(master: int) -> bool:
    try:
        data = os.read(master, 65536)
    except OSError:  # EIO: nobody has the other side open any more
        return False
    while data:
        data = data[os.write(1, data) :]
    return True


def _copy_size(fd: int) -> None:
    with suppress(OSError):
        fcntl.ioctl(fd, termios.TIOCSWINSZ, fcntl.ioctl(0, termios.TIOCGWINSZ, bytes(8)))

"""The process that everything of a lab is forked from: it imports once, so that a pod's processes need not.

``python -m lab.runtime.zygote FD MODULE...`` with the lab's mark in its environment. FD is one end of a socket pair
(`lab.runtime.channel`). It imports the modules, obeying between them what has come, says ``ready``, and goes on:
``{"op": "log", "path"}`` names the file for what it has to say; each
``{"op": "start", "place", "netns", "notify_dir", "hostname", "view", "sysctls"}`` brings one descriptor, the control
channel of the new place's first process (`lab.runtime.keeper`), which it starts. Reports: ``ready``, ``started`` with
a pidfd, ``ended`` with a ``code``, ``failed`` with an ``error``.

It must stay a process with one thread and nothing running, since only such a one may be forked at will. When the one
who gives orders is gone it stays as the parent that reaps, until its last place has ended.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from lab.runtime import channel, keeper, kernel, spawn


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until no order can come any more and no place is left."""
    fd, *modules = sys.argv[1:] if argv is None else argv
    control = socket.socket(fileno=int(fd))
    os.set_inheritable(control.fileno(), False)
    kernel.name_process("zygote")
    zygote = Zygote(control)
    error = preload(modules, zygote.obey_pending)
    if error:
        channel.send(control, {"event": "failed", "place": "", "error": error})
        return 1
    channel.send(control, {"event": "ready"})
    zygote.serve()
    return 0


def preload(modules: Sequence[str], after_each: Callable[[], None]) -> str:
    """Imports the modules; a reason why this process may not be forked, or nothing.

    Places that need few of them need not wait for all: ``after_each`` may fork.
    """
    gc.disable()
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as e:  # whatever a module does at import: the one who waits must hear of it
            return f"import {name}: {type(e).__name__}: {e}"
        threads = len(os.listdir("/proc/self/task"))
        if threads > 1:
            return f"importing {name} left {threads - 1} threads running"
        gc.freeze()  # the collector would write to every object, and so copy every page in every child
        after_each()
    return ""


class Zygote:
    """Forks places on order and reports their ends."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._places: dict[int, str] = {}
        self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._orphaned = False
        self._wake, self._wake_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        self._poll.register(control, select.POLLIN)
        spawn.reset_signals()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_end, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Until the control channel has ended and no place is left."""
        while not self._orphaned or self._places:
            self._turn(None)

    def obey_pending(self) -> None:
        """Does what has come, and waits for nothing."""
        while not self._orphaned and self._turn(0):
            pass

    def _turn(self, timeout: int | None) -> bool:
        ready = self._poll.poll(timeout)
        for fd, _ in ready:
            if fd == self._wake:
                with suppress(BlockingIOError):
                    os.read(self._wake, 4096)
                self._reap()
            elif not self._obey():
                self._poll.unregister(self._control)
                self._orphaned = True
        return bool(ready)

    def _obey(self) -> bool:
        received = channel.receive(self._control)
        if received is None:
            return False
        order, fds = received
        try:
            if order["op"] == "log":
                _say_into(order["path"])
            else:
                self._start(order, fds)
        except OSError as e:
            what = f"{e.filename or 'fork'}: {e.strerror}"
            self._report({"event": "failed", "place": order.get("place", ""), "error": what})
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _start(self, order: Mapping[str, Any], fds: list[int]) -> None:
        (control,) = fds
        kernel.unshare(kernel.CLONE_NEWPID)
        try:
            pid = os.fork()
            if pid == 0:
                try:
                    self._become_keeper(os.dup(control), order)
                finally:
                    os._exit(70)
        finally:
            kernel.setns(self._own_pids, kernel.CLONE_NEWPID)
        self._places[pid] = str(order["place"])
        pidfd = os.pidfd_open(pid)
        self._report({"event": "started", "place": order["place"], "pid": pid}, pidfd)
        os.close(pidfd)

    def _become_keeper(self, control: int, order: Mapping[str, Any]) -> None:
        self._control.close()
        keeper.run(socket.socket(fileno=control), order)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            place = self._places.pop(pid, None)
            if place is not None:
                self._report({"event": "ended", "place": place, "pid": pid, "code": keeper.code_of(status)})

    def _report(self, message: Mapping[str, object], *fds: int) -> None:
        with suppress(OSError):  # nobody listens any more
            channel.send(self._control, message, fds)


def _say_into(path: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    for standard in (1, 2):
        os.dup2(fd, standard)
    os.close(fd)


if __name__ == "__main__":
    sys.exit(main())

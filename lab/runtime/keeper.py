"""The first process of a place: starts what it is told to, reaps what ends, and says so.

It is process 1 of the place's pid namespace, so its end ends all others in it. It lives on when the one who gives the
orders dies: a mesh outlasts its supervisor until it is taken down.

Orders, one message each: ``{"op": "spawn", "process": {...}}``. Reports: ``up``; ``started`` with a pidfd;
``ready`` (the process said READY=1, or its program runs: exec(2) succeeded); ``exited`` with a ``code`` (128+n for signal n); ``failed`` with an ``error``.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from lab.fabric import paths
from lab.runtime import channel, kernel, mounts, spawn
from lab.runtime.spawn import ProcessSpec


def run(control: socket.socket, order: Mapping[str, Any]) -> NoReturn:
    """What a forked child of the zygote becomes: the first process of the place that ``order`` describes."""
    try:
        os.setsid()
        kernel.close_all_but((0, 1, 2, control.fileno()))
        kernel.name_process("pod")
        keeper = Keeper(control, str(order["notify_dir"]))
        try:
            _enter(order)
        except OSError as e:
            channel.send(control, {"event": "failed", "error": f"{e.filename or 'namespace'}: {e.strerror}"})
            os._exit(1)
        channel.send(control, {"event": "up"})
        keeper.serve()
    except BaseException as e:
        traceback.print_exc()
        with suppress(OSError):
            channel.send(control, {"event": "failed", "error": f"{type(e).__name__}: {e}"})
    finally:
        os._exit(70)


def _enter(order: Mapping[str, Any]) -> None:
    """Network namespace, then the place's own view of files, then its sysctls."""
    fd = os.open(order["netns"], os.O_RDONLY | os.O_CLOEXEC)
    kernel.setns(fd, kernel.CLONE_NEWNET)
    os.close(fd)
    if order.get("view"):
        kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWUTS | kernel.CLONE_NEWIPC)
        kernel.set_hostname(order["hostname"])
        mounts.enter(mounts.View.from_json(order["view"]))
    for name, value in order.get("sysctls", {}).items():
        Path("/proc/sys", *name.split(".")).write_text(value)


class Keeper:
    """The loop of process 1. One thread, no event loop: it is what every process of the place is forked from."""

    def __init__(self, control: socket.socket, notify_dir: str) -> None:
        self._control = control
        self._notify_dir = notify_dir
        self._mark = {paths.ENV_MARK: os.environ[paths.ENV_MARK]} if paths.ENV_MARK in os.environ else {}
        self._running: dict[int, str] = {}
        self._notify: dict[int, tuple[str, socket.socket]] = {}
        self._execs: dict[int, str] = {}
        """Pipes of programs that are about to run; exec(2) closes their other ends."""
        self._poll = select.poll()
        self._wake, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        spawn.reset_signals()
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._poll.register(self._wake, select.POLLIN)
        self._poll.register(control, select.POLLIN)

    def serve(self) -> NoReturn:
        """Until killed."""
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._wake:
                    with suppress(BlockingIOError):
                        os.read(self._wake, 4096)
                    self._reap()
                elif fd == self._control.fileno():
                    self._obey()
                elif fd in self._notify:
                    self._notified(fd)
                elif fd in self._execs:
                    self._executed(fd)

    def _obey(self) -> None:
        received = channel.receive(self._control)
        if received is None:
            self._poll.unregister(self._control)
            return
        order, fds = received
        for fd in fds:
            os.close(fd)
        if order["op"] == "spawn":
            self._spawn(ProcessSpec.from_json(order["process"]))

    def _spawn(self, spec: ProcessSpec) -> None:
        program = bool(spec.argv) and not spec.notify
        ours, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK) if program else (-1, -1)
        try:
            env = {**spec.env, **self._mark}
            if spec.notify:
                env["NOTIFY_SOCKET"] = self._listen(spec)
            spec = replace(spec, env=env)
            pid = os.fork()
        except OSError as e:
            for fd in {ours, theirs} - {-1}:
                os.close(fd)
            self._report({"event": "failed", "name": spec.name, "error": str(e)})
            return
        if pid == 0:
            try:
                self._forget()
                spawn.become(spec, theirs)
            finally:
                os._exit(70)
        self._running[pid] = spec.name
        if program:
            os.close(theirs)
            self._execs[ours] = spec.name
            self._poll.register(ours, select.POLLIN)
        fd = os.pidfd_open(pid)  # our own child, not reaped yet: the number is its
        self._report({"event": "started", "name": spec.name, "pid": pid}, fd)
        os.close(fd)

    def _listen(self, spec: ProcessSpec) -> str:
        path = f"{self._notify_dir}/{spec.name}"
        with suppress(FileNotFoundError):
            os.unlink(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        sock.bind(path)
        os.chown(path, spec.identity.uid, spec.identity.gid)
        self._notify[sock.fileno()] = (spec.name, sock)
        self._poll.register(sock, select.POLLIN)
        return path

    def _notified(self, fd: int) -> None:
        name, sock = self._notify[fd]
        try:
            message = sock.recv(4096)
        except BlockingIOError:
            return
        if b"READY=1" in message.splitlines():
            self._report({"event": "ready", "name": name})

    def _executed(self, fd: int) -> None:
        """The pipe of a program has ended, or has a byte: then the program could not be run."""
        name = self._execs.pop(fd)
        failed = os.read(fd, 1)
        self._poll.unregister(fd)
        os.close(fd)
        if not failed:
            self._report({"event": "ready", "name": name})

    def _reap(self) -> None:
        """Its own children, and those that lost their parent: they become children of process 1."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            name = self._running.pop(pid, None)
            if name is not None:
                self._stop_listening(name)
                for fd in [fd for fd, owner in self._execs.items() if owner == name]:
                    self._executed(fd)
                self._report({"event": "exited", "name": name, "pid": pid, "code": code_of(status)})

    def _stop_listening(self, name: str) -> None:
        for fd, (owner, sock) in list(self._notify.items()):
            if owner == name:
                # A last READY=1 may still lie there: what said it has ended, but it was said.
                self._notified(fd)
                self._poll.unregister(fd)
                sock.close()
                del self._notify[fd]

    def _report(self, message: Mapping[str, object], *fds: int) -> None:
        with suppress(OSError):  # nobody listens any more
            channel.send(self._control, message, fds)

    def _forget(self) -> None:
        """In a forked child: lets go of all that is process 1's."""
        self._control.close()
        for _, sock in self._notify.values():
            sock.close()


def code_of(status: int) -> int:
    """A wait status as a shell gives it: the exit code, or 128 plus the signal's number."""
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code

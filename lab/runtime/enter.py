"""Entering a place from outside: for ``lab exec``, probes and sniffers.

A place is found by the lab's record, so this works from any process of root, with or without a living supervisor. The
mount namespace is entered by a forked child only (the kernel refuses it to a process with threads); sockets alone
need no fork: `netns`.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, cast

from lab.errors import InputError, LabError
from lab.fabric import paths, record
from lab.runtime import keeper, kernel, spawn
from lab.runtime.identity import Identity, of_uid

T = TypeVar("T")
Kind = Literal["net", "mnt", "pid"]
EVERYTHING: tuple[Kind, ...] = ("net", "mnt", "pid")

_FLAGS: Mapping[Kind, int] = {
    "net": kernel.CLONE_NEWNET,
    "mnt": kernel.CLONE_NEWNS | kernel.CLONE_NEWUTS | kernel.CLONE_NEWIPC,
    "pid": kernel.CLONE_NEWPID,
}


@dataclass(frozen=True, slots=True)
class Place:
    """``pid`` is the host's number of the place's first process (0: it has none), ``starttime`` guards against reuse."""

    lab: str
    name: str
    netns: Path
    pid: int = 0
    starttime: int = 0
    mark: str = ""

    @contextmanager
    def first_process(self) -> Iterator[int]:
        """A pidfd of the place's first process.

        Raises:
            InputError: it has ended, or there never was one.
        """
        process = record.ProcessId(self.pid, self.starttime)
        try:
            fd = os.pidfd_open(self.pid) if self.pid else -1
        except ProcessLookupError:
            fd = -1
        try:
            if fd < 0 or not process.alive():
                raise InputError(f"nothing runs in {self.name}", f"lab {self.lab}", next_step="See lab inspect")
            yield fd
        finally:
            if fd >= 0:
                os.close(fd)


def find(lab: str, place: str) -> Place:
    """The place of a lab: ``node``, ``outside``, a pod ``POD.NAMESPACE``, an external host ``ext-NAME``.

    Raises:
        InputError: there is no such lab, or no such place in it.
    """
    known = record.open(lab)
    try:
        entries, mark = known.entries(), known.id
    finally:
        known.close()
    pid = starttime = 0
    for entry in entries:
        if entry.get("kind") == "process" and entry.get("role") == "keeper" and entry.get("place") == place:
            pid, starttime = cast(int, entry["pid"]), cast(int, entry["starttime"])
    netns_path = paths.netns_path(lab, place)
    if not netns_path.exists():
        names = sorted({str(e["place"]) for e in entries if e.get("kind") == "netns"})
        raise InputError(f'there is no "{place}" in lab {lab}', why=f"it has {', '.join(names)}")
    return Place(lab, place, netns_path, pid, starttime, mark)


@contextmanager
def netns(path: str | os.PathLike[str]) -> Iterator[None]:
    """The calling thread is in the network namespace pinned at ``path``; sockets opened meanwhile stay there.

    Raises:
        InputError: nothing is pinned there.
    """
    try:
        there = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise InputError("no network namespace", os.fspath(path), "nothing is pinned there") from None
    here = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        kernel.setns(there, kernel.CLONE_NEWNET)
        try:
            yield
        finally:
            kernel.setns(here, kernel.CLONE_NEWNET)
    finally:
        os.close(there)
        os.close(here)


class Child:
    """A process started in a place, a child of this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, 128+n if signal n ended it.

        Raises:
            TimeoutError: it runs on after ``timeout`` seconds.
        """
        if self._code is None:
            poll = select.poll()
            poll.register(self.pidfd, select.POLLIN)
            if not poll.poll(None if timeout is None else max(timeout, 0) * 1000):
                raise TimeoutError(f"process {self.pid} still runs")
            self._code = keeper.code_of(os.waitpid(self.pid, 0)[1])
            os.close(self.pidfd)
            self.pidfd = -1
        return self._code

    def signal(self, number: int) -> None:
        """Sends it a signal; nothing happens if it has ended."""
        if self._code is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def kill(self) -> int:
        """Ends it at once and waits for that."""
        self.signal(signal.SIGKILL)
        return self.wait()


def start(
    place: Place,
    what: Sequence[str] | Callable[[], int | None],
    identity: Identity | None = None,
    *,
    namespaces: Sequence[Kind] = EVERYTHING,
    env: Mapping[str, str] | None = None,
    cwd: str = "/",
    stdio: tuple[int, int, int] = (0, 1, 2),
    terminal: int | None = None,
) -> Child:
    """Starts a program, or calls a function in a forked child, inside the place; returns at once.

    Args:
        what: a command, or a function whose result is the exit code (None is 0).
        identity: default root with everything it has.
        env: the whole environment of a command (default: PATH, HOME and TERM); added to ours for a function.
        stdio: descriptors that become its standard streams.
        terminal: a pseudo-terminal's descriptor that becomes its controlling terminal and standard streams.

    The child is a session of its own, carries the lab's mark, and dies with the thread that started it (prctl(2):
    PR_SET_PDEATHSIG means the parent thread).

    Raises:
        InputError: nothing runs there.
    """
    flags = 0
    for kind in namespaces:
        flags |= _FLAGS[kind]
    with _joined(place, flags) as pidfd:
        try:
            pid = os.fork()
        except OSError as e:  # the place's first process ended in between: its namespace takes no new ones
            raise InputError(f"nothing runs in {place.name}", f"lab {place.lab}", str(e.strerror)) from None
        if pid == 0:
            _become(place, what, identity or of_uid(0), flags, pidfd, env, cwd, stdio, terminal)
    return Child(pid)


def run_in(
    place: Place,
    what: Sequence[str] | Callable[[], int | None],
    uid: int = 0,
    gid: int | None = None,
    namespaces: Sequence[Kind] = EVERYTHING,
    *,
    identity: Identity | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str = "/",
    timeout: float | None = None,
) -> int:
    """Runs it in the foreground and returns its exit code (128+n if signal n ended it).

    Signals that reach this process are passed on. If stdin is a terminal it gets one of its own. ``uid`` 0 keeps all
    capabilities, any other has none (``identity`` says otherwise).

    Raises:
        InputError: nothing runs there.
        TimeoutError: it did not end within ``timeout`` seconds; it was killed.
    """
    from lab.runtime import terminal

    who = identity or of_uid(uid, gid)
    if os.isatty(0) and not callable(what):
        return terminal.run(
            lambda slave: start(place, what, who, namespaces=namespaces, env=env, cwd=cwd, terminal=slave)
        )
    child = start(place, what, who, namespaces=namespaces, env=env, cwd=cwd)
    with terminal.forwarding(child):
        try:
            return child.wait(timeout)
        except TimeoutError:
            child.kill()
            raise


def call_in(
    place: Place,
    function: Callable[..., T],
    *args: object,
    uid: int = 0,
    gid: int | None = None,
    identity: Identity | None = None,
    namespaces: Sequence[Kind] = EVERYTHING,
    timeout: float = 30.0,
) -> T:
    """What ``function(*args)`` returns or raises when called inside the place, in a forked child.

    Result and exception must be picklable.

    Raises:
        InputError: nothing runs there.
        LabError: the child died without an answer, or did not answer within ``timeout`` seconds.
    """
    ours, theirs = os.pipe2(os.O_CLOEXEC)

    def call() -> int:
        try:
            answer = (True, function(*args))
        except BaseException as e:
            e.__traceback__ = None
            answer = (False, cast(Any, e))
        with open(theirs, "wb") as out:
            out.write(pickle.dumps(answer))
        return 0

    try:
        child = start(place, call, identity or of_uid(uid, gid), namespaces=namespaces)
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    try:
        data = _read_all(ours, time.monotonic() + timeout)
    finally:
        os.close(ours)
        child.signal(signal.SIGKILL)
        code = child.wait()
    if data is None:
        raise LabError(f"no answer from {place.name}", f"lab {place.lab}", f"nothing came within {timeout:g} s")
    if not data:
        raise LabError(f"no answer from {place.name}", f"lab {place.lab}", f"the process ended with {code}")
    worked, result = pickle.loads(data)
    if not worked:
        raise result
    return cast(T, result)


@contextmanager
def _joined(place: Place, flags: int) -> Iterator[int]:
    """Our next child will be in the place's pid namespace; yields the pidfd by which it joins the rest."""
    if flags == kernel.CLONE_NEWNET:
        yield -1
        return
    own = os.open("/proc/thread-self/ns/pid_for_children", os.O_RDONLY | os.O_CLOEXEC)
    try:
        with place.first_process() as pidfd:
            if flags & kernel.CLONE_NEWPID:
                kernel.setns(pidfd, kernel.CLONE_NEWPID)
            try:
                yield pidfd
            finally:
                kernel.setns(own, kernel.CLONE_NEWPID)
    finally:
        os.close(own)


def _become(
    place: Place,
    what: Sequence[str] | Callable[[], int | None],
    identity: Identity,
    flags: int,
    pidfd: int,
    env: Mapping[str, str] | None,
    cwd: str,
    stdio: tuple[int, int, int],
    terminal: int | None,
) -> NoReturn:
    """In the forked child: never returns, and never lets an exception into the caller's code."""
    code = 70
    try:
        os.setsid()
        spawn.reset_signals(exec_next=not callable(what))
        if pidfd < 0:
            pidfd = os.open(place.netns, os.O_RDONLY | os.O_CLOEXEC)
        rest = flags & ~kernel.CLONE_NEWPID
        if rest:
            kernel.setns(pidfd, rest)
        _standard_streams(stdio, terminal, identity)
        identity.apply()
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)  # after apply: a change of uid takes it away
        if flags & kernel.CLONE_NEWNS:
            os.chdir(cwd)
        mark = {paths.ENV_MARK: place.mark}
        if callable(what):
            os.environ.update({**(env or {}), **mark})
            code = what() or 0
        else:
            default = {"PATH": spawn.DEFAULT_PATH, "HOME": "/tmp", "TERM": os.environ.get("TERM", "dumb")}
            code = _exec(what, {**(default if env is None else env), **mark})
    except SystemExit as end:
        code = spawn.exit_code(end)
    except BaseException:
        code = 1
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _standard_streams(stdio: tuple[int, int, int], terminal: int | None, identity: Identity) -> None:
    if terminal is not None:
        import fcntl
        import termios

        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
        os.fchown(terminal, identity.uid, -1)
        stdio = (terminal, terminal, terminal)
    copies = [os.dup(fd) for fd in stdio]
    for target, copy in enumerate(copies):
        os.dup2(copy, target)
        os.close(copy)


def _exec(argv: Sequence[str], env: Mapping[str, str]) -> int:
    try:
        os.execvpe(argv[0], list(argv), dict(env))
    except OSError as e:
        os.write(2, f"{argv[0]}: {e.strerror}\n".encode())
        return 127 if isinstance(e, FileNotFoundError) else 126
    except ValueError as e:  # an empty name, or what no program can be given
        os.write(2, f"{argv[0]!r} cannot be run: {e}\n".encode("utf-8", "backslashreplace"))
        return 127


def _read_all(fd: int, deadline: float) -> bytes | None:
    """Up to the end of file; None if that does not come in time."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    data = bytearray()
    while True:
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return None
        chunk = os.read(fd, 65536)
        if not chunk:
            return bytes(data)
        data += chunk

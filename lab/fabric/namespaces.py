"""Network namespaces made, pinned and entered with the system calls alone.

A namespace belongs to a thread (setns(2), unshare(2)); whatever changes it runs in a thread of its own that then ends,
so the calling thread never leaves its namespace.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from lab.errors import InputError, LabError, ObservationError
from lab.fabric import paths
from lab.fabric.record import Record, unmount
from lab.fabric.shield import held

CLONE_NEWNET = 0x40000000
MS_BIND = 1 << 12
MS_SHARED = 1 << 20
MS_NOSUID, MS_NODEV, MS_NOEXEC = 1 << 1, 1 << 2, 1 << 3

T = TypeVar("T")


class Cancelled(Exception):
    """The caller was interrupted; raised inside `apart` work at its next `Stop.check`."""


class Stop:
    """Tells work in another thread that nobody waits for its result any more.

    A plain flag: `set` is called by signal handlers, which may interrupt one another, so it must not take a lock.
    """

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        self._set = True

    def check(self) -> None:
        """Raises `Cancelled` once the caller was interrupted."""
        if self._set:
            raise Cancelled


class _Outcome(Generic[T]):
    def __init__(self) -> None:
        self.value: T
        self.error: BaseException | None = None


def apart(work: Callable[[Stop], T], stop: Stop | None = None) -> T:
    """Runs ``work`` in a thread of its own and gives back what it returns or raises.

    Args:
        work: gets the `Stop` that it should check now and then.
        stop: the one to use, if the caller wants to set it itself.

    An interrupt (Ctrl-C) while waiting asks the work to stop and takes effect only after the work has ended: whoever
    cleans up then does not race with a half-done build.
    """
    stop = stop or Stop()
    outcome: _Outcome[T] = _Outcome()

    def run() -> None:
        try:
            outcome.value = work(stop)
        except BaseException as e:
            outcome.error = e

    thread = threading.Thread(target=run, name="fabric", daemon=True)
    with held(stop.set):
        thread.start()
        try:
            thread.join()
        except BaseException:  # not a signal; the work must end all the same
            stop.set()
            thread.join()
            raise
    if outcome.error is not None:
        raise outcome.error
    return outcome.value


def inside(path: Path, work: Callable[[], T]) -> T:
    """Runs ``work`` in a thread that lives in the network namespace pinned at ``path``.

    Sockets opened there, and programs started there, stay in that namespace.

    Raises:
        LabError: there is no such namespace.
    """

    def entered(_stop: Stop) -> T:
        enter(path)
        return work()

    return apart(entered)


def enter(path: Path) -> None:
    """Moves the calling thread into the network namespace pinned at ``path``.

    Raises:
        LabError: there is no such namespace, or this process may not enter it.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as e:
        raise LabError("a namespace cannot be entered", str(path), str(e.strerror)) from None
    try:
        _call("setns", fd, CLONE_NEWNET)
    except OSError as e:
        raise _refused("a namespace cannot be entered", str(path), e) from None
    finally:
        os.close(fd)


def make(record: Record, place: str) -> bool:
    """Makes the network namespace of ``place``, pins it and leaves the calling thread in it.

    Returns:
        False if it exists already; then the thread has only entered it.

    Raises:
        LabError: the kernel refused, or the record cannot be written.
    """
    path = paths.netns_path(record.name, place)
    if is_pinned(path):
        enter(path)
        return False
    record.add("netns", place=place, path=str(path))
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o444))
        _call("unshare", CLONE_NEWNET)
        _mount("/proc/thread-self/ns/net", path, "", MS_BIND)
    except OSError as e:
        raise _refused("a network namespace cannot be made", place, e) from None
    return True


def adopt(record: Record, place: str, pid: int) -> None:
    """Pins the network namespace of a process, made by others, as that of ``place``; what is missing in it `make` adds.

    Raises:
        LabError: the process has ended, or the kernel refused.
    """
    prepare(record)
    path = paths.netns_path(record.name, place)
    record.add("netns", place=place, path=str(path))
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o444))
        _mount(f"/proc/{pid}/ns/net", path, "", MS_BIND)
    except OSError as e:
        raise _refused("a container's network namespace cannot be pinned", place, e) from None


def unpin(record: Record, place: str) -> None:
    """Lets go of the namespace of ``place``; it ends with the last process and socket in it. Twice is fine."""
    path = paths.netns_path(record.name, place)
    try:
        if is_pinned(path):
            unmount(path)
        path.unlink(missing_ok=True)
    except OSError as e:
        raise _refused("a namespace cannot be let go of", str(path), e) from None


def is_pinned(path: Path) -> bool:
    """Whether a namespace is mounted at ``path`` (it then lies on the kernel's nsfs, not on its directory's disk)."""
    try:
        return os.stat(path).st_dev == os.stat("/proc/self/ns/net").st_dev
    except OSError:
        return False


def prepare(record: Record) -> None:
    """Gives the lab's pins a mount of their own, once.

    It is shared, so that letting go of a pin here also lets go of it in mount namespaces that copied it later and
    still follow this one (as ip-netns(8) does).
    """
    directory = paths.netns_dir(record.name)
    try:
        directory.mkdir(mode=0o755, exist_ok=True)
        if os.path.ismount(directory):
            return
        record.add("mount", path=str(directory))
        _mount("sidecarlab", directory, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, "mode=755,size=64k,nr_inodes=16k")
        _mount("", directory, "", MS_SHARED)
    except OSError as e:
        raise _refused("a lab cannot pin its namespaces", str(directory), e) from None


def sysctl(key: str, value: str, *, optional: bool = False) -> None:
    """Sets ``key`` (slashes, from /proc/sys) in the namespace of the calling thread.

    Where /proc/sys is read-only (some containers), a value that is already right will do.

    Raises:
        ObservationError: it cannot be set and is not right; an ``optional`` one only if the key exists.
    """
    path = f"/proc/sys/{key}"
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, value.encode())
        finally:
            os.close(fd)
    except FileNotFoundError:
        if not optional:
            raise ObservationError("this kernel lacks a setting", path, "a lab needs it") from None
    except OSError as e:
        with suppress(OSError):
            if Path(path).read_text().split() == value.split():
                return
        why = f"it must be {value}, and it cannot be set: {e.strerror}"
        raise ObservationError("a kernel setting cannot be made", path, why, "Is /proc/sys read-only here?") from None


def _mount(source: str, target: Path, kind: str, flags: int, data: str = "") -> None:
    _call("mount", source.encode(), os.fsencode(target), kind.encode() or None, flags, data.encode() or None)


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)


def _refused(what: str, where: str, e: OSError) -> LabError:
    if e.errno in (errno.EPERM, errno.EACCES):
        return InputError(what, where, str(e.strerror), "Run as root, in a container with CAP_SYS_ADMIN")
    if e.errno in (errno.EINVAL, errno.ENOSYS):
        return ObservationError(what, where, f"this kernel does not do it: {e.strerror}")
    return LabError(what, where, str(e.strerror))

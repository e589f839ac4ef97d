"""What a lab has made, so that it can be taken away again whatever happened in between.

``/run/sidecarlab/NAME/record.jsonl`` gets one line *before* each thing is made. `down` trusts three things, each of
which is exact and none of which is a name pattern:

- the record: processes as (pid, start time), mounts and files by path;
- the mark in a process's environment (``SIDECARLAB_LAB=<id>``), which every process of a lab inherits;
- membership: a process whose network namespace is one that the lab has pinned.

The id is also the target of a symbolic link, so a record that was cut short (a crash, a full disk) still leads to
every process. Imports stay light: taking a lab down must work when nothing else does.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import secrets
import select
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lab.errors import InputError, LabError
from lab.fabric import paths
from lab.fabric.shield import held

MNT_DETACH = 2

Entry = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class LabInfo:
    """One lab on this machine. ``running``: its supervisor lives; ``crashed``: only its remains do.

    ``created`` is in seconds since the epoch; ``id`` is empty and ``pid`` 0 where the record does not tell. ``temporary``: it
    lasts as long as one run of tests, which brought it up.
    """

    name: str
    id: str
    path: Path
    state: Literal["running", "crashed"]
    pid: int = 0
    created: float = 0.0
    temporary: bool = False


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process that cannot be mistaken for a later one with the same number.

    ``starttime`` is in clock ticks since boot (proc(5): /proc/PID/stat, field 22).
    """

    pid: int
    starttime: int

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The process that has this number now; None when there is none, or only a zombie."""
        stat = _stat(pid)
        return None if stat is None or stat.state in "ZX" else cls(pid, stat.starttime)

    def alive(self) -> bool:
        return ProcessId.of(self.pid) == self


class Record:
    """The record of one lab, open for adding. Safe to use from several threads and processes."""

    def __init__(self, name: str, lab_id: str, fd: int) -> None:
        self.name = name
        self.id = lab_id
        self._fd = fd
        self._lock = threading.Lock()
        size = os.fstat(fd).st_size
        self._torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"

    @property
    def dir(self) -> Path:
        return paths.run_dir(self.name)

    @property
    def environ(self) -> dict[str, str]:
        """The mark, for the environment of everything that the lab starts."""
        return {paths.ENV_MARK: self.id}

    @classmethod
    def create(cls, name: str, lab_id: str = "", *, temporary: bool = False) -> Record:
        """Claims ``name`` for a new lab whose supervisor is the calling process.

        The remains of a crashed lab of that name are taken down first. ``lab_id`` (see `new_id`) is for a caller that
        has started marked processes before. ``temporary``: see `LabInfo`.

        Raises:
            InputError: a lab of that name is running, or this process may not make one.
            LabError: the remains of an older one cannot be removed.
        """
        paths.check_name(name)
        for _ in range(10):
            with _root_lock() as root:
                if not (root / name).exists():
                    return cls._create(name, lab_id or new_id(), temporary)
                _refuse_running(_info(name))
            down(name, 10.0)
        why = "others keep claiming it"
        raise LabError(f'lab "{name}" could not be claimed', str(paths.run_dir(name)), why, "Give another --name.")

    @classmethod
    def _create(cls, name: str, lab_id: str, temporary: bool) -> Record:
        directory = paths.run_dir(name)
        try:
            directory.mkdir(mode=0o755)
            directory.chmod(0o755)  # whatever the umask: uids 1337 and 1000 walk through it
            paths.id_link(name).symlink_to(lab_id)
            record = cls(name, lab_id, _open_record(name, os.O_CREAT | os.O_EXCL))
            me = ProcessId.of(os.getpid())
            assert me is not None
            record.add("lab", name=name, id=lab_id, boot=_boot_id(), created=time.time(), temporary=temporary)
            record.add("supervisor", pid=me.pid, starttime=me.starttime)
            paths.netns_dir(name).mkdir(mode=0o755)
        except OSError as e:
            with suppress(OSError):
                shutil.rmtree(directory)
            raise _cannot_write(directory, e) from None
        return record

    def add(self, kind: str, **fields: object) -> None:
        """Appends one entry; it is in the file when this returns.

        Kinds that `down` acts on: ``process`` (pid, starttime, role), ``supervisor`` (pid, starttime), ``netns``
        (place, path), ``mount`` (path), ``file`` (path). Others are kept for whoever reads them.

        Raises:
            LabError: it could not be written whole (a full disk); then the thing must not be made.
        """
        line = json.dumps({"kind": kind, **fields}, default=str, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            if self._torn:  # ends what an earlier failure left of a line
                line = b"\n" + line
            try:
                written = os.write(self._fd, line)
            except OSError as e:
                raise _cannot_write(paths.record_file(self.name), e) from None
            self._torn = written < len(line)
            if self._torn:
                raise _cannot_write(paths.record_file(self.name), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    def add_process(self, pid: int, role: str) -> None:
        """Records a process that was just started; one that has ended already is not recorded."""
        process = ProcessId.of(pid)
        if process is not None:
            self.add("process", pid=pid, starttime=process.starttime, role=role)

    def set_supervisor(self, pid: int) -> None:
        """Makes ``pid`` the process whose life says whether the lab runs (for a lab that detaches)."""
        process = ProcessId.of(pid)
        if process is None:
            raise ValueError(f"no process {pid}")
        self.add("supervisor", pid=pid, starttime=process.starttime)

    def entries(self) -> list[Entry]:
        """All whole entries, oldest first."""
        return _entries(self.name)

    def close(self) -> None:
        """Lets go of the file. The lab stays."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def new_id() -> str:
    """An id that no other lab has."""
    return secrets.token_hex(16)


def open(name: str) -> Record:
    """The record of an existing lab, running or crashed.

    Raises:
        InputError: there is no such lab.
    """
    lab_id = _id(name, _entries(name))
    try:
        return Record(name, lab_id, _open_record(name))
    except FileNotFoundError:
        raise _no_such_lab(name) from None
    except OSError as e:
        raise _cannot_write(paths.record_file(name), e) from None


def info(name: str) -> LabInfo:
    """What is known of the lab ``name``.

    Raises:
        InputError: there is no such lab.
    """
    if not paths.run_dir(name).is_dir():
        raise _no_such_lab(name)
    return _info(name)


def list_labs() -> list[LabInfo]:
    """All labs of this machine, by name; also those that crashed."""
    try:
        names = sorted(e.name for e in os.scandir(paths.ROOT) if e.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []
    return [_info(name) for name in names if paths.is_name(name)]


def down(name: str, timeout: float = 10.0) -> list[str]:
    """Takes away everything of the lab ``name``, whatever state it is in. Doing it twice is fine.

    A living supervisor (unless it is the caller) is asked to end with SIGTERM, which lets it take the lab down itself;
    half the time later, or at once if it is gone, everything that is left is killed, unmounted and removed. An
    interrupt meanwhile takes effect afterwards.

    Args:
        timeout: how long ending processes may take, in seconds.

    Returns:
        What was removed, for people to read; empty if there was nothing.

    Raises:
        LabError: something could not be removed; it is named.
    """
    with held():
        return _down(name, timeout)


def _down(name: str, timeout: float) -> list[str]:
    deadline = time.monotonic() + timeout
    directory = paths.run_dir(name)
    if directory.is_symlink():
        raise LabError(f'lab "{name}" is not taken down', str(directory), "it is a symbolic link, made by nobody here")
    if not directory.is_dir():
        return []
    removed = _end_supervisor(name, timeout / 2)
    with _directory_lock(directory) as locked:
        if not locked:  # another down was faster
            return removed
        entries = _entries(name)
        lab_id = _id(name, entries)
        removed += _end_processes(name, lab_id, entries, deadline)
        removed += _remove_containers(lab_id, entries)
        removed += _unmount(name, entries)
        removed += _remove_files(name, entries)
    with suppress(OSError), _root_lock(make=False) as root:
        root.rmdir()
    return removed


# --- processes --------------------------------------------------------------------------------


def _end_supervisor(name: str, grace: float) -> list[str]:
    supervisor = _supervisor(_entries(name))
    if supervisor is None or supervisor.pid == os.getpid():
        return []
    with _pidfds([supervisor]) as fds:
        if not fds:
            return []
        _signal(fds, signal.SIGTERM)
        if _wait(fds, time.monotonic() + grace):
            _signal(fds, signal.SIGKILL)
            if _wait(fds, time.monotonic() + grace):
                raise LabError(f'lab "{name}" is not down', f"process {supervisor.pid}", "it does not end on SIGKILL")
    return [f"process {supervisor.pid} (supervisor)"]


def _end_processes(name: str, lab_id: str, entries: list[Entry], deadline: float) -> list[str]:
    """Kills until a scan finds nobody: what is killed may have forked in the meantime."""
    roles = {p: str(e.get("role", "")) for e in entries if (p := _process_of(e)) is not None}
    same_boot = next((e.get("boot") for e in entries if e.get("kind") == "lab"), _boot_id()) == _boot_id()
    recorded = {p for p in roles if same_boot}
    removed: dict[ProcessId, str] = {}
    while True:
        found = _find(lab_id, _pinned(name), recorded)
        if not found:
            return list(removed.values())
        for process in found:
            command = roles.get(process) or _command(process.pid)
            removed[process] = f"process {process.pid} ({command})" if command else f"process {process.pid}"
        with _pidfds(found) as fds:
            # The end of a pod's first process ends all others of the pod, and they cannot fork meanwhile.
            inits = {p: fd for p, fd in fds.items() if _is_namespace_init(p.pid)}
            _signal(inits, signal.SIGKILL)
            _signal(fds, signal.SIGKILL)
            left = _wait(fds, deadline)
        if left or time.monotonic() > deadline:
            who = ", ".join(removed[p] for p in left or found)
            raise LabError(f'lab "{name}" is not down', who, "it does not end on SIGKILL", f"Run lab down {name} again")


def _find(lab_id: str, namespaces: frozenset[tuple[int, int]], recorded: set[ProcessId]) -> list[ProcessId]:
    mark = f"{paths.ENV_MARK}={lab_id}".encode() if lab_id else None
    found = []
    for pid in _pids():
        if pid == os.getpid():
            continue
        process = ProcessId.of(pid)
        if process is None:
            continue
        if process in recorded or _is_marked(pid, mark) or (namespaces and _netns(pid) in namespaces):
            found.append(process)
    return found


def _is_marked(pid: int, mark: bytes | None) -> bool:
    if mark is None:
        return False
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _is_namespace_init(pid: int) -> bool:
    """Whether it is process 1 of a pid namespace other than ours (proc(5): NSpid)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    numbers = next((line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")), [])
    return len(numbers) > 1 and numbers[-1] == "1"


def _netns(pid: int) -> tuple[int, int] | None:
    try:
        st = os.stat(f"/proc/{pid}/ns/net")
    except OSError:
        return None
    return st.st_dev, st.st_ino


def _pinned(name: str) -> frozenset[tuple[int, int]]:
    """(device, inode) of the namespaces that the lab has pinned; a pin that is not mounted is a plain file."""
    mine = _netns(os.getpid())
    if mine is None:
        return frozenset()
    found = set()
    with suppress(OSError):
        for pin in os.scandir(paths.netns_dir(name)):
            with suppress(OSError):
                st = os.stat(pin.path)
                found.add((st.st_dev, st.st_ino))
    ours = {mine, _netns(1)}  # whatever was mounted there: never everybody
    return frozenset(ns for ns in found if ns[0] == mine[0] and ns not in ours)


@contextmanager
def _pidfds(processes: Iterable[ProcessId]) -> Iterator[dict[ProcessId, int]]:
    """File descriptors of those that still live: a signal through one cannot hit a stranger with the same number."""
    fds: dict[ProcessId, int] = {}
    try:
        for process in processes:
            with suppress(ProcessLookupError):
                fd = os.pidfd_open(process.pid)
                fds[process] = fd
                if not process.alive():
                    os.close(fds.pop(process))
        yield fds
    finally:
        for fd in fds.values():
            os.close(fd)


def _signal(fds: Mapping[ProcessId, int], number: signal.Signals) -> None:
    for process, fd in fds.items():
        try:
            signal.pidfd_send_signal(fd, number)
        except ProcessLookupError:
            pass
        except PermissionError:
            raise LabError(
                "a lab's process cannot be ended", f"process {process.pid}", "not permitted", "Run as root"
            ) from None


def _wait(fds: Mapping[ProcessId, int], deadline: float) -> list[ProcessId]:
    """Waits until they ended (a pidfd is readable then: pidfd_open(2)); those that did not."""
    poll = select.poll()
    left = {fd: process for process, fd in fds.items()}
    for fd in left:
        poll.register(fd, select.POLLIN)
    while left:
        rest = deadline - time.monotonic()
        if rest <= 0:
            break
        for fd, _ in poll.poll(rest * 1000):
            poll.unregister(fd)
            del left[fd]
    return list(left.values())


@dataclass(frozen=True, slots=True)
class _Stat:
    state: str
    starttime: int


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = text[text.rindex(b")") + 2 :].split()  # the name before may hold blanks and brackets
    return _Stat(fields[0].decode(), int(fields[19]))


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


# --- mounts and files ---------------------------------------------------------------------------


def _remove_containers(lab_id: str, entries: list[Entry]) -> list[str]:
    """Their processes have ended by now; the engine still keeps what they were."""
    engines = {str(e.get("address")) for e in entries if e.get("kind") == "engine"}
    if not engines or not lab_id:
        return []
    from lab.fabric import engine

    return [name for address in sorted(engines) for name in engine.remove(address, lab_id)]


def _unmount(name: str, entries: list[Entry]) -> list[str]:
    """Unmounts all below the lab's directory, recorded or not, and recorded mounts elsewhere."""
    directory = str(paths.run_dir(name))
    elsewhere = {str(e.get("path")) for e in entries if e.get("kind") == "mount"}
    places = {str(e.get("path")): str(e.get("place")) for e in entries if e.get("kind") == "netns"}
    removed = []
    for point in reversed(_mounts()):  # later mounts lie on earlier ones
        if point != directory and not point.startswith(directory + "/") and point not in elsewhere:
            continue
        try:
            unmount(point)
        except OSError as e:
            if e.errno in (errno.EINVAL, errno.ENOENT):  # gone with the one above it
                continue
            why = f"it cannot be unmounted: {e.strerror}"
            raise LabError(f'lab "{name}" is not down', point, why, "Unmount it and try again.") from None
        removed.append(f"namespace {places[point]}" if point in places else f"mount {point}")
    return removed


def unmount(point: str | os.PathLike[str]) -> None:
    """umount2(2) with MNT_DETACH: at once, and everything mounted below it too.

    Raises:
        OSError: the kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(point), MNT_DETACH) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), os.fspath(point))


def _mounts() -> list[str]:
    """Mount points of this process's mount namespace, in the order in which they were mounted (proc(5))."""
    points = []
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        raw = line.split()[4]
        points.append(os.fsdecode(raw.decode("unicode_escape").encode("latin-1") if b"\\" in raw else raw))
    return points


def _remove_files(name: str, entries: list[Entry]) -> list[str]:
    directory = paths.run_dir(name)
    inside = str(directory) + "/"
    if any(p == str(directory) or p.startswith(inside) for p in _mounts()):
        # Removing through a mount would remove what is not ours.
        why = "something is still mounted there"
        raise LabError(f'lab "{name}" is not down', str(directory), why, "Unmount it and try again.")
    removed = []
    for entry in entries:
        path = str(entry.get("path", ""))
        if entry.get("kind") == "file" and path and not path.startswith(inside):
            try:
                os.unlink(path)
            except FileNotFoundError:
                continue
            except OSError as e:
                why = f"it cannot be removed: {e.strerror}"
                raise LabError(f'lab "{name}" is not down', path, why, "Remove it and try again.") from None
            removed.append(f"file {path}")
    shutil.rmtree(directory, onerror=_ignore_missing)
    return [*removed, f"directory {directory}"]


def _ignore_missing(_function: Callable[..., object], path: str, problem: tuple[object, BaseException, object]) -> None:
    error = problem[1]
    if isinstance(error, FileNotFoundError):
        return
    why = error.strerror if isinstance(error, OSError) else None
    denied = isinstance(error, PermissionError)
    raise LabError(
        "a lab's file cannot be removed", str(path), why or str(error), "Run as root" if denied else "Try again"
    )


# --- the record itself ----------------------------------------------------------------------------


def _entries(name: str) -> list[Entry]:
    """Whole lines only: one that was cut short by a crash or a full disk tells nothing and is passed over."""
    try:
        text = paths.record_file(name).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as e:
        raise InputError(
            f'lab "{name}" cannot be read', str(paths.record_file(name)), str(e.strerror), "Run as root"
        ) from None
    entries: list[Entry] = []
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            entries.append(entry)
    return entries


def _id(name: str, entries: list[Entry]) -> str:
    for entry in entries:
        if entry.get("kind") == "lab" and isinstance(entry.get("id"), str):
            return str(entry["id"])
    try:
        return os.readlink(paths.id_link(name))
    except OSError:
        return ""


def _process_of(entry: Entry) -> ProcessId | None:
    pid, starttime = entry.get("pid"), entry.get("starttime")
    if entry.get("kind") == "process" and isinstance(pid, int) and isinstance(starttime, int):
        return ProcessId(pid, starttime)
    return None


def _supervisor(entries: list[Entry]) -> ProcessId | None:
    """The last one named, if this boot is the one it was started in."""
    if any(e.get("kind") == "lab" and e.get("boot") != _boot_id() for e in entries):
        return None
    for entry in reversed(entries):
        pid, starttime = entry.get("pid"), entry.get("starttime")
        if entry.get("kind") == "supervisor" and isinstance(pid, int) and isinstance(starttime, int):
            return ProcessId(pid, starttime)
    return None


def _info(name: str) -> LabInfo:
    entries = _entries(name)
    supervisor = _supervisor(entries)
    own: Entry = next((e for e in entries if e.get("kind") == "lab"), {})
    created = own.get("created", 0.0)
    return LabInfo(
        name=name,
        id=_id(name, entries),
        path=paths.run_dir(name),
        state="running" if supervisor is not None and supervisor.alive() else "crashed",
        pid=supervisor.pid if supervisor is not None else 0,
        created=float(created) if isinstance(created, int | float) else 0.0,
        temporary=own.get("temporary") is True,
    )


def _refuse_running(lab: LabInfo) -> None:
    if lab.state == "running":
        raise InputError(
            f'lab "{lab.name}" is already running',
            str(lab.path),
            f"process {lab.pid} runs it",
            f"Take it down with lab down {lab.name}, or choose another name with --name",
        )


def _open_record(name: str, flags: int = 0) -> int:
    return os.open(paths.record_file(name), os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | flags, 0o644)


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@contextmanager
def _root_lock(make: bool = True) -> Iterator[Path]:
    """Holds /run/sidecarlab, so that claiming a name and removing the empty directory cannot cross."""
    root = paths.ROOT
    while True:
        try:
            if make:
                root.mkdir(mode=0o755, parents=True, exist_ok=True)
            fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            if make:
                continue
            raise
        except OSError as e:
            raise _cannot_write(root, e) from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if _same(fd, root):
                yield root
                return
        finally:
            os.close(fd)


@contextmanager
def _directory_lock(directory: Path) -> Iterator[bool]:
    """Holds a lab's directory while it is taken down; False if it was removed while we waited."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield False
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield _same(fd, directory)
    finally:
        os.close(fd)


def _same(fd: int, path: Path) -> bool:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), there)


def _cannot_write(path: Path, e: OSError) -> LabError:
    what, why = "a lab cannot keep its record", str(e.strerror)
    if e.errno in (errno.EACCES, errno.EPERM):
        return InputError(what, str(path), why, "Run as root")
    if e.errno == errno.EROFS:
        return InputError(what, str(path), why, f"Mount a tmpfs at {paths.ROOT}")
    if e.errno in (errno.ENOSPC, errno.EDQUOT):
        return InputError(what, str(path), why, "Make room there")
    return LabError(what, str(path), why, "Try again")


def _no_such_lab(name: str) -> InputError:
    return InputError(f'there is no lab "{name}"', str(paths.run_dir(name)), next_step="lab ls shows those that are")

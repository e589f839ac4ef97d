"""What the processes of a pod see of the file system.

The host's own tree, read-only, with a few things of the pod's own on it: /run, /tmp, /var/tmp and /dev/shm are fresh
(so that the path sockets of nscd, systemd-resolved and the journal, which ignore network namespaces, are out of
reach), /proc and /sys are those of its namespaces, and resolv.conf, hosts, nsswitch.conf and hostname are as a kubelet
writes them. What the pod must be able to read but could not walk to (a checkout under /root, which is 0700, or below
/tmp, which is hidden) is shown at its own path.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lab.errors import InputError
from lab.runtime import kernel

FRESH: Mapping[str, int] = {"/run": 0o755, "/tmp": 0o1777, "/var/tmp": 0o1777, "/dev/shm": 0o1777}
"""Directories that each pod has for itself, with their modes."""

POD_DIR = "/run/sidecar"
NOTIFY_DIR = "/run/notify"
_WRITTEN = "/run/.etc"


@dataclass(frozen=True, slots=True)
class View:
    """``pod_dir``: the host's directory that becomes /run/sidecar. ``expose``: files and directories that must be
    readable at their own paths. ``files``: path to text, e.g. /etc/resolv.conf."""

    pod_dir: str
    expose: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> View:
        return cls(data["pod_dir"], tuple(data["expose"]), dict(data["files"]))


@dataclass(frozen=True, slots=True)
class Cover:
    """A directory under a fresh tmpfs, and what is shown in it at its old place; ``writable`` ones stay so."""

    path: str
    mode: int
    writable: bool
    shown: tuple[str, ...] = ()


def plan_covers(
    expose: Iterable[str], walkable: Callable[[str], bool], fresh: Mapping[str, int] = FRESH
) -> tuple[Cover, ...]:
    """Which directories are covered, and what shows through. Pure.

    Args:
        expose: absolute, normalised paths that must stay readable.
        walkable: whether a directory lets strangers pass (its x bit for others).
        fresh: directories that are covered in any case.

    Returns:
        covers ordered so that an outer one comes first; no cover lies in another's unshown part.
    """
    shown: dict[str, set[str]] = {path: set() for path in fresh}
    for path in expose:
        cover = next((f for f in fresh if _inside(path, f)), None) or _topmost_closed(path, walkable)
        if cover is not None:
            shown.setdefault(cover, set()).add(path)
    return tuple(
        Cover(path, fresh.get(path, 0o755), path in fresh, tuple(_outermost(shown[path]))) for path in sorted(shown)
    )


def strangers_may_pass(path: str) -> bool:
    """Whether a uid that owns nothing there may walk through the directory."""
    return bool(os.stat(path).st_mode & stat.S_IXOTH)


def strangers_may_read(path: str) -> bool:
    """Whether a uid that owns nothing there may read the file, or list and enter the directory."""
    mode = os.stat(path).st_mode
    wanted = stat.S_IROTH | stat.S_IXOTH if stat.S_ISDIR(mode) else stat.S_IROTH
    return mode & wanted == wanted


def program_paths(extra: Iterable[str] = ()) -> tuple[str, ...]:
    """What this very Python needs to import and exec: its prefixes, all of its path, the checkout; and ``extra``.

    Both as written and with symbolic links resolved: a link may lie where strangers cannot walk, too.

    Raises:
        InputError: one of them cannot be read by the uids of a pod, wherever it is shown.
    """
    checkout = str(Path(__file__).resolve().parents[2])
    wanted = [checkout, sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix, *sys.path, *extra]
    found: set[str] = set()
    for path in wanted:
        if path and os.path.exists(path):
            found |= {os.path.abspath(path), os.path.realpath(path)}
    for path in sorted(found):
        if not strangers_may_read(path):
            raise InputError(
                "a pod's processes cannot read what they run",
                path,
                "they have uids of their own and no privileges",
                f"Run chmod -R go+rX {path}",
            )
    return tuple(_outermost(found))


def enter(view: View) -> None:
    """Makes the view in the calling process's mount namespace, which must be its own already.

    Raises:
        OSError: with the path that could not be mounted.
    """
    # Slave, so that what the host unmounts later is not kept busy by a pod; nothing goes the other way.
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_SLAVE)
    fresh = {os.path.realpath(path): mode for path, mode in FRESH.items()}
    covers = plan_covers(view.expose, strangers_may_pass, fresh)
    pod_dir = kernel.clone_mount(view.pod_dir)
    clones = {path: (kernel.clone_mount(path), os.path.isdir(path)) for cover in covers for path in cover.shown}
    for fd, _ in clones.values():
        kernel.make_read_only(fd)
    kernel.make_read_only("/")
    for cover in covers:
        _cover(cover, clones)
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    kernel.mount("sysfs", "/sys", "sysfs", kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    os.makedirs(POD_DIR, exist_ok=True)
    kernel.attach_mount(pod_dir, POD_DIR)
    os.close(pod_dir)
    os.makedirs(NOTIFY_DIR, exist_ok=True)
    _write_files(view.files, tuple(fresh))
    os.chdir("/")


def _cover(cover: Cover, clones: Mapping[str, tuple[int, bool]]) -> None:
    # What is mounted below would live on unseen, e.g. the pins of other labs' namespaces.
    for point in reversed(_mount_points()):
        if point != cover.path and _inside(point, cover.path):
            with suppress(OSError):  # gone together with one above it
                kernel.unmount(point)
    if not os.path.isdir(cover.path):  # e.g. no /dev/shm on this machine: then nothing expects one
        return
    kernel.mount("tmpfs", cover.path, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, f"mode={cover.mode:o},size=256m")
    for path in cover.shown:
        fd, is_directory = clones[path]
        os.makedirs(path if is_directory else os.path.dirname(path), exist_ok=True)
        if not is_directory:
            Path(path).touch()
        kernel.attach_mount(fd, path)
        os.close(fd)
    if not cover.writable:
        kernel.make_read_only(cover.path, recursive=False)


def _write_files(files: Mapping[str, str], writable: Sequence[str]) -> None:
    """Shows our text at each path, on the file that the path leads to: a mount cannot sit on a symbolic link."""
    os.makedirs(_WRITTEN, exist_ok=True)
    for path, text in files.items():
        target = os.path.realpath(path)
        if any(_inside(target, directory) for directory in writable):  # e.g. systemd-resolved's file in /run
            os.makedirs(os.path.dirname(target), exist_ok=True)
            Path(target).write_text(text)
            continue
        if not os.path.exists(target):
            _make_writable(os.path.dirname(target))
            Path(target).write_text(text)
            continue
        source = os.path.join(_WRITTEN, os.path.basename(path))
        Path(source).write_text(text)
        fd = kernel.clone_mount(source)
        kernel.make_read_only(fd)
        kernel.attach_mount(fd, target)
        os.close(fd)


def _make_writable(directory: str) -> None:
    """An overlay, in this view alone, on a directory that lacks a file we must show."""
    layers = f"/run/.overlay{directory.replace('/', '-')}"
    for part in ("upper", "work"):
        os.makedirs(f"{layers}/{part}", exist_ok=True)
    data = f"lowerdir={directory},upperdir={layers}/upper,workdir={layers}/work"
    kernel.mount("overlay", directory, "overlay", 0, data)


def _topmost_closed(path: str, walkable: Callable[[str], bool]) -> str | None:
    parents = [str(parent) for parent in reversed(Path(path).parents)]
    return next((parent for parent in parents if not walkable(parent)), None)


def _inside(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def _outermost(paths: Iterable[str]) -> list[str]:
    """Without those that lie in another one."""
    found: list[str] = []
    for path in sorted(paths):
        if not any(_inside(path, outer) for outer in found):
            found.append(path)
    return found


def _mount_points() -> list[str]:
    """Mount points of this namespace, oldest first (proc(5): mountinfo, field 5; blanks are octal escapes)."""
    points = []
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        raw = line.split()[4]
        points.append(os.fsdecode(raw.decode("unicode_escape").encode("latin-1") if b"\\" in raw else raw))
    return points

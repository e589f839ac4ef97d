"""The few kernel calls that Python 3.11 has no words for, through libc: namespaces and mounts.

Thin on purpose: one function a call, an ``OSError`` with the path where it fails, no decisions. The new mount calls
(open_tree, move_mount, mount_setattr) have no wrapper in every libc, so they go by number, which is the same on all
architectures that have them since Linux 5.12 (include/uapi/asm-generic/unistd.h).
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Collection
from contextlib import suppress
from typing import Any

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REC = 0x4000
MS_SLAVE = 1 << 19
MNT_DETACH = 2

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_NAME = 15

_SYS_OPEN_TREE = 428
_SYS_MOVE_MOUNT = 429
_SYS_MOUNT_SETATTR = 442
_AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000
_AT_RECURSIVE = 0x8000
_OPEN_TREE_CLONE = 1
_MOVE_MOUNT_F_EMPTY_PATH = 4
_MOUNT_ATTR_RDONLY = 1
_RENAME_EXCHANGE = 2


class _MountAttr(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


@functools.cache
def libc() -> Any:
    """The C library of this process, with errno kept per call."""
    return ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> int:
    """The result of a libc call, or the error that it left.

    Raises:
        OSError: the call returned a negative number; ``what`` becomes its file name.
    """
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result


def setns(fd: int, kinds: int) -> None:
    """setns(2): puts the calling thread into a namespace (or several, if ``fd`` is a pidfd)."""
    native = getattr(os, "setns", None)
    if native is not None:
        native(fd, kinds)
    else:
        check(libc().setns(fd, kinds), "setns")


def unshare(kinds: int) -> None:
    """unshare(2): new namespaces for the calling thread (``CLONE_NEWPID``: for its next children)."""
    native = getattr(os, "unshare", None)
    if native is not None:
        native(kinds)
    else:
        check(libc().unshare(kinds), "unshare")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """mount(2)."""
    result = libc().mount(
        source.encode(), os.fsencode(target), kind.encode() or None, ctypes.c_ulong(flags), data.encode() or None
    )
    check(result, target)


def unmount(target: str) -> None:
    """umount2(2) with MNT_DETACH: at once, and all that is mounted below it too."""
    check(libc().umount2(os.fsencode(target), MNT_DETACH), target)


def clone_mount(path: str) -> int:
    """open_tree(2): a copy of the mounts at ``path`` and below that is attached nowhere yet, as a file descriptor."""
    flags = _OPEN_TREE_CLONE | _AT_RECURSIVE | os.O_CLOEXEC
    return check(int(libc().syscall(_SYS_OPEN_TREE, _AT_FDCWD, os.fsencode(path), ctypes.c_uint(flags))), path)


def attach_mount(fd: int, target: str) -> None:
    """move_mount(2): attaches what `clone_mount` returned."""
    result = libc().syscall(
        _SYS_MOVE_MOUNT, fd, b"", _AT_FDCWD, os.fsencode(target), ctypes.c_uint(_MOVE_MOUNT_F_EMPTY_PATH)
    )
    check(int(result), target)


def make_read_only(where: int | str, *, recursive: bool = True) -> None:
    """mount_setattr(2): the mount at a path, or of `clone_mount`'s descriptor, becomes read-only, in this view alone."""
    attributes = _MountAttr(attr_set=_MOUNT_ATTR_RDONLY)
    flags = _AT_RECURSIVE if recursive else 0
    if isinstance(where, int):
        arguments = (where, b"", ctypes.c_uint(flags | _AT_EMPTY_PATH))
    else:
        arguments = (_AT_FDCWD, os.fsencode(where), ctypes.c_uint(flags))
    result = libc().syscall(_SYS_MOUNT_SETATTR, *arguments, ctypes.byref(attributes), ctypes.sizeof(attributes))
    check(int(result), str(where))


def exchange(one: str, other: str) -> None:
    """renameat2(2) with RENAME_EXCHANGE: two files or directories change their names, at once."""
    result = libc().renameat2(
        _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_RENAME_EXCHANGE)
    )
    check(int(result), other)


def set_hostname(name: str) -> None:
    """sethostname(2); the kernel takes 64 bytes."""
    raw = name.encode()[:64]
    check(libc().sethostname(raw, ctypes.c_size_t(len(raw))), name)


def prctl(option: int, argument: int = 0, third: int = 0) -> int:
    """prctl(2) with plain numbers."""
    zero = ctypes.c_ulong(0)
    return check(libc().prctl(option, ctypes.c_ulong(argument), ctypes.c_ulong(third), zero, zero), f"prctl {option}")


def name_process(name: str) -> None:
    """What ps shows as the command (15 bytes)."""
    check(libc().prctl(PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]), 0, 0, 0), name)


def close_all_but(keep: Collection[int]) -> None:
    """Closes every file descriptor of this process except ``keep``."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in keep:
            with suppress(OSError):  # the one that listed the directory is gone already
                os.close(int(name))

"""The text of a file that a user named: whatever it is, it is read in no time or refused."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from lab.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

MAX_BYTES = 8 << 20
"""Size of one manifest. Kubernetes takes objects of 1.5 MiB (etcd: --max-request-bytes)."""

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
)


def read_text(file: str | Path, limit: int = MAX_BYTES) -> str:
    """The text of a regular file.

    Args:
        limit: its size in bytes, at most.

    Raises:
        InputError: it is none, it cannot be read, it is larger than ``limit`` bytes, or it is not UTF-8.
    """
    data = read_bytes(file, limit)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError("not a text file", f"{file}:{line}", "manifests are UTF-8", "Save it as UTF-8.") from None


def read_bytes(file: str | Path, limit: int, *, pipe: bool = False) -> bytes:
    """What is in a regular file, or in a ``pipe`` that somebody writes to.

    Raises:
        InputError: it is something else, it cannot be read, or it holds more than ``limit`` bytes.
    """
    try:
        mode = os.stat(file).st_mode
        if not (stat.S_ISREG(mode) or (pipe and stat.S_ISFIFO(mode))):
            what = next((name for is_it, name in _KINDS if is_it(mode)), "no regular file")
            raise InputError("not a file", str(file), f"it is {what}", "Name a regular file.")
        # Without O_NONBLOCK the open of a pipe waits for somebody to write to it (fifo(7)).
        flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_NONBLOCK if stat.S_ISFIFO(mode) else 0)
        with os.fdopen(os.open(file, flags), "rb") as opened:
            os.set_blocking(opened.fileno(), True)
            data = opened.read(limit + 1)
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        why = getattr(error, "strerror", "") or str(error)
        raise InputError("cannot read", str(file), why, "Name a file that can be read.") from None
    if len(data) > limit:
        raise InputError("file too large", str(file), f"it has more than {limit >> 20} MiB", "Name a smaller one.")
    return data

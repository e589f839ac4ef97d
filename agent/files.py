"""Reading and writing small files."""

from __future__ import annotations

import os


def read_file(path: str) -> bytes:
    """The content of a file.

    Raises:
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        return file.read()


def write_if_changed(path: str, content: bytes, mode: int) -> None:
    """Writes a file atomically unless it already has that content.

    Raises:
        OSError: it cannot be written.
    """
    try:
        if read_file(path) == content:
            return
    except OSError:
        pass
    # The name is the agent's own: nothing else writes beside these files.
    temporary = f"{path}.{os.getpid()}.new"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(content)
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise

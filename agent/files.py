"""Reading and writing small files."""

from __future__ import annotations

import errno
import io
import os
import stat

SIZE_LIMIT = 8 << 20


def read_file(path: str) -> bytes:
    """The content of a regular file of at most 8 MiB: a pipe may never end, a device never does.

    Raises:
        OSError: it cannot be read, or is none.
    """
    # A pipe without a writer would keep open() waiting.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        content = file.read(SIZE_LIMIT + 1)
    if len(content) > SIZE_LIMIT:
        raise OSError(errno.EFBIG, f"larger than {SIZE_LIMIT >> 20} MiB", path)
    return content


def read_text(path: str, errors: str = "strict") -> str:
    """The UTF-8 text of such a file, lines ending in a line feed.

    Raises:
        OSError: it cannot be read, or is none.
        UnicodeDecodeError: it is no text (`errors`: as for bytes.decode).
    """
    return io.StringIO(read_file(path).decode(errors=errors), newline=None).read()


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

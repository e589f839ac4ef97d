"""Standard output and error of the commands, whatever they are: closed, a pipe without a reader, a full disk.

A reader that went away (``lab ls | head``) wants no more output and changes nothing else: the command goes on and gives
its own exit code. A full disk is an error, for what the user asked for is not there. Both are told where bytes are
written, so whoever prints need not know.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from lab.errors import InputError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class OutputError(InputError):
    """Standard output takes no more."""


class _Stream(io.FileIO):
    """A standard stream; once it takes no more, it is the null device."""

    def __init__(self, number: int, *, tell: bool) -> None:
        """``tell``: raise OutputError if it is not for want of a reader."""
        super().__init__(number, "w", closefd=False)
        self._tell = tell

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(null, self.fileno())
            os.close(null)
            if self._tell and error.errno != errno.EPIPE:
                why = error.strerror or str(error)
                raise OutputError("cannot write", "standard output", why, "Give it a place with room.") from None
            return memoryview(data).nbytes


@contextmanager
def guarded() -> Iterator[None]:
    """Makes ``sys.stdout`` and ``sys.stderr`` such streams for a while.

    A closed standard stream becomes the null device: otherwise the next file to be opened would take its number, and what
    is printed would go there.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _text(1, sys.stdout, tell=True), _text(2, sys.stderr, tell=False)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _text(number: int, like: TextIO, *, tell: bool) -> io.TextIOWrapper:
    # Of a stream that was closed when Python began, there is no object.
    encoding, errors = getattr(like, "encoding", None) or "utf-8", getattr(like, "errors", None) or "replace"
    buffered = io.BufferedWriter(_Stream(number, tell=tell))
    return io.TextIOWrapper(buffered, encoding, errors, line_buffering=number == 2 or os.isatty(number))

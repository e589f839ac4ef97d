"""What a lab writes about itself, and what its processes wrote last."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

_TAIL = 65536
_LONGEST = 500


class Log:
    """Structured lines: ``TIME EVENT key=value ...``, to a file and, but for routine ones, to a stream."""

    def __init__(self, path: Path, stream: TextIO | None) -> None:
        path.parent.mkdir(exist_ok=True)
        self._file = path.open("a", buffering=1)
        self._stream = stream

    def write(self, event: str, routine: bool = False, /, **fields: object) -> None:
        values = " ".join(f"{key}={_quoted(value)}" for key, value in fields.items())
        line = f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {event} {values}\n"
        with suppress(OSError, ValueError):  # a full disk, a closed terminal
            self._file.write(line)
        if self._stream is not None and not routine:
            with suppress(OSError, ValueError):
                self._stream.write(f"lab: {event} {values}\n")
                self._stream.flush()

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()


def _quoted(value: object) -> str:
    text = str(value)
    return text if text and not set(text) & set(' ="\n') else json.dumps(text)


def last_error(log: Path) -> str:
    """The last line of a log that speaks of an error, else its last line, else nothing; at most 500 characters."""
    try:
        with log.open("rb") as f:
            f.seek(max(0, f.seek(0, os.SEEK_END) - _TAIL))
            lines = [line.strip() for line in f.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    bad = [line for line in lines if any(word in line.lower() for word in ("error", "critical", "fatal", "fail"))]
    return (bad or lines or [""])[-1][:_LONGEST]

"""Lines for a person or a log collector, on stderr unless told otherwise.

The levels and flags are those of pilot-agent (``--log_output_level default:info``, ``--log_as_json``,
``--log_target``; istio/istio: pkg/log/options.go). Standard output is kept for ``--dry-run`` and ``--json``, so
the target ``stdout`` is honoured only when neither is used.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import TextIO

from .errors import InitError

LEVELS = {"none": 0, "fatal": 1, "error": 2, "warn": 3, "info": 4, "debug": 5}


class Log:
    """Where lines go and how they look. ``warnings`` keeps what was warned of, for ``--json``.

    A line that cannot be written is lost and nothing else: whoever reads the log must not be able to stop a run half-way.
    """

    def __init__(
        self, level: int = LEVELS["info"], as_json: bool = False, targets: tuple[str, ...] = ("stderr",)
    ) -> None:
        self.level, self.as_json, self.targets = level, as_json, targets
        self.warnings: list[str] = []

    def error(self, message: str) -> None:
        self._write("error", message)

    def warn(self, message: str) -> None:
        if message not in self.warnings:
            self.warnings.append(message)
            self._write("warn", message)

    def info(self, message: str) -> None:
        self._write("info", message)

    def debug(self, message: str) -> None:
        self._write("debug", message)

    @property
    def informing(self) -> bool:
        return self.level >= LEVELS["info"]

    @property
    def debugging(self) -> bool:
        return self.level >= LEVELS["debug"]

    def _write(self, level: str, message: str) -> None:
        if LEVELS[level] > self.level:
            return
        if self.as_json:
            import json
            import time

            stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            text = json.dumps({"time": stamp, "level": level, "scope": "init", "msg": message}) + "\n"
        else:
            text = f"{level}: {message}\n"
        for target in self.targets:
            with suppress(OSError):
                _append(target, text)


def _append(target: str, text: str) -> None:
    if target in ("stdout", "stderr"):
        stream = sys.stdout if target == "stdout" else sys.stderr
        if stream is not None:  # it was closed before the start
            put(stream, text)
        return
    descriptor = _open(target)
    try:
        _write_all(descriptor, text)
    finally:
        os.close(descriptor)


def put(stream: TextIO, text: str) -> None:
    """Writes to a standard stream, but not through its buffer, which would keep what it cannot write, try again at the end of
    Python, and give the whole run another exit code. Raises OSError."""
    try:
        descriptor = stream.fileno()
    except OSError:  # something else in its place
        stream.write(text)
        return
    stream.flush()
    _write_all(descriptor, text)


def _write_all(descriptor: int, text: str) -> None:
    data = text.encode()
    while data:
        data = data[os.write(descriptor, data) :]


def level_of(spec: str) -> int:
    """The level for our one scope in a ``scope:level,...`` list; a bare level counts for every scope.

    Raises:
        ValueError: a level that does not exist.
    """
    chosen = LEVELS["info"]
    for item in (part.strip() for part in spec.split(",")):
        scope, _, name = item.rpartition(":")
        if name and name not in LEVELS:
            raise ValueError(f"unknown log level {name!r}")
        if name and scope in ("", "default", "all"):
            chosen = LEVELS[name]
    return chosen


def opened(targets: tuple[str, ...]) -> tuple[str, ...]:
    """The targets, each file among them opened once, so that a bad path is an error before anything is done.

    Raises:
        InitError: a file that cannot be written.
    """
    for target in targets:
        if target not in ("stdout", "stderr"):
            try:
                os.close(_open(target))
            except OSError as error:
                raise InitError(f"cannot write the log to {target!r}", error.strerror or str(error)) from None
    return targets


def targets_of(values: Iterable[str], keep_stdout_clean: bool) -> tuple[str, ...]:
    """Log targets; ``stdout`` becomes ``stderr`` where stdout carries a document."""
    chosen = ["stderr" if keep_stdout_clean and value == "stdout" else value for value in values]
    return tuple(dict.fromkeys(chosen)) or ("stderr",)


def _open(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

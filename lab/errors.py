"""The one error that reaches a user.

LabError
 ├── InputError        exit 2: bad manifests, flags, names, nothing to run
 └── ObservationError  exit 3: this kernel or machine cannot do or show it
"""

from __future__ import annotations

import re

_WORD, _HEAD, _TAIL = 100, 60, 20
_PLACE, _PART = 300, 1000
"""Longest word, place and other part of an error, in characters; what is longer is cut in its middle."""


def shortened(text: str, limit: int = _PART) -> str:
    """The text on one line, without what a terminal would act on, and at most ``limit`` characters."""
    line = " ".join(text.split())
    line = line if line.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    if len(line) <= limit:
        return line
    return f"{line[: limit * 2 // 3]}...{line[len(line) - limit // 3 + 3 :]}"


def _short_words(text: str) -> str:
    return re.sub(rf"\S{{{_WORD + 1},}}", lambda word: f"{word[0][:_HEAD]}...{word[0][-_TAIL:]}", text)


class LabError(Exception):
    """An error written for its reader: WHAT, WHERE, WHY and the NEXT STEP, one line.

    Args:
        what: what failed, e.g. ``unknown field "replcias"``.
        where: file:line, an object or a path; may be empty.
        why: the cause; may be empty.
        next_step: what the user can do; may be empty.
    """

    exit_code = 2

    def __init__(self, what: str, where: str = "", why: str = "", next_step: str = "") -> None:
        self.what, self.where, self.why, self.next_step = what, where, why, next_step
        super().__init__(str(self))

    def __str__(self) -> str:
        what, why, next_step = (shortened(_short_words(part)) for part in (self.what, self.why, self.next_step))
        line = ": ".join(part for part in (what, shortened(self.where, _PLACE), why) if part).rstrip(".")
        stop = "" if line.endswith(("?", "!")) else "."
        return f"{line}{stop} {next_step}" if next_step else line


class InputError(LabError):
    """Bad input or wrong usage."""


class ObservationError(LabError):
    """The machine cannot do or show what was asked; it is named."""

    exit_code = 3

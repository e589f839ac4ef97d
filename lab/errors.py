"""The one error that reaches a user.

LabError
 ├── InputError        exit 2: bad manifests, flags, names, nothing to run
 └── ObservationError  exit 3: this kernel or machine cannot do or show it
"""

from __future__ import annotations


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
        line = ": ".join(part for part in (self.what, self.where, self.why) if part).rstrip(".")
        text = f"{line}. {self.next_step}" if self.next_step else line
        return " ".join(text.split())


class InputError(LabError):
    """Bad input or wrong usage."""


class ObservationError(LabError):
    """The machine cannot do or show what was asked; it is named."""

    exit_code = 3

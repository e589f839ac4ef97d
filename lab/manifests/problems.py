"""Collects what is wrong with manifests, so that all of it is told at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field

from lab.errors import InputError
from lab.manifests.model import Level, Source, Warning


@dataclass
class Problems:
    """Errors and warnings in the order in which they were found."""

    errors: list[InputError] = field(default_factory=list)
    warnings: list[Warning] = field(default_factory=list)

    def error(self, source: Source, what: str, why: str = "", next_step: str = "") -> None:
        self.errors.append(InputError(what, str(source), why, next_step))

    def warn(self, source: Source, message: str, code: str = "", level: Level = "warning") -> None:
        self.warnings.append(Warning(source, message, code, level))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``Did you mean "x"?`` for the nearest known word, or an empty string."""
    names = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.7)
    return f'Did you mean "{names[near[0]]}"?' if near else ""

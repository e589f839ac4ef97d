"""docs/reference.md tells of every key that a verdict has."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterator
from pathlib import Path

from lab.verdict import RESULTS, From, Outcome, To, Verdict

REFERENCE = Path(__file__).parents[2] / "docs" / "reference.md"


def told() -> set[str]:
    """Every word in code in the section about verdicts; of ``a.b`` also ``b``."""
    section = REFERENCE.read_text().partition("\n## Verdict\n")[2].partition("\n## ")[0]
    words = re.findall(r"`([^`]+)`", section)
    return {part for word in words for part in (word, *re.findall(r"\w+", word))}


def parts(kind: object) -> Iterator[type]:
    """The dataclasses in a type."""
    if dataclasses.is_dataclass(kind):
        yield typing.cast(type, kind)
    for argument in typing.get_args(kind):
        yield from parts(argument)


def keys(kind: type) -> Iterator[str]:
    """The keys of a dataclass's JSON and of all that is in it."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        yield field.name
        for part in parts(hints[field.name]):
            yield from keys(part)


def test_every_key_of_a_verdict_is_told() -> None:
    verdict = Verdict("t", "observed", From("a.a", 1000), To("h", None, 80, "http"), Outcome("ok"))
    top = set(verdict.to_dict())
    inner = set(keys(Verdict)) - {field.name for field in dataclasses.fields(Verdict)}
    assert {"from", "pass", "undecided"} <= top
    assert {"grpc_status", "forwarded", "sport", "position"} <= inner
    assert (top | inner) - told() == set()


def test_every_outcome_is_told() -> None:
    assert set(RESULTS) - told() == set()

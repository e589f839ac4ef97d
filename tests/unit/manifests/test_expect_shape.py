"""What a TrafficTest may expect is what a verdict has."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from pydantic import BaseModel

from lab import verdict
from lab.manifests.schema.traffic_test import VerdictExpectation

_NOT_EXPECTED = {"expected", "pass", "differences", "skipped", "seconds", "undecided"}
_NAMES = {"source": "from", "passed": "pass"}


def _inner(annotation: Any, base: type) -> Any:
    """The class inside ``X | None`` or ``list[X]``; None if there is none of that base."""
    if isinstance(annotation, type) and issubclass(annotation, base):
        return annotation
    for part in typing.get_args(annotation):
        if (found := _inner(part, base)) is not None:
            return found
    return None


def _of_verdict(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    shape = {}
    for field in dataclasses.fields(kind):
        inner = next(
            (
                part
                for part in (hints[field.name], *typing.get_args(hints[field.name]))
                if dataclasses.is_dataclass(part)
            ),
            None,
        )
        shape[_NAMES.get(field.name, field.name)] = _of_verdict(inner) if isinstance(inner, type) else None
    return shape


def _of_expectation(kind: type[BaseModel]) -> dict[str, Any]:
    shape: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        if name == "native_nft":  # the same rule in other words, not a key of a verdict
            continue
        inner = _inner(field.annotation, BaseModel)
        shape[field.alias or name] = _of_expectation(inner) if inner is not None else None
    return shape


def test_every_key_of_a_verdict_can_be_expected_and_no_other() -> None:
    wanted = {key: value for key, value in _of_verdict(verdict.Verdict).items() if key not in _NOT_EXPECTED}
    found = _of_expectation(VerdictExpectation)
    assert found == wanted
    assert typing.get_args(verdict.Result) == verdict.RESULTS


def test_every_result_can_be_expected() -> None:
    for result in verdict.RESULTS:
        VerdictExpectation.model_validate({"outcome": {"result": result}})

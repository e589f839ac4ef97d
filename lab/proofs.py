"""The three kinds of proof of ``lab verify``: what was observed, what was predicted, and both against each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from lab.explain import compare

if TYPE_CHECKING:
    from lab.explaining import Backend
    from lab.manifests.model import Mesh, TrafficTest
    from lab.verdict import Verdict

Proof = Literal["observed", "predicted", "both"]
PROOFS: tuple[Proof, ...] = ("observed", "predicted", "both")


def predicted(mesh: Mesh, tests: Sequence[TrafficTest], backend: Backend = "auto") -> list[Verdict]:
    """The predictions for tests, judged by what the tests expect; nothing runs."""
    from lab import explaining
    from lab.probe import expect

    return [compare.judged(v, expect.differences) for v in explaining.predict_all(mesh, tests, backend)]


def held_against(observed: Sequence[Verdict], predictions: Sequence[Verdict]) -> list[Verdict]:
    """The observed verdicts; one that its prediction contradicts fails, and shows both sides of each difference."""
    found: list[Verdict] = []
    for one, other in zip(observed, predictions, strict=True):
        wrong = compare.differences(other, one) if one.passed is not None else []
        if wrong:
            said = tuple(f"prediction: {difference}" for difference in wrong)
            one = dataclasses.replace(one, passed=False, differences=(*one.differences, *said))
        found.append(one)
    return found

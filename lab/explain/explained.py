"""A prediction together with what it was made from, ready to be told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from lab.explain import telling
from lab.explain.counterfactual import Counterfactual
from lab.explain.journey import Journey
from lab.explain.predict import Question, distribution
from lab.verdict import Verdict


class Explained(NamedTuple):
    """``journeys`` are all courses, the likeliest first to be told; ``notes`` name what of a dump was not read."""

    verdict: Verdict
    journeys: tuple[Journey, ...] = ()
    questions: tuple[Question, ...] = ()
    notes: tuple[str, ...] = ()
    counterfactuals: tuple[Counterfactual, ...] = ()

    def to_json(self, *, why: bool = False) -> dict[str, Any]:
        """The verdict's object with ``sentence``, ``hops``, ``courses``, ``counterfactuals`` and ``notes`` added."""
        first = self.journeys[0] if self.journeys else None
        hops = telling.hops(first, self.questions)
        return {
            **self.verdict.to_dict(),
            "sentence": telling.sentence(self.verdict, self.journeys),
            "hops": [(hop if why else telling.brief(hop))._asdict() for hop in hops],
            "courses": distribution(self.journeys),
            "counterfactuals": [c._asdict() for c in self.counterfactuals],
            "notes": list(self.notes),
        }

    def lines(self, *, why: bool = False) -> Iterator[str]:
        """For a terminal; the first line is the verdict in one sentence."""
        yield from telling.text(self.verdict, self.journeys, self.questions, why=why)
        if self.counterfactuals:
            yield "What would change it:"
            yield from (f"  {c.sentence}" for c in self.counterfactuals)
        for note in self.notes:
            yield f"not evaluated: {note}"

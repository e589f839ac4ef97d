"""The smallest changes that would flip a verdict: candidates are tried one by one, and those that change it are told. Pure.

A candidate is a sentence's end ("uid were not 1337") and the verdict that would be; whoever knows the flow makes them,
smaller changes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from lab.errors import LabError
from lab.explain.conditions import Owner
from lab.explain.journey import Journey
from lab.explain.ruleset import Chain, Reject, Rule, RuleSet, Table
from lab.explain.ruleset import Verdict as Word
from lab.explain.walk import Fate
from lab.verdict import Verdict

MOST = 5
_SPARE_UIDS = (1000, 1001, 1002)


class Counterfactual(NamedTuple):
    """``effect`` is what would be otherwise, ``change`` what would have to be so; ``sentence`` joins them."""

    change: str
    effect: str

    @property
    def sentence(self) -> str:
        return f"{self.effect} if {self.change}"


Candidate = tuple[str, Callable[[], Verdict]]


def find(base: Verdict, candidates: Iterable[Candidate], most: int = MOST) -> tuple[Counterfactual, ...]:
    """The first ``most`` candidates that flip the verdict, in their order. One that cannot be is left out."""
    found: dict[str, Counterfactual] = {}
    for change, make in candidates:
        if len(found) >= most:
            break
        if change in found:
            continue
        try:
            effect = difference(base, make())
        except LabError:
            continue
        if effect is not None:
            found[change] = Counterfactual(change, effect)
    return tuple(found.values())


def difference(before: Verdict, after: Verdict) -> str | None:
    """What another verdict has that this one has not, in words; None if a user would call them the same."""
    for side in ("outbound", "inbound"):
        was, now = getattr(before, side), getattr(after, side)
        one, other = (was.captured if was else None), (now.captured if now else None)
        if one != other and None not in (one, other):
            where = "" if side == "outbound" else f" by {now.pod}"
            port = f" to {now.redirected_to}" if other else ""
            return f"{'captured' if other else 'not captured'}{where}{port}{_ending(before, after)}"
    for side in ("dns",):
        was, now = getattr(before, side), getattr(after, side)
        if (
            was is not None
            and now is not None
            and was.captured != now.captured
            and before.to.protocol.startswith("dns")
        ):
            return "the lookup is captured" if now.captured else "the lookup is not captured"
    result = (before.outcome.result, before.outcome.status) if before.outcome else None
    other_result = (after.outcome.result, after.outcome.status) if after.outcome else None
    if result != other_result and after.outcome is not None:
        return _ending(before, after).removeprefix(", ")
    cluster = before.envoy.cluster if before.envoy else None
    other_cluster = after.envoy.cluster if after.envoy else None
    if cluster != other_cluster and other_cluster is not None:
        return f"sent to cluster {other_cluster}"
    return None


def _ending(before: Verdict, after: Verdict) -> str:
    if after.outcome is None or before.outcome == after.outcome:
        return ""
    words = {
        "ok": "works",
        "http-error": "gets an error",
        "no-answer": "gets no answer",
        "timeout": "gets no answer in time",
    }
    said = words.get(after.outcome.result, f"is {after.outcome.result}")
    status = f" ({after.outcome.status})" if after.outcome.status is not None else ""
    return f", {said}{status}"


def uids(rules: RuleSet, own: int) -> Iterator[tuple[str, int]]:
    """Other users for which rules would be different: ("uid were 1337", 1337)."""
    ranges = {
        span
        for table in rules.tables
        for chain in table.chains.values()
        for rule in chain.rules
        for condition in rule.conditions
        if isinstance(condition, Owner)
        for span in condition.ranges
    }
    if any(low <= own <= high for low, high in ranges):
        for spare in _SPARE_UIDS:
            if not any(low <= spare <= high for low, high in ranges):
                yield f"uid were not {own}", spare
                return
    for low, high in sorted(ranges):
        yield (f"uid were {low}" if low == high else f"uid were in {low}-{high}"), low


def without_rules(rules: RuleSet, fate: Fate, hooks: Iterable[str]) -> Iterator[tuple[Rule, RuleSet]]:
    """The rule set without each rule that ended a chain for this packet, the last one first."""
    wanted = set(hooks)
    seen: set[tuple[str, str, int]] = set()
    for passed in reversed(fate.passes):
        if passed.hook not in wanted:
            continue
        for step in reversed(passed.steps):
            rule = step.rule
            if not step.matched or rule is None or not any(isinstance(p, Word | Reject) for p in rule.parts):
                continue
            key = (step.table.name, rule.chain, rule.position)
            if key not in seen:
                seen.add(key)
                yield rule, without(rules, step.table, rule)


def without(rules: RuleSet, table: Table, rule: Rule) -> RuleSet:
    """The rule set without one rule."""
    chain = table.chains[rule.chain]
    kept = tuple(r for r in chain.rules if r is not rule)
    chains = {**table.chains, rule.chain: Chain(chain.name, kept, chain.base)}
    changed = table._replace(chains=chains)
    return rules._replace(tables=tuple(changed if t is table else t for t in rules.tables))


def shortened(journeys: Iterable[Journey]) -> Journey | None:
    """The course to argue about: the likeliest."""
    return max(journeys, key=lambda j: j.chance, default=None)

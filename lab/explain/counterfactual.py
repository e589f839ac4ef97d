"""The smallest changes that would flip a verdict: candidates are tried one by one, and those that change it are told. Pure.

A candidate is a sentence's end ("its uid were not 1337") and the verdict that would be; whoever knows the flow makes them,
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
    """``effect`` is a clause that says what would be otherwise, ``change`` what would have to be so; ``sentence`` joins them."""

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
    """What another verdict has that this one has not, as a clause ("it would work (200)"); None if a user would call them the
    same. A flow that fails either way, and is not captured otherwise, is the same: how it fails tells no way to make it work."""
    captures = _captures(before, after)
    ending = _ending(before, after)
    if captures is not None:
        return f"{captures}, and would {ending}" if ending else captures
    if before.to.protocol.startswith("dns"):
        was, now = before.dns, after.dns
        if was is not None and now is not None and was.captured != now.captured:
            return f"its lookup would {'' if now.captured else 'not '}be captured"
    if ending is not None:
        both_fail = before.outcome is not None and "ok" not in (before.outcome.result, _result(after))
        return None if both_fail else f"it would {ending}"
    cluster = before.envoy.cluster if before.envoy else None
    other = after.envoy.cluster if after.envoy else None
    return f"it would go to cluster {other}" if other is not None and other != cluster else None


def _captures(before: Verdict, after: Verdict) -> str | None:
    """Which proxy would take it, or leave it alone, where that would be otherwise."""
    for side in ("outbound", "inbound"):
        was, now = getattr(before, side), getattr(after, side)
        one, other = (was.captured if was else None), (now.captured if now else None)
        if one == other or None in (one, other):
            continue
        port = f" (to {now.redirected_to})" if other else ""
        if side == "inbound":
            return f"{now.pod} would {'' if other else 'not '}capture it{port}"
        return f"it would {'' if other else 'not '}be captured{port}"
    return None


def _result(verdict: Verdict) -> str | None:
    return verdict.outcome.result if verdict.outcome else None


_ENDINGS = {
    "ok": "work",
    "http-error": "get an error",
    "closed": "be closed without an answer",
    "refused": "be refused",
    "timeout": "get no answer in time",
    "no-answer": "get no answer",
    "unreachable": "find its destination unreachable",
}


def _ending(before: Verdict, after: Verdict) -> str | None:
    """How it would end, after "would"; None if it would end so anyway, or nobody knows."""
    was, now = before.outcome, after.outcome
    if now is None or (was is not None and (was.result, was.status) == (now.result, now.status)):
        return None
    if now.grpc_status:
        return f"{_ENDINGS[now.result]} (gRPC status {now.grpc_status})"
    return _ENDINGS[now.result] + (f" ({now.status})" if now.status is not None else "")


def uids(rules: RuleSet, own: int) -> Iterator[tuple[str, int]]:
    """Other users for which rules would be different: ("its uid were 1337", 1337)."""
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
                yield f"its uid were not {own}", spare
                return
    for low, high in sorted(ranges):
        yield (f"its uid were {low}" if low == high else f"its uid were one of {low}-{high}"), low


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

"""Where the evaluator's course of a packet is not what the kernel did with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from explain_ground import HOST, Ground, Sent

from lab.explain.packet import Packet
from lab.explain.ruleset import Reject, RuleSet
from lab.explain.walk import Fate, Pass, certain, receive, send

Judge = Callable[[Packet, Sent, RuleSet, Counter[str] | None], str]
"""What is wrong with the prediction for a packet; empty if nothing is."""


def in_the_verdict(packet: Packet, sent: Sent, rules: RuleSet, count: Counter[str] | None) -> str:
    """The courses that differ in what matters: one of them is what happened; one alone is decided."""
    fates = (receive if packet.iif else send)(packet, rules, HOST)
    if count is not None:
        count["decided" if certain(fates) else "undecided"] += 1
    return _all_wrong(fates, packet, sent, rules)


def among_courses(packet: Packet, sent: Sent, rules: RuleSet, _count: Counter[str] | None) -> str:
    """Every course of every doubt: one of them is what happened, or one is not told to its end."""
    fates = (receive if packet.iif else send)(packet, rules, HOST, every=True)
    return "" if any(f.end == "undecided" for f in fates) else _all_wrong(fates, packet, sent, rules)


def found(
    ground: Ground,
    documents: Sequence[str],
    packets: Sequence[Packet],
    judge: Judge,
    count: Counter[str] | None = None,
) -> Iterator[tuple[Packet, str]]:
    """Sends the packets through the rules; gives those of which the prediction is wrong, and what is wrong."""
    rules = ground.apply(documents)
    packets = [ground.with_port(p) for p in packets]
    for packet, sent in zip(packets, ground.send(packets), strict=True):
        wrong = judge(packet, sent, rules, count)
        if wrong:
            yield packet, wrong


def persists(ground: Ground, documents: Sequence[str], packet: Packet, judge: Judge) -> bool:
    """Whether the prediction for a packet is wrong under these rules too. Rules that the tools refuse are no case."""
    try:
        return any(True for _ in found(ground, documents, [packet], judge))
    except AssertionError:
        return False


def _all_wrong(fates: Sequence[Fate], packet: Packet, sent: Sent, rules: RuleSet) -> str:
    wrong = [_difference(fate, packet, sent, rules) for fate in fates]
    return "\n".join(map(str, wrong)) if all(wrong) else ""


def _difference(fate: Fate, packet: Packet, sent: Sent, rules: RuleSet) -> str | None:
    """Where a predicted fate is not what the kernel did."""
    out = ("output", "postrouting") if not packet.iif else ("prerouting", "input", "forward", "postrouting")
    passes = list(fate.passes)
    cut = next((i for i, p in enumerate(passes) if p.hook == "prerouting" and i), len(passes))
    first, again = passes[:cut], passes[cut:]
    assert all(p.hook in out for p in first)
    if _matched(first) != sent.first:
        return f"rules: predicted {_matched(first)}, observed {sent.first} ({fate.end} {fate.why})"
    if not packet.iif and (_matched(again) if again else None) != sent.again:
        return f"over lo: predicted {_matched(again) if again else None}, observed {sent.again} ({fate.end} {fate.why})"
    return _translation(fate, sent, rules, packet)


def _translation(fate: Fate, sent: Sent, rules: RuleSet, packet: Packet) -> str | None:
    final = fate.packet
    if sent.entry is not None:
        reply = sent.entry.reply
        predicted = (final.dst, final.dport, final.src, final.sport, final.zone or 0)
        observed = (reply.src, reply.sport, reply.dst, reply.dport, sent.entry.zone)
        if packet.proto in (1, 58):
            predicted, observed = (predicted[0], predicted[2], predicted[4]), (observed[0], observed[2], observed[4])  # type: ignore[assignment]
        if predicted != observed:
            return f"translation: predicted {predicted}, observed {observed}"
    tracked = final.tracked and not final.untracked and final.state == "NEW" and rules.has_nat(packet.family)
    if tracked and fate.end in ("left", "delivered") and sent.entry is None:
        return f"predicted {fate.end}, but the connection was never confirmed"
    if sent.entry is None:
        return None
    ended = fate.end == "dropped" or (fate.end == "rejected" and not _confirmed_by_an_error(fate, rules))
    if ended and not any(p.hook == "postrouting" for p in fate.passes[:-1]):
        return f"predicted {fate.end} {fate.why}, but the connection was confirmed"
    return None


def _confirmed_by_an_error(fate: Fate, rules: RuleSet) -> bool:
    """Whether the connection of a rejected packet may be confirmed: by an ICMP error about the reset that answered it.

    What a REJECT sends belongs to the connection of what it answers, in the other direction, and only the direction of the first
    packet confirms (linux: nf_conntrack_core.c, nf_conntrack_attach and __nf_conntrack_confirm). Where a rule rejects the reset in
    its turn, the error about it goes the first one's direction again. No error is sent about an ICMP error.
    """
    if fate.why != "tcp-reset":
        return False
    parts = (p for t in rules.tables for c in t.chains.values() for r in c.rules for p in r.parts)
    return any(isinstance(p, Reject) and p.answer != "tcp-reset" for p in parts)


def _matched(passes: Sequence[Pass]) -> tuple[tuple[str, str, int], ...]:
    return tuple(
        (s.table.name, s.rule.chain, s.rule.position)
        for p in passes
        for s in p.steps
        if s.matched and s.rule is not None
    )

"""The rule evaluator against the kernel: random rule sets, random packets, and not one disagreement.

``SIDECARLAB_FUZZ_PAIRS`` is how many pairs of a rule set and a packet are tried (``make fuzz`` sets it), ``SIDECARLAB_FUZZ_SEED`` repeats
a run. A failure is shrunk to a small rule set and one packet, which the message shows.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence

import explain_rules as made
import pytest
from explain_ground import HOST, Ground, Sent, make
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from lab.explain.packet import Packet
from lab.explain.ruleset import RuleSet
from lab.explain.walk import Fate, Pass, certain, receive, send

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]

PAIRS = int(os.environ.get("SIDECARLAB_FUZZ_PAIRS", "600"))
SEED = int(os.environ.get("SIDECARLAB_FUZZ_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)
PACKETS = 12
PHASES = (
    Phase.explicit,
    Phase.generate,
    *(() if os.environ.get("SIDECARLAB_FUZZ_SHRINK") == "no" else (Phase.shrink,)),
)
COUNT: Counter[str] = Counter()


@pytest.fixture(scope="module")
def legacy() -> Iterator[Ground]:
    ground = make("legacy")
    yield ground
    ground.close()


@pytest.fixture(scope="module")
def nft() -> Iterator[Ground]:
    ground = make("nft")
    yield ground
    ground.close()


@pytest.fixture(scope="module")
def native() -> Iterator[Ground]:
    ground = make("native-nft")
    yield ground
    ground.close()


def _examples(share: float) -> settings:
    return settings(
        max_examples=max(2, round(PAIRS * share / PACKETS)),
        deadline=None,
        database=None,
        print_blob=True,
        report_multiple_bugs=False,
        phases=PHASES,
        suppress_health_check=list(HealthCheck),
    )


PACKET_LISTS = st.lists(made.packet(), min_size=PACKETS, max_size=PACKETS)
ICMP_OR_NOT = st.tuples(made.document(made.FOUR), made.document(made.SIX)).map(list)


@seed(SEED)
@_examples(0.25)
@given(documents=ICMP_OR_NOT, packets=PACKET_LISTS)
def test_random_rules_legacy(legacy: Ground, documents: list[str], packets: list[Packet]) -> None:
    _agree(legacy, documents, packets)


@seed(SEED)
@_examples(0.25)
@given(documents=ICMP_OR_NOT, packets=PACKET_LISTS)
def test_random_rules_nft(nft: Ground, documents: list[str], packets: list[Packet]) -> None:
    _agree(nft, documents, packets)


@seed(SEED)
@_examples(0.2)
@given(documents=made.nft_script(), packets=PACKET_LISTS)
def test_random_rules_native(native: Ground, documents: list[str], packets: list[Packet]) -> None:
    _agree(native, documents, packets)


@seed(SEED)
@_examples(0.1)
@given(documents=made.config().map(made.init_documents), packets=PACKET_LISTS)
def test_init_rules_legacy(legacy: Ground, documents: list[str], packets: list[Packet]) -> None:
    _agree(legacy, documents, packets)


@seed(SEED)
@_examples(0.1)
@given(documents=made.config().map(made.init_documents), packets=PACKET_LISTS)
def test_init_rules_nft(nft: Ground, documents: list[str], packets: list[Packet]) -> None:
    _agree(nft, documents, packets)


@seed(SEED)
@_examples(0.1)
@given(documents=made.config().map(made.init_script), packets=PACKET_LISTS)
def test_init_rules_native(native: Ground, documents: list[str], packets: list[Packet]) -> None:
    _agree(native, documents, packets)


@seed(SEED)
@_examples(0.1)
@given(
    documents=st.tuples(made.document(made.FOUR, True), made.document(made.SIX, True)).map(list), packets=PACKET_LISTS
)
def test_doubts_leave_the_truth_among_the_courses(legacy: Ground, documents: list[str], packets: list[Packet]) -> None:
    """Random choices, rates, matches that are not evaluated: what the kernel did is one of the courses that are predicted."""
    rules = legacy.apply(documents)
    packets = [legacy.with_port(p) for p in packets]
    for packet, sent in zip(packets, legacy.send(packets), strict=True):
        fates = (receive if packet.iif else send)(packet, rules, HOST, every=True)
        wrong = [_difference(fate, packet, sent, rules) for fate in fates if fate.end != "undecided"]
        if len(wrong) == len(fates) and all(wrong):
            shown = "\n".join(documents)
            pytest.fail(f"seed {SEED}\n{shown}\n{packet}\n" + "\n".join(map(str, wrong)))


def test_few_are_undecided() -> None:
    """Runs after the others: of all pairs less than one in a hundred had a doubt."""
    total = sum(COUNT.values())
    print(f"seed {SEED}: {total} pairs, {COUNT['undecided']} undecided")
    assert total >= PAIRS * 0.8
    assert COUNT["undecided"] < total / 100


def _agree(ground: Ground, documents: Sequence[str], packets: Sequence[Packet]) -> None:
    rules = ground.apply(documents)
    packets = [ground.with_port(p) for p in packets]
    for packet, sent in zip(packets, ground.send(packets), strict=True):
        fates = (receive if packet.iif else send)(packet, rules, HOST)
        COUNT["decided" if certain(fates) else "undecided"] += 1
        wrong = [_difference(fate, packet, sent, rules) for fate in fates]
        if all(wrong):
            shown = "\n".join(documents)
            pytest.fail(f"seed {SEED}, {ground.backend}\n{shown}\n{packet}\n" + "\n".join(map(str, wrong)))


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
    if fate.end in ("dropped", "rejected") and not any(p.hook == "postrouting" for p in fate.passes[:-1]):
        return f"predicted {fate.end} {fate.why}, but the connection was confirmed"
    return None


def _matched(passes: Sequence[Pass]) -> tuple[tuple[str, str, int], ...]:
    return tuple(
        (s.table.name, s.rule.chain, s.rule.position)
        for p in passes
        for s in p.steps
        if s.matched and s.rule is not None
    )

"""The rule evaluator against the kernel: random rule sets, random packets, and not one disagreement.

``SIDECARLAB_FUZZ_PAIRS`` is how many pairs of a rule set and a packet are tried (``make fuzz`` sets it), ``SIDECARLAB_FUZZ_SEED`` repeats
a run. A failure is shrunk, as far as `SHRINKING` seconds go, to a small rule set and one packet, which the message shows; the truth
about it then becomes one of the cases of test_rules_cases.py.
"""

from __future__ import annotations

import math
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence

import explain_disagreement as disagreement
import explain_rules as made
import pytest
from explain_ground import Ground, make
from explain_shrink import smallest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from lab.explain.packet import Packet

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]

PAIRS = int(os.environ.get("SIDECARLAB_FUZZ_PAIRS", "600"))
_DRAWN = random.SystemRandom().randrange(1, 1 << 32) if "SIDECARLAB_FUZZ_PAIRS" in os.environ else 901
SEED = int(os.environ.get("SIDECARLAB_FUZZ_SEED", "0")) or _DRAWN
"""``make test`` tries the same pairs each time, ``make fuzz`` new ones."""
PACKETS = 12
SHRINKING = 15.0
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
        max_examples=max(2, math.ceil(PAIRS * share / PACKETS)),
        deadline=None,
        database=None,
        print_blob=True,
        report_multiple_bugs=False,
        phases=(Phase.explicit, Phase.generate),  # see explain_shrink
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
    _hold(legacy, documents, packets, disagreement.among_courses)


def test_few_are_undecided() -> None:
    """Runs after the others: of all pairs less than one in a hundred had a doubt."""
    total = sum(COUNT.values())
    print(f"seed {SEED}: {total} pairs, {COUNT['undecided']} undecided")
    assert total >= PAIRS * 0.8
    assert COUNT["undecided"] < total / 100


def _agree(ground: Ground, documents: Sequence[str], packets: Sequence[Packet]) -> None:
    _hold(ground, documents, packets, disagreement.in_the_verdict, COUNT)


def _hold(
    ground: Ground,
    documents: Sequence[str],
    packets: Sequence[Packet],
    wrong: disagreement.Judge,
    count: Counter[str] | None = None,
) -> None:
    for packet, why in disagreement.found(ground, documents, packets, wrong, count):
        small = smallest(
            documents, lambda tried, one=packet: disagreement.persists(ground, tried, one, wrong), SHRINKING
        )
        now = next(iter(disagreement.found(ground, small, [packet], wrong)), (packet, why))
        shown = "\n".join(small)
        pytest.fail(f"seed {SEED}, {ground.backend}\n{shown}\n{now[0]}\n{now[1]}")

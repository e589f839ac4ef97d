"""What is in the kernel, what should be, and what differs: chain by chain, in order.

The reference compares rule counts and asks whether each rule exists; it sees neither order nor duplicates. Here a
chain of ours must hold exactly our rules in our order. In a built-in chain our rules must be there once and in
order; foreign rules may stand around them, but none may decide in front of them what ours are there for.

Source: istio/istio: tools/istio-iptables/pkg/capture/helper.go, .../builder (GetStateFromSave).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from . import restore
from .canonical import Canonical, canonical, goes, jump
from .model import Family, Rule

OURS = "ISTIO_"
TABLES = ("filter", "nat", "mangle", "raw")

Kind = Literal["missing", "unexpected", "duplicate", "order", "changed", "in-front"]

DECIDING = frozenset(
    {
        "ACCEPT",
        "DROP",
        "REJECT",
        "RETURN",
        "REDIRECT",
        "DNAT",
        "SNAT",
        "MASQUERADE",
        "NETMAP",
        "TPROXY",
        "QUEUE",
        "NFQUEUE",
        "NOTRACK",
        "CT",
    }
)


class Dump:
    """A parsed iptables-save: table -> chain -> rule texts (without ``-A CHAIN``), all in order."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[str, list[str]]] = {}

    def chain(self, table: str, chain: str) -> list[str]:
        return self.tables.get(table, {}).get(chain, [])

    def ours(self, table: str) -> list[str]:
        return [chain for chain in self.tables.get(table, {}) if chain.startswith(OURS)]

    def any_rule(self) -> bool:
        """Any rule at all, or a chain of ours: what the reference calls residue."""
        return any(self.ours(table) or any(chains.values()) for table, chains in self.tables.items())

    def any_of_ours(self) -> bool:
        return any(self.ours(table) for table in self.tables)


class Drift(NamedTuple):
    """One chain that is not as it should be. ``expected`` and ``actual`` are rule texts in order."""

    family: str
    table: str
    chain: str
    kind: Kind
    expected: tuple[str, ...]
    actual: tuple[str, ...]

    def diff(self) -> str:
        """The difference for a person: ``-`` is missing or misplaced, ``+`` should not be there."""
        import difflib

        name = f"{self.family} {self.table} {self.chain}"
        lines = difflib.unified_diff(
            self.expected, self.actual, f"{name} (wanted)", f"{name} (found)", lineterm="", n=1
        )
        return "\n".join(lines) or f"{name}: {self.kind}"


def parse(text: str) -> Dump:
    """Reads iptables-save output; counters and comments of the format are skipped."""
    dump = Dump()
    chains: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("*"):
            chains = dump.tables.setdefault(line[1:].strip(), {})
        elif line.startswith(":"):
            chains.setdefault(line[1:].split(" ", 1)[0], [])
        else:
            if line.startswith("["):
                line = line.partition("] ")[2]
            if line.startswith("-A "):
                _, chain, *rest = line.split(" ", 2)
                chains.setdefault(chain, []).append(rest[0] if rest else "")
    return dump


def placed(rules: Iterable[Rule]) -> dict[tuple[str, str], list[Rule]]:
    """(table, chain) -> our rules in the order in which they stand once inserts are done."""
    made: dict[tuple[str, str], list[Rule]] = {}
    for rule in rules:
        here = made.setdefault((rule.table, rule.chain), [])
        here.insert(len(here) if rule.position is None else rule.position - 1, rule)
    return made


def wanted(rules: Sequence[Rule]) -> dict[str, dict[str, list[str]]]:
    """Table -> chain -> rule texts as they stand after inserts; chains that are only jumped to are empty lists."""
    made: dict[str, dict[str, list[str]]] = {}
    for (table, chain), here in placed(rules).items():
        made.setdefault(table, {})[chain] = [restore.body(rule) for rule in here]
    for table in made:
        for chain in restore.new_chains(rules, table):
            made[table].setdefault(chain, [])
    return made


Ages = Callable[[str, str], list[int]]
"""(table, chain) -> a number for each rule that grows with its time of creation; empty if the kernel does not tell."""


def compare(family: Family, rules: Sequence[Rule], dump: Dump, ages: Ages | None = None) -> list[Drift]:
    """Every chain of ours and every built-in chain that is not as ``rules`` want it.

    A foreign rule in front of ours is drift if it came after ours. Where the kernel does not tell (legacy tables), it
    is drift unless it names an address: whoever wrote that meant that address.
    """
    plan = wanted(rules)
    found: list[Drift] = []
    for table in dict.fromkeys([*plan, *dump.tables]):
        expected, actual = plan.get(table, {}), dump.tables.get(table, {})
        for chain in dict.fromkeys([*expected, *actual]):
            want, have = expected.get(chain, []), actual.get(chain)
            if chain.startswith(OURS):
                found += _own_chain(family, table, chain, want if chain in expected else None, have)
            else:
                found += _shared_chain(family, table, chain, want, actual, ages)
    return found


def is_ours(text: str, want: set[Canonical]) -> bool:
    """A rule outside our chains that is one of ours: it jumps to a chain of ours, or equals a rule that we write."""
    return jump(text).startswith(OURS) or canonical(text) in want


Chains = Mapping[str, Sequence[str]]
"""The chains of one table: name -> rule texts."""


def deciding_ahead(want: Sequence[str], have: Sequence[str], chains: Chains) -> list[int]:
    """Indexes of foreign rules that may decide on packets before the last of our rules is reached."""
    ours = {canonical(text) for text in want}
    last = max((index for index, text in enumerate(have) if canonical(text) in ours), default=-1)
    return [index for index in range(last) if not is_ours(have[index], ours) and decides(have[index], chains)]


def decides(text: str, chains: Chains, any_address: bool = False) -> bool:
    """The rule, or one that its jumps lead to, ends the walk through the built-in chain.

    Args:
        text: a rule of a built-in chain.
        chains: those of its table.
        any_address: only if no rule on the way names an address; whoever wrote one meant that address.
    """
    return _decides(text, chains, any_address, ())


def _decides(text: str, chains: Chains, any_address: bool, path: tuple[str, ...]) -> bool:
    if any_address and _names_address(text):
        return False
    to = jump(text)
    if to in chains and to not in path:
        # Behind a jump RETURN only comes back; behind a goto the packet does not.
        return any(
            (jump(inner) != "RETURN" or goes(text)) and _decides(inner, chains, any_address, (*path, to))
            for inner in chains[to]
        )
    return to in DECIDING


def _names_address(text: str) -> bool:
    return any(item[0] in ("--source", "--destination") and not item[1] for item in canonical(text))


def _own_chain(family: str, table: str, chain: str, want: list[str] | None, have: list[str] | None) -> list[Drift]:
    if want is None:
        return [Drift(family, table, chain, "unexpected", (), tuple(have or ()))]
    if have is None:
        return [Drift(family, table, chain, "missing", tuple(want), ())]
    a, b = [canonical(text) for text in want], [canonical(text) for text in have]
    if a == b:
        return []
    shown = dict(zip(a, want, strict=True))
    # Rules that are right are shown in our own words, so that the diff holds only what differs.
    return [
        Drift(
            family,
            table,
            chain,
            kind_of(a, b),
            tuple(want),
            tuple(shown.get(key, text) for key, text in zip(b, have, strict=True)),
        )
    ]


def _shared_chain(
    family: str, table: str, chain: str, want: list[str], chains: Chains, ages: Ages | None
) -> list[Drift]:
    have = chains.get(chain, ())
    a = [canonical(text) for text in want]
    keys = set(a)
    b = [canonical(text) for text in have if is_ours(text, keys)]
    shown = dict(zip(a, want, strict=True))
    found = []
    if a != b:
        actual = tuple(shown.get(canonical(text), text) for text in have if is_ours(text, keys))
        found.append(Drift(family, table, chain, kind_of(a, b), tuple(want), actual))
    ahead = _intruders(table, chain, want, chains, ages)
    if ahead:
        actual = tuple(
            shown.get(canonical(text), text) for index, text in enumerate(have) if index in ahead or is_ours(text, keys)
        )
        found.append(Drift(family, table, chain, "in-front", tuple(want), actual))
    return found


def _intruders(table: str, chain: str, want: list[str], chains: Chains, ages: Ages | None) -> list[int]:
    have = chains.get(chain, ())
    ahead = deciding_ahead(want, have, chains)
    if not ahead:
        return []
    born = ages(table, chain) if ages else []
    if len(born) != len(have):
        return [index for index in ahead if decides(have[index], chains, any_address=True)]
    keys = {canonical(text) for text in want}
    ours = min(age for age, text in zip(born, have, strict=True) if is_ours(text, keys))
    return [index for index in ahead if born[index] > ours]


def kind_of(want: Sequence[object], have: Sequence[object]) -> Kind:
    """How two different lists of rules differ."""
    if sorted(want, key=repr) == sorted(have, key=repr):
        return "order"
    if any(key not in have for key in want):
        return "missing" if all(key in want for key in have) else "changed"
    return "duplicate" if set(have) == set(want) else "unexpected"

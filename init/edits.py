"""What to change in a table, as data: computed from a dump and the wanted rules, carried out by a back end.

The changes of one table are one commit, so that a packet sees the table before or after them, never between.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from . import restore, state
from .canonical import canonical, jump
from .model import BUILT_IN_CHAINS, Jump, Proto, Rule


class Delete(NamedTuple):
    """Delete the rule at ``position`` (from 1) of ``chain``, whose text is ``text``."""

    chain: str
    position: int
    text: str


class TableEdit(NamedTuple):
    """Changes of one table, carried out in the order of the fields."""

    table: str
    deletes: tuple[Delete, ...] = ()
    flush: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    new: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.deletes or self.flush or self.drop or self.new or self.rules)


GUARD = tuple(
    Rule("filter", chain, (proto,), Jump("DROP"), "nothing passes while rules change", 1)
    for chain in ("INPUT", "FORWARD", "OUTPUT")
    for proto in (Proto("tcp"), Proto("udp"))
)
"""The reference's guard rules (istio/istio: tools/istio-iptables/pkg/builder, buildGuardrails)."""


def apply(rules: Sequence[Rule]) -> list[TableEdit]:
    """The edits that put ``rules`` into tables that hold none of ours."""
    return [
        TableEdit(
            table,
            new=tuple(restore.new_chains(rules, table)),
            rules=tuple(rule for rule in rules if rule.table == table),
        )
        for table in restore.tables(rules)
    ]


def cleanup(rules: Sequence[Rule], dump: state.Dump) -> list[TableEdit]:
    """The edits that remove every chain of ours, every jump to one and every rule equal to one of ``rules``.

    Foreign rules stay as they are. In mangle, rules that only we write (mark 1338, the saved and restored mark) go
    even if the configuration that made them is not the present one.
    """
    found = (_remove(table, rules, dump) for table in dump.tables)
    return [edit for edit in found if edit]


def replace_all(rules: Sequence[Rule], dump: state.Dump, front: Collection[tuple[str, str]] = ()) -> list[TableEdit]:
    """The edits that leave exactly ``rules`` of ours, whatever is there now.

    In a built-in chain with foreign rules ours go where our first one stands now. They go to the top if none is left
    and a foreign rule decides there, and in the chains ``front``, given as (table, chain).
    """
    made = []
    tables = dict.fromkeys([*restore.tables(rules), *dump.tables])
    for table in sorted(tables):
        old = _remove(table, rules, dump)
        here = _in_place(table, [rule for rule in rules if rule.table == table], dump, front)
        edit = old._replace(new=tuple(restore.new_chains(here, table)), rules=tuple(here))
        if edit:
            made.append(edit)
    return made


def guard(dump: state.Dump) -> TableEdit:
    """Guard rules on top of filter; those that a killed run left there go first."""
    return TableEdit("filter", deletes=tuple(_guards(dump)), rules=GUARD)


def unguard(dump: state.Dump) -> TableEdit:
    """Takes the guard rules away again."""
    return TableEdit("filter", deletes=tuple(_guards(dump)))


def document(edits: Iterable[TableEdit], comments: bool = False) -> str:
    """The edits as text for iptables-restore --noflush."""
    lines = []
    for edit in filter(None, edits):
        lines.append(f"*{edit.table}")
        # By text, not by number: should somebody else change the chain meanwhile, this fails instead of hitting a foreign rule.
        lines += [f"-D {delete.chain} {delete.text}" for delete in edit.deletes]
        lines += [f"-F {chain}" for chain in edit.flush]
        lines += [f"-X {chain}" for chain in edit.drop]
        lines += [f"-N {chain}" for chain in edit.new]
        lines += [restore.line(rule, comments) for rule in edit.rules]
        lines.append("COMMIT")
    return "".join(f"{line}\n" for line in lines)


def _remove(table: str, rules: Sequence[Rule], dump: state.Dump) -> TableEdit:
    ours = tuple(dump.ours(table))
    equal = {canonical(restore.body(rule)) for rule in rules if rule.table == table and rule.chain in BUILT_IN_CHAINS}
    deletes = []
    for chain, texts in dump.tables.get(table, {}).items():
        if chain in ours:
            continue
        # From the last one, so that positions stay right.
        for index in range(len(texts) - 1, -1, -1):
            builtin = chain in BUILT_IN_CHAINS
            if state.is_ours(texts[index], equal if builtin else set()) or (
                builtin and _only_we_write(table, chain, texts[index])
            ):
                deletes.append(Delete(chain, index + 1, texts[index]))
    return TableEdit(table, tuple(deletes), ours, ours)


def _only_we_write(table: str, chain: str, text: str) -> bool:
    if table != "mangle":
        return False
    items = canonical(text)
    if chain == "OUTPUT":
        marked = ("--set-xmark", False, "0x53a/0xffffffff") in items
        return marked and any(str(item[0]) in ("--uid-owner", "--gid-owner") for item in items)
    return False


def _in_place(table: str, rules: list[Rule], dump: state.Dump, front: Collection[tuple[str, str]]) -> list[Rule]:
    """The rules with positions in those built-in chains where foreign rules stand."""
    moved: list[Rule] = []
    chains = set()
    for (_, chain), placed in state.placed(rules).items():
        have = dump.chain(table, chain)
        keys = {canonical(restore.body(rule)) for rule in placed}
        ours = [state.is_ours(text, keys) for text in have]
        if chain not in BUILT_IN_CHAINS or all(ours):
            continue
        if (table, chain) in front:
            start = 0
        elif any(ours):
            start = ours.index(True)
        elif any(jump(text) in state.DECIDING for text in have):
            start = 0
        else:
            continue
        chains.add(chain)
        moved += [rule._replace(position=start + number) for number, rule in enumerate(placed, 1)]
    return [*(rule for rule in rules if rule.chain not in chains), *moved]


def _guards(dump: state.Dump) -> list[Delete]:
    """Guard rules that stand at the very top of a filter chain; a DROP further down is somebody else's."""
    found = []
    for chain in ("INPUT", "FORWARD", "OUTPUT"):
        texts = dump.chain("filter", chain)
        expected = [canonical(restore.body(rule)) for rule in reversed(GUARD) if rule.chain == chain]
        if [canonical(text) for text in texts[:2]] == expected:
            found += [Delete(chain, 2, texts[1]), Delete(chain, 1, texts[0])]
    return found

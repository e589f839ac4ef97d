"""What to change in a table, as data: computed from a dump and the wanted rules, carried out by a back end.

The changes of one table are one commit, so that a packet sees the table before or after them, never between.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from . import restore, state
from .canonical import canonical
from .config import INBOUND_MARK
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


def cleanup(rules: Sequence[Rule], dump: state.Dump, mark: str = INBOUND_MARK) -> list[TableEdit]:
    """The edits that remove every chain of ours, every jump to one and every rule equal to one of ``rules``.

    Foreign rules stay as they are. In mangle, rules that only we write (mark 1338; the inbound mark, which is ``mark``
    or the default one, saved and restored) go even if the configuration that made them is not the present one. So do
    the guard rules of a run that was killed.
    """
    made = []
    for table in dump.tables:
        edit = _remove(table, rules, dump, mark)
        if table == "filter":
            # From the last one of a chain, so that positions stay right.
            deletes = sorted((*edit.deletes, *guards_left(dump)), key=lambda delete: -delete.position)
            edit = edit._replace(deletes=tuple(deletes))
        if edit:
            made.append(edit)
    return made


def replace_all(
    rules: Sequence[Rule], dump: state.Dump, front: Collection[tuple[str, str]] = (), mark: str = INBOUND_MARK
) -> list[TableEdit]:
    """The edits that leave exactly ``rules`` of ours, whatever is there now.

    In a built-in chain with foreign rules ours go where our first one stands now. They go to the top if none is left
    and a foreign rule decides there, and in the chains ``front``, given as (table, chain).
    """
    made = []
    tables = dict.fromkeys([*restore.tables(rules), *dump.tables])
    for table in sorted(tables):
        old = _remove(table, rules, dump, mark)
        here = _in_place(table, [rule for rule in rules if rule.table == table], dump, front)
        edit = old._replace(new=tuple(restore.new_chains(here, table)), rules=tuple(here))
        if edit:
            made.append(edit)
    return made


def guard(dump: state.Dump) -> TableEdit:
    """Guard rules on top of filter; those that a killed run left there go first."""
    return TableEdit("filter", deletes=guards_left(dump), rules=GUARD)


def guards_left(dump: state.Dump) -> tuple[Delete, ...]:
    """The guard rules of a run that was killed: a pair in each of the three chains, else they are somebody else's."""
    found = _guards(dump)
    return tuple(found) if len(found) == len(GUARD) else ()


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


def _remove(table: str, rules: Sequence[Rule], dump: state.Dump, mark: str) -> TableEdit:
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
                builtin and _only_we_write(table, chain, texts[index], mark)
            ):
                deletes.append(Delete(chain, index + 1, texts[index]))
    return TableEdit(table, tuple(deletes), ours, ours)


def _only_we_write(table: str, chain: str, text: str, mark: str) -> bool:
    if table != "mangle":
        return False
    items = canonical(text)
    if chain == "OUTPUT" and ("--set-xmark", False, "0x53a/0xffffffff") in items:
        return any(str(item[0]) in ("--uid-owner", "--gid-owner") for item in items)
    return any(items == canonical(wording) for number in (mark, INBOUND_MARK) for wording in _marked(chain, number))


def _marked(chain: str, mark: str) -> list[str]:
    """What TPROXY writes into a built-in chain of mangle beside jumps (init.rules, tproxy_tail)."""
    if chain == "PREROUTING":
        return [f"-p tcp -m mark --mark {mark} -j CONNMARK --save-mark"]
    if chain == "OUTPUT":
        return [
            f"-p tcp -o lo -m mark --mark {mark} -j RETURN",
            f"-p tcp -m connmark --mark {mark} -j CONNMARK --restore-mark",
        ]
    return []


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
        elif any(state.decides(text, dump.tables[table]) for text in have):
            start = 0
        else:
            continue
        chains.add(chain)
        moved += [rule._replace(position=start + number) for number, rule in enumerate(placed, 1)]
    return [*(rule for rule in rules if rule.chain not in chains), *moved]


def _guards(dump: state.Dump) -> list[Delete]:
    """The first pair of guard rules of each filter chain. Somebody may have put a rule on top meanwhile."""
    found = []
    for chain in ("INPUT", "FORWARD", "OUTPUT"):
        texts = dump.chain("filter", chain)
        keys = [canonical(text) for text in texts]
        expected = [canonical(restore.body(rule)) for rule in reversed(GUARD) if rule.chain == chain]
        at = next((index for index in range(len(keys)) if keys[index : index + 2] == expected), None)
        if at is not None:
            found += [Delete(chain, at + 2, texts[at + 1]), Delete(chain, at + 1, texts[at])]
    return found

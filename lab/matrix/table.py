"""A matrix for people: a table where it fits, else target by target with the sources that fare alike. Pure.

Targets are the rows and sources the columns: a mesh has more of the former. Twenty pods in a table would be wider than any
terminal, so that a wide matrix says for each target who has it how, in a line or two each.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import click

from lab.matrix.cells import Cell, How
from lab.matrix.matrix import Matrix
from lab.matrix.targets import Target

_COLOURS: Mapping[How, str] = {"mtls": "green", "blocked": "red", "failed": "red", "undecided": "yellow"}
_MEANING: Mapping[How, str] = {
    "mtls": "mTLS: through the client's proxy to another proxy, with mutual TLS",
    "tls": "TLS: through the client's proxy to a cluster of the mesh; the app's own TLS, or what the proxy adds",
    "plaintext": "plaintext: through the client's proxy to a cluster of the mesh, in the clear",
    "passthrough": "passthrough: through the client's proxy, which does not know the destination and sends it on",
    "direct": "direct: past the client's proxy, or it has none",
    "blocked": "blocked: a proxy ends it and asks nobody",
    "failed": "failed: nobody answers at its end",
    "undecided": "undecided, or one of several: not known from here, or not the same each time",
}
_GAP = "  "
_FEW = 6
"""How many sources of a wide matrix are named although "all others" would say the same."""


def lines(found: Matrix, width: int) -> Iterator[str]:
    """The matrix as text with colours.

    Args:
        width: columns that a line may take.
    """
    rows = _rows(found)
    if not rows:
        yield f"{found.name}: nothing to reach, or nobody to reach it"
        return
    yield from table(found, rows) if table_width(found, rows) <= width else groups(rows, width)
    yield ""
    counts = Counter(cell.how for cell in found.cells)
    shown = ", ".join(f"{counts[how]} {how}" for how in _MEANING if counts[how])
    live = " as it runs" if found.live else ""
    yield f"{found.name}{live}: {_count(found.sources, 'source')}, {_count(found.targets, 'target')}: {shown}"
    yield from (f"  {_MEANING[how]}" for how in _MEANING if counts[how])


def _count(things: Sequence[object], name: str) -> str:
    return f"{len(things)} {name}{'s' if len(things) != 1 else ''}"


def _rows(found: Matrix) -> list[tuple[Target, list[Cell]]]:
    """For each target its cells, in the order of the sources."""
    count = len(found.targets)
    return [(target, list(found.cells[n::count])) for n, target in enumerate(found.targets)] if found.sources else []


def _name(target: Target) -> str:
    return f"{target.label} ({target.protocol})"


def _widths(found: Matrix, rows: Sequence[tuple[Target, Sequence[Cell]]]) -> list[int]:
    first = max(len("TO"), *(len(_name(target)) for target, _ in rows))
    columns = [
        max(len(source.name), *(len(_in_table(cells[n])) for _, cells in rows))
        for n, source in enumerate(found.sources)
    ]
    return [first, *columns]


def table_width(found: Matrix, rows: Sequence[tuple[Target, Sequence[Cell]]]) -> int:
    """How many columns the table takes."""
    widths = _widths(found, rows)
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _in_table(cell: Cell) -> str:
    return f"{cell.word} via {cell.via}" if cell.via else cell.word


def table(found: Matrix, rows: Sequence[tuple[Target, Sequence[Cell]]]) -> Iterator[str]:
    """One row a target, one column a source."""
    widths = _widths(found, rows)
    head = ["TO", *(source.name for source in found.sources)]
    yield click.style(_GAP.join(text.ljust(w) for text, w in zip(head, widths, strict=True)).rstrip(), bold=True)
    for target, cells in rows:
        parts = [_name(target).ljust(widths[0])]
        parts += [_coloured(c, _in_table(c).ljust(w)) for c, w in zip(cells, widths[1:], strict=True)]
        yield _GAP.join(parts).rstrip()


def groups(rows: Sequence[tuple[Target, Sequence[Cell]]], width: int) -> Iterator[str]:
    """Target by target; sources that fare alike share a line."""
    for target, cells in rows:
        yield click.style(_name(target), bold=True)
        alike: dict[str, list[Cell]] = {}
        for cell in cells:
            alike.setdefault(cell.told, []).append(cell)
        column = max((len(text) for text in alike if len(text) <= width // 2 - 4), default=0)
        most = max(alike.values(), key=len)
        rest = most if len(most) > _FEW else None
        for text, same in sorted(alike.items(), key=lambda entry: entry[1] is rest):
            indent = 2 + max(len(text), column) + len(_GAP)
            if indent > width // 2:
                indent = 6
            named = _all([c.source for c in same], len(cells), others=same is rest)
            who = textwrap.wrap(named, max(width - indent, 20), break_long_words=False, break_on_hyphens=False)
            head = f"  {_coloured(same[0], text.ljust(column))}{_GAP}"
            if indent == 6:
                yield head.rstrip()
            else:
                yield head + who.pop(0)
            yield from (" " * indent + line for line in who)


def _all(names: Sequence[str], of: int, *, others: bool) -> str:
    """The names; where they are everybody, or all that the lines before do not name, that is said instead."""
    if len(names) == of and of > 1:
        return f"all {of}"
    return f"all others ({len(names)})" if others else ", ".join(names)


def _coloured(cell: Cell, text: str) -> str:
    return click.style(text, fg=_COLOURS.get(cell.how))

"""Makes a failing rule set small, within a time: each attempt asks the kernel, so hypothesis' own shrinking takes minutes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence


def smallest(documents: Sequence[str], fails: Callable[[list[str]], bool], seconds: float) -> list[str]:
    """Documents with as few rules as the time allows of which ``fails`` still says so; tables and chains stay."""
    deadline = time.monotonic() + seconds
    now = [document.splitlines() for document in documents]
    changed = True
    while changed:
        changed = False
        for which, cut in _cuts(now):
            if time.monotonic() > deadline:
                return _joined(now)
            kept = [line for number, line in enumerate(now[which]) if number not in cut]
            tried = [*now[:which], kept, *now[which + 1 :]]
            if fails(_joined(tried)):
                now, changed = tried, True
                break
    return _joined(now)


def _cuts(documents: Sequence[Sequence[str]]) -> Iterator[tuple[int, frozenset[int]]]:
    """(document, its lines to leave out): all rules, halves, and so on down to single ones."""
    rules = [[number for number, line in enumerate(lines) if _is_rule(line)] for lines in documents]
    count = max(map(len, rules), default=0)
    while count:
        for which, numbers in enumerate(rules):
            for start in range(0, len(numbers), count):
                yield which, frozenset(numbers[start : start + count])
        count //= 2


def _is_rule(line: str) -> bool:
    """In iptables' words, or indented below a chain of an nft script."""
    return line.startswith("-A ") or (line.startswith("    ") and not line.lstrip().startswith(("type ", "}")))


def _joined(documents: Sequence[Sequence[str]]) -> list[str]:
    return ["\n".join(lines) + "\n" for lines in documents]

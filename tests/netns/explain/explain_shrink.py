"""Makes a failing rule set small, within a time: each attempt asks the kernel, so hypothesis' own shrinking takes minutes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence


def smallest(documents: Sequence[str], fails: Callable[[list[str]], bool], seconds: float) -> list[str]:
    """Documents with as few lines as the time allows of which ``fails`` still says so.

    Args:
        fails: is asked of documents from which lines were taken; what the kernel refuses does not fail.
    """
    deadline = time.monotonic() + seconds
    now = [document.splitlines() for document in documents]
    changed = True
    while changed:
        changed = False
        for which, start, count in _cuts(now):
            if time.monotonic() > deadline:
                return _joined(now)
            lines = now[which]
            if start >= len(lines):
                continue
            tried = [*now[:which], lines[:start] + lines[start + count :], *now[which + 1 :]]
            if fails(_joined(tried)):
                now, changed = tried, True
    return _joined(now)


def _cuts(documents: Sequence[Sequence[str]]) -> Iterator[tuple[int, int, int]]:
    """(document, first line, how many): halves first, then less, from the end on so that earlier cuts stay where they are."""
    for which, lines in enumerate(documents):
        count = len(lines)
        while count:
            for start in range((len(lines) - 1) // count * count, -1, -count):
                yield which, start, count
            count //= 2


def _joined(documents: Sequence[Sequence[str]]) -> list[str]:
    return ["\n".join(lines) + "\n" for lines in documents]

"""``lab diff``: two meshes side by side: objects, flows, what would be pushed, and what would start again."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from lab.manifests import diff
from lab.matrix import changes, pushes
from lab.matrix.cells import Cell
from lab.matrix.changes import Change, Changes, Kind
from lab.matrix.pushes import Push
from lab.matrix.targets import Target

if TYPE_CHECKING:
    from lab.matrix.sides import Side
    from lab.runtime.turnover import Turnover

_HEADINGS: Mapping[Kind, str] = {
    "breaks": "breaks (it works before, and not after)",
    "opens": "opens (it does not work before, and does after)",
    "exposes": "mTLS -> no mTLS",
    "secures": "no mTLS -> mTLS",
    "reroutes": "other way (works before and after)",
    "fails-otherwise": "fails otherwise (does not work before or after)",
    "uncertain": "uncertain (whether it works is not known on one side)",
    "lookup": "other answer to the lookup",
    "new": "new",
    "gone": "gone",
}
_COLOURS: Mapping[Kind, str] = {"breaks": "red", "exposes": "red", "opens": "green", "secures": "green"}
_NAMES = 6
"""How many names of resources a line of text lists; JSON has all."""


@dataclass(frozen=True, slots=True)
class Difference:
    """What lies between two sides. ``places`` are pods and external hosts that would come, go or start again."""

    before: Side
    after: Side
    objects: diff.Diff
    flows: Changes
    pushed: tuple[Push, ...]
    places: Turnover

    def __bool__(self) -> bool:
        return bool(self.objects or self.flows.changes or self.pushed or self.places)

    def to_json(self) -> dict[str, Any]:
        return {
            "before": _side(self.before),
            "after": _side(self.after),
            "equal": not self,
            "objects": self.objects.to_json(),
            "flows": {"compared": self.flows.compared, "different": len(self.flows.changes)},
            "changes": [change.to_json() for change in self.flows.changes],
            "pushes": [push.to_json() for push in self.pushed],
            "places": self.places.to_json(),
        }

    def lines(self, width: int) -> Iterator[str]:
        """For people: objects, flows by kind of change, pushes; last a line that counts."""
        if not self:
            yield "no difference"
            return
        yield from _objects(self.objects)
        for kind in changes.KINDS:
            found = self.flows.of(kind)
            if found:
                yield click.style(f"{_HEADINGS[kind]}: {len(found)}", bold=True, fg=_COLOURS.get(kind))
                yield from _one_sided(found, self._stay(), width) if kind in ("new", "gone") else _flows(found, width)
        yield from _pushed(self.pushed, width)
        again = (*self.places.replaced, *self.places.restarted)
        if again:
            yield click.style("would start again: ", bold=True) + ", ".join(again)
        different = len(self.flows.changes)
        yield f"{self.before.name} -> {self.after.name}: {different} of {self.flows.compared} flows differ"

    def _stay(self) -> frozenset[str]:
        """The pods of both sides."""
        here, there = ({pod.name for pod in side.mesh.pods} for side in (self.before, self.after))
        return frozenset(here & there)


def between(before: Side, after: Side) -> Difference:
    """What a change from one side to the other would change."""
    from lab.runtime import turnover

    old, new = before.mesh, replace(after.mesh, name=before.mesh.name)
    objects = diff.between(old, new)
    unlike = bool(objects) or before.live or after.live
    return Difference(
        before,
        after,
        objects,
        changes.between(before.world, after.world) if unlike else Changes(),
        pushes.between(before.world, after.world) if objects else (),
        turnover.between(old, new),
    )


def _side(side: Side) -> dict[str, Any]:
    return {"name": side.name, "source": "lab" if side.live else "manifests"}


def _objects(objects: diff.Diff) -> Iterator[str]:
    tests = 0
    for mark, refs, colour in (
        ("+", objects.added, "green"),
        ("-", objects.removed, "red"),
        ("~", objects.changed, None),
    ):
        for ref in refs:
            if ref.kind == "TrafficTest":
                tests += 1
            else:
                yield click.style(f"{mark} {ref}", fg=colour)
    if tests:
        yield f"~ {tests} TrafficTest{'s' if tests != 1 else ''} (no part of the mesh)"


# --- flows ------------------------------------------------------------------------------------


def _flows(found: Sequence[Change], width: int) -> Iterator[str]:
    """``from -> to: before | after``; sources that fare alike share a line."""
    alike: dict[tuple[str, str], list[Change]] = {}
    for change in found:
        alike.setdefault((_to(change), _what(change)), []).append(change)
    for (to, what), same in alike.items():
        who = ", ".join(_from(change) for change in same)
        tests = ", ".join(dict.fromkeys(name for change in same for name in change.tests))
        line = f"{who} -> {to}: {what}" + (f"  [{tests}]" if tests else "")
        yield from _wrapped(line, "  ", width)


def _from(change: Change) -> str:
    return change.source if change.uid == 1000 else f"{change.source} (uid {change.uid})"


def _to(change: Change) -> str:
    return _target(change.target)


def _target(target: Target) -> str:
    return f"{target.label} ({target.protocol})"


def _what(change: Change) -> str:
    """Both sides in words; where those are the same, what is not."""
    assert change.before is not None
    assert change.after is not None
    was, now = change.before.told, change.after.told
    if was != now:
        return f"{was} | {now}"
    key, before, after = change.differences[0]
    return f"{was}, {key} {_shown(before)} | {_shown(after)}"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value)) or "none"
    if isinstance(value, Mapping):
        return f"{value['chance']:.0%} {value.get('cluster') or value.get('reached') or value.get('result')}"
    return "none" if value is None else str(value)


def _one_sided(found: Sequence[Change], stay: Collection[str], width: int) -> Iterator[str]:
    """Flows that one side alone has, and how many of them work: from a pod that comes or goes, else to what does."""
    alike: dict[str, list[Cell]] = {}
    for change in found:
        cell = change.before or change.after
        assert cell is not None
        alike.setdefault(f"to {_to(change)}" if change.source in stay else f"from {change.source}", []).append(cell)
    for what, cells in alike.items():
        works = sum(cell.reaches is True for cell in cells)
        if len(cells) == 1:
            cell = cells[0]
            other = f"from {cell.source}" if what.startswith("to ") else f"to {_target(cell.target)}"
            line = f"{what} {other}: {cell.told}"
        else:
            line = f"{what}: {len(cells)} flows, {'all' if works == len(cells) else works or 'none'} of which work"
        yield from _wrapped(line, "  ", width)


def _wrapped(line: str, indent: str, width: int) -> list[str]:
    return textwrap.wrap(
        line, max(width, 40), initial_indent=indent, subsequent_indent=f"{indent}    ", break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


# --- pushes -----------------------------------------------------------------------------------


def _pushed(found: Sequence[Push], width: int) -> Iterator[str]:
    """By proxy; those that get the same share their lines."""
    by_proxy: dict[str, list[Push]] = {}
    for push in found:
        by_proxy.setdefault(push.proxy, []).append(push)
    alike: dict[tuple[str, ...], list[str]] = {}
    for proxy, own in by_proxy.items():
        alike.setdefault(tuple(_names(push) for push in own), []).append(proxy)
    if alike:
        yield click.style("would be pushed:", bold=True)
    for lines, proxies in alike.items():
        yield from _wrapped(f"to {', '.join(proxies)}", "  ", width)
        for line in lines:
            yield from _wrapped(line, "    ", width)


def _names(push: Push) -> str:
    parts = []
    for mark, names in (("+", push.added), ("-", push.removed), ("~", push.changed)):
        if names:
            more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
            parts.append(f"{mark} {', '.join(names[:_NAMES])}{more}")
    return f"{push.type} {'; '.join(parts)}"

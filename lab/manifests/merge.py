"""Manifests over manifests, as ``kubectl apply`` lays them: objects of the new ones replace those of the same kind,
namespace and name; all others stay. Pure: texts in, texts out.

A replaced document is blanked where it stood, so that every line keeps its number and errors their place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from yaml.events import DocumentStartEvent

from lab.manifests.document import Map, Seq, parse, plain
from lab.manifests.kinds import KINDS, SCOPED

Text = tuple[str, str]
"""A file's name and what is in it."""

Identity = tuple[str, str, str, str]
"""API group, kind, namespace and name."""


def merge(current: Sequence[Text], new: Sequence[Text]) -> list[Text]:
    """``current`` without what ``new`` replaces and without files that hold nothing any more, then ``new``.

    Raises:
        InputError: a text is no YAML.
    """
    replaced = {identity for file, text in new for document in parse(text, file) for identity in _identities(document)}
    kept = []
    for file, text in current:
        rest = _without(file, text, replaced)
        if rest is not None:
            kept.append((file, rest))
    return [*kept, *new]


def _without(file: str, text: str, replaced: set[Identity]) -> str | None:
    documents = parse(text, file)
    gone = {id(document) for document in documents if _wholly(document, replaced)}
    if len(gone) == len(documents):
        return None
    lines = text.splitlines(keepends=True)
    starts = [*_starts(text), len(lines)]
    for document in documents:
        first = max(start for start in starts if start < document.line)
        end = min(start for start in starts if start >= document.line)
        if id(document) in gone:
            _blank(lines, first, end)
        elif any(identity in replaced for identity in _identities(document)):
            _blank(lines, first, end)
            mark = "--- " if lines[document.line - 1].startswith("---") else ""
            lines[document.line - 1] = mark + _remaining_list(document, replaced)
    return "".join(lines)


def _wholly(document: Map, replaced: set[Identity]) -> bool:
    identities = _identities(document)
    return bool(identities) and all(identity in replaced for identity in identities)


def _starts(text: str) -> list[int]:
    """The lines, from 0, at which documents begin (at their ``---``, if they have one)."""
    events = yaml.parse(text, yaml.CSafeLoader)
    return [e.start_mark.line for e in events if isinstance(e, DocumentStartEvent) and e.start_mark is not None]


def _blank(lines: list[str], first: int, end: int) -> None:
    """Empties lines; the ``---`` before a document stays, for it also ends the one before."""
    for number in range(first, end):
        lines[number] = "---\n" if lines[number].startswith("---") else "\n"


def _remaining_list(document: Map, replaced: set[Identity]) -> str:
    """What is left of a ``List``, on one line (a flow mapping)."""
    items = [item for item in _items(document) if _identity(item) not in replaced]
    data = {"apiVersion": "v1", "kind": "List", "items": [plain(item) for item in items]}
    return yaml.safe_dump(data, default_flow_style=True, width=float("inf"), allow_unicode=True)


def _items(document: Map) -> list[Map]:
    items = document.get("items")
    return [item for item in items if isinstance(item, Map)] if isinstance(items, Seq) else []


def _identities(document: Map) -> list[Identity]:
    if document.get("kind") == "List":
        return [_identity(item) for item in _items(document)]
    return [_identity(document)]


def _identity(document: Mapping[str, Any]) -> Identity:
    group = str(document.get("apiVersion") or "").rpartition("/")[0]
    kind = str(document.get("kind") or "")
    metadata = document.get("metadata")
    metadata = metadata if isinstance(metadata, Mapping) else {}
    known = KINDS.get((group, kind))
    scoped = known is None or known.scope == SCOPED
    return group, kind, str(metadata.get("namespace") or "default") if scoped else "", str(metadata.get("name") or "")

"""One object of a manifest, read and checked by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lab.manifests.document import Map
from lab.manifests.model import Meta
from lab.manifests.schema.metadata import Object


@dataclass(frozen=True, slots=True)
class Item:
    """``document`` is what was written, ``schema`` the checked form of it."""

    kind: str
    meta: Meta
    schema: Object
    document: Map

    @property
    def subject(self) -> str:
        """How errors call it: ``Service catalog/catalog``, ``ExternalHost vendor``."""
        return (
            f"{self.kind} {self.meta.namespace}/{self.meta.name}"
            if self.meta.namespace
            else f"{self.kind} {self.meta.name}"
        )


Items = Mapping[tuple[str, str], Item]
"""What was read, under (kind, NAMESPACE/NAME)."""


def value_at(item: Item, *path: str) -> object:
    """The value at ``path`` of an object as written, None if there is none."""
    here: object = item.document
    for key in path:
        here = here.get(key) if isinstance(here, Mapping) else None
    return here

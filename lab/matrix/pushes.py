"""What discovery would push after a change: names of resources that are new, gone, or other than they were. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lab.explaining import MeshWorld

if TYPE_CHECKING:
    from lab.discovery.snapshot import Resources


@dataclass(frozen=True, slots=True)
class Push:
    """Resources of one type for one proxy, by name. Of the name table (NDS) the names are hosts."""

    proxy: str
    type: str
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "proxy": self.proxy,
            "type": self.type,
            "added": list(self.added),
            "removed": list(self.removed),
            "changed": list(self.changed),
        }


def between(old: MeshWorld, new: MeshWorld) -> tuple[Push, ...]:
    """For each proxy that is on both sides, in the order of a push."""
    return tuple(_pushes(old, new))


def _pushes(old: MeshWorld, new: MeshWorld) -> Iterator[Push]:
    for pod in new.mesh.pods:
        then = old.mesh.pod(pod.name)
        if then is None or not (pod.injected and then.injected):
            continue
        before, after = _by_type(old.resources(then)), _by_type(new.resources(pod))
        for kind in before:
            was, now = before[kind], after[kind]
            found = Push(
                pod.name,
                kind,
                tuple(sorted(now.keys() - was.keys())),
                tuple(sorted(was.keys() - now.keys())),
                tuple(sorted(name for name in was.keys() & now.keys() if _differ(was[name], now[name]))),
            )
            if found.added or found.removed or found.changed:
                yield found


def _by_type(resources: Resources) -> dict[str, Mapping[str, Any]]:
    return {
        "CDS": resources.clusters,
        "EDS": resources.endpoints,
        "LDS": resources.listeners,
        "RDS": resources.routes,
        "NDS": resources.name_table.table,
    }


def _differ(one: Any, other: Any) -> bool:
    return bool(one.SerializeToString(deterministic=True) != other.SerializeToString(deterministic=True))

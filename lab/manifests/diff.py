"""What lies between two meshes, object by object. Pure; where something was written is no difference."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lab.manifests.model import Mesh, Meta, Source

_KINDS: Mapping[str, str] = {
    "namespaces": "Namespace",
    "pods": "Pod",
    "services": "Service",
    "endpoint_slices": "EndpointSlice",
    "service_entries": "ServiceEntry",
    "workload_entries": "WorkloadEntry",
    "sidecars": "Sidecar",
    "destination_rules": "DestinationRule",
    "virtual_services": "VirtualService",
    "peer_authentications": "PeerAuthentication",
    "external_hosts": "ExternalHost",
    "links": "Link",
    "tests": "TrafficTest",
}


@dataclass(frozen=True, slots=True, order=True)
class Ref:
    """An object by name; ``namespace`` is empty where its kind has none. A Deployment's pods are Pods."""

    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}" if self.namespace else f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True)
class Diff:
    """Objects that are new, gone, and other than they were; each sorted."""

    added: tuple[Ref, ...] = ()
    removed: tuple[Ref, ...] = ()
    changed: tuple[Ref, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)

    def to_json(self) -> dict[str, list[dict[str, str]]]:
        return {
            what: [dataclasses.asdict(ref) for ref in refs]
            for what, refs in (("added", self.added), ("removed", self.removed), ("changed", self.changed))
        }


def between(old: Mesh, new: Mesh) -> Diff:
    """What must be done to ``old`` to have ``new``. The mesh configuration is one object, ``MeshConfig``."""
    added: list[Ref] = []
    removed: list[Ref] = []
    changed: list[Ref] = []
    for field, kind in _KINDS.items():
        before, after = _by_ref(kind, getattr(old, field)), _by_ref(kind, getattr(new, field))
        added += after.keys() - before.keys()
        removed += before.keys() - after.keys()
        changed += (ref for ref in before.keys() & after.keys() if not same(before[ref], after[ref]))
    if not same(old.mesh_config, new.mesh_config):
        changed.append(Ref("MeshConfig", "", "mesh"))
    return Diff(tuple(sorted(added)), tuple(sorted(removed)), tuple(sorted(changed)))


def same(old: object, new: object) -> bool:
    """Whether two objects of the model say the same, wherever and in whatever order they were written."""
    return old is new or _plain(old) == _plain(new)


def _by_ref(kind: str, objects: Iterable[Any]) -> dict[Ref, Any]:
    return {Ref(kind, o.meta.namespace, o.meta.name): o for o in objects}


def _plain(value: Any) -> Any:
    if isinstance(value, Source):
        return None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        left_out = ("order",) if isinstance(value, Meta) else ()
        fields = (f.name for f in dataclasses.fields(value) if f.name not in left_out)
        return type(value), [_plain(getattr(value, name)) for name in fields]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value

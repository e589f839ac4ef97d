"""What changed between two meshes, and whether a push of endpoints alone is enough.

Source of the rules: istio/istio: pilot/pkg/xds/eds.go (EDSUpdate: new service accounts and first endpoints make it a full push).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lab.manifests import model

_NOWHERE = model.Source()

_CONFIG = (
    "namespaces",
    "services",
    "service_entries",
    "sidecars",
    "destination_rules",
    "virtual_services",
    "peer_authentications",
)


@dataclass(frozen=True, slots=True)
class EndpointChanges:
    """Pods, slices and workload entries that came, went or changed their readiness; nothing else did."""

    pods: tuple[model.Pod, ...]  # of both sides
    added: frozenset[str]  # names (POD.NS) of pods that are new
    services: frozenset[tuple[str, str]]  # (namespace, service) of changed slices
    workload_namespaces: frozenset[str]


def _strip(item: Any) -> Any:
    """The object without where it was written: moving lines is no change."""
    return replace(item, meta=replace(item.meta, source=_NOWHERE, order=0))


def _same(old: Sequence[Any], new: Sequence[Any]) -> bool:
    if old is new:
        return True
    return len(old) == len(new) and all(
        a is b or a == b or _strip(a) == _strip(b) for a, b in zip(old, new, strict=True)
    )


def _differing(old: Iterable[Any], new: Iterable[Any]) -> list[tuple[Any, Any]]:
    """(old, new) of every object that is not the same on both sides, None where it is missing."""
    before = {i.meta.key: i for i in old}
    after = {i.meta.key: i for i in new}
    out = []
    for key in before.keys() | after.keys():
        a, b = before.get(key), after.get(key)
        if a is not b and (a is None or b is None or (a != b and _strip(a) != _strip(b))):
            out.append((a, b))
    return out


def endpoint_changes(old: model.Mesh, new: model.Mesh) -> EndpointChanges | None:
    """The endpoint changes from ``old`` to ``new``; None if anything else changed that discovery reads."""
    if old.domain_suffix != new.domain_suffix:
        return None
    if old.mesh_config != new.mesh_config and replace(old.mesh_config, source=_NOWHERE) != replace(
        new.mesh_config, source=_NOWHERE
    ):
        return None
    if not all(_same(getattr(old, kind), getattr(new, kind)) for kind in _CONFIG):
        return None
    pods: list[model.Pod] = []
    added: set[str] = set()
    for a, b in _differing(old.pods, new.pods):
        if a is not None and b is not None and _strip(replace(a, ready=b.ready)) != _strip(b):
            return None  # labels, ports or addresses of a pod also decide what its own proxy gets
        pods.extend(p for p in (a, b) if p is not None)
        if a is None:
            added.add(b.name)
    slices = frozenset(
        (s.meta.namespace, s.service)
        for pair in _differing(old.endpoint_slices, new.endpoint_slices)
        for s in pair
        if s is not None
    )
    workloads = frozenset(
        w.meta.namespace
        for pair in _differing(old.workload_entries, new.workload_entries)
        for w in pair
        if w is not None
    )
    return EndpointChanges(tuple(pods), frozenset(added), slices, workloads)

"""Doubts that are not about references: objects that undo each other, parts that are never used, what is easily forgotten.

Each is one of ``istioctl analyze``; its code is given (istio/istio: pkg/config/analysis/msg/messages.yaml).
"""

from __future__ import annotations

from collections.abc import Iterator

from lab.manifests.analysis import (
    deployments,
    destination_rules,
    injection,
    istio_annotations,
    service_entries,
    services,
    validation,
    virtual_services,
)
from lab.manifests.analysis.finding import Finding, full_name
from lab.manifests.item import Items
from lab.manifests.model import Mesh


def findings(mesh: Mesh, items: Items) -> Iterator[Finding]:
    """All of them, by kind, each in the order of the manifests."""
    yield from injection.findings(mesh, items)
    yield from istio_annotations.findings(mesh, items)
    yield from deployments.findings(mesh, items)
    yield from services.findings(mesh)
    yield from service_entries.findings(mesh)
    yield from destination_rules.findings(mesh)
    yield from virtual_services.findings(mesh)
    yield from validation.findings(mesh, items)


__all__ = ["Finding", "findings", "full_name"]

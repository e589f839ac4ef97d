"""Doubts about Deployments whose pods several ports of Services lead to.

Source: istio/istio: pkg/config/analysis/analyzers/deployment/services.go.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from lab.manifests import injection
from lab.manifests.analysis.finding import Finding, selects
from lab.manifests.item import Item, Items
from lab.manifests.model import Mesh, Service

if TYPE_CHECKING:
    from lab.manifests.schema import deployment


def findings(mesh: Mesh, items: Items) -> Iterator[Finding]:
    labels = {namespace.meta.name: namespace.meta.labels for namespace in mesh.namespaces}
    by_namespace: dict[str, list[Service]] = defaultdict(list)
    for service in mesh.services:
        if service.selector:
            by_namespace[service.meta.namespace].append(service)
    for (kind, _), item in items.items():
        if kind != "Deployment" or not injection.decided(item, labels.get(item.meta.namespace, {})):
            continue
        template = cast("deployment.Deployment", item.schema).spec.template.metadata
        services = [
            service for service in by_namespace[item.meta.namespace] if selects(service.selector, template.labels)
        ]
        yield from _transports(item, services)
        yield from _targets(item, services)


def _transports(item: Item, services: list[Service]) -> Iterator[Finding]:
    """IST0116: one port number, several transport protocols."""
    by_port: dict[int, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for service in services:
        for port in service.ports:
            by_port[port.port][port.transport].append(service.meta.name)
    for number, found in by_port.items():
        if len(found) > 1:
            names = sorted({name for same in found.values() for name in same})
            message = f"Services lead to it on port {number} by {' and '.join(sorted(found))}: {', '.join(names)}"
            yield Finding("IST0116", item.kind, item.meta, ("metadata", "name"), message)


def _targets(item: Item, services: list[Service]) -> Iterator[Finding]:
    """IST0137: one target port, several ports of Services: the proxy takes one of them for what arrives there."""
    by_target: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for service in services:
        for port in service.ports:
            by_target[str(port.target)][port.port].append(service.meta.name)
    for target, found in by_target.items():
        if len(found) > 1:
            names = sorted({name for same in found.values() for name in same})
            ports = ", ".join(map(str, sorted(found)))
            message = f"Services lead to its port {target} from different ports ({ports}): {', '.join(names)}"
            yield Finding("IST0137", item.kind, item.meta, ("metadata", "name"), message)

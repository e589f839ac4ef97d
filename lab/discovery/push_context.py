"""PushContext: every index that one push is computed from. Frozen input, lazily filled memo tables.

Source: istio/istio: pilot/pkg/model/push_context.go.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping
from typing import Any

from lab.discovery import destination_rule, sidecar_scope, virtual_service
from lab.discovery.changes import endpoint_changes
from lab.discovery.node import Node
from lab.discovery.peer_authentication import PeerAuthentications
from lab.discovery.registry import KUBERNETES, Registry, Service
from lab.manifests import model


class PushContext:
    """Indexes over one mesh.

    ``memo`` keeps generated resources that several proxies share, ``assignments`` the ClusterLoadAssignments among them,
    ``encoded`` their serialised form (by identity of the message, which the other tables keep alive). ``added_pods`` are
    pods (POD.NS) that the last endpoint change brought.
    """

    def __init__(self, mesh: model.Mesh) -> None:
        self.mesh = mesh
        self.mesh_config = mesh.mesh_config
        self.registry = Registry(mesh)
        self.memo: dict[Hashable, Any] = {}
        self.assignments: dict[Hashable, Any] = {}
        self.encoded: dict[int, Any] = {}
        self.added_pods: frozenset[str] = frozenset()
        self.status: dict[str, dict[str, str]] = {}
        config, reads = self.mesh_config, self.registry.reads
        root = config.root_namespace
        parsed = [
            virtual_service.parse(raw, config.default_virtual_service_export_to, mesh.domain_suffix)
            for raw in mesh.virtual_services
            if reads(raw.meta.namespace)
        ]
        parsed.sort(key=virtual_service.sort_key)
        self.virtual_services = [vs for vs in virtual_service.merge_delegates(parsed) if vs.for_mesh]
        rules = [
            destination_rule.parse(raw, mesh.domain_suffix)
            for raw in mesh.destination_rules
            if reads(raw.meta.namespace)
        ]
        self.destination_rules = destination_rule.Index(rules, config.default_destination_rule_export_to, root)
        self.label_sensitive = any(r.selector is not None for r in rules) or any(
            m.get("sourceLabels")
            for vs in self.virtual_services
            for route in (*vs.http, *vs.tls, *vs.tcp)
            for m in route.get("match") or ()
        )
        self.peer_authentications = PeerAuthentications(
            (p for p in mesh.peer_authentications if reads(p.meta.namespace)), root
        )
        self._sidecars: dict[str, list[model.Sidecar]] = {}
        ordered = sorted(
            (s for s in mesh.sidecars if reads(s.meta.namespace)),
            key=lambda s: (s.workload_selector is None, s.meta.created, s.meta.name, s.meta.order),
        )
        for sidecar in ordered:
            self._sidecars.setdefault(sidecar.meta.namespace, []).append(sidecar)
        self._root_sidecar = next((s for s in self._sidecars.get(root, ()) if s.workload_selector is None), None)
        self._public = [s for s in self.registry.services if s.export_to is None]
        self._restricted = [s for s in self.registry.services if s.export_to]
        self._exported: dict[str, list[Service]] = {}
        self._scopes: dict[tuple[str, str], sidecar_scope.SidecarScope] = {}

    def add_metric(self, metric: str, key: str, message: str) -> None:
        """Notes something that was dropped or overridden while generating, under istiod's metric name."""
        self.status.setdefault(metric, {})[key] = message

    def advance(self, mesh: model.Mesh) -> tuple[PushContext, frozenset[str] | None]:
        """The context of a changed mesh, and the hosts whose endpoints alone changed; None stands for a full push."""
        changes = endpoint_changes(self.mesh, mesh)
        found = self.registry.with_endpoints(mesh, changes) if changes is not None else None
        if changes is None or found is None:
            return PushContext(mesh), None
        registry, services = found
        hosts = frozenset(s.host for s in services)
        fresh = copy.copy(self)
        fresh.mesh, fresh.registry, fresh.added_pods = mesh, registry, changes.added
        fresh.memo, fresh.encoded = dict(self.memo), dict(self.encoded)
        fresh.assignments = {}
        for key, message in self.assignments.items():
            if message.cluster_name.rpartition("|")[2] in hosts:
                fresh.encoded.pop(id(message), None)
            else:
                fresh.assignments[key] = message
        return fresh, hosts

    def services_exported_to(self, namespace: str) -> list[Service]:
        """Services that exportTo lets ``namespace`` see: private and explicitly exported ones, then the public ones."""
        found = self._exported.get(namespace)
        if found is None:
            found = [s for s in self._restricted if s.visible_to(namespace)] + self._public
            self._exported[namespace] = found
        return found

    def virtual_services_for(self, namespace: str) -> list[virtual_service.VirtualService]:
        """Visible VirtualServices: private of the namespace, exported to it, public; each part oldest first."""

        def rank(vs: virtual_service.VirtualService) -> int:
            if vs.export_to is None:
                return 2
            return 0 if vs.namespace == namespace else 1

        visible = [vs for vs in self.virtual_services if vs.export_to is None or namespace in vs.export_to]
        return sorted(visible, key=rank)

    def best_service(self, host: str, namespace: str) -> Service | None:
        """The service that a name in a VirtualService means: own namespace, else a Kubernetes one, else the oldest."""
        candidates = self.registry.by_host.get(host, {})
        if namespace in candidates:
            return candidates[namespace]
        visible = [s for s in candidates.values() if s.visible_to(namespace)]
        return min(visible, key=lambda s: (s.registry != KUBERNETES, s.created), default=None)

    def labels_of(self, node: Node) -> Mapping[str, str]:
        """Workload labels: what the registry knows wins over what the node says."""
        pod = self.registry.pod_of(node)
        return pod.meta.labels if pod is not None else node.labels

    def scope_for(self, node: Node) -> sidecar_scope.SidecarScope:
        """The SidecarScope of a proxy: first a Sidecar of its namespace with a matching selector, then one without,
        then the root namespace's, then the built-in default."""
        labels = self.labels_of(node)
        chosen: model.Sidecar | None = None
        for sidecar in self._sidecars.get(node.namespace, ()):
            selector = sidecar.workload_selector
            if selector is None or all(labels.get(k) == v for k, v in selector.items()):
                chosen = sidecar
                break
        else:
            chosen = self._root_sidecar
        key = (node.namespace, chosen.meta.key if chosen else "")
        scope = self._scopes.get(key)
        if scope is None:
            scope = self._scopes[key] = sidecar_scope.build(self, node.namespace, chosen)
        return scope

"""A proxy as the generators see it: its node, its scope, and the push it is computed for."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from lab.discovery.destination_rule import DestinationRule
from lab.discovery.node import Node
from lab.discovery.push_context import PushContext
from lab.discovery.registry import Service, ServiceTarget
from lab.discovery.sidecar_scope import SidecarScope
from lab.manifests import model

T = TypeVar("T")


@dataclass(frozen=True)
class Proxy:
    node: Node
    push: PushContext
    scope: SidecarScope
    labels: Mapping[str, str]

    @cached_property
    def targets(self) -> tuple[ServiceTarget, ...]:
        """Service ports that the proxy's own workload serves; asked for by what is generated for inbound alone."""
        return self.push.registry.service_targets(self.node)

    @property
    def mesh_config(self) -> model.MeshConfig:
        return self.push.mesh_config

    @property
    def key(self) -> Hashable:
        """Two proxies with equal keys have the same outbound resources."""
        node = self.node
        return (
            id(self.scope),
            node.families,
            node.dns_capture,
            node.text("DNS_PROXY_ADDR"),
            node.interception_mode,
            node.http10,
            node.evidence,
            node.text("IDLE_TIMEOUT"),
            node.text("HTTP_PROXY_PORT"),
            node.text("UNPRIVILEGED_POD"),
            node.domain,
            node.locality,
            node.cluster_id,
            tuple(sorted(self.labels.items())) if self.push.label_sensitive else None,
        )

    def destination_rule(self, host: str) -> DestinationRule | None:
        """The DestinationRule that governs this proxy's traffic to ``host``."""
        return self.scope.destination_rule(host, self.labels)

    def shared(
        self, name: Hashable, service: Service, build: Callable[[], T], table: dict[Hashable, T] | None = None
    ) -> T:
        """``build()``, once per push for all proxies that agree on the service, its rule and their own place.

        Most of what is generated for a service does not depend on the scope that imports it.
        """
        node = self.node
        if table is None:
            table = self.push.memo
        rule = self.destination_rule(service.host)
        place = (node.families, node.locality, node.cluster_id)
        labels = tuple(sorted(self.labels.items())) if rule is not None and node.locality else None
        full = (name, id(service), id(rule) if rule is not None else 0, place, labels)
        if full not in table:
            table[full] = build()
        return table[full]

    def memo(self, name: Hashable, build: Callable[[], T]) -> T:
        """``build()``, once per push and outbound key."""
        table = self.push.memo
        full = (name, self.key)
        if full not in table:
            table[full] = build()
        found: T = table[full]
        return found


def proxy_for(push: PushContext, node: Node) -> Proxy:
    return Proxy(node, push, push.scope_for(node), push.labels_of(node))

"""DestinationRules: merging, the two indexes, and which rule a proxy gets for a service.

Sources: istio/istio: pilot/pkg/model/destination_rule.go, pilot/pkg/model/push_context.go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lab.discovery import host as hosts
from lab.manifests import model


@dataclass(frozen=True, slots=True)
class DestinationRule:
    """One rule, or several of one host merged. ``traffic_policy`` and ``subsets`` are plain camelCase data."""

    name: str
    namespace: str
    host: str
    traffic_policy: Mapping[str, Any] | None
    subsets: tuple[Mapping[str, Any], ...]
    export_to: frozenset[str]  # as written, "." replaced by the own namespace; "*" is everybody
    selector: Mapping[str, str] | None = None
    created: float = 0.0
    order: int = 0

    def subset(self, name: str) -> Mapping[str, Any] | None:
        return next((s for s in self.subsets if s.get("name") == name), None)

    @property
    def config_path(self) -> str:
        """The name that Istio writes into cluster metadata."""
        return f"/apis/networking.istio.io/v1/namespaces/{self.namespace}/destination-rule/{self.name}"


def parse(raw: model.RawConfig, suffix: str) -> DestinationRule:
    namespace = raw.meta.namespace
    selector = raw.spec.get("workloadSelector")
    labels = selector.get("matchLabels") if isinstance(selector, Mapping) else None
    written = raw.spec.get("exportTo")
    exported = (
        frozenset(namespace if e == "." else str(e) for e in written) if isinstance(written, Sequence) else frozenset()
    )
    policy = raw.spec.get("trafficPolicy")
    subsets = raw.spec.get("subsets")
    return DestinationRule(
        name=raw.meta.name,
        namespace=namespace,
        host=hosts.resolve_short(str(raw.spec.get("host", "")), namespace, suffix),
        traffic_policy=policy if isinstance(policy, Mapping) else None,
        subsets=tuple(s for s in subsets if isinstance(s, Mapping)) if isinstance(subsets, Sequence) else (),
        # a rule with a selector is always private
        export_to=frozenset((namespace,)) if labels is not None else exported,
        selector={str(k): str(v) for k, v in labels.items()} if isinstance(labels, Mapping) else None,
        created=raw.meta.created,
        order=raw.meta.order,
    )


Table = dict[str, list[DestinationRule]]
"""host or wildcard -> its merged rules"""


def _merge(table: Table, rule: DestinationRule) -> None:
    """Adds a rule to a table, into the rules of its host that have the same exportTo and selector.

    The first (oldest) keeps its trafficPolicy, subsets are concatenated, a second subset of one name is dropped.
    A wider exportTo is merged into the narrower one and kept apart as well.
    """
    held = table.setdefault(rule.host, [])
    apart = True
    for index, known in enumerate(held):
        if rule.export_to != known.export_to and not (known.export_to and rule.export_to > known.export_to):
            continue
        if known.selector != rule.selector:
            continue
        names = {s.get("name") for s in known.subsets}
        held[index] = replace(
            known,
            subsets=known.subsets + tuple(s for s in rule.subsets if s.get("name") not in names),
            traffic_policy=known.traffic_policy if known.traffic_policy is not None else rule.traffic_policy,
        )
        apart = False
    if apart:
        held.append(rule)


class Index:
    """All DestinationRules of a mesh, indexed as Istio's push context does."""

    def __init__(self, rules: Iterable[DestinationRule], default_export: Sequence[str], root: str) -> None:
        self._root = root
        self._local: dict[str, Table] = {}
        self._exported: dict[str, Table] = {}
        self._root_local: Table = {}
        private_default = "." in default_export
        # selector-bearing rules first, each part oldest first
        for rule in sorted(rules, key=lambda r: (r.selector is None, r.created, r.name, r.namespace, r.order)):
            exported = rule.export_to
            if not exported or "*" in exported or rule.namespace in exported:
                _merge(self._local.setdefault(rule.namespace, {}), rule)
            private = exported == {rule.namespace} or (not exported and private_default)
            if private:
                if rule.namespace == root:
                    _merge(self._root_local, rule)
            else:
                _merge(self._exported.setdefault(rule.namespace, {}), rule)

    @staticmethod
    def _best(table: Table | None, host: str) -> list[DestinationRule]:
        if not table:
            return []
        found = host if host in table else hosts.most_specific(host, table)
        return table[found] if found is not None else []

    def _visible(self, owner: str, host: str, client: str) -> list[DestinationRule]:
        # visibility is asked after the choice: a hidden exact rule also hides the wildcard behind it
        rules = self._best(self._exported.get(owner), host)
        return [r for r in rules if not r.export_to or "*" in r.export_to or client in r.export_to]

    def lookup(self, client: str, host: str, service_namespace: str) -> list[DestinationRule]:
        """Rules for ``host`` as seen from namespace ``client``: client's own, the service's, the root's; first hit wins."""
        own = self._root_local if client == self._root else self._local.get(client)
        found = self._best(own, host)
        if not found and service_namespace:
            found = self._visible(service_namespace, host, client)
        return found or self._visible(self._root, host, client)


def select(
    rules: Sequence[DestinationRule], namespace: str, labels: Mapping[str, str], outbound: bool = True
) -> DestinationRule | None:
    """The one rule for a workload: a matching selector (outbound, own namespace) beats the selector-less rule."""
    fallback = None
    for rule in rules:
        if rule.selector is None:
            fallback = rule
        elif outbound and rule.namespace == namespace and all(labels.get(k) == v for k, v in rule.selector.items()):
            return rule
    return fallback

"""Locality-aware load balancing: failover priorities, failoverPriority labels, distribute weights.

Source: istio/istio: pilot/pkg/networking/core/loadbalancer/loadbalancer.go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envoy.config.endpoint.v3 import endpoint_components_pb2

from lab.discovery import protoconv, traffic_policy
from lab.discovery.proxy import Proxy
from lab.discovery.registry import Endpoint, Service


@dataclass(slots=True)
class Group:
    """One locality: its label, its message, and the endpoints in it, in the message's order."""

    label: str
    message: Any
    endpoints: list[Endpoint]


def parts(label: str) -> tuple[str, str, str]:
    region, zone, subzone = [*label.split("/"), "", "", ""][:3]
    return region, zone, subzone


def apply(proxy: Proxy, service: Service, groups: Sequence[Group], policy: traffic_policy.Policy) -> list[Any]:
    """The groups' messages with priorities or weights set as the settings ask; unchanged if locality plays no part."""
    settings = policy.locality_settings(proxy, service)
    if settings is None or not groups:
        return [g.message for g in groups]
    if settings.get("distribute"):
        return _distribute(proxy, groups, settings["distribute"])
    wanted = settings.get("failoverPriority")
    if not policy.outlier_detection and not service.traffic_distribution:
        return [g.message for g in groups]
    if wanted:
        return _failover_priority(proxy, groups, [str(w) for w in wanted])
    if not proxy.node.locality:
        return [g.message for g in groups]
    return _failover(proxy, groups, settings.get("failover") or ())


def _compact(numbers: Sequence[int]) -> dict[int, int]:
    """Priorities must be consecutive from 0."""
    return {value: index for index, value in enumerate(sorted(set(numbers)))}


def _failover(proxy: Proxy, groups: Sequence[Group], failover: Sequence[Mapping[str, Any]]) -> list[Any]:
    region, zone, subzone = parts(proxy.node.locality)
    target = next((str(f.get("to", "")) for f in failover if str(f.get("from", "")) == region), None)
    found = []
    for group in groups:
        own = parts(group.label)
        if own == (region, zone, subzone):
            priority = 0
        elif own[:2] == (region, zone):
            priority = 1
        elif own[0] == region:
            priority = 2
        elif target is None or own[0] == target:
            priority = 3
        else:
            priority = 4
        found.append(priority)
    compact = _compact(found)
    for group, priority in zip(groups, found, strict=True):
        group.message.priority = compact[priority]
    return [g.message for g in groups]


def _failover_priority(proxy: Proxy, groups: Sequence[Group], keys: Sequence[str]) -> list[Any]:
    """Priority by the number of leading labels that an endpoint shares with the proxy, or has as ``key=value``."""
    wanted = []
    for written in keys:
        name, separator, value = written.partition("=")
        wanted.append((name, value if separator else proxy.labels.get(name, proxy_label(proxy, name))))

    def rank(endpoint: Endpoint) -> int:
        for index, (name, value) in enumerate(wanted):
            if endpoint.labels.get(name, "") != value:
                return len(wanted) - index
        return 0

    split: dict[tuple[int, str], Any] = {}
    for group in groups:
        for endpoint, message in zip(group.endpoints, group.message.lb_endpoints, strict=True):
            key = (rank(endpoint), group.label)
            if key not in split:
                split[key] = endpoint_components_pb2.LocalityLbEndpoints(locality=group.message.locality)
            split[key].lb_endpoints.append(message)
    compact = _compact([priority for priority, _ in split])
    out = []
    for (priority, _), message in sorted(split.items(), key=lambda item: item[0]):
        message.priority = compact[priority]
        weight = sum(e.load_balancing_weight.value for e in message.lb_endpoints)
        message.load_balancing_weight.CopyFrom(protoconv.uint32(weight))
        out.append(message)
    return out


def proxy_label(proxy: Proxy, name: str) -> str:
    """Topology labels of the proxy, which its pod's labels do not hold."""
    region, zone, subzone = parts(proxy.node.locality)
    return {
        "topology.kubernetes.io/region": region,
        "topology.kubernetes.io/zone": zone,
        "topology.istio.io/subzone": subzone,
        "topology.istio.io/cluster": proxy.node.cluster_id,
    }.get(name, "")


def _matches(pattern: str, label: str) -> bool:
    """``region/zone/*`` patterns of distribute."""
    if pattern == "*":
        return True
    wanted, own = pattern.split("/"), label.split("/")
    for index, part in enumerate(wanted):
        if part == "*":
            return True
        if index >= len(own) or own[index] != part:
            return False
    return True


def _distribute(proxy: Proxy, groups: Sequence[Group], rules: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Weights per locality from percentages; a locality that gets nothing is left out."""
    rule = next((r for r in rules if _matches(str(r.get("from", "")), proxy.node.locality)), None)
    if rule is None:
        return [g.message for g in groups]
    left = list(groups)
    out: list[Any] = []
    to: Mapping[str, Any] = rule.get("to") or {}
    for pattern in sorted(to, key=lambda p: -len(p)):
        members = [g for g in left if _matches(pattern, g.label)]
        total = sum(len(g.endpoints) for g in members)
        for group in members:
            left.remove(group)
            share = max(1, round(int(to[pattern]) * len(group.endpoints) / total)) if total else 0
            group.message.load_balancing_weight.CopyFrom(protoconv.uint32(share))
            out.append(group.message)
    return sorted(out, key=lambda m: (m.locality.region, m.locality.zone, m.locality.sub_zone))

"""The part of a DestinationRule (or Sidecar) that applies to one cluster, and how it is written into the cluster.

Sources: istio/istio: pilot/pkg/networking/core/cluster_traffic_policy.go, pilot/pkg/networking/util/util.go.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lab.discovery.proxy import Proxy
from lab.discovery.registry import Port, Service

_BLOCKS = ("connectionPool", "outlierDetection", "loadBalancer", "tls")
_OVERLAID = ("tunnel", "proxyProtocol", "retryBudget")


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


@dataclass(frozen=True, slots=True)
class Policy:
    """Effective blocks for one service port and subset; a block that nobody wrote is None."""

    connection_pool: Mapping[str, Any] | None = None
    outlier_detection: Mapping[str, Any] | None = None
    load_balancer: Mapping[str, Any] | None = None
    tls: Mapping[str, Any] | None = None
    retry_budget: Mapping[str, Any] | None = None
    proxy_protocol: Mapping[str, Any] | None = None
    config_path: str = ""
    has_selector: bool = False

    @property
    def tls_mode(self) -> str:
        return str(_mapping(self.tls).get("mode") or "DISABLE")

    def sends_unhealthy(self, service: Service) -> bool:
        """Unready endpoints are sent (and never picked: panic threshold 0) unless minHealthPercent asks otherwise."""
        if service.traffic_distribution:
            return True
        return float(_mapping(self.outlier_detection).get("minHealthPercent") or 0) <= 0

    def locality_settings(self, proxy: Proxy, service: Service) -> Mapping[str, Any] | None:
        """localityLbSetting of the rule, else of the service's trafficDistribution, else the mesh's; None if off."""
        written = _mapping(self.load_balancer).get("localityLbSetting")
        if isinstance(written, Mapping):
            return None if written.get("enabled") is False else written
        if service.traffic_distribution:
            keys = [
                "topology.istio.io/network",
                "topology.kubernetes.io/region",
                "topology.kubernetes.io/zone",
                "topology.istio.io/subzone",
            ]
            if service.traffic_distribution == "PreferSameZone":
                keys = keys[:3]
            elif service.traffic_distribution == "PreferSameNode":
                keys.append("kubernetes.io/hostname")
            return {"failoverPriority": keys}
        if not proxy.mesh_config.locality_lb_enabled:
            return None
        return _mapping(proxy.mesh_config.raw.get("localityLbSetting"))


def _overlay(base: dict[str, Any], over: Mapping[str, Any], port_level: bool) -> None:
    """A subset's blocks replace block by block; a port's replace all, unset ones too."""
    for key in _BLOCKS:
        if port_level or over.get(key) is not None:
            base[key] = over.get(key)
    for key in _OVERLAID:
        if over.get(key) is not None:
            base[key] = over[key]


def _port_settings(policy: Mapping[str, Any], port: int) -> Mapping[str, Any] | None:
    for setting in policy.get("portLevelSettings") or ():
        if int(_mapping(_mapping(setting).get("port")).get("number") or 0) == port:
            return _mapping(setting)
    return None


def mesh_default(proxy: Proxy) -> Mapping[str, Any]:
    """MeshConfig defaultTrafficPolicy: a connectionPool and an outlierDetection for where no rule has one."""
    return _mapping(proxy.mesh_config.raw.get("defaultTrafficPolicy"))


def _effective(
    policy: Mapping[str, Any], subset_policy: Mapping[str, Any] | None, port: int, mesh: Mapping[str, Any]
) -> dict[str, Any]:
    """The mesh's defaults stand below the rule and its port's settings, but a subset's port settings replace them, too."""
    blocks: dict[str, Any] = {}
    _overlay(blocks, policy, port_level=False)
    own = _port_settings(policy, port)
    if own is not None:
        _overlay(blocks, own, port_level=True)
    for key in ("connectionPool", "outlierDetection"):
        if blocks.get(key) is None:
            blocks[key] = mesh.get(key)
    if subset_policy:
        _overlay(blocks, subset_policy, port_level=False)
        own = _port_settings(subset_policy, port)
        if own is not None:
            _overlay(blocks, own, port_level=True)
    return blocks


def for_cluster(proxy: Proxy, service: Service, port: Port, subset: str, *, outbound: bool = True) -> Policy:
    """What the proxy's DestinationRule for the service, and below it the mesh, say about one port and subset."""
    rule = proxy.scope.destination_rule(service.host, proxy.labels, outbound)
    chosen = rule.subset(subset) if rule is not None and subset else None
    over = _mapping(chosen.get("trafficPolicy")) if chosen is not None else None
    written = _mapping(rule.traffic_policy) if rule is not None else {}
    blocks = _effective(written, over, port.port, mesh_default(proxy))

    def block(key: str) -> Mapping[str, Any] | None:
        value = blocks.get(key)
        return value if isinstance(value, Mapping) else None

    return Policy(
        connection_pool=block("connectionPool"),
        outlier_detection=block("outlierDetection"),
        load_balancer=block("loadBalancer"),
        tls=block("tls"),
        retry_budget=block("retryBudget"),
        proxy_protocol=block("proxyProtocol"),
        config_path=rule.config_path if rule is not None else "",
        has_selector=rule is not None and rule.selector is not None,
    )

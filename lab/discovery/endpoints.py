"""EDS: ClusterLoadAssignments, and the endpoints inlined into DNS clusters.

Sources: istio/istio: pilot/pkg/xds/endpoints/endpoint_builder.go, mtls_checker.go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from envoy.config.core.v3 import base_pb2
from envoy.config.endpoint.v3 import endpoint_components_pb2, endpoint_pb2

from lab.discovery import locality, protoconv, traffic_policy
from lab.discovery.proxy import Proxy
from lab.discovery.registry import Endpoint, Port, Service

ISTIO_TLS = "istio"


def subset_labels(proxy: Proxy, host: str, subset: str) -> Mapping[str, str] | None:
    """Labels that a subset selects on; None if no rule defines the subset."""
    rule = proxy.destination_rule(host)
    found = rule.subset(subset) if rule else None
    if found is None:
        return None
    labels = found.get("labels")
    return {str(k): str(v) for k, v in labels.items()} if isinstance(labels, Mapping) else {}


@cache
def _meshed() -> Any:
    return protoconv.struct({"tlsMode": ISTIO_TLS})


def _uses_mtls(proxy: Proxy, endpoint: Endpoint, policy: traffic_policy.Policy) -> bool:
    """Whether traffic to this very endpoint is to be mTLS (workload and port policies included)."""
    if policy.tls is not None:
        return policy.tls_mode == "ISTIO_MUTUAL"
    if endpoint.tls_mode != ISTIO_TLS:
        return False
    effective = proxy.push.peer_authentications.effective(endpoint.namespace, endpoint.labels)
    return effective.for_port(endpoint.port) != "DISABLE"


def lb_endpoint(proxy: Proxy, endpoint: Endpoint, policy: traffic_policy.Policy) -> Any:
    filters: dict[str, Any] = {}
    if _uses_mtls(proxy, endpoint, policy):
        filters["envoy.transport_socket_match"] = _meshed()
    if endpoint.workload:
        parts = (endpoint.workload, endpoint.namespace, endpoint.canonical, endpoint.revision, proxy.node.cluster_id)
        filters["istio"] = protoconv.struct({"workload": ";".join(parts)})
    return endpoint_components_pb2.LbEndpoint(
        endpoint=endpoint_components_pb2.Endpoint(
            address=protoconv.socket_address(endpoint.address, endpoint.port),
            additional_addresses=[
                endpoint_components_pb2.Endpoint.AdditionalAddress(address=protoconv.socket_address(a, endpoint.port))
                for a in endpoint.addresses[1:]
            ],
        ),
        health_status=endpoint.health,
        load_balancing_weight=protoconv.uint32(endpoint.weight or 1),
        metadata=base_pb2.Metadata(filter_metadata=filters) if filters else None,
    )


def _for_proxy(proxy: Proxy, endpoint: Endpoint) -> Endpoint | None:
    """The endpoint with the addresses this proxy can reach, None without any."""
    if len(endpoint.addresses) == 1:
        return endpoint if not endpoint.is_ip or proxy.node.supports(endpoint.address) else None
    usable = tuple(a for a in endpoint.addresses if proxy.node.supports(a))
    if not usable:
        return None
    return endpoint if usable == endpoint.addresses else replace(endpoint, addresses=usable)


def locality_endpoints(
    proxy: Proxy, service: Service, endpoints: Iterable[Endpoint], policy: traffic_policy.Policy
) -> list[Any]:
    """LocalityLbEndpoints, one per locality label, sorted by it."""
    groups: dict[str, list[tuple[Endpoint, Any]]] = {}
    for endpoint in endpoints:
        usable = _for_proxy(proxy, endpoint)
        if usable is not None:
            groups.setdefault(usable.locality, []).append((usable, lb_endpoint(proxy, usable, policy)))
    out = []
    for label in sorted(groups):
        region, zone, subzone = locality.parts(label)
        members = groups[label]
        out.append(
            locality.Group(
                label,
                endpoint_components_pb2.LocalityLbEndpoints(
                    locality=base_pb2.Locality(region=region, zone=zone, sub_zone=subzone),
                    lb_endpoints=[message for _, message in members],
                    load_balancing_weight=protoconv.uint32(sum(e.weight or 1 for e, _ in members)),
                ),
                [e for e, _ in members],
            )
        )
    return locality.apply(proxy, service, out, policy)


def select(proxy: Proxy, service: Service, port: Port, subset: str, policy: traffic_policy.Policy) -> list[Endpoint]:
    """Endpoints of a service port and subset: matched by the port's name, of known health, with the subset's labels."""
    labels: Mapping[str, str] = {}
    if subset:
        wanted = subset_labels(proxy, service.host, subset)
        if wanted is None:
            return []
        labels = wanted
    out = []
    for endpoint in proxy.push.registry.port_endpoints(service, port):
        if any(endpoint.labels.get(k) != v for k, v in labels.items()):
            continue
        if endpoint.health == "UNHEALTHY" and not policy.sends_unhealthy(service):
            continue
        out.append(endpoint)
    return out


def load_assignment(proxy: Proxy, name: str) -> Any:
    """The ClusterLoadAssignment of one EDS cluster; an unknown name gives an empty one, never silence."""
    parsed = protoconv.parse_cluster_name(name)
    service = proxy.scope.by_host.get(parsed[3]) if parsed and parsed[0] == "outbound" else None
    port = service.port_by_number(parsed[1]) if service and parsed else None
    if service is None or port is None or service.resolution != "ClientSideLB" or parsed is None:
        return proxy.memo(("unknown", name), lambda: endpoint_pb2.ClusterLoadAssignment(cluster_name=name))
    found, subset = service, parsed[2]
    return proxy.shared(name, found, lambda: _build(proxy, name, found, port, subset), proxy.push.assignments)


def _build(proxy: Proxy, name: str, service: Service, port: Port, subset: str) -> Any:
    out = endpoint_pb2.ClusterLoadAssignment(cluster_name=name)
    policy = traffic_policy.for_cluster(proxy, service, port, subset)
    chosen = [e for e in select(proxy, service, port, subset, policy) if e.is_ip or e.address.startswith("unix://")]
    out.endpoints.extend(locality_endpoints(proxy, service, chosen, policy))
    return out

"""Where outbound traffic goes that no listener, chain or virtual host knows.

Sources: istio/istio: pilot/pkg/networking/core/listener_builder.go, httproute.go (buildCatchAllVirtualHost).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from envoy.config.route.v3 import route_components_pb2, route_pb2

from lab.discovery import filters, protoconv
from lab.discovery.proxy import Proxy


def cluster_of(proxy: Proxy) -> str:
    """The cluster of connections, and of HTTP requests that are not looked up by name."""
    policy = proxy.scope.outbound_traffic_policy
    if policy.mode == "REGISTRY_ONLY":
        return protoconv.BLACK_HOLE_CLUSTER
    if policy.egress_proxy is not None:
        host, port, subset = policy.egress_proxy
        return protoconv.cluster_name("outbound", port, subset, host)
    return protoconv.PASSTHROUGH_CLUSTER


def virtual_host(proxy: Proxy) -> Any:
    """What takes a Host that no service has: allow_any, allow_any_dynamic_dns, or block_all with a 502 of its own."""
    match = route_components_pb2.RouteMatch(prefix="/")
    if proxy.scope.outbound_traffic_policy.mode == "REGISTRY_ONLY":
        route = route_components_pb2.Route(
            name="block_all",
            match=match,
            direct_response=route_components_pb2.DirectResponseAction(status=502),
        )
    else:
        by_name = filters.allows_any_by_name(proxy)
        route = route_components_pb2.Route(
            name="allow_any_dynamic_dns" if by_name else "allow_any",
            match=match,
            route=route_components_pb2.RouteAction(
                cluster=protoconv.ALLOW_ANY_DYNAMIC_DNS_CLUSTER if by_name else cluster_of(proxy),
                timeout=protoconv.duration(0),
                max_grpc_timeout=protoconv.duration(0),
            ),
        )
    return route_components_pb2.VirtualHost(
        name=route.name, domains=["*"], routes=[route], include_request_attempt_count=True
    )


def route_configuration(name: str, virtual_hosts: Sequence[Any]) -> Any:
    """An outbound RouteConfiguration with what all of them have."""
    return route_pb2.RouteConfiguration(
        name=name,
        virtual_hosts=virtual_hosts,
        validate_clusters=protoconv.boolean(False),
        ignore_port_in_host_matching=True,
        max_direct_response_body_size_bytes=protoconv.uint32(1048576),
    )

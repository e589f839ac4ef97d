"""Which cluster a destination of a VirtualService route means (istio/istio: pilot/pkg/networking/core/route/route.go)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lab.discovery import protoconv
from lab.discovery.proxy import Proxy
from lab.discovery.registry import Service


def service_of(proxy: Proxy, destination: Mapping[str, Any]) -> Service | None:
    """The service in the proxy's scope that a destination names; it may be an ExternalName."""
    return proxy.scope.by_host.get(str(destination.get("host", "")))


def _http_service_of(proxy: Proxy, destination: Mapping[str, Any], listener_port: int) -> Service | None:
    """Likewise, for a route of HTTP: of what its egress listener imports, with that port (httproute.go)."""
    listener = proxy.scope.listener_for_route(listener_port) if listener_port else None
    if listener is None:
        return service_of(proxy, destination)
    host = str(destination.get("host", ""))
    found = [s for s in listener.services if s.host == host and s.port_by_number(listener_port) is not None]
    return found[-1] if found else None


def port_of(destination: Mapping[str, Any], service: Service | None, listener_port: int) -> int:
    """The destination's own port, else the service's only port, else the listener's."""
    port = destination.get("port")
    number = int(port.get("number") or 0) if isinstance(port, Mapping) else 0
    if number:
        return number
    if service is not None and len(service.ports) == 1:
        return service.ports[0].port
    return listener_port


def http_cluster_of(proxy: Proxy, destination: Mapping[str, Any], listener_port: int) -> str:
    """As :func:`cluster_of`, for a route of HTTP.

    A route configuration of one port knows of each service that port alone, so a destination without a port is of the
    listener's port, whatever its service's only port is (httproute.go: BuildSidecarOutboundVirtualHosts).
    """
    if listener_port and not port_of(destination, None, 0):
        destination = {**destination, "port": {"number": listener_port}}
    return _named(destination, _http_service_of(proxy, destination, listener_port), listener_port)


def cluster_of(proxy: Proxy, destination: Mapping[str, Any], listener_port: int) -> str:
    """The cluster's name; an unknown host, port or subset still gives one (503 NC at run time)."""
    return _named(destination, service_of(proxy, destination), listener_port)


def _named(destination: Mapping[str, Any], service: Service | None, listener_port: int) -> str:
    """An ExternalName stands for what it names, if that is no ExternalName too (route.go: GetDestinationCluster)."""
    host = service.alias_of if service is not None and service.alias_of else str(destination.get("host", ""))
    port = port_of(destination, service, listener_port)
    return protoconv.cluster_name("outbound", port, str(destination.get("subset") or ""), host)


def static_match(match: Mapping[str, Any], proxy: Proxy, port: int, *, gateways_replace_source: bool = False) -> bool:
    """The parts of a match that are decided at generation: gateways, sourceLabels, sourceNamespace, port.

    In HTTP routes a match that names gateways is not asked for its sourceLabels and sourceNamespace
    (``gateways_replace_source``; route.go: sourceMatchHTTP).
    """
    gateways: Iterable[str] = match.get("gateways") or ()
    if gateways and "mesh" not in gateways:
        return False
    if match.get("port") and int(match["port"]) != port:
        return False
    if gateways and gateways_replace_source:
        return True
    labels: Mapping[str, str] = match.get("sourceLabels") or {}
    if any(proxy.labels.get(k) != v for k, v in labels.items()):
        return False
    return match.get("sourceNamespace") in (None, "", proxy.node.namespace)

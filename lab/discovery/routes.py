"""RDS: route configurations by name, their virtual hosts and domains, and the inline inbound routes.

Sources: istio/istio: pilot/pkg/networking/core/httproute.go, pilot/pkg/networking/core/route/route.go.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from envoy.config.route.v3 import route_components_pb2, route_pb2

from lab.discovery import catch_all, protoconv, route_rules
from lab.discovery import host as hosts
from lab.discovery.proxy import Proxy
from lab.discovery.registry import Port, Service
from lab.discovery.sidecar_scope import EgressListener
from lab.discovery.virtual_service import VirtualService

HTTP_PROXY_ROUTE = "http_proxy"


# --- domains ------------------------------------------------------------------------------------


def _bracket(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def domains_of(service: Service, proxy: Proxy) -> list[str]:
    """Domains of a service's virtual host, without ports, in Istio's order: names and aliases, wildcards, addresses."""
    out: list[str] = []
    for host in (service.host, *(host for host, _ in service.aliases)):
        if host != "*":
            out += [host, *hosts.alternatives(host, proxy.node.domain)]
    if service.headless:
        # a pod of a headless service is asked for as <pod>.<service>
        out += [f"*.{d}" for d in out]
    out += [_bracket(a) for a in service.vips(proxy.node) if "/" not in a]
    return list(dict.fromkeys(out))


# --- virtual hosts --------------------------------------------------------------------------------


@dataclass(slots=True)
class HostInMaking:
    """A virtual host before the claims on domains are settled."""

    name: str
    domains: list[str]
    routes: list[Any]
    service: Service | None


def _http_services(listener: EgressListener, port: int) -> list[tuple[Service, Port]]:
    """Services of an egress listener with an HTTP or sniffed port of that number (0: any port), oldest first.

    Of several services of one host (an entry has one per address) the last counts
    (httproute.go: BuildSidecarOutboundVirtualHosts).
    """
    by_host: dict[str, Service] = {}
    for service in listener.services:
        if service.resolution != "Alias" and (port == 0 or service.port_by_number(port) is not None):
            by_host[service.host] = service
    return [
        (service, candidate)
        for service in by_host.values()
        for candidate in service.ports
        if candidate.listener_class in ("HTTP", "AUTO") and (port == 0 or candidate.port == port)
    ]


def _candidates(proxy: Proxy, listener: EgressListener, port: int) -> list[HostInMaking]:
    """Virtual hosts of one egress listener and port: those from VirtualServices first, then plain services."""
    services = _http_services(listener, port)
    by_host: dict[str, Service] = {}
    ports: dict[str, list[Port]] = {}
    for service, service_port in services:
        by_host.setdefault(service.host, service)
        ports.setdefault(service.host, []).append(service_port)
    out: list[HostInMaking] = []
    governed: set[str] = set()
    for vs in _selected(listener, by_host, port):
        made = route_rules.routes_of(proxy, vs, port)
        if not made:
            continue  # nothing of it is for this proxy and port: services keep their default routes
        matching, foreign = _split_hosts(vs, by_host, listener)
        numbers = sorted({p.port for s in matching for p in ports[s.host]})
        if not numbers and port == 80:
            numbers = [80]
        for number in numbers:
            for name in foreign:
                bare = _bracket(name.lower())
                out.append(HostInMaking(f"{name.lower()}:{number}", [bare], made, None))
            out.extend(
                HostInMaking(f"{service.host}:{number}", domains_of(service, proxy), made, service)
                for service in matching
                if any(p.port == number for p in ports[service.host])
            )
        governed.update(s.host for s in matching)
    for service, service_port in services:
        if service.host not in governed:
            out.append(
                HostInMaking(
                    f"{service.host}:{service_port.port}",
                    domains_of(service, proxy),
                    [_default_route(proxy, service, service_port)],
                    service,
                )
            )
    return out


def _default_route(proxy: Proxy, service: Service, port: Port) -> Any:
    return proxy.shared(("default_route", port.port), service, lambda: route_rules.default_route(proxy, service, port))


def _selected(listener: EgressListener, services: dict[str, Service], port: int) -> list[VirtualService]:
    """VirtualServices of a listener that have a host among the services; on port 80 all of them."""
    if port == 80:
        return list(listener.virtual_services)
    out = []
    for vs in listener.virtual_services:
        for name in vs.hosts:
            if name.lower() in services or any(
                hosts.matches(name.lower(), s) for s in services if hosts.is_wildcard(name) or hosts.is_wildcard(s)
            ):
                out.append(vs)
                break
    return out


def _split_hosts(
    vs: VirtualService, services: dict[str, Service], listener: EgressListener
) -> tuple[list[Service], list[str]]:
    """(services that the VirtualService governs here, its hosts that are no service).

    A wildcard host governs a service only if no other VirtualService of the listener names it more narrowly.
    """
    matching: list[Service] = []
    foreign: list[str] = []
    for name in vs.hosts:
        lower = name.lower()
        if not hosts.is_wildcard(lower):
            if lower in services:
                matching.append(services[lower])
            else:
                foreign.append(name)
            continue
        found = False
        for service_host, service in services.items():
            if hosts.matches(service_host, lower):
                found = True
                if _most_specific(listener, service_host) is vs and service not in matching:
                    matching.append(service)
        if not found:
            foreign.append(name)
    return matching, foreign


def _most_specific(listener: EgressListener, host: str) -> VirtualService | None:
    owners: dict[str, VirtualService] = {}
    for vs in listener.virtual_services:
        for name in vs.hosts:
            owners.setdefault(name, vs)
    best = hosts.most_specific(host, owners)
    return owners[best] if best is not None else None


def _settle(proxy: Proxy, candidates: Sequence[HostInMaking]) -> list[Any]:
    """Virtual hosts without double names and domains: a domain belongs to the first that claims it."""
    fqdns = {c.service.host.lower() for c in candidates if c.service is not None}
    names: set[str] = set()
    claimed: set[str] = set()
    out = []
    for one in candidates:
        if one.name in names:
            proxy.push.add_metric("pilot_vservice_dup_domain", one.name, f"duplicate virtual host: {one.name}")
            continue
        own = one.service.host.lower() if one.service is not None else ""
        kept = []
        for domain in one.domains:
            folded = domain.lower()
            # a short form that is another service's real name does not hide that service
            if folded in claimed or (folded in fqdns and folded != own):
                continue
            claimed.add(folded)
            kept.append(domain)
        if len(kept) < len(set(one.domains)):
            proxy.push.add_metric("pilot_vservice_dup_domain", one.name, f"duplicate domain from {one.name}")
        if not kept:
            continue
        names.add(one.name)
        out.append(
            route_components_pb2.VirtualHost(
                name=one.name, domains=kept, routes=one.routes, include_request_attempt_count=True
            )
        )
    return sorted(out, key=lambda v: v.name)


def _with_ports(candidates: Sequence[HostInMaking]) -> list[HostInMaking]:
    """Domains for a listener that serves every port at once: with the port, and plain for port 80 only."""
    out = []
    for one in candidates:
        port = one.name.rpartition(":")[2]
        with_port = [f"{d}:{port}" for d in one.domains]
        domains = [d for pair in zip(one.domains, with_port, strict=True) for d in pair] if port == "80" else with_port
        out.append(HostInMaking(one.name, domains, one.routes, one.service))
    return out


def route_configuration(proxy: Proxy, name: str) -> Any:
    """The RouteConfiguration called ``name`` for this proxy; an unknown name gives an empty one."""
    return proxy.memo(("route", name), lambda: _build(proxy, name))


def _build(proxy: Proxy, name: str) -> Any:
    scope = proxy.scope
    host, separator, port_text = name.rpartition(":")
    if separator and port_text.isdigit() and not name.startswith("unix://"):
        return _sniffed(proxy, name, host, int(port_text))
    if name.isdigit():
        port, bind = int(name), ""
    elif name == HTTP_PROXY_ROUTE or name.startswith("unix://"):
        port, bind = 0, "" if name == HTTP_PROXY_ROUTE else name
    else:
        return catch_all.route_configuration(name, [])
    if name == HTTP_PROXY_ROUTE:
        listener = next((e for e in scope.egress if e.port is None), None)
    else:
        listener = scope.listener_for_route(port, bind)
    if listener is None:
        return catch_all.route_configuration(name, [])
    every_port = port == 0 or (listener.written is not None and listener.written.port_protocol == "HTTP_PROXY")
    candidates = _candidates(proxy, listener, 0 if every_port else port)
    if every_port:
        candidates = _with_ports(candidates)
    hosts = _settle(proxy, candidates)
    return catch_all.route_configuration(name, [*hosts, catch_all.virtual_host(proxy)])


def _sniffed(proxy: Proxy, name: str, host: str, port: int) -> Any:
    """The route of a sniffed listener that belongs to one service: its virtual host, for every Host, nothing else."""
    listener = proxy.scope.listener_for_route(port)
    if listener is None:
        return catch_all.route_configuration(name, [])
    out = []
    for one in _candidates(proxy, listener, port):
        if one.service is not None and one.service.host == host:
            out.append(
                route_components_pb2.VirtualHost(
                    name=one.name, domains=["*"], routes=one.routes, include_request_attempt_count=True
                )
            )
            break
    return catch_all.route_configuration(name, out)


def route_names(listeners: Iterable[Any]) -> list[str]:
    """Names that the listeners ask for over RDS, in their order."""
    from envoy.extensions.filters.network.http_connection_manager.v3 import http_connection_manager_pb2 as hcm_pb2

    names: dict[str, None] = {}
    for listener in listeners:
        chains = [*listener.filter_chains]
        if listener.HasField("default_filter_chain"):
            chains.append(listener.default_filter_chain)
        for chain in chains:
            for one in chain.filters:
                if one.name == protoconv.HTTP_CONNECTION_MANAGER:
                    manager = hcm_pb2.HttpConnectionManager.FromString(one.typed_config.value)
                    if manager.HasField("rds"):
                        names[manager.rds.route_config_name] = None
    return list(names)


# --- inbound ----------------------------------------------------------------------------------------


def inbound_route_config(proxy: Proxy, port: Port, cluster: str, host: str) -> Any:
    """The inline route of an inbound HTTP chain: one virtual host, one route to the workload."""
    action = route_components_pb2.RouteAction(
        cluster=cluster,
        timeout=protoconv.duration(0),
        max_stream_duration=route_components_pb2.RouteAction.MaxStreamDuration(
            max_stream_duration=protoconv.duration(0), grpc_timeout_header_max=protoconv.duration(0)
        ),
    )
    if port.protocol != "GRPC":
        default = route_rules.mesh_default(proxy, "defaultInboundHttpRetryPolicy")
        retries = route_rules.inbound_retry_policy(default)
        if retries is not None:
            action.retry_policy.CopyFrom(retries)
    route = route_components_pb2.Route(
        name="default",
        match=route_components_pb2.RouteMatch(prefix="/"),
        route=action,
        decorator=route_components_pb2.Decorator(operation=f"{host}:{port.port}/*"),
    )
    return route_pb2.RouteConfiguration(
        name=cluster,
        validate_clusters=protoconv.boolean(False),
        virtual_hosts=[
            route_components_pb2.VirtualHost(name=f"inbound|http|{port.port}", domains=["*"], routes=[route])
        ],
    )

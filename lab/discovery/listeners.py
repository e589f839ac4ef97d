"""LDS, outbound side: one listener per service port or address, and virtualOutbound.

Sources: istio/istio: pilot/pkg/networking/core/listener.go, tls.go, listener_builder.go.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from envoy.config.listener.v3 import listener_components_pb2, listener_pb2

from lab.discovery import access_log, catch_all, destinations, filters, protoconv, virtual_service
from lab.discovery import host as hosts
from lab.discovery.durations import parse_go_duration
from lab.discovery.protoconv import BLACK_HOLE_CLUSTER
from lab.discovery.proxy import Proxy
from lab.discovery.registry import EXTERNAL, KUBERNETES, Port, Service

TRANSPORT_SOCKET_CONNECT_TIMEOUT = 15.0
"""PILOT_GATEWAY_TRANSPORT_SOCKET_CONNECT_TIMEOUT, on sidecar outbound chains too (istio/istio: pilot/pkg/features)."""

ListenerClass = Literal["HTTP", "TCP", "AUTO"]


@dataclass(slots=True)
class Chain:
    """A filter chain in the making: what it matches, and either an RDS name (HTTP) or network filters."""

    filters: Sequence[Any] = ()
    rds: str = ""
    sni: tuple[str, ...] = ()
    cidrs: tuple[str, ...] = ()
    alpn: tuple[str, ...] = ()
    transport: str = ""
    grpc_web: bool = False
    dynamic_host: str = ""
    http_proxy: bool = False
    needs_sni: bool = False  # resolves the name in the ClientHello

    @property
    def matches_all(self) -> bool:
        return (not self.sni or "*" in self.sni) and not self.alpn and not self.transport and not self.cidrs

    @property
    def match_key(self) -> tuple[object, ...]:
        """Two chains with equal keys would match the same connections."""
        return (
            self.transport,
            self.alpn,
            frozenset(s for s in self.sni if s != "*"),
            frozenset(str(ipaddress.ip_network(c, strict=False)) for c in self.cidrs if not c.startswith("0.0.0.0")),
        )

    def match(self) -> Any:
        out = listener_components_pb2.FilterChainMatch(
            application_protocols=self.alpn,
            transport_protocol=self.transport,
            server_names=[] if "*" in self.sni else sorted(self.sni),
        )
        for cidr in sorted(self.cidrs):
            prefix = protoconv.cidr_range(cidr)
            if prefix.address_prefix != "0.0.0.0":
                out.prefix_ranges.append(prefix)
        return out


@dataclass(slots=True)
class Entry:
    """A listener in the making, with what decides conflicts on its (bind, port)."""

    binds: tuple[str, ...]
    port: Port
    kind: ListenerClass
    chains: list[Chain]
    bind_to_port: bool = False
    locked: bool = False
    headless: bool = False


@dataclass(frozen=True, slots=True)
class Binding:
    """Where a listener is to be: addresses (empty: by the service), and whether the socket is a real one."""

    binds: tuple[str, ...] = ()
    bind_to_port: bool = False


def listener_name(bind: str, port: int) -> str:
    """Istio's name of a listener; that of a socket ends in ``_0`` (pilot/pkg/networking/core/gateway.go: getListenerName)."""
    return f"{bind}_{port}"


def is_reserved(proxy: Proxy, bind: str, port: Port, *, virtual: bool = True) -> bool:
    """Whether a listener would take a wildcard port of the proxy's own: status, statistics and the ``virtual`` ones.

    ``bind`` is the address as written; without one, HTTP is on the wildcard and anything else is not
    (istio/istio: pilot/pkg/model/context.go: conflictWithReservedListener).
    """
    if bind != proxy.node.wildcards[0] if bind else port.listener_class != "HTTP":
        return False
    node, config = proxy.node, proxy.mesh_config
    taken = {int(node.metadata.get("ENVOY_STATUS_PORT") or 15021)}
    taken.add(int(node.metadata.get("ENVOY_PROMETHEUS_PORT") or 15090))
    if virtual:
        taken |= {config.proxy_listen_port, config.proxy_inbound_listen_port}
    return port.port in taken


def _catch_all_filters(proxy: Proxy) -> Sequence[Any]:
    return proxy.memo("catch_all_filters", lambda: (filters.tcp_proxy(proxy, catch_all.cluster_of(proxy)),))


# --- filters of TCP chains --------------------------------------------------------------------------


def _policy_part(policy: Mapping[str, Any] | None, *path: str) -> Any:
    value: Any = policy
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _uses_source_ip(proxy: Proxy, host: str, subset_name: str) -> bool:
    rule = proxy.destination_rule(host)
    if rule is None:
        return False
    used = bool(_policy_part(rule.traffic_policy, "loadBalancer", "consistentHash", "useSourceIp"))
    subset = rule.subset(subset_name) if subset_name else None
    balancer = _policy_part(subset, "trafficPolicy", "loadBalancer")
    if balancer:
        used = bool(_policy_part(balancer, "consistentHash", "useSourceIp"))
    return used


def _tcp_filters(
    proxy: Proxy,
    port: Port,
    cluster: str,
    host: str,
    *,
    subset: str = "",
    weighted: Sequence[tuple[str, int]] = (),
    stat_prefix: str = "",
    dynamic_host: str = "",
) -> list[Any]:
    """tcp_proxy to one cluster or several, with what the destination's DestinationRule says about TCP."""
    rule = proxy.destination_rule(host) if host else None
    policy = rule.traffic_policy if rule else None
    tunnel = _policy_part(policy, "tunnel")
    if rule is not None and subset:
        tunnel = _policy_part(rule.subset(subset), "trafficPolicy", "tunnel") or tunnel
    terminal = filters.tcp_proxy(
        proxy,
        cluster,
        weighted=weighted,
        stat_prefix=stat_prefix,
        idle=parse_go_duration(_policy_part(policy, "connectionPool", "tcp", "idleTimeout")),
        max_duration=parse_go_duration(_policy_part(policy, "connectionPool", "tcp", "maxConnectionDuration")),
        hash_source_ip=bool(host) and _uses_source_ip(proxy, host, subset),
        tunneling=tunnel if isinstance(tunnel, Mapping) else None,
    )
    stack = filters.protocol_stack(port.protocol, stat_prefix or cluster, terminal)
    if dynamic_host:
        stack.insert(0, filters.sni_dynamic_forward_proxy(proxy, dynamic_host, port.port))
    return stack


def _route_filters(
    proxy: Proxy, port: Port, vs: virtual_service.VirtualService, routes: Sequence[Mapping[str, Any]]
) -> list[Any]:
    """Filters of a VirtualService's tcp or tls route: one destination, or weighted ones without the zero weights."""
    first = routes[0].get("destination") or {}
    service = destinations.service_of(proxy, first)
    host = service.host if service else ""
    if len(routes) == 1:
        cluster = destinations.cluster_of(proxy, first, port.port)
        return _tcp_filters(proxy, port, cluster, host, subset=str(first.get("subset") or ""))
    weighted = [
        (destinations.cluster_of(proxy, r.get("destination") or {}, port.port), int(r.get("weight") or 0))
        for r in routes
        if int(r.get("weight") or 0) > 0
    ]
    return _tcp_filters(proxy, port, "", host, weighted=weighted, stat_prefix=f"{vs.name}.{vs.namespace}")


# --- TCP and TLS chains of a service ------------------------------------------------------------------


def _service_port(service: Service, port: Port) -> int:
    """The service's only port, if it has one (a Sidecar may listen on another number), else the listener's."""
    return service.ports[0].port if len(service.ports) == 1 else port.port


def _tls_chains(
    proxy: Proxy,
    service: Service,
    port: Port,
    bind: str,
    cidrs: tuple[str, ...],
    virtual_services: Sequence[virtual_service.VirtualService],
) -> list[Chain]:
    out: list[Chain] = []
    seen: set[tuple[object, ...]] = set()
    for vs in virtual_services:
        for route in vs.tls:
            for match in route.get("match") or ():
                if not route.get("route") or not destinations.static_match(match, proxy, port.port):
                    continue
                subnets = tuple(match.get("destinationSubnets") or ())
                sni = tuple(match.get("sniHosts") or ())
                key = (sni, subnets)
                if key not in seen:
                    seen.add(key)
                    # Istio hands a match's subnets on to the matches behind it: two chains may then match the same,
                    # and Envoy refuses the listener
                    own = subnets if subnets and port.port > 0 else cidrs
                    out.append(Chain(_route_filters(proxy, port, vs, route["route"]), sni=sni, cidrs=own))
    if out:
        return out
    wildcard = proxy.node.wildcards[0]
    vips = service.listens_on(proxy.node)
    unspecified = not vips
    dynamic = service.resolution == "DynamicDNS" and service.host.startswith("*")
    sni = ()
    # without an address of its own, the name in the ClientHello is all that tells services apart
    if cidrs or (unspecified and bind == wildcard) or dynamic:
        aliases = [a for host, _ in service.aliases for a in (host, *hosts.alternatives(host, proxy.node.domain))]
        sni = (service.host, *aliases)
    number = _service_port(service, port)
    cluster = protoconv.cluster_name("outbound", number, "", service.host)
    chain_filters = _tcp_filters(proxy, port, cluster, service.host, dynamic_host=service.host if dynamic else "")
    return [Chain(chain_filters, sni=sni, cidrs=cidrs, needs_sni=dynamic)]


def _plain_tcp_chains(
    proxy: Proxy,
    service: Service,
    port: Port,
    cidrs: tuple[str, ...],
    virtual_services: Sequence[virtual_service.VirtualService],
) -> list[Chain]:
    out: list[Chain] = []
    for vs in virtual_services:
        for route in vs.tcp:
            if not route.get("route"):
                continue
            matches = route.get("match") or ()
            if not matches:
                return [*out, Chain(_route_filters(proxy, port, vs, route["route"]), cidrs=cidrs)]
            subnets: list[str] = []
            for match in matches:
                if not destinations.static_match(match, proxy, port.port):
                    continue
                wanted = match.get("destinationSubnets") or ()
                if not wanted or port.port == 0:
                    # matches any destination: nothing after it can be reached
                    return [*out, Chain(_route_filters(proxy, port, vs, route["route"]), cidrs=cidrs)]
                subnets.extend(wanted)
            if subnets:
                out.append(Chain(_route_filters(proxy, port, vs, route["route"]), cidrs=tuple(subnets)))
                if sorted(subnets) == sorted(cidrs):
                    return out  # the service's own chain would have the same match
    number = _service_port(service, port)
    cluster = protoconv.cluster_name("outbound", number, "", service.host)
    return [*out, Chain(_tcp_filters(proxy, port, cluster, service.host), cidrs=cidrs)]


# --- the listener table -----------------------------------------------------------------------------


class _Builder:
    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self.wildcards = proxy.node.wildcards
        self.entries: dict[tuple[str, int], Entry] = {}

    def can_bind(self, binding: Binding, port: Port) -> bool:
        """Whether a listener may be there: not on the proxy's own ports, not below 1024 if it may not bind them."""
        if binding.bind_to_port and port.port < 1024 and self.proxy.node.text("UNPRIVILEGED_POD"):
            return False
        return not is_reserved(self.proxy, binding.binds[0] if binding.binds else "", port)

    def _binds_of(self, service: Service, binding: Binding, port: Port) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(addresses to listen on, CIDRs to match) of one service port."""
        if binding.binds:
            return binding.binds, ()
        if port.listener_class == "HTTP":
            return self.wildcards, ()
        vips = service.listens_on(self.proxy.node)
        if not vips:
            return self.wildcards if service.registry == EXTERNAL else self.wildcards[:1], ()
        if "/" in vips[0]:
            return self.wildcards, vips
        return vips, ()

    def add(
        self,
        service: Service,
        port: Port,
        binding: Binding,
        virtual_services: Sequence[virtual_service.VirtualService],
        *,
        headless: bool = False,
    ) -> None:
        """Adds one service port, or merges it into the listener that is already there."""
        kind = port.listener_class
        if kind == "NONE" or service.resolution == "Alias":
            return
        binds, cidrs = self._binds_of(service, binding, port)
        key = (binds[0], port.port)
        current = self.entries.get(key)
        if current is not None and current.locked:
            return
        proxy = self.proxy
        named = virtual_service.for_host(virtual_services, service.host)

        def tcp_chains() -> list[Chain]:
            if port.is_tls:
                return _tls_chains(proxy, service, port, binds[0], cidrs, named)
            return _plain_tcp_chains(proxy, service, port, cidrs, named)

        def http_chain() -> Chain:
            if port.port == 0:
                rds = binds[0]
            elif kind == "AUTO" and binds[0] != self.wildcards[0]:
                rds = f"{service.host}:{port.port}"
            else:
                rds = str(port.port)
            dynamic = service.host if service.resolution == "DynamicDNS" and service.host.startswith("*") else ""
            return Chain(rds=rds, grpc_web=port.protocol == "GRPC-Web", dynamic_host=dynamic)

        def sniffed(chain: Chain) -> Chain:
            return replace(chain, alpn=filters.plaintext_alpns(proxy), transport="raw_buffer")

        def new(chains: list[Chain], as_kind: ListenerClass) -> None:
            self.entries[key] = Entry(binds, port, as_kind, chains, binding.bind_to_port, headless=headless)

        if port.protocol == "HTTP_PROXY":
            if current is None:
                new([http_chain()], "HTTP")
            return
        if kind == "HTTP":
            if current is not None and current.kind != "TCP":
                return  # the service appears through RDS
            chain = http_chain()
            wildcard = binds[0] == self.wildcards[0]
            if wildcard:
                chain = sniffed(chain)
            if current is None:
                # with a TCP chain behind it, a wildcard HTTP listener is in truth a sniffing one
                new([chain], "AUTO" if wildcard else "HTTP")
            elif self._may_mix(current, port):
                self._merge(current, [chain], service)
                current.kind = "AUTO"
            return
        if kind == "TCP":
            chains = tcp_chains()
            if current is None:
                new(chains, "TCP")
            elif self._may_mix(current, port):
                self._merge(current, chains, service)
                if current.kind == "HTTP":
                    current.kind = "AUTO"
            return
        if current is None:
            new([*tcp_chains(), sniffed(http_chain())], "AUTO")
        elif not self._may_mix(current, port):
            return
        elif current.kind == "HTTP":
            new([*tcp_chains(), sniffed(http_chain())], "AUTO")
        elif current.kind == "TCP":
            self._merge(current, [*tcp_chains(), sniffed(http_chain())], service)
            current.kind = "AUTO"
        else:
            self._merge(current, tcp_chains(), service)

    @staticmethod
    def _may_mix(current: Entry, port: Port) -> bool:
        """Mongo and MySQL share a listener with nothing else: inspectors break server-first protocols."""
        both = {current.port.protocol, port.protocol}
        return len(both) == 1 or not both & {"MONGO", "MYSQL"}

    def _merge(self, current: Entry, incoming: Sequence[Chain], service: Service) -> None:
        """Adds the chains whose match is new; of equal ones the first (oldest service) stays."""
        known = {c.match_key for c in current.chains}
        for chain in incoming:
            if chain.match_key in known:
                name = listener_name(current.binds[0], current.port.port)
                self.proxy.push.add_metric(
                    "pilot_conflict_outbound_listener_tcp_over_current_tcp",
                    name,
                    f"Listener={name} Accepted={current.kind} Rejected={service.host} for {self.proxy.scope.name}",
                )
                continue
            known.add(chain.match_key)
            current.chains.append(chain)

    def add_egress(self) -> None:
        proxy = self.proxy
        for egress in proxy.scope.egress:
            written = egress.written
            real = proxy.node.interception_mode == "NONE" or (
                written is not None and (written.capture_mode == "NONE" or written.bind.startswith("unix://"))
            )
            if written is not None and written.bind:
                binding = Binding((written.bind,), real)
            else:
                binding = Binding(proxy.node.localhosts if real else (), real)
            if written is not None and written.port is not None:
                port = Port(written.port, written.port_name, written.port_protocol)
                if self.can_bind(binding, port):
                    for service in egress.services:
                        self.add(service, port, binding, egress.virtual_services)
                continue
            for entry in self.entries.values():
                entry.locked = True
            for service in egress.services:
                for port in service.ports:
                    if self.can_bind(binding, port):
                        self._add_catch_all(service, port, binding, egress.virtual_services)

    def _add_catch_all(
        self,
        service: Service,
        port: Port,
        binding: Binding,
        virtual_services: Sequence[virtual_service.VirtualService],
    ) -> None:
        per_endpoint = (
            not binding.binds
            and service.resolution == "Passthrough"
            and not service.listens_on(self.proxy.node)
            and port.listener_class in ("TCP", "AUTO")
        )
        if not per_endpoint:
            self.add(service, port, binding, virtual_services)
            return
        endpoints = self.proxy.push.registry.port_endpoints(service, port)
        if not endpoints and service.registry != KUBERNETES and service.selector is None:
            self.add(service, port, binding, virtual_services)
            return
        for endpoint in endpoints:
            addresses = tuple(a for a in endpoint.addresses if self.proxy.node.supports(a)) if endpoint.is_ip else ()
            if addresses:
                self.add(service, port, Binding(addresses, binding.bind_to_port), virtual_services, headless=True)

    def build(self, entry: Entry) -> Any:
        proxy = self.proxy
        name = listener_name(entry.binds[0], entry.port.port)
        listener = listener_pb2.Listener(
            name=name,
            address=protoconv.socket_address(entry.binds[0], entry.port.port),
            additional_addresses=[
                listener_pb2.AdditionalAddress(address=protoconv.socket_address(b, entry.port.port))
                for b in entry.binds[1:]
            ],
            traffic_direction="OUTBOUND",
            continue_on_listener_filters_timeout=True,
        )
        if entry.bind_to_port:
            listener.max_connections_to_accept_per_socket_event.CopyFrom(protoconv.uint32(1))
        else:
            listener.bind_to_port.CopyFrom(protoconv.boolean(False))
        timeout = 0.0
        if any(c.sni or c.needs_sni for c in entry.chains):
            listener.listener_filters.append(filters.tls_inspector())
        if any(c.alpn for c in entry.chains):
            listener.listener_filters.append(filters.http_inspector())
            timeout = proxy.mesh_config.protocol_detection_timeout
        listener.listener_filters_timeout.CopyFrom(protoconv.duration(timeout))
        default = None
        for chain in entry.chains:
            built = self._chain(chain, name)
            if chain.matches_all:
                default = built
            else:
                built.filter_chain_match.CopyFrom(chain.match())
                listener.filter_chains.append(built)
        if default is None:
            default = listener_components_pb2.FilterChain(
                name=protoconv.PASSTHROUGH_FILTER_CHAIN,
                filter_chain_match=listener_components_pb2.FilterChainMatch(),
                filters=[] if any(c.http_proxy for c in entry.chains) else _catch_all_filters(proxy),
            )
        if listener.filter_chains:
            listener.default_filter_chain.CopyFrom(default)
        else:
            listener.filter_chains.append(default)
        listener.access_log.extend(access_log.logs(proxy, "listener", mesh_log=False))
        return listener

    def _chain(self, chain: Chain, name: str) -> Any:
        out = listener_components_pb2.FilterChain(
            transport_socket_connect_timeout=protoconv.duration(TRANSPORT_SOCKET_CONNECT_TIMEOUT)
        )
        if chain.rds:
            out.filters.append(
                filters.http_connection_manager(
                    self.proxy,
                    stat_prefix=f"outbound_{name};",
                    rds=chain.rds,
                    grpc_web=chain.grpc_web,
                    http_proxy=chain.http_proxy,
                    dynamic_host=chain.dynamic_host,
                )
            )
        else:
            out.filters.extend(chain.filters)
        return out


def _http_proxy_listener(builder: _Builder) -> Any:
    """The explicit HTTP proxy (MeshConfig proxyHttpPort, metadata HTTP_PROXY_PORT), None if it is off."""
    proxy = builder.proxy
    text = proxy.node.text("HTTP_PROXY_PORT")
    number = int(text) if text.isdigit() else proxy.mesh_config.proxy_http_port
    if not number:
        return None
    entry = Entry(
        proxy.node.localhosts,
        Port(number, "http_proxy", "HTTP_PROXY"),
        "HTTP",
        [Chain(rds="http_proxy", http_proxy=True)],
        bind_to_port=True,
    )
    return builder.build(entry)


def _by_name_chain(proxy: Proxy) -> Any:
    """Plain HTTP to ports that no listener has: the host is looked up by name (ALLOW_ANY_DYNAMIC_DNS)."""
    manager = filters.http_connection_manager(
        proxy,
        stat_prefix=f"outbound_{protoconv.VIRTUAL_OUTBOUND}_allow_any_dynamic_dns;",
        route_config=catch_all.route_configuration("allow_any_dynamic_dns", [catch_all.virtual_host(proxy)]),
    )
    return listener_components_pb2.FilterChain(
        name="virtualOutbound-catchall-tcp-http",
        filter_chain_match=listener_components_pb2.FilterChainMatch(
            application_protocols=filters.plaintext_alpns(proxy)
        ),
        filters=[manager],
    )


def virtual_outbound(proxy: Proxy) -> Any:
    """The listener that iptables redirects to; it hands connections to the listener of their original destination."""
    config, wildcards = proxy.mesh_config, proxy.node.wildcards
    port = config.proxy_listen_port
    listener = listener_pb2.Listener(
        name=protoconv.VIRTUAL_OUTBOUND,
        address=protoconv.socket_address(wildcards[0], port),
        additional_addresses=[
            listener_pb2.AdditionalAddress(address=protoconv.socket_address(w, port)) for w in wildcards[1:]
        ],
        use_original_dst=protoconv.boolean(True),
        traffic_direction="OUTBOUND",
        max_connections_to_accept_per_socket_event=protoconv.uint32(1),
        access_log=access_log.logs(proxy, "listener"),
        filter_chains=[
            listener_components_pb2.FilterChain(
                name="virtualOutbound-blackhole",
                filter_chain_match=listener_components_pb2.FilterChainMatch(destination_port=protoconv.uint32(port)),
                filters=[filters.tcp_proxy(proxy, BLACK_HOLE_CLUSTER, mesh_log=False)],
            ),
            listener_components_pb2.FilterChain(name="virtualOutbound-catchall-tcp", filters=_catch_all_filters(proxy)),
        ],
    )
    if filters.allows_any_by_name(proxy):
        listener.listener_filters.append(filters.http_inspector())
        listener.filter_chains.insert(1, _by_name_chain(proxy))
    if proxy.node.interception_mode == "TPROXY":
        listener.transparent.CopyFrom(protoconv.boolean(True))
    return listener


def _outbound(proxy: Proxy) -> list[tuple[Any, str]]:
    builder = _Builder(proxy)
    builder.add_egress()
    # (listener, pod address it stands for if it was made for one endpoint of a headless service)
    out = [(builder.build(e), e.binds[0] if e.headless else "") for e in builder.entries.values()]
    explicit = _http_proxy_listener(builder)
    if explicit is not None:
        out.append((explicit, ""))
    if proxy.node.interception_mode != "NONE":
        out.append((virtual_outbound(proxy), ""))
    return out


def outbound_listeners(proxy: Proxy) -> list[Any]:
    """Every outbound listener of a proxy; none of them for the proxy's own address (that traffic stays in the pod)."""
    if not proxy.mesh_config.proxy_listen_port:
        return []
    shared = proxy.memo("outbound_listeners", lambda: _outbound(proxy))
    own = proxy.node.ips[0]
    return [listener for listener, address in shared if address != own]

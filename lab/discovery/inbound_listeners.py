"""LDS, inbound side: virtualInbound with its chains per port and mTLS mode, and ingress listeners on real sockets.

Sources: istio/istio: pilot/pkg/networking/core/listener_inbound.go, filterchain_options.go.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from envoy.config.listener.v3 import listener_components_pb2, listener_pb2
from envoy.type.v3 import range_pb2

from lab.discovery import access_log, filters, protoconv, routes, tls
from lab.discovery.listeners import is_reserved, listener_name
from lab.discovery.protoconv import BLACK_HOLE_CLUSTER, INBOUND_PASSTHROUGH_CLUSTER
from lab.discovery.proxy import Proxy
from lab.discovery.registry import Port
from lab.manifests import model


@dataclass(frozen=True, slots=True)
class ChainMatch:
    """One row of Istio's table: what a chain matches, whether it is HTTP, and whether it ends mTLS."""

    transport: str
    alpn: tuple[str, ...] = ()
    http: bool = False
    mtls: bool = False


_PLAIN = filters.PLAINTEXT_HTTP_ALPNS

_TABLE: dict[tuple[str, str], tuple[ChainMatch, ...]] = {
    ("PERMISSIVE", "AUTO"): (
        ChainMatch("tls", tls.ALPN_MTLS_HTTP, http=True, mtls=True),
        ChainMatch("raw_buffer", _PLAIN, http=True),
        ChainMatch("tls", tls.ALPN_MTLS_TCP, mtls=True),
        ChainMatch("raw_buffer"),
        ChainMatch("tls"),
    ),
    ("PERMISSIVE", "HTTP"): (
        ChainMatch("tls", tls.ALPN_MTLS_ALL, http=True, mtls=True),
        ChainMatch("raw_buffer", http=True),
    ),
    ("PERMISSIVE", "TCP"): (
        ChainMatch("tls", tls.ALPN_MTLS_ALL, mtls=True),
        ChainMatch("tls"),
        ChainMatch("raw_buffer"),
    ),
    ("STRICT", "AUTO"): (ChainMatch("tls", tls.ALPN_MTLS_HTTP, http=True, mtls=True), ChainMatch("tls", mtls=True)),
    ("STRICT", "HTTP"): (ChainMatch("tls", http=True, mtls=True),),
    ("STRICT", "TCP"): (ChainMatch("tls", mtls=True),),
    ("DISABLE", "AUTO"): (ChainMatch("raw_buffer", _PLAIN, http=True), ChainMatch("raw_buffer")),
    ("DISABLE", "HTTP"): (ChainMatch("raw_buffer", http=True),),
    ("DISABLE", "TCP"): (ChainMatch("raw_buffer"),),
}


@dataclass(frozen=True, slots=True)
class ChainConfig:
    """One port of the workload (or the passthrough, port 0): its chains differ only in what they match."""

    target_port: int
    port: Port
    cluster: str
    bind: str
    extra_binds: tuple[str, ...] = ()
    host: str = ""
    passthrough: bool = False
    bind_to_port: bool = False

    def name(self, http: bool) -> str:
        if self.passthrough:
            return "virtualInbound-catchall-http" if http else protoconv.VIRTUAL_INBOUND
        return listener_name(self.bind, self.target_port)


def inbound_cluster(port: int) -> str:
    return protoconv.cluster_name("inbound", port, "", "")


def binds_to_port(proxy: Proxy, mode: str) -> bool:
    """Whether an inbound port is a real listener: captureMode NONE, or DEFAULT in a pod without interception."""
    return proxy.node.interception_mode == "NONE" if mode == "DEFAULT" else mode == "NONE"


def chain_configs(proxy: Proxy) -> list[ChainConfig]:
    """The workload's ports: from the Sidecar's ingress alone if it has one, else from its services; by target port."""
    wildcards = proxy.node.wildcards
    out: dict[int, ChainConfig] = {}
    if not proxy.scope.ingress:
        if proxy.node.interception_mode == "NONE":
            return []
        for target in proxy.targets:
            listens = replace(target.port, port=target.target_port)
            if listens.listener_class != "NONE" and not is_reserved(proxy, wildcards[0], listens):
                # of several services on one port the oldest decides, the protocol too
                out.setdefault(
                    target.target_port,
                    ChainConfig(
                        target.target_port,
                        target.port,
                        inbound_cluster(target.target_port),
                        wildcards[0],
                        wildcards[1:],
                        target.service.host,
                    ),
                )
    for ingress in proxy.scope.ingress:
        real = binds_to_port(proxy, ingress.capture_mode)
        if real and ingress.port < 1024 and proxy.node.text("UNPRIVILEGED_POD"):
            continue
        port = Port(ingress.port, ingress.name, ingress.protocol)
        if is_reserved(proxy, ingress.bind, port, virtual=False):
            continue
        out.setdefault(
            ingress.port,
            ChainConfig(
                ingress.port,
                port,
                inbound_cluster(ingress.port),
                # without a bind the chain is of the pod's own address (listener_address.go: getSidecarInboundBindIPs)
                ingress.bind or proxy.node.ips[0],
                (),
                f"{proxy.scope.sidecar.meta.name}.{proxy.scope.namespace}" if proxy.scope.sidecar else "",
                bind_to_port=real,
            ),
        )
    return [out[port] for port in sorted(out)]


def _passthrough(port: int) -> ChainConfig:
    return ChainConfig(
        port, Port(0, protoconv.VIRTUAL_INBOUND, "AUTO"), INBOUND_PASSTHROUGH_CLUSTER, "", passthrough=True
    )


def _trust_domains(config: model.MeshConfig) -> tuple[str, ...]:
    return (config.trust_domain, *config.trust_domain_aliases)


def _chains(proxy: Proxy, config: ChainConfig, mode: str) -> list[Any]:
    out = []
    for match in _TABLE[(mode, config.port.listener_class)]:
        alpn = filters.plaintext_alpns(proxy) if match.alpn == _PLAIN else match.alpn
        chain = listener_components_pb2.FilterChain(
            name=config.name(match.http),
            filter_chain_match=listener_components_pb2.FilterChainMatch(
                transport_protocol=match.transport, application_protocols=alpn
            ),
        )
        if config.target_port:
            chain.filter_chain_match.destination_port.CopyFrom(protoconv.uint32(config.target_port))
        if match.mtls:
            trust = _trust_domains(proxy.mesh_config)
            key = ("downstream_tls", match.http)
            memo = proxy.push.memo
            if key not in memo:
                memo[key] = tls.downstream(trust, match.http)
            chain.transport_socket.CopyFrom(memo[key])
        if match.http:
            stat = f"{config.cluster};" if config.passthrough else f"inbound_{config.name(True)};"
            chain.filters.append(
                filters.http_connection_manager(
                    proxy,
                    stat_prefix=stat,
                    route_config=routes.inbound_route_config(proxy, config.port, config.cluster, config.host),
                    inbound=True,
                    http2=config.port.is_http2,
                    grpc_web=config.port.protocol == "GRPC-Web",
                )
            )
        else:
            terminal = filters.tcp_proxy(proxy, config.cluster)
            chain.filters.extend(filters.protocol_stack(config.port.protocol, config.cluster, terminal))
        out.append(chain)
    return out


# --- inspectors ---------------------------------------------------------------------------------


def _ports_predicate(ports: Sequence[int]) -> Any:
    predicate = listener_components_pb2.ListenerFilterChainMatchPredicate
    ranges = [predicate(destination_port_range=range_pb2.Int32Range(start=p, end=p + 1)) for p in sorted(ports)]
    if len(ranges) == 1:
        return ranges[0]
    return predicate(or_match=predicate.MatchSet(rules=ranges))


def _disabled_on(inspector: Any, predicate: Any) -> Any:
    out = listener_components_pb2.ListenerFilter()
    out.CopyFrom(inspector)
    out.filter_disabled.CopyFrom(predicate)
    return out


def _inspectors(chains: Iterable[Any]) -> list[Any]:
    """tls_inspector and http_inspector, switched off for the ports whose chains do not need them (0: no port)."""
    wants_tls: dict[int, bool] = {}
    wants_http: dict[int, bool] = {}
    for chain in chains:
        match = chain.filter_chain_match
        port = match.destination_port.value
        wants_tls[port] = wants_tls.get(port, False) or match.transport_protocol == "tls"
        http = any(p in ("http/1.1", "h2c") for p in match.application_protocols)
        wants_http[port] = wants_http.get(port, False) or http
    out = []
    if any(wants_tls.values()):
        inspector = filters.tls_inspector()
        if wants_tls.get(0, False):
            off = [p for p, wanted in wants_tls.items() if p and not wanted]
            out.append(_disabled_on(inspector, _ports_predicate(off)) if off else inspector)
        else:
            on = [p for p, wanted in wants_tls.items() if p and wanted]
            predicate = listener_components_pb2.ListenerFilterChainMatchPredicate(not_match=_ports_predicate(on))
            out.append(_disabled_on(inspector, predicate))
    if any(wants_http.values()):
        off = [p for p, wanted in wants_http.items() if not wanted]
        inspector = filters.http_inspector()
        out.append(_disabled_on(inspector, _ports_predicate(off)) if off else inspector)
    return out


# --- listeners ------------------------------------------------------------------------------------


def _listener(proxy: Proxy, name: str, binds: Sequence[str], port: int, real: bool, chains: Sequence[Any]) -> Any:
    transparent = not real and proxy.node.interception_mode == "TPROXY"
    listener = listener_pb2.Listener(
        name=name,
        address=protoconv.socket_address(binds[0], port),
        additional_addresses=[
            listener_pb2.AdditionalAddress(address=protoconv.socket_address(b, port)) for b in binds[1:]
        ],
        traffic_direction="INBOUND",
        continue_on_listener_filters_timeout=True,
        listener_filters_timeout=protoconv.duration(proxy.mesh_config.protocol_detection_timeout),
        max_connections_to_accept_per_socket_event=protoconv.uint32(1),
        access_log=access_log.logs(proxy, "listener"),
        filter_chains=chains,
    )
    if transparent:
        listener.transparent.CopyFrom(protoconv.boolean(True))
    if not real:
        listener.listener_filters.append(filters.original_dst())
    if transparent:
        listener.listener_filters.append(filters.original_src())
    listener.listener_filters.extend(_inspectors(chains))
    return listener


def inbound_listeners(proxy: Proxy) -> list[Any]:
    """virtualInbound first (unless the pod has no interception), then the ingress listeners on real sockets."""
    config = proxy.mesh_config
    if not config.proxy_listen_port:
        return []
    pod = proxy.push.registry.pod_of(proxy.node)
    namespace = pod.meta.namespace if pod else proxy.node.namespace
    modes = proxy.push.peer_authentications.effective(namespace, proxy.labels)
    configs = chain_configs(proxy)
    captured: list[Any] = []
    custom: list[Any] = []
    for one in configs:
        chains = _chains(proxy, one, modes.for_port(one.target_port))
        if one.bind_to_port:
            binds = (one.bind, *one.extra_binds)
            custom.append(_listener(proxy, one.name(False), binds, one.target_port, True, chains))
        else:
            captured.extend(chains)
    if proxy.node.interception_mode == "NONE":
        return custom
    port = config.proxy_inbound_listen_port
    blackhole = listener_components_pb2.FilterChain(
        name="virtualInbound-blackhole",
        filter_chain_match=listener_components_pb2.FilterChainMatch(destination_port=protoconv.uint32(port)),
        filters=[filters.tcp_proxy(proxy, BLACK_HOLE_CLUSTER, mesh_log=False)],
    )
    passthrough = _chains(proxy, _passthrough(0), modes.mode)
    declared = {i.port for i in proxy.scope.ingress} or {t.target_port for t in proxy.targets}
    for number in sorted(modes.ports):
        if number not in declared:
            passthrough.extend(_chains(proxy, _passthrough(number), modes.for_port(number)))
    chains = [blackhole, *passthrough, *captured]
    return [_listener(proxy, protoconv.VIRTUAL_INBOUND, proxy.node.wildcards, port, False, chains), *custom]

"""Network and HTTP filters: the connection manager, the tcp proxy, the listener filters.

Sources: istio/istio: pilot/pkg/networking/core/listener_builder.go, networkfilter.go, pilot/pkg/xds/filters/filters.go.
Istio's own filters (istio.alpn, istio.metadata_exchange, istio.stats) are left out: a stock Envoy has none of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from envoy.config.core.v3 import protocol_pb2
from envoy.config.listener.v3 import listener_components_pb2
from envoy.extensions.common.dynamic_forward_proxy.v3 import dns_cache_pb2
from envoy.extensions.filters.http.cors.v3 import cors_pb2
from envoy.extensions.filters.http.dynamic_forward_proxy.v3 import dynamic_forward_proxy_pb2
from envoy.extensions.filters.http.fault.v3 import fault_pb2
from envoy.extensions.filters.http.grpc_stats.v3 import config_pb2 as grpc_stats_pb2
from envoy.extensions.filters.http.grpc_web.v3 import grpc_web_pb2
from envoy.extensions.filters.http.router.v3 import router_pb2
from envoy.extensions.filters.listener.http_inspector.v3 import http_inspector_pb2
from envoy.extensions.filters.listener.original_dst.v3 import original_dst_pb2
from envoy.extensions.filters.listener.original_src.v3 import original_src_pb2
from envoy.extensions.filters.listener.tls_inspector.v3 import tls_inspector_pb2
from envoy.extensions.filters.network.http_connection_manager.v3 import http_connection_manager_pb2 as hcm_pb2
from envoy.extensions.filters.network.mongo_proxy.v3 import mongo_proxy_pb2
from envoy.extensions.filters.network.sni_dynamic_forward_proxy.v3 import sni_dynamic_forward_proxy_pb2
from envoy.extensions.filters.network.tcp_proxy.v3 import tcp_proxy_pb2
from envoy.extensions.network.dns_resolver.cares.v3 import cares_dns_resolver_pb2
from envoy.extensions.request_id.uuid.v3 import uuid_pb2
from envoy.type.v3 import percent_pb2

from lab.discovery import access_log, protoconv
from lab.discovery.durations import parse_go_duration
from lab.discovery.proxy import Proxy

PLAINTEXT_HTTP_ALPNS = ("http/1.1", "h2c")
PLAINTEXT_HTTP_ALPNS_WITH_10 = ("http/1.0", "http/1.1", "h2c")


def plaintext_alpns(proxy: Proxy) -> tuple[str, ...]:
    """What http_inspector must have seen for the HTTP chain to be taken."""
    return PLAINTEXT_HTTP_ALPNS_WITH_10 if proxy.node.http10 else PLAINTEXT_HTTP_ALPNS


@cache
def tls_inspector() -> Any:
    return _listener_filter(
        "envoy.filters.listener.tls_inspector",
        tls_inspector_pb2.TlsInspector(initial_read_buffer_size=protoconv.uint32(512)),
    )


@cache
def http_inspector() -> Any:
    return _listener_filter("envoy.filters.listener.http_inspector", http_inspector_pb2.HttpInspector())


@cache
def original_dst() -> Any:
    return _listener_filter("envoy.filters.listener.original_dst", original_dst_pb2.OriginalDst())


@cache
def original_src() -> Any:
    """TPROXY: the upstream connection keeps the client's address; the mark exempts it from interception."""
    return _listener_filter("envoy.filters.listener.original_src", original_src_pb2.OriginalSrc(mark=1337))


def _listener_filter(name: str, config: Any) -> Any:
    return listener_components_pb2.ListenerFilter(name=name, typed_config=protoconv.to_any(config))


def network_filter(name: str, config: Any) -> Any:
    return listener_components_pb2.Filter(name=name, typed_config=protoconv.to_any(config))


# --- tcp proxy --------------------------------------------------------------------------------


def idle_timeout(proxy: Proxy) -> float | None:
    """Metadata IDLE_TIMEOUT in seconds, None if unset or unreadable."""
    return parse_go_duration(proxy.node.text("IDLE_TIMEOUT"))


def tcp_proxy(
    proxy: Proxy,
    cluster: str = "",
    *,
    weighted: Sequence[tuple[str, int]] = (),
    stat_prefix: str = "",
    idle: float | None = None,
    max_duration: float | None = None,
    hash_source_ip: bool = False,
    tunneling: Mapping[str, Any] | None = None,
    mesh_log: bool = True,
) -> Any:
    """A tcp_proxy network filter to one cluster or several (name, weight)."""
    if idle is None:
        idle = idle_timeout(proxy)
    config = tcp_proxy_pb2.TcpProxy(
        stat_prefix=stat_prefix or cluster,
        idle_timeout=None if idle is None else protoconv.duration(idle),
        max_downstream_connection_duration=None if max_duration is None else protoconv.duration(max_duration),
        access_log=access_log.logs(proxy, "tcp", mesh_log=mesh_log),
    )
    if weighted:
        for name, weight in weighted:
            config.weighted_clusters.clusters.add(name=name, weight=weight)
    else:
        config.cluster = cluster
    if hash_source_ip:
        config.hash_policy.add().source_ip.SetInParent()
    if tunneling:
        port = int(tunneling.get("targetPort") or 0)
        config.tunneling_config.hostname = f"{tunneling.get('targetHost', '')}:{port}"
        config.tunneling_config.use_post = str(tunneling.get("protocol", "")).upper() == "POST"
    return network_filter(protoconv.TCP_PROXY, config)


def mongo_proxy(stat_prefix: str) -> Any:
    return network_filter("envoy.filters.network.mongo_proxy", mongo_proxy_pb2.MongoProxy(stat_prefix=stat_prefix))


def protocol_stack(protocol: str, stat_prefix: str, terminal: Any) -> list[Any]:
    """Filters in front of the tcp proxy for a protocol (Redis and MySQL filters are off by default)."""
    return [mongo_proxy(stat_prefix), terminal] if protocol == "MONGO" else [terminal]


def dns_cache_name(host: str) -> str:
    """Istio's name of the shared DNS cache of a wildcard host (pilot/pkg/model/service.go: BuildDNSCacheName)."""
    return f"{host}_dfp_dns_cache"


def lookup_family(proxy: Proxy) -> str:
    families = proxy.node.families
    return "ALL" if len(families) > 1 else ("V6_ONLY" if families[0] == 6 else "V4_ONLY")


def sni_dynamic_forward_proxy(proxy: Proxy, host: str, port: int) -> Any:
    config = sni_dynamic_forward_proxy_pb2.FilterConfig(port_value=port)
    config.dns_cache_config.name = dns_cache_name(host)
    config.dns_cache_config.dns_lookup_family = lookup_family(proxy)
    return network_filter("envoy.filters.network.sni_dynamic_forward_proxy", config)


# --- HTTP connection manager ----------------------------------------------------------------------


def _http_filter(name: str, config: Any) -> Any:
    return hcm_pb2.HttpFilter(name=name, typed_config=protoconv.to_any(config))


@cache
def _standard_http_filters() -> tuple[Any, ...]:
    stats = grpc_stats_pb2.FilterConfig(emit_filter_state=True, stats_for_all_methods=protoconv.boolean(False))
    return (
        _http_filter("envoy.filters.http.grpc_stats", stats),
        _http_filter("envoy.filters.http.fault", fault_pb2.HTTPFault()),
        _http_filter("envoy.filters.http.cors", cors_pb2.Cors()),
    )


@cache
def _router() -> Any:
    return _http_filter("envoy.filters.http.router", router_pb2.Router())


@cache
def _grpc_web() -> Any:
    return _http_filter("envoy.filters.http.grpc_web", grpc_web_pb2.GrpcWeb())


@cache
def _request_id_extension() -> Any:
    return hcm_pb2.RequestIDExtension(typed_config=protoconv.to_any(uuid_pb2.UuidRequestIdConfig()))


@cache
def _tracing(sampling: float) -> Any:
    percent = percent_pb2.Percent
    return hcm_pb2.HttpConnectionManager.Tracing(
        client_sampling=percent(value=100), random_sampling=percent(value=sampling), overall_sampling=percent(value=100)
    )


def allows_any_by_name(proxy: Proxy) -> bool:
    """Whether HTTP to hosts that the mesh does not know is looked up by name (ALLOW_ANY_DYNAMIC_DNS)."""
    return proxy.scope.outbound_traffic_policy.mode == "ALLOW_ANY_DYNAMIC_DNS"


ALLOW_ANY_MAX_HOSTS = 1024
"""PILOT_ALLOW_ANY_DYNAMIC_DNS_MAX_HOSTS (istio/istio: pilot/pkg/features/pilot.go)."""


def allow_any_dns_cache(proxy: Proxy) -> Any:
    """The one DNS cache of ALLOW_ANY_DYNAMIC_DNS, which its cluster and filters must agree on.

    With DNS capture it asks the agent, else what resolv.conf names
    (istio/istio: pilot/pkg/networking/core/networkfilter.go: buildAllowAnyDynamicDNSDNSCacheConfig).
    """
    cache = dns_cache_pb2.DnsCacheConfig(
        name="allow_any_dfp_dns_cache",
        dns_lookup_family=lookup_family(proxy),
        max_hosts=protoconv.uint32(ALLOW_ANY_MAX_HOSTS),
    )
    if proxy.node.dns_capture:
        host, _, port = proxy.node.text("DNS_PROXY_ADDR").rpartition(":")
        host = proxy.node.localhosts[0] if host in ("", "localhost") else host.strip("[]")
        number = int(port) if port.isdigit() else 15053
        resolver = cares_dns_resolver_pb2.CaresDnsResolverConfig(resolvers=[protoconv.socket_address(host, number)])
        cache.typed_dns_resolver_config.name = "envoy.network.dns_resolver.cares"
        cache.typed_dns_resolver_config.typed_config.CopyFrom(protoconv.to_any(resolver))
    return cache


def _dynamic_forward_proxy(proxy: Proxy, host: str) -> Any:
    config = dynamic_forward_proxy_pb2.FilterConfig()
    if host:
        config.dns_cache_config.name = dns_cache_name(host)
        config.dns_cache_config.dns_lookup_family = lookup_family(proxy)
    else:
        config.dns_cache_config.CopyFrom(allow_any_dns_cache(proxy))
    return _http_filter("envoy.filters.http.dynamic_forward_proxy", config)


def http_connection_manager(
    proxy: Proxy,
    *,
    stat_prefix: str,
    rds: str = "",
    route_config: Any = None,
    inbound: bool = False,
    http2: bool = False,
    grpc_web: bool = False,
    http_proxy: bool = False,
    dynamic_host: str = "",
) -> Any:
    """An HCM network filter with an RDS name or an inline route configuration.

    ``http_proxy`` is the explicit proxy listener (absolute URLs), ``dynamic_host`` a wildcard host resolved per request.
    """
    config = proxy.mesh_config
    manager = hcm_pb2.HttpConnectionManager(
        codec_type="AUTO",
        stat_prefix=stat_prefix,
        normalize_path=protoconv.boolean(config.path_normalization != "NONE"),
        merge_slashes=config.path_normalization in ("MERGE_SLASHES", "DECODE_AND_MERGE_SLASHES"),
        path_with_escaped_slashes_action=(
            "UNESCAPE_AND_FORWARD" if config.path_normalization == "DECODE_AND_MERGE_SLASHES" else "KEEP_UNCHANGED"
        ),
        use_remote_address=protoconv.boolean(False),
        stream_idle_timeout=protoconv.duration(0),
        upgrade_configs=[hcm_pb2.HttpConnectionManager.UpgradeConfig(upgrade_type="websocket")],
        proxy_100_continue=not http_proxy,
        request_id_extension=_request_id_extension(),
        access_log=access_log.logs(proxy, "http", rds or (route_config.name if route_config is not None else None)),
        tracing=_tracing(1.0) if config.enable_tracing else None,
    )
    idle = idle_timeout(proxy)
    if idle is not None:
        manager.common_http_protocol_options.idle_timeout.CopyFrom(protoconv.duration(idle))
    if rds:
        manager.rds.route_config_name = rds
        manager.rds.config_source.CopyFrom(protoconv.ads())
    else:
        manager.route_config.CopyFrom(route_config)
    if inbound:
        manager.forward_client_cert_details = hcm_pb2.HttpConnectionManager.APPEND_FORWARD
        details = manager.set_current_client_cert_details
        details.subject.CopyFrom(protoconv.boolean(True))
        details.uri = details.dns = True
        manager.server_name = "istio-envoy"
        if http2:
            manager.http2_protocol_options.SetInParent()
    if http_proxy or proxy.node.http10:
        manager.http_protocol_options.CopyFrom(
            protocol_pb2.Http1ProtocolOptions(
                allow_absolute_url=protoconv.boolean(True) if http_proxy else None, accept_http_10=proxy.node.http10
            )
        )
    if grpc_web:
        manager.http_filters.append(_grpc_web())
    manager.http_filters.extend(_standard_http_filters())
    if dynamic_host:
        manager.http_filters.append(_dynamic_forward_proxy(proxy, dynamic_host))
    if not inbound and allows_any_by_name(proxy):
        manager.http_filters.append(_dynamic_forward_proxy(proxy, ""))
    manager.http_filters.append(_router())
    return network_filter(protoconv.HTTP_CONNECTION_MANAGER, manager)

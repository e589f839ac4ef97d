"""CDS: outbound clusters per service port and subset, inbound clusters per workload port, and the three fixed ones.

Sources: istio/istio: pilot/pkg/networking/core/cluster.go, cluster_builder.go, cluster_traffic_policy.go, cluster_tls.go.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

from envoy.config.cluster.v3 import circuit_breaker_pb2, cluster_pb2, outlier_detection_pb2
from envoy.config.common.matcher.v3 import matcher_pb2
from envoy.config.core.v3 import address_pb2, base_pb2, extension_pb2
from envoy.config.endpoint.v3 import endpoint_components_pb2, endpoint_pb2
from envoy.config.route.v3 import route_components_pb2
from envoy.extensions.clusters.dynamic_forward_proxy.v3 import cluster_pb2 as dynamic_cluster_pb2
from envoy.extensions.network.dns_resolver.cares.v3 import cares_dns_resolver_pb2
from envoy.extensions.transport_sockets.proxy_protocol.v3 import upstream_proxy_protocol_pb2
from envoy.extensions.upstreams.http.v3 import http_protocol_options_pb2

from lab.discovery import endpoints, filters, protoconv, tls, traffic_policy
from lab.discovery.durations import parse_go_duration
from lab.discovery.inbound_listeners import inbound_cluster
from lab.discovery.protoconv import MAX_UINT32
from lab.discovery.proxy import Proxy
from lab.discovery.registry import Port, Service, ServiceTarget
from lab.manifests import model

CLEANUP_NEVER = 9223372035.0
"""Seconds; the largest that Envoy takes (istio/istio: cluster_builder.go: maxSecondsValue)."""


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


class _Options:
    """HttpProtocolOptions in the making; attached to the cluster only if something was set."""

    def __init__(self) -> None:
        self.message = http_protocol_options_pb2.HttpProtocolOptions()

    @property
    def http2(self) -> bool:
        explicit = self.message.HasField("explicit_http_config")
        kind = self.message.explicit_http_config.WhichOneof("protocol_config") if explicit else ""
        return bool(kind == "http2_protocol_options")

    def set_http2(self) -> None:
        if self.message.WhichOneof("upstream_protocol_options") is None:
            self.message.explicit_http_config.http2_protocol_options.SetInParent()

    def use_downstream(self) -> None:
        self.message.use_downstream_protocol_config.http_protocol_options.SetInParent()
        self.message.use_downstream_protocol_config.http2_protocol_options.SetInParent()

    def attach(self, cluster: Any) -> None:
        if self.message.ByteSize() or self.message.WhichOneof("upstream_protocol_options"):
            if self.message.WhichOneof("upstream_protocol_options") is None:
                # Envoy asks for one of them; HTTP/1.1 is what it would take anyway
                self.message.explicit_http_config.http_protocol_options.SetInParent()
            cluster.typed_extension_protocol_options[protoconv.HTTP_PROTOCOL_OPTIONS].CopyFrom(
                protoconv.to_any(self.message)
            )


def _thresholds() -> Any:
    unlimited = protoconv.uint32(MAX_UINT32)
    return circuit_breaker_pb2.CircuitBreakers.Thresholds(
        max_connections=unlimited, max_pending_requests=unlimited, max_requests=unlimited, max_retries=unlimited
    )


# --- connection pool, load balancer, outlier detection ----------------------------------------------


def pool_as_data(pool: model.ConnectionPool) -> dict[str, Any]:
    """A Sidecar's connection pool in the shape that a DestinationRule's has."""
    out: dict[str, Any] = {}
    if pool.tcp is not None:
        tcp: dict[str, Any] = {
            "maxConnections": pool.tcp.max_connections,
            "connectTimeout": pool.tcp.connect_timeout,
            "maxConnectionDuration": pool.tcp.max_connection_duration,
            "idleTimeout": pool.tcp.idle_timeout,
        }
        if pool.tcp.keepalive is not None:
            probes, time, interval = pool.tcp.keepalive
            tcp["tcpKeepalive"] = {"probes": probes, "time": time or None, "interval": interval or None}
        out["tcp"] = tcp
    if pool.http is not None:
        out["http"] = {
            "http1MaxPendingRequests": pool.http.http1_max_pending_requests,
            "http2MaxRequests": pool.http.http2_max_requests,
            "maxRequestsPerConnection": pool.http.max_requests_per_connection,
            "maxRetries": pool.http.max_retries,
            "idleTimeout": pool.http.idle_timeout,
            "h2UpgradePolicy": pool.http.h2_upgrade_policy,
            "useClientProtocol": pool.http.use_client_protocol,
            "maxConcurrentStreams": pool.http.max_concurrent_streams,
        }
    return out


def _positive(value: Any) -> int:
    try:
        number = int(value or 0)
    except (TypeError, ValueError):
        return 0
    return max(number, 0)


def _connection_pool(
    proxy: Proxy,
    cluster: Any,
    options: _Options,
    pool: Mapping[str, Any],
    retry_budget: Mapping[str, Any] | None = None,
) -> None:
    """Thresholds, timeouts and HTTP limits. Zero and negative numbers mean unset."""
    http, tcp = _mapping(pool.get("http")), _mapping(pool.get("tcp"))
    threshold = _thresholds()
    for key, field in (
        ("http2MaxRequests", "max_requests"),
        ("http1MaxPendingRequests", "max_pending_requests"),
        ("maxRetries", "max_retries"),
    ):
        if _positive(http.get(key)):
            getattr(threshold, field).value = _positive(http[key])
    if _positive(tcp.get("maxConnections")):
        threshold.max_connections.value = _positive(tcp["maxConnections"])
    if retry_budget is not None:
        percent = _mapping(retry_budget.get("percent")).get("value", retry_budget.get("percent"))
        threshold.retry_budget.budget_percent.value = 20.0 if percent is None else float(percent)
        concurrency = _positive(retry_budget.get("minRetryConcurrency")) or 3
        threshold.retry_budget.min_retry_concurrency.CopyFrom(protoconv.uint32(concurrency))
    cluster.circuit_breakers.thresholds.append(threshold)
    connect = parse_go_duration(tcp.get("connectTimeout"))
    cluster.connect_timeout.CopyFrom(
        protoconv.duration(proxy.mesh_config.connect_timeout if connect is None else connect)
    )
    _keepalive(cluster, proxy.mesh_config.raw.get("tcpKeepalive"), tcp.get("tcpKeepalive"))
    idle = parse_go_duration(http.get("idleTimeout"))
    if idle is None:
        idle = parse_go_duration(tcp.get("idleTimeout"))
    lifetime = parse_go_duration(tcp.get("maxConnectionDuration"))
    per_connection = _positive(http.get("maxRequestsPerConnection"))
    common = options.message.common_http_protocol_options
    if idle is not None:
        common.idle_timeout.CopyFrom(protoconv.duration(idle))
    if lifetime is not None:
        common.max_connection_duration.CopyFrom(protoconv.duration(lifetime))
    if per_connection:
        common.max_requests_per_connection.CopyFrom(protoconv.uint32(per_connection))
    if options.http2:
        http2 = options.message.explicit_http_config.http2_protocol_options
        if _positive(http.get("maxConcurrentStreams")):
            http2.max_concurrent_streams.CopyFrom(protoconv.uint32(_positive(http["maxConcurrentStreams"])))
        keepalive = _mapping(http.get("http2KeepAlive"))
        if keepalive:
            for key in ("interval", "timeout"):
                seconds = parse_go_duration(keepalive.get(key))
                if seconds is not None:
                    getattr(http2.connection_keepalive, key).CopyFrom(protoconv.duration(seconds))
    if http.get("useClientProtocol"):
        options.use_downstream()


def _keepalive(cluster: Any, mesh: Any, rule: Any) -> None:
    """TCP keepalive of the mesh, overlaid field by field by the rule's."""
    if mesh is None and rule is None:
        return
    keepalive = {**_mapping(mesh), **{k: v for k, v in _mapping(rule).items() if v}}
    out = cluster.upstream_connection_options.tcp_keepalive
    out.SetInParent()  # present but empty: on, with the kernel's defaults
    if _positive(keepalive.get("probes")):
        out.keepalive_probes.CopyFrom(protoconv.uint32(_positive(keepalive["probes"])))
    for key, field in (("time", "keepalive_time"), ("interval", "keepalive_interval")):
        seconds = parse_go_duration(keepalive.get(key))
        if seconds:
            getattr(out, field).CopyFrom(protoconv.uint32(int(seconds)))


def _upgrades_to_http2(proxy: Proxy, port: Port, pool: Mapping[str, Any]) -> bool:
    http = _mapping(pool.get("http"))
    if http.get("useClientProtocol"):
        return False
    wanted = str(http.get("h2UpgradePolicy") or "DEFAULT")
    if wanted == "UPGRADE":
        return True
    if wanted == "DO_NOT_UPGRADE":
        return False
    return proxy.mesh_config.h2_upgrade and port.listener_class == "HTTP"


def _slow_start(settings: Mapping[str, Any]) -> Any:
    warmup = _mapping(settings.get("warmup"))
    out = cluster_pb2.Cluster.SlowStartConfig()
    if warmup:
        window = parse_go_duration(warmup.get("duration"))
        out.aggression.CopyFrom(
            base_pb2.RuntimeDouble(default_value=float(_number(warmup.get("aggression"), 1.0)), runtime_key="(")
        )
        out.min_weight_percent.value = float(_number(warmup.get("minimumPercent"), 10.0))
    else:
        window = parse_go_duration(settings.get("warmupDurationSecs"))
    if window is None:
        return None
    out.slow_start_window.CopyFrom(protoconv.duration(window))
    return out


def _number(value: Any, default: float) -> float:
    value = _mapping(value).get("value", value) if isinstance(value, Mapping) else value
    return default if value is None else float(value)


def _load_balancer(cluster: Any, settings: Mapping[str, Any], policy: traffic_policy.Policy, service: Service) -> None:
    if not cluster.common_lb_config.HasField("healthy_panic_threshold") and policy.sends_unhealthy(service):
        cluster.common_lb_config.healthy_panic_threshold.value = 0
        cluster.common_lb_config.healthy_panic_threshold.SetInParent()
    if cluster.type == cluster_pb2.Cluster.ORIGINAL_DST:
        cluster.lb_policy = cluster_pb2.Cluster.CLUSTER_PROVIDED
        return
    simple = str(settings.get("simple") or "")
    slow_start = _slow_start(settings)
    if simple == "PASSTHROUGH":
        cluster.type = cluster_pb2.Cluster.ORIGINAL_DST
        cluster.lb_policy = cluster_pb2.Cluster.CLUSTER_PROVIDED
        cluster.ClearField("load_assignment")
        cluster.ClearField("eds_cluster_config")
        return
    if simple == "RANDOM":
        cluster.lb_policy = cluster_pb2.Cluster.RANDOM
    elif simple == "ROUND_ROBIN":
        cluster.lb_policy = cluster_pb2.Cluster.ROUND_ROBIN
        if slow_start is not None:
            cluster.round_robin_lb_config.slow_start_config.CopyFrom(slow_start)
    else:
        cluster.lb_policy = cluster_pb2.Cluster.LEAST_REQUEST
        if slow_start is not None:
            cluster.least_request_lb_config.slow_start_config.CopyFrom(slow_start)
    hashing = settings.get("consistentHash")
    if not isinstance(hashing, Mapping):
        return
    cluster.ClearField("lb_config")
    if "maglev" in hashing:
        cluster.lb_policy = cluster_pb2.Cluster.MAGLEV
        size = _positive(_mapping(hashing["maglev"]).get("tableSize"))
        if size:
            cluster.maglev_lb_config.table_size.value = size
        return
    cluster.lb_policy = cluster_pb2.Cluster.RING_HASH
    if "ringHash" in hashing:
        size = _positive(_mapping(hashing["ringHash"]).get("minimumRingSize"))
    else:
        size = _positive(hashing.get("minimumRingSize")) or 1024
    if size:
        cluster.ring_hash_lb_config.minimum_ring_size.value = size


def _outlier_detection(cluster: Any, options: _Options, written: Mapping[str, Any], service: Service) -> None:
    out = outlier_detection_pb2.OutlierDetection(enforcing_success_rate=protoconv.uint32(0))
    for key, field, enforcing in (
        ("consecutive5xxErrors", "consecutive_5xx", "enforcing_consecutive_5xx"),
        ("consecutiveGatewayErrors", "consecutive_gateway_failure", "enforcing_consecutive_gateway_failure"),
    ):
        if written.get(key) is not None:
            count = _positive(written[key])
            getattr(out, field).CopyFrom(protoconv.uint32(count))
            getattr(out, enforcing).CopyFrom(protoconv.uint32(100 if count else 0))
    for key, field in (("interval", "interval"), ("baseEjectionTime", "base_ejection_time")):
        seconds = parse_go_duration(written.get(key))
        if seconds is not None:
            getattr(out, field).CopyFrom(protoconv.duration(seconds))
    if _positive(written.get("maxEjectionPercent")):
        out.max_ejection_percent.CopyFrom(protoconv.uint32(_positive(written["maxEjectionPercent"])))
    if written.get("splitExternalLocalOriginErrors"):
        out.split_external_local_origin_errors = True
        failures = _positive(written.get("consecutiveLocalOriginFailures"))
        if failures:
            out.consecutive_local_origin_failure.CopyFrom(protoconv.uint32(failures))
            out.enforcing_consecutive_local_origin_failure.CopyFrom(protoconv.uint32(100))
        out.enforcing_local_origin_success_rate.CopyFrom(protoconv.uint32(0))
    cluster.outlier_detection.CopyFrom(out)
    threshold = cluster.common_lb_config.healthy_panic_threshold
    threshold.value = 0.0 if service.traffic_distribution else float(written.get("minHealthPercent") or 0)
    threshold.SetInParent()
    codes = written.get("outlierDetectionHttpErrorCodes") or ()
    if codes:
        rules = [
            matcher_pb2.MatchPredicate(
                http_response_headers_match=matcher_pb2.HttpHeadersMatch(
                    headers=[route_components_pb2.HeaderMatcher(name=":status", string_match={"exact": str(int(code))})]
                )
            )
            for code in codes
        ]
        matcher = rules[0] if len(rules) == 1 else matcher_pb2.MatchPredicate(or_match={"rules": rules})
        options.message.outlier_detection.error_matcher.CopyFrom(matcher)


# --- upstream TLS -------------------------------------------------------------------------------------


def default_sni(port: int, subset: str, host: str) -> str:
    """The SNI by which sidecars name a cluster, e.g. ``outbound_.8080_._.catalog.catalog.svc.cluster.local``."""
    return f"outbound_.{port}_.{subset}_.{host}"


def _auto_mtls(proxy: Proxy, service: Service, port: Port, policy: traffic_policy.Policy) -> bool:
    """Whether mTLS is detected for a service without DestinationRule tls."""
    if service.mesh_external or not proxy.mesh_config.enable_auto_mtls:
        return False
    passthrough = _mapping(policy.load_balancer).get("simple") == "PASSTHROUGH"
    if service.resolution == "Passthrough" or passthrough:
        found = proxy.push.registry.port_endpoints(service, port)
        if not found or any(e.tls_mode == "disabled" for e in found):
            return False
    return proxy.push.peer_authentications.namespace_mode(service.namespace) != "DISABLE"


def _upstream_tls(
    proxy: Proxy,
    cluster: Any,
    options: _Options,
    service: Service,
    port: Port,
    subset: str,
    policy: traffic_policy.Policy,
) -> None:
    written = policy.tls
    sni = default_sni(port.port, subset, service.host)
    if written is None:
        if not _auto_mtls(proxy, service, port, policy):
            return
        socket = tls.istio_mutual(sni, proxy.push.registry.identities(service), options.http2)
        if cluster.type == cluster_pb2.Cluster.ORIGINAL_DST:
            cluster.transport_socket.CopyFrom(socket)
            return
        meshed = cluster.transport_socket_matches.add(name="tlsMode-istio", transport_socket=socket)
        meshed.match.update({"tlsMode": "istio"})
        plain = cluster.transport_socket_matches.add(name="tlsMode-disabled", transport_socket=tls.raw_buffer())
        plain.match.SetInParent()
        return
    mode = policy.tls_mode
    sans = [str(s) for s in written.get("subjectAltNames") or ()]
    if mode == "ISTIO_MUTUAL":
        own = proxy.push.registry.identities(service) if written.get("subjectAltNames") is None else sans
        cluster.transport_socket.CopyFrom(tls.istio_mutual(str(written.get("sni") or sni), own, options.http2))
    elif mode in ("SIMPLE", "MUTUAL"):
        _originate(cluster, options, service, written, sans, policy)


def _originate(
    cluster: Any,
    options: _Options,
    service: Service | None,
    written: Mapping[str, Any],
    sans: Sequence[str],
    policy: traffic_policy.Policy,
) -> None:
    mutual = policy.tls_mode == "MUTUAL"
    credential = str(written.get("credentialName") or "")
    if credential and not policy.has_selector:
        return  # would hand the secret to every sidecar: Istio leaves the cluster plaintext
    certificate, key = str(written.get("clientCertificate") or ""), str(written.get("privateKey") or "")
    if mutual and not credential and not (certificate and key):
        return
    skip = bool(written.get("insecureSkipVerify"))
    own_sni = str(written.get("sni") or "")
    dynamic = cluster.HasField("cluster_type")
    checks_name = (dynamic or (not own_sni and not sans)) and not skip
    if not own_sni or checks_name:
        upstream = options.message.upstream_http_protocol_options
        upstream.auto_sni = not own_sni
        upstream.auto_san_validation = checks_name
    if dynamic and (own_sni or not checks_name):
        config = dynamic_cluster_pb2.ClusterConfig.FromString(cluster.cluster_type.typed_config.value)
        config.allow_insecure_cluster_options = True
        cluster.cluster_type.typed_config.CopyFrom(protoconv.to_any(config))
    if service is not None and service.registry == "External" and not sans:
        sans = service.subject_alt_names
    cluster.transport_socket.CopyFrom(
        tls.originate(
            sni=own_sni,
            sans=sans,
            ca_file=str(written.get("caCertificates") or ""),
            client_certificate=certificate if mutual else "",
            private_key=key if mutual else "",
            skip_verify=skip,
            http2=options.http2,
            credential=credential,
            mutual=mutual,
        )
    )


def _proxy_protocol(cluster: Any, written: Mapping[str, Any]) -> None:
    def wrap(socket: Any) -> Any:
        config = upstream_proxy_protocol_pb2.ProxyProtocolUpstreamTransport(transport_socket=socket)
        config.config.version = 1 if str(written.get("version") or "V1") == "V2" else 0
        return base_pb2.TransportSocket(
            name="envoy.transport_sockets.upstream_proxy_protocol", typed_config=protoconv.to_any(config)
        )

    if cluster.HasField("transport_socket"):
        cluster.transport_socket.CopyFrom(wrap(cluster.transport_socket))
    elif not cluster.transport_socket_matches:
        cluster.transport_socket.CopyFrom(wrap(tls.raw_buffer()))
    for match in cluster.transport_socket_matches:
        match.transport_socket.CopyFrom(wrap(match.transport_socket))


# --- outbound -----------------------------------------------------------------------------------------


@cache
def _cares() -> Any:
    return extension_pb2.TypedExtensionConfig(
        name="envoy.network.dns_resolver.cares",
        typed_config=protoconv.to_any(
            cares_dns_resolver_pb2.CaresDnsResolverConfig(udp_max_queries=protoconv.uint32(100))
        ),
    )


def _set_protocol(options: _Options, port: Port) -> None:
    if port.is_http2:
        options.set_http2()
    elif port.protocol == "AUTO":
        options.use_downstream()


def _istio_metadata(service: Service, policy: traffic_policy.Policy, subset: str) -> Any:
    data: dict[str, Any] = {"services": [{"host": service.host, "name": service.name, "namespace": service.namespace}]}
    if policy.config_path:
        data["config"] = policy.config_path
    if subset:
        data["subset"] = subset
    if service.mesh_external:
        data["external"] = True
    if policy.tls is not None and policy.tls_mode in ("SIMPLE", "MUTUAL"):
        data["alpn_override"] = "false"
    return protoconv.metadata(istio=data)


def _outbound(proxy: Proxy, service: Service, port: Port, subset: str) -> Any:
    """One outbound cluster, None for a DNS cluster without endpoints."""
    policy = traffic_policy.for_cluster(proxy, service, port, subset)
    name = protoconv.cluster_name("outbound", port.port, subset, service.host)
    cluster = cluster_pb2.Cluster(name=name, alt_stat_name=f"{name};")
    cluster.common_lb_config.SetInParent()
    options = _Options()
    _set_protocol(options, port)
    if service.resolution == "ClientSideLB":
        cluster.type = cluster_pb2.Cluster.EDS
        cluster.eds_cluster_config.eds_config.CopyFrom(protoconv.ads())
        cluster.eds_cluster_config.service_name = name
    elif service.resolution in ("DNSLB", "DNSRoundRobinLB"):
        if not _dns(proxy, cluster, service, port, subset, policy):
            return None
    elif service.resolution == "DynamicDNS":
        _dynamic_dns(proxy, cluster, service)
    else:
        cluster.type = cluster_pb2.Cluster.ORIGINAL_DST
        if isinstance(port.target, int) and port.target not in (0, port.port) and not service.headless:
            cluster.original_dst_lb_config.upstream_port_override.CopyFrom(protoconv.uint32(port.target))
    cluster.metadata.CopyFrom(_istio_metadata(service, policy, subset))
    pool = policy.connection_pool or {}
    if _upgrades_to_http2(proxy, port, pool):
        options.set_http2()
    _connection_pool(proxy, cluster, options, pool, policy.retry_budget)
    if policy.outlier_detection is not None:
        _outlier_detection(cluster, options, policy.outlier_detection, service)
    if not cluster.HasField("cluster_type"):
        _load_balancer(cluster, policy.load_balancer or {}, policy, service)
    _upstream_tls(proxy, cluster, options, service, port, subset, policy)
    if policy.proxy_protocol is not None:
        _proxy_protocol(cluster, policy.proxy_protocol)
    options.attach(cluster)
    return cluster


def _dns(proxy: Proxy, cluster: Any, service: Service, port: Port, subset: str, policy: traffic_policy.Policy) -> bool:
    strict = service.resolution == "DNSLB" and not service.race_connect
    chosen = endpoints.select(proxy, service, port, subset, policy)
    groups = endpoints.locality_endpoints(proxy, service, chosen if strict else chosen[:1], policy)
    if not groups:
        return False
    cluster.type = cluster_pb2.Cluster.STRICT_DNS if strict else cluster_pb2.Cluster.LOGICAL_DNS
    cluster.dns_lookup_family = "ALL" if service.race_connect else filters.lookup_family(proxy)
    cluster.typed_dns_resolver_config.CopyFrom(_cares())
    cluster.dns_jitter.CopyFrom(protoconv.duration(0.1))
    cluster.dns_refresh_rate.CopyFrom(protoconv.duration(proxy.mesh_config.dns_refresh_rate))
    cluster.respect_dns_ttl = True
    cluster.load_assignment.cluster_name = cluster.name
    cluster.load_assignment.endpoints.extend(groups)
    return True


def _dynamic_dns(proxy: Proxy, cluster: Any, service: Service) -> None:
    config = dynamic_cluster_pb2.ClusterConfig()
    config.dns_cache_config.name = filters.dns_cache_name(service.host)
    config.dns_cache_config.dns_lookup_family = filters.lookup_family(proxy)
    cluster.cluster_type.name = "envoy.clusters.dynamic_forward_proxy"
    cluster.cluster_type.typed_config.CopyFrom(protoconv.to_any(config))
    cluster.lb_policy = cluster_pb2.Cluster.CLUSTER_PROVIDED


def _all_outbound(proxy: Proxy) -> list[Any]:
    out: list[Any] = []
    seen: set[str] = set()
    for service in proxy.scope.services:
        if service.resolution == "Alias":
            continue
        rule = proxy.destination_rule(service.host)
        subsets = [str(s.get("name", "")) for s in rule.subsets] if rule and service.resolution != "DynamicDNS" else []
        for port in service.ports:
            if port.protocol == "UDP":
                continue
            for subset in ("", *subsets):
                cluster = proxy.shared(
                    ("cluster", port.port, subset), service, partial(_outbound, proxy, service, port, subset)
                )
                if cluster is None:
                    continue
                if cluster.name in seen:
                    proxy.push.add_metric(
                        "pilot_duplicate_envoy_clusters", cluster.name, f"Duplicate cluster {cluster.name}"
                    )
                    continue
                seen.add(cluster.name)
                out.append(cluster)
    out.append(_black_hole(proxy))
    out.append(_passthrough(proxy, protoconv.PASSTHROUGH_CLUSTER))
    if filters.allows_any_by_name(proxy):
        out.append(_allow_any_by_name(proxy))
    return out


def outbound_clusters(proxy: Proxy) -> list[Any]:
    """Clusters for every imported service port and subset, then BlackHoleCluster, PassthroughCluster and, if the mesh
    looks unknown hosts up by name, AllowAnyDynamicDNSCluster."""
    return proxy.memo("outbound_clusters", lambda: _all_outbound(proxy))


def _black_hole(proxy: Proxy) -> Any:
    name = protoconv.BLACK_HOLE_CLUSTER
    return cluster_pb2.Cluster(
        name=name,
        alt_stat_name=f"{name};",
        type=cluster_pb2.Cluster.STATIC,
        connect_timeout=protoconv.duration(proxy.mesh_config.connect_timeout),
        lb_policy=cluster_pb2.Cluster.ROUND_ROBIN,
    )


def _passthrough(proxy: Proxy, name: str) -> Any:
    cluster = cluster_pb2.Cluster(
        name=name,
        alt_stat_name=f"{name};",
        type=cluster_pb2.Cluster.ORIGINAL_DST,
        lb_policy=cluster_pb2.Cluster.CLUSTER_PROVIDED,
    )
    # Of the mesh's default pool the limits of connections count here, not what it says about HTTP.
    _connection_pool(proxy, cluster, _Options(), _mapping(traffic_policy.mesh_default(proxy).get("connectionPool")))
    _passthrough_options().attach(cluster)
    return cluster


def _passthrough_options() -> _Options:
    options = _Options()
    options.use_downstream()
    options.message.common_http_protocol_options.idle_timeout.CopyFrom(protoconv.duration(300))
    return options


def _allow_any_by_name(proxy: Proxy) -> Any:
    """The cluster of hosts that are looked up by name, over TLS if the mesh's outboundTrafficPolicy says so."""
    name = protoconv.ALLOW_ANY_DYNAMIC_DNS_CLUSTER
    written = _mapping(_mapping(proxy.mesh_config.raw.get("outboundTrafficPolicy")).get("tls"))
    policy = traffic_policy.Policy(tls=written or None)
    cluster = cluster_pb2.Cluster(name=name, alt_stat_name=f"{name};", lb_policy=cluster_pb2.Cluster.CLUSTER_PROVIDED)
    config = dynamic_cluster_pb2.ClusterConfig(
        dns_cache_config=filters.allow_any_dns_cache(proxy), allow_insecure_cluster_options=policy.tls_mode == "DISABLE"
    )
    cluster.cluster_type.name = "envoy.clusters.dynamic_forward_proxy"
    cluster.cluster_type.typed_config.CopyFrom(protoconv.to_any(config))
    options = _passthrough_options()
    _connection_pool(proxy, cluster, _Options(), {})
    sans = [str(s) for s in written.get("subjectAltNames") or ()]
    if policy.tls_mode == "ISTIO_MUTUAL":
        cluster.transport_socket.CopyFrom(tls.istio_mutual(str(written.get("sni") or ""), sans, options.http2))
    elif policy.tls_mode in ("SIMPLE", "MUTUAL"):
        _originate(cluster, options, None, written, sans, policy)
    options.attach(cluster)
    return cluster


# --- inbound ------------------------------------------------------------------------------------------


def _bind_config(proxy: Proxy) -> Any:
    """Upstream connections to the workload come from 127.0.0.6 (::6), which the rules let through untouched."""
    sources = ["127.0.0.6" if family == 4 else "::6" for family in proxy.node.families]
    return address_pb2.BindConfig(
        source_address=address_pb2.SocketAddress(address=sources[0], port_value=0),
        extra_source_addresses=[
            address_pb2.ExtraSourceAddress(address=address_pb2.SocketAddress(address=s, port_value=0))
            for s in sources[1:]
        ],
    )


def _endpoint_of(proxy: Proxy, default_endpoint: str) -> tuple[str, int] | None:
    """(address, port) of an ingress listener's defaultEndpoint; None for the original destination."""
    if not default_endpoint:
        return None
    if default_endpoint.startswith("unix://"):
        return default_endpoint, 0
    host, _, port = default_endpoint.rpartition(":")
    host = host.strip("[]")
    if not port.isdigit():
        return None
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    if address.is_unspecified:
        own = next((ip for ip in proxy.node.ips if ipaddress.ip_address(ip).version == address.version), None)
        return (own, int(port)) if own else None
    return str(address), int(port)


def _inbound(
    proxy: Proxy,
    port_number: int,
    port: Port,
    owner: Service | None,
    hosts: Sequence[Mapping[str, str]],
    target: tuple[str, int] | None,
) -> Any:
    name = inbound_cluster(port_number)
    cluster = cluster_pb2.Cluster(name=name, alt_stat_name=f"{name};")
    options = _Options()
    _set_protocol(options, port)
    if target is None:
        cluster.type = cluster_pb2.Cluster.ORIGINAL_DST
        cluster.lb_policy = cluster_pb2.Cluster.CLUSTER_PROVIDED
        cluster.cleanup_interval.CopyFrom(protoconv.duration(CLEANUP_NEVER))
    else:
        cluster.type = cluster_pb2.Cluster.STATIC
        cluster.load_assignment.CopyFrom(
            endpoint_pb2.ClusterLoadAssignment(
                cluster_name=name,
                endpoints=[
                    endpoint_components_pb2.LocalityLbEndpoints(
                        lb_endpoints=[
                            endpoint_components_pb2.LbEndpoint(
                                endpoint=endpoint_components_pb2.Endpoint(address=protoconv.socket_address(*target))
                            )
                        ]
                    )
                ],
            )
        )
    data: dict[str, Any] = {"services": [dict(h) for h in hosts]} if hosts else {}
    pool: Mapping[str, Any] = _mapping(traffic_policy.mesh_default(proxy).get("connectionPool"))
    if owner is not None:
        policy = traffic_policy.for_cluster(proxy, owner, port, "", outbound=False)
        pool = policy.connection_pool or {}
        if policy.config_path:
            data["config"] = policy.config_path
    sidecar_pool = proxy.scope.inbound_connection_pool(port_number)
    if sidecar_pool is not None:
        pool = pool_as_data(sidecar_pool)
    if data:
        cluster.metadata.CopyFrom(protoconv.metadata(istio=data))
    _connection_pool(proxy, cluster, options, pool)
    if target is None or target[0] not in ("127.0.0.1", "::1"):
        cluster.upstream_bind_config.CopyFrom(_bind_config(proxy))
    options.attach(cluster)
    return cluster


def inbound_clusters(proxy: Proxy) -> list[Any]:
    """One cluster per workload port (of the Sidecar's ingress alone, if it has one), then InboundPassthroughCluster."""
    out: list[Any] = []
    if proxy.scope.ingress:
        for ingress in proxy.scope.ingress:
            if any(c.name == inbound_cluster(ingress.port) for c in out):
                continue
            owner = next((t for t in proxy.targets if t.target_port == ingress.port), None)
            port = Port(ingress.port, ingress.name, ingress.protocol)
            hosts = [_service_metadata(owner)] if owner else []
            target = _endpoint_of(proxy, ingress.default_endpoint)
            out.append(_inbound(proxy, ingress.port, port, owner.service if owner else None, hosts, target))
    elif proxy.node.interception_mode != "NONE":
        by_port: dict[int, list[ServiceTarget]] = {}
        for one in proxy.targets:
            if one.port.listener_class != "NONE":
                by_port.setdefault(one.target_port, []).append(one)
        for number, found in by_port.items():
            target = None
            if proxy.mesh_config.inbound_localhost:
                target = (proxy.node.localhosts[0], number)
            first = found[0]
            hosts = [_service_metadata(f) for f in found]
            out.append(_inbound(proxy, number, first.port, first.service, hosts, target))
    passthrough = _passthrough(proxy, protoconv.INBOUND_PASSTHROUGH_CLUSTER)
    passthrough.upstream_bind_config.CopyFrom(_bind_config(proxy))
    out.append(passthrough)
    return out


def _service_metadata(target: ServiceTarget) -> dict[str, str]:
    service = target.service
    return {"host": service.host, "name": service.name, "namespace": service.namespace}

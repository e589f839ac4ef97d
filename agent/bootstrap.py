"""The Envoy bootstrap of a proxy, as a JSON-ready dict. Pure.

Source: istio/istio: tools/packaging/common/envoy_bootstrap.json, pkg/bootstrap/config.go, pkg/bootstrap/option/.
One deviation: the ADS stream carries `retry_back_off` 0.2 s / 1 s, because Envoy's own back-off climbs to 30 s.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent import network, paths
from agent.duration import format_duration, parse_duration
from agent.environment import parse_int
from agent.node import Node
from agent.protos import proxy_config_pb2 as pb
from agent.proxy_config import split_host_port

log = logging.getLogger("default")

Json = dict[str, Any]

ADS_RETRY_BASE = "0.2s"
ADS_RETRY_MAX = "1s"
XDS_SOCKET = "XDS"
UNLIMITED = 2147483647

_TYPE = "type.googleapis.com/"
_HCM = _TYPE + "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"

TEXT_LOG_FORMAT = "%Y-%m-%dT%T.%fZ\t%l\tenvoy %n %g:%#\t%v\tthread=%t"

# Tag name -> regex; the extra tags come between these two lists.
_TAGS_BEFORE = (
    ("cluster_name", r"^cluster(\.(.+);)"),
    ("http_conn_manager_prefix", r"^http\.(((?:[_.[:digit:]\w]*|[_\[\]aAbBcCdDeEfF[:digit:]\w\:]*));\.)"),
    ("thread_name", r"^server(\.(.+))\.watchdog"),
    ("tcp_prefix", r"^tcp\.((.*?)\.)\w+?$"),
    ("response_code", r"_rq(_(\d{3}))$"),
    ("response_code_class", r"_rq(_(\dxx))$"),
    (
        "http_conn_manager_listener_prefix",
        r"^listener(?=\.).*?\.http\.(((?:[_.[:digit:]]*|[_\[\]aAbBcCdDeEfF[:digit:]]*))\.)",
    ),
    ("listener_address", r"^listener\.(((?:[_.[:digit:]]*|[_\[\]aAbBcCdDeEfF[:digit:]]*))\.)"),
    ("mongo_prefix", r"^mongo\.(.+?)\.(collection|cmd|cx_|op_|delays_|decoding_)(.*?)$"),
)
_TAGS_AFTER = (
    ("cache", r"(cache\.(.+?)\.)"),
    ("component", r"(component\.(.+?)\.)"),
    ("tag", r"(tag\.(.+?);\.)"),
    ("wasm_filter", r"(wasm_filter\.(.+?)\.)"),
    ("authz_enforce_result", r"rbac(\.(allowed|denied))"),
    ("authz_dry_run_action", r"(\.istio_dry_run_(allow|deny)_)"),
    ("authz_dry_run_result", r"(\.shadow_(allowed|denied))"),
)
_REQUIRED_PREFIXES = ("cluster_manager", "listener_manager", "server", "cluster.xds-grpc", "wasm")
_REQUIRED_SUFFIXES = ("rbac.allowed", "rbac.denied", "shadow_allowed", "shadow_denied")
_REQUIRED_REGEXPS = (r"vhost\..*\.route\..*",)
_COMPRESSED_TYPES = (
    "text/plain",
    "application/vnd.google.protobuf",
    "application/openmetrics-text",
    "application/openmetrics-protobuf",
)


@dataclass(frozen=True)
class BootstrapOptions:
    """What the bootstrap depends on besides node and ProxyConfig; the defaults are Istio's."""

    instance_ips: Sequence[str]
    delta_xds: bool = True
    dual_stack: bool = False
    log_as_json: bool = False
    status_port_proxy_protocol: bool = False
    strip_fragment: bool = True
    compliance_policy: str = ""
    host_ip: str = ""


@dataclass(frozen=True)
class AddressFamily:
    """The literals that depend on the node's addresses; `additional_wildcard` only with dual stack."""

    localhost: str
    wildcard: str
    dns_lookup_family: str
    additional_wildcard: str = ""


def address_family(instance_ips: Sequence[str], dual_stack: bool) -> AddressFamily:
    """Chooses the address literals from the node's addresses."""
    if network.all_ipv4(instance_ips):
        return AddressFamily("127.0.0.1", "0.0.0.0", "V4_ONLY")
    if network.all_ipv6(instance_ips):
        return AddressFamily("::1", "::", "V6_ONLY")
    if not dual_stack:
        return AddressFamily("127.0.0.1", "0.0.0.0", "V4_ONLY")
    if ":" in instance_ips[0]:
        return AddressFamily("::1", "::", "ALL", "0.0.0.0")
    return AddressFamily("127.0.0.1", "0.0.0.0", "ALL", "::")


def build_bootstrap(node: Node, config: pb.ProxyConfig, options: BootstrapOptions) -> Json:
    """The whole bootstrap for `node`.

    Raises:
        ValueError: a remote service's address is malformed.
    """
    return _Builder(node, config, options).build()


class _Builder:
    def __init__(self, node: Node, config: pb.ProxyConfig, options: BootstrapOptions) -> None:
        self.node, self.config, self.options = node, config, options
        self.meta = node.metadata
        self.family = address_family(options.instance_ips, options.dual_stack)
        self.annotations: Mapping[str, str] = self.meta.get("ANNOTATIONS") or {}
        waypoint = node.id.startswith("waypoint~")
        self.delta = options.delta_xds or waypoint
        self.metadata_discovery = waypoint or self.meta.get("METADATA_DISCOVERY") == "true"
        if self.metadata_discovery and not self.delta:
            log.warning("disabling metadata discovery; not supported on SotW XDS")
            self.metadata_discovery = False
        self.self_discovery = self.meta.get("ENABLE_SELF_DISCOVERY") == "true"

    def build(self) -> Json:
        result: Json = {
            "application_log_config": {"log_format": self._log_format()},
            "node": {
                "id": self.node.id,
                "cluster": service_cluster(self.config, self.meta),
                "locality": self.node.locality.to_dict(),
                "metadata": self.meta,
            },
            "layered_runtime": {
                "layers": [
                    {"name": "global config", "static_layer": self._runtime_flags()},
                    {"name": "admin", "admin_layer": {}},
                ]
            },
            "bootstrap_extensions": self._extensions(),
            **self._stats_intervals(),
            "stats_config": self._stats_config(),
            "admin": {
                "access_log": [
                    {
                        "name": "envoy.access_loggers.file",
                        "typed_config": {
                            "@type": _TYPE + "envoy.extensions.access_loggers.file.v3.FileAccessLog",
                            "path": "/dev/null",
                        },
                    }
                ],
                "profile_path": "/var/lib/istio/data/envoy.prof",
                "address": _socket_address(self.family.localhost, self.config.proxy_admin_port),
            },
            "dynamic_resources": self._dynamic_resources(),
            "static_resources": {"clusters": self._clusters(), "listeners": self._listeners()},
            "overload_manager": {
                "resource_monitors": [
                    {
                        "name": "envoy.resource_monitors.global_downstream_max_connections",
                        "typed_config": {
                            "@type": _TYPE + "envoy.extensions.resource_monitors.downstream_connections.v3"
                            ".DownstreamConnectionsConfig",
                            "max_active_downstream_connections": self._connection_limit(),
                        },
                    }
                ]
            },
        }
        tracing = self._tracing()
        if tracing:
            result["tracing"] = tracing
        sinks = self._stats_sinks()
        if sinks:
            result["stats_sinks"] = sinks
        manager = self._cluster_manager()
        if manager:
            result["cluster_manager"] = manager
        result["deferred_stat_options"] = {"enable_deferred_creation_stats": True}
        return result

    def _log_format(self) -> Json:
        if not self.options.log_as_json:
            return {"text_format": TEXT_LOG_FORMAT}
        return {
            "json_format": {
                "time": "%Y-%m-%dT%T.%fZ",
                "level": "%l",
                "scope": "envoy %n",
                "msg": "%j",
                "caller": "%g:%#",
                "thread": "%t",
            }
        }

    def _runtime_flags(self) -> Json:
        flags: Json = {
            "re2.max_program_size.error_level": "32768",
            "envoy.deprecated_features:envoy.config.listener.v3.Listener.hidden_envoy_deprecated_use_original_dst": True,
            "envoy.reloadable_features.http_reject_path_with_fragment": False,
            "envoy.reloadable_features.fixed_heap_use_allocated": True,
            "envoy.reloadable_features.coalesce_lb_rebuilds_on_batch_update": False,
        }
        if self.options.compliance_policy == "fips-140-2":
            flags["envoy.reloadable_features.google_grpc_disable_tls_13"] = True
        if not self.options.strip_fragment:
            flags["envoy.reloadable_features.http_strip_fragment_from_path_unsafe_if_disabled"] = "false"
        for key, value in self.config.runtime_values.items():
            if value == "":
                flags.pop(key, None)
            else:
                flags[key] = {"true": True, "false": False}.get(value, value)
        return dict(sorted(flags.items()))

    def _extensions(self) -> list[Json]:
        def typed(name: str, type_url: str, value: Json) -> Json:
            return {
                "name": name,
                "typed_config": {
                    "@type": _TYPE + "udpa.type.v1.TypedStruct",
                    "type_url": _TYPE + type_url,
                    "value": value,
                },
            }

        internal = typed(
            "envoy.bootstrap.internal_listener",
            "envoy.extensions.bootstrap.internal_listener.v3.InternalListener",
            {"buffer_size_kb": 64},
        )
        if not self.metadata_discovery:
            return [internal]
        discovery: Json = {"config_source": {"ads": {}}}
        return [typed("metadata_discovery", "istio.workload.BootstrapExtension", discovery), internal]

    def _stats_intervals(self) -> dict[str, str]:
        result = {}
        flush = 5_000_000_000
        text = self.annotations.get("sidecar.istio.io/statsFlushInterval")
        if text is not None:
            try:
                flush = parse_duration(text)
                result["stats_flush_interval"] = format_duration(flush)
            except ValueError as error:
                log.warning("Failed to parse stats flush interval %s: %s", text, error)
        text = self.annotations.get("sidecar.istio.io/statsEvictionInterval")
        if text is not None:
            try:
                eviction = parse_duration(text)
            except ValueError as error:
                log.warning("Failed to parse stats eviction interval %s: %s", text, error)
                return result
            if flush <= 0 or eviction % flush:
                log.warning("StatsEvictionInterval must be a multiple of the StatsFlushInterval")
            else:
                result["stats_eviction_interval"] = f"{eviction // 1_000_000_000}s"
        return result

    def _stats_config(self) -> Json:
        extra = [tag for tag in self.config.extra_stat_tags if tag]
        extra += [tag for tag in self.annotations.get("sidecar.istio.io/extraStatTags", "").split(",") if tag]
        tags = [
            *_TAGS_BEFORE,
            *((tag, rf"({tag}=\.=(.*?);\.;)") for tag in dict.fromkeys(extra)),
            *_TAGS_AFTER,
        ]
        stats: Json = {
            "use_all_default_tags": False,
            "stats_tags": [{"tag_name": name, "regex": regex} for name, regex in tags],
        }
        buckets = self._histogram_buckets()
        if buckets:
            stats["histogram_bucket_settings"] = buckets
        stats["stats_matcher"] = {"inclusion_list": {"patterns": self._stats_patterns()}}
        return stats

    def _stats_patterns(self) -> list[Json]:
        matcher = self.config.proxy_stats_matcher
        suffixes: Sequence[str] = _REQUIRED_SUFFIXES
        if self.meta.get("EXIT_ON_ZERO_ACTIVE_CONNECTIONS") == "true":
            suffixes = (*suffixes, "downstream_cx_active")
        prefix = self._inclusion("Prefixes", matcher.inclusion_prefixes, _REQUIRED_PREFIXES)
        suffix = self._inclusion("Suffixes", matcher.inclusion_suffixes, suffixes)
        regexps = self._inclusion("Regexps", matcher.inclusion_regexps, _REQUIRED_REGEXPS)
        patterns: list[Json] = [{"prefix": "reporter="}]
        if self.metadata_discovery:
            patterns.append({"prefix": "workload_discovery"})
        patterns += [{"prefix": text} for text in prefix]
        patterns += [{"suffix": text} for text in suffix]
        patterns += [{"safe_regex": {"regex": text}} for text in regexps]
        return [*patterns, {"prefix": "component"}, {"prefix": "istio"}]

    def _inclusion(self, kind: str, configured: Iterable[str], required: Sequence[str]) -> list[str]:
        annotation = self.annotations.get(f"sidecar.istio.io/statsInclusion{kind}", "")
        patterns = [*(annotation.split(",") if annotation else configured), *required]
        result: list[str] = []
        for pattern in patterns:
            if "{pod_ip}" in pattern:
                result += [pattern.replace("{pod_ip}", address) for address in self.options.instance_ips]
            else:
                result.append(pattern)
        return result

    def _histogram_buckets(self) -> list[Json]:
        text = self.annotations.get("sidecar.istio.io/statsHistogramBuckets")
        if text is None:
            return []
        try:
            buckets = json.loads(text)
            if not isinstance(buckets, dict):
                raise ValueError("not an object")
            return [
                {"match": {"prefix": prefix}, "buckets": [_number(bound) for bound in buckets[prefix]]}
                for prefix in sorted(buckets)
            ]
        except (ValueError, TypeError) as error:
            log.warning("Failed to unmarshal histogram buckets %s: %s", text, error)
            return []

    def _dynamic_resources(self) -> Json:
        over_ads: Json = {"ads": {}, "initial_fetch_timeout": "0s", "resource_api_version": "V3"}
        return {
            "lds_config": over_ads,
            "cds_config": dict(over_ads),
            "ads_config": {
                "api_type": "DELTA_GRPC" if self.delta else "GRPC",
                "set_node_on_first_message_only": True,
                "transport_api_version": "V3",
                "grpc_services": [
                    {
                        "envoy_grpc": {
                            "cluster_name": "xds-grpc",
                            "retry_policy": {
                                "retry_back_off": {"base_interval": ADS_RETRY_BASE, "max_interval": ADS_RETRY_MAX}
                            },
                        }
                    }
                ],
            },
        }

    def _clusters(self) -> list[Json]:
        socket_file = self.meta.get("WORKLOAD_IDENTITY_SOCKET_FILE", "socket")
        clusters = [
            _static_cluster("prometheus_stats", self._local(self.config.proxy_admin_port), "0.250s"),
            _static_cluster("agent", self._local(self.config.status_port), "0.250s"),
            _http2(_static_cluster("sds-grpc", _pipe(f"{paths.WORKLOAD_SOCKET_DIR}/{socket_file}"), "1s")),
        ]
        if "file-credential" in self.meta:
            clusters.append(_http2(_static_cluster("sds-files-grpc", _pipe(paths.CREDENTIAL_FILES_SOCKET), "1s")))
        clusters.append(self._xds_cluster())
        clusters += self._tracer_clusters()
        clusters += self._service_clusters()
        if self.self_discovery:
            clusters.append(self._local_cluster())
        return clusters

    def _local(self, port: int) -> Json:
        address = _socket_address(self.family.localhost, port)
        address["socket_address"]["protocol"] = "TCP"
        return address

    def _xds_cluster(self) -> Json:
        cluster = _static_cluster("xds-grpc", _pipe(f"{self.config.config_path}/{XDS_SOCKET}"), "1s")
        cluster["circuit_breakers"] = {
            "thresholds": [
                {
                    "priority": priority,
                    "max_connections": 100000,
                    "max_pending_requests": 100000,
                    "max_requests": 100000,
                }
                for priority in ("DEFAULT", "HIGH")
            ]
        }
        cluster["upstream_connection_options"] = {"tcp_keepalive": {"keepalive_time": 300}}
        cluster["max_requests_per_connection"] = 1
        return _http2(cluster)

    def _dns_cluster(self, name: str, address: str, tls: Json | None) -> Json:
        cluster: Json = {
            "name": name,
            "alt_stat_name": f"{name};",
            "type": "STRICT_DNS",
            "respect_dns_ttl": True,
            "dns_lookup_family": self.family.dns_lookup_family,
            "connect_timeout": "1s",
            "lb_policy": "ROUND_ROBIN",
            "load_assignment": _load_assignment(name, self._remote(address)),
        }
        if tls is not None:
            cluster["transport_socket"] = tls
        return cluster

    def _remote(self, address: str) -> Json:
        host, port = split_host_port(address)
        if host == "$(HOST_IP)" and self.options.host_ip:
            host = self.options.host_ip
        return _socket_address(host, parse_int(port))

    def _tracer_clusters(self) -> list[Json]:
        tracing = self.config.tracing
        tracer = tracing.WhichOneof("tracer")
        http2 = tracer == "lightstep"
        tls = self._tls(tracing.tls_settings if tracing.HasField("tls_settings") else None, "tracer", http2)
        if tracer == "zipkin":
            cluster = self._dns_cluster("zipkin", tracing.zipkin.address, tls)
            cluster["dns_refresh_rate"] = "30s"
            return [cluster]
        if tracer == "lightstep":
            return [_http2(self._dns_cluster("lightstep", tracing.lightstep.address, tls))]
        if tracer == "datadog":
            return [self._dns_cluster("datadog_agent", tracing.datadog.address, tls)]
        return []

    def _service_clusters(self) -> list[Json]:
        clusters = []
        for name, service in (
            ("envoy_metrics_service", self.config.envoy_metrics_service),
            ("envoy_accesslog_service", self.config.envoy_access_log_service),
        ):
            if not service.address:
                continue
            tls = self._tls(service.tls_settings if service.HasField("tls_settings") else None, name, True)
            cluster = _http2(self._dns_cluster(name, service.address, tls))
            if service.HasField("tcp_keepalive"):
                cluster["upstream_connection_options"] = {"tcp_keepalive": _tcp_keepalive(service.tcp_keepalive)}
            clusters.append(cluster)
        return clusters

    def _tls(self, settings: pb.ClientTLSSettings | None, default_sni: str, http2: bool) -> Json | None:
        modes = pb.ClientTLSSettings
        if settings is None or settings.mode == modes.DISABLE:
            return None
        istio = settings.mode == modes.ISTIO_MUTUAL
        common: Json = {}
        if http2:
            common["alpn_protocols"] = ["istio", "h2"] if istio else ["h2"]
        root = "ROOTCA" if istio else f"file-root:{self.meta.get('TLS_CLIENT_ROOT_CERT') or settings.ca_certificates}"
        validation: Json = {}
        if settings.subject_alt_names:
            validation["match_typed_subject_alt_names"] = [
                {"san_type": san_type, "matcher": {"exact": name}}
                for name in settings.subject_alt_names
                for san_type in ("DNS", "URI")
            ]
        common["combined_validation_context"] = {
            "default_validation_context": validation,
            "validation_context_sds_secret_config": _sds_config(root),
        }
        if istio:
            common["tls_certificate_sds_secret_configs"] = [_sds_config("default")]
        elif settings.mode == modes.MUTUAL:
            chain = self.meta.get("TLS_CLIENT_CERT_CHAIN") or settings.client_certificate
            key = self.meta.get("TLS_CLIENT_KEY") or settings.private_key
            common["tls_certificate_sds_secret_configs"] = [_sds_config(f"file-cert:{chain}~{key}")]
        context: Json = {
            "@type": _TYPE + "envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
            "common_tls_context": common,
        }
        if settings.sni or istio:
            context["sni"] = settings.sni or default_sni
        return {"name": "envoy.transport_sockets.tls", "typed_config": context}

    def _local_cluster(self) -> Json:
        return {
            "name": "local_cluster",
            "alt_stat_name": "local_cluster;",
            "type": "EDS",
            "connect_timeout": "1s",
            "eds_cluster_config": {
                "eds_config": {"ads": {}, "resource_api_version": "V3"},
                "service_name": "local_cluster",
            },
            "load_balancing_policy": {
                "policies": [
                    {
                        "typed_extension_config": {
                            "name": "envoy.load_balancing_policies.least_request",
                            "typed_config": {
                                "@type": _TYPE
                                + "envoy.extensions.load_balancing_policies.least_request.v3.LeastRequest",
                                "locality_lb_config": {"zone_aware_lb_config": {"min_cluster_size": "1"}},
                            },
                        }
                    }
                ]
            },
        }

    def _listeners(self) -> list[Json]:
        stats_host = self.family.wildcard
        localhost_only = self.config.proxy_metadata.get("METRICS_LOCALHOST_ACCESS_ONLY") == "true"
        if localhost_only:
            stats_host = self.family.localhost
        filters = []
        if not self.config.HasField("stats_compression") or self.config.stats_compression.value:
            filters = [_compressor(kind) for kind in ("brotli", "zstd", "gzip")]
        # Metadata leaves out a port of 0, for which the kernel chooses one.
        stats_port = self.meta.get("ENVOY_PROMETHEUS_PORT", 0)
        stats = _listener(
            f"{stats_host}_{stats_port}",
            stats_host,
            stats_port,
            _hcm("stats", [("/stats/prometheus", "prometheus_stats")], filters),
        )
        listeners = [stats]
        other_localhost = "::1" if self.family.localhost == "127.0.0.1" else "127.0.0.1"
        self._dual_stack(stats, other_localhost if localhost_only else self.family.additional_wildcard)
        secure = (
            ("ENVOY_SECURE_METRICS_PORT", "secure_stats", [("/stats/prometheus", "prometheus_stats")]),
            (
                "ENVOY_SECURE_MERGED_METRICS_PORT",
                "secure_merged_stats",
                [("/stats/prometheus", "agent"), ("/metrics", "agent")],
            ),
        )
        for key, prefix, routes in secure:
            port = self.meta.get(key)
            if port:
                name = f"{self.family.wildcard}_{port}"
                listener = _listener(name, self.family.wildcard, port, _hcm(prefix, routes, []))
                listener["listener_filters"] = [_tls_inspector()]
                chain = listener["filter_chains"][0]
                chain["filter_chain_match"] = {"transport_protocol": "tls"}
                chain["transport_socket"] = _downstream_mtls()
                listeners.append(listener)
        status_port = self.meta.get("ENVOY_STATUS_PORT", 0)
        status = _listener(
            f"{self.family.wildcard}_{status_port}",
            self.family.wildcard,
            status_port,
            _hcm("agent", [("/healthz/ready", "agent")], []),
        )
        self._dual_stack(status, self.family.additional_wildcard)
        if self.options.status_port_proxy_protocol:
            status["listener_filters"] = [
                {
                    "name": "envoy.filters.listener.proxy_protocol",
                    "typed_config": {
                        "@type": _TYPE + "envoy.extensions.filters.listener.proxy_protocol.v3.ProxyProtocol"
                    },
                }
            ]
        return [*listeners, status]

    def _dual_stack(self, listener: Json, additional: str) -> None:
        if self.family.additional_wildcard:
            port = listener["address"]["socket_address"]["port_value"]
            address = _socket_address(additional, port)
            address["socket_address"]["protocol"] = "TCP"
            listener["additional_addresses"] = [{"address": address}]

    def _connection_limit(self) -> int:
        limit = self.config.connection_settings.global_downstream_connection_limit.value
        if limit > 0:
            return limit
        for text in (
            self.config.proxy_metadata.get("ISTIO_META_GLOBAL_DOWNSTREAM_MAX_CONNECTIONS", ""),
            self.config.runtime_values.get("overload.global_downstream_max_connections", ""),
        ):
            try:
                return parse_int(text)
            except ValueError:
                continue
        return UNLIMITED

    def _tracing(self) -> Json | None:
        tracer = self.config.tracing.WhichOneof("tracer")
        typed: Json
        if tracer == "zipkin":
            name, typed = (
                "zipkin",
                {
                    "@type": _TYPE + "envoy.config.trace.v3.ZipkinConfig",
                    "collector_cluster": "zipkin",
                    "collector_endpoint": "/api/v2/spans",
                    "collector_endpoint_version": "HTTP_JSON",
                    "trace_id_128bit": True,
                    "shared_span_context": False,
                },
            )
        elif tracer == "lightstep":
            name, typed = (
                "lightstep",
                {
                    "@type": _TYPE + "envoy.config.trace.v3.LightstepConfig",
                    "collector_cluster": "lightstep",
                    "access_token_file": lightstep_token_file(self.config),
                },
            )
        elif tracer == "datadog":
            name, typed = (
                "datadog",
                {
                    "@type": _TYPE + "envoy.config.trace.v3.DatadogConfig",
                    "collector_cluster": "datadog_agent",
                    "service_name": service_cluster(self.config, self.meta),
                },
            )
        else:
            return None
        return {"http": {"name": f"envoy.tracers.{name}", "typed_config": typed}}

    def _stats_sinks(self) -> list[Json]:
        sinks: list[Json] = []
        if self.config.envoy_metrics_service.address:
            sinks.append(
                {
                    "name": "envoy.stat_sinks.metrics_service",
                    "typed_config": {
                        "@type": _TYPE + "envoy.config.metrics.v3.MetricsServiceConfig",
                        "transport_api_version": "V3",
                        "grpc_service": {"envoy_grpc": {"cluster_name": "envoy_metrics_service"}},
                    },
                }
            )
        if self.config.statsd_udp_address:
            sinks.append(
                {
                    "name": "envoy.stat_sinks.statsd",
                    "typed_config": {
                        "@type": _TYPE + "envoy.config.metrics.v3.StatsdSink",
                        "address": self._remote(self.config.statsd_udp_address),
                    },
                }
            )
        return sinks

    def _cluster_manager(self) -> Json | None:
        manager: Json = {}
        if self.meta.get("OUTLIER_LOG_PATH"):
            manager["outlier_detection"] = {"event_log_path": self.meta["OUTLIER_LOG_PATH"]}
        load_stats = self.meta.get("LOAD_STATS_CONFIG_JSON")
        if load_stats:
            try:
                manager["load_stats_config"] = json.loads(load_stats)
            except (ValueError, TypeError) as error:
                log.warning("LOAD_STATS_CONFIG_JSON is not JSON: %s", error)
        if self.self_discovery:
            manager["local_cluster_name"] = "local_cluster"
        if not manager:
            return None
        return {**manager, "enable_deferred_cluster_creation": True}


def service_cluster(config: pb.ProxyConfig, metadata: Mapping[str, Any]) -> str:
    """``node.cluster``: the configured name, else one from labels, workload and namespace."""
    labels: Mapping[str, str] = metadata.get("LABELS") or {}
    namespace: str = metadata.get("NAMESPACE") or ""
    workload: str = metadata.get("WORKLOAD_NAME") or ""

    def or_default(name: str) -> str:
        if name and name != "istio-proxy":
            return name
        for label in ("app", "app.kubernetes.io/name", "service.istio.io/canonical-name"):
            if label in labels:
                return f"{labels[label]}.{namespace}"
        if workload:
            return f"{workload}.{namespace}"
        return f"istio-proxy.{namespace}" if namespace else "istio-proxy"

    naming = config.WhichOneof("cluster_name")
    if naming == "service_cluster":
        return or_default(config.service_cluster)
    if naming == "tracing_service_name" and config.tracing_service_name != pb.ProxyConfig.APP_LABEL_AND_NAMESPACE:
        canonical = workload or "istio-proxy"
        for label in ("service.istio.io/canonical-name", "app.kubernetes.io/name", "app"):
            if label in labels:
                canonical = labels[label]
                break
        if config.tracing_service_name == pb.ProxyConfig.CANONICAL_NAME_AND_NAMESPACE and namespace:
            return f"{canonical}.{namespace}"
        return or_default(canonical)
    return or_default("istio-proxy")


def lightstep_token_file(config: pb.ProxyConfig) -> str:
    """Where the Lightstep access token must be written."""
    return f"{config.config_path}/lightstep_access_token.txt"


def _number(value: float) -> float | int:
    return int(value) if float(value).is_integer() else float(value)


def _socket_address(host: str, port: int) -> Json:
    return {"socket_address": {"address": host, "port_value": port}}


def _pipe(path: str) -> Json:
    return {"pipe": {"path": path}}


def _load_assignment(name: str, address: Json) -> Json:
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}]}


def _static_cluster(name: str, address: Json, timeout: str) -> Json:
    return {
        "name": name,
        "alt_stat_name": f"{name};",
        "type": "STATIC",
        "connect_timeout": timeout,
        "lb_policy": "ROUND_ROBIN",
        "load_assignment": _load_assignment(name, address),
    }


def _http2(cluster: Json) -> Json:
    cluster["typed_extension_protocol_options"] = {
        _HTTP_OPTIONS: {"@type": _TYPE + _HTTP_OPTIONS, "explicit_http_config": {"http2_protocol_options": {}}}
    }
    return cluster


def _tcp_keepalive(keepalive: pb.TcpKeepalive) -> Json:
    result: Json = {}
    if keepalive.probes:
        result["keepalive_probes"] = keepalive.probes
    for name in ("time", "interval"):
        seconds = getattr(keepalive, name).seconds
        if seconds > 0:
            result[f"keepalive_{name}"] = seconds
    return result


def _sds_config(name: str) -> Json:
    return {
        "name": name,
        "sds_config": {
            "api_config_source": {
                "api_type": "GRPC",
                "grpc_services": [{"envoy_grpc": {"cluster_name": "sds-grpc"}}],
                "set_node_on_first_message_only": True,
                "transport_api_version": "V3",
            },
            "resource_api_version": "V3",
        },
    }


def _hcm(stat_prefix: str, routes: Iterable[tuple[str, str]], filters: Sequence[Json]) -> Json:
    return {
        "name": "envoy.filters.network.http_connection_manager",
        "typed_config": {
            "@type": _HCM,
            "codec_type": "AUTO",
            "stat_prefix": stat_prefix,
            "route_config": {
                "virtual_hosts": [
                    {
                        "name": "backend",
                        "domains": ["*"],
                        "routes": [
                            {"match": {"prefix": prefix}, "route": {"cluster": cluster}} for prefix, cluster in routes
                        ],
                    }
                ]
            },
            "http_filters": [
                *filters,
                {
                    "name": "envoy.filters.http.router",
                    "typed_config": {"@type": _TYPE + "envoy.extensions.filters.http.router.v3.Router"},
                },
            ],
        },
    }


def _listener(name: str, host: str, port: int, network_filter: Json) -> Json:
    address = _socket_address(host, port)
    address["socket_address"]["protocol"] = "TCP"
    return {
        "name": name,
        "address": address,
        "ignore_global_conn_limit": True,
        "bypass_overload_manager": True,
        "filter_chains": [{"filters": [network_filter]}],
    }


def _compressor(kind: str) -> Json:
    package = f"envoy.extensions.compression.{kind}.compressor.v3.{kind.capitalize()}"
    return {
        "name": f"envoy.filters.http.compressor.{kind}",
        "typed_config": {
            "@type": _TYPE + "envoy.extensions.filters.http.compressor.v3.Compressor",
            "compressor_library": {"name": f"stats_{kind}", "typed_config": {"@type": _TYPE + package}},
            "response_direction_config": {"common_config": {"content_type": list(_COMPRESSED_TYPES)}},
        },
    }


def _tls_inspector() -> Json:
    return {
        "name": "envoy.filters.listener.tls_inspector",
        "typed_config": {"@type": _TYPE + "envoy.extensions.filters.listener.tls_inspector.v3.TlsInspector"},
    }


def _downstream_mtls() -> Json:
    return {
        "name": "envoy.transport_sockets.tls",
        "typed_config": {
            "@type": _TYPE + "envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
            "common_tls_context": {
                "tls_certificate_sds_secret_configs": [_sds_config("default")],
                "combined_validation_context": {
                    "default_validation_context": {},
                    "validation_context_sds_secret_config": _sds_config("ROOTCA"),
                },
            },
            "require_client_certificate": True,
        },
    }

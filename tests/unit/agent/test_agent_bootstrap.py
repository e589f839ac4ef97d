"""The Envoy bootstrap (spec: agent 7)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agent import bootstrap, proxy_config
from agent.bootstrap import BootstrapOptions, build_bootstrap, service_cluster
from agent.environment import Environment
from agent.envoy import find_binary
from agent.node import NodeOptions, build_node

Json = dict[str, Any]


def build(
    config: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    addresses: tuple[str, ...] = ("10.244.1.7",),
    annotations: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    node: Mapping[str, Any] | None = None,
    **options: Any,
) -> Json:
    merged = proxy_config.merge(proxy_config.defaults(), config or {})
    built = build_node(
        Environment(dict(env or {})),
        NodeOptions(
            id="sidecar~10.244.1.7~a.b~b.svc.cluster.local",
            proxy_config=proxy_config.to_dict(merged),
            instance_ips=addresses,
            annotations=annotations,
            labels=labels,
            **(node or {}),
        ),
    )
    return build_bootstrap(built, merged, BootstrapOptions(addresses, **options))


def clusters(result: Json) -> dict[str, Json]:
    return {cluster["name"]: cluster for cluster in result["static_resources"]["clusters"]}


def listeners(result: Json) -> dict[str, Json]:
    return {listener["name"]: listener for listener in result["static_resources"]["listeners"]}


def hcm(listener: Json) -> Json:
    config: Json = listener["filter_chains"][0]["filters"][0]["typed_config"]
    return config


def routes(listener: Json) -> dict[str, str]:
    found = hcm(listener)["route_config"]["virtual_hosts"][0]["routes"]
    return {route["match"]["prefix"]: route["route"]["cluster"] for route in found}


def patterns(result: Json) -> list[tuple[str, str]]:
    found = []
    for pattern in result["stats_config"]["stats_matcher"]["inclusion_list"]["patterns"]:
        ((kind, value),) = pattern.items()
        found.append((kind, value["regex"] if kind == "safe_regex" else value))
    return found


def test_default_static_clusters() -> None:
    found = clusters(build())
    assert list(found) == ["prometheus_stats", "agent", "sds-grpc", "xds-grpc"]
    for name, cluster in found.items():
        assert cluster["alt_stat_name"] == f"{name};"
        assert cluster["type"] == "STATIC"
        assert cluster["lb_policy"] == "ROUND_ROBIN"

    def address(name: str) -> Json:
        endpoints = found[name]["load_assignment"]["endpoints"]
        result: Json = endpoints[0]["lb_endpoints"][0]["endpoint"]["address"]
        return result

    assert address("prometheus_stats")["socket_address"]["port_value"] == 15000
    assert address("agent")["socket_address"] == {"address": "127.0.0.1", "port_value": 15020, "protocol": "TCP"}
    assert address("sds-grpc")["pipe"]["path"] == "./var/run/secrets/workload-spiffe-uds/socket"
    assert address("xds-grpc")["pipe"]["path"] == "./etc/istio/proxy/XDS"
    assert found["xds-grpc"]["max_requests_per_connection"] == 1
    assert {t["priority"]: t["max_requests"] for t in found["xds-grpc"]["circuit_breakers"]["thresholds"]} == {
        "DEFAULT": 100000,
        "HIGH": 100000,
    }


def test_default_static_listeners() -> None:
    found = listeners(build())
    assert list(found) == ["0.0.0.0_15090", "0.0.0.0_15021"]
    assert routes(found["0.0.0.0_15090"]) == {"/stats/prometheus": "prometheus_stats"}
    assert routes(found["0.0.0.0_15021"]) == {"/healthz/ready": "agent"}
    names = [item["name"] for item in hcm(found["0.0.0.0_15090"])["http_filters"]]
    prefix = "envoy.filters.http.compressor."
    assert names == [f"{prefix}brotli", f"{prefix}zstd", f"{prefix}gzip", "envoy.filters.http.router"]
    for listener in found.values():
        assert listener["ignore_global_conn_limit"] is True
        assert listener["bypass_overload_manager"] is True


def test_ads() -> None:
    dynamic = build()["dynamic_resources"]
    ads = dynamic["ads_config"]
    assert ads["api_type"] == "DELTA_GRPC"
    assert ads["set_node_on_first_message_only"] is True
    assert (
        dynamic["lds_config"]
        == dynamic["cds_config"]
        == {
            "ads": {},
            "initial_fetch_timeout": "0s",
            "resource_api_version": "V3",
        }
    )
    envoy_grpc = ads["grpc_services"][0]["envoy_grpc"]
    assert envoy_grpc["retry_policy"]["retry_back_off"] == {"base_interval": "0.2s", "max_interval": "1s"}
    assert build(delta_xds=False)["dynamic_resources"]["ads_config"]["api_type"] == "GRPC"


@pytest.mark.parametrize(
    ("addresses", "dual", "localhost", "wildcard", "family", "additional"),
    [
        (("10.0.0.1",), False, "127.0.0.1", "0.0.0.0", "V4_ONLY", None),
        (("fd00::1",), False, "::1", "::", "V6_ONLY", None),
        (("10.0.0.1", "fd00::1"), False, "127.0.0.1", "0.0.0.0", "V4_ONLY", None),
        (("10.0.0.1", "fd00::1"), True, "127.0.0.1", "0.0.0.0", "ALL", "::"),
        (("fd00::1", "10.0.0.1"), True, "::1", "::", "ALL", "0.0.0.0"),
    ],
)
def test_address_family(
    addresses: tuple[str, ...], dual: bool, localhost: str, wildcard: str, family: str, additional: str | None
) -> None:
    result = build({"tracing": {"zipkin": {"address": "z:9411"}}}, addresses=addresses, dual_stack=dual)
    assert result["admin"]["address"]["socket_address"]["address"] == localhost
    assert list(listeners(result)) == [f"{wildcard}_15090", f"{wildcard}_15021"]
    assert clusters(result)["zipkin"]["dns_lookup_family"] == family
    for listener in listeners(result).values():
        extra = listener.get("additional_addresses")
        assert (extra[0]["address"]["socket_address"]["address"] if extra else None) == additional


def test_runtime_flags() -> None:
    def flags(**arguments: Any) -> Json:
        layers = build(**arguments)["layered_runtime"]["layers"]
        assert [layer["name"] for layer in layers] == ["global config", "admin"]
        result: Json = layers[0]["static_layer"]
        return result

    default = {
        "re2.max_program_size.error_level": "32768",
        "envoy.deprecated_features:envoy.config.listener.v3.Listener.hidden_envoy_deprecated_use_original_dst": True,
        "envoy.reloadable_features.http_reject_path_with_fragment": False,
        "envoy.reloadable_features.fixed_heap_use_allocated": True,
        "envoy.reloadable_features.coalesce_lb_rebuilds_on_batch_update": False,
    }
    assert flags() == default
    changed = flags(
        config={"runtimeValues": {"re2.max_program_size.error_level": "", "a": "true", "b": "false", "c": "7"}}
    )
    del default["re2.max_program_size.error_level"]
    assert changed == {**default, "a": True, "b": False, "c": "7"}
    assert flags(compliance_policy="fips-140-2")["envoy.reloadable_features.google_grpc_disable_tls_13"] is True
    key = "envoy.reloadable_features.http_strip_fragment_from_path_unsafe_if_disabled"
    assert flags(strip_fragment=False)[key] == "false"


def test_stats_patterns_in_order() -> None:
    assert patterns(build()) == [
        ("prefix", "reporter="),
        *(("prefix", name) for name in ("cluster_manager", "listener_manager", "server", "cluster.xds-grpc", "wasm")),
        *(("suffix", name) for name in ("rbac.allowed", "rbac.denied", "shadow_allowed", "shadow_denied")),
        ("safe_regex", r"vhost\..*\.route\..*"),
        ("prefix", "component"),
        ("prefix", "istio"),
    ]


def test_stats_patterns_of_users() -> None:
    config = {"proxyStatsMatcher": {"inclusionPrefixes": ["http.{pod_ip}_", "x"], "inclusionRegexps": ["r.*"]}}
    result = patterns(build(config, addresses=("10.0.0.1", "10.0.0.2")))
    assert result[1:4] == [("prefix", "http.10.0.0.1_"), ("prefix", "http.10.0.0.2_"), ("prefix", "x")]
    assert ("safe_regex", "r.*") in result
    replaced = patterns(build(config, annotations={"sidecar.istio.io/statsInclusionPrefixes": "mine,yours"}))
    assert replaced[1:4] == [("prefix", "mine"), ("prefix", "yours"), ("prefix", "cluster_manager")]
    assert ("prefix", "x") not in replaced
    drain = patterns(build(node={"exit_on_zero_active_connections": True}))
    assert ("suffix", "downstream_cx_active") in drain


def test_stats_tags() -> None:
    config = {"extraStatTags": ["one", "two"]}
    tags = build(config, annotations={"sidecar.istio.io/extraStatTags": "two,three"})["stats_config"]["stats_tags"]
    names = [tag["tag_name"] for tag in tags]
    assert names == [
        *(
            "cluster_name",
            "http_conn_manager_prefix",
            "thread_name",
            "tcp_prefix",
            "response_code",
            "response_code_class",
        ),
        *("http_conn_manager_listener_prefix", "listener_address", "mongo_prefix", "one", "two", "three"),
        *("cache", "component", "tag", "wasm_filter", "authz_enforce_result", "authz_dry_run_action"),
        "authz_dry_run_result",
    ]
    regexes = {tag["tag_name"]: tag["regex"] for tag in tags}
    assert regexes["one"] == r"(one=\.=(.*?);\.;)"
    assert regexes["cluster_name"] == r"^cluster(\.(.+);)"


@pytest.mark.parametrize(
    ("annotations", "expected"),
    [
        ({}, {}),
        ({"sidecar.istio.io/statsFlushInterval": "1m"}, {"stats_flush_interval": "1m0s"}),
        ({"sidecar.istio.io/statsFlushInterval": "soon"}, {}),
        ({"sidecar.istio.io/statsEvictionInterval": "10s"}, {"stats_eviction_interval": "10s"}),
        ({"sidecar.istio.io/statsEvictionInterval": "7s"}, {}),
        (
            {"sidecar.istio.io/statsFlushInterval": "10s", "sidecar.istio.io/statsEvictionInterval": "1m"},
            {"stats_flush_interval": "10s", "stats_eviction_interval": "60s"},
        ),
    ],
)
def test_stats_intervals(annotations: dict[str, str], expected: dict[str, str]) -> None:
    result = build(annotations=annotations)
    assert {key: value for key, value in result.items() if key.startswith("stats_") and "interval" in key} == expected


def test_histogram_buckets_are_sorted_by_prefix() -> None:
    annotations = {"sidecar.istio.io/statsHistogramBuckets": '{"istio": [1, 2.5], "cluster": [5]}'}
    assert build(annotations=annotations)["stats_config"]["histogram_bucket_settings"] == [
        {"match": {"prefix": "cluster"}, "buckets": [5]},
        {"match": {"prefix": "istio"}, "buckets": [1, 2.5]},
    ]
    bad = build(annotations={"sidecar.istio.io/statsHistogramBuckets": "[1]"})
    assert "histogram_bucket_settings" not in bad["stats_config"]


@pytest.mark.parametrize(
    ("config", "labels", "env", "expected"),
    [
        ({}, {"app": "reviews"}, {"POD_NAMESPACE": "default"}, "reviews.default"),
        ({}, {"app.kubernetes.io/name": "r"}, {"POD_NAMESPACE": "n"}, "r.n"),
        ({}, {"service.istio.io/canonical-name": "c"}, {"POD_NAMESPACE": "n"}, "c.n"),
        ({}, {}, {"POD_NAMESPACE": "n", "ISTIO_META_WORKLOAD_NAME": "w"}, "w.n"),
        ({}, {}, {"POD_NAMESPACE": "n"}, "istio-proxy.n"),
        ({}, {}, {}, "istio-proxy"),
        ({"serviceCluster": "mine"}, {"app": "x"}, {"POD_NAMESPACE": "n"}, "mine"),
        (
            {"tracingServiceName": "CANONICAL_NAME_ONLY"},
            {"service.istio.io/canonical-name": "c", "app": "a"},
            {"POD_NAMESPACE": "n"},
            "c",
        ),
        ({"tracingServiceName": "CANONICAL_NAME_AND_NAMESPACE"}, {"app": "a"}, {"POD_NAMESPACE": "n"}, "a.n"),
        ({"tracingServiceName": "CANONICAL_NAME_AND_NAMESPACE"}, {}, {"ISTIO_META_WORKLOAD_NAME": "w"}, "w"),
        ({"tracingServiceName": "APP_LABEL_AND_NAMESPACE"}, {"app": "a"}, {"POD_NAMESPACE": "n"}, "a.n"),
    ],
)
def test_node_cluster(config: Json, labels: dict[str, str], env: dict[str, str], expected: str) -> None:
    assert build(config, env, labels=labels)["node"]["cluster"] == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, 2147483647),
        ({"runtimeValues": {"overload.global_downstream_max_connections": "10"}}, 10),
        (
            {
                "runtimeValues": {"overload.global_downstream_max_connections": "10"},
                "proxyMetadata": {"ISTIO_META_GLOBAL_DOWNSTREAM_MAX_CONNECTIONS": "20"},
            },
            20,
        ),
        (
            {
                "connectionSettings": {"globalDownstreamConnectionLimit": 30},
                "proxyMetadata": {"ISTIO_META_GLOBAL_DOWNSTREAM_MAX_CONNECTIONS": "20"},
            },
            30,
        ),
    ],
)
def test_connection_limit(config: Json, expected: int) -> None:
    monitor = build(config)["overload_manager"]["resource_monitors"][0]
    assert monitor["typed_config"]["max_active_downstream_connections"] == expected


def test_tracers() -> None:
    zipkin = build({"tracing": {"zipkin": {"address": "$(HOST_IP):9411"}}}, host_ip="192.0.2.9")
    assert zipkin["tracing"]["http"]["typed_config"]["collector_endpoint"] == "/api/v2/spans"
    cluster = clusters(zipkin)["zipkin"]
    assert cluster["dns_refresh_rate"] == "30s"
    endpoint = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]
    assert endpoint["address"]["socket_address"] == {"address": "192.0.2.9", "port_value": 9411}
    datadog = build({"tracing": {"datadog": {"address": "d:8126"}}}, labels={"app": "a"}, env={"POD_NAMESPACE": "n"})
    assert datadog["tracing"]["http"]["typed_config"]["service_name"] == "a.n"
    assert "datadog_agent" in clusters(datadog)
    lightstep = build({"tracing": {"lightstep": {"address": "l:1", "accessToken": "t"}}})
    assert lightstep["tracing"]["http"]["typed_config"]["access_token_file"].endswith("lightstep_access_token.txt")
    assert "typed_extension_protocol_options" in clusters(lightstep)["lightstep"]
    assert "tracing" not in build({"tracing": {"openCensusAgent": {"address": "o:1"}}})


def test_service_tls() -> None:
    def context(mode: str) -> Json:
        settings = {"mode": mode, "caCertificates": "/ca", "clientCertificate": "/c", "privateKey": "/k"}
        config = {"envoyMetricsService": {"address": "m:15000", "tlsSettings": settings}}
        result: Json = clusters(build(config))["envoy_metrics_service"]["transport_socket"]["typed_config"]
        return result

    def names(tls: Json) -> list[str]:
        common = tls["common_tls_context"]
        found = [item["name"] for item in common.get("tls_certificate_sds_secret_configs", [])]
        return [*found, common["combined_validation_context"]["validation_context_sds_secret_config"]["name"]]

    assert names(context("SIMPLE")) == ["file-root:/ca"]
    assert names(context("MUTUAL")) == ["file-cert:/c~/k", "file-root:/ca"]
    assert names(context("ISTIO_MUTUAL")) == ["default", "ROOTCA"]
    assert context("ISTIO_MUTUAL")["sni"] == "envoy_metrics_service"
    assert context("ISTIO_MUTUAL")["common_tls_context"]["alpn_protocols"] == ["istio", "h2"]
    assert "sni" not in context("SIMPLE")


def test_options_that_add_sections() -> None:
    plain = build()
    assert "cluster_manager" not in plain
    assert "stats_sinks" not in plain
    manager = build(node={"outlier_log_path": "/dev/stdout"})["cluster_manager"]
    assert manager == {"outlier_detection": {"event_log_path": "/dev/stdout"}, "enable_deferred_cluster_creation": True}
    own = build(env={"ISTIO_META_ENABLE_SELF_DISCOVERY": "true"})
    assert own["cluster_manager"]["local_cluster_name"] == "local_cluster"
    assert clusters(own)["local_cluster"]["type"] == "EDS"
    sinks = build({"statsdUdpAddress": "10.1.1.1:9125", "envoyMetricsService": {"address": "m:1"}})["stats_sinks"]
    assert [sink["name"] for sink in sinks] == ["envoy.stat_sinks.metrics_service", "envoy.stat_sinks.statsd"]
    files = build(node={"file_credentials": True})
    assert "sds-files-grpc" in clusters(files)


def test_metadata_discovery_needs_delta() -> None:
    env = {"ISTIO_META_ENABLE_HBONE": "true"}
    assert build(env=env)["bootstrap_extensions"][0]["name"] == "metadata_discovery"
    assert ("prefix", "workload_discovery") in patterns(build(env=env))
    assert len(build(env=env, delta_xds=False)["bootstrap_extensions"]) == 1


def test_metrics_listeners() -> None:
    local = build({"proxyMetadata": {"METRICS_LOCALHOST_ACCESS_ONLY": "true"}, "statsCompression": False})
    listener = listeners(local)["127.0.0.1_15090"]
    assert listener["address"]["socket_address"]["address"] == "127.0.0.1"
    assert [item["name"] for item in hcm(listener)["http_filters"]] == ["envoy.filters.http.router"]
    secure = build(node={"envoy_secure_metrics_port": 15091, "envoy_secure_merged_metrics_port": 15092})
    assert routes(listeners(secure)["0.0.0.0_15091"]) == {"/stats/prometheus": "prometheus_stats"}
    assert routes(listeners(secure)["0.0.0.0_15092"]) == {"/stats/prometheus": "agent", "/metrics": "agent"}
    chain = listeners(secure)["0.0.0.0_15091"]["filter_chains"][0]
    assert chain["filter_chain_match"] == {"transport_protocol": "tls"}
    assert chain["transport_socket"]["typed_config"]["require_client_certificate"] is True


def test_application_log() -> None:
    assert build()["application_log_config"]["log_format"]["text_format"] == bootstrap.TEXT_LOG_FORMAT
    assert build(log_as_json=True)["application_log_config"]["log_format"]["json_format"]["scope"] == "envoy %n"


FULL: Json = {
    "config": {
        "tracing": {"zipkin": {"address": "zipkin.local:9411"}, "tlsSettings": {"mode": "ISTIO_MUTUAL"}},
        "envoyMetricsService": {
            "address": "m.local:15000",
            "tcpKeepalive": {"probes": 3, "time": "10s", "interval": "5s"},
        },
        "envoyAccessLogService": {
            "address": "a.local:15000",
            "tlsSettings": {"mode": "SIMPLE", "caCertificates": "/ca", "subjectAltNames": ["san.example"]},
        },
        "statsdUdpAddress": "10.1.1.1:9125",
        "extraStatTags": ["one"],
        "proxyStatsMatcher": {"inclusionRegexps": [r"http\..*"]},
    },
    "annotations": {
        "sidecar.istio.io/statsFlushInterval": "10s",
        "sidecar.istio.io/statsEvictionInterval": "20s",
        "sidecar.istio.io/statsHistogramBuckets": '{"istio": [1, 2.5]}',
    },
    "env": {"ISTIO_META_ENABLE_SELF_DISCOVERY": "true", "ISTIO_METAJSON_X": '{"list": [1, {"a": null}], "é": "ü"}'},
    "node": {
        "outlier_log_path": "/dev/stdout",
        "envoy_secure_metrics_port": 15091,
        "envoy_secure_merged_metrics_port": 15092,
        "file_credentials": True,
    },
    "status_port_proxy_protocol": True,
}


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({}, id="default"),
        pytest.param({"delta_xds": False, "log_as_json": True}, id="sotw-json"),
        pytest.param({"addresses": ("fd00::1",)}, id="ipv6"),
        pytest.param({"addresses": ("10.0.0.1", "fd00::1"), "dual_stack": True}, id="dual"),
        pytest.param(FULL, id="everything"),
        pytest.param({"config": {"tracing": {"datadog": {"address": "d.local:8126"}}}}, id="datadog"),
        pytest.param({"annotations": {"a": "x\udcff"}, "env": {"ISTIO_META_B": "\udcff"}}, id="no UTF-8"),
        pytest.param({"node": {"envoy_status_port": 0, "envoy_prometheus_port": 0}}, id="any port"),
    ],
)
def test_a_stock_envoy_accepts_it(arguments: Json, tmp_path: Path) -> None:
    path = tmp_path / "envoy-rev.json"
    path.write_text(json.dumps(build(**arguments)))
    envoy = find_binary("/usr/local/bin/envoy")
    command = [envoy, "--mode", "validate", "-c", str(path), "--allow-unknown-static-fields", "-l", "error"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "OK" in done.stdout + done.stderr


def test_service_cluster_of_empty_metadata() -> None:
    assert service_cluster(proxy_config.defaults(), {}) == "istio-proxy"

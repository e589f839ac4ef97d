"""ProxyConfig: defaults, layers, merge rule, validation (spec: agent 5)."""

from __future__ import annotations

import os
from typing import Any

import pytest

from agent import network, proxy_config
from agent.errors import AgentError
from agent.proxy_config import construct, merge, to_dict

DEFAULTS = {
    "configPath": "./etc/istio/proxy",
    "binaryPath": "/usr/local/bin/envoy",
    "serviceCluster": "istio-proxy",
    "drainDuration": "45s",
    "terminationDrainDuration": "5s",
    "proxyAdminPort": 15000,
    "statusPort": 15020,
    "controlPlaneAuthPolicy": "MUTUAL_TLS",
    "discoveryAddress": "istiod.istio-system.svc:15012",
    "statNameLength": 189,
}


def test_defaults() -> None:
    assert to_dict(construct(None, "", {})) == DEFAULTS


def test_the_worked_example_of_all_layers() -> None:
    config = construct(
        'defaultConfig: {tracing: {sampling: 10, zipkin: {address: "z:9411"}}, proxyMetadata: {A: "1", B: "1"}, '
        "concurrency: 4}",
        '{"tracing":{"sampling":50},"proxyMetadata":{"B":"2"}}',
        {"proxy.istio.io/config": 'proxyMetadata: {C: "3"}'},
    )
    assert to_dict(config) == {
        **DEFAULTS,
        "tracing": {"sampling": 50},
        "proxyMetadata": {"A": "1", "B": "2", "C": "3"},
        "concurrency": 4,
    }


@pytest.mark.parametrize(
    ("base", "overlay", "expected"),
    [
        pytest.param({"statusPort": 1}, {"statusPort": 2}, {"statusPort": 2}, id="scalar"),
        pytest.param({"statusPort": 1}, {"status_port": 2}, {"statusPort": 2}, id="snake case"),
        pytest.param({"statusPort": 1}, {"statusPort": None}, {"statusPort": 1}, id="null is ignored"),
        pytest.param({"statusPort": 1}, {"nonsense": 2}, {"statusPort": 1}, id="unknown field"),
        pytest.param({"concurrency": 4}, {"concurrency": "2"}, {"concurrency": 2}, id="quoted number"),
        pytest.param({"concurrency": 4}, {"concurrency": 0}, {"concurrency": 0}, id="wrapper zero is a value"),
        pytest.param({"statusPort": 5}, {"statusPort": 0}, {}, id="scalar zero replaces"),
        pytest.param({"extraStatTags": ["a", "b"]}, {"extraStatTags": ["c"]}, {"extraStatTags": ["c"]}, id="list"),
        pytest.param({"extraStatTags": ["a"]}, {"extraStatTags": []}, {}, id="empty list replaces"),
        pytest.param(
            {"runtimeValues": {"a": "1"}}, {"runtimeValues": {"b": "2"}}, {"runtimeValues": {"b": "2"}}, id="map"
        ),
        pytest.param(
            {"proxyMetadata": {"A": "1", "B": "1"}},
            {"proxyMetadata": {"B": "2"}},
            {"proxyMetadata": {"A": "1", "B": "2"}},
            id="proxyMetadata is a union",
        ),
        pytest.param(
            {"proxyMetadata": {"A": "1"}}, {"proxyMetadata": {}}, {"proxyMetadata": {"A": "1"}}, id="keys stay"
        ),
        pytest.param(
            {"serviceCluster": "x"},
            {"tracingServiceName": "CANONICAL_NAME_ONLY"},
            {"tracingServiceName": "CANONICAL_NAME_ONLY"},
            id="oneof",
        ),
        pytest.param({"tracingServiceName": 1}, {"serviceCluster": "x"}, {"serviceCluster": "x"}, id="oneof back"),
        pytest.param({}, {"interceptionMode": 1}, {"interceptionMode": "TPROXY"}, id="enum by number"),
        pytest.param({}, {"interceptionMode": "TPROXY"}, {"interceptionMode": "TPROXY"}, id="enum by name"),
        pytest.param({}, {"drainDuration": "1m30s"}, {"drainDuration": "90s"}, id="Go duration"),
        pytest.param({}, {"terminationDrainDuration": "250ms"}, {"terminationDrainDuration": "0.250s"}, id="fraction"),
        pytest.param(
            {},
            {"privateKeyProvider": {"cryptomb": {"pollDelay": "10ms"}}},
            {"privateKeyProvider": {"cryptomb": {"pollDelay": "0.010s"}}},
            id="nested duration",
        ),
        pytest.param(
            {
                "proxyHeaders": {
                    "forwardedClientCert": "SANITIZE",
                    "server": {"value": "s"},
                    "xForwardedHost": {"enabled": True},
                }
            },
            {"proxyHeaders": {"requestId": {"disabled": True}}},
            {
                "proxyHeaders": {
                    "forwardedClientCert": "SANITIZE",
                    "server": {"value": "s"},
                    "requestId": {"disabled": True},
                }
            },
            id="five members of proxyHeaders fall back, others do not",
        ),
        pytest.param(
            {"proxyHeaders": {"server": {"value": "s"}}},
            {"statusPort": 2},
            {"proxyHeaders": {"server": {"value": "s"}}, "statusPort": 2},
            id="proxyHeaders untouched",
        ),
        pytest.param({"tracing": {"sampling": 10}}, {"tracing": {}}, {"tracing": {}}, id="empty message replaces"),
    ],
)
def test_merge_rule(base: dict[str, Any], overlay: dict[str, Any], expected: dict[str, Any]) -> None:
    empty = proxy_config.pb.ProxyConfig()
    assert to_dict(merge(merge(empty, base), overlay)) == expected


@pytest.mark.parametrize(
    ("overlay", "message"),
    [
        ({"statusPort": "port"}, "could not parse proxy config"),
        ({"statusPort": {"a": 1}}, "could not parse proxy config"),
        ({"drainDuration": "soon"}, "invalid duration"),
        ({"interceptionMode": "SIDEWAYS"}, "could not parse proxy config"),
        ({"proxyMetadata": ["a"]}, "could not parse proxy config"),
        ({"serviceCluster": "a", "tracingServiceName": 1}, "could not parse proxy config"),
    ],
)
def test_values_that_do_not_fit(overlay: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        merge(proxy_config.defaults(), overlay)


@pytest.mark.parametrize(
    ("layer", "problem"),
    [
        ('configPath: ""', "config path must be set"),
        ('binaryPath: ""', "binary path must be set"),
        ("drainDuration: 0s", "duration must be greater than 1ms"),
        ("drainDuration: -1s", "duration must be greater than 1ms"),
        ("drainDuration: 1500ms", "drain time only supports durations to seconds precision"),
        ('discoveryAddress: ""', "discovery address must be set"),
        ("discoveryAddress: istiod", "invalid discovery address"),
        ("discoveryAddress: istiod:99999", "port number 99999 must be in the range 1..65535"),
        ("discoveryAddress: ist_iod:15012", "is not a valid hostname or an IP address"),
        ("discoveryAddress: 10.0.0.300:15012", '"10.0.0.300" is not a valid hostname or an IP address'),
        ("proxyAdminPort: 0", "invalid proxy admin port"),
        ("tracing: {tlsSettings: {mode: MUTUAL}}", "invalid tracing TLS config: client certificate required"),
        (
            "tracing: {tlsSettings: {mode: SIMPLE, credentialName: a, caCertificates: b}}",
            "cannot specify client certificates or CA certificate or CA CRL",
        ),
        (
            "tracing: {tlsSettings: {mode: SIMPLE, insecureSkipVerify: true, subjectAltNames: [a]}}",
            "cannot specify CaCertificates or CredentialName or SubjectAltNames",
        ),
        ("statusPort: 0", "invalid status port"),
        ("statusPort: 70000", "invalid status port"),
        ("controlPlaneAuthPolicy: INHERIT", "invalid authentication policy"),
        ("tracing: {zipkin: {address: nowhere}}", "invalid zipkin config"),
        ("tracing: {lightstep: {address: 'l:1'}}", "access token is required"),
        ("envoyMetricsService: {address: nowhere}", "invalid envoy metrics service address"),
        ("envoyAccessLogService: {address: nowhere}", "invalid envoy access log service address"),
        ("privateKeyProvider: {}", "private key provider configuration is required"),
        ("privateKeyProvider: {qat: {}}", "pollDelay is required"),
        ("privateKeyProvider: {qat: {pollDelay: 0s}}", "pollDelay must be non zero"),
        ("connectionSettings: {httpIdleTimeout: -1s}", "http_idle_timeout must be non-negative"),
        (
            "connectionSettings: {globalDownstreamConnectionLimit: 0}",
            "global_downstream_connection_limit must be positive",
        ),
        ("connectionSettings: {http2InitialStreamWindowSize: 1}", "must be at least 65535"),
    ],
)
def test_validation_errors_are_fatal(layer: str, problem: str) -> None:
    with pytest.raises(AgentError, match=problem) as caught:
        construct(None, layer, {})
    assert caught.value.exit_code == 255


@pytest.mark.parametrize(
    "address", ["istiod:15012", "10.0.0.1:15010", "[fd00::1]:15010", "istiod.istio-system.svc.cluster.local.:15012"]
)
def test_discovery_addresses_that_are_valid(address: str) -> None:
    assert construct(None, f'discoveryAddress: "{address}"', {}).discovery_address == address


def test_annotations_come_after_validation() -> None:
    config = construct(
        None, "", {"sidecar.istio.io/discoveryAddress": "not an address", "status.sidecar.istio.io/port": "0"}
    )
    assert config.discovery_address == "not an address"
    assert config.status_port == 0


def test_a_status_port_annotation_that_is_no_number_disables_the_status_server() -> None:
    assert construct(None, "", {"status.sidecar.istio.io/port": "http"}).status_port == 0


@pytest.mark.parametrize(
    ("layer", "cpu_limit", "flag", "concurrency"),
    [
        ("", 0, 0, None),
        ("", 3, 0, 3),
        ("concurrency: 5", 3, 0, 5),
        ("concurrency: 5", 3, 2, 2),
        ("concurrency: 0", 3, 0, 0),
    ],
)
def test_concurrency(layer: str, cpu_limit: int, flag: int, concurrency: int | None) -> None:
    config = construct(None, layer, {}, concurrency=flag, cpu_limit=cpu_limit)
    assert (config.concurrency.value if config.HasField("concurrency") else None) == concurrency


def test_the_service_cluster_flag_stands_in_for_an_empty_one_only() -> None:
    assert construct(None, 'serviceCluster: ""', {}, service_cluster="mine").service_cluster == "mine"
    assert construct(None, "", {}, service_cluster="mine").service_cluster == "istio-proxy"


@pytest.mark.parametrize(("cpus", "limit", "warned"), [(4, 2, True), (2, 2, False), (4, 0, False)])
def test_more_workers_than_the_cpu_limit_allows_are_warned_of(
    cpus: int, limit: int, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cpus)
    construct(None, "concurrency: 0", {}, cpu_limit=limit)
    assert any("one worker per CPU" in record.message for record in caplog.records) is warned


def test_statsd_is_resolved_or_cleared() -> None:
    def resolves(address: str) -> str:
        assert address == "statsd:9125"
        return "10.1.1.1:9125"

    def fails(_: str) -> str:
        raise OSError("no such host")

    layer = "statsdUdpAddress: statsd:9125"
    assert construct(None, layer, {}, resolve_statsd=resolves).statsd_udp_address == "10.1.1.1:9125"
    assert construct(None, layer, {}, resolve_statsd=fails).statsd_udp_address == ""


@pytest.mark.parametrize("address", ["garbage", "a..b:8125", "localhost:port"])
def test_statsd_addresses_that_cannot_be_resolved_are_cleared(address: str) -> None:
    def resolve(text: str) -> str:
        return network.resolve(text, proxy_config.split_host_port)

    assert construct(None, f"statsdUdpAddress: '{address}'", {}, resolve_statsd=resolve).statsd_udp_address == ""


@pytest.mark.parametrize("text", ["{", "[1]", "just text", "defaultConfig: 3"])
def test_a_mesh_file_that_is_no_configuration_is_fatal(text: str) -> None:
    with pytest.raises(AgentError, match="failed to unmarshal mesh config from file"):
        construct(text, "", {})


def test_status_port_zero_in_proxy_config_is_rejected_but_not_in_the_annotation() -> None:
    with pytest.raises(AgentError, match="invalid status port"):
        construct(None, "", {"proxy.istio.io/config": "statusPort: 0"})


@pytest.mark.parametrize(
    ("scalar", "expected"),
    [
        ("2026-01-01", "2026-01-01"),
        ("2026-01-01T10:00:00Z", "2026-01-01T10:00:00Z"),
        ("12:30:45", "12:30:45"),
        ("1:30", "1:30"),
        ("190:20:30.15", "190:20:30.15"),
        ("10.96.0.10", "10.96.0.10"),
        ("1.2.3", "1.2.3"),
    ],
)
def test_plain_yaml_scalars_that_go_reads_as_text(scalar: str, expected: str) -> None:
    assert construct(None, f"proxyMetadata: {{A: {scalar}}}", {}).proxy_metadata["A"] == expected


@pytest.mark.parametrize(
    ("scalar", "expected"), [("017", 15), ("0o17", 15), ("0x1F", 31), ("0b101", 5), ("1_0", 10), ("-1", -1), ("+4", 4)]
)
def test_integers_as_go_reads_them_in_yaml(scalar: str, expected: int) -> None:
    assert construct(None, f"concurrency: {scalar}", {}).concurrency.value == expected


@pytest.mark.parametrize("scalar", ["12.5", "+12.5", "1.25e+1", "1_2.5"])
def test_floats_in_yaml(scalar: str) -> None:
    layer = f"tracing: {{sampling: {scalar}, zipkin: {{address: 'z:1'}}}}"
    assert construct(None, layer, {}).tracing.sampling == 12.5


def test_yaml_keys_are_text() -> None:
    config = construct(None, "proxyMetadata: {on: a, 2: b, 2026-01-01: c}", {})
    assert dict(config.proxy_metadata) == {"true": "a", "2": "b", "2026-01-01": "c"}


def test_the_first_yaml_document_counts() -> None:
    assert construct(None, "---\nconcurrency: 2\n---\nconcurrency: 3\n", {}).concurrency.value == 2
    assert construct(None, "---\n# nothing\n", {}) == proxy_config.defaults()


def test_bytes_that_are_no_utf_8_become_the_replacement_character() -> None:
    config = construct(None, "proxyMetadata: {A: 'x\udcffy'}", {})
    assert config.proxy_metadata["A"] == "x\ufffdy"

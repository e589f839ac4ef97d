"""Node id, addresses, metadata, locality (spec: agent 4 and 6)."""

from __future__ import annotations

import ipaddress
from typing import Any

import pytest

from agent import network
from agent.environment import Environment
from agent.errors import AgentError
from agent.network import IFF_LOOPBACK, IFF_UP, InterfaceAddress, proxy_addresses
from agent.node import Locality, NodeOptions, build_node, dns_domain, locality_of, node_id, pilot_san


def interface(name: str, address: str, flags: int = IFF_UP) -> InterfaceAddress:
    return InterfaceAddress(name, flags, ipaddress.ip_address(address))


def test_node_id() -> None:
    assert (
        node_id("sidecar", ["10.244.1.7", "fd00::1"], "productpage-v1-6b8", "default", "default.svc.cluster.local")
        == "sidecar~10.244.1.7~productpage-v1-6b8.default~default.svc.cluster.local"
    )
    assert node_id("sidecar", [], "", "", "") == "sidecar~~.~"


def test_domain() -> None:
    assert dns_domain("ns1", "") == "ns1.svc.cluster.local"
    assert dns_domain("ns1", "ns1.svc.example") == "ns1.svc.example"


LO = interface("lo", "127.0.0.1", IFF_UP | IFF_LOOPBACK)


@pytest.mark.parametrize(
    ("instance", "addresses", "excluded", "expected"),
    [
        pytest.param("10.0.0.1", [LO, interface("eth0", "10.0.0.1")], [], ["10.0.0.1"], id="no repeat of the first"),
        pytest.param("", [LO, interface("eth0", "10.0.0.2")], [], ["10.0.0.2"], id="no instance address"),
        pytest.param("bad", [interface("eth0", "10.0.0.2")], [], ["10.0.0.2"], id="instance address that is none"),
        pytest.param(
            "10.0.0.1",
            [interface("eth0", "10.0.0.1"), interface("eth1", "fd00::5")],
            [],
            ["10.0.0.1", "fd00::5"],
            id="both",
        ),
        pytest.param("10.0.0.1", [interface("eth0", "10.0.0.9", 0)], [], ["10.0.0.1", "127.0.0.1", "::1"], id="down"),
        pytest.param("", [LO], [], ["127.0.0.1", "::1"], id="nothing at all"),
        pytest.param(
            "",
            [interface("eth0", "fe80::1"), interface("eth0", "169.254.0.1")],
            [],
            ["127.0.0.1", "::1"],
            id="link-local",
        ),
        pytest.param("", [interface("eth0", "::ffff:10.0.0.3")], [], ["10.0.0.3"], id="mapped is unwrapped"),
        pytest.param(
            "10.0.0.1",
            [interface("eth0", "10.0.0.1"), interface("net1", "10.9.0.1")],
            ["net1"],
            ["10.0.0.1"],
            id="excluded",
        ),
    ],
)
def test_addresses(instance: str, addresses: list[InterfaceAddress], excluded: list[str], expected: list[str]) -> None:
    assert proxy_addresses(instance, addresses, excluded) == expected


def test_this_machines_own_loopback_is_found() -> None:
    found = network.interface_addresses()
    assert any(str(item.address) == "127.0.0.1" and item.flags & IFF_LOOPBACK for item in found)


def test_an_interface_without_an_address_yet_is_waited_for() -> None:
    early, late = interface("eth0", "0.0.0.0"), interface("eth0", "10.0.0.1")
    looks = [[LO, early, interface("eth1", "10.0.0.2")], [LO, late]]
    assert network.settled_addresses(lambda: looks.pop(0)) == [LO, late]
    assert looks == []
    # One that is down, or that never gets one, is not.
    assert network.settled_addresses(lambda: [interface("eth0", "::", flags=0)]) != []
    assert network.settled_addresses(lambda: [early], limit=0.0) == [early]


@pytest.mark.parametrize(
    ("addresses", "ipv4", "ipv6"),
    [
        ([], True, False),
        (["10.0.0.1"], True, False),
        (["fd00::1"], False, True),
        (["10.0.0.1", "fd00::1"], False, False),
    ],
)
def test_address_families(addresses: list[str], ipv4: bool, ipv6: bool) -> None:
    assert network.all_ipv4(addresses) is ipv4
    assert network.all_ipv6(addresses) is ipv6


def build(env: dict[str, str], **options: Any) -> Any:
    defaults: dict[str, Any] = {"id": "sidecar~1.2.3.4~r-1.default~x", "proxy_config": {}, "instance_ips": ["1.2.3.4"]}
    return build_node(Environment(env), NodeOptions(**{**defaults, **options}))


def test_the_worked_example() -> None:
    node = build(
        {
            "ISTIO_META_CLUSTER_ID": "Kubernetes",
            "ISTIO_META_DNS_CAPTURE": "true",
            "ISTIO_METAJSON_LABELS": '{"app":"reviews"}',
            "POD_NAME": "r-1",
            "POD_NAMESPACE": "default",
        },
        proxy_config={"proxyMetadata": {"ISTIO_META_DNS_CAPTURE": "false", "FOO": "1"}},
        labels={"app": "reviews", "pod-template-hash": "x"},
        pilot_san=["istiod.istio-system.svc"],
        version="1.2.3",
    )
    assert node.metadata == {
        "CLUSTER_ID": "Kubernetes",
        "DNS_CAPTURE": "true",
        "ENVOY_PROMETHEUS_PORT": 15090,
        "ENVOY_SKIP_DEPRECATED_LOGS": "true",
        "ENVOY_STATUS_PORT": 15021,
        "INSTANCE_IPS": "1.2.3.4",
        "ISTIO_VERSION": "1.2.3",
        "LABELS": {"app": "reviews"},
        "METADATA_DISCOVERY": "false",
        "NAME": "r-1",
        "NAMESPACE": "default",
        "PILOT_SAN": ["istiod.istio-system.svc"],
        "PROXY_CONFIG": {"proxyMetadata": {"ISTIO_META_DNS_CAPTURE": "false", "FOO": "1"}},
        "STATIC_LABELS": {"app": "reviews"},
        "WORKLOAD_IDENTITY_SOCKET_FILE": "socket",
        "app": "reviews",
    }
    assert list(node.metadata) == sorted(node.metadata)


@pytest.mark.parametrize(
    ("env", "options", "key", "expected"),
    [
        ({"ISTIO_META_ANYTHING": "x"}, {}, "ANYTHING", "x"),
        ({"ISTIO_METAJSON_X": '{"a": {"b": 1}}'}, {}, "a", {"b": 1}),
        ({"ISTIO_METAJSON_X": "not json"}, {}, "X", None),
        ({"ISTIO_META_ENABLE_HBONE": "true"}, {}, "METADATA_DISCOVERY", "true"),
        ({"ISTIO_META_ENABLE_HBONE": "true"}, {"metadata_discovery": False}, "METADATA_DISCOVERY", "false"),
        ({}, {"metadata_discovery": True}, "METADATA_DISCOVERY", "true"),
        ({"DNS_PROXY_ADDR": "127.0.0.1:15053"}, {}, "DNS_PROXY_ADDR", "127.0.0.1:15053"),
        ({"DNS_PROXY_ADDR": ""}, {}, "DNS_PROXY_ADDR", None),
        (
            {"ISTIO_META_POD_PORTS": '[{"containerPort": 80, "protocol":"TCP"}]'},
            {},
            "POD_PORTS",
            '[{"containerPort":80,"protocol":"TCP"}]',
        ),
        ({"ISTIO_META_NAME": "other", "POD_NAME": "pod"}, {}, "NAME", "pod"),
        ({"SERVICE_ACCOUNT": "sa"}, {}, "SERVICE_ACCOUNT", "sa"),
        ({}, {"exit_on_zero_active_connections": True}, "EXIT_ON_ZERO_ACTIVE_CONNECTIONS", "true"),
        ({}, {"exit_on_zero_active_connections": False}, "EXIT_ON_ZERO_ACTIVE_CONNECTIONS", None),
        ({}, {"sts_port": 15463}, "STS_PORT", "15463"),
        ({}, {"envoy_secure_metrics_port": 15091}, "ENVOY_SECURE_METRICS_PORT", 15091),
        ({}, {"envoy_skip_deprecated_logs": False}, "ENVOY_SKIP_DEPRECATED_LOGS", None),
        ({}, {"instance_ips": ["1.1.1.1", "fd00::1", "1.1.1.1"]}, "INSTANCE_IPS", "1.1.1.1,fd00::1"),
        ({}, {"credential_socket_exists": True}, "credential", "true"),
        ({}, {"file_credentials": True}, "file-credential", "true"),
        ({}, {"outlier_log_path": "/dev/stdout"}, "OUTLIER_LOG_PATH", "/dev/stdout"),
        ({}, {"annotations": {"a": "b"}}, "ANNOTATIONS", {"a": "b"}),
        ({"ISTIO_META_INTERCEPTION_MODE": "TPROXY"}, {}, "INTERCEPTION_MODE", "TPROXY"),
        ({"ISTIO_META_ISTIO_VERSION": "9"}, {}, "ISTIO_VERSION", "9"),
        ({"ISTIO_META_SIDECARLAB_EVIDENCE": "/log/e"}, {}, "SIDECARLAB_EVIDENCE", "/log/e"),
    ],
)
def test_metadata_keys(env: dict[str, str], options: dict[str, Any], key: str, expected: object) -> None:
    assert build(env, **options).metadata.get(key) == expected


@pytest.mark.parametrize(
    "env",
    [
        {"ISTIO_META_DNS_CAPTURE": "maybe"},
        {"ISTIO_META_POD_PORTS": "no json"},
        {"ISTIO_METAJSON_X": '{"ENVOY_STATUS_PORT": "text"}'},
        {"ISTIO_METAJSON_X": '{"NAMESPACE": 5}'},
        {"ISTIO_META_LABELS": "app=x"},
    ],
)
def test_a_value_that_does_not_fit_its_field_is_fatal(env: dict[str, str]) -> None:
    with pytest.raises(AgentError, match="failed to decode node metadata"):
        build(env)


def test_label_file_overlays_static_labels() -> None:
    node = build({"ISTIO_METAJSON_LABELS": '{"app":"static","tier":"back"}'}, labels={"app": "file"})
    assert node.metadata["LABELS"] == {"app": "file", "tier": "back"}
    assert node.metadata["STATIC_LABELS"] == {"app": "static", "tier": "back"}


@pytest.mark.parametrize(
    ("label", "sanitised", "locality"),
    [
        ("r/z/s", "r/z/s", Locality("r", "z", "s")),
        ("r.z.s", "r/z/s", Locality("r", "z", "s")),
        ("r/z.1", "r/z.1", Locality("r", "z.1", "")),
        ("r", "r", Locality("r", "", "")),
    ],
)
def test_locality(label: str, sanitised: str, locality: Locality) -> None:
    assert locality_of(label) == (sanitised, locality)
    node = build({}, labels={"istio-locality": label})
    assert node.locality == locality
    assert node.metadata["LABELS"]["istio-locality"] == sanitised


def test_the_topology_label_wins() -> None:
    node = build({}, labels={"topology.istio.io/locality": "a/b", "istio-locality": "c/d"})
    assert node.locality == Locality("a", "b", "")
    assert node.metadata["LABELS"]["istio-locality"] == "a/b"


def test_pilot_san() -> None:
    assert pilot_san("istiod.example:15012") == "istiod.example"
    assert pilot_san("localhost:15012") == "istiod.istio-system.svc"

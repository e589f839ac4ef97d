"""Nodes as agents write them, PeerAuthentication levels, and access logs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from envoy.extensions.access_loggers.file.v3 import file_pb2
from mesh_text import (
    CLIENT,
    SERVER,
    build,
    chains,
    hcm,
    mesh_config,
    namespace,
    of,
    peer_authentication,
    plain,
    pod,
    service,
    tcp,
)

from lab.discovery import node as node_module
from lab.discovery import snapshot
from lab.discovery.durations import parse_go_duration

# --- nodes ------------------------------------------------------------------------------------------

ID = "sidecar~10.0.0.1~pod-1.ns~ns.svc.cluster.local"


def test_node_of_an_agent() -> None:
    node = node_module.parse(
        ID,
        "pod.ns",
        {
            "INSTANCE_IPS": "10.0.0.1,fe80::1,nonsense",
            "NAMESPACE": "other",
            "LABELS": {"app": "x", "istio-locality": "r.z.s"},
            "DNS_CAPTURE": "true",
            "INTERCEPTION_MODE": "TPROXY",
            "HTTP10": "1",
        },
    )
    assert (node.ips, node.namespace, node.name) == (("10.0.0.1", "fe80::1"), "other", "pod-1.ns")
    assert (node.dns_capture, node.interception_mode, node.http10, node.locality) == (True, "TPROXY", True, "r/z/s")
    assert node.families == (4,)


def test_namespace_falls_back_to_the_domain() -> None:
    assert node_module.parse(ID).namespace == "ns"


@pytest.mark.parametrize(
    ("id", "why"),
    [
        ("sidecar~10.0.0.1~x", "missing parts"),
        ("sidecar~10.0.0.1~a~b~c", "missing parts"),
        ("sidecar~~a.b~b.svc", "no valid IP"),
        ("nothing~10.0.0.1~a.b~b.svc", "invalid node type"),
    ],
)
def test_bad_nodes(id: str, why: str) -> None:
    with pytest.raises(node_module.NodeError, match=why):
        node_module.parse(id)


def test_node_of_a_pod_has_what_its_agent_would_say() -> None:
    mesh = build(
        mesh_config("defaultConfig: {proxyMetadata: {ISTIO_META_A: '1', ISTIO_META_DNS_CAPTURE: 'false'}}"),
        CLIENT.replace(
            "labels: {app: client}}",
            "labels: {app: client}, annotations: {proxy.istio.io/config: 'proxyMetadata: {ISTIO_META_DNS_CAPTURE: \"true\"}'}}",
        ),
    )
    client = mesh.pod("client.a")
    assert client is not None
    node = snapshot.node_for_pod(mesh, client)
    assert (node.id, node.text("A"), node.dns_capture) == ("sidecar~10.1.0.1~client.a~a.svc.cluster.local", "1", True)
    assert node.text("SERVICE_ACCOUNT") == "client"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1m30s", 90.0),
        ("250ms", 0.25),
        ("0s", 0.0),
        ("1.5h", 5400.0),
        (3, 3.0),
        ("", None),
        ("abc", None),
        ("5", None),
        (None, None),
    ],
)
def test_go_durations(text: object, seconds: float | None) -> None:
    assert parse_go_duration(text) == seconds


# --- PeerAuthentication ---------------------------------------------------------------------------------

WEB = service("server", "b", "[{name: http, port: 8080}, {name: http-b, port: 9090}]", vip="10.96.0.9")
STRICT, PERMISSIVE, DISABLE = {"tls"}, {"tls", "raw_buffer"}, {"raw_buffer"}


def transports(port: int, *policies: str) -> set[str]:
    listener = of(CLIENT, SERVER, WEB, *policies, pod_name="server.b").listeners["virtualInbound"]
    own = [m for m, _ in chains(listener) if m.get("destination_port", 0) == port]
    return {m["transport_protocol"] for m in own}


def mode(value: str) -> str:
    return f"mtls: {{mode: {value}}}"


ROOT_STRICT = peer_authentication("default", "istio-system", mode("STRICT"))


@pytest.mark.parametrize(
    ("policies", "expected"),
    [
        ((), PERMISSIVE),
        ((ROOT_STRICT,), STRICT),
        ((ROOT_STRICT, peer_authentication("ns", "b", mode("DISABLE"))), DISABLE),
        ((ROOT_STRICT, peer_authentication("ns", "b", mode("UNSET"))), STRICT),
        ((peer_authentication("default", "istio-system", mode("UNSET")),), PERMISSIVE),
        (
            (ROOT_STRICT, peer_authentication("w", "b", "selector: {matchLabels: {app: server}}\n" + mode("DISABLE"))),
            DISABLE,
        ),
        (
            (ROOT_STRICT, peer_authentication("w", "b", "selector: {matchLabels: {app: other}}\n" + mode("DISABLE"))),
            STRICT,
        ),
        (
            (peer_authentication("w", "istio-system", "selector: {matchLabels: {app: server}}\n" + mode("STRICT")),),
            PERMISSIVE,
        ),
        (
            (
                peer_authentication("zz", "b", mode("STRICT"), created="2020-01-01T00:00:00Z"),
                peer_authentication("aa", "b", mode("DISABLE"), created="2021-01-01T00:00:00Z"),
            ),
            STRICT,
        ),
    ],
)
def test_levels(policies: tuple[str, ...], expected: set[str]) -> None:
    assert transports(8080, *policies) == expected


def test_a_selector_in_the_root_namespace_has_no_effect_there_either() -> None:
    own = namespace("istio-system", "istio-injection: enabled") + pod("sys", "istio-system", "10.9.0.1")
    policy = peer_authentication("w", "istio-system", "selector: {matchLabels: {app: sys}}\n" + mode("STRICT"))
    listener = of(own, policy, pod_name="sys.istio-system").listeners["virtualInbound"]
    assert {m.get("transport_protocol") for m, _ in chains(listener)} == {None, *PERMISSIVE}


def test_port_level_modes() -> None:
    policy = peer_authentication(
        "w",
        "b",
        "selector: {matchLabels: {app: server}}\nmtls: {mode: STRICT}\nportLevelMtls: {9090: {mode: DISABLE}, 7777: {mode: PERMISSIVE}}",
    )
    assert transports(8080, policy) == STRICT
    assert transports(9090, policy) == DISABLE
    assert transports(7777, policy) == PERMISSIVE
    assert transports(0, policy) == STRICT


def test_tcp_port_chains() -> None:
    text = service("server", "b", "[{name: tcp-x, port: 9000}]")
    listener = of(CLIENT, SERVER, text, pod_name="server.b").listeners["virtualInbound"]
    own = [
        (m["transport_protocol"], m.get("application_protocols"), t)
        for m, t in chains(listener)
        if m.get("destination_port") == 9000
    ]
    assert own == [
        ("tls", ["istio", "istio-peer-exchange", "istio-http/1.0", "istio-http/1.1", "istio-h2"], "tcp inbound|9000||"),
        ("tls", None, "tcp inbound|9000||"),
        ("raw_buffer", None, "tcp inbound|9000||"),
    ]


# --- access logs --------------------------------------------------------------------------------------------


def log_of(logs: Any) -> Any:
    (log,) = logs
    return file_pb2.FileAccessLog.FromString(log.typed_config.value)


def test_no_log_unless_asked_for() -> None:
    listeners = of(CLIENT, SERVER, WEB).listeners
    assert not listeners["virtualOutbound"].access_log
    assert not hcm(listeners["0.0.0.0_8080"].filter_chains[0]).access_log


def test_default_text_log_everywhere_but_in_black_holes() -> None:
    listeners = of(CLIENT, SERVER, WEB, mesh_config("accessLogFile: /dev/stdout")).listeners
    http = log_of(hcm(listeners["0.0.0.0_8080"].filter_chains[0]).access_log)
    assert http.path == "/dev/stdout"
    assert http.log_format.text_format_source.inline_string.startswith('[%START_TIME%] "%REQ(:METHOD)%')
    assert http.log_format.text_format_source.inline_string.endswith("%REQUESTED_SERVER_NAME% %ROUTE_NAME%\n")
    assert tcp(listeners["0.0.0.0_8080"].default_filter_chain).access_log
    blackhole, catch_all = listeners["virtualOutbound"].filter_chains
    assert not tcp(blackhole).access_log
    assert tcp(catch_all).access_log
    assert not listeners["0.0.0.0_8080"].access_log
    for name in ("virtualOutbound", "virtualInbound"):
        (log,) = listeners[name].access_log
        assert list(log.filter.response_flag_filter.flags) == ["NR"]


def test_json_log_and_own_formats() -> None:
    def log(*fields: str) -> Any:
        config = mesh_config("accessLogFile: /dev/stdout\n" + "\n".join(fields))
        return log_of(
            hcm(of(CLIENT, SERVER, WEB, config).listeners["0.0.0.0_8080"].filter_chains[0]).access_log
        ).log_format

    assert len(plain(log("accessLogEncoding: JSON").json_format)) == 24
    assert plain(log("accessLogEncoding: JSON", 'accessLogFormat: \'{"a": "%PROTOCOL%"}\'').json_format) == {
        "a": "%PROTOCOL%"
    }
    own = log('accessLogFormat: "%REQ_WITHOUT_QUERY(:PATH)%"')
    assert own.text_format_source.inline_string == "%REQ_WITHOUT_QUERY(:PATH)%\n"
    assert [f.name for f in own.formatters] == ["envoy.formatter.req_without_query"]


def test_listener_log_can_be_switched_off() -> None:
    listeners = of(CLIENT, mesh_config("accessLogFile: /dev/stdout\ndisableEnvoyListenerLog: true")).listeners
    assert not listeners["virtualOutbound"].access_log


def test_evidence_is_beside_the_log_and_everywhere() -> None:
    mesh = build(CLIENT, SERVER, WEB, mesh_config("accessLogFile: /dev/stdout"))
    client = mesh.pod("client.a")
    assert client is not None
    node = snapshot.node_for_pod(mesh, client)
    listeners = snapshot.generate(
        mesh, replace(node, metadata={**node.metadata, "SIDECARLAB_EVIDENCE": "/e"})
    ).listeners
    assert len(hcm(listeners["0.0.0.0_8080"].filter_chains[0]).access_log) == 2
    blackhole = tcp(listeners["virtualOutbound"].filter_chains[0])
    assert log_of(blackhole.access_log).path == "/e"
    assert all(len(log.access_log) >= 1 for log in listeners.values())
    evidence = file_pb2.FileAccessLog.FromString(listeners["0.0.0.0_8080"].access_log[0].typed_config.value)
    assert plain(evidence.log_format.json_format)["kind"] == "listener"


def test_http10_adds_its_protocol() -> None:
    client = CLIENT + pod(
        "old", "a", "10.1.0.9", annotations="proxy.istio.io/config: 'proxyMetadata: {ISTIO_META_HTTP10: \"1\"}'"
    )
    listener = of(client, SERVER, WEB, pod_name="old.a").listeners["0.0.0.0_8080"]
    assert chains(listener)[0][0]["application_protocols"] == ["http/1.0", "http/1.1", "h2c"]
    assert hcm(listener.filter_chains[0]).http_protocol_options.accept_http_10


def test_path_normalization() -> None:
    def manager(value: str) -> Any:
        config = mesh_config(f"pathNormalization: {{normalization: {value}}}")
        return hcm(of(CLIENT, SERVER, WEB, config).listeners["0.0.0.0_8080"].filter_chains[0])

    assert (manager("NONE").normalize_path.value, manager("BASE").normalize_path.value) == (False, True)
    assert manager("MERGE_SLASHES").merge_slashes
    assert manager("DECODE_AND_MERGE_SLASHES").path_with_escaped_slashes_action == 4

"""Clusters: types, DestinationRules, connection pools of either side, upstream TLS."""

from __future__ import annotations

from typing import Any

import pytest
from mesh_text import (
    CLIENT,
    SERVER,
    S,
    chains,
    hcm,
    istio,
    mesh_config,
    of,
    out,
    peer_authentication,
    plain,
    pod,
    service,
)

HOST = f"server.b{S}"
WEB = service("server", "b", "[{name: http, port: 8080}, {name: grpc, port: 7000}]", vip="10.96.0.9")
OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"


def rule(spec: str, name: str = "d", ns: str = "a", created: str = "") -> str:
    return istio("DestinationRule", name, ns, spec, created=created)


def entry(spec: str) -> str:
    return istio("ServiceEntry", "e", "a", spec)


def cluster(*parts: str, port: int = 8080, host: str = HOST, subset: str = "", pod_name: str = "client.a") -> Any:
    return plain(of(CLIENT, SERVER, WEB, *parts, pod_name=pod_name).clusters[out(port, host, subset)])


def options(found: Any) -> Any:
    out = dict(found["typed_extension_protocol_options"][OPTIONS])
    del out["@type"]
    return out


# --- types ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("resolution", "kind", "more"),
    [
        ("STATIC", "EDS", "\nendpoints: [{address: 203.0.113.1}]"),
        ("DNS", "STRICT_DNS", ""),
        ("DNS_ROUND_ROBIN", "LOGICAL_DNS", ""),
        ("NONE", "ORIGINAL_DST", ""),
    ],
)
def test_entry_types(resolution: str, kind: str, more: str) -> None:
    text = entry(
        f"hosts: [x.example]\nresolution: {resolution}\nports: [{{number: 80, name: http, protocol: HTTP, targetPort: 8081}}]{more}"
    )
    found = cluster(text, port=80, host="x.example")
    assert found["type"] == kind
    assert found["metadata"]["filter_metadata"]["istio"]["external"] is True
    if resolution == "NONE":
        assert found["lb_policy"] == "CLUSTER_PROVIDED"
        assert found["original_dst_lb_config"] == {"upstream_port_override": 8081}
    if "DNS" in resolution:
        (group,) = found["load_assignment"]["endpoints"]
        address = group["lb_endpoints"][0]["endpoint"]["address"]["socket_address"]
        assert address == {"address": "x.example", "port_value": 8081}
        assert (found["dns_lookup_family"], found["dns_refresh_rate"], found["respect_dns_ttl"]) == (
            "V4_ONLY",
            "60s",
            True,
        )
        assert found["typed_dns_resolver_config"]["name"] == "envoy.network.dns_resolver.cares"


def test_dns_cluster_without_endpoints_is_left_out() -> None:
    text = entry(
        "hosts: [x.example]\nresolution: DNS\nworkloadSelector: {labels: {app: nobody}}\n"
        "ports: [{number: 80, name: http, protocol: HTTP}]"
    )
    assert out(80, "x.example") not in of(CLIENT, text).clusters


def test_race_strategy_is_logical_dns_of_all_families() -> None:
    text = entry("hosts: [x.example]\nresolution: DNS\nports: [{number: 80, name: http, protocol: HTTP}]").replace(
        "namespace: a}", "namespace: a, annotations: {istio.io/connect-strategy: RACE_FIRST_TCP_CONNECT}}"
    )
    found = cluster(text, port=80, host="x.example")
    assert (found["type"], found["dns_lookup_family"]) == ("LOGICAL_DNS", "ALL")


def test_endpoint_ports_of_an_entry() -> None:
    text = entry(
        "hosts: [x.example]\nresolution: STATIC\n"
        "ports: [{number: 80, name: http, protocol: HTTP, targetPort: 8080}, {number: 90, name: tcp, protocol: TCP}]\n"
        "endpoints: [{address: 203.0.113.1, ports: {http: 8888}}, {address: 203.0.113.2}]"
    )
    resources = of(CLIENT, text)

    def ports(port: int) -> list[tuple[str, int]]:
        groups = resources.endpoints[out(port, "x.example")].endpoints
        found = [e.endpoint.address.socket_address for g in groups for e in g.lb_endpoints]
        return [(a.address, a.port_value) for a in found]

    assert ports(80) == [("203.0.113.1", 8888), ("203.0.113.2", 8080)]
    assert ports(90) == [("203.0.113.1", 90), ("203.0.113.2", 90)]


def test_grpc_ports_are_explicit_http2() -> None:
    assert options(cluster(port=7000)) == {"explicit_http_config": {"http2_protocol_options": {}}}


def test_passthrough_cluster() -> None:
    found = plain(of(CLIENT).clusters["PassthroughCluster"])
    assert (found["type"], found["lb_policy"]) == ("ORIGINAL_DST", "CLUSTER_PROVIDED")
    assert options(found) == {
        "common_http_protocol_options": {"idle_timeout": "300s"},
        "use_downstream_protocol_config": {"http_protocol_options": {}, "http2_protocol_options": {}},
    }
    inbound = plain(of(CLIENT).clusters["InboundPassthroughCluster"])
    assert inbound["upstream_bind_config"]["source_address"]["address"] == "127.0.0.6"


# --- connection pools ------------------------------------------------------------------------------


POOLS = """
host: server.b.svc.cluster.local
trafficPolicy:
  connectionPool:
    tcp: {maxConnections: 1, connectTimeout: 3s, tcpKeepalive: {time: 7200s, interval: 75s, probes: 5}, maxConnectionDuration: 60s}
    http: {http1MaxPendingRequests: 2, http2MaxRequests: 3, maxRetries: 4, maxRequestsPerConnection: 5, idleTimeout: 6s, maxConcurrentStreams: 7}
"""


def test_every_field_of_a_pool() -> None:
    found = cluster(rule(POOLS))
    (threshold,) = found["circuit_breakers"]["thresholds"]
    assert threshold == {"max_connections": 1, "max_pending_requests": 2, "max_requests": 3, "max_retries": 4}
    assert found["connect_timeout"] == "3s"
    assert found["upstream_connection_options"]["tcp_keepalive"] == {
        "keepalive_probes": 5,
        "keepalive_time": 7200,
        "keepalive_interval": 75,
    }
    assert options(found)["common_http_protocol_options"] == {
        "idle_timeout": "6s",
        "max_connection_duration": "60s",
        "max_requests_per_connection": 5,
    }
    http2 = options(cluster(rule(POOLS), port=7000))["explicit_http_config"]["http2_protocol_options"]
    assert http2 == {"max_concurrent_streams": 7}


def test_keepalive_of_the_mesh_is_overlaid_field_by_field() -> None:
    mesh = mesh_config("tcpKeepalive: {time: 100s, probes: 9}")
    assert cluster(mesh)["upstream_connection_options"]["tcp_keepalive"] == {
        "keepalive_probes": 9,
        "keepalive_time": 100,
    }
    text = rule(f"host: {HOST}\ntrafficPolicy: {{connectionPool: {{tcp: {{tcpKeepalive: {{time: 7s}}}}}}}}")
    assert cluster(mesh, text)["upstream_connection_options"]["tcp_keepalive"] == {
        "keepalive_probes": 9,
        "keepalive_time": 7,
    }


def test_zero_means_unset() -> None:
    text = rule(f"host: {HOST}\ntrafficPolicy: {{connectionPool: {{tcp: {{maxConnections: 0}}}}}}")
    (threshold,) = cluster(text)["circuit_breakers"]["thresholds"]
    assert threshold["max_connections"] == 4294967295


def test_port_level_settings_replace_and_subsets_override() -> None:
    text = rule(
        f"host: {HOST}\n"
        "trafficPolicy:\n"
        "  connectionPool: {tcp: {maxConnections: 10}}\n"
        "  loadBalancer: {simple: RANDOM}\n"
        "  portLevelSettings: [{port: {number: 7000}, connectionPool: {tcp: {maxConnections: 20}}}]\n"
        "subsets:\n- {name: v1, labels: {version: v1}, trafficPolicy: {loadBalancer: {simple: ROUND_ROBIN}}}"
    )
    assert cluster(text)["lb_policy"] == "RANDOM"
    port = cluster(text, port=7000)
    assert (port["lb_policy"], port["circuit_breakers"]["thresholds"][0]["max_connections"]) == ("LEAST_REQUEST", 20)
    subset = cluster(text, subset="v1")
    assert "lb_policy" not in subset  # ROUND_ROBIN is the zero of the enum
    assert subset["circuit_breakers"]["thresholds"][0]["max_connections"] == 10
    assert subset["metadata"]["filter_metadata"]["istio"]["subset"] == "v1"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("{simple: RANDOM}", {"lb_policy": "RANDOM"}),
        ("{simple: LEAST_CONN}", {"lb_policy": "LEAST_REQUEST"}),
        ("{simple: PASSTHROUGH}", {"lb_policy": "CLUSTER_PROVIDED", "type": "ORIGINAL_DST"}),
        (
            "{consistentHash: {httpHeaderName: x}}",
            {"lb_policy": "RING_HASH", "ring_hash_lb_config": {"minimum_ring_size": "1024"}},
        ),
        (
            "{consistentHash: {httpHeaderName: x, ringHash: {minimumRingSize: 50}}}",
            {"lb_policy": "RING_HASH", "ring_hash_lb_config": {"minimum_ring_size": "50"}},
        ),
        (
            "{consistentHash: {httpHeaderName: x, maglev: {tableSize: 1009}}}",
            {"lb_policy": "MAGLEV", "maglev_lb_config": {"table_size": "1009"}},
        ),
    ],
)
def test_load_balancers(settings: str, expected: dict[str, Any]) -> None:
    found = cluster(rule(f"host: {HOST}\ntrafficPolicy: {{loadBalancer: {settings}}}"))
    for key, value in expected.items():
        assert found.get(key) == value, key
    assert ("eds_cluster_config" in found) == ("PASSTHROUGH" not in settings)


def test_warm_up() -> None:
    found = cluster(
        rule(f"host: {HOST}\ntrafficPolicy: {{loadBalancer: {{simple: ROUND_ROBIN, warmup: {{duration: 30s}}}}}}")
    )
    slow = found["round_robin_lb_config"]["slow_start_config"]
    assert (slow["slow_start_window"], slow["min_weight_percent"], slow["aggression"]["default_value"]) == (
        "30s",
        {"value": 10.0},
        1.0,
    )


def test_outlier_detection() -> None:
    found = cluster(
        rule(
            f"host: {HOST}\ntrafficPolicy: {{outlierDetection: {{consecutive5xxErrors: 7, consecutiveGatewayErrors: 0, interval: 5m, "
            "baseEjectionTime: 15m, maxEjectionPercent: 20, minHealthPercent: 30}}"
        )
    )
    assert found["outlier_detection"] == {
        "consecutive_5xx": 7,
        "enforcing_consecutive_5xx": 100,
        "consecutive_gateway_failure": 0,
        "enforcing_consecutive_gateway_failure": 0,
        "interval": "300s",
        "base_ejection_time": "900s",
        "max_ejection_percent": 20,
        "enforcing_success_rate": 0,
    }
    assert found["common_lb_config"]["healthy_panic_threshold"] == {"value": 30.0}


def test_h2_upgrade() -> None:
    upgraded = options(
        cluster(rule(f"host: {HOST}\ntrafficPolicy: {{connectionPool: {{http: {{h2UpgradePolicy: UPGRADE}}}}}}"))
    )
    assert upgraded["explicit_http_config"] == {"http2_protocol_options": {}}
    mesh = mesh_config("h2UpgradePolicy: UPGRADE")
    assert options(cluster(mesh))["explicit_http_config"] == {"http2_protocol_options": {}}
    client = rule(f"host: {HOST}\ntrafficPolicy: {{connectionPool: {{http: {{useClientProtocol: true}}}}}}")
    assert "use_downstream_protocol_config" in options(cluster(mesh, client))


def test_retry_budget() -> None:
    text = rule(f"host: {HOST}\ntrafficPolicy: {{connectionPool: {{tcp: {{}}}}, retryBudget: {{percent: 25.0}}}}")
    budget = cluster(text)["circuit_breakers"]["thresholds"][0]["retry_budget"]
    assert budget == {"budget_percent": {"value": 25.0}, "min_retry_concurrency": 3}


# --- the other side: inbound pools -------------------------------------------------------------------


def inbound(*parts: str) -> Any:
    return plain(of(CLIENT, SERVER, WEB, *parts, pod_name="server.b").clusters["inbound|8080||"])


OWN = rule(f"host: {HOST}\ntrafficPolicy: {{connectionPool: {{http: {{http1MaxPendingRequests: 11}}}}}}", ns="b")
POOL = istio(
    "Sidecar", "s", "b", "inboundConnectionPool: {http: {http1MaxPendingRequests: 22}}\negress: [{hosts: ['*/*']}]"
)
INGRESS = istio(
    "Sidecar",
    "s",
    "b",
    "inboundConnectionPool: {http: {http1MaxPendingRequests: 22}}\n"
    "ingress: [{port: {number: 8080, protocol: HTTP, name: http}, connectionPool: {http: {http1MaxPendingRequests: 33}}}]",
)


@pytest.mark.parametrize(("text", "pending"), [("", 4294967295), (OWN, 11), (OWN + POOL, 22), (OWN + INGRESS, 33)])
def test_inbound_pool_order(text: str, pending: int) -> None:
    (threshold,) = inbound(text)["circuit_breakers"]["thresholds"]
    assert threshold["max_pending_requests"] == pending


def test_inbound_takes_nothing_but_the_pool_of_a_rule() -> None:
    text = rule(
        f"host: {HOST}\ntrafficPolicy: {{loadBalancer: {{simple: RANDOM}}, outlierDetection: {{consecutive5xxErrors: 1}}, tls: {{mode: SIMPLE}}}}",
        ns="b",
    )
    found = inbound(text)
    assert found["lb_policy"] == "CLUSTER_PROVIDED"
    assert "outlier_detection" not in found
    assert "transport_socket" not in found


@pytest.mark.parametrize(
    ("endpoint", "address", "binds"),
    [
        ("127.0.0.1:8081", {"socket_address": {"address": "127.0.0.1", "port_value": 8081}}, False),
        ("0.0.0.0:8081", {"socket_address": {"address": "10.2.0.1", "port_value": 8081}}, True),
        ("unix:///tmp/app.sock", {"pipe": {"path": "/tmp/app.sock"}}, True),
    ],
)
def test_default_endpoints(endpoint: str, address: dict[str, Any], binds: bool) -> None:
    text = istio(
        "Sidecar",
        "s",
        "b",
        f"ingress: [{{port: {{number: 8080, protocol: HTTP, name: h}}, defaultEndpoint: '{endpoint}'}}]",
    )
    found = inbound(text)
    assert found["type"] == "STATIC"
    (group,) = found["load_assignment"]["endpoints"]
    assert group["lb_endpoints"][0]["endpoint"]["address"] == address
    assert ("upstream_bind_config" in found) == binds


def test_ingress_replaces_the_services_ports() -> None:
    text = istio("Sidecar", "s", "b", "ingress: [{port: {number: 9999, protocol: TCP, name: t}}]")
    resources = of(CLIENT, SERVER, WEB, text, pod_name="server.b")
    assert {n for n in resources.clusters if n.startswith("inbound|")} == {"inbound|9999||"}
    names = [c.name for c in resources.listeners["virtualInbound"].filter_chains]
    assert [n for n in names if n.endswith("_9999")]
    assert not [n for n in names if n.endswith("_8080")]


def test_ingress_with_capture_mode_none_is_a_listener() -> None:
    text = istio(
        "Sidecar",
        "s",
        "b",
        "ingress: [{port: {number: 9999, protocol: HTTP, name: h}, bind: 10.2.0.1, captureMode: NONE}]",
    )
    listener = of(CLIENT, SERVER, WEB, text, pod_name="server.b").listeners["10.2.0.1_9999"]
    assert (listener.traffic_direction, listener.HasField("bind_to_port")) == (1, False)
    assert "original_dst" not in {f.name.rpartition(".")[2] for f in listener.listener_filters}


def test_inbound_localhost_policy() -> None:
    found = inbound(mesh_config("inboundTrafficPolicy: {mode: LOCALHOST}"))
    (group,) = found["load_assignment"]["endpoints"]
    assert group["lb_endpoints"][0]["endpoint"]["address"]["socket_address"] == {
        "address": "127.0.0.1",
        "port_value": 8080,
    }
    assert "upstream_bind_config" not in found


def test_cluster_is_of_the_target_port_and_host_of_the_service_port() -> None:
    moved = service("moved", "b", "[{name: http, port: 80, targetPort: main}]", vip="10.96.0.8", app="server")
    resources = of(CLIENT, SERVER, moved, pod_name="server.b")
    assert "inbound|8080||" in resources.clusters
    chain = next(c for c in resources.listeners["virtualInbound"].filter_chains if c.name == "0.0.0.0_8080")
    assert hcm(chain).route_config.virtual_hosts[0].name == "inbound|http|80"


def test_of_two_services_on_a_port_the_oldest_decides_the_protocol() -> None:
    old = service("old", "b", "[{name: tcp-x, port: 8080}]", app="server", created="2020-01-01T00:00:00Z")
    new = service("new", "b", "[{name: http, port: 8080}]", app="server", created="2021-01-01T00:00:00Z")
    resources = of(CLIENT, SERVER, new, old, pod_name="server.b")
    own = [t for m, t in chains(resources.listeners["virtualInbound"]) if m.get("destination_port") == 8080]
    assert set(own) == {"tcp inbound|8080||"}
    services = plain(resources.clusters["inbound|8080||"])["metadata"]["filter_metadata"]["istio"]["services"]
    assert [s["name"] for s in services] == ["old", "new"]


# --- upstream TLS ------------------------------------------------------------------------------------------


def test_written_tls_modes() -> None:
    assert "transport_socket_matches" not in cluster(rule(f"host: {HOST}\ntrafficPolicy: {{tls: {{mode: DISABLE}}}}"))
    mutual = cluster(rule(f"host: {HOST}\ntrafficPolicy: {{tls: {{mode: ISTIO_MUTUAL, sni: mine.example}}}}"))
    assert mutual["transport_socket"]["typed_config"]["sni"] == "mine.example"
    assert "transport_socket_matches" not in mutual


def test_simple_tls() -> None:
    found = cluster(rule(f"host: {HOST}\ntrafficPolicy: {{tls: {{mode: SIMPLE}}}}"))
    combined = found["transport_socket"]["typed_config"]["common_tls_context"]["combined_validation_context"]
    assert combined["validation_context_sds_secret_config"]["name"] == "file-root:system"
    assert options(found)["upstream_http_protocol_options"] == {"auto_sni": True, "auto_san_validation": True}
    assert found["metadata"]["filter_metadata"]["istio"]["alpn_override"] == "false"


def test_mutual_tls_with_files() -> None:
    found = cluster(
        rule(
            f"host: {HOST}\ntrafficPolicy: {{tls: {{mode: MUTUAL, clientCertificate: /c.pem, privateKey: /k.pem, caCertificates: /ca.pem, "
            "sni: x.example, subjectAltNames: [y.example]}}"
        )
    )
    common = found["transport_socket"]["typed_config"]["common_tls_context"]
    assert [c["name"] for c in common["tls_certificate_sds_secret_configs"]] == ["file-cert:/c.pem~/k.pem"]
    combined = common["combined_validation_context"]
    assert combined["validation_context_sds_secret_config"]["name"] == "file-root:/ca.pem"
    assert combined["default_validation_context"]["match_subject_alt_names"] == [{"exact": "y.example"}]
    assert OPTIONS not in found.get("typed_extension_protocol_options", {})


def test_credential_name_needs_a_selector() -> None:
    spec = f"host: {HOST}\ntrafficPolicy: {{tls: {{mode: SIMPLE, credentialName: secret}}}}"
    assert "transport_socket" not in cluster(rule(spec))
    selected = cluster(rule("workloadSelector: {matchLabels: {app: client}}\n" + spec))
    combined = selected["transport_socket"]["typed_config"]["common_tls_context"]["combined_validation_context"]
    assert combined["validation_context_sds_secret_config"]["name"] == "kubernetes://secret-cacert"


def test_no_auto_mtls_for_external_and_switched_off() -> None:
    external = entry(
        "hosts: [x.example]\nresolution: STATIC\nendpoints: [{address: 203.0.113.1}]\nports: [{number: 80, name: http, protocol: HTTP}]"
    )
    assert "transport_socket_matches" not in cluster(external, port=80, host="x.example")
    assert "transport_socket_matches" not in cluster(mesh_config("enableAutoMtls: false"))


def test_headless_is_mtls_only_if_every_endpoint_is_meshed() -> None:
    headless = service("server", "b", "[{name: tcp-x, port: 9000}]", more=", clusterIP: None")
    name = out(9000, HOST)
    assert "transport_socket" in plain(of(CLIENT, SERVER, headless).clusters[name])
    bare = pod("bare", "b", "10.2.0.7", labels="sidecar.istio.io/inject: 'false'").replace("app: bare", "app: server")
    assert "transport_socket" not in plain(of(CLIENT, SERVER, bare, headless).clusters[name])


def test_identities_of_all_service_accounts_and_trust_domains() -> None:
    second = pod("other", "b", "10.2.0.2").replace("app: other", "app: server")
    found = cluster(second, mesh_config("trustDomainAliases: [old.domain]"))
    typed = found["transport_socket_matches"][0]["transport_socket"]["typed_config"]
    names = typed["common_tls_context"]["combined_validation_context"]["default_validation_context"]
    assert [m["exact"] for m in names["match_subject_alt_names"]] == [
        "spiffe://cluster.local/ns/b/sa/other",
        "spiffe://cluster.local/ns/b/sa/server",
        "spiffe://old.domain/ns/b/sa/other",
        "spiffe://old.domain/ns/b/sa/server",
    ]


def test_rule_with_selector_is_for_its_pods_only() -> None:
    spec = f"workloadSelector: {{matchLabels: {{app: client}}}}\nhost: {HOST}\ntrafficPolicy: {{connectionPool: {{tcp: {{maxConnections: 5}}}}}}"
    other = pod("second", "a", "10.1.0.2")
    assert cluster(rule(spec))["circuit_breakers"]["thresholds"][0]["max_connections"] == 5
    found = cluster(other, rule(spec), pod_name="second.a")
    assert found["circuit_breakers"]["thresholds"][0]["max_connections"] == 4294967295


# --- mTLS per endpoint ------------------------------------------------------------------------------------------


def flags(*parts: str, port: int = 8080) -> list[bool]:
    groups = of(CLIENT, SERVER, WEB, *parts).endpoints[out(port, HOST)].endpoints
    return ["envoy.transport_socket_match" in e.metadata.filter_metadata for g in groups for e in g.lb_endpoints]


def test_endpoint_flag() -> None:
    bare = pod("bare", "b", "10.2.0.7", labels="sidecar.istio.io/inject: 'false'").replace("app: bare", "app: server")
    assert flags(bare) == [True, False]
    port = peer_authentication(
        "p", "b", "selector: {matchLabels: {app: server}}\nportLevelMtls: {7000: {mode: DISABLE}}"
    )
    assert (flags(port), flags(port, port=7000)) == ([True], [False])
    written = rule(f"host: {HOST}\ntrafficPolicy: {{tls: {{mode: ISTIO_MUTUAL}}}}")
    assert flags(bare, written) == [True, True]


def test_min_health_percent_withholds_unready_endpoints() -> None:
    unready = (
        pod("sick", "b", "")
        .replace("app: sick", "app: server")
        .replace("---\n", "status: {podIP: 10.2.0.9, conditions: [{type: Ready, status: 'False'}]}\n---\n")
    )
    assert len(flags(unready)) == 2
    assert (
        len(flags(unready, rule(f"host: {HOST}\ntrafficPolicy: {{outlierDetection: {{minHealthPercent: 10}}}}"))) == 1
    )


def test_subset_selects_endpoints_by_label() -> None:
    second = pod("two", "b", "10.2.0.2", labels="version: v2").replace("app: two", "app: server")
    text = rule(
        f"host: {HOST}\nsubsets: [{{name: v1, labels: {{version: v1}}}}, {{name: none, labels: {{version: v9}}}}]"
    )
    endpoints = of(CLIENT, SERVER, WEB, second, text).endpoints
    groups = endpoints[out(8080, HOST, "v1")].endpoints
    assert [e.endpoint.address.socket_address.address for g in groups for e in g.lb_endpoints] == ["10.2.0.1"]
    assert not endpoints[out(8080, HOST, "none")].endpoints

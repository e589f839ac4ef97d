"""The worked example: resource names of the frontend proxy in cases A, B, C and D, the shapes, and the variations."""

from __future__ import annotations

from typing import Any

import pytest
from envoy.extensions.filters.network.http_connection_manager.v3 import http_connection_manager_pb2 as hcm_pb2
from envoy.extensions.filters.network.tcp_proxy.v3 import tcp_proxy_pb2
from envoy.extensions.transport_sockets.tls.v3 import tls_pb2
from four_namespaces import (
    CATALOG,
    FRONTEND,
    PAYMENTS,
    REGISTRY_ONLY,
    TRACING,
    build,
    mesh_config,
    of,
    sidecar,
    virtual_hosts,
)
from google.protobuf import json_format

SCOPED = sidecar('["./*", "catalog/*"]')
CASES = {"A": (), "B": (REGISTRY_ONLY,), "C": (SCOPED,), "D": (SCOPED, REGISTRY_ONLY)}
FIXED = {"BlackHoleCluster", "PassthroughCluster", "inbound|8080||", "InboundPassthroughCluster"}


def http8080(*hosts: str) -> set[str]:
    return {f"outbound|8080||{h}" for h in hosts}


@pytest.mark.parametrize("case", CASES)
def test_cluster_and_endpoint_names(case: str) -> None:
    resources = of(build(*CASES[case]))
    eds = http8080(FRONTEND, CATALOG)
    if case in "AB":
        eds |= http8080(PAYMENTS) | {f"outbound|4317||{TRACING}"}
    assert set(resources.clusters) == eds | FIXED
    assert set(resources.endpoints) == eds
    assert set(resources.name_table.table) == {n.rpartition("|")[2] for n in eds}


@pytest.mark.parametrize("case", CASES)
def test_listener_names(case: str) -> None:
    expected = {"0.0.0.0_8080", "virtualOutbound", "virtualInbound"} | ({"0.0.0.0_4317"} if case in "AB" else set())
    assert set(of(build(*CASES[case])).listeners) == expected


@pytest.mark.parametrize("case", CASES)
def test_virtual_hosts_in_order(case: str) -> None:
    resources = of(build(*CASES[case]))
    last = "allow_any" if case in "AC" else "block_all"
    known = [CATALOG, FRONTEND, PAYMENTS] if case in "AB" else [CATALOG, FRONTEND]
    assert virtual_hosts(resources, "8080") == [f"{h}:8080" for h in known] + [last]
    if case in "AB":
        assert virtual_hosts(resources, "4317") == [f"{TRACING}:4317", last]
    else:
        assert set(resources.routes) == {"8080"}


def test_domains_of_the_virtual_hosts() -> None:
    resources = of(build())
    domains = {v.name: list(v.domains) for r in resources.routes.values() for v in r.virtual_hosts}
    assert domains[f"{FRONTEND}:8080"] == [
        FRONTEND, FRONTEND + ".", "frontend", "frontend.frontend.svc", "frontend.frontend", "10.96.0.10",
    ]  # fmt: skip
    assert domains[f"{CATALOG}:8080"] == [
        CATALOG, CATALOG + ".", "catalog.catalog", "catalog.catalog.svc", "10.96.0.20",
    ]  # fmt: skip
    assert domains[f"{TRACING}:4317"] == [
        TRACING, TRACING + ".", "tracing.observability", "tracing.observability.svc", "10.96.0.40",
    ]  # fmt: skip


def plain(message: Any) -> Any:
    return json_format.MessageToDict(message, preserving_proto_field_name=True)


def hcm(chain: Any) -> Any:
    return hcm_pb2.HttpConnectionManager.FromString(chain.filters[-1].typed_config.value)


def tcp(chain: Any) -> Any:
    return tcp_proxy_pb2.TcpProxy.FromString(chain.filters[-1].typed_config.value)


@pytest.mark.parametrize(("case", "target"), [("A", "PassthroughCluster"), ("B", "BlackHoleCluster")])
def test_http_listener(case: str, target: str) -> None:
    listener = of(build(*CASES[case])).listeners["0.0.0.0_8080"]
    assert (listener.traffic_direction, listener.bind_to_port.value) == (2, False)
    assert listener.continue_on_listener_filters_timeout
    assert listener.listener_filters_timeout.ToSeconds() == 0
    assert [f.name for f in listener.listener_filters] == ["envoy.filters.listener.http_inspector"]
    (chain,) = listener.filter_chains
    assert chain.name == ""
    assert chain.transport_socket_connect_timeout.ToSeconds() == 15
    assert plain(chain.filter_chain_match) == {
        "transport_protocol": "raw_buffer",
        "application_protocols": ["http/1.1", "h2c"],
    }
    assert (hcm(chain).stat_prefix, hcm(chain).rds.route_config_name) == ("outbound_0.0.0.0_8080;", "8080")
    default = listener.default_filter_chain
    assert default.name == "PassthroughFilterChain"
    assert default.HasField("filter_chain_match")
    assert (tcp(default).cluster, tcp(default).stat_prefix) == (target, target)


@pytest.mark.parametrize(("case", "target"), [("C", "PassthroughCluster"), ("D", "BlackHoleCluster")])
def test_virtual_outbound(case: str, target: str) -> None:
    listener = of(build(*CASES[case])).listeners["virtualOutbound"]
    assert listener.address.socket_address.port_value == 15001
    assert listener.use_original_dst.value
    assert not listener.listener_filters
    assert listener.max_connections_to_accept_per_socket_event.value == 1
    assert not listener.HasField("transparent")
    assert [c.name for c in listener.filter_chains] == ["virtualOutbound-blackhole", "virtualOutbound-catchall-tcp"]
    assert listener.filter_chains[0].filter_chain_match.destination_port.value == 15001
    assert [tcp(c).cluster for c in listener.filter_chains] == ["BlackHoleCluster", target]


def test_catch_all_virtual_hosts() -> None:
    allow = of(build()).routes["8080"].virtual_hosts[-1]
    assert plain(allow) == {
        "name": "allow_any",
        "domains": ["*"],
        "include_request_attempt_count": True,
        "routes": [
            {
                "name": "allow_any",
                "match": {"prefix": "/"},
                "route": {"cluster": "PassthroughCluster", "timeout": "0s", "max_grpc_timeout": "0s"},
            }
        ],
    }
    block = of(build(REGISTRY_ONLY)).routes["8080"].virtual_hosts[-1]
    assert plain(block)["routes"] == [
        {"name": "block_all", "match": {"prefix": "/"}, "direct_response": {"status": 502}}
    ]


def test_route_of_a_service() -> None:
    config = of(build()).routes["8080"]
    assert plain(config)["validate_clusters"] is False
    assert config.ignore_port_in_host_matching
    assert config.max_direct_response_body_size_bytes.value == 1048576
    catalog = config.virtual_hosts[0]
    assert catalog.include_request_attempt_count
    (route,) = plain(catalog)["routes"]
    predicate = route["route"]["retry_policy"].pop("retry_host_predicate")
    assert [p["name"] for p in predicate] == ["envoy.retry_host_predicates.previous_hosts"]
    assert route == {
        "name": "default",
        "match": {"prefix": "/"},
        "decorator": {"operation": f"{CATALOG}:8080/*"},
        "route": {
            "cluster": f"outbound|8080||{CATALOG}",
            "timeout": "0s",
            "max_grpc_timeout": "0s",
            "retry_policy": {
                "retry_on": "connect-failure,refused-stream,unavailable,cancelled,retriable-status-codes",
                "num_retries": 2,
                "host_selection_retry_max_attempts": "5",
            },
        },
    }


def test_outbound_cluster() -> None:
    name = f"outbound|8080||{CATALOG}"
    cluster = plain(of(build()).clusters[name])
    matches = cluster.pop("transport_socket_matches")
    assert cluster == {
        "name": name,
        "alt_stat_name": name + ";",
        "type": "EDS",
        "eds_cluster_config": {
            "eds_config": {"ads": {}, "initial_fetch_timeout": "0s", "resource_api_version": "V3"},
            "service_name": name,
        },
        "connect_timeout": "10s",
        "lb_policy": "LEAST_REQUEST",
        "common_lb_config": {"healthy_panic_threshold": {}},
        "circuit_breakers": {
            "thresholds": [
                dict.fromkeys(("max_connections", "max_pending_requests", "max_requests", "max_retries"), 4294967295)
            ]
        },
        "metadata": {
            "filter_metadata": {"istio": {"services": [{"host": CATALOG, "name": "catalog", "namespace": "catalog"}]}}
        },
    }
    assert [(m["name"], m["match"]) for m in matches] == [
        ("tlsMode-istio", {"tlsMode": "istio"}),
        ("tlsMode-disabled", {}),
    ]
    assert matches[1]["transport_socket"]["name"] == "envoy.transport_sockets.raw_buffer"


def upstream_tls(cluster: Any) -> Any:
    return tls_pb2.UpstreamTlsContext.FromString(
        cluster.transport_socket_matches[0].transport_socket.typed_config.value
    )


def test_upstream_tls_context() -> None:
    clusters = of(build()).clusters
    context = upstream_tls(clusters[f"outbound|8080||{CATALOG}"])
    assert context.sni == f"outbound_.8080_._.{CATALOG}"
    assert list(context.common_tls_context.alpn_protocols) == ["istio-peer-exchange", "istio"]
    combined = context.common_tls_context.combined_validation_context
    assert combined.validation_context_sds_secret_config.name == "ROOTCA"
    assert [m.exact for m in combined.default_validation_context.match_subject_alt_names] == [
        "spiffe://cluster.local/ns/catalog/sa/catalog"
    ]
    (certificate,) = context.common_tls_context.tls_certificate_sds_secret_configs
    assert certificate.name == "default"
    tracing = clusters[f"outbound|4317||{TRACING}"]
    assert list(upstream_tls(tracing).common_tls_context.alpn_protocols) == ["istio-peer-exchange", "istio", "h2"]
    assert "envoy.extensions.upstreams.http.v3.HttpProtocolOptions" in tracing.typed_extension_protocol_options


def test_endpoints() -> None:
    assignment = plain(of(build()).endpoints[f"outbound|8080||{CATALOG}"])
    assert assignment == {
        "cluster_name": f"outbound|8080||{CATALOG}",
        "endpoints": [
            {
                "locality": {"region": "r1", "zone": "z1"},
                "load_balancing_weight": 1,
                "lb_endpoints": [
                    {
                        "endpoint": {"address": {"socket_address": {"address": "10.0.2.5", "port_value": 8080}}},
                        "health_status": "HEALTHY",
                        "load_balancing_weight": 1,
                        "metadata": {
                            "filter_metadata": {
                                "envoy.transport_socket_match": {"tlsMode": "istio"},
                                "istio": {"workload": "catalog;catalog;catalog;;Kubernetes"},
                            }
                        },
                    }
                ],
            }
        ],
    }


def test_inbound_cluster() -> None:
    cluster = plain(of(build()).clusters["inbound|8080||"])
    assert cluster["type"] == "ORIGINAL_DST"
    assert cluster["lb_policy"] == "CLUSTER_PROVIDED"
    assert cluster["connect_timeout"] == "10s"
    assert cluster["cleanup_interval"] == "9223372035s"
    assert cluster["upstream_bind_config"] == {"source_address": {"address": "127.0.0.6", "port_value": 0}}


def test_name_table_in_case_c() -> None:
    table = of(build(*CASES["C"])).name_table.table
    entry = table[CATALOG]
    assert (list(entry.ips), entry.registry, entry.shortname, entry.namespace) == (
        ["10.96.0.20"],
        "Kubernetes",
        "catalog",
        "catalog",
    )


MH = ["istio-http/1.0", "istio-http/1.1", "istio-h2"]
PH = ["http/1.1", "h2c"]
MT = ["istio-peer-exchange", "istio"]
MA = ["istio", "istio-peer-exchange", *MH]


def chain_rows(listener: Any) -> list[tuple[str, int, str, list[str], str, bool]]:
    """(name, destination port, transport, ALPN, cluster or route, mTLS) of every chain, in order."""
    rows = []
    for chain in listener.filter_chains:
        match = chain.filter_chain_match
        if chain.filters[-1].name.endswith("http_connection_manager"):
            target = "http " + hcm(chain).route_config.name
        else:
            target = "tcp " + tcp(chain).cluster
        rows.append(
            (
                chain.name,
                match.destination_port.value,
                match.transport_protocol,
                list(match.application_protocols),
                target,
                chain.HasField("transport_socket"),
            )
        )
    return rows


def test_virtual_inbound_permissive() -> None:
    listener = of(build()).listeners["virtualInbound"]
    through = "InboundPassthroughCluster"
    assert chain_rows(listener) == [
        ("virtualInbound-blackhole", 15006, "", [], "tcp BlackHoleCluster", False),
        ("virtualInbound-catchall-http", 0, "tls", MH, f"http {through}", True),
        ("virtualInbound-catchall-http", 0, "raw_buffer", PH, f"http {through}", False),
        ("virtualInbound", 0, "tls", MT, f"tcp {through}", True),
        ("virtualInbound", 0, "raw_buffer", [], f"tcp {through}", False),
        ("virtualInbound", 0, "tls", [], f"tcp {through}", False),
        ("0.0.0.0_8080", 8080, "tls", MA, "http inbound|8080||", True),
        ("0.0.0.0_8080", 8080, "raw_buffer", [], "http inbound|8080||", False),
    ]
    filters = {f.name.rpartition(".")[2]: plain(f).get("filter_disabled") for f in listener.listener_filters}
    assert filters == {
        "original_dst": None,
        "tls_inspector": {"destination_port_range": {"start": 15006, "end": 15007}},
        "http_inspector": {
            "or_match": {
                "rules": [
                    {"destination_port_range": {"start": 8080, "end": 8081}},
                    {"destination_port_range": {"start": 15006, "end": 15007}},
                ]
            }
        },
    }


PEER_AUTHENTICATION = """
apiVersion: security.istio.io/v1
kind: PeerAuthentication
metadata: {{name: {name}, namespace: {namespace}}}
spec: {spec}
---
"""


def peer_authentication(mode: str, namespace: str = "istio-system", selector: str = "", name: str = "default") -> str:
    spec = f"{{mtls: {{mode: {mode}}}{', selector: {matchLabels: ' + selector + '}' if selector else ''}}}"
    return PEER_AUTHENTICATION.format(name=name, namespace=namespace, spec=spec)


def test_virtual_inbound_strict() -> None:
    listener = of(build(peer_authentication("STRICT"))).listeners["virtualInbound"]
    through = "InboundPassthroughCluster"
    assert chain_rows(listener) == [
        ("virtualInbound-blackhole", 15006, "", [], "tcp BlackHoleCluster", False),
        ("virtualInbound-catchall-http", 0, "tls", MH, f"http {through}", True),
        ("virtualInbound", 0, "tls", [], f"tcp {through}", True),
        ("0.0.0.0_8080", 8080, "tls", [], "http inbound|8080||", True),
    ]
    assert not any("http_inspector" in f.name for f in listener.listener_filters)


def test_virtual_inbound_disable() -> None:
    listener = of(build(peer_authentication("DISABLE"))).listeners["virtualInbound"]
    through = "InboundPassthroughCluster"
    assert chain_rows(listener) == [
        ("virtualInbound-blackhole", 15006, "", [], "tcp BlackHoleCluster", False),
        ("virtualInbound-catchall-http", 0, "raw_buffer", PH, f"http {through}", False),
        ("virtualInbound", 0, "raw_buffer", [], f"tcp {through}", False),
        ("0.0.0.0_8080", 8080, "raw_buffer", [], "http inbound|8080||", False),
    ]
    assert not any("tls_inspector" in f.name for f in listener.listener_filters)


def test_inbound_route() -> None:
    listener = of(build()).listeners["virtualInbound"]
    manager = hcm(listener.filter_chains[-1])
    assert (manager.stat_prefix, manager.server_name) == ("inbound_0.0.0.0_8080;", "istio-envoy")
    (host,) = manager.route_config.virtual_hosts
    assert (host.name, list(host.domains)) == ("inbound|http|8080", ["*"])
    (route,) = plain(host)["routes"]
    assert route["route"]["cluster"] == "inbound|8080||"
    assert route["route"]["retry_policy"] == {"retry_on": "reset-before-request", "num_retries": 2}
    assert route["decorator"]["operation"] == f"{FRONTEND}:8080/*"
    passthrough = hcm(listener.filter_chains[1]).route_config
    assert (passthrough.name, passthrough.virtual_hosts[0].name) == ("InboundPassthroughCluster", "inbound|http|0")


# --- variations ---------------------------------------------------------------------------------


def outbound(resources: Any) -> set[str]:
    return {n.rpartition("|")[2] for n in resources.clusters if n.startswith("outbound|")}


def test_sidecar_without_its_own_namespace() -> None:
    resources = of(build(sidecar('["catalog/*"]')))
    assert outbound(resources) == {CATALOG}
    assert virtual_hosts(resources, "8080") == [f"{CATALOG}:8080", "allow_any"]
    assert "inbound|8080||" in resources.clusters


def test_sidecar_that_imports_nothing() -> None:
    resources = of(build(sidecar('["~/*"]')))
    assert outbound(resources) == set()
    assert set(resources.listeners) == {"virtualOutbound", "virtualInbound"}
    assert not resources.routes


def test_sidecar_with_an_exclusion() -> None:
    assert outbound(of(build(sidecar('["*/*", "~payments/*"]')))) == {FRONTEND, CATALOG, TRACING}


def test_short_host_in_a_sidecar_matches_nothing() -> None:
    assert outbound(of(build(sidecar('["./*", "catalog/catalog"]')))) == {FRONTEND}
    assert outbound(of(build(sidecar(f'["./*", "catalog/{CATALOG}"]')))) == {FRONTEND, CATALOG}


def test_root_sidecar_applies_where_no_own_one_does() -> None:
    root = sidecar('["./*"]', "istio-system")
    assert outbound(of(build(root))) == {FRONTEND}
    assert outbound(of(build(root, sidecar('["catalog/*"]')))) == {CATALOG}


def test_sidecar_with_a_foreign_selector_is_not_used() -> None:
    other = sidecar('["catalog/*"]').replace("spec: {", "spec: {workloadSelector: {labels: {app: other}}, ")
    assert outbound(of(build(other))) == {FRONTEND, CATALOG, PAYMENTS, TRACING}
    assert outbound(of(build(other, sidecar('["./*"]', "istio-system")))) == {FRONTEND}


def export_to(value: str) -> dict[str, str]:
    return {"payments": f', annotations: {{networking.istio.io/exportTo: "{value}"}}'}


def test_service_exported_to_its_own_namespace_only() -> None:
    mesh = build(services=export_to("."))
    assert outbound(of(mesh)) == {FRONTEND, CATALOG, TRACING}
    assert PAYMENTS in outbound(of(mesh, "payments-0.payments"))


def test_service_exported_to_nobody_keeps_its_inbound_chains() -> None:
    own = of(build(services=export_to("~")), "payments-0.payments")
    assert PAYMENTS not in outbound(own)
    assert "inbound|8080||" in own.clusters
    assert any(c.name == "0.0.0.0_8080" for c in own.listeners["virtualInbound"].filter_chains)


def test_discovery_selectors() -> None:
    mesh = build(
        mesh_config(
            "discoverySelectors:\n- matchExpressions: [{key: team, operator: In, values: [frontend, catalog, payments]}]"
        )
    )
    assert outbound(of(mesh)) == {FRONTEND, CATALOG, PAYMENTS}
    assert "inbound|4317||" not in of(mesh, "tracing-0.observability").clusters


VIRTUAL_SERVICE = """
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: detour, namespace: frontend}
spec:
  hosts: [catalog.catalog.svc.cluster.local]
  http: [{route: [{destination: {host: payments.payments.svc.cluster.local}}]}]
---
"""


def test_virtual_service_widens_clusters_but_not_hosts() -> None:
    resources = of(build(SCOPED, VIRTUAL_SERVICE))
    assert outbound(resources) == {FRONTEND, CATALOG, PAYMENTS}
    assert f"outbound|8080||{PAYMENTS}" in resources.endpoints
    assert virtual_hosts(resources, "8080") == [f"{CATALOG}:8080", f"{FRONTEND}:8080", "allow_any"]
    assert resources.routes["8080"].virtual_hosts[0].routes[0].route.cluster == f"outbound|8080||{PAYMENTS}"


def destination_rule(name: str, namespace: str, host: str, connections: int) -> str:
    return (
        "apiVersion: networking.istio.io/v1\nkind: DestinationRule\n"
        f"metadata: {{name: {name}, namespace: {namespace}}}\n"
        f"spec: {{host: '{host}', trafficPolicy: {{connectionPool: {{tcp: {{maxConnections: {connections}}}}}}}}}\n---\n"
    )


def test_client_namespace_rule_hides_the_owners() -> None:
    owner = destination_rule("own", "catalog", CATALOG, 7)
    name = f"outbound|8080||{CATALOG}"
    seen = of(build(owner)).clusters[name]
    assert seen.circuit_breakers.thresholds[0].max_connections.value == 7
    hidden = of(build(owner, destination_rule("wide", "frontend", "*.svc.cluster.local", 9))).clusters[name]
    assert hidden.circuit_breakers.thresholds[0].max_connections.value == 9
    assert hidden.metadata.filter_metadata["istio"]["config"].endswith("/namespaces/frontend/destination-rule/wide")


def tls_mode_of(resources: Any) -> str | None:
    metadata = resources.endpoints[f"outbound|8080||{CATALOG}"].endpoints[0].lb_endpoints[0].metadata
    found = metadata.filter_metadata.get("envoy.transport_socket_match")
    return found["tlsMode"] if found else None


def test_strict_namespace_leaves_clients_as_they_are() -> None:
    strict = of(build(peer_authentication("STRICT", "catalog")))
    assert strict.clusters == of(build()).clusters
    inbound = of(build(peer_authentication("STRICT", "catalog")), "catalog-0.catalog").listeners["virtualInbound"]
    assert not any(c.filter_chain_match.transport_protocol == "raw_buffer" for c in inbound.filter_chains)


def test_disabled_workload_keeps_the_matches_and_drops_the_flag() -> None:
    resources = of(build(peer_authentication("DISABLE", "catalog", "{app: catalog}")))
    assert resources.clusters[f"outbound|8080||{CATALOG}"].transport_socket_matches
    assert tls_mode_of(resources) is None


def test_disabled_namespace_drops_the_matches() -> None:
    resources = of(build(peer_authentication("DISABLE", "catalog")))
    assert not resources.clusters[f"outbound|8080||{CATALOG}"].transport_socket_matches
    assert tls_mode_of(of(build())) == "istio"


def test_unready_pod_is_sent_unhealthy() -> None:
    unready = ", conditions: [{type: Ready, status: 'False'}]"
    endpoints = of(build(pods={"catalog": unready})).endpoints[f"outbound|8080||{CATALOG}"].endpoints
    assert [e.health_status for g in endpoints for e in g.lb_endpoints] == [2]


def test_service_without_pods_has_an_empty_assignment() -> None:
    orphan = (
        "apiVersion: v1\nkind: Service\nmetadata: {name: orphan, namespace: catalog}\n"
        "spec: {selector: {app: none}, ports: [{name: http, port: 8080}]}\n---\n"
    )
    name = "outbound|8080||orphan.catalog.svc.cluster.local"
    resources = of(build(orphan))
    assert not resources.endpoints[name].endpoints
    assert name in resources.clusters


def test_json_has_snake_case_names_and_whole_resources() -> None:
    from lab.discovery import snapshot

    out = snapshot.to_json(of(build()))
    assert set(out) == {"listeners", "routes", "clusters", "endpoints", "nds"}
    catalog = next(c for c in out["clusters"] if c["name"] == f"outbound|8080||{CATALOG}")
    assert catalog["eds_cluster_config"]["service_name"] == catalog["name"]
    assert out["nds"]["table"][CATALOG]["ips"] == ["10.96.0.20"]

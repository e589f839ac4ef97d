"""What MeshConfig says about all traffic: unknown hosts looked up by name, default pools, how far entries are seen."""

from __future__ import annotations

from typing import Any

import pytest
from mesh_text import (
    CLIENT,
    SERVER,
    S,
    chains,
    hcm,
    inspectors,
    istio,
    mesh_config,
    namespace,
    of,
    out,
    outbound,
    plain,
    pod,
    service,
)

HOST = f"server.b{S}"
WEB = service("server", "b", "[{name: http, port: 8080}]", vip="10.96.0.9")
OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
CAPTURE = "defaultConfig: {proxyMetadata: {ISTIO_META_DNS_CAPTURE: 'true'}}\n"
BY_NAME = "outboundTrafficPolicy: {mode: ALLOW_ANY_DYNAMIC_DNS}\n"
CLUSTER = "AllowAnyDynamicDNSCluster"
CACHE: dict[str, Any] = {"name": "allow_any_dfp_dns_cache", "dns_lookup_family": "V4_ONLY", "max_hosts": 1024}


# --- ALLOW_ANY_DYNAMIC_DNS (istio/istio: cluster_builder.go: buildAllowAnyDFPCluster) -----------------


def dns_cache(chain: Any) -> Any:
    (found,) = [f for f in hcm(chain).http_filters if f.name == "envoy.filters.http.dynamic_forward_proxy"]
    assert hcm(chain).http_filters[-1].name == "envoy.filters.http.router"
    assert hcm(chain).http_filters[-2] == found
    return plain(found.typed_config)["dns_cache_config"]


def test_unknown_hosts_are_looked_up_by_name() -> None:
    found = of(CLIENT, SERVER, WEB, mesh_config(BY_NAME))
    virtual = found.listeners["virtualOutbound"]
    assert inspectors(virtual) == ["http_inspector"]
    assert [c.name for c in virtual.filter_chains] == [
        "virtualOutbound-blackhole", "virtualOutbound-catchall-tcp-http", "virtualOutbound-catchall-tcp",
    ]  # fmt: skip
    assert chains(virtual)[1:] == [
        ({"application_protocols": ["http/1.1", "h2c"]}, "http allow_any_dynamic_dns"),
        ({}, "tcp PassthroughCluster"),
    ]
    http = virtual.filter_chains[1]
    assert hcm(http).stat_prefix == "outbound_virtualOutbound_allow_any_dynamic_dns;"
    for routes in (hcm(http).route_config, found.routes["8080"]):
        last = routes.virtual_hosts[-1]
        assert (last.name, list(last.domains)) == ("allow_any_dynamic_dns", ["*"])
        assert (last.routes[0].name, last.routes[0].route.cluster) == ("allow_any_dynamic_dns", CLUSTER)
        assert routes.ignore_port_in_host_matching
    assert dns_cache(http) == CACHE
    service_listener = found.listeners["0.0.0.0_8080"]
    assert dns_cache(service_listener.filter_chains[0]) == CACHE
    assert chains(service_listener)[-1] == ({"default": "PassthroughFilterChain"}, "tcp PassthroughCluster")
    inbound = [c for c in found.listeners["virtualInbound"].filter_chains if c.filters[-1].name.endswith("manager")]
    assert inbound
    for chain in inbound:
        assert all("dynamic_forward_proxy" not in f.name for f in hcm(chain).http_filters)


def test_the_cluster_of_unknown_hosts() -> None:
    found = of(CLIENT, SERVER, WEB, mesh_config(BY_NAME)).clusters
    assert list(found).index(CLUSTER) == list(found).index("PassthroughCluster") + 1
    cluster = plain(found[CLUSTER])
    config = cluster["cluster_type"]["typed_config"]
    assert config["dns_cache_config"] == CACHE
    assert config["allow_insecure_cluster_options"] is True
    assert cluster["lb_policy"] == "CLUSTER_PROVIDED"
    assert cluster["alt_stat_name"] == f"{CLUSTER};"
    assert cluster["circuit_breakers"] == plain(found["PassthroughCluster"])["circuit_breakers"]
    assert (
        cluster["typed_extension_protocol_options"]
        == plain(found["PassthroughCluster"])["typed_extension_protocol_options"]
    )
    assert "transport_socket" not in cluster


@pytest.mark.parametrize(
    ("written", "address"),
    [
        ("", ("127.0.0.1", 15053)),
        ("DNS_PROXY_ADDR: 'localhost:5353'", ("127.0.0.1", 5353)),
        ("DNS_PROXY_ADDR: '[::1]:53'", ("::1", 53)),
    ],
)
def test_with_dns_capture_the_agent_is_asked(written: str, address: tuple[str, int]) -> None:
    metadata = "ISTIO_META_DNS_CAPTURE: 'true'" + (f", ISTIO_META_{written}" if written else "")
    config = mesh_config(BY_NAME + f"defaultConfig: {{proxyMetadata: {{{metadata}}}}}\n")
    found = of(CLIENT, SERVER, WEB, config)
    cache = plain(found.clusters[CLUSTER])["cluster_type"]["typed_config"]["dns_cache_config"]
    assert cache == dns_cache(found.listeners["virtualOutbound"].filter_chains[1])
    (resolver,) = cache["typed_dns_resolver_config"]["typed_config"]["resolvers"]
    assert (resolver["socket_address"]["address"], resolver["socket_address"]["port_value"]) == address


def test_unknown_hosts_over_tls() -> None:
    config = "outboundTrafficPolicy: {mode: ALLOW_ANY_DYNAMIC_DNS, tls: {mode: SIMPLE}}\n"
    cluster = plain(of(CLIENT, mesh_config(config)).clusters[CLUSTER])
    assert "allow_insecure_cluster_options" not in cluster["cluster_type"]["typed_config"]
    context = cluster["transport_socket"]["typed_config"]
    assert "sni" not in context
    root = context["common_tls_context"]["combined_validation_context"]["validation_context_sds_secret_config"]
    assert root["name"] == "file-root:system"
    upstream = cluster["typed_extension_protocol_options"][OPTIONS]["upstream_http_protocol_options"]
    assert upstream == {"auto_sni": True, "auto_san_validation": True}


def test_a_sidecar_chooses_for_itself() -> None:
    sidecar = istio("Sidecar", "s", "a", "outboundTrafficPolicy: {mode: REGISTRY_ONLY}")
    found = of(CLIENT, SERVER, WEB, mesh_config(BY_NAME), sidecar)
    assert CLUSTER not in found.clusters
    assert found.routes["8080"].virtual_hosts[-1].name == "block_all"
    assert inspectors(found.listeners["virtualOutbound"]) == []


# --- defaultTrafficPolicy (istio/istio: cluster_traffic_policy.go: applyDefaultTrafficPolicy) -----------

DEFAULTS = mesh_config(
    "tcpKeepalive: {probes: 7}\n"
    "defaultTrafficPolicy:\n"
    "  connectionPool: {tcp: {maxConnections: 11, connectTimeout: 3s}, http: {maxRequestsPerConnection: 5}}\n"
    "  outlierDetection: {consecutive5xxErrors: 4}\n"
)


def limit(cluster: Any) -> int:
    return int(cluster.circuit_breakers.thresholds[0].max_connections.value)


def test_default_pool_and_outlier_detection_without_a_rule() -> None:
    found = of(CLIENT, SERVER, WEB, DEFAULTS).clusters
    web = found[out(8080, HOST)]
    assert (limit(web), web.connect_timeout.seconds, web.outlier_detection.consecutive_5xx.value) == (11, 3, 4)
    common = plain(web)["typed_extension_protocol_options"][OPTIONS]["common_http_protocol_options"]
    assert common["max_requests_per_connection"] == 5
    for name in ("PassthroughCluster", "InboundPassthroughCluster"):
        rest = found[name]
        assert (limit(rest), rest.connect_timeout.seconds, rest.HasField("outlier_detection")) == (11, 3, False)
        assert rest.upstream_connection_options.tcp_keepalive.keepalive_probes.value == 7
        common = plain(rest)["typed_extension_protocol_options"][OPTIONS]["common_http_protocol_options"]
        assert common == {"idle_timeout": "300s"}
    inbound = of(CLIENT, SERVER, WEB, DEFAULTS, pod_name="server.b").clusters["inbound|8080||"]
    assert (limit(inbound), inbound.HasField("outlier_detection")) == (11, False)


@pytest.mark.parametrize(
    ("policy", "subset", "pool", "outlier"),
    [
        ("connectionPool: {tcp: {maxConnections: 2}}", "", 2, 4),
        ("outlierDetection: {consecutive5xxErrors: 9}", "", 11, 9),
        ("portLevelSettings: [{port: {number: 8080}, connectionPool: {tcp: {maxConnections: 3}}}]", "", 3, 4),
        ("loadBalancer: {simple: RANDOM}", "v1", 11, 4),
        # the settings of a port of a subset replace everything, the mesh's defaults too
        ("loadBalancer: {simple: RANDOM}", "port", 4294967295, 0),
    ],
)
def test_a_rule_replaces_a_default_block_by_block(policy: str, subset: str, pool: int, outlier: int) -> None:
    subsets = (
        "[{name: v1, labels: {version: v1}}, {name: port, labels: {version: v1}, trafficPolicy: "
        "{portLevelSettings: [{port: {number: 8080}, loadBalancer: {simple: ROUND_ROBIN}}]}}]"
    )
    rule = istio("DestinationRule", "d", "a", f"host: {HOST}\ntrafficPolicy: {{{policy}}}\nsubsets: {subsets}")
    found = of(CLIENT, SERVER, WEB, DEFAULTS, rule).clusters[out(8080, HOST, subset)]
    assert (limit(found), found.outlier_detection.consecutive_5xx.value) == (pool, outlier)


# --- serviceEntryVisibility (istio/istio: push_context.go: serviceExportTo) ----------------------------

VISIBILITY = """serviceEntryVisibility:
  defaultVisibility: NAMESPACE
  applyToSidecars: {applies}
  policies:
  - {{matchingRules: [{{namespaceSelector: {{matchLabels: {{team: open}}}}}}], visibility: PUBLIC}}
  - {{matchingRules: [{{namespaceSelector: {{matchExpressions: [{{key: team, operator: In, values: [hidden]}}]}}}}], visibility: NONE}}
"""
SPACES = namespace("open", "team: open") + namespace("hidden", "team: hidden") + namespace("c")
CLIENTS = pod("client", "hidden", "10.3.0.1", labels="sidecar.istio.io/inject: 'true'") + pod(
    "client", "c", "10.4.0.1", labels="sidecar.istio.io/inject: 'true'"
)


def entries(export: str = "") -> str:
    return "".join(
        istio("ServiceEntry", "e", ns, f"hosts: [{ns}.example]\nports: [{{number: 80, name: http, protocol: HTTP}}]\n{export}")
        for ns in ("open", "hidden", "c")
    )  # fmt: skip


@pytest.mark.parametrize(
    ("applies", "export", "client", "seen"),
    [
        ("true", "", "a", {"open"}),
        ("true", "", "c", {"open", "c"}),
        ("true", "", "hidden", {"open"}),
        ("true", "exportTo: [a]", "a", {"open"}),
        ("true", "exportTo: [a]", "c", set()),  # what is only for others is, capped to its namespace, for nobody
        ("true", "exportTo: ['~']", "c", set()),
        ("false", "", "a", {"open", "hidden", "c"}),
    ],
)
def test_entries_are_seen_no_further_than_their_namespace_may(
    applies: str, export: str, client: str, seen: set[str]
) -> None:
    mesh = mesh_config(VISIBILITY.format(applies=applies))
    found = of(CLIENT, SERVER, WEB, SPACES, CLIENTS, entries(export), mesh, pod_name=f"client.{client}")
    assert {one.split()[1].removesuffix(".example") for one in outbound(found) if one.endswith(".example")} == seen
    assert out(8080, HOST) in found.clusters, "Kubernetes services are not concerned"

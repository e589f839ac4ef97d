"""Outbound listeners: which there are, their chains, and what happens when two services want the same one."""

from __future__ import annotations

from typing import Any

import pytest
from mesh_text import (
    CLIENT,
    DNS_CAPTURE,
    SERVER,
    S,
    chains,
    hcm,
    hosts_of,
    inspectors,
    istio,
    mesh_config,
    namespace,
    of,
    out,
    plain,
    pod,
    service,
    tcp,
)

HTTP = {"transport_protocol": "raw_buffer", "application_protocols": ["http/1.1", "h2c"]}
SERVER_HOST = f"server.b{S}"


def server(ports: str, **more: Any) -> str:
    return service("server", "b", ports, vip="10.96.0.9", **more)


def entry(name: str, spec: str, created: str = "") -> str:
    return istio("ServiceEntry", name, "a", spec, created=created)


# --- kinds of listener ----------------------------------------------------------------------------


def test_tcp_service_has_a_listener_on_its_vip() -> None:
    listener = of(CLIENT, SERVER, server("[{name: tcp-db, port: 5432}]")).listeners["10.96.0.9_5432"]
    assert chains(listener) == [({}, f"tcp {out(5432, SERVER_HOST)}")]
    assert inspectors(listener) == []
    assert not listener.HasField("default_filter_chain")


def test_tls_service_with_a_vip_has_no_sni_match() -> None:
    listener = of(CLIENT, SERVER, server("[{name: https-web, port: 443}]")).listeners["10.96.0.9_443"]
    assert chains(listener) == [({}, f"tcp {out(443, SERVER_HOST)}")]
    assert inspectors(listener) == []


def test_unnamed_port_is_sniffed_on_its_vip_with_a_route_of_its_own() -> None:
    resources = of(CLIENT, SERVER, server("[{port: 9000}]"))
    listener = resources.listeners["10.96.0.9_9000"]
    assert chains(listener) == [
        (HTTP, f"rds {SERVER_HOST}:9000"),
        ({"default": ""}, f"tcp {out(9000, SERVER_HOST)}"),
    ]
    assert inspectors(listener) == ["http_inspector"]
    (host,) = resources.routes[f"{SERVER_HOST}:9000"].virtual_hosts
    assert (host.name, list(host.domains)) == (f"{SERVER_HOST}:9000", ["*"])
    options = resources.clusters[out(9000, SERVER_HOST)].typed_extension_protocol_options
    assert "envoy.extensions.upstreams.http.v3.HttpProtocolOptions" in options


@pytest.mark.parametrize("port", [25, 53, 3306, 27017])
def test_well_known_ports_are_tcp(port: int) -> None:
    listener = of(CLIENT, SERVER, server(f"[{{port: {port}}}]")).listeners[f"10.96.0.9_{port}"]
    assert inspectors(listener) == []


def test_udp_ports_have_nothing() -> None:
    resources = of(CLIENT, SERVER, server("[{name: dns, port: 5353, protocol: UDP}]"))
    assert set(resources.listeners) == {"virtualOutbound", "virtualInbound"}
    assert not any("5353" in name for name in resources.clusters)


def test_mongo_port_has_its_filter() -> None:
    listener = of(CLIENT, SERVER, server("[{name: mongo, port: 27017}]")).listeners["10.96.0.9_27017"]
    names = [f.name.rpartition(".")[2] for f in listener.filter_chains[0].filters]
    assert names == ["mongo_proxy", "tcp_proxy"]


def test_headless_tcp_has_a_listener_per_pod_on_the_service_port() -> None:
    headless = service("server", "b", "[{name: tcp-db, port: 5432, targetPort: 5433}]", more=", clusterIP: None")
    second = pod("server2", "b", "10.2.0.2").replace("app: server2", "app: server")
    resources = of(CLIENT, SERVER, second, headless)
    names = set(resources.listeners) - {"virtualOutbound", "virtualInbound"}
    assert names == {"10.2.0.1_5432", "10.2.0.2_5432"}
    own = of(CLIENT, SERVER, second, headless, pod_name="server.b")
    assert "10.2.0.1_5432" not in own.listeners
    assert "10.2.0.2_5432" in own.listeners
    cluster = resources.clusters[out(5432, SERVER_HOST)]
    assert plain(cluster)["type"] == "ORIGINAL_DST"


def test_headless_without_pods_has_no_listener() -> None:
    headless = service("nobody", "b", "[{name: tcp-db, port: 5432}]", more=", clusterIP: None")
    assert set(of(CLIENT, SERVER, headless).listeners) == {"virtualOutbound", "virtualInbound"}


def test_headless_http_shares_the_wildcard_listener_and_has_wildcard_domains() -> None:
    headless = service("server", "b", "[{name: http, port: 8080}]", more=", clusterIP: None")
    resources = of(CLIENT, SERVER, headless)
    assert "0.0.0.0_8080" in resources.listeners
    domains = list(resources.routes["8080"].virtual_hosts[0].domains)
    names = [SERVER_HOST, SERVER_HOST + ".", "server.b", "server.b.svc"]
    assert domains == names + [f"*.{n}" for n in names]


def test_explicit_http_proxy_port() -> None:
    resources = of(CLIENT, SERVER, mesh_config("proxyHttpPort: 3128"), server("[{name: http, port: 8080}]"))
    listener = resources.listeners["127.0.0.1_3128"]
    assert not listener.HasField("bind_to_port")
    manager = hcm(listener.filter_chains[0])
    assert (manager.rds.route_config_name, manager.http_protocol_options.allow_absolute_url.value) == (
        "http_proxy",
        True,
    )
    domains = resources.routes["http_proxy"].virtual_hosts[0].domains
    assert f"{SERVER_HOST}:8080" in domains
    assert SERVER_HOST not in domains


# --- service entries ------------------------------------------------------------------------------


def test_entry_without_address_is_on_the_wildcard() -> None:
    text = entry("db", "hosts: [db.example]\nresolution: DNS\nports: [{number: 5432, name: tcp, protocol: TCP}]")
    assert chains(of(CLIENT, text).listeners["0.0.0.0_5432"]) == [({}, f"tcp {out(5432, 'db.example')}")]


def test_auto_allocated_address_counts_with_dns_capture_only() -> None:
    text = entry("db", "hosts: [db.example]\nresolution: DNS\nports: [{number: 5432, name: tcp, protocol: TCP}]")
    assert "240.240.0.1_5432" in of(CLIENT, DNS_CAPTURE, text).listeners
    assert "240.240.0.1_5432" not in of(CLIENT, text).listeners


def test_each_address_of_an_entry_has_a_listener() -> None:
    text = entry(
        "db",
        "hosts: [db.example]\naddresses: [192.0.2.1, 192.0.2.2/32]\nresolution: STATIC\nendpoints: [{address: 203.0.113.5}]\n"
        "ports: [{number: 5432, name: tcp, protocol: TCP}]",
    )
    resources = of(CLIENT, text)
    assert {"192.0.2.1_5432", "192.0.2.2_5432"} <= set(resources.listeners)
    assert list(resources.clusters).count(out(5432, "db.example")) == 1


def test_of_the_addresses_of_an_http_entry_the_last_is_a_domain() -> None:
    text = entry(
        "web",
        "hosts: [web.example]\naddresses: [192.0.2.1, 192.0.2.2]\nresolution: STATIC\nendpoints: [{address: 203.0.113.5}]\n"
        "ports: [{number: 80, name: http, protocol: HTTP}]",
    )
    assert hosts_of(of(CLIENT, text), "80")["web.example:80"] == ["web.example", "web.example.", "192.0.2.2"]


def test_address_of_another_family_is_no_wildcard() -> None:
    ports = "ports: [{number: 5432, name: tcp, protocol: TCP}, {number: 80, name: http, protocol: HTTP}]"
    six = entry(
        "six",
        f"hosts: [six.example]\naddresses: ['2001:db8::5']\nresolution: STATIC\n{ports}\nendpoints: [{{address: 203.0.113.5}}]",
    )
    resources = of(CLIENT, six)
    assert chains(resources.listeners["2001:db8::5_5432"]) == [({}, f"tcp {out(5432, 'six.example')}")]
    assert "0.0.0.0_5432" not in resources.listeners
    assert hosts_of(resources, "80")["six.example:80"] == ["six.example", "six.example.", "[2001:db8::5]"]
    web = service("server", "b", "[{name: tcp, port: 9000}, {name: http, port: 80}]", vip="'fd00:10:96::99'")
    resources = of(CLIENT, SERVER, web)
    assert {"fd00:10:96::99_9000", "0.0.0.0_80"} <= set(resources.listeners)
    assert "0.0.0.0_9000" not in resources.listeners
    assert "[fd00:10:96::99]" not in hosts_of(resources, "80")[f"server.b{S}:80"]


def test_cidr_entry_matches_on_the_wildcard_listener() -> None:
    text = entry(
        "net",
        "hosts: [net.example]\naddresses: [198.51.100.0/24]\nresolution: NONE\nports: [{number: 5432, name: tcp, protocol: TCP}]",
    )
    listener = of(CLIENT, text).listeners["0.0.0.0_5432"]
    assert chains(listener) == [
        ({"prefix_ranges": [{"address_prefix": "198.51.100.0", "prefix_len": 24}]}, f"tcp {out(5432, 'net.example')}"),
        ({"default": "PassthroughFilterChain"}, "tcp PassthroughCluster"),
    ]


def test_tls_entries_share_a_listener_by_sni() -> None:
    one = entry("one", "hosts: [one.example]\nresolution: DNS\nports: [{number: 443, name: tls, protocol: TLS}]")
    two = entry("two", "hosts: ['*.two.example']\nresolution: NONE\nports: [{number: 443, name: tls, protocol: TLS}]")
    listener = of(CLIENT, one, two).listeners["0.0.0.0_443"]
    assert chains(listener) == [
        ({"server_names": ["*.two.example"]}, f"tcp {out(443, '*.two.example')}"),
        ({"server_names": ["one.example"]}, f"tcp {out(443, 'one.example')}"),
        ({"default": "PassthroughFilterChain"}, "tcp PassthroughCluster"),
    ]
    assert inspectors(listener) == ["tls_inspector"]


def test_none_entry_with_pods_is_per_endpoint() -> None:
    text = entry(
        "mine",
        "hosts: [mine.example]\nresolution: NONE\nworkloadSelector: {labels: {app: server}}\n"
        "ports: [{number: 5432, name: tcp, protocol: TCP}]",
    ).replace("namespace: a", "namespace: b")
    assert "10.2.0.1_5432" in of(CLIENT, SERVER, text).listeners


# --- two services, one listener -----------------------------------------------------------------------


def tcp_entry(name: str, host: str, created: str, protocol: str = "TCP", port: int = 7000) -> str:
    spec = f"hosts: [{host}]\nresolution: DNS\nports: [{{number: {port}, name: p, protocol: {protocol}}}]"
    return entry(name, spec, created)


OLD, NEW = "2020-01-01T00:00:00Z", "2021-01-01T00:00:00Z"


def test_of_two_tcp_services_the_oldest_wins() -> None:
    old, new = tcp_entry("old", "old.example", OLD), tcp_entry("new", "new.example", NEW)
    for order in ((old, new), (new, old)):
        assert chains(of(CLIENT, *order).listeners["0.0.0.0_7000"]) == [({}, f"tcp {out(7000, 'old.example')}")]


def test_http_over_tcp_is_sniffed() -> None:
    listener = of(CLIENT, tcp_entry("old", "old.example", OLD), tcp_entry("new", "new.example", NEW, "HTTP")).listeners[
        "0.0.0.0_7000"
    ]
    assert chains(listener) == [(HTTP, "rds 7000"), ({"default": ""}, f"tcp {out(7000, 'old.example')}")]


def test_tcp_over_http_replaces_the_passthrough_chain() -> None:
    listener = of(CLIENT, tcp_entry("old", "old.example", OLD, "HTTP"), tcp_entry("new", "new.example", NEW)).listeners[
        "0.0.0.0_7000"
    ]
    assert chains(listener) == [(HTTP, "rds 7000"), ({"default": ""}, f"tcp {out(7000, 'new.example')}")]
    assert inspectors(listener) == ["http_inspector"]


@pytest.mark.parametrize("protocol", ["MONGO", "MYSQL"])
def test_server_first_protocols_share_with_nobody(protocol: str) -> None:
    old, http = tcp_entry("old", "old.example", OLD, protocol), tcp_entry("new", "new.example", NEW, "HTTP")
    listener = of(CLIENT, old, http).listeners["0.0.0.0_7000"]
    assert chains(listener) == [({}, f"tcp {out(7000, 'old.example')}")]
    young = tcp_entry("new", "new.example", NEW, protocol)
    listener = of(CLIENT, tcp_entry("old", "old.example", OLD, "HTTP"), young).listeners["0.0.0.0_7000"]
    assert [target for _, target in chains(listener)] == ["rds 7000", "tcp PassthroughCluster"]


def test_http_services_share_a_listener_through_rds() -> None:
    resources = of(CLIENT, tcp_entry("old", "old.example", OLD, "HTTP"), tcp_entry("new", "new.example", NEW, "HTTP"))
    listener = resources.listeners["0.0.0.0_7000"]
    assert chains(listener) == [(HTTP, "rds 7000"), ({"default": "PassthroughFilterChain"}, "tcp PassthroughCluster")]
    assert [v.name for v in resources.routes["7000"].virtual_hosts] == [
        "new.example:7000",
        "old.example:7000",
        "allow_any",
    ]


def test_conflict_is_counted_under_istiods_name() -> None:
    from mesh_text import build

    from lab.discovery import snapshot
    from lab.discovery.push_context import PushContext

    mesh = build(CLIENT, tcp_entry("old", "old.example", OLD), tcp_entry("new", "new.example", NEW))
    push = PushContext(mesh)
    client = mesh.pod("client.a")
    assert client is not None
    snapshot.generate(push, snapshot.node_for_pod(mesh, client))
    (message,) = push.status["pilot_conflict_outbound_listener_tcp_over_current_tcp"].values()
    assert "Rejected=new.example" in message


# --- Sidecar egress listeners ---------------------------------------------------------------------------


def sidecar(spec: str) -> str:
    return istio("Sidecar", "s", "a", spec)


TWO = (
    namespace("b")
    + namespace("c")
    + service("one", "b", "[{name: http, port: 8080}]", vip="10.96.0.1")
    + service("two", "c", "[{name: http, port: 8080}, {name: tcp-x, port: 9000}]", vip="10.96.0.2")
)


def test_explicit_port_is_locked_against_the_catch_all() -> None:
    text = sidecar(
        "egress:\n- {port: {number: 8080, protocol: HTTP, name: h}, hosts: ['b/*']}\n- {hosts: ['*/*']}",
    )
    resources = of(CLIENT, TWO, text)
    assert [v.name for v in resources.routes["8080"].virtual_hosts] == [f"one.b{S}:8080", "allow_any"]
    assert out(8080, f"two.c{S}") in resources.clusters
    assert "10.96.0.2_9000" in resources.listeners


def test_explicit_port_imports_only_services_of_that_port() -> None:
    text = sidecar("egress:\n- {port: {number: 9000, protocol: TCP, name: t}, hosts: ['*/*']}")
    resources = of(CLIENT, TWO, text)
    assert {n for n in resources.clusters if n.startswith("outbound|")} == {out(9000, f"two.c{S}")}


def test_capture_mode_none_is_a_real_socket_on_loopback() -> None:
    text = sidecar("egress:\n- {port: {number: 8080, protocol: HTTP, name: h}, captureMode: NONE, hosts: ['b/*']}")
    listener = of(CLIENT, TWO, text).listeners["127.0.0.1_8080"]
    assert not listener.HasField("bind_to_port")
    assert chains(listener) == [({}, "rds 8080")]
    assert inspectors(listener) == []


def test_unix_socket_listener() -> None:
    text = sidecar(
        "egress:\n- {port: {number: 0, protocol: HTTP, name: h}, bind: 'unix:///tmp/x.sock', hosts: ['b/*']}"
    )
    resources = of(CLIENT, TWO, text)
    listener = resources.listeners["unix:///tmp/x.sock_0"]
    assert listener.address.pipe.path == "/tmp/x.sock"
    assert chains(listener) == [({}, "rds unix:///tmp/x.sock")]
    assert f"one.b{S}:8080" in resources.routes["unix:///tmp/x.sock"].virtual_hosts[0].domains


def test_each_unix_socket_has_the_services_of_its_own_listener() -> None:
    port = "port: {number: 0, protocol: HTTP, name: h}"
    text = sidecar(
        f"egress:\n- {{{port}, bind: 'unix:///b', hosts: ['b/*']}}\n- {{{port}, bind: 'unix:///c', hosts: ['c/*']}}"
    )
    routes = of(CLIENT, TWO, text).routes
    assert [v.name for v in routes["unix:///b"].virtual_hosts] == [f"one.b{S}:8080", "allow_any"]
    assert [v.name for v in routes["unix:///c"].virtual_hosts] == [f"two.c{S}:8080", "allow_any"]


def test_http_proxy_port_serves_every_service() -> None:
    text = sidecar(
        "egress:\n- {port: {number: 3128, protocol: HTTP_PROXY, name: p}, captureMode: NONE, hosts: ['*/*']}"
    )
    resources = of(CLIENT, TWO, text)
    assert chains(resources.listeners["127.0.0.1_3128"]) == [({}, "rds 3128")]
    assert [v.name for v in resources.routes["3128"].virtual_hosts] == [f"one.b{S}:8080", f"two.c{S}:8080", "allow_any"]


def test_no_listener_on_the_proxys_own_ports() -> None:
    ports = "[{name: http-a, port: 15001}, {name: http-b, port: 15006}, {name: http-c, port: 15021}, {name: http-d, port: 15090}]"
    resources = of(CLIENT, SERVER, server(ports))
    assert set(resources.listeners) == {"virtualOutbound", "virtualInbound"}
    # nor has the pod that serves them a chain for them
    found = of(CLIENT, SERVER, server(ports), pod_name="server.b").listeners["virtualInbound"].filter_chains
    assert {c.filter_chain_match.destination_port.value for c in found} == {0, 15006}


def test_ingress_on_the_proxys_own_ports() -> None:
    text = istio(
        "Sidecar",
        "s",
        "b",
        "ingress:\n- {port: {number: 15021, protocol: HTTP, name: a}}\n- {port: {number: 15090, protocol: TCP, name: b}}\n"
        "- {port: {number: 9999, protocol: TCP, name: c}}",
    )
    found = of(CLIENT, SERVER, text, pod_name="server.b").listeners["virtualInbound"].filter_chains
    # only HTTP without a bind is thought to be on the wildcard
    assert {c.filter_chain_match.destination_port.value for c in found} == {0, 15006, 15090, 9999}


def test_interception_none_has_real_sockets_only() -> None:
    client = namespace("a") + pod("client", "a", "10.1.0.1", annotations="sidecar.istio.io/interceptionMode: NONE")
    resources = of(client, TWO)
    assert "virtualOutbound" not in resources.listeners
    assert "virtualInbound" not in resources.listeners
    assert set(resources.listeners) == {"127.0.0.1_8080", "127.0.0.1_9000"}


def test_tproxy_listeners_are_transparent() -> None:
    client = namespace("a") + pod("client", "a", "10.1.0.1", annotations="sidecar.istio.io/interceptionMode: TPROXY")
    listeners = of(client, TWO).listeners
    assert listeners["virtualOutbound"].transparent.value
    assert listeners["virtualInbound"].transparent.value
    assert inspectors(listeners["virtualInbound"])[:2] == ["original_dst", "original_src"]


# --- outboundTrafficPolicy ----------------------------------------------------------------------------------


def test_sidecar_policy_replaces_the_meshes() -> None:
    text = sidecar("outboundTrafficPolicy: {mode: REGISTRY_ONLY}\negress: [{hosts: ['*/*']}]")
    resources = of(CLIENT, TWO, text)
    assert resources.routes["8080"].virtual_hosts[-1].name == "block_all"
    assert tcp(resources.listeners["virtualOutbound"].filter_chains[1]).cluster == "BlackHoleCluster"
    assert set(of(CLIENT, TWO, sidecar("egress: [{hosts: ['*/*']}]")).clusters) == set(resources.clusters)


def test_egress_proxy_takes_the_catch_all() -> None:
    text = sidecar(
        f"outboundTrafficPolicy: {{mode: ALLOW_ANY, egressProxy: {{host: one.b{S}, port: {{number: 8080}}}}}}\n"
        "egress: [{hosts: ['*/*']}]"
    )
    resources = of(CLIENT, TWO, text)
    cluster = out(8080, f"one.b{S}")
    assert resources.routes["8080"].virtual_hosts[-1].routes[0].route.cluster == cluster
    assert tcp(resources.listeners["virtualOutbound"].filter_chains[1]).cluster == cluster
    assert tcp(resources.listeners["0.0.0.0_8080"].default_filter_chain).cluster == cluster
    assert "PassthroughCluster" in resources.clusters


# --- VirtualService tcp and tls ---------------------------------------------------------------------------------


def test_tls_routes_match_sni() -> None:
    text = entry(
        "e", "hosts: [one.example]\nresolution: DNS\nports: [{number: 443, name: tls, protocol: TLS}]"
    ) + istio(
        "VirtualService",
        "v",
        "a",
        "hosts: [one.example]\ntls:\n"
        "- match: [{port: 443, sniHosts: [one.example]}]\n  route: [{destination: {host: one.example}}]\n"
        "- match: [{port: 443, sniHosts: [one.example]}]\n  route: [{destination: {host: other.example}}]",
    )
    listener = of(CLIENT, text).listeners["0.0.0.0_443"]
    assert chains(listener) == [
        ({"server_names": ["one.example"]}, f"tcp {out(443, 'one.example')}"),
        ({"default": "PassthroughFilterChain"}, "tcp PassthroughCluster"),
    ]


def test_subnets_of_a_tls_match_are_its_own() -> None:
    text = entry(
        "tls",
        "hosts: [one.example]\naddresses: [198.51.100.0/24]\nresolution: NONE\nports: [{number: 443, name: tls, protocol: TLS}]",
    ) + istio(
        "VirtualService",
        "v",
        "a",
        "hosts: [one.example]\ntls:\n- match: [{sniHosts: [one.example], destinationSubnets: [198.51.100.128/25]}, {sniHosts: [one.example]}]\n"
        "  route: [{destination: {host: one.example}}]",
    )
    matches = [m for m, _ in chains(of(CLIENT, text).listeners["0.0.0.0_443"])][:2]
    assert [m["prefix_ranges"] for m in matches] == [
        [{"address_prefix": "198.51.100.128", "prefix_len": 25}],
        [{"address_prefix": "198.51.100.0", "prefix_len": 24}],
    ]


def test_weighted_tcp_route() -> None:
    text = server("[{name: tcp-x, port: 9000}]") + istio(
        "VirtualService",
        "v",
        "a",
        f"hosts: [{SERVER_HOST}]\ntcp:\n- route:\n  - {{destination: {{host: {SERVER_HOST}, subset: v1}}, weight: 75}}\n"
        f"  - {{destination: {{host: {SERVER_HOST}, subset: v2}}, weight: 25}}\n"
        f"  - {{destination: {{host: {SERVER_HOST}}}, weight: 0}}",
    )
    listener = of(CLIENT, SERVER, text).listeners["10.96.0.9_9000"]
    one, two = out(9000, SERVER_HOST, "v1"), out(9000, SERVER_HOST, "v2")
    assert chains(listener) == [({}, f"tcp {one}:75 {two}:25")]
    assert tcp(listener.filter_chains[0]).stat_prefix == "v.a"


def test_tcp_route_by_subnet_keeps_the_services_own_chain() -> None:
    text = server("[{name: tcp-x, port: 9000}]") + istio(
        "VirtualService",
        "v",
        "a",
        f"hosts: [{SERVER_HOST}]\ntcp:\n- match: [{{destinationSubnets: [10.0.0.0/8]}}]\n"
        "  route: [{destination: {host: other.example, port: {number: 1}}}]",
    )
    listener = of(CLIENT, SERVER, text).listeners["10.96.0.9_9000"]
    assert chains(listener) == [
        ({"prefix_ranges": [{"address_prefix": "10.0.0.0", "prefix_len": 8}]}, f"tcp {out(1, 'other.example')}"),
        ({"default": ""}, f"tcp {out(9000, SERVER_HOST)}"),
    ]


def test_route_for_other_clients_is_not_for_this_one() -> None:
    text = server("[{name: tcp-x, port: 9000}]") + istio(
        "VirtualService",
        "v",
        "a",
        f"hosts: [{SERVER_HOST}]\ntcp:\n- match: [{{sourceLabels: {{app: other}}}}]\n"
        "  route: [{destination: {host: other.example, port: {number: 1}}}]",
    )
    listener = of(CLIENT, SERVER, text).listeners["10.96.0.9_9000"]
    assert chains(listener) == [({}, f"tcp {out(9000, SERVER_HOST)}")]


def test_destination_rule_sets_tcp_timeouts_and_source_hash() -> None:
    text = server("[{name: tcp-x, port: 9000}]") + istio(
        "DestinationRule",
        "d",
        "a",
        f"host: {SERVER_HOST}\ntrafficPolicy:\n  connectionPool: {{tcp: {{idleTimeout: 7s, maxConnectionDuration: 90s}}}}\n"
        "  loadBalancer: {consistentHash: {useSourceIp: true}}",
    )
    proxy = tcp(of(CLIENT, SERVER, text).listeners["10.96.0.9_9000"].filter_chains[0])
    assert (proxy.idle_timeout.seconds, proxy.max_downstream_connection_duration.seconds) == (7, 90)
    assert proxy.hash_policy[0].HasField("source_ip")

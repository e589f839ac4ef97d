"""Endpoints by source and locality, and the name table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from mesh_text import (
    CLIENT,
    DNS_CAPTURE,
    SERVER,
    S,
    build,
    istio,
    mesh_config,
    namespace,
    of,
    out,
    pod,
    service,
)

from lab.discovery import snapshot

HOST = f"server.b{S}"
WEB = service("server", "b", "[{name: http, port: 8080}]", vip="10.96.0.9")


def groups(resources: Any, host: str = HOST, port: int = 8080, subset: str = "") -> list[tuple[str, int, list[str]]]:
    """(locality, priority, addresses) of each group."""
    found = []
    for group in resources.endpoints[out(port, host, subset)].endpoints:
        place = "/".join(p for p in (group.locality.region, group.locality.zone, group.locality.sub_zone) if p)
        found.append((place, group.priority, [e.endpoint.address.socket_address.address for e in group.lb_endpoints]))
    return found


def replica(name: str, ip: str, locality: str = "", labels: str = "", ready: bool = True) -> str:
    own = ", ".join(x for x in (f"istio-locality: {locality}" if locality else "", labels) if x)
    text = pod(name, "b", ip, labels=own).replace(f"app: {name}", "app: server", 1)
    return text if ready else text.replace("status: {", "status: {conditions: [{type: Ready, status: 'False'}], ")


# --- where endpoints come from --------------------------------------------------------------------


def test_endpoints_are_found_by_port_name() -> None:
    text = """
apiVersion: v1
kind: Service
metadata: {name: manual, namespace: b}
spec: {ports: [{name: http, port: 80}, {name: other, port: 81}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: manual-1, namespace: b, labels: {kubernetes.io/service-name: manual}}
addressType: IPv4
ports: [{name: http, port: 8888}]
endpoints:
- {addresses: [192.0.2.1]}
- {addresses: [192.0.2.2], conditions: {ready: false}}
- {addresses: [192.0.2.3], conditions: {ready: false, terminating: false}}
- {addresses: [10.2.0.1], targetRef: {kind: Pod, name: server, namespace: b}}
- {addresses: [192.0.2.9], targetRef: {kind: Pod, name: gone, namespace: b}}
- {addresses: [10.2.0.1]}
- {addresses: [10.1.0.1]}
---
"""
    resources = of(CLIENT, SERVER, text)
    assert groups(resources, f"manual.b{S}", 80) == [
        ("", 0, ["192.0.2.1", "192.0.2.3", "10.2.0.1", "10.2.0.1", "10.1.0.1"])
    ]
    assert groups(resources, f"manual.b{S}", 81) == []
    found = [e for g in resources.endpoints[out(80, f"manual.b{S}")].endpoints for e in g.lb_endpoints]
    assert [e.health_status for e in found] == [1, 2, 1, 1, 1]
    # without targetRef the pod of that address is taken for it, if it is of the slice's namespace
    meshed = ["envoy.transport_socket_match" in e.metadata.filter_metadata for e in found]
    assert meshed == [False, False, True, True, False]


def test_endpoints_object_of_a_service_with_selector_is_overwritten() -> None:
    text = """
apiVersion: v1
kind: Endpoints
metadata: {name: server, namespace: b}
subsets: [{addresses: [{ip: 192.0.2.1}], ports: [{name: http, port: 8888}]}]
---
"""
    web = service("server", "b", "[{name: http, port: 80, targetPort: 8080}]")
    assert groups(of(CLIENT, SERVER, web, text), f"server.b{S}", 80) == [("", 0, ["10.2.0.1"])]
    (warning,) = build(CLIENT, SERVER, web, text).warnings
    assert "Kubernetes overwrites these endpoints with its own" in warning.message


def test_publish_not_ready_addresses_count_as_ready() -> None:
    text = WEB.replace("spec: {", "spec: {publishNotReadyAddresses: true, ")
    resources = of(CLIENT, namespace("b"), replica("server", "10.2.0.1", ready=False), text)
    endpoint = resources.endpoints[out(8080, HOST)].endpoints[0].lb_endpoints[0]
    assert endpoint.health_status == 1


def test_service_selects_workload_entries_too() -> None:
    entry = istio(
        "WorkloadEntry", "vm", "b", "address: 192.0.2.7\nlabels: {app: server}\nserviceAccount: vm\nweight: 3"
    )
    resources = of(CLIENT, SERVER, WEB, entry)
    assert groups(resources) == [("", 0, ["10.2.0.1", "192.0.2.7"])]
    vm = resources.endpoints[out(8080, HOST)].endpoints[0].lb_endpoints[1]
    assert vm.load_balancing_weight.value == 3
    assert "envoy.transport_socket_match" in vm.metadata.filter_metadata


def test_entry_selects_ready_pods_and_workload_entries() -> None:
    entry = istio(
        "ServiceEntry",
        "e",
        "b",
        "hosts: [x.example]\nresolution: STATIC\nlocation: MESH_INTERNAL\nworkloadSelector: {labels: {app: server}}\n"
        "ports: [{number: 80, name: http, protocol: HTTP, targetPort: 8080}]",
    )
    vm = istio("WorkloadEntry", "vm", "b", "address: 192.0.2.7\nlabels: {app: server}\nports: {http: 9090}")
    resources = of(CLIENT, SERVER, replica("sick", "10.2.0.2", ready=False), entry, vm)
    found = resources.endpoints[out(80, "x.example")].endpoints[0].lb_endpoints
    addresses = [e.endpoint.address.socket_address for e in found]
    assert [(a.address, a.port_value) for a in addresses] == [("10.2.0.1", 8080), ("192.0.2.7", 9090)]
    assert [e.health_status for e in found] == [0, 0]
    own = of(CLIENT, SERVER, entry, pod_name="server.b")
    assert "inbound|8080||" in own.clusters


def test_entry_endpoint_of_the_proxys_own_address_is_inbound_in_its_namespace_only() -> None:
    def entry(ns: str) -> str:
        return istio(
            "ServiceEntry",
            "e",
            ns,
            "hosts: [x.example]\nresolution: STATIC\nports: [{number: 80, name: http, protocol: HTTP}]\n"
            "endpoints: [{address: 10.2.0.1, ports: {http: 7777}}]",
        )

    assert "inbound|7777||" in of(CLIENT, SERVER, entry("b"), pod_name="server.b").clusters
    assert "inbound|7777||" not in of(CLIENT, SERVER, entry("a"), pod_name="server.b").clusters


def test_unix_and_name_endpoints() -> None:
    entry = istio(
        "ServiceEntry",
        "e",
        "a",
        "hosts: [x.example]\nresolution: STATIC\nports: [{number: 80, name: http, protocol: HTTP}]\n"
        "endpoints: [{address: 'unix:///tmp/x.sock'}]",
    )
    found = of(CLIENT, entry).endpoints[out(80, "x.example")].endpoints[0].lb_endpoints[0]
    assert found.endpoint.address.pipe.path == "/tmp/x.sock"


# --- locality -----------------------------------------------------------------------------------------


NEAR = namespace("a") + pod("client", "a", "10.1.0.1", labels="istio-locality: r1.z1.s1")
SPREAD = namespace("b") + "".join(
    replica(name, f"10.2.0.{n}", place)
    for n, (name, place) in enumerate(
        (("s1", "r1.z1.s1"), ("s2", "r1.z1.s2"), ("s3", "r1.z2.s1"), ("s4", "r2.z1.s1")), 1
    )
)


def rule(policy: str) -> str:
    return istio("DestinationRule", "d", "a", f"host: {HOST}\ntrafficPolicy: {policy}")


def test_no_priorities_without_outlier_detection() -> None:
    assert [p for _, p, _ in groups(of(NEAR, SPREAD, WEB))] == [0, 0, 0, 0]


def test_failover_priorities() -> None:
    found = groups(of(NEAR, SPREAD, WEB, rule("{outlierDetection: {consecutive5xxErrors: 1}}")))
    assert [(place, priority) for place, priority, _ in found] == [
        ("r1/z1/s1", 0),
        ("r1/z1/s2", 1),
        ("r1/z2/s1", 2),
        ("r2/z1/s1", 3),
    ]


def test_priorities_are_compacted() -> None:
    two = namespace("b") + replica("s1", "10.2.0.1", "r1.z1.s1") + replica("s4", "10.2.0.4", "r2.z1.s1")
    found = groups(of(NEAR, two, WEB, rule("{outlierDetection: {consecutive5xxErrors: 1}}")))
    assert [p for _, p, _ in found] == [0, 1]


def test_failover_target_is_better_than_the_rest() -> None:
    three = SPREAD + replica("s5", "10.2.0.5", "r3.z1.s1")
    text = rule(
        "{outlierDetection: {consecutive5xxErrors: 1}, loadBalancer: {localityLbSetting: {failover: [{from: r1, to: r3}]}}}"
    )
    found = {place: p for place, p, _ in groups(of(NEAR, three, WEB, text))}
    assert (found["r3/z1/s1"], found["r2/z1/s1"]) == (3, 4)


def test_failover_priority_labels() -> None:
    text = rule(
        "{outlierDetection: {consecutive5xxErrors: 1}, "
        "loadBalancer: {localityLbSetting: {failoverPriority: [topology.kubernetes.io/region, topology.kubernetes.io/zone]}}}"
    )
    found = sorted((p, a) for _, p, a in groups(of(NEAR, SPREAD, WEB, text)))
    assert found == [(0, ["10.2.0.1"]), (0, ["10.2.0.2"]), (1, ["10.2.0.3"]), (2, ["10.2.0.4"])]


def test_distribute_sets_weights() -> None:
    text = rule("{loadBalancer: {localityLbSetting: {distribute: [{from: 'r1/*', to: {'r1/*': 80, 'r2/*': 20}}]}}}")
    resources = of(NEAR, SPREAD, WEB, text)
    weights = {
        (g.locality.region, g.locality.zone, g.locality.sub_zone): g.load_balancing_weight.value
        for g in resources.endpoints[out(8080, HOST)].endpoints
    }
    assert weights[("r2", "z1", "s1")] == 20
    assert sum(v for k, v in weights.items() if k[0] == "r1") == pytest.approx(80, abs=2)


def test_mesh_wide_failover_and_a_rules_own_setting_over_it() -> None:
    mesh = mesh_config("localityLbSetting: {failover: [{from: r1, to: r3}]}")
    three = SPREAD + replica("s5", "10.2.0.5", "r3.z1.s1")
    outlier = "{outlierDetection: {consecutive5xxErrors: 1}}"
    found = {place: p for place, p, _ in groups(of(NEAR, three, WEB, mesh, rule(outlier)))}
    assert (found["r3/z1/s1"], found["r2/z1/s1"]) == (3, 4)
    own = rule("{outlierDetection: {consecutive5xxErrors: 1}, loadBalancer: {localityLbSetting: {enabled: true}}}")
    found = {place: p for place, p, _ in groups(of(NEAR, three, WEB, mesh, own))}
    assert (found["r3/z1/s1"], found["r2/z1/s1"]) == (3, 3)


def test_locality_can_be_switched_off() -> None:
    off = mesh_config("localityLbSetting: {enabled: false}")
    found = groups(of(NEAR, SPREAD, WEB, off, rule("{outlierDetection: {consecutive5xxErrors: 1}}")))
    assert [p for _, p, _ in found] == [0, 0, 0, 0]


def test_traffic_distribution_prefers_what_is_close() -> None:
    text = WEB.replace("spec: {", "spec: {trafficDistribution: PreferClose, ")
    found = groups(of(NEAR, SPREAD, text))
    assert found[0][:2] == ("r1/z1/s1", 0)
    assert len({p for _, p, _ in found}) == 4


# --- dual stack ---------------------------------------------------------------------------------------------


DUAL = mesh_config("defaultConfig: {proxyMetadata: {ISTIO_DUAL_STACK: 'true'}}")
DUAL_CLIENT = namespace("a") + pod("client", "a", ips="[{ip: 10.1.0.1}, {ip: 'fd00::1'}]")
DUAL_SERVER = namespace("b") + pod("server", "b", ips="[{ip: 10.2.0.1}, {ip: 'fd00::2'}]")
DUAL_WEB = WEB.replace(
    "clusterIP: 10.96.0.9", "clusterIPs: [10.96.0.9, 'fd10::9'], ipFamilyPolicy: RequireDualStack"
) + service(
    "tcp",
    "b",
    "[{name: tcp-x, port: 9000}]",
    app="server",
    more=", clusterIPs: [10.96.0.8, 'fd10::8'], ipFamilyPolicy: RequireDualStack",
)


def addresses(listener: Any) -> list[str]:
    return [listener.address.socket_address.address] + [
        a.address.socket_address.address for a in listener.additional_addresses
    ]


def test_dual_stack_proxy_has_both_families() -> None:
    resources = of(DUAL, DUAL_CLIENT, DUAL_SERVER, DUAL_WEB)
    assert addresses(resources.listeners["virtualOutbound"]) == ["0.0.0.0", "::"]
    assert addresses(resources.listeners["virtualInbound"]) == ["0.0.0.0", "::"]
    assert addresses(resources.listeners["0.0.0.0_8080"]) == ["0.0.0.0", "::"]
    assert addresses(resources.listeners["10.96.0.8_9000"]) == ["10.96.0.8", "fd10::8"]
    domains = list(resources.routes["8080"].virtual_hosts[0].domains)
    assert domains[-2:] == ["10.96.0.9", "[fd10::9]"]
    bind = resources.clusters["InboundPassthroughCluster"].upstream_bind_config
    assert (bind.source_address.address, bind.extra_source_addresses[0].address.address) == ("127.0.0.6", "::6")
    assert set(resources.name_table.table[HOST].ips) == {"10.96.0.9", "fd10::9"}


def test_without_dual_stack_two_families_mean_ipv4() -> None:
    resources = of(DUAL_CLIENT, DUAL_SERVER, DUAL_WEB)
    assert addresses(resources.listeners["virtualOutbound"]) == ["0.0.0.0"]
    assert list(resources.name_table.table[HOST].ips) == ["10.96.0.9"]


def test_ipv6_proxy() -> None:
    """The loader gives every pod an IPv4 address too, so pods of IPv6 alone are made here."""
    web = WEB.replace("clusterIP: 10.96.0.9", "clusterIP: 'fd10::9', ipFamilies: [IPv6]")
    mesh = build(CLIENT, SERVER, web)
    mesh = replace(mesh, pods=tuple(replace(p, ips=(f"fd00::{n}",)) for n, p in enumerate(mesh.pods, 1)))
    client = mesh.pod("client.a")
    assert client is not None
    resources = snapshot.generate(mesh, snapshot.node_for_pod(mesh, client))
    assert addresses(resources.listeners["virtualOutbound"]) == ["::"]
    assert "::_8080" in resources.listeners
    assert resources.clusters["InboundPassthroughCluster"].upstream_bind_config.source_address.address == "::6"
    assert groups(resources) == [("", 0, ["fd00::2"])]


# --- name table ----------------------------------------------------------------------------------------------


def table(*parts: str) -> dict[str, tuple[list[str], str, str]]:
    found = of(CLIENT, SERVER, *parts).name_table.table
    return {host: (list(info.ips), info.registry, info.shortname) for host, info in found.items()}


def test_headless_names_are_the_ready_pods_and_each_pod_by_name() -> None:
    headless = service("set", "b", "[{name: http, port: 80}]", app="server", more=", clusterIP: None")
    named = replica("s1", "10.2.0.2").replace("spec: {", "spec: {hostname: s1, subdomain: set, ")
    sick = replica("s2", "10.2.0.3", ready=False).replace("spec: {", "spec: {hostname: s2, subdomain: set, ")
    found = table(headless, named, sick)
    assert found[f"set.b{S}"] == (["10.2.0.1", "10.2.0.2"], "Kubernetes", "set")
    assert found[f"s1.set.b{S}"] == (["10.2.0.2"], "Kubernetes", "s1.set")
    assert f"s2.set.b{S}" not in found


def entry(spec: str, name: str = "e") -> str:
    return istio("ServiceEntry", name, "a", spec + "\nports: [{number: 80, name: http, protocol: HTTP}]")


def test_entries_by_address() -> None:
    assert table(entry("hosts: [x.example]\naddresses: [192.0.2.1]\nresolution: DNS"))["x.example"] == (
        ["192.0.2.1"],
        "External",
        "",
    )
    dns = entry("hosts: [x.example]\nresolution: DNS")
    assert "x.example" not in table(dns)
    assert table(dns, DNS_CAPTURE)["x.example"][0] == ["240.240.0.1"]
    assert "x.example" not in table(entry("hosts: [x.example]\naddresses: [198.51.100.0/24]\nresolution: NONE"))


def test_entries_of_one_host_merge_their_addresses() -> None:
    one = entry("hosts: [x.example]\naddresses: [192.0.2.1, 192.0.2.2]\nresolution: NONE", "one")
    two = entry("hosts: [x.example]\naddresses: [192.0.2.3]\nresolution: NONE", "two")
    assert sorted(table(one, two)["x.example"][0]) == ["192.0.2.1", "192.0.2.2", "192.0.2.3"]


def test_external_names_are_not_in_the_table() -> None:
    alias = (
        "apiVersion: v1\nkind: Service\nmetadata: {name: alias, namespace: a}\n"
        "spec: {type: ExternalName, externalName: www.example, ports: [{name: http, port: 80}]}\n---\n"
    )
    assert f"alias.a{S}" not in table(alias)

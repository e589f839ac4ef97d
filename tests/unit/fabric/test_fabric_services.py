"""What of a Service becomes which rule."""

from __future__ import annotations

import pytest

from lab.fabric.services import Endpoint, VirtualPort, legacy_document, nft_document, stale_flows, virtual_ports
from lab.manifests import load

PODS = """
apiVersion: v1
kind: Namespace
metadata: {name: shop}
---
apiVersion: v1
kind: Pod
metadata: {name: one, namespace: shop, labels: {app: web, tier: a}}
spec: {containers: [{name: app, ports: [{name: http, containerPort: 8080}, {name: http, containerPort: 99, protocol: UDP}]}]}
status: {podIP: 10.244.1.1}
---
apiVersion: v1
kind: Pod
metadata: {name: two, namespace: shop, labels: {app: web}}
spec: {containers: [{name: other}, {name: app, ports: [{name: http, containerPort: 9090}]}]}
status: {podIP: 10.244.1.2}
---
apiVersion: v1
kind: Pod
metadata: {name: three, namespace: shop, labels: {app: web}}
spec: {containers: [{name: app, ports: [{name: admin, containerPort: 7070}]}]}
status: {podIP: 10.244.1.3}
"""


def service(spec: str, name: str = "web") -> str:
    return f"""
---
apiVersion: v1
kind: Service
metadata: {{name: {name}, namespace: shop}}
spec: {spec}
"""


def ports_of(*more: str) -> tuple[VirtualPort, ...]:
    return virtual_ports(load.load_text(PODS + "".join(more)))


def test_a_named_target_port_is_each_pod_s_own_and_those_without_it_are_no_endpoints() -> None:
    spec = "{clusterIP: 10.96.1.1, selector: {app: web}, ports: [{port: 80, targetPort: http}]}"
    assert ports_of(service(spec)) == (
        VirtualPort("shop/web", "10.96.1.1", "tcp", 80, (Endpoint("10.244.1.1", 8080), Endpoint("10.244.1.2", 9090))),
    )


def test_a_named_target_port_is_looked_up_by_protocol_too() -> None:
    spec = "{clusterIP: 10.96.1.1, selector: {app: web}, ports: [{port: 53, protocol: UDP, targetPort: http}]}"
    (port,) = ports_of(service(spec))
    assert (port.transport, port.endpoints) == ("udp", (Endpoint("10.244.1.1", 99),))


def test_a_target_port_left_out_is_the_port_itself() -> None:
    (port,) = ports_of(service("{clusterIP: 10.96.1.1, selector: {tier: a}, ports: [{port: 81}]}"))
    assert port.endpoints == (Endpoint("10.244.1.1", 81),)


@pytest.mark.parametrize(
    "spec",
    [
        "{clusterIP: None, selector: {app: web}, ports: [{port: 80}]}",
        "{type: ExternalName, externalName: api.vendor.example, ports: [{port: 80}]}",
    ],
)
def test_headless_and_external_name_services_have_no_rules(spec: str) -> None:
    assert ports_of(service(spec)) == ()


def test_a_selector_that_selects_nobody_leaves_a_port_without_endpoints() -> None:
    (port,) = ports_of(service("{clusterIP: 10.96.1.1, selector: {app: nobody}, ports: [{port: 80}]}"))
    assert port.endpoints == ()


SLICE = """
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: http, port: 8081, protocol: TCP}]
endpoints: [%s]
"""
WRITTEN = service("{clusterIP: 10.96.1.1, ports: [{name: http, port: 80}, {name: admin, port: 81}]}")


def test_written_endpoints_serve_a_service_without_selector_by_port_name() -> None:
    http, admin = ports_of(WRITTEN, SLICE % "{addresses: [203.0.113.5]}, {addresses: [203.0.113.6]}")
    assert http.endpoints == (Endpoint("203.0.113.5", 8081), Endpoint("203.0.113.6", 8081))
    assert admin.endpoints == ()


def test_of_written_endpoints_only_ready_ones_serve() -> None:
    gone = "{addresses: [203.0.113.6], conditions: {ready: false}}"
    http, _ = ports_of(WRITTEN, SLICE % f"{{addresses: [203.0.113.5]}}, {gone}")
    assert http.endpoints == (Endpoint("203.0.113.5", 8081),)


def test_where_none_is_ready_those_that_still_serve_while_they_end_do() -> None:
    ending = "{addresses: [203.0.113.6], conditions: {ready: false, serving: true, terminating: true}}"
    dead = "{addresses: [203.0.113.7], conditions: {ready: false, serving: false, terminating: true}}"
    http, _ = ports_of(WRITTEN, SLICE % f"{ending}, {dead}")
    assert http.endpoints == (Endpoint("203.0.113.6", 8081),)


SPREAD = VirtualPort("shop/web", "10.96.1.1", "tcp", 80, (Endpoint("10.244.1.1", 8080), Endpoint("10.244.1.2", 9090)))
SIX = VirtualPort("shop/web", "fd00::1", "udp", 53, (Endpoint("fd00:1::5", 5353),))
EMPTY = VirtualPort("shop/empty", "10.96.1.2", "tcp", 80, ())
BEYOND = ("169.254.1.2", "203.0.113.8", "fd00:3::8")


def test_the_document_replaces_the_table_in_one_transaction() -> None:
    lines = nft_document((SPREAD, SIX, EMPTY), {4: "169.254.1.1", 6: "fd5c::1"}, BEYOND).splitlines()
    assert lines[:3] == [
        "table inet sidecarlab-services",
        "delete table inet sidecarlab-services",
        "table inet sidecarlab-services {",
    ]
    text = "\n".join(lines)
    assert "dnat ip addr . port to numgen random mod 2 map { 0 : 10.244.1.1 . 8080, 1 : 10.244.1.2 . 9090 }" in text
    assert "elements = { fd00::1 . udp . 53 : goto service6-shop/web/udp/53 }" in text
    assert "elements = { 10.96.1.1, 10.96.1.2 }" in text
    assert "10.96.1.2 . tcp" not in text  # no endpoints: left to the reject
    assert "ct status dnat ip saddr . ip daddr @hairpin4 snat ip to 169.254.1.1" in text
    assert "elements = { 10.244.1.1 . 10.244.1.1, 10.244.1.2 . 10.244.1.2 }" in text


def test_the_legacy_document_gives_each_endpoint_the_same_chance() -> None:
    three = VirtualPort("s/w", "10.96.1.1", "tcp", 80, tuple(Endpoint(f"10.244.1.{n}", 8080) for n in (1, 2, 3)))
    text = legacy_document((three, SIX), 4, "169.254.1.1", BEYOND)
    chances = [line.split("--probability ")[1].split()[0] for line in text.splitlines() if "--probability" in line]
    assert chances == ["0.3333333333", "0.5000000000"]
    assert "fd00" not in text
    assert len(three.short_chain) <= 28


def test_the_legacy_document_of_ipv6_writes_ports_after_brackets() -> None:
    text = legacy_document((SPREAD, SIX), 6, "fd5c::1", BEYOND)
    assert "--to-destination [fd00:1::5]:5353" in text
    assert "10.96" not in text


def test_only_udp_endpoints_that_went_are_stale() -> None:
    one, two = Endpoint("10.244.1.1", 53), Endpoint("10.244.1.2", 53)
    old = (VirtualPort("s/d", "10.96.1.1", "udp", 53, (one, two)), VirtualPort("s/d", "10.96.1.1", "tcp", 53, (one,)))
    new = (VirtualPort("s/d", "10.96.1.1", "udp", 53, (two,)),)
    assert stale_flows(old, new) == [(old[0], one)]
    assert stale_flows(old, ()) == [(old[0], one), (old[0], two)]
    assert stale_flows(new, old) == []


def test_the_way_outside_is_for_those_who_are_there_alone() -> None:
    """Each family's own answer: what a router without a route says."""
    nft = nft_document((), {4: "169.254.1.1"}, BEYOND)
    assert "elements = { 169.254.1.2, 203.0.113.8 }" in nft
    assert "elements = { fd00:3::8 }" in nft
    four, six = (legacy_document((), version, "169.254.1.1", BEYOND).splitlines() for version in (4, 6))
    assert [line for line in four if "UNROUTED -" in line and not line.startswith(":")] == [
        "-A UNROUTED -d 169.254.1.2 -j RETURN",
        "-A UNROUTED -d 203.0.113.8 -j RETURN",
        "-A UNROUTED -j REJECT --reject-with icmp-net-unreachable",
    ]
    assert [line for line in six if "UNROUTED -" in line and not line.startswith(":")] == [
        "-A UNROUTED -d fd00:3::8 -j RETURN",
        "-A UNROUTED -j REJECT --reject-with icmp6-no-route",
    ]

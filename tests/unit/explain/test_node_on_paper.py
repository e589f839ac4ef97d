"""What a prediction says of the node: its rules are the document that a running lab's node has."""

from __future__ import annotations

import dataclasses

import pytest

from lab.explain import telling
from lab.explaining import MeshWorld, Told, predict
from lab.manifests.load import load_text
from lab.manifests.model import FlowFrom, FlowTo, Meta, TrafficTest

MESH = """
apiVersion: v1
kind: Namespace
metadata: {name: shop}
---
apiVersion: v1
kind: Pod
metadata: {name: a, namespace: shop}
spec: {containers: [{name: app, ports: [{name: http, containerPort: 8080}]}]}
status: {podIP: 10.244.1.1, podIPs: [{ip: 10.244.1.1}, {ip: "fd00:1::a"}]}
---
apiVersion: v1
kind: Pod
metadata: {name: b, namespace: shop}
spec: {containers: [{name: app, ports: [{name: http, containerPort: 8080}]}]}
status: {podIP: 10.244.1.2}
---
apiVersion: v1
kind: Service
metadata: {name: empty, namespace: shop}
spec: {clusterIP: 10.96.1.3, selector: {app: nobody}, ports: [{name: t, port: 80}, {name: u, port: 53, protocol: UDP}]}
---
apiVersion: sidecarlab.dev/v1alpha1
kind: ExternalHost
metadata: {name: vendor}
spec: {hosts: [api.vendor.example], addresses: [203.0.113.8], ports: [{port: 80, protocol: http}]}
"""
NOBODY, NOBODY6, OUTSIDE = "198.51.100.1", "fd00:99::1", "169.254.1.2"


def told(to: FlowTo, source: FlowFrom | None = None, links: str = "") -> Told:
    return predict(MeshWorld(load_text(MESH + links)), TrafficTest(Meta("t"), source or FlowFrom(pod="a.shop"), to, {}))


def result(to: FlowTo, source: FlowFrom | None = None, links: str = "") -> str | None:
    outcome = told(to, source, links).verdict.outcome
    return outcome.result if outcome else None


@pytest.mark.parametrize(
    ("address", "rule", "answer"),
    [
        (NOBODY, "unrouted 1: ip daddr != @outside4 reject with icmp net-unreachable", "icmp-net-unreachable"),
        ("10.244.1.77", "unrouted 1: ip daddr != @outside4 reject with icmp net-unreachable", "icmp-net-unreachable"),
        (NOBODY6, "unrouted 2: ip6 daddr != @outside6 reject with icmpv6 no-route", "icmp6-no-route"),
    ],
)
def test_what_nobody_has_is_rejected_by_the_node_s_rule(address: str, rule: str, answer: str) -> None:
    found = told(FlowTo(address, 80, "tcp"))
    (node,) = [hop for hop in telling.hops(found.journeys[0]) if hop.kind == "node"]
    assert node.text == f"goes no further: nothing has the address {address}: {answer}"
    assert node.details[-1] == f"sidecarlab-services {rule}  [reject]"
    assert found.verdict.outcome is not None
    assert (found.verdict.outcome.result, found.journeys[0].error) == ("unreachable", "Network is unreachable")


def test_external_hosts_find_it_unreachable_too() -> None:
    assert result(FlowTo(NOBODY, 80, "tcp"), FlowFrom(external="vendor")) == "unreachable"


@pytest.mark.parametrize("address", [NOBODY, NOBODY6])
def test_a_udp_socket_does_not_hear_of_it_and_a_raw_one_does(address: str) -> None:
    datagram = FlowTo(address, 53, "udp")
    assert result(datagram) == "no-answer"
    assert result(dataclasses.replace(datagram, crafted=True)) == "unreachable"


def test_a_virtual_port_without_endpoints_is_refused_and_not_unreachable() -> None:
    assert result(FlowTo("10.96.1.3", 80, "tcp")) == "refused"
    assert result(FlowTo("10.96.1.3", 53, "udp")) == "refused"


def test_what_the_way_outside_leads_to_passes() -> None:
    assert result(FlowTo("203.0.113.8", 80, "http")) == "ok"
    assert result(FlowTo(OUTSIDE, 80, "tcp")) == "refused"  # the other router, where nothing listens


def test_a_verdict_map_without_an_element_for_a_packet_is_no_rule_that_matched() -> None:
    (node,) = [hop for hop in telling.hops(told(FlowTo(NOBODY, 80, "tcp")).journeys[0]) if hop.kind == "node"]
    assert node.details[0] == "sidecarlab-services prerouting 1: jump services  [no rule of services matches]"


def _link(between: str) -> str:
    return f"""
---
apiVersion: sidecarlab.dev/v1alpha1
kind: Link
metadata: {{name: l}}
spec: {{between: {between}, cut: true}}
"""


@pytest.mark.parametrize(
    ("between", "host", "expected"),
    [
        ("[a.shop, '*']", NOBODY, "timeout"),
        ("[a.shop, '*']", "10.96.1.3", "timeout"),
        ("[a.shop, '*']", "169.254.1.1", "timeout"),  # the node itself
        ("['*', '*']", NOBODY, "timeout"),
        ("['*', '*']", "10.244.1.2", "timeout"),
        ("['*', '*']", "169.254.1.1", "refused"),
        ("[b.shop, '*']", NOBODY, "unreachable"),
        ("[b.shop, vendor]", NOBODY, "unreachable"),
        ("[a.shop, vendor]", "203.0.113.8", "timeout"),
    ],
)
def test_a_cut_link_takes_it_before_the_rules_do(between: str, host: str, expected: str) -> None:
    assert result(FlowTo(host, 80, "tcp"), links=_link(between)) == expected

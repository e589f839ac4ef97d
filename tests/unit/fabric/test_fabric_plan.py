"""Mesh in, plan out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.errors import InputError
from lab.fabric import paths
from lab.fabric.plan import changes, node_interface, plan
from lab.manifests import load

SHOP = """
apiVersion: v1
kind: Namespace
metadata: {name: shop}
---
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: shop}
spec: {containers: [{name: app}]}
status: {podIP: 10.244.7.9}
---
apiVersion: sidecarlab.dev/v1alpha1
kind: ExternalHost
metadata: {name: vendor}
spec: {hosts: [api.vendor.example], addresses: [203.0.113.8, 203.0.113.9], ports: [{port: 80, protocol: http}]}
"""

POD = """
---
apiVersion: v1
kind: Pod
metadata: {name: %s, namespace: shop}
spec: {containers: [{name: app}]}
status: {podIP: %s}
"""


def test_each_pod_and_external_host_is_a_place_of_its_own() -> None:
    made = plan(load.load_text(SHOP))
    assert made.namespaces == ("node", "outside", "web.shop", "ext-vendor")
    web, vendor = made.places
    assert (web.kind, web.addresses, web.router, web.mac) == ("pod", ("10.244.7.9",), "node", "0a:58:0a:f4:07:09")
    assert (vendor.kind, vendor.addresses, vendor.router) == ("external", ("203.0.113.8", "203.0.113.9"), "outside")
    assert web.interface == node_interface("web.shop")


def test_the_node_answers_as_gateway_cluster_dns_and_discovery() -> None:
    mesh = load.load_text(SHOP)
    made = plan(mesh)
    assert made.node.addresses == ("169.254.1.1", mesh.fabric.dns, mesh.fabric.discovery)
    assert made.outside.addresses == ("169.254.1.2",)
    assert not made.ipv6


def test_beyond_the_node_are_the_other_router_and_external_hosts() -> None:
    assert plan(load.load_text(SHOP)).beyond == ("169.254.1.2", "203.0.113.8", "203.0.113.9")


def test_the_second_router_keeps_off_an_address_that_a_pod_has() -> None:
    made = plan(load.load_text(SHOP + POD % ("odd", "169.254.1.2")))
    assert made.outside.addresses == ("169.254.1.3",)


def test_one_ipv6_address_gives_every_router_one() -> None:
    made = plan(load.load_text(SHOP + POD % ("six", "fd00::6")))
    assert made.ipv6
    assert made.node.own6 in made.node.addresses
    assert made.outside.own6 in made.outside.addresses
    assert made.node.own6 != made.outside.own6


@given(st.text(min_size=1, max_size=300))
def test_an_interface_name_is_short_stable_and_one_word(place: str) -> None:
    name = node_interface(place)
    assert name == node_interface(place)
    assert 0 < len(name.encode()) <= 15
    assert not set(name) & set("/: \t\n")
    assert name not in ("node", "outside", "lo")


def test_changes_name_what_goes_and_what_comes() -> None:
    old = plan(load.load_text(SHOP + POD % ("one", "10.244.7.20") + POD % ("two", "10.244.7.21")))
    new = plan(load.load_text(SHOP + POD % ("two", "10.244.7.22") + POD % ("three", "10.244.7.23")))
    difference = changes(old, new)
    assert difference.removed == ("one.shop", "two.shop")
    assert difference.added == ("two.shop", "three.shop")
    assert changes(old, old) == changes(new, new) == type(difference)((), ())


def test_a_pod_that_would_take_the_pin_of_an_external_host_is_refused() -> None:
    clash = SHOP.replace("vendor}", "web.shop}") + POD % ("ext-web", "10.244.7.30")
    with pytest.raises(InputError, match=r'"ext-web.shop" cannot be a place|would be called so too'):
        plan(load.load_text(clash))


def test_a_file_name_never_is_too_long_and_stays_unique() -> None:
    one, other = "a" * 253 + ".one", "a" * 253 + ".other"
    assert len(paths.file_name(one)) <= 255
    assert paths.file_name(one) != paths.file_name(other)
    assert paths.file_name("web.shop") == "web.shop"

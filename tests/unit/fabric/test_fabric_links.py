"""What a Link does to which interface."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.errors import InputError
from lab.fabric.links import Bucket, Drop, PathMTU, Selection, legacy_document, nft_document
from lab.fabric.plan import Plan, node_interface, plan
from lab.manifests import load
from lab.manifests.model import Link, Meta, Source

MESH = """
apiVersion: v1
kind: Namespace
metadata: {name: shop}
---
apiVersion: v1
kind: Pod
metadata: {name: a, namespace: shop}
spec: {containers: [{name: app}]}
status: {podIP: 10.244.1.1}
---
apiVersion: v1
kind: Pod
metadata: {name: b, namespace: shop}
spec: {containers: [{name: app}]}
status: {podIP: 10.244.1.2}
---
apiVersion: sidecarlab.dev/v1alpha1
kind: ExternalHost
metadata: {name: vendor}
spec: {hosts: [api.vendor.example], addresses: [203.0.113.8], ports: [{port: 80, protocol: http}]}
"""
A, B, VENDOR = node_interface("a.shop"), node_interface("b.shop"), node_interface("ext-vendor")


def planned(*specs: str) -> Plan:
    text = MESH
    for number, spec in enumerate(specs):
        text += f"""
---
apiVersion: sidecarlab.dev/v1alpha1
kind: Link
metadata: {{name: l{number}}}
spec: {spec}
"""
    return plan(load.load_text(text, file="mesh.yaml"))


def test_no_link_no_effect() -> None:
    made = planned()
    assert made.links.drops == made.links.buckets == made.links.classes == made.links.paths == made.links.mtus == ()
    document = nft_document(made.links, "node")
    assert document.splitlines() == ["table inet sidecarlab-links", "delete table inet sidecarlab-links"]


def test_a_cut_between_two_pods_drops_both_ways() -> None:
    made = planned("{between: [a.shop, b.shop], cut: true}")
    assert made.links.drops == (
        Drop("node", "forward", Selection(incoming=A, outgoing=B), 1_000_000),
        Drop("node", "forward", Selection(incoming=B, outgoing=A), 1_000_000),
    )
    assert f'iifname "{A}" oifname "{B}" drop' in nft_document(made.links, "node")
    assert f"-A FORWARD -i {A} -o {B} -j DROP" in legacy_document(made.links, "node", 4)


def test_towards_an_external_host_the_first_router_drops_by_address() -> None:
    made = planned("{between: [a.shop, vendor], loss: 25%}")
    node, outside = (nft_document(made.links, r) for r in ("node", "outside"))
    assert f'iifname "{A}" oifname "outside" ip daddr {{ 203.0.113.8 }} numgen random mod 1000000 < 250000 drop' in node
    assert f'iifname "{VENDOR}" oifname "node" ip daddr {{ 10.244.1.1 }} numgen random' in outside
    assert "--probability 0.250000 -j DROP" in legacy_document(made.links, "outside", 4)
    assert "DROP" not in legacy_document(made.links, "outside", 6)


def test_a_place_and_all_others_meets_what_enters_and_leaves_it() -> None:
    made = planned("{between: [a.shop, '*'], cut: true, rate: 8mbit, mtu: 1400}")
    assert [(d.stage, d.selection) for d in made.links.drops] == [
        ("prerouting", Selection(incoming=A)),
        ("postrouting", Selection(outgoing=A)),
    ]
    assert made.links.buckets == (Bucket("node", A, 8_000_000), Bucket("a.shop", "eth0", 8_000_000))
    assert made.links.mtu("a.shop") == 1400
    assert made.links.mtu("b.shop") == 0


def test_all_links_at_once_drop_each_packet_in_one_router_only() -> None:
    made = planned("{between: ['*', '*'], loss: 10}")
    assert [(d.router, d.selection) for d in made.links.drops] == [
        ("node", Selection(not_incoming="outside")),
        ("outside", Selection(not_incoming="node")),
    ]


def test_the_mtu_of_a_path_is_the_last_router_s() -> None:
    made = planned("{between: [a.shop, vendor], mtu: 1200}")
    assert made.links.paths == (
        PathMTU("outside", "10.244.1.1", "203.0.113.8", VENDOR, 1200),
        PathMTU("node", "203.0.113.8", "10.244.1.1", A, 1200),
    )
    assert made.links.mtus == ()


def test_rates_of_several_paths_to_one_place_are_apart() -> None:
    made = planned("{between: [a.shop, b.shop], rate: 1mbit}", "{between: [vendor, b.shop], rate: 2mbit}")
    assert [(c.interface, c.minor, c.rate) for c in made.links.classes] == [
        (B, 1, 1_000_000),
        (A, 1, 1_000_000),
        (B, 2, 2_000_000),
        (VENDOR, 1, 2_000_000),
    ]
    assert "meta priority set 1:2" in nft_document(made.links, "node")


def test_a_link_of_a_place_with_itself_is_refused_where_it_was_written() -> None:
    with pytest.raises(InputError, match=r'Link "l0" joins a.shop with itself: mesh.yaml:\d+'):
        planned("{between: [a.shop, a.shop], cut: true}")


def test_a_link_to_nowhere_is_refused_where_it_was_written() -> None:
    """The loader refuses it first; a mesh may also be made without it."""
    mesh = load.load_text(MESH, file="mesh.yaml")
    lost = Link(Meta("lost", source=Source("mesh.yaml", 7)), ("a.shop", "c.shop"), cut=True)
    with pytest.raises(InputError, match=r'Link "lost" names "c.shop": mesh.yaml:7: no pod and no external'):
        plan(replace(mesh, links=(lost,)))


def test_two_kinds_of_rate_on_one_interface_are_refused() -> None:
    with pytest.raises(InputError, match="two Links limit the rate of one interface"):
        planned("{between: [a.shop, b.shop], rate: 1mbit}", "{between: [b.shop, '*'], rate: 2mbit}")


def test_ipv6_needs_its_smallest_mtu() -> None:
    mesh = MESH.replace("10.244.1.2}", "fd00::2}") + (
        "---\napiVersion: sidecarlab.dev/v1alpha1\nkind: Link\nmetadata: {name: l}\n"
        "spec: {between: [a.shop, '*'], mtu: 1000}\n"
    )
    with pytest.raises(InputError, match="must be 1280 to 65535"):
        plan(load.load_text(mesh))


def test_delay_needs_netem_and_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="delay"):
        planned("{between: [a.shop, b.shop], delay: 10ms}")

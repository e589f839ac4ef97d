"""Addresses: pinned, chosen, unique, the same every time."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.errors import InputError
from lab.manifests import load
from lab.manifests.addresses import Pool
from lab.manifests.model import Mesh


def pod(name: str, namespace: str = "a", ip: str = "", extra: str = "") -> str:
    status = f"status: {{podIP: {ip!r}{extra}}}\n" if ip else ""
    return (
        f"---\napiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: {namespace}}}\n"
        f"spec: {{containers: [{{name: app}}]}}\n{status}"
    )


def service(name: str, namespace: str = "a", more: str = "") -> str:
    return (
        f"---\napiVersion: v1\nkind: Service\nmetadata: {{name: {name}, namespace: {namespace}}}\n"
        f"spec: {{ports: [{{port: 80}}]{more}}}\n"
    )


def host(name: str, address: str = "") -> str:
    pinned = f", addresses: [{address!r}]" if address else ""
    return (
        f"---\napiVersion: sidecarlab.dev/v1alpha1\nkind: ExternalHost\nmetadata: {{name: {name}}}\n"
        f"spec: {{hosts: [{name}.example], ports: [{{port: 80, protocol: http}}]{pinned}}}\n"
    )


def entry(name: str, spec: str, meta: str = "", tail: str = "") -> str:
    return (
        f"---\napiVersion: networking.istio.io/v1\nkind: ServiceEntry\n"
        f"metadata: {{name: {name}, namespace: a{meta}}}\nspec: {{{spec}, ports: [{{number: 80, name: http, protocol: HTTP}}]}}\n{tail}"
    )


def addresses(mesh: Mesh) -> list[str]:
    found = [ip for one in mesh.pods for ip in one.ips]
    found += [ip for one in mesh.services for ip in one.cluster_ips]
    found += [ip for one in mesh.external_hosts for ip in one.addresses]
    found += [ip for one in mesh.service_entries for ips in one.auto_addresses.values() for ip in ips]
    fabric = mesh.fabric
    return found + [ip for ip in (fabric.dns, fabric.discovery, fabric.gateway, fabric.dns6, fabric.discovery6) if ip]


def test_blocks_of_namespaces() -> None:
    mesh = load.load_text(
        pod("x", "a") + pod("w", "b") + pod("z", "a") + service("s", "b") + service("t", "c") + host("h")
    )
    assert {one.name: one.ip for one in mesh.pods} == {"x.a": "10.244.1.1", "w.b": "10.244.2.1", "z.a": "10.244.1.2"}
    assert {one.meta.name: one.cluster_ips for one in mesh.services} == {"s": ("10.96.2.1",), "t": ("10.96.3.1",)}
    assert mesh.external_hosts[0].addresses == ("203.0.113.1",)
    assert (mesh.fabric.dns, mesh.fabric.discovery) == ("10.96.0.10", "10.96.0.11")


def test_pinned_addresses_are_kept_and_avoided() -> None:
    text = (
        pod("x") + pod("w", ip="10.244.1.1") + service("s", more=", clusterIP: 10.96.0.10") + host("h", "203.0.113.1")
    )
    mesh = load.load_text(text + host("i"))
    assert {one.name: one.ip for one in mesh.pods} == {"x.a": "10.244.1.2", "w.a": "10.244.1.1"}
    assert [one.addresses for one in mesh.external_hosts] == [("203.0.113.1",), ("203.0.113.2",)]
    assert (mesh.fabric.dns, mesh.fabric.discovery) == ("10.96.0.11", "10.96.0.12")


@pytest.mark.parametrize(
    ("text", "what", "who"),
    [
        (pod("x", ip="10.1.1.1") + pod("w", ip="10.1.1.1"), "address 10.1.1.1 used twice", "Pod a/x (-:6)"),
        (
            pod("x", ip="10.1.1.1") + service("s", more=", clusterIP: 10.1.1.1"),
            "address 10.1.1.1 used twice",
            "Pod a/x (-:6)",
        ),
        (host("h", "10.1.1.1") + host("i", "10.1.1.1"), "address 10.1.1.1 used twice", "ExternalHost h (-:5)"),
        (pod("x", ip="169.254.1.1"), "address 169.254.1.1 used twice", "gateway"),
        (pod("x", ip="127.0.0.1"), "unusable address 127.0.0.1", "loopback"),
        (pod("x", ip="224.0.0.1"), "unusable address 224.0.0.1", "multicast"),
        (pod("x", ip="10.1.1"), 'bad value "10.1.1" of status.podIP', "no IP address"),
        (
            pod("x", ip="10.1.1.1", extra=", podIPs: [{ip: 10.1.1.1}, {ip: 10.1.1.2}]"),
            "two addresses of one family",
            "at most one",
        ),
    ],
)
def test_bad_addresses_are_refused(text: str, what: str, who: str) -> None:
    mesh, errors = load_check(text)
    assert mesh is None
    assert errors[0].what == what
    assert who in errors[0].why


def load_check(text: str) -> tuple[Mesh | None, list[InputError]]:
    problems = load.Problems()
    return load._build([("-", text)], "t", problems), problems.errors


def test_automatic_addresses_of_service_entries() -> None:
    text = (
        entry("one", "hosts: [a.example, b.example], resolution: DNS")
        + entry("none", "hosts: [c.example], resolution: NONE")
        + entry("wild", "hosts: ['*.d.example'], resolution: DYNAMIC_DNS")
        + entry(
            "given", "hosts: [e.example], addresses: [240.240.0.2], resolution: STATIC, endpoints: [{address: 1.2.3.4}]"
        )
        + entry(
            "without",
            "hosts: [f.example], resolution: DNS",
            ", labels: {networking.istio.io/enable-autoallocate-ip: 'false'}",
        )
        + entry(
            "kept",
            "hosts: [g.example], resolution: DNS",
            tail="status: {addresses: [{value: 240.240.9.9, host: g.example}]}\n",
        )
    )
    mesh = load.load_text(text)
    found = {host: ips for one in mesh.service_entries for host, ips in one.auto_addresses.items()}
    assert found == {
        "a.example": ("240.240.0.1", "2001:2::1"),
        "b.example": ("240.240.0.3", "2001:2::2"),  # 240.240.0.2 is given by a user
        "*.d.example": ("240.240.0.4", "2001:2::3"),
        "g.example": ("240.240.9.9",),
    }


def test_the_older_service_entry_is_first() -> None:
    old = ", creationTimestamp: 2024-01-01T00:00:00Z"
    new = ", creationTimestamp: 2024-06-01T00:00:00Z"
    mesh = load.load_text(
        entry("young", "hosts: [z.example], resolution: DNS", new)
        + entry("aged", "hosts: [o.example], resolution: DNS", old)
    )
    found = {host: ips[0] for one in mesh.service_entries for host, ips in one.auto_addresses.items()}
    assert found == {"o.example": "240.240.0.1", "z.example": "240.240.0.2"}


def test_single_stack_has_no_ipv6() -> None:
    mesh = load.load_text(pod("x") + service("s") + host("h"))
    assert not [ip for ip in addresses(mesh) if ":" in ip]
    assert mesh.fabric.dns6 == ""


def test_dual_stack_gives_pods_and_hosts_both_families() -> None:
    mesh = load.load_text(
        pod("x")
        + pod("w", ip="fd00::5")
        + service("s", more=", ipFamilyPolicy: PreferDualStack")
        + service("t")
        + host("h")
    )
    assert [one.ips for one in mesh.pods] == [("10.244.1.1", "fd00:10:244:1::1"), ("fd00::5", "10.244.1.2")]
    assert [one.cluster_ips for one in mesh.services] == [("10.96.1.1", "fd00:10:96:1::1"), ("10.96.1.2",)]
    assert mesh.external_hosts[0].addresses == ("203.0.113.1", "2001:db8:113::1")
    assert (mesh.fabric.dns6, mesh.fabric.discovery6) == ("fd00:10:96::a", "fd00:10:96::b")


def test_headless_and_external_name_services_have_none() -> None:
    mesh = load.load_text(
        service("h", more=", clusterIP: None")
        + "---\napiVersion: v1\nkind: Service\nmetadata: {name: e, namespace: a}\n"
        + "spec: {type: ExternalName, externalName: x.example}\n"
    )
    assert [(one.headless, one.external_name, one.cluster_ips) for one in mesh.services] == [
        (True, "", ()),
        (False, "x.example", ()),
    ]


def test_a_full_block_flows_over() -> None:
    mesh = load.load_text("".join(pod(f"p{i}") for i in range(260)) + pod("q", "b"))
    ips = [one.ip for one in mesh.pods]
    assert ips[253] == "10.244.1.254"
    assert ips[254] == "10.244.200.1"
    assert ips[-1] == "10.244.2.1"
    assert len(set(ips)) == 261


def test_a_used_up_range_is_told() -> None:
    pool = Pool()
    for _ in range(2):
        pool.choose("x", ("192.0.2.0/30",))
    with pytest.raises(InputError, match="no address left for x"):
        pool.choose("x", ("192.0.2.0/30",))


def test_what_runs_keeps_its_addresses() -> None:
    before = pod("x") + service("s") + host("h") + entry("one", "hosts: [a.example], resolution: DNS")
    added = pod("w", "aa") + pod("aaa") + service("r") + host("g") + entry("new", "hosts: [b.example], resolution: DNS")
    old = load.load_text(before)
    problems = load.Problems()
    new = load._build([("-", added + before)], "lab", problems, old)
    assert new is not None
    for kind in ("pods", "services", "external_hosts", "service_entries"):
        then = {one.meta.key: one for one in getattr(old, kind)}
        now = {one.meta.key: one for one in getattr(new, kind)}
        for key, one in then.items():
            for name in ("ips", "cluster_ips", "addresses", "auto_addresses"):
                assert getattr(one, name, None) == getattr(now[key], name, None)
    assert old.fabric == new.fabric
    found = addresses(new)
    assert len(found) == len(set(found))


def test_a_pin_beats_what_was_before() -> None:
    old = load.load_text(pod("x"))
    problems = load.Problems()
    new = load._build([("-", pod("x") + pod("w", ip="10.244.1.1"))], "lab", problems, old)
    assert new is not None
    assert {one.name: one.ip for one in new.pods} == {"x.a": "10.244.1.2", "w.a": "10.244.1.1"}


_names = st.lists(st.sampled_from("abcdefgh"), max_size=8, unique=True)
_ips = st.integers(0, 6).map(lambda n: f"10.244.1.{n + 1}") | st.just("")


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("xvz"), st.sampled_from("pqrst"), _ips), max_size=12, unique_by=lambda t: t[:2]),
    _names,
)
def test_no_two_addresses_are_alike_and_loading_twice_gives_the_same(
    pods: list[tuple[str, str, str]], names: list[str]
) -> None:
    taken: set[str] = set()
    text = ""
    for namespace, name, ip in pods:
        text += pod(name, namespace, "" if ip in taken else ip)
        taken.add(ip)
    text += "".join(service(name, "x") + host(name) for name in names)
    mesh = load.load_text(text or pod("only"))
    found = addresses(mesh)
    assert len(found) == len(set(found))
    assert all(str(ipaddress.ip_address(ip)) == ip for ip in found)
    assert load.load_text(text or pod("only")) == mesh

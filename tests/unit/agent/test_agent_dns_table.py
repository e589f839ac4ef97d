"""Names of the lookup table (spec: agent 12.3)."""

from __future__ import annotations

import ipaddress

import pytest
from dns.message import Message, from_wire, make_query

from agent.dns.message import AAAA, A, Query, Verdict, local_answer, parse_query
from agent.dns.resolv_conf import ResolvConf, parse_resolv_conf
from agent.dns.table import LookupTable, ProxyNames, alternate_hosts, build_table, wire_name
from agent.protos import nds_pb2

PROXY = ProxyNames("ns1", "ns1.svc.cluster.local", ("ns1.svc.cluster.local", "svc.cluster.local", "cluster.local"))


def name_table(*entries: tuple[str, list[str], str, str, str]) -> nds_pb2.NameTable:
    table = nds_pb2.NameTable()
    for host, ips, registry, shortname, namespace in entries:
        info = table.table[host]
        info.ips.extend(ips)
        info.registry, info.shortname, info.namespace = registry, shortname, namespace
    return table


TABLE = name_table(
    ("productpage.ns1.svc.cluster.local", ["9.9.9.9"], "Kubernetes", "productpage", "ns1"),
    ("example.ns2.svc.cluster.local", ["10.10.10.10"], "Kubernetes", "example", "ns2"),
    ("details.ns2.svc.cluster.remote", ["11.11.11.11", "12.12.12.12"], "Kubernetes", "details", "ns2"),
    ("dual.ns1.svc.cluster.local", ["9.9.9.8", "2001:db8::8"], "Kubernetes", "dual", "ns1"),
    ("v6.ns1.svc.cluster.local", ["2001:db8::9"], "Kubernetes", "v6", "ns1"),
    ("ipless.ns1.svc.cluster.local", ["0.0.0.0/0", "not-an-ip"], "Kubernetes", "ipless", "ns1"),
    ("web-0.headless.ns1.svc.cluster.local", ["10.1.1.1"], "Kubernetes", "web-0.headless", "ns1"),
    ("dotted.ns1.svc.cluster.local.", ["10.1.1.9"], "Kubernetes", "dotted", "ns1"),
    ("www.google.com", ["1.1.1.1"], "External", "", ""),
    ("Mixed.Example", ["1.1.1.2"], "External", "", ""),
    ("*.wildcard", ["10.10.10.11"], "External", "", ""),
    ("a.b.wildcard", ["11.11.11.11"], "External", "", ""),
    ("*.b.wildcard", ["11.11.11.12"], "External", "", ""),
    ("*.svc.mesh.company.net", ["10.1.2.3"], "External", "", ""),
)


@pytest.fixture(scope="module")
def table() -> LookupTable:
    return build_table(TABLE, PROXY)


def resolve(table: LookupTable, name: str, rdtype: str = "A") -> list[str] | None:
    """Answer records as text, None if the question is forwarded."""
    wire = make_query(name, rdtype).to_wire()
    query = parse_query(wire)
    assert query.verdict is Verdict.QUESTION
    answer = local_answer(query, table, 4096)
    if answer is None:
        return None
    message: Message = from_wire(wire[:2] + answer.reply())
    assert message.question[0].name.to_text() == name
    return sorted(
        f"{rrset.name.to_text()} {rrset.ttl} {rdata.rdtype.name} {rdata.to_text()}"
        for rrset in message.answer
        for rdata in rrset
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("productpage.ns1.svc.cluster.local.", ["productpage.ns1.svc.cluster.local. 30 A 9.9.9.9"]),
        ("productpage.ns1.svc.", ["productpage.ns1.svc. 30 A 9.9.9.9"]),
        ("productpage.ns1.", ["productpage.ns1. 30 A 9.9.9.9"]),
        ("productpage.", ["productpage. 30 A 9.9.9.9"]),
        (
            "productpage.ns1.ns1.svc.cluster.local.",
            ["productpage.ns1. 30 A 9.9.9.9", "productpage.ns1.ns1.svc.cluster.local. 30 CNAME productpage.ns1."],
        ),
        ("productpage.ns1.svc.cluster.local.ns1.svc.cluster.local.", None),
        ("example.ns2.", ["example.ns2. 30 A 10.10.10.10"]),
        ("example.ns2.svc.", ["example.ns2.svc. 30 A 10.10.10.10"]),
        ("example.ns2.svc.cluster.local.", ["example.ns2.svc.cluster.local. 30 A 10.10.10.10"]),
        (
            "example.ns2.svc.cluster.local.ns1.svc.cluster.local.",
            [
                "example.ns2.svc.cluster.local. 30 A 10.10.10.10",
                "example.ns2.svc.cluster.local.ns1.svc.cluster.local. 30 CNAME example.ns2.svc.cluster.local.",
            ],
        ),
        ("example.", None),
        ("details.ns2.", None),
        (
            "details.ns2.svc.cluster.remote.",
            ["details.ns2.svc.cluster.remote. 30 A 11.11.11.11", "details.ns2.svc.cluster.remote. 30 A 12.12.12.12"],
        ),
        ("web-0.headless.ns1.", ["web-0.headless.ns1. 30 A 10.1.1.1"]),
        ("web-0.headless.", ["web-0.headless. 30 A 10.1.1.1"]),
        ("www.google.com.", ["www.google.com. 30 A 1.1.1.1"]),
        (
            "www.google.com.ns1.svc.cluster.local.",
            ["www.google.com. 30 A 1.1.1.1", "www.google.com.ns1.svc.cluster.local. 30 CNAME www.google.com."],
        ),
        ("www.google.com.svc.cluster.local.", None),
        ("mixed.example.", ["mixed.example. 30 A 1.1.1.2"]),
        ("MIXED.example.", ["mixed.example. 30 A 1.1.1.2"]),
        ("foo.wildcard.", ["foo.wildcard. 30 A 10.10.10.11"]),
        ("x.y.wildcard.", ["x.y.wildcard. 30 A 10.10.10.11"]),
        ("a.b.wildcard.", ["a.b.wildcard. 30 A 11.11.11.11"]),
        ("c.b.wildcard.", ["c.b.wildcard. 30 A 11.11.11.12"]),
        ("b.wildcard.", ["b.wildcard. 30 A 10.10.10.11"]),
        ("wildcard.", None),
        (
            "foo.wildcard.ns1.svc.cluster.local.",
            ["*.wildcard. 30 A 10.10.10.11", "foo.wildcard.ns1.svc.cluster.local. 30 CNAME *.wildcard."],
        ),
        ("bar.foo.svc.mesh.company.net.", ["bar.foo.svc.mesh.company.net. 30 A 10.1.2.3"]),
        ("ipless.ns1.svc.cluster.local.", None),
        ("dotted.ns1.svc.cluster.local.", None),
        ("unknown.example.", None),
        (".", None),
    ],
)
def test_questions_for_a(table: LookupTable, name: str, expected: list[str] | None) -> None:
    assert resolve(table, name) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("productpage.ns1.svc.cluster.local.", []),
        ("productpage.ns1.ns1.svc.cluster.local.", []),
        ("foo.wildcard.", []),
        ("dual.ns1.", ["dual.ns1. 30 AAAA 2001:db8::8"]),
        ("v6.", ["v6. 30 AAAA 2001:db8::9"]),
        ("unknown.example.", None),
    ],
)
def test_questions_for_aaaa(table: LookupTable, name: str, expected: list[str] | None) -> None:
    assert resolve(table, name, "AAAA") == expected


def test_a_v4_question_for_a_v6_only_name_is_empty(table: LookupTable) -> None:
    assert resolve(table, "v6.ns1.", "A") == []


@pytest.mark.parametrize("rdtype", ["SRV", "TXT", "PTR", "MX", "CNAME", "HTTPS", "ANY", "NS", "SOA"])
def test_other_types_are_forwarded(table: LookupTable, rdtype: str) -> None:
    assert resolve(table, "productpage.ns1.svc.cluster.local.", rdtype) is None


def test_without_search_domains_nothing_is_expanded() -> None:
    plain = build_table(TABLE, ProxyNames("ns1", "ns1.svc.cluster.local"))
    assert resolve(plain, "productpage.") == ["productpage. 30 A 9.9.9.9"]
    assert resolve(plain, "www.google.com.ns1.svc.cluster.local.") is None


def test_without_a_proxy_domain_only_full_names_are_local() -> None:
    plain = build_table(TABLE, ProxyNames("ns1", ""))
    assert resolve(plain, "productpage.ns1.svc.cluster.local.") is not None
    assert resolve(plain, "productpage.") is None


def test_an_upper_case_search_domain_expands() -> None:
    table = build_table(TABLE, ProxyNames("ns1", "", ("Ns1.Example",)))
    assert resolve(table, "www.google.com.ns1.example.") == [
        "www.google.com. 30 A 1.1.1.1",
        "www.google.com.ns1.example. 30 CNAME www.google.com.",
    ]


def test_alternate_hosts_of_entries() -> None:
    info = TABLE.table["productpage.ns1.svc.cluster.local"]
    info = nds_pb2.NameTable.NameInfo.FromString(info.SerializeToString())
    info.alt_hosts.append("productpage.elsewhere")
    assert alternate_hosts("productpage.ns1.svc.cluster.local", info, PROXY) == [
        "productpage.ns1.svc.cluster.local.",
        "productpage.ns1.",
        "productpage.",
        "productpage.ns1.svc.",
        "productpage.elsewhere.",
    ]


def test_names_that_dns_cannot_carry_are_left_out() -> None:
    assert wire_name("a" * 64 + ".example") is None
    assert wire_name(".".join(["abcdefgh"] * 40)) is None
    assert wire_name("é.example") is None
    assert wire_name("a..b") is None
    table = build_table(name_table(("a" * 64, ["1.1.1.1"], "External", "", "")), PROXY)
    assert table.hosts == set()


def test_a_question_of_another_class_is_answered_like_istio() -> None:
    query = Query(Verdict.QUESTION, 0x0100, b"\x04test\0\0\x01\0\x03", b"\x04test\0", A)
    table = build_table(name_table(("test", ["1.1.1.1"], "External", "", "")), PROXY)
    assert local_answer(query, table, 512) is not None


def test_two_entries_for_one_short_name_do_not_crash() -> None:
    table = build_table(
        name_table(
            ("a.ns1.svc.cluster.local", ["1.1.1.1"], "Kubernetes", "a", "ns1"),
            ("a.ns1", ["2.2.2.2"], "External", "", ""),
        ),
        PROXY,
    )
    assert resolve(table, "a.ns1.") in (["a.ns1. 30 A 1.1.1.1"], ["a.ns1. 30 A 2.2.2.2"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nameserver 10.96.0.10\nsearch a.b b\noptions ndots:5\n", ResolvConf(("10.96.0.10",), ("a.b", "b"))),
        ("nameserver 1.1.1.1\nnameserver fd00::1\n", ResolvConf(("1.1.1.1", "fd00::1"), ())),
        ("domain d\nsearch s1 s2\n", ResolvConf((), ("s1", "s2"))),
        ("search s1\ndomain d\n", ResolvConf((), ("d",))),
        ("# nameserver 1.1.1.1\n; x\n\nnameserver\nnonsense 1\n", ResolvConf()),
        ("", ResolvConf()),
    ],
)
def test_resolv_conf(text: str, expected: ResolvConf) -> None:
    assert parse_resolv_conf(text) == expected


def test_packed_addresses_are_what_the_entry_says(table: LookupTable) -> None:
    wire = wire_name("dual.ns1")
    assert wire is not None
    match = table.lookup(wire)
    assert match is not None
    assert [str(ipaddress.ip_address(packed)) for packed in (*match.ipv4, *match.ipv6)] == ["9.9.9.8", "2001:db8::8"]
    assert AAAA == 28

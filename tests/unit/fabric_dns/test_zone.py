"""What cluster DNS knows of a mesh."""

from __future__ import annotations

import dns.name
import dns.rcode
import dns.rdatatype
import pytest
from dns.rdatatype import RdataType

from lab.errors import InputError
from lab.fabric.zone import Lookup, Zone, build
from lab.manifests.model import (
    Container,
    ContainerPort,
    EndpointAddress,
    EndpointSlice,
    ExternalHost,
    ExternalPort,
    Fabric,
    Mesh,
    MeshConfig,
    Meta,
    Namespace,
    Pod,
    Service,
    ServicePort,
    Source,
)


def pod(name: str, ips: tuple[str, ...], *, ready: bool = True, hostname: str = "", subdomain: str = "") -> Pod:
    return Pod(
        meta=Meta(name, "data", {"app": "db"}),
        ips=ips,
        containers=(Container("c", ports=(ContainerPort(5433, "sql"), ContainerPort(9000, "sql", "UDP"))),),
        injected=False,
        ready=ready,
        hostname=hostname,
        subdomain=subdomain,
    )


def headless(name: str, *, publish_not_ready: bool = False, selector: dict[str, str] | None = None) -> Service:
    return Service(
        meta=Meta(name, "data"),
        cluster_ips=(),
        ports=(
            ServicePort(5432, "sql", "TCP", "sql"),
            ServicePort(8125, "stats", "UDP", 8125, "UDP"),
            ServicePort(1, "absent", "TCP", "no-such-port"),
            ServicePort(2, "", "TCP", 2),
        ),
        selector={"app": "db"} if selector is None else selector,
        headless=True,
        publish_not_ready=publish_not_ready,
        families=(4, 6),
    )


def external_name(name: str, target: str) -> Service:
    return Service(Meta(name, "data", source=Source("mesh.yaml", 7)), (), (), external_name=target)


MESH = Mesh(
    name="zone",
    files=(),
    mesh_config=MeshConfig(),
    fabric=Fabric(dns="10.96.0.10", discovery="10.96.0.11", dns6="fd00:96::a"),
    namespaces=(Namespace(Meta("empty")), Namespace(Meta("shop"))),
    pods=(
        pod("db-0", ("10.0.0.1", "fd00::1"), hostname="db-0", subdomain="db"),
        pod("db-1", ("10.0.0.2",)),
        pod("db-2", ("10.0.0.3",), ready=False, hostname="db-2", subdomain="all"),
    ),
    services=(
        Service(
            Meta("web", "shop"),
            ("10.96.1.1", "fd00:96::1"),
            (ServicePort(80, "http", "HTTP", 8080), ServicePort(81), ServicePort(53, "dns", "UDP", 53, "UDP")),
            {"app": "web"},
        ),
        headless("db"),
        headless("all", publish_not_ready=True),
        headless("none", selector={"app": "nobody"}),
        headless("written", selector={}),
        external_name("alias", "web.shop.svc.cluster.local"),
        external_name("alias2", "alias.data.svc.cluster.local."),
        external_name("outside", "api.vendor.example"),
        external_name("nowhere", "gone.example"),
        external_name("numeric", "192.0.2.1"),
        external_name("loop-a", "loop-b.data.svc.cluster.local"),
        external_name("loop-b", "loop-a.data.svc.cluster.local"),
    ),
    endpoint_slices=(
        EndpointSlice(
            Meta("written-1", "data"),
            "written",
            (EndpointAddress("192.0.2.7", hostname="seven"), EndpointAddress("192.0.2.8", ready=False)),
            {"sql": 1234},
        ),
    ),
    external_hosts=(
        ExternalHost(
            Meta("vendor"),
            ("api.vendor.example", "*.wild.example"),
            ("203.0.113.1", "203.0.113.2", "2001:db8::1"),
            (ExternalPort(80, "http"),),
        ),
    ),
)
ZONE = build(MESH, serial=42)
SVC = "svc.cluster.local"


def ask(name: str, rdtype: str = "A", zone: Zone = ZONE) -> Lookup:
    return zone.lookup(dns.name.from_text(name), dns.rdatatype.from_text(rdtype))


def records(name: str, rdtype: str = "A", zone: Zone = ZONE) -> list[str]:
    """The answer section as ``TYPE data`` lines."""
    return [
        f"{dns.rdatatype.to_text(rrset.rdtype)} {data.to_text()}"
        for rrset in ask(name, rdtype, zone).answer
        for data in rrset
    ]


@pytest.mark.parametrize(
    ("name", "rdtype", "expected"),
    [
        # 2.2 schema version
        ("dns-version.cluster.local", "TXT", ['TXT "1.1.0"']),
        # 2.3 ClusterIP
        (f"web.shop.{SVC}", "A", ["A 10.96.1.1"]),
        (f"web.shop.{SVC}", "AAAA", ["AAAA fd00:96::1"]),
        (f"WEB.Shop.{SVC}", "A", ["A 10.96.1.1"]),
        (f"_http._tcp.web.shop.{SVC}", "SRV", [f"SRV 0 100 80 web.shop.{SVC}."]),
        (f"_dns._udp.web.shop.{SVC}", "SRV", [f"SRV 0 100 53 web.shop.{SVC}."]),
        ("1.1.96.10.in-addr.arpa", "PTR", [f"PTR web.shop.{SVC}."]),
        # 2.4 headless: ready endpoints only
        (f"db.data.{SVC}", "A", ["A 10.0.0.1", "A 10.0.0.2"]),
        (f"db.data.{SVC}", "AAAA", ["AAAA fd00::1"]),
        (f"db-0.db.data.{SVC}", "A", ["A 10.0.0.1"]),
        (f"10-0-0-2.db.data.{SVC}", "A", ["A 10.0.0.2"]),
        (
            f"_sql._tcp.db.data.{SVC}",
            "SRV",
            [f"SRV 0 50 5433 db-0.db.data.{SVC}.", f"SRV 0 50 5433 10-0-0-2.db.data.{SVC}."],
        ),
        (
            f"_stats._udp.db.data.{SVC}",
            "SRV",
            [f"SRV 0 50 8125 db-0.db.data.{SVC}.", f"SRV 0 50 8125 10-0-0-2.db.data.{SVC}."],
        ),
        ("1.0.0.10.in-addr.arpa", "PTR", [f"PTR db-0.db.data.{SVC}."]),
        # publishNotReadyAddresses
        (f"all.data.{SVC}", "A", ["A 10.0.0.1", "A 10.0.0.2", "A 10.0.0.3"]),
        (f"db-2.all.data.{SVC}", "A", ["A 10.0.0.3"]),
        # written EndpointSlices
        (f"written.data.{SVC}", "A", ["A 192.0.2.7"]),
        (f"seven.written.data.{SVC}", "A", ["A 192.0.2.7"]),
        (f"_sql._tcp.written.data.{SVC}", "SRV", [f"SRV 0 100 1234 seven.written.data.{SVC}."]),
        # 2.5 ExternalName
        (f"alias.data.{SVC}", "A", [f"CNAME web.shop.{SVC}.", "A 10.96.1.1"]),
        (f"alias.data.{SVC}", "CNAME", [f"CNAME web.shop.{SVC}."]),
        (f"alias2.data.{SVC}", "A", [f"CNAME alias.data.{SVC}.", f"CNAME web.shop.{SVC}.", "A 10.96.1.1"]),
        (f"outside.data.{SVC}", "AAAA", ["CNAME api.vendor.example.", "AAAA 2001:db8::1"]),
        # 2.6 pod names
        ("10-9-8-7.shop.pod.cluster.local", "A", ["A 10.9.8.7"]),
        ("fd00--1.shop.pod.cluster.local", "AAAA", ["AAAA fd00::1"]),
        ("10-9-8-7.SHOP.pod.cluster.local", "A", ["A 10.9.8.7"]),
        # the lab's own
        (f"istiod.istio-system.{SVC}", "A", ["A 10.96.0.11"]),
        (f"_grpc-xds._tcp.istiod.istio-system.{SVC}", "SRV", [f"SRV 0 100 15010 istiod.istio-system.{SVC}."]),
        (f"kube-dns.kube-system.{SVC}", "AAAA", ["AAAA fd00:96::a"]),
        ("10.0.96.10.in-addr.arpa", "PTR", [f"PTR kube-dns.kube-system.{SVC}."]),
        ("cluster.local", "NS", ["NS ns.dns.cluster.local."]),
        ("ns.dns.cluster.local", "A", ["A 10.96.0.10"]),
        # machines outside
        ("api.vendor.example", "A", ["A 203.0.113.1", "A 203.0.113.2"]),
        ("api.vendor.example", "AAAA", ["AAAA 2001:db8::1"]),
        ("a.wild.example", "A", ["A 203.0.113.1", "A 203.0.113.2"]),
        ("a.b.wild.example", "A", ["A 203.0.113.1", "A 203.0.113.2"]),
        ("2.113.0.203.in-addr.arpa", "PTR", ["PTR api.vendor.example."]),
    ],
)
def test_known_names(name: str, rdtype: str, expected: list[str]) -> None:
    found = ask(name, rdtype)
    assert found.rcode == dns.rcode.NOERROR
    assert records(name, rdtype) == expected
    assert found.authority == ()


@pytest.mark.parametrize(
    ("name", "rdtype"),
    [
        (f"web.shop.{SVC}", "TXT"),
        (f"web.shop.{SVC}", "SRV"),
        (f"db-2.all.data.{SVC}", "AAAA"),
        (f"_tcp.web.shop.{SVC}", "A"),  # between a record and its service
        (f"shop.{SVC}", "A"),
        (f"empty.{SVC}", "A"),
        ("empty.pod.cluster.local", "A"),
        (SVC, "A"),
        ("cluster.local", "A"),
        ("10-9-8-7.shop.pod.cluster.local", "AAAA"),
        ("api.vendor.example", "MX"),
        ("vendor.example", "A"),
        ("wild.example", "A"),  # a wildcard is no name for what it stands below
        ("a.wild.example", "TXT"),
        ("96.10.in-addr.arpa", "PTR"),
    ],
)
def test_a_name_without_such_records_is_no_data(name: str, rdtype: str) -> None:
    found = ask(name, rdtype)
    assert (found.rcode, found.answer) == (dns.rcode.NOERROR, ())
    assert [r.rdtype for r in found.authority] == [RdataType.SOA]


@pytest.mark.parametrize(
    ("name", "origin"),
    [
        (f"nobody.shop.{SVC}", "cluster.local."),
        (f"web.nowhere.{SVC}", "cluster.local."),
        (f"none.data.{SVC}", "cluster.local."),  # headless without ready endpoints: section 2.4.1
        (f"db-2.db.data.{SVC}", "cluster.local."),  # its subdomain is another service
        (f"db-1.db.data.{SVC}", "cluster.local."),  # a pod's name is no hostname
        (f"_absent._tcp.db.data.{SVC}", "cluster.local."),
        (f"numeric.data.{SVC}", "cluster.local."),  # an ExternalName that is an address
        ("10-9-8-7.nowhere.pod.cluster.local", "cluster.local."),
        ("10-9-8.shop.pod.cluster.local", "cluster.local."),
        ("10-9-8-700.shop.pod.cluster.local", "cluster.local."),
        ("x.10-9-8-7.shop.pod.cluster.local", "cluster.local."),
        (f"x.web.shop.{SVC}", "cluster.local."),
        (f"api.vendor.example.shop.{SVC}", "cluster.local."),  # resolv.conf's search list asks this
        ("2.0.0.10.in-addr.arpa", "in-addr.arpa."),  # an endpoint without hostname has no reverse name
        ("gone.example", "."),
        ("example.com", "."),
        ("x.api.vendor.example", "."),
    ],
)
@pytest.mark.parametrize("rdtype", ["A", "TXT"])
def test_an_unknown_name_does_not_exist(name: str, origin: str, rdtype: str) -> None:
    found = ask(name, rdtype)
    assert (found.rcode, found.answer) == (dns.rcode.NXDOMAIN, ())
    (soa,) = found.authority
    assert (soa.name.to_text(), soa.rdtype) == (origin, RdataType.SOA)
    assert soa[0].serial == 42


def test_an_alias_of_an_unknown_name_says_so_with_the_chain() -> None:
    found = ask(f"nowhere.data.{SVC}")
    assert found.rcode == dns.rcode.NXDOMAIN
    assert records(f"nowhere.data.{SVC}") == ["CNAME gone.example."]
    assert found.authority[0].name == dns.name.root


def test_an_alias_without_such_records_is_no_data_with_the_chain() -> None:
    found = ask(f"alias.data.{SVC}", "TXT")
    assert found.rcode == dns.rcode.NOERROR
    assert records(f"alias.data.{SVC}", "TXT") == [f"CNAME web.shop.{SVC}."]
    assert [r.rdtype for r in found.authority] == [RdataType.SOA]


def test_a_loop_of_aliases_is_a_failure() -> None:
    found = ask(f"loop-a.data.{SVC}")
    assert found.rcode == dns.rcode.SERVFAIL
    assert len(found.answer) == 2


def test_the_owner_keeps_the_case_of_the_question() -> None:
    assert ask(f"WeB.shop.{SVC}").answer[0].name.to_text() == f"WeB.shop.{SVC}."


def test_srv_brings_the_addresses_of_its_targets() -> None:
    extra = ask(f"_sql._tcp.db.data.{SVC}", "SRV").additional
    assert [(r.name.to_text(), r[0].to_text()) for r in extra] == [
        (f"db-0.db.data.{SVC}.", "10.0.0.1"),
        (f"db-0.db.data.{SVC}.", "fd00::1"),
        (f"10-0-0-2.db.data.{SVC}.", "10.0.0.2"),
    ]


def test_any_gives_all_records_of_the_name() -> None:
    assert records(f"web.shop.{SVC}", "ANY") == ["A 10.96.1.1", "AAAA fd00:96::1"]


def test_every_record_lives_thirty_seconds() -> None:
    assert {r.ttl for r in (*ask(f"alias.data.{SVC}").answer, *ask("gone.example").authority)} == {30}


def test_a_service_of_that_name_replaces_the_labs_istiod() -> None:
    istiod = Service(Meta("istiod", "istio-system"), ("10.96.9.9",), (ServicePort(443, "https"),))
    zone = build(Mesh("m", (), MeshConfig(), MESH.fabric, services=(istiod,)))
    assert records(f"istiod.istio-system.{SVC}", "A", zone) == ["A 10.96.9.9"]
    assert ask(f"_grpc-xds._tcp.istiod.istio-system.{SVC}", "SRV", zone).rcode == dns.rcode.NXDOMAIN


def test_another_domain_suffix() -> None:
    zone = build(Mesh("m", (), MeshConfig(), MESH.fabric, services=MESH.services[:1], domain_suffix="corp.test"))
    assert records("web.shop.svc.corp.test", "A", zone) == ["A 10.96.1.1"]
    assert ask(f"web.shop.{SVC}", "A", zone).rcode == dns.rcode.NXDOMAIN


def test_a_target_that_is_no_name_is_refused_with_its_place() -> None:
    with pytest.raises(InputError, match=r'"a\.\.b" is no DNS name: mesh\.yaml:7'):
        build(Mesh("m", (), MeshConfig(), MESH.fabric, services=(external_name("bad", "a..b"),)))

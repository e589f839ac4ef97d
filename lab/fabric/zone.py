"""What cluster DNS knows: Mesh -> records, and the lookup of a name in them. Pure.

Kubernetes' names follow its DNS specification (kubernetes/dns: docs/specification.md, schema 1.1.0); where it leaves
a choice we do as CoreDNS with kubeadm's Corefile does (coredns/coredns: plugin/kubernetes): TTL 30, ``pods insecure``,
endpoints without a hostname are named by their address with dashes, reverse names only for endpoints that have a hostname.

Beyond the cluster's zone the lab is the whole internet: the names of its ExternalHosts exist, all others do not.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import dns.exception
import dns.name
import dns.rcode
import dns.rdata
import dns.rdataclass
import dns.rdatatype
import dns.reversename
import dns.rrset
from dns.name import Name
from dns.rdata import Rdata
from dns.rdatatype import RdataType
from dns.rrset import RRset

from lab.errors import InputError
from lab.fabric.endpoints import Endpoint, ready_endpoints
from lab.manifests.model import EndpointSlice, Mesh, Pod, Service, Source

TTL = 30  # seconds; kubeadm's Corefile
SCHEMA_VERSION = "1.1.0"  # coredns/coredns: plugin/kubernetes/kubernetes.go
MAX_CHAIN = 10  # CNAMEs followed in one answer (coredns/coredns: plugin/pkg/upstream)
ISTIOD = ("istiod", "istio-system")
KUBE_DNS = ("kube-dns", "kube-system")
# manifests/charts/istio-control/istio-discovery/templates/service.yaml of istio/istio; only what a lab serves.
ISTIOD_PORTS = (("grpc-xds", 15010), ("https-dns", 15012), ("http-monitoring", 15014))

_LAB = Source()  # where names come from that no manifest has

Records = Mapping[Name, Mapping[RdataType, tuple[Rdata, ...]]]


@dataclass(frozen=True, slots=True)
class Lookup:
    """The sections of an answer. We are authoritative for all that we answer."""

    rcode: dns.rcode.Rcode
    answer: tuple[RRset, ...] = ()
    authority: tuple[RRset, ...] = ()
    additional: tuple[RRset, ...] = ()


@dataclass(frozen=True)
class Zone:
    """The records of one mesh.

    ``origins`` are the names that have a start of authority, deepest first; the last is the root.
    ``namespaces`` are those that exist. A name between a record and its origin exists without records.
    """

    suffix: Name
    records: Records
    namespaces: frozenset[str]
    origins: tuple[Name, ...]
    existing: frozenset[Name] = field(repr=False)
    serial: int = 1

    def lookup(self, name: Name, rdtype: RdataType) -> Lookup:
        """The answer to a question of class IN.

        A CNAME is followed as far as the records go: the code is that of the last name (RFC 6604, 3), a loop is
        SERVFAIL. A name that exists without such records is NOERROR with the start of authority (RFC 2308, 2.2), one that does not
        exist NXDOMAIN with it (2.1).
        """
        chain: list[RRset] = []
        seen = {name}
        current = name
        while True:
            data = self._at(current)
            if data is None:
                return Lookup(dns.rcode.NXDOMAIN, tuple(chain), (self._soa(current),))
            if rdtype == RdataType.ANY:
                sets = tuple(_rrset(current, entries) for entries in data.values())
                return Lookup(dns.rcode.NOERROR, sets, () if sets else (self._soa(current),))
            if rdtype in data:
                answer = _rrset(current, data[rdtype])
                return Lookup(dns.rcode.NOERROR, (*chain, answer), (), tuple(self._targets(answer)))
            if RdataType.CNAME not in data:
                return Lookup(dns.rcode.NOERROR, tuple(chain), (self._soa(current),))
            alias = _rrset(current, data[RdataType.CNAME])
            chain.append(alias)
            current = alias[0].target
            if current in seen or len(chain) > MAX_CHAIN:
                return Lookup(dns.rcode.SERVFAIL, tuple(chain))
            seen.add(current)

    def _at(self, name: Name) -> Mapping[RdataType, tuple[Rdata, ...]] | None:
        """The records of a name, empty if it only exists, None if it does not."""
        found = self.records.get(name)
        if found is not None:
            return found
        if name in self.existing:
            return {}
        pod = self._pod(name)
        if pod is not None:
            return pod
        # A wildcard stands below the closest name that exists (RFC 4592, 2.2.1).
        encloser = name
        while encloser != dns.name.root:
            encloser = encloser.parent()
            if encloser in self.existing:
                return self.records.get(Name((b"*", *encloser.labels)))
        return None

    def _pod(self, name: Name) -> Mapping[RdataType, tuple[Rdata, ...]] | None:
        """``10-0-0-1.NAMESPACE.pod.SUFFIX``: whatever address it spells, if the namespace exists."""
        if not name.is_subdomain(self.suffix):
            return None
        labels = [label.decode("latin-1").lower() for label in name.relativize(self.suffix).labels]
        if len(labels) != 3 or labels[2] != "pod" or labels[1] not in self.namespaces:
            return None
        spelled = labels[0]
        dotted = spelled.count("-") == 3 and "--" not in spelled
        try:
            address = ipaddress.ip_address(spelled.replace("-", "." if dotted else ":"))
        except ValueError:
            return None
        return {_family(str(address)): (_address(str(address)),)}

    def _targets(self, answer: RRset) -> Iterator[RRset]:
        """The addresses of an SRV answer's targets."""
        if answer.rdtype != RdataType.SRV:
            return
        for target in dict.fromkeys(record.target for record in answer):
            data = self.records.get(target, {})
            for kind in (RdataType.A, RdataType.AAAA):
                if kind in data:
                    yield _rrset(target, data[kind])

    def _soa(self, name: Name) -> RRset:
        origin = next(origin for origin in self.origins if name.is_subdomain(origin))
        return _rrset(origin, self.records[origin][RdataType.SOA])


def build(mesh: Mesh, serial: int = 1) -> Zone:
    """The zone of a mesh.

    Args:
        mesh: all of it; ServiceEntries are no names of cluster DNS.
        serial: of the starts of authority; a reload gives the next one.

    Raises:
        InputError: a host of the mesh cannot be a DNS name.
    """
    suffix = _name(mesh.domain_suffix)
    records: dict[Name, dict[RdataType, dict[Rdata, None]]] = {}

    def add(name: Name, kind: RdataType, data: Rdata) -> None:
        records.setdefault(name, {}).setdefault(kind, {})[data] = None

    reverse = (_name("in-addr.arpa"), _name("ip6.arpa"))
    origins = (suffix, *reverse, dns.name.root)
    server = _below("ns.dns", suffix)
    for origin in origins:
        for kind, data in _authority(server, _below("hostmaster", suffix), serial):
            add(origin, kind, data)
    resolvers = [a for a in (mesh.fabric.dns, mesh.fabric.dns6) if a]
    for address in resolvers:
        add(server, _family(address), _address(address))
    add(_below("dns-version", suffix), RdataType.TXT, _rdata(RdataType.TXT, f'"{SCHEMA_VERSION}"'))

    pods, slices = _by_namespace(mesh.pods), _by_namespace(mesh.endpoint_slices)
    for service in mesh.services:
        namespace = service.meta.namespace
        ready = ready_endpoints(service, pods.get(namespace, ()), slices.get(namespace, ()))
        for name, kind, data in _service(service, ready, suffix):
            add(name, kind, data)
    taken = {(s.meta.name, s.meta.namespace) for s in mesh.services}
    if ISTIOD not in taken:
        addresses = [a for a in (mesh.fabric.discovery, mesh.fabric.discovery6) if a]
        ports = [(name, "tcp", port) for name, port in ISTIOD_PORTS]
        for name, kind, data in _cluster_ip(_below(f"{ISTIOD[0]}.{ISTIOD[1]}.svc", suffix), addresses, ports):
            add(name, kind, data)
    if KUBE_DNS not in taken:
        ports = [("dns", "udp", 53), ("dns-tcp", "tcp", 53)]
        for name, kind, data in _cluster_ip(_below(f"{KUBE_DNS[0]}.{KUBE_DNS[1]}.svc", suffix), resolvers, ports):
            add(name, kind, data)

    for host in mesh.external_hosts:
        names = [_name(h, host.meta.source) for h in host.hosts]
        for address in host.addresses:
            for name in names:
                add(name, _family(address), _address(address))
            plain = next((n for n in names if not n.is_wild()), None)
            if plain is not None:
                add(dns.reversename.from_address(address), RdataType.PTR, _pointer(plain))

    namespaces = _namespaces(mesh)
    nodes = [_below(f"{ns}.{kind}", suffix) for ns in namespaces for kind in ("svc", "pod")]
    return Zone(
        suffix=suffix,
        records={n: {k: tuple(d) for k, d in kinds.items()} for n, kinds in records.items()},
        namespaces=namespaces,
        origins=origins,
        existing=frozenset(_with_parents([*records, *nodes])),
        serial=serial,
    )


_Object = TypeVar("_Object", Pod, EndpointSlice)


def _by_namespace(objects: Iterable[_Object]) -> dict[str, list[_Object]]:
    found: dict[str, list[_Object]] = {}
    for one in objects:
        found.setdefault(one.meta.namespace, []).append(one)
    return found


def _namespaces(mesh: Mesh) -> frozenset[str]:
    names = {n.meta.name for n in mesh.namespaces}
    names.update(p.meta.namespace for p in mesh.pods)
    names.update(s.meta.namespace for s in mesh.services)
    names.update((ISTIOD[1], KUBE_DNS[1]))
    return frozenset(n.lower() for n in names)


Record = tuple[Name, RdataType, Rdata]


def _service(service: Service, ready: Sequence[Endpoint], suffix: Name) -> Iterator[Record]:
    base = _below(f"{service.meta.name}.{service.meta.namespace}.svc", suffix)
    if service.external_name:
        if not _is_address(service.external_name):  # CoreDNS gives no record for an address in that place
            target = _name(service.external_name, service.meta.source)
            yield base, RdataType.CNAME, _rdata(RdataType.CNAME, target.to_text())
        return
    for endpoint in ready:
        yield _member(endpoint, base), _family(endpoint.ip), _address(endpoint.ip)
    if service.headless:
        yield from _headless(base, ready)
    else:
        ports = [(p.name, p.transport.lower(), p.port) for p in service.ports]
        yield from _cluster_ip(base, service.cluster_ips, ports)
    for endpoint in ready:
        if endpoint.hostname:
            pointer = _pointer(_member(endpoint, base))
            yield dns.reversename.from_address(endpoint.ip), RdataType.PTR, pointer


def _cluster_ip(base: Name, addresses: Iterable[str], ports: Iterable[tuple[str, str, int]]) -> Iterator[Record]:
    """Section 2.3: A or AAAA, SRV of each named port, PTR."""
    for address in addresses:
        yield base, _family(address), _address(address)
        yield dns.reversename.from_address(address), RdataType.PTR, _pointer(base)
    for name, transport, number in ports:
        if name:
            yield _below(f"_{name}._{transport}", base), RdataType.SRV, _srv(100, number, base)


def _headless(base: Name, ready: Sequence[Endpoint]) -> Iterator[Record]:
    """Section 2.4: an address of each ready endpoint, SRV of each named port of each."""
    targets: dict[Name, list[tuple[int, Name]]] = {}
    for endpoint in ready:
        yield base, _family(endpoint.ip), _address(endpoint.ip)
        for port in endpoint.ports:
            if port.name:
                owner = _below(f"_{port.name}._{port.transport.lower()}", base)
                target = (port.port, _member(endpoint, base))
                if target not in targets.setdefault(owner, []):
                    targets[owner].append(target)
    for owner, found in targets.items():
        for number, member in found:
            yield owner, RdataType.SRV, _srv(100 // len(found), number, member)


def _member(endpoint: Endpoint, base: Name) -> Name:
    """The name of one endpoint of a service."""
    label = endpoint.hostname or endpoint.ip.replace(".", "-").replace(":", "-")
    return Name((label.encode(), *base.labels))


def _authority(server: Name, mailbox: Name, serial: int) -> Iterator[tuple[RdataType, Rdata]]:
    # refresh, retry, expire as CoreDNS has them; the last number is the time that "no" may be cached (RFC 2308, 4).
    yield RdataType.SOA, _rdata(RdataType.SOA, f"{server} {mailbox} {serial} 7200 1800 86400 {TTL}")
    yield RdataType.NS, _rdata(RdataType.NS, server.to_text())


def _with_parents(names: Iterable[Name]) -> Iterator[Name]:
    for name in names:
        yield name
        while name != dns.name.root:
            name = name.parent()
            yield name


def _name(text: str, source: Source = _LAB) -> Name:
    try:
        return dns.name.from_text(text.rstrip(".") + ".")
    except dns.exception.DNSException as e:
        raise InputError(f'"{text}" is no DNS name', str(source), str(e)) from e


def _below(text: str, origin: Name) -> Name:
    return dns.name.from_text(text, origin)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text.rstrip("."))
    except ValueError:
        return False
    return True


def _family(address: str) -> RdataType:
    return RdataType.AAAA if ":" in address else RdataType.A


def _address(address: str) -> Rdata:
    return _rdata(_family(address), address)


def _pointer(target: Name) -> Rdata:
    return _rdata(RdataType.PTR, target.to_text())


def _srv(weight: int, port: int, target: Name) -> Rdata:
    return _rdata(RdataType.SRV, f"0 {max(weight, 1)} {port} {target}")


def _rdata(kind: RdataType, text: str) -> Rdata:
    return dns.rdata.from_text(dns.rdataclass.IN, kind, text)


def _rrset(name: Name, data: Iterable[Rdata]) -> RRset:
    return dns.rrset.from_rdata_list(name, TTL, list(data))

"""The lookup table: which names are local, and their addresses. Pure.

Names are kept in wire form, lower-cased: what a query carries is compared without any parsing.

Source: istio/istio: pkg/dns/client/dns.go (BuildAlternateHosts, generateAltHosts, buildDNSAnswers, lookupHost).
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from agent.protos import nds_pb2

KUBERNETES = "Kubernetes"
WILDCARD_LABEL = b"\x01*"
_LENGTHS = [bytes((length,)) for length in range(64)]


def wire_name(name: str) -> bytes | None:
    """The wire form of a host name with or without its final dot, lower-cased; None if it has none (RFC 1035, 2.3.4)."""
    try:
        labels = name.lower().removesuffix(".").encode("ascii").split(b".")
    except UnicodeEncodeError:
        return None
    if not all(labels) or max(map(len, labels)) > 63:
        return None
    wire = b"".join([_LENGTHS[len(label)] + label for label in labels]) + b"\0"
    return wire if len(wire) <= 255 else None


@dataclass(frozen=True)
class ProxyNames:
    """What the proxy's own place in the cluster adds to names.

    Args:
        namespace: of the proxy.
        domain: of the proxy, e.g. ``ns1.svc.cluster.local``; a leading namespace label is dropped.
        search: search domains of resolv.conf; only the first counts.
    """

    namespace: str
    domain: str
    search: Sequence[str] = ()

    @functools.cached_property
    def cluster_domain(self) -> str:
        """The domain without the namespace."""
        labels = self.domain.split(".")
        return ".".join(labels[1:] if labels[0] == self.namespace else labels)


@dataclass(frozen=True)
class Match:
    """A name that is local. `target` is the CNAME's target if the name is an expansion, else None."""

    owner: bytes
    target: bytes | None
    ipv4: tuple[bytes, ...]
    ipv6: tuple[bytes, ...]


@dataclass
class LookupTable:
    """All local names in wire form."""

    hosts: set[bytes] = field(default_factory=set)
    ipv4: dict[bytes, tuple[bytes, ...]] = field(default_factory=dict)
    ipv6: dict[bytes, tuple[bytes, ...]] = field(default_factory=dict)
    cname: dict[bytes, bytes] = field(default_factory=dict)

    def lookup(self, question: bytes) -> Match | None:
        """The match for a lower-cased wire name; the longest wildcard wins over shorter ones, an exact name over all."""
        name = question
        if name not in self.hosts:
            wildcard = self._wildcard(question)
            if wildcard is None:
                return None
            name = wildcard
        target = self.cname.get(name)
        if target is not None:
            return Match(target, target, self.ipv4.get(target, ()), self.ipv6.get(target, ()))
        return Match(question, None, self.ipv4.get(name, ()), self.ipv6.get(name, ()))

    def _wildcard(self, question: bytes) -> bytes | None:
        rest = question
        while rest[0]:
            rest = rest[rest[0] + 1 :]
            candidate = WILDCARD_LABEL + rest
            if candidate in self.hosts:
                return candidate
        return None


def alternate_hosts(host: str, info: nds_pb2.NameTable.NameInfo, proxy: ProxyNames) -> list[str]:
    """Every name, with its final dot, that a table entry answers to."""
    if info.registry != KUBERNETES:
        return [host if host.endswith(".") else f"{host}."]
    if host.endswith("."):
        # Istio stores "host.." here, which no query can match.
        return []
    names = [f"{host}."]
    domain = proxy.cluster_domain
    if not domain or not host.endswith(domain):
        return names
    names.append(f"{info.shortname}.{info.namespace}.")
    if proxy.namespace == info.namespace:
        names.append(f"{info.shortname}.")
    names.append(f"{info.shortname}.{info.namespace}.{domain.split('.')[0]}.")
    names += [f"{alternate}." for alternate in info.alt_hosts]
    return list(dict.fromkeys(names))


def split_addresses(texts: Sequence[str]) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """Packed IPv4 and IPv6 addresses; text that is no address is skipped."""
    ipv4: list[bytes] = []
    ipv6: list[bytes] = []
    for text in texts:
        family, found = (socket.AF_INET6, ipv6) if ":" in text else (socket.AF_INET, ipv4)
        try:
            found.append(socket.inet_pton(family, text))
        except (OSError, ValueError):
            continue
    return tuple(ipv4), tuple(ipv6)


def entries(
    table: Mapping[str, nds_pb2.NameTable.NameInfo], proxy: ProxyNames
) -> Iterator[tuple[str, list[str], tuple[bytes, ...], tuple[bytes, ...]]]:
    """Host, generated names, IPv4 and IPv6 addresses of every usable entry, in the order of hosts."""
    for host in sorted(table):
        ipv4, ipv6 = split_addresses(table[host].ips)
        if ipv4 or ipv6:
            yield host, alternate_hosts(host, table[host], proxy), ipv4, ipv6


def build_in_steps(table: nds_pb2.NameTable, proxy: ProxyNames, result: LookupTable, size: int) -> Iterator[None]:
    """Fills `result`, and yields after every `size` entries: ten thousand services take a while."""
    suffix = wire_name(proxy.search[0]) if proxy.search else None
    for number, (_, names, ipv4, ipv6) in enumerate(entries(table.table, proxy), 1):
        wires = [wire for name in names if (wire := wire_name(name)) is not None]
        for wire in wires:
            result.hosts.add(wire)
            if ipv4:
                result.ipv4[wire] = ipv4
            if ipv6:
                result.ipv6[wire] = ipv6
            if suffix is None or (wire.endswith(suffix) and _on_label(wire, suffix)):
                continue
            expanded = wire[:-1] + suffix
            if expanded not in wires and len(expanded) <= 255:
                result.cname[expanded] = wire
                result.hosts.add(expanded)
        if number % size == 0:
            yield


def build_table(table: nds_pb2.NameTable, proxy: ProxyNames) -> LookupTable:
    """The lookup table of one proxy."""
    result = LookupTable()
    for _ in build_in_steps(table, proxy, result, len(table.table) + 1):
        pass
    return result


def _on_label(wire: bytes, suffix: bytes) -> bool:
    position = 0
    while position < len(wire) - len(suffix):
        position += wire[position] + 1
    return position == len(wire) - len(suffix)

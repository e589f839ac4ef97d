"""Addresses: those that manifests pin, and those that the lab chooses. Deterministic, and no two alike.

========================  ==========================  ===========================
what                      IPv4                        IPv6
========================  ==========================  ===========================
pods of namespace N       10.244.N.M                  fd00:10:244:N::M
services of namespace N   10.96.N.M                   fd00:10:96:N::M
external hosts            203.0.113.M                 2001:db8:113::M
cluster DNS, discovery    10.96.0.10 and upward       fd00:10:96::a and upward
ServiceEntry hosts        240.240.0.1 and upward      2001:2::1 and upward
========================  ==========================  ===========================

IPv6 is given only where a manifest asks for dual stack, and to ServiceEntry hosts (a proxy uses what its families allow).
N counts the namespaces that hold pods or services, M the objects in it, both from 1 in the order of the manifests. Automatic addresses of
ServiceEntries: istio/istio: pilot/pkg/controllers/ipallocate.
"""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lab.errors import InputError
from lab.manifests.model import ExternalHost, Fabric, Mesh, Namespace, Pod, Service, ServiceEntry, Source
from lab.manifests.problems import Problems

GATEWAY = "169.254.1.1"
_SHARED = 200  # blocks from here on belong to no namespace


@dataclass(frozen=True, slots=True)
class Claim:
    """An address that a manifest pins."""

    address: str
    owner: str
    source: Source


@dataclass(frozen=True, slots=True)
class ServiceDraft:
    """A Service without its addresses, and how many of which families it wants."""

    service: Service
    families: tuple[int, ...]  # 4 and 6, in order; empty for headless and ExternalName


class Pool:
    """The addresses that are in use, and what is chosen from the rest.

    Args:
        held: addresses that owners had before, by owner and IP version: kept for them, and given to nobody else.
    """

    def __init__(self, held: Mapping[tuple[str, int], str] | None = None) -> None:
        self._held = dict(held or {})
        self._kept_for_others = set(self._held.values())
        self._owner: dict[str, Claim] = {GATEWAY: Claim(GATEWAY, "the lab's own gateway", Source())}
        self._candidates: dict[tuple[str, int], Iterator[str]] = {}

    def claim(self, claims: Iterable[Claim], problems: Problems) -> None:
        """Takes pinned addresses; one that is taken, or that no machine can have, is an error."""
        for claim in claims:
            address = ipaddress.ip_address(claim.address)
            other = self._owner.get(claim.address)
            if (
                address.is_loopback
                or address.is_multicast
                or address.is_unspecified
                or address == ipaddress.ip_address("255.255.255.255")
            ):
                problems.error(
                    claim.source,
                    f"unusable address {claim.address}",
                    f"{claim.owner} pins it, but it is loopback, multicast or unspecified",
                )
            elif other is not None:
                where = f" ({other.source})" if other.source.line else ""
                problems.error(
                    claim.source,
                    f"address {claim.address} used twice",
                    f"{claim.owner} and {other.owner}{where} have it",
                    "Change one of them.",
                )
            else:
                self._owner[claim.address] = claim

    def reserve(self, addresses: Iterable[str], owner: str) -> None:
        """Keeps addresses that manifests speak of from being chosen; what is not one address (a CIDR, a name) is left out."""
        for address in addresses:
            if is_address(address):
                self._owner.setdefault(address, Claim(address, owner, Source()))

    def choose(self, owner: str, networks: tuple[str, ...], start: int = 1) -> str:
        """The first free address of ``networks``, from host number ``start`` of each.

        Raises:
            InputError: all of them are taken.
        """
        key = (networks[0], start)
        had = self._held.get((owner, 6 if ":" in networks[0] else 4))
        if had is not None and had not in self._owner:
            self._owner[had] = Claim(had, owner, Source())
            return had
        for address in self._candidates.setdefault(key, _hosts(networks, start)):
            if address not in self._owner and address not in self._kept_for_others:
                self._owner[address] = Claim(address, owner, Source())
                return address
        raise InputError(
            f"no address left for {owner}", networks[0], "the lab's range is used up", "Pin addresses of your own."
        )


def _hosts(networks: Sequence[str], start: int = 1) -> Iterator[str]:
    """Addresses of networks in order, from host number ``start``; the last address of each (IPv4's broadcast) is left out."""
    for text in networks:
        network = ipaddress.ip_network(text)
        for number in range(start, min(network.num_addresses, 1 << 16) - 1):
            yield str(network[number])


def is_address(text: str) -> bool:
    """Whether a text is one IP address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


@functools.cache
def _blocks(four: str, six: str, family: int, block: int) -> tuple[str, ...]:
    """The network of a namespace; when it is full, those that no namespace owns follow."""
    numbers = (block, *range(_SHARED, 256))
    return tuple(four.format(n) for n in numbers) if family == 4 else tuple(six.format(f"{n:x}") for n in numbers)


def assign(
    namespaces: Sequence[Namespace],
    pods: Sequence[Pod],
    services: Sequence[ServiceDraft],
    external_hosts: Sequence[ExternalHost],
    service_entries: Sequence[ServiceEntry],
    claims: Sequence[Claim],
    problems: Problems,
    dual_stack: bool = False,
    previous: Mesh | None = None,
) -> tuple[list[Pod], list[Service], list[ExternalHost], list[ServiceEntry], Fabric]:
    """Gives every object its addresses: pinned ones first, then those it had before, then chosen ones in the order of the manifests."""
    pool = Pool(_held(previous) if previous is not None else None)
    pool.claim(claims, problems)
    for entry in service_entries:
        owner = f"ServiceEntry {entry.meta.key}"
        pool.reserve(entry.addresses, owner)
        pool.reserve((endpoint.address for endpoint in entry.endpoints), owner)
        pool.reserve((address for found in entry.auto_addresses.values() for address in found), owner)
    lived_in = {thing.meta.namespace for thing in pods} | {draft.service.meta.namespace for draft in services}
    names = [namespace.meta.name for namespace in namespaces if namespace.meta.name in lived_in]
    number = {name: index % (_SHARED - 1) + 1 for index, name in enumerate(names)}
    families = (4, 6) if dual_stack else (4,)

    new_pods = []
    for pod in pods:
        block, have = number[pod.meta.namespace], {ipaddress.ip_address(ip).version for ip in pod.ips}
        chosen = (
            ()
            if pod.ips and not dual_stack
            else tuple(
                pool.choose(f"Pod {pod.meta.key}", _blocks("10.244.{}.0/24", "fd00:10:244:{}::/112", family, block))
                for family in families
                if family not in have
            )
        )
        new_pods.append(replace(pod, ips=pod.ips + chosen))
    new_services = []
    for draft in services:
        service, block = draft.service, number[draft.service.meta.namespace]
        pinned = {ipaddress.ip_address(ip).version for ip in service.cluster_ips}
        chosen = tuple(
            pool.choose(f"Service {service.meta.key}", _blocks("10.96.{}.0/24", "fd00:10:96:{}::/112", family, block))
            for family in draft.families
            if family not in pinned
        )
        new_services.append(replace(service, cluster_ips=service.cluster_ips + chosen))
    new_hosts = []
    for host in external_hosts:
        have_families = {ipaddress.ip_address(ip).version for ip in host.addresses}
        extra = []
        if 4 not in have_families and not host.addresses:
            extra.append(
                pool.choose(f"ExternalHost {host.meta.name}", ("203.0.113.0/24", "198.51.100.0/24", "192.0.2.0/24"))
            )
        if dual_stack and 6 not in have_families:
            extra.append(pool.choose(f"ExternalHost {host.meta.name}", ("2001:db8:113::/112",)))
        new_hosts.append(replace(host, addresses=host.addresses + tuple(extra)))
    dns = pool.choose("cluster DNS", ("10.96.0.0/24",), 10)
    discovery = pool.choose("discovery", ("10.96.0.0/24",), 11)
    dns6 = discovery6 = ""
    if dual_stack:
        dns6 = pool.choose("cluster DNS", ("fd00:10:96::/112",), 10)
        discovery6 = pool.choose("discovery", ("fd00:10:96::/112",), 11)
    automatic = {
        entry.meta.key: _automatic(entry, pool)
        for entry in sorted(service_entries, key=lambda entry: (entry.meta.created, entry.meta.order))
    }
    new_entries = [replace(entry, auto_addresses=automatic[entry.meta.key]) for entry in service_entries]
    return new_pods, new_services, new_hosts, new_entries, Fabric(dns, discovery, GATEWAY, dns6, discovery6)


def _held(previous: Mesh) -> dict[tuple[str, int], str]:
    """The addresses of an earlier mesh, by owner (as ``assign`` calls it) and IP version."""
    owned = [(f"Pod {pod.meta.key}", pod.ips) for pod in previous.pods]
    owned += [(f"Service {service.meta.key}", service.cluster_ips) for service in previous.services]
    owned += [(f"ExternalHost {host.meta.name}", host.addresses) for host in previous.external_hosts]
    owned += [
        (f"ServiceEntry {entry.meta.key} {host}", addresses)
        for entry in previous.service_entries
        for host, addresses in entry.auto_addresses.items()
    ]
    fabric = previous.fabric
    owned += [("cluster DNS", (fabric.dns, fabric.dns6)), ("discovery", (fabric.discovery, fabric.discovery6))]
    return {(owner, 6 if ":" in address else 4): address for owner, found in owned for address in found if address}


def eligible(entry: ServiceEntry, host: str) -> bool:
    """Whether a ServiceEntry's host gets an automatic address (istio/istio: pilot/pkg/networking/serviceentry: ShouldV2AutoAllocateIP)."""
    if (
        entry.addresses
        or entry.resolution == "NONE"
        or entry.meta.labels.get("networking.istio.io/enable-autoallocate-ip") == "false"
    ):
        return False
    return not host.startswith("*") or entry.resolution == "DYNAMIC_DNS"


def _automatic(entry: ServiceEntry, pool: Pool) -> dict[str, tuple[str, ...]]:
    result = {}
    for host in dict.fromkeys(entry.hosts):
        if not eligible(entry, host):
            continue
        have = entry.auto_addresses.get(host, ())
        if not have:
            owner = f"ServiceEntry {entry.meta.key} {host}"
            have = (pool.choose(owner, ("240.240.0.0/16",)), pool.choose(owner, ("2001:2::/112",)))
        result[host] = have
    return result


def one_per_family(addresses: Sequence[str], owner: str, source: Source, problems: Problems) -> None:
    """Adds an error if two of the addresses are of one family."""
    versions = [ipaddress.ip_address(address).version for address in addresses]
    if len(versions) != len(set(versions)):
        problems.error(source, "two addresses of one family", f"{owner}: at most one IPv4 and one IPv6 address")

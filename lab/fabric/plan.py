"""What the fabric of a mesh is made of. Pure: a mesh in, a plan out; `lab.fabric.build` makes it.

::

    pod ns      eth0 10.244.1.2/32, default via 169.254.1.1
                 |  veth, one per pod
    node ns     NAME-HASH, route 10.244.1.2 -> it; services, cluster DNS, discovery
                 |  veth "outside" - "node"
    outside ns  NAME-HASH, route 203.0.113.1 -> it
                 |  veth, one per external host
    ext-... ns  eth0 203.0.113.1/32, default via 169.254.1.2

Every address is a /32 or /128 and every hop is routed: no bridge, so what crosses the node crosses its forwarding.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from lab.errors import InputError
from lab.fabric import links, paths, services
from lab.manifests.model import Mesh

ROUTER_MAC = "ee:ee:ee:ee:ee:ee"
"""Of every router's end of every link: they are point-to-point, so nobody sees two of them."""

UPLINKS: Mapping[str, str] = {paths.NODE: paths.OUTSIDE, paths.OUTSIDE: paths.NODE}
"""By router, its interface towards the other; it is called as the other is."""

_NODES6 = "fd5c:1ab::"  # unique local (RFC 4193); a router needs an address that others may answer to


@dataclass(frozen=True, slots=True)
class Place:
    """A pod or an external host: one namespace with one link, ``eth0``, to its router.

    ``interface`` is the router's end of that link.
    """

    name: str
    kind: Literal["pod", "external"]
    addresses: tuple[str, ...]
    router: str
    interface: str
    mac: str


@dataclass(frozen=True, slots=True)
class Router:
    """``addresses`` lie on its lo, its own (the gateway of what hangs on it) first; ``link_local`` on each link."""

    name: str
    addresses: tuple[str, ...]
    own4: str
    own6: str
    link_local: str

    @property
    def ipv6(self) -> bool:
        return self.own6 in self.addresses

    @property
    def sources(self) -> Mapping[int, str]:
        """Its own address by IP version (4, and 6 if the mesh has any)."""
        return {4: self.own4, 6: self.own6} if self.ipv6 else {4: self.own4}


@dataclass(frozen=True, slots=True)
class Plan:
    """The fabric of one mesh. ``beyond`` are all addresses that the node's way outside leads to."""

    node: Router
    outside: Router
    places: tuple[Place, ...]
    ipv6: bool
    services: tuple[services.VirtualPort, ...]
    links: links.Effects
    beyond: tuple[str, ...]

    def place(self, name: str) -> Place:
        """The pod or external host called so (KeyError: there is none)."""
        for place in self.places:
            if place.name == name:
                return place
        raise KeyError(name)

    def router(self, name: str) -> Router:
        return {r.name: r for r in (self.node, self.outside)}[name]

    @property
    def namespaces(self) -> tuple[str, ...]:
        """All places that have a network namespace, routers first."""
        return (paths.NODE, paths.OUTSIDE, *(p.name for p in self.places))


@dataclass(frozen=True, slots=True)
class Changes:
    """What lies between two plans: places to take away (as the old plan has them), places to make."""

    removed: tuple[str, ...]
    added: tuple[str, ...]


def changes(old: Plan, new: Plan) -> Changes:
    """Places that differ; one whose address changed is both removed and added."""
    before, after = set(old.places), set(new.places)
    return Changes(
        removed=tuple(p.name for p in old.places if p not in after),
        added=tuple(p.name for p in new.places if p not in before),
    )


def plan(mesh: Mesh) -> Plan:
    """The fabric of ``mesh``.

    Raises:
        InputError: a Link cannot be, or two places cannot be told apart.
    """
    pods = [_place(p.name, "pod", p.ips, paths.NODE) for p in mesh.pods]
    hosts = [
        _place(paths.external_place(h.meta.name), "external", h.addresses, paths.OUTSIDE) for h in mesh.external_hosts
    ]
    places = (*pods, *hosts)
    _check(places)
    node, outside = routers(mesh)
    return Plan(
        node=node,
        outside=outside,
        places=places,
        ipv6=node.ipv6,
        services=services.virtual_ports(mesh),
        links=links.effects(
            mesh.links, places, {h.meta.name: paths.external_place(h.meta.name) for h in mesh.external_hosts}, UPLINKS
        ),
        beyond=beyond(mesh, outside),
    )


def routers(mesh: Mesh) -> tuple[Router, Router]:
    """The node and the outside."""
    fabric = mesh.fabric
    taken = _addresses(mesh)
    ipv6 = any(":" in a for a in taken)
    second = _next_free(taken, fabric.gateway)
    first6 = _next_free(taken, _NODES6)
    second6 = _next_free(taken, first6)
    serving = (fabric.dns, fabric.discovery, fabric.dns6, fabric.discovery6)
    own = (fabric.gateway, first6 if ipv6 else "", *serving)
    return (
        Router(paths.NODE, tuple(a for a in own if a), fabric.gateway, first6, "fe80::1"),
        Router(paths.OUTSIDE, (second, second6) if ipv6 else (second,), second, second6, "fe80::2"),
    )


def beyond(mesh: Mesh, outside: Router) -> tuple[str, ...]:
    """All addresses that the node's way outside leads to."""
    return (*outside.addresses, *(a for h in mesh.external_hosts for a in h.addresses))


def node_interface(place: str) -> str:
    """The name of the router's end of the link of ``place``; the same in every run, at most 15 characters.

    ``frontend.frontend`` gives ``fronte-1a2b3c4d``: for people the beginning, for uniqueness a digest.
    """
    readable = "".join(c for c in place.removeprefix("ext-") if c.isascii() and c.isalnum())[:6]
    return f"{readable or 'x'}-{hashlib.sha256(place.encode()).hexdigest()[:8]}"


def _place(name: str, kind: Literal["pod", "external"], addresses: Iterable[str], router: str) -> Place:
    given = tuple(addresses)
    return Place(name, kind, given, router, node_interface(name), _mac(given[0] if given else name))


def _mac(address: str) -> str:
    """A locally administered address that shows an IPv4 address in its last four bytes (as CNI's bridge plugin does)."""
    try:
        tail = ipaddress.IPv4Address(address).packed
    except ValueError:
        tail = hashlib.sha256(address.encode()).digest()[:4]
    return ":".join(f"{b:02x}" for b in b"\x0a\x58" + tail)


def _check(places: Iterable[Place]) -> None:
    """Places must differ by name, by pin and by interface, and each must have an address."""
    seen: dict[str, str] = {paths.NODE: paths.NODE, paths.OUTSIDE: paths.OUTSIDE}
    for place in places:
        if not place.addresses:
            raise InputError(f'"{place.name}" cannot be reached', why="it has no address", next_step="Give it one")
        for name in {place.name, paths.file_name(place.name), place.interface}:
            if name in seen:
                why = f'"{seen[name]}" would be called so too'
                raise InputError(f'"{place.name}" cannot be a place', name, why, "Rename one of them")
            seen[name] = place.name


def _addresses(mesh: Mesh) -> set[str]:
    """Every address that something in the mesh has or is reached by."""
    fabric = mesh.fabric
    found = {a for p in mesh.pods for a in p.ips}
    found |= {a for h in mesh.external_hosts for a in h.addresses}
    found |= {a for s in mesh.services for a in s.cluster_ips}
    found |= {fabric.dns, fabric.discovery, fabric.gateway, fabric.dns6, fabric.discovery6}
    return found - {""}


def _next_free(taken: set[str], after: str) -> str:
    used = {ipaddress.ip_address(a) for a in taken}
    candidate = ipaddress.ip_address(after) + 1
    while candidate in used:
        candidate += 1
    return str(candidate)

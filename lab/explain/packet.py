"""A packet on paper, and what is known of the machine that it is in. Pure data.

Addresses are compared as numbers: `number` turns a text into one.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal, NamedTuple

Family = Literal["ipv4", "ipv6"]

NOTHING: Mapping[str, Any] = {}
"""No entries: the default of mappings that nobody changes. (These types are named tuples, as in `lab.explain.conditions`.)"""

FULL = 0xFFFFFFFF
"""A mask over all bits of a mark."""

PROTOCOLS: Mapping[str, int] = {
    "icmp": 1, "igmp": 2, "tcp": 6, "udp": 17, "dccp": 33, "gre": 47, "esp": 50, "ah": 51, "ipv6-icmp": 58,
    "sctp": 132, "udplite": 136,
}  # fmt: skip
"""Names of transport protocols as iptables-save and nft write them (IANA: protocol-numbers)."""

WITH_PORTS = frozenset({6, 17, 33, 132, 136})


@lru_cache(maxsize=65536)
def number(address: str) -> int:
    """An address as a number. Raises ValueError."""
    return int(ipaddress.ip_address(address))


def family_of(address: str) -> Family:
    return "ipv6" if ":" in address else "ipv4"


def loopback(address: str) -> bool:
    return address == "::1" or (":" not in address and address.startswith("127."))


class Packet(NamedTuple):
    """One packet.

    ``state`` is what connection tracking will say of it (NEW, ESTABLISHED, RELATED, INVALID); until that has happened
    (``tracked``) rules see no connection, and never where a rule took it out (``untracked``). ``uid`` and ``gid`` are None where no socket of this machine sent it.
    ``iif`` and ``oif`` are empty where a hook has none. ``zone`` is the conntrack zone that a rule chose, 0 without one.
    ``tproxy`` is the port that a TPROXY rule assigned. ``socket`` answers the socket match: None is unknown. ``rerouted`` is the
    interface that a rule of the output hook made it leave by (rules of that hook still see ``oif``).
    """

    proto: int
    src: str
    dst: str
    sport: int = 0
    dport: int = 0
    iif: str = ""
    oif: str = ""
    uid: int | None = None
    gid: int | None = None
    mark: int = 0
    ctmark: int = 0
    state: str = "NEW"
    reply: bool = False
    flags: frozenset[str] = frozenset({"SYN"})
    icmp_type: int = 8
    icmp_code: int = 0
    socket: bool | None = None
    tracked: bool = False
    untracked: bool = False
    zone: int | None = None
    snat_done: bool = False
    dnat_done: bool = False
    snat: bool = False
    dnat: bool = False
    tproxy: int | None = None
    original: tuple[str, int, str, int] | None = None
    rerouted: str = ""

    @property
    def family(self) -> Family:
        return "ipv6" if ":" in self.dst else "ipv4"

    @property
    def conntrack(self) -> str:
        """The state that a rule sees at this point."""
        if self.untracked:
            return "UNTRACKED"
        if self.tracked:
            return self.state
        return "NEW" if self.zone is not None else "INVALID"

    @property
    def has_connection(self) -> bool:
        """Whether there is a connection that a rule could look at."""
        if not self.tracked:
            return self.zone is not None
        return not self.untracked and self.state != "INVALID"

    @property
    def connected(self) -> bool:
        """Whether that is a real connection, and not only the zone of one to come."""
        return self.tracked and self.has_connection

    def shown(self) -> str:
        name = protocol_name(self.proto, self.family)
        ends = (self.src, self.dst)
        if self.proto in WITH_PORTS:
            ends = (endpoint(self.src, self.sport), endpoint(self.dst, self.dport))
        return f"{name} {ends[0]} -> {ends[1]}"


def endpoint(address: str, port: int) -> str:
    """``ADDRESS:PORT``; without a port (one that the kernel will choose) the address alone."""
    if port == 0:
        return address
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def protocol_name(number: int, family: Family = "ipv4") -> str:
    if number == 58 and family == "ipv6":
        return "icmpv6"
    return next((name for name, n in PROTOCOLS.items() if n == number), str(number))


class Host(NamedTuple):
    """What is known of a network namespace, for routing and for matches that ask for it.

    ``addresses`` by interface, the primary one first, without prefix length; None if unknown (a dump alone).
    ``routes`` are (network, interface), a longer network wins; ``ways`` are routes to one address each, which win over these;
    what no route covers leaves by ``uplink``.
    ``sets`` are the members of ipsets and nft sets known by name: addresses, networks or ports as text.
    ``listeners`` are (protocol number, port) of sockets that a TPROXY rule can find; None: whatever is looked for.
    ``local_marks`` are packet marks that policy routing delivers here (``ip rule fwmark`` to a table with ``local``).
    """

    addresses: Mapping[str, tuple[str, ...]] | None = None
    routes: tuple[tuple[str, str], ...] = ()
    uplink: str = "eth0"
    forwarding: bool = False
    sets: Mapping[str, frozenset[str]] = NOTHING
    listeners: frozenset[tuple[int, int]] | None = None
    local_marks: frozenset[int] = frozenset()
    broadcasts: frozenset[str] = frozenset()
    ways: Mapping[str, str] = NOTHING

    def is_local(self, address: str) -> bool | None:
        """Whether packets to an address are delivered here; None if nothing is known of the addresses."""
        if loopback(address):
            return True
        if self.addresses is None:
            return None
        return any(address in own for own in self.addresses.values())

    def route(self, address: str, mark: int = 0) -> str:
        """The interface by which a packet with a mark to an address leaves."""
        if self.is_local(address) or mark in self.local_marks:
            return "lo"
        if address in self.ways:
            return self.ways[address]
        best, length = self.uplink, -1
        for network, interface in self.routes:
            found = _network(network)
            if found.version != (6 if ":" in address else 4) or found.prefixlen <= length:
                continue
            if number(address) & int(found.netmask) == int(found.network_address):
                best, length = interface, found.prefixlen
        return best

    def primary(self, interface: str, family: Family) -> str | None:
        """The first address of an interface; None if it has none, or nothing is known."""
        for address in (self.addresses or {}).get(interface, ()):
            if family_of(address) == family:
                return address
        if interface == "lo":
            return "127.0.0.1" if family == "ipv4" else "::1"
        return None


@lru_cache(maxsize=4096)
def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    return ipaddress.ip_network(text, strict=False)

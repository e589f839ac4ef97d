"""What a rule asks of a packet. Each condition answers yes, no, or a doubt that it names.

Sources of the rules: Linux net/netfilter/xt_*.c for iptables, net/netfilter/nft_*.c for nftables; where both differ
(a packet without socket or connection) ``strict`` is nftables, whose expressions then end the rule, negated or not.

These are named tuples: a dataclass takes six times as long to define, and each start of the program pays for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, Protocol

from lab.explain.packet import WITH_PORTS, Family, Host, Packet, number, protocol_name


class Doubt(NamedTuple):
    """A question without an answer on paper. ``chance`` is the probability of yes, where it has one."""

    reason: str
    chance: float | None = None


Answer = bool | Doubt


class Condition(Protocol):
    """``text`` is the condition as its owner writes it."""

    @property
    def text(self) -> str: ...

    def check(self, packet: Packet, host: Host) -> Answer: ...

    def found(self, packet: Packet, host: Host) -> str:
        """What the packet has where the rule wants something else, e.g. ``uid 1000``."""
        ...


Side = Literal["src", "dst"]
Range = tuple[int, int]


class Masked(NamedTuple):
    """The address, under any of the masks, is (or is not) the value. ``any_of`` holds (value, mask)."""

    text: str
    side: Side
    family: Family
    any_of: tuple[tuple[int, int], ...]
    negate: bool = False

    def check(self, packet: Packet, _host: Host) -> Answer:
        if packet.family != self.family:
            return False
        address = number(packet.src if self.side == "src" else packet.dst)
        return any(address & mask == value for value, mask in self.any_of) != self.negate

    def found(self, packet: Packet, _host: Host) -> str:
        return _address(packet, self.side)


class Between(NamedTuple):
    """The address is (or is not) in one of the ranges, ends included."""

    text: str
    side: Side
    family: Family
    ranges: tuple[Range, ...]
    negate: bool = False

    def check(self, packet: Packet, _host: Host) -> Answer:
        if packet.family != self.family:
            return False
        address = number(packet.src if self.side == "src" else packet.dst)
        return any(low <= address <= high for low, high in self.ranges) != self.negate

    def found(self, packet: Packet, _host: Host) -> str:
        return _address(packet, self.side)


def _address(packet: Packet, side: Side) -> str:
    return f"source {packet.src}" if side == "src" else f"destination {packet.dst}"


class Interface(NamedTuple):
    """In by, or out by, an interface. A trailing ``+`` (iptables) or ``*`` (nft) stands for any rest."""

    text: str
    direction: Literal["in", "out"]
    names: tuple[str, ...]
    negate: bool = False

    def check(self, packet: Packet, _host: Host) -> Answer:
        own = packet.iif if self.direction == "in" else packet.oif
        return any(own.startswith(n[:-1]) if n[-1:] in ("+", "*") else own == n for n in self.names) != self.negate

    def found(self, packet: Packet, _host: Host) -> str:
        own = packet.iif if self.direction == "in" else packet.oif
        return f"{self.direction} interface {own}" if own else f"no {self.direction} interface"


class Transport(NamedTuple):
    """The transport protocol is (or is not) one of these."""

    text: str
    numbers: frozenset[int]
    negate: bool = False

    def check(self, packet: Packet, _host: Host) -> Answer:
        return (packet.proto in self.numbers) != self.negate

    def found(self, packet: Packet, _host: Host) -> str:
        return f"protocol {protocol_name(packet.proto, packet.family)}"


class IPVersion(NamedTuple):
    """The packet is IPv4, or IPv6."""

    text: str
    family: Family
    negate: bool = False

    def check(self, packet: Packet, _host: Host) -> Answer:
        return (packet.family == self.family) != self.negate

    def found(self, packet: Packet, _host: Host) -> str:
        return "IPv6" if packet.family == "ipv6" else "IPv4"


class Ports(NamedTuple):
    """A port is (or is not) in one of the ranges. ``either``: the source's or the destination's; without ``protos`` any
    protocol that has ports will do."""

    text: str
    side: Literal["src", "dst", "either"]
    ranges: tuple[Range, ...]
    negate: bool = False
    protos: frozenset[int] = frozenset()

    def check(self, packet: Packet, _host: Host) -> Answer:
        if packet.proto not in (self.protos or WITH_PORTS):
            return False
        own = {"src": (packet.sport,), "dst": (packet.dport,)}.get(self.side, (packet.sport, packet.dport))
        return any(low <= port <= high for port in own for low, high in self.ranges) != self.negate

    def found(self, packet: Packet, _host: Host) -> str:
        if packet.proto not in (self.protos or WITH_PORTS):
            return f"protocol {protocol_name(packet.proto, packet.family)}"
        if self.side == "either":
            return f"ports {packet.sport} and {packet.dport}"
        return f"source port {packet.sport}" if self.side == "src" else f"port {packet.dport}"


class Owner(NamedTuple):
    """The socket that sent the packet is (or is not) of a user or group in one of the ranges.

    Without a socket iptables' negated match holds and its plain one does not; nftables' ends the rule.
    """

    text: str
    kind: Literal["uid", "gid"]
    ranges: tuple[Range, ...]
    negate: bool = False
    strict: bool = False

    def check(self, packet: Packet, _host: Host) -> Answer:
        own = packet.uid if self.kind == "uid" else packet.gid
        if own is None:
            return False if self.strict else self.negate
        return any(low <= own <= high for low, high in self.ranges) != self.negate

    def found(self, packet: Packet, _host: Host) -> str:
        own = packet.uid if self.kind == "uid" else packet.gid
        return "no local sender" if own is None else f"{self.kind} {own}"


class HasSocket(NamedTuple):
    """``--socket-exists`` of the owner match."""

    text: str
    negate: bool = False

    def check(self, packet: Packet, _host: Host) -> Answer:
        return (packet.uid is not None) != self.negate

    def found(self, packet: Packet, _host: Host) -> str:
        return "no local sender" if packet.uid is None else f"uid {packet.uid}"


class Mark(NamedTuple):
    """The packet's mark, or the connection's, under a mask is (or is not) a value."""

    text: str
    of: Literal["packet", "connection"]
    value: int
    mask: int
    negate: bool = False
    strict: bool = False

    def check(self, packet: Packet, _host: Host) -> Answer:
        if self.of == "connection":
            if not (packet.connected if self.strict else packet.has_connection):
                return False
            return (packet.ctmark & self.mask == self.value) != self.negate
        return (packet.mark & self.mask == self.value) != self.negate

    def found(self, packet: Packet, _host: Host) -> str:
        if self.of == "packet":
            return f"mark {packet.mark:#x}"
        return f"connection mark {packet.ctmark:#x}" if packet.has_connection else "no connection"


class MarkIn(NamedTuple):
    """nftables: the mark is (or is not) in one of the ranges."""

    text: str
    of: Literal["packet", "connection"]
    ranges: tuple[Range, ...]
    negate: bool = False

    def check(self, packet: Packet, _host: Host) -> Answer:
        if self.of == "connection" and not packet.connected:
            return False
        own = packet.mark if self.of == "packet" else packet.ctmark
        return any(low <= own <= high for low, high in self.ranges) != self.negate

    def found(self, packet: Packet, _host: Host) -> str:
        own = packet.mark if self.of == "packet" else packet.ctmark
        return f"{'mark' if self.of == 'packet' else 'connection mark'} {own:#x}"


class State(NamedTuple):
    """Connection tracking says one (or none) of these: its state, or SNAT or DNAT for what was translated."""

    text: str
    states: frozenset[str]
    negate: bool = False

    def check(self, packet: Packet, _host: Host) -> Answer:
        own = {packet.conntrack}
        if packet.has_connection and packet.tracked:
            own |= {"SNAT"} if packet.snat else set()
            own |= {"DNAT"} if packet.dnat else set()
        return bool(own & self.states) != self.negate

    def found(self, packet: Packet, _host: Host) -> str:
        return f"state {packet.conntrack}"


class Status(NamedTuple):
    """nftables ``ct status``: the connection was translated so (or was not)."""

    text: str
    bits: frozenset[str]
    negate: bool = False

    def check(self, packet: Packet, _host: Host) -> Answer:
        if not packet.connected:
            return False
        if self.bits - {"snat", "dnat"}:
            return Doubt(f"{self.text}: only snat and dnat are known on paper")
        own = ({"snat"} if packet.snat else set()) | ({"dnat"} if packet.dnat else set())
        return bool(own & self.bits) != self.negate

    def found(self, packet: Packet, _host: Host) -> str:
        return "a connection that was translated" if packet.snat or packet.dnat else "a connection as it was sent"


class Original(NamedTuple):
    """The connection's first packet, before translation, had (or had not) this at one of its ends."""

    text: str
    part: Literal["src", "dst", "sport", "dport"]
    any_of: tuple[tuple[int, int], ...]  # (value, mask) of an address, (low, high) of a port
    negate: bool = False

    def check(self, packet: Packet, _host: Host) -> Answer:
        if not packet.has_connection or packet.original is None:
            return False
        src, sport, dst, dport = packet.original
        if self.part in ("sport", "dport"):
            own = sport if self.part == "sport" else dport
            return any(low <= own <= high for low, high in self.any_of) != self.negate
        address = number(src if self.part == "src" else dst)
        return any(address & mask == value for value, mask in self.any_of) != self.negate

    def found(self, packet: Packet, _host: Host) -> str:
        if packet.original is None:
            return "no connection"
        src, sport, dst, dport = packet.original
        return f"originally {src}:{sport} -> {dst}:{dport}"


class Direction(NamedTuple):
    """The packet goes the way of the connection's first one, or the other."""

    text: str
    reply: bool
    negate: bool = False

    def check(self, packet: Packet, _host: Host) -> Answer:
        return packet.has_connection and (packet.reply == self.reply) != self.negate

    def found(self, packet: Packet, _host: Host) -> str:
        return "a reply" if packet.reply else "the original direction"


class Zone(NamedTuple):
    """nftables ``ct zone``."""

    text: str
    ranges: tuple[Range, ...]
    negate: bool = False

    def check(self, packet: Packet, _host: Host) -> Answer:
        if not packet.connected:
            return False
        return any(low <= (packet.zone or 0) <= high for low, high in self.ranges) != self.negate

    def found(self, packet: Packet, _host: Host) -> str:
        return f"conntrack zone {packet.zone or 0}"


class Connected(NamedTuple):
    """There is a connection to read from; nftables ends a rule where there is none."""

    text: str

    def check(self, packet: Packet, _host: Host) -> Answer:
        return packet.connected

    def found(self, packet: Packet, _host: Host) -> str:
        return "a connection" if packet.connected else "no connection"


class AddressType(NamedTuple):
    """The routing table's word for an address: LOCAL, BROADCAST, MULTICAST, UNICAST. ``limit`` keeps it to the interface.

    In IPv6 iptables' UNICAST means any address that is no multicast one, a local one too; nftables' (``strict``) does not.
    """

    text: str
    side: Side
    types: frozenset[str]
    negate: bool = False
    limit: Literal["", "in", "out"] = ""
    strict: bool = False

    def check(self, packet: Packet, host: Host) -> Answer:
        kind = address_type(packet, host, self.side, self.limit)
        if packet.family == "ipv6" and not self.strict:
            class_ = "MULTICAST" if kind == "MULTICAST" else "UNICAST"
            if {"UNICAST", "MULTICAST"} & self.types and class_ not in self.types:
                return self.negate
            if not self.types - {"UNICAST", "MULTICAST"}:
                return not self.negate
        if kind is None:
            return Doubt(f"{self.text}: the addresses of this machine are not known")
        return (kind in self.types) != self.negate

    def found(self, packet: Packet, host: Host) -> str:
        kind = address_type(packet, host, self.side, self.limit)
        return f"{_address(packet, self.side)} of type {kind or 'unknown'}"


def address_type(packet: Packet, host: Host, side: Side, limit: Literal["", "in", "out"] = "") -> str | None:
    """The type of an address (linux: net/ipv4/fib_frontend.c inet_addr_type, net/netfilter/xt_addrtype.c)."""
    address = packet.src if side == "src" else packet.dst
    value = number(address)
    if packet.family == "ipv4":
        if value >> 28 == 0xE:
            return "MULTICAST"
        if value in (0, 0xFFFFFFFF) or address in host.broadcasts:
            return "BROADCAST"
    elif value >> 120 == 0xFF:
        return "MULTICAST"
    local = host.is_local(address)
    if local is None:
        return None
    if local and limit:
        interface = packet.iif if limit == "in" else packet.oif
        own = (host.addresses or {}).get(interface, ())
        local = address in own or (interface == "lo" and packet.family == "ipv4" and value >> 24 == 127)
        local = local or (interface == "lo" and address == "::1")
    return "LOCAL" if local else "UNICAST"


class TcpFlags(NamedTuple):
    """Of the flags in ``mask`` exactly those in ``wanted`` are set (or are not)."""

    text: str
    mask: frozenset[str]
    wanted: frozenset[str]
    negate: bool = False

    def check(self, packet: Packet, _host: Host) -> Answer:
        if packet.proto != 6:
            return False
        return ((packet.flags & self.mask) == self.wanted) != self.negate

    def found(self, packet: Packet, _host: Host) -> str:
        return f"flags {','.join(sorted(packet.flags)) or 'none'}" if packet.proto == 6 else "no TCP"


class Icmp(NamedTuple):
    """The ICMP type (and code) is (or is not) this. ``number`` is the protocol's."""

    text: str
    number: int
    types: tuple[Range, ...]
    codes: Range = (0, 255)
    negate: bool = False

    def check(self, packet: Packet, _host: Host) -> Answer:
        if packet.proto != self.number:
            return False
        kind = any(low <= packet.icmp_type <= high for low, high in self.types)
        return (kind and self.codes[0] <= packet.icmp_code <= self.codes[1]) != self.negate

    def found(self, packet: Packet, _host: Host) -> str:
        return f"type {packet.icmp_type} code {packet.icmp_code}" if packet.proto == self.number else "another protocol"


class Chance(NamedTuple):
    """The statistic match: true with a probability."""

    text: str
    probability: float

    def check(self, _packet: Packet, _host: Host) -> Answer:
        if self.probability <= 0:
            return False
        if self.probability >= 1:
            return True
        return Doubt(self.text, self.probability)

    def found(self, _packet: Packet, _host: Host) -> str:
        return "the other outcome of a random choice"


class InSet(NamedTuple):
    """The packet's addresses and ports are (or are not) in a named set; a doubt where its members are not known."""

    text: str
    name: str
    parts: tuple[str, ...]  # src, dst per dimension
    negate: bool = False

    def check(self, packet: Packet, host: Host) -> Answer:
        members = host.sets.get(self.name)
        if members is None:
            return Doubt(f"{self.text}: the members of set {self.name} are not known")
        if len(self.parts) == 1:
            address = packet.src if self.parts[0] == "src" else packet.dst
            port = packet.sport if self.parts[0] == "src" else packet.dport
            return (_in_members(address, members) or str(port) in members) != self.negate
        if len(self.parts) == 2:
            address = packet.src if self.parts[0] == "src" else packet.dst
            port = packet.sport if self.parts[1] == "src" else packet.dport
            proto = protocol_name(packet.proto, packet.family)
            found = any(
                _in_members(address, frozenset({m.partition(",")[0]}))
                and m.partition(",")[2] in (str(port), f"{proto}:{port}")
                for m in members
            )
            return found != self.negate
        return Doubt(f"{self.text}: sets of {len(self.parts)} dimensions are not evaluated")

    def found(self, packet: Packet, _host: Host) -> str:
        return f"{packet.shown()} {'in' if self.negate else 'not in'} set {self.name}"


def _in_members(address: str, members: frozenset[str]) -> bool:
    if address in members:
        return True
    own = number(address)
    for member in members:
        base, slash, length = member.partition("/")
        if not slash or (":" in base) != (":" in address):
            continue
        bits = 128 if ":" in base else 32
        shift = bits - int(length)
        if own >> shift == number(base) >> shift:
            return True
    return False


class SocketMatch(NamedTuple):
    """The packet belongs to a socket of this machine."""

    text: str
    negate: bool = False

    def check(self, packet: Packet, _host: Host) -> Answer:
        if packet.socket is None:
            return Doubt(f"{self.text}: whether a socket has this packet is not known")
        return packet.socket != self.negate

    def found(self, packet: Packet, _host: Host) -> str:
        return "a socket" if packet.socket else "no socket"


class Fixed(NamedTuple):
    """True or false of every packet on paper (a comment; fragments)."""

    text: str
    value: bool

    def check(self, _packet: Packet, _host: Host) -> Answer:
        return self.value

    def found(self, _packet: Packet, _host: Host) -> str:
        return "a whole packet"


class Unknown(NamedTuple):
    """A match that is not evaluated; it is named, and its answer is a doubt."""

    text: str
    why: str = "this match is not evaluated"

    def check(self, _packet: Packet, _host: Host) -> Answer:
        return Doubt(f"{self.text}: {self.why}")

    def found(self, _packet: Packet, _host: Host) -> str:
        return "not known"


class AnyOf(NamedTuple):
    """One of several things that the packet could be (nft sets of concatenations)."""

    text: str
    alternatives: tuple[tuple[Condition, ...], ...]
    negate: bool = False

    def check(self, packet: Packet, host: Host) -> Answer:
        doubt: Doubt | None = None
        for together in self.alternatives:
            answer = all_of(c.check(packet, host) for c in together)
            if answer is True:
                return not self.negate
            if isinstance(answer, Doubt):
                doubt = answer
        return doubt if doubt is not None else self.negate

    def found(self, packet: Packet, _host: Host) -> str:
        return packet.shown()


def all_of(answers: Iterable[Answer]) -> Answer:
    """No if any answer is no, else a doubt if any is one, else yes."""
    doubt: Doubt | None = None
    for answer in answers:
        if answer is False:
            return False
        if isinstance(answer, Doubt):
            doubt = doubt or answer
    return doubt if doubt is not None else True

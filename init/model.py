"""The vocabulary of rules: matches, targets, and a rule made of them. Pure data; back ends render it.

Values are words that ``init.words`` has accepted, so no value can bring a blank, a quote or an option with it. An
IPv4 and an IPv6 rule differ in their address words only.

These are named tuples: a dataclass takes six times as long to define, and a cold start of the program pays for each.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Family = Literal["ipv4", "ipv6"]

BUILT_IN_CHAINS = frozenset({"INPUT", "OUTPUT", "FORWARD", "PREROUTING", "POSTROUTING"})
VERDICTS = frozenset({"ACCEPT", "RETURN", "DROP"})


class Interface(NamedTuple):
    """The packet came in by, or goes out by, this interface."""

    direction: Literal["in", "out"]
    name: str


class Address(NamedTuple):
    """Source or destination in (or, with ``negate``, not in) ``cidr`` (``address/length``)."""

    side: Literal["src", "dst"]
    cidr: str
    negate: bool = False


class Proto(NamedTuple):
    """Transport protocol."""

    name: Literal["tcp", "udp"]


class Port(NamedTuple):
    """Source or destination port. Several ports are one set."""

    proto: Literal["tcp", "udp"]
    side: Literal["src", "dst"]
    ports: tuple[str, ...]
    negate: bool = False


class Owner(NamedTuple):
    """The process that sent the packet has (or has not) this user or group."""

    kind: Literal["uid", "gid"]
    name: str
    negate: bool = False


class State(NamedTuple):
    """Connection tracking state is one of these (upper case)."""

    states: tuple[str, ...]


class Mark(NamedTuple):
    """The packet's mark is (or is not) this value."""

    value: str
    negate: bool = False


class ConnMark(NamedTuple):
    """The connection's mark is this value."""

    value: str


Match = Interface | Address | Proto | Port | Owner | State | Mark | ConnMark


class Jump(NamedTuple):
    """To a chain, or one of the verdicts ACCEPT, RETURN, DROP."""

    to: str


class Redirect(NamedTuple):
    """To a port of this machine. ``singular``: the reference writes ``--to-port`` for UDP."""

    port: str
    singular: bool = False


class SetMark(NamedTuple):
    value: str


class SaveMark(NamedTuple):
    """Packet mark to connection mark."""


class RestoreMark(NamedTuple):
    """Connection mark to packet mark."""


class Zone(NamedTuple):
    """Track the connection in this conntrack zone."""

    number: int


class Transparent(NamedTuple):
    """Hand the packet to a socket on ``port`` without changing its addresses, and mark it.

    ``family`` matters to nftables only, where one rule set holds both.
    """

    mark: str
    port: str
    family: Family = "ipv4"


Target = Jump | Redirect | SetMark | SaveMark | RestoreMark | Zone | Transparent


class Rule(NamedTuple):
    """One rule. ``position`` counts as its back end does (iptables from 1, nftables from 0); None appends."""

    table: str
    chain: str
    matches: tuple[Match, ...]
    target: Target
    comment: str
    position: int | None = None


class RuleSet(NamedTuple):
    """All iptables rules of a configuration in the order in which they are given to the kernel.

    ``ipv6`` is empty when IPv6 is off.
    """

    ipv4: tuple[Rule, ...]
    ipv6: tuple[Rule, ...]

    def family(self, family: Family) -> tuple[Rule, ...]:
        return self.ipv4 if family == "ipv4" else self.ipv6

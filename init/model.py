"""The vocabulary of rules: matches, targets, and a rule made of them. Pure data; back ends render it.

Values are words that ``init.words`` has accepted, so no value can bring a blank, a quote or an option with it. An
IPv4 and an IPv6 rule differ in their address words only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Family = Literal["ipv4", "ipv6"]

BUILT_IN_CHAINS = frozenset({"INPUT", "OUTPUT", "FORWARD", "PREROUTING", "POSTROUTING"})
VERDICTS = frozenset({"ACCEPT", "RETURN", "DROP"})


@dataclass(frozen=True, slots=True)
class Interface:
    """The packet came in by, or goes out by, this interface."""

    direction: Literal["in", "out"]
    name: str


@dataclass(frozen=True, slots=True)
class Address:
    """Source or destination in (or, with ``negate``, not in) ``cidr`` (``address/length``)."""

    side: Literal["src", "dst"]
    cidr: str
    negate: bool = False


@dataclass(frozen=True, slots=True)
class Proto:
    """Transport protocol."""

    name: Literal["tcp", "udp"]


@dataclass(frozen=True, slots=True)
class Port:
    """Source or destination port. Several ports are one set."""

    proto: Literal["tcp", "udp"]
    side: Literal["src", "dst"]
    ports: tuple[str, ...]
    negate: bool = False


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that sent the packet has (or has not) this user or group."""

    kind: Literal["uid", "gid"]
    id: str
    negate: bool = False


@dataclass(frozen=True, slots=True)
class State:
    """Connection tracking state is one of these (upper case)."""

    states: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Mark:
    """The packet's mark is (or is not) this value."""

    value: str
    negate: bool = False


@dataclass(frozen=True, slots=True)
class ConnMark:
    """The connection's mark is this value."""

    value: str


Match = Interface | Address | Proto | Port | Owner | State | Mark | ConnMark


@dataclass(frozen=True, slots=True)
class Jump:
    """To a chain, or one of the verdicts ACCEPT, RETURN, DROP."""

    to: str


@dataclass(frozen=True, slots=True)
class Redirect:
    """To a port of this machine. ``singular``: the reference writes ``--to-port`` for UDP."""

    port: str
    singular: bool = False


@dataclass(frozen=True, slots=True)
class SetMark:
    value: str


@dataclass(frozen=True, slots=True)
class SaveMark:
    """Packet mark to connection mark."""


@dataclass(frozen=True, slots=True)
class RestoreMark:
    """Connection mark to packet mark."""


@dataclass(frozen=True, slots=True)
class Zone:
    """Track the connection in this conntrack zone."""

    number: int


@dataclass(frozen=True, slots=True)
class Transparent:
    """Hand the packet to a socket on ``port`` without changing its addresses, and mark it.

    ``family`` matters to nftables only, where one rule set holds both.
    """

    mark: str
    port: str
    family: Family = "ipv4"


Target = Jump | Redirect | SetMark | SaveMark | RestoreMark | Zone | Transparent


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. ``position`` counts as its back end does (iptables from 1, nftables from 0); None appends."""

    table: str
    chain: str
    matches: tuple[Match, ...]
    target: Target
    comment: str
    position: int | None = None


@dataclass(frozen=True, slots=True)
class RuleSet:
    """All iptables rules of a configuration in the order in which they are given to the kernel.

    ``ipv6`` is empty when IPv6 is off.
    """

    ipv4: tuple[Rule, ...]
    ipv6: tuple[Rule, ...]

    def family(self, family: Family) -> tuple[Rule, ...]:
        return self.ipv4 if family == "ipv4" else self.ipv6

"""A parsed rule set: tables, chains, rules; and what rules do. iptables and nftables share it. Pure data.

Named tuples, as in `lab.explain.conditions`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from lab.explain.conditions import Condition, Direction, Mark, MarkIn, Original, Range, State, Status, Zone
from lab.explain.packet import FULL, Family

Backend = Literal["legacy", "nft", "native-nft"]
Hook = Literal["prerouting", "input", "forward", "output", "postrouting"]
HOOKS: tuple[Hook, ...] = ("prerouting", "input", "forward", "output", "postrouting")


class Verdict(NamedTuple):
    """Ends the walk: ``accept``, ``drop``, ``return``, or ``queue`` (a program decides). ``nf``: the word as written."""

    kind: Literal["accept", "drop", "return", "queue"]


class Reject(NamedTuple):
    """Drops, and answers. ``answer`` is iptables' word for it (icmp-port-unreachable, tcp-reset...)."""

    answer: str


class Jump(NamedTuple):
    """To a chain; with ``goto`` its end is that of the chain which it was called from."""

    to: str
    goto: bool = False


class Redirect(NamedTuple):
    """To this machine; without ``ports`` the port stays."""

    ports: Range | None = None


class Translate(NamedTuple):
    """DNAT or SNAT to one of the ends: (first address, last address, ports); an address of None stays.

    nftables' statement names a ``family``, and lets packets of the other one go on.
    """

    what: Literal["src", "dst"]
    ends: tuple[tuple[str | None, str | None, Range | None], ...]
    family: Family | None = None


class Masquerade(NamedTuple):
    """SNAT to the address of the interface by which the packet leaves."""

    ports: Range | None = None


class SetMark(NamedTuple):
    """mark = (mark & ~mask) ^ value."""

    of: Literal["packet", "connection"]
    value: int
    mask: int = FULL


class SaveMark(NamedTuple):
    """The packet's mark under ``nfmask`` to the connection's under ``ctmask``."""

    nfmask: int = FULL
    ctmask: int = FULL


class RestoreMark(NamedTuple):
    """The connection's mark under ``ctmask`` to the packet's under ``nfmask``."""

    nfmask: int = FULL
    ctmask: int = FULL


class SetZone(NamedTuple):
    """Tracks the connection in a zone. A packet gets one zone only; later rules change nothing."""

    number: int
    retracks: bool = False
    """nftables' statement tracks again what ``notrack`` took out (kernel: nft_ct.c), iptables' CT target does not."""


class NoTrack(NamedTuple):
    """The packet belongs to no connection."""


class Tproxy(NamedTuple):
    """Hands the packet to a socket that listens on ``port``. ``ends``: iptables' target accepts (or, without such a socket,
    drops); nftables' statement goes on in its rule (or, without, ends it)."""

    port: int
    value: int = 0
    mask: int = 0
    ends: bool = True


class NoEffect(NamedTuple):
    """Something that changes no path: counters, logs, traces."""

    name: str


class UnknownAction(NamedTuple):
    """A target that is not evaluated."""

    text: str
    why: str = "this target is not evaluated"


class VerdictMap(NamedTuple):
    """nftables ``vmap``: the first entry that fits decides; without one the rule does not match."""

    entries: tuple[tuple[tuple[Condition, ...], Verdict | Jump | UnknownAction], ...]


class Spread(NamedTuple):
    """nftables ``numgen``: one of the actions, each with its share of flows."""

    actions: tuple[tuple[float, Action], ...]


Action = (
    Verdict
    | Reject
    | Jump
    | Redirect
    | Translate
    | Masquerade
    | SetMark
    | SaveMark
    | RestoreMark
    | SetZone
    | NoTrack
    | Tproxy
    | NoEffect
    | UnknownAction
    | VerdictMap
    | Spread
)
Part = Condition | Action

ACTIONS: tuple[type, ...] = (
    Verdict, Reject, Jump, Redirect, Translate, Masquerade, SetMark, SaveMark, RestoreMark, SetZone, NoTrack, Tproxy,
    NoEffect, UnknownAction, VerdictMap, Spread,
)  # fmt: skip

DECIDING: tuple[type, ...] = (Verdict, Reject, Redirect, Translate, Masquerade, Spread)
"""Actions that end the walk through a base chain, or (return) through one chain. TPROXY does if it ``ends``."""


_CONNECTED: tuple[type, ...] = (
    State, Status, Original, Direction, Zone, Redirect, Masquerade, SaveMark, RestoreMark, SetZone,
)  # fmt: skip


def _needs_connections(part: Part, family: str) -> bool:
    """Whether a part makes the kernel track connections of a family. SNAT and DNAT do so for their address's family alone."""
    if isinstance(part, Spread):
        return any(_needs_connections(action, family) for _, action in part.actions)
    if isinstance(part, Translate):
        return part.family in (None, family)
    if isinstance(part, Mark | MarkIn | SetMark):
        return part.of == "connection"
    return isinstance(part, _CONNECTED)


class Rule(NamedTuple):
    """One rule. ``position`` counts from 1 in its chain, ``line`` from 1 in its file. ``parts`` are in order of evaluation."""

    chain: str
    position: int
    text: str
    parts: tuple[Part, ...]
    line: int = 0

    @property
    def conditions(self) -> Iterator[Condition]:
        return (p for p in self.parts if not isinstance(p, ACTIONS))  # type: ignore[misc]

    @property
    def decides(self) -> bool:
        """Whether the rule ends a walk when it matches; a jump alone does not."""
        return any(isinstance(p, DECIDING) or (isinstance(p, Tproxy) and p.ends) for p in self.parts)


class Base(NamedTuple):
    """Where a base chain is hooked in. ``policy`` is accept or drop; ``shown`` the policy as its owner writes it."""

    hook: Hook
    kind: Literal["filter", "nat", "route"]
    priority: int
    policy: Literal["accept", "drop"]
    shown: str


class Chain(NamedTuple):
    name: str
    rules: tuple[Rule, ...] = ()
    base: Base | None = None


class Table(NamedTuple):
    """One table. ``family`` is ipv4, ipv6 or inet (both). ``backend`` is None where nothing tells it."""

    family: Literal["ipv4", "ipv6", "inet"]
    name: str
    chains: Mapping[str, Chain]
    backend: Backend | None = None
    order: int = 0


_NO_SETS: Mapping[str, frozenset[str]] = {}


class RuleSet(NamedTuple):
    """All tables of a network namespace. ``unread`` names what a dump holds but is outside of what is evaluated."""

    tables: tuple[Table, ...] = ()
    unread: tuple[str, ...] = ()
    sets: Mapping[str, frozenset[str]] = _NO_SETS

    def bases(self, hook: Hook, family: str) -> list[tuple[Table, Chain, Base]]:
        """The base chains of a hook for packets of a family, in the order in which they run."""
        found = [
            (table, chain, chain.base)
            for table in self.tables
            if table.family in (family, "inet")
            for chain in table.chains.values()
            if chain.base is not None and chain.base.hook == hook
        ]
        return sorted(found, key=lambda entry: (entry[2].priority, entry[0].order))

    def has_nat(self, family: str) -> bool:
        return any(
            chain.base is not None and chain.base.kind == "nat"
            for table in self.tables
            if table.family in (family, "inet")
            for chain in table.chains.values()
        )

    def tracks(self, family: str) -> bool:
        """Whether the kernel tracks connections of a family: only if some rule needs that (linux: nf_ct_netns_get). Without it
        no nat chain is even looked at."""
        return any(
            _needs_connections(part, family)
            for table in self.tables
            if table.family in (family, "inet")
            for chain in table.chains.values()
            for rule in chain.rules
            for part in rule.parts
        )

    def joined(self, other: RuleSet) -> RuleSet:
        """Both."""
        return RuleSet(self.tables + other.tables, self.unread + other.unread, {**self.sets, **other.sets})

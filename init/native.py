"""Configuration to nftables rules in three ``inet`` tables of our own, and the script that ``nft -f`` reads.

The steps are those of ``init.rules``; where the reference's nftables program differs from its iptables program the
difference is here: one rule set for both families (address-bearing rules get an ``ip6`` twin only if IPv6 is on, the
others act on IPv6 always), drop-invalid for TCP only, inserts counted from 0.

Source: istio/istio: tools/istio-nftables/pkg/capture/run.go, tools/istio-nftables/pkg/builder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from .config import DNS_PORT, DOCKER_RESOLVER, OUTBOUND_MARK, Config
from .errors import InitError
from .model import (
    Address,
    ConnMark,
    Family,
    Interface,
    Jump,
    Mark,
    Match,
    Owner,
    Port,
    Proto,
    Redirect,
    RestoreMark,
    Rule,
    SaveMark,
    SetMark,
    State,
    Target,
    Transparent,
    Zone,
)
from .rules import FAMILIES, FULL_LENGTH, LO_IN, LO_OUT, PASSTHROUGH, TCP, UDP, Lists, lists

NAT, MANGLE, RAW = "istio-proxy-nat", "istio-proxy-mangle", "istio-proxy-raw"
TABLES = (NAT, MANGLE, RAW)

BASE_CHAINS: dict[str, dict[str, tuple[str, str, int]]] = {
    NAT: {"prerouting": ("nat", "prerouting", -100), "output": ("nat", "output", -100)},
    MANGLE: {"prerouting": ("filter", "prerouting", -150), "output": ("route", "output", -150)},
    RAW: {"prerouting": ("filter", "prerouting", -300), "output": ("filter", "output", -300)},
}
"""Type, hook and priority of each base chain, in order of creation."""

REGULAR_CHAINS: dict[str, tuple[str, ...]] = {
    NAT: ("istio-inbound", "istio-redirect", "istio-in-redirect", "istio-output", "istio-output-dns"),
    MANGLE: ("istio-divert", "istio-tproxy", "istio-inbound", "istio-drop"),
    RAW: ("istio-inbound", "istio-output-dns"),
}

_BARE = re.compile(r"[A-Za-z][A-Za-z0-9/_.-]*")
_VALUE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/+-]*")
# nft's own words that have a digit or a hyphen. All others are letters only, and such names are quoted anyway: nft's
# list of words grows with each release.
_KEYWORDS = frozenset(
    {"icmpv6", "ip6", "ipv4", "ipv6", "l4proto", "max-resp-time", "rt0", "rt2", "rt4"}
    | {"sack0", "sack1", "sack2", "sack3", "sack-perm", "sack-permitted", "seg-left"}
)

PerFamily = Callable[[Family], Match]


def build(config: Config) -> tuple[Rule, ...]:
    """The nftables rules of ``config``; ``Rule.position`` is an index from 0.

    Raises:
        InitError: a value that cannot become a rule.
    """
    builder = _Builder(config, lists(config))
    builder.run()
    return tuple(builder.rules)


def script(rules: Sequence[Rule], comments: bool = False, ahead: bool = False) -> str:
    """One transaction: each table with rules is added, emptied and filled.

    ``ahead`` hooks nat output one step before iptables' own (Docker's resolver: the first nat rule that matches wins).
    """
    return "".join(f"{line}\n" for line in _lines(rules, comments, ahead))


def cleanup() -> str:
    """One transaction that removes the three tables, whether they exist or not."""
    return "".join(f"add table inet {table}\ndelete table inet {table}\n" for table in TABLES)


def chains(rules: Sequence[Rule], table: str) -> list[str]:
    """The chains of ``table`` that own rules, in order of creation."""
    used = {rule.chain for rule in rules if rule.table == table}
    return [chain for chain in (*BASE_CHAINS[table], *REGULAR_CHAINS[table]) if chain in used]


def placed(rules: Sequence[Rule]) -> list[Rule]:
    """The rules with inserts that nft would refuse turned into appends (an empty chain, an index past the end)."""
    count: dict[tuple[str, str], int] = {}
    made = []
    for rule in rules:
        so_far = count.get((rule.table, rule.chain), 0)
        if rule.position is not None and rule.position >= so_far:
            rule = rule._replace(position=None)
        made.append(rule)
        count[rule.table, rule.chain] = so_far + 1
    return made


def _lines(rules: Sequence[Rule], comments: bool, ahead: bool) -> Iterable[str]:
    for table in TABLES:
        here = chains(rules, table)
        if not here:
            continue
        yield f"add table inet {table}"
        yield f"flush table inet {table}"
        for chain in here:
            if chain in BASE_CHAINS[table]:
                kind, hook, priority = BASE_CHAINS[table][chain]
                priority -= ahead and (table, chain) == (NAT, "output")
                yield f"add chain inet {table} {chain} {{ type {kind} hook {hook} priority {priority} ; }}"
            else:
                yield f"add chain inet {table} {chain}"
        for rule in placed([rule for rule in rules if rule.table == table]):
            verb = "add rule" if rule.position is None else "insert rule"
            index = "" if rule.position is None else f" index {rule.position}"
            yield f"{verb} inet {table} {rule.chain}{index} {body(rule, comments)}"


def body(rule: Rule, comments: bool = False) -> str:
    """The rule without its place, as nft reads it."""
    words = [_match(match, rule.table) for match in rule.matches]
    if isinstance(rule.target, Transparent):
        ip = _IP[rule.target.family]
        words += [f"tproxy {ip} to :{_value(rule.target.port)} meta mark set {_value(rule.target.mark)} counter accept"]
    else:
        words += ["counter", _target(rule.target)]
    if comments:
        words.append(f'comment "{rule.comment}"')
    return " ".join(words)


_IP: dict[Family, str] = {"ipv4": "ip", "ipv6": "ip6"}


def _match(match: Match, table: str) -> str:
    if isinstance(match, Proto):
        return f"meta l4proto {match.name}"
    if isinstance(match, Interface):
        return f"{match.direction[0]}ifname {_interface(match.name)}"
    if isinstance(match, Address):
        ip = "ip6" if ":" in match.cidr else "ip"
        return f"{ip} {match.side[0]}addr {'!= ' if match.negate else ''}{match.cidr}"
    if isinstance(match, Port):
        ports = [_value(port) for port in match.ports]
        shown = ports[0] if len(ports) == 1 else f"{{ {', '.join(ports)} }}"
        return f"{match.proto} {match.side[0]}port {'!= ' if match.negate else ''}{shown}"
    if isinstance(match, Owner):
        # The reference writes the key with "meta" in the raw table only.
        meta = "meta " if table == RAW else ""
        return f"{meta}sk{match.kind} {'!= ' if match.negate else ''}{_value(match.name)}"
    if isinstance(match, State):
        return f"ct state {','.join(state.lower() for state in match.states)}"
    if isinstance(match, Mark):
        return f"mark {'!= ' if match.negate else ''}{_value(match.value)}"
    assert isinstance(match, ConnMark)
    return f"ct mark {_value(match.value)}"


def _target(target: Target) -> str:
    if isinstance(target, Jump):
        return target.to.lower() if target.to in ("ACCEPT", "RETURN", "DROP") else f"jump {target.to}"
    if isinstance(target, Redirect):
        return f"redirect to :{_value(target.port)}"
    if isinstance(target, SetMark):
        return f"meta mark set {_value(target.value)}"
    if isinstance(target, SaveMark):
        return "ct mark set mark"
    if isinstance(target, RestoreMark):
        return "meta mark set ct mark"
    assert isinstance(target, Zone)
    return f"ct zone set {target.number}"


def _interface(name: str) -> str:
    bare = _BARE.fullmatch(name) and not name.isalpha() and name not in _KEYWORDS
    return name if bare or name == "lo" else f'"{name}"'


def _value(text: str) -> str:
    if not _VALUE.fullmatch(text):
        raise InitError(f"{text!r} is no value that nft can read")
    return text


class _Builder:
    def __init__(self, config: Config, lists: Lists) -> None:
        self.config, self.lists = config, lists
        self.rules: list[Rule] = []

    def emit(self, table: str, chain: str, *matches: Match, to: Target, why: str, at: int | None = None) -> None:
        self.rules.append(Rule(table, chain, matches, to, why, at))

    def twins(
        self, table: str, chain: str, *matches: Match | PerFamily, to: Target, why: str, at: int | None = None
    ) -> None:
        """An ``ip`` rule and, right behind it, its ``ip6`` twin if IPv6 is on."""
        for family in FAMILIES if self.config.ipv6 else FAMILIES[:1]:
            made = tuple(match(family) if callable(match) else match for match in matches)
            target = to._replace(family=family) if isinstance(to, Transparent) else to
            self.emit(table, chain, *made, to=target, why=why, at=at)

    def cidrs(self, v4: Sequence[str], v6: Sequence[str]) -> list[str]:
        return [*v4, *(v6 if self.config.ipv6 else ())]

    def run(self) -> None:
        lists, config = self.lists, self.config
        self.interfaces()
        if config.drop_invalid:
            self.emit(
                MANGLE, "prerouting", TCP, State(("INVALID",)), to=Jump("istio-drop"), why="out of window packets"
            )
            self.emit(MANGLE, "istio-drop", to=Jump("DROP"), why="drop them instead of resetting the connection")
        self.emit(
            NAT, "istio-inbound", TCP, _to(lists.tunnel_port), to=Jump("RETURN"), why="HBONE tunnel port is direct"
        )
        self.emit(NAT, "istio-redirect", TCP, to=Redirect(lists.proxy_port), why="to Envoy outbound listener")
        self.emit(NAT, "istio-in-redirect", TCP, to=Redirect(lists.capture_port), why="to Envoy inbound listener")
        if config.inbound_ports_include:
            self.inbound()
        self.emit(NAT, "output", to=Jump("istio-output"), why="all locally sent packets")
        for port in lists.outbound_excluded:
            self.emit(NAT, "istio-output", _to(port), to=Jump("RETURN"), why="excluded outbound port")
            self.emit(NAT, "istio-output", Port("udp", "dst", (port,)), to=Jump("RETURN"), why="excluded outbound port")
        self.twins(NAT, "istio-output", LO_OUT, _passthrough, to=Jump("RETURN"), why="Envoy inbound to the app")
        for uid in lists.uids:
            self.proxy(Owner("uid", uid))
        for gid in lists.gids:
            self.proxy(Owner("gid", gid))
        self.owner_groups()
        if config.captures_dns:
            self.dns()
        self.twins(NAT, "istio-output", self.loopback(), to=Jump("RETURN"), why="loopback stays direct")
        for cidr in self.cidrs(lists.exclude.ipv4, lists.exclude.ipv6):
            self.emit(NAT, "istio-output", Address("dst", cidr), to=Jump("RETURN"), why="excluded outbound range")
        for port in lists.outbound:
            self.emit(NAT, "istio-output", _to(port), to=Jump("istio-redirect"), why="included outbound port")
        self.outbound_ranges()
        if config.tproxy:
            self.tproxy_tail()

    def interfaces(self) -> None:
        for table in (NAT, MANGLE) if self.config.tproxy else (NAT,):
            for name in self.lists.interfaces_excluded:
                self.emit(table, "prerouting", Interface("in", name), to=Jump("RETURN"), why="excluded interface")
                self.emit(table, "output", Interface("out", name), to=Jump("RETURN"), why="excluded interface")
        for name in self.lists.interfaces_virtual:
            self.emit(
                NAT,
                "prerouting",
                Interface("in", name),
                to=Jump("RETURN"),
                why="virtual interface is not inbound",
                at=0,
            )

    def inbound(self) -> None:
        lists, tproxy = self.lists, self.config.tproxy
        table = MANGLE if tproxy else NAT
        capture = Jump("istio-tproxy" if tproxy else "istio-in-redirect")
        if tproxy:
            self.emit(MANGLE, "istio-divert", to=SetMark(lists.mark), why="route to lo by the policy rule")
            self.emit(MANGLE, "istio-divert", to=Jump("ACCEPT"), why="packet of a known connection")
            transparent = Transparent(lists.mark, lists.capture_port)
            self.twins(
                MANGLE, "istio-tproxy", TCP, self.loopback(negate=True), to=transparent, why="to Envoy, addresses kept"
            )
        self.emit(table, "prerouting", TCP, to=Jump("istio-inbound"), why="inbound TCP")
        related = State(("RELATED", "ESTABLISHED"))
        if lists.inbound_all:
            for port in lists.inbound_excluded:
                self.emit(table, "istio-inbound", TCP, _to(port), to=Jump("RETURN"), why="excluded inbound port")
            if tproxy:
                self.emit(table, "istio-inbound", TCP, related, to=Jump("istio-divert"), why="known connection")
            self.emit(table, "istio-inbound", TCP, to=capture, why="inbound to any port")
            return
        for port in lists.inbound:
            if tproxy:
                self.emit(
                    table, "istio-inbound", TCP, related, _to(port), to=Jump("istio-divert"), why="known connection"
                )
            self.emit(table, "istio-inbound", TCP, _to(port), to=capture, why="included inbound port")

    def proxy(self, own: Owner) -> None:
        dns = self.config.captures_dns
        other = own._replace(negate=True)
        tunnel = self.lists.tunnel_port
        ports = ("53", tunnel) if dns and own.kind == "uid" else (tunnel,)
        away = Port("tcp", "dst", ports, negate=True)
        self.twins(
            NAT, "istio-output", LO_OUT, TCP, self.loopback(negate=True), away, own,
            to=Jump("istio-in-redirect"), why="app to its own service, by Envoy inbound",
        )  # fmt: skip
        if not self.lists.include.loopback:
            local: tuple[Match, ...] = (TCP, Port("tcp", "dst", ("53",), negate=True)) if dns else ()
            self.emit(NAT, "istio-output", LO_OUT, *local, other, to=Jump("RETURN"), why="app to itself over lo")
        self.emit(NAT, "istio-output", own, to=Jump("RETURN"), why="the proxy itself")

    def owner_groups(self) -> None:
        lists = self.lists
        if lists.groups_all:
            for group in lists.groups:
                self.emit(NAT, "istio-output", Owner("gid", group), to=Jump("RETURN"), why="excluded owner group")
            return
        others = tuple(Owner("gid", group, negate=True) for group in lists.groups)
        self.emit(NAT, "istio-output", *others, to=Jump("RETURN"), why="not an included owner group")

    def dns(self) -> None:
        everything = self.config.capture_all_dns
        self.emit(RAW, "output", to=Jump("istio-output-dns"), why="conntrack zones of DNS")
        # Also with only IPv6 servers and IPv6 off, where the target chain stays without rules: see init.surprises.
        self.emit(NAT, "istio-output", to=Jump("istio-output-dns"), why="DNS of the app")
        to = Redirect(DNS_PORT)
        if everything:
            self.emit(NAT, "istio-output-dns", TCP, _to("53"), to=to, why="to the DNS server of the agent")
            self.emit(NAT, "istio-output-dns", Port("udp", "dst", ("53",)), to=to, why="to the DNS server of the agent")
        else:
            for port in (_to("53"), Port("udp", "dst", ("53",))):
                for cidr in self.servers():
                    self.emit(
                        NAT, "istio-output-dns", Address("dst", cidr), port, to=to, why="to the DNS server of the agent"
                    )
        self.dns_zones()

    def dns_zones(self) -> None:
        to_53, from_53 = Port("udp", "dst", ("53",)), Port("udp", "src", ("53",))
        owners = [*(Owner("uid", uid) for uid in self.lists.uids), *(Owner("gid", gid) for gid in self.lists.gids)]
        for owner in owners:
            self.emit(RAW, "istio-output-dns", to_53, owner, to=Zone(1), why="agent to upstream")
            self.emit(RAW, "istio-output-dns", Port("udp", "src", (DNS_PORT,)), owner, to=Zone(2), why="agent to app")
        if self.config.docker_resolver:
            resolver = Address("src", DOCKER_RESOLVER + "/32")
            self.emit(RAW, "istio-output-dns", UDP, resolver, to=Zone(1), why="Docker resolver to agent")
        self.emit(RAW, "prerouting", to=Jump("istio-inbound"), why="conntrack zones of DNS")
        if self.config.capture_all_dns:
            self.emit(RAW, "istio-output-dns", to_53, to=Zone(2), why="app to agent")
            self.emit(RAW, "istio-inbound", from_53, to=Zone(1), why="upstream to agent")
            return
        for cidr in self.servers():
            self.emit(RAW, "istio-output-dns", to_53, Address("dst", cidr), to=Zone(2), why="app to agent")
            self.emit(RAW, "istio-inbound", from_53, Address("src", cidr), to=Zone(1), why="upstream to agent")

    def servers(self) -> list[str]:
        """Server addresses as prefixes: IPv4, then IPv6 if it is on."""
        v4, v6 = (tuple(s + FULL_LENGTH[f] for s in self.lists.servers[f]) for f in FAMILIES)
        return self.cidrs(v4, v6)

    def outbound_ranges(self) -> None:
        include, redirect = self.lists.include, Jump("istio-redirect")
        virtual = [Interface("in", name) for name in self.lists.interfaces_virtual]
        if include.wildcard:
            self.emit(NAT, "istio-output", to=redirect, why="all other outbound traffic")
            for interface in virtual:
                self.emit(NAT, "prerouting", interface, to=redirect, why="virtual interface is outbound", at=0)
            return
        for cidr in self.cidrs(include.ipv4, include.ipv6):
            to = Address("dst", cidr)
            for interface in virtual:
                self.emit(NAT, "prerouting", interface, to, to=redirect, why="virtual interface is outbound", at=0)
            self.emit(NAT, "istio-output", to, to=redirect, why="included outbound range")

    def tproxy_tail(self) -> None:
        mark, away = self.lists.mark, self.loopback(negate=True)
        self.emit(
            MANGLE, "prerouting", TCP, Mark(mark), to=SaveMark(), why="mark of Envoy original source to the connection"
        )
        self.emit(MANGLE, "output", LO_OUT, TCP, Mark(mark), to=Jump("RETURN"), why="Envoy to app is marked already")
        owners = [*(Owner("uid", uid) for uid in self.lists.uids), *(Owner("gid", gid) for gid in self.lists.gids)]
        for owner in owners:
            self.twins(
                MANGLE, "output", LO_OUT, TCP, away, owner, to=SetMark(OUTBOUND_MARK), why="Envoy to its own pod"
            )
        self.emit(MANGLE, "output", TCP, ConnMark(mark), to=RestoreMark(), why="replies of the app back to Envoy")
        self.emit(MANGLE, "istio-inbound", TCP, Mark(mark), to=Jump("RETURN"), why="no second redirect", at=0)
        self.twins(
            MANGLE, "istio-inbound", LO_IN, TCP, _passthrough, to=Jump("RETURN"), why="Envoy or agent to app", at=1
        )
        not_envoy = Mark(OUTBOUND_MARK, negate=True)
        self.emit(MANGLE, "istio-inbound", LO_IN, TCP, not_envoy, to=Jump("RETURN"), why="app to itself over lo", at=2)

    def loopback(self, negate: bool = False) -> PerFamily:
        cidrs = self.lists.loopback
        return lambda family: Address("dst", cidrs[family], negate)


def _passthrough(family: Family) -> Match:
    return Address("src", PASSTHROUGH[family])


def _to(port: str) -> Port:
    return Port("tcp", "dst", (port,))

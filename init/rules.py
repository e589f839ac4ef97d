"""Configuration to iptables rules: the ordered steps of the reference, for IPv4 and IPv6 at once.

Tables and chains::

    nat     PREROUTING -> ISTIO_INBOUND -> ISTIO_IN_REDIRECT           (REDIRECT mode)
            OUTPUT     -> ISTIO_OUTPUT  -> ISTIO_REDIRECT, ISTIO_IN_REDIRECT, ISTIO_OUTPUT_DNS
    mangle  PREROUTING -> ISTIO_INBOUND -> ISTIO_DIVERT, ISTIO_TPROXY  (TPROXY mode), ISTIO_DROP
    raw     OUTPUT     -> ISTIO_OUTPUT_DNS, PREROUTING -> ISTIO_INBOUND (conntrack zones of DNS)

Source: istio/istio: tools/istio-iptables/pkg/capture/run.go. The one deviation is Docker's resolver: where OUTPUT
already jumps to DOCKER_OUTPUT and 127.0.0.11 is a listed server, our OUTPUT rules go in front of that jump (behind it
the query would be gone before we see it), and replies of 127.0.0.11 to the agent get the zone of its queries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from . import words
from .config import DNS_PORT, DOCKER_RESOLVER, OUTBOUND_MARK, Config, Ranges, ranges
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
    RuleSet,
    SaveMark,
    SetMark,
    State,
    Target,
    Transparent,
    Zone,
)

TCP = Proto("tcp")
UDP = Proto("udp")
LO_OUT = Interface("out", "lo")
LO_IN = Interface("in", "lo")

FAMILIES: tuple[Family, Family] = ("ipv4", "ipv6")
FULL_LENGTH: dict[Family, str] = {"ipv4": "/32", "ipv6": "/128"}
PASSTHROUGH: dict[Family, str] = {"ipv4": "127.0.0.6/32", "ipv6": "::6/128"}
"""What Envoy's inbound passthrough cluster binds as its source."""

EXCLUDED_RANGES = "OUTBOUND_IP_RANGES_EXCLUDE"

PerFamily = Callable[[Family], Match]


class Lists(NamedTuple):
    """The comma lists of a Config, split and checked. Shared by the iptables and the nftables rules."""

    proxy_port: str
    capture_port: str
    tunnel_port: str
    mark: str
    loopback: dict[Family, str]
    uids: tuple[str, ...]
    gids: tuple[str, ...]
    inbound_all: bool
    inbound: tuple[str, ...]
    inbound_excluded: tuple[str, ...]
    outbound: tuple[str, ...]
    outbound_excluded: tuple[str, ...]
    interfaces_excluded: tuple[str, ...]
    interfaces_virtual: tuple[str, ...]
    include: Ranges
    exclude: Ranges
    groups_all: bool
    groups: tuple[str, ...]
    servers: dict[Family, tuple[str, ...]]


def lists(config: Config) -> Lists:
    """Splits and checks every list.

    Raises:
        InitError: a bad CIDR, ``*`` as excluded range, or an item that is not one word.
    """
    exclude = ranges(config.outbound_ip_ranges_exclude)
    if exclude.wildcard:
        raise InitError(f"invalid value for {EXCLUDED_RANGES}", "* would exclude everything")
    groups_all = config.owner_groups_include == "*"
    groups = config.owner_groups_exclude if groups_all else config.owner_groups_include
    return Lists(
        proxy_port=words.word(config.proxy_port, "--envoy-port"),
        capture_port=words.word(config.inbound_capture_port, "--inbound-capture-port"),
        tunnel_port=words.word(config.inbound_tunnel_port, "--inbound-tunnel-port"),
        mark=words.word(config.inbound_tproxy_mark, "--istio-inbound-tproxy-mark") if config.tproxy else "",
        loopback={"ipv4": words.word(config.loopback_cidr, "ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR"), "ipv6": "::1/128"},
        uids=words.words(config.proxy_uid, "--proxy-uid"),
        gids=words.words(config.proxy_gid, "--proxy-gid"),
        inbound_all=config.inbound_ports_include == "*",
        inbound=words.words(config.inbound_ports_include, "--istio-inbound-ports"),
        inbound_excluded=words.words(config.inbound_ports_exclude, "--istio-local-exclude-ports"),
        outbound=words.words(config.outbound_ports_include, "--istio-outbound-ports"),
        outbound_excluded=words.words(config.outbound_ports_exclude, "--istio-local-outbound-ports-exclude"),
        interfaces_excluded=_interfaces(config.exclude_interfaces, "--istio-exclude-interfaces"),
        interfaces_virtual=_interfaces(config.kube_virt_interfaces, "--kube-virt-interfaces"),
        include=ranges(config.outbound_ip_ranges_include),
        exclude=exclude,
        groups_all=groups_all,
        groups=words.words(groups, "ISTIO_OUTBOUND_OWNER_GROUPS" + ("_EXCLUDE" if groups_all else "")),
        servers={"ipv4": config.dns_servers_v4, "ipv6": config.dns_servers_v6},
    )


def build(config: Config) -> RuleSet:
    """The iptables rules of ``config``.

    Raises:
        InitError: a value that cannot become a rule.
    """
    builder = _Builder(config, lists(config))
    builder.run()
    return RuleSet(tuple(builder.rules["ipv4"]), tuple(builder.rules["ipv6"]))


class _Builder:
    def __init__(self, config: Config, lists: Lists) -> None:
        self.config, self.lists = config, lists
        self.rules: dict[Family, list[Rule]] = {"ipv4": [], "ipv6": []}
        self.in_front = 0

    @property
    def families(self) -> tuple[Family, ...]:
        return FAMILIES if self.config.ipv6 else ("ipv4",)

    def emit(
        self,
        table: str,
        chain: str,
        *matches: Match | PerFamily,
        to: Target,
        why: str,
        only: Family | None = None,
        at: int | None = None,
    ) -> None:
        """Adds one rule to each family; a match may be a function of the family."""
        for family in self.families:
            if only not in (None, family):
                continue
            position = at
            if table == "nat" and chain == "OUTPUT" and family == "ipv4" and self.config.docker_resolver:
                position = self.in_front = self.in_front + 1
            made = tuple(match(family) if callable(match) else match for match in matches)
            self.rules[family].append(Rule(table, chain, made, to, why, position))

    def run(self) -> None:
        lists, config = self.lists, self.config
        self.interfaces()
        if config.drop_invalid:
            self.emit("mangle", "PREROUTING", State(("INVALID",)), to=Jump("ISTIO_DROP"), why="out of window packets")
            self.emit("mangle", "ISTIO_DROP", to=Jump("DROP"), why="drop them instead of resetting the connection")
        self.emit(
            "nat",
            "ISTIO_INBOUND",
            TCP,
            _to_port(lists.tunnel_port),
            to=Jump("RETURN"),
            why="HBONE tunnel port is direct",
        )
        self.emit("nat", "ISTIO_REDIRECT", TCP, to=Redirect(lists.proxy_port), why="to Envoy outbound listener")
        self.emit("nat", "ISTIO_IN_REDIRECT", TCP, to=Redirect(lists.capture_port), why="to Envoy inbound listener")
        if config.inbound_ports_include:
            self.inbound()
        self.emit("nat", "OUTPUT", to=Jump("ISTIO_OUTPUT"), why="all locally sent packets")
        for port in lists.outbound_excluded:
            self.emit("nat", "ISTIO_OUTPUT", TCP, _to_port(port), to=Jump("RETURN"), why="excluded outbound port")
            self.emit(
                "nat", "ISTIO_OUTPUT", UDP, _to_port(port, "udp"), to=Jump("RETURN"), why="excluded outbound port"
            )
        self.emit("nat", "ISTIO_OUTPUT", LO_OUT, _passthrough, to=Jump("RETURN"), why="Envoy inbound to the app")
        for uid in lists.uids:
            self.proxy("uid", uid)
        for gid in lists.gids:
            self.proxy("gid", gid)
        self.owner_groups()
        if config.captures_dns:
            self.dns()
        self.emit("nat", "ISTIO_OUTPUT", self.loopback("dst"), to=Jump("RETURN"), why="loopback stays direct")
        for family in FAMILIES:
            for cidr in _of(lists.exclude, family):
                self.emit(
                    "nat",
                    "ISTIO_OUTPUT",
                    Address("dst", cidr),
                    to=Jump("RETURN"),
                    why="excluded outbound range",
                    only=family,
                )
        for port in lists.outbound:
            self.emit(
                "nat", "ISTIO_OUTPUT", TCP, _to_port(port), to=Jump("ISTIO_REDIRECT"), why="included outbound port"
            )
        for family in FAMILIES:
            self.outbound_ranges(family)
        if config.tproxy:
            self.tproxy_tail()

    def interfaces(self) -> None:
        for table in ("nat", "mangle") if self.config.tproxy else ("nat",):
            for name in self.lists.interfaces_excluded:
                self.emit(table, "PREROUTING", Interface("in", name), to=Jump("RETURN"), why="excluded interface")
                self.emit(table, "OUTPUT", Interface("out", name), to=Jump("RETURN"), why="excluded interface")
        for name in self.lists.interfaces_virtual:
            self.emit(
                "nat",
                "PREROUTING",
                Interface("in", name),
                to=Jump("RETURN"),
                why="virtual interface is not inbound",
                at=1,
            )

    def inbound(self) -> None:
        lists, tproxy = self.lists, self.config.tproxy
        table = "mangle" if tproxy else "nat"
        if tproxy:
            self.emit("mangle", "ISTIO_DIVERT", to=SetMark(lists.mark), why="route to lo by the policy rule")
            self.emit("mangle", "ISTIO_DIVERT", to=Jump("ACCEPT"), why="packet of a known connection")
            transparent = Transparent(lists.mark, lists.capture_port)
            self.emit(
                "mangle",
                "ISTIO_TPROXY",
                self.loopback("dst", negate=True),
                TCP,
                to=transparent,
                why="to Envoy, addresses kept",
            )
        self.emit(table, "PREROUTING", TCP, to=Jump("ISTIO_INBOUND"), why="inbound TCP")
        related = State(("RELATED", "ESTABLISHED"))
        if lists.inbound_all:
            for port in lists.inbound_excluded:
                self.emit(table, "ISTIO_INBOUND", TCP, _to_port(port), to=Jump("RETURN"), why="excluded inbound port")
            if tproxy:
                self.emit("mangle", "ISTIO_INBOUND", TCP, related, to=Jump("ISTIO_DIVERT"), why="known connection")
                self.emit("mangle", "ISTIO_INBOUND", TCP, to=Jump("ISTIO_TPROXY"), why="new connection to any port")
            else:
                self.emit("nat", "ISTIO_INBOUND", TCP, to=Jump("ISTIO_IN_REDIRECT"), why="inbound to any port")
            return
        for port in lists.inbound:
            if tproxy:
                self.emit(
                    "mangle",
                    "ISTIO_INBOUND",
                    TCP,
                    _to_port(port),
                    related,
                    to=Jump("ISTIO_DIVERT"),
                    why="known connection",
                )
                self.emit(
                    "mangle", "ISTIO_INBOUND", TCP, _to_port(port), to=Jump("ISTIO_TPROXY"), why="included inbound port"
                )
            else:
                self.emit(
                    "nat",
                    "ISTIO_INBOUND",
                    TCP,
                    _to_port(port),
                    to=Jump("ISTIO_IN_REDIRECT"),
                    why="included inbound port",
                )

    def proxy(self, kind: str, number: str) -> None:
        """What a proxy user or group may do without being captured."""
        dns = self.config.captures_dns
        own = Owner("uid" if kind == "uid" else "gid", number)
        other = Owner(own.kind, number, negate=True)
        tunnel = self.lists.tunnel_port
        # The reference exempts port 53 for users only; for groups it keeps the plain form even with DNS capture.
        ports = ("53", tunnel) if dns and kind == "uid" else (tunnel,)
        away = Port("tcp", "dst", ports, negate=True)
        self.emit(
            "nat", "ISTIO_OUTPUT", LO_OUT, self.loopback("dst", negate=True), TCP, away, own,
            to=Jump("ISTIO_IN_REDIRECT"), why="app to its own service, by Envoy inbound",
        )  # fmt: skip
        if not self.lists.include.loopback:
            local: tuple[Match, ...] = (TCP, Port("tcp", "dst", ("53",), negate=True)) if dns else ()
            self.emit("nat", "ISTIO_OUTPUT", LO_OUT, *local, other, to=Jump("RETURN"), why="app to itself over lo")
        self.emit("nat", "ISTIO_OUTPUT", own, to=Jump("RETURN"), why="the proxy itself")

    def owner_groups(self) -> None:
        lists = self.lists
        if lists.groups_all:
            for group in lists.groups:
                self.emit("nat", "ISTIO_OUTPUT", Owner("gid", group), to=Jump("RETURN"), why="excluded owner group")
            return
        others = tuple(Owner("gid", group, negate=True) for group in lists.groups)
        self.emit("nat", "ISTIO_OUTPUT", *others, to=Jump("RETURN"), why="not an included owner group")

    def dns(self) -> None:
        everything = self.config.capture_all_dns
        servers = self.lists.servers
        self.emit("raw", "OUTPUT", to=Jump("ISTIO_OUTPUT_DNS"), why="conntrack zones of DNS")
        for family in FAMILIES:
            if everything or servers[family]:
                self.emit("nat", "ISTIO_OUTPUT", to=Jump("ISTIO_OUTPUT_DNS"), why="DNS of the app", only=family)
        for proto in (TCP, UDP):
            # The reference spells the UDP option in the singular.
            to = Redirect(DNS_PORT, singular=proto is UDP)
            port = _to_port("53", proto.name)
            if everything:
                self.emit("nat", "ISTIO_OUTPUT_DNS", proto, port, to=to, why="to the DNS server of the agent")
                continue
            for family in FAMILIES:
                for server in servers[family]:
                    at = Address("dst", server + FULL_LENGTH[family])
                    self.emit(
                        "nat",
                        "ISTIO_OUTPUT_DNS",
                        proto,
                        port,
                        at,
                        to=to,
                        why="to the DNS server of the agent",
                        only=family,
                    )
        self.dns_zones()

    def dns_zones(self) -> None:
        """Zone 1: agent and upstream. Zone 2: app and agent. Else one source port could mean two flows."""
        servers = self.lists.servers
        to_53, from_53 = Port("udp", "dst", ("53",)), Port("udp", "src", ("53",))
        from_agent = Port("udp", "src", (DNS_PORT,))
        owners = [*(Owner("uid", uid) for uid in self.lists.uids), *(Owner("gid", gid) for gid in self.lists.gids)]
        for owner in owners:
            self.emit("raw", "ISTIO_OUTPUT_DNS", UDP, to_53, owner, to=Zone(1), why="agent to upstream")
            self.emit("raw", "ISTIO_OUTPUT_DNS", UDP, from_agent, owner, to=Zone(2), why="agent to app")
        if self.config.docker_resolver:
            resolver = Address("src", DOCKER_RESOLVER + "/32")
            self.emit("raw", "ISTIO_OUTPUT_DNS", UDP, resolver, to=Zone(1), why="Docker resolver to agent", only="ipv4")
        if self.config.capture_all_dns:
            self.emit("raw", "PREROUTING", to=Jump("ISTIO_INBOUND"), why="conntrack zones of DNS")
            self.emit("raw", "ISTIO_OUTPUT_DNS", UDP, to_53, to=Zone(2), why="app to agent")
            self.emit("raw", "ISTIO_INBOUND", UDP, from_53, to=Zone(1), why="upstream to agent")
            return
        for family in FAMILIES:
            if servers[family]:
                self.emit("raw", "PREROUTING", to=Jump("ISTIO_INBOUND"), why="conntrack zones of DNS", only=family)
            for server in servers[family]:
                cidr = server + FULL_LENGTH[family]
                self.emit(
                    "raw",
                    "ISTIO_OUTPUT_DNS",
                    UDP,
                    to_53,
                    Address("dst", cidr),
                    to=Zone(2),
                    why="app to agent",
                    only=family,
                )
                self.emit(
                    "raw",
                    "ISTIO_INBOUND",
                    UDP,
                    from_53,
                    Address("src", cidr),
                    to=Zone(1),
                    why="upstream to agent",
                    only=family,
                )

    def outbound_ranges(self, family: Family) -> None:
        include = self.lists.include
        redirect = Jump("ISTIO_REDIRECT")
        virtual = [Interface("in", name) for name in self.lists.interfaces_virtual]
        if include.wildcard:
            self.emit("nat", "ISTIO_OUTPUT", to=redirect, why="all other outbound traffic", only=family)
            for interface in virtual:
                self.emit(
                    "nat", "PREROUTING", interface, to=redirect, why="virtual interface is outbound", only=family, at=1
                )
            return
        for cidr in _of(include, family):
            to = Address("dst", cidr)
            for interface in virtual:
                self.emit(
                    "nat",
                    "PREROUTING",
                    interface,
                    to,
                    to=redirect,
                    why="virtual interface is outbound",
                    only=family,
                    at=1,
                )
            self.emit("nat", "ISTIO_OUTPUT", to, to=redirect, why="included outbound range", only=family)

    def tproxy_tail(self) -> None:
        mark = self.lists.mark
        away = self.loopback("dst", negate=True)
        self.emit(
            "mangle",
            "PREROUTING",
            TCP,
            Mark(mark),
            to=SaveMark(),
            why="mark of Envoy original source to the connection",
        )
        self.emit("mangle", "OUTPUT", TCP, LO_OUT, Mark(mark), to=Jump("RETURN"), why="Envoy to app is marked already")
        owners = [*(Owner("uid", uid) for uid in self.lists.uids), *(Owner("gid", gid) for gid in self.lists.gids)]
        for owner in owners:
            self.emit(
                "mangle", "OUTPUT", away, TCP, LO_OUT, owner, to=SetMark(OUTBOUND_MARK), why="Envoy to its own pod"
            )
        self.emit("mangle", "OUTPUT", TCP, ConnMark(mark), to=RestoreMark(), why="replies of the app back to Envoy")
        self.emit("mangle", "ISTIO_INBOUND", TCP, Mark(mark), to=Jump("RETURN"), why="no second redirect", at=1)
        self.emit(
            "mangle", "ISTIO_INBOUND", TCP, _passthrough, LO_IN, to=Jump("RETURN"), why="Envoy or agent to app", at=2
        )
        not_envoy = Mark(OUTBOUND_MARK, negate=True)
        self.emit(
            "mangle", "ISTIO_INBOUND", TCP, LO_IN, not_envoy, to=Jump("RETURN"), why="app to itself over lo", at=3
        )

    def loopback(self, side: str, negate: bool = False) -> PerFamily:
        cidrs = self.lists.loopback
        return lambda family: Address("dst" if side == "dst" else "src", cidrs[family], negate)


def _passthrough(family: Family) -> Match:
    return Address("src", PASSTHROUGH[family])


def _to_port(port: str, proto: str = "tcp") -> Port:
    return Port("udp" if proto == "udp" else "tcp", "dst", (port,))


def _of(cidrs: Ranges, family: Family) -> tuple[str, ...]:
    return cidrs.ipv4 if family == "ipv4" else cidrs.ipv6


def _interfaces(text: str, source: str) -> tuple[str, ...]:
    return tuple(words.interface(item, source) for item in words.split(text))

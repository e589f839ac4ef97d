"""Random rule sets and packets over the vocabulary that the evaluator claims to know (hypothesis strategies)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from explain_ground import CAPTURE, MARK, UIDS
from hypothesis import strategies as st

from init import native, restore, rules
from init.config import Config
from lab.explain.packet import Packet
from lab.explaining import tcp_state

PORTS = (53, 80, 443, 8080, 9000, 15001, CAPTURE, 15008, 15020, 15053)
SOME_PORTS = ("8000:9000", "1:1023", "15000:16000", "9000:", ":443")
MARKS = ("0x1", hex(MARK), "0x53a", "0x1/0x1", "0x0/0x1")
STATES = ("NEW", "ESTABLISHED", "RELATED,ESTABLISHED", "INVALID", "NEW,UNTRACKED", "DNAT", "SNAT")
OWNERS = (
    "--uid-owner 1337",
    "--gid-owner 1337",
    "--uid-owner 1000-1999",
    "--gid-owner 0",
    "--uid-owner 0",
    "--uid-owner 2000",
)


@dataclass(frozen=True)
class Family:
    """What differs between IPv4 and IPv6."""

    name: str
    local: tuple[str, ...]
    away: tuple[str, ...]
    networks: tuple[str, ...]
    icmp: str
    rejects: tuple[str, ...]
    spoofed: tuple[str, ...]
    beyond: tuple[str, ...]

    @property
    def proto(self) -> int:
        return 1 if self.name == "ipv4" else 58


FOUR = Family(
    "ipv4",
    ("127.0.0.1", "127.0.0.6", "10.5.0.2", "10.7.0.1"),
    ("10.5.0.1", "203.0.113.9", "10.96.0.10", "10.5.0.77"),
    (
        "127.0.0.1/32",
        "127.0.0.6/32",
        "10.0.0.0/8",
        "10.5.0.0/24",
        "203.0.113.0/24",
        "10.96.0.10/32",
        "10.5.0.2/32",
        "10.0.0.2/255.0.0.255",
    ),
    "icmp",
    ("icmp-port-unreachable", "icmp-admin-prohibited", "icmp-host-unreachable"),
    ("127.0.0.6", "10.5.0.2", "198.51.100.7"),
    ("10.7.0.9", "203.0.113.9"),
)
SIX = Family(
    "ipv6",
    ("::1", "fd00:5::2", "fd00:7::1"),
    ("fd00:5::1", "2001:db8::9", "fd00:96::10"),
    ("::1/128", "::6/128", "fd00::/16", "fd00:5::/64", "2001:db8::/32", "fd00:96::10/128", "fd00:5::2/128"),
    "ipv6-icmp",
    ("icmp6-port-unreachable", "icmp6-adm-prohibited"),
    ("fd00:5::2", "2001:db8:1::7"),
    ("fd00:7::9", "2001:db8::9"),
)

_CHAINS: Mapping[str, tuple[str, ...]] = {
    "raw": ("PREROUTING", "OUTPUT"),
    "mangle": ("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"),
    "nat": ("PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"),
    "filter": ("INPUT", "FORWARD", "OUTPUT"),
}
_IN = frozenset({"PREROUTING", "INPUT", "FORWARD"})
_OUT = frozenset({"OUTPUT", "POSTROUTING"})


def _both(*texts: str) -> list[str]:
    """Each text as it is, and negated."""
    return [f"{no}{text}" for text in texts for no in ("", "! ")]


@cache
def _matches(family: Family, chain: str, proto: str, own: bool) -> tuple[st.SearchStrategy[str], ...]:
    """What a rule of a chain may ask, one strategy a kind. ``own``: the sender is known there."""
    found = [
        _both(*(f"-s {n}" for n in family.networks)),
        _both(*(f"-d {n}" for n in family.networks)),
        [f"-m mark {n}--mark {m}" for m in MARKS for n in ("", "! ")],
        [f"-m connmark {n}--mark {m}" for m in MARKS[:3] for n in ("", "! ")],
        [f"-m conntrack {n}--ctstate {s}" for s in STATES for n in ("", "! ")],
        [
            f"-m addrtype {n}--{side}-type {t}"
            for side in ("src", "dst")
            for t in ("LOCAL", "UNICAST")
            for n in ("", "! ")
        ],
    ]
    if chain in _IN or (chain not in _OUT and not own):
        found.append(_both("-i lo", "-i eth0", "-i eth+", "-i eth1"))
    if chain in ("FORWARD", "OUTPUT", "POSTROUTING") or own:
        found.append(_both("-o lo", "-o eth0", "-o eth+", "-o eth1"))
    if own:
        found.append([f"-m owner {n}{o}" for o in OWNERS for n in ("", "! ")])
    if proto in ("tcp", "udp"):
        found.append(_both(*(f"--dport {p}" for p in (*PORTS, *SOME_PORTS))))
        found.append(["--sport 1:30000", "! --sport 1:30000"])
        lists = ("8080", "53,15008", "80,443,8080,9000", "15001,15006", "53", "9000,15020,15053")
        found.append([f"-m multiport {n}{o} {p}" for p in lists for n in ("", "! ") for o in ("--dports", "--ports")])
    if proto == "tcp":
        found.append(["--tcp-flags FIN,SYN,RST,ACK SYN", "! --syn", "--tcp-flags ALL FIN", "! --tcp-flags SYN,RST SYN"])
    if proto == family.icmp:
        name = "icmp" if family is FOUR else "icmpv6"
        found.append([f"{n}--{name}-type {t}" for t in ("echo-request", "echo-reply") for n in ("", "! ")])
    return tuple(st.sampled_from(texts) for texts in found)


@cache
def _targets(family: Family, table: str, chain: str, proto: str, callee: tuple[str, ...]) -> st.SearchStrategy[str]:
    found = ["-j RETURN", "-j RETURN", "-j ACCEPT", '-m comment --comment "a b"']
    found += [f"-j {c}" for c in callee] * 3 + [f"-g {c}" for c in callee]
    if table != "nat":
        found.append("-j DROP")
    if table == "raw":
        found += ["-j CT --zone 1", "-j CT --zone 2", "-j CT --zone 1", "-j CT --notrack"]
    if table == "mangle":
        found += [f"-j MARK --set-xmark {m}" for m in ("0x1/0xffffffff", f"{MARK:#x}/0xffffffff", "0x2/0x3")]
        found += ["-j MARK --or-mark 0x10", "-j MARK --and-mark 0xff"]
        found += ["-j CONNMARK --save-mark", "-j CONNMARK --restore-mark", "-j CONNMARK --set-mark 0x1"]
        if chain == "PREROUTING" and proto in ("tcp", "udp"):
            found += [
                f"-j TPROXY --on-port {CAPTURE} --tproxy-mark {MARK:#x}",
                "-j TPROXY --on-port 15099 --tproxy-mark 0x1",
            ]
    if table == "nat":
        ends = (*family.local[-2:], *family.away[:2])
        if chain in ("PREROUTING", "OUTPUT"):
            if proto in ("tcp", "udp"):
                found += [f"-j REDIRECT --to-ports {p}" for p in (15001, CAPTURE, 15053)] * 2
                bracket = "[{}]" if family is SIX else "{}"
                found += [f"-j DNAT --to-destination {bracket.format(a)}:8080" for a in ends]
            found += [f"-j DNAT --to-destination {a}" for a in ends]
            found.append("-j REDIRECT")
        elif chain == "POSTROUTING":
            found += [
                "-j MASQUERADE",
                f"-j SNAT --to-source {family.local[-1]}",
                f"-j SNAT --to-source {family.spoofed[-1]}",
            ]
        elif chain == "INPUT":
            found.append(f"-j SNAT --to-source {family.spoofed[-1]}")
    if table == "filter" and chain in ("INPUT", "FORWARD", "OUTPUT"):
        found += [f"-j REJECT --reject-with {r}" for r in family.rejects]
        if proto == "tcp":
            found.append("-j REJECT --reject-with tcp-reset")
    return st.sampled_from(found)


_CHANCES = st.sampled_from(
    [
        "-m statistic --mode random --probability 0.5",
        "-m statistic --mode nth --every 3 --packet 0",
        "-m limit --limit 1/min",
        "-m length --length 40:60",
    ]
)
_COUNT = st.integers(0, 4)
_FEW = st.integers(0, 2)
_SELDOM = st.sampled_from([False, False, False, True])
_FULL = st.sampled_from([True, True, True, False])
_POLICIES = st.sampled_from(["ACCEPT", "ACCEPT", "ACCEPT", "ACCEPT", "DROP"])


@cache
def _protos(family: Family) -> st.SearchStrategy[str]:
    return st.sampled_from(["", "tcp", "tcp", "tcp", "udp", family.icmp])


@cache
def _which(count: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, count - 1), max_size=2, unique=True)


def _rule(
    draw: st.DrawFn, family: Family, table: str, chain: str, hook: str, callee: tuple[str, ...], doubtful: bool
) -> str:
    proto = draw(_protos(family))
    options = _matches(family, chain, proto, hook in _OUT)
    asked = [draw(options[i]) for i in draw(_which(len(options)))]
    # Behind multiport --dport would be multiport's own.
    asked.sort(key=lambda text: text.startswith("-m multiport"))
    if doubtful and draw(_SELDOM):
        asked.append(draw(_CHANCES))
    words = [f"-p {proto}" if proto else "", *asked]
    return " ".join(w for w in [f"-A {chain}", *words, draw(_targets(family, table, hook, proto, callee))] if w)


@st.composite
def document(draw: st.DrawFn, family: Family, doubtful: bool = False) -> str:
    """A restore document: some of the four tables, each with user chains. ``doubtful``: with matches that nobody can answer."""
    lines: list[str] = []
    for table, bases in _CHAINS.items():
        lines.append(f"*{table}")
        limited = table in ("filter", "mangle")
        lines += [f":{base} {draw(_POLICIES) if limited else 'ACCEPT'} [0:0]" for base in bases]
        body: list[str] = []
        if draw(_FULL):
            groups = {base: tuple(f"{base[:4]}-{n}" for n in range(draw(_FEW))) for base in bases}
            lines += [f":{c} - [0:0]" for chains in groups.values() for c in chains]
            for base, chains in groups.items():
                for number, chain in enumerate([base, *chains]):
                    body += [
                        _rule(draw, family, table, chain, base, chains[number:], doubtful) for _ in range(draw(_COUNT))
                    ]
        lines += [*body, "COMMIT"]
    return "\n".join(lines) + "\n"


_CIDRS = ("*", "10.96.0.0/16,fd00:96::/64", "10.0.0.0/8", "203.0.113.0/24,2001:db8::/32", "", "127.1.2.3/32,10.0.0.0/8")


@st.composite
def config(draw: st.DrawFn) -> Config:
    """Settings of init, as annotations could make them."""
    ports = st.lists(st.sampled_from(PORTS), max_size=3, unique=True).map(lambda p: ",".join(map(str, p)))
    return Config(
        inbound_interception_mode=draw(st.sampled_from(["REDIRECT", "REDIRECT", "TPROXY"])),
        inbound_ports_include=draw(st.sampled_from(["*", "*", "8080,9000", ""])),
        inbound_ports_exclude=draw(st.sampled_from(["15090,15021,15020", "15020,8080"])),
        outbound_ip_ranges_include=draw(st.sampled_from(_CIDRS)),
        outbound_ip_ranges_exclude=draw(st.sampled_from(["", "203.0.113.0/28", "10.5.0.0/24,fd00:5::/64"])),
        outbound_ports_include=draw(ports),
        outbound_ports_exclude=draw(ports),
        proxy_uid=draw(st.sampled_from(["1337", "1337", "1337,2000"])),
        proxy_gid=draw(st.sampled_from(["1337", "1337", "2000"])),
        owner_groups_include=draw(st.sampled_from(["*", "*", "*", "1000,1337"])),
        owner_groups_exclude=draw(st.sampled_from(["", "2000"])),
        kube_virt_interfaces=draw(st.sampled_from(["", "", "eth1"])),
        exclude_interfaces=draw(st.sampled_from(["", "", "eth1"])),
        redirect_dns=draw(st.booleans()),
        capture_all_dns=draw(st.booleans()),
        dns_servers_v4=("10.96.0.10",),
        dns_servers_v6=("fd00:96::10",),
        drop_invalid=draw(st.booleans()),
        ipv6=draw(st.sampled_from([True, True, False])),
    )


def init_documents(made: Config) -> list[str]:
    """Documents of init; the kernel's other tables are emptied with them."""
    both = rules.build(made)
    empty = "".join(f"*{table}\nCOMMIT\n" for table in _CHAINS)

    def whole(text: str) -> str:
        mine = {line.split()[-1] for line in text.splitlines() if line.startswith("*")}
        return text + "".join(f"*{table}\nCOMMIT\n" for table in _CHAINS if table not in mine)

    return [whole(restore.document(both.ipv4)), whole(restore.document(both.ipv6)) if both.ipv6 else empty]


def init_script(made: Config) -> list[str]:
    return [native.script(native.build(made))]


_NFT_CHAINS: Mapping[str, tuple[str, str]] = {
    "pre-raw": ("filter", "prerouting priority -300"), "out-raw": ("filter", "output priority -300"),
    "pre-mangle": ("filter", "prerouting priority -150"), "out-mangle": ("route", "output priority -150"),
    "pre-nat": ("nat", "prerouting priority -100"), "out-nat": ("nat", "output priority -100"),
    "post-nat": ("nat", "postrouting priority 100"), "in-filter": ("filter", "input priority 0"),
    "out-filter": ("filter", "output priority 0"), "post-mangle": ("filter", "postrouting priority -150"),
}  # fmt: skip


@cache
def _asked(family: Family, chain: str, no: str) -> tuple[st.SearchStrategy[str], ...]:
    ip = "ip" if family is FOUR else "ip6"
    networks = [n for n in family.networks if "255.0.0.255" not in n]
    found = [
        [f"{ip} {side} {no}{n}" for n in networks for side in ("saddr", "daddr")],
        [f"{p} dport {no}{n}" for n in (*PORTS, "8000-9000", "{ 53, 8080, 15000-16000 }") for p in ("tcp", "udp")],
        [f"meta l4proto {no}{p}" for p in ("tcp", "udp", "{ tcp, udp }")],
        [f"meta mark {no}{m}" for m in ("0x1", MARK)] + [f"meta mark & 0x1 {no or '== '}0x1", f"ct mark {no}0x1"],
        [f"ct state {s}" for s in ("new", "established,related", "invalid", "new,untracked")],
        [f'{d}ifname {no}"{n}"' for d in ("i", "o") for n in ("lo", "eth0", "eth*")],
        [
            f"tcp flags & (fin|syn|rst|ack) {no or '== '}syn",
            "tcp flags syn,ack",
            f"tcp flags {no or '== '}syn",
            f"fib daddr type {no}local",
            f"meta nfproto {no}ipv4",
        ],
    ]
    if chain.startswith(("out", "post")):
        found.append([f"meta skuid {no}{u}" for u in (*UIDS, "1000-1999")] + [f"meta skgid {no}1337"])
    return tuple(st.sampled_from(texts) for texts in found)


_FAMILIES = st.sampled_from([FOUR, SIX])
_NO = st.sampled_from(["", "!= "])
_UP_TO_THREE = {n: st.lists(st.integers(0, n - 1), max_size=3, unique=True) for n in (7, 8)}


@cache
def _pick(texts: tuple[str, ...]) -> st.SearchStrategy[str]:
    return st.sampled_from(texts)


def _consistent(words: list[str]) -> list[str]:
    """Without expressions that nft refuses beside an earlier one: two protocols, two families."""
    kept: list[str] = []
    proto = ""
    for word in words:
        implied = next((p for p in ("tcp", "udp") if word.startswith(f"{p} ")), "")
        if word.startswith("meta l4proto") and (proto or len(words) > 1):
            continue
        if (implied and proto and implied != proto) or (word.startswith("meta nfproto") and len(words) > 1):
            continue
        proto = proto or implied
        kept.append(word)
    return kept


def _nft_rule(draw: st.DrawFn, chain: str, callee: tuple[str, ...]) -> str:
    family = draw(_FAMILIES)
    ip = "ip" if family is FOUR else "ip6"
    asked = _asked(family, chain, draw(_NO))
    words = _consistent([draw(asked[i]) for i in draw(_UP_TO_THREE[len(asked)])])
    actions = ["accept", "return", "counter", *(f"jump {c}" for c in callee * 2), *(f"goto {c}" for c in callee)]
    if "raw" in chain:
        actions += ["ct zone set 1", "ct zone set 2", "notrack", "drop"]
    elif "mangle" in chain:
        actions += ["meta mark set 0x1", f"meta mark set {MARK}", "meta mark set meta mark | 0x10", "drop"]
        actions += ["ct mark set meta mark", "meta mark set ct mark"]
    elif "nat" in chain:
        named = any(w.startswith(("tcp dport", "udp dport", "meta l4proto tcp", "meta l4proto udp")) for w in words)
        if chain.startswith("post"):
            actions += ["masquerade", f"snat {ip} to {family.spoofed[-1]}"]
        elif named:
            actions += ["redirect to :15001", f"redirect to :{CAPTURE}", f"dnat {ip} to {family.local[-1]}"] * 2
        else:
            actions += ["redirect", f"dnat {ip} to {family.away[0]}"]
    else:
        actions += ["drop", "reject"]
    if any(w.startswith("meta nfproto") for w in words):  # nft refuses a translation that names the other family
        actions = [a for a in actions if not a.startswith(("snat ", "dnat "))]
    if chain == "pre-mangle" and not any(w.startswith(("udp", "meta")) for w in words):
        actions.append(f"meta l4proto tcp tproxy {ip} to :{CAPTURE} meta mark set {MARK} accept")
    return " ".join([*words, draw(_pick(tuple(actions)))])


@st.composite
def nft_script(draw: st.DrawFn) -> list[str]:
    """One inet table with base chains, each with chains of its own."""
    lines = ["table inet t {"]
    for chain, (kind, hook) in _NFT_CHAINS.items():
        own = tuple(f"{chain}-{n}" for n in range(draw(_FEW)))
        for number, name in reversed(list(enumerate([chain, *own]))):
            lines.append(f"  chain {name} {{")
            if name == chain:
                policy = draw(_POLICIES).lower() if kind == "filter" else "accept"
                lines.append(f"    type {kind} hook {hook}; policy {policy};")
            lines += [f"    {_nft_rule(draw, chain, own[number:])}" for _ in range(draw(_COUNT))]
            lines.append("  }")
    return ["\n".join([*lines, "}", ""])]


@st.composite
def packet(draw: st.DrawFn, families: Sequence[Family] = (FOUR, SIX)) -> Packet:
    """A packet from one of several users, or from outside."""
    family = draw(st.sampled_from(list(families)))
    inward = draw(st.sampled_from([False, False, True]))
    proto = draw(st.sampled_from([6, 6, 6, 6, 17, 17, family.proto]))
    flags, state, icmp = frozenset({"SYN"}), "NEW", 8 if family is FOUR else 128
    if proto == 6 and family is FOUR:
        flags = draw(
            st.sampled_from(
                [
                    frozenset(f)
                    for f in (("SYN",), ("SYN",), ("SYN",), ("SYN",), ("FIN",), ("RST",), ("ACK",), ("SYN", "ACK"), ())
                ]
            )
        )
        state = tcp_state(flags)
    elif proto == family.proto:
        icmp = draw(st.sampled_from([icmp, icmp, 0 if family is FOUR else 129]))
        state = "NEW" if icmp in (8, 128) else "INVALID"
    port = draw(st.sampled_from(PORTS)) if proto in (6, 17) else 0
    if inward:
        src = draw(st.sampled_from([family.away[0], family.spoofed[-1]]))
        dst = draw(st.sampled_from([*family.local[-2:], *family.local[-2:], *family.beyond]))
        return Packet(proto, src, dst, 0, port, iif="eth0", flags=flags, state=state, icmp_type=icmp)
    dst = draw(st.sampled_from([*family.local, *family.away]))
    if dst in family.local:
        src = draw(st.sampled_from([dst, *family.spoofed]))
    else:
        src = family.local[-2] if family is SIX else "10.5.0.2"
    uid = draw(st.sampled_from(UIDS))
    return Packet(proto, src, dst, 0, port, uid=uid, gid=uid, flags=flags, state=state, icmp_type=icmp)

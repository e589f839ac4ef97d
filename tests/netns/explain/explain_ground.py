"""Where the kernel's own truth about rules comes from: a namespace with rules, hand-made packets, packet traces.

``pod`` has eth0 (10.5.0.2, fd00:5::2) to a silent ``peer`` (10.5.0.1, fd00:5::1), eth1 (10.7.0.1, fd00:7::1), forwards, and
delivers packets with mark 0x539 to itself, as init sets it up for TPROXY.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import select
import socket
import struct
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from hypothesis.vendor.pretty import RepresentationPrinter

from lab.explain import iptables_save, nft_text
from lab.explain.packet import Host, Packet
from lab.explain.ruleset import RuleSet
from lab.trace import owner_table
from lab.trace.index import Entry, Step
from lab.trace.places import Place, attach, inside
from lab.trace.rules import Listing, parse_iptables_save, parse_nft_listing

UIDS = (0, 1000, 1337, 2000)
MARK = 0x539
CAPTURE = 15006
_FENCE_PROTOCOL = 0x88B5
_FENCE_TO, _FENCE_FROM = bytes.fromhex("020000000002"), bytes.fromhex("020000000001")
_numbers = itertools.count()

HOST = Host(
    addresses={
        "lo": ("127.0.0.1", "::1"),
        "eth0": ("10.5.0.2", "fd00:5::2"),
        "eth1": ("10.7.0.1", "fd00:7::1"),
    },
    routes=(("10.7.0.0/24", "eth1"), ("fd00:7::/64", "eth1")),
    forwarding=True,
    listeners=frozenset({(6, CAPTURE), (17, CAPTURE)}),
    local_marks=frozenset({MARK}),
    broadcasts=frozenset({"10.5.0.255", "10.7.0.255"}),
)

_SETUP = """
net.ipv4.ip_forward=1
net.ipv4.conf.all.rp_filter=0
net.ipv4.conf.default.rp_filter=0
net.ipv4.conf.all.send_redirects=0
net.ipv4.conf.default.send_redirects=0
net.ipv6.conf.all.disable_ipv6=0
net.ipv6.conf.all.accept_dad=0
net.ipv6.conf.default.accept_dad=0
net.ipv6.conf.all.addr_gen_mode=1
net.ipv6.conf.default.addr_gen_mode=1
net.ipv6.conf.all.forwarding=1
net.ipv4.icmp_ratelimit=0
"""


def sh(*words: str, stdin: str | None = None) -> str:
    done = subprocess.run(words, input=stdin, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}{stdin or ''}"
    return done.stdout


@contextmanager
def _fsuid(uid: int) -> Iterator[None]:
    libc = ctypes.CDLL(None)
    libc.setfsgid(uid)
    libc.setfsuid(uid)
    try:
        yield
    finally:
        libc.setfsuid(0)
        libc.setfsgid(0)


@contextmanager
def _one_cpu() -> Iterator[None]:
    """Keeps this thread on one CPU, so that all it sends waits in one queue."""
    allowed = os.sched_getaffinity(0)
    here = ctypes.CDLL(None).sched_getcpu()
    os.sched_setaffinity(0, {here if here in allowed else min(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


@dataclass(frozen=True)
class Sent:
    """What the kernel said of one packet: the rules that it matched on its way out (or in), and back in over lo."""

    first: tuple[tuple[str, str, int], ...]
    again: tuple[tuple[str, str, int], ...] | None
    entry: Entry | None


@dataclass(repr=False)
class Ground:
    """One namespace with rules of one back end."""

    backend: str
    pod: str
    peer: str
    place: Place
    sockets: dict[tuple[int, int], socket.socket] = field(default_factory=dict)
    outside: dict[int, socket.socket] = field(default_factory=dict)
    listening: list[socket.socket] = field(default_factory=list)
    fence_in: socket.socket = field(init=False)
    fence_out: socket.socket = field(init=False)
    listing: Listing = field(default_factory=Listing)
    ports: Iterator[int] = field(default_factory=lambda: itertools.cycle(range(20000, 60000)))

    def _repr_pretty_(self, printer: RepresentationPrinter, _cycle: bool) -> None:
        printer.text(f"the {self.backend} namespace")

    def run(self, *words: str, stdin: str | None = None, ns: str | None = None) -> str:
        return sh("ip", "netns", "exec", ns or self.pod, *words, stdin=stdin)

    def apply(self, documents: Sequence[str]) -> RuleSet:
        """Replaces all rules (IPv4, then IPv6, or one nft script), and reads back what the kernel now has."""
        if self.backend == "native-nft":
            listed = self.run("nft", "list", "tables")
            old = [line.split() for line in listed.splitlines() if owner_table.NAME not in line]
            script = "".join(f"delete table {family} {name}\n" for _, family, name in old) + documents[0]
            self.run("nft", "-f", "-", stdin=script)
            text = self.run("nft", "--handle", "list", "ruleset")
            self.listing = Listing({}, parse_nft_listing(text))
            return _without_tracer(nft_text.parse(text))
        found = RuleSet()
        iptables = {}
        for tool, family, document in zip(("iptables", "ip6tables"), ("ipv4", "ipv6"), documents, strict=False):
            self.run(f"{tool}-{self.backend}-restore", stdin=document)
            saved = self.run(f"{tool}-{self.backend}-save")
            if saved.strip():
                found = found.joined(iptables_save.parse(saved, family, tool, self.backend))  # type: ignore[arg-type]
            for table, content in parse_iptables_save(saved).items():
                iptables[(self.backend, family, table)] = content
        nft = parse_nft_listing(self.run("nft", "--handle", "list", "ruleset")) if self.backend == "nft" else {}
        self.listing = Listing(iptables, nft)
        return found

    def send(self, packets: Sequence[Packet]) -> list[Sent]:
        """Sends each packet (its source port is chosen here, see `with_port`), and gives what the kernel said of it."""
        with _one_cpu():
            self._send(packets)
            self._fence()
        return [self._said(p) for p in packets]

    def _send(self, packets: Sequence[Packet]) -> None:
        for packet in packets:
            data = build(packet)
            family = socket.AF_INET6 if ":" in packet.dst else socket.AF_INET
            s = self.outside[family] if packet.iif else self.sockets[family, packet.uid or 0]
            try:
                s.sendto(data, (packet.dst, 0))
            except PermissionError:
                pass  # a rule of output dropped it
            except OSError as e:
                # A reject from output comes back as an error of the socket, to whichever call is next.
                if e.errno not in (
                    errno.EINVAL,
                    errno.ENETUNREACH,
                    errno.ECONNREFUSED,
                    errno.EHOSTUNREACH,
                    errno.EACCES,
                ):
                    raise

    def with_port(self, packet: Packet) -> Packet:
        """The packet from a port that no other had, so that it begins a connection."""
        return packet._replace(sport=next(self.ports))

    def _fence(self) -> None:
        """Waits until the kernel is through with everything that was sent before.

        A frame that no rule sees, from the peer: it waits in the same queue of this CPU as the packets (net/core/dev.c: netif_rx), and
        what the kernel says of them is written before it takes the next one.
        """
        number = struct.pack("!I", next(_numbers))
        self.fence_in.send(_FENCE_TO + _FENCE_FROM + struct.pack("!H", _FENCE_PROTOCOL) + number + bytes(42))
        deadline = time.monotonic() + 10
        while True:
            left = deadline - time.monotonic()
            assert select.select([self.fence_out], [], [], max(0.0, left))[0], "the fence was not seen"
            if self.fence_out.recv(64)[14:18] == number:
                break
        self.place.read()
        assert not self.place.lost, "the kernel dropped events"

    def _said(self, packet: Packet) -> Sent:
        proto = {6: "tcp", 17: "udp", 1: "icmp", 58: "icmpv6"}[packet.proto]
        seen = self.place.index.packets(proto, packet.src, packet.sport)
        hook = "prerouting" if packet.iif else "output"
        first = next((p for p in seen if p.hook == hook and p.flow.dst == packet.dst), None)
        assert first is not None, f"the kernel reported nothing of {packet.shown()}"
        entries = self.place.index.conntrack(proto, packet.src, packet.sport, packet.dst, None)
        entry = next((e for e in entries if e.original.dport == first.flow.dport), None)
        again = None
        if hook == "output":
            later = [p for p in seen if p.hook == "prerouting" and p.number > first.number]
            if entry is not None:
                # SNAT gives it another source before it comes back.
                port = packet.sport if packet.proto in (1, 58) else entry.reply.dport
                if (entry.reply.dst, port) != (packet.src, packet.sport):
                    moved = self.place.index.packets(proto, entry.reply.dst, port)
                    later = [p for p in moved if p.hook == "prerouting" and p.number > first.number]
            again = self._rules(later[0].steps) if later else None
        return Sent(self._rules(first.steps), again, entry)

    def _rules(self, steps: Sequence[Step]) -> tuple[tuple[str, str, int], ...]:
        return tuple(self._named(s) for s in steps if s.kind == "rule" or self._is_rule(s))

    def _is_rule(self, step: Step) -> bool:
        """Legacy iptables calls a rule without conditions that ends a chain its end (ip_tables.c: get_chainname_rulenum)."""
        if step.backend != "legacy" or step.position is None:
            return False
        table = self.listing.iptables.get(("legacy", "ipv6" if step.family == "ip6" else "ipv4", step.table))
        return table is not None and step.position <= len(table.rules.get(step.chain, ()))

    def _named(self, step: Step) -> tuple[str, str, int]:
        return step.table, step.chain, self.listing.position(step) or 0

    def close(self) -> None:
        for s in (*self.sockets.values(), *self.outside.values(), *self.listening, self.fence_in, self.fence_out):
            s.close()
        self.place.close()
        for name in (self.pod, self.peer):
            subprocess.run(["ip", "netns", "del", name], check=False)


def _without_tracer(rules: RuleSet) -> RuleSet:
    return rules._replace(tables=tuple(t for t in rules.tables if t.name != owner_table.NAME))


def make(backend: str) -> Ground:
    """Makes the namespaces; `Ground.close` removes them."""
    prefix = f"slt-{os.getpid()}-x{next(_numbers)}"
    pod, peer = f"{prefix}-pod", f"{prefix}-peer"
    try:
        for name in (pod, peer):
            sh("ip", "netns", "add", name)
            for line in _SETUP.split():
                key, _, value = line.partition("=")
                if name == peer and "forward" in key:
                    value = "0"  # else it would send back what is not for it
                sh("ip", "netns", "exec", name, "sh", "-c", f"echo {value} > /proc/sys/{key.replace('.', '/')}")
            sh("ip", "-n", name, "link", "set", "lo", "up")
        for number, interface in enumerate(("eth0", "eth1")):
            link = ["type", "veth", "peer", "name", interface, "address", f"02:00:00:00:0{number}:01", "netns", peer]
            sh("ip", "-n", pod, "link", "add", interface, "address", f"02:00:00:00:0{number}:02", *link)
        sh("ip", "-n", peer, "link", "set", "eth1", "up")
        for name, interface, addresses in (
            (pod, "eth0", ("10.5.0.2/24", "fd00:5::2/64")),
            (pod, "eth1", ("10.7.0.1/24", "fd00:7::1/64")),
            (peer, "eth0", ("10.5.0.1/24", "fd00:5::1/64")),
        ):
            sh("ip", "-n", name, "link", "set", interface, "up")
            for address in addresses:
                sh("ip", "-n", name, "addr", "add", address, "dev", interface, *(["nodad"] if ":" in address else []))
        for address in ("10.7.0.9", "fd00:7::9"):
            mac = ["lladdr", "02:00:00:00:01:01", "dev", "eth1", "nud", "permanent"]
            sh("ip", "-n", pod, "neigh", "add", address, *mac)
        for name, other, mac in ((pod, ("10.5.0.1", "fd00:5::1"), "01"), (peer, ("10.5.0.2", "fd00:5::2"), "02")):
            for address in other:
                family = ["-6"] if ":" in address else []
                sh(
                    "ip",
                    *family,
                    "-n",
                    name,
                    "neigh",
                    "add",
                    address,
                    "lladdr",
                    f"02:00:00:00:00:{mac}",
                    "dev",
                    "eth0",
                    "nud",
                    "permanent",
                )
                sh("ip", *family, "-n", name, "route", "add", "default", "via", address, "dev", "eth0")
        sh(
            "ip",
            "netns",
            "exec",
            peer,
            "nft",
            "add table inet q; add chain inet q i { type filter hook input priority 0; policy drop; }",
        )
        for family in ("-4", "-6"):
            everything = "0.0.0.0/0" if family == "-4" else "::/0"
            sh("ip", family, "-n", pod, "rule", "add", "fwmark", str(MARK), "lookup", "133")
            sh("ip", family, "-n", pod, "route", "add", "local", everything, "dev", "lo", "table", "133")
        ground = Ground(backend, pod, peer, attach("pod", f"/run/netns/{pod}"))
        with inside(f"/run/netns/{pod}"):
            for family in (socket.AF_INET, socket.AF_INET6):
                for uid in UIDS:
                    with _fsuid(uid):
                        ground.sockets[family, uid] = _raw(family)
                ground.listening += [_transparent(family, kind) for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM)]
            ground.fence_out = _frames()
        with inside(f"/run/netns/{peer}"):
            for family in (socket.AF_INET, socket.AF_INET6):
                ground.outside[family] = _raw(family)
            ground.fence_in = _frames()
    except BaseException:
        for name in (pod, peer):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        raise
    return ground


def _raw(family: int) -> socket.socket:
    s = socket.socket(family, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.IPPROTO_RAW)
    if family == socket.AF_INET6:
        s.setsockopt(socket.IPPROTO_IPV6, 36, 1)  # IPV6_HDRINCL
    return s


def _frames() -> socket.socket:
    """Frames of the fence's own protocol on eth0."""
    s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.htons(_FENCE_PROTOCOL))
    s.bind(("eth0", _FENCE_PROTOCOL))
    return s


def _transparent(family: int, kind: int) -> socket.socket:
    s = socket.socket(family, kind | socket.SOCK_CLOEXEC)
    if family == socket.AF_INET6:
        s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        s.setsockopt(socket.IPPROTO_IPV6, 75, 1)  # IPV6_TRANSPARENT
    else:
        s.setsockopt(socket.SOL_IP, 19, 1)  # IP_TRANSPARENT
    s.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", CAPTURE))
    if kind == socket.SOCK_STREAM:
        s.listen(1024)
    return s


_FLAG_BITS = {"FIN": 1, "SYN": 2, "RST": 4, "PSH": 8, "ACK": 16, "URG": 32}


def build(packet: Packet) -> bytes:
    """The packet's bytes, network header first, with good checksums."""
    six = ":" in packet.dst
    family = socket.AF_INET6 if six else socket.AF_INET
    src, dst = (socket.inet_pton(family, a) for a in (packet.src, packet.dst))
    if packet.proto == 6:
        bits = sum(_FLAG_BITS[f] for f in packet.flags)
        body = struct.pack("!HHIIBBHHH", packet.sport, packet.dport, 1, 0, 0x50, bits, 1024, 0, 0)
        at = 16
    elif packet.proto == 17:
        body, at = struct.pack("!HHHH", packet.sport, packet.dport, 12, 0) + b"test", 6
    else:
        body, at = struct.pack("!BBHHH", packet.icmp_type, packet.icmp_code, 0, packet.sport, 1), 2
    pseudo = b""
    if packet.proto in (6, 17, 58):
        pseudo = (
            src
            + dst
            + (
                struct.pack("!IBBBB", len(body), 0, 0, 0, packet.proto)
                if six
                else struct.pack("!BBH", 0, packet.proto, len(body))
            )
        )
    body = body[:at] + struct.pack("!H", _checksum(pseudo + body)) + body[at + 2 :]
    if six:
        return struct.pack("!IHBB", 6 << 28, len(body), packet.proto, 64) + src + dst + body
    head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(body), owner_table.CRAFTED_ID, 0, 64, packet.proto, 0) + src + dst
    return head[:10] + struct.pack("!H", _checksum(head)) + head[12:] + body


def _checksum(data: bytes) -> int:
    data += b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF

"""The kernel's evidence in a plain namespace: who says what, for each of the three kinds of rules."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import pytest
from istio_rule_sets import DNS_NAT_AND_RAW, ISTIO_NAT, NATIVE_NFT

from lab.trace import netlink, owner_table, places, rules
from lab.trace.index import Entry, Packet
from lab.trace.places import Place, inside

pytestmark = pytest.mark.root

IPTABLES = ("legacy", "nft")


@pytest.fixture
def attach(net) -> Iterator[Callable[..., Place]]:
    opened: list[Place] = []

    def begin(name: str | None = None, **options: object) -> Place:
        place = places.attach("pod", net.path(name or net.pod), **options)
        opened.append(place)
        return place

    yield begin
    for place in opened:
        place.close()


def until(place: Place, found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not found():
        assert places.wait_readable(place, deadline - time.monotonic()), "the kernel did not report it"
        place.read()


def seen(place: Place, flow: tuple[str, str, int, str, int]) -> tuple[Packet, list[Entry]]:
    """The flow's first packet and its conntrack entries, once a later packet (a fence) was seen."""
    until(place, lambda: bool(place.index.packets(*flow)))
    return place.index.packets(*flow)[0], place.index.conntrack(*flow)


def fence(net, place: Place) -> None:
    """Nothing sent before is still to come when this returns."""
    s = net.socket(socket.SOCK_DGRAM, uid=0)
    s.sendto(b"fence", ("10.5.0.1", 9))
    port = s.getsockname()[1]
    until(place, lambda: bool(place.index.packets("udp", "10.5.0.2", port)))


def restore(net, backend: str, document: str) -> None:
    net.run(f"iptables-{backend}-restore", "--noflush", stdin=document)


def decide(net, packet: Packet, hook: str = "output") -> rules.Rule:
    return rules.decide(packet, rules.take(net.path(net.pod), rules.wanted([packet])), hook)


def connect(net, address: tuple[str, int], uid: int = 1000) -> int:
    s = net.socket(uid=uid)
    s.connect(address)
    return int(s.getsockname()[1])


@pytest.mark.parametrize("backend", IPTABLES)
def test_a_captured_connection_names_the_redirect_and_its_ports(net, attach, backend: str) -> None:
    restore(net, backend, ISTIO_NAT)
    place = attach()
    net.listen(15001)
    port = connect(net, ("198.51.100.7", 80))
    fence(net, place)
    packet, entries = seen(place, ("tcp", "10.5.0.2", port, "198.51.100.7", 80))
    rule = decide(net, packet)
    assert rule == rules.Rule(
        "ipv4", backend, "nat", "ISTIO_REDIRECT", 1, "-A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001"
    )
    assert [(e.zone, e.reply.src, e.reply.sport, e.reply.dport) for e in entries] == [(0, "127.0.0.1", 15001, port)]


@pytest.mark.parametrize("backend", IPTABLES)
def test_the_proxys_own_connection_names_the_return_that_let_it_go(net, attach, backend: str) -> None:
    restore(net, backend, ISTIO_NAT)
    place = attach()
    net.listen(8080, ns=net.peer)
    port = connect(net, ("10.5.0.1", 8080), uid=1337)
    fence(net, place)
    packet, entries = seen(place, ("tcp", "10.5.0.2", port, "10.5.0.1", 8080))
    rule = decide(net, packet)
    assert (rule.chain, rule.position) == ("ISTIO_OUTPUT", 4)
    assert rule.text == "-A ISTIO_OUTPUT -m owner --uid-owner 1337 -j RETURN"
    assert [(e.reply.src, e.reply.sport) for e in entries] == [("10.5.0.1", 8080)]


@pytest.mark.parametrize("backend", IPTABLES)
def test_a_jump_alone_decides_nothing_so_the_policy_is_named(net, attach, backend: str) -> None:
    restore(net, backend, ISTIO_NAT)
    place = attach()
    s = net.socket(socket.SOCK_DGRAM)
    s.sendto(b"x", ("10.5.0.1", 5000))
    fence(net, place)
    packet, entries = seen(place, ("udp", "10.5.0.2", s.getsockname()[1], "10.5.0.1", 5000))
    assert any(step.chain == "OUTPUT" and step.kind == "rule" for step in packet.steps), "the jump was reported"
    assert decide(net, packet) == rules.Rule("ipv4", backend, "nat", "OUTPUT", None, "-P OUTPUT ACCEPT")
    assert [(e.reply.src, e.reply.sport) for e in entries] == [("10.5.0.1", 5000)]


@pytest.mark.parametrize("backend", IPTABLES)
def test_ping_is_seen_under_its_identifier(net, attach, backend: str) -> None:
    restore(net, backend, ISTIO_NAT)
    place = attach()
    net.run("sysctl", "-qw", "net.ipv4.ping_group_range=0 2147483647")
    with_ping = net.socket(socket.SOCK_DGRAM)
    with_ping.close()
    with places.inside(net.path(net.pod)):
        s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP)
    net.opened.append(s)
    s.settimeout(5)
    s.sendto(bytes([8, 0, 0, 0, 0, 0, 0, 1]), ("10.5.0.1", 0))
    s.recv(100)
    identifier = s.getsockname()[1]
    packet, entries = seen(place, ("icmp", "10.5.0.2", identifier, "10.5.0.1", 0))
    assert decide(net, packet).text == "-P OUTPUT ACCEPT"
    assert entries


@pytest.mark.parametrize("backend", IPTABLES)
def test_an_inbound_connection_is_seen_at_prerouting(net, attach, backend: str) -> None:
    restore(net, backend, ISTIO_NAT)
    place = attach()
    net.listen(15006)
    s = net.socket(ns=net.peer)
    s.connect(("10.5.0.2", 8080))
    fence(net, place)
    packet, entries = seen(place, ("tcp", "10.5.0.1", s.getsockname()[1], "10.5.0.2", 8080))
    assert packet.hook == "prerouting"
    assert decide(net, packet, "prerouting").text == "-A ISTIO_IN_REDIRECT -p tcp -j REDIRECT --to-ports 15006"
    assert [e.reply.sport for e in entries] == [15006]


@pytest.mark.parametrize("backend", IPTABLES)
def test_a_foreign_return_put_first_is_the_one_that_is_named(net, attach, backend: str) -> None:
    restore(net, backend, ISTIO_NAT)
    comment = ["-m", "comment", "--comment", 'a "foreign" tool']
    net.run(f"iptables-{backend}", "-t", "nat", "-I", "OUTPUT", "-p", "tcp", *comment, "-j", "RETURN")
    place = attach()
    net.listen(80, ns=net.peer)
    port = connect(net, ("10.5.0.1", 80))
    fence(net, place)
    packet, _ = seen(place, ("tcp", "10.5.0.2", port, "10.5.0.1", 80))
    assert decide(net, packet) == rules.Rule("ipv4", backend, "nat", "OUTPUT", 1, "-A OUTPUT -p tcp -j RETURN")


@pytest.mark.parametrize("backend", IPTABLES)
def test_a_rule_that_drops_is_named_whatever_its_table(net, attach, backend: str) -> None:
    restore(net, backend, ISTIO_NAT)
    net.run(f"iptables-{backend}", "-A", "OUTPUT", "-p", "udp", "--dport", "7777", "-j", "DROP")
    place = attach()
    s = net.socket(socket.SOCK_DGRAM)
    with pytest.raises(PermissionError):
        s.sendto(b"x", ("10.5.0.1", 7777))
    fence(net, place)
    packet, _ = seen(place, ("udp", "10.5.0.2", s.getsockname()[1], "10.5.0.1", 7777))
    rule = decide(net, packet)
    assert (rule.table, rule.chain, rule.position) == ("filter", "OUTPUT", 1)


@pytest.mark.parametrize("backend", IPTABLES)
def test_dns_zones_tell_the_apps_query_from_the_agents(net, attach, backend: str) -> None:
    restore(net, backend, ISTIO_NAT)
    restore(net, backend, DNS_NAT_AND_RAW)
    place = attach()
    ports = {}
    for uid in (1000, 1337):
        s = net.socket(socket.SOCK_DGRAM, uid=uid)
        s.sendto(b"query", ("10.5.0.1", 53))
        ports[uid] = s.getsockname()[1]
    fence(net, place)
    packet, entries = seen(place, ("udp", "10.5.0.2", ports[1000], "10.5.0.1", 53))
    assert [(e.zone, e.reply.sport) for e in entries] == [(2, 15053)]
    assert decide(net, packet).chain == "ISTIO_OUTPUT_DNS"
    packet, entries = seen(place, ("udp", "10.5.0.2", ports[1337], "10.5.0.1", 53))
    assert [(e.zone, e.reply.sport) for e in entries] == [(1, 53)]
    assert decide(net, packet).text == "-A ISTIO_OUTPUT -m owner --uid-owner 1337 -j RETURN"


def test_native_nft_gives_nfts_own_words(net, attach) -> None:
    net.run("nft", "-f", "-", stdin=NATIVE_NFT)
    place = attach()
    net.listen(15001)
    port = connect(net, ("198.51.100.7", 80))
    proxy = net.socket(uid=1337)
    net.listen(8080, ns=net.peer)
    proxy.connect(("10.5.0.1", 8080))
    fence(net, place)
    packet, entries = seen(place, ("tcp", "10.5.0.2", port, "198.51.100.7", 80))
    assert decide(net, packet) == rules.Rule(
        "inet", "native-nft", "istio-proxy-nat", "istio-redirect", 1, "meta l4proto tcp redirect to :15001"
    )
    assert [e.reply.sport for e in entries] == [15001]
    packet, _ = seen(place, ("tcp", "10.5.0.2", proxy.getsockname()[1], "10.5.0.1", 8080))
    rule = decide(net, packet)
    assert (rule.chain, rule.position, rule.text) == ("istio-output", 2, "meta skuid 1337 return")
    s = net.socket(socket.SOCK_DGRAM)
    s.sendto(b"x", ("10.5.0.1", 5000))
    fence(net, place)
    packet, _ = seen(place, ("udp", "10.5.0.2", s.getsockname()[1], "10.5.0.1", 5000))
    assert decide(net, packet) == rules.Rule("inet", "native-nft", "istio-proxy-nat", "output", None, "policy accept")


def test_a_namespace_without_rules_still_reports_the_packet(net, attach) -> None:
    place = attach()
    net.listen(80, ns=net.peer)
    port = connect(net, ("10.5.0.1", 80))
    fence(net, place)
    packet, entries = seen(place, ("tcp", "10.5.0.2", port, "10.5.0.1", 80))
    assert not packet.steps
    assert not entries
    assert decide(net, packet) == rules.Rule("ipv4", None, "nat", "OUTPUT", None, "-P OUTPUT ACCEPT")


def test_observing_leaves_the_rules_alone_and_nothing_behind(net, attach) -> None:
    restore(net, "legacy", ISTIO_NAT)
    before = net.run("iptables-legacy-save")
    place = attach()
    assert "sidecarlab-trace" in net.run("nft", "list", "tables")
    assert net.run("iptables-legacy-save").count("\n-A") == before.count("\n-A")
    place.close()
    assert "sidecarlab-trace" not in net.run("nft", "list", "tables")


def test_without_nf_tables_trace_rules_in_raw_serve(net, attach) -> None:
    restore(net, "legacy", ISTIO_NAT)
    place = attach(raw_trace=True)
    assert place.missing == {}
    net.listen(15001)
    port = connect(net, ("198.51.100.7", 80))
    fence(net, place)
    packet, entries = seen(place, ("tcp", "10.5.0.2", port, "198.51.100.7", 80))
    assert decide(net, packet).text == "-A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001"
    assert [e.reply.sport for e in entries] == [15001]
    place.close()
    assert "TRACE" not in net.run("iptables-legacy-save", "-t", "raw")


def test_a_connection_to_itself_is_two_packets_and_one_entry(net, attach) -> None:
    restore(net, "legacy", ISTIO_NAT)
    place = attach()
    net.listen(8080)
    port = connect(net, ("10.5.0.2", 8080))
    fence(net, place)
    flow = ("tcp", "10.5.0.2", port, "10.5.0.2", 8080)
    seen(place, flow)
    assert [p.hook for p in place.index.packets(*flow)] == ["output", "prerouting"]
    rule = decide(net, place.index.packets(*flow)[0])
    assert rule.text == "-A ISTIO_OUTPUT -o lo -m owner ! --uid-owner 1337 -j RETURN"
    assert len(place.index.conntrack(*flow)) == 1


@pytest.mark.parametrize("raw_trace", [False, True])
@pytest.mark.parametrize("uid", [1000, 1337])
def test_a_packet_tells_who_sent_it_though_the_socket_is_closed(net, attach, raw_trace: bool, uid: int) -> None:
    restore(net, "legacy", ISTIO_NAT)
    place = attach(raw_trace=raw_trace)
    s = net.socket(socket.SOCK_DGRAM, uid=uid)
    s.sendto(b"gone", ("10.5.0.1", 5000))
    port = s.getsockname()[1]
    s.close()
    fence(net, place)
    packet, _ = seen(place, ("udp", "10.5.0.2", port, "10.5.0.1", 5000))
    assert packet.uid == uid


def test_what_arrives_and_what_the_kernel_sends_has_no_sender(net, attach) -> None:
    """The same address and port as a packet that was sent before: its sender is not the answer's."""
    place = attach()
    s = net.socket(socket.SOCK_DGRAM)
    s.bind(("10.5.0.2", 5000))
    s.sendto(b"?", ("10.5.0.2", 5000))
    fence(net, place)
    there, back = place.index.packets("udp", "10.5.0.2", 5000)
    assert [(p.hook, p.uid) for p in (there, back)] == [("output", 1000), ("prerouting", None)]
    net.socket(socket.SOCK_DGRAM, ns=net.peer).sendto(b"?", ("10.5.0.2", 5999))  # the kernel answers: nobody listens
    until(place, lambda: bool(place.index.packets("icmp", "10.5.0.2", 0)))
    assert [(p.hook, p.uid) for p in place.index.packets("icmp", "10.5.0.2", 0)] == [("output", None)]


def test_without_the_log_of_owners_packets_report_all_the_same(net, attach) -> None:
    """A kernel without nft_log refuses the first table, and what it says of it must not be taken for the answer to the second."""
    place = attach(trace=False)
    with inside(net.path(net.pod)):
        s = netlink.open_socket()
        try:
            with pytest.raises(netlink.NetlinkError):
                netlink.request(s, *_with_an_unknown_expression())
            netlink.request(s, *owner_table.create(owners=False))
            netlink.join(s, [netlink.GROUP_NFTRACE])
            place.socket.close()
            place.socket = s
            s.setblocking(False)
            sender = net.socket(socket.SOCK_DGRAM)
            sender.sendto(b"?", ("10.5.0.1", 5000))
            packet, _ = seen(place, ("udp", "10.5.0.2", sender.getsockname()[1], "10.5.0.1", 5000))
        finally:
            s.close()
    assert packet.uid is None


def _with_an_unknown_expression() -> tuple[bytes, int]:
    batch, acks = owner_table.create()
    return batch.replace(b"log\0", b"lug\0"), acks

"""Comments of captured packets: what is known is said with its source, what is not known says so."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scapy.layers.inet import ICMP, IP, TCP, UDP
from scapy.layers.l2 import ARP, Ether
from scapy.packet import Raw

from lab.capture import headers
from lab.capture.taps import Direction, Frame
from lab.probe.captions import Captioner, Connection, Owner
from lab.trace.flows import Flow

POD, FAR, VIP, DNS, OUT = "10.244.1.1", "10.244.2.1", "10.96.20.30", "10.96.0.10", "203.0.113.20"
NAMES = {POD: "pod frontend.frontend", FAR: "pod catalog.catalog", VIP: "VIP of catalog.catalog", DNS: "cluster DNS"}
NAMES |= {OUT: "external host unknown", "169.254.1.1": "the node"}
APP, ENVOY, AGENT = Owner(1000, "app"), Owner(1337, "Envoy"), Owner(1337, "agent")
HELLO_DONE = b"\x17\x03\x03\x00\x05hello"

OUTBOUND = Connection(
    original=Flow("tcp", POD, 40000, VIP, 8080),
    changed=Flow("tcp", POD, 40000, "127.0.0.1", 15001),
    captured_to=15001,
    rule="nat ISTIO_REDIRECT 1",
    client=APP,
    server=ENVOY,
)
UPSTREAM = Connection(Flow("tcp", POD, 50000, FAR, 8080), Flow("tcp", POD, 50000, FAR, 8080), client=ENVOY)


def tell(
    flow: Flow,
    connection: Connection | None,
    *,
    direction: Direction = "lo",
    pod: str = POD,
    flags: str = "A",
    payload: bytes = b"",
) -> str:
    upper = (
        TCP(sport=flow.sport, dport=flow.dport, flags=flags)
        if flow.proto == "tcp"
        else UDP(sport=flow.sport, dport=flow.dport)
    )
    data = bytes(Ether() / IP(src=flow.src, dst=flow.dst) / upper / Raw(payload))
    frame = Frame("lo" if direction == "lo" else "eth0", direction, 0, data)
    known = replace(connection) if connection else None
    return Captioner(frozenset({pod}), NAMES).caption(frame, headers.decode(data), known)


def test_an_apps_packet_to_a_vip_names_it_and_the_port_it_is_turned_to() -> None:
    assert tell(Flow("tcp", POD, 40000, "127.0.0.1", 15001), OUTBOUND, flags="S") == (
        "app (uid 1000) -> 10.96.20.30:8080 (VIP of catalog.catalog): DNAT to 15001 (Envoy) by nat ISTIO_REDIRECT 1; SYN "
        "[conntrack, sock_diag, nftrace, manifests, packet]"
    )


def test_the_answer_on_lo_has_its_translation_undone_already() -> None:
    assert tell(Flow("tcp", VIP, 8080, POD, 40000), OUTBOUND, flags="SA") == (
        "Envoy (15001) -> app (uid 1000): answers as 10.96.20.30:8080 (VIP of catalog.catalog); SYN-ACK "
        "[conntrack, sock_diag, manifests, packet]"
    )


@pytest.mark.parametrize(
    ("secure", "payload", "said"),
    [("", b"", ""), ("mTLS", HELLO_DONE, ", mTLS; TLS data"), ("", HELLO_DONE, ", TLS; TLS data")],
)
def test_envoys_own_connection_names_its_endpoint(secure: str, payload: bytes, said: str) -> None:
    known = replace(UPSTREAM, secure=secure)
    assert tell(Flow("tcp", POD, 50000, FAR, 8080), known, direction="out", payload=payload) == (
        f"Envoy (uid 1337) -> endpoint 10.244.2.1:8080 (pod catalog.catalog){said} [conntrack, sock_diag, manifests, packet]"
    )
    assert tell(Flow("tcp", FAR, 8080, POD, 50000), known, direction="in", payload=payload).startswith(
        f"endpoint 10.244.2.1:8080 (pod catalog.catalog) -> Envoy (uid 1337): answers{said} ["
    )


def test_what_envoy_wrote_earlier_of_a_kept_connection_is_used_and_named() -> None:
    known = replace(UPSTREAM, cluster="outbound|8080||catalog", secure="mTLS")
    assert tell(Flow("tcp", POD, 50000, FAR, 8080), known, direction="out").endswith(
        ", cluster outbound|8080||catalog, mTLS [conntrack, sock_diag, access-log, manifests, packet]"
    )


def test_an_inbound_packet_names_where_it_arrives() -> None:
    flow = Flow("tcp", POD, 50000, FAR, 8080)
    known = Connection(flow, Flow("tcp", POD, 50000, FAR, 15006), 0, 15006, "nat ISTIO_IN_REDIRECT 1", server=ENVOY)
    assert tell(flow, known, direction="in", pod=FAR, flags="S") == (
        "inbound: 10.244.1.1:50000 (pod frontend.frontend) -> this pod's 8080: arrives at 15006 (Envoy), DNAT by nat "
        "ISTIO_IN_REDIRECT 1; SYN [conntrack, sock_diag, nftrace, manifests, packet]"
    )
    assert tell(flow.reversed(), known, direction="out", pod=FAR).startswith(
        "Envoy (15006) -> 10.244.1.1:50000 (pod frontend.frontend): answers as 10.244.2.1:8080 (this pod)"
    )


def test_the_far_envoy_comes_to_its_app_from_127_0_0_6() -> None:
    flow = Flow("tcp", "127.0.0.6", 37412, FAR, 8080)
    known = Connection(flow, flow, client=ENVOY, server=APP)
    assert tell(flow, known, pod=FAR, flags="PA", payload=b"GET / HTTP/1.1\r\n\r\n") == (
        "Envoy (uid 1337) -> app (uid 1000), port 8080: the app sees 127.0.0.6:37412; GET / HTTP/1.1 [conntrack, sock_diag, packet]"
    )
    assert "app (uid 1000) -> Envoy (uid 1337): answers to 127.0.0.6:37412" in tell(flow.reversed(), known, pod=FAR)


def test_with_tproxy_the_app_sees_the_clients_own_address() -> None:
    flow = Flow("tcp", POD, 53258, FAR, 8080)
    known = Connection(flow, flow, client=ENVOY, server=APP)
    assert tell(flow, known, pod=FAR).startswith(
        "Envoy (uid 1337) -> app (uid 1000), port 8080: the app sees 10.244.1.1:53258"
    )
    admin = Connection(flow, flow, client=AGENT, server=ENVOY)
    assert tell(flow, admin, pod=FAR).startswith("agent (uid 1337) -> Envoy (uid 1337) (8080): within the pod")


def test_a_lookup_names_zone_and_question() -> None:
    import dns.message

    asked = Flow("udp", POD, 41000, DNS, 53)
    known = Connection(asked, Flow("udp", POD, 41000, "127.0.0.1", 15053), 2, 15053, client=None, server=AGENT)
    query = dns.message.make_query("catalog.catalog.", "A").to_wire()
    assert tell(Flow("udp", POD, 41000, "127.0.0.1", 15053), known, payload=query) == (
        "10.244.1.1:41000 (its process is not known) -> 10.96.0.10:53 (cluster DNS): DNAT to 15053 (agent), zone 2; "
        "DNS A catalog.catalog.? [conntrack, sock_diag, manifests, packet]"
    )


def test_an_uncaptured_packet_names_the_rule_that_let_it_go() -> None:
    flow = Flow("tcp", POD, 40000, OUT, 80)
    known = Connection(flow, flow, rule="nat ISTIO_OUTPUT 4", client=Owner(1337))
    assert tell(flow, known, direction="out", flags="S") == (
        "a process (uid 1337) -> 203.0.113.20:80 (external host unknown): not captured by nat ISTIO_OUTPUT 4; SYN "
        "[conntrack, sock_diag, nftrace, manifests, packet]"
    )


def test_of_a_sender_that_is_gone_the_user_is_named_and_who_says_so() -> None:
    flow = Flow("tcp", POD, 40000, OUT, 80)
    gone = Owner(1337, user="proxy", source="nflog")
    assert tell(flow, Connection(flow, flow, client=gone), direction="out", flags="S") == (
        "a process of the proxy's user (uid 1337) -> 203.0.113.20:80 (external host unknown): not captured; SYN "
        "[conntrack, nflog, manifests, packet]"
    )
    turned = Connection(flow, Flow("tcp", POD, 40000, "127.0.0.1", 15001), 0, 15001, client=gone, server=ENVOY)
    assert tell(Flow("tcp", POD, 40000, "127.0.0.1", 15001), turned, flags="S").endswith(
        "DNAT to 15001 (Envoy); SYN [conntrack, nflog, sock_diag, manifests, packet]"
    )


def test_the_trace_alone_is_no_dnat() -> None:
    flow = Flow("tcp", POD, 50000, FAR, 8080)
    known = Connection(flow, flow, 0, 15006, "mangle ISTIO_TPROXY 2", by_trace=True, server=ENVOY)
    said = tell(flow, known, direction="in", pod=FAR)
    assert "arrives at 15006 (Envoy), given by mangle ISTIO_TPROXY 2" in said
    assert "DNAT" not in said


def test_an_answer_to_a_pod_that_nothing_tracks_is_told_by_who_began() -> None:
    flow = Flow("tcp", POD, 40000, VIP, 8080)
    known = Connection(opened=flow, client=APP)
    assert tell(flow.reversed(), known, direction="in", flags="SA") == (
        "10.96.20.30:8080 (VIP of catalog.catalog) -> app (uid 1000): answers; SYN-ACK [sock_diag, manifests, packet]"
    )


def test_what_is_not_known_says_so() -> None:
    flow = Flow("tcp", POD, 40000, "198.51.100.1", 80)
    known = Connection(unknown="conntrack told nothing of this flow")
    assert tell(flow, known, direction="out") == (
        "10.244.1.1:40000 (this pod) -> 198.51.100.1:80; what netfilter did is not known: conntrack told nothing "
        "of this flow [packet]"
    )


def test_a_client_hello_makes_a_connection_known_as_mutual_tls() -> None:
    from test_probe_speech import client_hello

    known = replace(UPSTREAM)
    flow = UPSTREAM.original
    assert flow is not None
    captioner = Captioner(frozenset({POD}), NAMES)

    def said(payload: bytes) -> str:
        segment = TCP(sport=flow.sport, dport=flow.dport, flags="PA")
        data = bytes(Ether() / IP(src=flow.src, dst=flow.dst) / segment / Raw(payload))
        return captioner.caption(Frame("eth0", "out", 0, data), headers.decode(data), known)

    assert "mTLS; TLS ClientHello, SNI catalog.example, ALPN istio-peer-exchange,istio [" in said(
        client_hello("catalog.example", "istio-peer-exchange", "istio")
    )
    assert ", mTLS; TLS data [" in said(HELLO_DONE), "later records do not take it back"


def test_packets_that_are_no_flows() -> None:
    captioner = Captioner(frozenset({POD}), NAMES)

    def said(packet: object) -> str:
        data = bytes(packet)  # type: ignore[call-overload]
        return captioner.caption(Frame("eth0", "in", 0, data), headers.decode(data), None)

    assert said(Ether() / ARP(op=1, psrc=POD, pdst="169.254.1.1")) == (
        "ARP: 10.244.1.1 asks who has 169.254.1.1 [packet]"
    )
    about = IP(src=POD, dst="169.254.1.1") / UDP(sport=41000, dport=9)
    assert said(Ether() / IP(src="169.254.1.1", dst=POD) / ICMP(type=3, code=3) / about) == (
        "169.254.1.1 (the node) -> 10.244.1.1 (this pod): icmp port unreachable about 10.244.1.1:41000 -> 169.254.1.1:9 "
        "[packet, manifests]"
    )
    assert said(Ether() / IP(src=POD, dst=FAR) / ICMP(type=8, id=7)) == (
        "10.244.1.1 (this pod) -> 10.244.2.1 (pod catalog.catalog): echo request, id 7 [packet, manifests]"
    )
    fence = Ether() / IP(src=POD, dst="169.254.1.1") / UDP(sport=1, dport=9) / Raw(b"sidecarlab-fence-00")
    assert said(fence) == "a fence of the lab's own: a verify or trace is under way [packet]"
    assert said(Ether(type=0x88CC) / Raw(b"x")) == "no IP packet (type 0x88cc) [packet]"

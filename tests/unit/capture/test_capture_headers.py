"""Headers of captured packets, made by scapy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scapy.layers.inet import ICMP, IP, TCP, UDP
from scapy.layers.inet6 import ICMPv6EchoRequest, IPv6, IPv6ExtHdrHopByHop
from scapy.layers.l2 import ARP, Ether
from scapy.packet import Raw

from lab.capture import headers
from lab.trace.flows import Flow

APP = Flow("tcp", "10.244.1.1", 40000, "10.96.20.30", 8080)
V4 = Ether() / IP(src="10.244.1.1", dst="10.96.20.30")


def test_tcp_gives_flow_flags_and_payload() -> None:
    packet = V4 / TCP(sport=40000, dport=8080, flags="PA", options=[("NOP", None)] * 4) / Raw(b"GET / ")
    assert headers.decode(bytes(packet)) == (0x0800, APP, "PA", None, b"GET / ")


@pytest.mark.parametrize(("flags", "begins"), [("S", True), ("SA", False), ("A", False), ("R", False), ("SEC", True)])
def test_a_syn_alone_begins(flags: str, begins: bool) -> None:
    assert headers.decode(bytes(V4 / TCP(flags=flags))).begins is begins


def test_padding_of_a_short_frame_is_no_payload() -> None:
    packet = bytes(V4 / UDP(sport=1, dport=2) / Raw(b"ab"))
    assert headers.decode(packet + bytes(20)).payload == b"ab"


def test_ipv6_extensions_are_passed() -> None:
    packet = Ether() / IPv6(src="fd00::1", dst="fd00::2") / IPv6ExtHdrHopByHop() / TCP(sport=1, dport=2) / Raw(b"x")
    decoded = headers.decode(bytes(packet))
    assert (decoded.flow, decoded.payload) == (Flow("tcp", "fd00::1", 1, "fd00::2", 2), b"x")


def test_icmp_gives_type_and_code_and_what_it_is_about() -> None:
    inner = IP(src="10.96.20.30", dst="10.244.1.1") / UDP(sport=9, dport=41000)
    decoded = headers.decode(bytes(V4 / ICMP(type=3, code=3) / inner))
    assert decoded.icmp == (3, 3)
    assert decoded.payload == bytes(inner)
    assert headers.decode(bytes(Ether() / IPv6() / ICMPv6EchoRequest())).icmp == (128, 0)


def test_arp_in_words() -> None:
    asked = bytes(Ether() / ARP(op=1, psrc="10.244.1.1", pdst="169.254.1.1"))
    told = bytes(Ether() / ARP(op=2, psrc="169.254.1.1", hwsrc="ee:ee:ee:ee:ee:ee"))
    assert headers.decode(asked).kind == headers.ARP
    assert headers.arp(asked) == "10.244.1.1 asks who has 169.254.1.1"
    assert headers.arp(told) == "169.254.1.1 is at ee:ee:ee:ee:ee:ee"


@given(st.integers(0, 80), st.sampled_from(["tcp", "udp", "icmp", "six"]))
def test_a_packet_cut_anywhere_is_read_as_far_as_it_goes(size: int, kind: str) -> None:
    upper = {"tcp": TCP(), "udp": UDP(), "icmp": ICMP()}
    whole = bytes(Ether() / IPv6() / TCP() / Raw(b"x") if kind == "six" else V4 / upper[kind] / Raw(b"x" * 8))
    decoded = headers.decode(whole[:size])
    assert decoded.payload in whole
    assert size < 34 or decoded.flow is not None or kind == "six"


@given(st.binary(max_size=120))
def test_no_bytes_are_too_strange(data: bytes) -> None:
    headers.decode(data)
    headers.arp(data)

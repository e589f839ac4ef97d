"""The netlink codecs, on messages as the kernel wrote them (6.18), and on damaged ones."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.trace import conntrack, netlink, nflog, nftrace, owner_table
from lab.trace.flows import Flow, parse_headers

IP = bytes.fromhex("4500003ceb5940004006293f0a0909090a090909")
TCP = bytes.fromhex("a7f0005039b3d95b00000000a002ffd726520000")
FLOW = Flow("tcp", "10.9.9.9", 42992, "10.9.9.9", 80)


def be32(value: int) -> bytes:
    return struct.pack(">I", value & 0xFFFFFFFF)


def body(family: int, *attrs: tuple[int, bytes]) -> bytes:
    return bytes([family, 0, 0, 0]) + b"".join(netlink.attribute(k, v) for k, v in attrs)


def verdict(code: int, chain: str = "") -> bytes:
    value = netlink.attribute(1, be32(code))
    return value + (netlink.attribute(2, chain.encode() + b"\0") if chain else b"")


def trace(kind: int, *more: tuple[int, bytes]) -> bytes:
    return body(2, (15, be32(2)), (4, be32(kind)), (6, be32(0x731EF4DD)), (2, b"OUTPUT\0"), (1, b"nat\0"), *more)


def test_a_jump_with_the_packets_headers() -> None:
    payload = trace(3, (3, (4).to_bytes(8, "big")), (5, verdict(-3, "R")), (12, be32(1)), (8, IP), (9, TCP))
    assert nftrace.decode(payload) == nftrace.NftTrace(
        trace_id=0x731EF4DD,
        family="ip",
        table="nat",
        chain="OUTPUT",
        kind="rule",
        verdict="jump",
        handle=4,
        target="R",
        flow=FLOW,
        oif=1,
    )


@pytest.mark.parametrize(
    ("kind", "attrs", "expected"),
    [
        (3, [(3, (2).to_bytes(8, "big")), (5, verdict(1))], ("rule", "accept", 2)),
        (2, [(3, (2).to_bytes(8, "big")), (5, verdict(-5))], ("rule", "return", 2)),
        (3, [(5, verdict(-1))], ("return", "continue", None)),
        (2, [(5, verdict(-1))], ("return", "continue", None)),
        (1, [(16, be32(1))], ("policy", "accept", None)),
        (1, [(16, be32(0))], ("policy", "drop", None)),
    ],
    ids=["accept", "explicit return", "end of a chain", "end of a chain, type return", "policy", "policy drop"],
)
def test_what_a_trace_message_means(kind: int, attrs: list[tuple[int, bytes]], expected: object) -> None:
    decoded = nftrace.decode(trace(kind, *attrs))
    assert decoded is not None
    assert (decoded.kind, decoded.verdict, decoded.handle) == expected
    assert decoded.flow is None


def packet_hdr(hook: int) -> tuple[int, bytes]:
    return 1, struct.pack(">HBB", 0x800, hook, 0)


def test_a_legacy_trace_line() -> None:
    payload = body(2, packet_hdr(3), (10, b"TRACE: nat:ISTIO_OUTPUT:rule:9 \0"), (5, be32(1)), (9, IP + TCP))
    assert nflog.decode(payload) == nflog.LegacyTrace("nat", "ISTIO_OUTPUT", "rule", 9, "output", FLOW, oif=1)


@pytest.mark.parametrize("kind", ["policy", "return"])
def test_the_other_legacy_lines(kind: str) -> None:
    payload = body(2, packet_hdr(0), (10, f"TRACE: nat:PREROUTING:{kind}:2 ".encode() + b"\0"), (9, IP + TCP))
    line = nflog.decode(payload)
    assert line is not None
    assert (line.kind, line.hook) == (kind, "prerouting")


def test_a_chain_whose_name_holds_colons() -> None:
    payload = body(2, packet_hdr(3), (10, b"TRACE: nat:rule:3:x:rule:7 \0"), (9, IP + TCP))
    line = nflog.decode(payload)
    assert line is not None
    assert (line.chain, line.position) == ("rule:3:x", 7)


def test_what_somebody_else_logs_is_no_trace_line() -> None:
    assert nflog.decode(body(2, packet_hdr(3), (10, b"dropped: \0"), (9, IP + TCP))) is None


def ct_tuple(src: str, sport: int, dst: str, dport: int, proto: int = 6) -> bytes:
    ip = netlink.attribute(1, parse4(src)) + netlink.attribute(2, parse4(dst))
    ports = netlink.attribute(2, struct.pack(">H", sport)) + netlink.attribute(3, struct.pack(">H", dport))
    if proto == 1:
        ports = netlink.attribute(4, struct.pack(">H", sport))
    return netlink.attribute(1, ip) + netlink.attribute(2, netlink.attribute(1, bytes([proto])) + ports)


def parse4(address: str) -> bytes:
    return bytes(int(p) for p in address.split("."))


def test_a_conntrack_event_in_a_zone() -> None:
    payload = body(
        2,
        (1, ct_tuple("10.0.0.1", 40000, "10.96.0.10", 53, 17)),
        (2, ct_tuple("127.0.0.1", 15053, "10.0.0.1", 40000, 17)),
        (3, be32(0x1A8)),
        (12, be32(7)),
        (18, struct.pack(">H", 2)),
    )
    event = conntrack.decode(conntrack.MSG_NEW, payload)
    assert event == conntrack.ConntrackEvent(
        event="new",
        original=Flow("udp", "10.0.0.1", 40000, "10.96.0.10", 53),
        reply=Flow("udp", "127.0.0.1", 15053, "10.0.0.1", 40000),
        zone=2,
        status=0x1A8,
        id=7,
    )
    assert conntrack.status_names(event.status) == ["dst-nat"]
    assert conntrack.status_names(0x1A8 | 6) == ["seen-reply", "assured", "dst-nat"]


def test_a_ping_is_named_by_its_identifier() -> None:
    payload = body(2, (1, ct_tuple("10.0.0.1", 77, "10.0.0.2", 0, 1)), (2, ct_tuple("10.0.0.2", 77, "10.0.0.1", 0, 1)))
    event = conntrack.decode(conntrack.MSG_DELETE, payload)
    assert event is not None
    assert event.event == "destroy"
    assert event.original == Flow("icmp", "10.0.0.1", 77, "10.0.0.2", 0)
    assert event.reply.reversed() == event.original


@pytest.mark.parametrize("decode", [nftrace.decode, nflog.decode, lambda p: conntrack.decode(conntrack.MSG_NEW, p)])
@given(payload=st.binary(min_size=4, max_size=120))
def test_no_decoder_fails_on_odd_bytes(decode, payload: bytes) -> None:
    decode(payload)


@given(st.lists(st.tuples(st.integers(1, 0x3FFF), st.binary(max_size=40)), unique_by=lambda a: a[0]))
def test_attributes_come_back_as_written(attrs: list[tuple[int, bytes]]) -> None:
    assert netlink.attributes(b"".join(netlink.attribute(k, v) for k, v in attrs)) == dict(attrs)


def test_a_truncated_attribute_is_left_out() -> None:
    whole = netlink.attribute(1, b"abcd")
    assert netlink.attributes(whole + netlink.attribute(2, b"efgh")[:-1]) == {1: b"abcd"}


def test_messages_of_one_datagram() -> None:
    data = netlink.message(0x0A11, 0, 2, b"abcd", seq=1) + netlink.message(0x0100, 0, 2, b"efgh", seq=2)
    assert [(k, s, p[4:]) for k, s, p in netlink.messages(data)] == [(0x0A11, 1, b"abcd"), (0x0100, 2, b"efgh")]
    assert list(netlink.messages(data[:-1]))[1:] == []


@pytest.mark.parametrize(
    ("packet", "flow"),
    [
        (IP + TCP, FLOW),
        (b"\x46" + IP[1:] + bytes(4) + TCP, FLOW),
        (IP[:9] + b"\x01" + IP[10:] + b"\x08\0\0\0\0\x4d\0\x01", Flow("icmp", "10.9.9.9", 77, "10.9.9.9", 0)),
        (IP[:9] + b"\x84" + IP[10:], Flow("132", "10.9.9.9", 0, "10.9.9.9", 0)),
        (
            b"\x60\0\0\0\0\x08\x11\x40" + bytes(15) + b"\x01" + bytes(15) + b"\x02" + b"\0\x35\x12\x34",
            Flow("udp", "::1", 53, "::2", 0x1234),
        ),
        (
            b"\x60\0\0\0\0\x08\0\x40" + bytes(15) + b"\x01" + bytes(15) + b"\x02" + b"\x06\0" + bytes(6) + TCP,
            Flow("tcp", "::1", 42992, "::2", 80),
        ),
        (IP[:19], None),
        (b"", None),
    ],
    ids=["tcp", "with IP options", "ping", "sctp", "v6 udp", "v6 with hop-by-hop options", "short", "empty"],
)
def test_the_flow_of_a_packet(packet: bytes, flow: Flow | None) -> None:
    assert parse_headers(packet) == flow


def test_the_owner_table_is_one_batch_that_names_its_owner() -> None:
    data, acks = owner_table.create()
    kinds = [kind for kind, _, _ in netlink.messages(data)]
    assert kinds[0] == 0x10
    assert kinds[-1] == 0x11
    assert acks == len(kinds) - 2
    _, _, table = list(netlink.messages(data))[1]
    family, attrs = netlink.family_and_attributes(table)
    assert family == 1
    assert netlink.string(attrs[1]) == owner_table.NAME
    assert netlink.number(attrs[2]) == 2

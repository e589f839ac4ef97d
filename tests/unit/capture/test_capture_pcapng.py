"""pcapng as another reader sees it (scapy's), and as the specification's block structure has it."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st
from scapy.utils import RawPcapNgReader

from lab.capture import pcapng

FRAME = bytes(12) + b"\x08\x00" + bytes(46)
WHEN = 1_796_022_868_123_456_789


def blocks(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Type and body of each block; both of its lengths must agree, and be a multiple of four."""
    at = 0
    while at < len(data):
        kind, size = struct.unpack_from("=II", data, at)
        assert size % 4 == 0
        assert size >= 12
        assert struct.unpack_from("=I", data, at + size - 4) == (size,)
        yield kind, data[at + 8 : at + size - 4]
        at += size
    assert at == len(data)


def options(data: bytes) -> dict[int, bytes]:
    found = {}
    at = 0
    while True:
        code, size = struct.unpack_from("=HH", data, at)
        if code == 0:
            assert (size, at + 4) == (0, len(data))
            return found
        found[code] = data[at + 4 : at + 4 + size]
        at += 4 + size + (-size % 4)


def file(*packets: bytes) -> bytes:
    head = pcapng.section("lab", "Linux", "a pod")
    return head + pcapng.interface("lo", "loopback") + pcapng.interface("eth0", "the link") + b"".join(packets)


def test_another_reader_finds_packet_time_interface_direction_and_comment() -> None:
    data = file(
        pcapng.packet(0, WHEN, FRAME, len(FRAME), 0, "app -> VIP"),
        pcapng.packet(1, WHEN + 1, FRAME + b"x", 9000, pcapng.OUTBOUND, "Envoy → endpoint"),
    )
    (first, one), (second, two) = list(RawPcapNgReader(io.BytesIO(data)))
    assert (first, second) == (FRAME, FRAME + b"x")
    assert [m.ifname for m in (one, two)] == [b"lo", b"eth0"]
    assert [m.comments for m in (one, two)] == [[b"app -> VIP"], ["Envoy → endpoint".encode()]]
    assert (two.wirelen, two.direction) == (9000, pcapng.OUTBOUND)
    assert one.tsresol == 10**9
    assert [(m.tshigh << 32) + m.tslow for m in (one, two)] == [WHEN, WHEN + 1]


def test_blocks_are_those_of_the_specification() -> None:
    data = file(pcapng.packet(1, WHEN, FRAME, 60, 1, "c")) + pcapng.statistics(1, WHEN, WHEN + 5, 12, 3)
    kinds = [kind for kind, _ in blocks(data)]
    assert kinds == [0x0A0D0D0A, 1, 1, 6, 5]
    bodies = [body for _, body in blocks(data)]
    assert struct.unpack_from("=IHHq", bodies[0]) == (0x1A2B3C4D, 1, 0, -1)
    assert options(bodies[0][16:]) == {1: b"a pod", 3: b"Linux", 4: b"lab"}
    assert struct.unpack_from("=HHI", bodies[1]) == (1, 0, pcapng.SNAPLEN)
    assert options(bodies[2][8:]) == {2: b"eth0", 3: b"the link", 9: b"\x09"}
    statistics = options(bodies[4][12:])
    assert struct.unpack("=Q", statistics[4]) + struct.unpack("=Q", statistics[5]) == (12, 3)
    assert struct.unpack("=II", statistics[3]) == ((WHEN + 5) >> 32, (WHEN + 5) & 0xFFFFFFFF)


@given(st.binary(max_size=200), st.text(max_size=100), st.integers(0, 2**63 - 1))
def test_any_packet_and_any_comment_come_back_whole(data: bytes, comment: str, when: int) -> None:
    made = pcapng.packet(0, when, data, len(data), 0, comment.encode(errors="ignore").decode())
    ((kind, body),) = blocks(made)
    number, high, low, size, length = struct.unpack_from("=IIIII", body)
    assert (kind, number, (high << 32) + low, size, length) == (6, 0, when, len(data), len(data))
    assert body[20 : 20 + size] == data
    assert options(body[20 + size + (-size % 4) :])[1] == comment.encode(errors="ignore")


def test_a_comment_that_no_option_can_hold_is_cut_between_characters() -> None:
    made = pcapng.packet(0, WHEN, b"", 0, 0, "é" * 40_000)
    ((_, body),) = blocks(made)
    assert options(body[20:])[1].decode() == "é" * 32_767

"""Wire form of DNS answers, sizes and the parser of queries (spec: agent 12.2, 12.5)."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable

import dns.flags
import dns.message
import dns.name
import dns.opcode
import dns.rcode
import dns.rdatatype
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.dns.message import (
    FORMERR,
    NOTIMP,
    SERVFAIL,
    LocalAnswer,
    Verdict,
    error_reply,
    local_answer,
    parse_query,
)
from agent.dns.table import LookupTable, ProxyNames, build_table
from agent.protos import nds_pb2

HOST = "big.ns1.svc.cluster.local."


def table_of(count: int, host: str = HOST, v6: int = 0) -> LookupTable:
    table = nds_pb2.NameTable()
    info = table.table[host.removesuffix(".")]
    info.ips.extend(f"10.1.{n // 250}.{n % 250 + 1}" for n in range(count))
    info.ips.extend(f"2001:db8::{n + 1:x}" for n in range(v6))
    info.registry = "External"
    return build_table(table, ProxyNames("ns1", "ns1.svc.cluster.local", ("ns1.svc.cluster.local",)))


def answer(wire: bytes, table: LookupTable, size: int | None = None) -> tuple[bytes, dns.message.Message]:
    query = parse_query(wire)
    found = local_answer(query, table, size or query.udp_size)
    assert found is not None
    reply = wire[:2] + found.reply()
    return reply, dns.message.from_wire(reply)


def addresses(message: dns.message.Message) -> list[str]:
    return [rdata.to_text() for rrset in message.answer for rdata in rrset if rdata.rdtype != dns.rdatatype.CNAME]


def ordered(reply: bytes) -> list[str]:
    message = dns.message.from_wire(reply, one_rr_per_rrset=True)
    return [rrset[0].to_text() for rrset in message.answer]


def test_header_of_a_local_answer() -> None:
    query = dns.message.make_query(HOST, "A")
    query.flags |= dns.flags.CD
    reply, message = answer(query.to_wire(), table_of(1))
    assert message.id == query.id
    assert message.rcode() == dns.rcode.NOERROR
    assert message.flags == dns.flags.QR | dns.flags.AA | dns.flags.RD | dns.flags.CD
    assert len(message.authority) == len(message.additional) == 0
    query.flags = 0
    assert answer(query.to_wire(), table_of(1))[1].flags == dns.flags.QR | dns.flags.AA
    assert reply[:2] == struct.pack("!H", message.id)


def test_an_edns_query_gets_no_opt_record() -> None:
    query = dns.message.make_query(HOST, "A", use_edns=0, payload=1232)
    _, message = answer(query.to_wire(), table_of(1))
    assert message.edns == -1


def test_the_question_keeps_its_case_and_records_are_lower_case() -> None:
    query = dns.message.make_query("BIG.Ns1.svc.Cluster.local.", "A")
    reply, message = answer(query.to_wire(), table_of(2))
    assert message.question[0].name.to_text() == "BIG.Ns1.svc.Cluster.local."
    assert b"\x03big\x03ns1\x03svc\x07cluster\x05local\0\0\x01\0\x01\0\0\0\x1e" in reply


def test_42_addresses_without_edns_fit_512_bytes_with_tc() -> None:
    query = dns.message.make_query(HOST, "A")
    reply, message = answer(query.to_wire(), table_of(42))
    assert len(reply) <= 512
    assert message.flags & dns.flags.TC
    found = addresses(message)
    assert len(found) == (512 - 12 - 31 - 0) // 16
    assert len(set(found)) == len(found)


def test_42_addresses_over_tcp_are_whole_and_uncompressed() -> None:
    query = dns.message.make_query(HOST, "A")
    reply, message = answer(query.to_wire(), table_of(42), 65535)
    assert not message.flags & dns.flags.TC
    assert len(set(addresses(message))) == 42
    assert reply.count(b"\x03big") == 43


def test_compression_comes_before_truncation() -> None:
    query = dns.message.make_query(HOST, "A")
    reply, message = answer(query.to_wire(), table_of(20))
    assert len(reply) == 12 + 31 + 20 * 16
    assert not message.flags & dns.flags.TC
    assert len(addresses(message)) == 20


def test_compression_of_a_mixed_case_question_keeps_records_lower_case() -> None:
    query = dns.message.make_query("BIG.ns1.svc.cluster.local.", "A")
    reply, message = answer(query.to_wire(), table_of(20))
    assert reply.count(b"\x03big") == 1
    assert len(addresses(message)) == 20
    assert len(reply) <= 512


def test_the_edns_size_counts() -> None:
    query = dns.message.make_query(HOST, "A", use_edns=0, payload=1400)
    _, message = answer(query.to_wire(), table_of(42))
    assert len(addresses(message)) == 42
    small = dns.message.make_query(HOST, "A", use_edns=0, payload=100)
    reply, message = answer(small.to_wire(), table_of(42))
    assert 480 < len(reply) <= 512


def test_cname_comes_first_also_when_compressed() -> None:
    name = "big.ns1.svc.cluster.local.ns1.svc.cluster.local."
    table = nds_pb2.NameTable()
    table.table["www.example.com"].ips.extend(f"10.0.0.{n}" for n in range(1, 43))
    lookup = build_table(table, ProxyNames("", "", ("ns1.svc.cluster.local",)))
    query = dns.message.make_query("www.example.com.ns1.svc.cluster.local.", "A")
    for size in (512, 65535):
        reply, _ = answer(query.to_wire(), lookup, size)
        records = ordered(reply)
        assert records[0] == "www.example.com."
        assert all(record.startswith("10.0.0.") for record in records[1:])
        assert len(reply) <= size
    assert name.endswith("ns1.svc.cluster.local.")


def test_two_addresses_change_places() -> None:
    query = dns.message.make_query(HOST, "A").to_wire()
    table = table_of(2)
    firsts = Counter(ordered(answer(query, table)[0])[0] for _ in range(400))
    assert set(firsts) == {"10.1.0.1", "10.1.0.2"}
    assert min(firsts.values()) > 100


def test_more_addresses_are_shuffled() -> None:
    query = dns.message.make_query(HOST, "A").to_wire()
    table = table_of(3)
    orders = Counter(tuple(ordered(answer(query, table)[0])) for _ in range(1200))
    assert len(orders) == 6
    assert min(orders.values()) > 100


def test_a_truncated_answer_holds_a_random_choice() -> None:
    query = dns.message.make_query(HOST, "A").to_wire()
    table = table_of(60)
    seen = {address for _ in range(60) for address in ordered(answer(query, table)[0])}
    assert len(seen) == 60


def test_answers_that_cannot_change_are_fixed_bytes() -> None:
    query = parse_query(dns.message.make_query(HOST, "A").to_wire())
    one = local_answer(query, table_of(1), 512)
    none = local_answer(query, table_of(0, v6=1), 512)
    many = local_answer(query, table_of(3), 512)
    assert isinstance(one, LocalAnswer)
    assert isinstance(none, LocalAnswer)
    assert isinstance(many, LocalAnswer)
    assert one.fixed is not None
    assert none.fixed is not None
    assert many.fixed is None


def test_nodata_has_no_soa() -> None:
    query = dns.message.make_query(HOST, "AAAA")
    _, message = answer(query.to_wire(), table_of(1))
    assert message.rcode() == dns.rcode.NOERROR
    assert message.flags & dns.flags.AA
    assert not message.answer
    assert not message.authority


@pytest.mark.parametrize(
    ("data", "verdict"),
    [
        (b"", Verdict.MALFORMED),
        (b"\0" * 11, Verdict.MALFORMED),
        (b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0", Verdict.MALFORMED),
        (b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0\x03abc", Verdict.MALFORMED),
        (b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0\xc0\x0c\0\x01\0\x01", Verdict.MALFORMED),
        (b"\x12\x34\x01\0\0\x01\0\0\0\0\0\x01\x01a\0\0\x01\0\x01", Verdict.MALFORMED),
        (b"\x12\x34\x81\0\0\x01\0\0\0\0\0\0\x01a\0\0\x01\0\x01", Verdict.IGNORED),
        (b"\x12\x34\x01\0\0\0\0\0\0\0\0\0", Verdict.NO_QUESTION),
        (b"\x12\x34\x29\0\0\x01\0\0\0\0\0\0\x01a\0\0\x01\0\x01", Verdict.REJECTED),
        (b"\x12\x34\x01\0\0\x01\0\x02\0\0\0\0\x01a\0\0\x01\0\x01", Verdict.REJECTED),
        (b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0\x01a\0\0\x01\0\x01", Verdict.QUESTION),
        (b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0\x01a\0\0\x01\0\x01trailing", Verdict.QUESTION),
    ],
)
def test_verdicts(data: bytes, verdict: Verdict) -> None:
    assert parse_query(data).verdict is verdict


def test_rejections_carry_their_code() -> None:
    update = parse_query(b"\x12\x34\x29\0\0\x01\0\0\0\0\0\0\x01a\0\0\x01\0\x01")
    assert update.rcode == NOTIMP
    message = dns.message.from_wire(error_reply(b"\x12\x34", update, update.rcode), question_only=True)
    assert message.rcode() == dns.rcode.NOTIMP
    answers = parse_query(b"\x12\x34\x01\0\0\x01\0\x02\0\0\0\0\x01a\0\0\x01\0\x01")
    assert answers.rcode == FORMERR


def test_error_replies_echo_the_question() -> None:
    query = dns.message.make_query("Some.Name.", "TXT")
    wire = query.to_wire()
    message = dns.message.from_wire(error_reply(wire, parse_query(wire), SERVFAIL))
    assert message.rcode() == dns.rcode.SERVFAIL
    assert query.is_response(message)
    assert message.flags & dns.flags.RD
    assert not message.flags & dns.flags.AA


def test_only_the_first_question_counts() -> None:
    query = dns.message.make_query(HOST, "A")
    query.question.append(dns.message.make_query("other.example.", "TXT").question[0])
    wire = query.to_wire()
    _, message = answer(wire, table_of(1))
    assert [question.name.to_text() for question in message.question] == [HOST]
    assert not parse_query(wire).plain


@pytest.mark.parametrize(
    ("arguments", "plain"),
    [
        ({}, True),
        ({"use_edns": 0}, True),
        ({"use_edns": 0, "options": [dns.edns.GenericOption(10, b"12345678")]}, False),
    ],
)
def test_queries_with_options_are_not_kept(arguments: dict[str, object], plain: bool) -> None:
    wire = dns.message.make_query(HOST, "A", **arguments).to_wire()  # type: ignore[arg-type]
    assert parse_query(wire).plain is plain


LABEL = st.text(st.sampled_from("abcXYZ019-_"), min_size=1, max_size=12)


@given(st.binary(max_size=80))
@settings(max_examples=400, deadline=None)
def test_no_packet_crashes_the_parser(data: bytes) -> None:
    query = parse_query(data)
    if query.verdict is Verdict.QUESTION:
        local_answer(query, table_of(3), query.udp_size)


@given(st.binary(min_size=0, max_size=60), st.integers(0, 3), st.integers(0, 2))
@settings(max_examples=400, deadline=None)
def test_no_body_behind_a_good_header_crashes_the_parser(body: bytes, questions: int, additionals: int) -> None:
    data = b"\x12\x34\x01\0" + struct.pack("!HHHH", questions, 0, 0, additionals) + body
    query = parse_query(data)
    assert query.verdict in (Verdict.QUESTION, Verdict.NO_QUESTION, Verdict.MALFORMED)
    if query.verdict is Verdict.QUESTION:
        reply = error_reply(data, query, SERVFAIL)
        assert dns.message.from_wire(reply).question


@given(st.lists(LABEL, min_size=1, max_size=6), st.sampled_from(["A", "AAAA", "TXT"]), st.integers(0, 4096))
@settings(max_examples=200, deadline=None)
def test_what_dnspython_asks_is_understood(labels: list[str], rdtype: str, payload: int) -> None:
    name = ".".join(labels) + "."
    arguments = {"use_edns": 0, "payload": payload} if payload else {}
    wire = dns.message.make_query(name, rdtype, **arguments).to_wire()  # type: ignore[arg-type]
    query = parse_query(wire)
    assert query.verdict is Verdict.QUESTION
    assert query.plain
    assert query.lowered == dns.name.from_text(name.lower()).to_wire()
    assert query.type == dns.rdatatype.from_text(rdtype)
    assert query.udp_size == max(512, payload)


@given(st.integers(1, 90), st.integers(512, 1500), st.booleans())
@settings(max_examples=100, deadline=None)
def test_every_answer_fits_and_parses(count: int, size: int, upper: bool) -> None:
    name = HOST.upper() if upper else HOST
    query = dns.message.make_query(name, "A", use_edns=0, payload=size)
    reply, message = answer(query.to_wire(), table_of(count))
    assert len(reply) <= size
    found = addresses(message)
    assert bool(message.flags & dns.flags.TC) == (len(found) < count)
    assert found


@pytest.mark.parametrize("change", [str.lower, str.upper])
def test_an_alias_that_does_not_fit_is_left_out_too(change: Callable[[str], str]) -> None:
    # 237 bytes of name and 24 of search domain: with an upper-case question nothing can be pointed to.
    host = ".".join(("a" * 63, "b" * 63, "c" * 63, "d" * 38))
    table = nds_pb2.NameTable()
    table.table[host].ips.append("10.0.0.1")
    built = build_table(table, ProxyNames("ns1", "ns1.svc.cluster.local", ("svc.example",)))
    query = dns.message.make_query(change(f"{host}.svc.example"), "A")
    reply, message = answer(query.to_wire(), built)
    assert len(reply) <= 512
    assert message.flags & dns.flags.TC
    whole, _ = answer(query.to_wire(), built, 65535)
    assert addresses(dns.message.from_wire(whole)) == ["10.0.0.1"]

"""Packets and conntrack entries are found again by their 5-tuple."""

from __future__ import annotations

from lab.trace import owner_table
from lab.trace.conntrack import ConntrackEvent
from lab.trace.flows import Flow
from lab.trace.index import Index
from lab.trace.nflog import LegacyTrace
from lab.trace.nftrace import NftTrace

APP = Flow("tcp", "10.0.0.1", 40000, "10.96.0.5", 80)
TO_ENVOY = Flow("tcp", "10.0.0.1", 40000, "127.0.0.1", 15001)


def begins(trace_id: int, hook: str, flow: Flow) -> NftTrace:
    return NftTrace(trace_id, "inet", owner_table.NAME, hook, "rule", "continue", handle=3, flow=flow)


def rule(trace_id: int, chain: str, handle: int, verdict: str, flow: Flow | None = None) -> NftTrace:
    return NftTrace(trace_id, "ip", "nat", chain, "rule", verdict, handle=handle, flow=flow)


def line(chain: str, position: int, hook: str = "output", flow: Flow = APP, table: str = "nat", kind: str = "rule"):
    return LegacyTrace(table, chain, kind, position, hook, flow)


def query(flow: Flow) -> tuple[str, str, int, str, int]:
    return flow.proto, flow.src, flow.sport, flow.dst, flow.dport


def test_steps_of_one_trace_belong_to_the_packet_that_opened_it() -> None:
    index = Index()
    other = Flow("tcp", "10.0.0.1", 40001, "10.96.0.5", 80)
    index.add_nft(begins(1, "output", APP))
    index.add_nft(begins(2, "output", other))
    index.add_nft(rule(2, "OUTPUT", 4, "jump", other))
    index.add_nft(rule(1, "OUTPUT", 4, "jump", APP))
    index.add_nft(rule(1, "ISTIO_OUTPUT", 9, "return"))
    (packet,) = index.packets(*query(APP))
    assert [(s.chain, s.handle, s.base, s.backend) for s in packet.steps] == [
        ("OUTPUT", 4, "OUTPUT", "nft"),
        ("ISTIO_OUTPUT", 9, "OUTPUT", "nft"),
    ]


def test_a_trace_number_that_changed_on_the_way_is_joined_by_the_source() -> None:
    index = Index()
    index.add_nft(begins(1, "output", APP))
    index.add_nft(rule(7, "OUTPUT", 4, "accept", TO_ENVOY))
    assert [s.handle for s in index.packets(*query(APP))[0].steps] == [4]


def test_a_reused_trace_number_does_not_mix_two_packets() -> None:
    index = Index()
    other = Flow("tcp", "10.0.0.9", 5, "10.96.0.5", 80)
    index.add_nft(begins(1, "output", APP))
    index.add_nft(begins(9, "output", other))
    index.add_nft(rule(1, "OUTPUT", 4, "accept", other))
    assert index.packets(*query(APP))[0].steps == []
    assert len(index.packets(*query(other))[0].steps) == 1


def test_traces_of_packets_that_we_did_not_mark_are_ignored() -> None:
    index = Index()
    assert index.add_nft(rule(5, "OUTPUT", 4, "accept", APP)) is None
    assert index.add_nft(rule(5, "OUTPUT", 4, "accept")) is None
    assert index.packets(*query(APP)) == []


def test_legacy_lines_join_by_tuple_and_hook() -> None:
    index = Index()
    index.add_nft(begins(1, "output", APP))
    index.add_legacy(line("OUTPUT", 1))
    index.add_legacy(line("POSTROUTING", 1, "postrouting", TO_ENVOY, kind="policy"))
    index.add_nft(begins(2, "prerouting", TO_ENVOY))
    index.add_legacy(line("PREROUTING", 1, "prerouting", TO_ENVOY, kind="policy"))
    sent, arrived = index.packets("tcp", "10.0.0.1", 40000)
    assert [s.chain for s in sent.steps] == ["OUTPUT", "POSTROUTING"]
    assert [s.chain for s in arrived.steps] == ["PREROUTING"]


def test_a_packet_that_leaves_is_not_the_one_that_came_back_over_lo() -> None:
    """SYN, then the kernel's RST to the answer: the same source and destination, while the SYN has also arrived."""
    index = Index()
    index.add_nft(begins(1, "output", APP))
    index.add_nft(begins(2, "prerouting", TO_ENVOY))
    index.add_nft(begins(3, "output", APP))
    index.add_legacy(line("POSTROUTING", 1, "postrouting", TO_ENVOY))
    index.add_nft(rule(4, "POSTROUTING", 7, "accept", TO_ENVOY))
    syn, arrived, reset = index.packets("tcp", "10.0.0.1", 40000)
    assert (syn.steps, arrived.steps) == ([], [])
    assert [(s.chain, s.position, s.handle) for s in reset.steps] == [
        ("POSTROUTING", 1, None),
        ("POSTROUTING", None, 7),
    ]


def test_without_a_mark_the_raw_table_begins_a_packet() -> None:
    index = Index(marked=False)
    for _ in range(2):
        index.add_legacy(line("OUTPUT", 2, table="raw", kind="policy"))
        index.add_legacy(line("OUTPUT", 1))
    assert [[s.table for s in p.steps] for p in index.packets(*query(APP))] == [["raw", "nat"]] * 2


def event(kind: str = "new", status: int = 0, number: int = 1, zone: int = 0) -> ConntrackEvent:
    return ConntrackEvent(kind, APP, Flow("tcp", "127.0.0.1", 15001, "10.0.0.1", 40000), zone, status, number)


def test_an_entry_is_found_by_its_tuple_before_and_after_nat() -> None:
    index = Index()
    index.add_conntrack(event())
    for flow in (APP, TO_ENVOY):
        assert [e.reply.sport for e in index.conntrack(*query(flow))] == [15001]
    assert index.conntrack("tcp", "10.0.0.1", 40000, "10.96.0.5", 81) == []


def test_a_rewritten_source_port_still_leads_to_the_entry() -> None:
    index = Index()
    index.add_conntrack(ConntrackEvent("new", APP, Flow("tcp", "127.0.0.1", 15001, "10.0.0.1", 50123)))
    assert index.conntrack("tcp", "10.0.0.1", 50123, "127.0.0.1", 15001)
    assert index.conntrack(*query(APP))


def test_updates_add_up_and_zones_are_apart() -> None:
    index = Index()
    index.add_conntrack(event(status=0x8))
    index.add_conntrack(event(status=0x2))
    index.add_conntrack(event("destroy"))
    index.add_conntrack(event(number=2, zone=1))
    first, second = index.conntrack(*query(APP))
    assert (first.status, first.ended, first.zone) == (0xA, True, 0)
    assert (second.ended, second.zone) == (False, 1)
    assert [e.zone for e in index.entries(since=first.number)] == [1]


def test_the_oldest_are_forgotten_everywhere() -> None:
    index = Index(limit=2)
    flows = [Flow("tcp", "10.0.0.1", port, "10.96.0.5", 80) for port in (1, 2, 3)]
    for number, flow in enumerate(flows):
        index.add_nft(begins(number, "output", flow))
        index.add_conntrack(ConntrackEvent("new", flow, flow.reversed(), id=number))
    assert [len(index.packets(*query(f))) for f in flows] == [0, 1, 1]
    assert [len(index.conntrack(*query(f))) for f in flows] == [0, 1, 1]
    assert index.packets(*query(flows[2]))[0].flow == flows[2]

"""The join: from what each witness saw to one verdict, and nothing that nobody saw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from lab.manifests.model import FlowFrom, FlowTo, Meta, TrafficTest
from lab.probe import evidence_log, join
from lab.probe.join import Facts, Far
from lab.probe.orders import Query, Sent
from lab.probe.wire import Seen
from lab.trace.client import Sighting
from lab.trace.flows import Flow
from lab.trace.index import Entry, Packet, Step
from lab.trace.rules import Listing, parse_iptables_save

POD, FAR, VIP, DNS = "10.244.1.2", "10.244.2.2", "10.96.20.30", "10.96.0.10"
APP = Flow("tcp", POD, 40000, VIP, 8080)
UPSTREAM = Flow("tcp", POD, 50000, FAR, 8080)
QUERY = Flow("udp", POD, 41000, DNS, 53)

SAVE = """*nat
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:ISTIO_REDIRECT - [0:0]
:ISTIO_IN_REDIRECT - [0:0]
:ISTIO_OUTPUT_DNS - [0:0]
-A OUTPUT -j ISTIO_REDIRECT
-A OUTPUT -d 10.0.0.0/8 -j RETURN
-A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001
-A ISTIO_IN_REDIRECT -p tcp -j REDIRECT --to-ports 15006
-A ISTIO_OUTPUT_DNS -p udp --dport 53 -j REDIRECT --to-ports 15053
COMMIT
*mangle
:PREROUTING ACCEPT [0:0]
:ISTIO_TPROXY - [0:0]
-A ISTIO_TPROXY -p tcp -j TPROXY --on-port 15006 --on-ip 0.0.0.0 --tproxy-mark 0x539/0xffffffff
COMMIT
"""
LISTING = Listing(iptables={("legacy", "ipv4", n): t for n, t in parse_iptables_save(SAVE).items()})
TEST = TrafficTest(Meta("t"), FlowFrom(pod="frontend.frontend"), FlowTo("catalog.catalog", 8080), expect={})


def step(chain: str, hook: str, position: int = 1, table: str = "nat") -> Step:
    return Step("ip", "legacy", table, chain, "rule", position=position, hook=hook)


def packet(flow: Flow, hook: str, *steps: Step) -> Packet:
    return Packet(1, hook, flow, steps=list(steps))


def entry(original: Flow, end: tuple[str, int], *, zone: int = 0, source_port: int | None = None) -> Entry:
    reply = Flow(original.proto, end[0], end[1], original.src, source_port or original.sport)
    return Entry(1, original, reply, zone, 0)


def sighting(packets: list[Packet], entries: list[Entry], missing: Mapping[str, str] | None = None) -> Sighting:
    return Sighting(packets, entries, True, missing or {})


def line(**values: object) -> evidence_log.EnvoyLine:
    return evidence_log.parse({"kind": "http", **values})


CLIENT = line(
    listener="0.0.0.0_8080",
    filter_chain="-",
    route_config="8080",
    virtual_host="catalog.catalog.svc.cluster.local:8080",
    route_name="default",
    cluster="outbound|8080||catalog.catalog.svc.cluster.local",
    endpoint=f"{FAR}:8080",
    upstream_local=f"{POD}:50000",
    downstream_local=f"{VIP}:8080",
    downstream_remote=f"{POD}:40000",
    flags="-",
    details="via_upstream",
    request_id="r1",
)
SERVER = line(
    listener="virtualInbound",
    filter_chain="0.0.0.0_8080",
    cluster="inbound|8080||",
    downstream_remote=f"{POD}:50000",
    downstream_local=f"{FAR}:8080",
    request_id="r1",
    tls_version="TLSv1.3",
    peer_san="spiffe://cluster.local/ns/frontend/sa/frontend",
)

CAUGHT = sighting(
    [packet(APP, "output", step("OUTPUT", "output"), step("ISTIO_REDIRECT", "output"))],
    [entry(APP, ("127.0.0.1", 15001))],
)
ARRIVED = sighting(
    [packet(UPSTREAM, "prerouting", step("ISTIO_IN_REDIRECT", "prerouting"))], [entry(UPSTREAM, (FAR, 15006))]
)
LOOKED_UP = sighting(
    [packet(QUERY, "output", step("ISTIO_OUTPUT_DNS", "output"))], [entry(QUERY, ("127.0.0.1", 15053), zone=2)]
)

FACTS = Facts(
    test=TEST,
    sent=Sent(
        "ok",
        200,
        address=VIP,
        port=8080,
        src=POD,
        sport=40000,
        queries=[
            Query("catalog.catalog.frontend.svc.cluster.local.", "A", "udp", DNS, 53, POD, 40999, "NXDOMAIN"),
            Query("catalog.catalog.svc.cluster.local.", "A", "udp", DNS, 53, POD, 41000, "NOERROR", [VIP]),
        ],
        body={"pod": "catalog.catalog", "peer": {"address": "127.0.0.6", "port": 33333}},
    ),
    addresses=frozenset({POD}),
    cluster_dns=DNS,
    place="frontend.frontend",
    observed=True,
    dns=LOOKED_UP,
    outbound=CAUGHT,
    listing=LISTING,
    line=CLIENT,
    far=Far("catalog.catalog", UPSTREAM, frozenset({FAR}), False, ARRIVED, LISTING, SERVER),
    wire=[Seen(UPSTREAM, False, 1.0, 2.0)],
)


def test_a_captured_request_from_end_to_end() -> None:
    v = join.verdict(FACTS).to_dict()
    assert v["outbound"] == {
        "captured": True,
        "redirected_to": 15001,
        "rule": {
            "family": "ipv4",
            "backend": "legacy",
            "table": "nat",
            "chain": "ISTIO_REDIRECT",
            "position": 1,
            "text": "-A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001",
        },
    }
    assert (v["dns"]["captured"], v["dns"]["redirected_to"], v["dns"]["answered_by"]) == (True, 15053, "agent")
    assert (v["dns"]["answers"], v["dns"]["zone"], v["dns"]["forwarded"]) == ([VIP], 2, None)
    assert v["envoy"]["filter_chain"] is None
    assert v["envoy"]["route"] == "8080"
    assert v["envoy"]["response_flags"] == "-"
    assert (v["inbound"]["pod"], v["inbound"]["redirected_to"]) == ("catalog.catalog", 15006)
    assert v["inbound"]["rule"]["chain"] == "ISTIO_IN_REDIRECT"
    assert v["inbound"]["peer_seen_by_app"] == "127.0.0.6"
    assert v["tls"] == {
        "downstream": "TLSv1.3",
        "upstream": None,
        "peer_san": "spiffe://cluster.local/ns/frontend/sa/frontend",
    }
    assert v["wire"] == {
        "left_pod": True,
        "seen_at": "node",
        "packets": [{"src": POD, "dst": FAR, "proto": "tcp", "sport": 50000, "dport": 8080}],
    }
    assert v["source_port"] == 40000
    assert v["evidence"]["outbound.rule"] == "nftrace"
    assert v["evidence"]["outbound.redirected_to"] == "conntrack"
    assert v["evidence"]["envoy"] == "access-log"
    assert v["evidence"]["inbound.peer_seen_by_app"] == "app"


def test_a_silent_envoy_leaves_null_and_no_source() -> None:
    v = join.verdict(replace(FACTS, line=None, far=None, wire=[])).to_dict()
    assert v["outbound"]["captured"] is True
    assert v["envoy"] is None
    assert v["inbound"] is None
    assert "envoy" not in v["evidence"]
    assert v["wire"]["left_pod"] is False


def test_envoys_part_is_not_taken_from_a_flow_that_was_not_captured() -> None:
    direct = sighting([packet(APP, "output", step("OUTPUT", "output", 2))], [entry(APP, (VIP, 8080))])
    v = join.verdict(replace(FACTS, outbound=direct)).to_dict()
    assert v["outbound"]["captured"] is False
    assert v["outbound"]["redirected_to"] is None
    assert v["outbound"]["rule"]["text"] == "-A OUTPUT -d 10.0.0.0/8 -j RETURN"
    assert v["envoy"] is None


def test_without_conntrack_a_packet_that_was_seen_was_not_captured() -> None:
    found = join.translate(sighting([packet(APP, "output")], []), APP, Listing(), {POD}, "output")
    assert (found.captured, found.redirected_to) == (False, None)
    assert found.rule is not None
    assert found.rule.text == "-P OUTPUT ACCEPT"


def test_without_any_sign_nothing_is_claimed() -> None:
    for nothing in (None, sighting([], []), sighting([packet(APP, "output")], [], {"conntrack": "no such kernel"})):
        assert join.translate(nothing, APP, Listing(), {POD}, "output").captured is None


@pytest.mark.parametrize(
    ("end", "captured", "port"),
    [
        (("127.0.0.1", 15001), True, 15001),
        ((POD, 15001), True, 15001),
        ((VIP, 8080), False, None),
        (("10.0.0.99", 80), False, None),
    ],
    ids=["to loopback", "to its own address", "as sent", "translated to another machine"],
)
def test_captured_means_that_it_ended_in_the_pod(end: tuple[str, int], captured: bool, port: int | None) -> None:
    found = join.translate(sighting([], [entry(APP, end)]), APP, LISTING, {POD}, "output")
    assert (found.captured, found.redirected_to) == (captured, port)


def test_a_flow_to_oneself_is_not_captured_unless_its_port_changed() -> None:
    own = Flow("tcp", POD, 40000, POD, 8080)
    assert join.translate(sighting([], [entry(own, (POD, 8080))]), own, LISTING, {POD}, "output").captured is False
    assert join.translate(sighting([], [entry(own, (POD, 15006))]), own, LISTING, {POD}, "output").captured is True


def test_tproxy_translates_nothing_so_the_rule_tells() -> None:
    seen = sighting(
        [packet(UPSTREAM, "prerouting", step("ISTIO_TPROXY", "prerouting", table="mangle"))],
        [entry(UPSTREAM, (FAR, 8080))],
    )
    found = join.translate(seen, UPSTREAM, LISTING, {FAR}, "prerouting")
    assert (found.captured, found.redirected_to) == (True, 15006)


def test_tproxy_takes_a_local_flow_where_it_comes_back_from_lo() -> None:
    own = Flow("tcp", POD, 50000, POD, 8080)
    passed_by = packet(own, "output", step("OUTPUT", "output", position=2))
    taken = packet(own, "prerouting", step("ISTIO_TPROXY", "prerouting", table="mangle"))
    over_lo = join.arrival(sighting([passed_by, taken], [entry(own, (POD, 8080))]), own, LISTING, {POD}, local=True)
    assert (over_lo.captured, over_lo.redirected_to) == (True, 15006)
    direct = join.arrival(sighting([passed_by], [entry(own, (POD, 8080))]), own, LISTING, {POD}, local=True)
    assert direct.captured is False
    assert direct.rule is not None
    assert direct.rule.chain == "OUTPUT"


def test_the_identifier_of_an_echo_is_no_port() -> None:
    ping = Flow("icmpv6", "fd00::1", 700, "fd00::2", 0)
    answered = entry(ping, ("fd00::2", 700))
    assert join.translate(sighting([], [answered]), ping, LISTING, {"fd00::2"}, "prerouting").captured is False


def test_where_envoy_could_not_connect_it_tried() -> None:
    refused = replace(CLIENT, upstream_local=None)
    assert join.tried(refused) == (FAR, 8080)
    assert join.tried(CLIENT) is None
    assert join.tried(replace(refused, endpoint=None)) is None
    assert join.tried(None) is None


def test_the_packet_that_met_nat_is_the_one_that_counts() -> None:
    repeated = packet(APP, "output")
    first = packet(APP, "output", step("ISTIO_REDIRECT", "output"))
    assert join.first_packet([first, repeated], APP, "output") is first
    assert join.first_packet([repeated], APP, "output") is repeated
    assert join.first_packet([first], APP, "prerouting") is None


def test_a_policy_does_not_capture_so_an_older_entry_must_have() -> None:
    found = join.translate(sighting([packet(APP, "output")], CAUGHT.conntrack), APP, LISTING, {POD}, "output")
    assert (found.captured, found.redirected_to, found.rule) == (True, 15001, None)


def test_a_rewritten_port_still_finds_envoys_line() -> None:
    rewritten = entry(APP, ("127.0.0.1", 15001), source_port=51111)
    theirs = replace(CLIENT, downstream_remote=f"{POD}:51111")
    assert join.belongs(theirs, APP, rewritten)
    assert not join.belongs(CLIENT, APP, rewritten)
    assert join.belongs(CLIENT, APP, None)


def test_envoys_own_connection_goes_on() -> None:
    assert join.onward(CLIENT, APP, True) == UPSTREAM
    assert join.onward(replace(CLIENT, upstream_local=None), APP, True) is None
    assert join.onward(None, APP, True) is None
    assert join.onward(None, APP, False) == APP


def test_the_node_turns_a_service_into_an_endpoint() -> None:
    assert join.behind_node(APP, [entry(APP, (FAR, 8080))]) == replace(APP, dst=FAR)
    assert join.behind_node(APP, []) == APP


def test_a_forwarded_question_is_answered_by_cluster_dns() -> None:
    own = Flow("udp", POD, 42000, DNS, 53)
    seen = sighting([packet(own, "output", step("OUTPUT", "output", 2))], [entry(own, (DNS, 53), zone=1)])
    dns = join.verdict(replace(FACTS, forwarded=(own, seen))).to_dict()["dns"]
    assert (dns["captured"], dns["redirected_to"], dns["answered_by"]) == (True, 15053, "cluster-dns")
    assert dns["forwarded"]["server"] == DNS
    assert (dns["forwarded"]["captured"], dns["forwarded"]["zone"]) == (False, 1)


@pytest.mark.parametrize(("server", "name"), [(DNS, "cluster-dns"), ("9.9.9.9", "9.9.9.9")])
def test_an_uncaptured_question_is_answered_by_the_server_asked(server: str, name: str) -> None:
    query = Query("x.", "A", "udp", server, 53, POD, 41000, "NOERROR", [VIP])
    flow = replace(QUERY, dst=server)
    seen = sighting([packet(flow, "output")], [entry(flow, (server, 53))])
    facts = replace(FACTS, sent=replace(FACTS.sent, queries=[query]), dns=seen)
    assert join.verdict(facts).to_dict()["dns"]["answered_by"] == name


def test_a_question_without_answer_has_no_answerer() -> None:
    query = Query("x.", "A", "udp", DNS, 53, POD, 41000, None, [], "refused")
    dns = join.verdict(replace(FACTS, sent=replace(FACTS.sent, queries=[query]))).to_dict()["dns"]
    assert (dns["captured"], dns["answered_by"], dns["answers"]) == (True, None, None)


def test_a_flow_to_oneself_was_decided_at_output() -> None:
    own = Flow("tcp", POD, 50001, POD, 8080)
    seen = sighting([packet(own, "output", step("ISTIO_IN_REDIRECT", "output"))], [entry(own, (POD, 15006))])
    far = Far("frontend.frontend", own, frozenset({POD}), True, seen, LISTING, SERVER)
    inbound = join.verdict(replace(FACTS, far=far)).to_dict()["inbound"]
    assert (inbound["captured"], inbound["redirected_to"]) == (True, 15006)
    assert inbound["rule"]["chain"] == "ISTIO_IN_REDIRECT"


def test_another_apps_answer_is_not_this_pods_peer() -> None:
    other = replace(FACTS.sent, body={"pod": "other.other", "peer": {"address": "1.2.3.4", "port": 1}})
    v = join.verdict(replace(FACTS, sent=other)).to_dict()
    assert v["inbound"]["peer_seen_by_app"] is None
    assert "inbound.peer_seen_by_app" not in v["evidence"]


def test_a_pod_that_saw_nothing_was_not_reached() -> None:
    far = Far("catalog.catalog", UPSTREAM, frozenset({FAR}), False, sighting([], []))
    sent = replace(FACTS.sent, body=None)
    assert join.verdict(replace(FACTS, far=far, sent=sent)).inbound is None


def test_a_source_that_nobody_observes_has_no_outbound() -> None:
    v = join.verdict(replace(FACTS, observed=False, outbound=None, dns=None, line=None))
    assert v.outbound is None
    assert v.inbound is not None


@pytest.mark.parametrize(
    ("text", "expected"),
    [("10.0.0.1:80", ("10.0.0.1", 80)), ("[fd00::1]:80", ("fd00::1", 80)), (None, None), ("-", None), ("pipe", None)],
)
def test_envoys_addresses(text: str | None, expected: object) -> None:
    assert evidence_log.address(text) == expected
    if expected:
        assert evidence_log.written(*expected) == text


def test_a_later_packet_of_a_connection_is_not_taken_for_its_first() -> None:
    """With TPROXY nothing meets nat, and what comes later matches the socket: the conntrack entry tells where the flow began."""
    flow = Flow("tcp", "10.0.0.2", 40000, "10.0.0.1", 9000)
    old, first, later = (Packet(number, "prerouting", flow) for number in (3, 11, 18))
    entry = Entry(12, flow, flow.reversed(), 0, 0)
    assert join.first_packet([old, first, later], flow, "prerouting", entry) is first
    assert join.first_packet([old, first, later], flow, "prerouting") is later
    assert join.first_packet([later], flow, "prerouting", entry) is later

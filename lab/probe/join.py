"""From what was gathered to a verdict. Pure.

The chain: the app's 5-tuple -> conntrack's original tuple -> its *reply* tuple (whose destination is what Envoy sees: the kernel
rewrites a port that clashes) -> Envoy's downstream address -> its upstream local address -> the source of the next pod's flow.
Nothing here is filled from configuration: a key whose source is silent is None, and ``evidence`` names each key's source.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from lab.manifests.model import TrafficTest
from lab.probe import evidence_log
from lab.probe.evidence_log import EnvoyLine
from lab.probe.orders import Query, Sent
from lab.probe.wire import Seen
from lab.trace import rules
from lab.trace.client import Sighting
from lab.trace.flows import Flow
from lab.trace.index import Entry, Packet
from lab.trace.rules import Listing
from lab.verdict import (
    Dns,
    Envoy,
    Forwarded,
    From,
    Inbound,
    Outbound,
    Outcome,
    Result,
    Rule,
    Tls,
    To,
    Verdict,
    Wire,
    WirePacket,
)

_ON_PORT = re.compile(r"TPROXY.* --on-port (\d+)|tproxy (?:ip6? )?to [^ ]*:(\d+)")


@dataclass(frozen=True, slots=True)
class Translation:
    """What netfilter made of a flow. ``captured``: its destination became a port of the namespace itself.

    ``by_trace``: the trace alone says so, not conntrack (nothing is tracked, or TPROXY, which translates nothing).
    """

    captured: bool | None
    redirected_to: int | None
    entry: Entry | None
    rule: Rule | None
    by_trace: bool = False


@dataclass(frozen=True, slots=True)
class Far:
    """The pod that the flow reached. ``local``: the flow began there too, and went over lo."""

    pod: str
    flow: Flow
    addresses: frozenset[str]
    local: bool
    sighting: Sighting | None = None
    listing: Listing = field(default_factory=Listing)
    line: EnvoyLine | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """All that was gathered for one test. ``addresses``: of the source's namespace. ``cluster_dns``: the resolver's address."""

    test: TrafficTest
    sent: Sent
    addresses: frozenset[str]
    cluster_dns: str
    place: str
    observed: bool
    dns: Sighting | None = None
    forwarded: tuple[Flow, Sighting] | None = None
    outbound: Sighting | None = None
    listing: Listing = field(default_factory=Listing)
    line: EnvoyLine | None = None
    upstream: Sighting | None = None
    far: Far | None = None
    wire: Sequence[Seen] | None = None
    wire_at: str = "node"
    seconds: float = 0.0


def flow_of(sent: Sent) -> Flow | None:
    """The flow that was sent, as it left the socket; None if none left."""
    if not sent.src or not sent.sport or not sent.address:
        return None
    port = 0 if sent.proto.startswith("icmp") else (sent.port or 0)
    return Flow(sent.proto, sent.src, sent.sport, sent.address, port)


def query_flow(query: Query) -> Flow | None:
    """The flow of a DNS question; None if it could not be sent."""
    return Flow(query.proto, query.src, query.sport, query.server, query.port) if query.src and query.sport else None


def first_packet(packets: Iterable[Packet], flow: Flow, hook: str, entry: Entry | None = None) -> Packet | None:
    """The packet of a flow that met the nat table: the newest with a nat step, else the newest that came before the flow's
    conntrack ``entry`` was reported, else the newest.

    Later packets of the flow (a repeated SYN, another datagram) pass nat by, and an old flow may have had the same ports.
    Packets and entries are numbered together.
    """
    own = [p for p in packets if p.flow == flow and p.hook == hook]
    met = next((p for p in reversed(own) if any("nat" in s.table for s in p.steps)), None)
    if met is None and entry is not None:
        met = next((p for p in reversed(own) if p.number < entry.number), None)
    return met or (own[-1] if own else None)


_TO_PORT = re.compile(r"(?:REDIRECT --to-ports |redirect to :)(\d+)")


def translate(
    sighting: Sighting | None, flow: Flow, listing: Listing, addresses: Collection[str], hook: str
) -> Translation:
    """What a namespace made of a flow at ``hook``, from its conntrack and its trace.

    Without a conntrack entry (the namespace has no rule that needs one) a packet that was seen was not captured.
    """
    if sighting is None:
        return Translation(None, None, None, None)
    entry = next((e for e in reversed(sighting.conntrack) if e.original == flow), None)
    packet = first_packet(sighting.packets, flow, hook, entry)
    rule = rules.decide(packet, listing, hook) if packet is not None else None
    captured, port, by_trace = None, None, False
    if entry is not None:
        end = (entry.reply.src, entry.reply.sport)
        here = entry.reply.src in addresses or _is_loopback(entry.reply.src)
        # Docker's resolver listens on another port of its own 127.0.0.11: that is Docker's translation, no capture.
        served = entry.reply.src == flow.dst and _is_loopback(flow.dst)
        # An echo has no ports: what conntrack shows in their place is its identifier.
        port_before = entry.reply.sport if flow.proto.startswith("icmp") else flow.dport
        captured = here and not served and end != (flow.dst, port_before)
        port = entry.reply.sport if captured else None
        if captured and rule is not None and rule.position is None:
            rule = None  # an older entry with the same ports decided: no rule was asked
    elif packet is not None and "conntrack" not in sighting.missing:
        captured, by_trace = False, True
    if not captured and rule is not None and (match := _TO_PORT.search(rule.text)) and int(match[1]) == flow.dport:
        # To the port it went to anyway: conntrack has nothing to translate, but the rule was hit.
        captured, port, by_trace = True, flow.dport, True
    if not captured and rule is not None and (match := _ON_PORT.search(rule.text)):  # TPROXY translates nothing
        captured, port, by_trace = True, int(match[1] or match[2]), True
    return Translation(captured, port, entry, rule, by_trace)


def onward(line: EnvoyLine | None, flow: Flow | None, captured: bool | None) -> Flow | None:
    """The flow that goes on from the source pod: Envoy's own if it took the app's, else the app's."""
    if not captured:
        return flow
    if line is None:
        return None
    here, there = evidence_log.address(line.upstream_local), evidence_log.address(line.endpoint)
    return Flow("tcp", *here, *there) if here and there else None


def tried(line: EnvoyLine | None) -> tuple[str, int] | None:
    """Where Envoy tried to connect to without success: it knows no address of its own then, so the flow is not known."""
    return evidence_log.address(line.endpoint) if line and not line.upstream_local else None


def arrival(
    sighting: Sighting | None, flow: Flow, listing: Listing, addresses: Collection[str], *, local: bool
) -> Translation:
    """What the pod that a flow reached made of it: at prerouting. A ``local`` flow goes over lo and meets nat before, at output;
    where that lets it pass, TPROXY may take it at prerouting."""
    found = translate(sighting, flow, listing, addresses, "prerouting")
    if not local or (found.captured and found.by_trace):
        return found
    return translate(sighting, flow, listing, addresses, "output")


def behind_node(flow: Flow, entries: Sequence[Entry]) -> Flow:
    """A flow as it looks behind the node, where service addresses become endpoints."""
    entry = next((e for e in reversed(entries) if e.original == flow), None)
    return entry.reply.reversed() if entry is not None else flow


def seen_by_envoy(flow: Flow, entry: Entry | None) -> tuple[str, int]:
    """The source of a captured flow as Envoy sees it: conntrack's reply tuple has it, for the kernel may change the port."""
    return (entry.reply.dst, entry.reply.dport) if entry is not None else (flow.src, flow.sport)


def belongs(line: EnvoyLine, flow: Flow, entry: Entry | None) -> bool:
    """Whether an evidence line is of this flow: by its remote address, and the port of its local one (the original one)."""
    if evidence_log.address(line.downstream_remote) != seen_by_envoy(flow, entry):
        return False
    local = evidence_log.address(line.downstream_local)
    return local is None or local[1] == flow.dport


def verdict(facts: Facts) -> Verdict:
    """The verdict of one flow; not yet compared with what was expected."""
    test, sent = facts.test, facts.sent
    flow = flow_of(sent)
    evidence: dict[str, str] = {"outcome": "driver"}
    out = translate(facts.outbound, flow, facts.listing, facts.addresses, "output") if flow else None
    outbound = Outbound(out.captured, out.redirected_to, out.rule) if out and facts.observed else None
    if out and outbound:
        _name_sources(evidence, "outbound", out, facts.outbound)
    by_envoy = facts.line if out and out.captured else None
    envoy = _envoy(facts, by_envoy, evidence) if by_envoy else None
    inbound = _inbound(facts, evidence)
    server = facts.far.line if facts.far else None
    tls = Tls(
        downstream=server.tls_version if server else None,
        upstream=by_envoy.upstream_tls_version if by_envoy else None,
        peer_san=(by_envoy.upstream_peer_san if by_envoy else None) or (server.peer_san if server else None),
    )
    if tls != Tls():
        evidence["tls"] = "access-log"
    wire = _wire(facts)
    if wire:
        evidence["wire"] = "veth"
    far_side = sent.body if sent.body and isinstance(sent.body.get("peer"), Mapping) else None
    if far_side:
        evidence["far_side"] = "app"
    return Verdict(
        test=test.meta.name,
        proof="observed",
        source=From(
            pod=test.flow_from.pod or None,
            uid=test.flow_from.uid,
            external=test.flow_from.external or None,
            spoof=test.flow_from.spoof or None,
        ),
        to=To(test.to.host, sent.address, sent.port, test.to.protocol),
        source_port=sent.sport,
        dns=_dns(facts, evidence),
        outbound=outbound,
        envoy=envoy,
        inbound=inbound,
        tls=tls,
        wire=wire,
        outcome=Outcome(cast(Result, sent.result), sent.status, sent.error, sent.grpc_status),
        far_side=far_side,
        evidence=evidence,
        expected=test.expect,
        seconds=round(facts.seconds, 3),
    )


def _dns(facts: Facts, evidence: dict[str, str]) -> Dns | None:
    if not facts.sent.queries:
        return None
    query = facts.sent.queries[-1]
    flow = query_flow(query)
    found = translate(facts.dns, flow, facts.listing, facts.addresses, "output") if flow else None
    if found and facts.dns:
        _name_sources(evidence, "dns", found, facts.dns)
    forwarded = _forwarded(facts, evidence)
    answered_by = None
    if query.rcode is not None:
        evidence["dns.answers"] = "driver"
        if found and found.captured and forwarded is None:
            answered_by, evidence["dns.answered_by"] = "agent", "conntrack"
        else:
            server = forwarded.server if forwarded else query.server
            answered_by = "cluster-dns" if server == facts.cluster_dns else server
            evidence["dns.answered_by"] = "dns-log" if forwarded else "conntrack"
    return Dns(
        captured=found.captured if found else None,
        redirected_to=found.redirected_to if found else None,
        answered_by=answered_by,
        answers=tuple(query.answers) if query.rcode is not None else None,
        rule=found.rule if found else None,
        server=query.server,
        name=query.name.rstrip("."),
        rcode=query.rcode,
        zone=found.entry.zone if found and found.entry else None,
        forwarded=forwarded,
    )


def _forwarded(facts: Facts, evidence: dict[str, str]) -> Forwarded | None:
    if facts.forwarded is None:
        return None
    flow, sighting = facts.forwarded
    found = translate(sighting, flow, facts.listing, facts.addresses, "output")
    evidence["dns.forwarded"] = "dns-log"
    return Forwarded(
        server=flow.dst,
        captured=found.captured,
        zone=found.entry.zone if found.entry else None,
        source_port=flow.sport,
        rule=found.rule,
    )


def _envoy(facts: Facts, line: EnvoyLine, evidence: dict[str, str]) -> Envoy:
    evidence["envoy"] = "access-log"
    flow = onward(line, None, True)
    upstream = None
    if flow is not None and facts.upstream is not None:
        found = translate(facts.upstream, flow, facts.listing, facts.addresses, "output")
        _name_sources(evidence, "envoy.upstream", found, facts.upstream)
        upstream = Outbound(found.captured, found.redirected_to, found.rule)
    return Envoy(
        listener=line.listener,
        filter_chain=line.filter_chain,
        route=line.route_config,
        virtual_host=line.virtual_host,
        route_name=line.route_name,
        cluster=line.cluster,
        endpoint=line.endpoint,
        response_flags=line.flags,
        details=line.details,
        upstream=upstream,
    )


def _inbound(facts: Facts, evidence: dict[str, str]) -> Inbound | None:
    far = facts.far
    if far is None:
        return None
    found = arrival(far.sighting, far.flow, far.listing, far.addresses, local=far.local)
    peer = _peer(facts.sent.body, far.pod)
    line = far.line
    if found.captured is None and found.rule is None and line is None and peer is None:
        return None  # it never got there
    _name_sources(evidence, "inbound", found, far.sighting)
    if line:
        evidence["inbound.listener"] = evidence["inbound.cluster"] = "access-log"
    if peer:
        evidence["inbound.peer_seen_by_app"] = "app"
    return Inbound(
        pod=far.pod,
        captured=found.captured,
        redirected_to=found.redirected_to,
        rule=found.rule,
        listener=line.listener if line else None,
        filter_chain=line.filter_chain if line else None,
        cluster=line.cluster if line else None,
        peer_seen_by_app=peer,
        route=line.route_config if line else None,
        route_name=line.route_name if line else None,
        endpoint=line.endpoint if line else None,
        response_flags=line.flags if line else None,
        details=line.details if line else None,
    )


def _peer(body: Mapping[str, Any] | None, pod: str) -> str | None:
    """The peer that the app of ``pod`` reported, if it is that app that answered."""
    peer = body.get("peer") if body and body.get("pod") == pod else None
    return str(peer["address"]) if isinstance(peer, Mapping) and "address" in peer else None


def _wire(facts: Facts) -> Wire | None:
    if facts.wire is None:
        return None
    seen: dict[Flow, None] = dict.fromkeys(s.flow for s in facts.wire)
    packets = tuple(WirePacket(f.src, f.dst, f.proto, f.sport, f.dport) for f in seen)
    return Wire(left_pod=bool(packets), seen_at=facts.wire_at, packets=packets)


def _name_sources(evidence: dict[str, str], key: str, found: Translation, sighting: Sighting | None) -> None:
    if sighting is None:
        return
    by = sighting.tracer if found.by_trace else "conntrack"
    if found.captured is not None:
        evidence[f"{key}.captured"] = by
    if found.redirected_to is not None:
        evidence[f"{key}.redirected_to"] = by
    if found.rule is not None:
        # Without a table there was no rule to ask: the text is what the kernel does by itself.
        evidence[f"{key}.rule"] = sighting.tracer if found.rule.backend else f"{sighting.tracer}: no table"


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback

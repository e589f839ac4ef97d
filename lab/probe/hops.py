"""One observed flow as a reader follows it: the nine steps of a sidecar request, each with its evidence and that one's source.

Pure. The order is the flow's own: lookup, VIP, iptables, virtualOutbound, original destination, route, cluster, endpoint, far pod;
then what the wire and the sender saw. A step that did not happen says why; nothing is told that has no source.
"""

from __future__ import annotations

import ipaddress
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lab.probe import evidence_log, join, proxy_view
from lab.probe.evidence_log import EnvoyLine
from lab.probe.join import Facts, Far, Translation
from lab.probe.orders import Query
from lab.probe.proxy_view import Config
from lab.trace.client import Sighting
from lab.trace.flows import Flow
from lab.trace.index import Entry, Packet
from lab.trace.rules import Listing
from lab.verdict import Rule, Verdict

Step = Literal[
    "lookup", "vip", "iptables", "virtualOutbound", "original-destination", "route", "cluster", "endpoint", "far-pod",
    "wire", "outcome",
]  # fmt: skip
STEPS: tuple[Step, ...] = (
    "lookup", "vip", "iptables", "virtualOutbound", "original-destination", "route", "cluster", "endpoint", "far-pod",
)  # fmt: skip
"""The nine steps, in order."""

Source = Literal[
    "nftrace", "raw-trace", "conntrack", "access-log", "config_dump", "name-table", "dns-log", "app", "veth", "socket", "manifests",
]  # fmt: skip

FLAGS: Mapping[str, str] = {
    "DC": "the client closed the connection", "DF": "a name could not be resolved", "DI": "an injected delay",
    "DPE": "the client broke the protocol", "FI": "an injected fault", "LR": "reset by this Envoy", "NC": "no such cluster",
    "NR": "no route or filter chain", "RL": "rate limit", "SI": "stream idle timeout", "UAEX": "external authorization",
    "UC": "the upstream connection ended", "UF": "the upstream connection failed", "UH": "no healthy upstream",
    "UO": "a connection pool is full", "UPE": "the upstream broke the protocol", "UR": "reset by the upstream",
    "URX": "retries used up", "UT": "upstream request timeout",
}  # fmt: skip
"""Envoy's response flags (envoy: source/common/stream_info/utility.h)."""

_NO_ENVOY = "it is not redirected to Envoy"


@dataclass(frozen=True, slots=True)
class Detail:
    """One piece of evidence and who gave it."""

    text: str
    source: str


@dataclass(frozen=True, slots=True)
class Hop:
    """One step. ``happened`` is false for one that did not take place, then ``text`` says why."""

    step: Step
    place: str
    text: str
    details: tuple[Detail, ...] = ()
    happened: bool = True

    @property
    def number(self) -> int | None:
        """From 1; None for what comes after the nine."""
        return STEPS.index(self.step) + 1 if self.step in STEPS else None

    def to_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "step": self.step,
            "place": self.place,
            "happened": self.happened,
            "text": self.text,
            "evidence": sorted({d.source for d in self.details}),
            "details": [{"text": d.text, "source": d.source} for d in self.details],
        }


@dataclass(frozen=True, slots=True)
class More:
    """What a trace asks for beyond a verdict's facts.

    ``course``: every packet from the flow's source port in its namespace, so also its second way through the hooks, over lo.
    ``questions``: the lookups before the last, with what the kernel said of each. ``node``: of the flow that went on, and
    ``node_rules`` those that it met there.
    ``app``: of the connection of the far pod's Envoy to its app. ``client``, ``server``: configurations after the flow.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    course: Sighting | None = None
    questions: Sequence[Sighting | None] = ()
    node: Sighting | None = None
    node_rules: Listing = field(default_factory=Listing)
    app: Sighting | None = None
    client: Config | None = None
    server: Config | None = None


def hops(facts: Facts, verdict: Verdict, more: More) -> list[Hop]:
    """All steps of a flow, in order."""
    return _Teller(facts, verdict, more).all()


class _Teller:
    def __init__(self, facts: Facts, verdict: Verdict, more: More) -> None:
        self.facts, self.verdict, self.more = facts, verdict, more
        self.sent = facts.sent
        self.here = facts.place
        self.flow = join.flow_of(facts.sent)
        self.is_lookup = facts.test.to.protocol in ("dns", "dns-tcp")
        self.out = (
            join.translate(facts.outbound, self.flow, facts.listing, facts.addresses, "output")
            if self.flow
            else Translation(None, None, None, None)
        )
        self.line = facts.line if self.out.captured else None
        self.tracer = facts.outbound.tracer if facts.outbound and facts.outbound.tracer else "nftrace"

    def all(self) -> list[Hop]:
        found = [self._lookup()]
        if self.is_lookup:
            return [*found, *self._wire(), self._outcome()]
        found.append(self._vip())
        found.append(self._iptables())
        found += self._envoy()
        found.append(self._far())
        return [*found, *self._wire(), self._outcome()]

    # --- 1: lookup --------------------------------------------------------------------------

    def _lookup(self) -> Hop:
        host, queries = self.facts.test.to.host, self.sent.queries
        if not queries:
            why = "an address, nothing to look up" if _is_address(host) else f"{host} stands in /etc/hosts"
            return Hop("lookup", self.here, why, happened=False)
        last = queries[-1]
        dns = self.verdict.dns
        answer = _answer(last)
        how = ""
        if dns is not None and dns.captured is not None:
            how = f", captured to {dns.redirected_to}" if dns.captured else ", not captured"
        by = f", answered by {dns.answered_by}" if dns and dns.answered_by else ""
        details: list[Detail] = []
        for number, query in enumerate(queries):
            asked = f"{query.type} {query.name} asked of {_end(query.server, query.port)}"
            whence = f" from {_end(query.src, query.sport)}" if query.src else ""
            details.append(Detail(f"{asked}{whence} by {query.proto}: {_answer(query)}", "socket"))
            if number < len(queries) - 1 and number < len(self.more.questions):
                details += self._earlier(query, self.more.questions[number])
        flow = join.query_flow(last)
        if flow is not None and self.facts.dns is not None:
            found = join.translate(self.facts.dns, flow, self.facts.listing, self.facts.addresses, "output")
            details += self._passed(self.facts.dns, flow, "output", found)
        if dns is not None and dns.answered_by == "agent" and self.more.client is not None:
            held = proxy_view.name_table(self.more.client, last.name)
            if held:
                details.append(Detail(held, "name-table"))
        if self.facts.forwarded is not None:
            own, sighting = self.facts.forwarded
            details.append(Detail(f"the agent asks itself: {shown(own)}", "dns-log"))
            found = join.translate(sighting, own, self.facts.listing, self.facts.addresses, "output")
            details += self._passed(sighting, own, "output", found)
        return Hop("lookup", self.here, f"{last.type} {last.name}: {answer}{how}{by}", tuple(details))

    def _earlier(self, query: Query, sighting: Sighting | None) -> Iterator[Detail]:
        flow = join.query_flow(query)
        if flow is None or sighting is None:
            return
        entry = _entry(sighting, flow)
        if entry is not None:
            yield Detail(_tracked(entry), "conntrack")

    # --- 2, 3: VIP, iptables ----------------------------------------------------------------

    def _vip(self) -> Hop:
        if self.flow is None:
            return Hop("vip", self.here, self.sent.error or "nothing was sent", happened=False)
        owner = self.more.names.get(self.flow.dst)
        who = f" ({owner})" if owner else ""
        text = f"uid {self.facts.test.flow_from.uid} sends {shown(self.flow)}{who}"
        crafted = self.facts.test.to.crafted
        details = [
            Detail(f"{shown(self.flow)}, {'hand-made' if crafted else 'as the sending socket has it'}", "socket")
        ]
        if owner:
            details.append(Detail(f"{self.flow.dst} is {owner}", "manifests"))
        else:
            details.append(Detail(f"{self.flow.dst} is nobody's that the manifests know", "manifests"))
        return Hop("vip", self.here, text, tuple(details))

    def _iptables(self) -> Hop:
        if self.flow is None:
            return Hop("iptables", self.here, "no packet was sent", happened=False)
        if self.facts.outbound is None:
            return Hop("iptables", self.here, "nobody watches the kernel of this place", happened=False)
        details = list(self._passed(self.more.course or self.facts.outbound, self.flow, "output", self.out))
        return Hop("iptables", self.here, self._decision(self.out), tuple(details))

    @staticmethod
    def _decision(out: Translation) -> str:
        if out.captured is None:
            return "what netfilter did was not seen"
        text = f"captured to {out.redirected_to}" if out.captured else "not captured"
        if out.rule is not None and out.rule.backend is not None:
            text += f" by {_rule(out.rule)}"
        elif not out.captured and out.rule is not None:
            text += ": no rule was asked"
        return text

    def _passed(self, sighting: Sighting, flow: Flow, hook: str, found: Translation) -> Iterator[Detail]:
        """What one namespace's kernel said of a flow's first packet: each rule that matched, then the connection."""
        yield from rules_hit(sighting, flow, hook, self.facts.listing, found)
        entry = found.entry or _entry(sighting, flow)
        if entry is not None:
            yield Detail(_tracked(entry), "conntrack")

    # --- 4 to 8: the Envoy of the pod -------------------------------------------------------

    def _envoy(self) -> list[Hop]:
        steps = STEPS[3:8]
        if not self.out.captured:
            return [Hop(step, self.here, self._why_no_envoy(), happened=False) for step in steps]
        first = self._virtual_outbound()
        if self.line is None:
            why = "Envoy has written nothing of this flow"
            if self.facts.test.to.crafted:
                why = "a hand-made packet makes no connection, Envoy gets none"
            return [first, *(Hop(step, self.here, why, happened=False) for step in steps[1:])]
        return [
            first,
            self._original(self.line),
            self._route(self.line),
            self._cluster(self.line),
            self._endpoint(self.line),
        ]

    def _why_no_envoy(self) -> str:
        if self.flow is None:
            return "no packet was sent"
        if self.out.captured is None:
            return "what netfilter did was not seen"
        rule = self.out.rule
        if rule is None or rule.backend is None:
            return f"{_NO_ENVOY}: no rule of this place redirects anything"
        return f"{_NO_ENVOY}: {_rule(rule)} let the packet go"

    def _virtual_outbound(self) -> Hop:
        port = self.out.redirected_to
        details = [
            Detail(f"the kernel hands the connection to port {port}", self.tracer if self.out.by_trace else "conntrack")
        ]
        name = None
        if self.more.client is not None and port is not None:
            listener = proxy_view.listener_on(self.more.client, port)
            if listener is not None:
                name = str(listener.get("name"))
                uses = ", use_original_dst" if listener.get("use_original_dst") else ""
                details.append(Detail(f"{name} binds port {port}{uses}", "config_dump"))
        if self.line is not None and self.line.downstream_direct_local:
            details.append(Detail(f"accepted on {self.line.downstream_direct_local}", "access-log"))
        who = f"listener {name}" if name else "a listener whose name is not known"
        return Hop("virtualOutbound", self.here, f"{who} accepts it on {port}", tuple(details))

    def _original(self, line: EnvoyLine) -> Hop:
        details = []
        if self.out.entry is not None:
            o = self.out.entry.original
            details.append(Detail(f"SO_ORIGINAL_DST is {_end(o.dst, o.dport)}, the tuple before REDIRECT", "conntrack"))
        details.append(
            Detail(
                f"Envoy sees {line.downstream_remote} -> {line.downstream_local}: that is what it was told",
                "access-log",
            )
        )
        details += self._of_config(self.more.client, proxy_view.listener, line.listener, line.filter_chain)
        chain = f", filter chain {line.filter_chain}" if line.filter_chain else ", filter chain without a name"
        if line.kind == "listener":
            chain = ", no filter chain takes it"
        text = f"{line.downstream_local}: listener {line.listener}{chain}"
        return Hop("original-destination", self.here, text, tuple(details))

    def _route(self, line: EnvoyLine) -> Hop:
        if line.kind != "http":
            why = "no HTTP: the filter chain itself names the cluster"
            if line.kind == "listener":
                why = "no filter chain, no route"
            return Hop("route", self.here, why, happened=False)
        text = f"route configuration {line.route_config}, virtual host {line.virtual_host or 'none'}, route {line.route_name or 'none'}"
        details = [Detail(text, "access-log")]
        details += self._of_config(
            self.more.client, proxy_view.route, line.route_config, line.virtual_host, line.route_name
        )
        return Hop("route", self.here, text, tuple(details))

    def _cluster(self, line: EnvoyLine) -> Hop:
        flags = _flags(line)
        if line.cluster is None:
            answer = f"Envoy answers {line.code} itself" if line.code else "Envoy ends the connection"
            text = f"none: {answer}{flags}"
            said = Detail(
                f"cluster none, code {line.code or 'none'}, flags {line.flags}, {line.details or 'no details'}",
                "access-log",
            )
            return Hop("cluster", self.here, text, (said,), happened=False)
        details = [Detail(f"cluster {line.cluster}, flags {line.flags}, {line.details or 'no details'}", "access-log")]
        details += self._of_config(self.more.client, proxy_view.cluster, line.cluster)
        return Hop("cluster", self.here, f"{line.cluster}{flags}", tuple(details))

    def _endpoint(self, line: EnvoyLine) -> Hop:
        settings = self._of_config(self.more.client, proxy_view.destination_rule, line.cluster)
        if line.endpoint is None:
            why = "no cluster, no endpoint" if line.cluster is None else f"the cluster gave none{_flags(line)}"
            return Hop("endpoint", self.here, why, tuple(settings), happened=False)
        owner = self._owner(line.endpoint)
        who = f" ({owner})" if owner else ""
        flow = join.onward(line, None, True)
        if line.upstream_local is None:
            text = f"{line.endpoint}{who}: Envoy could not connect, {line.upstream_failure or line.flags}"
            return Hop("endpoint", self.here, text, (Detail(text, "access-log"), *settings))
        how = f"{line.upstream_tls_version}, peer {line.upstream_peer_san or 'without a SPIFFE identity'}"
        how = how if line.upstream_tls_version else "plain text"
        text = f"{line.endpoint}{who} from {line.upstream_local}, {how}"
        kept = flow is not None and self._pooled(flow)
        if kept:
            text += ", over a connection that was open before"
        details = [Detail(f"{line.upstream_local} -> {line.endpoint}, {how}", "access-log")]
        if owner:
            details.append(Detail(f"{line.endpoint} is {owner}", "manifests"))
        details += settings
        if flow is not None and self.facts.upstream is not None:
            found = join.translate(self.facts.upstream, flow, self.facts.listing, self.facts.addresses, "output")
            if kept:
                details.append(Detail("a connection of the pool: its SYN came before this request's", self.tracer))
            details += self._passed(self.facts.upstream, flow, "output", found)
        return Hop("endpoint", self.here, text, tuple(details))

    def _pooled(self, flow: Flow) -> bool:
        """Whether Envoy's connection is older than the app's: the namespace numbers its packets in order."""
        if self.facts.upstream is None or self.facts.outbound is None or self.flow is None:
            return False
        own = join.first_packet(self.facts.outbound.packets, self.flow, "output")
        theirs = join.first_packet(self.facts.upstream.packets, flow, "output")
        return own is not None and theirs is not None and theirs.number < own.number

    # --- 9: the far side --------------------------------------------------------------------

    def _far(self) -> Hop:
        node = list(self._node())
        far, inbound = self.facts.far, self.verdict.inbound
        if far is None or inbound is None:
            told = [*node, *self._app()]
            body = self.verdict.far_side
            if body is not None and body.get("pod"):
                peer = _peer_of(body)
                return Hop("far-pod", str(body["pod"]), f"answers; it sees {peer} as its peer", tuple(told))
            return Hop("far-pod", self._beyond(), self._untold(), tuple(told), happened=False)
        found = join.arrival(far.sighting, far.flow, far.listing, far.addresses, local=far.local)
        hook = "output" if far.local and not (found.captured and found.by_trace) else "prerouting"
        details = node
        if far.sighting is not None:
            details += rules_hit(far.sighting, far.flow, hook, far.listing, found)
            entry = found.entry or _entry(far.sighting, far.flow)
            if entry is not None:
                details.append(Detail(_tracked(entry), "conntrack"))
        text = "what its netfilter did was not seen"
        if found.captured is not None:
            text = f"captured to {found.redirected_to}" if found.captured else "not captured"
            if found.rule is not None and found.rule.backend is not None:
                text += f" by {_rule(found.rule)}"
        if far.line is not None:
            details += self._server(far.line)
            text += f", {far.line.cluster or 'no cluster'}{_flags(far.line)}"
        details += self._to_app()
        details += self._app()
        if inbound.peer_seen_by_app:
            text += f", the app sees {inbound.peer_seen_by_app}"
        return Hop("far-pod", far.pod, text, tuple(details))

    def _node(self) -> Iterator[Detail]:
        """What the node made of the flow that came to it: service addresses become endpoints there, and rules may end it."""
        node, listing = self.more.node, self.more.node_rules
        if node is None:
            return
        for entry in node.conntrack[-1:]:
            if entry.reply.reversed() != entry.original:
                yield Detail(f"the node makes it {shown(entry.reply.reversed())}", "conntrack")
        for step in (s for p in node.packets[:1] for s in p.steps if listing.dropped(s)):
            yield Detail(f"the node ends it: {_rule(listing.rule(step))}", node.tracer or "nftrace")

    def _untold(self) -> str:
        """No app and no watched pod told of the flow: how far it is known to have come."""
        if self.flow is not None and (self.more.names.get(self.flow.dst) == self.here or _on_lo(self.flow)):
            return "it ended in this pod itself"
        own = self.more.course or self.facts.outbound
        entry = _entry(own, self.flow) if own is not None and self.flow is not None else None
        answered = entry is not None and not self.out.captured and "seen-reply" in _status(entry)
        return f"{self._beyond()} sent packets back, but told nothing of it" if answered else "nothing there told of it"

    def _beyond(self) -> str:
        flow = join.onward(self.line, self.flow, self.out.captured)
        if flow is None:
            return "nowhere"
        return self.more.names.get(flow.dst, flow.dst)

    def _server(self, line: EnvoyLine) -> Iterator[Detail]:
        """The far Envoy's side."""
        tls: str = f"{line.tls_version}, SNI {line.sni or 'none'}, client {line.peer_san or 'without identity'}"
        yield Detail(
            f"Envoy sees {line.downstream_remote} -> {line.downstream_local}, accepted on {line.downstream_direct_local}",
            "access-log",
        )
        yield Detail(f"listener {line.listener}, filter chain {line.filter_chain or 'none'}", "access-log")
        yield Detail(tls if line.tls_version else "plain text", "access-log")
        if line.kind == "http":
            yield Detail(f"route configuration {line.route_config}, route {line.route_name or 'none'}", "access-log")
        yield Detail(
            f"cluster {line.cluster or 'none'}, flags {line.flags}, {line.details or 'no details'}", "access-log"
        )
        yield from self._of_config(self.more.server, proxy_view.listener, line.listener, line.filter_chain)
        yield from self._of_config(self.more.server, proxy_view.cluster, line.cluster)
        if line.upstream_local and line.endpoint:
            yield Detail(f"Envoy's connection to its app: {line.upstream_local} -> {line.endpoint}", "access-log")

    def _to_app(self) -> Iterator[Detail]:
        far = self.facts.far
        flow = join.onward(far.line, None, True) if far and far.line else None
        if flow is None or far is None or self.more.app is None:
            return
        found = join.translate(self.more.app, flow, far.listing, far.addresses, "output")
        if (own := join.first_packet(self.more.app.packets, flow, "output")) is not None:
            yield Detail(self._age(own, far), self.tracer)
        yield from rules_hit(self.more.app, flow, "output", far.listing, found)

    def _age(self, own: Packet, far: Far) -> str:
        """Whether the far Envoy opened its connection to the app for this flow: a namespace numbers its packets in order."""
        client = join.onward(self.line, None, True) if self.line else None
        arrived = join.first_packet(far.sighting.packets, far.flow, "prerouting") if far.sighting else None
        if arrived is not None and own.number < arrived.number:
            return "a connection of its pool: opened for an earlier flow"
        if arrived is None or (client is not None and self._pooled(client)):
            return "opened for this flow or for an earlier one over the same connection: Envoy does not tell"
        return "opened for this flow"

    def _app(self) -> Iterator[Detail]:
        body = self.verdict.far_side
        if body is None:
            return
        local = body.get("local")
        there = (
            f" on {_end(str(local.get('address')), int(local.get('port', 0)))}" if isinstance(local, Mapping) else ""
        )
        yield Detail(f"{body.get('pod') or body.get('app')}{there} sees {_peer_of(body)} as its peer", "app")
        if body.get("method"):
            yield Detail(f"{body['method']} {body.get('path')} for host {body.get('host')}", "app")
        headers = body.get("headers")
        if isinstance(headers, Mapping):
            yield from (Detail(f"header {k}: {v}", "app") for k, v in sorted(headers.items()))
        tls = body.get("tls")
        if isinstance(tls, Mapping):
            client = f"client {tls['peer_san']}" if tls.get("peer_san") else "no client certificate"
            yield Detail(
                f"{tls.get('version')}, SNI {tls.get('sni') or 'none'}, ALPN {tls.get('alpn') or 'none'}, {client}",
                "app",
            )

    # --- the end ----------------------------------------------------------------------------

    def _wire(self) -> list[Hop]:
        seen = self.facts.wire
        at = self.facts.wire_at
        if seen is None:
            return [Hop("wire", at, "what left the place could not be told", happened=False)]
        if not seen:
            return [
                Hop(
                    "wire",
                    at,
                    f"nothing of it left {self.here}",
                    (Detail("the fence after it came, it did not", "veth"),),
                )
            ]
        details = tuple(
            Detail(
                f"{shown(s.flow)}: {_packets(s.count)}" + (f", flags {s.flags}" if s.flags else ""),
                "veth",
            )
            for s in seen
        )
        return [Hop("wire", at, f"{_packets(sum(s.count for s in seen))} left {self.here} for it", details)]

    def _outcome(self) -> Hop:
        sent = self.sent
        status = f" {sent.status}" if sent.status is not None else ""
        grpc = f", gRPC status {sent.grpc_status}" if sent.grpc_status is not None else ""
        error = f": {sent.error}" if sent.error else ""
        replies = (f"answered by {', '.join(sent.replies)}",) if sent.replies else ()
        text = f"{sent.result}{status}{grpc}{error}"
        return Hop("outcome", self.here, text, tuple(Detail(t, "socket") for t in (text, *replies)))

    def _owner(self, endpoint: str) -> str | None:
        address = evidence_log.address(endpoint)
        return self.more.names.get(address[0]) if address else None

    @staticmethod
    def _of_config(config: Config | None, view: Any, *names: str | None) -> list[Detail]:
        return [] if config is None else [Detail(text, "config_dump") for text in view(config, *names)]


def rules_hit(
    sighting: Sighting, flow: Flow, hook: str, listing: Listing, found: Translation | None = None
) -> Iterator[Detail]:
    """Every rule that the first packet of a flow matched, in order; if none of them decided, the policy that did.

    With ``sighting`` of all destinations, a packet that was turned to lo is followed on its second way through the hooks.
    """
    packet = join.first_packet(sighting.packets, flow, hook)
    if packet is None:
        return
    ways = [packet]
    if hook == "output":
        same = (flow.proto, flow.src, flow.sport)
        ways += [
            p
            for p in sighting.packets
            if p.hook == "prerouting" and p.number > packet.number and (p.flow.proto, p.flow.src, p.flow.sport) == same
        ][:1]
    for way in ways:
        yield from _way(way, listing, sighting.tracer or "nftrace")
        if way is packet and found is not None and found.rule is not None and found.rule.position is None:
            none = "no table reports anything of it" if found.rule.backend is None else _rule(found.rule)
            yield Detail(f"{hook}: {none}", sighting.tracer or "nftrace")


def _way(packet: Packet, listing: Listing, tracer: str) -> Iterator[Detail]:
    for step in packet.steps:
        if step.kind == "rule":
            yield Detail(f"{listing.hook(step) or packet.hook}: {_rule(listing.rule(step))}", tracer)


def _rule(rule: Rule) -> str:
    position = f" {rule.position}" if rule.position is not None else ""
    backend = f"{rule.backend} " if rule.backend else ""
    return f"{backend}{rule.table} {rule.chain}{position}: {rule.text}"


def _entry(sighting: Sighting, flow: Flow) -> Entry | None:
    return next((e for e in reversed(sighting.conntrack) if e.original == flow), None)


def _on_lo(flow: Flow) -> bool:
    return ipaddress.ip_address(flow.dst).is_loopback


def _tracked(entry: Entry) -> str:
    """A conntrack entry in words."""
    text = f"{shown(entry.original)}, answers come from {_end(entry.reply.src, entry.reply.sport)}"
    if (entry.reply.dst, entry.reply.dport) != (entry.original.src, entry.original.sport):
        text += f" to {_end(entry.reply.dst, entry.reply.dport)}"
    return f"{text}; zone {entry.zone}; {', '.join(_status(entry)) or 'new'}"


def _status(entry: Entry) -> list[str]:
    from lab.trace.conntrack import status_names

    return [*status_names(entry.status), *(["ended"] if entry.ended else [])]


def _flags(line: EnvoyLine) -> str:
    if line.flags == "-":
        return ""
    words = [FLAGS.get(flag, "") for flag in line.flags.split(",")]
    meaning = "; ".join(filter(None, words))
    return f", flags {line.flags}" + (f" ({meaning})" if meaning else "")


def _answer(query: Query) -> str:
    if query.rcode is None:
        return query.error or "no answer"
    return ", ".join(query.answers) if query.answers else query.rcode if query.rcode != "NOERROR" else "no such record"


def _peer_of(body: Mapping[str, Any]) -> str:
    peer = body.get("peer")
    return _end(str(peer.get("address")), int(peer.get("port", 0))) if isinstance(peer, Mapping) else "nobody"


def _packets(count: int) -> str:
    return f"{count} packet{'s' if count != 1 else ''}"


def shown(flow: Flow) -> str:
    """A flow as a reader writes it."""
    if flow.proto.startswith("icmp"):
        return f"{flow.proto} {flow.src} -> {flow.dst} (id {flow.sport})"
    return f"{flow.proto} {_end(flow.src, flow.sport)} -> {_end(flow.dst, flow.dport)}"


def _end(address: str, port: int) -> str:
    return evidence_log.written(address, port)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def lines(found: Sequence[Hop]) -> Iterator[str]:
    """For a terminal: one line a step, and below it each piece of evidence with its source in brackets."""
    for (happened, _, _), group in itertools.groupby(found, lambda h: (h.happened, h.text, h.details)):
        same = list(group)
        first, last = same[0], same[-1]
        mark = f"{first.number}." if first.number is not None else ""
        name = first.step.replace("-", " ")
        if first is not last:  # steps that did not happen for one reason
            mark, name = f"{first.number}-{last.number}.", f"{name} to {last.step.replace('-', ' ')}"
        yield f"{mark:4} {name:20} {first.place}: {first.text}" if happened else f"{mark:4} {name:20} -  {first.text}"
        for detail in first.details:
            yield f"       [{detail.source}] {detail.text}"

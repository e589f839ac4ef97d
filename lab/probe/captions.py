"""What a packet is, in the mesh's words: the comment that ``lab capture`` gives it. Pure.

Only what has a source is said: the addresses and bytes of the packet itself, conntrack's entry of its flow, the rule that the
kernel's trace named, the socket (or the packet's sender) that the kernel says is whose, and what the manifests call an address. What is not known says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lab.capture import headers
from lab.capture.headers import Decoded
from lab.capture.taps import Frame
from lab.probe import fence, speech
from lab.probe.evidence_log import written
from lab.trace.flows import Flow, parse_headers

_PROXIES = ("Envoy", "agent")
_DNS_PORTS = (53, 15053)
_UNREACHABLE = {0: "net unreachable", 1: "host unreachable", 3: "port unreachable", 4: "too big", 13: "prohibited"}


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose a socket is. ``name``: ``Envoy``, ``agent``, ``app``; empty for another process of the pod, or one that is not known.

    ``user``: whose uid it is (``proxy``, ``app``), where that alone is known. ``source``: who says so.
    """

    uid: int
    name: str = ""
    user: str = ""
    source: str = "sock_diag"

    def __str__(self) -> str:
        who = self.name or (f"a process of the {self.user}'s user" if self.user else "a process")
        return f"{who} (uid {self.uid})"


@dataclass(slots=True)
class Connection:
    """What is known of a flow in one place.

    ``cluster`` is what Envoy wrote earlier of a connection that it keeps. ``original`` and ``changed``: the flow before and after NAT, by conntrack; None if it is not tracked. ``captured_to``: a port of this
    place that it was turned to, ``rule`` the rule that decided. ``client`` and ``server``: the processes of this place at
    its ends. ``opened``: the flow of its opener, as the packets themselves show it. ``unknown``: why netfilter's part is not known. ``secure``: what its bytes so far have shown: TLS or mTLS.
    """

    original: Flow | None = None
    changed: Flow | None = None
    zone: int = 0
    captured_to: int | None = None
    rule: str = ""
    by_trace: bool = False
    client: Owner | None = None
    server: Owner | None = None
    opened: Flow | None = None
    unknown: str = ""
    cluster: str = ""
    secure: str = ""


@dataclass(frozen=True, slots=True)
class Captioner:
    """The place that is looked at: its addresses, and what the manifests call all others. ``tracer`` made packets report."""

    addresses: frozenset[str]
    names: Mapping[str, str]
    tracer: str = "nftrace"

    def caption(self, frame: Frame, packet: Decoded, connection: Connection | None) -> str:
        """The comment for a packet; learns from its bytes whether its connection is TLS."""
        if packet.kind == headers.ARP:
            return f"ARP: {headers.arp(frame.data) or 'not for IPv4'} [packet]"
        flow = packet.flow
        if flow is None:
            return f"no IP packet (type 0x{packet.kind:04x}) [packet]"
        if flow.proto == "udp" and flow.dport == fence.DISCARD and fence.token_of(packet.payload) is not None:
            return "a fence of the lab's own: a verify or trace is under way [packet]"
        if packet.icmp is not None:
            return self._icmp(flow, packet)
        said = self._said(flow, packet, connection)
        if connection is None:
            return f"{self._end(flow.src, flow.sport)} -> {self._end(flow.dst, flow.dport)}{said} [packet, manifests]"
        return self._hop(frame, flow, connection, said)

    def _hop(self, frame: Frame, flow: Flow, c: Connection, said: str) -> str:
        back = c.changed is not None and flow == c.changed.reversed()
        back = back or (c.original is not None and flow == c.original.reversed())
        back = back or (c.original is None and c.opened is not None and flow == c.opened.reversed())
        if c.captured_to is not None and c.original is not None:
            text = self._captured(c, c.original, back)
        elif frame.direction == "lo":
            text = self._over_lo(flow, c, back)
        else:
            text = self._direct(frame, flow, c, back)
        if c.unknown:
            text += f"; what netfilter did is not known: {c.unknown}"
        if c.cluster and c.client is not None:
            text += f", cluster {c.cluster}"
        secure = f", {c.secure}" if c.secure else ""
        return f"{text}{secure}{said} [{', '.join(self._used(text, c))}]"

    def _used(self, text: str, c: Connection) -> Iterator[str]:
        """Whose word a caption rests on."""
        if c.original is not None:
            yield "conntrack"
        owners = [o for o in (c.client, c.server) if o is not None]
        yield from dict.fromkeys(o.source for o in owners if str(o.uid) in text or (o is c.server and c.captured_to))
        if c.rule and c.rule in text:
            yield self.tracer
        if c.cluster:
            yield "access-log"
        if any(name in text for name in self.names.values()):
            yield "manifests"
        yield "packet"

    def _captured(self, c: Connection, original: Flow, back: bool) -> str:
        """A flow that was turned to a port of this place."""
        server = c.server.name if c.server and c.server.name else "an unknown process"
        there = self._end(original.dst, original.dport)
        zone = f", zone {c.zone}" if c.zone else ""
        by = f" by {c.rule}" if c.rule else ""
        outbound = original.src in self.addresses or original.src.startswith("127.") or original.src == "::1"
        client = self._client(c, original) if outbound else self._end(original.src, original.sport)
        how = "DNAT" if not c.by_trace else "given"
        if back:
            return f"{server} ({c.captured_to}) -> {client}: answers as {there}{zone}"
        if outbound:
            return f"{client} -> {there}: {how} to {c.captured_to} ({server}){zone}{by}"
        return f"inbound: {client} -> this pod's {original.dport}: arrives at {c.captured_to} ({server}), {how}{by}"

    def _over_lo(self, flow: Flow, c: Connection, back: bool) -> str:
        original = c.original or (flow.reversed() if back else flow)
        client, server = self._client(c, original), str(c.server) if c.server else "an unknown process"
        apps = c.client is not None and c.client.name == "Envoy" and (c.server is None or c.server.name not in _PROXIES)
        if apps or original.src in ("127.0.0.6", "::6"):
            if back:
                return f"{server} -> {client}: answers to {written(original.src, original.sport)}"
            return f"{client} -> {server}, port {original.dport}: the app sees {written(original.src, original.sport)}"
        if back:
            return f"{server} ({original.dport}) -> {client}: answers, within the pod"
        return f"{client} -> {server} ({original.dport}): within the pod"

    def _direct(self, frame: Frame, flow: Flow, c: Connection, back: bool) -> str:
        """A flow that leaves or enters the place as it is."""
        outward = frame.direction == "out"
        far = self._end(flow.dst, flow.dport) if outward else self._end(flow.src, flow.sport)
        here = c.server if (back if outward else not back) else c.client
        envoys = here is not None and here.name == "Envoy" and here is c.client
        if envoys and self.names.get(flow.dst if outward else flow.src, "").split(" ")[0] in ("pod", "external", ""):
            far = f"endpoint {far}"
        near = str(here) if here else self._end(*((flow.src, flow.sport) if outward else (flow.dst, flow.dport)))
        passed = "" if c.unknown else f": not captured{f' by {c.rule}' if c.rule else ''}"
        if outward:
            return f"{near} -> {far}{': answers' if back else '' if envoys else passed}"
        return f"{far} -> {near}: answers" if back else f"inbound: {far} -> {near}, port {flow.dport}{passed}"

    def _client(self, c: Connection, original: Flow) -> str:
        return str(c.client) if c.client else f"{written(original.src, original.sport)} (its process is not known)"

    def _end(self, address: str, port: int) -> str:
        name = "this pod" if address in self.addresses else self.names.get(address)
        return f"{written(address, port)} ({name})" if name else written(address, port)

    def _icmp(self, flow: Flow, packet: Decoded) -> str:
        kind, code = packet.icmp or (0, 0)
        here = f"{self._name(flow.src)} -> {self._name(flow.dst)}"
        echo = {"icmp": {8: "request", 0: "reply"}, "icmpv6": {128: "request", 129: "reply"}}[flow.proto]
        if kind in echo:
            return f"{here}: echo {echo[kind]}, id {flow.sport} [packet, manifests]"
        inner = parse_headers(packet.payload)
        words = (
            _UNREACHABLE.get(code, f"code {code}") if (flow.proto, kind) == ("icmp", 3) else f"type {kind} code {code}"
        )
        about = f" about {written(inner.src, inner.sport)} -> {written(inner.dst, inner.dport)}" if inner else ""
        return f"{here}: {flow.proto} {words}{about} [packet, manifests]"

    def _name(self, address: str) -> str:
        name = "this pod" if address in self.addresses else self.names.get(address)
        return f"{address} ({name})" if name else address

    @staticmethod
    def _said(flow: Flow, packet: Decoded, connection: Connection | None) -> str:
        """What the packet's own bytes say."""
        if packet.begins:
            return "; SYN"
        if not packet.payload:
            return f"; {_without_data(packet.flags)}" if _without_data(packet.flags) else ""
        if flow.proto == "udp":
            message = speech.dns(packet.payload) if {flow.sport, flow.dport} & set(_DNS_PORTS) else ""
            return f"; DNS {message}" if message else ""
        record = speech.tls(packet.payload)
        if record is not None:
            if connection is not None and connection.secure != "mTLS":
                connection.secure = "mTLS" if record.mutual else "TLS"
            if record.what != "ClientHello":
                return f"; TLS {record.what}"
            return f"; TLS ClientHello, SNI {record.sni or 'none'}, ALPN {','.join(record.alpn) or 'none'}"
        line = speech.http(packet.payload)
        return f"; {line}" if line else f"; {len(packet.payload)} bytes"


def _without_data(flags: str) -> str:
    if "R" in flags:
        return "RST"
    if "F" in flags:
        return "FIN"
    return "SYN-ACK" if "S" in flags else ""

"""What was seen in one namespace, found again by 5-tuple. Pure: events in, answers out.

A `Packet` is one packet on one of its ways through the hooks: locally made (``output`` first) or arrived (``prerouting``
first). A packet over ``lo`` is two of them. Steps are attached to it as the kernel reports them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from lab.trace import conntrack, owner_table
from lab.trace.conntrack import ConntrackEvent
from lab.trace.flows import Flow
from lab.trace.nflog import LegacyTrace, Sent
from lab.trace.nftrace import NftTrace

_IPTABLES_TABLES = frozenset({"raw", "mangle", "nat", "filter", "security"})
_OUTPUT_HOOKS = frozenset({"output", "postrouting"})

_Key = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that the kernel said of a packet.

    ``backend`` is ``legacy``, ``nft`` (iptables-nft) or ``native-nft``; ``family`` the table's (``ip``, ``ip6``, ``inet``).
    ``kind`` is ``rule``, ``return`` (a chain's end) or ``policy``. Legacy tells ``position`` and ``hook``, nf_tables ``handle``,
    ``verdict`` and, in ``base``, the base chain that was entered.
    """

    family: str
    backend: str
    table: str
    chain: str
    kind: str
    position: int | None = None
    handle: int | None = None
    verdict: str = ""
    hook: str = ""
    base: str = ""


@dataclass(slots=True, eq=False)
class Packet:
    """``flow`` is the tuple at the first hook, before NAT; ``hook`` is that hook. ``number`` counts packets of the namespace.

    ``uid`` is of the socket that sent it; None if it was not sent by one here, or that is not known.
    """

    number: int
    hook: str
    flow: Flow
    iif: int = 0
    oif: int = 0
    mark: int = 0
    uid: int | None = None
    steps: list[Step] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Entry:
    """A conntrack entry as last seen; ``ended`` once it was destroyed. ``number`` orders entries by their beginning."""

    number: int
    original: Flow
    reply: Flow
    zone: int
    id: int
    status: int = 0
    ended: bool = False


class Index:
    """Packets and conntrack entries of one namespace, the newest ``limit`` of each.

    Args:
        marked: our own table announces each packet (see ``owner_table``); else its first line in ``raw`` does.
    """

    def __init__(self, limit: int = 20_000, *, marked: bool = True) -> None:
        self.limit = limit
        self._marked = marked
        self._packets: deque[Packet] = deque()
        self._by_source: dict[_Key, list[Packet]] = {}
        self._open: OrderedDict[int, Packet] = OrderedDict()
        self._uid: OrderedDict[Flow, int | None] = OrderedDict()
        self._entries: OrderedDict[tuple[int, int, Flow], Entry] = OrderedDict()
        self._entries_by_source: dict[_Key, list[Entry]] = {}
        self.count = 0

    # --- events in -------------------------------------------------------------------------

    def add_nft(self, trace: NftTrace) -> Flow | None:
        """Takes one nf_tables message; returns the flow whose evidence has grown, if any."""
        if trace.table == owner_table.NAME:
            if trace.flow is None or trace.kind != "rule":
                return None
            packet = self._new_packet(trace.chain, trace.flow, trace.iif, trace.oif, trace.mark)
            if trace.chain == "output":
                packet.uid = self._uid.pop(trace.flow, None)
            self._open[trace.trace_id] = packet
            self._open.move_to_end(trace.trace_id)
            if len(self._open) > 1024:
                self._open.popitem(last=False)
            return packet.flow
        opened = self._open.get(trace.trace_id)
        if trace.flow is not None and (opened is None or _source(opened.flow) != _source(trace.flow)):
            # The kernel makes a trace's number from the packet's address and hash: NAT may change the latter.
            opened = self._passing(trace.flow, trace.iif)
            if opened is not None:
                self._open[trace.trace_id] = opened
        if opened is None:
            return None
        base = trace.chain if trace.flow is not None or not opened.steps else opened.steps[-1].base
        opened.steps.append(
            Step(
                family=trace.family,
                backend=backend(trace.family, trace.table),
                table=trace.table,
                chain=trace.chain,
                kind=trace.kind,
                handle=trace.handle,
                verdict=trace.verdict,
                base=base,
            )
        )
        return opened.flow

    def add_sent(self, sent: Sent) -> None:
        """Takes who sent a packet, which our own table tells just before it announces the packet itself."""
        self._uid[sent.flow] = sent.uid
        if len(self._uid) > 1024:
            self._uid.popitem(last=False)

    def add_legacy(self, trace: LegacyTrace) -> Flow | None:
        """Takes one line of legacy iptables; returns the flow whose evidence has grown."""
        entry = "output" if trace.hook in _OUTPUT_HOOKS else "prerouting"
        packet = (
            self._passing(trace.flow, trace.iif) if trace.hook == "postrouting" else self._latest(trace.flow, entry)
        )
        if (
            not self._marked
            and trace.table == "raw"
            and trace.hook == entry
            and (packet is None or _raw_is_over(packet))
        ):
            packet = None
        if packet is None:
            packet = self._new_packet(entry, trace.flow, trace.iif, trace.oif, trace.mark)
            packet.uid = trace.uid if trace.hook == "output" else None
        packet.steps.append(
            Step(
                family="ip6" if trace.flow.family == "ipv6" else "ip",
                backend="legacy",
                table=trace.table,
                chain=trace.chain,
                kind=trace.kind,
                position=trace.position,
                hook=trace.hook,
            )
        )
        return packet.flow

    def add_conntrack(self, event: ConntrackEvent) -> Flow:
        """Takes one conntrack event; returns the entry's original flow."""
        key = (event.id, event.zone, event.original)
        entry = self._entries.get(key)
        if entry is None:
            self.count += 1
            entry = Entry(self.count, event.original, event.reply, event.zone, event.id)
            self._entries[key] = entry
            for source in {_source(event.original), _source(event.reply.reversed())}:
                self._entries_by_source.setdefault(source, []).append(entry)
            if len(self._entries) > self.limit:
                self._forget(self._entries.popitem(last=False)[1])
        entry.reply = event.reply
        entry.status |= event.status
        entry.ended |= event.event == "destroy"
        return event.original

    # --- answers out -----------------------------------------------------------------------

    def packets(
        self, proto: str, src: str, sport: int, dst: str | None = None, dport: int | None = None
    ) -> list[Packet]:
        """Packets of a flow, oldest first; without ``dst`` or ``dport`` any destination."""
        return [p for p in self._by_source.get((proto, src, sport), []) if _goes_to(p.flow, dst, dport)]

    def conntrack(
        self, proto: str, src: str, sport: int, dst: str | None = None, dport: int | None = None
    ) -> list[Entry]:
        """Entries whose flow, before or after NAT, is the given one, oldest first."""
        found = self._entries_by_source.get((proto, src, sport), [])
        return [e for e in found if any(_is(f, src, sport, dst, dport) for f in (e.original, e.reply.reversed()))]

    def entries(self, since: int = 0) -> Iterator[Entry]:
        """All entries that began after number ``since``, oldest first."""
        return (e for e in self._entries.values() if e.number > since)

    # --- inside ----------------------------------------------------------------------------

    def _new_packet(self, hook: str, flow: Flow, iif: int, oif: int, mark: int) -> Packet:
        self.count += 1
        packet = Packet(self.count, hook, flow, iif, oif, mark)
        self._packets.append(packet)
        self._by_source.setdefault(_source(flow), []).append(packet)
        if len(self._packets) > self.limit:
            old = self._packets.popleft()
            same = self._by_source[_source(old.flow)]
            same.remove(old)
            if not same:
                del self._by_source[_source(old.flow)]
        return packet

    def _latest(self, flow: Flow, hook: str | None) -> Packet | None:
        """The newest packet from the same source: NAT of the destination keeps that."""
        candidates = [p for p in self._by_source.get(_source(flow), []) if hook is None or p.hook == hook]
        return next((p for p in reversed(candidates) if p.flow == flow), candidates[-1] if candidates else None)

    def _passing(self, flow: Flow, iif: int) -> Packet | None:
        """The newest packet from the same source that came by an interface, or (0) was made here. On its way out both are seen:
        over ``lo`` one packet is two, and the answer to an answer (RST) has the same source again."""
        return self._latest(flow, "prerouting" if iif else "output") or self._latest(flow, None)

    def _forget(self, entry: Entry) -> None:
        for source in {_source(entry.original), _source(entry.reply.reversed())}:
            same = self._entries_by_source.get(source, [])
            if entry in same:
                same.remove(entry)
            if not same:
                self._entries_by_source.pop(source, None)


def backend(family: str, table: str) -> str:
    """Whose table it is: iptables-nft keeps its own in ``ip`` and ``ip6`` under iptables' names."""
    return "nft" if family in ("ip", "ip6") and table in _IPTABLES_TABLES else "native-nft"


def entry_to_json(entry: Entry) -> dict[str, object]:
    return {
        "number": entry.number,
        "zone": entry.zone,
        "original": flow_to_json(entry.original),
        "reply": flow_to_json(entry.reply),
        "status": conntrack.status_names(entry.status),
        "ended": entry.ended,
    }


def flow_to_json(flow: Flow) -> dict[str, object]:
    return {"proto": flow.proto, "src": flow.src, "sport": flow.sport, "dst": flow.dst, "dport": flow.dport}


def _raw_is_over(packet: Packet) -> bool:
    return bool(packet.steps) and (packet.steps[-1].table != "raw" or packet.steps[-1].kind == "policy")


def _source(flow: Flow) -> _Key:
    return flow.proto, flow.src, flow.sport


def _goes_to(flow: Flow, dst: str | None, dport: int | None) -> bool:
    return dst in (None, flow.dst) and dport in (None, flow.dport)


def _is(flow: Flow, src: str, sport: int, dst: str | None, dport: int | None) -> bool:
    return (flow.src, flow.sport) == (src, sport) and _goes_to(flow, dst, dport)

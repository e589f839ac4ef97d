"""The judge: one process that sniffs the router's side of links with scapy, outside the pods it judges.

Messages on its SOCK_SEQPACKET socket (``lab.runtime.channel``); each gets an answer with its ``id``::

    {"op": "watch", "links": {place: {"netns": path, "interface": name}}}
    {"op": "fence", "place": ..., "token": ..., "wait": 1.0}   was the fence seen on that link, now or in time?
    {"op": "find", "place": ..., "which": [{"since": ..., "dst": ..., ...}, ...]}   flows (``lab.probe.wire.Link.find``)
    {"op": "send", "netns": path, "to": address}               a fence towards a place; its 5-tuple
"""

from __future__ import annotations

import dataclasses
import selectors
import socket
import time
from collections.abc import Mapping
from typing import Any

from lab.errors import LabError
from lab.probe import fence, packets
from lab.probe.wire import Link
from lab.runtime import channel, enter
from lab.trace.flows import Flow


@dataclasses.dataclass
class _Waiting:
    number: int
    place: str
    token: str
    deadline: float


class Judge:
    """Sniffers, what they saw, and who waits for a fence."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ, None)
        self._links: dict[str, Link] = {}
        self._taps: dict[str, packets.Tap] = {}
        self._waiting: list[_Waiting] = []

    def run(self) -> int:
        """Serves until the other end is gone."""
        packets.conf.layers.filter(
            [packets.Ether, packets.IP, packets.IPv6, packets.TCP, packets.UDP, packets.ICMP, packets.Raw]
        )
        while True:
            first = min((w.deadline for w in self._waiting), default=None)
            timeout = None if first is None else max(0.0, first - time.monotonic())
            for key, _ in self._selector.select(timeout):
                if key.data is not None:
                    self._sniffed(*key.data)
                    continue
                received = channel.receive(self._control)
                if received is None:
                    return 0
                self._obey(received[0])
            self._answer_waiting()

    def _obey(self, message: Mapping[str, Any]) -> None:
        number = int(message["id"])
        try:
            if message["op"] == "watch":
                self._watch(message["links"])
                self._reply(number, {})
            elif message["op"] == "fence":
                deadline = time.monotonic() + float(message["wait"])
                self._waiting.append(_Waiting(number, message["place"], message["token"], deadline))
            elif message["op"] == "find":
                link = self._links[message["place"]]
                if message["place"] in self._taps:  # what was on the wire before the question counts
                    self._sniffed(message["place"], self._taps[message["place"]])
                found = [[dataclasses.asdict(s) for s in link.find(**which)] for which in message["which"]]
                self._reply(number, {"found": found})
            elif message["op"] == "send":
                with enter.netns(message["netns"]):
                    sent = fence.send(message["to"])
                self._reply(number, {"fence": sent})
            else:
                self._reply(number, {"error": f"unknown op {message['op']!r}"})
        except KeyError as e:
            self._reply(number, {"error": f"nothing is watched at {e}"})
        except (OSError, ValueError, LabError) as e:
            self._reply(number, {"error": str(e)})

    def _watch(self, links: Mapping[str, Mapping[str, str]]) -> None:
        for place, where in links.items():
            if place in self._taps:
                continue
            with enter.netns(where["netns"]):
                packets.know_interfaces()
                tap = packets.Tap(iface=where["interface"])
            tap.ins.setblocking(False)
            self._taps[place] = tap
            self._links[place] = Link()
            self._selector.register(tap.ins, selectors.EVENT_READ, (place, tap))

    def _sniffed(self, place: str, tap: packets.Tap) -> None:
        link = self._links[place]
        while True:
            try:
                packet = tap.recv()
            except BlockingIOError:
                return
            except OSError:  # the interface went away
                self._selector.unregister(tap.ins)
                tap.close()
                del self._taps[place]
                return
            if packet is None:
                return
            note(link, packet, tap.outgoing)

    def _answer_waiting(self) -> None:
        now = time.monotonic()
        left = []
        for waiting in self._waiting:
            link = self._links.get(waiting.place)
            if link is None:
                self._reply(waiting.number, {"error": f"nothing is watched at '{waiting.place}'"})
            elif waiting.token in link.fences or waiting.deadline <= now:
                self._reply(waiting.number, {"seen": waiting.token in link.fences})
            else:
                left.append(waiting)
        self._waiting = left

    def _reply(self, number: int, answer: Mapping[str, object]) -> None:
        channel.send(self._control, {"id": number, **answer})


def main(control: socket.socket) -> int:
    """Judges until the other end of ``control`` is gone."""
    try:
        return Judge(control).run()
    except BrokenPipeError:
        return 0


def note(link: Link, packet: Any, outgoing: bool) -> None:
    """Enters a sniffed packet of scapy; ``outgoing``: from the router to the place."""
    flow = _flow_of(packet)
    if flow is None:
        return
    when = float(packet.time)
    token = None
    if flow.proto == "udp" and flow.dport == fence.DISCARD:
        token = fence.token_of(bytes(packet[packets.UDP].payload))
    if token is not None:
        link.add_fence(token, when)
    else:
        segment = packet.getlayer(packets.TCP)
        link.add(flow, outgoing, when, str(segment.flags) if segment is not None else "")


def _flow_of(packet: Any) -> Flow | None:
    """The flow of a sniffed packet; of an ICMP error its own (the packet that it complains about is another's)."""
    ip = packet.getlayer(packets.IP) or packet.getlayer(packets.IPv6)
    if ip is None:
        return None
    segment = ip.payload
    if isinstance(segment, packets.TCP | packets.UDP):
        return Flow("tcp" if isinstance(segment, packets.TCP) else "udp", ip.src, segment.sport, ip.dst, segment.dport)
    if isinstance(segment, packets.ICMP):
        return Flow("icmp", ip.src, int(segment.id or 0), ip.dst, 0)
    if isinstance(segment, packets.ICMPv6EchoRequest | packets.ICMPv6EchoReply):
        return Flow("icmpv6", ip.src, int(segment.id or 0), ip.dst, 0)
    return None

"""conntrack's events: what a flow's addresses were before and after NAT, and in which zone.

Layouts: include/uapi/linux/netfilter/nfnetlink_conntrack.h, .../nf_conntrack_common.h.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from typing import Literal

from lab.trace import netlink
from lab.trace.flows import Flow, protocol_name

MSG_NEW = netlink.SUBSYS_CTNETLINK << 8
MSG_GET = netlink.SUBSYS_CTNETLINK << 8 | 1
MSG_DELETE = netlink.SUBSYS_CTNETLINK << 8 | 2

SEEN_REPLY = 1 << 1
ASSURED = 1 << 2
SRC_NAT = 1 << 4
DST_NAT = 1 << 5

_STATUS_NAMES = {SEEN_REPLY: "seen-reply", ASSURED: "assured", SRC_NAT: "src-nat", DST_NAT: "dst-nat"}


@dataclass(frozen=True, slots=True)
class ConntrackEvent:
    """One event. ``reply`` is the tuple of the answers as the kernel expects them: its source is the flow's real end.

    ``zone`` is 0 unless a CT rule set one; ``status`` are IPS_* bits (0 where the event does not tell); ``id`` tells an
    entry from a later one with the same tuple.
    """

    event: Literal["new", "destroy"]
    original: Flow
    reply: Flow
    zone: int = 0
    status: int = 0
    id: int = 0


def decode(kind: int, payload: bytes) -> ConntrackEvent | None:
    """The event in ``payload`` (``new`` stands for updates too); None for a protocol without tuples."""
    _, a = netlink.family_and_attributes(payload)
    if not {1, 2} <= a.keys():
        return None
    original, zone = _tuple(a[1])
    reply, _ = _tuple(a[2])
    if original is None or reply is None:
        return None
    return ConntrackEvent(
        event="destroy" if kind == MSG_DELETE else "new",
        original=original,
        reply=reply,
        zone=netlink.number(a[18]) if 18 in a else zone,
        status=netlink.number(a[3]) if 3 in a else 0,
        id=netlink.number(a[12]) if 12 in a else 0,
    )


def status_names(status: int) -> list[str]:
    return [name for bit, name in _STATUS_NAMES.items() if status & bit]


def _tuple(value: bytes) -> tuple[Flow | None, int]:
    a = netlink.attributes(value)
    zone = netlink.number(a[3]) if 3 in a else 0  # CTA_TUPLE_ZONE: a zone of this direction only
    if not {1, 2} <= a.keys():
        return None, zone
    ip, proto = netlink.attributes(a[1]), netlink.attributes(a[2])
    if 1 in ip and 2 in ip:
        src, dst = socket.inet_ntop(socket.AF_INET, ip[1]), socket.inet_ntop(socket.AF_INET, ip[2])
    elif 3 in ip and 4 in ip:
        src, dst = str(ipaddress.IPv6Address(ip[3])), str(ipaddress.IPv6Address(ip[4]))
    else:
        return None, zone
    name = protocol_name(proto[1][0]) if 1 in proto else ""
    identifier = proto.get(4) or proto.get(7)  # CTA_PROTO_ICMP_ID, CTA_PROTO_ICMPV6_ID
    if identifier is not None:
        return Flow(name, src, netlink.number(identifier), dst, 0), zone
    sport = netlink.number(proto[2]) if 2 in proto else 0
    dport = netlink.number(proto[3]) if 3 in proto else 0
    return Flow(name, src, sport, dst, dport), zone

"""What the kernel sends to NFLOG group 0: trace lines of legacy iptables, and who sent a packet that our own table logs.

``ip_tables`` logs ``TRACE: TABLE:CHAIN:KIND:POSITION`` for each rule that matched (net/ipv4/netfilter/ip_tables.c:
trace_packet); with ``net.netfilter.nf_log.2=nfnetlink_log`` in the namespace it comes by netlink, with the packet.
Layouts: include/uapi/linux/netfilter/nfnetlink_log.h.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Literal

from lab.trace import netlink, owner_table
from lab.trace.flows import Flow, parse_headers

MSG_PACKET = netlink.SUBSYS_ULOG << 8
_MSG_CONFIG = netlink.SUBSYS_ULOG << 8 | 1

_CMD_BIND = 1
_COPY_PACKET = 2
_COPIED_BYTES = 128  # IP and transport headers, options included

HOOKS = ("prerouting", "input", "forward", "output", "postrouting")
"""Names of the hooks by number (enum nf_inet_hooks)."""

_PREFIX = re.compile(r"TRACE: (?P<table>[^:]+):(?P<chain>.+):(?P<kind>rule|return|policy):(?P<position>\d+) ?\Z")


@dataclass(frozen=True, slots=True)
class LegacyTrace:
    """One line: ``kind`` is ``rule`` (it matched), ``return`` (the end of a user chain) or ``policy``. ``uid``: see `Sent`."""

    table: str
    chain: str
    kind: Literal["rule", "return", "policy"]
    position: int
    hook: str
    flow: Flow
    iif: int = 0
    oif: int = 0
    mark: int = 0
    uid: int | None = None


@dataclass(frozen=True, slots=True)
class Sent:
    """A packet on its way out: its flow, and whose socket it comes from (None: the kernel's own, or of no file any more)."""

    flow: Flow
    uid: int | None


def bind_group(group: int = 0) -> bytes:
    """Messages (two, each acknowledged) that make the sending socket the receiver of ``group``, packet by packet."""
    config = netlink.attribute(2, struct.pack(">IBB", _COPIED_BYTES, _COPY_PACKET, 0))  # NFULA_CFG_MODE
    config += netlink.attribute(5, struct.pack(">I", 1))  # NFULA_CFG_QTHRESH: do not wait for more
    bind = netlink.attribute(1, bytes([_CMD_BIND]))  # NFULA_CFG_CMD
    return b"".join(netlink.message(_MSG_CONFIG, netlink.NLM_F_ACK, 2, body, res_id=group) for body in (bind, config))


def decode(payload: bytes) -> LegacyTrace | Sent | None:
    """The trace line in ``payload``, or who sent the packet; None if it was logged by something else."""
    _, a = netlink.family_and_attributes(payload)
    if not {1, 9, 10} <= a.keys():
        return None
    prefix = netlink.string(a[10])
    match = _PREFIX.match(prefix)
    flow = parse_headers(a[9])
    hook = a[1][2]
    uid = netlink.number(a[11]) if 11 in a else None
    if prefix == owner_table.LOG_PREFIX and flow is not None:
        return Sent(flow, uid)
    if match is None or flow is None or hook >= len(HOOKS):
        return None
    kind: Literal["rule", "return", "policy"] = "rule"
    if match["kind"] == "return":
        kind = "return"
    elif match["kind"] == "policy":
        kind = "policy"
    return LegacyTrace(
        table=match["table"],
        chain=match["chain"],
        kind=kind,
        position=int(match["position"]),
        hook=HOOKS[hook],
        flow=flow,
        iif=netlink.number(a[4]) if 4 in a else 0,
        oif=netlink.number(a[5]) if 5 in a else 0,
        mark=netlink.number(a[2]) if 2 in a else 0,
        uid=uid,
    )

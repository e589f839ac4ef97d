"""nf_tables' trace messages: which rule of which chain a packet met, and what the rule said.

include/uapi/linux/netfilter/nf_tables.h (enum nft_trace_attributes); the packet's headers come with the first message of
each base chain that it enters (net/netfilter/nf_tables_trace.c).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Literal

from lab.trace import netlink
from lab.trace.flows import Flow, parse_headers

MSG_TRACE = netlink.SUBSYS_NFTABLES << 8 | 17

FAMILIES = {1: "inet", 2: "ip", 3: "arp", 5: "netdev", 7: "bridge", 10: "ip6"}
"""Families of nf_tables tables by number (include/uapi/linux/netfilter.h)."""

VERDICTS = {
    0: "drop",
    1: "accept",
    2: "stolen",
    3: "queue",
    4: "repeat",
    -1: "continue",
    -2: "break",
    -3: "jump",
    -4: "goto",
    -5: "return",
}

_POLICY, _RETURN, _RULE = 1, 2, 3
_KINDS: dict[int, Literal["policy", "return", "rule"]] = {_POLICY: "policy", _RETURN: "return", _RULE: "rule"}


@dataclass(frozen=True, slots=True)
class NftTrace:
    """One trace message.

    ``kind`` is ``rule`` (with ``handle``), ``policy`` (``verdict`` is the policy's), or ``return`` (the end of a chain was
    reached without a decision). ``flow`` is None except in the first message of a base chain.
    """

    trace_id: int
    family: str
    table: str
    chain: str
    kind: Literal["policy", "return", "rule"]
    verdict: str
    handle: int | None = None
    target: str = ""
    flow: Flow | None = None
    iif: int = 0
    oif: int = 0
    mark: int = 0


def decode(payload: bytes) -> NftTrace | None:
    """The trace message in ``payload``; None if it lacks what names a rule."""
    family, a = netlink.family_and_attributes(payload)
    if not {1, 2, 4, 6} <= a.keys():
        return None
    kind = _KINDS.get(netlink.number(a[4]))
    if kind is None:
        return None
    handle = netlink.number(a[3]) if 3 in a else None
    verdict, target = _verdict(a[5]) if 5 in a else ("", "")
    if kind == "policy":
        verdict = VERDICTS.get(_signed(a[16]), "") if 16 in a else verdict
    elif handle is None:  # a chain's end: "continue" that belongs to no rule
        kind = "return"
    else:
        kind = "rule"
    return NftTrace(
        trace_id=netlink.number(a[6]),
        family=FAMILIES.get(family, str(family)),
        table=netlink.string(a[1]),
        chain=netlink.string(a[2]),
        kind=kind,
        verdict=verdict,
        handle=handle,
        target=target,
        flow=parse_headers(a[8], a.get(9, b"")) if 8 in a else None,
        iif=netlink.number(a[10]) if 10 in a else 0,
        oif=netlink.number(a[12]) if 12 in a else 0,
        mark=netlink.number(a[14]) if 14 in a else 0,
    )


def _verdict(value: bytes) -> tuple[str, str]:
    a = netlink.attributes(value)
    code = VERDICTS.get(_signed(a[1]), "") if 1 in a else ""
    return code, netlink.string(a[2]) if 2 in a else ""


def _signed(value: bytes) -> int:
    return int(struct.unpack(">i", value[:4])[0]) if len(value) >= 4 else -1

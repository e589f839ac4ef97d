"""The one nft table that makes a namespace report: it belongs to a socket and vanishes with it.

``inet`` so that one table serves both families, ``owner`` (NFT_TABLE_F_OWNER) so that nothing is left behind by a kill
and nobody else changes it, priority -310 so that it comes before raw (-300). Nothing is planted in the rules under test.
It marks (``meta nftrace set 1``) TCP segments without ACK (each connection's first, and odd crafted ones), all UDP and ICMP, and
packets that carry `CRAFTED_ID`. A marked packet is reported by nf_tables and by legacy iptables alike.

Who sent it no trace message says; NFLOG does (nfnetlink_log.c, NFULA_UID: of the file that the sending socket is), so on their way
out marked packets are logged to `LOG_GROUP`, too. That is exact also for a socket that is gone before anybody could ask for it.
"""

from __future__ import annotations

import functools
import struct
from typing import Any

from lab.trace import netlink

NAME = "sidecarlab-trace"
HOOKS = {"prerouting": 0, "output": 3}
"""Our base chains, named as their hooks, with the hook's number (enum nf_inet_hooks)."""

CRAFTED_ID = 0x51DE
"""The IPv4 identification of hand-made packets: any of them is traced, whatever its flags."""

LOG_GROUP = 0
LOG_PREFIX = "sidecarlab owner"

_PRIORITY = -310
_OWNER = 2  # NFT_TABLE_F_OWNER
_INET = 1
_REG = 1  # NFT_REG_1
_ACCEPT = 1

_META_NFTRACE, _META_NFPROTO, _META_L4PROTO = 12, 15, 16
_NETWORK_HEADER, _TRANSPORT_HEADER = 1, 2
_IPV4 = 2
_TCP, _UDP, _ICMP, _ICMPV6 = 6, 17, 1, 58
_ACK = 0x10

_Expression = tuple[str, list[tuple[str, Any]]]


@functools.cache
def create(*, owners: bool = True) -> tuple[bytes, int]:
    """One batch that makes the table, and how many acknowledgements it gets.

    Args:
        owners: also log who sent a packet (a kernel may lack nft_log).
    """
    from pyroute2.netlink import nla
    from pyroute2.netlink.nfnetlink import nftsocket

    class Expression(nftsocket.nft_rule_msg.nft_expr):  # type: ignore[misc]
        class nft_log(nla):  # type: ignore[misc]
            nla_map = (
                ("NFTA_LOG_UNSPEC", "none"),
                ("NFTA_LOG_GROUP", "be16"),
                ("NFTA_LOG_PREFIX", "asciiz"),
            )

    class RuleMessage(nftsocket.nft_rule_msg):  # type: ignore[misc]
        nft_expr = Expression

    chain_kind, rule_kind, table_kind = (
        nftsocket.NFT_MSG_NEWCHAIN,
        nftsocket.NFT_MSG_NEWRULE,
        nftsocket.NFT_MSG_NEWTABLE,
    )
    parts = [
        (nftsocket.nft_table_msg, table_kind, [("NFTA_TABLE_NAME", NAME), ("NFTA_TABLE_FLAGS", _OWNER)]),
    ]
    for chain, hook in HOOKS.items():
        where = {"attrs": [("NFTA_HOOK_HOOKNUM", hook), ("NFTA_HOOK_PRIORITY", _PRIORITY)]}
        parts.append(
            (
                nftsocket.nft_chain_msg,
                chain_kind,
                [
                    ("NFTA_CHAIN_TABLE", NAME),
                    ("NFTA_CHAIN_NAME", chain),
                    ("NFTA_CHAIN_HOOK", where),
                    ("NFTA_CHAIN_POLICY", _ACCEPT),
                    ("NFTA_CHAIN_TYPE", "filter"),
                ],
            )
        )
        parts += [
            (
                RuleMessage,
                rule_kind,
                [
                    ("NFTA_RULE_TABLE", NAME),
                    ("NFTA_RULE_CHAIN", chain),
                    ("NFTA_RULE_EXPRESSIONS", [_expression(*e) for e in expressions]),
                ],
            )
            for expressions in _rules(log=owners and chain == "output")
        ]
    batch = [netlink.message(0x10, 0, 0, res_id=netlink.SUBSYS_NFTABLES)]  # NFNL_MSG_BATCH_BEGIN
    for message_class, kind, attrs in parts:
        m = message_class()
        m["nfgen_family"] = _INET
        m["header"]["type"] = netlink.SUBSYS_NFTABLES << 8 | kind
        m["header"]["flags"] = netlink.NLM_F_REQUEST | netlink.NLM_F_ACK | 0x400 | 0x800  # CREATE, APPEND
        m["attrs"] = attrs
        m.encode()
        batch.append(bytes(m.data))
    batch.append(netlink.message(0x11, 0, 0, res_id=netlink.SUBSYS_NFTABLES))  # NFNL_MSG_BATCH_END
    return b"".join(batch), len(parts)


def _rules(*, log: bool) -> list[list[_Expression]]:
    trace: list[_Expression] = [
        ("immediate", [("NFTA_IMMEDIATE_DREG", _REG), ("NFTA_IMMEDIATE_DATA", _value(b"\x01"))]),
        ("meta", [("NFTA_META_KEY", _META_NFTRACE), ("NFTA_META_SREG", _REG)]),
    ]
    if log:
        trace.append(("log", [("NFTA_LOG_GROUP", LOG_GROUP), ("NFTA_LOG_PREFIX", LOG_PREFIX)]))
    without_ack: list[_Expression] = [
        _payload(_TRANSPORT_HEADER, 13, 1),
        (
            "bitwise",
            [
                ("NFTA_BITWISE_SREG", _REG),
                ("NFTA_BITWISE_DREG", _REG),
                ("NFTA_BITWISE_LEN", 1),
                ("NFTA_BITWISE_MASK", _value(bytes([_ACK]))),
                ("NFTA_BITWISE_XOR", _value(b"\0")),
            ],
        ),
        _equals(b"\0"),
    ]
    crafted = [
        *_meta_is(_META_NFPROTO, _IPV4),
        _payload(_NETWORK_HEADER, 4, 2),
        _equals(struct.pack(">H", CRAFTED_ID)),
    ]
    return [
        [*_meta_is(_META_L4PROTO, _TCP), *without_ack, *trace],
        *([*_meta_is(_META_L4PROTO, proto), *trace] for proto in (_UDP, _ICMP, _ICMPV6)),
        [*crafted, *trace],
    ]


def _meta_is(key: int, value: int) -> list[_Expression]:
    return [("meta", [("NFTA_META_KEY", key), ("NFTA_META_DREG", _REG)]), _equals(bytes([value]))]


def _payload(base: int, offset: int, length: int) -> _Expression:
    return (
        "payload",
        [
            ("NFTA_PAYLOAD_DREG", _REG),
            ("NFTA_PAYLOAD_BASE", base),
            ("NFTA_PAYLOAD_OFFSET", offset),
            ("NFTA_PAYLOAD_LEN", length),
        ],
    )


def _equals(value: bytes) -> _Expression:
    return ("cmp", [("NFTA_CMP_SREG", _REG), ("NFTA_CMP_OP", 0), ("NFTA_CMP_DATA", _value(value))])


def _value(data: bytes) -> dict[str, Any]:
    return {"attrs": [("NFTA_DATA_VALUE", data)]}


def _expression(name: str, attrs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {"attrs": [("NFTA_EXPR_NAME", name), ("NFTA_EXPR_DATA", {"attrs": attrs})]}

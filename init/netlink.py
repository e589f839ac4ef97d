"""Two read-only netlink dumps by hand: pyroute2 takes 0.2 s to import, and most runs need nothing else of it.

The layouts are the kernel's: include/uapi/linux/netlink.h, rtnetlink.h, if_addr.h, netfilter/nfnetlink.h.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address

NETLINK_ROUTE, NETLINK_NETFILTER = 0, 12
NLM_F_REQUEST, NLM_F_DUMP = 0x1, 0x300
NLMSG_ERROR, NLMSG_DONE = 0x2, 0x3
RTM_GETADDR = 22
IFA_ADDRESS, IFA_LOCAL = 1, 2
NFT_MSG_GETTABLE = (10 << 8) | 1
NFTA_TABLE_NAME = 1
TABLE_FAMILIES = {1: "inet", 2: "ip", 3: "arp", 5: "netdev", 7: "bridge", 10: "ip6"}


def addresses() -> list[IPv4Address | IPv6Address]:
    """All interface addresses in the kernel's order (IPv4 of every interface, then IPv6). Raises OSError."""
    found = []
    for payload in _dump(NETLINK_ROUTE, RTM_GETADDR, struct.pack("=BBBBI", 0, 0, 0, 0, 0)):
        attributes = dict(_attributes(payload[8:]))
        raw = attributes.get(IFA_LOCAL) or attributes.get(IFA_ADDRESS)
        if raw and len(raw) in (4, 16):
            found.append(ip_address(raw))
    return found


def nft_tables() -> list[tuple[str, str]]:
    """``(family, name)`` of each nftables table of this network namespace, those of iptables-nft included.

    Raises:
        OSError: no permission, or a kernel without nf_tables.
    """
    found = []
    for payload in _dump(NETLINK_NETFILTER, NFT_MSG_GETTABLE, struct.pack("=BBH", 0, 0, 0)):
        name = dict(_attributes(payload[4:])).get(NFTA_TABLE_NAME, b"")
        found.append((TABLE_FAMILIES.get(payload[0], str(payload[0])), name.rstrip(b"\0").decode()))
    return found


def _dump(protocol: int, kind: int, payload: bytes) -> Iterator[bytes]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol) as sock:
        sock.bind((0, 0))
        header = struct.pack("=IHHII", 16 + len(payload), kind, NLM_F_REQUEST | NLM_F_DUMP, 1, 0)
        sock.send(header + payload)
        while True:
            data = sock.recv(1 << 18)
            while data:
                length, message, _, _, _ = struct.unpack_from("=IHHII", data)
                body = data[16:length]
                if message == NLMSG_DONE:
                    return
                if message == NLMSG_ERROR:
                    code = -struct.unpack_from("=i", body)[0]
                    if code:
                        raise OSError(code, f"netlink dump {kind} failed")
                    return
                yield body
                data = data[(length + 3) & ~3 :]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= 4:
        length, kind = struct.unpack_from("=HH", data)
        yield kind & 0x3FFF, data[4:length]
        data = data[(length + 3) & ~3 :]

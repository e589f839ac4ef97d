"""Forgets UDP flows to endpoints that a service no longer has, in the namespace of the calling thread.

A UDP client may keep its port for ever, and the kernel its translation with it: without this it would go on talking
to an address that is gone (kubernetes/kubernetes: pkg/proxy/conntrack/cleanup.go).
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable

from pyroute2 import Conntrack
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.nfnetlink.nfctsocket import NFCTAttrTuple

from lab.errors import LabError
from lab.fabric.services import Endpoint, VirtualPort


def forget(stale: Iterable[tuple[VirtualPort, Endpoint]]) -> None:
    """Deletes the translations from each virtual port to its former endpoint.

    Raises:
        LabError: the kernel refused.
    """
    with Conntrack() as table:
        for port, endpoint in stale:
            family = socket.AF_INET6 if ":" in port.ip else socket.AF_INET
            wanted = NFCTAttrTuple(family=family, daddr=port.ip, proto=socket.IPPROTO_UDP, dport=port.port)
            for entry in list(table.dump_entries(tuple_orig=wanted)):
                if entry.tuple_reply.saddr != endpoint.ip:
                    continue
                try:
                    table.entry("del", tuple_orig=entry.tuple_orig)
                except NetlinkError as e:
                    if e.code != errno.ENOENT:  # it has just ended by itself
                        raise LabError("a flow cannot be forgotten", f"{port.ip}:{port.port}", str(e)) from None

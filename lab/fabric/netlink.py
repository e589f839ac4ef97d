"""Many rtnetlink requests in few system calls.

pyroute2 knows the messages; its sockets spend most of the time of a small build on set-up and on one answer per
request. Here one plain socket sends a whole batch, asks for one acknowledgement at its end, and reads errors, which
the kernel always sends (rtnetlink(7), netlink(7)), in between.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyroute2.netlink import (
    NLM_F_ACK,
    NLM_F_CREATE,
    NLM_F_EXCL,
    NLM_F_REPLACE,
    NLM_F_REQUEST,
    NLMSG_ERROR,
    nlmsg,
)
from pyroute2.netlink.rtnl import (
    RTM_DELLINK,
    RTM_DELQDISC,
    RTM_DELROUTE,
    RTM_DELRULE,
    RTM_NEWADDR,
    RTM_NEWLINK,
    RTM_NEWNEIGH,
    RTM_NEWQDISC,
    RTM_NEWROUTE,
    RTM_NEWRULE,
    RTM_NEWTCLASS,
)
from pyroute2.netlink.rtnl.fibmsg import fibmsg
from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg
from pyroute2.netlink.rtnl.ndmsg import ndmsg
from pyroute2.netlink.rtnl.rtmsg import rtmsg
from pyroute2.netlink.rtnl.tcmsg import sched_htb, sched_tbf, tcmsg

from lab.errors import InputError, LabError, ObservationError

_SOL_NETLINK, _NETLINK_CAP_ACK, _NETLINK_EXT_ACK = 270, 10, 11
_NLM_F_CAPPED, _NLM_F_ACK_TLVS = 0x100, 0x200
_NLMSGERR_ATTR_MSG = 1
_HEADER = struct.Struct("=IHHII")
_CHUNK = 48 * 1024  # well below the smallest socket buffer in use
_TIMEOUT = 20.0  # seconds; the kernel answers in microseconds unless another holds its lock

IFF_UP = 1
IFA_F_NODAD, IFA_F_PERMANENT = 0x02, 0x80
NUD_PERMANENT = 0x80
RT_TABLE_MAIN = 254
RTPROT_STATIC = 4
RT_SCOPE_UNIVERSE, RT_SCOPE_LINK = 0, 253
RTN_UNICAST = 1
RTNH_F_ONLINK = 4
FR_ACT_TO_TBL, FR_ACT_UNREACHABLE = 1, 7
TC_H_ROOT = 0xFFFFFFFF

_CREATE = NLM_F_CREATE | NLM_F_EXCL
_REPLACE = NLM_F_CREATE | NLM_F_REPLACE


@dataclass(frozen=True, slots=True)
class Request:
    """One message. ``what`` says it in words, for an error; error numbers in ``ignore`` are none."""

    message: nlmsg
    type: int
    flags: int
    what: str
    ignore: frozenset[int] = frozenset()

    def encode(self, sequence: int, flags: int) -> bytes:
        header = self.message["header"]
        header["type"], header["flags"], header["sequence_number"], header["pid"] = self.type, flags, sequence, 0
        self.message.reset()
        self.message.encode()
        data = bytes(self.message.data)
        return data + b"\0" * (-len(data) % 4)


class Route:
    """An rtnetlink socket in the network namespace of the thread that makes it; usable from any thread then."""

    def __init__(self, place: str) -> None:
        self.place = place
        self._sequence = 0
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        self._socket.settimeout(_TIMEOUT)
        self._socket.setsockopt(_SOL_NETLINK, _NETLINK_CAP_ACK, 1)
        self._socket.setsockopt(_SOL_NETLINK, _NETLINK_EXT_ACK, 1)

    def __enter__(self) -> Route:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def run(self, requests: Sequence[Request]) -> None:
        """Applies them in order.

        Raises:
            LabError: the kernel refused at least one; the first is named with the kernel's own words. Those after it
                were tried all the same.
        """
        chunk: list[bytes] = []
        sent: dict[int, Request] = {}
        size = 0
        for number, request in enumerate(requests, 1):
            self._sequence += 1
            last = number == len(requests)
            data = request.encode(self._sequence, request.flags | NLM_F_REQUEST)
            sent[self._sequence] = request
            size += len(data)
            if last or size > _CHUNK:
                data = _with_flag(data, NLM_F_ACK)
                self._socket.send(b"".join([*chunk, data]))
                self._answers(sent)
                chunk, sent, size = [], {}, 0
            else:
                chunk.append(data)

    def _answers(self, sent: dict[int, Request]) -> None:
        last = max(sent)
        failure: LabError | None = None
        while True:
            try:
                data = self._socket.recv(1 << 18)
            except TimeoutError:
                raise ObservationError(
                    f"the kernel did not answer within {_TIMEOUT:.0f} s", self.place, sent[last].what
                ) from None
            for sequence, number, text in _errors(data):
                request = sent.get(sequence)
                if request is None:
                    continue
                if number and number not in request.ignore and failure is None:
                    failure = _refused(request.what, self.place, number, text)
                if sequence == last:
                    if failure is not None:
                        raise failure
                    return


def _with_flag(data: bytes, flag: int) -> bytes:
    length, kind, flags, sequence, pid = _HEADER.unpack_from(data)
    return _HEADER.pack(length, kind, flags | flag, sequence, pid) + data[_HEADER.size :]


def _errors(data: bytes) -> list[tuple[int, int, str]]:
    """(sequence, errno or 0, the kernel's words) of each NLMSG_ERROR in ``data``."""
    found = []
    offset = 0
    while offset + _HEADER.size <= len(data):
        length, kind, flags, sequence, _pid = _HEADER.unpack_from(data, offset)
        if length < _HEADER.size:
            break
        if kind == NLMSG_ERROR:
            (code,) = struct.unpack_from("=i", data, offset + _HEADER.size)
            text = ""
            if flags & _NLM_F_ACK_TLVS:
                inner = struct.unpack_from("=I", data, offset + _HEADER.size + 4)[0]
                start = _HEADER.size + 4 + (_HEADER.size if flags & _NLM_F_CAPPED else (inner + 3) & ~3)
                text = _text(data[offset + start : offset + length])
            found.append((sequence, -code, text))
        offset += (length + 3) & ~3
    return found


def _text(attributes: bytes) -> str:
    offset = 0
    while offset + 4 <= len(attributes):
        length, kind = struct.unpack_from("=HH", attributes, offset)
        if length < 4:
            break
        if kind & 0x3FFF == _NLMSGERR_ATTR_MSG:
            return attributes[offset + 4 : offset + length].rstrip(b"\0").decode("ascii", "replace")
        offset += (length + 3) & ~3
    return ""


def _refused(what: str, place: str, number: int, text: str) -> LabError:
    why = f"{os.strerror(number)} ({text})" if text else os.strerror(number)
    if number in (errno.EPERM, errno.EACCES):
        return InputError(f"cannot {what}", place, why, "Run as root")
    if number in (errno.EOPNOTSUPP, errno.EAFNOSUPPORT, errno.ENOENT):  # ENOENT: no such kind of link or queue
        return ObservationError(f"this kernel cannot {what}", place, why)
    return LabError(f"cannot {what}", place, why)


# --- messages ---------------------------------------------------------------------------------------


def family(address: str) -> int:
    """AF_INET or AF_INET6."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def bits(address: str) -> int:
    """The length of a prefix that holds one address: 32 or 128."""
    return 128 if ":" in address else 32


def veth(name: str, mac: str, peer: str, peer_mac: str, peer_netns: int, mtu: int = 0) -> Request:
    """A pair: ``name`` here and up, ``peer`` in the namespace of the descriptor ``peer_netns`` and still down.

    (The kernel opens the peer before it knows its other end, so it cannot be made up: drivers/net/veth.c.)
    """
    size = [("IFLA_MTU", mtu)] if mtu else []
    there = {
        "attrs": [("IFLA_IFNAME", peer), ("IFLA_ADDRESS", peer_mac), ("IFLA_NET_NS_FD", peer_netns), *size],
    }
    return Request(
        _message(
            ifinfmsg,
            flags=IFF_UP,
            change=IFF_UP,
            attrs=[
                ("IFLA_IFNAME", name),
                ("IFLA_ADDRESS", mac),
                *size,
                (
                    "IFLA_LINKINFO",
                    {"attrs": [("IFLA_INFO_KIND", "veth"), ("IFLA_INFO_DATA", {"attrs": [("VETH_INFO_PEER", there)]})]},
                ),
            ],
        ),
        RTM_NEWLINK,
        _CREATE,
        f"make the link {name} - {peer}",
    )


def link_up(index: int) -> Request:
    return Request(_message(ifinfmsg, index=index, flags=IFF_UP, change=IFF_UP), RTM_NEWLINK, 0, "set a link up")


def link_mtu(index: int, mtu: int) -> Request:
    message = _message(ifinfmsg, index=index, attrs=[("IFLA_MTU", mtu)])
    return Request(message, RTM_NEWLINK, 0, f"set an MTU of {mtu}")


def link_delete(name: str) -> Request:
    message = _message(ifinfmsg, attrs=[("IFLA_IFNAME", name)])
    return Request(message, RTM_DELLINK, 0, f"remove the link {name}", frozenset({errno.ENODEV}))


def address(index: int, ip: str) -> Request:
    """One address without a network around it, usable at once (no duplicate address detection)."""
    flags = IFA_F_PERMANENT | (IFA_F_NODAD if ":" in ip else 0)
    message = _message(
        ifaddrmsg,
        family=family(ip),
        prefixlen=bits(ip),
        flags=flags,
        scope=RT_SCOPE_LINK if ip.lower().startswith("fe80:") else RT_SCOPE_UNIVERSE,
        index=index,
        attrs=[("IFA_LOCAL", ip), ("IFA_ADDRESS", ip)],
    )
    return Request(message, RTM_NEWADDR, _REPLACE, f"add the address {ip}")


def neighbour(index: int, ip: str, mac: str) -> Request:
    """A fixed neighbour: nobody needs to ask, so nothing but the flows under test is on the wire."""
    message = _message(
        ndmsg, family=family(ip), ifindex=index, state=NUD_PERMANENT, attrs=[("NDA_DST", ip), ("NDA_LLADDR", mac)]
    )
    return Request(message, RTM_NEWNEIGH, _REPLACE, f"add the neighbour {ip}")


def route(
    index: int,
    ip: str = "",
    via: str = "",
    source: str = "",
    table: int = RT_TABLE_MAIN,
    mtu: int = 0,
    delete: bool = False,
) -> Request:
    """A route to one address (or the default, for ``via``'s family), straight or through ``via`` on the same link."""
    attributes: list[tuple[str, Any]] = [("RTA_OIF", index), ("RTA_TABLE", table)]
    if ip:
        attributes.append(("RTA_DST", ip))
    if via:
        attributes.append(("RTA_GATEWAY", via))
    if source:
        attributes.append(("RTA_PREFSRC", source))
    if mtu:
        attributes.append(("RTA_METRICS", {"attrs": [("RTAX_MTU", mtu)]}))
    message = _message(
        rtmsg,
        family=family(ip or via),
        dst_len=bits(ip) if ip else 0,
        table=table if table < 256 else 0,
        proto=RTPROT_STATIC,
        scope=RT_SCOPE_UNIVERSE if via or ":" in ip else RT_SCOPE_LINK,
        type=RTN_UNICAST,
        flags=RTNH_F_ONLINK if via else 0,
        attrs=attributes,
    )
    if delete:
        return Request(message, RTM_DELROUTE, 0, f"remove the route to {ip}", frozenset({errno.ESRCH}))
    return Request(message, RTM_NEWROUTE, _REPLACE, f"add the route to {ip or 'everywhere'}")


def rule(
    address_family: int,
    priority: int,
    *,
    incoming: str = "",
    source: str = "",
    destination: str = "",
    table: int = RT_TABLE_MAIN,
    suppress: int | None = None,
    unreachable: bool = False,
    delete: bool = False,
) -> Request:
    """A routing rule; ``suppress`` refuses routes of that prefix length or shorter (0: the default route)."""
    attributes: list[tuple[str, Any]] = [("FRA_PRIORITY", priority)]
    if incoming:
        attributes.append(("FRA_IIFNAME", incoming))
    if source:
        attributes.append(("FRA_SRC", source))
    if destination:
        attributes.append(("FRA_DST", destination))
    if not unreachable:
        attributes.append(("FRA_TABLE", table))
    if suppress is not None:
        attributes.append(("FRA_SUPPRESS_PREFIXLEN", suppress))
    message = _message(
        fibmsg,
        family=address_family,
        src_len=bits(source) if source else 0,
        dst_len=bits(destination) if destination else 0,
        table=table if table < 256 and not unreachable else 0,
        action=FR_ACT_UNREACHABLE if unreachable else FR_ACT_TO_TBL,
        attrs=attributes,
    )
    if delete:
        return Request(message, RTM_DELRULE, 0, "remove a routing rule", frozenset({errno.ENOENT}))
    return Request(message, RTM_NEWRULE, _CREATE, "add a routing rule", frozenset({errno.EEXIST}))


def qdisc_tbf(index: int, rate: int) -> Request:
    """A token bucket on a link's way out. ``rate`` in bits a second."""
    parameters = {"rate": rate // 8 or 1, "burst": _burst(rate), "latency": "100ms"}
    message = _message(
        tcmsg,
        index=index,
        handle=0x10000,
        parent=TC_H_ROOT,
        attrs=[("TCA_KIND", "tbf"), ("TCA_OPTIONS", sched_tbf.get_parameters(parameters))],
    )
    return Request(message, RTM_NEWQDISC, _REPLACE, f"limit a link to {rate} bits a second (tbf)")


def qdisc_htb(index: int) -> Request:
    """The root of classes 1:N; what is in no class is not limited."""
    message = _message(
        tcmsg,
        index=index,
        handle=0x10000,
        parent=TC_H_ROOT,
        attrs=[("TCA_KIND", "htb"), ("TCA_OPTIONS", sched_htb.get_parameters({"default": 0}))],
    )
    return Request(message, RTM_NEWQDISC, _REPLACE, "limit a path (htb)")


def class_htb(index: int, minor: int, rate: int) -> Request:
    """The class 1:``minor`` with ``rate`` bits a second."""
    parameters = {"rate": rate // 8 or 1, "ceil": rate // 8 or 1, "burst": _burst(rate), "cburst": _burst(rate)}
    message = _message(
        tcmsg,
        index=index,
        handle=0x10000 | minor,
        parent=0x10000,
        attrs=[("TCA_KIND", "htb"), ("TCA_OPTIONS", sched_htb.get_class_parameters(parameters))],
    )
    return Request(message, RTM_NEWTCLASS, _REPLACE, f"limit a path to {rate} bits a second (htb)")


def qdisc_delete(index: int) -> Request:
    message = _message(tcmsg, index=index, parent=TC_H_ROOT)
    ignore = frozenset({errno.ENOENT, errno.EINVAL})
    return Request(message, RTM_DELQDISC, 0, "lift the limit of a link", ignore)


def _burst(rate: int) -> int:
    """Bytes sent at once: 10 ms worth, and never less than two full frames."""
    return max(rate // 800, 4096)


def _message(kind: type[nlmsg], **fields: Any) -> nlmsg:
    message = kind()
    for key, value in fields.items():
        message[key] = value
    return message

"""The addresses of this machine, as a proxy reports them.

Source: istio/istio: pilot/cmd/pilot-agent/app/cmd.go (initProxy), pilot/pkg/util/network/ip.go.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import logging
import select
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

log = logging.getLogger("default")

IFF_UP = 0x1
IFF_LOOPBACK = 0x8

# rtnetlink.h: groups of multicast messages.
RTMGRP_LINK, RTMGRP_IPV4_IFADDR, RTMGRP_IPV6_IFADDR = 0x1, 0x10, 0x100

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class InterfaceAddress:
    """One address of one interface; `flags` are the kernel's IFF_* bits."""

    interface: str
    flags: int
    address: IPAddress


class _SockAddr(ctypes.Structure):
    _fields_ = (("family", ctypes.c_ushort), ("data", ctypes.c_ubyte * 26))


class _IfAddrs(ctypes.Structure):
    pass


_IfAddrs._fields_ = (
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("addr", ctypes.POINTER(_SockAddr)),
    ("netmask", ctypes.c_void_p),
    ("broadcast", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
)


def interface_addresses() -> list[InterfaceAddress]:
    """Every IP address of every interface, in the kernel's order (getifaddrs(3)).

    Raises:
        OSError: getifaddrs failed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    head = ctypes.POINTER(_IfAddrs)()
    if libc.getifaddrs(ctypes.byref(head)) != 0:
        raise OSError(ctypes.get_errno(), "getifaddrs")
    found = []
    try:
        entry = head
        while entry:
            item = entry.contents
            if item.addr:
                raw = bytes(item.addr.contents.data)
                address: IPAddress | None = None
                if item.addr.contents.family == socket.AF_INET:
                    address = ipaddress.IPv4Address(raw[2:6])
                elif item.addr.contents.family == socket.AF_INET6:
                    address = ipaddress.IPv6Address(raw[6:22])
                if address is not None:
                    found.append(InterfaceAddress(item.name.decode(), item.flags, address))
            entry = item.next
    finally:
        libc.freeifaddrs(head)
    return found


def settled_addresses(
    read: Callable[[], list[InterfaceAddress]] = interface_addresses, limit: float = 120.0
) -> list[InterfaceAddress]:
    """What `read` gives once no interface has an unspecified address: one that is still being set up has.

    Args:
        read: looked at again whenever the kernel tells of a change of links or addresses.
        limit: seconds after which what is there counts.

    Raises:
        OSError: getifaddrs or rtnetlink(7) failed.
    """
    found = read()
    if _settled(found):
        return found
    deadline = time.monotonic() + limit
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as changes:
        changes.bind((0, RTMGRP_LINK | RTMGRP_IPV4_IFADDR | RTMGRP_IPV6_IFADDR))
        while True:
            found = read()
            left = deadline - time.monotonic()
            if _settled(found) or left <= 0 or not select.select([changes], [], [], left)[0]:
                return found
            with contextlib.suppress(OSError):  # ENOBUFS: more changes than it holds; look again all the same
                changes.recv(1 << 16)


def _settled(found: Iterable[InterfaceAddress]) -> bool:
    return not any(
        item.address.is_unspecified and item.flags & IFF_UP and not item.flags & IFF_LOOPBACK for item in found
    )


def _usable(address: IPAddress) -> IPAddress | None:
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_loopback or address.is_link_local or address.is_unspecified:
        return None
    return address


def proxy_addresses(
    instance_ip: str, addresses: Iterable[InterfaceAddress], excluded_interfaces: Sequence[str] = ()
) -> list[str]:
    """The address list of a proxy: `instance_ip` if it is one, then those of the interfaces, without repeats of it.

    With no address on any interface both loopback addresses are added.
    """
    first = _parse(instance_ip)
    result = [str(first)] if first is not None else []
    addresses = list(addresses)
    usable = [
        str(address)
        for item in addresses
        if item.flags & IFF_UP and not item.flags & IFF_LOOPBACK
        for address in [_usable(item.address)]
        if address is not None
    ]
    if not usable:
        usable = ["127.0.0.1", "::1"]
    excluded = {
        str(address)
        for item in addresses
        if item.interface in excluded_interfaces
        for address in [_usable(item.address)]
        if address is not None
    }
    excluded.update(result)
    return result + [address for address in usable if address not in excluded]


def _parse(text: str) -> IPAddress | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def all_ipv4(addresses: Sequence[str]) -> bool:
    """True if every parseable address is IPv4, and for an empty list."""
    return all(isinstance(_parse(address), ipaddress.IPv4Address) for address in addresses)


def all_ipv6(addresses: Sequence[str]) -> bool:
    """True if there is an address and every one is IPv6."""
    return bool(addresses) and all(isinstance(_parse(address), ipaddress.IPv6Address) for address in addresses)


def resolve(address: str, split: Callable[[str], tuple[str, str]]) -> str:
    """``host:port`` with the host resolved, the first IPv4 address preferred.

    Raises:
        OSError: the name does not resolve.
    """
    host, port = split(address)
    if _parse(host) is not None:
        return address
    infos = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)
    infos.sort(key=lambda info: info[0] != socket.AF_INET)
    found = str(infos[0][4][0])
    return f"[{found}]:{port}" if ":" in found else f"{found}:{port}"

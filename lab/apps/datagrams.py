"""UDP ports of the echo app: a datagram is answered by what was seen of it, from the address that it was sent to."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import socket
import struct

from lab.apps.events import EventLog
from lab.apps.ports import EchoConfig, EchoPort
from lab.apps.report import Endpoint, endpoint, flow, line
from lab.apps.streams import bound

_IP_PKTINFO = 8  # linux/in.h: the socket module of Python 3.11 does not name it
_MAX = 65535


class DatagramListener:
    """One listening address and port."""

    def __init__(self, config: EchoConfig, port: EchoPort, log: EventLog) -> None:
        self._config, self._port, self._log = config, port, log
        self._socket: socket.socket | None = None
        self._number = 0

    def start(self, address: str) -> Endpoint:
        """Listens on an address.

        Returns:
            where it listens (the kernel's choice for port 0).

        Raises:
            OSError: the address cannot be had.
        """
        sock = bound(address, self._port.port, socket.SOCK_DGRAM)
        # On a wildcard address only the packet says where it was sent to.
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
        else:
            sock.setsockopt(socket.IPPROTO_IP, _IP_PKTINFO, 1)
        self._socket = sock
        where = endpoint(sock.getsockname())
        if where is None:
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
        self._number = where.port
        asyncio.get_running_loop().add_reader(sock, self._readable, sock)
        return where

    async def stop(self) -> None:
        """Stops listening."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None

    def _readable(self, sock: socket.socket) -> None:
        try:
            data, ancillary, _, peer = sock.recvmsg(_MAX, socket.CMSG_SPACE(20))
        except OSError:
            return  # an ICMP error for an earlier answer: nothing to answer now
        local, source = _sent_to(ancillary)
        told = {
            **flow(self._config, endpoint(peer), Endpoint(local, self._number) if local else None),
            "received": len(data),
        }
        self._log.write("datagram", {"protocol": self._port.protocol, **told})
        try:
            sock.sendmsg([line(told)], source, 0, peer)
        except OSError:
            return  # no way back to the sender, or its buffer is full: UDP may lose


def _sent_to(ancillary: list[tuple[int, int, bytes]]) -> tuple[str, list[tuple[int, int, bytes]]]:
    """The destination address of a datagram, and the control message that answers from it (ip(7), ipv6(7))."""
    for level, kind, data in ancillary:
        if level == socket.IPPROTO_IP and kind == _IP_PKTINFO:
            # struct in_pktinfo: interface, preferred source, destination. The source of the answer goes in the middle.
            return str(ipaddress.IPv4Address(data[8:12])), [(level, kind, struct.pack("=I", 0) + data[8:12] + bytes(4))]
        if level == socket.IPPROTO_IPV6 and kind == socket.IPV6_PKTINFO:
            return str(ipaddress.IPv6Address(data[:16])), [(level, kind, data)]
    return "", []

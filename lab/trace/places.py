"""Opens the kernel's evidence of one network namespace: table, trace messages, NFLOG, conntrack events, on one socket.

One socket, because its queue then keeps the order in which the kernel said things.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from lab.runtime import kernel
from lab.trace import conntrack, netlink, nflog, nftrace, owner_table
from lab.trace.flows import Flow
from lab.trace.index import Index

RECEIVE_BUFFER = 32 << 20
"""Bytes of events that may wait; memory is used only while they do."""

_CONNTRACK_GROUPS = (netlink.GROUP_CONNTRACK_NEW, netlink.GROUP_CONNTRACK_UPDATE, netlink.GROUP_CONNTRACK_DESTROY)
_LOG_FAMILIES = {"2": "ipv4", "10": "ipv6"}


@contextmanager
def inside(netns: str | Path) -> Iterator[None]:
    """Puts the calling thread into a network namespace for a while.

    One that it is in already needs no privilege (a prober in a container has none to enter others).

    Raises:
        OSError: no such namespace, or no right to enter it.
    """
    if os.path.samefile(netns, "/proc/thread-self/ns/net"):
        yield
        return
    here = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        there = os.open(netns, os.O_RDONLY | os.O_CLOEXEC)
        try:
            kernel.setns(there, kernel.CLONE_NEWNET)
        finally:
            os.close(there)
        try:
            yield
        finally:
            kernel.setns(here, kernel.CLONE_NEWNET)
    finally:
        os.close(here)


@dataclass
class Place:
    """One observed namespace. ``missing`` says what cannot be seen here and why; ``lost`` counts overruns of the queue.

    ``tracer`` is what makes packets report: ``nftrace`` (our own table), ``raw-trace`` (rules in raw), or empty.
    """

    name: str
    netns: str
    socket: socket.socket
    index: Index
    missing: dict[str, str] = field(default_factory=dict)
    tracer: str = ""
    lost: int = 0
    planted: list[list[str]] = field(default_factory=list)

    def read(self) -> set[Flow]:
        """Takes everything that waits; returns the flows that it concerns."""
        seen: set[Flow] = set()
        while True:
            try:
                data = self.socket.recv(1 << 17, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return seen
            except OSError as e:
                if e.errno != errno.ENOBUFS:
                    raise
                self.lost += 1
                continue
            for kind, _, payload in netlink.messages(data):
                flow = self._take(kind, payload)
                if flow is not None:
                    seen.add(flow)

    def _take(self, kind: int, payload: bytes) -> Flow | None:
        if kind == nftrace.MSG_TRACE:
            trace = nftrace.decode(payload)
            return self.index.add_nft(trace) if trace else None
        if kind == nflog.MSG_PACKET:
            line = nflog.decode(payload)
            if isinstance(line, nflog.Sent):
                self.index.add_sent(line)
                return None
            return self.index.add_legacy(line) if line else None
        if kind in (conntrack.MSG_NEW, conntrack.MSG_DELETE):
            event = conntrack.decode(kind, payload)
            return self.index.add_conntrack(event) if event else None
        return None

    def close(self) -> None:
        """Ends the observation; the kernel removes the table with the socket."""
        self.socket.close()
        for command in self.planted:
            with suppress(OSError), inside(self.netns):
                subprocess.run(command, capture_output=True, check=False)


def attach(name: str, netns: str, *, trace: bool = True, raw_trace: bool = False, limit: int = 20_000) -> Place:
    """Begins to observe a namespace; everything from now on is seen.

    Args:
        trace: packets, not only conntrack.
        raw_trace: use TRACE rules in the raw table instead of our own nft table (for kernels without nf_tables).
        limit: packets and conntrack entries that are kept.

    Raises:
        OSError: the namespace cannot be entered, or netlink cannot be opened in it.
    """
    with inside(netns):
        s = netlink.open_socket(RECEIVE_BUFFER)
        place = Place(name, netns, s, Index(limit))
        if trace:
            _trace(place, raw_trace)
        try:
            netlink.join(s, _CONNTRACK_GROUPS)
        except OSError as e:
            place.missing["conntrack"] = f"conntrack events: {os.strerror(e.errno or 0)}"
    s.setblocking(False)
    return place


def _trace(place: Place, raw_trace: bool) -> None:
    """Turns on packet traces in the current namespace, as far as the kernel has them."""
    refused = "not asked for"
    if not raw_trace:
        try:
            _make_table(place)
            netlink.join(place.socket, [netlink.GROUP_NFTRACE])
            place.tracer = "nftrace"
        except OSError as e:
            raw_trace, refused = True, os.strerror(e.errno or 0)
    if raw_trace and not _plant_raw_trace(place):
        place.missing["trace"] = f"packet traces: no owned nft table ({refused}) and no TRACE target in legacy iptables"
        return
    try:
        for number in _LOG_FAMILIES:
            path = Path("/proc/sys/net/netfilter/nf_log") / number
            if path.exists():
                path.write_text("nfnetlink_log")
        netlink.request(place.socket, nflog.bind_group(), 2)
    except OSError as e:
        place.missing["legacy"] = f"traces of legacy iptables: {os.strerror(e.errno or 0)}"


def _make_table(place: Place) -> None:
    """Our own table; without the log of owners where the kernel has none (ENOENT: no such expression). Raises OSError."""
    try:
        netlink.request(place.socket, *owner_table.create())
    except OSError as e:
        if e.errno != errno.ENOENT:
            raise
        netlink.request(place.socket, *owner_table.create(owners=False))


def _plant_raw_trace(place: Place) -> bool:
    place.index = Index(place.index.limit, marked=False)
    for tool in ("iptables-legacy", "ip6tables-legacy"):
        for chain in ("PREROUTING", "OUTPUT"):
            for match in (["tcp", "!", "--tcp-flags", "ACK", "ACK"], ["udp"], ["icmp" if tool[2] == "t" else "icmpv6"]):
                rule = [chain, "-p", *match, "-j", "TRACE"]
                try:
                    done = subprocess.run([tool, "-w", "-t", "raw", "-I", *rule], capture_output=True, check=False)
                except FileNotFoundError:
                    return False
                if done.returncode == 0:
                    place.planted.append([tool, "-w", "-t", "raw", "-D", *rule])
                    place.tracer = "raw-trace"
    return bool(place.planted)


def wait_readable(place: Place, seconds: float) -> bool:
    """Whether something to read arrives in time (for callers without an event loop)."""
    return bool(select.select([place.socket], [], [], max(0.0, seconds))[0])

"""A real fabric under test, with sockets of the test's own process inside its places."""

from __future__ import annotations

import itertools
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from lab.fabric import build, namespaces, paths, record
from lab.fabric.plan import Plan, plan
from lab.fabric.record import Record
from lab.manifests import load

T = TypeVar("T")
Backend = Literal["nft", "legacy"]

DEADLINE = 5.0  # seconds; nothing here takes longer than milliseconds
_numbers = itertools.count()


def unique_name() -> str:
    return f"slt-{os.getpid()}-{next(_numbers)}"


def pod(name: str, ip: str, labels: str = "{}", port: int = 8080, more: str = "") -> str:
    return f"""
---
apiVersion: v1
kind: Pod
metadata: {{name: {name}, namespace: shop, labels: {labels}}}
spec: {{containers: [{{name: app, ports: [{{name: main, containerPort: {port}}}]}}]}}
status: {{podIP: "{ip}"{more}}}
"""


def service(name: str, ip: str, ports: str, selector: str = "") -> str:
    chosen = f", selector: {selector}" if selector else ""
    return f"""
---
apiVersion: v1
kind: Service
metadata: {{name: {name}, namespace: shop}}
spec: {{clusterIP: "{ip}", ports: {ports}{chosen}}}
"""


def external(name: str, *addresses: str) -> str:
    written = ", ".join(f'"{a}"' for a in addresses)
    return f"""
---
apiVersion: sidecarlab.dev/v1alpha1
kind: ExternalHost
metadata: {{name: {name}}}
spec: {{hosts: [{name}.example], addresses: [{written}], ports: [{{port: 80, protocol: http}}]}}
"""


def link(name: str, spec: str) -> str:
    return f"""
---
apiVersion: sidecarlab.dev/v1alpha1
kind: Link
metadata: {{name: {name}}}
spec: {spec}
"""


NAMESPACE = "apiVersion: v1\nkind: Namespace\nmetadata: {name: shop}\n"


def planned(*objects: str) -> Plan:
    return plan(load.load_text(NAMESPACE + "".join(objects)))


@dataclass
class Lab:
    """A fabric that is up. Sockets opened through it are closed with it."""

    name: str
    plan: Plan
    record: Record
    sockets: list[socket.socket] = field(default_factory=list)

    def inside(self, place: str, work: Callable[[], T]) -> T:
        return namespaces.inside(paths.netns_path(self.name, place), work)

    def socket(self, place: str, family: int, kind: int, protocol: int = 0) -> socket.socket:
        s = self.inside(place, lambda: socket.socket(family, kind, protocol))
        s.settimeout(DEADLINE)
        self.sockets.append(s)
        return s

    def listen(self, place: str, address: str, port: int) -> socket.socket:
        s = self.socket(place, _family(address), socket.SOCK_STREAM)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind((address, port))
        s.listen(64)
        return s

    def connect(self, place: str, address: str, port: int) -> socket.socket:
        """Raises what the kernel says: ConnectionRefusedError, OSError(EHOSTUNREACH), TimeoutError."""
        s = self.socket(place, _family(address), socket.SOCK_STREAM)
        s.connect((address, port))
        return s

    def udp(self, place: str, address: str = "", port: int = 0) -> socket.socket:
        s = self.socket(place, _family(address), socket.SOCK_DGRAM)
        if address:
            s.bind((address, port))
        return s

    def peer_seen(self, client: str, address: str, port: int, server: socket.socket) -> str:
        """Connects, and says whom the server saw."""
        self.connect(client, address, port)
        connection, peer = server.accept()
        connection.close()
        return str(peer[0])

    def sniff(self, place: str, interface: str) -> socket.socket:
        """A packet socket on one interface: whole IP packets, those sent and those received."""
        s = self.socket(place, socket.AF_PACKET, socket.SOCK_DGRAM, 0)
        self.inside(place, lambda: s.bind((interface, 0x0003)))
        return s


def _family(address: str) -> int:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


@contextmanager
def up(*objects: str, backend: Backend | None = None) -> Iterator[Lab]:
    name = unique_name()
    made = planned(*objects)
    kept = Record.create(name)
    lab = Lab(name, made, kept)
    try:
        build.build(made, kept, backend=backend)
        yield lab
    finally:
        for s in lab.sockets:
            s.close()
        kept.close()
        record.down(name)


def udp_packet(source: str, target: str, sport: int, dport: int, data: bytes) -> bytes:
    """An IPv4 packet with any source, for a raw socket; the kernel fills in the header's checksum, UDP needs none."""
    udp = struct.pack("!HHHH", sport, dport, 8 + len(data), 0) + data
    header = struct.pack(
        "!BBHHHBBH4s4s", 0x45, 0, 20 + len(udp), 0, 0, 64, 17, 0, socket.inet_aton(source), socket.inet_aton(target)
    )
    return header + udp


def tcp_syn(source: str, target: str, sport: int, dport: int) -> bytes:
    """A SYN with any source; its checksum is right, so that the target answers."""
    tcp = struct.pack("!HHIIBBHHH", sport, dport, 7, 0, 5 << 4, 0x02, 1024, 0, 0)
    pseudo = socket.inet_aton(source) + socket.inet_aton(target) + struct.pack("!BBH", 0, 6, len(tcp))
    total = sum(struct.unpack(f"!{(len(pseudo) + len(tcp)) // 2}H", pseudo + tcp))
    total = (total & 0xFFFF) + (total >> 16)
    checksum = ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF
    tcp = tcp[:16] + struct.pack("!H", checksum) + tcp[18:]
    header = struct.pack(
        "!BBHHHBBH4s4s", 0x45, 0, 20 + len(tcp), 0, 0, 64, 6, 0, socket.inet_aton(source), socket.inet_aton(target)
    )
    return header + tcp


def mounts_below(directory: Path) -> list[str]:
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [p for p in points if p == str(directory) or p.startswith(f"{directory}/")]

"""Name lookup as a program in the pod does it, on sockets of its own, so that each question's ports are known.

resolv.conf(5): search list, ndots, servers; /etc/hosts first (nsswitch.conf of the lab's pods says ``files dns``).
"""

from __future__ import annotations

import errno
import ipaddress
import random
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.probe import packets
from lab.probe.orders import Query

TYPES = {"A": 1, "CNAME": 5, "PTR": 12, "MX": 15, "TXT": 16, "AAAA": 28, "SRV": 33}
_RCODES = ("NOERROR", "FORMERR", "SERVFAIL", "NXDOMAIN", "NOTIMP", "REFUSED")
_FIELD = {"MX": "exchange", "SRV": "target"}


@dataclass(frozen=True, slots=True)
class ResolvConf:
    servers: tuple[str, ...] = ("127.0.0.1",)
    search: tuple[str, ...] = ()
    ndots: int = 1

    def candidates(self, name: str) -> list[str]:
        """The absolute names to try, in order (resolv.conf(5): search, ndots)."""
        if name.endswith("."):
            return [name]
        searched = [f"{name}.{domain}." for domain in self.search]
        absolute = [f"{name}."]
        return absolute + searched if name.count(".") >= self.ndots else searched + absolute


def parse_resolv_conf(text: str) -> ResolvConf:
    """resolv.conf(5); the last ``search`` line wins."""
    servers: list[str] = []
    search: tuple[str, ...] = ()
    ndots = 1
    for line in text.splitlines():
        words = line.split("#")[0].split()
        if len(words) < 2:
            continue
        if words[0] == "nameserver":
            servers.append(words[1])
        elif words[0] == "search":
            search = tuple(w.rstrip(".") for w in words[1:])
        elif words[0] == "options":
            ndots = next((int(w[6:]) for w in words[1:] if w.startswith("ndots:") and w[6:].isdigit()), ndots)
    return ResolvConf(tuple(servers) or ("127.0.0.1",), search, min(ndots, 15))


def in_hosts(text: str, name: str) -> str | None:
    """The first address that /etc/hosts gives a name."""
    wanted = name.rstrip(".").lower()
    for line in text.splitlines():
        words = line.split("#")[0].split()
        if wanted in (w.lower() for w in words[1:]):
            return words[0]
    return None


def lookup(name: str, deadline: float) -> tuple[str | None, list[Query]]:
    """An address of ``name``, and the questions that were asked for it; the last question is the one that answered.

    Args:
        deadline: of time.monotonic().
    """
    with_hosts = in_hosts(read_file("/etc/hosts"), name)
    if with_hosts is not None:
        return with_hosts, []
    config = parse_resolv_conf(read_file("/etc/resolv.conf"))
    asked: list[Query] = []
    for kind in ("A", "AAAA"):
        for candidate in config.candidates(name):
            query = ask(candidate, kind, config.servers[0], "udp", deadline)
            asked.append(query)
            addresses = [a for a in query.answers if _is_address(a)]
            if addresses:
                return addresses[0], asked
            if query.rcode is None:  # no server: the next name would fare no better
                return None, asked
    # The question for A is what a verdict should show, not the AAAA that came after it in vain.
    return None, [q for q in asked if q.type == "A"]


def ask(name: str, kind: str, server: str, proto: str, deadline: float, port: int = 53) -> Query:
    """Sends one question and waits for its answer. Never raises: what went wrong is in the result's ``error``."""
    number = random.SystemRandom().randrange(1 << 16)
    question = packets.DNS(id=number, rd=1, qd=packets.DNSQR(qname=name, qtype=TYPES[kind]))
    family = socket.AF_INET6 if ":" in server else socket.AF_INET
    stream = proto == "tcp"
    query = Query(name, kind, proto, server, port, "", 0)
    with socket.socket(family, socket.SOCK_STREAM if stream else socket.SOCK_DGRAM) as s:
        try:
            s.settimeout(max(0.001, deadline - time.monotonic()))
            s.connect((server, port))
            query.src, query.sport = s.getsockname()[:2]
            if stream:
                wire = bytes(question)
                packets.put(s, packets.Raw(struct.pack(">H", len(wire)) + wire))
            else:
                packets.put(s, question)
            for data in _received(s, stream, deadline):
                answer = packets.DNS(data)
                if answer.id == number and answer.qr:
                    query.rcode = _RCODES[answer.rcode] if answer.rcode < len(_RCODES) else str(answer.rcode)
                    query.answers = list(_answers(answer, kind))
                    return query
            query.error = "closed"
        except TimeoutError:
            query.error = "no-answer"
        except OSError as e:
            query.error = {
                errno.ECONNREFUSED: "refused",
                errno.ECONNRESET: "closed",
                errno.EHOSTUNREACH: "unreachable",
                errno.ENETUNREACH: "unreachable",
            }.get(e.errno or 0, e.strerror or str(e))
        finally:
            if not query.sport and s.fileno() >= 0:
                query.src, query.sport = s.getsockname()[:2]
    return query


def _received(s: socket.socket, stream: bool, deadline: float) -> Iterator[bytes]:
    """Whole messages, until the deadline (TimeoutError) or the end of the stream."""
    buffer = b""
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        s.settimeout(left)
        data = s.recv(65535)
        if not stream:
            yield data
            continue
        if not data:
            return
        buffer += data
        while len(buffer) >= 2 and len(buffer) >= 2 + (size := struct.unpack_from(">H", buffer)[0]):
            yield buffer[2 : 2 + size]
            buffer = buffer[2 + size :]


def _answers(message: Any, kind: str) -> Iterator[str]:
    for record in message.an or []:
        if record.type != TYPES[kind]:
            continue  # a CNAME on the way
        if kind == "TXT":
            yield b"".join(record.rdata).decode("utf-8", "replace")
        elif kind in ("A", "AAAA"):
            yield str(ipaddress.ip_address(record.rdata))
        else:
            value = getattr(record, _FIELD.get(kind, "rdata"))
            text = (value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)).rstrip(".")
            if kind == "MX":
                text = f"{record.preference} {text}"
            elif kind == "SRV":
                text = f"{record.priority} {record.weight} {record.port} {text}"
            yield text


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def read_file(path: str) -> str:
    """Its text; empty if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""

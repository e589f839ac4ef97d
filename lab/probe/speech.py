"""What the first bytes of a payload are: a TLS ClientHello, an HTTP line, a DNS message. Pure; what is not recognised is not named."""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

_HANDSHAKE, _APPLICATION_DATA = 22, 23
_CLIENT_HELLO, _SERVER_HELLO = 1, 2
_SNI, _ALPN = 0, 16
_HTTP = re.compile(rb"(?:[A-Z]{3,10} \S{1,200} HTTP/1\.[01]|HTTP/1\.[01] \d{3}[^\r\n]{0,60})\r\n")
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


class Tls(NamedTuple):
    """A TLS record that begins a segment. ``sni`` and ``alpn`` are a ClientHello's."""

    what: str
    sni: str = ""
    alpn: tuple[str, ...] = ()

    @property
    def mutual(self) -> bool:
        """Whether a ClientHello offers what only Istio's mutual TLS does (istio/istio: pkg/config/... alpn: istio-peer-exchange, istio)."""
        return any(a == "istio" or a.startswith("istio-") for a in self.alpn)


def tls(payload: bytes) -> Tls | None:
    """The TLS record that a payload begins with (RFC 8446, 5.1 and 4.1.2)."""
    if len(payload) < 6 or payload[1] != 3 or payload[2] > 4:
        return None
    if payload[0] == _APPLICATION_DATA:
        return Tls("data")
    if payload[0] != _HANDSHAKE:
        return Tls({20: "change cipher spec", 21: "alert"}[payload[0]]) if payload[0] in (20, 21) else None
    if payload[5] == _SERVER_HELLO:
        return Tls("ServerHello")
    if payload[5] != _CLIENT_HELLO:
        return Tls("handshake")
    try:
        return _client_hello(payload[9:])
    except (IndexError, struct.error, UnicodeDecodeError):  # cut off, or goes on in the next segment
        return Tls("ClientHello")


def _client_hello(body: bytes) -> Tls:
    at = 34  # version, random
    at += 1 + body[at]  # session id
    at += 2 + _u16(body, at)  # cipher suites
    at += 1 + body[at]  # compression methods
    end = at + 2 + _u16(body, at)
    at += 2
    sni, alpn = "", list[str]()
    while at + 4 <= end:
        kind, size = struct.unpack_from(">HH", body, at)
        value = body[at + 4 : at + 4 + size]
        at += 4 + size
        if kind == _SNI and len(value) > 5:
            sni = value[5 : 5 + _u16(value, 3)].decode("ascii")
        elif kind == _ALPN:
            offset = 2
            while offset < len(value):
                alpn.append(value[offset + 1 : offset + 1 + value[offset]].decode("ascii"))
                offset += 1 + value[offset]
    return Tls("ClientHello", sni, tuple(alpn))


def http(payload: bytes) -> str:
    """The request or status line that a payload begins with; ``HTTP/2 preface``; empty for anything else."""
    if payload.startswith(_PREFACE):
        return "HTTP/2 preface"
    match = _HTTP.match(payload)
    return match.group().decode("ascii", "replace").strip() if match else ""


def dns(payload: bytes) -> str:
    """A DNS message: its question, and of an answer what it gives; empty if it is none."""
    import dns.exception
    import dns.flags
    import dns.message
    import dns.rcode
    import dns.rdatatype

    try:
        message = dns.message.from_wire(payload, ignore_trailing=True)
    except (dns.exception.DNSException, ValueError, IndexError):
        return ""
    if not message.question:
        return ""
    question = message.question[0]
    asked = f"{dns.rdatatype.to_text(question.rdtype)} {question.name}"
    if not message.flags & dns.flags.QR:
        return f"{asked}?"
    found = [str(r) for records in message.answer for r in records]
    code = dns.rcode.to_text(message.rcode())
    return f"{asked} = {', '.join(found) if found else code if code != 'NOERROR' else 'no such record'}"


def _u16(data: bytes, at: int) -> int:
    return int(struct.unpack_from(">H", data, at)[0])

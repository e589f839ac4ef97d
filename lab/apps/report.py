"""What the echo app tells about one connection, request or datagram: plain data, no I/O.

These are the keys that probes read: ``peer_seen_by_app`` of a verdict is ``peer.address``.
"""

from __future__ import annotations

import ipaddress
import json
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import unquote

from lab.apps.ports import EchoConfig

JSON = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One end of a flow. IPv4-mapped IPv6 addresses are written as IPv4."""

    address: str
    port: int

    def data(self) -> dict[str, object]:
        return {"address": self.address, "port": self.port}


def endpoint(name: object) -> Endpoint | None:
    """The end that a socket name (``(address, port, ...)``) stands for, None if it is none."""
    if not isinstance(name, tuple) or len(name) < 2:
        return None
    address = ipaddress.ip_address(str(name[0]).partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    return Endpoint(str(address), int(name[1]))


def grpc_endpoint(peer: str) -> Endpoint | None:
    """The end that gRPC calls ``ipv4:1.2.3.4:5`` or ``ipv6:%5B::1%5D:5`` (grpc/grpc: doc/naming.md)."""
    scheme, _, rest = peer.partition(":")
    if scheme not in ("ipv4", "ipv6"):
        return None
    address, _, port = unquote(rest).rpartition(":")
    return endpoint((address.strip("[]"), int(port)))


class TLSObject(ssl.SSLObject):
    """An SSL object of a server that remembers the name which the client asked for."""

    sni: str | None = None


def tls(ssl_object: object) -> JSON | None:
    """``{"version", "sni", "alpn", "peer_san"}`` of a TLS connection, None for a plain one."""
    if not isinstance(ssl_object, ssl.SSLObject):
        return None
    return {
        "version": ssl_object.version(),
        "sni": ssl_object.sni if isinstance(ssl_object, TLSObject) else None,
        "alpn": ssl_object.selected_alpn_protocol(),
        "peer_san": _names(ssl_object),
    }


def _names(ssl_object: ssl.SSLObject) -> list[str] | None:
    certificate = ssl_object.getpeercert()
    if not certificate:
        return None
    entries = certificate.get("subjectAltName", ())
    return [str(entry[1]) for entry in entries if isinstance(entry, tuple)]


def flow(
    config: EchoConfig, peer: Endpoint | None, local: Endpoint | None, tls_info: JSON | None = None
) -> dict[str, object]:
    """The keys that all answers share."""
    return {
        "app": config.app,
        "pod": config.pod,
        "peer": peer.data() if peer else None,
        "local": local.data() if local else None,
        "tls": dict(tls_info) if tls_info else None,
    }


def headers(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Headers by lower-case name; a repeated one is joined by ``, `` (RFC 9110, 5.2)."""
    result: dict[str, str] = {}
    for key, value in pairs:
        name = key.lower()
        result[name] = f"{result[name]}, {value}" if name in result else value
    return result


def line(data: JSON) -> bytes:
    """One JSON line."""
    return json.dumps(data, separators=(",", ":")).encode() + b"\n"

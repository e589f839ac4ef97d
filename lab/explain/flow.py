"""What comes to an Envoy: a connection, what its first bytes are, and the request in it. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from lab.explain.packet import NOTHING

Speech = Literal["http1", "h2", "tls", "opaque", "silent"]
"""First bytes: an HTTP/1 request line, an HTTP/2 preface, a TLS client hello, anything else, or none at all."""


class ClientTls(NamedTuple):
    """A TLS client: what its hello says, and who it is (the URI of its certificate, if it has one)."""

    sni: str = ""
    alpn: tuple[str, ...] = ()
    identity: str = ""


class Request(NamedTuple):
    """One HTTP request. ``headers`` are lower-case."""

    authority: str
    path: str = "/"
    method: str = "GET"
    headers: Mapping[str, str] = NOTHING
    scheme: str = "http"

    @property
    def grpc(self) -> bool:
        return self.headers.get("content-type", "").startswith("application/grpc")


class Connection(NamedTuple):
    """A connection. ``dst`` and ``dport`` are the original destination, ``port`` the one at which Envoy took it.

    With ``tls``, ``speech`` is what is inside of it, or inside of the TLS within it (``inner``). ``request`` is the request
    that comes, if one comes.
    """

    src: str
    dst: str
    dport: int
    port: int
    speech: Speech = "http1"
    tls: ClientTls | None = None
    request: Request | None = None
    sport: int = 0
    inner: ClientTls | None = None

    @property
    def first_bytes(self) -> Speech:
        return "tls" if self.tls is not None else self.speech

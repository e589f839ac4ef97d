"""What a journey needs to know of the places that it passes; whoever composes a prediction provides it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from lab.explain.flow import ClientTls, Request, Speech
from lab.explain.packet import NOTHING, Host, Packet
from lab.explain.ruleset import RuleSet
from lab.explain.upstream import Resolve
from lab.explain.walk import Fate, Walker
from lab.explain.xds import Config

if TYPE_CHECKING:
    from lab.manifests.model import AppProbe

Speaks = Literal["http", "https", "tls", "tcp", "grpc", "auto", "udp", "dns", "status", "admin", "unknown"]
"""What a program answers to: see `serve`. ``status`` and ``admin`` are the agent's and Envoy's own HTTP servers."""

Result = Literal[
    "ok",
    "closed",
    "reset",
    "stream-reset",
    "refused",
    "timeout",
    "no-answer",
    "unreachable",
    "tls-refused",
    "loop",
    "silence",
    "unknown",
]
"""How a connection ends for whoever opened it. ``loop``: a proxy gets its own connection back, again and again.
``silence``: it is open, and nothing comes. ``reset``: it is closed by RST; ``stream-reset``: the request alone is (HTTP/2)."""


class Place(NamedTuple):
    """A network namespace: a pod, an external host, or the one that a dump is from.

    ``listening`` is what programs other than Envoy listen on, by (protocol number, port); None: nobody knows.
    ``loopback_only`` are those of them that take connections to loopback addresses alone.
    ``identity`` is the URI of the certificate that its proxy presents. ``meshed``: it has a proxy.
    ``probes`` are those of its app that its agent answers, by the path on the status port.
    """

    name: str
    host: Host
    rules: RuleSet = RuleSet()
    addresses: tuple[str, ...] = ()
    listening: Mapping[tuple[int, int], Speaks] | None = None
    loopback_only: frozenset[int] = frozenset()
    identity: str = ""
    meshed: bool = False
    proxy_uid: int = 1337
    proxy_gid: int = 1337
    probes: Mapping[str, AppProbe] = NOTHING


class Transit(NamedTuple):
    """What became of a packet between two places: it came to ``reached`` as ``packet``, or it did not (``result``)."""

    reached: str | None
    packet: Packet
    result: Result | None = None
    fate: Fate | None = None
    chance: float = 1.0
    why: str = ""


class World(Protocol):
    """Everything around one flow. ``busy``: programs run whose own traffic nobody knows."""

    @property
    def busy(self) -> bool: ...

    def place(self, name: str) -> Place: ...

    def walker(self, name: str) -> Walker:
        """The rules of a place, to send packets through."""
        ...

    def envoy(self, name: str) -> Config | None:
        """The configuration of a place's proxy; None without one, or if it is not known."""
        ...

    def transit(self, packet: Packet, source: str) -> tuple[Transit, ...]:
        """Carries a packet that left ``source`` to where it arrives."""
        ...

    def lookup(self, place: str) -> Resolve:
        """How a place's proxy resolves names (not through its own capture)."""
        ...


class Payload(NamedTuple):
    """What a client sends. ``inner`` is a TLS client inside of TLS."""

    speech: Speech = "http1"
    tls: ClientTls | None = None
    request: Request | None = None
    inner: ClientTls | None = None

    @property
    def first_bytes(self) -> Speech:
        return "tls" if self.tls is not None else self.speech


class Served(NamedTuple):
    """What a program made of a payload. ``told``: it answered with the report that names its peer: ``peer``, or who sent the
    payload. ``ends``: it closes the connection after an answer that nobody asked for in that protocol."""

    result: Result
    status: int | None = None
    told: bool = False
    delay: float = 0.0
    facts: Mapping[str, str] = NOTHING
    ends: bool = False
    peer: str = ""


ADMIN_PAGES = frozenset(
    ("/", "/certs", "/clusters", "/config_dump", "/help", "/listeners", "/memory", "/ready", "/server_info", "/stats",
     "/stats/prometheus")
)  # fmt: skip
"""What Envoy's administration interface always answers to a GET (its own ``/help`` lists them); others depend on much."""


def serve(speaks: Speaks, payload: Payload) -> Served:
    """How the echo app, or one of the agent's servers, answers.

    Plain text to a TLS port, TLS to a plain one and HTTP/2 to an HTTP/1 port end without what the client could read.
    """
    if speaks == "unknown":
        return Served("unknown")
    first, request = payload.first_bytes, payload.request
    if speaks == "grpc" and first not in ("h2", "tls"):
        return Served("ok")  # its HTTP/2 settings, whatever the client says
    if first == "silent":
        return Served("silence")
    if speaks in ("https", "tls"):
        if payload.tls is None:
            return Served("closed")
        if speaks == "tls":
            return Served("ok", told=True)
        return _http(Payload(payload.speech, payload.inner, request))
    if first == "tls":
        return Served("closed")
    if speaks == "auto":
        speaks = "http" if first == "http1" else "tcp"
    if speaks == "tcp":
        return Served("ok", told=True)
    if speaks == "grpc":
        return Served("ok", 200, told=True) if request is None or request.grpc else Served("stream-reset")
    if speaks in ("status", "admin"):
        if first != "http1" or request is None:
            return Served("ok", 400) if first == "opaque" else Served("closed")
        path = request.path.partition("?")[0]
        if speaks == "admin":
            return Served("ok", 200) if path in ADMIN_PAGES and request.method == "GET" else Served("unknown")
        return Served("ok", 200 if path in ("/healthz/ready", "/stats/prometheus", "/metrics") else 404)
    return _http(payload)


def _http(payload: Payload) -> Served:
    """The echo app's HTTP port (lab.apps.web): ``/status/CODE``, ``/delay/SECONDS``, ``/close``, ``/reset``."""
    if payload.first_bytes == "opaque":
        return Served("silence")  # the end of a head is waited for
    if payload.first_bytes == "h2":
        return Served("ok", ends=True)  # an error of HTTP/1.1
    if payload.first_bytes != "http1" or payload.request is None:
        return Served("closed")
    path = payload.request.path.partition("?")[0].rstrip("/")
    if path in ("/close", "/reset"):
        return Served("reset" if path == "/reset" else "closed")
    head, _, rest = path[1:].partition("/")
    if head == "status" and len(rest) == 3 and rest.isdigit():
        status = int(rest)
        return Served("ok", status, told=status >= 200 and status not in (204, 304))
    if head == "delay" and rest.replace(".", "", 1).isdigit():
        return Served("ok", 200, told=True, delay=min(float(rest), 60.0))
    return Served("ok", 200, told=True)

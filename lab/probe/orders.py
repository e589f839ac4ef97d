"""What the driver is asked to send, and what it says came of it. Plain data that crosses a process boundary."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lab.manifests.model import FlowProtocol, TrafficTest


@dataclass(frozen=True, slots=True)
class Order:
    """One flow to send. ``timeout`` is in seconds, for the whole of it: lookup, connection and answer."""

    host: str
    port: int
    protocol: FlowProtocol
    uid: int = 1000
    timeout: float = 5.0
    path: str = "/"
    method: str = "GET"
    headers: Mapping[str, str] = field(default_factory=dict)
    authority: str = ""
    sni: str = ""
    crafted: bool = False
    flags: str = "S"
    spoof: str = ""
    server: str = ""
    query_type: str = "A"
    silent: bool = False

    @classmethod
    def of(cls, test: TrafficTest) -> Order:
        to = test.to
        return cls(
            host=to.host,
            port=to.port,
            protocol=to.protocol,
            uid=test.flow_from.uid,
            timeout=test.timeout,
            path=to.path,
            method=to.method,
            headers=dict(to.headers),
            authority=to.authority,
            sni=to.sni,
            crafted=to.crafted,
            flags=to.flags,
            spoof=test.flow_from.spoof,
            server=to.server,
            query_type=to.query_type,
            silent=to.silent,
        )

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(slots=True)
class Query:
    """One DNS question that was sent, and its answer. ``rcode`` is the answer's name (NOERROR...), None without one."""

    name: str
    type: str
    proto: str
    server: str
    port: int
    src: str
    sport: int
    rcode: str | None = None
    answers: list[str] = field(default_factory=list)
    error: str | None = None


@dataclass(slots=True)
class Sent:
    """What became of an order.

    ``result`` is an outcome of the contract. ``address``, ``port``: where the flow went; ``src``, ``sport``: from where (of
    ICMP ``sport`` is the identifier). ``body`` is the far side's answer, if it was JSON. ``fence``: see ``lab.probe.fence``.
    """

    result: str
    status: int | None = None
    error: str | None = None
    proto: str = "tcp"
    address: str | None = None
    port: int | None = None
    src: str | None = None
    sport: int | None = None
    queries: list[Query] = field(default_factory=list)
    body: dict[str, Any] | None = None
    grpc_status: int | None = None
    tls: dict[str, Any] | None = None
    replies: list[str] = field(default_factory=list)
    fence: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Sent:
        return cls(**{**data, "queries": [Query(**q) for q in data["queries"]]})

"""A verdict: where one flow went and why. The shapes that scripts outside rely on (docs/reference.md); pure data.

What is None has no source: it was not observed, or does not apply.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Result = Literal["ok", "http-error", "closed", "refused", "timeout", "no-answer", "unreachable"]
RESULTS: tuple[str, ...] = ("ok", "http-error", "closed", "refused", "timeout", "no-answer", "unreachable")
Proof = Literal["observed", "predicted"]


@dataclass(frozen=True, slots=True)
class Rule:
    """The netfilter rule that decided, as its owner writes it. ``position`` counts from 1, None for a policy."""

    family: str
    backend: str | None
    table: str
    chain: str
    position: int | None
    text: str


@dataclass(frozen=True, slots=True)
class Forwarded:
    """The agent's own question to the cluster's resolver on behalf of the app's."""

    server: str
    captured: bool | None = None
    zone: int | None = None
    source_port: int | None = None
    rule: Rule | None = None


@dataclass(frozen=True, slots=True)
class Dns:
    """The lookup: ``answered_by`` is ``agent``, ``cluster-dns`` or another server's address; ``server`` is who was asked."""

    captured: bool | None = None
    redirected_to: int | None = None
    answered_by: str | None = None
    answers: tuple[str, ...] | None = None
    rule: Rule | None = None
    server: str | None = None
    name: str | None = None
    rcode: str | None = None
    zone: int | None = None
    forwarded: Forwarded | None = None


@dataclass(frozen=True, slots=True)
class Outbound:
    captured: bool | None = None
    redirected_to: int | None = None
    rule: Rule | None = None


@dataclass(frozen=True, slots=True)
class Envoy:
    """What the client's Envoy did. ``route`` is the route configuration's name, ``route_name`` Envoy's %ROUTE_NAME%.

    ``upstream``: what netfilter made of Envoy's own connection on its way out of the pod.
    """

    listener: str | None = None
    filter_chain: str | None = None
    route: str | None = None
    virtual_host: str | None = None
    route_name: str | None = None
    cluster: str | None = None
    endpoint: str | None = None
    response_flags: str | None = None
    details: str | None = None
    upstream: Outbound | None = None


@dataclass(frozen=True, slots=True)
class Inbound:
    """What happened in the pod that the flow reached."""

    pod: str | None = None
    captured: bool | None = None
    redirected_to: int | None = None
    rule: Rule | None = None
    listener: str | None = None
    filter_chain: str | None = None
    cluster: str | None = None
    peer_seen_by_app: str | None = None
    route: str | None = None
    route_name: str | None = None
    endpoint: str | None = None
    response_flags: str | None = None
    details: str | None = None


@dataclass(frozen=True, slots=True)
class Tls:
    """``downstream``: TLS version at the Envoy of the pod that was reached; ``upstream``: that of the client's Envoy towards
    it. ``peer_san``: the identity of the server that the client's Envoy saw; without one, the client's that the server saw."""

    downstream: str | None = None
    upstream: str | None = None
    peer_san: str | None = None


@dataclass(frozen=True, slots=True)
class WirePacket:
    src: str
    dst: str
    proto: str
    sport: int
    dport: int


@dataclass(frozen=True, slots=True)
class Wire:
    """What left the source pod for this flow, as seen outside it; one entry a 5-tuple."""

    left_pod: bool | None = None
    seen_at: str | None = None
    packets: tuple[WirePacket, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """``status`` is HTTP's. ``error`` says more, in words."""

    result: Result
    status: int | None = None
    error: str | None = None
    grpc_status: int | None = None


@dataclass(frozen=True, slots=True)
class From:
    pod: str | None
    uid: int
    external: str | None = None
    spoof: str | None = None


@dataclass(frozen=True, slots=True)
class To:
    host: str
    address: str | None
    port: int | None
    protocol: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """One flow. ``passed`` is None if it was not judged; then ``skipped`` says what could not be observed.

    ``undecided`` names what a prediction would have to know and does not; keys that depend on it are None.
    """

    test: str
    proof: Proof
    source: From
    to: To
    outcome: Outcome | None
    source_port: int | None = None
    dns: Dns | None = None
    outbound: Outbound | None = None
    envoy: Envoy | None = None
    inbound: Inbound | None = None
    tls: Tls = Tls()
    wire: Wire | None = None
    far_side: Mapping[str, Any] | None = None
    evidence: Mapping[str, str] = field(default_factory=dict)
    expected: Mapping[str, Any] = field(default_factory=dict)
    passed: bool | None = None
    differences: tuple[str, ...] = ()
    skipped: str | None = None
    seconds: float = 0.0
    undecided: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The contract's JSON object."""
        data = dataclasses.asdict(self)
        data["from"] = data.pop("source")
        data["pass"] = data.pop("passed")
        ordered = ["test", "proof", "from", "to", "source_port", "dns", "outbound", "envoy", "inbound", "tls", "wire"]
        ordered += ["outcome", "far_side", "evidence", "expected", "pass", "differences", "skipped", "seconds"]
        ordered.append("undecided")
        return {key: _plain(data[key]) for key in ordered}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    return value

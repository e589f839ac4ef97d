"""Schema of our own kind TrafficTest: one flow, and the verdict that it must have."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from lab.manifests.schema.base import Duration, IPAddress, Port, PositiveDuration, Spec
from lab.manifests.schema.metadata import Object


class FlowFrom(Spec):
    """Where the flow starts: ``pod`` (POD.NAMESPACE) or ``external`` (an ExternalHost)."""

    pod: str = ""
    external: str = ""
    uid: Annotated[int, Field(ge=0, le=4294967294)] = 1000
    spoof: IPAddress = ""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if bool(self.pod) == bool(self.external):
            raise ValueError("exactly one of pod and external is needed")
        return self


def _flags(value: str) -> str:
    if not re.fullmatch(r"[FSRPAUECN]+", value):
        raise ValueError("TCP flags are letters of FSRPAUECN")
    return value


def _path(value: str) -> str:
    if not value.startswith("/"):
        raise ValueError("a path begins with /")
    return value


class FlowTo(Spec):
    """Where it goes: ``host`` (a name that the source looks up, or an address) or ``pod`` (that pod's address)."""

    host: str = ""
    pod: str = ""
    port: Port | None = None
    protocol: Literal["http", "grpc", "tcp", "tls", "udp", "dns", "dns-tcp", "icmp"] = "http"
    path: Annotated[str, AfterValidator(_path)] = "/"
    method: str = "GET"
    headers: dict[str, str] = Field(default_factory=dict)
    authority: str = ""
    sni: str = ""
    crafted: bool = False
    flags: Annotated[str, AfterValidator(_flags)] = "S"
    server: str = ""
    query_type: Literal["A", "AAAA", "TXT", "SRV", "MX", "CNAME", "PTR"] = "A"
    silent: bool = False

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if bool(self.host) == bool(self.pod):
            raise ValueError("exactly one of host and pod is needed")
        if self.protocol not in ("dns", "dns-tcp", "icmp") and self.port is None:
            raise ValueError(f"protocol {self.protocol} needs a port")
        if self.protocol == "icmp" and self.port is not None:
            raise ValueError("icmp has no ports")
        if self.silent and (self.protocol != "tcp" or self.crafted):
            raise ValueError("only a tcp connection can be silent")
        if self.protocol in ("dns", "dns-tcp") and self.pod:
            raise ValueError("a lookup needs host: the name to look up")
        return self


class Retry(Spec):
    attempts: Annotated[int, Field(ge=1, le=100)] = 1
    interval: Duration = 0.0


class Expected(Spec):
    """Part of an expected verdict; every key may be left out, and null means that the verdict must have null there."""

    KEEP_NULL = True


def _verdict_key(name: str) -> str:
    return {"from_": "from", "passed": "pass"}.get(name, name)


class VerdictPart(Expected, alias_generator=_verdict_key):
    """Keys of a verdict are snake_case."""


class NativeRuleExpectation(VerdictPart):
    """The same rule in the words of the native nft back end, whose table is of family ``inet``."""

    family: Literal["inet"] | None = None
    table: str | None = None
    chain: str | None = None
    position: int | None = None
    text: str | None = None


class RuleExpectation(VerdictPart):
    """A rule in the words of iptables-save; ``native_nft`` says it for the native nft back end, where all words differ."""

    family: Literal["ipv4", "ipv6"] | None = None
    backend: Literal["legacy", "nft", "native-nft"] | None = None
    table: str | None = None
    chain: str | None = None
    position: int | None = None
    text: str | None = None
    native_nft: NativeRuleExpectation | None = None


class FromExpectation(VerdictPart):
    pod: str | None = None
    external: str | None = None
    uid: int | None = None
    spoof: str | None = None


class ToExpectation(VerdictPart):
    host: str | None = None
    address: str | None = None
    port: int | None = None
    protocol: str | None = None


class ForwardedExpectation(VerdictPart):
    server: str | None = None
    captured: bool | None = None
    zone: int | None = None
    source_port: int | None = None
    rule: RuleExpectation | None = None


class DnsExpectation(VerdictPart):
    captured: bool | None = None
    redirected_to: int | None = None
    answered_by: str | None = None
    answers: list[str] | None = None
    rule: RuleExpectation | None = None
    server: str | None = None
    name: str | None = None
    rcode: str | None = None
    zone: int | None = None
    forwarded: ForwardedExpectation | None = None


class OutboundExpectation(VerdictPart):
    captured: bool | None = None
    redirected_to: int | None = None
    rule: RuleExpectation | None = None


class EnvoyExpectation(VerdictPart):
    listener: str | None = None
    filter_chain: str | None = None
    route: str | None = None
    virtual_host: str | None = None
    route_name: str | None = None
    cluster: str | None = None
    endpoint: str | None = None
    response_flags: str | None = None
    details: str | None = None
    upstream: OutboundExpectation | None = None


class InboundExpectation(VerdictPart):
    pod: str | None = None
    captured: bool | None = None
    redirected_to: int | None = None
    rule: RuleExpectation | None = None
    listener: str | None = None
    filter_chain: str | None = None
    cluster: str | None = None
    peer_seen_by_app: str | None = None
    route: str | None = None
    route_name: str | None = None
    endpoint: str | None = None
    response_flags: str | None = None
    details: str | None = None


class TlsExpectation(VerdictPart):
    downstream: str | None = None
    upstream: str | None = None
    peer_san: str | None = None


class PacketExpectation(VerdictPart):
    src: str | None = None
    dst: str | None = None
    proto: str | None = None
    sport: int | None = None
    dport: int | None = None


class WireExpectation(VerdictPart):
    left_pod: bool | None = None
    seen_at: str | None = None
    packets: list[PacketExpectation] | None = None


class OutcomeExpectation(VerdictPart):
    result: Literal["ok", "http-error", "closed", "refused", "timeout", "no-answer", "unreachable"] | None = None
    status: Annotated[int, Field(ge=100, le=599)] | None = None
    error: str | None = None
    grpc_status: int | None = None


class VerdictExpectation(VerdictPart):
    """A subset of a verdict (lab.verdict); lists compare as sets."""

    test: str | None = None
    proof: Literal["observed", "predicted"] | None = None
    from_: FromExpectation | None = None
    to: ToExpectation | None = None
    source_port: int | None = None
    dns: DnsExpectation | None = None
    outbound: OutboundExpectation | None = None
    envoy: EnvoyExpectation | None = None
    inbound: InboundExpectation | None = None
    tls: TlsExpectation | None = None
    wire: WireExpectation | None = None
    outcome: OutcomeExpectation | None = None
    far_side: dict[str, object] | None = None
    evidence: dict[str, str] | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if not self.model_fields_set:
            raise ValueError("expect is empty: such a test cannot fail")
        return self


class TrafficTestSpec(Spec):
    """One flow and the verdict that it must have."""

    from_: FlowFrom = Field(alias="from")
    to: FlowTo
    expect: VerdictExpectation
    timeout: PositiveDuration = 5.0
    retry: Retry = Field(default_factory=Retry)


class TrafficTest(Object):
    spec: TrafficTestSpec

"""Schema of VirtualService.

Source: istio/api: networking/v1alpha3/virtual_service.proto;
rules of istio/istio: pkg/config/validation/virtualservice.go.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from lab.manifests.schema.base import Duration, IPOrCIDR, Port, PositiveDuration, Spec, words
from lab.manifests.schema.config import STATUS, Destination, ExportTo, RouteHost, one_of
from lab.manifests.schema.metadata import LabelKey, Object
from lab.manifests.schema.retry import HTTPRetry

Weight = Annotated[int, Field(ge=0)]


def _regex(value: str) -> str:
    try:
        re.compile(value)  # Envoy's engine is RE2; what neither accepts is caught here
    except re.error as error:
        raise ValueError(f"it is no regular expression: {error}") from None
    return value


Regex = Annotated[str, AfterValidator(_regex)]


class StringMatch(Spec):
    exact: str | None = None
    prefix: str | None = None
    regex: Regex | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        one_of(self, "exact", "prefix", "regex")
        return self


class HeaderOperations(Spec):
    set: dict[str, str] = Field(default_factory=dict)
    add: dict[str, str] = Field(default_factory=dict)
    remove: list[str] = Field(default_factory=list)


class Headers(Spec):
    request: HeaderOperations | None = None
    response: HeaderOperations | None = None


class HTTPMatchRequest(Spec):
    name: str = ""
    stat_prefix: str = ""
    uri: StringMatch | None = None
    scheme: StringMatch | None = None
    method: StringMatch | None = None
    authority: StringMatch | None = None
    headers: dict[str, StringMatch] = Field(default_factory=dict)
    port: Port | None = None
    source_labels: dict[LabelKey, str] = Field(default_factory=dict)
    gateways: list[str] = Field(default_factory=list)
    query_params: dict[str, StringMatch] = Field(default_factory=dict)
    ignore_uri_case: bool = False
    without_headers: dict[str, StringMatch] = Field(default_factory=dict)
    source_namespace: str = ""


class HTTPRouteDestination(Spec):
    destination: Destination
    weight: Weight = 0
    headers: Headers | None = None


class HTTPRedirect(Spec):
    uri: str = ""
    authority: str = ""
    port: Port | None = None
    derive_port: Literal["FROM_PROTOCOL_DEFAULT", "FROM_REQUEST_PORT"] | None = None
    scheme: str = ""
    redirect_code: Literal[301, 302, 303, 307, 308] = 301
    prefix_rewrite: str = ""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        one_of(self, "port", "derive_port")
        return self


class HTTPBody(Spec):
    string: str | None = None
    bytes: str | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        one_of(self, "string", "bytes")
        return self


class HTTPDirectResponse(Spec):
    status: Annotated[int, Field(ge=200, le=599)]
    body: HTTPBody | None = None


class Delegate(Spec):
    name: str = ""
    namespace: str = ""


class RegexRewrite(Spec):
    match: Regex
    rewrite: str = ""


class HTTPRewrite(Spec):
    uri: str = ""
    authority: str = ""
    uri_regex_rewrite: RegexRewrite | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.uri and self.uri_regex_rewrite:
            raise ValueError("uri and uriRegexRewrite exclude each other")
        return self


class Percent(Spec):
    value: Annotated[float, Field(ge=0, le=100)] = 0.0


class Delay(Spec):
    UNUSED = words("exponentialDelay")

    percent: Annotated[int, Field(ge=0, le=100)] = 0
    fixed_delay: PositiveDuration
    percentage: Percent | None = None


class Abort(Spec):
    UNUSED = words("http2Error")

    http_status: Annotated[int, Field(ge=200, le=599)] | None = None
    grpc_status: str | None = None
    percentage: Percent | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        one_of(self, "http_status", "grpc_status", required=True)
        return self


class HTTPFaultInjection(Spec):
    delay: Delay | None = None
    abort: Abort | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.delay is None and self.abort is None:
            raise ValueError("a fault needs delay or abort")
        return self


class HTTPMirrorPolicy(Spec):
    destination: Destination
    percentage: Percent | None = None


class CorsPolicy(Spec):
    unmatched_preflights: Literal["UNSPECIFIED", "FORWARD", "IGNORE"] = "UNSPECIFIED"
    allow_origin: list[str] = Field(default_factory=list)
    allow_origins: list[StringMatch] = Field(default_factory=list)
    allow_methods: list[str] = Field(default_factory=list)
    allow_headers: list[str] = Field(default_factory=list)
    expose_headers: list[str] = Field(default_factory=list)
    max_age: Duration | None = None
    allow_credentials: bool | None = None


class HTTPRoute(Spec):
    name: str = ""
    match: list[HTTPMatchRequest] = Field(default_factory=list)
    route: list[HTTPRouteDestination] = Field(default_factory=list)
    redirect: HTTPRedirect | None = None
    direct_response: HTTPDirectResponse | None = None
    delegate: Delegate | None = None
    rewrite: HTTPRewrite | None = None
    timeout: Duration | None = None
    retries: HTTPRetry | None = None
    fault: HTTPFaultInjection | None = None
    mirror: Destination | None = None
    mirrors: list[HTTPMirrorPolicy] = Field(default_factory=list)
    mirror_percent: Annotated[int, Field(ge=0, le=100)] | None = None
    mirror_percentage: Percent | None = None
    cors_policy: CorsPolicy | None = None
    headers: Headers | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        what = [
            bool(self.route),
            self.redirect is not None,
            self.direct_response is not None,
            self.delegate is not None,
        ]
        if sum(what) != 1:
            raise ValueError("an HTTP route has exactly one of route, redirect, directResponse and delegate")
        if len(self.route) > 1 and sum(entry.weight for entry in self.route) == 0:
            raise ValueError("the weights of several destinations must not add up to 0")
        if self.mirror is not None and self.mirrors:
            raise ValueError("mirror and mirrors exclude each other")
        if self.redirect is not None and self.rewrite is not None:
            raise ValueError("redirect and rewrite exclude each other")
        return self


class RouteDestination(Spec):
    destination: Destination
    weight: Weight = 0


class L4MatchAttributes(Spec):
    UNUSED = words("sourceSubnet")

    destination_subnets: list[IPOrCIDR] = Field(default_factory=list)
    port: Port | None = None
    source_labels: dict[LabelKey, str] = Field(default_factory=dict)
    gateways: list[str] = Field(default_factory=list)
    source_namespace: str = ""


class TLSMatchAttributes(Spec):
    sni_hosts: Annotated[list[str], Field(min_length=1)]
    destination_subnets: list[IPOrCIDR] = Field(default_factory=list)
    port: Port | None = None
    source_labels: dict[LabelKey, str] = Field(default_factory=dict)
    gateways: list[str] = Field(default_factory=list)
    source_namespace: str = ""


class TLSRoute(Spec):
    match: Annotated[list[TLSMatchAttributes], Field(min_length=1)]
    route: Annotated[list[RouteDestination], Field(min_length=1)]


class TCPRoute(Spec):
    match: list[L4MatchAttributes] = Field(default_factory=list)
    route: Annotated[list[RouteDestination], Field(min_length=1)]


class VirtualServiceSpec(Spec):
    hosts: list[RouteHost] = Field(default_factory=list)
    gateways: list[str] = Field(default_factory=list)
    http: list[HTTPRoute] = Field(default_factory=list)
    tls: list[TLSRoute] = Field(default_factory=list)
    tcp: list[TCPRoute] = Field(default_factory=list)
    export_to: ExportTo = Field(default_factory=list)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if not (self.http or self.tls or self.tcp):
            raise ValueError("a VirtualService needs http, tls or tcp routes")
        if not self.hosts and (self.gateways or self.tls or self.tcp):
            raise ValueError("only a delegate (http routes, no gateways) has no hosts")
        if "*" in self.hosts and (not self.gateways or "mesh" in self.gateways):
            raise ValueError('host "*" is not allowed for sidecars (gateway mesh)')
        twice = [host for index, host in enumerate(self.hosts) if host in self.hosts[:index]]
        if twice:
            raise ValueError(f'host "{twice[0]}" is written twice')
        return self


class VirtualService(Object):
    BOOKKEEPING = STATUS

    spec: VirtualServiceSpec

"""Schema of VirtualService.

Source: istio/api: networking/v1alpha3/virtual_service.proto;
rules of istio/istio: pkg/config/validation/virtualservice.go.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from lab.manifests.model import GrpcStatus
from lab.manifests.schema.base import IPOrCIDR, MaybeLabel, Milliseconds, Port, Spec, WholeSeconds, words
from lab.manifests.schema.config import STATUS, Destination, ExportTo, RouteHost, one_of
from lab.manifests.schema.metadata import LabelKey, Object
from lab.manifests.schema.re2 import regex
from lab.manifests.schema.retry import HTTPRetry

Weight = Annotated[int, Field(ge=0)]


Regex = Annotated[str, AfterValidator(regex)]


class PathMatch(Spec):
    exact: str | None = None
    prefix: str | None = None
    regex: Regex | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        one_of(self, "exact", "prefix", "regex")
        return self


class StringMatch(PathMatch):
    prefix: Annotated[str, Field(min_length=1)] | None = None


class WithoutMatch(StringMatch):
    """As :class:`StringMatch`; the regex ``*``, which is none, stands for presence."""

    regex: Annotated[str, AfterValidator(lambda value: value if value == "*" else regex(value))] | None = None


def is_claim(name: str) -> bool:
    """Whether a name of a header stands for a claim of a JWT (istio/istio: pkg/jwt/routing.go, ToRoutingClaim)."""
    return bool(re.fullmatch(r"(?is)@request\.auth\.claims(\..+|\[.+\])", name))


def _header_name(value: str) -> str:
    if not is_claim(value) and value not in (":method", ":scheme", ":authority") and not re.fullmatch(_TOKEN, value):
        raise ValueError("it is no name of a header")
    return value


def _own_header(value: str) -> str:
    if not value or value.startswith(":") or value.lower() == "host":
        raise ValueError("it is no header that can be changed")
    return value


def _own_header_or_authority(value: str) -> str:
    return value if is_authority(value) else _own_header(value)


def is_authority(name: str) -> bool:
    """Whether a header is the one that holds the host."""
    return name.lower() in ("host", ":authority")


_ARGUMENT = r'(?:\\.|[^\\)"])*'
_VARIABLE = rf'%(?:[^%(]+%|[^%(]*\( *(?:\[ *"|[^ \[]){_ARGUMENT}(?:" *, *"{_ARGUMENT})*(?:\)|" *\] *\)) *%)'
_HEADER_VALUE = re.compile(rf"(?:[^%]|%%|{_VARIABLE})*", re.DOTALL)


def _header_value(value: str) -> str:
    """Source: istio/istio: pkg/config/validation/header_value_validator.go."""
    if re.search(r"[\0-\x08\n-\x1f\x7f]", value):
        raise ValueError("a header holds no control characters")
    if not _HEADER_VALUE.fullmatch(value):
        raise ValueError(
            "it is no value of a header: a % begins a %VARIABLE% or %VARIABLE(ARGUMENT)%, and %% stands for one"
        )
    return value


_TOKEN = r"[-!#$%&'*+.^_`|~0-9A-Za-z]+"  # RFC 9110, 5.6.2
HeaderName = Annotated[str, AfterValidator(_header_name)]
OwnHeader = Annotated[str, AfterValidator(_own_header)]
HeaderValue = Annotated[str, AfterValidator(_header_value)]
OwnHeaderOrAuthority = Annotated[str, AfterValidator(_own_header_or_authority)]


class RequestOperations(Spec):
    set: dict[OwnHeaderOrAuthority, HeaderValue] = Field(default_factory=dict)
    add: dict[OwnHeaderOrAuthority, HeaderValue] = Field(default_factory=dict)
    remove: list[OwnHeader] = Field(default_factory=list)


class ResponseOperations(Spec):
    set: dict[OwnHeader, HeaderValue] = Field(default_factory=dict)
    add: dict[OwnHeader, HeaderValue] = Field(default_factory=dict)
    remove: list[OwnHeader] = Field(default_factory=list)


class Headers(Spec):
    request: RequestOperations | None = None
    response: ResponseOperations | None = None


class HTTPMatchRequest(Spec):
    name: str = ""
    stat_prefix: str = ""
    uri: PathMatch | None = None
    scheme: StringMatch | None = None
    method: StringMatch | None = None
    authority: StringMatch | None = None
    headers: dict[HeaderName, StringMatch] = Field(default_factory=dict)
    port: Port | None = None
    source_labels: dict[LabelKey, str] = Field(default_factory=dict)
    gateways: list[str] = Field(default_factory=list)
    query_params: dict[str, StringMatch] = Field(default_factory=dict)
    ignore_uri_case: bool = False
    without_headers: dict[HeaderName, WithoutMatch] = Field(default_factory=dict)
    source_namespace: MaybeLabel = ""


class HTTPRouteDestination(Spec):
    destination: Destination
    weight: Weight = 0
    headers: Headers | None = None


class HTTPRedirect(Spec):
    uri: str = ""
    authority: str = ""
    port: Port | None = None
    derive_port: Literal["FROM_PROTOCOL_DEFAULT", "FROM_REQUEST_PORT"] | None = None
    scheme: Literal["", "http", "https"] = ""
    redirect_code: Literal[301, 302, 303, 307, 308] = 301
    prefix_rewrite: str = ""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        one_of(self, "port", "derive_port")
        if self.uri and self.prefix_rewrite:
            raise ValueError("uri and prefixRewrite exclude each other")
        if not (self.uri or self.prefix_rewrite or self.authority or self.scheme or self.port or self.derive_port):
            raise ValueError("a redirect needs uri, prefixRewrite, authority, scheme or port")
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
    rewrite: Annotated[str, Field(min_length=1)]


class HTTPRewrite(Spec):
    uri: str = ""
    authority: str = ""
    uri_regex_rewrite: RegexRewrite | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.uri and self.uri_regex_rewrite:
            raise ValueError("uri and uriRegexRewrite exclude each other")
        if not (self.uri or self.uri_regex_rewrite or self.authority):
            raise ValueError("a rewrite needs uri, uriRegexRewrite or authority")
        return self


class Percent(Spec):
    value: Annotated[float, Field(ge=0, le=100)] = 0.0


class Delay(Spec):
    UNUSED = words("exponentialDelay")

    percent: Annotated[int, Field(ge=0, le=100)] = 0
    fixed_delay: Milliseconds
    percentage: Percent | None = None


class Abort(Spec):
    """Without a status it does nothing (a warning tells it)."""

    http_status: Annotated[int, Field(ge=200, le=599)] | None = None
    grpc_status: GrpcStatus | None = None
    http2_error: str | None = Field(None, alias="http2Error")
    percentage: Percent | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        one_of(self, "http_status", "grpc_status", "http2_error")
        if self.http2_error is not None:
            raise ValueError("Istio has no faults of HTTP/2 yet; use httpStatus or grpcStatus")
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
    max_age: WholeSeconds | None = None
    allow_credentials: bool | None = None


class HTTPRoute(Spec):
    name: str = ""
    match: list[HTTPMatchRequest] = Field(default_factory=list)
    route: list[HTTPRouteDestination] = Field(default_factory=list)
    redirect: HTTPRedirect | None = None
    direct_response: HTTPDirectResponse | None = None
    delegate: Delegate | None = None
    rewrite: HTTPRewrite | None = None
    timeout: Milliseconds | None = None
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
        for word, other in (("redirect", self.redirect), ("directResponse", self.direct_response)):
            if other is not None and self.rewrite is not None:
                raise ValueError(f"{word} and rewrite exclude each other")
            if other is not None and self.fault is not None:
                raise ValueError(f"{word} and fault exclude each other")
        by_prefix = all(entry.uri is None or entry.uri.prefix is not None for entry in self.match)
        if self.redirect is not None and self.redirect.prefix_rewrite and not by_prefix:
            raise ValueError("a redirect's prefixRewrite needs prefix matches")
        operations = self.headers.request if self.headers else None
        written = [*operations.set, *operations.add] if operations else []
        hosts = sum(map(is_authority, written)) + bool(self.rewrite and self.rewrite.authority)
        if hosts > 1:
            raise ValueError("the authority is written more than once")
        return self


class RouteDestination(Spec):
    destination: Destination
    weight: Weight = 0


def _weighed(value: list[RouteDestination]) -> list[RouteDestination]:
    if len(value) > 1 and sum(entry.weight for entry in value) == 0:
        raise ValueError("the weights of several destinations must not add up to 0")
    return value


Targets = Annotated[list[RouteDestination], Field(min_length=1), AfterValidator(_weighed)]


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
    route: Targets


class TCPRoute(Spec):
    match: list[L4MatchAttributes] = Field(default_factory=list)
    route: Targets


def _covers(host: str, name: str) -> bool:
    """Whether every name that ``name`` stands for is one that ``host`` stands for."""
    return name.endswith(host[1:]) and len(name) >= len(host) if host.startswith("*") else host == name


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
        for index, host in enumerate(self.hosts):
            for other in self.hosts[:index]:
                if host == other:
                    raise ValueError(f'host "{host}" is written twice')
                if _covers(host, other) or _covers(other, host):
                    raise ValueError(f'hosts "{other}" and "{host}" overlap')
        if not self.hosts and any(route.delegate for route in self.http):
            raise ValueError("a delegate (no hosts) cannot delegate further")
        for name in {name for route in self.tls for match in route.match for name in match.sni_hosts}:
            if not any(_covers(host, name) for host in self.hosts):
                raise ValueError(f'SNI host "{name}" is within none of the hosts')
        return self


class VirtualService(Object):
    BOOKKEEPING = STATUS

    spec: VirtualServiceSpec

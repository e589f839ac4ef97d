"""HTTP routes: Istio's default route and retries, and the rules of a VirtualService translated.

Sources: istio/istio: pilot/pkg/networking/core/route/route.go, route/retry/retry.go.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, get_args

from envoy.config.core.v3 import base_pb2
from envoy.config.route.v3 import route_components_pb2
from envoy.extensions.filters.common.fault.v3 import fault_pb2 as common_fault_pb2
from envoy.extensions.filters.http.cors.v3 import cors_pb2
from envoy.extensions.filters.http.fault.v3 import fault_pb2
from envoy.extensions.retry.host.previous_hosts.v3 import previous_hosts_pb2
from envoy.extensions.retry.priority.previous_priorities.v3 import previous_priorities_config_pb2
from envoy.type.matcher.v3 import string_pb2
from envoy.type.v3 import percent_pb2

from lab.discovery import destinations, protoconv
from lab.discovery.durations import parse_go_duration
from lab.discovery.proxy import Proxy
from lab.discovery.registry import Port, Service
from lab.discovery.virtual_service import VirtualService
from lab.manifests.model import GrpcStatus

RETRY_ON = "connect-failure,refused-stream,unavailable,cancelled,retriable-status-codes"
FAULT_FILTER = "envoy.filters.http.fault"
CORS_FILTER = "envoy.filters.http.cors"

GRPC_CODES: tuple[str, ...] = get_args(GrpcStatus)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


# --- retries and hash policies ------------------------------------------------------------------


@cache
def previous_hosts_predicate() -> Any:
    return route_components_pb2.RetryPolicy.RetryHostPredicate(
        name="envoy.retry_host_predicates.previous_hosts",
        typed_config=protoconv.to_any(previous_hosts_pb2.PreviousHostsPredicate()),
    )


@cache
def _previous_priorities() -> Any:
    return route_components_pb2.RetryPolicy.RetryPriority(
        name="envoy.retry_priorities.previous_priorities",
        typed_config=protoconv.to_any(previous_priorities_config_pb2.PreviousPrioritiesConfig(update_frequency=2)),
    )


def _retry_on(policy: Any, written: Mapping[str, Any]) -> None:
    """``retryOn`` into a policy: numbers in it are status codes."""
    if not written.get("retryOn"):
        return
    words, codes = [], []
    for word in str(written["retryOn"]).split(","):
        word = word.strip()
        if word.isdigit():
            codes.append(int(word))
        elif word:
            words.append(word)
    if codes and "retriable-status-codes" not in words:
        words.append("retriable-status-codes")
    policy.retry_on = ",".join(words)
    policy.retriable_status_codes.extend(codes)


def _backoff(policy: Any, written: Mapping[str, Any]) -> None:
    seconds = parse_go_duration(written.get("backoff"))
    if seconds is not None:
        policy.retry_back_off.base_interval.CopyFrom(protoconv.duration(seconds))


def mesh_default(proxy: Proxy, key: str) -> Mapping[str, Any] | None:
    """MeshConfig's ``defaultHttpRetryPolicy`` or ``defaultInboundHttpRetryPolicy``, None if it has none."""
    found = proxy.mesh_config.raw.get(key)
    return found if isinstance(found, Mapping) else None


def inbound_retry_policy(written: Mapping[str, Any] | None) -> Any:
    """The retries of an inbound route: of requests that the application has not seen, unless the mesh says otherwise."""
    policy = route_components_pb2.RetryPolicy(retry_on="reset-before-request", num_retries=protoconv.uint32(2))
    if written is None:
        return policy
    attempts = int(written.get("attempts") or 0)
    if attempts <= 0:
        return None
    policy.num_retries.value = attempts
    _retry_on(policy, written)
    _backoff(policy, written)
    return policy


def retry_policy(written: Mapping[str, Any] | None, consistent_hash: bool) -> Any:
    """A RetryPolicy from ``retries`` (None: Istio's default); None if it switches retries off.

    With consistent hashing a retry may go to the same host again.
    """
    policy = route_components_pb2.RetryPolicy(
        retry_on=RETRY_ON, num_retries=protoconv.uint32(2), host_selection_retry_max_attempts=5
    )
    if not consistent_hash:
        policy.retry_host_predicate.append(previous_hosts_predicate())
    if written is None:
        return policy
    attempts = int(written.get("attempts") or 0)
    if attempts <= 0:
        return None
    policy.num_retries.value = attempts
    _retry_on(policy, written)
    per_try = parse_go_duration(written.get("perTryTimeout"))
    if per_try is not None:
        policy.per_try_timeout.CopyFrom(protoconv.duration(per_try))
    ignore_previous = written.get("retryIgnorePreviousHosts")
    if ignore_previous is not None:
        del policy.retry_host_predicate[:]
        if ignore_previous:
            policy.retry_host_predicate.append(previous_hosts_predicate())
    if written.get("retryRemoteLocalities"):
        policy.retry_priority.CopyFrom(_previous_priorities())
    _backoff(policy, written)
    return policy


def consistent_hash(proxy: Proxy, host: str, port: int | None, subset: str) -> Mapping[str, Any]:
    """The consistentHash settings of a destination: subset, then port, then the rule's own; empty if there are none.

    istio/istio: pilot/pkg/networking/core/route/route.go: hashForService, HashForHTTPDestination.
    """
    rule = proxy.destination_rule(host)
    if rule is None:
        return {}

    def of(policy: Mapping[str, Any]) -> Mapping[str, Any]:
        found = _mapping(_mapping(policy.get("loadBalancer")).get("consistentHash"))
        for setting in policy.get("portLevelSettings") or ():
            if port is not None and int(_mapping(setting.get("port")).get("number") or 0) == port:
                own = _mapping(_mapping(setting.get("loadBalancer")).get("consistentHash"))
                return own or found
        return found

    found = of(_mapping(rule.traffic_policy))
    chosen = rule.subset(subset) if subset else None
    if chosen is not None:
        found = of(_mapping(chosen.get("trafficPolicy"))) or found
    return found


def hash_policy(settings: Mapping[str, Any]) -> Any:
    """The route's hash policy for consistentHash settings, None without a hash key."""
    policy = route_components_pb2.RouteAction.HashPolicy()
    if settings.get("httpHeaderName"):
        policy.header.header_name = str(settings["httpHeaderName"])
    elif settings.get("httpCookie"):
        cookie = _mapping(settings["httpCookie"])
        policy.cookie.name = str(cookie.get("name", ""))
        policy.cookie.path = str(cookie.get("path", ""))
        ttl = parse_go_duration(cookie.get("ttl"))
        if ttl is not None:
            policy.cookie.ttl.CopyFrom(protoconv.duration(ttl))
    elif settings.get("useSourceIp"):
        policy.connection_properties.source_ip = True
    elif settings.get("httpQueryParameterName"):
        policy.query_parameter.name = str(settings["httpQueryParameterName"])
    else:
        return None
    return policy


# --- the default route ----------------------------------------------------------------------------


def default_route(proxy: Proxy, service: Service, port: Port) -> Any:
    """The one route of a service without VirtualService."""
    action = route_components_pb2.RouteAction(
        cluster=protoconv.cluster_name("outbound", port.port, "", service.host),
        timeout=protoconv.duration(0),
        max_grpc_timeout=protoconv.duration(0),
    )
    hashed = hash_policy(consistent_hash(proxy, service.host, port.port, ""))
    if hashed is not None:
        action.hash_policy.append(hashed)
    # the hash does not change the retries here: Istio builds this policy before it looks at the hash
    retries = retry_policy(mesh_default(proxy, "defaultHttpRetryPolicy"), False)
    if retries is not None:
        action.retry_policy.CopyFrom(retries)
    return route_components_pb2.Route(
        name="default",
        match=route_components_pb2.RouteMatch(prefix="/"),
        route=action,
        decorator=route_components_pb2.Decorator(operation=f"{service.host}:{port.port}/*"),
    )


# --- matches ----------------------------------------------------------------------------------------


def _string_matcher(match: Mapping[str, Any]) -> Any:
    """A StringMatcher of ``{exact|prefix|regex}``; None stands for "present" (empty, or the regex ``*``)."""
    if match.get("exact"):
        return string_pb2.StringMatcher(exact=str(match["exact"]))
    if match.get("prefix"):
        return string_pb2.StringMatcher(prefix=str(match["prefix"]))
    if match.get("regex") and match["regex"] != "*":
        out = string_pb2.StringMatcher()
        out.safe_regex.regex = str(match["regex"])
        return out
    return None


def _header_matcher(name: str, match: Mapping[str, Any]) -> Any:
    out = route_components_pb2.HeaderMatcher(name=name)
    matcher = _string_matcher(match)
    if matcher is None:
        out.present_match = True
    else:
        out.string_match.CopyFrom(matcher)
    return out


def route_match(match: Mapping[str, Any] | None) -> Any:
    """A RouteMatch of one HTTPMatchRequest (None matches everything)."""
    out = route_components_pb2.RouteMatch(prefix="/")
    if match is None:
        return out
    headers = []
    for name, value in _mapping(match.get("headers")).items():
        headers.append(_header_matcher(name, _mapping(value)))
    for name, value in _mapping(match.get("withoutHeaders")).items():
        header = _header_matcher(name, _mapping(value))
        header.invert_match = True
        header.treat_missing_header_as_empty = not header.present_match
        headers.append(header)
    out.headers.extend(sorted(headers, key=lambda h: h.name))
    uri = _mapping(match.get("uri"))
    if uri.get("exact"):
        out.path = str(uri["exact"])
    elif uri.get("prefix"):
        out.prefix = str(uri["prefix"])
    elif uri.get("regex"):
        out.safe_regex.regex = str(uri["regex"])
    out.case_sensitive.CopyFrom(protoconv.boolean(not match.get("ignoreUriCase")))
    for key, header_name in (("method", ":method"), ("authority", ":authority"), ("scheme", ":scheme")):
        if match.get(key):
            out.headers.append(_header_matcher(header_name, _mapping(match[key])))
    for name, value in _mapping(match.get("queryParams")).items():
        parameter = out.query_parameters.add(name=name)
        matcher = _string_matcher(_mapping(value))
        if matcher is None:
            parameter.present_match = True
        else:
            parameter.string_match.CopyFrom(matcher)
    return out


def is_catch_all(route: Any) -> bool:
    """Whether nothing behind this route can be reached."""
    match = route.match
    kind = match.WhichOneof("path_specifier")
    all_paths = (kind == "prefix" and match.prefix == "/") or (kind == "safe_regex" and match.safe_regex.regex == ".*")
    return bool(all_paths and not match.headers and not match.query_parameters and not match.dynamic_metadata)


# --- actions ----------------------------------------------------------------------------------------


def _internal(name: str) -> bool:
    return name.startswith(":") or name.lower() == "host"


def _header_options(values: Mapping[str, Any], append: bool) -> tuple[list[Any], str]:
    """(headers to add sorted by name, the authority if one was among them)."""
    options, authority = [], ""
    for name in sorted(values):
        if name.lower() in (":authority", "host"):
            authority = str(values[name])
        if not _internal(name):
            options.append(
                base_pb2.HeaderValueOption(
                    header=base_pb2.HeaderValue(key=name, value=str(values[name])),
                    append_action="APPEND_IF_EXISTS_OR_ADD" if append else "OVERWRITE_IF_EXISTS_OR_ADD",
                )
            )
    return options, authority


def _apply_headers(target: Any, headers: Mapping[str, Any]) -> str:
    """Adds header operations to a route or a weighted cluster; returns the authority that they set."""
    authority = ""
    for side in ("request", "response"):
        operations = _mapping(headers.get(side))
        set_options, set_authority = _header_options(_mapping(operations.get("set")), append=False)
        add_options, add_authority = _header_options(_mapping(operations.get("add")), append=True)
        getattr(target, f"{side}_headers_to_add").extend([*set_options, *add_options])
        getattr(target, f"{side}_headers_to_remove").extend(
            n for n in operations.get("remove") or () if not _internal(n)
        )
        if side == "request":
            authority = set_authority or add_authority
    return authority


def _redirect(out: Any, redirect: Mapping[str, Any], listener_port: int) -> None:
    action = out.redirect
    action.host_redirect = str(redirect.get("authority") or "")
    if redirect.get("prefixRewrite"):
        action.prefix_rewrite = str(redirect["prefixRewrite"])
    else:
        action.path_redirect = str(redirect.get("uri") or "")
    scheme = str(redirect.get("scheme") or "")
    if scheme:
        action.scheme_redirect = scheme
    port = int(redirect.get("port") or 0)
    if redirect.get("derivePort") == "FROM_REQUEST_PORT":
        port = listener_port
    if (port, scheme or "http") not in ((80, "http"), (443, "https")):
        action.port_redirect = port
    code = int(redirect.get("redirectCode") or 301)
    action.response_code = {
        301: "MOVED_PERMANENTLY",
        302: "FOUND",
        303: "SEE_OTHER",
        307: "TEMPORARY_REDIRECT",
        308: "PERMANENT_REDIRECT",
    }.get(code, "MOVED_PERMANENTLY")


def _direct_response(out: Any, response: Mapping[str, Any]) -> None:
    out.direct_response.status = int(response.get("status") or 0)
    body = _mapping(response.get("body"))
    if "string" in body:
        out.direct_response.body.inline_string = str(body["string"])
    elif "bytes" in body:
        try:
            out.direct_response.body.inline_bytes = base64.b64decode(str(body["bytes"]), validate=True)
        except (binascii.Error, ValueError):
            out.direct_response.body.inline_bytes = str(body["bytes"]).encode()


def _percent(value: Any) -> Any:
    return percent_pb2.FractionalPercent(
        numerator=round(float(_mapping(value).get("value") or 0) * 10000), denominator="MILLION"
    )


def _hundredths(value: float) -> Any:
    return percent_pb2.FractionalPercent(numerator=int(value), denominator="HUNDRED")


def _add_mirror(action: Any, proxy: Proxy, destination: Mapping[str, Any], percent: Any, listener_port: int) -> None:
    action.request_mirror_policies.add(
        cluster=destinations.http_cluster_of(proxy, destination, listener_port),
        runtime_fraction=base_pb2.RuntimeFractionalPercent(default_value=percent),
        trace_sampled=protoconv.boolean(False),
        disable_shadow_host_suffix_append=True,
    )


def _mirrors(action: Any, proxy: Proxy, http: Mapping[str, Any], listener_port: int) -> None:
    if http.get("mirror"):
        percent = _hundredths(100)
        if http.get("mirrorPercentage") is not None:
            percent = _percent(http["mirrorPercentage"])
        elif http.get("mirrorPercent") is not None:
            percent = _hundredths(float(http["mirrorPercent"]))
        if percent.numerator:
            _add_mirror(action, proxy, _mapping(http["mirror"]), percent, listener_port)
    for mirror in http.get("mirrors") or ():
        percent = _percent(mirror["percentage"]) if mirror.get("percentage") is not None else _hundredths(100)
        if percent.numerator and mirror.get("destination"):
            _add_mirror(action, proxy, _mapping(mirror["destination"]), percent, listener_port)


def _destination_hash(proxy: Proxy, destination: Mapping[str, Any]) -> Any:
    service = destinations.service_of(proxy, destination)
    host = service.host if service else str(destination.get("host", ""))
    number = int(_mapping(destination.get("port")).get("number") or 0) or None
    return hash_policy(consistent_hash(proxy, host, number, str(destination.get("subset") or "")))


def _route_action(out: Any, proxy: Proxy, http: Mapping[str, Any], authority: str, listener_port: int) -> None:
    action = out.route
    timeout = parse_go_duration(http.get("timeout")) or 0.0
    action.timeout.CopyFrom(protoconv.duration(timeout))
    action.max_grpc_timeout.CopyFrom(protoconv.duration(timeout))
    rewrite = _mapping(http.get("rewrite"))
    regex = _mapping(rewrite.get("uriRegexRewrite"))
    if regex:
        action.regex_rewrite.pattern.regex = str(regex.get("match") or "")
        action.regex_rewrite.substitution = str(regex.get("rewrite") or "")
    elif rewrite.get("uri"):
        action.prefix_rewrite = str(rewrite["uri"])
    authority = str(rewrite.get("authority") or "") or authority
    if authority:
        action.host_rewrite_literal = authority
    _mirrors(action, proxy, http, listener_port)
    written = http.get("retries")
    hashed = False
    routes: Sequence[Mapping[str, Any]] = http.get("route") or ()
    if len(routes) == 1:
        destination = _mapping(routes[0].get("destination"))
        action.cluster = destinations.http_cluster_of(proxy, destination, listener_port)
        own = _apply_headers(out, _mapping(routes[0].get("headers")))
        if own and not authority:
            action.host_rewrite_literal = own
        policy = _destination_hash(proxy, destination)
        if policy is not None:
            hashed = True
            action.hash_policy.append(policy)
    else:
        action.weighted_clusters.SetInParent()
        for one in routes:
            weight = int(one.get("weight") or 0)
            if not weight:
                continue
            destination = _mapping(one.get("destination"))
            cluster = action.weighted_clusters.clusters.add(
                name=destinations.http_cluster_of(proxy, destination, listener_port), weight=protoconv.uint32(weight)
            )
            own = _apply_headers(cluster, _mapping(one.get("headers")))
            if own:
                cluster.host_rewrite_literal = own
            policy = _destination_hash(proxy, destination)
            if policy is not None:
                action.hash_policy.append(policy)
    if written is None:
        written = mesh_default(proxy, "defaultHttpRetryPolicy")
    retries = retry_policy(_mapping(written) if written is not None else None, hashed)
    if retries is not None:
        action.retry_policy.CopyFrom(retries)


def _fault(written: Mapping[str, Any]) -> Any:
    out = fault_pb2.HTTPFault()
    delay, abort = _mapping(written.get("delay")), _mapping(written.get("abort"))
    fixed = parse_go_duration(delay.get("fixedDelay"))
    if fixed is not None:
        percent = (
            _percent(delay["percentage"])
            if delay.get("percentage") is not None
            else _hundredths(delay.get("percent") or 0)
        )
        out.delay.CopyFrom(common_fault_pb2.FaultDelay(fixed_delay=protoconv.duration(fixed), percentage=percent))
    status, grpc = abort.get("httpStatus"), str(abort.get("grpcStatus") or "")
    if status or grpc in GRPC_CODES:
        if status:
            out.abort.http_status = int(status)
        else:
            out.abort.grpc_status = GRPC_CODES.index(grpc)
        if abort.get("percentage") is not None:
            out.abort.percentage.CopyFrom(_percent(abort["percentage"]))
    return out


def _cors(written: Mapping[str, Any]) -> Any:
    out = cors_pb2.CorsPolicy(
        filter_enabled=base_pb2.RuntimeFractionalPercent(default_value=_hundredths(100)),
        allow_methods=",".join(written.get("allowMethods") or ()),
        allow_headers=",".join(written.get("allowHeaders") or ()),
        expose_headers=",".join(written.get("exposeHeaders") or ()),
        forward_not_matching_preflights=protoconv.boolean(written.get("unmatchedPreflights") != "IGNORE"),
    )
    for origin in written.get("allowOrigins") or ():
        matcher = _string_matcher(_mapping(origin))
        if matcher is not None:
            out.allow_origin_string_match.append(matcher)
    if not written.get("allowOrigins"):
        out.allow_origin_string_match.extend(
            string_pb2.StringMatcher(exact=str(o)) for o in written.get("allowOrigin") or ()
        )
    age = parse_go_duration(written.get("maxAge"))
    if age is not None:
        out.max_age = str(int(age))
    if written.get("allowCredentials") is not None:
        out.allow_credentials.CopyFrom(protoconv.boolean(bool(written["allowCredentials"])))
    return out


def _operation(route: Any, vs: VirtualService, port: int) -> str:
    """The decorator: ``host:port/path`` of the cluster, else the VirtualService's name (GetRouteOperation)."""
    kind = route.match.WhichOneof("path_specifier")
    if kind == "path":
        path = route.match.path
    elif kind == "safe_regex":
        path = route.match.safe_regex.regex
    else:
        path = f"{route.match.prefix}*"
    parsed = protoconv.parse_cluster_name(route.route.cluster) if route.HasField("route") else None
    if parsed is not None:
        return f"{parsed[3]}:{parsed[1]}{path}"
    return f"{vs.name}:{port}{path}"


def translate(
    proxy: Proxy, vs: VirtualService, http: Mapping[str, Any], match: Mapping[str, Any] | None, port: int
) -> Any:
    """One Envoy route for one rule and one of its matches; None if it is not for this proxy and port."""
    if match is not None and not destinations.static_match(match, proxy, port, gateways_replace_source=True):
        return None
    name = str(http.get("name") or "")
    if match is not None and match.get("name"):
        name = f"{name}.{match['name']}"
    out = route_components_pb2.Route(name=name, match=route_match(match))
    out.metadata.CopyFrom(
        protoconv.metadata(
            istio={"config": f"/apis/networking.istio.io/v1/namespaces/{vs.namespace}/virtual-service/{vs.name}"}
        )
    )
    if match is not None and match.get("statPrefix"):
        out.stat_prefix = str(match["statPrefix"])
    authority = _apply_headers(out, _mapping(http.get("headers")))
    if http.get("redirect") is not None:
        _redirect(out, _mapping(http["redirect"]), port)
    elif http.get("directResponse") is not None:
        _direct_response(out, _mapping(http["directResponse"]))
    else:
        _route_action(out, proxy, http, authority, port)
    out.decorator.operation = _operation(out, vs, port)
    if http.get("fault"):
        fault = _fault(_mapping(http["fault"]))
        if fault.ByteSize():
            out.typed_per_filter_config[FAULT_FILTER].CopyFrom(protoconv.to_any(fault))
    if http.get("corsPolicy"):
        out.typed_per_filter_config[CORS_FILTER].CopyFrom(protoconv.to_any(_cors(_mapping(http["corsPolicy"]))))
    return out


def routes_of(proxy: Proxy, vs: VirtualService, port: int) -> list[Any]:
    """Envoy routes of a VirtualService for one listener port, up to and with the first that matches everything."""
    out: list[Any] = []
    for http in vs.http:
        matches = http.get("match") or (None,)
        for match in matches:
            route = translate(proxy, vs, http, match, port)
            if route is not None:
                out.append(route)
                if is_catch_all(route):
                    return out
        if matches == (None,):
            return out
    return out

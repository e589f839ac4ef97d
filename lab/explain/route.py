"""Which virtual host and route of a route configuration take a request, and what the route does.

Source: envoyproxy/envoy: source/common/router/config_impl.cc.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from lab.explain.flow import Request
from lab.explain.listener import Passed
from lab.explain.xds import Json, seconds


class Routed(NamedTuple):
    """Where a route leads. Exactly one of ``cluster``, ``status`` (direct response or redirect) is set, or ``doubt``.

    ``timeout`` and ``delay`` are in seconds, 0 is none. ``retries`` are the repeated attempts after a failed connect,
    ``retried`` the statuses that are tried again, ``retried_grpc`` the gRPC ones.
    ``request`` is the request as it goes on. ``abort``: a fault filter answers; ``missing``: no host or route fits.
    """

    virtual_host: str
    route: str
    cluster: str | None = None
    status: int | None = None
    doubt: str = ""
    chance: float = 1.0
    timeout: float = 0.0
    delay: float = 0.0
    retries: int = 0
    retried: frozenset[int] = frozenset()
    retried_grpc: frozenset[int] = frozenset()
    request: Request | None = None
    abort: bool = False
    missing: bool = False
    config: str = ""
    passed: tuple[Passed, ...] = ()


def find(route_config: Json, request: Request, fault: Json | None = None) -> tuple[Routed, ...]:
    """All that a request can become (weights make several). Without a virtual host or route: one with status 404.

    Args:
        fault: the fault filter's configuration, where the connection manager has one.
    """
    name = str(route_config.get("name", ""))
    authority = request.authority
    if route_config.get("ignore_port_in_host_matching"):
        authority = without_port(authority)
    host, passed = virtual_host(route_config, authority)
    if host is None:
        return (Routed("", "", status=404, missing=True, config=name, passed=tuple(passed)),)
    vhost_name = str(host.get("name", ""))
    for route in host.get("routes", ()):
        answer = matches(route.get("match", {}), request)
        if answer is not True:
            why = answer if isinstance(answer, str) else "it does not match"
            passed.append(Passed("route", str(route.get("name", "")), why))
            if isinstance(answer, str) and answer.startswith(_DOUBT):
                return (Routed(vhost_name, "", doubt=answer.removeprefix(_DOUBT), config=name, passed=tuple(passed)),)
            continue
        found = _action(route, request, vhost_name)
        found = tuple(f for part in found for f in _faults(part, route, host, fault))
        return tuple(f._replace(config=name, passed=tuple(passed)) for f in found)
    return (Routed(vhost_name, "", status=404, missing=True, config=name, passed=tuple(passed)),)


def without_port(authority: str) -> str:
    """A Host without its port; an IPv6 address in brackets keeps them."""
    host, colon, port = authority.rpartition(":")
    return host if colon and port.isdigit() and (host.endswith("]") or ":" not in host) else authority


def virtual_host(route_config: Json, authority: str) -> tuple[Json | None, list[Passed]]:
    """Exact domains first, then the longest ``*suffix``, then the longest ``prefix*``, then ``*``; case does not count."""
    wanted = authority.lower()
    best: tuple[int, int] | None = None
    chosen: Json | None = None
    for host in route_config.get("virtual_hosts", ()):
        for domain in host.get("domains", ()):
            rank = _rank(str(domain).lower(), wanted)
            if rank is not None and (best is None or rank > best):
                best, chosen = rank, host
    passed = [
        Passed("virtual host", str(host.get("name", "")), f"{authority} is none of its domains")
        for host in route_config.get("virtual_hosts", ())
        if host is not chosen
    ]
    return chosen, passed


def _rank(domain: str, authority: str) -> tuple[int, int] | None:
    if domain == authority:
        return (3, len(domain))
    if domain == "*":
        return (0, 0)
    if domain.startswith("*") and authority.endswith(domain[1:]) and len(authority) >= len(domain):
        return (2, len(domain))
    if domain.endswith("*") and authority.startswith(domain[:-1]) and len(authority) >= len(domain):
        return (1, len(domain))
    return None


_DOUBT = "not evaluated: "


def matches(match: Json, request: Request) -> bool | str:
    """True, or what does not fit; a text that begins with `_DOUBT` names what is not evaluated."""
    path, _, query = request.path.partition("?")
    path = path.partition("#")[0]
    fold = match.get("case_sensitive") is False

    def same(text: object) -> str:
        return str(text).lower() if fold else str(text)

    if "prefix" in match:
        if not same(request.path).startswith(same(match["prefix"])):
            return f"path prefix {match['prefix']}: the path is {request.path}"
    elif "path" in match:
        if same(path) != same(match["path"]):
            return f"path {match['path']}: the path is {path}"
    elif "path_separated_prefix" in match:
        wanted = same(match["path_separated_prefix"])
        if same(path) != wanted and not same(path).startswith(wanted + "/"):
            return f"path prefix {wanted}: the path is {path}"
    elif "safe_regex" in match:
        answer = _regex(match["safe_regex"], path)
        if answer is not True:
            return answer or f"path regex {match['safe_regex'].get('regex')}: the path is {path}"
    elif "connect_matcher" in match:
        if request.method != "CONNECT":
            return "only CONNECT requests"
    elif "path_match_policy" in match:
        return f"{_DOUBT}path_match_policy"
    for header in match.get("headers", ()):
        answer = header_matches(header, request)
        if answer is not True:
            return answer or f"header {header.get('name')}: it does not match"
    if match.get("grpc") is not None and not request.grpc:
        return "only gRPC requests"
    for wanted in match.get("query_parameters", ()):
        from urllib.parse import parse_qsl  # few routes ask for parameters, and every prediction would read it

        value = dict(parse_qsl(query, keep_blank_values=True)).get(str(wanted.get("name")))
        if wanted.get("present_match") is not None or "string_match" not in wanted:
            if (value is not None) != (wanted.get("present_match", True) is not False):
                return f"query parameter {wanted.get('name')}"
            continue
        found = None if value is None else string_matches(wanted["string_match"], value)
        if found is not True:
            return found or f"query parameter {wanted.get('name')}: it does not match"
    fraction = match.get("runtime_fraction")
    if fraction is not None and share(fraction.get("default_value", {})) < 1.0:
        return f"{_DOUBT}a route for a part of the requests (runtime_fraction)"
    for key in ("dynamic_metadata", "tls_context", "filter_state", "cookies"):
        if match.get(key):
            return f"{_DOUBT}route match by {key}"
    return True


def header_matches(header: Json, request: Request) -> bool | str:
    """True, False, or a text: what is not evaluated."""
    name = str(header.get("name", "")).lower()
    value = {
        ":method": request.method,
        ":path": request.path,
        ":authority": request.authority,
        ":scheme": request.scheme,
        "host": request.authority,
    }.get(name, request.headers.get(name))
    invert = bool(header.get("invert_match"))
    if value is None and header.get("treat_missing_header_as_empty"):
        value = ""
    if "present_match" in header:
        return ((value is not None) == bool(header["present_match"])) != invert
    if value is None:
        # A header that is missing matches nothing, inverted or not (HeaderUtility::HeaderDataBaseImpl::matchesHeaders).
        return invert
    found: bool | str
    if "string_match" in header:
        found = string_matches(header["string_match"], value)
    elif "exact_match" in header:
        found = value == header["exact_match"]
    elif "prefix_match" in header:
        found = value.startswith(str(header["prefix_match"]))
    elif "suffix_match" in header:
        found = value.endswith(str(header["suffix_match"]))
    elif "contains_match" in header:
        found = str(header["contains_match"]) in value
    elif "safe_regex_match" in header:
        found = _regex(header["safe_regex_match"], value)
    elif "range_match" in header:
        span = header["range_match"]
        number = int(value) if re.fullmatch(r"-?\d+", value) else None
        found = number is not None and int(span.get("start", 0)) <= number < int(span.get("end", 0))
    else:
        found = True
    return found if isinstance(found, str) else found != invert


def string_matches(match: Json, value: str) -> bool | str:
    """A StringMatcher: True, False, or a text that names what is not evaluated."""
    fold = bool(match.get("ignore_case"))
    own = value.lower() if fold else value
    for key, test in (
        ("exact", lambda w: own == w),
        ("prefix", lambda w: own.startswith(w)),
        ("suffix", lambda w: own.endswith(w)),
        ("contains", lambda w: w in own),
    ):
        if key in match:
            wanted = str(match[key])
            return bool(test(wanted.lower() if fold else wanted))
    if "safe_regex" in match:
        return _regex(match["safe_regex"], value)
    return f"{_DOUBT}string match by {', '.join(match)}"


def _regex(regex: Json, value: str) -> bool | str:
    """A full match. RE2 and Python agree on what meshes use; what Python cannot read is not evaluated."""
    text = str(regex.get("regex", ""))
    try:
        return re.fullmatch(text, value) is not None
    except re.error:
        return f"{_DOUBT}regular expression {text}"


def share(percent: Json) -> float:
    """A FractionalPercent as a share of 1."""
    per = {"HUNDRED": 100, "TEN_THOUSAND": 10_000, "MILLION": 1_000_000}[str(percent.get("denominator", "HUNDRED"))]
    return float(percent.get("numerator", 0)) / per


_REDIRECT = {
    "MOVED_PERMANENTLY": 301, "FOUND": 302, "SEE_OTHER": 303, "TEMPORARY_REDIRECT": 307, "PERMANENT_REDIRECT": 308,
}  # fmt: skip


def _action(route: Json, request: Request, vhost: str) -> tuple[Routed, ...]:
    base = Routed(vhost, str(route.get("name", "")))
    if "direct_response" in route:
        return (base._replace(status=int(route["direct_response"].get("status", 200))),)
    if "redirect" in route:
        code = str(route["redirect"].get("response_code", "MOVED_PERMANENTLY"))
        return (base._replace(status=_REDIRECT.get(code, 301)),)
    action = route.get("route")
    if action is None:
        return (base._replace(doubt=f"the action of route {base.route or 'without a name'} is not evaluated"),)
    base = base._replace(
        timeout=seconds(action.get("timeout", "15s")),
        retries=_retries(action.get("retry_policy") or {}),
        retried=_retried(action.get("retry_policy") or {}),
        retried_grpc=_retried_grpc(action.get("retry_policy") or {}),
        request=_onward(route.get("match", {}), action, request),
    )
    if "cluster" in action:
        return (base._replace(cluster=str(action["cluster"])),)
    if "weighted_clusters" in action:
        weighted = action["weighted_clusters"]
        entries = [(str(c.get("name", "")), int(c.get("weight", 0))) for c in weighted.get("clusters", ())]
        total = sum(weight for _, weight in entries) or 1
        return tuple(base._replace(cluster=name, chance=weight / total) for name, weight in entries if weight)
    if "cluster_header" in action:
        named = request.headers.get(str(action["cluster_header"]).lower())
        return (base._replace(cluster=named) if named else base._replace(status=404),)
    return (base._replace(doubt="the route chooses its cluster by a plugin"),)


def _retries(policy: Json) -> int:
    words = {w.strip() for w in str(policy.get("retry_on", "")).split(",")}
    if not words & {"connect-failure", "5xx", "gateway-error", "reset", "reset-before-request"}:
        return 0
    return int(policy.get("num_retries", 1))


def _retried(policy: Json) -> frozenset[int]:
    """The statuses after which a request is sent again (source/common/router/retry_state_impl.cc)."""
    if not policy or int(policy.get("num_retries", 1)) < 1:
        return frozenset()
    words = {w.strip() for w in str(policy.get("retry_on", "")).split(",")}
    found: set[int] = set()
    if "5xx" in words:
        found |= set(range(500, 600))
    if "gateway-error" in words:
        found |= {502, 503, 504}
    if "retriable-4xx" in words:
        found.add(409)
    if "retriable-status-codes" in words:
        found |= {int(code) for code in policy.get("retriable_status_codes", ())}
    return frozenset(found)


_GRPC_CODES = {"cancelled": 1, "deadline-exceeded": 4, "resource-exhausted": 8, "internal": 13, "unavailable": 14}


def _retried_grpc(policy: Json) -> frozenset[int]:
    """The gRPC codes in the headers of an answer after which a request is sent again (retry_state_impl.cc)."""
    if not policy or int(policy.get("num_retries", 1)) < 1:
        return frozenset()
    words = {w.strip() for w in str(policy.get("retry_on", "")).split(",")}
    return frozenset(code for word, code in _GRPC_CODES.items() if word in words)


def _onward(match: Json, action: Json, request: Request) -> Request:
    """The request as the route rewrites it."""
    authority = str(action.get("host_rewrite_literal") or request.authority)
    path = request.path
    if action.get("prefix_rewrite"):
        old = match.get("prefix") or match.get("path") or match.get("path_separated_prefix") or ""
        path = str(action["prefix_rewrite"]) + path[len(str(old)) :]
    elif action.get("regex_rewrite"):
        pattern = action["regex_rewrite"].get("pattern", {}).get("regex", "")
        try:
            path = re.sub(pattern, str(action["regex_rewrite"].get("substitution", "")), path)
        except re.error:
            path = request.path
    return request._replace(authority=authority, path=path)


def _faults(routed: Routed, route: Json, host: Json, fault: Json | None) -> Iterable[Routed]:
    """What a fault filter makes of a routed request."""
    if fault is None:
        yield routed
        return
    config: Mapping[str, Any] = fault
    for level in (host, route):
        own = (level.get("typed_per_filter_config") or {}).get("envoy.filters.http.fault")
        config = own if own else config
    delay = config.get("delay")
    if delay and share(delay.get("percentage", {})) > 0:
        part, wait = share(delay["percentage"]), seconds(delay.get("fixed_delay"))
        delayed = routed._replace(delay=wait, chance=routed.chance * part)
        yield from _aborts(delayed, config)
        if part < 1.0:
            yield from _aborts(routed._replace(chance=routed.chance * (1 - part)), config)
        return
    yield from _aborts(routed, config)


def _aborts(routed: Routed, config: Mapping[str, Any]) -> Iterable[Routed]:
    abort = config.get("abort")
    part = share(abort.get("percentage", {})) if abort else 0.0
    if abort and part > 0:
        status = int(abort.get("http_status", 0)) or 200
        yield routed._replace(status=status, abort=True, chance=routed.chance * part)
        if part >= 1.0:
            return
        routed = routed._replace(chance=routed.chance * (1 - part))
    yield routed

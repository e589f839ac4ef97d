"""One Envoy's decision over a connection, from xDS resources alone; and what it makes of what its upstream did.

Sources: envoyproxy/envoy: source/common/router/router.cc, source/common/tcp_proxy/tcp_proxy.cc,
source/common/stream_info/utility.h (flags), source/common/grpc/status.cc.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from lab.explain import listener as listeners
from lab.explain import route as routes
from lab.explain import upstream as upstreams
from lab.explain.flow import Connection, Request, Speech
from lab.explain.listener import Passed
from lab.explain.upstream import Resolve, Upstream
from lab.explain.xds import Config, Json, config_of, type_of

_HTTP_WITHOUT_EFFECT = frozenset(
    {
        "router", "grpc_stats", "cors", "fault", "alpn", "stats", "metadata_exchange", "peer_metadata", "compressor",
        "decompressor", "grpc_web", "buffer", "health_check", "original_src", "on_demand", "stateful_session",
        "bandwidth_limit", "set_metadata", "header_to_metadata", "tap", "admission_control", "csrf", "grpc_json_transcoder",
        "set_filter_state", "upstream_codec",
    }
)  # fmt: skip
"""HTTP filters that neither answer a usual request nor change its route."""
_NETWORK_WITHOUT_EFFECT = frozenset(
    {"stats", "metadata_exchange", "peer_metadata", "mongo_proxy", "mysql_proxy", "kafka_broker", "sni_cluster",
     "set_filter_state", "wasm_stats"}
)  # fmt: skip


class Decision(NamedTuple):
    """Where one Envoy sends one connection (or the request in it).

    ``http`` is True where a connection manager reads it. Exactly one of these goes on: ``upstream`` (with endpoints, or
    without any healthy one), ``answer`` (an HTTP status that Envoy itself gives), ``closed`` (the connection ends). ``flags`` and
    ``details`` are Envoy's, as they are when nothing goes wrong further on. ``tls``: the connection's TLS ended here. ``source``
    and ``mark`` are the address and packet mark of the connection onward where a listener filter keeps the client's; ``wanted`` the
    host and port that a filter took from the SNI. ``waits``: it waits for bytes that do not come. ``logged``: an access log tells of
    the connection; nothing tells of one that ends while a filter waits or in its TLS handshake, but a
    TCP proxy, which has an ``upstream`` by then although it is ``closed``.
    """

    listener: str | None = None
    filter_chain: str | None = None
    http: bool = False
    route: str | None = None
    virtual_host: str | None = None
    route_name: str | None = None
    cluster: str | None = None
    upstream: Upstream | None = None
    answer: int | None = None
    closed: bool = False
    flags: str = "-"
    details: str | None = None
    tls: bool = False
    client_certificate: bool = False
    request: Request | None = None
    retries: int = 0
    retried: frozenset[int] = frozenset()
    retried_grpc: frozenset[int] = frozenset()
    timeout: float = 0.0
    delay: float = 0.0
    alpn: tuple[str, ...] = ()
    chance: float = 1.0
    doubts: tuple[str, ...] = ()
    passed: tuple[Passed, ...] = ()
    detected: str = ""
    source: str = ""
    mark: int = 0
    wanted: tuple[str, int] | None = None
    waits: bool = False
    logged: bool = True

    @property
    def speech(self) -> Speech:
        """What the next hop hears first (inside TLS, if it is wrapped in that)."""
        if not self.http:
            return "opaque"
        return "h2" if self.upstream and self.upstream.protocol == "h2" else "http1"


def listens(config: Config, connection: Connection) -> bool:
    """Whether a listener takes connections to ``connection.port``."""
    return listeners.find(config, connection) is not None


def decide(config: Config, connection: Connection, lookup: Resolve | None = None) -> tuple[Decision, ...]:
    """All that can become of a connection; several where weights or faults choose. Chances add up to 1."""
    listener = listeners.find(config, connection)
    if listener is None:
        return (Decision(closed=True, flags="", doubts=(f"no listener takes port {connection.port}",)),)
    chosen = listeners.choose(listener, connection)
    detected = (
        f"{chosen.detected.transport}{' ' + ','.join(chosen.detected.protocols) if chosen.detected.protocols else ''}"
    )
    source, mark = _original_source(listener, connection)
    base = Decision(
        source=source,
        mark=mark,
        listener=str(listener.get("name", "")),
        doubts=chosen.doubts,
        passed=chosen.passed,
        detected=detected,
    )
    if chosen.detected.waits:
        return (base._replace(waits=True, logged=False, flags=""),)
    if chosen.chain is None:
        return (base._replace(closed=True, flags="NR", details="filter_chain_not_found"),)
    chain = chosen.chain
    base = base._replace(filter_chain=str(chain.get("name", "")) or None)
    secured = _downstream_tls(chain)
    if secured is not None:
        wants = bool(config_of(secured).get("require_client_certificate"))
        if connection.tls is None or (wants and not connection.tls.identity):
            return tuple(_insecure(config, base, chain, connection, lookup))
        base = base._replace(tls=True, client_certificate=wants)
        connection = connection._replace(tls=connection.inner, inner=None)
    return tuple(_filters(config, base, chain, connection, lookup))


def _insecure(
    config: Config, base: Decision, chain: Json, connection: Connection, lookup: Resolve | None
) -> Iterator[Decision]:
    """A TLS handshake that fails. A TCP proxy has its cluster already by then, and writes of it; HTTP has no request to tell of."""
    details = "TLS was expected" if connection.tls is None else "TLS without the client certificate that is required"
    base = base._replace(closed=True, logged=False, flags="-", details=details)
    if not any(type_of(filter_) == "TcpProxy" for filter_ in chain.get("filters", ())):
        yield base
        return
    for decision in _filters(config, base, chain, connection, lookup):
        yield decision._replace(closed=True, logged=True, flags="-", details=None)


def _original_source(listener: Json, connection: Connection) -> tuple[str, int]:
    """The listener filter original_src makes connections onward come from the client's address, with a mark."""
    for filter_ in listener.get("listener_filters", ()):
        if type_of(filter_) == "OriginalSrc":
            return connection.src, int(config_of(filter_).get("mark", 0))
    return "", 0


def _downstream_tls(chain: Json) -> Json | None:
    socket = chain.get("transport_socket")
    if not socket or type_of(socket) in ("RawBuffer", ""):
        return None
    return socket  # type: ignore[no-any-return]


def _filters(
    config: Config, base: Decision, chain: Json, connection: Connection, lookup: Resolve | None
) -> Iterator[Decision]:
    doubts = list(base.doubts)
    for filter_ in chain.get("filters", ()):
        kind = type_of(filter_)
        if kind == "HttpConnectionManager":
            yield from _http(config, base._replace(doubts=tuple(doubts)), config_of(filter_), connection, lookup)
            return
        if kind == "TcpProxy":
            yield from _tcp(config, base._replace(doubts=tuple(doubts)), config_of(filter_), connection, lookup)
            return
        name = str(filter_.get("name", kind)).rpartition(".")[2]
        if name == "sni_dynamic_forward_proxy" and connection.tls is not None:
            port = int(config_of(filter_).get("port_value", 443))
            base = base._replace(wanted=(connection.tls.sni, port))
            continue
        if name not in _NETWORK_WITHOUT_EFFECT:
            doubts.append(f"network filter {filter_.get('name', kind)} is not evaluated")
    yield base._replace(closed=True, doubts=(*doubts, "the filter chain ends in no filter that is known"))


def _tcp(
    config: Config, base: Decision, proxy: Json, connection: Connection, lookup: Resolve | None
) -> Iterator[Decision]:
    if "cluster" in proxy:
        shares = [(str(proxy["cluster"]), 1.0)]
    else:
        entries = (proxy.get("weighted_clusters") or {}).get("clusters", ())
        total = sum(int(e.get("weight", 0)) for e in entries) or 1
        shares = [(str(e.get("name", "")), int(e.get("weight", 0)) / total) for e in entries if e.get("weight")]
    doubts = base.doubts
    if "tunneling_config" in proxy:
        doubts = (*doubts, "tunneling_config is not evaluated")
    for name, part in shares:
        upstream = upstreams.resolve(config, name, connection, lookup, base.wanted)
        now = base._replace(cluster=name, chance=base.chance * part, doubts=(*doubts, *upstream.doubts))
        if not upstream.known:
            yield now._replace(cluster=None, closed=True, flags="NC")
        elif not upstream.endpoints and not upstream.doubts:
            yield now._replace(closed=True, flags="DF" if upstream.unresolved else "UH")
        else:
            yield now._replace(upstream=upstream)


def _http(
    config: Config, base: Decision, manager: Json, connection: Connection, lookup: Resolve | None
) -> Iterator[Decision]:
    base = base._replace(http=True)
    if connection.first_bytes == "silent":
        yield base._replace(waits=True, logged=False, flags="")
        return
    route_config, missing = _route_config(config, manager)
    if connection.first_bytes not in ("http1", "h2"):
        # The codec cannot read it; it answers 400 in plain HTTP/1.1, with no route taken.
        name = str(route_config.get("name", "")) if route_config else None
        yield base._replace(
            route=name, answer=400, closed=connection.tls is not None, flags="DPE", details="http1.codec_error"
        )
        return
    request = connection.request
    if request is None:
        yield base._replace(doubts=(*base.doubts, "no request is given for an HTTP connection"))
        return
    fault: Json | None = None
    doubts = list(base.doubts)
    alpn: tuple[str, ...] = ()
    for filter_ in manager.get("http_filters", ()):
        name = str(filter_.get("name", "")).removeprefix("envoy.filters.http.").removeprefix("istio.").partition(".")[0]
        if filter_.get("disabled"):
            continue
        if name == "fault":
            fault = config_of(filter_)
        elif name == "alpn":
            alpn = _alpn(config_of(filter_), request, connection)
        elif name not in _HTTP_WITHOUT_EFFECT:
            doubts.append(f"HTTP filter {filter_.get('name')} is not evaluated")
    base = base._replace(doubts=tuple(doubts), alpn=alpn)
    if route_config is None:
        yield base._replace(doubts=(*base.doubts, missing))
        return
    if manager.get("strip_any_host_port") or manager.get("strip_matching_host_port"):
        request = request._replace(authority=routes.without_port(request.authority))
    for routed in routes.find(route_config, request, fault):
        yield _routed(config, base, routed, connection, lookup)


def _route_config(config: Config, manager: Json) -> tuple[Json | None, str]:
    if "route_config" in manager:
        return manager["route_config"], ""
    name = str((manager.get("rds") or {}).get("route_config_name", ""))
    if name:
        return config.routes.get(name), f"route configuration {name} is not in the dump"
    return None, "scoped routes are not evaluated"


def _alpn(config: Json, request: Request, connection: Connection) -> tuple[str, ...]:
    """What istio.alpn offers by the protocol of the request (istio/proxy: source/extensions/filters/http/alpn)."""
    version = "HTTP2" if connection.speech == "h2" or request.grpc else "HTTP11"
    for entry in config.get("alpn_override", ()):
        if str(entry.get("upstream_protocol", "HTTP10")).replace("_", "") == version:
            return tuple(entry.get("alpn_override", ()))
    return ()


def _routed(
    config: Config, base: Decision, routed: routes.Routed, connection: Connection, lookup: Resolve | None
) -> Decision:
    now = base._replace(
        route=routed.config,
        virtual_host=routed.virtual_host or None,
        route_name=routed.route or None,
        chance=base.chance * routed.chance,
        request=routed.request or connection.request,
        retries=routed.retries,
        retried=routed.retried,
        retried_grpc=routed.retried_grpc,
        timeout=routed.timeout,
        delay=routed.delay,
        passed=(*base.passed, *routed.passed),
        flags="DI" if routed.delay else "-",
    )
    if routed.doubt:
        return now._replace(doubts=(*now.doubts, routed.doubt))
    if routed.abort:
        flags = "DI,FI" if routed.delay else "FI"
        named = routed.cluster if routed.cluster in config.clusters else None  # a log knows those that there are
        return now._replace(cluster=named, answer=routed.status, flags=flags, details="fault_filter_abort")
    if routed.status is not None:
        if routed.missing:
            return now._replace(answer=404, flags="NR", details="route_not_found")
        return now._replace(answer=routed.status, details="direct_response")
    assert routed.cluster is not None
    wanted = _authority(now.request)
    upstream = upstreams.resolve(config, routed.cluster, connection, lookup, wanted)
    now = now._replace(cluster=routed.cluster, doubts=(*now.doubts, *upstream.doubts))
    if not upstream.known:
        return now._replace(cluster=None, answer=503, flags="NC", details="cluster_not_found")
    if not upstream.endpoints and not upstream.doubts:
        if upstream.unresolved:
            return now._replace(answer=503, flags="DF", details="dns_resolution_failure")
        return now._replace(answer=503, flags="UH", details="no_healthy_upstream")
    return now._replace(upstream=upstream, details="via_upstream")


def _authority(request: Request | None) -> tuple[str, int] | None:
    """The host and port that a request names."""
    if request is None:
        return None
    host = routes.without_port(request.authority)
    port = request.authority[len(host) + 1 :]
    return host.strip("[]"), int(port) if port else 443 if request.scheme == "https" else 80


UpstreamResult = Literal[
    "ok", "refused", "timeout", "unreachable", "closed", "reset", "stream-reset", "tls-refused", "silence"
]


class Reply(NamedTuple):
    """What the client of an Envoy gets: an HTTP status, or (None) bytes as they come, or the end of the connection."""

    result: Literal["ok", "closed", "reset", "stream-reset", "timeout", "silence"]
    status: int | None
    flags: str
    details: str | None


def reply(
    decision: Decision, result: UpstreamResult, status: int | None, error: str = "", grpc: int | None = None
) -> Reply:
    """What becomes of a flow whose upstream ended so.

    Args:
        result: of the connection to the endpoint: it answered, refused, did not answer, ended without a byte, failed the TLS
            handshake, or stayed silent until the client went away.
        status: of the answer, if it was HTTP.
        error: what the kernel said of a connection that is unreachable.
        grpc: the gRPC code in its headers (not in trailers).
    """
    if result == "ok":
        flags = "URX" if status in decision.retried or grpc in decision.retried_grpc else decision.flags
        return Reply("ok", status, flags, decision.details)
    if result == "silence":
        return Reply(
            "silence", None, "DC" if decision.http else "-", "downstream_remote_disconnect" if decision.http else None
        )
    if not decision.http:
        failed = result in ("refused", "timeout", "unreachable", "tls-refused")
        flags = "UF,URX" if failed else "UR" if result == "reset" else "-"
        ends: Literal["closed", "reset", "stream-reset", "timeout"] = "closed"
        if result in ("timeout", "reset", "stream-reset"):  # the last is bytes to this proxy, which it hands on
            ends = result
        return Reply(ends, None, flags, None)
    if result in ("closed", "reset"):
        why = "upstream_reset_before_response_started{connection_termination}"
        return Reply("ok", 503, "UC", why)
    if result == "stream-reset":
        return Reply("ok", 503, "UR", "upstream_reset_before_response_started{remote_reset}")
    reason = {
        "refused": "remote_connection_failure|delayed_connect_error:_Connection_refused",
        "unreachable": f"remote_connection_failure|delayed_connect_error:_{error.replace(' ', '_')}",
        "timeout": "connection_timeout",
    }.get(result, "remote_connection_failure")
    flags = "URX,UF" if decision.retries else "UF"
    return Reply("ok", 503, flags, f"upstream_reset_before_response_started{{{reason}}}")


def grpc_status(status: int) -> int:
    """gRPC's code for an HTTP status that Envoy itself answers (source/common/grpc/status.cc)."""
    return {400: 13, 401: 16, 403: 7, 404: 12, 429: 14, 502: 14, 503: 14, 504: 14}.get(status, 2)


def shares(decisions: Iterable[Decision]) -> dict[str, float]:
    """The distribution over clusters, where weights choose."""
    found: dict[str, float] = {}
    for decision in decisions:
        name = decision.cluster or (f"status {decision.answer}" if decision.answer else "closed")
        found[name] = found.get(name, 0.0) + decision.chance
    return found

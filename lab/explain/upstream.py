"""From a cluster's name to the endpoints it may choose, and how it speaks to each.

Sources: envoyproxy/envoy: source/common/upstream/{upstream_impl,load_balancer_impl,transport_socket_match_impl}.cc.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from lab.explain.flow import Connection
from lab.explain.xds import Config, Json, config_of, seconds, socket_address, type_of

Resolve = Callable[[str], Sequence[str] | None]
"""Addresses of a host name; empty: it has none; None: nobody knows."""


class UpstreamTls(NamedTuple):
    """A TLS client's context. ``sans`` are the (kind, value) of names of which the server must have one; ``certificate`` the
    name of the secret that is presented, ``trust`` that of the roots; both empty if there are none."""

    sni: str = ""
    alpn: tuple[str, ...] = ()
    certificate: str = ""
    trust: str = ""
    sans: tuple[tuple[str, str], ...] = ()
    name: str = ""


class Endpoint(NamedTuple):
    """One host that a cluster may choose. ``share`` is its part of the choices as far as weights tell."""

    address: str
    port: int
    tls: UpstreamTls | None = None
    host: str = ""
    share: float = 1.0
    doubt: str = ""

    def __str__(self) -> str:
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


class Upstream(NamedTuple):
    """A cluster as one flow meets it. Without endpoints there is no healthy host. ``known`` is False if no such cluster
    exists. ``sources`` are the addresses that connections come from, none: the machine's choice. ``protocol`` of requests. ``limits``
    are circuit breakers that somebody set: other traffic may use them up. ``unresolved``: the name that was asked for has no
    address."""

    cluster: str
    known: bool
    endpoints: tuple[Endpoint, ...] = ()
    protocol: str = "http1"
    sources: tuple[str, ...] = ()
    connect_timeout: float = 5.0
    doubts: tuple[str, ...] = ()
    kind: str = ""
    limits: tuple[str, ...] = ()
    unresolved: bool = False

    def source(self, destination: str) -> str:
        """The address that a connection to ``destination`` comes from; empty: the machine's choice."""
        return next((a for a in self.sources if (":" in a) == (":" in destination)), "")


def resolve(
    config: Config,
    name: str,
    connection: Connection,
    lookup: Resolve | None = None,
    wanted: tuple[str, int] | None = None,
) -> Upstream:
    """What a cluster makes of a connection.

    Args:
        lookup: how its DNS names are resolved; without it such endpoints are named in a doubt.
        wanted: the host and port that the client asked for, for clusters that look it up (dynamic forward proxy).
    """
    cluster = config.clusters.get(name)
    if cluster is None:
        return Upstream(name, False)
    doubts: list[str] = []
    custom = cluster.get("cluster_type", {})
    kind = str(cluster.get("type", "STATIC")) if not custom else str(custom.get("name", ""))
    endpoints: tuple[Endpoint, ...] = ()
    if kind == "envoy.clusters.dynamic_forward_proxy" and wanted is not None:
        endpoints, more = _wanted(cluster, wanted, lookup)
        doubts += more
    elif custom:
        doubts.append(f"cluster {name}: type {kind} is not evaluated")
    elif kind == "ORIGINAL_DST":
        endpoints = (_original(cluster, connection),)
    else:
        endpoints, more = _listed(config, cluster, kind, lookup)
        doubts += more
    bind = cluster.get("upstream_bind_config") or {}
    sources = [bind.get("source_address") or {}]
    sources += [e.get("address") or {} for e in bind.get("extra_source_addresses", ())]
    return Upstream(
        cluster=name,
        known=True,
        endpoints=endpoints,
        protocol=protocol_of(cluster, connection),
        sources=tuple(str(s["address"]) for s in sources if s.get("address")),
        connect_timeout=seconds(cluster.get("connect_timeout", "5s")),
        doubts=tuple(doubts),
        kind=kind,
        limits=_limits(cluster),
        unresolved=kind == "envoy.clusters.dynamic_forward_proxy" and not endpoints and not doubts,
    )


_UNLIMITED = 1 << 31


def _limits(cluster: Json) -> tuple[str, ...]:
    found: list[str] = []
    for threshold in (cluster.get("circuit_breakers") or {}).get("thresholds", ()):
        if str(threshold.get("priority", "DEFAULT")) not in ("DEFAULT", "0"):
            continue
        found += [
            f"{key} {threshold[key]}"
            for key in ("max_connections", "max_pending_requests", "max_requests")
            if int(threshold.get(key, _UNLIMITED)) < _UNLIMITED
        ]
    return tuple(found)


def _wanted(cluster: Json, wanted: tuple[str, int], lookup: Resolve | None) -> tuple[tuple[Endpoint, ...], list[str]]:
    """The addresses of the host that the client named."""
    host, port = wanted
    tls, doubt = transport(cluster, {})
    addresses = [host] if _is_address(host) else lookup(host) if lookup else None
    if addresses is None:
        return (), [f"cluster {cluster.get('name', '')}: the addresses of {host} are not known"]
    return tuple(Endpoint(a, port, tls, host, 1.0, doubt) for a in addresses[:1]), []


def _original(cluster: Json, connection: Connection) -> Endpoint:
    port = int((cluster.get("original_dst_lb_config") or {}).get("upstream_port_override", 0)) or connection.dport
    tls, doubt = transport(cluster, {})
    return Endpoint(connection.dst, port, tls, doubt=doubt)


def _listed(config: Config, cluster: Json, kind: str, lookup: Resolve | None) -> tuple[tuple[Endpoint, ...], list[str]]:
    name = str(cluster.get("name", ""))
    assignment: Json | None = cluster.get("load_assignment")
    if kind == "EDS":
        service = str((cluster.get("eds_cluster_config") or {}).get("service_name") or name)
        assignment = config.endpoints.get(service)
        if assignment is None:
            return (), [f"cluster {name}: its endpoints are not in the dump (take it with ?include_eds)"]
    levels: dict[int, list[tuple[Json, Json, bool]]] = {}
    for locality in (assignment or {}).get("endpoints", ()):
        for entry in locality.get("lb_endpoints", ()):
            usable = str(entry.get("health_status", "UNKNOWN")) in ("UNKNOWN", "HEALTHY")
            levels.setdefault(int(locality.get("priority", 0)), []).append((entry, locality, usable))
    chosen = _by_health(cluster, levels)
    found: list[Endpoint] = []
    doubts: list[str] = []
    total = sum(int(entry.get("load_balancing_weight", 1)) for entry, _ in chosen) or 1
    for entry, locality in chosen:
        where = socket_address(entry.get("endpoint", {}).get("address"))
        part = int(entry.get("load_balancing_weight", 1)) / total
        if where is None:
            doubts.append(f"cluster {name}: an endpoint that is no IP socket is not evaluated")
            continue
        tls, doubt = transport(cluster, _criteria(entry, locality))
        if _is_address(where[0]):
            found.append(Endpoint(*where, tls, where[0], part, doubt))
            continue
        addresses = lookup(where[0]) if lookup else None
        if addresses is None:
            doubts.append(f"cluster {name}: the addresses of {where[0]} are not known")
            continue
        wanted = _family(str(cluster.get("dns_lookup_family", "AUTO")), addresses)
        # LOGICAL_DNS takes the first, of an order that is another every time.
        found += [Endpoint(a, where[1], tls, where[0], part / len(wanted), doubt) for a in wanted]
    return tuple(found), doubts


def _by_health(cluster: Json, levels: Mapping[int, list[tuple[Json, Json, bool]]]) -> list[tuple[Json, Json]]:
    """Healthy hosts of the first priority that has enough of them; every host where too few are healthy (panic)."""
    if not levels:
        return []
    threshold = (cluster.get("common_lb_config") or {}).get("healthy_panic_threshold")
    panic = 50.0 if threshold is None else float(threshold.get("value", 0))
    left, taken = 100.0, []
    everyone = [(e, x) for hosts in levels.values() for e, x, _ in hosts]
    healthy_everywhere = sum(1 for hosts in levels.values() for _, _, usable in hosts if usable)
    for priority in sorted(levels):
        hosts = levels[priority]
        healthy = [(e, x) for e, x, usable in hosts if usable]
        # 1.4 is Envoy's overprovisioning factor: a level with 72 % of its hosts takes all.
        load = min(left, 140.0 * len(healthy) / len(hosts)) if hosts else 0.0
        if load > 0:
            taken += healthy if 100.0 * len(healthy) / len(hosts) >= panic else [(e, x) for e, x, _ in hosts]
            left -= load
        if left <= 0:
            break
    if not taken and panic > 0 and not healthy_everywhere:
        return everyone
    return taken


def _family(family: str, addresses: Iterable[str]) -> list[str]:
    """The addresses that a cluster's DNS takes (Cluster.DnsLookupFamily)."""
    four, six = [a for a in addresses if ":" not in a], [a for a in addresses if ":" in a]
    if family == "V4_ONLY":
        return four
    if family == "V6_ONLY":
        return six
    if family == "V4_PREFERRED":
        return four or six
    return [*six, *four] if family == "ALL" else six or four


def _criteria(entry: Json, locality: Json) -> Mapping[str, Any]:
    """The endpoint's (over its locality's) metadata for transport socket matches."""
    key = "envoy.transport_socket_match"
    found: dict[str, Any] = {}
    for owner in (locality, entry):
        found |= ((owner.get("metadata") or {}).get("filter_metadata") or {}).get(key) or {}
    return found


def transport(cluster: Json, criteria: Mapping[str, Any]) -> tuple[UpstreamTls | None, str]:
    """How a host is spoken to: the first transport socket whose match is a part of its metadata; and a doubt, if any."""
    for candidate in cluster.get("transport_socket_matches", ()):
        wanted = candidate.get("match") or {}
        if all(criteria.get(key) == value for key, value in wanted.items()):
            return _tls(candidate.get("transport_socket"), str(candidate.get("name", "")))
    return _tls(cluster.get("transport_socket"), "")


def _tls(socket: Json | None, name: str) -> tuple[UpstreamTls | None, str]:
    if not socket:
        return None, ""
    kind = type_of(socket) or str(socket.get("name", ""))
    config = config_of(socket)
    if kind in ("RawBuffer", "envoy.transport_sockets.raw_buffer"):
        return None, ""
    if "transport_socket" in config:  # a wrapper: PROXY protocol, internal upstream, tap
        return _tls(config["transport_socket"], name)[0], f"transport socket {kind} is not evaluated"
    if kind not in ("UpstreamTlsContext", "envoy.transport_sockets.tls"):
        return None, f"transport socket {kind} is not evaluated"
    common = config.get("common_tls_context") or {}
    secrets = common.get("tls_certificate_sds_secret_configs") or []
    combined = common.get("combined_validation_context") or {}
    context = combined.get("default_validation_context") or common.get("validation_context") or {}
    roots = (
        combined.get("validation_context_sds_secret_config") or common.get("validation_context_sds_secret_config") or {}
    )
    sans = [(e.get("matcher") or {}) for e in context.get("match_typed_subject_alt_names", ())]
    sans += list(context.get("match_subject_alt_names", ()))
    return UpstreamTls(
        sni=str(config.get("sni", "")),
        alpn=tuple(common.get("alpn_protocols", ())),
        certificate=str(secrets[0].get("name", "")) if secrets else "",
        trust=str(roots.get("name", "")) or ("inline" if "trusted_ca" in context else ""),
        sans=tuple((k, str(v)) for matcher in sans for k, v in matcher.items() if k in ("exact", "prefix", "suffix")),
        name=name,
    ), ""


def protocol_of(cluster: Json, connection: Connection) -> str:
    """The HTTP version that requests go on with."""
    options = (cluster.get("typed_extension_protocol_options") or {}).get(
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    ) or {}
    if "use_downstream_protocol_config" in options:
        return "h2" if connection.speech == "h2" else "http1"
    explicit = options.get("explicit_http_config") or {}
    if "http2_protocol_options" in explicit or "http2_protocol_options" in cluster:
        return "h2"
    return "http1"


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True

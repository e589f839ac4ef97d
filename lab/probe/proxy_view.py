"""What a proxy's configuration says of the listener, route and cluster that took a flow. Pure.

The configuration is that of ``lab proxy-config POD all``: lists of whole resources, as protobuf JSON in snake_case. Each function
gives lines for people; an unknown name gives none, for what is not configured any more cannot be shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Config = Mapping[str, Any]

_UNLIMITED = 2**32 - 1
_NO_BREAKER = "no connection pool limits"


def listener_on(config: Config, port: int) -> Config | None:
    """The listener whose socket has a port."""
    for listener in config.get("listeners", ()):
        address = listener.get("address", {}).get("socket_address", {})
        if address.get("port_value") == port and listener.get("bind_to_port", True) is not False:
            return listener  # type: ignore[no-any-return]
    return None


def named(config: Config, kind: str, name: str | None) -> Config | None:
    """The resource of a kind that is called so."""
    return next((r for r in config.get(kind, ()) if r.get("name") == name), None) if name else None


def listener(config: Config, name: str | None, chain: str | None) -> Iterator[str]:
    """A listener's listener filters, and what the filter chain that took the flow asks of it."""
    found = named(config, "listeners", name)
    if found is None:
        return
    filters = [_short(f.get("name", "")) for f in found.get("listener_filters", ())]
    chains = [*found.get("filter_chains", ()), *filter(None, [found.get("default_filter_chain")])]
    yield f"{name}: listener filters {', '.join(filters) or 'none'}; {_count(chains, 'filter chain')}"
    for taken in (c for c in chains if chain and c.get("name") == chain):  # one for TLS, one without: same name
        asks = _value(taken.get("filter_chain_match") or {}) or "anything"
        socket = taken.get("transport_socket", {}).get("name", "")
        yield f"filter chain {chain} takes {asks}" + (f" ({_short(socket)})" if socket else "")


def route(config: Config, name: str | None, host: str | None, route_name: str | None) -> Iterator[str]:
    """The virtual host's domains, and the route's action with its timeout, retries and VirtualService."""
    virtual_hosts = (named(config, "routes", name) or {}).get("virtual_hosts", ())
    virtual_host = next((v for v in virtual_hosts if v.get("name") == host), None)
    if virtual_host is None:
        return
    yield f"virtual host {host}: domains {', '.join(virtual_host.get('domains', ()))}"
    routes = [r for r in virtual_host.get("routes", ()) if r.get("name") == route_name]
    if len(routes) != 1:
        return
    taken = routes[0]
    parts = [f"match {_value(taken.get('match', {}))}"]
    action = taken.get("route", {})
    if "timeout" in action:
        parts.append(f"timeout {action['timeout']}" + (" (none)" if action["timeout"] == "0s" else ""))
    retry = action.get("retry_policy")
    if retry:
        parts.append(f"{retry.get('num_retries', 1)} retries on {retry.get('retry_on', 'nothing')}")
    direct = taken.get("direct_response")
    if direct:
        parts.append(f"direct response {direct.get('status')}")
    yield f"route {route_name}: {'; '.join(parts)}"
    source = _istio(taken).get("config")
    if source:
        yield f"from {_kubernetes(source)}"


def cluster(config: Config, name: str | None) -> Iterator[str]:
    """A cluster's type and endpoints."""
    found = named(config, "clusters", name)
    if found is None:
        return
    kind = found.get("type") or found.get("cluster_type", {}).get("name", "STATIC")
    yield f"type {kind}, load balancing {found.get('lb_policy', 'ROUND_ROBIN')}"
    assigned = next((e for e in config.get("endpoints", ()) if e.get("cluster_name") == name), None)
    endpoints = [
        "{}{}".format(_address(e), "" if e.get("health_status") in (None, "HEALTHY") else f" ({e['health_status']})")
        for locality in (assigned or {}).get("endpoints", ())
        for e in locality.get("lb_endpoints", ())
    ]
    if assigned is not None:
        yield f"endpoints: {', '.join(endpoints) or 'none'}"


def destination_rule(config: Config, name: str | None) -> Iterator[str]:
    """The DestinationRule that shaped a cluster, and the settings that came of it (or are the defaults)."""
    found = named(config, "clusters", name)
    if found is None:
        return
    source = _istio(found).get("config")
    yield _kubernetes(source) if source else "no DestinationRule; the mesh's defaults:"
    yield "; ".join(_settings(found))


def _settings(found: Config) -> Iterator[str]:
    yield f"connect timeout {found.get('connect_timeout', '5s')}"
    limits = {
        key: value
        for threshold in found.get("circuit_breakers", {}).get("thresholds", ())
        for key, value in threshold.items()
        if isinstance(value, int) and value != _UNLIMITED and not isinstance(value, bool)
    }
    yield ", ".join(f"{key} {value}" for key, value in limits.items()) or _NO_BREAKER
    protocol = (
        found.get("typed_extension_protocol_options", {})
        .get("envoy.extensions.upstreams.http.v3.HttpProtocolOptions", {})
        .get("common_http_protocol_options", {})
    )
    if "max_requests_per_connection" in protocol:
        yield f"{protocol['max_requests_per_connection']} requests per connection"
    outlier = found.get("outlier_detection")
    yield f"outlier detection {_value(outlier)}" if outlier else "no outlier detection"
    sockets = {
        m.get("name"): m.get("transport_socket", {}).get("typed_config", {})
        for m in found.get("transport_socket_matches", ())
    }
    if found.get("transport_socket"):
        sockets["every endpoint"] = found["transport_socket"].get("typed_config", {})
    for who, tls in sockets.items():
        if str(tls.get("@type", "")).endswith("UpstreamTlsContext"):
            alpn = ",".join(tls.get("common_tls_context", {}).get("alpn_protocols", ())) or "none"
            yield f"TLS for {who}: SNI {tls.get('sni') or 'none'}, ALPN {alpn}"


def name_table(config: Config, name: str) -> str | None:
    """What the agent's name table has for an absolute name, or for what is left of it without a search domain (the agent
    answers such a name with a CNAME; istio/istio: pkg/dns/client/dns.go)."""
    table = {f"{key.rstrip('.')}.": info for key, info in config.get("nds", {}).get("table", {}).items()}
    absolute = f"{name.rstrip('.')}."
    key = absolute if absolute in table else max((k for k in table if absolute.startswith(k)), key=len, default="")
    if not key:
        return None
    return f"name table: {key} has {', '.join(table[key].get('ips', ()))} ({table[key].get('registry', '?')})"


def _istio(resource: Config) -> Config:
    return resource.get("metadata", {}).get("filter_metadata", {}).get("istio", {})  # type: ignore[no-any-return]


def _kubernetes(path: str) -> str:
    """``/apis/GROUP/VERSION/namespaces/NAMESPACE/KIND/NAME`` (istio's metadata) as a reader writes it."""
    words = path.strip("/").split("/")
    if len(words) < 4:
        return path
    kind = "".join(w.capitalize() for w in words[-2].split("-"))
    return f"{kind} {words[-1]}.{words[-3]}"


def _address(endpoint: Config) -> str:
    address = endpoint.get("endpoint", {}).get("address", {})
    where = address.get("socket_address")
    if where:
        host = where["address"]
        return f"[{host}]:{where['port_value']}" if ":" in host else f"{host}:{where['port_value']}"
    return str(address.get("pipe", {}).get("path", address))


def _value(value: Any) -> str:
    """A small message on one line: ``key value``, lists with commas."""
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_value(v)}" for k, v in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "/".join(_value(v) for v in value)
    return str(value)


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def _count(what: Sequence[object], word: str) -> str:
    return f"{len(what)} {word}{'s' if len(what) != 1 else ''}"

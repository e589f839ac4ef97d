"""xDS resources as plain data, found by name: our own (``lab proxy-config --json``) or any Envoy's ``config_dump``.

Names of fields are those of the protobuf messages, snake_case; the camelCase that istioctl prints is read too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from lab.errors import InputError
from lab.explain.packet import NOTHING

Json = Mapping[str, Any]

_FREE = frozenset(
    {"filter_metadata", "typed_per_filter_config", "match", "metadata_match", "labels", "node", "runtime"}
)
"""Fields whose value holds keys of somebody's own choice, which stay as they are."""


class Config(NamedTuple):
    """What one Envoy has. Each mapping is by name and keeps the order of the source."""

    listeners: Mapping[str, Json] = NOTHING
    routes: Mapping[str, Json] = NOTHING
    clusters: Mapping[str, Json] = NOTHING
    endpoints: Mapping[str, Json] = NOTHING
    source: str = ""


def from_resources(document: Json, source: str = "discovery") -> Config:
    """Of lists of bare resources under ``listeners``, ``routes``, ``clusters``, ``endpoints``."""
    return Config(
        listeners=_named(document.get("listeners", ())),
        routes=_named(document.get("routes", ())),
        clusters=_named(document.get("clusters", ())),
        endpoints=_named(document.get("endpoints", ()), "cluster_name"),
        source=source,
    )


def from_any(document: object, source: str) -> Config:
    """Of a config_dump, of ``lab proxy-config --json``, or of one section of either.

    Raises:
        InputError: the document is neither.
    """
    if isinstance(document, Mapping):
        if "configs" in document:
            return from_dump(document["configs"], source)
        if any(kind in document for kind in ("listeners", "routes", "clusters")):
            return from_resources(document, source)
        if "@type" in document:
            return from_dump([document], source)
    raise InputError(
        "not an Envoy config_dump",
        source,
        'the document has neither "configs" nor "listeners"',
        "Give what Envoy's admin port answers to /config_dump?include_eds",
    )


def from_dump(sections: Iterable[Json], source: str = "config_dump") -> Config:
    """Of the ``configs`` of a config_dump. A resource that is active wins over one that warms, static ones come last."""
    listeners: list[Json] = []
    routes: list[Json] = []
    clusters: list[Json] = []
    endpoints: list[Json] = []
    for raw in sections:
        kind = str(raw.get("@type", "")).rpartition(".")[2]
        if kind not in ("ListenersConfigDump", "ClustersConfigDump", "RoutesConfigDump", "EndpointsConfigDump"):
            continue
        section = snake(raw) if _is_camel(raw) else raw
        if kind == "ListenersConfigDump":
            for entry in section.get("dynamic_listeners", ()):
                state = entry.get("active_state") or entry.get("warming_state") or {}
                listeners += [state["listener"]] if "listener" in state else []
            listeners += [e["listener"] for e in section.get("static_listeners", ()) if "listener" in e]
        elif kind == "ClustersConfigDump":
            for group in ("dynamic_active_clusters", "dynamic_warming_clusters", "static_clusters"):
                clusters += [e["cluster"] for e in section.get(group, ()) if "cluster" in e]
        elif kind == "RoutesConfigDump":
            for group in ("dynamic_route_configs", "static_route_configs"):
                routes += [e["route_config"] for e in section.get(group, ()) if "route_config" in e]
        else:
            for group in ("dynamic_endpoint_configs", "static_endpoint_configs"):
                endpoints += [e["endpoint_config"] for e in section.get(group, ()) if "endpoint_config" in e]
    return Config(_named(listeners), _named(routes), _named(clusters), _named(endpoints, "cluster_name"), source)


def _named(resources: Iterable[Json], key: str = "name") -> dict[str, Json]:
    found: dict[str, Json] = {}
    for resource in resources:
        found.setdefault(str(resource.get(key, "")), resource)
    return found


def _is_camel(section: Json) -> bool:
    return any(re.search("[a-z][A-Z]", key) for key in section)


def snake(value: Any) -> Any:
    """camelCase keys as snake_case, except below fields that hold keys of somebody's own choice."""
    if isinstance(value, Mapping):
        made: dict[str, Any] = {}
        for key, inner in value.items():
            name = key if key.startswith("@") else re.sub(r"(?<=[a-z0-9])([A-Z])", lambda m: f"_{m[1].lower()}", key)
            # A route's match is a message, a transport socket's match somebody's metadata.
            free = name in _FREE and not (name == "match" and isinstance(inner, Mapping) and set(inner) & _ROUTE_MATCH)
            made[name] = inner if free else snake(inner)
        return made
    if isinstance(value, list):
        return [snake(inner) for inner in value]
    return value


_ROUTE_MATCH = frozenset(
    {"prefix", "path", "safeRegex", "pathSeparatedPrefix", "connectMatcher", "caseSensitive", "headers"}
)


def type_of(extension: Json) -> str:
    """The last part of an extension's type: ``HttpConnectionManager``. TypedStructs are named by what they stand for."""
    config = extension.get("typed_config") or {}
    url = str(
        config.get("type_url") if str(config.get("@type", "")).endswith("TypedStruct") else config.get("@type", "")
    )
    return url.rpartition(".")[2]


def config_of(extension: Json) -> Json:
    """The configuration of an extension; of a TypedStruct its value."""
    config: Json = extension.get("typed_config") or {}
    if str(config.get("@type", "")).endswith("TypedStruct"):
        return config.get("value") or {}
    return config


def seconds(duration: object) -> float:
    """A protobuf duration in JSON (``1.5s``); 0 if it is none."""
    text = str(duration or "")
    try:
        return float(text.removesuffix("s"))
    except ValueError:
        return 0.0


def socket_address(address: Json | None) -> tuple[str, int] | None:
    found = (address or {}).get("socket_address")
    if not found:
        return None
    return str(found.get("address", "")), int(found.get("port_value", 0))

"""VirtualServices: short names, delegates, exportTo, and the destinations they name.

Sources: istio/istio: pilot/pkg/model/virtualservice.go, pilot/pkg/model/push_context.go. The spec stays
plain camelCase data, with every host a full name.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.discovery import host as hosts
from lab.discovery.registry import export_set
from lab.manifests import model

MESH_GATEWAY = "mesh"


@dataclass(frozen=True, slots=True)
class VirtualService:
    """One VirtualService; ``export_to`` is None for everybody, else the namespaces that see it."""

    name: str
    namespace: str
    hosts: tuple[str, ...]
    gateways: tuple[str, ...]
    http: Sequence[Mapping[str, Any]]
    tls: Sequence[Mapping[str, Any]]
    tcp: Sequence[Mapping[str, Any]]
    export_to: frozenset[str] | None
    created: float = 0.0
    order: int = 0

    @property
    def key(self) -> tuple[str, str]:
        return (self.namespace, self.name)

    @property
    def for_mesh(self) -> bool:
        """Whether sidecars read it: its gateways are empty or hold ``mesh``."""
        return not self.gateways or MESH_GATEWAY in self.gateways


def _items(spec: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    value = spec.get(key)
    return [dict(v) for v in value if isinstance(v, Mapping)] if isinstance(value, Sequence) else []


def _strings(value: object) -> list[str]:
    return [str(v) for v in value] if isinstance(value, list | tuple) else []


def _resolve_destination(holder: dict[str, Any], namespace: str, suffix: str) -> None:
    destination = holder.get("destination")
    if isinstance(destination, Mapping):
        holder["destination"] = {
            **destination,
            "host": hosts.resolve_short(str(destination.get("host", "")), namespace, suffix),
        }


def parse(raw: model.RawConfig, default_export: Sequence[str], suffix: str) -> VirtualService:
    """A VirtualService from checked plain data; names without a dot become Services of its own namespace."""
    namespace = raw.meta.namespace
    spec = copy.deepcopy(dict(raw.spec))
    http, tls, tcp = _items(spec, "http"), _items(spec, "tls"), _items(spec, "tcp")
    for route in (*http, *tls, *tcp):
        route["route"] = _items(route, "route")
        for one in route["route"]:
            _resolve_destination(one, namespace, suffix)
    for route in http:
        if isinstance(route.get("mirror"), Mapping):
            mirror = dict(route["mirror"])
            mirror["host"] = hosts.resolve_short(str(mirror.get("host", "")), namespace, suffix)
            route["mirror"] = mirror
        route["mirrors"] = _items(route, "mirrors")
        for one in route["mirrors"]:
            _resolve_destination(one, namespace, suffix)
    return VirtualService(
        name=raw.meta.name,
        namespace=namespace,
        hosts=tuple(hosts.resolve_short(h, namespace, suffix) for h in _strings(spec.get("hosts"))),
        gateways=tuple(_strings(spec.get("gateways"))),
        http=http,
        tls=tls,
        tcp=tcp,
        export_to=export_set(_strings(spec.get("exportTo")), default_export, namespace),
        created=raw.meta.created,
        order=raw.meta.order,
    )


def sort_key(vs: VirtualService) -> tuple[float, str, str, int]:
    """Oldest first, then by name and namespace (istio/istio: pilot/pkg/model/config.go: sortConfigByCreationTime)."""
    return (vs.created, vs.name, vs.namespace, vs.order)


# --- delegates ------------------------------------------------------------------------------


def merge_delegates(services: Sequence[VirtualService]) -> list[VirtualService]:
    """Root VirtualServices with their delegates' routes in place; delegates (no hosts) are taken out.

    A delegate must be visible to the root's namespace by exportTo, and may not delegate further.
    """
    delegates = {vs.key: vs for vs in services if not vs.hosts}
    out = []
    for vs in services:
        if not vs.hosts:
            continue
        if not any("delegate" in r for r in vs.http):
            out.append(vs)
            continue
        merged: list[Mapping[str, Any]] = []
        for route in vs.http:
            delegate = route.get("delegate")
            if not isinstance(delegate, Mapping):
                merged.append(route)
                continue
            key = (str(delegate.get("namespace") or vs.namespace), str(delegate.get("name", "")))
            target = delegates.get(key)
            if target is None or (target.export_to is not None and vs.namespace not in target.export_to):
                continue
            root = {k: v for k, v in route.items() if k != "delegate"}
            merged.extend(m for child in target.http if (m := _merge_route(root, child)) is not None)
        out.append(
            VirtualService(
                vs.name, vs.namespace, vs.hosts, vs.gateways, merged, vs.tls, vs.tcp, vs.export_to, vs.created, vs.order
            )
        )
    return out


_INHERITED = (
    "rewrite",
    "directResponse",
    "timeout",
    "retries",
    "fault",
    "mirror",
    "mirrorPercent",
    "mirrorPercentage",
    "corsPolicy",
    "mirrors",
    "headers",
)


def _merge_route(root: Mapping[str, Any], child: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """A delegate's route under its root: both matches must hold; None if they exclude each other."""
    roots, children = _items(root, "match"), _items(child, "match")
    if not roots or not children:
        matches = children or roots
    else:
        matches = []
        for leaf in children:
            fitting = [_merge_match(r, leaf) for r in roots if not _conflict(r, leaf)]
            if not fitting:
                return None
            matches.extend(fitting)
    merged = {**child, "match": matches}
    names = [str(n) for n in (root.get("name"), child.get("name")) if n]
    if names:
        merged["name"] = "-".join(names)
    for key in _INHERITED:
        if not merged.get(key) and root.get(key):
            merged[key] = root[key]
    return merged


_MAPS = ("headers", "withoutHeaders", "queryParams", "sourceLabels")


def _merge_match(root: Mapping[str, Any], leaf: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**root, **{k: v for k, v in leaf.items() if v}}
    names = [str(n) for n in (root.get("name"), leaf.get("name")) if n]
    if names:
        merged["name"] = "-".join(names)
    for key in _MAPS:
        both = {**(root.get(key) or {}), **(leaf.get(key) or {})}
        if both:
            merged[key] = both
    return merged


def _conflict(root: Mapping[str, Any], leaf: Mapping[str, Any]) -> bool:
    for key in ("uri", "scheme", "method", "authority"):
        if _string_conflict(root.get(key), leaf.get(key)):
            return True
    for key in ("headers", "withoutHeaders", "queryParams"):
        held = root.get(key) or {}
        if any(_string_conflict(held.get(name), value) for name, value in (leaf.get(key) or {}).items()):
            return True
    if bool(root.get("ignoreUriCase")) != bool(leaf.get("ignoreUriCase")):
        return True
    if root.get("port") and leaf.get("port") and root["port"] != leaf["port"]:
        return True
    if root.get("sourceNamespace") and leaf.get("sourceNamespace") != root["sourceNamespace"]:
        return True
    labels = root.get("sourceLabels") or {}
    if any(k in labels and labels[k] != v for k, v in (leaf.get("sourceLabels") or {}).items()):
        return True
    over, under = root.get("gateways") or [], leaf.get("gateways") or []
    return bool(over and under and not set(under) <= set(over))


def _string_conflict(root: Any, leaf: Any) -> bool:
    """Whether a delegate's string match is no part of its root's."""
    if not root or not leaf:
        return False
    if root.get("regex") or leaf.get("regex"):
        return True
    if root.get("exact"):
        return bool(leaf.get("exact") != root["exact"])
    if root.get("prefix"):
        value = str(leaf.get("prefix") or leaf.get("exact") or "")
        return not value or not value.startswith(root["prefix"])
    return True


# --- what a VirtualService sends traffic to ---------------------------------------------------


def destinations(vs: VirtualService, source_namespace: str) -> dict[str, set[int]]:
    """Hosts that its routes name, with the ports they name (0: all), for clients of one namespace.

    Routes of which every match asks for another sourceNamespace are left out
    (istio/istio: pilot/pkg/model/push_context.go: virtualServiceDestinationsFilteredBySourceNamespace).
    """
    out: dict[str, set[int]] = {}

    def add(destination: Any) -> None:
        if isinstance(destination, Mapping) and destination.get("host"):
            port = destination.get("port")
            number = int(port.get("number") or 0) if isinstance(port, Mapping) else 0
            out.setdefault(str(destination["host"]), set()).add(number)

    def applies(matches: Any) -> bool:
        return not matches or any(m.get("sourceNamespace") in (None, "", source_namespace) for m in matches)

    for route in (*vs.http, *vs.tls, *vs.tcp):
        if not applies(route.get("match")):
            continue
        for one in route.get("route") or ():
            add(one.get("destination"))
        add(route.get("mirror"))
        for one in route.get("mirrors") or ():
            add(one.get("destination"))
    return out


def for_host(services: Iterable[VirtualService], host: str) -> list[VirtualService]:
    """VirtualServices one of whose hosts covers (or is covered by) ``host``, in their order."""
    return [vs for vs in services if any(hosts.matches(h, host) for h in vs.hosts)]

"""Everything that discovery would send to one proxy, as a pure function of the mesh and its node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf import json_format

from lab.discovery import clusters, endpoints, inbound_listeners, listeners, name_table, routes
from lab.discovery.node import Node, node_for_pod
from lab.discovery.proxy import Proxy, proxy_for
from lab.discovery.push_context import PushContext
from lab.manifests import model


@dataclass(frozen=True, slots=True)
class Resources:
    """xDS resources of one proxy by name, in Istio's order. ``endpoints`` are the CLAs its EDS clusters ask for."""

    listeners: Mapping[str, Any]
    routes: Mapping[str, Any]
    clusters: Mapping[str, Any]
    endpoints: Mapping[str, Any]
    name_table: Any


def listener_set(proxy: Proxy) -> dict[str, Any]:
    """Outbound listeners with virtualOutbound, then the inbound ones; the first of a name stays."""
    out: dict[str, Any] = {}
    for listener in (*listeners.outbound_listeners(proxy), *inbound_listeners.inbound_listeners(proxy)):
        out.setdefault(listener.name, listener)
    return out


def cluster_set(proxy: Proxy) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for cluster in (*clusters.outbound_clusters(proxy), *clusters.inbound_clusters(proxy)):
        out.setdefault(cluster.name, cluster)
    return out


def generate(mesh: model.Mesh | PushContext, node: Node) -> Resources:
    """All resources for ``node``. Pass a PushContext to share work between proxies of one mesh."""
    push = mesh if isinstance(mesh, PushContext) else PushContext(mesh)
    proxy = proxy_for(push, node)
    lds, cds = listener_set(proxy), cluster_set(proxy)
    eds = [c.eds_cluster_config.service_name for c in cds.values() if c.HasField("eds_cluster_config")]
    return Resources(
        listeners=lds,
        routes={name: routes.route_configuration(proxy, name) for name in routes.route_names(lds.values())},
        clusters=cds,
        endpoints={name: endpoints.load_assignment(proxy, name) for name in eds},
        name_table=name_table.name_table(proxy),
    )


def plain(message: Any) -> dict[str, Any]:
    """One message as protobuf JSON with snake_case field names."""
    found: dict[str, Any] = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return found


def to_json(resources: Resources) -> dict[str, Any]:
    """The resources as protobuf JSON with snake_case field names: lists per kind, and ``nds`` as one object."""

    out: dict[str, Any] = {
        kind: [plain(message) for message in getattr(resources, kind).values()]
        for kind in ("listeners", "routes", "clusters", "endpoints")
    }
    out["nds"] = plain(resources.name_table)
    return out


__all__ = [
    "Node",
    "PushContext",
    "Resources",
    "cluster_set",
    "generate",
    "listener_set",
    "node_for_pod",
    "plain",
    "to_json",
]

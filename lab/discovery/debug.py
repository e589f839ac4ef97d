"""What ``/debug/*`` shows, as plain data (istio/istio: pilot/pkg/xds/debug.go)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from google.protobuf import json_format

from lab.discovery.registry import Endpoint, Service
from lab.discovery.resources import CDS, ECDS, EDS, LDS, RDS

if TYPE_CHECKING:
    from lab.discovery.ads import Connection, DiscoveryServer

_ISTIO_NAMES = {
    CDS: "cluster",
    LDS: "listener",
    RDS: "route",
    EDS: "endpoint",
    ECDS: "extensionconfig",
}


def plain(value: Any) -> Any:
    """A model object as JSON data; sets sorted, tuples as lists."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value) if f.name not in ("source", "order")}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, frozenset | set):
        return sorted(plain(v) for v in value)
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def syncz(server: DiscoveryServer, namespace: str = "") -> list[dict[str, Any]]:
    """Per proxy (of one namespace, or all) the nonces sent and acknowledged, and the text of what it refused."""
    out = []
    for connection in server.connections:
        node = connection.node
        if node is None or namespace not in ("", node.namespace):
            continue
        entry: dict[str, Any] = {
            "cluster_id": node.cluster_id,
            "proxy": node.name,
            "proxy_type": node.type,
            "istio_version": node.text("ISTIO_VERSION"),
            "resources": {},
        }
        for watch in connection.stream.watches.values():
            name = _ISTIO_NAMES.get(watch.type_url)
            if name:
                entry[f"{name}_sent"], entry[f"{name}_acked"] = watch.nonce_sent, watch.nonce_acked
            resource = {"sent": watch.nonce_sent, "acked": watch.nonce_acked, "sentTime": _time(watch.sent_at)}
            if watch.error:
                resource["lastError"] = watch.error
            entry["resources"][watch.type_url] = resource
        out.append(entry)
    return out


def _service(service: Service) -> dict[str, Any]:
    return {
        "hostname": service.host,
        "defaultAddress": service.addresses[0] if service.addresses else "0.0.0.0",
        "ports": [{"name": p.name, "port": p.port, "protocol": p.protocol} for p in service.ports],
        "Resolution": service.resolution,
        "MeshExternal": service.mesh_external,
        "creationTime": service.created,
        "Attributes": {
            "ServiceRegistry": service.registry,
            "Name": service.name,
            "Namespace": service.namespace,
            "ExportTo": ["*"] if service.export_to is None else sorted(service.export_to) or ["~"],
        },
    }


def _registryz(server: DiscoveryServer) -> list[dict[str, Any]]:
    return [_service(service) for service in server.push_context.registry.services]


def _mesh(server: DiscoveryServer) -> Any:
    return plain(server.push_context.mesh_config)


def _push_status(server: DiscoveryServer) -> dict[str, Any]:
    return {"ProxyStatus": server.push_context.status, "last": server.last_push}


def _endpoint(endpoint: Endpoint) -> dict[str, Any]:
    return {
        "Addresses": list(endpoint.addresses),
        "EndpointPort": endpoint.port,
        "ServicePortName": endpoint.port_name,
        "Labels": dict(endpoint.labels),
        "Locality": endpoint.locality,
        "ServiceAccount": endpoint.identity,
        "TLSMode": endpoint.tls_mode,
        "HealthStatus": endpoint.health,
        "WorkloadName": endpoint.workload,
        "Namespace": endpoint.namespace,
    }


def endpointz(server: DiscoveryServer) -> list[dict[str, Any]]:
    registry = server.push_context.registry
    return [
        {"svc": f"{service.host}:{port.name}", "ep": [_endpoint(e) for e in registry.port_endpoints(service, port)]}
        for service in registry.services
        for port in service.ports
    ]


def configz(server: DiscoveryServer) -> list[dict[str, Any]]:
    """Every Istio object that was read, as the model has it."""
    mesh = server.push_context.mesh
    reads = server.push_context.registry.reads
    kinds = (
        ("ServiceEntry", mesh.service_entries),
        ("WorkloadEntry", mesh.workload_entries),
        ("Sidecar", mesh.sidecars),
        ("DestinationRule", mesh.destination_rules),
        ("VirtualService", mesh.virtual_services),
        ("PeerAuthentication", mesh.peer_authentications),
    )
    out = []
    for kind, items in kinds:
        for item in items:
            if not reads(item.meta.namespace):
                continue
            data = plain(item)
            metadata = data.pop("meta")
            out.append({"kind": kind, "metadata": metadata, "spec": data.get("spec", data)})
    return out


def connection_of(server: DiscoveryServer, proxy_id: str, namespace: str = "") -> Connection:
    """The stream of a proxy (POD.NAMESPACE, or a node id), of one namespace only if that is given. Raises LookupError."""
    for connection in server.connections:
        node = connection.node
        if node is not None and proxy_id in (node.name, node.id) and namespace in ("", node.namespace):
            return connection
    raise LookupError(f"Proxy not connected to this Pilot instance: {proxy_id!r}. Give ?proxyID=POD.NAMESPACE")


def _dump(connection: Connection, query: Mapping[str, str]) -> dict[str, Any]:
    """The config dump that a query asks for: of some ``types``, or whole, with endpoints if it has ``include_eds``."""
    from lab.discovery import config_dump

    types = [t for t in query.get("types", "").split(",") if t]
    if types:
        message = config_dump.of_types(connection, types)
    else:
        message = config_dump.whole(connection, include_eds="include_eds" in query)
    return json_format.MessageToDict(message)


def _sidecarz(server: DiscoveryServer, connection: Connection) -> dict[str, Any]:
    node = connection.node
    assert node is not None
    scope = server.push_context.scope_for(node)
    return {
        "name": scope.name,
        "namespace": scope.namespace,
        "outboundTrafficPolicy": plain(scope.outbound_traffic_policy),
        "services": [s.host for s in scope.services],
        "egressListenerServices": [[s.host for s in e.services] for e in scope.egress],
        "destinationRules": {host: [r.name for r in rules] for host, rules in scope.rules.items()},
    }


def adsz(server: DiscoveryServer) -> dict[str, Any]:
    clients = [
        {
            "connectionId": id(c),
            "address": c.peer,
            "connectedAt": c.since,
            "identities": list(c.identities),
            "watches": {w.type_url: sorted(w.names) for w in c.stream.watches.values()},
            "metadata": dict(c.node.metadata) if c.node else {},
        }
        for c in server.connections
    ]
    return {"totalClients": len(clients), "clients": clients}


_TYPED = {"edsz": "eds", "ecdsz": "ecds", "ndsz": "nds", "clusterz": "cds"}
"""Pages that are the config dump of one type."""

_Query = Mapping[str, str]
_PAGES: Mapping[str, Callable[[DiscoveryServer, _Query], Any]] = {
    "syncz": lambda server, query: syncz(server, query.get("namespace", "")),
    "registryz": lambda server, _: _registryz(server),
    "endpointz": lambda server, _: endpointz(server),
    "endpointShardz": lambda server, _: endpointz(server),
    "configz": lambda server, _: configz(server),
    "adsz": lambda server, _: adsz(server),
    "connections": lambda server, _: adsz(server),
    "mesh": lambda server, _: _mesh(server),
    "push_status": lambda server, _: _push_status(server),
    "list": lambda *_: listed(),
}
_OF_ONE: Mapping[str, Callable[[DiscoveryServer, Connection, _Query], Any]] = {
    "sidecarz": lambda server, connection, _: _sidecarz(server, connection),
    "config_dump": lambda _, connection, query: _dump(connection, query),
    **dict.fromkeys(_TYPED, lambda _, connection, query: _dump(connection, query)),
}


def listed() -> list[str]:
    """The path of every page but this one."""
    return [f"/debug/{page}" for page in sorted((*_PAGES, *_OF_ONE)) if page != "list"]


def known(name: str) -> None:
    """Raises LookupError if there is no page ``/debug/NAME``."""
    if name not in _PAGES and name not in _OF_ONE:
        raise LookupError(f"no such page: /debug/{name}. See /debug/list")


def answer(server: DiscoveryServer, name: str, query: Mapping[str, str], namespace: str = "") -> Any:
    """The data of ``/debug/NAME?QUERY``, about proxies of one namespace only if that is given.

    Raises:
        ValueError: the page is about one proxy, and none is given.
        LookupError: there is no such page or proxy.
    """
    known(name)
    if name in _PAGES:
        return _PAGES[name](server, query)
    proxy_id = query.get("proxyID", "")
    if not proxy_id:
        raise ValueError("You must provide a proxyID in the query string")
    types = {"types": _TYPED[name]} if name in _TYPED else query
    return _OF_ONE[name](server, connection_of(server, proxy_id, namespace), types)

"""What ``/debug/*`` shows, as plain data (istio/istio: pilot/pkg/xds/debug.go)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from lab.discovery import snapshot
from lab.discovery.ads import Connection, DiscoveryServer
from lab.discovery.registry import Endpoint, Service
from lab.discovery.resources import CDS, ECDS, EDS, LDS, RDS

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


def syncz(server: DiscoveryServer) -> list[dict[str, Any]]:
    """Per proxy the nonces sent and acknowledged, and the text of what it refused."""
    out = []
    for connection in server.connections:
        node = connection.node
        if node is None:
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
            resource = {"sent": watch.nonce_sent, "acked": watch.nonce_acked}
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


def _connection(server: DiscoveryServer, proxy_id: str) -> Connection:
    for connection in server.connections:
        if connection.node is not None and proxy_id in (connection.node.name, connection.node.id):
            return connection
    raise LookupError(f"Proxy not connected to this Pilot instance: {proxy_id!r}. Give ?proxyID=POD.NAMESPACE")


def _resources(server: DiscoveryServer, proxy_id: str) -> dict[str, Any]:
    node = _connection(server, proxy_id).node
    assert node is not None
    return snapshot.to_json(snapshot.generate(server.push_context, node))


def sidecarz(server: DiscoveryServer, proxy_id: str) -> dict[str, Any]:
    node = _connection(server, proxy_id).node
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


def answer(server: DiscoveryServer, name: str, proxy_id: str) -> Any:
    """The data of ``/debug/NAME``. Raises LookupError for an unknown page or proxy."""
    pages: dict[str, Any] = {
        "syncz": lambda: syncz(server),
        "registryz": lambda: [_service(s) for s in server.push_context.registry.services],
        "endpointz": lambda: endpointz(server),
        "configz": lambda: configz(server),
        "adsz": lambda: adsz(server),
        "connections": lambda: adsz(server),
        "mesh": lambda: plain(server.push_context.mesh_config),
        "push_status": lambda: {"ProxyStatus": server.push_context.status, "last": server.last_push},
        "sidecarz": lambda: sidecarz(server, proxy_id),
        "config_dump": lambda: _resources(server, proxy_id),
        "edsz": lambda: _resources(server, proxy_id)["endpoints"],
        "clusterz": lambda: _resources(server, proxy_id)["clusters"],
        "ndsz": lambda: _resources(server, proxy_id)["nds"],
    }
    if name == "list":
        return [f"/debug/{page}" for page in sorted(pages)]
    if name not in pages:
        raise LookupError(f"no such page: /debug/{name}. See /debug/list")
    return pages[name]()

"""Short forms for meshes in tests: Kubernetes and Istio objects as YAML text, and looks at what comes out."""

from __future__ import annotations

from typing import Any

from envoy.extensions.filters.network.http_connection_manager.v3 import http_connection_manager_pb2 as hcm_pb2
from envoy.extensions.filters.network.tcp_proxy.v3 import tcp_proxy_pb2
from google.protobuf import json_format

from lab.discovery import snapshot
from lab.manifests import load, model

S = ".svc.cluster.local"


def namespace(name: str, labels: str = "istio-injection: enabled") -> str:
    return f"apiVersion: v1\nkind: Namespace\nmetadata: {{name: {name}, labels: {{{labels}}}}}\n---\n"


def pod(
    name: str, ns: str, ip: str = "", *, labels: str = "", spec: str = "", ips: str = "", annotations: str = ""
) -> str:
    own = f"app: {name}" + (f", {labels}" if labels else "")
    status = f"status: {{podIPs: {ips}}}\n" if ips else (f"status: {{podIP: {ip}}}\n" if ip else "")
    notes = f", annotations: {{{annotations}}}" if annotations else ""
    return (
        f"apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: {ns}, labels: {{{own}}}{notes}}}\n"
        f"spec: {{serviceAccountName: {name}, containers: [{{name: app, ports: [{{containerPort: 8080, name: main}}]}}]{spec}}}\n"
        f"{status}---\n"
    )


def service(name: str, ns: str, ports: str, *, vip: str = "", app: str = "", more: str = "", created: str = "") -> str:
    cluster_ip = f", clusterIP: {vip}" if vip else ""
    time = f", creationTimestamp: '{created}'" if created else ""
    return (
        f"apiVersion: v1\nkind: Service\nmetadata: {{name: {name}, namespace: {ns}{time}}}\n"
        f"spec: {{selector: {{app: {app or name}}}, ports: {ports}{cluster_ip}{more}}}\n---\n"
    )


def istio(kind: str, name: str, ns: str, spec: str, *, group: str = "networking.istio.io/v1", created: str = "") -> str:
    time = f", creationTimestamp: '{created}'" if created else ""
    body = "\n".join("  " + line for line in spec.strip("\n").splitlines())
    return f"apiVersion: {group}\nkind: {kind}\nmetadata: {{name: {name}, namespace: {ns}{time}}}\nspec:\n{body}\n---\n"


def peer_authentication(name: str, ns: str, spec: str, created: str = "") -> str:
    return istio("PeerAuthentication", name, ns, spec, group="security.istio.io/v1", created=created)


def mesh_config(text: str) -> str:
    lines = "\n".join("    " + line for line in text.splitlines())
    return f"apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: istio, namespace: istio-system}}\ndata:\n  mesh: |\n{lines}\n---\n"


DNS_CAPTURE = mesh_config("defaultConfig: {proxyMetadata: {ISTIO_META_DNS_CAPTURE: 'true'}}")
CLIENT = namespace("a") + pod("client", "a", "10.1.0.1")
SERVER = namespace("b") + pod("server", "b", "10.2.0.1", labels="version: v1")


def build(*parts: str) -> model.Mesh:
    return load.load_text("".join(parts), "mesh.yaml")


def of(*parts: str, pod_name: str = "client.a") -> snapshot.Resources:
    mesh = build(*parts)
    found = mesh.pod(pod_name)
    assert found is not None
    return snapshot.generate(mesh, snapshot.node_for_pod(mesh, found))


def plain(message: Any) -> Any:
    return json_format.MessageToDict(message, preserving_proto_field_name=True)


def hcm(chain: Any) -> Any:
    return hcm_pb2.HttpConnectionManager.FromString(chain.filters[-1].typed_config.value)


def tcp(chain: Any) -> Any:
    return tcp_proxy_pb2.TcpProxy.FromString(chain.filters[-1].typed_config.value)


def target(chain: Any) -> str:
    """``rds NAME``, ``tcp CLUSTER`` or ``tcp A:1 B:2`` (weighted)."""
    if chain.filters[-1].name.endswith("http_connection_manager"):
        manager = hcm(chain)
        return (
            f"rds {manager.rds.route_config_name}"
            if manager.rds.route_config_name
            else f"http {manager.route_config.name}"
        )
    proxy = tcp(chain)
    if proxy.WhichOneof("cluster_specifier") == "weighted_clusters":
        return "tcp " + " ".join(f"{c.name}:{c.weight}" for c in proxy.weighted_clusters.clusters)
    return f"tcp {proxy.cluster}"


def chains(listener: Any) -> list[tuple[dict[str, Any], str]]:
    """(match, target) of every chain, and the default one last under match ``{"default": name}``."""
    out = [(plain(c.filter_chain_match), target(c)) for c in listener.filter_chains]
    if listener.HasField("default_filter_chain"):
        default = listener.default_filter_chain
        out.append(({"default": default.name}, target(default)))
    return out


def inspectors(listener: Any) -> list[str]:
    return [f.name.rpartition(".")[2] for f in listener.listener_filters]


def outbound(resources: snapshot.Resources) -> set[str]:
    """``port host`` of every outbound cluster without subset."""
    found = (n.split("|") for n in resources.clusters if n.startswith("outbound|"))
    return {f"{port} {host}" for _, port, subset, host in found if not subset}


def out(port: int, host: str, subset: str = "") -> str:
    return f"outbound|{port}|{subset}|{host}"


def hosts_of(resources: snapshot.Resources, route: str) -> dict[str, list[str]]:
    return {v.name: list(v.domains) for v in resources.routes[route].virtual_hosts}

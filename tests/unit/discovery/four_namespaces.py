"""The worked example of four namespaces, as manifests: one service and one pod each, all injected, mesh defaults."""

from __future__ import annotations

from typing import Any

from lab.discovery import snapshot
from lab.manifests import load, model

S = ".svc.cluster.local"
CATALOG, FRONTEND, PAYMENTS = f"catalog.catalog{S}", f"frontend.frontend{S}", f"payments.payments{S}"
TRACING = f"tracing.observability{S}"

_SERVICES = (
    ("frontend", "frontend", "10.96.0.10", "10.0.1.5", 8080, "http"),
    ("catalog", "catalog", "10.96.0.20", "10.0.2.5", 8080, "http"),
    ("payments", "payments", "10.96.0.30", "10.0.3.5", 8080, "http"),
    ("observability", "tracing", "10.96.0.40", "10.0.4.5", 4317, "grpc"),
)

SIDECAR = """
apiVersion: networking.istio.io/v1
kind: Sidecar
metadata: {{name: default, namespace: {namespace}}}
spec: {{egress: [{{hosts: {hosts}}}]}}
---
"""


def manifests(*, pods: dict[str, str] | None = None, services: dict[str, str] | None = None) -> str:
    """The base as YAML; ``pods`` and ``services`` add spec lines (or ``metadata:`` lines after ``meta:``) per name."""
    out = []
    for namespace, name, vip, ip, port, port_name in _SERVICES:
        notes = (services or {}).get(name, "")
        status = (pods or {}).get(name, "")
        out.append(
            f"""
apiVersion: v1
kind: Namespace
metadata: {{name: {namespace}, labels: {{istio-injection: enabled, team: {name}}}}}
---
apiVersion: v1
kind: Pod
metadata:
  name: {name}-0
  namespace: {namespace}
  labels: {{app: {name}, istio-locality: r1.z1}}
  ownerReferences: [{{apiVersion: apps/v1, kind: StatefulSet, name: {name}, controller: true}}]
spec:
  serviceAccountName: {name}
  containers: [{{name: app, ports: [{{containerPort: {port}}}]}}]
status: {{podIP: {ip}{status}}}
---
apiVersion: v1
kind: Service
metadata: {{name: {name}, namespace: {namespace}{notes}}}
spec:
  clusterIP: {vip}
  selector: {{app: {name}}}
  ports: [{{name: {port_name}, port: {port}}}]
---
"""
        )
    return "".join(out)


def mesh_config(text: str) -> str:
    lines = "\n".join("    " + line for line in text.splitlines())
    return (
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: istio, namespace: istio-system}\n"
        f"data:\n  mesh: |\n{lines}\n---\n"
    )


REGISTRY_ONLY = mesh_config("outboundTrafficPolicy: {mode: REGISTRY_ONLY}")


def sidecar(hosts: str, namespace: str = "frontend") -> str:
    return SIDECAR.format(hosts=hosts, namespace=namespace)


def build(*extra: str, **changes: Any) -> model.Mesh:
    return load.load_text(manifests(**changes) + "".join(extra), "four.yaml")


def of(mesh: model.Mesh, pod: str = "frontend-0.frontend") -> snapshot.Resources:
    found = mesh.pod(pod)
    assert found is not None
    return snapshot.generate(mesh, snapshot.node_for_pod(mesh, found))


def virtual_hosts(resources: snapshot.Resources, route: str) -> list[str]:
    return [v.name for v in resources.routes[route].virtual_hosts]

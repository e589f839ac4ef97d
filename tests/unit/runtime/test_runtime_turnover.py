"""Which places a changed mesh lets live."""

from __future__ import annotations

import pytest

from lab.manifests.load import load_text, load_texts
from lab.runtime import turnover

MESH = """
apiVersion: v1
kind: ConfigMap
metadata: {name: istio, namespace: istio-system}
data:
  mesh: |
    outboundTrafficPolicy: {mode: ALLOW_ANY}
    defaultConfig: {concurrency: 2}
---
apiVersion: v1
kind: Namespace
metadata: {name: shop, labels: {istio-injection: enabled}}
---
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: shop, labels: {app: web}, annotations: {note: a}}
spec: {containers: [{name: app, ports: [{name: http, containerPort: 8080}]}]}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {selector: {app: web}, ports: [{name: http, port: 8080}]}
---
apiVersion: sidecarlab.dev/v1alpha1
kind: ExternalHost
metadata: {name: vendor}
spec: {hosts: [api.vendor.example], addresses: [203.0.113.10], ports: [{port: 80, protocol: http}]}
"""


def after(old: str, new: str) -> turnover.Turnover:
    before = load_text(MESH)
    assert old in MESH
    return turnover.between(before, load_texts([("-", MESH.replace(old, new))], before.name, before))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ALLOW_ANY", "REGISTRY_ONLY"),
        ("labels: {app: web}", "labels: {app: web, version: v2}"),
        ("labels: {app: web}", "labels: {app: other}"),
        ("annotations: {note: a}", "annotations: {note: b}"),
        (
            "metadata: {name: web, namespace: shop}\nspec: {selector",
            "metadata: {name: w2, namespace: shop}\nspec: {selector",
        ),
        ("port: 8080", "port: 9090, targetPort: 8080"),
    ],
)
def test_what_matters_to_discovery_alone_leaves_every_place(old: str, new: str) -> None:
    assert not after(old, new)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("containerPort: 8080", "containerPort: 8081"),
        ("annotations: {note: a}", 'annotations: {traffic.sidecar.istio.io/excludeOutboundPorts: "9000"}'),
        ("annotations: {note: a}", 'annotations: {sidecar.istio.io/inject: "false"}'),
        ("concurrency: 2", "concurrency: 1"),
        ("istio-injection: enabled", "istio-injection: disabled"),
        ("{containers:", "{serviceAccountName: other, containers:"),
    ],
)
def test_a_pod_whose_processes_would_be_others_is_replaced(old: str, new: str) -> None:
    found = after(old, new)
    assert (found.replaced, found.added, found.removed) == (("web.shop",), (), ())


def test_an_app_whose_service_says_another_protocol_is_started_again() -> None:
    found = after("ports: [{name: http, port", "ports: [{name: tcp, port")
    assert (found.replaced, list(found.restarted)) == ((), ["web.shop"])
    (spec,) = found.restarted["web.shop"]
    assert spec.name == "app"


def test_places_come_and_go() -> None:
    found = after("metadata: {name: vendor}", "metadata: {name: seller}")
    assert (found.added, found.removed, found.replaced) == (("ext-seller",), ("ext-vendor",), ())
    assert after("port: 80, protocol: http", "port: 80, protocol: tcp").replaced == ("ext-vendor",)

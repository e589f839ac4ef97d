"""Doubts that need more than one object to see; each named, at its line."""

from __future__ import annotations

import pytest

from lab.manifests import load

BASE = """\
apiVersion: v1
kind: Namespace
metadata: {name: shop, labels: {istio-injection: enabled}}
---
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: shop, labels: {app: web}}
spec: {containers: [{name: app, ports: [{name: http, containerPort: 8080}]}]}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {selector: {app: web}, ports: [{name: http, port: 80, targetPort: 8080}]}
---
"""


def kind(api: str, name: str, spec: str, namespace: str = "shop", meta: str = "") -> str:
    return f"apiVersion: {api}\nkind: {name}\nmetadata: {{name: x, namespace: {namespace}{meta}}}\nspec:\n{spec}"


SERVICE, POD = ("v1", "Service"), ("v1", "Pod")
SIDECAR, RULE = ("networking.istio.io/v1", "Sidecar"), ("networking.istio.io/v1", "DestinationRule")
ROUTE, ENTRY = ("networking.istio.io/v1", "VirtualService"), ("networking.istio.io/v1", "ServiceEntry")
POLICY = ("security.istio.io/v1", "PeerAuthentication")


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (
            kind(*SERVICE, "  ports: [{port: 80}]\n  selector: {app: wbe}\n"),
            20,
            "Service shop/x: it selects no pod, so it has no endpoints",
        ),
        (
            kind(*SERVICE, "  ports: [{port: 80}]\n"),
            18,
            "Service shop/x: it has no selector and no endpoints are written for it",
        ),
        (
            kind(*SERVICE, "  selector: {app: web}\n  ports: [{port: 80, targetPort: htpp}]\n"),
            20,
            'Service shop/x: no container of pod web.shop has a port named "htpp". Did you mean "http"?',
        ),
        (
            kind(*SERVICE, "  selector: {app: web}\n  ports:\n  - port: 80\n"),
            21,
            "Service shop/x: no container of pod web.shop declares port 80, so its echo app does not listen there",
        ),
        (
            kind(*POD, "  containers: [{name: app, ports: [{containerPort: 15021}]}]\n"),
            18,
            "Pod shop/x: port 15021 of container app is one of the proxy's own",
        ),
        (
            kind(
                *POD,
                "  containers: [{name: app}]\n",
                "default",
                ", annotations: {sidecar.istio.io/inject: 'true'}",
            ),
            17,
            "Pod default/x: annotation sidecar.istio.io/inject has no effect here: only the label of that name"
            " reaches the injector",
        ),
        (
            kind(*POD, "  securityContext: {runAsUser: 1337}\n  containers: [{name: app}]\n"),
            20,
            "Pod shop/x: container app runs as 1337, the proxy's uid: none of its traffic is captured",
        ),
        (
            "apiVersion: v1\nkind: Namespace\nmetadata: {name: x, labels: {istio-injection: enable}}\n",
            17,
            'Namespace x: istio-injection "enable" injects nothing. Did you mean "enabled"?',
        ),
        (
            "apiVersion: v1\nkind: Namespace\nmetadata: {name: x, labels: {istio.io/rev: canary}}\n",
            17,
            'Namespace x: no control plane of revision "canary" is here, only "default": its pods get no sidecar',
        ),
        (
            kind(*SIDECAR, "  egress:\n  - hosts:\n    - ./*\n    - shop/web\n"),
            22,
            'Sidecar shop/x: "web" is a short name and matches nothing. Did you mean "shop/web.shop.svc.cluster.local"?',
        ),
        (
            kind(*SIDECAR, "  egress: [{hosts: [shpo/*]}]\n"),
            19,
            'Sidecar shop/x: there is no namespace "shpo". Did you mean "shop"?',
        ),
        (
            kind(*SIDECAR, "  egress: [{hosts: [shop/wbe.shop.svc.cluster.local]}]\n"),
            19,
            'Sidecar shop/x: no service has the host "wbe.shop.svc.cluster.local". Did you mean "web.shop.svc.cluster.local"?',
        ),
        (
            kind(*SIDECAR, "  workloadSelector: {labels: {app: wbe}}\n  egress: [{hosts: ['*/*']}]\n"),
            19,
            "Sidecar shop/x: it selects no pod",
        ),
        (
            kind(*SIDECAR, "  egress: [{hosts: ['*/*']}]\n")
            + "---\n"
            + kind(*SIDECAR, "  egress: [{hosts: ['*/*']}]\n").replace("name: x", "name: z"),
            24,
            "Sidecar shop/z: shop/x already is the namespace's Sidecar without selector; the oldest wins, nothing is merged",
        ),
        (
            kind(*RULE, "  host: wbe\n"),
            19,
            'DestinationRule shop/x: no service has the host "wbe.shop.svc.cluster.local".'
            ' Did you mean "web.shop.svc.cluster.local"?',
        ),
        (
            kind(*RULE, "  host: web\n  subsets:\n  - name: v1\n    labels: {v: '1'}\n"),
            22,
            'DestinationRule shop/x: subset "v1" selects none of the pods of web.shop.svc.cluster.local',
        ),
        (
            kind(*RULE, "  host: '*.example'\n"),
            19,
            'DestinationRule shop/x: no service has a host that ends in ".example"',
        ),
        (
            kind(
                *ROUTE,
                "  hosts: [web]\n  http:\n  - route:\n    - destination:\n        host: web\n        subset: v1\n",
            ),
            24,
            'VirtualService shop/x: no DestinationRule gives web.shop.svc.cluster.local a subset "v1": requests get 503 NC.',
        ),
        (
            kind(*ROUTE, "  hosts: [web]\n  tcp: [{route: [{destination: {host: www.example.com}}]}]\n"),
            20,
            'VirtualService shop/x: no service has the host "www.example.com".',
        ),
        (
            kind(*ENTRY, "  hosts: [a.example]\n  resolution: STATIC\n"),
            20,
            "ServiceEntry shop/x: resolution STATIC without endpoints: requests to it find no upstream",
        ),
        (
            kind(*ENTRY, "  hosts: [a.example]\n  exportTo: [shopp]\n"),
            20,
            'ServiceEntry shop/x: there is no namespace "shopp". Did you mean "shop"?',
        ),
        (
            kind(*ENTRY, "  hosts: [a.example]\n  resolution: STATIC\n  workloadSelector: {labels: {a: b}}\n"),
            21,
            "ServiceEntry shop/x: it selects no workload",
        ),
        (
            kind(*POLICY, "  selector: {matchLabels: {app: web}}\n", "istio-system"),
            19,
            "PeerAuthentication istio-system/x: with a selector in the root namespace it has no effect on other namespaces",
        ),
        (
            kind(*POLICY, "  selector: {matchLabels: {app: wbe}}\n"),
            19,
            "PeerAuthentication shop/x: it selects no pod",
        ),
        (
            "apiVersion: v1\nkind: Endpoints\nmetadata: {name: wbe, namespace: shop}\nsubsets: [{addresses: [{ip: 10.1.1.1}]}]\n",
            17,
            "Endpoints shop/wbe: there is no Service wbe in namespace shop",
        ),
    ],
)
def test_doubt(text: str, line: int, message: str) -> None:
    mesh = load.load_text(BASE + text, "f.yaml")
    told = [(str(warning.source), warning.message) for warning in mesh.warnings]
    assert (f"f.yaml:{line}", message) in told


def test_a_mesh_without_doubts_has_no_warnings() -> None:
    assert load.load_text(BASE.rstrip("-\n"), "f.yaml").warnings == ()


def test_replicas_are_told_once() -> None:
    text = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 3
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      tolerations: []
      containers: [{name: app, args: [x]}]
"""
    messages = [warning.message for warning in load.load_text(text).warnings]
    assert len(messages) == len(set(messages)) == 2

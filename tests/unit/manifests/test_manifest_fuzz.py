"""Whatever is written, the answer is a mesh or errors with a place; never a traceback."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from lab.manifests import load
from lab.manifests.document import parse, plain

SOURCE = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: shop, labels: {a: b}, annotations: {proxy.istio.io/config: "concurrency: 2"}}
spec:
  replicas: 2
  selector: {matchLabels: {app: web}, matchExpressions: [{key: app, operator: In, values: [web]}]}
  template:
    metadata: {labels: {app: web}, annotations: {traffic.sidecar.istio.io/excludeOutboundPorts: "80"}}
    spec: {containers: [{name: app, env: [{name: A, valueFrom: {fieldRef: {fieldPath: status.podIP}}}]}], dnsConfig: {searches: [a.b]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: db-1, labels: {kubernetes.io/service-name: db}}
addressType: IPv4
endpoints: [{addresses: [10.1.1.1], conditions: {ready: false}, targetRef: {kind: Pod, name: p}}]
ports: [{name: tcp, port: 5433}]
---
apiVersion: networking.istio.io/v1
kind: Sidecar
metadata: {name: s, namespace: shop}
spec:
  ingress: [{port: {number: 8080, protocol: HTTP}, defaultEndpoint: "127.0.0.1:80", connectionPool: {tcp: {maxConnections: 2}}}]
  egress: [{port: {number: 9080}, hosts: ["*/*"]}, {hosts: [./*, "~/x.example"]}]
  outboundTrafficPolicy: {mode: ALLOW_ANY, egressProxy: {host: a.b, port: {number: 80}}}
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: v}
spec:
  hosts: [web]
  http: [{match: [{uri: {prefix: /a}}], route: [{destination: {host: web, subset: v1}, weight: 1}], mirrors: [{destination: {host: web}}]}]
  tcp: [{route: [{destination: {host: web}}]}]
---
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: d}
spec: {host: web, subsets: [{name: v1, labels: {v: "1"}}], trafficPolicy: {tls: {mode: SIMPLE}, portLevelSettings: [{port: {number: 80}}]}}
---
apiVersion: sidecarlab.dev/v1alpha1
kind: Link
metadata: {name: thin}
spec: {between: [web-0.shop, "*"], mtu: 1280, rate: 1.5mbit, loss: 2.5%, cut: true}
"""
QUICKSTART = (Path(__file__).parents[3] / "topologies" / "quickstart.yaml").read_text()
DOCUMENTS: list[Any] = [plain(document) for document in parse(SOURCE + "---\n" + QUICKSTART, "-")]
JUNK: list[Any] = [
    None,
    True,
    -1,
    0,
    80,
    70000,
    1.5,
    10**30,
    "",
    "x",
    "8080",
    "a.b/c",
    "10.0.0.1",
    "é\n",
    [],
    ["x"],
    [[]],
    {},
    {"x": {}},
]


def _places(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return [(value, key) for key in value] + [place for item in value.values() for place in _places(item)]
    if isinstance(value, list):
        return [(value, i) for i in range(len(value))] + [place for item in value for place in _places(item)]
    return []


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9))
def test_any_damage_gives_errors_with_a_place(seed: int) -> None:
    chance = random.Random(seed)
    documents = json.loads(json.dumps(DOCUMENTS))
    for _ in range(chance.randint(1, 3)):
        here, key = chance.choice(_places(documents))
        damage = chance.choice(("junk", "junk", "drop", "rename", "copy"))
        if damage == "junk":
            here[key] = chance.choice(JUNK)
        elif damage == "drop":
            del here[key]
        elif damage == "rename" and isinstance(here, dict):
            here[str(key) + "x"] = here.pop(key)
        elif isinstance(here, list):
            here.append(here[key])
    text = "\n---\n".join(json.dumps(document, indent=1) for document in documents)
    problems = load.Problems()
    mesh = load._build([("f.yaml", text)], "t", problems)
    assert (mesh is None) == bool(problems.errors)
    for error in problems.errors:
        assert error.where.startswith("f.yaml:"), str(error)
        assert "\n" not in str(error)
    if mesh is not None:
        for warning in mesh.warnings:
            assert warning.source.line

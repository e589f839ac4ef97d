"""Meshes and flows about which prediction and Envoy once did not agree, each as small as it was found."""

from __future__ import annotations

import json
from dataclasses import dataclass

import mesh_made

from lab.manifests.model import FlowFrom, FlowTo, Meta, TrafficTest


@dataclass(frozen=True)
class Case:
    """``documents`` are the mesh beside the ground, as YAML."""

    name: str
    documents: str
    test: TrafficTest


def _case(name: str, source: str, to: FlowTo, documents: str = "", policy: str = "ALLOW_ANY") -> Case:
    flow = TrafficTest(Meta(name), FlowFrom(pod=source), to, {}, mesh_made.TIMEOUT)
    return Case(name, f"{json.dumps(mesh_made.config(policy))}\n---\n{documents}", flow)


def _service(ports: str, app: str = "alpha") -> str:
    return (
        "apiVersion: v1\nkind: Service\nmetadata: {name: more, namespace: one}\n"
        f"spec: {{selector: {{app: {app}}}, ports: [{ports}]}}\n"
    )


def _istio(kind: str, namespace: str, spec: str) -> str:
    group = "security" if kind == "PeerAuthentication" else "networking"
    return f"apiVersion: {group}.istio.io/v1\nkind: {kind}\nmetadata: {{name: own, namespace: {namespace}}}\nspec: {spec}\n"


_CLOSED = _service("{name: http-closed, port: 85, targetPort: 8099}")
_TO_PLAIN = "{host: plain.plain.svc.cluster.local, trafficPolicy: {tls: {mode: SIMPLE}}}"
_STRICT = _istio("PeerAuthentication", "one", "{mtls: {mode: STRICT}}")

CASES = (
    _case(
        "retries before the request at the server",
        "plain.plain",
        FlowTo("more.one", 85, "http"),
        _CLOSED,
    ),
    _case(
        "retries by gRPC code",
        "client.one",
        FlowTo("more.one", 85, "grpc"),
        _service("{name: grpc-closed, port: 85, targetPort: 8099}"),
    ),
    _case("gRPC to an HTTP server", "client.one", FlowTo("alpha.one", 8080, "grpc")),
    _case("gRPC to an HTTP server that the mesh does not know", "client.one",
          FlowTo(mesh_made.ADDRESSES["plain.plain"], 8080, "grpc")),
    _case("gRPC without a proxy to an HTTP server", "plain.plain", FlowTo("plain.plain", 8080, "grpc")),
    _case("a fault before a cluster that does not exist", "client.one", FlowTo("alpha.one", 8080, "http"),
          _istio("VirtualService", "one", "{hosts: [alpha.one.svc.cluster.local], http: [{route: [{destination:"
                 " {host: nobody.example}}], fault: {abort: {httpStatus: 400, percentage: {value: 100}}}}]}")),
    _case("gRPC over a hop of HTTP/1", "client.one", FlowTo("alpha.one.svc.cluster.local", 7070, "grpc"),
          _istio("ServiceEntry", "two", "{hosts: [made.example], ports: [{number: 443, name: tls, protocol: TLS}],"
                 " resolution: NONE}") + "---\n"
          + _istio("VirtualService", "one", "{hosts: [alpha.one.svc.cluster.local], http: [{route: [{destination:"
                   " {host: made.example, port: {number: 443}}}]}]}")),
    _case("a kept connection of which no TCP proxy has written yet", "client.one", FlowTo("alpha.one", 7070, "grpc"),
          _istio("Sidecar", "one", "{ingress: [{port: {number: 8080, protocol: HTTP, name: http},"
                 " defaultEndpoint: '127.0.0.1:8080'}]}")),
    _case("a stream that is reset behind a TCP proxy", "client.one", FlowTo("alpha.one", 7070, "http"),
          _istio("Sidecar", "one", "{ingress: [{port: {number: 8080, protocol: HTTP, name: http},"
                 " defaultEndpoint: '127.0.0.1:8080'}]}")),
    _case("gRPC to a TCP server", "plain.plain", FlowTo("plain.plain", 9000, "grpc")),
    _case("anything to a gRPC server", "plain.plain", FlowTo("plain.plain", 7070, "tcp")),
    _case("HTTP to a gRPC server", "plain.plain", FlowTo("plain.plain", 7070, "http")),
    _case("HTTP through a proxy to a gRPC server", "client.one", FlowTo("alpha.one", 7070, "http")),
    _case("HTTP that a TCP server answers", "client.one", FlowTo("more.one", 83, "http"),
          _service("{name: http-data, port: 83, targetPort: 9000}")),
    _case("TLS to a server without TLS", "client.one", FlowTo("plain.plain", 8080, "http"),
          _istio("DestinationRule", "one", _TO_PLAIN)),
    _case("TLS whose server nobody trusts", "client.one", FlowTo("plain.plain", 8443, "tls"),
          _istio("DestinationRule", "one", _TO_PLAIN)),
    _case("TLS within TLS to an HTTP server", "client.one", FlowTo("more.one", 81, "tls"),
          _service("{name: web, port: 81, targetPort: 8080}")),
    _case("a handshake that fails at a TCP proxy", "plain.plain", FlowTo("alpha.one", 8443, "tls"), _STRICT),
    _case("the end by a reset: no chain", "client.one",
          FlowTo(mesh_made.ADDRESSES["alpha.one"], 9000, "tcp"), _STRICT),
    _case("the end by a reset: no server", "client.one", FlowTo(mesh_made.ADDRESSES["alpha.one"], 5555, "tcp")),
    _case("an address that nobody has", "client.one", FlowTo("203.0.113.99", 80, "http")),
    _case(
        "a port that another proxy does not import",
        "beta.two",
        FlowTo("alpha.one", 7070, "grpc"),
        _istio("Sidecar", "one", "{egress: [{port: {number: 9000, protocol: TCP, name: tcp}, hosts: ['*/*']}]}"),
    ),
)  # fmt: skip

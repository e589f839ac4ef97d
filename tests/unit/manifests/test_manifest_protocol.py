"""Protocol selection of ports: spec discovery 1.5."""

from __future__ import annotations

import pytest

from lab.errors import InputError
from lab.manifests import protocol
from lab.manifests.load import load_text


@pytest.mark.parametrize(
    ("port", "transport", "name", "app_protocol", "chosen"),
    [
        (8080, "TCP", "http", "", "HTTP"),
        (8080, "TCP", "http-web", "", "HTTP"),
        (8080, "TCP", "HTTP2-x", "", "HTTP2"),
        (8080, "TCP", "grpc", "", "GRPC"),
        (8080, "TCP", "grpc-web", "", "GRPC-Web"),
        (8080, "TCP", "grpc-web-x", "", "GRPC-Web"),
        (8080, "TCP", "grpc-x", "", "GRPC"),
        (443, "TCP", "https", "", "HTTPS"),
        (443, "TCP", "tls-mail", "", "TLS"),
        (6379, "TCP", "redis", "", "REDIS"),
        (3306, "TCP", "mysql-a", "", "MYSQL"),
        (27017, "TCP", "mongo", "", "MONGO"),
        (8080, "TCP", "", "", "AUTO"),
        (8080, "TCP", "web", "", "AUTO"),
        (8080, "TCP", "httpweb", "", "AUTO"),
        (25, "TCP", "", "", "TCP"),
        (53, "TCP", "dns", "", "TCP"),
        (3306, "TCP", "db", "", "TCP"),
        (27017, "TCP", "db", "", "TCP"),
        (53, "UDP", "http", "http", "UDP"),
        (8080, "TCP", "tcp", "http", "HTTP"),
        (8080, "TCP", "tcp", "kubernetes.io/h2c", "HTTP2"),
        (8080, "TCP", "tcp", "kubernetes.io/ws", "HTTP"),
        (8080, "TCP", "tcp", "kubernetes.io/wss", "HTTPS"),
        (8080, "TCP", "tcp", "example.com/own", "AUTO"),
        (8080, "TCP", "http-x", "bogus", "AUTO"),
        (3306, "TCP", "http", "bogus", "TCP"),
        (8080, "TCP", "tcp-x", "http-custom", "HTTP"),
        (8080, "TCP", "x", "grpc-web-own", "GRPC-Web"),
        (8080, "TCP", "x", "Kubernetes.io/h2c", "AUTO"),
        (8080, "TCP", "http", "HTTPS", "HTTPS"),
    ],
)
def test_service_port(port: int, transport: str, name: str, app_protocol: str, chosen: str) -> None:
    assert protocol.of_service_port(port, transport, name, app_protocol) == chosen


def test_istio_port() -> None:
    assert protocol.of_istio_port("http_proxy") == "HTTP_PROXY"
    assert protocol.of_istio_port("Grpc-Web") == "GRPC-Web"
    assert protocol.of_istio_port("") == "AUTO"
    assert protocol.of_istio_port("quic") == "AUTO"


@pytest.mark.parametrize(
    ("spec", "line", "next_step"),
    [
        ("hosts: [a.example]\n  ports:\n  - {number: 80, name: p, protocol: FOO}", 7, "Use one of HTTP, HTTPS"),
        ("hosts: [a.example]\n  ports:\n  - {number: 80, name: p, protocol: HTPP}", 7, 'Did you mean "HTTP"?'),
    ],
)
def test_a_service_entry_with_an_unknown_protocol_is_refused(spec: str, line: int, next_step: str) -> None:
    text = f"apiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {{name: x}}\nspec:\n  {spec}\n"
    with pytest.raises(InputError, match="unsupported protocol") as caught:
        load_text(text, "mesh.yaml")
    assert caught.value.where == f"mesh.yaml:{line}"
    assert "ServiceEntry default/x" in str(caught.value)
    assert next_step in str(caught.value)


@pytest.mark.parametrize(
    "spec",
    [
        "  ingress:\n  - {port: {number: 80, protocol: FOO, name: p}, defaultEndpoint: 127.0.0.1:80}\n",
        "  egress:\n  - {port: {number: 80, protocol: FOO, name: p}, hosts: ['*/*']}\n",
    ],
)
def test_a_sidecar_port_with_an_unknown_protocol_is_refused(spec: str) -> None:
    with pytest.raises(InputError, match=r'unsupported protocol "FOO": mesh.yaml:6: Sidecar default/x'):
        load_text(
            f"apiVersion: networking.istio.io/v1\nkind: Sidecar\nmetadata: {{name: x}}\nspec:\n{spec}", "mesh.yaml"
        )

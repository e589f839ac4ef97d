"""Protocol selection of ports: spec discovery 1.5."""

from __future__ import annotations

import pytest

from lab.manifests import protocol


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
        (8080, "TCP", "tcp", "example.com/own", "TCP"),
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

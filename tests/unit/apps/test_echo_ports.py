"""The echo app's configuration and its plain data."""

from __future__ import annotations

import json

import pytest

from lab.apps import report
from lab.apps.ports import EchoConfig, EchoPort, from_params, parse_port
from lab.apps.report import Endpoint, endpoint, grpc_endpoint
from lab.errors import InputError


@pytest.mark.parametrize(
    ("text", "port"),
    [
        ("8080", EchoPort(8080, "http")),
        ("443:https", EchoPort(443, "https")),
        ("4317:grpc:otlp", EchoPort(4317, "grpc", "otlp")),
        ("53:udp", EchoPort(53, "udp")),
    ],
)
def test_port_from_text(text: str, port: EchoPort) -> None:
    assert parse_port(text) == port


@pytest.mark.parametrize("text", ["", "http", "70000", "-1", "80:smtp", "80.5"])
def test_bad_port_is_refused_and_named(text: str) -> None:
    with pytest.raises(InputError, match="bad echo p"):
        parse_port(text)


def test_params_have_defaults() -> None:
    config = from_params({"ports": [{"port": 8080}], "name": "catalog.catalog"})
    assert config == EchoConfig(
        ports=(EchoPort(8080, "http"),), pod="catalog.catalog", app="catalog", hosts=("catalog.catalog",)
    )


def test_addresses_are_canonical() -> None:
    assert from_params({"ports": [], "addresses": ["0:0::1", "10.0.0.1"]}).addresses == ("::1", "10.0.0.1")


@pytest.mark.parametrize(
    ("params", "what"),
    [
        ({}, "ports"),
        ({"ports": 8080}, "ports"),
        ({"ports": ["8080"]}, "no port"),
        ({"ports": [{"port": 1, "protocol": "h3"}]}, "h3"),
        ({"ports": [], "addresses": ["localhost"]}, "localhost"),
        ({"ports": [], "prots": []}, "prots"),
    ],
)
def test_bad_params_are_refused_and_named(params: dict[str, object], what: str) -> None:
    with pytest.raises(InputError, match=what):
        from_params(params)


def test_mapped_addresses_are_written_as_ipv4() -> None:
    assert endpoint(("::ffff:10.0.0.1", 80, 0, 0)) == Endpoint("10.0.0.1", 80)
    assert endpoint(("fe80::1%eth0", 80, 0, 2)) == Endpoint("fe80::1", 80)
    assert endpoint("/a/unix/path") is None


@pytest.mark.parametrize(
    ("peer", "end"),
    [
        ("ipv4:10.0.0.1:4000", Endpoint("10.0.0.1", 4000)),
        ("ipv6:%5B::1%5D:4000", Endpoint("::1", 4000)),
        ("ipv6:%5B::ffff:10.0.0.1%5D:4000", Endpoint("10.0.0.1", 4000)),
        ("unix:/a", None),
    ],
)
def test_grpc_peer(peer: str, end: Endpoint | None) -> None:
    assert grpc_endpoint(peer) == end


def test_repeated_headers_are_joined_under_one_lower_case_name() -> None:
    assert report.headers([("X-A", "1"), ("Host", "h"), ("x-a", "2")]) == {"x-a": "1, 2", "host": "h"}


def test_a_line_is_one_line() -> None:
    text = report.line({"path": "/a\nb"})
    assert text.count(b"\n") == 1
    assert json.loads(text) == {"path": "/a\nb"}

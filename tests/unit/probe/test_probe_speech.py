"""What first bytes are recognised as."""

from __future__ import annotations

import ssl

import dns.message
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.probe import speech


def client_hello(name: str | None, *alpn: str) -> bytes:
    """A real one, of OpenSSL."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if alpn:
        context.set_alpn_protocols(list(alpn))
    out = ssl.MemoryBIO()
    tls = context.wrap_bio(ssl.MemoryBIO(), out, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return out.read()


def test_a_client_hello_tells_name_and_protocols() -> None:
    name = "outbound_.8080_._.catalog.catalog.svc.cluster.local"
    found = speech.tls(client_hello(name, "istio-peer-exchange", "istio"))
    assert found == ("ClientHello", name, ("istio-peer-exchange", "istio"))
    assert found is not None
    assert found.mutual


def test_an_ordinary_client_is_not_taken_for_mutual() -> None:
    found = speech.tls(client_hello("api.vendor.example", "h2", "http/1.1"))
    assert found == ("ClientHello", "api.vendor.example", ("h2", "http/1.1"))
    assert found is not None
    assert not found.mutual
    assert speech.tls(client_hello(None)) == ("ClientHello", "", ())


@given(st.integers(6, 500))
def test_a_client_hello_that_is_cut_off_is_one_nevertheless(size: int) -> None:
    found = speech.tls(client_hello("catalog.example", "istio")[:size])
    assert found is not None
    assert found.what == "ClientHello"


def test_other_records() -> None:
    assert speech.tls(b"\x17\x03\x03\x00\x10" + bytes(16)) == ("data", "", ())
    assert speech.tls(b"\x15\x03\x03\x00\x02\x01\x00") == ("alert", "", ())
    assert speech.tls(b"\x16\x03\x03\x00\x10\x02" + bytes(16)) == ("ServerHello", "", ())
    assert speech.tls(b"GET / HTTP/1.1\r\n") is None


@pytest.mark.parametrize(
    ("payload", "line"),
    [
        (b"GET /status/503 HTTP/1.1\r\nhost: x\r\n\r\n", "GET /status/503 HTTP/1.1"),
        (b"HTTP/1.1 200 OK\r\n\r\n", "HTTP/1.1 200 OK"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0", "HTTP/2 preface"),
        (b"sidecarlab tcp probe\n", ""),
        (b"GET / HTTP/1.1", ""),
    ],
)
def test_http_lines(payload: bytes, line: str) -> None:
    assert speech.http(payload) == line


def test_dns_questions_and_answers() -> None:
    question = dns.message.make_query("catalog.catalog.svc.cluster.local.", "A")
    assert speech.dns(question.to_wire()) == "A catalog.catalog.svc.cluster.local.?"
    answer = dns.message.make_response(question)
    assert speech.dns(answer.to_wire()).endswith("= no such record")
    answer.set_rcode(3)
    assert speech.dns(answer.to_wire()).endswith("= NXDOMAIN")
    answer.set_rcode(0)
    answer.answer.append(dns.rrset.from_text(question.question[0].name, 30, "IN", "A", "10.96.20.30"))
    assert speech.dns(answer.to_wire()) == "A catalog.catalog.svc.cluster.local. = 10.96.20.30"
    assert speech.dns(b"sidecarlab") == ""


@given(st.binary(max_size=300))
def test_no_bytes_are_too_strange(data: bytes) -> None:
    speech.tls(data)
    speech.tls(b"\x16\x03\x01\x00\xff\x01" + data)
    speech.http(data)
    speech.dns(data)

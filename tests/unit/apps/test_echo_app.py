"""The echo app on real loopback sockets."""

from __future__ import annotations

import asyncio
import datetime
import http.client
import ipaddress
import json
import os
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from free_ports import free_port

from lab.apps.certificate import self_signed
from lab.apps.echo import EchoApp
from lab.apps.ports import EchoConfig, EchoPort
from lab.errors import InputError

PORTS = ("http", "https", "tls", "tcp", "udp", "grpc", "auto")
DEADLINE = 5.0


Event = dict[str, object]


class Events:
    """The event log as a pipe, so that a test can wait for a line."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._pipe = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0)  # noqa: SIM115
        self._seen: list[Event] = []
        self._new = threading.Condition()
        self._reader = threading.Thread(target=self._read)

    def start(self) -> None:
        """Call once the other end is open: an end without a writer reads as ended."""
        os.set_blocking(self._pipe.fileno(), True)
        self._reader.start()

    def _read(self) -> None:
        for text in self._pipe:
            with self._new:
                self._seen.append(json.loads(text))
                self._new.notify_all()

    def wait(self, name: str, peer: object, count: int = 1) -> list[Event]:
        """The events of that name and peer, once there are that many."""
        with self._new:
            assert self._new.wait_for(lambda: len(self.of(name, peer)) >= count, DEADLINE), self._seen
            return self.of(name, peer)

    def of(self, name: str, peer: object) -> list[Event]:
        """Those seen so far."""
        return [e for e in self._seen if e["event"] == name and e["peer"] == peer]

    def close(self) -> None:
        if self._reader.ident is not None:
            self._reader.join(DEADLINE)
        self._pipe.close()


class Running:
    """An echo app in a thread of its own: the tests are clients in plain blocking code."""

    def __init__(self, config: EchoConfig) -> None:
        self.events = Events(Path(config.log))
        self.ports: dict[str, int] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._app = EchoApp(config)
        try:
            bound = asyncio.run_coroutine_threadsafe(self._app.start(), self._loop).result(DEADLINE)
        except BaseException:
            self._end()
            raise
        self.events.start()
        self.ports = {b.port.protocol: b.where.port for b in bound}

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._app.stop(), self._loop).result(DEADLINE)
        self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE)
        self._loop.close()
        self.events.close()


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(
        EchoConfig(
            ports=tuple(EchoPort(0, p) for p in PORTS),
            pod="catalog.catalog",
            app="catalog",
            addresses=("127.0.0.1",),
            hosts=("catalog.example", "127.0.0.1"),
            log=str(tmp_path_factory.mktemp("echo") / "events.jsonl"),
        )
    )
    yield running
    running.stop()


def connect(app: Running, protocol: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", app.ports[protocol]), DEADLINE)


def ends(sock: socket.socket) -> dict[str, object]:
    peer, local = sock.getsockname(), sock.getpeername()
    return {
        "peer": {"address": peer[0], "port": peer[1]},
        "local": {"address": local[0], "port": local[1]},
    }


def get(app: Running, path: str, headers: dict[str, str] | None = None, method: str = "GET", body: bytes = b""):
    connection = http.client.HTTPConnection("127.0.0.1", app.ports["http"], timeout=DEADLINE)
    connection.request(method, path, body or None, headers or {})
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    return answer.status, data


def test_http_answers_what_it_saw(app: Running) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", app.ports["http"], timeout=DEADLINE)
    connection.request("POST", "/a?b=%20c", b"12345", {"Host": "catalog.catalog", "X-Request-ID": "r-1"})
    seen = json.loads(connection.getresponse().read())
    assert {k: seen[k] for k in ("peer", "local")} == ends(connection.sock)
    connection.close()
    assert seen["app"] == "catalog"
    assert seen["pod"] == "catalog.catalog"
    assert seen["method"] == "POST"
    assert seen["path"] == "/a?b=%20c"
    assert seen["host"] == "catalog.catalog"
    assert seen["headers"]["x-request-id"] == "r-1"
    assert seen["received"] == 5
    assert seen["tls"] is None
    logged = app.events.wait("request", seen["peer"])
    assert [(e["method"], e["path"], e["protocol"]) for e in logged] == [("POST", "/a?b=%20c", "http")]


def test_two_requests_on_one_connection_are_one_connection_event(app: Running) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", app.ports["http"], timeout=DEADLINE)
    peers = []
    for _ in range(2):
        connection.request("GET", "/")
        peers.append(json.loads(connection.getresponse().read())["peer"])
    connection.close()
    assert peers[0] == peers[1]
    assert len(app.events.wait("request", peers[0], count=2)) == 2
    assert len(app.events.of("connection", peers[0])) == 1


@pytest.mark.parametrize("code", [200, 204, 301, 404, 503])
def test_status_path(app: Running, code: int) -> None:
    status, data = get(app, f"/status/{code}")
    assert status == code
    assert (data == b"") == (code == 204)


def test_delay_path_waits(app: Running) -> None:
    loop = asyncio.new_event_loop()
    start = loop.time()
    status, _ = get(app, "/delay/0.2")
    assert status == 200
    assert loop.time() - start >= 0.2
    loop.close()


def test_close_path_ends_by_fin(app: Running) -> None:
    with connect(app, "http") as sock:
        sock.sendall(b"GET /close HTTP/1.1\r\nHost: a\r\n\r\n")
        assert sock.recv(100) == b""


def test_reset_path_ends_by_rst(app: Running) -> None:
    with connect(app, "http") as sock:
        sock.sendall(b"GET /reset HTTP/1.1\r\nHost: a\r\n\r\n")
        with pytest.raises(ConnectionResetError):
            sock.recv(100)


def test_head_has_no_body(app: Running) -> None:
    assert get(app, "/", method="HEAD") == (200, b"")


def test_pipelined_requests_are_answered_in_turn_also_behind_one_that_waits(app: Running) -> None:
    with connect(app, "http") as sock:
        sock.sendall(
            b"".join(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode() for path in ("/delay/0.1", "/b", "/c"))
        )
        sock.shutdown(socket.SHUT_WR)  # the client has said all, and listens on
        answers = sock.makefile("rb").read().decode()
    seen = [json.loads(text) for text in answers.splitlines() if text.startswith("{")]
    assert [s["path"] for s in seen] == ["/delay/0.1", "/b", "/c"]


def test_body_is_asked_for_and_counted(app: Running) -> None:
    with connect(app, "http") as sock:
        sock.sendall(b"PUT / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n")
        stream = sock.makefile("rb")
        assert stream.readline() == b"HTTP/1.1 100 Continue\r\n"
        assert stream.readline() == b"\r\n"
        sock.sendall(b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")
        sock.shutdown(socket.SHUT_WR)
        assert json.loads(stream.read().partition(b"\r\n\r\n")[2])["received"] == 5


def test_interim_status_comes_before_the_answer(app: Running) -> None:
    with connect(app, "http") as sock:
        sock.sendall(b"GET /status/103 HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        interim, final, _ = sock.makefile("rb").read().split(b"\r\n\r\n")
    assert interim.startswith(b"HTTP/1.1 103 ")
    assert final.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n", 400),
        (b"GET / HTTP/1.0\r\n\r\n", 200),
    ],
)
def test_old_and_bad_requests_are_answered_and_end_the_connection(app: Running, raw: bytes, status: int) -> None:
    with connect(app, "http") as sock:
        sock.sendall(raw)
        answer = sock.makefile("rb").read()
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())


def trusting(app: Running, *alpn: str) -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.load_verify_locations(cadata=ssl.get_server_certificate(("127.0.0.1", app.ports["https"])))
    if alpn:
        context.set_alpn_protocols(alpn)
    return context


def test_https_tells_version_name_and_alpn(app: Running) -> None:
    context = trusting(app, "h2", "http/1.1")
    with connect(app, "https") as raw, context.wrap_socket(raw, server_hostname="catalog.example") as sock:
        sock.sendall(b"GET /x HTTP/1.1\r\nHost: catalog.example\r\nConnection: close\r\n\r\n")
        head, _, body = sock.makefile("rb").read().partition(b"\r\n\r\n")
        assert sock.selected_alpn_protocol() == "http/1.1"
        version = sock.version()
    assert head.startswith(b"HTTP/1.1 200")
    assert json.loads(body)["tls"] == {
        "version": version,
        "sni": "catalog.example",
        "alpn": "http/1.1",
        "peer_san": None,
    }


def test_certificate_names_an_address_too(app: Running) -> None:
    with (
        connect(app, "https") as raw,
        trusting(app).wrap_socket(raw, server_hostname="127.0.0.1") as sock,
    ):
        assert ("IP Address", "127.0.0.1") in sock.getpeercert()["subjectAltName"]


def test_tls_echoes_after_its_line(app: Running) -> None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with connect(app, "tls") as raw, context.wrap_socket(raw, server_hostname="other.example") as sock:
        stream = sock.makefile("rwb")
        stream.write(b"hello\n")
        stream.flush()
        seen = json.loads(stream.readline())
        assert stream.readline() == b"hello\n"
        assert {k: seen[k] for k in ("peer", "local")} == ends(sock)
    assert seen["tls"]["sni"] == "other.example"
    assert seen["received"] == 6


def test_plaintext_on_a_tls_port_is_logged_as_a_failed_handshake(app: Running) -> None:
    with connect(app, "tls") as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        peer = ends(sock)["peer"]
        try:
            sock.recv(1000)
        except ConnectionResetError:
            pass
    (event,) = app.events.wait("tls-error", peer)
    assert "HTTP_REQUEST" in str(event["error"])
    assert len(app.events.of("connection", peer)) == 1


def test_tcp_tells_then_echoes(app: Running) -> None:
    with connect(app, "tcp") as sock:
        stream = sock.makefile("rwb")
        stream.write(b"one\n")
        stream.flush()
        seen = json.loads(stream.readline())
        assert stream.readline() == b"one\n"
        stream.write(b"two\n")
        stream.flush()
        assert stream.readline() == b"two\n"
        assert {k: seen[k] for k in ("peer", "local")} == ends(sock)
    assert seen["tls"] is None
    assert seen["pod"] == "catalog.catalog"


def test_large_echo_comes_back_whole(app: Running) -> None:
    data = bytes(range(256)) * 8192
    with connect(app, "tcp") as sock:
        sender = threading.Thread(target=lambda: (sock.sendall(data), sock.shutdown(socket.SHUT_WR)))
        sender.start()
        received = b""
        while chunk := sock.recv(1 << 16):
            received += chunk
        sender.join(DEADLINE)
    assert received.partition(b"\n")[2] == data


def test_a_silent_connection_is_logged(app: Running) -> None:
    with connect(app, "tcp") as sock:
        peer = ends(sock)["peer"]
        assert [e["protocol"] for e in app.events.wait("connection", peer)] == ["tcp"]
        assert app.events.of("bytes", peer) == []


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ([b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"], b"HTTP/1.1 200 OK\r\n"),
        ([b"G", b"ET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"], b"HTTP/1.1 200 OK\r\n"),
        ([b"\x00\x01hello"], b'{"app":"catalog"'),
        ([b"hello"], b'{"app":"catalog"'),
        ([b"HELLO"], b'{"app":"catalog"'),
    ],
)
def test_auto_port_speaks_by_the_first_bytes(app: Running, first: list[bytes], expected: bytes) -> None:
    with connect(app, "auto") as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in first:
            sock.sendall(part)
        if not expected.startswith(b"HTTP"):  # "HELLO" is undecided until it ends
            sock.shutdown(socket.SHUT_WR)
        assert sock.makefile("rb").read().startswith(expected)


def test_udp_answers_what_it_saw(app: Running) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(DEADLINE)
        sock.connect(("127.0.0.1", app.ports["udp"]))
        sock.send(b"12345")
        seen = json.loads(sock.recv(2000))
        assert {k: seen[k] for k in ("peer", "local")} == ends(sock)
    assert seen["received"] == 5
    assert [e["received"] for e in app.events.wait("datagram", seen["peer"])] == [5]


def test_an_empty_datagram_is_answered(app: Running) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(DEADLINE)
        sock.sendto(b"", ("127.0.0.1", app.ports["udp"]))
        assert json.loads(sock.recv(2000))["received"] == 0


@pytest.fixture
def channel(app: Running) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{app.ports['grpc']}") as channel:
        yield channel


def test_any_grpc_method_is_answered(app: Running, channel: grpc.Channel) -> None:
    call: Callable[..., bytes] = channel.unary_unary("/opentelemetry.Trace/Export")
    seen = json.loads(call(b"abc", metadata=[("x-b", "1")], timeout=DEADLINE))
    assert seen["path"] == "/opentelemetry.Trace/Export"
    assert seen["headers"]["x-b"] == "1"
    assert seen["peer"]["address"] == "127.0.0.1"
    assert seen["received"] == 3
    assert [e["path"] for e in app.events.wait("request", seen["peer"])] == ["/opentelemetry.Trace/Export"]


def test_grpc_health_serves(channel: grpc.Channel) -> None:
    assert channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=DEADLINE) == b"\x08\x01"
    watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=DEADLINE)
    assert next(watch) == b"\x08\x01"
    watch.cancel()


def config(tmp_path: Path, *ports: EchoPort, **more: object) -> EchoConfig:
    return EchoConfig(ports=ports, pod="a.b", app="a", addresses=("127.0.0.1",), log=str(tmp_path / "log"), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("protocol", ["http", "tcp", "udp", "grpc"])
def test_a_port_in_use_is_one_clear_error(tmp_path: Path, protocol: str) -> None:
    kind = socket.SOCK_DGRAM if protocol == "udp" else socket.SOCK_STREAM
    with socket.socket(socket.AF_INET, kind) as taken:
        taken.bind(("127.0.0.1", 0))
        if kind == socket.SOCK_STREAM:
            taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=rf"cannot listen: {protocol} port {port} of a\.b: .+"):
            Running(config(tmp_path, EchoPort(0, "http"), EchoPort(port, protocol)))  # type: ignore[arg-type]


def test_an_unwritable_log_is_one_clear_error(tmp_path: Path) -> None:
    bad = EchoConfig(ports=(), pod="a", app="a", log=str(tmp_path / "none" / "log"))
    with pytest.raises(InputError, match="cannot write the event log"):
        asyncio.run(EchoApp(bad).start())


def test_two_addresses_of_one_port(tmp_path: Path) -> None:
    port = free_port()
    running = Running(
        EchoConfig(
            ports=(EchoPort(port, "http"),),
            pod="a",
            app="a",
            addresses=("127.0.0.1", "127.0.0.2"),
            log=str(tmp_path / "log"),
        )
    )
    try:
        for address in ("127.0.0.1", "127.0.0.2"):
            connection = http.client.HTTPConnection(address, port, timeout=DEADLINE)
            connection.request("GET", "/")
            assert json.loads(connection.getresponse().read())["local"]["address"] == address
            connection.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.3", port), DEADLINE)
    finally:
        running.stop()


def client_certificate(path: Path, spiffe: str) -> tuple[Path, Path]:
    """A client certificate with a SPIFFE id, and the CA that signed it."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    ca_pem = self_signed(["ca.example"])
    ca_key = serialization.load_pem_private_key(ca_pem, None)
    assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
    ca = x509.load_pem_x509_certificate(ca_pem)
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "client")]))
        .issuer_name(ca.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(
            x509.SubjectAlternativeName(
                [x509.UniformResourceIdentifier(spiffe), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
            ),
            critical=False,
        )
        .sign(ca_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    client, authority = path / "client.pem", path / "ca.pem"
    client.write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + certificate.public_bytes(pem)
    )
    authority.write_bytes(ca.public_bytes(pem))
    return client, authority


def test_the_client_certificate_is_reported(tmp_path: Path) -> None:
    spiffe = "spiffe://cluster.local/ns/frontend/sa/frontend"
    client, authority = client_certificate(tmp_path, spiffe)
    running = Running(config(tmp_path, EchoPort(0, "tls"), client_ca=str(authority)))
    try:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        for load, names in ((False, None), (True, [spiffe, "127.0.0.1"])):
            if load:
                context.load_cert_chain(client)
            with connect(running, "tls") as raw, context.wrap_socket(raw) as sock:
                sock.sendall(b"x")
                assert json.loads(sock.makefile("rb").readline())["tls"]["peer_san"] == names
    finally:
        running.stop()


def test_a_reset_before_the_accept_does_not_end_the_port(app: Running) -> None:
    with connect(app, "tcp") as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with connect(app, "tcp") as sock:
        sock.sendall(b"x")
        assert sock.recv(1) == b"{"

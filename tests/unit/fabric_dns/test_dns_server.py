"""Cluster DNS on real loopback sockets."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import dns.edns
import dns.exception
import dns.flags
import dns.message
import dns.opcode
import dns.query
import dns.rcode
import dns.rdatatype
import pytest
from free_ports import free_port

from lab.errors import InputError
from lab.fabric import zone as zones
from lab.fabric.dns import PAYLOAD, QueryLog, Server, respond
from lab.manifests.model import ExternalHost, ExternalPort, Fabric, Mesh, MeshConfig, Meta, Service, ServicePort

DEADLINE = 5.0
MANY = tuple(f"198.51.100.{n}" for n in range(1, 201))
MESH = Mesh(
    name="server",
    files=(),
    mesh_config=MeshConfig(),
    fabric=Fabric(dns="127.0.0.1", discovery="10.96.0.11"),
    services=(Service(Meta("web", "shop"), ("10.96.1.1",), (ServicePort(80, "http"),)),),
    external_hosts=(
        ExternalHost(Meta("forty"), ("forty.example",), MANY[:40], (ExternalPort(80, "http"),)),
        ExternalHost(Meta("many"), ("many.example",), MANY, (ExternalPort(80, "http"),)),
    ),
)
ZONE = zones.build(MESH)
WEB = "web.shop.svc.cluster.local"


class Running:
    """A server in a thread of its own."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.server = Server(ZONE, QueryLog(str(log)))
        self.port = free_port()
        started = self.server.start(["127.0.0.1"], self.port)
        asyncio.run_coroutine_threadsafe(started, self._loop).result(DEADLINE)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self.server.stop(), self._loop).result(DEADLINE)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE)
        self._loop.close()

    def logged(self, number: int) -> list[dict[str, object]]:
        """The exchanges of that message id; each is written before its answer is sent."""
        return [e for e in map(json.loads, self.log.read_text().splitlines()) if e["id"] == number]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(tmp_path_factory.mktemp("dns") / "queries.jsonl")
    yield running
    running.stop()


def udp(server: Running, query: dns.message.Message) -> dns.message.Message:
    return dns.query.udp(query, "127.0.0.1", DEADLINE, server.port)


def tcp(server: Running, query: dns.message.Message) -> dns.message.Message:
    return dns.query.tcp(query, "127.0.0.1", DEADLINE, server.port)


def raw(server: Running, wire: bytes) -> bytes:
    """The answer to bytes that dnspython would not write."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(DEADLINE)
        sock.connect(("127.0.0.1", server.port))
        sock.send(wire)
        return sock.recv(65535)


def test_both_transports_give_the_same_answer(server: Running) -> None:
    query = dns.message.make_query("WEB.shop.svc.cluster.local", "A")
    answers = [udp(server, query), tcp(server, query)]
    for answer in answers:
        assert answer.rcode() == dns.rcode.NOERROR
        assert [r.to_text() for r in answer.answer] == ["WEB.shop.svc.cluster.local. 30 IN A 10.96.1.1"]
        assert answer.flags & dns.flags.AA
        assert answer.flags & dns.flags.RA
        assert not answer.flags & dns.flags.TC
    assert answers[0].to_wire() == answers[1].to_wire()


def test_the_log_names_the_sender(server: Running) -> None:
    query = dns.message.make_query("gone.example", "AAAA", id=4242)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.9", 0))
        sock.settimeout(DEADLINE)
        sock.sendto(query.to_wire(), ("127.0.0.1", server.port))
        sock.recv(512)
        port = sock.getsockname()[1]
    (entry,) = server.logged(4242)
    time = entry.pop("time")
    assert isinstance(time, float)
    assert entry == {
        "transport": "udp",
        "src": "127.0.0.9",
        "sport": port,
        "id": 4242,
        "name": "gone.example",
        "type": "AAAA",
        "rcode": "NXDOMAIN",
        "answers": 0,
        "truncated": False,
    }


def test_tcp_is_logged_as_tcp_with_its_port(server: Running) -> None:
    query = dns.message.make_query(WEB, "A", id=4243)
    with socket.create_connection(("127.0.0.1", server.port), DEADLINE) as sock:
        dns.query.send_tcp(sock, query)
        dns.query.receive_tcp(sock)
        port = sock.getsockname()[1]
    assert [(e["transport"], e["sport"], e["answers"]) for e in server.logged(4243)] == [("tcp", port, 1)]


def test_without_edns_an_answer_beyond_512_bytes_is_cut_and_tcp_gives_it_whole(server: Running) -> None:
    query = dns.message.make_query("forty.example", "A", use_edns=False, id=4244)
    cut = udp(server, query)
    assert cut.flags & dns.flags.TC
    assert len(cut.to_wire()) <= 512
    whole = tcp(server, query)
    assert not whole.flags & dns.flags.TC
    assert len(whole.answer[0]) == 40
    assert [e["truncated"] for e in server.logged(4244)] == [True, False]


def test_with_edns_the_clients_size_counts(server: Running) -> None:
    whole = udp(server, dns.message.make_query("forty.example", "A", use_edns=0, payload=1232))
    assert len(whole.answer[0]) == 40
    assert whole.edns == 0
    assert whole.payload == PAYLOAD
    cut = udp(server, dns.message.make_query("forty.example", "A", use_edns=0, payload=600))
    assert cut.flags & dns.flags.TC


def test_no_datagram_is_larger_than_our_own_size(server: Running) -> None:
    query = dns.message.make_query("many.example", "A", use_edns=0, payload=65535)
    assert udp(server, query).flags & dns.flags.TC
    assert len(tcp(server, query).answer[0]) == len(MANY)


def test_no_edns_in_no_edns_out(server: Running) -> None:
    assert udp(server, dns.message.make_query(WEB, "A", use_edns=False)).edns == -1


def test_an_edns_version_that_nobody_has_is_refused(server: Running) -> None:
    query = dns.message.make_query(WEB, "A", use_edns=1)
    answer = udp(server, query)
    assert answer.rcode() == dns.rcode.BADVERS
    assert answer.edns == 0


def test_unknown_edns_options_are_ignored(server: Running) -> None:
    cookie = dns.edns.GenericOption(dns.edns.OptionType.COOKIE, b"12345678")
    query = dns.message.make_query(WEB, "A", use_edns=0, options=[cookie])
    assert udp(server, query).rcode() == dns.rcode.NOERROR


def test_a_zone_transfer_is_refused(server: Running) -> None:
    query = dns.message.make_query("cluster.local", "AXFR")
    answer = dns.message.from_wire(respond(ZONE, query.to_wire(), limit=None).answer or b"")
    assert answer.rcode() == dns.rcode.REFUSED


def test_another_class_is_refused(server: Running) -> None:
    assert udp(server, dns.message.make_query("version.bind", "TXT", "CH")).rcode() == dns.rcode.REFUSED


def test_another_operation_is_not_implemented(server: Running) -> None:
    query = dns.message.make_query(WEB, "A")
    query.set_opcode(dns.opcode.NOTIFY)
    answer = dns.message.from_wire(raw(server, query.to_wire()))
    assert answer.rcode() == dns.rcode.NOTIMP
    assert answer.opcode() == dns.opcode.NOTIFY


@pytest.mark.parametrize(
    "body",
    [
        b"\x00\x01" + bytes(6),  # a question is promised, none comes
        b"\x00\x01" + bytes(6) + b"\x40a",  # a label that is longer than the message
        b"\x00\x00" + bytes(6),  # no question
        b"\x00\x01" + bytes(6) + b"\x00\x00\x01\x00\x01" + b"trailing",
    ],
)
def test_a_message_that_cannot_be_read_is_a_format_error(server: Running, body: bytes) -> None:
    answer = raw(server, b"\x12\x34\x01\x00" + body)
    assert answer[:2] == b"\x12\x34"
    assert answer[3] & 0xF == dns.rcode.FORMERR
    assert server.logged(0x1234)[-1]["rcode"] == "FORMERR"


def test_two_questions_are_a_format_error(server: Running) -> None:
    query = dns.message.make_query(WEB, "A")
    query.question.append(dns.message.make_query("forty.example", "A").question[0])
    assert raw(server, query.to_wire())[3] & 0xF == dns.rcode.FORMERR


@pytest.mark.parametrize(
    "wire", [b"", b"\x00", bytes(11), dns.message.make_response(dns.message.make_query("a", "A")).to_wire()]
)
def test_noise_and_answers_get_no_answer(server: Running, wire: bytes) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(DEADLINE)
        sock.connect(("127.0.0.1", server.port))
        sock.send(wire)
        fence = dns.message.make_query(WEB, "A")
        sock.send(fence.to_wire())
        assert dns.message.from_wire(sock.recv(512)).id == fence.id


def test_queries_may_be_pipelined_on_one_connection(server: Running) -> None:
    queries = [dns.message.make_query(WEB, "A") for _ in range(3)]
    with socket.create_connection(("127.0.0.1", server.port), DEADLINE) as sock:
        sock.sendall(b"".join(q.to_wire(prepend_length=True) for q in queries))
        for query in queries:
            answer, _ = dns.query.receive_tcp(sock)
            assert answer.id == query.id


def test_a_query_may_come_in_pieces(server: Running) -> None:
    wire = dns.message.make_query(WEB, "A").to_wire(prepend_length=True)
    with socket.create_connection(("127.0.0.1", server.port), DEADLINE) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in wire:
            sock.sendall(bytes([byte]))
        answer, _ = dns.query.receive_tcp(sock)
    assert answer.rcode() == dns.rcode.NOERROR


def test_noise_on_a_connection_ends_it(server: Running) -> None:
    with socket.create_connection(("127.0.0.1", server.port), DEADLINE) as sock:
        sock.sendall(b"\x00\x01x")
        assert sock.recv(10) == b""


def test_a_new_zone_answers_at_once(server: Running) -> None:
    old = server.server.zone
    server.server.zone = zones.build(Mesh("m", (), MeshConfig(), MESH.fabric), 2)
    try:
        assert udp(server, dns.message.make_query(WEB, "A")).rcode() == dns.rcode.NXDOMAIN
    finally:
        server.server.zone = old
    assert udp(server, dns.message.make_query(WEB, "A")).rcode() == dns.rcode.NOERROR


@pytest.mark.parametrize("kind", [socket.SOCK_DGRAM, socket.SOCK_STREAM])
def test_an_address_in_use_is_one_clear_error(kind: socket.SocketKind) -> None:
    with socket.socket(socket.AF_INET, kind) as taken:
        taken.bind(("127.0.0.1", 0))
        if kind == socket.SOCK_STREAM:
            taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            InputError, match=rf"cannot listen: DNS on 127\.0\.0\.1 port {port}: Address already in use"
        ):
            asyncio.run(Server(ZONE, QueryLog("")).start(["127.0.0.1"], port))


needs_dig = pytest.mark.skipif(shutil.which("dig") is None, reason="dig is not installed (package bind9-dnsutils)")


def dig(server: Running, *arguments: str) -> str:
    done = subprocess.run(
        ["dig", "@127.0.0.1", "-p", str(server.port), "+tries=1", "+time=5", *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE * 2,
        check=True,
    )
    return done.stdout


@needs_dig
def test_dig_is_content(server: Running) -> None:
    out = dig(server, WEB, "A")
    assert "status: NOERROR" in out
    assert "flags: qr aa rd ra;" in out
    assert "recursion requested but not available" not in out
    assert re.search(rf"^{WEB}\.\s+30\s+IN\s+A\s+10\.96\.1\.1$", out, re.MULTILINE)


@needs_dig
def test_dig_retries_over_tcp_after_a_cut_answer(server: Running) -> None:
    out = dig(server, "+noedns", "many.example", "A")
    assert "Truncated, retrying in TCP mode" in out
    assert f"ANSWER: {len(MANY)}" in out


@needs_dig
def test_dig_sees_the_cut_answer_itself(server: Running) -> None:
    out = dig(server, "+noedns", "+ignore", "many.example", "A")
    assert "flags: qr aa tc rd ra;" in out


@needs_dig
def test_dig_reverse_and_negative(server: Running) -> None:
    assert re.search(rf"\sPTR\s+{WEB}\.$", dig(server, "-x", "10.96.1.1"), re.MULTILINE)
    out = dig(server, "gone.example", "MX")
    assert "status: NXDOMAIN" in out
    assert re.search(r"^\.\s.*SOA\s+ns\.dns\.cluster\.local\. hostmaster\.cluster\.local\. 1 ", out, re.MULTILINE)

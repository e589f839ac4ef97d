"""The DNS server on real sockets, with small real upstream servers (spec: agent 12.1, 12.2, 12.4)."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dns.flags
import dns.message
import dns.rcode
import dns.rrset
import pytest
import uvloop
from free_ports import free_port

from agent.dns.forward import Forwarder
from agent.dns.server import DNSOptions, DNSServer, listen_addresses
from agent.dns.table import ProxyNames
from agent.errors import AgentError
from agent.metrics import Metrics
from agent.protos import nds_pb2

DEADLINE = 10.0
NAMES = ProxyNames("ns1", "ns1.svc.cluster.local")
HOST = "local.example."


def run(job: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(DEADLINE):
            await job()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(limited())


def name_table(count: int = 1) -> nds_pb2.NameTable:
    table = nds_pb2.NameTable()
    table.table[HOST.removesuffix(".")].ips.extend(f"10.0.0.{n + 1}" for n in range(count))
    return table


Answer = Callable[[dns.message.Message], list[bytes]]


def plain_answer(address: str) -> Answer:
    def answer(query: dns.message.Message) -> list[bytes]:
        reply = dns.message.make_response(query)
        reply.answer.append(dns.rrset.from_text(query.question[0].name, 60, "IN", "A", address))
        return [reply.to_wire()]

    return answer


def coded_answer(rcode: dns.rcode.Rcode) -> Answer:
    def answer(query: dns.message.Message) -> list[bytes]:
        reply = dns.message.make_response(query)
        reply.set_rcode(rcode)
        return [reply.to_wire()]

    return answer


def no_answer(_: dns.message.Message) -> list[bytes]:
    return []


@dataclass
class Upstream:
    """A DNS server that answers with what `answer` gives, UDP and TCP."""

    answer: Answer
    seen: list[bytes] = field(default_factory=list)
    peers: list[tuple[str, int]] = field(default_factory=list)
    address: tuple[str, int] = ("", 0)

    async def __aenter__(self) -> Upstream:
        upstream = self

        class Protocol(asyncio.DatagramProtocol):
            def connection_made(self, transport: Any) -> None:
                self.transport = transport

            def datagram_received(self, data: bytes, addr: Any) -> None:
                upstream.seen.append(data)
                upstream.peers.append(addr[:2])
                for reply in upstream.answer(dns.message.from_wire(data)):
                    self.transport.sendto(reply, addr)

        async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            (length,) = struct.unpack("!H", await reader.readexactly(2))
            data = await reader.readexactly(length)
            upstream.seen.append(data)
            for reply in upstream.answer(dns.message.from_wire(data)):
                writer.write(struct.pack("!H", len(reply)) + reply)
            writer.close()

        loop = asyncio.get_running_loop()
        self.address = ("127.0.0.1", free_port())
        self._transport, _ = await loop.create_datagram_endpoint(Protocol, local_addr=self.address)
        self._server = await asyncio.start_server(stream, *self.address)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._transport.close()
        self._server.close()


class Served:
    """A DNS server of ours on a free port."""

    def __init__(self, tmp_path: Path, upstreams: list[tuple[str, int]], **options: Any) -> None:
        conf = tmp_path / "resolv.conf"
        conf.write_text("nameserver 127.0.0.1\n")
        self.metrics = Metrics()
        self.port = free_port()
        settings = {"timeout": 0.3, **options}
        self.server = DNSServer(
            DNSOptions(f"127.0.0.1:{self.port}", NAMES, resolv_conf=str(conf), **settings), self.metrics
        )
        self.server._forwarder = Forwarder(
            upstreams, settings["timeout"], bool(settings.get("parallel", False)), self.metrics
        )

    async def __aenter__(self) -> Served:
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop()

    async def ask(self, query: dns.message.Message | bytes) -> dns.message.Message:
        data = query if isinstance(query, bytes) else query.to_wire()
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
            sock.connect(("127.0.0.1", self.port))
            sock.send(data)
            return dns.message.from_wire(await loop.sock_recv(sock, 65535))

    async def ask_tcp(self, query: dns.message.Message) -> dns.message.Message:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        data = query.to_wire()
        writer.write(struct.pack("!H", len(data)) + data)
        (length,) = struct.unpack("!H", await reader.readexactly(2))
        reply = dns.message.from_wire(await reader.readexactly(length))
        writer.close()
        return reply


def question(name: str = "remote.example.", rdtype: str = "A", **options: Any) -> dns.message.Message:
    return dns.message.make_query(name, rdtype, **options)


def texts(message: dns.message.Message) -> list[str]:
    return [rdata.to_text() for rrset in message.answer for rdata in rrset]


def test_before_the_table_everything_is_servfail(tmp_path: Path) -> None:
    async def job() -> None:
        async with Served(tmp_path, []) as served:
            for ask in (served.ask, served.ask_tcp):
                query = question(HOST)
                reply = await ask(query)
                assert reply.rcode() == dns.rcode.SERVFAIL
                assert query.is_response(reply)
            assert not served.server.ready
            assert "not ready" in served.server.check_ready()

    run(job)


def test_local_names_and_their_replacement(tmp_path: Path) -> None:
    async def job() -> None:
        async with Served(tmp_path, []) as served:
            await served.server.update(name_table())
            for _ in range(3):
                assert texts(await served.ask(question(HOST))) == ["10.0.0.1"]
            assert texts(await served.ask_tcp(question(HOST))) == ["10.0.0.1"]
            replaced = nds_pb2.NameTable()
            replaced.table["local.example"].ips.append("10.9.9.9")
            await served.server.update(replaced)
            assert texts(await served.ask(question(HOST))) == ["10.9.9.9"]
            assert texts(await served.ask_tcp(question(HOST))) == ["10.9.9.9"]
            assert served.metrics.dns_requests_total.value == 6
            assert served.server.check_ready() == ""

    run(job)


def test_a_truncated_udp_answer_is_whole_over_tcp(tmp_path: Path) -> None:
    async def job() -> None:
        async with Served(tmp_path, []) as served:
            await served.server.update(name_table(42))
            short = await served.ask(question(HOST))
            assert short.flags & dns.flags.TC
            whole = await served.ask_tcp(question(HOST))
            assert not whole.flags & dns.flags.TC
            assert len(texts(whole)) == 42

    run(job)


def test_what_was_asked_over_tcp_first_is_still_cut_for_udp(tmp_path: Path) -> None:
    async def job() -> None:
        async with Served(tmp_path, []) as served:
            await served.server.update(name_table(42))
            query = question(HOST)
            assert len(texts(await served.ask_tcp(query))) == 42
            short = await served.ask(query)
            assert short.flags & dns.flags.TC
            assert len(texts(short)) < 42

    run(job)


def test_several_questions_on_one_tcp_connection(tmp_path: Path) -> None:
    async def job() -> None:
        async with Served(tmp_path, []) as served:
            await served.server.update(name_table())
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            queries = [question(HOST), question(HOST, "AAAA"), question(HOST)]
            for query in queries:
                wire = query.to_wire()
                writer.write(struct.pack("!H", len(wire)) + wire)
            for query in queries:
                (length,) = struct.unpack("!H", await reader.readexactly(2))
                assert query.is_response(dns.message.from_wire(await reader.readexactly(length)))
            writer.close()

    run(job)


def test_unknown_names_are_forwarded_unchanged_over_the_same_transport(tmp_path: Path) -> None:
    async def job() -> None:
        async with Upstream(plain_answer("192.0.2.1")) as upstream, Served(tmp_path, [upstream.address]) as served:
            await served.server.update(name_table())
            for ask in (served.ask, served.ask_tcp):
                query = question("ReMote.Example.", use_edns=0, payload=1232, want_dnssec=True)
                reply = await ask(query)
                assert texts(reply) == ["192.0.2.1"]
                assert query.is_response(reply)
                assert upstream.seen.pop() == query.to_wire()
            await served.ask(question(HOST, "MX"))
            assert len(upstream.seen) == 1
            assert served.metrics.dns_upstream_requests_total.value == 3
            assert served.metrics.dns_upstream_failures_total.value == 0
            assert served.metrics.dns_upstream_request_duration_seconds.counts[-1] == 0

    run(job)


def test_any_well_formed_reply_wins_whatever_its_code(tmp_path: Path) -> None:
    async def job() -> None:
        async with (
            Upstream(coded_answer(dns.rcode.NXDOMAIN)) as upstream,
            Served(tmp_path, [upstream.address]) as served,
        ):
            await served.server.update(name_table())
            assert (await served.ask(question())).rcode() == dns.rcode.NXDOMAIN
            upstream.answer = coded_answer(dns.rcode.REFUSED)
            assert (await served.ask(question())).rcode() == dns.rcode.REFUSED

    run(job)


def test_silent_and_refusing_servers_are_passed_over(tmp_path: Path) -> None:
    async def job() -> None:
        closed = ("127.0.0.1", free_port())
        async with (
            Upstream(no_answer) as silent,
            Upstream(plain_answer("192.0.2.2")) as good,
            Served(tmp_path, [closed, silent.address, good.address]) as served,
        ):
            await served.server.update(name_table())
            for _ in range(4):
                assert texts(await served.ask(question())) == ["192.0.2.2"]
            assert texts(await served.ask_tcp(question())) == ["192.0.2.2"]

    run(job)


def test_no_server_left_is_servfail(tmp_path: Path) -> None:
    async def job() -> None:
        async with (
            Upstream(no_answer) as silent,
            Served(tmp_path, [silent.address, ("127.0.0.1", free_port())]) as served,
        ):
            await served.server.update(name_table())
            query = question()
            reply = await served.ask(query)
            assert reply.rcode() == dns.rcode.SERVFAIL
            assert query.is_response(reply)
            assert (await served.ask_tcp(question())).rcode() == dns.rcode.SERVFAIL
            assert served.metrics.dns_upstream_failures_total.value == 2

    run(job)


@pytest.mark.parametrize("parallel", [False, True])
def test_no_servers_at_all_is_servfail(tmp_path: Path, parallel: bool) -> None:
    async def job() -> None:
        async with Served(tmp_path, [], parallel=parallel) as served:
            await served.server.update(name_table())
            assert (await served.ask(question())).rcode() == dns.rcode.SERVFAIL

    run(job)


def test_parallel_asks_all_and_takes_the_first(tmp_path: Path) -> None:
    async def job() -> None:
        async with (
            Upstream(no_answer) as silent,
            Upstream(plain_answer("192.0.2.3")) as good,
            Served(tmp_path, [silent.address, good.address], parallel=True, timeout=DEADLINE) as served,
        ):
            await served.server.update(name_table())
            assert texts(await served.ask(question())) == ["192.0.2.3"]
            assert len(silent.seen) == 1
            silent.answer = plain_answer("192.0.2.3")
            assert texts(await served.ask_tcp(question())) == ["192.0.2.3"]

    run(job)


def test_parallel_fails_when_all_fail(tmp_path: Path) -> None:
    async def job() -> None:
        async with (
            Upstream(no_answer) as silent,
            Served(tmp_path, [silent.address, ("127.0.0.1", free_port())], parallel=True) as served,
        ):
            await served.server.update(name_table())
            assert (await served.ask(question())).rcode() == dns.rcode.SERVFAIL

    run(job)


def test_udp_replies_with_another_id_are_ignored(tmp_path: Path) -> None:
    def spoofed_first(query: dns.message.Message) -> list[bytes]:
        good = plain_answer("192.0.2.4")(query)[0]
        bad = struct.pack("!H", query.id ^ 1) + plain_answer("203.0.113.66")(query)[0][2:]
        return [bad, good]

    async def job() -> None:
        async with Upstream(spoofed_first) as upstream, Served(tmp_path, [upstream.address]) as served:
            await served.server.update(name_table())
            assert texts(await served.ask(question())) == ["192.0.2.4"]

    run(job)


def test_a_malformed_reply_is_no_reply(tmp_path: Path) -> None:
    def cut(query: dns.message.Message) -> list[bytes]:
        return [plain_answer("192.0.2.5")(query)[0][:-3]]

    async def job() -> None:
        async with Upstream(cut) as upstream, Served(tmp_path, [upstream.address]) as served:
            await served.server.update(name_table())
            assert (await served.ask(question())).rcode() == dns.rcode.SERVFAIL
            assert (await served.ask_tcp(question())).rcode() == dns.rcode.SERVFAIL

    run(job)


def many_addresses(query: dns.message.Message) -> list[bytes]:
    reply = dns.message.make_response(query, our_payload=4096)
    addresses = [f"192.0.2.{n}" for n in range(1, 61)]
    reply.answer.append(dns.rrset.from_text_list(query.question[0].name, 60, "IN", "A", addresses))
    return [reply.to_wire(max_size=65535)]


def test_large_upstream_answers(tmp_path: Path) -> None:
    async def job() -> None:
        async with Upstream(many_addresses) as upstream, Served(tmp_path, [upstream.address]) as served:
            await served.server.update(name_table())
            without_edns = await served.ask(question())
            assert without_edns.rcode() == dns.rcode.SERVFAIL
            with_edns = await served.ask(question(use_edns=0, payload=1400))
            assert len(texts(with_edns)) == 60
            assert len(texts(await served.ask_tcp(question()))) == 60

    run(job)


def test_a_truncated_upstream_answer_keeps_tc(tmp_path: Path) -> None:
    def truncated(query: dns.message.Message) -> list[bytes]:
        reply = dns.message.make_response(query)
        reply.flags |= dns.flags.TC
        return [reply.to_wire()]

    async def job() -> None:
        async with Upstream(truncated) as upstream, Served(tmp_path, [upstream.address]) as served:
            await served.server.update(name_table())
            reply = await served.ask(question())
            assert reply.flags & dns.flags.TC

    run(job)


def test_a_query_that_comes_back_is_refused(tmp_path: Path) -> None:
    async def job() -> None:
        async with Served(tmp_path, []) as served:
            await served.server.update(name_table())
            served.server._forwarder = Forwarder([("127.0.0.1", served.port)], DEADLINE, False, served.metrics)
            for ask in (served.ask, served.ask_tcp):
                assert (await ask(question())).rcode() == dns.rcode.REFUSED

    run(job)


def test_before_the_table_a_query_that_comes_back_is_refused_too(tmp_path: Path) -> None:
    async def job() -> None:
        async with Served(tmp_path, []) as served:
            served.server._answer_before_table = True  # as root on port 53
            served.server._forwarder = Forwarder([("127.0.0.1", served.port)], DEADLINE, False, served.metrics)
            for ask in (served.ask, served.ask_tcp):
                assert (await ask(question())).rcode() == dns.rcode.REFUSED
            # Once each: the second time it is seen to have come from here.
            assert served.metrics.dns_upstream_requests_total.value == 2

    run(job)


def test_malformed_packets_are_dropped_and_counted(tmp_path: Path) -> None:
    async def job() -> None:
        async with Served(tmp_path, []) as served:
            await served.server.update(name_table())
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
                sock.connect(("127.0.0.1", served.port))
                for data in (b"", b"x", b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0\x03abc"):
                    sock.send(data)
                response = question(HOST)
                response.flags |= dns.flags.QR
                sock.send(response.to_wire())
                good = question(HOST)
                sock.send(good.to_wire())
                first = await asyncio.get_running_loop().sock_recv(sock, 65535)
            assert good.is_response(dns.message.from_wire(first))
            assert served.metrics.dns_malformed_total.value == 3
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(b"\0\3abc")
            assert await reader.read() == b""
            writer.close()

    run(job)


def test_no_question_is_servfail(tmp_path: Path) -> None:
    async def job() -> None:
        async with Served(tmp_path, []) as served:
            await served.server.update(name_table())
            assert (await served.ask(b"\x12\x34\x01\0\0\0\0\0\0\0\0\0")).rcode() == dns.rcode.SERVFAIL

    run(job)


@pytest.mark.parametrize(
    ("address", "servers", "expected"),
    [
        ("localhost:15053", ["10.96.0.10"], [("127.0.0.1", 15053)]),
        ("localhost:15053", ["fd00::10"], [("::1", 15053)]),
        ("localhost:15053", ["10.96.0.10", "fd00::10", "1.1.1.1"], [("127.0.0.1", 15053), ("::1", 15053)]),
        ("localhost:15053", [], [("localhost", 15053)]),
        ("0.0.0.0:15053", ["10.96.0.10"], [("0.0.0.0", 15053)]),
        ("[::1]:53", [], [("::1", 53)]),
        (":15053", ["10.96.0.10"], [("0.0.0.0", 15053), ("::", 15053)]),
        ("[::]:15053", ["10.96.0.10"], [("0.0.0.0", 15053), ("::", 15053)]),
    ],
)
def test_listen_addresses(address: str, servers: list[str], expected: list[tuple[str, int]]) -> None:
    assert listen_addresses(address, servers) == expected


@pytest.mark.parametrize("address", ["localhost", "localhost:99999", "127.0.0.1:-1", "127.0.0.1:5_3", "127.0.0.1:"])
def test_an_address_that_is_none_is_fatal(address: str) -> None:
    with pytest.raises(AgentError, match="dns address must be a valid host:port"):
        listen_addresses(address, [])


def test_without_a_host_both_families_are_served(tmp_path: Path) -> None:
    async def job() -> None:
        served = Served(tmp_path, [])
        served.server.addresses = listen_addresses(f":{served.port}", [])
        async with served:
            await served.server.update(name_table())
            assert (await served.ask(question(HOST))).answer
            with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
                sock.connect(("::1", served.port))
                sock.send(question(HOST).to_wire())
                assert dns.message.from_wire(await asyncio.get_running_loop().sock_recv(sock, 65535)).answer
            for host in ("127.0.0.1", "::1"):
                _, writer = await asyncio.open_connection(host, served.port)
                writer.close()

    run(job)


def test_port_53_needs_root(tmp_path: Path) -> None:
    conf = tmp_path / "resolv.conf"
    conf.write_text("nameserver 10.0.0.1\n")
    unprivileged = DNSServer(DNSOptions("127.0.0.1:53", NAMES, resolv_conf=str(conf)), Metrics())
    assert unprivileged.addresses == [("127.0.0.1", 15053)]
    assert DNSServer(DNSOptions("127.0.0.5:53", NAMES, resolv_conf=str(conf), root=True), Metrics()).addresses == [
        ("127.0.0.5", 53)
    ]


def test_upstreams_that_are_this_server_are_left_out(tmp_path: Path) -> None:
    conf = tmp_path / "resolv.conf"
    conf.write_text("nameserver 127.0.0.1\nnameserver 192.0.2.53\n")
    server = DNSServer(DNSOptions("127.0.0.1:53", NAMES, resolv_conf=str(conf), root=True), Metrics())
    assert server._forwarder.servers == (("192.0.2.53", 53),)


def test_a_missing_resolv_conf_is_fatal(tmp_path: Path) -> None:
    with pytest.raises(AgentError, match="failed to load"):
        DNSServer(DNSOptions("", NAMES, resolv_conf=str(tmp_path / "absent")), Metrics())


def test_a_port_in_use_is_fatal(tmp_path: Path) -> None:
    async def job() -> None:
        async with Served(tmp_path, []) as served:
            other = Served(tmp_path, [])
            other.server.addresses = [("127.0.0.1", served.port)]
            with pytest.raises(AgentError, match="failed to listen on DNS address"):
                await other.server.start()
            await other.server.stop()

    run(job)

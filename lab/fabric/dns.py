"""Cluster DNS: answers from a mesh's zone on UDP and TCP, and logs every query with where it came from.

The log is evidence: a query that the agent forwarded appears in it with the agent's own source port. One JSON object a line::

    {"time": 1700000000.0, "transport": "udp", "src": "10.244.0.1", "sport": 4000, "id": 7, "name": "a.example", "type": "A",
     "rcode": "NXDOMAIN", "answers": 0, "truncated": false}

There is no upstream: what the zone does not know does not exist.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import dns.edns
import dns.exception
import dns.flags
import dns.message
import dns.opcode
import dns.rcode
import dns.rdataclass
import dns.rdatatype

from lab import notify
from lab.errors import InputError
from lab.fabric import zone as zones
from lab.fabric.zone import Zone
from lab.manifests import stored

PORT = 53
PAYLOAD = 1232  # bytes; fits any path without fragments (DNS flag day 2020)
IDLE = 10.0  # seconds that a TCP connection may be silent (RFC 7766, 6.2.3)
CONTROL_LIMIT = 1 << 16  # bytes of a control request


@dataclass(frozen=True, slots=True)
class Exchange:
    """A query and its answer on the wire; ``answer`` is None where none may be sent."""

    id: int
    name: str
    type: str
    rcode: str
    answers: int
    truncated: bool
    answer: bytes | None


def respond(zone: Zone, wire: bytes, *, limit: int | None) -> Exchange:
    """Answers one message; no I/O.

    Args:
        zone: the records.
        wire: what was received.
        limit: the transport's size in bytes without EDNS (512 on UDP, RFC 1035, 4.2.1); None where only 65535 bounds it.

    Several addresses come in random order, as kubeadm's ``loadbalance`` gives them (dnspython shuffles what it writes).
    A message without a whole header or which is itself an answer gets none; one that cannot be read gets FORMERR, another
    operation than a query NOTIMP, a zone transfer or another class REFUSED, an EDNS version above 0 BADVERS (RFC 6891, 6.1.3).
    """
    if len(wire) < 12 or wire[2] & 0x80:
        return Exchange(int.from_bytes(wire[:2], "big"), "", "", "DROPPED", 0, False, None)
    number = int.from_bytes(wire[:2], "big")
    if dns.opcode.from_flags(int.from_bytes(wire[2:4], "big")) != dns.opcode.QUERY:
        return _bare(wire, dns.rcode.NOTIMP)
    try:
        query = dns.message.from_wire(wire)
    except dns.exception.DNSException:
        return _bare(wire, dns.rcode.FORMERR)
    if len(query.question) != 1:
        return _bare(wire, dns.rcode.FORMERR)
    question = query.question[0]
    answer = dns.message.make_response(query, recursion_available=True, our_payload=PAYLOAD, pad=0)
    if query.edns > 0:
        answer.set_rcode(dns.rcode.BADVERS)
    elif question.rdclass != dns.rdataclass.IN or question.rdtype in (dns.rdatatype.AXFR, dns.rdatatype.IXFR):
        answer.set_rcode(dns.rcode.REFUSED)
    else:
        found = zone.lookup(question.name, question.rdtype)
        answer.flags |= dns.flags.AA
        answer.set_rcode(found.rcode)
        answer.answer = list(found.answer)
        answer.authority = list(found.authority)
        answer.additional = list(found.additional)
    size = 65535
    if limit is not None:
        size = min(max(query.payload, limit), PAYLOAD) if query.edns >= 0 else limit
    packed = answer.to_wire(max_size=size, prefer_truncation=True)
    return Exchange(
        id=number,
        name=question.name.to_text(omit_final_dot=True),
        type=dns.rdatatype.to_text(question.rdtype),
        rcode=dns.rcode.to_text(answer.rcode()),
        answers=sum(len(rrset) for rrset in answer.answer),
        truncated=bool(packed[2] & (dns.flags.TC >> 8)),
        answer=packed,
    )


def _bare(wire: bytes, rcode: dns.rcode.Rcode) -> Exchange:
    """A header alone: the query's id, operation and RD, and the code."""
    flags = dns.flags.QR | (int.from_bytes(wire[2:4], "big") & (0x7800 | dns.flags.RD)) | rcode
    answer = wire[:2] + flags.to_bytes(2, "big") + bytes(8)
    return Exchange(int.from_bytes(wire[:2], "big"), "", "", dns.rcode.to_text(rcode), 0, False, answer)


class QueryLog:
    """Appends exchanges to a file, each by one write call; an empty path is nowhere."""

    def __init__(self, path: str) -> None:
        """Opens the file.

        Raises:
            InputError: it cannot be opened for writing.
        """
        self._fd = -1
        if path:
            try:
                self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            except OSError as e:
                raise InputError("cannot write the query log", path, e.strerror or str(e)) from e

    def write(self, transport: str, peer: tuple[object, ...], exchange: Exchange) -> None:
        if self._fd < 0:
            return
        data = {
            "time": round(time.time(), 6),
            "transport": transport,
            "src": str(ipaddress.ip_address(str(peer[0]).partition("%")[0])),
            "sport": peer[1],
            "id": exchange.id,
            "name": exchange.name,
            "type": exchange.type,
            "rcode": exchange.rcode,
            "answers": exchange.answers,
            "truncated": exchange.truncated,
        }
        os.write(self._fd, json.dumps(data, separators=(",", ":")).encode() + b"\n")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Server:
    """Cluster DNS on some addresses, inside a running event loop. ``zone`` may be replaced while it runs."""

    def __init__(self, zone: Zone, log: QueryLog) -> None:
        self.zone = zone
        self.queries = 0
        self._log = log
        self._udp: list[asyncio.DatagramTransport] = []
        self._tcp: list[asyncio.Server] = []
        self._open: set[asyncio.Task[None]] = set()

    async def start(self, addresses: Sequence[str], port: int = PORT) -> None:
        """Listens on UDP and TCP of one port.

        Raises:
            InputError: an address cannot be had; nothing listens then.
        """
        for address in addresses:
            try:
                await self._listen(address, port)
            except OSError as e:
                await self.stop()
                why = os.strerror(e.errno) if e.errno else str(e)
                raise InputError("cannot listen", f"DNS on {address} port {port}", why) from e

    async def _listen(self, address: str, port: int) -> None:
        loop = asyncio.get_running_loop()
        udp, _ = await loop.create_datagram_endpoint(lambda: _Datagrams(self), (address, port))
        self._udp.append(udp)
        self._tcp.append(await asyncio.start_server(self._stream, address, port, reuse_address=True))

    async def stop(self) -> None:
        """Stops listening and ends open connections; twice is fine."""
        for udp in self._udp:
            udp.close()
        for tcp in self._tcp:
            tcp.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        self._udp, self._tcp = [], []

    def answer(self, transport: str, wire: bytes, peer: tuple[object, ...]) -> bytes | None:
        """Answers and logs one message."""
        self.queries += 1
        exchange = respond(self.zone, wire, limit=512 if transport == "udp" else None)
        self._log.write(transport, peer, exchange)
        return exchange.answer

    async def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._open.add(task)
            task.add_done_callback(self._open.discard)
        peer = writer.get_extra_info("peername")
        try:
            while True:
                async with asyncio.timeout(IDLE):
                    size = int.from_bytes(await reader.readexactly(2), "big")
                    wire = await reader.readexactly(size)
                answer = self.answer("tcp", wire, peer)
                if answer is None:
                    break
                writer.write(len(answer).to_bytes(2, "big") + answer)
                async with asyncio.timeout(IDLE):
                    await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            pass  # silent, gone, or done
        finally:
            writer.close()


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, server: Server) -> None:
        self._server = server
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[object, ...]) -> None:
        answer = self._server.answer("udp", data, addr)
        if answer is not None and self._transport is not None:
            self._transport.sendto(answer, addr)


@dataclass(frozen=True, slots=True)
class Config:
    """``manifests`` is a directory (or file); ``listen`` empty means the mesh's own DNS addresses; ``socket`` is a control socket's path."""

    manifests: str
    name: str | None = None
    listen: tuple[str, ...] = ()
    port: int = PORT
    log: str = ""
    socket: str = ""


def from_params(params: Mapping[str, object]) -> Config:
    """The configuration from plain data; keys as in ``Config``, ``listen`` also as one string.

    Raises:
        InputError: a key is unknown or the manifests are missing.
    """
    known = {"manifests", "name", "listen", "port", "log", "socket"}
    unknown = sorted(set(params) - known)
    if unknown:
        raise InputError("unknown DNS parameter", ", ".join(unknown), "", f"Known are {', '.join(sorted(known))}")
    if not params.get("manifests"):
        raise InputError("bad DNS parameter", "manifests", "a path is needed")
    listen = params.get("listen") or ()
    values = [listen] if isinstance(listen, str) else listen
    if not isinstance(values, list | tuple):
        raise InputError("bad DNS parameter", "listen", f"{listen!r} is no address")
    try:
        addresses = tuple(str(ipaddress.ip_address(str(v))) for v in values)
        port = int(str(params.get("port", PORT)))
    except ValueError as e:
        raise InputError("bad DNS parameter", "listen", str(e)) from e
    return Config(
        manifests=str(params["manifests"]),
        name=str(params["name"]) if params.get("name") else None,
        listen=addresses,
        port=port,
        log=str(params.get("log") or ""),
        socket=str(params.get("socket") or ""),
    )


class ClusterDNS:
    """The server with its manifests: loads, reloads, and answers its control socket.

    The control socket speaks JSON lines: ``{"op": "status"}`` and ``{"op": "reload"}`` are answered by
    ``{"ok": true, "serial", "names", "queries", "listen"}``, a failure by ``{"ok": false, "error"}``. A reload that fails keeps the old records.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._log = QueryLog(config.log)
        self._server: Server | None = None
        self._control: asyncio.Server | None = None
        self._listen: list[tuple[str, int]] = []
        self._reloading = asyncio.Lock()

    async def start(self) -> None:
        """Loads the manifests and listens.

        Raises:
            InputError: bad manifests, or an address or path that cannot be had.
        """
        zone, own = _load(self._config, 1)
        server = Server(zone, self._log)
        addresses = self._config.listen or own
        await server.start(addresses, self._config.port)
        self._listen = [(address, self._config.port) for address in addresses]
        self._server = server
        if self._config.socket:
            try:  # asyncio replaces a socket that a crash left there
                self._control = await asyncio.start_unix_server(
                    self._converse, self._config.socket, limit=CONTROL_LIMIT
                )
            except OSError as e:
                raise InputError("cannot listen", self._config.socket, e.strerror or str(e)) from e

    async def stop(self) -> None:
        """Stops; twice is fine."""
        if self._control is not None:
            self._control.close()
            _remove(self._config.socket)
        if self._server is not None:
            await self._server.stop()
        self._log.close()

    async def reload(self) -> dict[str, object]:
        """Reads the manifests again; see the class for the answer."""
        server = self._server
        if server is None:
            return {"ok": False, "error": "not started"}
        async with self._reloading:
            try:
                # In a thread: queries are answered meanwhile.
                zone, _ = await asyncio.to_thread(_load, self._config, server.zone.serial + 1)
            except InputError as e:
                return {"ok": False, "error": str(e)}
            server.zone = zone
        return self.status()

    def status(self) -> dict[str, object]:
        """What runs."""
        server = self._server
        if server is None:
            return {"ok": False, "error": "not started"}
        return {
            "ok": True,
            "serial": server.zone.serial,
            "names": len(server.zone.records),
            "queries": server.queries,
            "listen": [{"address": address, "port": port} for address, port in self._listen],
        }

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async for text in reader:
                answer = await self._control_answer(text)
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        except (OSError, ValueError):
            pass  # gone, or a line beyond the limit
        finally:
            writer.close()

    async def _control_answer(self, text: bytes) -> dict[str, object]:
        try:
            request = json.loads(text)
        except ValueError:
            request = None
        op = request.get("op") if isinstance(request, dict) else None
        if op == "reload":
            return await self.reload()
        if op == "status":
            return self.status()
        return {"ok": False, "error": f"unknown request {text[:100]!r}: ops are status and reload"}


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _load(config: Config, serial: int) -> tuple[Zone, list[str]]:
    """The zone of the manifests, and the addresses that they give to cluster DNS."""
    mesh = stored.load(config.manifests, config.name)
    return zones.build(mesh, serial), [a for a in (mesh.fabric.dns, mesh.fabric.dns6) if a]


async def serve(config: Config) -> None:
    """Serves until SIGTERM or SIGINT; SIGHUP reloads the manifests.

    Raises:
        InputError: see ``ClusterDNS.start``.
    """
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    server = ClusterDNS(config)
    reloads: set[asyncio.Task[None]] = set()

    async def reload() -> None:
        answer = await server.reload()
        if answer["ok"]:
            _say(f"reloaded: serial {answer['serial']}, {answer['names']} names")
        else:
            _say(f"error: {answer['error']}")

    def reload_soon() -> None:
        task = loop.create_task(reload())
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    try:
        await server.start()
        loop.add_signal_handler(signal.SIGHUP, reload_soon)
        notify.ready()
        await ended.wait()
    finally:
        await server.stop()


def main(params: Mapping[str, object]) -> int:
    """The entry of the node: parameters are plain data, see ``from_params``.

    Returns:
        0 after SIGTERM; 2 with one line on stderr if it could not start.
    """
    try:
        asyncio.run(serve(from_params(params)))
    except InputError as e:
        _say(f"error: {e}")
        return e.exit_code
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201

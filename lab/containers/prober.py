"""The prober of one pod: sends its flows, sniffs its link, and keeps what the kernel said, all in the pod's own network.

It is root without capabilities but NET_ADMIN and NET_RAW (to watch) and SETUID and SETGID (to send as somebody else). It
answers on a Unix socket, which crosses network namespaces, in the observer's language (`lab.trace.observer`), and more::

    {"op": "send", "order": {...}}                            one flow (lab.probe.orders); what came of it
    {"op": "fence", "token": ..., "wait": 1.0}                did that fence leave by eth0, now or in time?
    {"op": "find", "which": [{...}, ...]}                     flows on eth0 (lab.probe.wire.Link.find)
    {"op": "questions", "name": ..., "type": ..., "since": 0} DNS questions that went to the pod's resolver
    {"op": "listing", "what": [["nft", "ip"], ...]}           rules as text (lab.trace.rules.dump)
    {"op": "listening"}                                       ports that somebody listens on
    {"op": "status-code", "port": 15021, "path": "/"}         of a GET to 127.0.0.1
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import traceback
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from lab.errors import LabError
from lab.probe import driver, judge, packets, resolver
from lab.probe.orders import Order
from lab.probe.wire import Link
from lab.runtime import kernel, spawn
from lab.trace import observer, rules

_HERE = "/proc/thread-self/ns/net"
_LINK, _LOOPBACK = "eth0", "lo"
_KEPT = 10_000
_LISTEN = "0A"  # include/net/tcp_states.h


class Prober(observer.Observer):
    """The observer of one place, with a sniffer and a driver beside it. Lives in one event loop."""

    def __init__(self, pod: str) -> None:
        super().__init__()
        self._pod = pod
        self._link = Link()
        self._questions: deque[dict[str, object]] = deque(maxlen=_KEPT)
        self._fenced = asyncio.Condition()
        self._resolver = resolver.parse_resolv_conf(resolver.read_file("/etc/resolv.conf")).servers[0]
        self._taps: list[packets.Tap] = []
        self._sending: set[asyncio.Task[dict[str, Any]]] = set()

    def start(self) -> None:
        """Begins to watch.

        Raises:
            OSError: a capability lacks, or there is no eth0.
        """
        self.attach(self._pod, _HERE)
        packets.know_interfaces()
        for interface in (_LINK, _LOOPBACK):
            tap = packets.Tap(iface=interface)
            tap.ins.setblocking(False)
            self._taps.append(tap)
            asyncio.get_running_loop().add_reader(tap.ins, self._sniffed, interface, tap)

    def stop(self) -> None:
        for tap in self._taps:
            asyncio.get_running_loop().remove_reader(tap.ins)
            tap.close()
        self.close()

    async def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        match question.get("op"):
            case "send":
                sending = asyncio.create_task(_send(Order(**question["order"])))
                self._sending.add(sending)  # it goes on to its end, whether or not somebody still waits for it
                sending.add_done_callback(self._sending.discard)
                return {"ok": True, **await asyncio.shield(sending)}
            case "fence":
                return {"ok": True, "seen": await self._fence(str(question["token"]), float(question["wait"]))}
            case "find":
                found = [[dataclasses.asdict(s) for s in self._link.find(**which)] for which in question["which"]]
                return {"ok": True, "found": found}
            case "questions":
                return {"ok": True, "questions": self._asked(question)}
            case "listing":
                try:
                    return {"ok": True, "texts": rules.dump((str(b), str(f)) for b, f in question["what"])}
                except LabError as e:
                    return {"ok": False, "error": str(e)}
            case "listening":
                return {"ok": True, "ports": sorted(_listening())}
            case "status-code":
                return {"ok": True, "code": await _status_code(int(question["port"]), str(question["path"]))}
        return await super().answer(question)

    async def _fence(self, token: str, wait: float) -> bool:
        async with self._fenced:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._fenced.wait_for(lambda: token in self._link.fences)
        return token in self._link.fences

    def _asked(self, question: Mapping[str, Any]) -> list[dict[str, object]]:
        name, kind, since = str(question["name"]), question["type"], float(question["since"])
        wanted = name.rstrip(".").lower()
        return [
            q for q in self._questions if q["name"] == wanted and q["type"] == kind and float(str(q["time"])) >= since
        ]

    def _sniffed(self, interface: str, tap: packets.Tap) -> None:
        while True:
            try:
                packet = tap.recv()
            except BlockingIOError:
                return
            if packet is None:
                return
            if interface == _LINK:
                fences = len(self._link.fences)
                judge.note(self._link, packet, not tap.outgoing)  # seen from the pod's end
                if len(self._link.fences) > fences:
                    asyncio.get_running_loop().create_task(self._tell())
            if tap.outgoing:
                self._note_question(packet)

    async def _tell(self) -> None:
        async with self._fenced:
            self._fenced.notify_all()

    def _note_question(self, packet: Any) -> None:
        """A packet to the pod's resolver, whichever port it has by now (Docker's own translation comes before lo)."""
        ip = packet.getlayer(packets.IP)
        if ip is None or ip.dst != self._resolver:
            return
        segment = ip.payload
        if isinstance(segment, packets.UDP):
            proto, data = "udp", bytes(segment.payload)
        elif isinstance(segment, packets.TCP):
            proto, data = "tcp", bytes(segment.payload)[2:]  # behind the message's length
        else:
            return
        if len(data) < 12 or data[2] & 0x80:
            return
        try:
            asked = packets.DNS(data)
            name, kind = asked.qd[0].qname.decode("ascii"), asked.qd[0].qtype
        except Exception:  # whatever scapy makes of bytes that are no DNS message
            return
        self._questions.append(
            {
                "time": float(packet.time),
                "name": name.rstrip(".").lower(),
                "type": next((t for t, number in resolver.TYPES.items() if number == kind), str(kind)),
                "proto": proto,
                "src": ip.src,
                "sport": segment.sport,
                "server": ip.dst,
            }
        )


async def _send(order: Order) -> dict[str, Any]:
    """Sends a flow from a forked child that is its uid."""
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        _become_sender(order, theirs)
    os.close(theirs)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ours, "rb"))
    try:
        data = await reader.read()
    finally:
        transport.close()
        _reap(pid)
    if not data:
        return {"ok": False, "error": "the flow's process ended without an answer"}
    answer: dict[str, Any] = json.loads(data)
    return answer


def _reap(pid: int) -> None:
    os.waitpid(pid, 0)  # it has closed its end of the pipe, so it is ending


def _become_sender(order: Order, out: int) -> NoReturn:
    try:
        spawn.reset_signals()
        if order.uid and not order.crafted:
            os.setgroups([])
            os.setresgid(order.uid, order.uid, order.uid)
            os.setresuid(order.uid, order.uid, order.uid)
            kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # or /proc/self would belong to root from now on
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            answer: dict[str, object] = {"sent": driver.send(order).to_json()}
        except OSError as e:
            answer = {"ok": False, "error": str(e)}
        with os.fdopen(out, "wb") as pipe:
            pipe.write(json.dumps(answer).encode())
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _listening() -> set[int]:
    """TCP ports of this network namespace (proc(5): /proc/net/tcp)."""
    ports = set()
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/thread-self/net/{name}").read_text().splitlines()[1:]:
                local, _, state = line.split()[1:4]
                if state == _LISTEN:
                    ports.add(int(local.rpartition(":")[2], 16))
    return ports


async def _status_code(port: int, path: str) -> int:
    """Of a GET to 127.0.0.1; 0 if nobody answers."""
    with suppress(OSError, ValueError, IndexError, TimeoutError):
        async with asyncio.timeout(2.0):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
                return int((await reader.readline()).split()[1])
            finally:
                writer.close()
    return 0


def main(pod: str, socket: Path) -> int:
    """Probes until SIGTERM.

    Raises:
        LabError: it cannot watch here.
    """
    socket.unlink(missing_ok=True)
    try:
        return asyncio.run(_main(pod, socket))
    finally:
        socket.unlink(missing_ok=True)


async def _main(pod: str, socket: Path) -> int:
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    prober = Prober(pod)
    try:
        prober.start()
    except OSError as e:
        raise LabError(f"pod {pod} cannot be watched", e.filename or "", e.strerror or str(e)) from None
    server = await observer.serve(prober, str(socket))
    await ended.wait()
    server.close()
    prober.stop()
    return 0

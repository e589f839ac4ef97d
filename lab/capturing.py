"""``lab capture``: a pod's packets, each with a comment that names its hop, on a terminal or as a pcapng file.

Packets come from AF_PACKET sockets opened inside the pod's network namespace; what they are comes from the lab's observer
(conntrack and trace), from the kernel's list of sockets and from the manifests. Nothing is planted, and nobody waits by polling: a
packet is held back until the observer has told of its flow (or `_LONGEST` seconds), so the order stays that of the wire.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import re
import signal
import stat
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab import lifecycle
from lab.capture import headers, packet_filter, pcapng, sockets, taps
from lab.capture.headers import Decoded
from lab.capture.packet_filter import Keep
from lab.capture.sockets import Diag, Socket
from lab.capture.taps import Frame, Tap
from lab.errors import InputError, LabError, ObservationError
from lab.fabric import paths
from lab.probe import evidence_log, join, names, speech
from lab.probe.captions import Captioner, Connection, Owner
from lab.probe.evidence_log import EnvoyLine, written
from lab.runtime import enter, files
from lab.trace import rules
from lab.trace.client import Client, Sighting
from lab.trace.flows import Flow
from lab.trace.rules import Listing

if TYPE_CHECKING:
    from lab.manifests.model import Mesh, Pod

_PATIENCE = 0.3  # seconds until the observer must have told of a flow
_LONGEST = 1.5  # seconds that packets are held back for one, if the observer itself is late
_AT_ONCE = 256  # packets read from one tap before the others have their turn
_REMEMBERED = 10_000  # connections
_EVIDENCE_BYTES = 1 << 20  # of an Envoy's evidence that are looked at
_OWNER = re.compile(r"(?<!! )--[ug]id-owner (\d+)|meta sk[ug]id (\d+)")
_ROLES = {"envoy": "Envoy", "agent": "agent", "app": "app"}
_DIRECTIONS = {"in": pcapng.INBOUND, "out": pcapng.OUTBOUND, "lo": 0}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for. ``interface``: empty for all; ``file``: empty for lines of text, ``-`` for standard output."""

    interface: str = ""
    file: str = ""
    count: int | None = None
    seconds: float | None = None
    filter: str = ""


@dataclass(frozen=True, slots=True)
class Captured:
    """One packet with its comment."""

    frame: Frame
    packet: Decoded
    comment: str

    def to_json(self) -> dict[str, Any]:
        flow = self.packet.flow
        return {
            "time": f"{self.frame.when // 10**9}.{self.frame.when % 10**9:09}",
            "interface": self.frame.interface,
            "direction": self.frame.direction,
            "length": len(self.frame.data),
            "proto": flow.proto if flow else None,
            "src": flow.src if flow else None,
            "sport": flow.sport if flow else None,
            "dst": flow.dst if flow else None,
            "dport": flow.dport if flow else None,
            "flags": self.packet.flags or None,
            "comment": self.comment,
        }

    def line(self) -> str:
        when = time.strftime("%H:%M:%S", time.localtime(self.frame.when // 10**9))
        flow = self.packet.flow
        what = "-"
        if flow is not None:
            ports = flow.proto in ("tcp", "udp")
            src, dst = (written(flow.src, flow.sport), written(flow.dst, flow.dport)) if ports else (flow.src, flow.dst)
            what = f"{flow.proto} {src} > {dst}"
        flags = f" {self.packet.flags}" if self.packet.flags else ""
        arrow = {"in": "in ", "out": "out", "lo": "   "}[self.frame.direction]
        where = f"{self.frame.interface:5} {arrow}"
        return f"{when}.{self.frame.when % 10**9 // 1000:06} {where} {what}{flags}  # {self.comment}"


@dataclass(slots=True)
class Ended:
    """What a capture gave. ``dropped``: packets that the kernel had no room for; ``why``: what ended it, if not the user."""

    pod: str
    interfaces: tuple[str, ...]
    packets: int = 0
    dropped: int = 0
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "pod": self.pod,
            "interfaces": list(self.interfaces),
            "count": self.packets,
            "dropped": self.dropped,
            "ended": self.why or None,
        }


def capture(
    lab: str, pod: str, wanted: Wanted, log: Callable[[str], None], keep: list[Captured] | None = None
) -> Ended:
    """Captures until the user, ``count`` or ``seconds`` end it, or the pod does.

    Args:
        log: gets a line when it begins.
        keep: packets are put here instead of being printed.

    Raises:
        InputError: no such lab, pod or interface; a filter that is none; a file that cannot be written.
        ObservationError: packets cannot be seen on this machine.
    """
    mesh = lifecycle.stored_mesh(lab)
    place = _place(mesh, pod)
    wants = packet_filter.parse(wanted.filter)
    with ExitStack() as stack:
        opened, diag = _open(stack, lab, place, wanted.interface)
        output = _output(stack, wanted.file, keep)
        work = _Capture(lab, mesh, place, opened, diag, output, wants, wanted.count)
        return asyncio.run(work.run(wanted.seconds, log))


def _place(mesh: Mesh, name: str) -> str:
    """The place of a pod, or of an external host."""
    pod = mesh.pod(name)
    if pod is not None:
        return pod.name
    for host in mesh.external_hosts:
        if name in (host.meta.name, paths.external_place(host.meta.name)):
            return paths.external_place(host.meta.name)
    known = ", ".join([*(p.name for p in mesh.pods), *(h.meta.name for h in mesh.external_hosts)])
    raise InputError(f"no pod {name!r} in {mesh.name}", why=f"there are {known}", next_step="Name one of them")


def _open(stack: ExitStack, lab: str, place: str, interface: str) -> tuple[list[Tap], Diag]:
    """Taps on the interfaces of a place, and the way to its list of sockets."""
    with enter.netns(paths.netns_path(lab, place)):
        known = taps.interfaces()
        if interface not in ("", "any", *known):
            why = f"it has {', '.join(known)}"
            raise InputError(f"{place} has no interface {interface!r}", f"lab {lab}", why, "Name one of them")
        chosen = known if interface in ("", "any") else [interface]
        try:
            opened = [stack.enter_context(closing(taps.open_tap(name))) for name in chosen]
        except OSError as e:
            why = e.strerror or str(e)
            raise ObservationError("packets cannot be captured", place, why, "Run as root with CAP_NET_RAW") from None
        return opened, stack.enter_context(closing(Diag()))


# --- where packets go -----------------------------------------------------------------------


class _Output:
    """Where packets go. ``watched``: a pipe whose reader may go away, to be waited for; -1 for none."""

    watched = -1

    def begin(self, lab: str, place: str, interfaces: Sequence[str]) -> None: ...

    def put(self, captured: Captured) -> None: ...

    def flush(self) -> None:
        """Raises _Gone or InputError."""

    def end(self, opened: Sequence[Tap], started: int) -> None: ...


class _Gone(Exception):
    """Who read the packets has gone away."""


class _Kept(_Output):
    """Packets as a list."""

    def __init__(self, to: list[Captured]) -> None:
        self._to = to

    def put(self, captured: Captured) -> None:
        self._to.append(captured)


class _Stream(_Output):
    """Packets as bytes in a file or on standard output: whole ones, as soon as they are known."""

    def __init__(self, fd: int, name: str) -> None:
        self._fd, self._name = fd, name
        self._waiting: list[bytes] = []
        if stat.S_ISFIFO(os.fstat(fd).st_mode):
            self.watched = fd

    def write(self, data: bytes) -> None:
        self._waiting.append(data)

    def flush(self) -> None:
        data = memoryview(b"".join(self._waiting))
        self._waiting.clear()
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BrokenPipeError:
                raise _Gone from None
            except OSError as e:
                raise InputError(
                    "cannot write the packets", self._name, e.strerror or str(e), "Give it a place with room"
                ) from None


class _Text(_Stream):
    """One line a packet."""

    def put(self, captured: Captured) -> None:
        self.write(f"{captured.line()}\n".encode())


class _File(_Stream):
    """A pcapng file."""

    def begin(self, lab: str, place: str, interfaces: Sequence[str]) -> None:
        self._numbers = {name: number for number, name in enumerate(interfaces)}
        system = f"{platform.system()} {platform.release()}"
        self.write(pcapng.section("sidecarlab", system, f"{place} of lab {lab}"))
        for name in interfaces:
            self.write(pcapng.interface(name, f"{name} in the network namespace of {place}"))

    def put(self, captured: Captured) -> None:
        frame = captured.frame
        number, direction = self._numbers[frame.interface], _DIRECTIONS[frame.direction]
        self.write(pcapng.packet(number, frame.when, frame.data, len(frame.data), direction, captured.comment))

    def end(self, opened: Sequence[Tap], started: int) -> None:
        now = time.time_ns()
        for tap in opened:
            self.write(pcapng.statistics(self._numbers[tap.interface], started, now, tap.received, tap.dropped))


def _output(stack: ExitStack, file: str, keep: list[Captured] | None) -> _Output:
    """Raises InputError: the file cannot be opened, or packets would go to a terminal."""
    if file == "-" and os.isatty(1):
        raise InputError(
            "packets on a terminal", "-w -", next_step="Give it a pipe: `lab capture POD -w - | wireshark -k -i -`"
        )
    if file and file != "-":
        try:
            fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        except OSError as e:
            raise InputError("cannot write the packets", file, e.strerror or str(e)) from None
    elif keep is not None and not file:
        return _Kept(keep)
    else:
        sys.stdout.flush()
        fd = os.dup(1)
    stack.callback(os.close, fd)
    return _File(fd, file if file != "-" else "standard output") if file else _Text(fd, "standard output")


# --- what packets are -----------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Pending:
    """A connection that is being found out about; ``known`` once it is."""

    connection: Connection = field(default_factory=Connection)
    known: bool = False


class _Evidence:
    """The end of an Envoy's evidence file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def newest(self, worth: Callable[[str], bool]) -> Iterator[EnvoyLine]:
        """Lines whose text is worth a look, the newest first."""
        try:
            with self._path.open("rb") as f:
                f.seek(max(0, f.seek(0, os.SEEK_END) - _EVIDENCE_BYTES))
                text = f.read().decode(errors="replace")
        except OSError:
            return
        for line in reversed(text.splitlines()):
            if worth(line):
                with suppress(ValueError):  # cut off at its beginning, or being written
                    yield evidence_log.parse(json.loads(line))


class _Knowledge:
    """Finds out what the connections of one place are."""

    def __init__(self, lab: str, mesh: Mesh, place: str, diag: Diag) -> None:
        self._netns = paths.netns_path(lab, place)
        self._place, self._diag = place, diag
        pod = mesh.pod(place)
        self.addresses = (
            frozenset(pod.ips)
            if pod
            else frozenset(
                a for h in mesh.external_hosts if paths.external_place(h.meta.name) == place for a in h.addresses
            )
        )
        self._has_rules = pod is not None and pod.injected
        self._pids = _pids(lab, place)
        self._users = _users(mesh, pod) if pod else {}
        self._evidence = _Evidence(files.evidence(lab, place)) if self._has_rules else None
        self._listing = Listing()
        self._listed: set[tuple[str, str]] = set()
        self._listing_now = asyncio.Lock()
        self.observer: Client | None = None
        self.tracer = "nftrace"

    def sockets(self, proto: str) -> tuple[list[Socket], Mapping[int, str]]:
        """Sockets of the place at this moment, and which process has them: soon they may be gone."""
        try:
            return self._diag.all(proto), sockets.inodes(self._pids)
        except OSError:
            return [], {}

    async def learn(
        self,
        c: Connection,
        flow: Flow,
        begins: bool,
        over_lo: bool,
        found: Sequence[Socket],
        holders: Mapping[int, str],
    ) -> None:
        """Fills in what is known of the connection that a packet of ``flow`` belongs to.

        ``over_lo``: both of its ends are here, whatever their addresses say (with TPROXY Envoy keeps its client's).
        """
        try:
            async with asyncio.timeout(_LONGEST):
                await self._ask(c, flow, begins)
        except TimeoutError:
            c.unknown = "the lab's observer has more to do than it can"
        except LabError as e:
            c.unknown = e.why or e.what
        first = c.original or flow
        last = c.changed or first
        if not c.original and not begins and any(s.waits and s.local[1] == flow.sport for s in found):
            first = last = flow.reversed()  # what listens on that port here answers
            c.opened = first
        elif begins or flow.proto == "udp":
            c.opened = first
        if over_lo or self._is_here(first.src):
            c.client = self._owner(sockets.sender(found, first), holders) or c.client
        if over_lo or self._is_here(last.dst):
            port = c.captured_to or last.dport
            c.server = self._owner(
                sockets.receiver(found, (last.dst, port), (first.src, first.sport), holders), holders
            )
        if not begins:
            self._remember(c, first, last)

    async def _ask(self, c: Connection, flow: Flow, begins: bool) -> None:
        if self.observer is None:
            c.unknown = "the lab's observer does not answer"
            return
        sighting = await self._sighting(flow, begins)
        entry = sighting.conntrack[-1] if sighting.conntrack else None
        if entry is None and "conntrack" in sighting.missing:
            c.unknown = sighting.missing["conntrack"]
            return
        if entry is None and not sighting.packets:
            if self._has_rules:
                c.unknown = "conntrack told nothing of this flow"
            return
        original = entry.original if entry else flow
        if entry is not None:
            c.original, c.changed, c.zone = entry.original, entry.reply.reversed(), entry.zone
            if entry.original != flow:
                sighting = await self._of(original, 0.0)
        self.tracer = sighting.tracer or self.tracer
        hook = "output" if self._is_here(original.src) else "prerouting"
        listing = await self._rules(rules.wanted(sighting.packets))
        made = join.translate(sighting, original, listing, self.addresses, hook)
        c.captured_to, c.by_trace = made.redirected_to if made.captured else None, made.by_trace
        if c.captured_to is not None and c.original is None:
            c.original = c.changed = original
        if made.rule is not None and made.rule.backend is not None and made.rule.position is not None:
            c.rule = f"{made.rule.table} {made.rule.chain} {made.rule.position}"
            if uid := _OWNER.search(made.rule.text):
                c.client = self._user(int(uid[1] or uid[2]), self.tracer)
        first = join.first_packet(sighting.packets, original, "output")
        if first is not None and first.uid is not None:
            c.client = self._user(first.uid, "nflog")  # its socket may be gone already

    def _owner(self, found: Socket | None, holders: Mapping[int, str]) -> Owner | None:
        if found is None:
            return None
        name = holders.get(found.inode, "")
        return Owner(found.uid, name) if name else self._user(found.uid, "sock_diag")

    def _user(self, uid: int, source: str) -> Owner:
        """An owner of whom the kernel tells the uid alone. Which of that user's processes it is nobody says."""
        return Owner(uid, user=self._users.get(uid, ""), source=source)

    def _remember(self, c: Connection, first: Flow, last: Flow) -> None:
        """What Envoy has written earlier of a connection that began before its first packet was seen."""
        if self._evidence is None:
            return
        upstream = written(last.src, last.sport)
        downstream = (written(first.src, first.sport), written(first.dst, first.dport))
        for line in self._evidence.newest(lambda e: upstream in e or downstream[0] in e):
            if line.upstream_local == upstream:
                c.secure = "mTLS" if line.upstream_peer_san else "TLS" if line.upstream_tls_version else ""
                c.cluster = line.cluster or ""
                return
            if (line.downstream_remote, line.downstream_local) == downstream:
                c.secure = "mTLS" if line.peer_san else "TLS" if line.tls_version else ""
                return

    async def _sighting(self, flow: Flow, begins: bool) -> Sighting:
        """What the observer saw of a flow, or of the one that it answers.

        Without rules nothing is tracked, and only of a first packet there is something to come.
        """
        wait = _PATIENCE if self._has_rules or begins or flow.proto == "udp" else 0.0
        asked = [asyncio.ensure_future(self._of(f, wait)) for f in ([flow] if begins else [flow, flow.reversed()])]
        seen: Sighting | None = None
        try:
            for answer in asyncio.as_completed(asked):
                sighting = await answer
                if sighting.conntrack or (sighting.packets and not self._has_rules):
                    return sighting
                if seen is None or sighting.packets:
                    seen = sighting
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        assert seen is not None
        return seen

    async def _of(self, flow: Flow, wait: float) -> Sighting:
        assert self.observer is not None
        return await self.observer.flow(
            self._place, flow.proto, flow.src, flow.sport, flow.dst, flow.dport, wait=wait, tracked=self._has_rules
        )

    async def _rules(self, wanted: set[tuple[str, str]]) -> Listing:
        """The rules of the place, listed when a back end is first met."""
        async with self._listing_now:
            if not wanted <= self._listed:
                self._listed |= wanted
                self._listing = await asyncio.to_thread(rules.take, self._netns, self._listed)
            return self._listing

    def _is_here(self, address: str) -> bool:
        return address in self.addresses or address.startswith("127.") or address in ("::1", "::6")


def _users(mesh: Mesh, pod: Pod) -> dict[int, str]:
    """Whose uids these are: those that the lab starts a pod's proxy and its apps with."""
    from lab.runtime import workload

    found = {app.identity.uid: "app" for app in workload.apps(mesh, pod)}
    agent = workload.agent(mesh, pod)
    return {**found, agent.identity.uid: "proxy"} if agent else found


def _pids(lab: str, place: str) -> dict[str, int]:
    """The processes of a pod by the names that captions give them."""
    for pod in lifecycle.inspect(lab)["pods"]:
        if f"{pod['name']}.{pod['namespace']}" == place:
            return {_ROLES[role]: pid for role, pid in pod["pids"].items() if role in _ROLES and pid}
    return {}


# --- the capture ----------------------------------------------------------------------------


class _Capture:
    def __init__(
        self,
        lab: str,
        mesh: Mesh,
        place: str,
        opened: Sequence[Tap],
        diag: Diag,
        output: _Output,
        wants: Keep,
        count: int | None,
    ) -> None:
        self._lab, self._place = lab, place
        self._taps, self._output, self._wants, self._count = opened, output, wants, count
        self._known = _Knowledge(lab, mesh, place, diag)
        self._captioner = Captioner(self._known.addresses, names.of(mesh))
        self._connections: OrderedDict[tuple[str, frozenset[tuple[str, int]]], _Pending] = OrderedDict()
        self._by_original: dict[Flow, Connection] = {}
        self._queue: deque[tuple[Frame, Decoded, _Pending | None]] = deque()
        self._learning: set[asyncio.Task[None]] = set()
        self._ended = Ended(place, tuple(t.interface for t in opened))
        self._accepted = 0

    async def run(self, seconds: float | None, log: Callable[[str], None]) -> Ended:
        """Until something ends it; then what waits is written, and the file is whole."""
        loop = asyncio.get_running_loop()
        self._stop: asyncio.Future[str] = loop.create_future()
        started = time.time_ns()
        self._known.observer = await self._connect()
        speech.dns(b"")  # its library is loaded now, not while packets wait
        self._output.begin(self._lab, self._place, self._ended.interfaces)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._end, "")
        if self._output.watched >= 0:
            loop.add_reader(self._output.watched, self._end, "who read the packets has gone")
        if seconds is not None:
            loop.call_later(seconds, self._end, "")
        try:
            self._flush()
            for tap in self._taps:
                loop.add_reader(tap.socket, self._readable)
            log(f"capturing on {', '.join(self._ended.interfaces)} of {self._place}; Ctrl-C ends it")
            self._ended.why = await self._stop
            self._last()
            if self._learning:
                await asyncio.wait(self._learning)
            self._flush()
            for tap in self._taps:
                tap.count()
            self._ended.dropped = sum(t.dropped for t in self._taps)
            self._output.end(self._taps, started)
            self._output.flush()
        except _Gone:
            self._ended.why = "who read the packets has gone"
        finally:
            for task in self._learning:
                task.cancel()
            if self._known.observer is not None:
                await self._known.observer.close()
        return self._ended

    async def _connect(self) -> Client | None:
        try:
            observer = await Client.connect(str(files.observer_socket(self._lab)))
        except LabError:
            return None
        observer.ended.add_done_callback(lambda _: self._end("the lab has ended"))
        return observer

    def _end(self, why: str) -> None:
        if not self._stop.done():
            self._stop.set_result(why)

    def _fail(self, error: Exception) -> None:
        if not self._stop.done():
            self._stop.set_exception(error)

    def _last(self) -> None:
        """What the kernel has seen until now still counts."""
        for tap in self._taps:
            asyncio.get_running_loop().remove_reader(tap.socket)
        with suppress(OSError):
            self._read(1 << 16)

    def _readable(self) -> None:
        try:
            self._read(_AT_ONCE)
            self._flush()
        except OSError as e:
            for tap in self._taps:
                asyncio.get_running_loop().remove_reader(tap.socket)
            self._end("its interface is gone" if taps.is_gone(e) else f"no more can be read: {e.strerror}")
        except (LabError, _Gone) as e:
            self._fail(e)

    def _read(self, most: int) -> None:
        """Takes what waits on all taps, in the order of time."""
        frames: list[Frame] = []
        for tap in self._taps:
            frames += tap.read(most)
        for frame in sorted(frames, key=lambda f: f.when):
            if self._count is not None and self._accepted >= self._count:
                return
            packet = headers.decode(frame.data)
            if not self._wants(packet.kind, packet.flow):
                continue
            self._accepted += 1
            self._queue.append((frame, packet, self._connection(packet, frame.direction == "lo")))
            if self._accepted == self._count:
                self._end("")

    def _connection(self, packet: Decoded, over_lo: bool) -> _Pending | None:
        flow = packet.flow
        if flow is None or flow.proto not in ("tcp", "udp"):
            return None
        key = (flow.proto, frozenset(sockets.ends(flow)))
        pending = self._connections.get(key)
        if pending is None or packet.begins:
            pending = self._connections[key] = _Pending()
            if len(self._connections) > _REMEMBERED:
                self._connections.popitem(last=False)
            task = asyncio.ensure_future(
                self._learn(pending, flow, packet.begins, over_lo, *self._known.sockets(flow.proto))
            )
            self._learning.add(task)
            task.add_done_callback(self._learning.discard)
        self._connections.move_to_end(key)
        return pending

    async def _learn(
        self,
        pending: _Pending,
        flow: Flow,
        begins: bool,
        over_lo: bool,
        found: Sequence[Socket],
        holders: Mapping[int, str],
    ) -> None:
        try:
            await self._known.learn(pending.connection, flow, begins, over_lo, found, holders)
            self._merge(pending, begins)
        finally:
            pending.known = True
        try:
            self._flush()
        except (LabError, _Gone) as e:
            self._fail(e)

    def _merge(self, pending: _Pending, begins: bool) -> None:
        """Packets and answers of a captured flow differ on lo in more than their order; conntrack says that they are one."""
        made = pending.connection
        if made.original is None:
            return
        same = self._by_original.get(made.original)
        if same is None or begins:
            self._by_original[made.original] = made
            if len(self._by_original) > _REMEMBERED:
                del self._by_original[next(iter(self._by_original))]
            return
        same.client, same.server = same.client or made.client, same.server or made.server
        pending.connection = same

    def _flush(self) -> None:
        """Gives out what is known, in the order of the wire."""
        captioner = replace(self._captioner, tracer=self._known.tracer)
        while self._queue and (self._queue[0][2] is None or self._queue[0][2].known):
            frame, packet, pending = self._queue.popleft()
            connection = pending.connection if pending else None
            self._output.put(Captured(frame, packet, captioner.caption(frame, packet, connection)))
            self._ended.packets += 1
        self._output.flush()

"""The process that listens to the kernel in every place of a lab, and answers what it saw.

Questions and answers are JSON lines over a Unix socket::

    {"op": "attach", "place": "frontend.frontend", "netns": "/run/.../ns/frontend.frontend"}
    {"op": "detach", "place": ...}
    {"op": "status"}
    {"op": "flow", "place": ..., "proto": "tcp", "src": ..., "sport": ..., "dst": ..., "dport": ..., "wait": 1.0, "fence": {...}}
    {"op": "entries", "place": ..., "since": 0, "zone": 1, "proto": "udp", "dport": 53}

``flow`` waits, at most ``wait`` seconds, until ``fence`` (another flow of that place, sent later) was seen, or without one
until something of the flow itself was; with ``"tracked": true`` until conntrack told of it (after all its first packet's rules).
``dst`` and ``dport`` may be left out or null. Every answer has ``"ok"``; a wrong
question gets ``{"ok": false, "error": ...}``.

``attach`` with ``"trace": false`` listens to conntrack alone. With ``"while_connected": true`` packets report as long as the
connection lasts that asked for it, and afterwards conntrack alone.

An open socket keeps a network namespace alive: a place must be detached when its pod is removed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from lab import notify
from lab.trace import owner_table, places
from lab.trace.flows import Flow
from lab.trace.index import Packet, entry_to_json, flow_to_json
from lab.trace.places import Place

_LONGEST_LINE = 1 << 20


class Observer:
    """All places of one lab. Lives in one event loop."""

    def __init__(self) -> None:
        self._places: dict[str, Place] = {}
        self._waiting: dict[str, set[asyncio.Future[None]]] = defaultdict(set)

    def attach(self, place: str, netns: str, *, trace: bool = True, raw_trace: bool = False) -> Place:
        """Begins to observe; a place that is observed already is left and opened anew.

        Raises:
            OSError: the namespace cannot be entered.
        """
        self.detach(place)
        opened = places.attach(place, netns, trace=trace, raw_trace=raw_trace)
        self._places[place] = opened
        asyncio.get_running_loop().add_reader(opened.socket, self._readable, opened)
        return opened

    def detach(self, place: str) -> bool:
        """Ends the observation of a place; whether there was one."""
        opened = self._places.pop(place, None)
        if opened is None:
            return False
        asyncio.get_running_loop().remove_reader(opened.socket)
        opened.close()
        return True

    def close(self) -> None:
        for place in list(self._places):
            self.detach(place)

    def _readable(self, place: Place) -> None:
        try:
            seen = place.read()
        except OSError as e:
            place.missing["socket"] = os.strerror(e.errno or 0)
            asyncio.get_running_loop().remove_reader(place.socket)
            return
        if seen:
            for waiter in self._waiting[place.name]:
                if not waiter.done():
                    waiter.set_result(None)

    async def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one question (see the module's text)."""
        op = question.get("op")
        if op == "attach":
            options = {k: bool(question[k]) for k in ("trace", "raw_trace") if k in question}
            opened = self.attach(str(question["place"]), str(question["netns"]), **options)
            return {"ok": True, "missing": opened.missing}
        if op == "detach":
            return {"ok": True, "detached": self.detach(str(question["place"]))}
        if op == "status":
            return {"ok": True, "places": {n: {"missing": p.missing, "lost": p.lost} for n, p in self._places.items()}}
        if op not in ("flow", "entries"):
            return {"ok": False, "error": f"unknown op {op!r}"}
        place = self._places.get(str(question.get("place")))
        if place is None:
            return {"ok": False, "error": f"place {question.get('place')!r} is not observed"}
        if op == "entries":
            return self._entries(place, question)
        return await self._flow(place, question)

    async def _flow(self, place: Place, question: Mapping[str, Any]) -> dict[str, Any]:
        key = _key(question)
        fence = question.get("fence")
        fence_key = _key(fence) if fence else key
        deadline = asyncio.get_running_loop().time() + float(question.get("wait") or 0)
        complete = True
        tracked = bool(question.get("tracked"))
        while not (place.index.conntrack(*fence_key) or (not tracked and place.index.packets(*fence_key))):
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                complete = False
                break
            await self._wait(place.name, left)
        return {
            "ok": True,
            "complete": complete,
            "packets": [_packet_to_json(p) for p in place.index.packets(*key)],
            "conntrack": [entry_to_json(e) for e in place.index.conntrack(*key)],
            "missing": place.missing,
            "tracer": place.tracer,
            "lost": place.lost,
        }

    async def _wait(self, place: str, seconds: float) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiting[place].add(waiter)
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(waiter, seconds)
        finally:
            self._waiting[place].discard(waiter)

    def _entries(self, place: Place, question: Mapping[str, Any]) -> dict[str, Any]:
        asked = {k: question[k] for k in ("proto", "src", "sport", "dst", "dport") if question.get(k) is not None}
        zone = question.get("zone")
        found = [
            entry_to_json(e)
            for e in place.index.entries(int(question.get("since") or 0))
            if zone in (None, e.zone) and all(getattr(e.original, k) == v for k, v in asked.items())
        ]
        return {"ok": True, "entries": found, "count": place.index.count, "lost": place.lost}


async def serve(observer: Observer, path: str) -> asyncio.Server:
    """Answers questions on the Unix socket ``path``; one connection may ask many, in parallel if they carry an ``id``."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked: set[asyncio.Task[None]] = set()
        lent: dict[str, str] = {}  # network namespaces by place
        try:
            while line := await reader.readline():
                task = asyncio.create_task(_reply(observer, line, writer, lent))
                asked.add(task)
                task.add_done_callback(asked.discard)
        except (ConnectionError, ValueError):  # gone, or a line that never ends
            pass
        finally:
            for task in asked:
                task.cancel()
            for place, netns in lent.items():
                if observer.detach(place):
                    with suppress(OSError):
                        observer.attach(place, netns, trace=False)
            writer.close()

    return await asyncio.start_unix_server(connected, path, limit=_LONGEST_LINE)


async def _reply(observer: Observer, line: bytes, writer: asyncio.StreamWriter, lent: dict[str, str]) -> None:
    number = None
    try:
        question = json.loads(line)
        number = question.get("id")
        answer = await observer.answer(question)
        if question.get("op") == "attach" and question.get("while_connected"):
            lent[str(question["place"])] = str(question["netns"])
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        answer = {"ok": False, "error": f"not understood: {type(e).__name__}: {e}"}
    except OSError as e:
        answer = {"ok": False, "error": f"{e.filename or ''}: {os.strerror(e.errno or 0)}".lstrip(": ")}
    if number is not None:
        answer["id"] = number
    with suppress(ConnectionError):
        writer.write(json.dumps(answer, separators=(",", ":")).encode() + b"\n")
        await writer.drain()


def main(params: Mapping[str, Any]) -> int:
    """Entry point of the process: observes until SIGTERM.

    Args:
        params: ``places``: {place: path of its network namespace}, or {place: {"netns": path, "trace": bool}};
            ``socket``: path of the Unix socket to answer on.
    """
    return asyncio.run(_main(params))


async def _main(params: Mapping[str, Any]) -> int:
    observer = Observer()
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    for name, where in dict(params.get("places") or {}).items():
        options = {"netns": where} if isinstance(where, str) else where
        await observer.answer({"op": "attach", "place": name, **options})
    server = await serve(observer, str(params["socket"]))
    owner_table.create()  # imports pyroute2 (0.2 s) now, while no pod waits for its attachment
    notify.ready()
    await ended.wait()
    server.close()
    observer.close()
    return 0


def _key(question: Mapping[str, Any]) -> tuple[str, str, int, str | None, int | None]:
    dst, dport = question.get("dst"), question.get("dport")
    return (
        str(question["proto"]),
        str(question["src"]),
        int(question["sport"]),
        None if dst is None else str(dst),
        None if dport is None else int(dport),
    )


def _packet_to_json(packet: Packet) -> dict[str, Any]:
    return {
        "number": packet.number,
        "hook": packet.hook,
        "flow": flow_to_json(packet.flow),
        "iif": packet.iif,
        "oif": packet.oif,
        "mark": packet.mark,
        "uid": packet.uid,
        "steps": [dataclasses.asdict(s) for s in packet.steps],
    }


def packet_from_json(data: Mapping[str, Any]) -> Packet:
    """The inverse of what ``flow`` answers."""
    from lab.trace.index import Step

    return Packet(
        number=data["number"],
        hook=data["hook"],
        flow=Flow(**data["flow"]),
        iif=data["iif"],
        oif=data["oif"],
        mark=data["mark"],
        uid=data["uid"],
        steps=[Step(**s) for s in data["steps"]],
    )

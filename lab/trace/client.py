"""Asks the observer. One connection, many questions at a time."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lab.errors import ObservationError
from lab.trace.flows import Flow
from lab.trace.index import Entry, Packet, flow_to_json
from lab.trace.observer import packet_from_json

_STATUS_BITS = {"seen-reply": 1 << 1, "assured": 1 << 2, "src-nat": 1 << 4, "dst-nat": 1 << 5}


@dataclass(frozen=True, slots=True)
class Sighting:
    """What one place saw of a flow. ``complete``: nothing more is to come (the fence was seen, or the flow itself).

    ``missing`` names kinds of evidence that this kernel cannot give; ``lost`` counts overruns of the event queue so far.
    ``tracer`` is what made the packets report (see ``lab.trace.places.Place``).
    """

    packets: list[Packet]
    conntrack: list[Entry]
    complete: bool
    missing: Mapping[str, str]
    lost: int = 0
    tracer: str = "nftrace"


class Client:
    """A connection to the observer of one lab. Use within one event loop, then `close`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._listener = asyncio.create_task(self._listen())

    @property
    def ended(self) -> asyncio.Task[None]:
        """Done once the observer is gone, or this connection is closed."""
        return self._listener

    @classmethod
    async def connect(cls, path: str) -> Client:
        """Connects to the Unix socket ``path``.

        Raises:
            ObservationError: no observer answers there.
        """
        try:
            reader, writer = await asyncio.open_unix_connection(path, limit=1 << 26)
        except OSError as e:
            raise ObservationError(
                "the lab's observer does not answer", path, e.strerror or str(e), "Take the lab down and up again"
            ) from None
        return cls(reader, writer)

    async def ask(self, **question: Any) -> dict[str, Any]:
        """One question and its answer (see ``lab.trace.observer``).

        Raises:
            ObservationError: the observer refuses the question, or has ended.
        """
        number = next(self._numbers)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._asked[number] = future
        try:
            if self._listener.done():
                raise ConnectionResetError
            self._writer.write(json.dumps({**question, "id": number}).encode() + b"\n")
            await self._writer.drain()
            answer = await future
        except ConnectionError:
            raise ObservationError("the lab's observer has ended", next_step="Take the lab down and up again") from None
        finally:
            del self._asked[number]
        if not answer.get("ok"):
            why = str(answer.get("error"))
            raise ObservationError(
                "the observer refuses", str(question.get("op")), why, "Is the pod still up? See `lab inspect`"
            )
        return answer

    async def flow(
        self,
        place: str,
        proto: str,
        src: str,
        sport: int,
        dst: str | None = None,
        dport: int | None = None,
        *,
        wait: float = 0.0,
        fence: Flow | None = None,
        tracked: bool = False,
    ) -> Sighting:
        """What ``place`` saw of a flow; waits up to ``wait`` seconds for it, or for ``fence``, which came later.

        ``tracked``: wait for conntrack's word, which comes after all rules of a flow's first packet.
        """
        answer = await self.ask(
            op="flow",
            place=place,
            proto=proto,
            src=src,
            sport=sport,
            dst=dst,
            dport=dport,
            wait=wait,
            fence=flow_to_json(fence) if fence else None,
            tracked=tracked,
        )
        return Sighting(
            packets=[packet_from_json(p) for p in answer["packets"]],
            conntrack=[entry_from_json(e) for e in answer["conntrack"]],
            complete=answer["complete"],
            missing=answer["missing"],
            lost=answer["lost"],
            tracer=answer["tracer"],
        )

    async def entries(self, place: str, *, since: int = 0, **which: Any) -> tuple[list[Entry], int]:
        """Conntrack entries of a place that began after number ``since``, and the number to ask after next time."""
        answer = await self.ask(op="entries", place=place, since=since, **which)
        return [entry_from_json(e) for e in answer["entries"]], answer["count"]

    async def close(self) -> None:
        self._listener.cancel()
        with suppress(asyncio.CancelledError):
            await self._listener
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()

    async def _listen(self) -> None:
        try:
            while line := await self._reader.readline():
                answer = json.loads(line)
                future = self._asked.get(answer.get("id", 0))
                if future is not None and not future.done():
                    future.set_result(answer)
        except OSError:
            pass
        finally:
            for future in self._asked.values():
                if not future.done():
                    future.set_exception(ConnectionResetError())
                    future.exception()  # whoever waited may be gone


def entry_from_json(data: Mapping[str, Any]) -> Entry:
    return Entry(
        number=data["number"],
        original=Flow(**data["original"]),
        reply=Flow(**data["reply"]),
        zone=data["zone"],
        id=0,
        status=sum(_STATUS_BITS[name] for name in data["status"]),
        ended=data["ended"],
    )

"""The runner's side of driver and judge: orders out, answers in, as awaitables."""

from __future__ import annotations

import asyncio
import itertools
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.errors import ObservationError
from lab.fabric.paths import ENV_MARK
from lab.probe.orders import Order, Sent
from lab.probe.wire import Seen
from lab.runtime import channel
from lab.runtime.launch import clean_environ
from lab.trace.flows import Flow

_START = 30.0  # seconds; scapy alone takes one
_GRACE = 5.0  # seconds an order may last beyond its own timeout


@dataclass(frozen=True, slots=True)
class Where:
    """A place as driver and judge need it. ``whole``: it has namespaces of its own beside the network's (a pod).

    ``lab`` is empty for a bare network namespace. ``router`` and ``interface``: the other end of its link.
    """

    place: str
    netns: str
    lab: str = ""
    whole: bool = False
    router: str = ""
    interface: str = ""


class _Line:
    """One channel: numbered questions, answers by number."""

    def __init__(self, control: socket.socket, who: str) -> None:
        self._control, self._who = control, who
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open = True
        control.setblocking(False)
        asyncio.get_running_loop().add_reader(control, self._readable)

    async def ask(self, message: Mapping[str, object], timeout: float) -> dict[str, Any]:
        """Raises ObservationError: it is gone, silent, or cannot."""
        number = next(self._numbers)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._asked[number] = future
        try:
            if not self._open:
                raise ConnectionResetError
            channel.send(self._control, {**message, "id": number})
            answer = await asyncio.wait_for(future, timeout)
        except TimeoutError:
            why = f"nothing within {timeout:g} s"
            raise ObservationError(f"the {self._who} does not answer", why=why, next_step="Run it again") from None
        except OSError as e:
            why = "; ".join(filter(None, (e.strerror, "its lab may be down")))
            raise ObservationError(f"the {self._who} has ended", why=why, next_step="See `lab ls`") from None
        finally:
            del self._asked[number]
        if "error" in answer:
            where, why = str(message.get("place", "")), str(answer["error"])
            raise ObservationError(f"the {self._who} cannot", where, why, "See `lab inspect` for what runs there")
        return answer

    def close(self) -> None:
        if self._open:
            self._open = False
            asyncio.get_running_loop().remove_reader(self._control)
            for future in self._asked.values():
                if not future.done():
                    future.set_exception(ConnectionResetError())
                    future.exception()  # whoever waited may be gone
            if not self.ready.done():
                self.ready.cancel()
        self._control.close()

    def _readable(self) -> None:
        with suppress(BlockingIOError):
            while True:
                received = channel.receive(self._control)
                if received is None:
                    self.close()
                    return
                message = received[0]
                if message.get("ready") and not self.ready.done():
                    self.ready.set_result(None)
                future = self._asked.get(int(message.get("id", 0)))
                if future is not None and not future.done():
                    future.set_result(message)


@dataclass(frozen=True, slots=True)
class Launched:
    """Driver and judge as processes; a `Crew` speaks with them."""

    process: subprocess.Popen[bytes]
    driver: socket.socket
    judge: socket.socket

    def kill(self) -> None:
        """Ends them without having spoken with them."""
        self.driver.close()
        self.judge.close()
        self.process.kill()
        self.process.wait()


def launch(mark: str = "") -> Launched:
    """Starts driver and judge; returns at once, so that their imports (a second) run beside other work. Needs no loop.

    Args:
        mark: the lab's id: its processes carry it (``lab.fabric.paths.ENV_MARK``).
    """
    ours, theirs = channel.pair()
    environ = clean_environ() | ({ENV_MARK: mark} if mark else {})
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "lab.probe.driver", str(theirs.fileno())],
            env=environ,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
    judge_ours, judge_theirs = channel.pair()
    with judge_theirs:
        channel.send(ours, {"op": "judge"}, (judge_theirs.fileno(),))
    return Launched(process, ours, judge_ours)


class Crew:
    """Speaks with a driver and a judge, from one event loop. `close` ends them."""

    def __init__(self, launched: Launched) -> None:
        self._process = launched.process
        self._driver = _Line(launched.driver, "driver")
        self._judge = _Line(launched.judge, "judge")
        self._watched: set[str] = set()

    async def ready(self) -> None:
        """Until the driver takes orders.

        Raises:
            ObservationError: it does not come up.
        """
        try:
            await asyncio.wait_for(asyncio.shield(self._driver.ready), _START)
        except (TimeoutError, asyncio.CancelledError) as e:
            if isinstance(e, asyncio.CancelledError) and not self._driver.ready.cancelled():
                raise  # it is we who are told to stop
            code = self._process.poll()
            why = f"it ended with {code}" if code is not None else "it was ended meanwhile, perhaps with its lab"
            raise ObservationError(
                "the driver does not start", why=why, next_step="See `lab ls`, then run it again"
            ) from None

    async def send(self, where: Where, order: Order) -> Sent:
        """Sends one flow; see ``lab.probe.driver``."""
        message = {
            "op": "flow",
            "lab": where.lab,
            "place": where.place,
            "netns": where.netns,
            "whole": where.whole,
            "order": order.to_json(),
        }
        answer = await self._driver.ask(message, order.timeout + _GRACE)
        return Sent.from_json(answer["sent"])

    async def watch(self, places: Sequence[Where]) -> None:
        """Begins to sniff the router's end of these places' links (those that have one)."""
        links = {
            w.place: {"netns": w.router, "interface": w.interface}
            for w in places
            if w.interface and w.place not in self._watched
        }
        if links:
            await self._judge.ask({"op": "watch", "links": links}, _START)
            self._watched |= links.keys()

    async def fence_seen(self, place: str, token: str, wait: float = 2.0) -> bool:
        """Whether a fence arrived at the router's end of a place's link, now or in time."""
        answer = await self._judge.ask({"op": "fence", "place": place, "token": token, "wait": wait}, wait + _GRACE)
        return bool(answer["seen"])

    async def send_fence(self, netns: str | Path, to: str) -> Flow:
        """Sends a fence from a namespace towards an address; its flow."""
        answer = await self._judge.ask({"op": "send", "netns": str(netns), "to": to}, _GRACE)
        sent = answer["fence"]
        return Flow(sent["proto"], sent["src"], sent["sport"], sent["dst"], sent["dport"])

    async def find(self, place: str, which: Sequence[Mapping[str, object]]) -> list[list[Seen]]:
        """Flows seen on a place's link, one list for each of ``which`` (see ``lab.probe.wire.Link.find``)."""
        answer = await self._judge.ask({"op": "find", "place": place, "which": list(which)}, _GRACE)
        return [[Seen(**{**s, "flow": Flow(**s["flow"])}) for s in found] for found in answer["found"]]

    async def close(self) -> None:
        """Ends both and waits for that."""
        self._judge.close()
        self._driver.close()
        try:
            await asyncio.to_thread(self._process.wait, 5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

"""The supervisor's side of the zygote and of the places it started: orders out, reports in, as futures.

Runs on one asyncio loop. Processes are held by pidfds, so a signal cannot hit a stranger with the same number, and
their numbers are the host's.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from lab.errors import LabError
from lab.runtime import channel, launch
from lab.runtime.channel import Message
from lab.runtime.place import PlaceSpec
from lab.runtime.spawn import ProcessSpec


class Ended(Exception):
    """A process or place ended before it did what was waited for. ``code`` as a shell gives it."""

    def __init__(self, name: str, code: int) -> None:
        self.name, self.code = name, code
        super().__init__(f"{name} ended with {code}")


class Process:
    """A process of a place. ``pid`` is the host's number."""

    def __init__(self, spec: ProcessSpec, pidfd: int) -> None:
        loop = asyncio.get_running_loop()
        self.spec = spec
        self.pidfd = pidfd
        self.pid = host_pid(pidfd)
        self.ready: asyncio.Future[None] = loop.create_future()
        self.exited: asyncio.Future[int] = loop.create_future()

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def running(self) -> bool:
        return not self.exited.done()

    async def wait_ready(self) -> None:
        """Until it said READY=1, or, of a program that says nothing, until it runs.

        Raises:
            Ended: it ended first.
        """
        await asyncio.wait((self.ready, self.exited), return_when=asyncio.FIRST_COMPLETED)
        if not self.ready.done():
            raise Ended(self.name, self.exited.result())

    def signal(self, number: signal.Signals) -> None:
        """Sends it a signal; nothing happens if it has ended."""
        if self.running:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def has_exited(self, code: int) -> None:
        """Called once, by the report of its end."""
        os.close(self.pidfd)
        self.exited.set_result(code)


class Place:
    """A running place: its first process, and those it started, by name (the latest of each name)."""

    def __init__(self, spec: PlaceSpec, control: socket.socket, on_exit: Callable[[Place, Process], None]) -> None:
        loop = asyncio.get_running_loop()
        self.spec = spec
        self.pid = 0
        self.pidfd = -1
        self.processes: dict[str, Process] = {}
        self.known: asyncio.Future[None] = loop.create_future()
        """Done once it is known whether there is a first process."""
        self.up: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[int] = loop.create_future()
        self._starting: dict[str, tuple[ProcessSpec, asyncio.Future[Process]]] = {}
        self._on_exit = on_exit
        self._control = control
        control.setblocking(False)
        loop.add_reader(control, self._readable)

    @property
    def name(self) -> str:
        return self.spec.name

    async def wait_up(self) -> None:
        """Until its namespaces and mounts are made.

        Raises:
            LabError: they cannot be; it says why.
        """
        await asyncio.wait((self.up, self.ended), return_when=asyncio.FIRST_COMPLETED)
        if not self.up.done():
            raise LabError(f"{self.name} cannot be started", why=f"its first process ended with {self.ended.result()}")
        self.up.result()
        # Two senders: the place can say that it is up before the zygote has said which process it is.
        await asyncio.wait((self.known,))

    async def spawn(self, spec: ProcessSpec) -> Process:
        """Starts a process and returns when it runs.

        Raises:
            LabError: it cannot be started, or the place has ended.
        """
        if self.ended.done() or spec.name in self._starting:
            raise LabError(f"{spec.name} cannot be started", self.name, "the place has ended")
        future: asyncio.Future[Process] = asyncio.get_running_loop().create_future()
        self._starting[spec.name] = (spec, future)
        try:
            channel.send(self._control, {"op": "spawn", "process": spec.to_json()})
        except OSError as e:
            del self._starting[spec.name]
            raise LabError(f"{spec.name} cannot be started", self.name, str(e.strerror)) from None
        return await future

    async def run(self, spec: ProcessSpec) -> int:
        """Runs a process to its end; its exit code."""
        return await (await self.spawn(spec)).exited

    def kill(self) -> None:
        """Ends the place and everything in it at once; ``ended`` says when it has."""
        if self.pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def has_started(self, pid: int, pidfd: int) -> None:
        """Called by the zygote's report."""
        self.pid, self.pidfd = pid, pidfd
        self.known.set_result(None)

    def watch(self) -> None:
        """From now on its end is seen on its pidfd: there is no zygote any more that would report it."""
        if self.pidfd >= 0:  # else it has ended already
            asyncio.get_running_loop().add_reader(self.pidfd, self.has_ended, 128 + signal.SIGKILL)

    def has_ended(self, code: int) -> None:
        """Called when the first process has ended, or could not be started; all others went with it."""
        if self.ended.done():
            return
        if not self.known.done():
            self.known.set_result(None)
        self._drain()
        asyncio.get_running_loop().remove_reader(self._control)
        self._control.close()
        self.ended.set_result(code)
        if self.pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self.pidfd)
            os.close(self.pidfd)
            self.pidfd = -1
        for _, future in self._starting.values():
            if not future.done():  # cancelled: nobody waits any more
                future.set_exception(LabError("a process cannot be started", self.name, "the place has ended"))
        self._starting.clear()
        for process in self.processes.values():
            if process.running:
                process.has_exited(128 + signal.SIGKILL)

    def fail(self, error: str) -> None:
        """The place cannot be: whoever waits for it hears why."""
        if not self.up.done():
            self.up.set_exception(LabError(f"{self.name} cannot be started", why=error))
            self.up.exception()  # told even if nobody asks

    def _drain(self) -> None:
        """Reports that came just before the end, e.g. why it ended."""
        with suppress(BlockingIOError):
            while received := channel.receive(self._control):
                self._report(*received)

    def _readable(self) -> None:
        with suppress(BlockingIOError):
            received = channel.receive(self._control)
            if received is None:
                asyncio.get_running_loop().remove_reader(self._control)
            else:
                self._report(*received)

    def _report(self, message: Message, fds: list[int]) -> None:
        event, name = message["event"], str(message.get("name", ""))
        process = self.processes.get(name)
        if event == "up":
            if not self.up.done():
                self.up.set_result(None)
        elif event == "started":
            spec, future = self._starting.pop(name)
            self.processes[name] = process = Process(spec, fds.pop())
            if not future.done():
                future.set_result(process)
        elif event == "ready":
            if process is not None and not process.ready.done():
                process.ready.set_result(None)
        elif event == "exited":
            if process is not None and process.running:
                process.has_exited(int(message["code"]))
                self._on_exit(self, process)
        elif event == "failed":
            if name in self._starting:
                spec, future = self._starting.pop(name)
                if not future.done():
                    future.set_exception(LabError(f"{name} cannot be started", self.name, str(message["error"])))
            else:
                self.fail(str(message["error"]))
        for fd in fds:
            os.close(fd)


class Zygote:
    """The zygote's process and channel. Make it with `launch`."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self.process = process
        self.places: dict[str, Place] = {}
        self.ready: asyncio.Future[None] = loop.create_future()
        self.gone: asyncio.Future[None] = loop.create_future()
        self._control = control
        control.setblocking(False)
        loop.add_reader(control, self._readable)

    @classmethod
    def launch(cls, modules: Sequence[str], environ: Mapping[str, str]) -> Zygote:
        """Execs a zygote (`lab.runtime.launch.zygote`). Returns at once."""
        return cls(*launch.zygote(modules, environ))

    def log_to(self, path: Path) -> None:
        """What it and the first processes of places say goes to this file (it exists once the lab's directory does)."""
        with suppress(OSError):  # it has ended: whoever waits for it hears that
            channel.send(self._control, {"op": "log", "path": str(path)})

    async def wait_ready(self) -> None:
        """Until it has imported everything.

        Raises:
            LabError: it cannot; it says which module and why.
        """
        await asyncio.wait((self.ready, self.gone), return_when=asyncio.FIRST_COMPLETED)
        if not self.ready.done():
            raise LabError("the lab's processes cannot be started", why="the zygote ended. See its log")
        self.ready.result()

    async def start(self, spec: PlaceSpec, on_exit: Callable[[Place, Process], None]) -> Place:
        """Starts a place and returns when its namespaces and mounts are made.

        Args:
            on_exit: called when one of its processes has ended.

        Raises:
            LabError: it cannot be started.
        """
        ours, theirs = channel.pair()
        place = self.places[spec.name] = Place(spec, ours, on_exit)
        order = {
            "op": "start",
            "place": spec.name,
            "netns": spec.netns,
            "notify_dir": spec.notify_dir,
            "hostname": spec.hostname,
            "view": spec.view.to_json() if spec.view else None,
            "sysctls": dict(spec.sysctls),
        }
        with theirs:
            try:
                channel.send(self._control, order, (theirs.fileno(),))
            except OSError as e:
                place.fail(str(e.strerror))
                place.has_ended(70)
        await place.wait_up()
        return place

    async def stop(self) -> None:
        """Ends all places at once, then the zygote, and waits for them. Nothing is left as a zombie."""
        starting = [place.known for place in self.places.values()]
        if starting:  # one that is just being forked would outlive us
            await asyncio.wait((self.gone, asyncio.gather(*starting)), return_when=asyncio.FIRST_COMPLETED)
        for place in self.places.values():
            place.kill()
        running = [place.ended for place in self.places.values() if place.pid]
        if running:
            await asyncio.wait(running)
        self._lost()
        self.process.kill()
        await asyncio.to_thread(self.process.wait)

    def _readable(self) -> None:
        try:
            received = channel.receive(self._control)
        except BlockingIOError:
            return
        if received is None:
            self._lost()
            return
        message, fds = received
        event, place = message["event"], self.places.get(str(message.get("place", "")))
        if event == "ready":
            self.ready.set_result(None)
        elif event == "started" and place is not None:
            place.has_started(int(message["pid"]), fds.pop())
        elif event == "ended" and place is not None:
            place.has_ended(int(message["code"]))
        elif event == "failed":
            error = str(message["error"])
            if place is not None:
                place.fail(error)
                place.has_ended(70)
            elif not self.ready.done():
                self.ready.set_exception(LabError("the lab's processes cannot be started", why=error))
        for fd in fds:
            os.close(fd)

    def _lost(self) -> None:
        if not self.gone.done():
            self.gone.set_result(None)
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._control)
            self._control.close()
            for place in self.places.values():
                if place.pid:
                    place.watch()
                else:
                    place.has_ended(70)


def host_pid(pidfd: int) -> int:
    """The number, in our own pid namespace, of the process that a pidfd stands for; -1 if it has been reaped."""
    for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
        if line.startswith("Pid:"):
            return int(line.split()[1])
    return -1

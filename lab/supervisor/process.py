"""The supervisor's process from the moment that its zygote runs: reads the mesh, runs the lab, ends.

Standard input brings the mesh (eight bytes of length, then a pickle) and is a leash from then on: when it ends, whoever
started us is gone, and the lab is taken down; a detached lab lets go of it once it is ready.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import pickle
import signal
import traceback
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TypeVar

from lab.errors import LabError, ObservationError
from lab.fabric import record
from lab.fabric.record import Record
from lab.manifests.model import Mesh
from lab.runtime import launch
from lab.runtime.client import Zygote
from lab.runtime.lines import error_to_json
from lab.supervisor.lab import Supervisor
from lab.supervisor.options import Options

T = TypeVar("T")


class _Interrupted(Exception):
    """Told to stop before the lab was ready."""


class Leash:
    """Standard input: first the mesh, then nothing, and its end says that whoever started us is gone."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._data = bytearray()
        self.mesh: asyncio.Future[Mesh] = self._loop.create_future()
        self.ended = asyncio.Event()
        self._loop.add_reader(0, self._readable)

    def _readable(self) -> None:
        data = os.read(0, 1 << 16)
        if not data:
            self.let_go()
            self.ended.set()
        self._data += data
        size = int.from_bytes(self._data[:8], "big")
        if len(self._data) >= 8 + size > 8 and not self.mesh.done():
            self.mesh.set_result(pickle.loads(self._data[8:]))

    def let_go(self) -> None:
        """From now on its end means nothing."""
        self._loop.remove_reader(0)


def run(options: Options, lab_id: str, zygote: launch.Launched) -> int:
    """Runs one lab to its end."""
    null = os.open(os.devnull, os.O_RDWR)
    reports = os.fdopen(os.dup(1), "wb", buffering=0)  # nothing is left to be written when nobody reads any more
    os.dup2(null, 1)  # what is printed by accident must not look like a report

    def say(message: Mapping[str, object]) -> None:
        with suppress(OSError, ValueError):
            left = memoryview(json.dumps(message, default=str).encode() + b"\n")
            while left:
                left = left[reports.write(left) :]

    def let_go() -> None:
        """Detached: nothing of whoever started us stays open."""
        os.dup2(null, 0)
        os.dup2(null, 2)
        reports.close()

    try:
        asyncio.run(_run(options, lab_id, zygote, say, let_go))
    except LabError as e:
        e.next_step = e.next_step or _next_step(e)
        say({"event": "error", "error": error_to_json(e)})
        return e.exit_code
    except Exception as e:
        traceback.print_exc()
        why = f"{type(e).__name__}: {e}"
        say({"event": "error", "error": error_to_json(LabError("the lab's process failed", why=why))})
        return 1
    say({"event": "down"})
    return 0


def _next_step(error: LabError) -> str:
    """What to do about an error that does not say so itself: nobody's manifests are at fault."""
    if isinstance(error, ObservationError):
        return "Nothing of the lab is left. Run it where the kernel can do that."
    return "Nothing of the lab is left: try again, and report it if it stays."


async def _run(
    options: Options,
    lab_id: str,
    launched: launch.Launched,
    say: Callable[[Mapping[str, object]], None],
    let_go: Callable[[], None],
) -> None:
    loop = asyncio.get_running_loop()
    leash = Leash()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, leash.ended.set)
    zygote = Zygote(*launched)
    _warm_up()
    try:
        mesh = await _unless_ended(leash.ended, leash.mesh)
        known = Record.create(mesh.name, lab_id, temporary=options.temporary)
    except BaseException as e:  # there is no lab yet: the zygote is all that there is
        await zygote.stop()
        if isinstance(e, _Interrupted):
            return
        raise
    try:
        known.add_process(zygote.process.pid, "zygote")
        supervisor = Supervisor(options, mesh, known, zygote, leash.ended)
    except BaseException:
        await zygote.stop()
        known.close()
        record.down(known.name)
        raise
    try:
        await _unless_ended(leash.ended, supervisor.up())
        say({"event": "ready", "info": await supervisor.inspect()})
        if options.detach:
            leash.let_go()
            let_go()
        await leash.ended.wait()
    except _Interrupted:
        pass
    finally:
        await supervisor.down()


async def _unless_ended(ended: asyncio.Event, work: Awaitable[T]) -> T:
    """The result of the work; it is cancelled if the end comes first.

    Raises:
        _Interrupted: the end came first.
    """
    doing = asyncio.ensure_future(work)
    ending = asyncio.ensure_future(ended.wait())
    try:
        await asyncio.wait((doing, ending), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise _Interrupted
        return doing.result()
    finally:
        for task in (doing, ending):
            task.cancel()
        await asyncio.gather(doing, ending, return_exceptions=True)


def _warm_up() -> None:
    """Imports what the fabric needs (a quarter of a second) while the zygote imports and the manifests are read."""
    importlib.import_module("lab.fabric.build")
    importlib.import_module("lab.fabric.plan")

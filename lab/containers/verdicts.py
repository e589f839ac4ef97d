"""The tests of a mesh of containers: every TrafficTest sent by the probers, joined and judged as in a lab."""

from __future__ import annotations

import asyncio
import fcntl
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lab.containers import paths
from lab.containers.ground import open_ground
from lab.manifests.load import load
from lab.manifests.model import Mesh, TrafficTest
from lab.probe import runner
from lab.verdict import Verdict
from lab.verify import Outcome

_AT_ONCE = 4


def run(files: Sequence[str], *, only: str | None, wait: float) -> Outcome:
    """Waits for the mesh, then runs the tests of the manifests.

    Args:
        wait: for the mesh to be ready, in seconds.

    Raises:
        InputError: bad manifests, or no test to run. ObservationError: a pod has no prober.
    """
    mesh = load(files)
    tests = runner.select(mesh.tests, only)
    with _alone():
        verdicts = asyncio.run(_run(mesh, tests, wait))
    return Outcome(mesh.name, _backend(verdicts), verdicts)


@contextmanager
def _alone() -> Iterator[None]:
    """Two runs at a time would take each other's flows for their own."""
    with paths.LOCK.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("another run of the tests is under way; this one waits for its end")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


async def _run(mesh: Mesh, tests: Sequence[TrafficTest], wait: float) -> list[Verdict]:
    return await runner.run_on(await open_ground(mesh, wait, _say), tests, at_once=_AT_ONCE)


def _backend(verdicts: Sequence[Verdict]) -> str:
    """Which back ends the rules were in that decided, by the kernel's own account."""
    rules = [end.rule for v in verdicts for end in (v.outbound, v.inbound, v.dns) if end and end.rule]
    return ", ".join(sorted({rule.backend for rule in rules if rule.backend})) or "none"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201

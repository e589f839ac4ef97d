"""``lab verify``: a lab by name or from manifests, its TrafficTests run, the verdicts printed or written."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab import lifecycle
from lab.errors import InputError, LabError
from lab.fabric import paths, record
from lab.memory import mesh_of

if TYPE_CHECKING:
    from lab.manifests.model import Mesh, TrafficTest
    from lab.proofs import Proof
    from lab.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run of tests gave. ``backend`` is the iptables back end in the lab's pods; ``predictions`` stand beside the
    observed verdicts where both were asked for."""

    lab: str
    backend: str
    verdicts: Sequence[Verdict]
    predictions: Sequence[Verdict] = ()

    @property
    def exit_code(self) -> int:
        from lab.probe import report

        # A prediction that is undecided beside an observation is no failure to observe.
        return report.exit_code([*self.verdicts, *(p for p in self.predictions if p.passed is False)])

    def to_json(self) -> dict[str, Any]:
        from lab.probe import report

        every = self.verdicts
        if self.predictions:
            every = [v for pair in zip(self.verdicts, self.predictions, strict=True) for v in pair]
        return {**report.to_json(self.lab, every), "iptables": self.backend}

    def junit(self) -> str:
        from lab.probe import report

        return report.junit(self.lab, self.verdicts)

    def print_table(self) -> None:
        """The verdict table, then a line that counts them and names the back end."""
        from lab.probe import report
        from lab.show import console

        screen = console()
        wrong = [replace(p, test=f"{p.test} (predicted)") for p in self.predictions if p.passed is not True]
        screen.print(report.table([*self.verdicts, *wrong]))
        counts = report.summary(self.verdicts)
        screen.print(
            f"{self.lab}: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped "
            f"(iptables back end: {self.backend})"
        )
        if self.predictions:
            told = report.summary(self.predictions)
            screen.print(f"predictions: {told['passed']} hold, {told['failed']} do not, {told['skipped']} undecided")


def verify(
    what: Sequence[str],
    *,
    only: str | None,
    backend: str,
    log: Callable[[str], None],
    runtime: str | None = None,
    proof: Proof = "observed",
    progress: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Runs the tests of the running lab ``what`` names, or of manifests, whose lab is then brought up and taken down.

    Nothing given means the only lab that is up. ``log`` gets a line when something is not as asked for, ``progress`` one for
    each phase. ``proof``: see `lab.proofs`; for ``predicted`` nothing is run at all. ``backend`` and ``runtime`` (None:
    ``netns``, or what a running lab has) are those of a lab that is brought up.

    Raises:
        InputError: nothing to run, bad manifests, or the lab runs with another ``backend`` or ``runtime``. LabError: the lab does not come up.
    """
    from lab.probe import runner

    if proof == "predicted":
        return _predicted(what, only, backend)
    with _lab(what, only, backend, log, runtime, progress) as (lab, mesh):
        tests = runner.select(mesh.tests, only)
        progress(f"{lab.name}: {len(tests)} tests")
        verdicts = _run(lab.name, mesh, tests)
        if proof == "observed":
            return Outcome(lab.name, lab.backend, verdicts)
        from lab import proofs

        predictions = proofs.predicted(mesh, tests, lab.backend)  # type: ignore[arg-type]
        return Outcome(lab.name, lab.backend, proofs.held_against(verdicts, predictions), predictions)


def _run(name: str, mesh: Mesh, tests: Sequence[TrafficTest]) -> list[Verdict]:
    """The verdicts. Of flows that end because the lab is taken down there are none, whatever was seen of them.

    Raises:
        InputError: the lab is gone, or has crashed.
    """
    from lab.probe import runner

    lab_id = record.info(name).id
    try:
        verdicts = runner.run_tests(name, mesh, tests)
    except LabError:
        _has_to_run(name, lab_id)
        raise
    if not all(verdict.passed for verdict in verdicts):
        _has_to_run(name, lab_id)
    return verdicts


def _has_to_run(name: str, lab_id: str) -> None:
    state = lifecycle.state(name, lab_id)
    if state != "running":
        raise _gone(name) if state == "gone" else _crashed(name)


def _predicted(what: Sequence[str], only: str | None, backend: str) -> Outcome:
    """The predictions for a running lab's manifests, or for files."""
    from lab import proofs
    from lab.probe import runner

    up = [lab.name for lab in record.list_labs() if lab.state == "running"]
    name = what[0] if what else up[0] if len(up) == 1 else ""
    if name in up and (not what or not os.path.exists(name)):
        mesh = lifecycle.stored_mesh(name)
    elif what:
        mesh = mesh_of(what)
    else:
        raise InputError("nothing to predict", next_step="Give a FILE, e.g. topologies/quickstart.yaml")
    tests = runner.select(mesh.tests, only)
    return Outcome(mesh.name, backend, proofs.predicted(mesh, tests, backend))  # type: ignore[arg-type]


@contextmanager
def alone(name: str, log: Callable[[str], None]) -> Iterator[None]:
    """One run of tests a lab at a time: what another run sends would be taken for this one's on the wire."""
    try:
        lock = open(paths.run_dir(name) / "verify.lock", "w")  # noqa: SIM115  (closed below)
    except FileNotFoundError:
        raise _gone(name) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log(f"another run of flows in {name} is under way; this one waits for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock.fileno()).st_nlink == 0:
            raise _gone(name)
        yield


def _gone(name: str) -> InputError:
    return InputError(f'lab "{name}" is gone', why="another process took it down", next_step="See `lab ls`")


def _crashed(name: str) -> InputError:
    return InputError(f'lab "{name}" has crashed', why="its process is gone", next_step=f"Run `lab down {name}`")


@contextmanager
def _lab(
    what: Sequence[str],
    only: str | None,
    backend: str,
    log: Callable[[str], None],
    runtime: str | None,
    progress: Callable[[str], None],
) -> Iterator[tuple[lifecycle.Lab, Mesh]]:
    from lab.probe import runner

    running = {lab.name: lab for lab in record.list_labs() if lab.state == "running"}
    up = list(running)
    if not what and len(up) != 1:
        raise InputError(
            "which lab?" if up else "nothing to verify",
            why=f"up: {', '.join(up)}" if up else "no lab is up",
            next_step="Give a name, or a FILE to bring up" if up else "Give a FILE, e.g. topologies/quickstart.yaml",
        )
    if not what or (len(what) == 1 and not os.path.exists(what[0])):
        name = what[0] if what else up[0]
        if name not in up:
            if any(lab.name == name for lab in record.list_labs()):
                raise _crashed(name)
            raise InputError(f'no lab and no file is called "{name}"', next_step="See `lab ls`, or give a FILE")
        lab, mesh = lifecycle.attach(name), lifecycle.stored_mesh(name)
        lifecycle.refuse_other_settings(lab.info, backend, runtime)
        with alone(name, log):
            yield lab, mesh
        return
    mesh = mesh_of(what)
    runner.select(mesh.tests, only)  # nothing to run is said before anything is made
    known = running.get(mesh.name)
    if known is not None and not known.temporary:
        stored = _stored_manifests(mesh.name)
        if stored == sorted(Path(file).read_bytes() for file in mesh.files):
            lab = lifecycle.attach(mesh.name)
            lifecycle.refuse_other_settings(lab.info, backend, runtime)
            with alone(mesh.name, log):
                yield lab, mesh
            return
        # The running lab is somebody's: these manifests get a lab of their own beside it.
        if stored is not None:
            mesh = _beside(mesh, mesh.name, "a lab of that name runs other manifests", log)
    progress(f"{mesh.name}: up, {len(mesh.pods)} pods")
    lab = _brought_up(mesh, backend, runtime or "netns", log)
    mesh = replace(mesh, name=lab.name)
    with ExitStack() as stack:
        try:
            stack.enter_context(alone(lab.name, log))
        except BaseException:
            lab.down()
            raise
        stack.callback(lab.down)  # before others may have it: who waits for this lab shall find that it is gone
        yield lab, mesh
    progress(f"{mesh.name}: down")


def _brought_up(mesh: Mesh, backend: str, runtime: str, log: Callable[[str], None]) -> lifecycle.Lab:
    """A lab for this run alone. One that another run brought up goes with that run, so this one takes another name."""
    wanted = mesh.name
    while True:
        if _is_anothers(mesh.name):
            mesh = _beside(mesh, wanted, "another run of tests has a lab of that name", log)
        try:
            return lifecycle.Lab.up(mesh, iptables=backend, runtime=runtime, temporary=True)
        except InputError:
            if not _is_anothers(mesh.name):  # else both began at the same moment, and the other one was faster
                raise


def _is_anothers(name: str) -> bool:
    return any(lab.name == name and lab.temporary and lab.state == "running" for lab in record.list_labs())


def _beside(mesh: Mesh, wanted: str, why: str, log: Callable[[str], None]) -> Mesh:
    mesh = replace(mesh, name=_free_name(wanted))
    log(f"{why}; this one is called {mesh.name}")
    return mesh


def _stored_manifests(name: str) -> list[bytes] | None:
    """The texts that the running lab was started with; None if another process has taken it down meanwhile."""
    try:
        return sorted(p.read_bytes() for p in paths.manifests_dir(name).iterdir() if p.is_file())
    except FileNotFoundError:
        return None


def _free_name(name: str) -> str:
    taken = {lab.name for lab in record.list_labs()}
    return next(n for n in (f"{name}-{i}" for i in range(2, 1000)) if n not in taken)

"""``lab verify``: a lab by name or from manifests, its TrafficTests run, the verdicts printed or written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab import lifecycle
from lab.errors import InputError
from lab.fabric import paths, record

if TYPE_CHECKING:
    from lab.manifests.model import Mesh
    from lab.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run of tests gave. ``backend`` is the iptables back end in the lab's pods."""

    lab: str
    backend: str
    verdicts: Sequence[Verdict]

    @property
    def exit_code(self) -> int:
        from lab.probe import report

        return report.exit_code(self.verdicts)

    def to_json(self) -> dict[str, Any]:
        from lab.probe import report

        return {**report.to_json(self.lab, self.verdicts), "iptables": self.backend}

    def junit(self) -> str:
        from lab.probe import report

        return report.junit(self.lab, self.verdicts)

    def print_table(self) -> None:
        """The verdict table, then a line that counts them and names the back end."""
        from lab.probe import report
        from lab.show import console

        screen = console()
        screen.print(report.table(self.verdicts))
        counts = report.summary(self.verdicts)
        screen.print(
            f"{self.lab}: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped "
            f"(iptables back end: {self.backend})"
        )


def verify(
    what: Sequence[str], *, only: str | None, backend: str, log: Callable[[str], None], runtime: str = "netns"
) -> Outcome:
    """Runs the tests of the running lab ``what`` names, or of manifests, whose lab is then brought up and taken down.

    Nothing given means the only lab that is up. ``log`` gets a line when something takes its time.

    Raises:
        InputError: nothing to run, or bad manifests. LabError: the lab does not come up.
    """
    from lab.probe import runner

    with _lab(what, only, backend, log, runtime) as (lab, mesh):
        verdicts = runner.run_tests(lab.name, mesh, runner.select(mesh.tests, only))
        return Outcome(lab.name, lab.backend, verdicts)


@contextmanager
def _lab(
    what: Sequence[str], only: str | None, backend: str, log: Callable[[str], None], runtime: str
) -> Iterator[tuple[lifecycle.Lab, Mesh]]:
    from lab.probe import runner

    up = [lab.name for lab in record.list_labs() if lab.state == "running"]
    if not what and len(up) != 1:
        raise InputError(
            "which lab?" if up else "nothing to verify",
            why=f"up: {', '.join(up)}" if up else "no lab is up",
            next_step="Give a name, or a FILE to bring up" if up else "Give a FILE, e.g. topologies/quickstart.yaml",
        )
    if not what or (len(what) == 1 and not os.path.exists(what[0])):
        name = what[0] if what else up[0]
        if name not in up:
            raise InputError(f'no lab and no file is called "{name}"', next_step="See `lab ls`, or give a FILE")
        yield lifecycle.attach(name), lifecycle.stored_mesh(name)
        return
    from lab.manifests.load import load

    mesh = load(what)
    runner.select(mesh.tests, only)  # nothing to run is said before anything is made
    if mesh.name in up:
        if _same_manifests(mesh):
            yield lifecycle.attach(mesh.name), mesh
            return
        # The running lab is somebody's: these manifests get a lab of their own beside it.
        mesh = replace(mesh, name=_free_name(mesh.name))
        log(f"a lab of that name runs other manifests; this one is called {mesh.name}")
    with lifecycle.running(mesh, iptables=backend, runtime=runtime) as lab:
        yield lab, mesh


def _same_manifests(mesh: Mesh) -> bool:
    """Whether the running lab was started with the very text of these manifests."""
    stored = sorted(p.read_bytes() for p in paths.manifests_dir(mesh.name).iterdir() if p.is_file())
    return stored == sorted(Path(file).read_bytes() for file in mesh.files)


def _free_name(name: str) -> str:
    taken = {lab.name for lab in record.list_labs()}
    return next(n for n in (f"{name}-{i}" for i in range(2, 1000)) if n not in taken)

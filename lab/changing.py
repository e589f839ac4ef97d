"""``lab up`` of a lab that runs, and ``lab apply``: what lies between it and manifests, and the change itself."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab import lifecycle
from lab.errors import InputError
from lab.fabric import paths, record

if TYPE_CHECKING:
    from lab.manifests.diff import Diff
    from lab.manifests.model import Mesh
    from lab.runtime.turnover import Turnover

_MARGIN = 60.0  # seconds that a change may take beyond the wait for new pods, also to be undone


@dataclass(frozen=True, slots=True)
class Changes:
    """What lies between a running lab and manifests. ``mesh`` is what they say; ``done`` that the lab is that now.

    ``nacks`` is, by pod, what its Envoy rejects since (routes and endpoints; of anything else the change is undone).
    """

    mesh: Mesh
    diff: Diff
    places: Turnover
    done: bool
    nacks: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "lab": self.mesh.name,
            "applied": self.done,
            **self.diff.to_json(),
            "places": self.places.to_json(),
            "nacks": dict(self.nacks),
        }

    def doubts(self) -> list[str]:
        """What is not as it should be, a line each."""
        return [f"pod {pod} keeps what it had: its Envoy rejects {error}" for pod, error in self.nacks.items()]

    def lines(self) -> list[str]:
        """For people: one object a line, then what became of pods and external hosts."""
        if not self.diff:
            return [f"{self.mesh.name}: already up, nothing changed"]
        marks = (("+", self.diff.added), ("-", self.diff.removed), ("~", self.diff.changed))
        names = self.places.to_json()
        counts = ", ".join(f"{len(names[what])} {what}" for what in ("added", "removed", "replaced"))
        places = [f"  app restarted: {name}" for name in names["restarted"]]
        places += [f"  replaced: {name}" for name in names["replaced"]]
        return [
            *(f"{mark} {ref}" for mark, refs in marks for ref in refs),
            f"{self.mesh.name}: {'changed' if self.done else 'would change'}; places: {counts}",
            *places,
        ]


def to_manifests(
    name: str, files: Sequence[str], *, dry_run: bool = False, timeout: float = lifecycle.TIMEOUT
) -> Changes:
    """Makes a running lab the one that manifests describe.

    Args:
        timeout: how long new pods may take to be ready, in seconds.

    Raises:
        LabError: bad manifests, or the lab cannot be so; it is as it was.
    """
    from lab.manifests import load, stored

    refuse_temporary(name, "Wait for its end, or choose another name with --name")
    base = stored.fingerprint(paths.manifests_dir(name))
    old = lifecycle.stored_mesh(name)
    texts = load.texts(files)
    if [text for _, text in texts] == [text for _, text in stored.texts(paths.manifests_dir(name))]:
        return _unchanged(old)
    new = replace(load.load_texts(texts, name, old), files=tuple(os.path.abspath(file) for file, _ in texts))
    copies = [(stored.copy_name(number, file), text) for number, (file, text) in enumerate(texts)]
    return _change(name, base, old, new, copies, dry_run, timeout)


def apply(name: str, files: Sequence[str], *, dry_run: bool = False, timeout: float = lifecycle.TIMEOUT) -> Changes:
    """Adds the objects of manifests to a running lab; those of the same kind, namespace and name are replaced.

    Raises:
        LabError: bad manifests, or the lab cannot be so; it is as it was.
    """
    from lab.manifests import load, stored
    from lab.manifests.merge import merge

    refuse_temporary(name, "Wait for its end, or name another lab with --lab")
    directory = paths.manifests_dir(name)
    base = stored.fingerprint(directory)
    old = lifecycle.stored_mesh(name)
    current = stored.texts(directory)
    texts = load.texts(files)
    merged = merge(current, texts)
    kept = merged[: -len(texts)]
    given = tuple(os.path.abspath(file) for file, _ in texts)
    new = replace(load.load_texts(merged, name, old), files=tuple(dict.fromkeys((*old.files, *given))))
    first = 1 + max((int(Path(file).name[:4]) for file, _ in kept), default=-1)
    copies = [(Path(file).name, text) for file, text in kept]
    copies += [(stored.copy_name(number, file), text) for number, (file, text) in enumerate(texts, first)]
    return _change(name, base, old, new, copies, dry_run, timeout)


def refuse_temporary(name: str, next_step: str) -> None:
    """The lab of a run of tests is that run's alone: changed, it would spoil them; and it goes when they end.

    Raises:
        InputError: it is one, or there is no such lab.
    """
    lab = record.info(name)
    if lab.temporary:
        raise InputError(
            f'lab "{name}" is in use', str(lab.path), "a run of tests has it, and takes it down", next_step
        )


def _unchanged(mesh: Mesh) -> Changes:
    from lab.manifests.diff import Diff
    from lab.runtime.turnover import Turnover

    return Changes(mesh, Diff(), Turnover(), done=True)


def _change(
    name: str, base: str, old: Mesh, new: Mesh, copies: Sequence[tuple[str, str]], dry_run: bool, timeout: float
) -> Changes:
    from lab.manifests import diff, stored
    from lab.runtime import turnover

    changes = Changes(new, diff.between(old, new), turnover.between(old, new), done=not dry_run)
    if dry_run:
        return changes
    workplace = Path(tempfile.mkdtemp(prefix="change-", dir=paths.run_dir(name)))
    try:
        staged = workplace / "manifests"
        staged.mkdir(mode=0o755)
        for file, text in copies:
            (staged / file).write_text(text, encoding="utf-8")
        stored.save(new, staged)
        answer = lifecycle.ask(
            name,
            {"op": "change", "staged": str(staged), "base": base, "timeout": timeout},
            timeout=2 * timeout + _MARGIN,
        )
    finally:
        shutil.rmtree(workplace, ignore_errors=True)
    return replace(changes, nacks=answer["nacks"])

"""From what was typed to a mesh on paper: manifests, or a lab that runs, with what its pods have now."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lab.errors import InputError

if TYPE_CHECKING:
    from lab.explaining import Backend, MeshWorld
    from lab.manifests.model import Mesh
    from lab.memory import Memory


@dataclass(frozen=True, slots=True)
class Side:
    """A mesh to predict flows of. ``live``: with the rules and configuration of a lab that runs."""

    name: str
    world: MeshWorld
    live: bool = False
    memory: Memory | None = None

    @property
    def mesh(self) -> Mesh:
        return self.world.mesh

    def save(self) -> None:
        """Remembers what was generated of manifests, for the next time."""
        if self.memory is not None:
            self.memory.save()


def read(what: Sequence[str], backend: Backend = "auto", previous: Mesh | None = None) -> Side:
    """The mesh of files and directories, or of the running lab of that name (a file of that name goes first).

    Args:
        backend: of the rules, for manifests.
        previous: manifests are read as news to this one: its name stays, and the addresses of what is in both.

    Raises:
        InputError: neither a file nor a lab, or bad manifests, or a running lab without being root.
    """
    from lab.explaining import MeshWorld
    from lab.fabric import record

    if not any(os.path.lexists(name) for name in what):
        if len(what) == 1 and any(lab.name == what[0] and lab.state == "running" for lab in record.list_labs()):
            return _of_lab(what[0])
        if len(what) == 1 and not what[0].endswith((".yaml", ".yml")):
            raise InputError(
                f'no lab that runs and no file is called "{what[0]}"', next_step="See `lab ls`, or give a FILE"
            )
    if previous is not None:
        from lab.manifests.load import load

        return Side(", ".join(what), MeshWorld(load(what, previous.name, previous), backend))
    from lab.memory import Memory

    memory = Memory.of(what)
    return Side(", ".join(what), MeshWorld(memory.mesh(), backend, kept=memory.get), memory=memory)


def _of_lab(name: str) -> Side:
    from lab.asking import live
    from lab.explaining import MeshWorld

    if os.geteuid() != 0:
        raise InputError(
            "a lab that runs is seen by root alone", f"lab {name}", "it lives in network namespaces", "Run it with sudo"
        )
    now = live(name)
    return Side(name, MeshWorld(now.mesh, now.backend, rules_of=now.rules, envoy_of=now.configs), live=True)

"""A running lab that becomes one mesh after the other, and flows in it beside their predictions."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mesh_made
import yaml

from lab import changing, explaining, proofs
from lab.fabric import paths
from lab.lifecycle import Lab
from lab.manifests import load
from lab.manifests.model import FlowFrom, Mesh, TrafficTest
from lab.probe import runner
from lab.probe.ground import Ground, open_ground
from lab.verdict import Verdict

Document = Mapping[str, Any]
_AT_ONCE = 12


class Compared(NamedTuple):
    """One flow: what was predicted, what was observed, and where they differ (keys of a verdict with both sides)."""

    test: TrafficTest
    predicted: Verdict
    observed: Verdict

    @property
    def differences(self) -> tuple[str, ...]:
        return proofs.held_against([self.observed], [self.predicted])[0].differences


class MeshLab:
    """The lab; `close` takes it down. Driver, judge and observer serve all meshes: their pods are the same."""

    def __init__(self, directory: Path) -> None:
        self.name = f"slt-{os.getpid()}-meshes"
        self._file = directory / "mesh.yaml"
        self._loop = asyncio.new_event_loop()
        self._file.write_text(text([mesh_made.config("ALLOW_ANY")]))
        mesh = load.load([self._file], self.name)
        self._lab = Lab.up(mesh, self.name)
        try:
            self.backend = self._lab.backend
            self._ground = self._loop.run_until_complete(self._opened(mesh))
        except BaseException:
            self._lab.down()
            raise

    async def _opened(self, mesh: Mesh) -> Ground:
        return await open_ground(self.name, mesh, [FlowFrom(pod=name) for name in mesh_made.PODS])

    def become(self, documents: Sequence[Document]) -> Mesh:
        """Makes the lab the mesh of the ground and these documents; every proxy has taken it when this returns.

        Raises:
            LabError: it is none.
        """
        self._file.write_text(text(documents))
        mesh = changing.to_manifests(self.name, [str(self._file)]).mesh
        for pod in mesh.pods:
            self._end_connections(pod.name)
        return mesh

    def _end_connections(self, place: str) -> None:
        """Closes what proxies keep open to one another: a kept connection goes the way of the mesh in which it was made.

        The proxy's own connections to the control plane, from and to higher ports, stay. (A kernel without
        CONFIG_INET_DIAG_DESTROY closes none.)
        """
        enter = ["nsenter", f"--net={paths.netns_path(self.name, place)}"]
        kept = ["ss", "-K", "-t", "state", "established", "( dport < 15000 or sport < 15000 )"]
        subprocess.run([*enter, *kept], stdout=subprocess.DEVNULL, check=True)

    def compare(self, mesh: Mesh, tests: Sequence[TrafficTest]) -> list[Compared]:
        """Sends the flows, and predicts them."""
        observed = self._loop.run_until_complete(self._observe(mesh, tests))
        predicted = explaining.predict_all(mesh, tests, self.backend)  # type: ignore[arg-type]
        return [Compared(*three) for three in zip(tests, predicted, observed, strict=True)]

    async def _observe(self, mesh: Mesh, tests: Sequence[TrafficTest]) -> list[Verdict]:
        places = asyncio.Semaphore(_AT_ONCE)
        alone: defaultdict[tuple[str, str], asyncio.Lock] = defaultdict(asyncio.Lock)
        self._ground.mesh = mesh

        async def one(test: TrafficTest) -> Verdict:
            # As `lab.probe.runner` does: on the wire only addresses tell flows apart.
            async with alone[(test.flow_from.pod, test.to.host)], places:
                return await runner.judge(self._ground, test)

        return await asyncio.gather(*map(one, tests))

    def close(self) -> None:
        try:
            self._loop.run_until_complete(self._ground.close())
            self._loop.close()
        finally:
            self._lab.down()


def text(documents: Sequence[Document]) -> str:
    """Manifests of the ground and these documents."""
    return "---\n".join(yaml.safe_dump(dict(d), sort_keys=False) for d in (*mesh_made.ground(), *documents))

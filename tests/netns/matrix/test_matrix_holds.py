"""The matrix of the quickstart mesh against real flows: every field is sent."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab import lifecycle
from lab.explain import compare
from lab.explaining import MeshWorld
from lab.manifests.load import load
from lab.manifests.model import Mesh
from lab.matrix import difference
from lab.matrix.cells import Cell, cell
from lab.matrix.matrix import Matrix, as_test, matrix, sources
from lab.matrix.sides import read
from lab.probe import runner
from lab.verdict import Verdict

pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]

QUICKSTART = Path(__file__).parents[3] / "topologies" / "quickstart.yaml"


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return dataclasses.replace(load([QUICKSTART]), name=f"slt-{os.getpid()}-matrix")


@pytest.fixture(scope="module")
def running(mesh: Mesh) -> Iterator[lifecycle.Lab]:
    with lifecycle.running(mesh) as lab:
        yield lab


@pytest.fixture(scope="module")
def predicted(mesh: Mesh, running: lifecycle.Lab) -> Matrix:
    return matrix(MeshWorld(mesh, running.backend))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def observed(mesh: Mesh, running: lifecycle.Lab, predicted: Matrix) -> list[Verdict]:
    by_name = {source.name: source for source in sources(mesh)}
    tests = [as_test(by_name[field.source], field.target) for field in predicted.cells]
    return runner.run_tests(running.name, mesh, tests)


def told(field: Cell) -> tuple[object, ...]:
    return field.how, field.reaches, field.wire, field.blocked_by, field.cluster, field.flags


def test_every_field_is_what_happens(predicted: Matrix, observed: list[Verdict]) -> None:
    assert len(predicted.cells) == 5 * 20
    wrong = {}
    for field, seen in zip(predicted.cells, observed, strict=True):
        here = [str(difference) for difference in compare.differences(field.verdict, seen)]
        was = cell(field.source, field.target, seen)
        if told(was) != told(field):
            here.append(f"predicted {told(field)}, observed {told(was)}")
        if here:
            wrong[f"{field.source} -> {field.target.label}"] = here
    assert wrong == {}


def test_a_lab_that_runs_has_the_matrix_of_its_manifests(running: lifecycle.Lab, predicted: Matrix) -> None:
    side = read([running.name])
    found = matrix(side.world, live=side.live)
    assert found.live
    assert [told(field) for field in found.cells] == [told(field) for field in predicted.cells]
    assert [field.sentence for field in found.cells] == [field.sentence for field in predicted.cells]


def test_a_lab_that_runs_does_not_differ_from_its_manifests(running: lifecycle.Lab) -> None:
    lab, files = read([running.name]), read([str(QUICKSTART)])
    there = difference.between(lab, read([str(QUICKSTART)], previous=lab.mesh))
    back = difference.between(files, lab)
    for found in (there, back):
        assert found.flows.compared > 100
        assert not found, list(found.lines(200))


def test_what_new_manifests_would_do_to_a_lab_that_runs(running: lifecycle.Lab) -> None:
    registry_only = str(QUICKSTART.parent / "registry-only.yaml")
    done = subprocess.run(
        [sys.executable, "-m", "lab", "diff", running.name, registry_only, "--json"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "")
    document = json.loads(done.stdout)
    assert (document["before"]["source"], document["after"]["source"]) == ("lab", "manifests")
    broken = {(c["from"], c["to"]["port"]) for c in document["changes"] if c["to"]["host"] == "unknown.example"}
    assert {port for pod, port in broken if pod == "frontend.frontend"} == {80, 443, 8081, 9000}
    assert document["places"] == {"added": [], "removed": [], "replaced": [], "restarted": []}

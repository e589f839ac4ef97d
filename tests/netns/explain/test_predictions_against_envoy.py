"""Predictions against real Envoys: random small meshes, random requests, and not one disagreement.

One lab becomes each mesh while it runs. ``SIDECARLAB_FUZZ_REQUESTS`` is how many requests are sent, of meshes that are others every time;
without it the same 320 are. ``SIDECARLAB_FUZZ_SEED`` repeats a run.
A disagreement counts if it is still there when the flow is sent alone; then objects are taken from the mesh, as far as `SHRINKING`
seconds go, and what is left is shown. The truth about it then becomes one of `CASES`.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Sequence

import mesh_made
import pytest
import yaml
from mesh_cases import CASES, Case
from mesh_lab import Compared, Document, MeshLab

from lab import asking, proxyconfig
from lab.errors import LabError
from lab.manifests.model import TrafficTest

pytestmark = [pytest.mark.root, pytest.mark.timeout(1800)]

REQUESTS = int(os.environ.get("SIDECARLAB_FUZZ_REQUESTS", "0"))
SEED = int(os.environ.get("SIDECARLAB_FUZZ_SEED", "0")) or (
    random.SystemRandom().randrange(2, 1 << 32) if REQUESTS else 1
)
REQUESTS = REQUESTS or 320
EACH = 40
"""Requests to one mesh."""
SHRINKING = 30.0


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshLab]:
    made = MeshLab(tmp_path_factory.mktemp("meshes"))
    yield made
    made.close()


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_once_found(lab: MeshLab, case: Case) -> None:
    documents = [document for document in yaml.safe_load_all(case.documents) if document]
    mesh = lab.become(documents)
    (found,) = lab.compare(mesh, [case.test])
    if found.differences:  # as for random flows: one counts that is there again when the flow is sent once more
        (found,) = lab.compare(mesh, [case.test])
    assert found.differences == ()
    assert found.predicted.undecided == ()


def test_random_meshes(lab: MeshLab) -> None:
    decided = 0
    for number in range(-(-REQUESTS // EACH)):
        maker = mesh_made.Maker(f"{SEED} {number}")
        documents = maker.mesh()
        requests = [maker.request(n) for n in range(EACH)]
        mesh = lab.become(documents)
        found = lab.compare(mesh, requests)
        unseen = [one.observed.skipped for one in found if one.observed.passed is None]
        assert unseen == []
        for one in found:
            if one.differences and _alone(lab, documents, one.test) is not None:
                pytest.fail(_told(number, *_smallest(lab, documents, one.test)))
        decided += sum(not one.predicted.undecided for one in found)
    print(f"seed {SEED}: {REQUESTS} requests, {decided} decided in all")
    assert decided >= REQUESTS * 0.75  # the others are by chance: several endpoints, weights


def test_a_running_lab_is_asked_about_the_ends_of_the_flow_alone(lab: MeshLab, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    fetch = proxyconfig.from_proxy

    def noted(name: str, pod: str, kind: str) -> dict[str, object]:
        asked.append((pod, kind))
        return fetch(name, pod, kind)

    monkeypatch.setattr(proxyconfig, "from_proxy", noted)
    lab.become([mesh_made.config("ALLOW_ANY")])
    found = asking.of_lab(lab.name, asking.Question("alpha.one:8080", "client.one"))
    assert found.verdict.outcome is not None
    assert found.verdict.outcome.status == 200
    assert sorted(asked) == [("alpha.one", "xds"), ("client.one", "xds")]


def _alone(lab: MeshLab, documents: Sequence[Document], test: TrafficTest) -> Compared | None:
    """The flow in that mesh with nothing beside it on the wire, if prediction and observation still differ."""
    (found,) = lab.compare(lab.become(documents), [test])
    return found if found.differences else None


def _smallest(lab: MeshLab, documents: Sequence[Document], test: TrafficTest) -> tuple[list[Document], Compared]:
    """The mesh without each object that the disagreement does not need."""
    deadline = time.monotonic() + SHRINKING
    now = list(documents)
    for document in documents[1:]:
        if time.monotonic() > deadline:
            break
        tried = [d for d in now if d is not document]
        try:
            still = _alone(lab, tried, test)
        except LabError:  # it is no mesh without this
            continue
        if still is not None:
            now = tried
    found = _alone(lab, now, test)
    assert found is not None, "it comes and goes"
    return now, found


def _told(number: int, documents: Sequence[Document], found: Compared) -> str:
    shown = "---\n".join(yaml.safe_dump(dict(d), sort_keys=False) for d in documents)
    differing = "\n".join(found.differences)
    return f"seed {SEED}, mesh {number}\n{shown}\n{found.test.flow_from}\n{found.test.to}\n{differing}"

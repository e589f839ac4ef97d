"""Every topology's TrafficTests hold on real Envoys, on each iptables back end that this kernel has; so do the predictions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[3]
TOPOLOGIES = sorted(p.name for p in (ROOT / "topologies").glob("*.yaml"))
BACKENDS = ("legacy", "nft", "native-nft")
EVERYWHERE = (
    "quickstart.yaml",
    "tproxy.yaml",
    "dual-stack.yaml",
)  # the others add nothing that depends on the back end
BUSY = ("connection-pools.yaml",)
"""Programs of their own run there: whether they use a pool up at a moment is not decided on paper."""


@pytest.fixture(scope="module")
def usable() -> dict[str, str]:
    """Back end -> why this machine cannot use it, empty if it can."""
    tools = {"legacy": "iptables-legacy -t nat -S", "nft": "iptables-nft -t nat -S", "native-nft": "nft list ruleset"}
    found = {}
    for backend, command in tools.items():
        result = subprocess.run(["unshare", "-n", *command.split()], capture_output=True, text=True, check=False)
        found[backend] = "" if result.returncode == 0 else result.stderr.strip() or f"{command} fails"
    return found


@pytest.mark.parametrize(
    ("topology", "backend"),
    [(t, b) for t in TOPOLOGIES for b in (BACKENDS if t in EVERYWHERE else ("auto",))],
)
def test_every_verdict_holds(topology: str, backend: str, usable: dict[str, str]) -> None:
    if usable.get(backend):
        pytest.skip(f"back end {backend}: {usable[backend]}")
    arguments = f"verify topologies/{topology} --iptables {backend} --proof both --json"
    result = subprocess.run(
        [sys.executable, "-m", "lab", *arguments.split()],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=ROOT,
        check=False,
    )
    assert result.stdout, result.stderr
    document = json.loads(result.stdout)
    verdicts = document["verdicts"]
    observed, predicted = ([v for v in verdicts if v["proof"] == proof] for proof in ("observed", "predicted"))
    wrong = {v["test"]: v["differences"] or v["skipped"] for v in observed if v["pass"] is not True}
    assert wrong == {}  # a prediction that is not what was observed is a difference of the observed verdict
    assert [v["test"] for v in predicted] == [v["test"] for v in observed]
    wrong = {v["test"]: v["differences"] or v["skipped"] for v in predicted if v["pass"] is not True}
    assert topology in BUSY or wrong == {}
    assert [v["test"] for v in predicted if v["pass"] is False] == []
    assert "lab: nack" not in result.stderr, "an Envoy rejected part of its configuration"
    assert result.returncode == 0
    assert document["verdicts"]
    seen = {
        part["rule"]["backend"]
        for v in document["verdicts"]
        for part in (v["dns"], v["outbound"], v["inbound"])
        if part and part.get("rule") and part["rule"]["backend"]  # a pod without sidecar has rules of no back end
    }
    assert seen == {document["iptables"]}, "the kernel reported rules of another back end"
    if backend != "auto":
        assert document["iptables"] == backend
    assert not os.path.exists(f"/run/sidecarlab/{document['lab']}")

"""What is left of a lab whose command cannot write what it has to say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]

NAME = f"slt-output-{os.getpid()}"
MANIFEST = """
apiVersion: v1
kind: Pod
metadata: {name: a, namespace: a}
spec: {containers: [{name: app, ports: [{containerPort: 8080, name: http}]}]}
---
apiVersion: v1
kind: Pod
metadata: {name: b, namespace: a}
spec: {containers: [{name: app}]}
---
apiVersion: sidecarlab.dev/v1alpha1
kind: TrafficTest
metadata: {name: arrives}
spec: {from: {pod: b.a}, to: {pod: a.a, port: 8080, protocol: http}, expect: {outcome: {result: ok}}}
"""
FULL = "error: cannot write: standard output: No space left on device"


def labs() -> list[str]:
    listed = subprocess.run([sys.executable, "-m", "lab", "ls", "--json"], capture_output=True, check=True, timeout=60)
    return [lab["name"] for lab in json.loads(listed.stdout)["labs"]]


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    path = tmp_path / f"{NAME}.yaml"
    path.write_text(MANIFEST)
    return path


@pytest.mark.parametrize("verb", [("verify",), ("up",), ("up", "-d")], ids=" ".join)
def test_a_full_disk_leaves_no_lab(manifest: Path, verb: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "lab", *verb, str(manifest)]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert result.returncode == 2
    lines = result.stderr.splitlines()
    assert [line for line in lines if line.startswith("error: ")] == [lines[-1]]
    assert lines[-1].startswith(FULL)
    assert NAME not in labs()


def test_a_terminal_hears_of_each_phase_and_json_stays_whole(manifest: Path) -> None:
    ours, theirs = os.openpty()
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        command = [sys.executable, "-m", "lab", "verify", "--json", str(manifest)]
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, timeout=120, check=True)
        os.close(theirs)
        said = terminal.read(65536).decode()
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in said.splitlines()]
    assert lines == [f"{NAME}: up, 2 pods ...", f"{NAME}: 1 tests ...", f"{NAME}: down ..."]
    assert json.loads(result.stdout)["summary"]["passed"] == 1


@pytest.mark.parametrize("redirection", [">&-", "<&- >&- 2>&-"])
def test_a_lab_runs_without_standard_streams(manifest: Path, redirection: str) -> None:
    command = ["bash", "-c", f'exec "$0" -m lab verify "$1" {redirection}', sys.executable, str(manifest)]
    assert subprocess.run(command, timeout=120, check=False).returncode == 0
    assert NAME not in labs()

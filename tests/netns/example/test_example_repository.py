"""docs/example is a repository that tests its mesh: here its tests are run as its own CI job runs them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "docs" / "example"
WORKFLOW = EXAMPLE / ".github" / "workflows" / "mesh.yml"


def steps() -> list[dict[str, object]]:
    (job,) = yaml.safe_load(WORKFLOW.read_text())["jobs"].values()
    return list(job["steps"])


def verify_command() -> list[str]:
    """The job's last command, with this checkout's program for the one that the job installs."""
    command = str([step["run"] for step in steps() if "run" in step][-1])
    program = ".venv/bin/lab"
    assert command.startswith(f"sudo sidecarlab/{program} verify ")
    return [str(ROOT / program), *command.split()[2:]]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A copy, whose lab has a name of its own."""
    shutil.copytree(EXAMPLE, tmp_path / "repository")
    return tmp_path / "repository"


def run(repository: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    own = f"slt-{os.getpid()}-mesh.yaml"  # the file's name is the lab's
    (repository / "mesh.yaml").rename(repository / own)
    words = [own if word == "mesh.yaml" else word for word in command]
    return subprocess.run(words, cwd=repository, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.root
def test_its_verdicts_hold_and_are_reported(repository: Path) -> None:
    done = run(repository, verify_command())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed, 0 failed, 0 skipped" in done.stdout
    cases = ElementTree.parse(repository / "junit.xml").iter("testcase")
    assert [case.get("name") for case in cases] == [
        "web-reaches-orders",
        "orders-may-pay",
        "orders-may-not-call-strangers",
    ]


@pytest.mark.root
def test_a_change_that_opens_the_mesh_fails_its_job(repository: Path) -> None:
    mesh = repository / "mesh.yaml"
    text = mesh.read_text()
    assert "REGISTRY_ONLY" in text
    mesh.write_text(text.replace("REGISTRY_ONLY", "ALLOW_ANY"))
    done = run(repository, verify_command())
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAIL orders-may-not-call-strangers" in done.stdout
    assert "2 passed, 1 failed" in done.stdout


def test_the_documented_job_is_the_examples() -> None:
    text = (ROOT / "docs" / "ci.md").read_text()
    begin = text.index("```yaml\n") + len("```yaml\n")
    (documented,) = yaml.safe_load(text[begin : text.index("```", begin)])["jobs"].values()
    assert documented["steps"] == steps()

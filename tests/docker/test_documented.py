"""What docs/ci.md and docs/containers.md tell a reader to type, where test_compose.py does not run it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

pytestmark = [pytest.mark.docker, pytest.mark.timeout(300)]


def command_of(document: str, start: str) -> str:
    text = (ROOT / "docs" / document).read_text()
    begin = text.index(f"\n{start}") + 1
    return text[begin : text.index("\n```", begin)]


def test_a_container_with_the_listed_capabilities_runs_a_lab(image: str) -> None:
    command = command_of("ci.md", "docker run").replace("sidecarlab:latest", image)
    assert "--privileged" not in command
    done = subprocess.run(
        ["bash", "-c", f"{command} --json"], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["summary"] == {"passed": 3, "failed": 0, "skipped": 0}


def test_compose_file_needs_no_file_that_git_ignores() -> None:
    """A checkout alone is what `docker compose up` starts from."""
    wanted = [line.split()[1] for line in (ROOT / "Dockerfile").read_text().splitlines() if line.startswith("COPY ")]
    for word in wanted:
        if not word.startswith("--") and "[" not in word:
            assert (ROOT / word).exists(), word
    assert Path(ROOT / "certificates" / "README.md").exists()

"""A command whose output goes nowhere, or cannot go where it should."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

QUICKSTART = "topologies/quickstart.yaml"
VERBS = [
    ("--help",),
    ("schema",),
    ("validate", QUICKSTART),
    ("verify", "--proof", "predicted", "--only", "catalog-*", QUICKSTART),
]
FULL = "error: cannot write: standard output: No space left on device. Give it a place with room.\n"


def lab(args: tuple[str, ...], redirection: str) -> subprocess.CompletedProcess[str]:
    """Runs ``lab`` as a shell does it with a redirection, whose standard output is then not ours."""
    return subprocess.run(
        ["bash", "-c", f'exec "$0" -m lab "$@" {redirection}', sys.executable, *args],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("args", VERBS, ids=" ".join)
def test_a_closed_output_is_nowhere(args: tuple[str, ...]) -> None:
    result = lab(args, ">&-")
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("args", VERBS, ids=" ".join)
def test_a_full_disk_is_one_line(args: tuple[str, ...]) -> None:
    result = lab(args, "> /dev/full")
    assert (result.returncode, result.stderr) == (2, FULL)


@pytest.mark.parametrize("args", VERBS, ids=" ".join)
def test_a_reader_that_is_gone_is_no_error(args: tuple[str, ...]) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    with os.fdopen(theirs, "wb") as pipe:
        result = subprocess.run(
            [sys.executable, "-m", "lab", *args],
            stdout=pipe,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert (result.returncode, result.stderr) == (0, "")


def test_a_reader_that_is_gone_does_not_hide_a_failure(tmp_path: Path) -> None:
    manifest = tmp_path / "wrong.yaml"
    manifest.write_text(
        """
apiVersion: v1
kind: Pod
metadata: {name: a, namespace: a}
spec: {containers: [{name: app}]}
---
apiVersion: sidecarlab.dev/v1alpha1
kind: TrafficTest
metadata: {name: fails}
spec: {from: {pod: a.a}, to: {host: 192.0.2.1, port: 80}, expect: {outbound: {captured: true}}}
"""
    )
    ours, theirs = os.pipe()
    os.close(ours)
    with os.fdopen(theirs, "wb") as pipe:
        command = [sys.executable, "-m", "lab", "verify", "--proof", "predicted", str(manifest)]
        assert subprocess.run(command, stdout=pipe, timeout=60, check=False).returncode == 1


@pytest.mark.parametrize("redirection", ["2>&-", "2> /dev/full", "<&- >&- 2>&-"])
def test_an_error_that_cannot_be_told_keeps_its_code(redirection: str) -> None:
    result = lab(("validate", "nowhere.yaml"), redirection)
    assert (result.returncode, result.stdout, result.stderr) == (2, "", "")


def test_a_closed_output_is_not_another_file(tmp_path: Path) -> None:
    # The first file to be opened would otherwise get the number of standard output, and what is printed.
    manifest = tmp_path / "a.yaml"
    manifest.write_text("apiVersion: v1\nkind: Namespace\nmetadata: {name: a}\n")
    before = manifest.read_text()
    assert lab(("validate", str(manifest)), "<&- >&-").returncode == 0
    assert manifest.read_text() == before

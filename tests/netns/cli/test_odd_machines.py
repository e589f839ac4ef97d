"""Machines with too little of something: one line says of what, and nothing is left; or it does not matter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]

NAME = f"slt-odd-{os.getpid()}"
MANIFEST = """
apiVersion: v1
kind: Pod
metadata: {name: a, namespace: a}
spec: {containers: [{name: app, ports: [{containerPort: 8080, name: http}]}]}
---
apiVersion: sidecarlab.dev/v1alpha1
kind: TrafficTest
metadata: {name: arrives}
spec: {from: {pod: a.a}, to: {pod: a.a, port: 8080, protocol: http}, expect: {outcome: {result: ok}}}
"""


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    path = tmp_path / f"{NAME}.yaml"
    path.write_text(MANIFEST)
    return path


def verify(manifest: Path, before: str, front: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """``lab verify`` behind commands of a shell, which then lists what lies in the labs' directory."""
    script = f'{before}; "$0" -m lab verify "$1" >/dev/null; code=$?; ls -A /run/sidecarlab; exit $code'
    command = [*front, "sh", "-c", script, sys.executable, str(manifest)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def of_its_own(mount: str, manifest: Path) -> subprocess.CompletedProcess[str]:
    """With a /run of its own, made by mount(8)."""
    before = f"mount -t tmpfs -o mode=755 tmpfs /run && mkdir /run/sidecarlab && {mount}"
    return verify(manifest, before, ("unshare", "--mount"))


def told(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("error: ")]


def test_a_low_soft_limit_of_descriptors_does_not_matter(manifest: Path) -> None:
    result = verify(manifest, "ulimit -S -n 16")
    assert (result.returncode, told(result.stderr)) == (0, [])


def test_a_low_hard_limit_of_descriptors_is_told(manifest: Path) -> None:
    bound = ("setpriv", "--bounding-set=-sys_resource", "--inh-caps=-sys_resource")  # who has that may raise it
    result = verify(manifest, "ulimit -n 16", bound)
    assert (result.returncode, NAME in result.stdout) == (2, False)
    assert told(result.stderr) == [
        "error: too few open files are allowed: RLIMIT_NOFILE: 16, and a lab needs 64, better 1024. "
        "Raise it: ulimit -n 1024"
    ]


def test_where_nothing_can_be_written_it_is_said(manifest: Path) -> None:
    result = of_its_own("mount -o remount,ro /run", manifest)
    assert (result.returncode, result.stdout) == (2, "")
    assert told(result.stderr) == [
        f"error: a lab cannot keep its record: /run/sidecarlab/{NAME}: Read-only file system. "
        "Mount a tmpfs at /run/sidecarlab"
    ]


@pytest.mark.parametrize("size", ["4k", "16k"])
def test_where_there_is_no_room_it_is_said_and_nothing_is_left(manifest: Path, size: str) -> None:
    result = of_its_own(f"mount -t tmpfs -o mode=755,size={size} tmpfs /run/sidecarlab", manifest)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = told(result.stderr)
    assert line.startswith("error: a lab cannot keep its ")
    assert line.endswith("No space left on device. Make room there.")

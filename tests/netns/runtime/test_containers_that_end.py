"""A container whose command does not go on running: the lab does not come up, and says which and why."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab import lifecycle
from lab.errors import InputError
from lab.fabric import paths, record
from lab.manifests.load import load

pytestmark = pytest.mark.root

MANIFEST = """
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: shop}
spec:
  containers:
  - {name: echo, ports: [{containerPort: 8080}]}
  - {name: worker, %s}
"""


@pytest.fixture
def name() -> Iterator[str]:
    chosen = f"slt-{os.getpid()}-ends"
    yield chosen
    left = record.down(chosen)
    assert left == [], "nothing is left of a lab that did not come up"


def refused(name: str, tmp_path: Path, container: str) -> str:
    file = tmp_path / "mesh.yaml"
    file.write_text(MANIFEST % container)
    with pytest.raises(InputError) as error:
        lifecycle.Lab.up(load([file]), name)
    assert error.value.exit_code == 2
    assert not paths.run_dir(name).exists()
    return str(error.value).replace(str(file), "mesh.yaml")


WHO = 'pod web.shop did not become ready: container "worker": mesh.yaml:2: '
START = " Correct its command, or leave it out for the echo app."
KEEP = " A container's command must go on running. Correct it, or leave it out for the echo app."


@pytest.mark.parametrize(
    ("container", "why"),
    [
        ("command: [/no/such/program]", f"it cannot be started: /no/such/program: No such file or directory.{START}"),
        ("command: [no-such-program]", f"it cannot be started: no-such-program: No such file or directory.{START}"),
        ("command: [/etc/passwd]", f"it cannot be started: /etc/passwd: Permission denied.{START}"),
        (
            "command: [sleep, '1000'], workingDir: /no/such/place",
            f"it cannot be started: working directory /no/such/place: No such file or directory.{START}",
        ),
        (
            "command: [sh, -c, 'echo fatal: no configuration >&2; exit 3']",
            f"sh -c 'echo fatal: no configuration >&2; exit 3' ended with 3: fatal: no configuration.{KEEP}",
        ),
        ("command: [sh, -c, 'kill -SEGV $$']", f"sh -c 'kill -SEGV $$' ended with SIGSEGV, without a word.{KEEP}"),
        # Kubernetes would start it again and again (restartPolicy Always, CrashLoopBackOff), whatever it ends with.
        ('command: ["true"]', f"true ended with 0, without a word.{KEEP}"),
    ],
)
def test_a_container_that_ends_is_an_error(name: str, tmp_path: Path, container: str, why: str) -> None:
    assert refused(name, tmp_path, container) == WHO + why

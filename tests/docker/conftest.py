"""An engine, our image, and meshes of containers; all that was made is taken away again, the engine too if we started it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
IMAGE = f"sidecarlab:test-{os.getpid()}"
NO_ENGINE = 4


def run(*command: str, env: Mapping[str, str] | None = None, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def docker(*arguments: str) -> str:
    done = run("docker", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def engine() -> Iterator[None]:
    """A container engine that answers."""
    before = shutil.which("docker") is not None and run("docker", "version").returncode == 0
    started = run("scripts/docker-engine", "start", timeout=1200)
    if started.returncode == NO_ENGINE:
        pytest.skip(started.stderr.strip().splitlines()[-1])
    assert started.returncode == 0, started.stderr
    yield
    if not before:
        run("scripts/docker-engine", "stop")


@pytest.fixture(scope="session")
def image(engine: None) -> Iterator[str]:
    """Our image, built here."""
    built = run("scripts/build-image", IMAGE, timeout=2400)
    if built.returncode == NO_ENGINE:
        pytest.skip(built.stderr.strip().splitlines()[-1])
    assert built.returncode == 0, built.stderr
    yield IMAGE
    run("docker", "rmi", "-f", IMAGE)


def compose_command() -> list[str]:
    if run("docker", "compose", "version").returncode == 0:
        return ["docker", "compose"]
    return ["docker-compose"]


@dataclass
class Compose:
    """One project of docker-compose.yml."""

    name: str
    image: str
    policy: str | None = None
    files: Sequence[str] = ()

    def __call__(self, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        env = {"SIDECARLAB_IMAGE": self.image, "COMPOSE_PROJECT_NAME": self.name}
        if self.policy is not None:
            env["OUTBOUND_TRAFFIC_POLICY"] = self.policy
        files = [word for file in ("docker-compose.yml", *self.files) for word in ("-f", file)]
        return run(*compose_command(), *files, *arguments, env=env, timeout=timeout)

    def up(self, *arguments: str) -> None:
        done = self("up", "-d", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr

    def container(self, service: str) -> str:
        """The id of a service's container, running or not; empty if there is none."""
        filters = [f"label=com.docker.compose.project={self.name}", f"label=com.docker.compose.service={service}"]
        words = [word for one in filters for word in ("--filter", one)]
        # `run` makes containers of the service `tests`, too; they carry a label of their own.
        ids = docker("ps", "-aq", "--no-trunc", *words, "--filter", "label=com.docker.compose.oneoff=False").split()
        return ids[0] if ids else ""

    def inspect(self, service: str) -> dict[str, Any]:
        document: list[dict[str, Any]] = json.loads(docker("inspect", self.container(service)))
        return document[0]

    def verify(self, *arguments: str, options: Sequence[str] = ()) -> tuple[int, dict[str, Any]]:
        """``run --rm tests``: exit code and document."""
        done = self("run", "--rm", "-T", *options, "tests", "--json", *arguments)
        assert "{" in done.stdout, done.stdout + done.stderr
        return done.returncode, json.loads(done.stdout[done.stdout.index("{") :])

    def left(self) -> list[str]:
        """What the engine still has of this project."""
        label = f"label=com.docker.compose.project={self.name}"
        found = docker("ps", "-a", "--filter", label, "--format", "container {{.Names}}").splitlines()
        for kind in ("network", "volume"):
            found += docker(kind, "ls", "--filter", label, "--format", f"{kind} {{{{.Name}}}}").splitlines()
        return found

    def down(self) -> None:
        self("down", "-v", "--remove-orphans", timeout=120)


def failures(document: Mapping[str, Any]) -> str:
    """What a failed test should say."""
    return "\n".join(f"{v['test']}: {v['differences'] or v['skipped']}" for v in document["verdicts"] if not v["pass"])


def process(parent: int, name: str) -> int:
    """A child of a process, by its command's name; pids are the host's."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return next(int(pid) for pid in children if Path(f"/proc/{pid}/comm").read_text().strip() == name)

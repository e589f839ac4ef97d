"""One lab for all mutations of a module: what was changed is put back, and what was started is ended."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab import lifecycle
from lab.fabric import paths
from lab.lifecycle import Lab
from lab.manifests.load import load
from lab.manifests.model import Mesh, TrafficTest
from lab.probe import runner
from lab.runtime import enter
from lab.runtime.identity import Identity
from lab.runtime.launch import clean_environ
from lab.trace import conntrack, netlink
from lab.verdict import Verdict

CHECKOUT = Path(__file__).parents[3]
TOPOLOGIES = CHECKOUT / "topologies"

HOPELESS = 0.4  # seconds for a flow that will get no answer
ROUNDS = 3  # connections of an Envoy to itself; each is retried twice where it fails, so more would be many more

Verdicts = Mapping[str, Verdict]


class Mutant:
    """A running lab to be mutated."""

    def __init__(self, lab: Lab, mesh: Mesh) -> None:
        self.lab, self.mesh = lab, mesh
        self.tests: Mapping[str, TrafficTest] = {t.meta.name: t for t in mesh.tests}

    def verify(self, hopeless: Collection[str] = ()) -> Verdicts:
        """Runs all tests; the ``hopeless`` ones get little time."""
        tests = [dataclasses.replace(t, timeout=HOPELESS) if t.meta.name in hopeless else t for t in self.mesh.tests]
        return {v.test: v for v in runner.run_tests(self.lab.name, self.mesh, tests)}

    def those(self, wanted: Callable[[TrafficTest, Mapping[str, Any]], bool]) -> set[str]:
        """The names of the tests that a mutation concerns: ``wanted`` gets each test and its expectations."""
        chosen = {name for name, t in self.tests.items() if wanted(t, t.expect)}
        assert chosen, "a mutation that concerns no test proves nothing"
        assert chosen != set(self.tests)
        return chosen

    def run(self, place: str, *command: str, stdin: str | None = None) -> str:
        """Runs a command of the host in the network namespace of a place."""
        with enter.netns(paths.netns_path(self.lab.name, place)):
            done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    @contextmanager
    def rules(self, pod: str) -> Iterator[Callable[..., str]]:
        """Yields iptables in a pod; all its rules are put back at the end.

        Connections that the rules had decided over are forgotten at each change: a flow that gets the ports of one would
        not be asked about again.
        """
        backend = self.lab.backend
        saved = self.run(pod, f"iptables-{backend}-save")

        def iptables(*words: str) -> str:
            said = self.run(pod, f"iptables-{backend}", *words)
            self._forget_connections(pod)
            return said

        try:
            yield iptables
        finally:
            self.run(pod, f"iptables-{backend}-restore", stdin=saved)
            self._forget_connections(pod)

    def _forget_connections(self, pod: str) -> None:
        with enter.netns(paths.netns_path(self.lab.name, pod)), netlink.open_socket() as s:
            netlink.request(s, netlink.message(conntrack.MSG_DELETE, netlink.NLM_F_ACK, socket.AF_UNSPEC), 1)

    def pid(self, place: str, process: str) -> int:
        """The host's number of a process of a pod."""
        pod = next(p for p in self.lab.inspect()["pods"] if f"{p['name']}.{p['namespace']}" == place)
        return int(pod["pids"][process])

    def kill(self, place: str, *processes: str) -> None:
        """Ends processes and waits for that."""
        for pid in [self.pid(place, process) for process in processes]:
            with contextlib.suppress(ProcessLookupError):  # it went with the one before
                fd = os.pidfd_open(pid)
                signal.pidfd_send_signal(fd, signal.SIGKILL)
                select.select([fd], [], [], 10)
                os.close(fd)

    @contextmanager
    def instead_of(self, place: str, *processes: str) -> Iterator[Starter]:
        """Processes of a pod are killed; yields what starts others there. In the end those are killed, and the pod's own
        (the first of ``processes``, which starts what hangs on it) runs again."""
        self.kill(place, *processes)
        starter = Starter(enter.find(self.lab.name, place), paths.pod_dir(self.lab.name, place))
        try:
            yield starter
        finally:
            starter.end()
            lifecycle.restart(self.lab.name, place, processes[0])

    @contextmanager
    def not_in_circles(self, port: int, uid: int, *pods: str) -> Iterator[None]:
        """An Envoy that feeds ``port`` of itself is stopped after a few rounds: it could make thousands a second.

        A table of its own, behind nat: the rules under test stay as they are.
        """
        rule = f"tcp dport {port} tcp flags syn / syn,ack meta skuid {uid} ct count over {ROUNDS} reject with tcp reset"
        table = f"table inet circles {{ chain output {{ type filter hook output priority 10; {rule}; }}; }}"
        for pod in pods:
            self.run(pod, "nft", "-f", "-", stdin=table)
        try:
            yield
        finally:
            for pod in pods:
                self.run(pod, "nft", "delete", "table", "inet", "circles")


class Starter:
    """Starts programs in a place, and waits for their READY=1."""

    def __init__(self, place: enter.Place, directory: Path) -> None:
        self._place = place
        self._path = directory / "ready"
        self._ready = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._ready.bind(str(self._path))
        self._path.chmod(0o777)
        self._ready.settimeout(30)
        self._children: list[enter.Child] = []

    def start(self, command: Sequence[str], identity: Identity, env: Mapping[str, str], cwd: str = "/") -> None:
        environ = clean_environ() | dict(env) | {"NOTIFY_SOCKET": "/run/sidecar/ready"}
        child = enter.start(self._place, list(command), identity, env=environ, cwd=cwd)
        self._children.append(child)

    def wait_ready(self) -> None:
        """Until one of them says READY=1."""
        assert self._ready.recv(100) == b"READY=1"

    def end(self) -> None:
        for child in self._children:
            child.kill()
        self._ready.close()
        self._path.unlink()


@contextmanager
def mutant(topology: str, name: str) -> Iterator[Mutant]:
    """A lab of a topology."""
    mesh = load([TOPOLOGIES / topology], name=name)
    with lifecycle.running(mesh) as lab:
        yield Mutant(lab, mesh)


@contextmanager
def mutated_source(topology: str, name: str, directory: Path, module: str, code: str) -> Iterator[Mutant]:
    """A lab whose programs are a copy of ours with ``code`` at the end of one ``module`` (a path); the probes are ours."""
    directory.chmod(0o755)  # pods read it under uids of their own
    for package in ("lab", "agent", "init"):
        shutil.copytree(CHECKOUT / package, directory / package, ignore=shutil.ignore_patterns("__pycache__"))
    with (directory / module).open("a") as f:
        f.write(code)
    command = [sys.executable, "-P", "-m", "lab", "up", str(TOPOLOGIES / topology), "--name", name, "-d"]
    try:
        environ = clean_environ() | {"PYTHONPATH": str(directory)}
        done = subprocess.run(command, cwd=directory, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        yield Mutant(lifecycle.attach(name), load([TOPOLOGIES / topology], name=name))
    finally:
        lifecycle.stop(name)


def must_fail(verdicts: Verdicts, concerned: set[str]) -> None:
    """Exactly these rows fail."""
    failed = {name for name, v in verdicts.items() if not v.passed}
    also = [f"{name}: {verdicts[name].differences or verdicts[name].skipped}" for name in sorted(failed - concerned)]
    assert not also, "also failed: " + "; ".join(also)
    passed = [json.dumps(verdicts[name].to_dict()) for name in sorted(concerned - failed)]
    assert not passed, "passed all the same: " + "; ".join(passed)

"""One lab for all mutations of a module: what was changed is put back, and what was started is ended."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
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
from lab.runtime import enter, files, workload
from lab.runtime.identity import Identity
from lab.runtime.launch import clean_environ
from lab.trace import conntrack, netlink
from lab.verdict import Verdict

TOPOLOGIES = Path(__file__).parents[3] / "topologies"

HOPELESS = 0.4  # seconds for a flow that will get no answer, or that an Envoy will feed back to itself for ever

Verdicts = Mapping[str, Verdict]


class Mutant:
    """A running lab to be mutated."""

    def __init__(self, lab: Lab, mesh: Mesh) -> None:
        self.lab, self.mesh = lab, mesh
        self.tests: Mapping[str, TrafficTest] = {t.meta.name: t for t in mesh.tests}

    def verify(self, hopeless: Collection[str] = (), at_once: int = 8) -> Verdicts:
        """Runs all tests; the ``hopeless`` ones get little time."""
        tests = [dataclasses.replace(t, timeout=HOPELESS) if t.meta.name in hopeless else t for t in self.mesh.tests]
        return {v.test: v for v in runner.run_tests(self.lab.name, self.mesh, tests, at_once=at_once)}

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
        """The host's number of a process; of the node's: ``discovery``, ``dns``, ``observer``."""
        info = self.lab.inspect()
        if place == paths.NODE:
            return int(info["services"][process])
        pod = next(p for p in info["pods"] if f"{p['name']}.{p['namespace']}" == place)
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
        starter = Starter(enter.find(self.lab.name, place), paths.pod_dir(self.lab.name, place), "/run/sidecar")
        try:
            yield starter
        finally:
            starter.end()
            lifecycle.restart(self.lab.name, place, processes[0])

    @contextmanager
    def other_discovery(self, change: str) -> Iterator[None]:
        """A control plane that is the lab's own but for ``change`` (Python that runs first), once all proxies follow it.

        The lab has none afterwards.
        """
        params = workload.discovery(self.lab.name, self.mesh).args[0]
        code = f"import json, sys\n{change}\nfrom lab.discovery.server import main\nsys.exit(main(json.loads(sys.argv[1])))"
        self.kill(paths.NODE, "discovery")
        directory = paths.run_dir(self.lab.name)
        starter = Starter(enter.find(self.lab.name, paths.NODE), directory, str(directory), namespaces=("net",))
        try:
            starter.start([sys.executable, "-c", code, json.dumps(params)], Identity(0, 0), {})
            starter.wait_ready()
            self._all_acknowledge()
            yield
        finally:
            starter.end()

    def _all_acknowledge(self) -> None:
        nodes = [
            f"sidecar~{p.ip}~{p.meta.name}.{p.meta.namespace}~{p.meta.namespace}.svc.{self.mesh.domain_suffix}"
            for p in self.mesh.pods
            if p.injected
        ]
        with socket.socket(socket.AF_UNIX) as s:
            s.settimeout(40)
            s.connect(str(files.discovery_socket(self.lab.name)))
            s.sendall(json.dumps({"op": "wait", "timeout": 30, "nodes": nodes}).encode() + b"\n")
            with s.makefile("rb") as lines:
                assert json.loads(lines.readline())["settled"]


class Starter:
    """Starts programs in a place, and waits for their READY=1."""

    def __init__(self, place: enter.Place, directory: Path, inside: str, **options: Any) -> None:
        self._place, self._options = place, options
        self._inside = f"{inside}/ready"
        self._path = directory / "ready"
        self._ready = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._ready.bind(str(self._path))
        self._path.chmod(0o777)
        self._ready.settimeout(30)
        self._children: list[enter.Child] = []

    def start(self, command: Sequence[str], identity: Identity, env: Mapping[str, str], cwd: str = "/") -> None:
        environ = clean_environ() | dict(env) | {"NOTIFY_SOCKET": self._inside}
        child = enter.start(self._place, list(command), identity, env=environ, cwd=cwd, **self._options)
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


def must_fail(verdicts: Verdicts, concerned: set[str]) -> None:
    """Exactly these rows fail."""
    failed = {name for name, v in verdicts.items() if not v.passed}
    also = [f"{name}: {verdicts[name].differences or verdicts[name].skipped}" for name in sorted(failed - concerned)]
    assert not also, "also failed: " + "; ".join(also)
    passed = [json.dumps(verdicts[name].to_dict()) for name in sorted(concerned - failed)]
    assert not passed, "passed all the same: " + "; ".join(passed)

"""Labs from outside: start one, ask it, run something in it, take it down.

Each lab has a process of its own, the supervisor (`lab.supervisor`); this is how commands, tests and programs speak
with it. Example::

    with lifecycle.running(load(["topologies/quickstart.yaml"])) as lab:
        lab.inspect()["pods"]
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from lab.errors import InputError, LabError
from lab.fabric import paths, record

if TYPE_CHECKING:
    from lab.manifests.model import Mesh
    from lab.runtime import enter

Info = dict[str, Any]

TIMEOUT = 60.0
"""Seconds that a lab may take to be ready."""

_FILES = 64
_DRAIN = 40.0
_STOP = 30.0


class Lab:
    """A running lab. ``info`` is what `inspect` said when it became ready; ``backend`` the iptables back end in use."""

    def __init__(self, name: str, info: Info, process: subprocess.Popen[bytes] | None = None) -> None:
        self.name = name
        self.info = info
        self._process = process

    @classmethod
    def up(
        cls,
        mesh: Mesh | Callable[[], Mesh],
        name: str | None = None,
        iptables: str = "auto",
        *,
        timeout: float = TIMEOUT,
        detach: bool = False,
        runtime: str = "netns",
        temporary: bool = False,
    ) -> Lab:
        """Brings a lab up and returns when all of it is ready.

        Args:
            mesh: from manifest files (discovery and DNS read them, too), or what reads it: then the lab's processes
                start meanwhile.
            name: instead of the mesh's own.
            iptables: ``auto``, ``legacy``, ``nft`` or ``native-nft``.
            timeout: how long it may take, in seconds.
            detach: it outlives this process; otherwise it is taken down when this process ends, however that ends.
            runtime: ``netns``, or ``docker`` for pods as containers (DOCKER_HOST and SIDECARLAB_IMAGE name engine and image).
            temporary: it is there for one run of tests, and no other run shall count on it.

        Raises:
            LabError: it cannot be; what had been made is gone again.
            KeyboardInterrupt: interrupted; likewise.
        """
        _need_root()
        _need_files()
        process = _launch(
            {
                "backend": iptables,
                "timeout": timeout,
                "detach": detach,
                "temporary": temporary,
                **_runtime(runtime),
            }
        )
        try:
            known = mesh() if callable(mesh) else mesh
            known = _with_files(known if name is None else replace(known, name=name))
            _send(process, known)
            message = _next_report(process)
        except BaseException:
            _let_go(process)
            raise
        if message.get("event") != "ready":
            _let_go(process)
            if not message and not paths.run_dir(known.name).exists():
                raise LabError("the lab's process failed", why=f"it ended with {process.returncode}")
            raise _error_of(message, known.name)
        if detach:
            _let_go(process)
            return cls(known.name, message["info"])
        return cls(known.name, message["info"], process)

    @property
    def backend(self) -> str:
        return str(self.info["iptables"])

    def inspect(self) -> Info:
        """What runs now; see `inspect`."""
        return inspect(self.name)

    def place(self, place: str) -> enter.Place:
        """A pod (``POD.NAMESPACE``), ``node``, ``outside`` or ``ext-NAME``, to enter."""
        from lab.runtime import enter

        return enter.find(self.name, place)

    def down(self) -> None:
        """Takes it down; twice is fine.

        Raises:
            LabError: something could not be removed.
        """
        if self._process is not None:
            _let_go(self._process)
            self._process = None
        record.down(self.name)

    def wait(self) -> None:
        """Until it has ended, by itself or because somebody took it down.

        Raises:
            LabError: its process died; its pods may still run.
        """
        if self._process is not None:
            message = _next_report(self._process)
            _let_go(self._process)
            self._process = None
            if message.get("event") != "down":
                raise _error_of(message, self.name)


@contextmanager
def running(
    mesh: Mesh, name: str | None = None, iptables: str = "auto", *, timeout: float = TIMEOUT, runtime: str = "netns"
) -> Iterator[Lab]:
    """A lab for the time of a ``with`` block (see `Lab.up`)."""
    lab = Lab.up(mesh, name, iptables, timeout=timeout, runtime=runtime)
    try:
        yield lab
    finally:
        lab.down()


def attach(name: str) -> Lab:
    """The lab of that name, which runs already.

    Raises:
        InputError: there is none.
    """
    return Lab(name, inspect(name))


# --- what the commands do -----------------------------------------------------------------------


def run_attached(
    mesh: Mesh | Callable[[], Mesh],
    *,
    backend: str = "auto",
    timeout: float = TIMEOUT,
    runtime: str = "netns",
    on_ready: Callable[[Info], None] = lambda _: None,
) -> int:
    """``lab up``: runs until Ctrl-C, SIGTERM or ``lab down``; then the lab is down. Returns 0.

    Raises:
        LabError: it cannot be brought up, or its process died.
        KeyboardInterrupt: interrupted before it was ready; nothing is left.
    """
    with _interruptible():
        lab = Lab.up(mesh, iptables=backend, timeout=timeout, runtime=runtime)
        try:
            try:
                on_ready(lab.info)
            except LabError:
                lab.down()
                raise
            lab.wait()
        except KeyboardInterrupt:
            lab.down()
    return 0


def start_detached(
    mesh: Mesh | Callable[[], Mesh], *, backend: str = "auto", timeout: float = TIMEOUT, runtime: str = "netns"
) -> Info:
    """``lab up -d``: returns what `inspect` says when the lab is ready."""
    with _interruptible():
        return Lab.up(mesh, iptables=backend, timeout=timeout, detach=True, runtime=runtime).info


def inspect(name: str) -> Info:
    """The contract's ``inspect`` of a running lab: ``{"name", "pid", "files", "pods": [...]}`` and more.

    Raises:
        InputError: no such lab, or it crashed.
    """
    return ask(name, {"op": "inspect"})


def refuse_other_settings(info: Info, iptables: str, runtime: str | None) -> None:
    """What a lab that runs (``info``: see `inspect`) cannot change. ``auto`` and None ask for nothing.

    Raises:
        InputError: it runs with another back end or runtime.
    """
    wanted = {"iptables": None if iptables == "auto" else iptables, "runtime": runtime}
    for setting, value in wanted.items():
        if value not in (None, info[setting]):
            name, why = info["name"], f"it runs with {info[setting]}"
            raise InputError(f"lab {name} cannot change to --{setting} {value}", "", why, f"lab down {name} first")


def discovery_status(name: str) -> Info:
    """What the lab's control plane says of each proxy: versions, acknowledgements and refusals with Envoy's text."""
    return ask(name, {"op": "discovery"})


def restart(name: str, place: str, process: str) -> int:
    """Starts a process of a pod (``agent``, ``app``), external host or ``node`` (``discovery``, ``dns``) again; its new pid."""
    return int(ask(name, {"op": "restart", "place": place, "process": process}, timeout=TIMEOUT)["pid"])


def drain(name: str) -> None:
    """SIGTERM to the processes of all pods, and the wait for their ends (at most Kubernetes' 30 s grace).

    A lab that is not there, or has crashed, has nothing to drain.
    """
    with suppress(InputError):
        if record.info(name).state == "running":
            ask(name, {"op": "drain"}, timeout=_DRAIN)


def state(name: str, lab_id: str, seconds: float = 10.0) -> Literal["running", "crashed", "gone"]:
    """What became of a lab (``lab_id``: of its `record.LabInfo`). One that is just ending is waited for, so long at most."""
    answers = False
    with suppress(LabError):
        inspect(name)
        answers = True
    known = _known(name, lab_id)
    if known is not None and known.state == "running" and not answers:
        _wait_for_end(known.pid, seconds)  # its socket closes first of all, its process ends last
        known = _known(name, lab_id)
    return "gone" if known is None else known.state


def _known(name: str, lab_id: str) -> record.LabInfo | None:
    with suppress(InputError):
        known = record.info(name)
        return known if known.id == lab_id else None
    return None


def stop(name: str, *, graceful: bool = False) -> list[str]:
    """Takes a lab down; what was removed.

    Raises:
        LabError: something could not be removed.
    """
    if graceful:
        drain(name)
    return record.down(name, _STOP)


def stored_mesh(name: str) -> Mesh:
    """The mesh of a lab, from its own copy of the manifests.

    Raises:
        InputError: no such lab.
    """
    from lab.manifests import stored

    record.info(name)
    return stored.load(paths.manifests_dir(name), name)


def exec_in_pod(name: str, pod: str, command: Sequence[str], uid: int) -> int:
    """``lab exec``: runs a command in a pod (``POD.NAMESPACE`` or ``NAMESPACE/POD``); its exit code.

    Root keeps all capabilities, everybody else has none. A terminal and signals are passed through.

    Raises:
        InputError: no such pod.
    """
    from lab.runtime import enter

    return enter.run_in(enter.find(name, place_name(pod)), list(command), uid=uid)


def place_name(pod: str) -> str:
    """``NAMESPACE/POD`` as ``POD.NAMESPACE``; anything else as it is."""
    namespace, slash, name = pod.partition("/")
    return f"{name}.{namespace}" if slash else pod


def ask(name: str, question: Mapping[str, object], timeout: float = 10.0) -> Info:
    """One question on a lab's control socket (`lab.supervisor`), and its answer.

    Raises:
        InputError: no such lab, or it crashed. LabError: what the lab answers.
    """
    path = paths.control_socket(name)
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(timeout)
            sock.connect(str(path))
            sock.sendall(json.dumps(question).encode() + b"\n")
            with sock.makefile("rb") as lines:
                line = lines.readline()
                if not line:
                    raise ConnectionResetError("it closed the connection without an answer")
                answer: Info = json.loads(line)
    except (OSError, ValueError) as e:
        lab = record.info(name)
        if isinstance(e, ConnectionError) and lab.state == "running" and lab.pid:
            # Its sockets close before its process is gone: wait for the end that tells a crash from a refusal.
            _wait_for_end(lab.pid)
            lab = record.info(name)
        if lab.state == "crashed":
            raise InputError(
                f'lab "{name}" has crashed', str(lab.path), "", f"Take it down with lab down {name}"
            ) from None
        why = "it is not ready yet" if isinstance(e, FileNotFoundError) else str(e)
        raise LabError(f'lab "{name}" does not answer', str(path), why) from None
    if "error" in answer:
        from lab.runtime.lines import error_from_json

        raise error_from_json(answer["error"])
    return answer


def _wait_for_end(pid: int, seconds: float = 1.0) -> None:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        select.select([fd], [], [], seconds)
    finally:
        os.close(fd)


# --- the supervisor's process ---------------------------------------------------------------------


def _with_files(mesh: Mesh) -> Mesh:
    """With absolute paths: the supervisor has another working directory."""
    missing = next((file for file in mesh.files if not Path(file).is_file()), None)
    if missing is not None or not mesh.files:
        why = "discovery and cluster DNS read them, too"
        raise InputError("a lab needs manifest files", missing or "", why, "Name regular files.")
    return replace(mesh, files=tuple(os.path.abspath(file) for file in mesh.files))


def _runtime(runtime: str) -> dict[str, object]:
    if runtime != "docker":
        return {}
    from lab.fabric import engine

    return {"runtime": runtime, "engine": engine.address(), "image": os.environ.get("SIDECARLAB_IMAGE", "")}


def _launch(options: Mapping[str, object]) -> subprocess.Popen[bytes]:
    from lab.runtime.launch import clean_environ

    return subprocess.Popen(
        [sys.executable, "-P", "-m", "lab.supervisor", json.dumps(options)],
        env=clean_environ(),
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for us; the supervisor hears of it by its leash
    )


def _send(process: subprocess.Popen[bytes], mesh: Mesh) -> None:
    assert process.stdin is not None
    data = pickle.dumps(mesh)
    with suppress(BrokenPipeError):  # then its report says why
        process.stdin.write(len(data).to_bytes(8, "big") + data)
        process.stdin.flush()


def _next_report(process: subprocess.Popen[bytes]) -> Info:
    """The supervisor's next message; an empty one when it has ended without."""
    assert process.stdout is not None
    line = process.stdout.readline()
    message: Info = json.loads(line) if line else {}
    return message


def _let_go(process: subprocess.Popen[bytes]) -> None:
    """Lets the leash go and waits for the end of the process (a detached lab's own process goes on)."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    while process.stdout.read(65536):
        pass
    process.stdout.close()
    process.wait()


def _error_of(message: Mapping[str, Any], name: str) -> LabError:
    if "error" in message:
        from lab.runtime.lines import error_from_json

        return error_from_json(message["error"])
    return LabError(
        f'the process of lab "{name}" died',
        why="its pods may still run",
        next_step=f"Take it down with lab down {name}",
    )


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP interrupt as Ctrl-C does, where that can be."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _need_files() -> None:
    """Descriptors enough to take down what was brought up, at least."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit < _FILES:
        what, why = "too few open files are allowed", f"{limit}, and a lab needs {_FILES}, better 1024"
        raise InputError(what, "RLIMIT_NOFILE", why, "Raise it: ulimit -n 1024")


def _need_root() -> None:
    if os.geteuid() != 0:
        raise InputError("a lab needs root", why="it makes network namespaces and mounts", next_step="Run it with sudo")

"""Pods as containers of an engine, on the fabric of a lab: what ``lab up --runtime docker`` starts instead of places.

A pod is one container that sleeps and owns the network namespace (the fabric's link is put into it), and one for each
process: init, agent, app. All but an app with an image of its own run our image. To the rest of a lab a pod of
containers looks as one of namespaces: `Pod` has the face of `lab.runtime.client.Place`.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.errors import InputError, LabError
from lab.fabric import engine, namespaces, paths
from lab.fabric.record import Record
from lab.manifests import model
from lab.runtime.client import Process
from lab.runtime.mounts import NOTIFY_DIR, POD_DIR
from lab.runtime.place import PlaceSpec
from lab.runtime.spawn import ProcessSpec

if TYPE_CHECKING:
    from docker.models.containers import Container

IMAGE = "sidecarlab:latest"
_PYTHON = "/opt/sidecarlab/bin/python"
_NOBODY = "65535:65535"


class Engine:
    """One lab's side of a container engine. Blocking calls run in threads."""

    def __init__(self, address: str, image: str, record: Record) -> None:
        """
        Args:
            address: of its socket, ``unix:///PATH``.
            image: ours (``scripts/build-image`` makes it).
        """
        self._address, self.image, self._record = address, image or IMAGE, record
        self._client: Any = None
        self.labels = {engine.LABEL: record.id, "sidecarlab.dev/lab": record.name}

    async def connect(self) -> None:
        """Raises InputError: no engine answers, or it does not have our image."""
        await asyncio.to_thread(self._connect)

    def _connect(self) -> None:
        import docker

        self._record.add("engine", address=self._address)
        try:
            self._client = docker.DockerClient(base_url=self._address, timeout=60)
            self._client.ping()
        except Exception as e:  # the SDK raises what requests raises, too
            raise InputError(
                "no container engine answers",
                self._address,
                str(e).splitlines()[0][:200],
                "Start one, or set DOCKER_HOST",
            ) from None
        self.have(self.image, "Build it with scripts/build-image")

    def have(self, image: str, next_step: str = "Pull or build it") -> None:
        """Raises InputError: the engine does not have an image, and cannot pull it."""
        import docker.errors

        try:
            self._client.images.get(image)
        except docker.errors.ImageNotFound:
            try:
                self._client.images.pull(image)
            except docker.errors.APIError as e:
                raise InputError("no such image", image, _why(e), next_step) from None

    def create(self, **options: Any) -> Container:
        """Starts a container with the rights that everything of a lab has: none but those it is given.

        Raises:
            LabError: the engine refused.
        """
        import docker.errors

        try:
            container: Container = self._client.containers.create(
                cap_drop=["ALL"],
                read_only=True,
                labels={**self.labels, **options.pop("labels")},
                tmpfs={"/run": "mode=755", "/tmp": "mode=1777", "/var/tmp": "mode=1777"},
                stdin_open=False,
                **options,
            )
            container.start()
            container.reload()
        except docker.errors.APIError as e:
            raise LabError("a container cannot be started", str(options.get("name")), _why(e)) from None
        return container

    async def pod(self, spec: PlaceSpec, pod: model.Pod, number: int, on_exit: OnExit) -> Pod:
        """Starts the container that owns a pod's network, and pins that, for the fabric to put its link into."""
        return await asyncio.to_thread(self._pod, asyncio.get_running_loop(), spec, pod, number, on_exit)

    def _pod(
        self, loop: asyncio.AbstractEventLoop, spec: PlaceSpec, pod: model.Pod, number: int, on_exit: OnExit
    ) -> Pod:
        shared = paths.run_dir(self._record.name) / "containers" / str(number)  # a short path: sockets lie below it
        (shared / "notify").mkdir(parents=True)
        (shared / "notify").chmod(0o755)
        volumes = [f"{paths.pod_dir(self._record.name, spec.name)}:{POD_DIR}", f"{shared / 'notify'}:{NOTIFY_DIR}"]
        for target, text in (spec.view.files if spec.view else {}).items():
            file = shared / Path(target).name
            file.write_text(text)
            volumes.append(f"{file}:{target}:ro")
        container = self.create(
            image=self.image,
            entrypoint=["sleep", "infinity"],
            name=f"{self._record.name}_{spec.name}",
            hostname=spec.hostname,
            user=_NOBODY,
            network_mode="none",
            volumes=volumes,
            labels={"sidecarlab.dev/pod": spec.name},
            environment=self.environ,
            security_opt=["no-new-privileges:true"],
        )
        pid = int(container.attrs["State"]["Pid"])
        namespaces.adopt(self._record, spec.name, pid)
        namespaces.inside(paths.netns_path(self._record.name, spec.name), lambda: _set(spec.sysctls))
        return Pod(self, loop, spec, pod, container, volumes, shared / "notify", on_exit)

    @property
    def environ(self) -> dict[str, str]:
        """The lab's mark, which everything of a lab carries."""
        return {paths.ENV_MARK: self._record.id}

    def name_of(self, place: str, process: str) -> str:
        return f"{self._record.name}_{place}_{process}"

    def host_file(self, place: str, inside: str) -> Path:
        """A file of the pod's own directory as the host sees it."""
        return paths.pod_dir(self._record.name, place) / Path(inside).relative_to(POD_DIR)


class Pod:
    """A running pod of containers; ``pid`` is of the container that owns its network, ``processes`` are by name."""

    def __init__(
        self,
        of: Engine,
        loop: asyncio.AbstractEventLoop,
        spec: PlaceSpec,
        pod: model.Pod,
        owner: Container,
        volumes: Sequence[str],
        notify: Path,
        on_exit: OnExit,
    ) -> None:
        self.spec = spec
        self.pid = int(owner.attrs["State"]["Pid"])
        self.processes: dict[str, Process] = {}
        self.ended: asyncio.Future[int] = loop.create_future()
        self._engine, self._loop, self._pod = of, loop, pod
        self._owner, self._volumes, self._notify_dir, self._on_exit = owner, list(volumes), notify, on_exit
        self._containers: dict[str, Container] = {}
        self._notify: dict[str, socket.socket] = {}
        self._burying: set[asyncio.Task[None]] = set()
        self._pidfd = os.pidfd_open(self.pid)
        loop.call_soon_threadsafe(loop.add_reader, self._pidfd, self._owner_ended)

    @property
    def name(self) -> str:
        return self.spec.name

    async def spawn(self, spec: ProcessSpec) -> Process:
        """Starts a process's container and returns when it runs.

        Raises:
            LabError: it cannot be started, or the pod has ended.
        """
        if self.ended.done():
            raise LabError(f"{spec.name} cannot be started", self.name, "the pod has ended")
        notify = self._listen(spec) if spec.notify else None
        old = self._containers.pop(spec.name, None)
        container = await asyncio.to_thread(self._create, spec, old)
        self._containers[spec.name] = container
        pid = int(container.attrs["State"]["Pid"])
        try:
            pidfd = os.pidfd_open(pid) if pid else -1
        except ProcessLookupError:
            pidfd = -1
        over = pidfd < 0
        process = self.processes[spec.name] = Process(spec, os.open(os.devnull, os.O_RDONLY) if over else pidfd)
        if notify is not None:
            self._loop.add_reader(notify, self._notified, process, notify)
        if over:
            self._bury(process)
        else:
            self._loop.add_reader(pidfd, self._ends, process)
            if spec.argv and not spec.notify:  # the engine would have said otherwise
                process.ready.set_result(None)
        return process

    async def run(self, spec: ProcessSpec) -> int:
        """Runs a process to its end; its exit code."""
        return await (await self.spawn(spec)).exited

    def close(self) -> None:
        """Lets go of everything of it in this process; the containers are the caller's to remove."""
        for process in self.processes.values():
            if process.running:
                self._loop.remove_reader(process.pidfd)
                process.has_exited(137)
        for listening in self._notify.values():
            self._loop.remove_reader(listening)
            listening.close()
        self._notify.clear()
        if not self.ended.done():
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self.ended.set_result(137)

    def _create(self, spec: ProcessSpec, old: Container | None) -> Container:
        """In a thread."""
        if old is not None:
            old.remove(force=True)
        self._make_log(spec)
        who = spec.identity
        if spec.argv:
            command = list(spec.argv)
            image, environment = self._of_manifest(spec)
        else:
            command = [_PYTHON, "-m", "lab.runtime.contained", json.dumps(spec.to_json())]
            image, environment = self._engine.image, dict(spec.env)
        environment |= self._engine.environ
        if spec.notify:
            environment["NOTIFY_SOCKET"] = f"{NOTIFY_DIR}/{spec.name}"
        return self._engine.create(
            image=image,
            entrypoint=command[:1],
            command=command[1:],
            name=self._engine.name_of(self.name, spec.name),
            user=f"{who.uid}:{who.gid}",
            cap_add=sorted(who.capabilities or ()),
            security_opt=["no-new-privileges:true"] if who.no_new_privs else [],
            network_mode=f"container:{self._owner.id}",
            working_dir=spec.cwd,
            environment=environment,
            volumes=self._volumes,
            labels={"sidecarlab.dev/pod": self.name, "sidecarlab.dev/process": spec.name},
        )

    def _of_manifest(self, spec: ProcessSpec) -> tuple[str, dict[str, str]]:
        """Image and environment of the manifest's container whose command it is; ours where it names no image.

        What a place would add to the environment (PATH, HOME) is the image's to say.
        """
        for container in self._pod.containers:
            if container.command and (*container.command, *container.args) == spec.argv:
                if container.image:
                    self._engine.have(container.image)
                return container.image or self._engine.image, dict(container.env)
        return self._engine.image, dict(spec.env)

    def _make_log(self, spec: ProcessSpec) -> None:
        """The log as its process may append to it: without capabilities it could not make one in another's directory."""
        log = self._engine.host_file(self.name, spec.log)
        with log.open("a"):
            os.chown(log, spec.identity.uid, spec.identity.gid)

    def _listen(self, spec: ProcessSpec) -> socket.socket:
        path = self._notify_dir / spec.name
        path.unlink(missing_ok=True)
        old = self._notify.pop(spec.name, None)
        if old is not None:
            self._loop.remove_reader(old)
            old.close()
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        listening.bind(str(path))
        os.chown(path, spec.identity.uid, spec.identity.gid)
        self._notify[spec.name] = listening
        return listening

    def _notified(self, process: Process, listening: socket.socket) -> None:
        with suppress(BlockingIOError):
            if b"READY=1" in listening.recv(4096).splitlines() and not process.ready.done():
                process.ready.set_result(None)

    def _ends(self, process: Process) -> None:
        self._loop.remove_reader(process.pidfd)
        self._bury(process)

    def _bury(self, process: Process) -> None:
        task = self._loop.create_task(self._ended(process, self._containers[process.name]))
        self._burying.add(task)
        task.add_done_callback(self._burying.discard)

    async def _ended(self, process: Process, container: Container) -> None:
        """The engine knows its exit code, a moment after the kernel does."""
        try:
            code = await asyncio.to_thread(_wait, container)
            if process.spec.argv:
                await asyncio.to_thread(self._keep_output, process.spec, container)
        except Exception:  # the container, or the engine, is gone already
            code = 137
        if process.running:
            process.has_exited(code)
            self._on_exit(self, process)

    def _keep_output(self, spec: ProcessSpec, container: Container) -> None:
        with self._engine.host_file(self.name, spec.log).open("ab") as log:
            log.write(container.logs(tail=1000))

    def _owner_ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.ended.set_result(137)


OnExit = Callable[[Pod, Process], None]


def _wait(container: Container) -> int:
    return int(container.wait(timeout=30)["StatusCode"])


def _set(sysctls: Mapping[str, str]) -> None:
    for key, value in sysctls.items():
        namespaces.sysctl(key.replace(".", "/"), value)


def _why(error: Exception) -> str:
    return str(getattr(error, "explanation", None) or error).strip()[:300]

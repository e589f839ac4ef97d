"""One running lab: brings it up, says what runs, restarts what it is asked to, takes it down.

Control socket (JSON lines): ``inspect``; ``discovery`` (its status); ``drain`` (SIGTERM to every pod's processes, and
wait); ``stop``, with ``graceful`` after a drain; ``restart`` with ``place`` and ``process``; ``change`` to the
manifests that lie at ``staged`` (`lab.supervisor.change`).
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shlex
import shutil
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.containers import pods as contained
from lab.errors import InputError, LabError, shortened
from lab.fabric import paths, record
from lab.fabric.record import Record
from lab.manifests import stored
from lab.manifests.model import ExternalHost, Mesh, Pod
from lab.runtime import enter, files, mounts, workload
from lab.runtime.client import Ended, Place, Process, Zygote
from lab.runtime.lines import ask, error_to_json
from lab.runtime.logs import Log, last_error
from lab.runtime.place import PlaceSpec
from lab.runtime.spawn import ProcessSpec
from lab.supervisor.change import Change
from lab.supervisor.credentials import Credentials
from lab.supervisor.options import Options

_AT_ONCE = 8  # pods that start at the same time: more only take turns on the processors
_GRACE = 30.0  # seconds a drain may take: Kubernetes' terminationGracePeriodSeconds
_KEPT_EVENTS = 1000
_SETTLE = 1.0  # seconds that proxies may take to answer what they were sent last, once they are ready
_REJECTION_PAUSE = 1.0  # seconds between looks at what was rejected: discovery does not say so by itself
_STEADY = 0.5  # seconds that a container's command must run at least; Kubernetes would restart it, for ever
_HEALTH_PORT = 15021
_HEALTH_PAUSE = 0.02


@dataclass(slots=True)
class Running:
    """A pod or external host, as far as it has come."""

    name: str
    pod: Pod | None = None
    place: Place | contained.Pod | None = None
    ready: bool = False
    reason: str = "it has not been started"
    expected: set[str] = field(default_factory=set)
    """Processes that were started and should run."""
    leaving: bool = False
    """It is being taken away on purpose."""


class Supervisor:
    """One lab, from its record to its end. Lives in one event loop."""

    def __init__(self, options: Options, mesh: Mesh, known: Record, zygote: Zygote, stopped: asyncio.Event) -> None:
        """``stopped`` is set when the lab is to be taken down."""
        self._options = options
        self._mesh = mesh
        self._lab = known.name
        self._record = known
        self._log = Log(files.log(known.name, "lab"), sys.stderr if not options.detach else None)
        self._backend = options.backend
        self._pods = {pod.name: Running(pod.name, pod) for pod in self._mesh.pods}
        self._hosts = {name: Running(name) for name in map(_place_of, self._mesh.external_hosts)}
        self._events: deque[dict[str, object]] = deque(maxlen=_KEPT_EVENTS)
        self._zygote = zygote
        self._node: Place | None = None
        self._fabric: asyncio.Future[None] | None = None
        self._control: asyncio.Server | None = None
        self._ending = False
        self._started = time.monotonic()
        self._stopped = stopped
        self._down: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answers: set[asyncio.Task[None]] = set()
        self._credentials = Credentials(known.name)
        self._keeping: asyncio.Task[None] | None = None
        self._changing: asyncio.Task[None] | None = None
        self._contained: dict[str, contained.Pod] = {}

    # --- up ---------------------------------------------------------------------------------

    async def up(self) -> None:
        """Everything, in order; what does not depend on each other at the same time.

        Raises:
            LabError: what failed first; the caller takes down what there is.
        """
        self._store_manifests()
        expose = mounts.program_paths(_binary_directories(self._mesh))
        self._zygote.log_to(files.log(self._lab, "zygote"))
        files.notify_dir(self._lab).mkdir()
        if self._options.runtime == "docker":  # the fabric puts its links into networks that the engine makes
            self._make_directories()
            await self._start_owners(expose)
        self._fabric = asyncio.ensure_future(asyncio.to_thread(_build_fabric, self._mesh, self._record))
        if self._options.runtime != "docker":
            self._make_directories()
        self._fabric.add_done_callback(lambda _: self._phase("fabric"))
        self._zygote.ready.add_done_callback(lambda _: self._phase("zygote"))
        # The node's services need few of the zygote's modules: they start while it imports the others.
        await asyncio.shield(self._fabric)
        self._node = await self._start_place(workload.node_place(self._lab))
        services = asyncio.ensure_future(self._start_services(self._node))
        try:
            await self._zygote.wait_ready()
            await self._start_all(expose, services)
        finally:
            services.cancel()
        await self._tell_nacks()
        self._check_running(self._pods.values())
        self._keeping = asyncio.create_task(self._credentials.keep(self._meshed, self._not_renewed))
        self._zygote.gone.add_done_callback(lambda _: self._zygote_ended())
        self._log.write("ready", True, pods=len(self._pods), iptables=self._backend, seconds=f"{self._seconds():.2f}")
        await self._listen()

    def _make_directories(self) -> None:
        for running in (*self._pods.values(), *self._hosts.values()):
            self._make_directory(running)

    async def _start_owners(self, expose: tuple[str, ...]) -> None:
        """The containers that own the networks of pods."""
        engine = contained.Engine(self._options.engine, self._options.image, self._record)
        await engine.connect()
        turns = asyncio.Semaphore(_AT_ONCE)

        async def start(number: int, pod: Pod) -> None:
            async with turns:
                spec = workload.pod_place(self._lab, self._mesh, pod, expose)
                self._contained[pod.name] = await engine.pod(spec, pod, number, self._process_ended)

        await _all(*(start(number, pod) for number, pod in enumerate(self._mesh.pods)))
        self._phase("owners")

    async def _start_services(self, node: Place) -> None:
        specs = (
            workload.discovery(self._lab, self._mesh),
            workload.cluster_dns(self._lab, self._mesh),
            workload.observer(self._lab),
        )
        await _all(*(self._start_service(node, spec) for spec in specs))
        self._phase("services")

    async def _start_service(self, node: Place, spec: ProcessSpec) -> None:
        process = await node.spawn(spec)
        try:
            await process.wait_ready()
        except Ended as ended:
            log = files.log(self._lab, spec.name)
            if not os.statvfs(log.parent).f_bavail:
                raise _no_room(log.parent) from None
            raise LabError(f"{spec.name} did not start", why=_why(log, ended.code)) from None

    async def _start_all(
        self,
        expose: tuple[str, ...],
        services: asyncio.Future[None],
        names: Collection[str] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Starts the places called so, or all, and returns when they are ready."""
        limit = self._options.timeout if timeout is None else timeout
        turns = asyncio.Semaphore(_AT_ONCE)
        hosts = {_place_of(host): host for host in self._mesh.external_hosts}

        async def start(running: Running) -> None:
            async with turns:
                if running.pod is not None:
                    await self._start_pod(running, running.pod, expose, services)
                else:
                    await self._start_host(running, hosts[running.name], expose)
            running.ready, running.reason = True, ""
            self._phase(running.name)

        everything = [*self._pods.values(), *self._hosts.values()]
        if names is not None:
            everything = [running for running in everything if running.name in names]
        try:
            async with asyncio.timeout(limit):
                await self._unless_rejected(_all(asyncio.shield(services), *map(start, everything)))
        except TimeoutError:
            if not services.done():
                why, next_step = "discovery is not", "Give it longer with --timeout."
                raise LabError(f"the lab was not ready after {limit:g} s", why=why, next_step=next_step) from None
            late = next(r for r in everything if not r.ready)
            raise await self._not_ready(late, f"after {limit:g} s {late.reason}") from None
        self._check_running(everything)

    def _check_running(self, these: Iterable[Running]) -> None:
        """Raises InputError if a container of one of them has ended, whatever its exit code."""
        for running in these:
            for process in running.place.processes.values() if running.place is not None else ():
                if process.spec.argv and not process.running:
                    raise self._container_ended(running, process)

    def _container_ended(self, running: Running, process: Process) -> InputError:
        """Why a pod cannot be ready: a container's command could not be run, or did not go on running."""
        assert running.pod is not None
        container = workload.containers(running.pod)[process.name]
        last = last_error(self._log_of(running, process.name))
        if process.ready.done():
            command, status = shortened(shlex.join(process.spec.argv), 120), _status(process.exited.result())
            why = f"{command} ended with {status}{f': {last}' if last else ', without a word'}"
            next_step = "A container's command must go on running. Correct it, or leave it out for the echo app."
        else:
            why = f"it cannot be started: {last}"
            next_step = "Correct its command, or leave it out for the echo app."
        return InputError(
            f'pod {running.name} did not become ready: container "{container.name}"',
            str(running.pod.meta.source),
            why,
            next_step,
        )

    async def _unless_rejected(self, starting: Coroutine[Any, Any, None]) -> None:
        """Ends the wait for pods when one of them cannot become ready any more.

        Raises:
            InputError: an Envoy rejected its listeners or clusters; without them it is never ready.
        """
        doing = asyncio.ensure_future(starting)
        try:
            while not (await asyncio.wait([doing], timeout=_REJECTION_PAUSE))[0]:
                for name, error in (await self.nacks()).items():
                    running = self._pods.get(name)
                    if running is not None and not running.ready and error.startswith(("LDS", "CDS")):
                        raise await self._not_ready(running, running.reason)
            await doing
        finally:
            doing.cancel()
            await asyncio.gather(doing, return_exceptions=True)

    async def _start_pod(
        self, running: Running, pod: Pod, expose: tuple[str, ...], services: asyncio.Future[None]
    ) -> None:
        running.reason = "its namespaces were not made"
        place: Place | contained.Pod | None = self._contained.get(pod.name)
        if place is None:
            place = await self._start_place(workload.pod_place(self._lab, self._mesh, pod, expose))
        else:
            self._keep(place)
        running.place = place
        init = workload.init(self._mesh, pod, self._backend)
        if init is not None:
            running.reason = "init has not ended"
            code = await place.run(init)
            if code:
                raise await self._not_ready(running, f"init: {_why(files.init_log(self._lab, pod.name), code)}")
        running.reason = "discovery was not ready"
        await asyncio.shield(services)
        await self._observe(pod.name)
        agent = workload.agent(self._mesh, pod)
        if agent is not None:
            await self._credentials.mount(pod)
        specs = ([agent] if agent else []) + list(workload.apps(self._mesh, pod))
        running.reason = f"it waits for {' and '.join(spec.name for spec in specs)}"
        await _all(*(self._start_process(running, spec) for spec in specs))
        if agent is not None:
            running.reason = f"port {_HEALTH_PORT} does not say that it is ready"
            await self._healthy(pod.ip, int(agent.env.get("ENVOY_STATUS_PORT", _HEALTH_PORT)))

    async def _start_host(self, running: Running, host: ExternalHost, expose: tuple[str, ...]) -> None:
        spec = workload.external_place(self._lab, self._mesh, host, expose)
        running.place = await self._start_place(spec)
        await self._start_process(running, workload.external_app(host))

    async def _start_process(self, running: Running, spec: ProcessSpec) -> Process:
        """Starts a process and waits until it is ready; a container's command must then go on running for a moment."""
        assert running.place is not None
        process = await running.place.spawn(spec)
        running.expected.add(spec.name)
        try:
            await process.wait_ready()
            if spec.argv:
                await asyncio.wait([process.exited], timeout=_STEADY)
        except Ended as ended:
            if not spec.argv:
                log = self._log_of(running, spec.name)
                raise await self._not_ready(running, f"{spec.name}: {_why(log, ended.code)}") from None
        if spec.argv and not process.running:
            raise self._container_ended(running, process)
        return process

    async def _start_place(self, spec: PlaceSpec) -> Place:
        place = await self._zygote.start(spec, self._process_ended)
        self._keep(place)
        return place

    def _keep(self, place: Place | contained.Pod) -> None:
        """Remembers the process by which the place can be entered, and hears of its end."""
        process = record.ProcessId.of(place.pid)
        if process is not None:
            self._record.add("process", pid=process.pid, starttime=process.starttime, role="keeper", place=place.name)
        place.ended.add_done_callback(lambda _: self._place_ended(place.name))

    async def _observe(self, place: str) -> None:
        """After init, so that init finds no rules but its own; before the first packet of agent and app."""
        netns = str(paths.netns_path(self._lab, place))
        answer = await ask(files.observer_socket(self._lab), {"op": "attach", "place": place, "netns": netns})
        if not answer.get("ok"):
            raise LabError(f"pod {place} cannot be observed", why=str(answer.get("error")))
        for what, why in dict(answer.get("missing") or {}).items():
            self._log.write("not-observable", place=place, what=what, why=why)

    async def _healthy(self, address: str, port: int) -> None:
        """One GET from the node, as a kubelet makes it; again only where the answer is not yes."""
        request = f"GET /healthz/ready HTTP/1.1\r\nHost: {address}:{port}\r\nConnection: close\r\n\r\n".encode()
        while True:
            with suppress(OSError):
                if b" 200 " in await self._fetch(address, port, request):
                    return
            await asyncio.sleep(_HEALTH_PAUSE)

    async def _fetch(self, address: str, port: int, request: bytes) -> bytes:
        with enter.netns(paths.netns_path(self._lab, paths.NODE)):
            sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        with sock:
            await loop.sock_connect(sock, (address, port))
            await loop.sock_sendall(sock, request)
            return await loop.sock_recv(sock, 256)

    async def _not_ready(self, running: Running, reason: str) -> LabError:
        kind = "pod" if running.pod is not None else "external host"
        nack = (await self.nacks()).get(running.name)
        next_step = "Correct the manifests and try again."
        if nack:
            reason = f"{reason}; its Envoy rejected {nack}"
            next_step = f"Correct what makes it: lab proxy-config {running.name} -f FILE shows what Envoy gets."
        elif running.pod is not None and running.pod.injected and "agent" in running.expected:
            last = last_error(files.agent_log(self._lab, running.name))
            reason = f"{reason}; the agent's last word: {last}" if last and last not in reason else reason
        if not nack and reason.startswith("after "):
            next_step = "Correct the manifests, or give it longer with --timeout."
        return InputError(f"{kind} {running.name} did not become ready", why=reason, next_step=next_step)

    def _store_manifests(self) -> None:
        """Copies in the order in which they were read: order decides who is oldest."""
        directory = paths.manifests_dir(self._lab)
        directory.mkdir()
        for number, file in enumerate(self._mesh.files):
            try:
                shutil.copyfile(file, directory / stored.copy_name(number, file))
            except OSError as e:
                if e.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise _no_room(directory) from None
                why = str(e.strerror)
                raise InputError("a manifest cannot be read again", file, why, "Name files that can be.") from None
        stored.save(self._mesh, directory)

    def _make_directory(self, running: Running) -> None:
        directory = paths.pod_dir(self._lab, running.name)
        directory.parent.mkdir(exist_ok=True)
        for owned in workload.pod_files(running.pod) if running.pod else workload.external_files():
            path = directory / owned.path
            if owned.text is None:
                path.mkdir()
                path.chmod(0o775)  # a proxy that is root, but without capabilities, writes as a member of the group
            else:
                path.write_text(owned.text)
            os.chown(path, owned.uid, owned.uid)

    # --- while it runs ----------------------------------------------------------------------

    def _process_ended(self, place: Place | contained.Pod, process: Process) -> None:
        if process.name == "init":
            return
        running = self._running(place.name)
        unexpected = not self._ending and (running is None or process.name in running.expected)
        if running is not None:
            running.expected.discard(process.name)
            if running.ready:
                running.ready, running.reason = False, f"{process.name} has ended"
        code = process.exited.result()
        self._event("process-ended", place.name, process=process.name, code=code, unexpected=unexpected)

    def _place_ended(self, name: str) -> None:
        running = self._running(name)
        if running is not None:
            if running.leaving:
                return
            running.ready, running.reason = False, "its first process has ended"
            running.expected.clear()
        if not self._ending:
            self._event("place-ended", name, unexpected=True)

    def _zygote_ended(self) -> None:
        """Places live on without it; none can be started any more."""
        if not self._ending:
            self._event("zygote-ended", paths.NODE, unexpected=True)

    async def _tell_nacks(self) -> None:
        """A pod may be ready although its Envoy rejected something (routes, endpoints); that is said, not hidden."""
        with suppress(LabError):
            await ask(files.discovery_socket(self._lab), {"op": "wait", "timeout": _SETTLE}, timeout=2 * _SETTLE)
        for pod, error in (await self.nacks()).items():
            self._event("nack", pod, error=error)

    def _meshed(self) -> list[Pod]:
        return [pod for pod in self._mesh.pods if pod.injected]

    def _not_renewed(self, pod: Pod, error: LabError) -> None:
        self._event("token-not-renewed", pod.name, error=str(error))

    def _event(self, what: str, place: str, **fields: object) -> None:
        self._events.append({"time": time.time(), "event": what, "place": place, **fields})
        self._log.write(what, place=place, **fields)

    def _running(self, place: str) -> Running | None:
        return self._pods.get(place) or self._hosts.get(place)

    def _log_of(self, running: Running, process: str) -> Path:
        if process == "agent":
            return files.agent_log(self._lab, running.name)
        return files.app_log(self._lab, running.name, process)

    async def inspect(self) -> dict[str, Any]:
        """The contract's shape, and more."""
        nacks = await self.nacks()
        return {
            "name": self._lab,
            "pid": os.getpid(),
            "files": list(self._mesh.files),
            "iptables": self._backend,
            "runtime": self._options.runtime,
            "directory": str(paths.run_dir(self._lab)),
            "pods": [self._pod_info(running, nacks) for running in self._pods.values()],
            "external_hosts": [
                {
                    "name": host.meta.name,
                    "addresses": list(host.addresses),
                    "ready": self._hosts[_place_of(host)].ready,
                    "pids": {"app": _pid(self._hosts[_place_of(host)].place, "app")},
                }
                for host in self._mesh.external_hosts
                if _place_of(host) in self._hosts
            ],
            "services": {name: _pid(self._node, name) for name in ("discovery", "dns", "observer")},
            "events": list(self._events),
        }

    def _pod_info(self, running: Running, nacks: Mapping[str, str]) -> dict[str, Any]:
        pod = running.pod
        assert pod is not None
        agent = _pid(running.place, "agent")
        apps = [spec.name for spec in workload.apps(self._mesh, pod)]
        return {
            "name": pod.meta.name,
            "namespace": pod.meta.namespace,
            "ip": pod.ip,
            "ips": list(pod.ips),
            "injected": pod.injected,
            "ports": [p.port for c in pod.containers for p in c.ports],
            "ready": running.ready,
            "reason": running.reason or None,
            "pids": {
                "agent": agent,
                "envoy": next(iter(children(agent, "envoy")), None) if agent else None,
                "app": _pid(running.place, "app"),
                "init": running.place.pid if running.place else None,
                **{name: _pid(running.place, name) for name in apps[1:]},
            },
            "nack": nacks.get(pod.name),
        }

    async def nacks(self) -> dict[str, str]:
        """Per pod what its Envoy rejected, in Envoy's words (node id: TYPE~IP~POD.NAMESPACE~DOMAIN)."""
        try:
            status = await ask(files.discovery_socket(self._lab), {"op": "status"}, timeout=2.0)
        except LabError:
            return {}
        found = {}
        for node, proxy in dict(status.get("proxies") or {}).items():
            nack, parts = proxy.get("nack"), node.split("~")
            if nack and len(parts) == 4:
                found[parts[2]] = f"{nack['type']}: {nack['error']}"
        return found

    async def drain(self) -> dict[str, Any]:
        """SIGTERM to all processes of all pods, as a node does that shuts down; waits for their ends."""
        self._ending = True
        processes = [
            process
            for running in self._pods.values()
            if running.place is not None
            for process in running.place.processes.values()
            if process.running
        ]
        for process in processes:
            process.signal(signal.SIGTERM)
        if processes:
            await asyncio.wait([process.exited for process in processes], timeout=_GRACE)
        left = [process.pid for process in processes if process.running]
        return {"drained": len(processes) - len(left), "left": left}

    async def restart(self, name: str, process: str, spec: ProcessSpec | None = None) -> dict[str, Any]:
        """Starts a process of a place again, with what it was started with or ``spec``; ends it first if it runs."""
        if name == paths.NODE:
            return await self._restart_service(process)
        running = self._running(name)
        old = running.place.processes.get(process) if running is not None and running.place is not None else None
        if running is None or old is None:
            raise InputError(f"there is no process {process} in {name}", f"lab {self._lab}")
        running.expected.discard(process)
        old.signal(signal.SIGKILL)
        await old.exited
        new = await asyncio.wait_for(self._start_process(running, spec or old.spec), self._options.timeout)
        if running.place is not None and not running.place.ended.done():
            running.ready, running.reason = True, ""
        return {"pid": new.pid}

    async def _restart_service(self, name: str) -> dict[str, Any]:
        """Starts discovery or cluster DNS again (the observer would have lost what it follows)."""
        old = self._node.processes.get(name) if self._node is not None and name in ("discovery", "dns") else None
        if self._node is None or old is None:
            raise InputError(f"there is no process {name} to start again in {paths.NODE}", f"lab {self._lab}")
        old.signal(signal.SIGKILL)
        await old.exited
        await asyncio.wait_for(self._start_service(self._node, old.spec), self._options.timeout)
        return {"pid": _pid(self._node, name)}

    async def change(self, staged: Path, base: str, timeout: float) -> dict[str, Any]:
        """Makes the lab that of the manifests in a directory, which this takes; if it cannot be, all stays as it is.

        Args:
            base: the fingerprint of the manifests that the caller has seen running.
            timeout: how long new pods may take to be ready, in seconds.
        """
        if self._changing is not None:
            raise InputError(f"lab {self._lab} is being changed", why="one change at a time", next_step="Try again")
        if base != stored.fingerprint(paths.manifests_dir(self._lab)):
            raise InputError(
                f"lab {self._lab} was not changed", why="somebody else changed it meanwhile", next_step="Try again"
            )
        change = Change(self, stored.load(staged, self._lab), staged, timeout)
        self._changing = asyncio.create_task(change.run())
        try:
            await asyncio.wait([self._changing])
            if self._changing.cancelled():
                raise LabError(f"lab {self._lab} was not changed", why="it is being taken down")
            self._changing.result()
        except OSError as e:
            raise LabError(f"lab {self._lab} was not changed", e.filename or "", str(e.strerror)) from None
        finally:
            self._changing = None
        self._event("changed", paths.NODE)
        return {"changed": self._lab, "nacks": await self.nacks()}

    # --- what a change needs (`lab.supervisor.change`) --------------------------------------

    @property
    def name(self) -> str:
        return self._lab

    @property
    def record(self) -> Record:
        return self._record

    @property
    def runtime(self) -> str:
        return self._options.runtime

    @property
    def ending(self) -> bool:
        """It is being taken down."""
        return self._ending

    @property
    def mesh(self) -> Mesh:
        """What places are started from."""
        return self._mesh

    @mesh.setter
    def mesh(self, mesh: Mesh) -> None:
        self._mesh = mesh

    async def in_fabric(self, work: Callable[[], None]) -> None:
        """Runs work on namespaces in a thread; an end of the lab waits for it."""
        self._fabric = asyncio.ensure_future(asyncio.to_thread(work))
        await asyncio.shield(self._fabric)

    def admit(self, names: Collection[str], mesh: Mesh) -> None:
        """Makes places of a mesh known, with a directory each."""
        pods = [Running(pod.name, pod) for pod in mesh.pods if pod.name in names]
        hosts = [Running(name) for name in map(_place_of, mesh.external_hosts) if name in names]
        self._pods.update((running.name, running) for running in pods)
        self._hosts.update((running.name, running) for running in hosts)
        for running in (*pods, *hosts):
            self._make_directory(running)

    async def start(self, names: Collection[str], timeout: float) -> None:
        """Starts places that are known; returns when they are ready.

        Raises:
            LabError: one of them is not, in time or ever.
        """
        services: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        services.set_result(None)
        expose = mounts.program_paths(_binary_directories(self._mesh))
        await self._start_all(expose, services, names, timeout)

    async def dismiss(self, names: Collection[str]) -> None:
        """Ends places and everything in them at once, and forgets them. Those that never came so far are no matter."""
        places = [place for name in names if (place := self._zygote.places.get(name)) is not None]
        for name in names:
            running = self._running(name)
            if running is not None:
                running.leaving, running.ready, running.reason = True, False, "it is taken away"
                running.expected.clear()
            with suppress(LabError):  # it would else keep the network namespace alive
                await ask(files.observer_socket(self._lab), {"op": "detach", "place": name})
        for place in places:
            await asyncio.wait((place.known, self._zygote.gone), return_when=asyncio.FIRST_COMPLETED)
            place.kill()
        for place in places:
            await asyncio.wait([place.ended])
            self._zygote.places.pop(place.name, None)
        for name in names:
            self._pods.pop(name, None)
            self._hosts.pop(name, None)

    def spec(self, name: str, process: str) -> ProcessSpec:
        """What a process of a place was started with."""
        running = self._running(name)
        if running is None or running.place is None or process not in running.place.processes:
            raise InputError(f"there is no process {process} in {name}", f"lab {self._lab}")
        return running.place.processes[process].spec

    def adopt(self, mesh: Mesh) -> None:
        """From now on this is what the lab is; all of its places run."""
        self._mesh = mesh
        self._pods = {pod.name: self._pods[pod.name] for pod in mesh.pods}
        for pod in mesh.pods:
            self._pods[pod.name].pod = pod

    # --- control socket ---------------------------------------------------------------------

    async def _listen(self) -> None:
        path = paths.control_socket(self._lab)
        self._control = await asyncio.start_unix_server(self._converse, str(path), limit=1 << 20)
        path.chmod(0o600)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._answers.add(task)
        try:
            while line := await reader.readline():
                answer = await self._answer(line)
                writer.write(json.dumps(answer, separators=(",", ":"), default=str).encode() + b"\n")
                await writer.drain()
        except (ConnectionError, ValueError):
            pass  # gone, or a line without end
        finally:
            self._answers.discard(task)
            writer.close()

    async def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
            match request.get("op"):
                case "inspect":
                    return await self.inspect()
                case "discovery":
                    return await ask(files.discovery_socket(self._lab), {"op": "status"})
                case "drain":
                    return await self.drain()
                case "restart":
                    return await self.restart(str(request["place"]), str(request["process"]))
                case "change":
                    return await self.change(
                        Path(request["staged"]), str(request["base"]), float(request.get("timeout") or 60.0)
                    )
                case "stop":
                    if request.get("graceful"):
                        await self.drain()
                    self._stopped.set()
                    await asyncio.shield(self._down)
                    return {"down": self._lab}
                case op:
                    raise InputError(f"unknown request {op!r}")
        except LabError as e:
            return {"error": error_to_json(e)}
        except (ValueError, KeyError, AttributeError) as e:
            return {"error": error_to_json(InputError("bad request", why=str(e)))}

    # --- down -------------------------------------------------------------------------------

    async def down(self) -> None:
        """Takes everything away, however far it came.

        Raises:
            LabError: something could not be removed.
        """
        self._ending = True
        if self._keeping is not None:
            self._keeping.cancel()
        if self._control is not None:
            self._control.close()
        if self._changing is not None:
            self._changing.cancel()
            await asyncio.wait([self._changing])
        if self._fabric is not None:
            await asyncio.wait([self._fabric])  # a thread cannot be interrupted, and would make things again
            self._fabric.exception()
        for pod in self._contained.values():
            pod.close()
        await self._zygote.stop()
        self._log.write("down", True, seconds=f"{self._seconds():.2f}")
        self._log.close()
        self._record.close()
        record.down(self._lab)
        if not self._down.done():
            self._down.set_result(None)
        if self._answers:  # whoever asked for it hears that it is done
            await asyncio.wait(self._answers, timeout=1.0)

    def _phase(self, what: str) -> None:
        self._log.write("phase", True, ready=what, seconds=f"{self._seconds():.3f}")

    def _seconds(self) -> float:
        return time.monotonic() - self._started


# --- small things -----------------------------------------------------------------------------


def _place_of(host: ExternalHost) -> str:
    return paths.external_place(host.meta.name)


def _build_fabric(mesh: Mesh, known: Record) -> None:
    from lab.fabric import build, plan

    build.build(plan.plan(mesh), known)


def _binary_directories(mesh: Mesh) -> list[str]:
    """Where Envoys lie that the manifests name."""
    configs = [mesh.mesh_config.default_config, *(pod.proxy_config for pod in mesh.pods)]
    binaries = [config.get("binaryPath") for config in configs]
    return [os.path.dirname(path) for path in binaries if isinstance(path, str) and os.path.isabs(path)]


async def _all(*work: Coroutine[Any, Any, Any] | asyncio.Future[Any]) -> None:
    """Waits for all of them; the first failure cancels the others and is raised as it is."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _pid(place: Place | contained.Pod | None, name: str) -> int | None:
    process = place.processes.get(name) if place is not None else None
    return process.pid if process is not None and process.running else None


def children(pid: int, command: str) -> list[int]:
    """The children of a process that ps calls ``command``."""
    found: list[str] = []
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            found += Path(f"/proc/{pid}/task/{task}/children").read_text().split()
    return [int(child) for child in found if _command(child) == command]


def _command(pid: str) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _no_room(directory: Path) -> InputError:
    return InputError("a lab cannot keep its files", str(directory), os.strerror(errno.ENOSPC), "Make room there.")


def _status(code: int) -> str:
    """An exit code, or the signal that it stands for (128 and its number, as a shell has it)."""
    try:
        return signal.Signals(code - 128).name
    except ValueError:
        return str(code)


def _why(log: Path, code: int) -> str:
    last = last_error(log)
    return f"it ended with {code}: {last}" if last else f"it ended with {code} and without a word"

"""A lab of one test: its record, pinned network namespaces, a zygote, and places started by it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from lab.fabric import paths, record
from lab.fabric.record import Record
from lab.runtime import etc, kernel, mounts
from lab.runtime.client import Place, Process, Zygote
from lab.runtime.identity import APP, Identity
from lab.runtime.place import PlaceSpec
from lab.runtime.spawn import DEFAULT_PATH, ProcessSpec

_MS_BIND = 0x1000


class Lab:
    """What the tests start places with."""

    def __init__(self, name: str, known: Record) -> None:
        self.name = name
        self.record = known

    def pin_netns(self, place: str) -> Path:
        pin = paths.netns_path(self.name, place)
        self.record.add("netns", place=place, path=str(pin))
        pin.touch()

        def make() -> None:
            kernel.unshare(kernel.CLONE_NEWNET)
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            kernel.mount("/proc/thread-self/ns/net", str(pin), flags=_MS_BIND)

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        return pin

    def place(self, name: str, hostname: str = "pod-0", expose: tuple[str, ...] | None = None) -> PlaceSpec:
        directory = paths.pod_dir(self.name, name)
        directory.mkdir(parents=True)
        return PlaceSpec(
            name=name,
            netns=str(self.pin_netns(name)),
            notify_dir=mounts.NOTIFY_DIR,
            hostname=hostname,
            view=mounts.View(
                str(directory),
                mounts.program_paths() if expose is None else expose,
                {
                    "/etc/resolv.conf": etc.resolv_conf(["10.96.0.10"], etc.cluster_search("shop")),
                    "/etc/hosts": etc.hosts(["10.244.0.1"], hostname),
                    "/etc/nsswitch.conf": etc.NSSWITCH,
                    "/etc/hostname": f"{hostname}\n",
                },
            ),
            sysctls={"net.ipv4.ip_unprivileged_port_start": "0"},
        )

    @asynccontextmanager
    async def zygote(self, *modules: str) -> AsyncIterator[Zygote]:
        zygote = Zygote.launch(modules, self.record.environ)
        self.record.add_process(zygote.process.pid, "zygote")
        try:
            await zygote.wait_ready()
            yield zygote
        finally:
            await zygote.stop()

    @asynccontextmanager
    async def running(self, name: str = "web.shop", spec: PlaceSpec | None = None) -> AsyncIterator[Place]:
        """One place, started and recorded."""
        async with self.zygote() as zygote:
            yield await self.start(zygote, spec or self.place(name))

    async def start(
        self, zygote: Zygote, spec: PlaceSpec, on_exit: Callable[[Place, Process], None] = lambda *_: None
    ) -> Place:
        place = await zygote.start(spec, on_exit)
        process = record.ProcessId.of(place.pid)
        assert process is not None
        self.record.add("process", pid=place.pid, starttime=process.starttime, role="keeper", place=spec.name)
        return place

    def log(self, place: str) -> str:
        return (paths.pod_dir(self.name, place) / "log.txt").read_text()


def python(code: str, identity: Identity = APP, name: str = "app", **fields: object) -> ProcessSpec:
    """A program of the place: this Python, with its output in the place's log.txt."""
    return ProcessSpec(
        name=name,
        argv=(sys.executable, "-c", code),
        env={"PATH": DEFAULT_PATH},
        identity=identity,
        log="/run/sidecar/log.txt",
        **fields,  # type: ignore[arg-type]
    )

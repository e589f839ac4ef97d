"""A place, started for real: who its processes are, what they see, and how they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runtime_lab import Lab, python

from lab.errors import LabError
from lab.fabric import paths, record
from lab.runtime.client import Ended, Zygote
from lab.runtime.identity import APP, INIT, NUMBERS, PROXY, ROOT, Identity
from lab.runtime.launch import clean_environ
from lab.runtime.spawn import ProcessSpec

pytestmark = pytest.mark.root

Run = Callable[[Coroutine[Any, Any, None]], None]

SELF = """
import json, os
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
def attempt(path):
    try:
        open(path, "a").close()
    except OSError as e:
        return e.strerror
    return "written"
print(json.dumps({
    "uid": os.getresuid(), "gid": os.getresgid(), "groups": os.getgroups(),
    "caps": {k: int(status["Cap" + k], 16) for k in ("Inh", "Prm", "Eff", "Bnd", "Amb")},
    "nnp": int(status["NoNewPrivs"]), "pid": os.getpid(), "session": os.getsid(0),
    "ignored": int(status["SigIgn"], 16), "blocked": int(status["SigBlk"], 16),
    "fds": {f: os.readlink(f"/proc/self/fd/{f}") for f in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{f}")},
    "root": attempt("/written"), "etc": attempt("/etc/resolv.conf"), "lib": attempt(json.__file__),
    "tmp": attempt("/tmp/written"), "stdout": attempt("/dev/stdout"),
}))
"""


THREADS = range(signal.SIGRTMIN - 2, signal.SIGRTMIN)
"""Signals that the C library keeps for its threads and lets nobody set, so they stay as they were inherited (signal(7))."""


def read(path: str) -> str:
    """The file's text; empty if what it belongs to is gone."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def bits(*names: str) -> int:
    return sum(1 << NUMBERS[name] for name in names)


@pytest.mark.parametrize(
    ("identity", "caps"),
    [(APP, 0), (PROXY, 0), (INIT, bits("NET_ADMIN", "NET_RAW"))],
    ids=["app", "proxy", "init"],
)
def test_process_has_its_identity_and_a_read_only_root(lab: Lab, run: Run, identity: Identity, caps: int) -> None:
    async def check() -> None:
        async with lab.running() as place:
            assert await place.run(python(SELF, identity)) == 0, lab.log("web.shop")
        seen = json.loads(lab.log("web.shop"))
        assert seen["uid"] == [identity.uid] * 3
        assert seen["gid"] == [identity.gid] * 3
        assert seen["groups"] == []
        assert seen["caps"] == {"Inh": 0, "Prm": caps, "Eff": caps, "Bnd": caps, "Amb": 0}
        assert seen["nnp"] == 1
        refused = "Permission denied" if identity.uid else "Read-only file system"
        assert (seen["root"], seen["etc"], seen["lib"]) == ("Read-only file system", refused, refused)
        assert (seen["tmp"], seen["stdout"]) == ("written", "written")
        assert seen["pid"] == seen["session"] != 1
        assert set(seen["fds"]) == {"0", "1", "2"}
        assert seen["fds"]["1"] == seen["fds"]["2"] == "/run/sidecar/log.txt"
        assert seen["blocked"] == 0
        ignored = {n for n in range(1, signal.SIGRTMAX + 1) if seen["ignored"] >> n - 1 & 1}
        assert ignored <= {signal.SIGPIPE, signal.SIGXFSZ, *THREADS}, "only what Python ignores"

    run(check())


def test_uid_with_capabilities_passes_them_to_its_programs(lab: Lab, run: Run) -> None:
    async def check() -> None:
        async with lab.running() as place:
            await place.run(python(SELF, Identity(1337, 1337, frozenset({"NET_ADMIN"}))))
        seen = json.loads(lab.log("web.shop"))
        wanted = bits("NET_ADMIN")
        assert seen["uid"] == [1337] * 3
        assert seen["caps"] == dict.fromkeys(("Inh", "Prm", "Eff", "Bnd", "Amb"), wanted)

    run(check())


def test_root_of_a_pod_keeps_its_capabilities_and_cannot_write_outside(lab: Lab, run: Run) -> None:
    async def check() -> None:
        async with lab.running() as place:
            await place.run(python(SELF, ROOT))
        seen = json.loads(lab.log("web.shop"))
        ours = dict(line.split(":", 1) for line in read("/proc/self/status").splitlines())
        assert seen["caps"]["Eff"] == int(ours["CapEff"], 16)
        assert (seen["root"], seen["lib"]) == ("Read-only file system",) * 2

    run(check())


CHECKOUT = [Path(__file__).parts[2]] if Path(__file__).parts[1] == "tmp" else []
"""What a pod sees in its own /tmp: nothing, but for the checkout if that is where it runs from."""

FILES = """
import json, os, socket
print(json.dumps({
    "resolv": open("/etc/resolv.conf").read(), "hosts": open("/etc/hosts").read(),
    "nsswitch": open("/etc/nsswitch.conf").read(), "hostname": open("/etc/hostname").read(),
    "name": socket.gethostname(), "run": sorted(os.listdir("/run")), "tmp": os.listdir("/tmp"),
    "processes": sorted(int(p) for p in os.listdir("/proc") if p.isdigit()),
    "links": os.listdir("/sys/class/net"), "sidecar": os.stat("/run/sidecar").st_ino,
    "unprivileged": open("/proc/sys/net/ipv4/ip_unprivileged_port_start").read().strip(),
    "below_run": [line.split()[4] for line in open("/proc/self/mountinfo") if line.split()[4].startswith("/run/")],
}))
"""


def test_files_of_a_pod_are_its_own(lab: Lab, run: Run) -> None:
    async def check() -> None:
        async with lab.running() as place:
            assert await place.run(python(FILES)) == 0
        seen = json.loads(lab.log("web.shop"))
        assert seen["resolv"] == (
            "search shop.svc.cluster.local svc.cluster.local cluster.local\nnameserver 10.96.0.10\noptions ndots:5\n"
        )
        assert "10.244.0.1\tpod-0" in seen["hosts"]
        assert "hosts: files dns\n" in seen["nsswitch"]
        assert (seen["hostname"], seen["name"]) == ("pod-0\n", "pod-0")
        assert seen["run"] == [".etc", "notify", "sidecar"], "nothing of the host's /run"
        assert seen["below_run"] == ["/run/sidecar"], "no pins of namespaces stay mounted in a pod"
        assert seen["tmp"] == CHECKOUT
        assert seen["processes"] == [1, 2]
        assert seen["links"] == ["lo"]
        assert seen["sidecar"] == os.stat(paths.pod_dir(lab.name, "web.shop")).st_ino
        assert seen["unprivileged"] == "0"

    run(check())


def test_mounts_of_a_pod_stay_in_it(lab: Lab, run: Run) -> None:
    def mounts() -> list[str]:
        """Mount points, root and source, but what is pinned below /run: other labs come and go."""
        lines = [line.split() for line in read("/proc/self/mountinfo").splitlines()]
        return [f"{line[3]} {line[4]}" for line in lines if not line[4].startswith("/run/")]

    async def check() -> None:
        spec = lab.place("web.shop")
        before = mounts()
        async with lab.running(spec=spec) as place:
            inside = read(f"/proc/{place.pid}/mountinfo")
            assert " /run/sidecar " in inside
            assert " /etc/resolv.conf " in inside
            assert mounts() == before
            assert "/run/sidecar " not in read("/proc/self/mountinfo")
        assert mounts() == before

    run(check())


@pytest.mark.parametrize("where", ["/root", "/tmp", "/var/tmp"])
def test_code_behind_a_closed_or_hidden_directory_can_be_run(lab: Lab, run: Run, where: str) -> None:
    base = Path(where, f"slt-{os.getpid()}-code")
    code = base / "closed" / "checkout"
    code.mkdir(parents=True)
    base.chmod(0o700)
    try:
        (code / "greeting.py").write_text("text = 'hello'")
        (code / "tool").write_text("#!/bin/sh\necho tool as $(id -u)\n")
        (code / "tool").chmod(0o755)
        (base / "secret").write_text("not exposed")

        async def check() -> None:
            spec = lab.place("web.shop")
            assert spec.view is not None
            spec = replace(spec, view=replace(spec.view, expose=(*spec.view.expose, str(code))))
            script = f"""
import os, subprocess, sys
sys.path.insert(0, {str(code)!r})
import greeting
print(greeting.text, subprocess.check_output([{str(code / "tool")!r}], text=True).strip(), os.listdir({str(base)!r}))
try:
    open({str(code / "new")!r}, "w")
except OSError as e:
    print(e.strerror)
"""
            async with lab.running(spec=spec) as place:
                assert await place.run(python(script, PROXY)) == 0, lab.log("web.shop")
            assert lab.log("web.shop") == "hello tool as 1337 ['closed']\nRead-only file system\n"

        run(check())
    finally:
        for path in sorted(base.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        base.rmdir()


def test_end_of_process_1_ends_all_in_the_place(lab: Lab, run: Run) -> None:
    """Also one that ignores signals and left its session; and nobody stays a zombie."""
    stubborn = """
import os, signal, time
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
print("there", flush=True)
import socket
s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); s.sendto(b"READY=1", os.environ["NOTIFY_SOCKET"])
time.sleep(1000)
"""

    async def check() -> None:
        async with lab.running() as place:
            process = await place.spawn(python(stubborn, notify=True))
            await process.wait_ready()
            members = [pid for pid in record._pids() if _pid_namespace(pid) == _pid_namespace(place.pid)]
            assert len(members) == 3
            identities = [record.ProcessId.of(pid) for pid in members]
            place.kill()
            assert await place.ended == 128 + signal.SIGKILL
            assert await process.exited == 128 + signal.SIGKILL
            assert not [i for i in identities if i is not None and i.alive()]
            assert not [pid for pid in members if read(f"/proc/{pid}/stat")]

    run(check())


def _pid_namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


def test_orphans_are_reaped(lab: Lab, run: Run) -> None:
    script = """
import os, sys
r, w = os.pipe()
if os.fork() == 0:          # the parent of an orphan
    if os.fork() == 0:      # the orphan: ends after its parent
        os.close(w)
        os._exit(0)
    os._exit(0)
os.wait()
os.close(w)
os.read(r, 1)               # end of file: the orphan has ended
"""

    async def check() -> None:
        async with lab.running() as place:
            assert await place.run(python(script)) == 0
            # Its own end is reported after the reaping round in which the orphan went.
            assert await place.run(python("")) == 0
            zombies = [
                pid
                for pid in record._pids()
                if _pid_namespace(pid) == _pid_namespace(place.pid) and "State:\tZ" in read(f"/proc/{pid}/status")
            ]
            assert zombies == []

    run(check())


def test_ready_exit_code_and_host_pid_are_reported(lab: Lab, run: Run) -> None:
    script = """
import os, socket, sys
s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
s.sendto(b"STATUS=listening\\nREADY=1\\n", os.environ["NOTIFY_SOCKET"])
sys.stdin.read()
import signal
signal.sigwait([signal.SIGUSR1])
sys.exit(7)
"""

    async def check() -> None:
        async with lab.running() as place:
            mask = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
            process = await place.spawn(python(mask + script, notify=True))
            await process.wait_ready()
            assert f"SIDECARLAB_LAB={lab.record.id}" in read(f"/proc/{process.pid}/environ").split("\0")
            process.signal(signal.SIGUSR1)
            assert await process.exited == 7

    run(check())


def test_process_that_ends_before_it_is_ready(lab: Lab, run: Run) -> None:
    async def check() -> None:
        async with lab.running() as place:
            process = await place.spawn(python("raise SystemExit(3)", notify=True))
            with pytest.raises(Ended) as ended:
                await process.wait_ready()
            assert ended.value.code == 3

    run(check())


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (("/no/such/program",), 127, "/no/such/program: No such file or directory"),
        (("/etc/hosts",), 126, "/etc/hosts: Permission denied"),
        (("sh", "-c", "kill -TERM $$"), 143, ""),
    ],
)
def test_program_that_cannot_start_or_is_killed(
    lab: Lab, run: Run, argv: tuple[str, ...], code: int, said: str
) -> None:
    async def check() -> None:
        async with lab.running() as place:
            assert await place.run(replace(python("pass"), argv=argv)) == code
        assert lab.log("web.shop").strip() == said

    run(check())


def test_entry_is_called_in_a_forked_child(lab: Lab, run: Run) -> None:
    """No exec: the function runs in a process that already has its module."""

    async def check() -> None:
        spec = ProcessSpec(
            name="entry",
            entry="os:write",
            args=(1, "no bytes"),
            identity=APP,
            log="/run/sidecar/log.txt",
        )
        async with lab.running() as place:
            assert await place.run(spec) == 1
            assert "TypeError" in lab.log("web.shop")
            assert await place.run(replace(spec, entry="signal:getsignal", args=(15,))) == 0

    run(check())


def test_unwritable_log_is_an_error_of_that_process(lab: Lab, run: Run) -> None:
    async def check() -> None:
        async with lab.running() as place:
            assert await place.run(replace(python("pass"), log="/etc/nothing/here")) == 1
            assert await place.run(python("print('still works')")) == 0

    run(check())


def test_place_without_its_namespace_says_so(lab: Lab, run: Run) -> None:
    async def check() -> None:
        spec = replace(lab.place("web.shop"), netns="/run/no/such/netns")
        async with lab.zygote() as zygote:
            with pytest.raises(LabError, match=r"web\.shop cannot be started: /run/no/such/netns: No such file"):
                await zygote.start(spec, lambda *_: None)

    run(check())


def test_two_places_do_not_see_each_other(lab: Lab, run: Run) -> None:
    async def check() -> None:
        async with lab.zygote() as zygote:
            one = await lab.start(zygote, lab.place("one.shop"))
            two = await lab.start(zygote, lab.place("two.shop"))
            assert await one.run(python("open('/tmp/x', 'w'); open('/run/sidecar/y', 'w')", ROOT)) == 0
            listing = "import os; print(os.listdir('/tmp'), sorted(os.listdir('/run/sidecar')))"
            assert await two.run(python(listing)) == 0
            assert lab.log("two.shop") == f"{CHECKOUT} ['log.txt']\n"
            one.kill()
            await one.ended
            assert await two.run(python("")) == 0

    run(check())


def test_zygote_that_cannot_import_names_the_module(lab: Lab, run: Run) -> None:
    async def check() -> None:
        with pytest.raises(LabError, match="import no_such_module: ModuleNotFoundError"):
            async with lab.zygote("json", "no_such_module"):
                pass

    run(check())


def test_zygote_with_threads_refuses_to_be_forked(lab: Lab, run: Run, tmp_path: Path) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )

    async def check() -> None:
        environ = {**lab.record.environ, "PYTHONPATH": f"{clean_environ()['PYTHONPATH']}:{tmp_path}"}
        zygote = Zygote.launch(["threaded"], environ)
        with pytest.raises(LabError, match="importing threaded left 1 threads running"):
            await zygote.wait_ready()
        await zygote.stop()

    run(check())


def test_places_outlive_the_one_who_started_them_until_down(lab: Lab) -> None:
    """kill -9 of the supervisor: pods stay, `down` ends them, and nothing is left."""
    script = f"""
import asyncio, sys
sys.path[:0] = {sys.path!r}
from runtime_lab import Lab, python
from lab.fabric import record
async def main():
    lab = Lab({lab.name!r}, record.open({lab.name!r}))
    async with lab.running() as place:
        process = await place.spawn(python("import time; time.sleep(1000)"))
        print(place.pid, process.pid, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        pids = [int(pid) for pid in supervisor.stdout.readline().split()]
        identities = [record.ProcessId.of(pid) for pid in pids]
        supervisor.kill()
    assert len(identities) == 2
    assert all(i is not None and i.alive() for i in identities)
    assert all(_netns(pid) == _netns(pids[0]) != _netns(os.getpid()) for pid in pids)
    assert record.down(lab.name)
    assert not any(i is not None and i.alive() for i in identities)
    assert not paths.run_dir(lab.name).exists()


def _netns(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")

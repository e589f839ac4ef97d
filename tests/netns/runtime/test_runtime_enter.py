"""Entering a place from another process: exit codes, identity, terminals, signals, sockets."""

from __future__ import annotations

import os
import pty
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from runtime_lab import Lab

from lab.errors import InputError, LabError
from lab.runtime import enter

pytestmark = pytest.mark.root

Run = Callable[[Coroutine[Any, Any, None]], None]

PLACE = "web.shop"


@pytest.fixture
def place(lab: Lab) -> enter.Place:
    """A running place whose supervisor is another process, as for `lab exec`; `lab` takes it down."""
    script = f"""
import asyncio, sys
sys.path[:0] = {sys.path!r}
from runtime_lab import Lab
from lab.fabric import record
async def main():
    lab = Lab({lab.name!r}, record.open({lab.name!r}))
    async with lab.running({PLACE!r}):
        print("up", flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
    supervisor = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    assert supervisor.stdout.readline() == "up\n"
    supervisor.kill()  # the place lives on
    supervisor.wait()
    supervisor.stdout.close()
    return enter.find(lab.name, PLACE)


@pytest.mark.parametrize(
    ("command", "code"),
    [("exit 0", 0), ("exit 7", 7), ("kill -TERM $$", 143), ("exec /no/such/program", 127)],
)
def test_exit_code_is_the_commands(place: enter.Place, command: str, code: int) -> None:
    assert enter.run_in(place, ["sh", "-c", command], uid=1000) == code


def test_program_that_is_not_there(place: enter.Place) -> None:
    assert enter.run_in(place, ["/no/such/program"]) == 127
    assert enter.run_in(place, ["/etc/hosts"]) == 126


def facts() -> dict[str, object]:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "uid": os.getuid(),
        "gid": os.getgid(),
        "caps": int(status["CapEff"], 16),
        "nnp": int(status["NoNewPrivs"]),
        "netns": os.stat("/proc/self/ns/net").st_ino,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "sidecar": Path("/run/sidecar").is_dir(),
        "mark": os.environ["SIDECARLAB_LAB"],
    }


@pytest.mark.parametrize(("uid", "privileged"), [(1000, False), (1337, False), (0, True), (4242, False)])
def test_function_runs_as_that_uid_in_all_namespaces(place: enter.Place, uid: int, privileged: bool) -> None:
    before = os.stat("/proc/self/ns/net").st_ino
    seen = enter.call_in(place, facts, uid=uid)
    assert (seen["uid"], seen["gid"]) == (uid, uid)
    assert (seen["caps"] != 0, seen["nnp"]) == (privileged, 0 if privileged else 1)
    assert seen["netns"] == place.netns.stat().st_ino != before
    assert (seen["host"], seen["sidecar"]) == ("pod-0", True)
    assert 1 < int(str(seen["pid"])) < 100, "a number of the place's own pid namespace"
    assert seen["mark"] == place.mark
    assert os.stat("/proc/self/ns/net").st_ino == before
    look = ["readlink", "/proc/self/ns/pid"]
    assert subprocess.check_output(look, text=True).strip() == os.readlink(look[1]), "our next child is ours again"


def test_network_namespace_alone_keeps_our_files(place: enter.Place) -> None:
    def look() -> tuple[int, bool]:
        return os.stat("/proc/self/ns/net").st_ino, Path("/run/sidecar").exists()

    assert enter.call_in(place, look, namespaces=("net",)) == (place.netns.stat().st_ino, False)


def test_exception_of_a_function_comes_back(place: enter.Place) -> None:
    def fail() -> None:
        raise InputError("asked for", "here")

    with pytest.raises(InputError, match="asked for: here"):
        enter.call_in(place, fail)


def test_function_that_dies_or_hangs_is_an_error_and_leaves_nothing(place: enter.Place) -> None:
    with pytest.raises(LabError, match="ended with 9"):
        enter.call_in(place, lambda: os._exit(9))
    with pytest.raises(LabError, match=r"nothing came within 0\.1 s"):
        enter.call_in(place, lambda: signal.pause(), timeout=0.1)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_command_that_takes_too_long_is_killed(place: enter.Place) -> None:
    with pytest.raises(TimeoutError):
        enter.run_in(place, ["sleep", "1000"], timeout=0.1)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_socket_opened_in_a_namespace_stays_there(place: enter.Place) -> None:
    with enter.netns(place.netns):
        server = socket.create_server(("127.0.0.1", 0))
    with server:
        address = server.getsockname()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=5)
        with enter.netns(place.netns), enter.netns(place.netns):  # nested is fine
            client = socket.create_connection(address, timeout=5)
        with client, server.accept()[0] as accepted:
            accepted.sendall(b"from inside")
            assert client.recv(100) == b"from inside"


def test_other_threads_stay_where_they_are(place: enter.Place) -> None:
    look, seen, entered = "/proc/thread-self/ns/net", [], threading.Event()

    def watch() -> None:
        assert entered.wait(10)
        seen.append(os.stat(look).st_ino)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    with enter.netns(place.netns):
        inside = os.stat(look).st_ino
        entered.set()
        thread.join(10)
    assert inside == place.netns.stat().st_ino
    assert seen == [os.stat(look).st_ino] != [inside]


def test_unknown_places_are_named(lab: Lab, place: enter.Place) -> None:
    with pytest.raises(InputError, match=rf'no "web\.shpo" in lab {lab.name}: it has web\.shop'):
        enter.find(lab.name, "web.shpo")
    with pytest.raises(InputError, match='no lab "slt-none"'):
        enter.find("slt-none", PLACE)


def test_place_that_has_ended_says_so(place: enter.Place) -> None:
    fd = os.pidfd_open(place.pid)
    signal.pidfd_send_signal(fd, signal.SIGKILL)
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    assert poll.poll(5000)
    os.close(fd)
    with pytest.raises(InputError, match=rf"nothing runs in {PLACE}"):
        enter.run_in(place, ["true"])


DRIVER = """
import sys
sys.path[:0] = {path!r}
from lab.runtime import enter
sys.exit(enter.run_in(enter.find({lab!r}, {place!r}), {command!r}, uid=1000))
"""


def driver(place: enter.Place, command: list[str]) -> list[str]:
    code = DRIVER.format(path=sys.path, lab=place.lab, place=place.name, command=command)
    return [sys.executable, "-c", code]


def test_signals_are_passed_on(place: enter.Place) -> None:
    script = "trap 'echo got it; exit 5' TERM; echo ready; while :; do read -r line; done"
    with subprocess.Popen(
        driver(place, ["sh", "-c", script]), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        process.stdin.write("\n")  # dash runs a trap once its read returns
        process.stdin.flush()
        assert process.stdout.readline() == "got it\n"
        assert process.wait(10) == 5


def test_command_dies_with_the_one_who_ran_it(place: enter.Place) -> None:
    with subprocess.Popen(
        driver(place, ["sh", "-c", "echo $$; exec sleep 1000"]), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "2\n", "its number inside"
        (inner,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        pidfd = os.pidfd_open(int(inner))
        process.kill()
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        assert poll.poll(5000)
        os.close(pidfd)


def test_terminal_is_passed_through(place: enter.Place) -> None:
    """The command has a controlling terminal of its own that it may reopen, of our size; Ctrl-C is its own."""
    script = (
        "trap 'echo interrupted; exit 4' INT; test -t 0 && test -t 1 && stty size && "
        "echo hello > /dev/tty && echo again > /dev/stdout && read -r line && echo got $line && "
        "while :; do sleep 0.05; done"
    )
    pid, master = pty.fork()
    if pid == 0:
        command = driver(place, ["sh", "-c", script])
        try:
            import termios

            termios.tcsetwinsize(1, (33, 77))
            os.execv(command[0], command)
        finally:
            os._exit(70)
    try:
        expect(master, b"33 77\r\nhello\r\nagain\r\n")
        os.write(master, b"input\n")
        expect(master, b"got input\r\n")
        os.write(master, b"\x03")
        expect(master, b"interrupted\r\n")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4
    finally:
        os.close(master)


def expect(fd: int, wanted: bytes) -> None:
    seen, deadline = b"", time.monotonic() + 10
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while wanted not in seen:
        assert poll.poll(max(0.0, deadline - time.monotonic()) * 1000), f"{wanted!r} did not come, but {seen!r}"
        seen += os.read(fd, 4096)

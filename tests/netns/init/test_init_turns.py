"""Two runs at the same time in one pod: one after the other, and what each reports is true."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from init_pod import DEFAULT, HERE, QUIET, Net, Place, Run, backends, stand_in

from init import libiptc, nftables, turn, xtables

pytestmark = pytest.mark.root

REDIRECT = [*DEFAULT, "--ipv6=on"]
TPROXY = [
    "--ipv6=on", "-u", "1337", "-m", "TPROXY", "-i", "10.0.0.0/8", "-b", "80,81", "--redirect-dns", "--dns-servers=10.9.0.53,fd09::53",
]  # fmt: skip
ROUNDS = 2


def together(pod: Place, *runs: list[str]) -> list[Run]:
    """Runs that start at the same time, each in a process of its own."""
    reader, writer = os.pipe()

    def work(args: list[str]) -> Run:
        os.close(writer)
        os.read(reader, 1)
        return HERE.init(*args)

    started = [pod.start(partial(work, args)) for args in runs]
    os.close(reader)
    os.close(writer)
    return [Run(*pod.finish(*one)) for one in started]


@pytest.mark.parametrize("backend", ["legacy", "nft", "native-nft"])
def test_two_runs_at_once_are_one_after_the_other(backend: str, pods: Net) -> None:
    """The same and different settings, mending and cleaning: both succeed, and the later one's rules are there."""
    common = [f"--backend={backend}", QUIET, "--json"]
    wanted = {}
    for name, args in (("REDIRECT", REDIRECT), ("TPROXY", TPROXY)):
        assert pods.pod.init(*args, *common, "--reconcile").code == 0
        wanted[name] = _rules(pods.pod)
    assert wanted["REDIRECT"] != wanted["TPROXY"]
    assert pods.pod.init(*TPROXY, *common, "--cleanup-only").code == 0
    nothing = _rules(pods.pod)
    for _ in range(ROUNDS):
        done = together(pods.pod, *([*args, *common, "--reconcile"] for args in (REDIRECT, TPROXY, REDIRECT)))
        assert [run.code for run in done] == [0, 0, 0], [run.err for run in done]
        assert sorted(run.document["action"] for run in done)[0] == "applied", "just one was the first"
        assert sorted(run.document["action"] for run in done)[1] != "applied"
        assert _rules(pods.pod) in wanted.values()
        done = together(pods.pod, [*TPROXY, *common, "--reconcile"], [*TPROXY, *common, "--cleanup-only"])
        assert [run.code for run in done] == [0, 0], [run.err for run in done]
        assert _rules(pods.pod) in (wanted["TPROXY"], nothing)
        assert pods.pod.init(*TPROXY, *common, "--cleanup-only").code == 0
        assert _rules(pods.pod) == nothing


def _rules(pod: Place) -> list[str]:
    """Every rule of every back end, guards included."""
    saved = pod.save()
    lines = [f"{tool} {line}" for tool in saved for line in saved[tool].splitlines() if line.startswith("-A")]
    native_rules = re.sub(r"packets \d+ bytes \d+", "", saved["nft"])
    return [*lines, *native_rules.splitlines()]


@contextmanager
def in_the_middle(pod: Place, *args: str) -> Iterator[int]:
    """A run that has just made its first change, and goes on when the body ends. Gives its pid; it must succeed."""
    go_on, let = os.pipe()

    def body(pipe: int) -> None:
        os.close(let)

        def stopping(real: Callable[..., None]) -> Callable[..., None]:
            def change(*given: object) -> None:
                real(*given)
                # Once the test has let go this is the end of the pipe, for all that follow too.
                os.write(pipe, b"c")
                os.read(go_on, 1)

            return change

        for kind in (xtables.Restore, libiptc.LibIPTC):
            kind.change = stopping(kind.change)  # type: ignore[method-assign]
        nftables.NFTables.apply = stopping(nftables.NFTables.apply)  # type: ignore[method-assign]
        assert HERE.init(*args).code == 0

    pid, reader = pod.fork(body)
    os.close(go_on)
    assert os.read(reader, 1) == b"c"
    try:
        yield pid
    finally:
        os.close(let)
        _, status = os.waitpid(pid, 0)
        os.close(reader)
    assert status == 0


@backends
@pytest.mark.parametrize("other", [["--reconcile"], ["--cleanup-only"], []])
def test_no_run_touches_what_another_is_at_work_on(backend: str, other: list[str], pods: Net) -> None:
    """The first one's guards stand (native nftables: its rules) while the second comes."""
    args = [*DEFAULT, "--ipv6=off", f"--backend={backend}"]
    assert pods.pod.init(*args, "-o", "25").code == 0
    with in_the_middle(pods.pod, *args, "--reconcile") as pid:
        before = _rules(pods.pod)
        run = pods.pod.init(*args, *other, "--lock-wait=0s", QUIET)
        assert run.code == 1
        assert run.err == (
            f"error: cannot get the lock of this network namespace in 0s: held by pid {pid}. "
            "End that process or raise --lock-wait\n"
        )
        assert _rules(pods.pod) == before
        assert pods.peer.init(*args, "--lock-wait=0s").code == 0, "another network namespace has a lock of its own"
    assert pods.pod.init(*args, *other, "--lock-wait=0s").code == 0


def test_a_look_needs_no_turn(pods: Net) -> None:
    args = [*DEFAULT, "--ipv6=off", "--backend=nft", "--lock-wait=0s"]
    with in_the_middle(pods.pod, *args):
        assert pods.pod.init(*args, "--dry-run").code == 0
        assert pods.pod.init(*args, "--skip-rule-apply").code == 0


def test_a_run_in_another_pid_namespace_is_waited_for_too(pods: Net) -> None:
    prefix = ("unshare", "--pid", "--fork", "--mount-proc")
    args = ["--ipv6=off", "--backend=nft"]
    with in_the_middle(pods.pod, "-u", "1337", *args):
        done = pods.pod.program(*args, "--lock-wait=100ms", prefix=prefix)
    assert done.returncode == 1
    assert "in 0.1s: held by a process that cannot be seen from this pid namespace. End" in done.stderr
    assert done.stderr.count("\n") == 1
    assert pods.pod.program(*args, prefix=prefix).returncode == 0


def test_the_next_run_waits_for_the_tool_of_a_killed_one(pods: Net, tmp_path: Path) -> None:
    """The tool goes on after kill -9 of its run: it has read the rules already, and will write them."""
    fifo, marker = tmp_path / "go-on", tmp_path / "started"
    os.mkfifo(fifo)
    os.mkfifo(marker)
    script = f'echo x >{marker}; read x <{fifo}; exec /usr/sbin/iptables-nft-restore "$@"'
    env = stand_in(tmp_path, "iptables-nft-restore", script)
    args = [*DEFAULT, "--ipv6=off", "--backend=nft", "--json"]
    pid, reader = pods.pod.start(lambda: HERE.init(*args, env=env))
    os.close(reader)
    marker.read_text()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    run = pods.pod.init(*args, "--lock-wait=0s", QUIET)
    assert run.code == 1
    assert f"held by a command that pid {pid} has left. End" in run.err
    second = pods.pod.start(lambda: HERE.init(*args))
    fifo.write_text("x\n")
    code, out, _ = pods.pod.finish(*second)
    assert (code, json.loads(out)["action"]) == (0, "unchanged"), "it saw what the tool has written"


def test_a_name_that_nobody_listens_on_is_waited_for_as_long(pods: Net) -> None:
    """Not one of ours: the kernel tells neither who has it nor when it ends, and yet the run ends in time or works."""

    def work() -> list[Any]:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.bind(turn.NAME)
            held = HERE.init("--ipv6=off", "--backend=nft", "--lock-wait=50ms", QUIET)
        return [held.code, held.err, HERE.init("--ipv6=off", "--backend=nft", "--lock-wait=50ms", QUIET).code]

    assert pods.pod.call(work) == [
        1,
        "error: cannot get the lock of this network namespace in 0.05s: its holder does not listen, so the kernel does not "
        "tell who it is. End that process or raise --lock-wait\n",
        0,
    ]


def test_one_that_takes_connections_and_closes_them_is_named_once(pods: Net) -> None:
    """Not one of ours: each end of a connection looks like the end of a run."""

    def holder(pipe: int) -> None:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.bind(turn.NAME)
            stranger.listen()
            os.write(pipe, b"r")
            while True:
                stranger.accept()[0].close()
                os.write(pipe, b".")

    pid, reader = pods.pod.fork(holder)
    try:
        assert os.read(reader, 1) == b"r"
        run = pods.pod.init("--ipv6=off", "--backend=nft", "--lock-wait=200ms")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    with os.fdopen(reader, "rb") as told:
        tries = len(told.read())
    assert run.code == 1
    assert run.err.count("waiting for another run") == 1
    assert f"in 0.2s: held by pid {pid}. End" in run.err
    assert 1 < tries <= 0.2 / turn.PAUSE + 2

"""How long init takes: as a program from a cold start, and as a call in a process that has it loaded.

Each run works in a network namespace of its own, made for the run. Cold: the whole process, from exec to exit, with its rules applied.
Call: ``init.cli.main`` in one process that enters pod after pod. Forked call: in a child forked for the pod, as the lab starts
pods; the time is that of the call.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CLONE_NEWNET = 0x40000000
DEFAULT = [
    "-p",
    "15001",
    "-z",
    "15006",
    "-u",
    "1337",
    "-m",
    "REDIRECT",
    "-i",
    "*",
    "-x",
    "",
    "-b",
    "*",
    "-d",
    "15090,15021,15020",
]
DNS = ["--redirect-dns", "--dns-servers", "10.96.0.10"]
BACKENDS = ("legacy", "legacy-restore", "nft", "native-nft")

COLD_GOAL = {"legacy": 0.5}
COLD_GOAL_OTHERS = 0.25
CALL_GOAL = 0.005
IN_PROCESS = ("legacy", "native-nft")
"""Back ends that are libraries in the process; the others execute programs, whose time is not ours."""


def main(rounds: int = 7) -> dict[str, Any]:
    """Measures, prints a table and gives ``{"rows": [...], "met": bool}``; times are seconds.

    Needs root. Rows: ``what`` (cold or call), ``backend``, ``rules``, ``median_s``, ``best_s``, ``goal_s``, ``met``.
    """
    import init.preload_legacy  # noqa: F401  (what the process that forks pods has loaded)
    from init import cli

    # As the process from which the lab forks pods: what a collector would write to, each child would have to copy.
    gc.collect()
    gc.freeze()
    gc.disable()
    rows = []
    for backend in BACKENDS:
        goal = COLD_GOAL.get(backend, COLD_GOAL_OTHERS)
        rows.append(_row("cold", backend, "default", [_cold(backend) for _ in range(rounds)], goal))
    for backend in BACKENDS:
        for rules, extra in (("default", []), ("default + DNS", DNS)):
            args = [*DEFAULT, *extra, "--ipv6=off", f"--backend={backend}", "--log_output_level=warn"]
            goal = CALL_GOAL if backend in IN_PROCESS else None
            rows.append(_row("call", backend, rules, _pods_of_one_process(args, rounds * 3), goal))
            times = [_call(lambda args=args: cli.main(args, dict(os.environ))) for _ in range(rounds * 3)]
            rows.append(_row("forked call", backend, rules, times, None))
    for backend in BACKENDS:
        args = [*DEFAULT, "--ipv6=off", f"--backend={backend}", "--log_output_level=warn"]
        times = [_call(lambda args=args: cli.main(args, dict(os.environ)), before=args) for _ in range(rounds)]
        rows.append(_row("second call", backend, "default", times, None))
    gc.enable()
    gc.unfreeze()
    _print(rows)
    return {"rows": rows, "met": all(row["met"] is not False for row in rows)}


def _row(what: str, backend: str, rules: str, times: list[float], goal: float | None) -> dict[str, Any]:
    median = statistics.median(times)
    return {
        "what": what,
        "backend": backend,
        "rules": rules,
        "median_s": round(median, 5),
        "best_s": round(min(times), 5),
        "goal_s": goal,
        "met": None if goal is None else median <= goal,
    }


def _print(rows: list[dict[str, Any]]) -> None:
    print(f"{'init':<12} {'back end':<15} {'rules':<14} {'median':>10} {'best':>10} {'goal':>9}")
    for row in rows:
        goal = "" if row["goal_s"] is None else f"{row['goal_s'] * 1000:.0f} ms"
        mark = "" if row["met"] in (None, True) else "  missed"
        print(
            f"{row['what']:<12} {row['backend']:<15} {row['rules']:<14} {row['median_s'] * 1000:>7.1f} ms "
            f"{row['best_s'] * 1000:>7.1f} ms {goal:>9}{mark}"
        )


def _cold(backend: str) -> float:
    with _namespace() as descriptor:
        argv = [sys.executable, "-m", "init", *DEFAULT, "--ipv6=off", f"--backend={backend}", "--log_output_level=warn"]
        started = time.perf_counter()
        done = subprocess.run(
            argv, cwd=ROOT, check=False, capture_output=True, text=True, preexec_fn=lambda: _enter(descriptor)
        )
        taken = time.perf_counter() - started
        if done.returncode:
            raise RuntimeError(f"init failed: {done.stderr}")
        return taken


def _pods_of_one_process(args: list[str], pods: int) -> list[float]:
    """Seconds for each of so many fresh namespaces, which one process enters and programs one after the other."""
    from init import cli

    with contextlib.ExitStack() as stack:
        descriptors = [stack.enter_context(_namespace()) for _ in range(pods)]
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                for descriptor in descriptors:
                    _enter(descriptor)
                    with contextlib.redirect_stderr(io.StringIO()):
                        started = time.perf_counter()
                        code = cli.main(args, dict(os.environ))
                        taken = time.perf_counter() - started
                    os.write(writer, f"{taken}\n".encode())
                    if code:
                        break
            finally:
                os._exit(code)
        os.close(writer)
        with os.fdopen(reader) as told:
            times = [float(line) for line in told]
        _, status = os.waitpid(pid, 0)
        if status:
            raise RuntimeError("init failed in a forked child")
        return times


def _call(work: Callable[[], int], before: list[str] | None = None) -> float:
    """Seconds that ``work`` takes in a child forked for it, in a fresh namespace; ``before`` is a first run there.

    So the lab runs it. The child pays for each page that it is the first to write to after the fork (some 700).
    """
    from init import cli

    with _namespace() as descriptor:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                _enter(descriptor)
                with contextlib.redirect_stderr(io.StringIO()):
                    if before is not None:
                        cli.main(before, dict(os.environ))
                    started = time.perf_counter()
                    code = work()
                    taken = time.perf_counter() - started
                os.write(writer, repr(taken).encode())
            finally:
                os._exit(code)
        os.close(writer)
        with os.fdopen(reader) as told:
            text = told.read()
        _, status = os.waitpid(pid, 0)
        if status:
            raise RuntimeError("init failed in a forked child")
        return float(text)


@contextlib.contextmanager
def _namespace() -> Iterator[int]:
    """A descriptor of a new network namespace, which ends with it."""
    reader, writer = os.pipe()
    hold_reader, hold_writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            os.write(writer, b"y" if libc.unshare(CLONE_NEWNET) == 0 else b"n")
            os.close(hold_writer)
            os.read(hold_reader, 1)
        finally:
            os._exit(0)
    try:
        if os.read(reader, 1) != b"y":
            raise RuntimeError("cannot make a network namespace: run as root")
        descriptor = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    finally:
        os.write(hold_writer, b"x")
        os.waitpid(pid, 0)
        for number in (reader, writer, hold_reader, hold_writer):
            os.close(number)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _enter(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(0 if main()["met"] else 1)

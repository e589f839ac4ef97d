"""The record, in a directory of the test's own; what needs root is in tests/netns/fabric."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.errors import InputError, LabError
from lab.fabric import paths, record
from lab.fabric.record import ProcessId, Record

CHECKOUT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(paths, "ROOT", tmp_path / "sidecarlab")
    return paths.ROOT


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for child in started:
        child.kill()
        child.wait()
        if child.stdin:
            child.stdin.close()


def start(children: list[subprocess.Popen[bytes]], environ: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    """A process that ends only when it is killed (or with this test: its input ends)."""
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, env={**os.environ, **(environ or {})})
    children.append(child)
    return child


def test_a_name_that_is_taken_is_refused_in_one_line() -> None:
    Record.create("one")
    with pytest.raises(InputError, match=r'^lab "one" is already running: .*process \d+ runs it\. Take it down') as e:
        Record.create("one")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-a", "a b", "x" * 49, "ä"])
def test_a_name_that_could_leave_the_directory_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="cannot name a lab"):
        Record.create(name)


def test_only_one_of_many_gets_a_name(root: Path) -> None:
    results: list[object] = []
    barrier = threading.Barrier(8)

    def claim() -> None:
        barrier.wait()
        try:
            results.append(Record.create("one"))
        except InputError as e:
            results.append(e)

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sum(isinstance(r, Record) for r in results) == 1
    assert sum(isinstance(r, InputError) for r in results) == 7


def test_labs_are_listed_and_a_crashed_one_is_told_from_a_running_one(children: list[subprocess.Popen[bytes]]) -> None:
    assert record.list_labs() == []
    Record.create("here")
    crashed = Record.create("crashed")
    supervisor = start(children)
    crashed.set_supervisor(supervisor.pid)
    assert {lab.name: lab.state for lab in record.list_labs()} == {"here": "running", "crashed": "running"}
    supervisor.kill()
    supervisor.wait()
    labs = {lab.name: lab for lab in record.list_labs()}
    assert {name: lab.state for name, lab in labs.items()} == {"here": "running", "crashed": "crashed"}
    assert labs["here"].pid == os.getpid()
    assert labs["crashed"].id == crashed.id


def test_a_process_number_that_was_used_again_is_not_the_lab_s(children: list[subprocess.Popen[bytes]]) -> None:
    lab = Record.create("one")
    stranger = start(children)
    process = ProcessId.of(stranger.pid)
    assert process is not None
    lab.add("process", pid=stranger.pid, starttime=process.starttime - 1, role="agent")
    lab.add("supervisor", pid=stranger.pid, starttime=process.starttime - 1)
    assert record.info("one").state == "crashed"
    record.down("one")
    assert process.alive()


def test_the_remains_of_a_crashed_lab_make_way_for_a_new_one(children: list[subprocess.Popen[bytes]]) -> None:
    old = Record.create("one")
    left = start(children, old.environ)
    supervisor = start(children)
    old.set_supervisor(supervisor.pid)
    supervisor.kill()
    supervisor.wait()
    new = Record.create("one")
    assert new.id != old.id
    assert left.wait(10) == -signal.SIGKILL
    assert record.info("one").state == "running"


def test_down_ends_what_is_recorded_and_what_is_marked_and_nobody_else(
    children: list[subprocess.Popen[bytes]], root: Path
) -> None:
    lab, other = Record.create("one"), Record.create("other")
    recorded, marked = start(children), start(children, lab.environ)
    lab.add_process(recorded.pid, "agent")
    bystander, neighbour = start(children), start(children, other.environ)
    (paths.pod_dir("one", "web.shop") / "log").mkdir(parents=True)
    elsewhere = root.parent / "elsewhere"
    elsewhere.touch()
    lab.add("file", path=str(elsewhere))
    removed = record.down("one")
    assert recorded.wait(10) == marked.wait(10) == -signal.SIGKILL
    assert bystander.poll() is None
    assert neighbour.poll() is None
    assert f"process {recorded.pid} (agent)" in removed
    assert f"process {marked.pid} (cat)" in removed
    assert not elsewhere.exists()
    assert [e.name for e in root.iterdir()] == ["other"]


def test_down_twice_is_fine_and_leaves_no_directory(root: Path) -> None:
    Record.create("one")
    assert record.down("one") == [f"directory {root}/one"]
    assert record.down("one") == []
    assert not root.exists()


def test_several_may_take_a_lab_down_at_once(root: Path, children: list[subprocess.Popen[bytes]]) -> None:
    lab = Record.create("one")
    for _ in range(5):
        start(children, lab.environ)
    failures: list[BaseException] = []

    def take_down() -> None:
        try:
            record.down("one")
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=take_down) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert failures == []
    assert not root.exists()


def test_a_living_supervisor_is_asked_first(root: Path) -> None:
    """It gets SIGTERM, takes the lab down itself and ends: nobody is killed behind its back."""
    script = (
        "import signal, sys, pathlib; from lab.fabric import paths, record\n"
        f"paths.ROOT = pathlib.Path({str(root)!r})\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(record.down('one') and 7))\n"
        "record.Record.create('one'); print('up', flush=True); signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=CHECKOUT, stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == b"up\n"
        assert record.down("one") == [f"process {supervisor.pid} (supervisor)"]
        assert supervisor.wait(10) == 7
    assert not root.exists()


def test_a_supervisor_that_ignores_sigterm_is_killed(root: Path) -> None:
    script = (
        "import signal, pathlib; from lab.fabric import paths, record\n"
        f"paths.ROOT = pathlib.Path({str(root)!r})\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "record.Record.create('one'); print('up', flush=True); signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=CHECKOUT, stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == b"up\n"
        record.down("one", timeout=1.0)
        assert supervisor.wait(10) == -signal.SIGKILL
    assert not root.exists()


@pytest.mark.parametrize("keep", [0, 1, 30, 100, 200])
def test_a_record_that_was_cut_anywhere_still_leads_to_every_process(
    keep: int, children: list[subprocess.Popen[bytes]], root: Path
) -> None:
    lab = Record.create("one")
    marked = start(children, lab.environ)
    supervisor = start(children)
    lab.set_supervisor(supervisor.pid)
    supervisor.kill()
    supervisor.wait()
    os.truncate(paths.record_file("one"), keep)
    record.list_labs()
    record.down("one")
    assert marked.wait(10) == -signal.SIGKILL
    assert not root.exists()


def test_an_entry_after_a_torn_one_is_whole() -> None:
    lab = Record.create("one")
    size = paths.record_file("one").stat().st_size
    lab.add("file", path="/nowhere/a")
    os.truncate(paths.record_file("one"), size + 5)
    again = record.open("one")
    again.add("file", path="/nowhere/b")
    assert [e["path"] for e in again.entries() if e["kind"] == "file"] == ["/nowhere/b"]
    text = paths.record_file("one").read_bytes()
    assert text.endswith(b"\n")


def test_an_entry_that_does_not_fit_is_an_error_and_the_next_one_is_whole() -> None:
    lab = Record.create("one")
    size = paths.record_file("one").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))
    try:
        with pytest.raises(LabError, match="cannot keep its record"):  # half a line is written
            lab.add("file", path="/nowhere/a")
        with pytest.raises(LabError, match="cannot keep its record"):  # nothing is
            lab.add("file", path="/nowhere/b")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    lab.add("file", path="/nowhere/c")
    assert [e["path"] for e in lab.entries() if e["kind"] == "file"] == ["/nowhere/c"]


def test_entries_of_many_threads_do_not_mix() -> None:
    lab = Record.create("one")
    threads = [
        threading.Thread(target=lambda n=n: [lab.add("note", thread=n, number=i) for i in range(50)]) for n in range(8)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    lines = paths.record_file("one").read_text().splitlines()
    notes = [json.loads(line) for line in lines]
    assert sum(n["kind"] == "note" for n in notes) == 400


def test_a_directory_without_a_record_is_a_crashed_lab_and_goes(root: Path) -> None:
    (root / "bare" / "ns").mkdir(parents=True)
    (root / "bare" / "ns" / "node").touch()
    assert [(lab.name, lab.state, lab.id) for lab in record.list_labs()] == [("bare", "crashed", "")]
    record.down("bare")
    assert not root.exists()


def test_a_link_where_a_lab_should_be_leads_nowhere(root: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    (precious / "kept").mkdir(parents=True)
    root.mkdir()
    (root / "one").symlink_to(precious)
    assert record.list_labs() == []
    with pytest.raises(LabError, match="symbolic link"):
        record.down("one")
    assert (precious / "kept").is_dir()


def test_no_such_lab() -> None:
    with pytest.raises(InputError, match='there is no lab "one"'):
        record.open("one")
    with pytest.raises(InputError, match='there is no lab "one"'):
        record.info("one")


def test_taking_down_needs_no_heavy_imports() -> None:
    """It must work when nothing else does, and quickly."""
    script = "import sys, lab.fabric.record; print(*sorted(m.partition('.')[0] for m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert not {"pyroute2", "grpc", "scapy", "asyncio", "pydantic", "yaml"} & set(done.stdout.split())

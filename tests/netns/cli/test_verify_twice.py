"""`lab verify` of the same manifests by two users at the same time."""

from __future__ import annotations

import json
import os
import queue
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lab import lifecycle, verify
from lab.errors import InputError
from lab.fabric import paths, record
from lab.manifests import load
from lab.runtime import enter

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]

MANIFESTS = """
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: shop, labels: {app: web}}
spec: {containers: [{name: app, ports: [{containerPort: 9000, name: tcp}]}]}
---
apiVersion: v1
kind: Pod
metadata: {name: till, namespace: shop}
spec: {containers: [{name: app, ports: [{containerPort: 9000, name: tcp}]}]}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {selector: {app: web}, ports: [{name: tcp, port: 9000}]}
---
apiVersion: sidecarlab.dev/v1alpha1
kind: TrafficTest
metadata: {name: till-reaches-web}
spec:
  from: {pod: till.shop}
  to: {host: web.shop, port: 9000, protocol: tcp}
  expect: {outcome: {result: ok}}
"""


def test_each_run_has_a_lab_of_its_own(tmp_path: Path) -> None:
    name = f"slt-{os.getpid()}-twice"
    file = tmp_path / f"{name}.yaml"
    file.write_text(MANIFESTS)
    command = [sys.executable, "-m", "lab", "verify", "--json", str(file)]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    told = [(*run.communicate(timeout=120), run.returncode) for run in runs]
    assert [code for _, _, code in told] == [0, 0, 0], told
    labs = {json.loads(out)["lab"]: errors for out, errors, _ in told}
    assert set(labs) == {name, f"{name}-2", f"{name}-3"}
    for lab, errors in labs.items():
        assert (f"a lab of that name; this one is called {lab}\n" in errors) == (lab != name)
    assert not {lab.name for lab in record.list_labs()} & set(labs)


def test_who_waited_for_a_lab_that_is_down_then_is_told_that_it_is_gone() -> None:
    name = f"slt-{os.getpid()}-waits"
    directory = paths.run_dir(name)
    directory.mkdir(parents=True)
    waits: queue.Queue[str] = queue.Queue()
    ended: queue.Queue[str] = queue.Queue()

    def second() -> None:
        try:
            with verify.alone(name, waits.put):
                ended.put("alone with a lab that is gone")
        except InputError as error:
            ended.put(str(error))

    with verify.alone(name, waits.put):
        thread = threading.Thread(target=second)
        thread.start()
        assert "this one waits for it" in waits.get(timeout=30)
        shutil.rmtree(directory)
    assert ended.get(timeout=30).startswith(f'lab "{name}" is gone')
    thread.join()


def lab(*words: str) -> tuple[int, str]:
    """Exit code and what was said on both streams."""
    command = [sys.executable, "-m", "lab", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


def test_the_lab_of_a_run_of_tests_is_nobody_elses(tmp_path: Path) -> None:
    name = f"slt-{os.getpid()}-used"
    file = tmp_path / f"{name}.yaml"
    file.write_text(MANIFESTS)
    used = lifecycle.Lab.up(load.load([str(file)]), name, temporary=True)
    try:
        pods = used.inspect()["pods"]
        other = "nft" if used.backend == "legacy" else "legacy"
        changed = tmp_path / "changed.yaml"
        changed.write_text(MANIFESTS.replace("9000", "9001"))
        said = f'error: lab "{name}" is in use: {paths.run_dir(name)}: a run of tests has it, and takes it down. '
        for words in ([str(file)], ["--iptables", other, str(file)], [str(changed)], ["--dry-run", str(changed)]):
            told = f"{said}Wait for its end, or choose another name with --name\n"
            assert lab("up", "-d", "--name", name, *words) == (2, told)
        told = f"{said}Wait for its end, or name another lab with --lab\n"
        assert lab("apply", "--lab", name, str(changed)) == (2, told)
        assert used.inspect()["pods"] == pods
    finally:
        used.down()


def test_a_lab_that_runs_with_something_else_is_not_verified_as_it_is(tmp_path: Path) -> None:
    name = f"slt-{os.getpid()}-other"
    file = tmp_path / f"{name}.yaml"
    file.write_text(MANIFESTS)
    with lifecycle.running(load.load([str(file)]), name) as up:
        other = "nft" if up.backend == "legacy" else "legacy"
        for what in (name, str(file)):
            for option, value, has in (("--iptables", other, up.backend), ("--runtime", "docker", "netns")):
                told = (
                    f"error: lab {name} cannot change to {option} {value}: it runs with {has}. lab down {name} first\n"
                )
                assert lab("verify", what, option, value) == (2, told)
        assert lab("verify", str(file), "--iptables", up.backend, "--runtime", "netns")[0] == 0


@pytest.mark.parametrize("brought_up", [True, False], ids=["its-own", "somebodys"])
def test_a_lab_that_is_taken_down_under_a_flow_is_gone(tmp_path: Path, brought_up: bool) -> None:
    name = f"slt-{os.getpid()}-under"
    file = tmp_path / f"{name}.yaml"
    silent = "to: {host: web.shop, port: 9001, protocol: tcp}\n  timeout: 60s"
    asked = MANIFESTS.replace(
        "ports: [{name: tcp, port: 9000}]", "ports: [{name: tcp, port: 9000}, {name: b, port: 9001}]"
    )
    file.write_text(asked.replace("to: {host: web.shop, port: 9000, protocol: tcp}", silent))
    begin: queue.Queue[str] = queue.Queue()
    go: queue.Queue[None] = queue.Queue()
    ended: queue.Queue[str] = queue.Queue()

    def progress(line: str) -> None:
        if line.endswith(" 1 tests"):
            begin.put(line)
            go.get(timeout=60)

    def run() -> None:
        what = [str(file)] if brought_up else [name]
        try:
            outcome = verify.verify(what, only=None, backend="auto", log=print, progress=progress)
            ended.put(str(outcome.to_json()))
        except Exception as error:
            ended.put(f"{type(error).__name__}: {error}")

    try:
        if not brought_up:
            lifecycle.Lab.up(load.load([str(file)]), name)
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        begin.get(timeout=90)
        with enter.netns(paths.netns_path(name, "web.shop")):
            server = socket.create_server(("", 9001))
        with server:
            server.settimeout(60)
            go.put(None)
            flow, _ = server.accept()  # and no answer: it is under way now
            with flow:
                record.down(name)
        assert ended.get(timeout=60) == f'InputError: lab "{name}" is gone: another process took it down. See `lab ls`'
        thread.join()
    finally:
        record.down(name)

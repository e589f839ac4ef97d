"""``lab up --runtime docker``: pods as containers on a lab's fabric."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, docker, failures, process
from scapy.utils import RawPcapNgReader

from lab.probe.hops import STEPS

pytestmark = [pytest.mark.docker, pytest.mark.root, pytest.mark.timeout(600)]

NAME = f"slt-{os.getpid()}"
MOVES = frozenset({"source_port", "seconds", "far_side", "packets", "address", "test"})
"""Keys whose values differ from run to run: ports that the kernel chooses, times."""


def lab(image: str, *arguments: str, timeout: float = 180) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "SIDECARLAB_IMAGE": image}
    command = [sys.executable, "-m", "lab", *arguments]
    return subprocess.run(
        command,
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def ours() -> list[str]:
    return docker("ps", "-a", "--filter", f"label=sidecarlab.dev/lab={NAME}", "--format", "{{.Names}}").split()


@pytest.fixture(scope="module")
def mesh(image: str) -> Iterator[dict[str, Any]]:
    """The quickstart as containers; what ``lab inspect`` says of it."""
    up = lab(image, "up", "topologies/quickstart.yaml", "--name", NAME, "-d", "--runtime", "docker", "--json")
    try:
        assert up.returncode == 0, up.stderr
        yield json.loads(up.stdout)
    finally:
        down = lab(image, "down", NAME)
    assert down.returncode == 0, down.stderr
    assert ours() == []


def steady(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: steady(item) for key, item in value.items() if key not in MOVES}
    return [steady(item) for item in value] if isinstance(value, list) else value


def test_verdicts_are_those_of_namespaces(image: str, mesh: dict[str, Any], tmp_path: Path) -> None:
    contained = lab(image, "verify", NAME, "--json")
    document = json.loads(contained.stdout)
    assert failures(document) == ""
    assert contained.returncode == 0
    same = tmp_path / f"{NAME}-netns.yaml"  # the file's name is the lab's
    same.write_text((ROOT / "topologies" / "quickstart.yaml").read_text())
    bare = json.loads(lab(image, "verify", str(same), "--json").stdout)
    assert document["iptables"] == bare["iptables"]
    for one, other in zip(document["verdicts"], bare["verdicts"], strict=True):
        assert one["test"] == other["test"]
        assert steady(one) == steady(other)


def test_every_pod_is_containers_with_the_rights_of_injection(mesh: dict[str, Any]) -> None:
    for pod in mesh["pods"]:
        name = f"{pod['name']}.{pod['namespace']}"
        expected = {"agent": ("1337:1337", None), "app": ("1000:1000", None), "init": ("0:0", ["NET_ADMIN", "NET_RAW"])}
        for role, (user, added) in expected.items() if pod["injected"] else [("app", ("1000:1000", None))]:
            (found,) = json.loads(docker("inspect", f"{NAME}_{name}_{role}"))
            host = found["HostConfig"]
            assert found["Config"]["User"] == user
            assert host["CapDrop"] == ["ALL"]
            assert (host["CapAdd"] or None) == added
            assert host["ReadonlyRootfs"] is True
            assert host["Privileged"] is False
            if role == "agent":
                assert found["State"]["Pid"] == pod["pids"]["agent"]
                assert process(found["State"]["Pid"], "envoy") == pod["pids"]["envoy"]


def test_exec_runs_in_the_pod(image: str, mesh: dict[str, Any]) -> None:
    done = lab(
        image,
        "exec",
        "frontend.frontend",
        "--lab",
        NAME,
        "--",
        "sh",
        "-c",
        "hostname; id -u; cat /etc/resolv.conf; exit 7",
    )
    assert done.returncode == 7
    assert done.stdout.splitlines()[:2] == ["frontend", "1000"]
    assert "search frontend.svc.cluster.local" in done.stdout


def test_a_trace_shows_the_nine_steps(image: str, mesh: dict[str, Any]) -> None:
    where = ("--from", "frontend.frontend", "--to", "catalog.catalog:8080")
    done = lab(image, "trace", NAME, *where, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["outcome"]["status"], document["missing"]) == (200, {})
    steps = [hop for hop in document["hops"] if hop["number"] is not None]
    assert [hop["step"] for hop in steps] == list(STEPS)
    assert all(hop["evidence"] for hop in steps), steps
    assert "catalog" in json.dumps(document["far_side"])


def test_a_capture_names_the_hop_of_each_packet(image: str, mesh: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "catalog.pcapng"
    command = [
        sys.executable,
        "-m",
        "lab",
        "capture",
        "catalog.catalog",
        "--lab",
        NAME,
        "-w",
        str(file),
        "--filter",
        "tcp",
    ]
    capture = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        assert capture.stderr is not None
        assert capture.stderr.readline().startswith("capturing on ")
        sent = lab(image, "trace", NAME, "--from", "frontend.frontend", "--to", "catalog.catalog:8080")
        assert sent.returncode == 0, sent.stderr
        capture.send_signal(signal.SIGINT)
        _, said = capture.communicate(timeout=20)
    finally:
        capture.kill()
        capture.wait()
    assert capture.returncode == 0, said
    comments = [meta.comments[0].decode() for _, meta in RawPcapNgReader(str(file))]
    assert any(c.startswith("inbound: 10.244.1.") and "arrives at 15006 (Envoy)" in c for c in comments), comments
    assert any(c.startswith("Envoy (uid 1337) -> app (uid 1000), port 8080") for c in comments), comments


def test_a_killed_agent_is_noticed_and_the_app_lives_on(image: str, mesh: dict[str, Any]) -> None:
    payments = next(pod for pod in mesh["pods"] if pod["name"] == "payments")
    docker("kill", f"{NAME}_payments.payments_agent")
    seen = json.loads(lab(image, "inspect", NAME, "--json").stdout)
    (now,) = [pod for pod in seen["pods"] if pod["name"] == "payments"]
    assert now["ready"] is False
    assert now["pids"]["agent"] is None
    assert now["pids"]["app"] == payments["pids"]["app"]
    (event,) = [event for event in seen["events"] if event["place"] == "payments.payments"]
    assert (event["event"], event["process"], event["unexpected"]) == ("process-ended", "agent", True)


def test_down_after_a_crash_leaves_nothing(image: str, mesh: dict[str, Any]) -> None:
    """Last: it ends the lab."""
    os.kill(mesh["pid"], signal.SIGKILL)
    assert len(ours()) > 10
    down = lab(image, "down", NAME)
    assert down.returncode == 0, down.stderr
    assert ours() == []
    assert not Path(f"/run/sidecarlab/{NAME}").exists()


POD = """\
apiVersion: v1
kind: Pod
metadata: {{name: client, namespace: default}}
spec: {{containers: [{{name: app, ports: [{{containerPort: 80}}]}}]}}
---
apiVersion: v1
kind: Pod
metadata: {{name: server, namespace: default}}
spec:
  containers:
  - name: app
    image: {image}
    command: [python, -m, lab.apps.echo, "--port=8080:http", --name=from-the-image]
---
apiVersion: sidecarlab.dev/v1alpha1
kind: TrafficTest
metadata: {{name: the-command-of-the-image-answers}}
spec:
  from: {{pod: client.default}}
  to: {{pod: server.default, port: 8080, protocol: http}}
  retry: {{attempts: 40, interval: 250ms}}
  expect: {{outcome: {{result: ok, status: 200}}}}
"""


def test_a_containers_image_and_command_are_the_manifests(image: str, tmp_path: Path) -> None:
    file = tmp_path / f"{NAME}-image.yaml"
    file.write_text(POD.format(image=image))
    done = lab(image, "verify", str(file), "--runtime", "docker", "--json")
    document = json.loads(done.stdout)
    assert failures(document) == ""
    assert document["verdicts"][0]["far_side"]["pod"] == "from-the-image"


def test_an_image_that_cannot_be_had_is_an_error_in_one_line(image: str, tmp_path: Path) -> None:
    file = tmp_path / f"{NAME}-missing.yaml"
    file.write_text(POD.format(image="sidecarlab.invalid/nothing:here"))
    done = lab(image, "up", str(file), "-d", "--runtime", "docker")
    assert done.returncode == 2
    assert "sidecarlab.invalid/nothing:here" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert docker("ps", "-aq", "--filter", f"label=sidecarlab.dev/lab={NAME}-missing") == ""
    assert not Path(f"/run/sidecarlab/{NAME}-missing").exists()

"""docker-compose.yml on a real engine."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Compose, docker, failures, process

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]

PROXIES = [f"proxy-{name}" for name in ("frontend", "catalog", "payments", "tracing")]
LEAK = """\
apiVersion: sidecarlab.dev/v1alpha1
kind: TrafficTest
metadata: {name: nothing-leaks}
spec:
  from: {pod: frontend.frontend}
  to: {host: 10.231.77.220, port: 9000, protocol: tcp}
  expect:
    outbound: {captured: true, redirected_to: 15001}
    wire: {left_pod: false}
    outcome: {result: refused}
"""


@pytest.fixture(scope="module")
def mesh(image: str) -> Iterator[Compose]:
    compose = Compose(f"slt-{os.getpid()}", image)
    try:
        compose.up()
        yield compose
    finally:
        compose.down()
    assert compose.left() == []


def test_up_shows_the_verdict_table_and_leaves_the_mesh_running(mesh: Compose) -> None:
    code = docker("wait", mesh.container("tests")).strip()
    table = docker("logs", mesh.container("tests"))
    assert code == "0", table[-3000:]
    assert re.search(r"catalog-through-mesh .* captured to 15001 .* ok 200 +ok", table)
    assert re.search(r"\d+ passed, 0 failed, 0 skipped", table)
    assert all(mesh.inspect(name)["State"]["Running"] for name in [*PROXIES, "pod-frontend", "app-frontend"])
    assert mesh.inspect("init-frontend")["State"]["ExitCode"] == 0


def test_run_gives_the_verdicts_and_their_exit_status(mesh: Compose) -> None:
    code, document = mesh.verify()
    assert failures(document) == ""
    assert code == 0
    assert document["summary"]["passed"] == len(document["verdicts"]) > 25
    assert any(v["wire"]["seen_at"] == "eth0" and v["wire"]["left_pod"] for v in document["verdicts"] if v["wire"])


def test_a_verdict_that_does_not_hold_is_exit_status_1(mesh: Compose, tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text(LEAK.replace("refused", "timeout").replace("nothing-leaks", "wrong"))
    code, document = mesh.verify(
        "/extra/wrong.yaml", "--only", "wrong", options=["--no-deps", "-v", f"{tmp_path}:/extra:ro"]
    )
    assert code == 1
    assert document["summary"] == {"passed": 0, "failed": 1, "skipped": 0}


def test_junit_report(mesh: Compose, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    done = mesh(
        "run", "--rm", "-T", "--no-deps", "-v", f"{tmp_path}:/out", "tests",
        "--only", "catalog-through-mesh", "--junit", "/out/junit.xml",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'name="catalog-through-mesh"' in (tmp_path / "junit.xml").read_text()


@pytest.mark.parametrize("service", PROXIES)
def test_a_proxy_is_1337_and_can_do_nothing_else(mesh: Compose, service: str) -> None:
    found = mesh.inspect(service)
    host: dict[str, Any] = found["HostConfig"]
    assert found["Config"]["User"] == "1337:1337"
    assert host["CapDrop"] == ["ALL"]
    assert not host["CapAdd"]
    assert host["ReadonlyRootfs"] is True
    assert host["Privileged"] is False
    assert "no-new-privileges:true" in host["SecurityOpt"]
    envoy = process(found["State"]["Pid"], "envoy")
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{envoy}/status").read_text().splitlines() if ":\t" in line
    )
    assert set(status["Uid"].split()) == set(status["Gid"].split()) == {"1337"}
    assert {status[k] for k in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert status["NoNewPrivs"] == "1"


def test_nothing_is_privileged(mesh: Compose) -> None:
    label = f"label=com.docker.compose.project={mesh.name}"
    ids = docker("ps", "-aq", "--filter", label).split()
    assert len(ids) >= 27
    assert set(docker("inspect", "--format", "{{.HostConfig.Privileged}} {{.HostConfig.PidMode}}", *ids).split()) == {
        "false"
    }


def test_an_apps_restart_keeps_the_rules(mesh: Compose) -> None:
    before = mesh.inspect("pod-frontend")["State"]["Pid"]
    assert mesh("restart", "app-frontend").returncode == 0
    assert mesh.inspect("pod-frontend")["State"]["Pid"] == before
    code, document = mesh.verify("--only", "own-service-goes-through-both-sides", options=["--no-deps"])
    assert failures(document) == ""
    assert code == 0


def test_a_killed_proxy_fails_closed_and_the_verdict_says_so(mesh: Compose, tmp_path: Path) -> None:
    (tmp_path / "leak.yaml").write_text(LEAK)
    docker("kill", mesh.container("proxy-frontend"))
    try:
        extra = ["--no-deps", "-v", f"{tmp_path}:/extra:ro"]
        code, document = mesh.verify("/extra/leak.yaml", "--only", "nothing-leaks", "--wait", "2", options=extra)
        assert failures(document) == ""
        assert code == 0
        code, document = mesh.verify("--only", "unknown-host-tcp", "--wait", "2", options=["--no-deps"])
        assert code == 1
        (verdict,) = document["verdicts"]
        assert verdict["outcome"]["result"] == "unreachable"  # not even a name: lookups are captured, too
        assert verdict["dns"]["captured"] is True
        assert verdict["wire"] in (None, {"left_pod": False, "seen_at": "eth0", "packets": []})
    finally:
        docker("start", mesh.container("proxy-frontend"))


def test_the_other_policy(mesh: Compose) -> None:
    blocking = Compose(mesh.name, mesh.image, "REGISTRY_ONLY")
    blocking.up()
    code, document = blocking.verify()
    assert failures(document) == ""
    assert code == 0
    assert "unknown-host-tcp-is-blocked" in {v["test"] for v in document["verdicts"]}


def test_where_init_fails_the_app_never_starts_and_up_says_why(mesh: Compose, tmp_path: Path) -> None:
    """Last: it takes the network of the mesh over."""
    mesh.down()
    override = tmp_path / "override.yml"
    override.write_text(
        "services:\n  init-frontend:\n    command: [python, -m, init, -p, '15001', -i, '10.0.0.0/99']\n"
    )
    broken = Compose(mesh.name, mesh.image, files=[str(override)])
    done = broken("up", "-d", "app-frontend")
    assert done.returncode != 0
    assert "init-frontend" in done.stdout + done.stderr
    state = broken.inspect("app-frontend")["State"] if broken.container("app-frontend") else {"Status": "created"}
    assert state["Status"] == "created"
    assert "10.0.0.0/99" in docker_logs(broken.container("init-frontend"))


def test_down_leaves_nothing(mesh: Compose) -> None:
    assert mesh.left() != []
    mesh.down()
    assert mesh.left() == []


def docker_logs(container: str) -> str:
    from conftest import run

    done = run("docker", "logs", container)
    return done.stdout + done.stderr

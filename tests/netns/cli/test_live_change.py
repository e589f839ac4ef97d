"""A running lab becomes another one while its pods live, or stays as it was."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.fabric import paths, record

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]

NAME = f"slt-live-{os.getpid()}"
MESH = """
apiVersion: v1
kind: ConfigMap
metadata: {name: istio, namespace: istio-system}
data:
  mesh: |
    outboundTrafficPolicy: {mode: ALLOW_ANY}
    defaultConfig:
      proxyMetadata: {ISTIO_META_DNS_CAPTURE: "true"}
---
apiVersion: v1
kind: Namespace
metadata: {name: shop, labels: {istio-injection: enabled}}
---
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: shop, labels: {app: web}}
spec: {containers: [{name: app, ports: [{name: http, containerPort: 8080}]}]}
---
apiVersion: v1
kind: Pod
metadata: {name: plain, namespace: shop, labels: {app: plain, sidecar.istio.io/inject: "false"}}
spec: {containers: [{name: app, ports: [{name: http, containerPort: 8080}]}]}
---
apiVersion: sidecarlab.dev/v1alpha1
kind: ExternalHost
metadata: {name: unknown}
spec: {hosts: [unknown.example], addresses: [203.0.113.20], ports: [{port: 80, protocol: http}]}
---
apiVersion: sidecarlab.dev/v1alpha1
kind: TrafficTest
metadata: {name: unknown-host}
spec:
  from: {pod: web.shop}
  to: {host: unknown.example, port: 80, protocol: http}
  expect:
    envoy: {cluster: PassthroughCluster}
    outcome: {result: ok, status: 200}
"""
BLOCKED = """
apiVersion: v1
kind: ConfigMap
metadata: {name: istio, namespace: istio-system}
data:
  mesh: |
    outboundTrafficPolicy: {mode: REGISTRY_ONLY}
    defaultConfig:
      proxyMetadata: {ISTIO_META_DNS_CAPTURE: "true"}
---
apiVersion: sidecarlab.dev/v1alpha1
kind: TrafficTest
metadata: {name: unknown-host}
spec:
  from: {pod: web.shop}
  to: {host: unknown.example, port: 80, protocol: http}
  expect:
    envoy: {cluster: BlackHoleCluster}
    outcome: {result: closed}
"""
LATE = """
apiVersion: v1
kind: Pod
metadata: {name: late, namespace: shop, labels: {app: late}}
spec: {containers: [{name: app, ports: [{name: http, containerPort: 8080}]}]}
---
apiVersion: v1
kind: Service
metadata: {name: late, namespace: shop}
spec: {selector: {app: late}, ports: [{name: http, port: 8080}]}
---
apiVersion: sidecarlab.dev/v1alpha1
kind: TrafficTest
metadata: {name: late-is-reached}
spec:
  from: {pod: web.shop}
  to: {host: late.shop, port: 8080, protocol: http}
  expect:
    envoy: {cluster: outbound|8080||late.shop.svc.cluster.local}
    inbound: {pod: late.shop, captured: true}
    outcome: {result: ok, status: 200}
"""
NEVER = """
apiVersion: v1
kind: Pod
metadata:
  name: never
  namespace: shop
  annotations: {proxy.istio.io/config: '{"discoveryAddress": "192.0.2.1:15010"}'}
spec: {containers: [{name: app, ports: [{name: http, containerPort: 8080}]}]}
"""


ROUTED = """
apiVersion: v1
kind: Service
metadata: {name: plain, namespace: shop}
spec: {selector: {app: plain}, ports: [{name: http, port: 8080}]}
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: plain, namespace: shop}
spec:
  hosts: [plain]
  http:
  - headers: {request: {set: {x-told: "%s"}}}
    route: [{destination: {host: plain}}]
---
apiVersion: sidecarlab.dev/v1alpha1
kind: TrafficTest
metadata: {name: header-is-set}
spec:
  from: {pod: web.shop}
  to: {host: plain.shop, port: 8080, protocol: http}
  expect: {far_side: {headers: {x-told: once}}, outcome: {status: 200}}
"""


def lab(*args: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lab", *args]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if code is not None:
        assert result.returncode == code, f"{args}: {result.stdout}\n{result.stderr}"
    return result


def lab_json(*args: str, code: int = 0) -> Any:
    return json.loads(lab(*args, "--json", code=code).stdout)


def written(directory: Path, name: str, text: str) -> str:
    file = directory / name
    file.write_text(text)
    return str(file)


def pids() -> dict[str, dict[str, int]]:
    return {f"{p['name']}.{p['namespace']}": p["pids"] for p in lab_json("inspect", NAME)["pods"]}


def verdicts(*args: str, code: int = 0) -> dict[str, bool]:
    return {v["test"]: v["pass"] for v in lab_json("verify", NAME, *args, code=code)["verdicts"]}


def copies() -> dict[str, str]:
    return {file.name: file.read_text() for file in sorted(paths.manifests_dir(NAME).iterdir())}


def names(refs: list[dict[str, str]]) -> list[str]:
    return [f"{ref['kind']} {ref['name']}" for ref in refs]


@pytest.fixture
def base(tmp_path: Path) -> Iterator[str]:
    """The manifests of a lab that runs."""
    file = written(tmp_path, "mesh.yaml", MESH)
    try:
        lab("up", "-d", "--name", NAME, file)
        yield file
    finally:
        record.down(NAME)
    assert not paths.run_dir(NAME).exists()


def test_policies_flip_and_pods_come_and_go_while_the_others_live(base: str, tmp_path: Path) -> None:
    before = pids()
    assert lab("up", "--name", NAME, base).stdout == f"{NAME}: already up, nothing changed\n"
    assert verdicts() == {"unknown-host": True}

    flip = written(tmp_path, "blocked.yaml", BLOCKED)
    planned = lab_json("apply", "--lab", NAME, "--dry-run", flip)
    assert (planned["applied"], names(planned["changed"])) == (False, ["MeshConfig mesh", "TrafficTest unknown-host"])
    assert verdicts() == {"unknown-host": True}, "a plan changes nothing"
    done = lab_json("apply", "--lab", NAME, flip)
    assert done == {**planned, "applied": True}
    assert done["places"] == {"added": [], "removed": [], "replaced": [], "restarted": []}
    assert pids() == before, "no process ended for a policy"
    assert verdicts() == {"unknown-host": True}, "by name it is the new mesh's test, and it holds"

    late = written(tmp_path, "late.yaml", LATE)
    assert lab_json("apply", "--lab", NAME, late)["places"]["added"] == ["late.shop"]
    came = pids()
    assert {pod: came[pod] for pod in before} == before
    assert verdicts() == {"unknown-host": True, "late-is-reached": True}

    document = lab_json("up", "-d", "--name", NAME, written(tmp_path, "mesh.yaml", MESH.replace("plain", "simple")))
    assert document["changes"]["places"] == {
        "added": ["simple.shop"],
        "removed": ["plain.shop", "late.shop"],
        "replaced": [],
        "restarted": [],
    }
    after = pids()
    assert set(after) == {"web.shop", "simple.shop"}
    assert after["web.shop"] == before["web.shop"]
    for gone in (before["plain.shop"]["app"], came["late.shop"]["envoy"], came["late.shop"]["init"]):
        assert not Path(f"/proc/{gone}").exists()
    for place in ("plain.shop", "late.shop"):
        assert not paths.netns_path(NAME, place).exists()
        assert not paths.pod_dir(NAME, place).exists()
    assert verdicts() == {"unknown-host": True}, "back to the policy of the file"


def test_what_envoy_rejects_is_told_until_it_is_mended(base: str, tmp_path: Path) -> None:
    """A formatter that no admission knows to be none: routes only, so that the lab lives on with the old ones."""

    def nacks() -> dict[str, str | None]:
        return {pod["name"]: pod["nack"] for pod in lab_json("inspect", NAME)["pods"]}

    lab("apply", "--lab", NAME, written(tmp_path, "good.yaml", ROUTED % "once"))
    assert nacks() == {"web": None, "plain": None}

    applied = lab("apply", "--lab", NAME, written(tmp_path, "bad.yaml", ROUTED % "%NONSENSE%"))
    told = nacks()
    assert f"warning: pod web.shop keeps what it had: its Envoy rejects {told['web']}" in applied.stderr.splitlines()
    assert told["plain"] is None
    assert told["web"] is not None
    kind, _, words = told["web"].partition(": ")
    assert (kind, "NONSENSE" in words) == ("RDS", True), told
    log = (paths.pod_dir(NAME, "web.shop") / "log/agent.log").read_text()
    rejected = [line for line in log.splitlines() if "RouteConfiguration" in line and words in line]
    assert rejected, "the very words of the Envoy of that pod"
    text = lab("inspect", NAME).stdout
    assert f"web.shop: configuration rejected by Envoy: {told['web']}" in " ".join(text.split())
    assert verdicts("--only", "header-is-set") == {"header-is-set": True}, "the routes that it had"

    mended = lab_json("apply", "--lab", NAME, written(tmp_path, "mended.yaml", ROUTED % "again"))
    assert mended["nacks"] == {}
    assert nacks() == {"web": None, "plain": None}
    assert verdicts("--only", "header-is-set", code=1) == {"header-is-set": False}, "the new routes"


def test_what_cannot_be_leaves_all_as_it_was(base: str, tmp_path: Path) -> None:
    before, held = pids(), copies()

    def fails(*args: str) -> str:
        result = lab(*args, code=2)
        assert (result.stdout, result.stderr.count("\n")) == ("", 1), result.stderr
        assert (pids(), copies()) == (before, held)
        return result.stderr

    bad = written(tmp_path, "bad.yaml", "\n" + LATE.replace("containers", "contianers"))
    assert f'error: unknown field "contianers": {bad}:6' in fails("apply", "--lab", NAME, bad)
    assert f'error: unknown field "contianers": {bad}:6' in fails("up", "-d", "--name", NAME, bad)

    never = written(tmp_path, "never.yaml", BLOCKED + "---" + NEVER)
    error = fails("apply", "--lab", NAME, "--timeout", "3", never)
    assert error.startswith("error: pod never.shop did not become ready: after 3 s it waits for agent and app")
    assert not paths.netns_path(NAME, "never.shop").exists()
    assert not paths.pod_dir(NAME, "never.shop").exists()
    assert list(paths.run_dir(NAME).glob("change-*")) == []

    # One that ran is brought back, as it was, under its address.
    instead = NEVER.replace("name: never", "name: web")
    result = lab("apply", "--lab", NAME, "--timeout", "3", written(tmp_path, "web.yaml", instead), code=2)
    assert result.stderr.startswith("error: pod web.shop did not become ready: ")
    now = pids()
    assert now["plain.shop"] == before["plain.shop"]
    assert now["web.shop"]["envoy"] not in (None, before["web.shop"]["envoy"])
    assert copies() == held
    assert lab_json("inspect", NAME)["pods"][0]["ready"] is True
    assert verdicts() == {"unknown-host": True}, "under the old policy"

    refused = written(tmp_path, "policy.yaml", BLOCKED.replace("outbound", "trustDomain: other\n    outbound", 1))
    assert "trustDomain cannot change while lab" in lab("apply", "--lab", NAME, refused, code=2).stderr
    filters = BLOCKED.replace(
        "    outbound", "    accessLogFile: /dev/stdout\n    accessLogFormat: '%NO_SUCH_COMMAND%'\n    outbound", 1
    )
    result = lab("apply", "--lab", NAME, written(tmp_path, "filters.yaml", filters), code=2)
    assert result.stderr.startswith("error: pod web.shop rejects its new configuration: ")
    assert pids() == now
    assert verdicts() == {"unknown-host": True}


def test_down_takes_all_after_a_kill_in_the_middle(base: str, tmp_path: Path) -> None:
    supervisor = record.info(NAME)
    never = written(tmp_path, "never.yaml", NEVER)
    command = [sys.executable, "-m", "lab", "apply", "--lab", NAME, "--timeout", "60", never]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as applying:
        _wait_for_entry("never.shop", 60)
        os.kill(supervisor.pid, signal.SIGKILL)
        _, error = applying.communicate(timeout=60)
    assert applying.returncode == 2
    assert "has crashed" in error
    keeper = _keeper("never.shop")
    assert Path(f"/proc/{keeper}").exists(), "pods live on until they are taken down"
    lab("down", NAME)
    assert not paths.run_dir(NAME).exists()
    assert NAME not in Path("/proc/self/mountinfo").read_text()
    mark = f"SIDECARLAB_LAB={supervisor.id}".encode()
    assert [pid for pid in record._pids() if record._is_marked(pid, mark)] == []


def _keeper(place: str) -> int | None:
    entries = record._entries(NAME)
    return next((int(str(e["pid"])) for e in entries if e.get("role") == "keeper" and e.get("place") == place), None)


def _wait_for_entry(place: str, seconds: float) -> None:
    """Until the record names the first process of a place; the supervisor writes it in the middle of a change."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    watch = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        assert libc.inotify_add_watch(watch, os.fsencode(paths.record_file(NAME)), 0x2) >= 0  # IN_MODIFY
        deadline = time.monotonic() + seconds
        while _keeper(place) is None:
            assert select.select([watch], [], [], max(0.0, deadline - time.monotonic()))[0], (
                f"{place} was never started"
            )
            os.read(watch, 4096)
    finally:
        os.close(watch)

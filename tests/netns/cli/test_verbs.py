"""The verbs of ``lab`` on a real lab, as a user types them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]

QUICKSTART = "topologies/quickstart.yaml"
NAME = f"slt-verbs-{os.getpid()}"


def lab(*args: str, code: int | None = 0, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [sys.executable, "-m", "lab", *args], capture_output=True, text=True, timeout=120, check=False, **kwargs
    )
    if code is not None:
        assert result.returncode == code, f"{args}: {result.stdout}\n{result.stderr}"
    return result


def lab_json(*args: str, code: int = 0) -> Any:
    return json.loads(lab(*args, "--json", code=code).stdout)


def marked(lab_id: str) -> list[int]:
    """Host pids whose environment carries the lab's mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if f"SIDECARLAB_LAB={lab_id}".encode() in environment.split(b"\0"):
                found.append(int(entry.name))
    return found


@pytest.fixture(scope="module")
def running() -> Iterator[str]:
    lab("up", "-d", "--name", NAME, QUICKSTART)
    yield NAME
    lab("down", NAME)


def test_ls_names_it(running: str) -> None:
    labs = {entry["name"]: entry for entry in lab_json("ls")["labs"]}
    assert labs[running]["state"] == "running"
    assert running in lab("ls").stdout


def test_inspect_shows_every_pod_ready_with_live_pids(running: str) -> None:
    info = lab_json("inspect", running)
    assert info["name"] == running
    assert [Path(f).name for f in info["files"]] == ["quickstart.yaml"]
    pods = {f"{p['name']}.{p['namespace']}": p for p in info["pods"]}
    assert set(pods) == {
        "frontend.frontend",
        "catalog.catalog",
        "payments.payments",
        "tracing.observability",
        "legacy.legacy",
    }
    for name, pod in pods.items():
        assert pod["ready"] is True, name
        assert pod["nack"] is None, name
        roles = ("app",) if name == "legacy.legacy" else ("agent", "envoy", "app")
        for role in roles:
            assert Path(f"/proc/{pod['pids'][role]}").exists(), (name, role)
    assert pods["legacy.legacy"]["pids"]["envoy"] is None


@pytest.mark.parametrize(("user", "uid"), [("app", "1000"), ("proxy", "1337"), ("root", "0"), ("4242", "4242")])
def test_exec_runs_as_the_user_asked_for(running: str, user: str, uid: str) -> None:
    done = lab("exec", "frontend.frontend", "--lab", running, "--as", user, "--", "id", "-u")
    assert done.stdout.strip() == uid


def test_exec_passes_the_exit_code_and_sees_the_pod(running: str) -> None:
    assert lab("exec", "frontend/frontend", "--lab", running, "--", "sh", "-c", "exit 7", code=7).stderr == ""
    shown = lab("exec", "frontend.frontend", "--lab", running, "--", "cat", "/etc/resolv.conf").stdout
    assert "search frontend.svc.cluster.local svc.cluster.local cluster.local" in shown
    assert "ndots:5" in shown


def test_exec_in_an_unknown_pod_is_one_line(running: str) -> None:
    result = lab("exec", "nobody.frontend", "--lab", running, "--", "id", code=2)
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1


def test_proxy_config_of_the_proxy_has_what_discovery_would_send(running: str) -> None:
    live = lab_json("proxy-config", "frontend.frontend", "all", "--lab", running)
    planned = lab_json("proxy-config", "frontend.frontend", "all", "-f", QUICKSTART)
    assert (live["source"], planned["source"]) == ("proxy", "discovery")

    def names(document: dict[str, Any], kind: str, key: str = "name") -> set[str]:
        return {r.get(key, "") for r in document[kind]}

    static_listeners = {"0.0.0.0_15090", "0.0.0.0_15021"}
    static_clusters = {"prometheus_stats", "agent", "sds-grpc", "xds-grpc"}
    assert names(live, "listeners") - static_listeners == names(planned, "listeners")
    assert names(live, "clusters") - static_clusters == names(planned, "clusters")
    assert names(planned, "routes") <= names(live, "routes")
    assert names(planned, "endpoints", "cluster_name") <= names(live, "endpoints", "cluster_name")
    assert {n.rstrip(".") for n in live["nds"]["table"]} >= set(planned["nds"]["table"])
    assert live["bootstrap"]["node"]["id"] == planned["bootstrap"]["node"]["id"]


def asked(running: str, pod: str, path: str) -> Any:
    """What the debug port of a pod's agent answers, asked by the pod's app."""
    command = [sys.executable, "-m", "agent", "request", "--debug-port=15004", "GET", path]
    return json.loads(lab("exec", pod, "--lab", running, "--", *command).stdout)


def test_the_agents_debug_port_answers_what_discovery_knows_of_the_proxy(running: str) -> None:
    synced = asked(running, "frontend.frontend", "debug/syncz")
    assert synced["typeUrl"] == "istio.io/debug/syncz"
    (proxy,) = synced["resources"]
    assert proxy["node"]["id"] == "frontend.frontend"
    states = {c["typeUrl"].rpartition(".")[2]: c["configStatus"] for c in proxy["genericXdsConfigs"]}
    assert states == dict.fromkeys(
        ("Cluster", "ClusterLoadAssignment", "Listener", "NameTable", "RouteConfiguration"), "SYNCED"
    )
    dump = asked(running, "frontend.frontend", "debug/config_dump?resourceName=frontend.frontend")
    sections = {s["@type"].rpartition(".")[2]: s for s in dump["resources"]}
    live = lab_json("proxy-config", "frontend.frontend", "all", "--lab", running)
    listeners = {one["name"] for one in sections["ListenersConfigDump"]["dynamicListeners"]}
    assert listeners == {one["name"] for one in live["listeners"]} - {"0.0.0.0_15090", "0.0.0.0_15021"}
    for other in ("catalog.catalog", "nobody.here"):
        assert asked(running, "frontend.frontend", f"debug/config_dump?resourceName={other}")["resources"] == []
    (names,) = asked(running, "frontend.frontend", "debug/ndsz")["resources"]
    (table,) = names["value"]["configs"]
    assert table["table"]["catalog.catalog.svc.cluster.local"]["ips"] == ["10.96.20.30"]


STATUS = """
import json, sys, urllib.error, urllib.request
page, token_file = sys.argv[1:3]
headers = {"Authorization": "Bearer " + open(token_file).read().strip()} if token_file else {}
try:
    answer = urllib.request.urlopen(urllib.request.Request("http://" + page, headers=headers), timeout=10)
except urllib.error.HTTPError as error:
    answer = error
print(json.dumps([answer.status, answer.read().decode()]))
"""
ADDRESS = "import json, socket; print(json.dumps(socket.gethostbyname('istiod.istio-system.svc')))"
TOKEN = "/run/sidecar/var/run/secrets/tokens/istio-token"


def test_discoverys_debug_pages_are_for_the_node_and_for_tokens(running: str) -> None:
    def from_pod(page: str, token: str = TOKEN, port: int = 8080) -> list[Any]:
        url = f"istiod.istio-system.svc:{port}{page}"
        command = [sys.executable, "-c", STATUS, url, token]
        done = lab("exec", "frontend.frontend", "--as", "proxy", "--lab", running, "--", *command)
        answer: list[Any] = json.loads(done.stdout)
        return answer

    for port in (8080, 15014):
        assert from_pod("/debug/syncz", "", port) == [401, ""]
        assert from_pod("/debug/syncz", port=port) == [403, ""]
    assert from_pod("/ready", "")[0] == 200
    assert from_pod("/metrics", "", 15014)[0] == 200
    assert from_pod("/debug/nothing", "")[0] == 404
    status, text = from_pod("/debug/config_dump?proxyID=frontend.frontend")
    assert (status, len(json.loads(text)["configs"])) == (200, 7)
    assert from_pod("/debug/config_dump?proxyID=catalog.catalog")[0] == 404
    node = f"/run/sidecarlab/{running}/ns/node"
    discovery = json.loads(
        lab("exec", "frontend.frontend", "--lab", running, "--", sys.executable, "-c", ADDRESS).stdout
    )
    command = ["nsenter", f"--net={node}", sys.executable, "-c", STATUS, f"{discovery}:8080/debug/syncz", ""]
    status, text = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout)
    assert (status, "frontend.frontend" in {proxy["proxy"] for proxy in json.loads(text)}) == (200, True)


def test_verify_by_name_with_a_glob_and_a_report(running: str, tmp_path: Path) -> None:
    report = tmp_path / "junit.xml"
    document = lab_json("verify", running, "--only", "catalog-*", "--junit", str(report))
    assert document["lab"] == running
    assert [v["test"] for v in document["verdicts"]] == ["catalog-through-mesh"]
    assert document["summary"] == {"passed": 1, "failed": 0, "skipped": 0}
    verdict = document["verdicts"][0]
    assert verdict["proof"] == "observed"
    assert verdict["outbound"]["redirected_to"] == 15001
    assert verdict["inbound"]["peer_seen_by_app"] == "127.0.0.6"
    cases = ElementTree.parse(report).getroot().findall(".//testcase")
    assert [c.get("name") for c in cases] == ["catalog-through-mesh"]


def test_verify_with_a_glob_that_matches_nothing_has_nothing_to_run(running: str) -> None:
    assert "nothing to run" in lab("verify", running, "--only", "zzz*", code=2).stderr


def test_up_of_the_same_manifests_changes_nothing(running: str) -> None:
    before = lab_json("inspect", running)
    assert lab("up", "--name", running, QUICKSTART).stdout == f"{running}: already up, nothing changed\n"
    assert lab_json("inspect", running)["pods"] == before["pods"]


def test_up_of_a_running_lab_with_another_back_end_is_refused(running: str) -> None:
    used = lab_json("inspect", running)["iptables"]
    other = "nft" if used == "legacy" else "legacy"
    result = lab("up", "-d", "--name", running, "--runtime", "docker", QUICKSTART, code=2)
    assert result.stderr == (
        f"error: lab {running} cannot change to --runtime docker: it runs with netns. lab down {running} first\n"
    )
    result = lab("up", "-d", "--name", running, "--iptables", other, QUICKSTART, code=2)
    assert (len(result.stderr.splitlines()), f"it runs with {used}" in result.stderr) == (1, True)


def test_down_after_kill_9_of_everything_that_knows_leaves_nothing() -> None:
    name = f"{NAME}-k"
    pid = json.loads(lab("up", "-d", "--name", name, "--json", QUICKSTART).stdout)["pid"]
    lab_id = os.readlink(f"/run/sidecarlab/{name}/id")
    os.kill(pid, signal.SIGKILL)
    assert marked(lab_id)
    lab("down", name)
    assert marked(lab_id) == []
    assert not Path(f"/run/sidecarlab/{name}").exists()
    assert name not in Path("/proc/self/mountinfo").read_text()
    assert lab("down", name).returncode == 0


def test_a_failing_verdict_is_exit_1_and_says_why(running: str, tmp_path: Path) -> None:
    """The same mesh with one wrong expectation: only that row fails."""
    text = Path(QUICKSTART).read_text()
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(
        text
        + """
---
apiVersion: sidecarlab.dev/v1alpha1
kind: TrafficTest
metadata: {name: zz-wrong}
spec:
  from: {pod: frontend.frontend}
  to: {host: catalog.catalog, port: 8080, protocol: http}
  expect: {outcome: {result: http-error, status: 502}}
"""
    )
    document = lab_json("verify", str(wrong), "--only", "*[hw]*", code=1)
    failed = [v for v in document["verdicts"] if v["pass"] is False]
    assert [v["test"] for v in failed] == ["zz-wrong"]
    assert any("502" in line and "200" in line for line in failed[0]["differences"])

"""Labs brought up and taken down for real, by the library and by the command, in good times and bad."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from lab import lifecycle
from lab.errors import InputError, LabError
from lab.fabric import paths, record
from lab.manifests.load import load
from lab.runtime import files

pytestmark = pytest.mark.root

ROOT = Path(__file__).parents[3]

MESH = """
apiVersion: v1
kind: ConfigMap
metadata: {name: istio, namespace: istio-system}
data:
  mesh: |
    enableAutoMtls: false
    defaultConfig:
      discoveryAddress: istiod.istio-system.svc:15010
      controlPlaneAuthPolicy: NONE
      proxyMetadata: {ISTIO_META_DNS_CAPTURE: "true"}
---
apiVersion: security.istio.io/v1
kind: PeerAuthentication
metadata: {name: default, namespace: istio-system}
spec: {mtls: {mode: DISABLE}}
---
apiVersion: v1
kind: Namespace
metadata: {name: shop, labels: {istio-injection: enabled}}
---
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: shop, labels: {app: web}}
spec:
  containers:
  - {name: app, ports: [{name: http, containerPort: 8080}]}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {selector: {app: web}, ports: [{name: http, port: 8080}]}
"""
PLAIN = """
---
apiVersion: v1
kind: Pod
metadata: {name: plain, namespace: shop, labels: {sidecar.istio.io/inject: "false"}}
spec:
  containers:
  - name: app
    command: %s
"""
OUTSIDE = """
---
apiVersion: sidecarlab.dev/v1alpha1
kind: ExternalHost
metadata: {name: vendor}
spec: {hosts: [api.vendor.example], addresses: [203.0.113.10], ports: [{port: 80, protocol: http}]}
"""
LOST = MESH.replace("istiod.istio-system.svc:15010", "192.0.2.1:15010")
"""A sidecar that never hears from its control plane."""


@pytest.fixture
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """A lab's name; whatever a failed test leaves of it is taken away."""
    chosen = f"slt-{os.getpid()}-{abs(hash(request.node.nodeid)) % 10000:04d}"
    yield chosen
    left = record.down(chosen)
    assert left == [], "the test itself takes its lab down"


def manifests(tmp_path: Path, *parts: str) -> str:
    file = tmp_path / "mesh.yaml"
    file.write_text("".join(parts))
    return str(file)


def marked(lab_id: str) -> list[int]:
    """Processes with the lab's mark."""
    mark = f"SIDECARLAB_LAB={lab_id}".encode()
    found = []
    for pid in record._pids():
        try:
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
        except OSError:
            continue
    return found


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lifecycle.Lab]:
    """A lab that the tests after it only look at."""
    file = manifests(tmp_path_factory.mktemp("small"), MESH, PLAIN % "[sleep, '1000']", OUTSIDE)
    with lifecycle.running(load([file]), f"slt-{os.getpid()}-small") as lab:
        yield lab


def test_inspect_has_the_contracts_shape(small: lifecycle.Lab) -> None:
    info = small.inspect()
    assert info["name"] == small.name
    assert status(info["pid"])["Name"].startswith("python")
    assert [Path(file).name for file in info["files"]] == ["mesh.yaml"]
    web, plain = info["pods"]
    assert (web["name"], web["namespace"], web["ready"], web["nack"]) == ("web", "shop", True, None)
    assert {"agent", "envoy", "app"} <= web["pids"].keys()
    assert [status(web["pids"][who])["Name"] for who in ("agent", "envoy", "app")] == ["agent", "envoy", "app"]
    assert (plain["ready"], plain["pids"]["agent"], plain["pids"]["envoy"]) == (True, None, None)
    assert status(plain["pids"]["app"])["Name"] == "sleep"
    assert info["external_hosts"][0]["ready"]
    assert info["iptables"] == small.backend in ("legacy", "nft")
    assert all(info["services"].values())
    assert info["events"] == []


def test_processes_are_who_they_should_be(small: lifecycle.Lab) -> None:
    web = small.inspect()["pods"][0]
    for who, uid in (("agent", 1337), ("envoy", 1337), ("app", 1000)):
        seen = status(web["pids"][who])
        assert seen["Uid"].split() == [str(uid)] * 4
        assert seen["Gid"].split() == [str(uid)] * 4
        assert seen["Groups"] == ""
        assert {seen[f"Cap{kind}"].strip("0") for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {""}
        assert seen["NoNewPrivs"] == "1"
        mounts = Path(f"/proc/{web['pids'][who]}/mountinfo").read_text().splitlines()
        (root,) = [line for line in mounts if line.split()[4] == "/"]
        assert "ro" in root.split()[5].split(",")


def test_nothing_of_the_supervisor_is_open_in_a_pod(small: lifecycle.Lab) -> None:
    """No netlink, no sockets of other network namespaces, nothing that the supervisor has open."""
    info = small.inspect()
    web = info["pods"][0]
    ours = sockets(info["pid"]) | sockets(info["services"]["observer"]) | sockets(info["services"]["discovery"])
    assert ours
    for who in ("init", "agent", "envoy", "app"):
        pid = web["pids"][who]
        theirs = sockets(pid)
        assert not theirs & ours
        # /proc/PID/net lists the sockets of the pod's own namespace (and Unix ones, whose pairs belong to none).
        tables = ("tcp", "tcp6", "udp", "udp6", "unix", "netlink")
        known = {
            w for t in tables for line in Path(f"/proc/{pid}/net/{t}").read_text().splitlines() for w in line.split()
        }
        strange = {s for s in theirs if s not in known}
        assert len(strange) <= (1 if who == "init" else 0), "process 1 has its control channel"
        netlink = {line.split()[-1] for line in Path(f"/proc/{pid}/net/netlink").read_text().splitlines()[1:]}
        assert not theirs & netlink


def sockets(pid: int) -> set[str]:
    """Inode numbers of the sockets that a process has open."""
    links = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            links.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except OSError:
            continue
    return {link[8:-1] for link in links if link.startswith("socket:[")}


def test_every_process_carries_the_mark(small: lifecycle.Lab) -> None:
    info = small.inspect()
    lab_id = record.info(small.name).id
    pids = {pid for pod in info["pods"] for pid in pod["pids"].values() if pid} | set(info["services"].values())
    assert pids <= set(marked(lab_id))


def lab_command(*arguments: str, front: Sequence[str] = (), **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*front, sys.executable, "-m", "lab", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        **options,  # type: ignore[call-overload]
    )


@pytest.mark.parametrize(
    ("user", "said"),
    [("app", "1000 0000000000000000"), ("proxy", "1337 0000000000000000"), ("4711", "4711 0000000000000000")],
)
def test_exec_has_the_identity_that_was_asked_for(small: lifecycle.Lab, user: str, said: str) -> None:
    script = "echo $(id -u) $(grep CapEff /proc/self/status | cut -f2); hostname; exit 9"
    done = lab_command("exec", "web.shop", "--lab", small.name, "--as", user, "--", "sh", "-c", script)
    assert (done.returncode, done.stdout, done.stderr) == (9, f"{said}\nweb\n", "")


def test_exec_as_root_may_look_at_rules(small: lifecycle.Lab) -> None:
    tool = "iptables-legacy-save" if small.backend == "legacy" else "iptables-nft-save"
    done = lab_command("exec", "shop/web", "--lab", small.name, "--as", "root", "--", tool, "-t", "nat")
    assert done.returncode == 0, done.stderr
    assert "-A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001" in done.stdout


def test_exec_in_a_pod_that_is_not_there(small: lifecycle.Lab) -> None:
    done = lab_command("exec", "none.shop", "--lab", small.name, "--", "true")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f'error: there is no "none.shop" in lab {small.name}: it has ')


def test_second_lab_of_that_name_is_refused_and_the_first_lives_on(small: lifecycle.Lab, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f'lab "{small.name}" is already running'):
        lifecycle.Lab.up(load([manifests(tmp_path, MESH)]), small.name)
    assert all(pod["ready"] for pod in small.inspect()["pods"])


def test_stored_mesh_is_that_of_the_manifests(small: lifecycle.Lab) -> None:
    assert [pod.name for pod in lifecycle.stored_mesh(small.name).pods] == ["web.shop", "plain.shop"]


def test_unknown_request_and_unknown_process_are_errors(small: lifecycle.Lab) -> None:
    with pytest.raises(InputError, match="unknown request 'dance'"):
        lifecycle.ask(small.name, {"op": "dance"})
    with pytest.raises(InputError, match=r"no process none in web\.shop"):
        lifecycle.restart(small.name, "web.shop", "none")


def test_discovery_status_is_passed_through(small: lifecycle.Lab) -> None:
    proxies = lifecycle.discovery_status(small.name)["proxies"]
    assert [node.split("~")[2] for node in proxies] == ["web.shop"]


def test_down_leaves_nothing(name: str, tmp_path: Path) -> None:
    file = manifests(tmp_path, MESH, OUTSIDE)
    lab = lifecycle.Lab.up(load([file]), name)
    lab_id = record.info(name).id
    assert marked(lab_id)
    supervisor = lab.info["pid"]
    lab.down()
    assert marked(lab_id) == []
    assert not paths.run_dir(name).exists()
    assert name not in Path("/proc/self/mountinfo").read_text()
    assert not Path(f"/proc/{supervisor}").exists()
    lab.down()


def test_killed_supervisor_leaves_the_pods_until_down(name: str, tmp_path: Path) -> None:
    lab = lifecycle.Lab.up(load([manifests(tmp_path, MESH)]), name)
    lab_id, web = record.info(name).id, lab.info["pods"][0]
    os.kill(lab.info["pid"], signal.SIGKILL)
    with pytest.raises(LabError, match=f'the process of lab "{name}" died.*Take it down with lab down {name}'):
        lab.wait()
    assert set(web["pids"].values()) <= set(marked(lab_id))
    with pytest.raises(InputError, match=f'lab "{name}" has crashed'):
        lab.inspect()
    assert lab_command("exec", "web.shop", "--lab", name, "--", "true").returncode == 2, "commands want a living lab"
    assert lab_command("down", name).returncode == 0
    assert marked(lab_id) == []
    assert not paths.run_dir(name).exists()


def test_lab_ends_with_the_one_who_started_it(name: str, tmp_path: Path) -> None:
    """Even when that one is killed: the leash."""
    file = manifests(tmp_path, MESH)
    up = subprocess.Popen(
        [sys.executable, "-m", "lab", "up", file, "--name", name, "--json"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert up.stdout is not None
    info = json.loads("".join(iter(up.stdout.readline, "}\n")) + "}")
    fd = os.pidfd_open(info["pid"])
    up.kill()
    up.wait()
    up.stdout.close()
    assert ended(fd, 10)
    assert not paths.run_dir(name).exists()


def ended(pidfd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    try:
        return bool(poll.poll(seconds * 1000))
    finally:
        os.close(pidfd)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_attached_lab_goes_down_on_a_signal(name: str, tmp_path: Path, number: signal.Signals) -> None:
    file = manifests(tmp_path, PLAIN % "[sleep, '1000']")
    up = subprocess.Popen(
        [sys.executable, "-m", "lab", "up", file, "--name", name, "--json"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert up.stdout is not None
    json.loads("".join(iter(up.stdout.readline, "}\n")) + "}")
    up.send_signal(number)
    assert up.wait(10) == 0
    up.stdout.close()
    assert not paths.run_dir(name).exists()


def test_attached_lab_ends_when_it_is_taken_down_elsewhere(name: str, tmp_path: Path) -> None:
    with lifecycle.running(load([manifests(tmp_path, PLAIN % "[sleep, '1000']")]), name) as lab:
        assert lab_command("down", name).returncode == 0
        lab.wait()
    assert not paths.run_dir(name).exists()


def test_detached_lab_outlives_the_command(name: str, tmp_path: Path) -> None:
    done = lab_command("up", manifests(tmp_path, PLAIN % "[sleep, '1000']"), "-d", "--name", name, "--json")
    assert done.returncode == 0, done.stderr
    info = json.loads(done.stdout)
    assert lifecycle.inspect(name)["pid"] == info["pid"]
    assert status(info["pid"])["PPid"] != str(os.getpid())
    assert lab_command("down", name).returncode == 0
    assert not paths.run_dir(name).exists()


@pytest.fixture
def fifo(name: str) -> Iterator[Path]:
    """A pipe with a name that pods see: /tmp is hidden from them."""
    directory = Path("/var", name)
    directory.mkdir()
    os.mkfifo(directory / "pipe")
    (directory / "pipe").chmod(0o666)
    yield directory / "pipe"
    shutil.rmtree(directory)


@contextmanager
def leased(file: Path) -> Iterator[Callable[[], None]]:
    """A file that others wait for when they open it (fcntl(2), leases); gives what waits until somebody does."""
    ours, theirs = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = signal.signal(signal.SIGIO, lambda *_: None), signal.set_wakeup_fd(theirs)

    def wanted() -> None:
        assert select.select([ours], [], [], 30)[0], "nobody opens the file"

    try:
        with file.open("r+") as held:
            fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            yield wanted
    finally:
        signal.set_wakeup_fd(before[1])
        signal.signal(signal.SIGIO, before[0])
        os.close(ours)
        os.close(theirs)


def test_interrupt_while_manifests_are_read_leaves_nothing(name: str, tmp_path: Path) -> None:
    """The lab's processes have been started by then."""
    file = manifests(tmp_path, PLAIN % "[sleep, '1000']")
    with leased(Path(file)) as wanted:
        up = subprocess.Popen([sys.executable, "-m", "lab", "up", file, "--name", name], cwd=ROOT)
        wanted()
        (supervisor,) = map(int, Path(f"/proc/{up.pid}/task/{up.pid}/children").read_text().split())
        pidfd = os.pidfd_open(supervisor)
        up.send_signal(signal.SIGINT)
        assert up.wait(10) == 130
        assert ended(pidfd, 0), "the command waits for the end of what it started"
    assert not paths.run_dir(name).exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_interrupt_in_the_middle_of_an_up_leaves_nothing(
    name: str, tmp_path: Path, fifo: Path, number: signal.Signals
) -> None:
    signalling = PLAIN % f"[sh, -c, 'echo here > {fifo}; exec sleep 1000']"
    up = subprocess.Popen(
        [sys.executable, "-m", "lab", "up", manifests(tmp_path, LOST, signalling), "-d", "--name", name],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert up.stderr is not None
    assert fifo.read_text() == "here\n"  # one pod runs, the other waits for its control plane
    lab_id, supervisor = record.info(name).id, record.info(name).pid
    assert len(marked(lab_id)) > 5
    pidfd = os.pidfd_open(supervisor)
    up.send_signal(number)
    assert up.wait(10) == (-9 if number == signal.SIGKILL else 130)
    assert ended(pidfd, 10)
    assert (up.stderr.read().strip(), up.stderr.close()) == ("", None)
    assert marked(lab_id) == []
    assert not paths.run_dir(name).exists()


def test_pod_that_never_becomes_ready_is_named(name: str, tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(InputError) as error:
        lifecycle.Lab.up(load([manifests(tmp_path, LOST)]), name, timeout=4.0)
    assert time.monotonic() - started < 15
    assert str(error.value).startswith("pod web.shop did not become ready: after 4 s it waits for agent and app; ")
    assert "192.0.2.1:15010" in str(error.value), "the agent's own reason"
    assert not paths.run_dir(name).exists()


def test_failed_up_is_one_line_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    """Attached, where the supervisor could say more on the same terminal."""
    done = lab_command("up", manifests(tmp_path, LOST, OUTSIDE), "--name", name, "--timeout", "3")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: pod web.shop did not become ready: ")
    assert done.stderr.endswith(" Correct the manifests, or give it longer with --timeout.\n")
    assert done.stderr.count("\n") == 1
    assert not paths.run_dir(name).exists()


def test_pod_whose_init_fails_is_named(name: str, tmp_path: Path) -> None:
    odd = MESH.replace("proxyMetadata: {", 'proxyMetadata: {CAPTURE_ALL_DNS: "maybe", ')
    with pytest.raises(
        InputError,
        match=r"pod web\.shop did not become ready: init: it ended with 1: .*'maybe' is not.* Correct the manifests",
    ):
        lifecycle.Lab.up(load([manifests(tmp_path, odd)]), name)
    assert not paths.run_dir(name).exists()


def test_configuration_that_envoy_rejects_is_told_in_its_words(name: str, tmp_path: Path) -> None:
    bad = MESH.replace(
        "    enableAutoMtls: false",
        "    enableAutoMtls: false\n    accessLogFile: /dev/stdout\n    accessLogFormat: '%NO_SUCH_COMMAND%'",
    )
    said = r"pod web\.shop did not become ready: .*rejected LDS: .*NO_SUCH_COMMAND.*lab proxy-config web\.shop -f FILE"
    with pytest.raises(InputError, match=said):
        lifecycle.Lab.up(load([manifests(tmp_path, bad)]), name, timeout=600.0)  # it need not be waited for
    assert not paths.run_dir(name).exists()


def test_end_of_a_process_is_seen_and_it_is_restarted_only_on_demand(name: str, tmp_path: Path) -> None:
    with lifecycle.running(load([manifests(tmp_path, MESH)]), name) as lab:
        app = lab.info["pods"][0]["pids"]["app"]
        pidfd = os.pidfd_open(app)
        os.kill(app, signal.SIGKILL)
        assert ended(pidfd, 5)
        # The same answer holds the event: process 1 reports before anybody can ask for what it has not reported.
        info = until(lab, lambda i: i["events"])
        (event,) = info["events"]
        assert (event["event"], event["place"], event["process"], event["code"]) == (
            "process-ended",
            "web.shop",
            "app",
            137,
        )
        web = info["pods"][0]
        assert (web["ready"], web["reason"], web["pids"]["app"]) == (False, "app has ended", None)
        log = files.log(name, "lab").read_text()
        assert log.count("process-ended place=web.shop process=app code=137 unexpected=True") == 1
        new = lifecycle.restart(name, "web.shop", "app")
        web = lab.inspect()["pods"][0]
        assert (web["ready"], web["pids"]["app"]) == (True, new)
        assert new != app


def until(lab: lifecycle.Lab, wanted: object) -> lifecycle.Info:
    """Asks until the answer is as wanted: the report of an end is on its way from process 1."""
    deadline = time.monotonic() + 5
    while True:
        info = lab.inspect()
        if wanted(info):  # type: ignore[operator]
            return info
        assert time.monotonic() < deadline


def test_labs_go_on_without_their_zygote(name: str, tmp_path: Path) -> None:
    with lifecycle.running(load([manifests(tmp_path, MESH)]), name) as lab:
        (zygote,) = [int(str(e["pid"])) for e in record.open(name).entries() if e.get("role") == "zygote"]
        os.kill(zygote, signal.SIGKILL)
        info = until(lab, lambda i: i["events"])
        assert [event["event"] for event in info["events"]] == ["zygote-ended"]
        assert info["pods"][0]["ready"]
    assert not paths.run_dir(name).exists()


def test_drain_lets_processes_end_by_themselves(name: str, tmp_path: Path) -> None:
    script = "trap 'echo drained; exit 0' TERM; while :; do sleep 0.01; done"
    text = MESH + PLAIN % f'[sh, -c, "{script}"]'
    with lifecycle.running(load([manifests(tmp_path, text)]), name) as lab:
        lifecycle.drain(name)
        assert lab.inspect()["events"][0]["unexpected"] is False
        pods = lab.inspect()["pods"]
        assert {pid for pod in pods for who, pid in pod["pids"].items() if who != "init"} == {None}
        assert files.app_log(name, "plain.shop").read_text() == "drained\n"
        assert "drain" in files.agent_log(name, "web.shop").read_text().lower()
    assert not paths.run_dir(name).exists()


def test_labs_side_by_side_do_not_touch_each_other(name: str, tmp_path: Path, small: lifecycle.Lab) -> None:
    """The same addresses, twice."""
    with lifecycle.running(load([manifests(tmp_path, MESH)]), name) as lab:
        assert lab.info["pods"][0]["ip"] == small.info["pods"][0]["ip"]
    assert all(pod["ready"] for pod in small.inspect()["pods"])


def test_without_root_there_is_one_line(as_user: Callable[[int], list[str]]) -> None:
    done = lab_command("up", str(ROOT / "topologies/quickstart.yaml"), front=as_user(1000))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert "root" in done.stderr
    assert done.stderr.count("\n") == 1


def test_mesh_without_files_is_refused() -> None:
    from lab.manifests.load import load_text

    with pytest.raises(InputError, match="a lab needs manifest files"):
        lifecycle.Lab.up(load_text(MESH), "slt-none")


def test_runs_from_a_checkout_and_a_venv_that_only_root_can_reach(name: str) -> None:
    """All code lies below a directory of mode 0700, as in a clone under /root; what the lab writes, pods can read."""
    base = Path("/root", name)
    base.mkdir(mode=0o700)
    try:
        checkout = base / "checkout"
        for part in ("lab", "agent", "init", "topologies"):
            shutil.copytree(ROOT / part, checkout / part, ignore=shutil.ignore_patterns("__pycache__"))
        python = private_venv(base / "venv")
        (checkout / "mesh.yaml").write_text(MESH)
        environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
        up = [python, "-m", "lab", "up", "mesh.yaml", "-d", "--name", name, "--json"]
        done = subprocess.run(up, cwd=checkout, env=environ, capture_output=True, text=True, timeout=60, umask=0o077)
        assert done.returncode == 0, done.stderr
        (web,) = json.loads(done.stdout)["pods"]
        script = "import agent, sys; print(agent.__file__, sys.prefix, __import__('lab.apps.web').__name__)"
        run = [
            python,
            "-m",
            "lab",
            "exec",
            "web.shop",
            "--lab",
            name,
            "--",
            "env",
            f"PYTHONPATH={checkout}",
            python,
            "-c",
            script,
        ]
        done = subprocess.run(run, cwd=checkout, env=environ, capture_output=True, text=True, timeout=60)
        assert done.stdout == f"{checkout}/agent/__init__.py {base}/venv lab\n", done.stderr
        envoy = os.readlink(f"/proc/{web['pids']['envoy']}/exe")
        assert os.path.basename(envoy) == "envoy"
        stop = [python, "-m", "lab", "down", name]
        assert subprocess.run(stop, cwd=checkout, env=environ, timeout=60).returncode == 0
        assert not paths.run_dir(name).exists()
    finally:
        shutil.rmtree(base)


def private_venv(where: Path) -> str:
    """A venv with our packages that lies where we say: Python by link, the packages by hard links (one is Envoy)."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--symlinks", str(where)], check=True)
    ours = next(Path(p) for p in sys.path if p.endswith("site-packages"))
    (theirs,) = where.glob("lib/python*/site-packages")
    theirs.rmdir()
    ignored = shutil.ignore_patterns(
        "__editable__*", "__pycache__", "scapy", "mypy", "mypyc", "ruff*", "docker", "hypothesis"
    )
    shutil.copytree(ours, theirs, copy_function=link_or_copy, ignore=ignored)
    return str(where / "bin/python")


def link_or_copy(source: str, target: str) -> object:
    try:
        return os.link(source, target)
    except OSError:  # another file system
        return shutil.copy2(source, target)

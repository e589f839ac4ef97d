"""Which back end is used, the lock, the validator's packet, the sandbox, and what each says when it fails."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from init_pod import BACKENDS, DEFAULT, HERE, POD, QUIET, Net, backends, listen, stand_in

pytestmark = pytest.mark.root


# --- choice ---------------------------------------------------------------------------------


def test_a_fresh_namespace_gets_nft_and_no_legacy_table(pods: Net) -> None:
    run = pods.pod.init(*DEFAULT, "--ipv6=on", "--json")
    assert run.document["backend"] == "nft"
    assert pods.pod.init(*DEFAULT, "--ipv6=on", "--json").document["action"] == "unchanged"
    for name in ("ip_tables_names", "ip6_tables_names"):
        assert pods.pod.tool("cat", f"/proc/net/{name}", check=False).strip() == "", (
            "trying legacy would create its table"
        )


def test_a_namespace_with_legacy_rules_gets_legacy(pods: Net) -> None:
    pods.pod.tool("iptables-legacy", "-A", "INPUT", "-p", "icmp", "-j", "ACCEPT")
    assert pods.pod.init(*DEFAULT, "--ipv6=off", "--json").document["backend"] == "legacy"
    assert pods.pod.init(*DEFAULT, "--ipv6=off", "--json").document["action"] == "unchanged"


def test_each_name_is_obeyed(pods: Net) -> None:
    for args, name in (
        (["--force-iptables-binary=legacy"], "legacy"),
        (["--force-iptables-binary=nft"], "nft"),
        (["--backend=legacy-restore"], "legacy-restore"),
        (["--native-nftables"], "native-nft"),
    ):
        assert pods.pod.init(*DEFAULT, "--ipv6=off", "--json", *args).document["backend"] == name


def broken(directory: Path, tool: str, says: str, code: int = 1) -> dict[str, str]:
    """A program that fails as the real one does where the kernel lacks something; gives the environment with it."""
    script = f"case $1 in --version) echo 'v1.8.9 (legacy)';; *) [ -t 0 ] || cat >/dev/null; echo '{says}' >&2; exit {code};; esac"
    return stand_in(directory, tool, script)


def test_a_kernel_without_nf_tables_is_named_and_plain_iptables_is_tried(pods: Net, tmp_path: Path) -> None:
    says = "iptables: Failed to initialize nft: Protocol not supported"
    env = broken(tmp_path, "iptables-nft-restore", says)
    run = pods.pod.init(*DEFAULT, "--ipv6=off", "--json", env=env)
    # Plain iptables is legacy or nft, as the machine has it.
    assert (run.code, run.document["action"]) == (0, "applied")
    broken(tmp_path, "iptables-restore", "iptables-restore: can not initialize iptables table nat")
    run = pods.pod.init("--ipv6=off", QUIET, env=env)
    if run.code:
        assert says in run.err
        assert "no usable iptables for ipv4" in run.err
        assert run.err.count("\n") == 1


def test_no_program_is_one_line(pods: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from init import tools

    monkeypatch.setattr(tools, "_SBIN", ())
    for args, says in (
        ([], "iptables-nft-save is not installed"),
        (["--native-nftables"], "the nft binary is missing"),
    ):
        run = pods.pod.init("--ipv6=off", QUIET, *args, env={"PATH": str(tmp_path)})
        assert run.code == 1
        assert says in run.err
        assert run.err.count("\n") == 1


def test_missing_ip6tables_matters_only_with_ipv6(pods: Net, tmp_path: Path) -> None:
    for tool in ("ip6tables-nft-restore", "ip6tables-restore", "ip6tables-legacy-restore"):
        env = broken(tmp_path, tool, "ip6tables: no kernel support")
    assert pods.pod.init("--ipv6=off", env=env).code == 0
    assert pods.pod.init("--ipv6=off", "--cleanup-only").code == 0
    run = pods.pod.init("--ipv6=on", QUIET, env=env)
    assert run.code == 1
    assert "no kernel support" in run.err


def test_without_root_there_is_one_clear_line(pods: Net, as_user: Callable[[int], list[str]]) -> None:
    for backend in BACKENDS:
        done = pods.pod.program("--ipv6=off", f"--backend={backend}", prefix=as_user(1000))
        assert done.returncode == 1, backend
        assert done.stderr.count("\n") == 1, done.stderr
        assert "Run as root" in done.stderr or "Permission denied" in done.stderr, done.stderr
        assert "Traceback" not in done.stderr


# --- lock -----------------------------------------------------------------------------------


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """The lock held by another process; gives its pid."""
    reader, writer = os.pipe()
    stop_reader, stop_writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        descriptor = os.open(path, os.O_RDONLY | os.O_CREAT, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(writer, b"r")
        os.read(stop_reader, 1)
        os._exit(0)
    os.read(reader, 1)
    try:
        yield pid
    finally:
        os.write(stop_writer, b"x")
        os.waitpid(pid, 0)
        for descriptor in (reader, writer, stop_reader, stop_writer):
            os.close(descriptor)


@pytest.mark.parametrize("backend", ["legacy", "legacy-restore", "auto"])
def test_a_held_lock_names_its_holder(backend: str, pods: Net, tmp_path: Path) -> None:
    if backend == "auto":
        pods.pod.tool("iptables-legacy", "-A", "INPUT", "-p", "icmp", "-j", "ACCEPT")
    path = tmp_path / "xtables.lock"
    env = {"XTABLES_LOCKFILE": str(path)}
    with locked(path) as pid:
        run = pods.pod.init(*DEFAULT, "--ipv6=off", f"--backend={backend}", "--lock-wait=1s", QUIET, env=env)
        assert run.code == 1
        assert f"cannot get the xtables lock {path} in 1s: held by pid {pid}" in run.err
        assert "kernel support" not in run.err
        assert "no usable" not in run.err
    assert pods.pod.init(*DEFAULT, "--ipv6=off", f"--backend={backend}", env=env).code == 0


@pytest.mark.parametrize("backend", ["nft", "native-nft"])
def test_nft_needs_no_lock(backend: str, pods: Net, tmp_path: Path) -> None:
    path = tmp_path / "xtables.lock"
    with locked(path):
        run = pods.pod.init(*DEFAULT, "--ipv6=off", f"--backend={backend}", env={"XTABLES_LOCKFILE": str(path)})
        assert run.code == 0, run.err


@pytest.mark.parametrize("backend", ["legacy", "legacy-restore"])
def test_a_lock_that_is_let_go_is_waited_for(backend: str, pods: Net, tmp_path: Path) -> None:
    path = tmp_path / "xtables.lock"
    holder = subprocess.Popen(["flock", str(path), "sh", "-c", "echo r; exec sleep 0.5"], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    run = pods.pod.init(*DEFAULT, "--ipv6=off", f"--backend={backend}", env={"XTABLES_LOCKFILE": str(path)})
    assert holder.wait() == 0
    holder.stdout.close()
    assert run.code == 0, run.err


# --- validation -----------------------------------------------------------------------------


@backends
@pytest.mark.parametrize("ipv6", ["off", "on"])
@pytest.mark.parametrize("mode", ["REDIRECT", "TPROXY"])
def test_a_packet_proves_the_rules(backend: str, ipv6: str, mode: str, pods: Net) -> None:
    run = pods.pod.init(*DEFAULT, "-m", mode, f"--ipv6={ipv6}", f"--backend={backend}", "--run-validation", "--json")
    assert run.code == 0, run.err
    assert run.document["validated"] is True


def validate(pods: Net, *args: str, uid: int = 1337, path: str = "") -> tuple[int, str]:
    words = ["--skip-rule-apply", "--run-validation", "--probe-timeout=200ms", "--ipv6=off", "-u", "1337", *args]
    code, _, err = pods.pod.call(lambda: HERE.init(*words, env={"PATH": path}), uid=uid)
    return code, err


def test_the_validation_container_runs_as_the_proxy(pods: Net) -> None:
    assert pods.pod.init(*DEFAULT, "--ipv6=off", "--backend=nft").code == 0
    code, text = validate(pods)
    assert code == 0
    assert "validation passed" in text


def test_rules_that_are_right_are_not_blamed_where_lo_is_down(pods: Net) -> None:
    assert pods.pod.init(*DEFAULT, "--ipv6=off", "--backend=nft").code == 0
    pods.pod.tool("ip", "link", "set", "lo", "down")
    code, text = validate(pods, uid=0)
    assert code == 126
    assert "Cause: interface lo is down" in text


def test_ipv6_only_pods_are_validated_over_ipv6(pods: Net) -> None:
    pods.pod.tool("ip", "addr", "del", f"{POD[4]}/24", "dev", "eth0")
    run = pods.pod.init(*DEFAULT, "--backend=nft", "--run-validation")
    assert run.code == 0, run.err
    assert "IPV6=true" in run.err
    assert f"HOST_IP={POD[6]}" in run.err


@pytest.mark.parametrize(
    ("prepare", "args", "uid", "cause"),
    [
        ("", [], 0, "Cause: no rule: no back end holds rules of ours for ipv4"),
        ("", [], 1337, "was refused, so no rule redirected it"),
        ("nft", ["--backend=legacy"], 0, "Cause: wrong back end: the rules are in nft, legacy was asked for"),
        ("legacy", ["--native-nftables"], 0, "Cause: wrong back end: the rules are in legacy, native-nft was asked for"),
        ("nft", ["-u", "1338"], 0, "did not match the packet"),
        ("nft", [], 1000, "this process is user 1000 and may not open a socket as the proxy's user 1337"),
    ],
)  # fmt: skip
def test_a_failed_validation_names_its_cause(prepare: str, args: list[str], uid: int, cause: str, pods: Net) -> None:
    if prepare:
        assert pods.pod.init(*DEFAULT, "--ipv6=off", f"--backend={prepare}").code == 0
    if "wrong back end" in cause:
        # Rules that work are as good as any, whoever wrote them: these do not.
        pods.pod.tool(f"iptables-{prepare}", "-t", "nat", "-D", "OUTPUT", "-j", "ISTIO_OUTPUT")
    code, text = validate(pods, *args, uid=uid)
    assert code == 126
    assert cause in text
    assert "workload is not ready for Istio" in text


def test_a_missing_module_is_the_cause(pods: Net, tmp_path: Path) -> None:
    broken(tmp_path, "iptables-nft-restore", "iptables: Failed to initialize nft: Protocol not supported")
    code, text = validate(pods, "--backend=nft", uid=0, path=str(tmp_path))
    assert code == 126
    assert "Cause: missing module: iptables-nft has no kernel support" in text
    assert "Protocol not supported" in text


def test_a_proxy_that_listens_already_does_not_disturb(pods: Net) -> None:
    """Envoy on the same ports without SO_REUSEPORT: nobody of ours can listen, and that is said."""
    assert pods.pod.init(*DEFAULT, "--ipv6=off", "--backend=nft").code == 0
    pods.pod.serve(listen(15001), listen(15006), uid=1337)
    code, text = validate(pods)
    assert code == 126
    assert "nobody listens" in text


def test_stray_connections_are_no_proof(pods: Net) -> None:
    """Something else in the pod is redirected to the listener: only our token counts."""
    document = "*nat\n-A OUTPUT -p tcp --dport 15002 -m owner --uid-owner 1000 -j REDIRECT --to-ports 15006\nCOMMIT\n"
    pods.pod.tool("iptables-nft-restore", "--noflush", text=document)

    def knock() -> None:
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.6", 15002), 1) as sock:
                sock.sendall(b"x" * 16)
                if sock.recv(16) == b"15002":
                    return

    pid, reader = pods.pod.fork(lambda _: knock(), uid=1000)
    code, text = validate(pods)
    os.close(reader)
    _, status = os.waitpid(pid, 0)
    assert status == 0, "the stray connection was redirected and answered"
    assert code == 126
    assert "without root" in text


# --- sandbox --------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["legacy", "nft", "native-nft"])
def test_cni_mode_applies_the_same_rules(backend: str, pods: Net) -> None:
    netns = f"/run/netns/{pods.pod.name}"
    args = [*DEFAULT, "--ipv6=on", f"--backend={backend}", "--json"]
    run = pods.pod.init(*args, "--cni-mode", f"--network-namespace={netns}")
    assert run.code == 0, run.err
    assert "running without it" not in run.err
    assert pods.pod.init(*args).document["action"] == "unchanged"


def test_cni_mode_locks_the_namespace_file_not_the_node(pods: Net, tmp_path: Path) -> None:
    path = tmp_path / "xtables.lock"
    netns = f"/run/netns/{pods.pod.name}"
    args = [
        *DEFAULT,
        "--ipv6=off",
        "--backend=legacy",
        "--cni-mode",
        f"--network-namespace={netns}",
        "--lock-wait=1s",
        QUIET,
    ]
    with locked(path):
        assert pods.pod.init(*args, env={"XTABLES_LOCKFILE": str(path)}).code == 0
    with locked(Path(netns)) as pid:
        run = pods.pod.init(*args, "--force-apply")
        assert run.code == 1
        assert f"{netns} in 1s: held by pid {pid}" in run.err


def test_the_sandbox_hides_name_services_and_the_host_keeps_its_mounts(pods: Net) -> None:
    from init.log import Log
    from init.tools import Tools

    tools = Tools(Log(), sandbox=True, environ=dict(os.environ))
    assert tools.run(["cat", "/etc/nsswitch.conf"]).out == ""
    assert "nsswitch.conf" not in Path("/proc/self/mounts").read_text()
    assert Path("/etc/nsswitch.conf").read_text() != ""


def test_a_sandbox_that_cannot_be_built_is_a_warning(pods: Net) -> None:
    from init.log import Log
    from init.tools import Tools

    def work() -> list[object]:
        log = Log(level=0)
        out = Tools(log, sandbox=True, environ=dict(os.environ)).run(["echo", "ran"])
        return [out.code, out.out, log.warnings]

    code, out, warnings = pods.pod.call(work, uid=1000)
    assert (code, out) == (0, "ran\n")
    assert "running without it: unshare" in warnings[0]


# --- start ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "ipv6", "absent"),
    [
        ("nft", "off", {"iptc", "pyroute2", "subprocess", "dataclasses"}),
        ("native-nft", "off", {"iptc", "pyroute2", "subprocess", "dataclasses"}),
        ("legacy-restore", "off", {"iptc", "pyroute2", "subprocess"}),
        ("legacy", "off", {"pyroute2", "distutils", "setuptools"}),
    ],
)
def test_nothing_heavy_is_imported_where_it_is_not_needed(backend: str, ipv6: str, absent: set[str], pods: Net) -> None:
    code = (
        "import sys; from init.cli import main; code = main(sys.argv[1:]); "
        "print(code, *sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    done = pods.pod.program(*DEFAULT, f"--ipv6={ipv6}", f"--backend={backend}", words=("-c", code))
    exit_code, *modules = done.stdout.split()
    assert exit_code == "0", done.stderr
    assert not absent & set(modules)

"""What a run meets in a pod that is not as it should be: killed runs, mixed back ends, foreign chains, missing rights."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from init_pod import (
    DEFAULT,
    HERE,
    PEER,
    QUIET,
    ROOT,
    Net,
    Run,
    ask,
    backends,
    listen,
    stand_in,
    tool_of,
    xtables_backends,
)

from init import detect, edits, libiptc, program, rules, xtables
from init.config import Config
from init.errors import InitError
from init.log import Log
from init.tools import Tools

pytestmark = pytest.mark.root

# --- killed in the middle -------------------------------------------------------------------


def killed_after(pods: Net, changes: int, *args: str, by: signal.Signals = signal.SIGKILL) -> None:
    """A run that gets a signal right after that many documents were applied, guards included, and ends by it."""

    def body(_: int) -> None:
        done = 0

        def counting(real: Callable[..., None]) -> Callable[..., None]:
            def change(self: xtables.Restore, wanted: xtables.Changes) -> None:
                nonlocal done
                real(self, wanted)
                done += 1
                if done == changes:
                    os.kill(os.getpid(), by)

            return change

        if by != signal.SIGKILL:
            signal.signal(by, signal.SIG_DFL)  # under nohup it would be ignored
        for kind in (xtables.Restore, libiptc.LibIPTC):
            kind.change = counting(kind.change)  # type: ignore[method-assign]
        HERE.init(*args)

    pid, reader = pods.pod.fork(body)
    os.close(reader)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == -by


@xtables_backends
@pytest.mark.parametrize("changes", [1, 2])
def test_after_a_kill_in_the_middle_nothing_passes_and_the_next_run_mends(
    backend: str, changes: int, pods: Net
) -> None:
    """1: the guards stand, the rules are still the old ones. 2: the rules are right already, only the guards are left."""
    args = [*DEFAULT, "--ipv6=off", f"--backend={backend}", "--json"]
    assert pods.pod.init(*args).code == 0
    pods.pod.serve(listen(15001), uid=1337)
    pods.pod.tool(tool_of(backend), "-t", "nat", "-F", "ISTIO_OUTPUT")
    killed_after(pods, changes, *args, "--reconcile")
    assert pods.pod.tool(tool_of(backend), "-S", "OUTPUT").splitlines()[1:] == [
        "-A OUTPUT -p udp -j DROP",
        "-A OUTPUT -p tcp -j DROP",
    ]
    seen = pods.pod.init(*args)
    assert seen.code == 1, "the guards are left: nothing of this pod works"
    assert "ipv4 filter OUTPUT unexpected" in seen.err
    run = pods.pod.init(*args, "--reconcile")
    assert (run.code, run.document["action"]) == (0, "reconciled")
    assert pods.pod.tool(tool_of(backend), "-S").splitlines() == [
        f"-P {chain} ACCEPT" for chain in ("INPUT", "FORWARD", "OUTPUT")
    ]
    assert pods.pod.call(ask(PEER[4], 80), uid=1000)["listener"] == 15001
    assert pods.pod.init(*args).document["action"] == "unchanged"


@xtables_backends
@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGHUP])
def test_a_polite_signal_waits_until_the_guards_are_gone(backend: str, by: signal.Signals, pods: Net) -> None:
    args = [*DEFAULT, "--ipv6=off", f"--backend={backend}", "--json"]
    assert pods.pod.init(*args).code == 0
    pods.pod.tool(tool_of(backend), "-t", "nat", "-F", "ISTIO_OUTPUT")
    killed_after(pods, 1, *args, "--reconcile", by=by)
    assert "DROP" not in pods.pod.tool(tool_of(backend), "-S")
    assert pods.pod.init(*args).document["action"] == "unchanged", "the rules were mended first"


@pytest.mark.parametrize(("fails", "other"), [("iptables", "ip6tables"), ("ip6tables", "iptables")])
def test_guards_that_cannot_be_removed_keep_no_others(fails: str, other: str, pods: Net, tmp_path: Path) -> None:
    script = f"""text=$(cat); case $text in *'-D INPUT'*) echo gone >&2; exit 4;; esac
        echo "$text" | exec /usr/sbin/{fails}-nft-restore "$@\""""
    env = stand_in(tmp_path, f"{fails}-nft-restore", script)
    args = [*DEFAULT, "--ipv6=on", "--backend=nft"]
    assert pods.pod.init(*args).code == 0
    run = pods.pod.init(*args, "--force-apply", QUIET, env=env)
    assert run.code == 1
    assert f"{fails}-nft-restore refused" in run.err
    assert "-A OUTPUT -p tcp -j DROP" in pods.pod.tool(f"{fails}-nft", "-S"), "nothing leaks"
    assert "DROP" not in pods.pod.tool(f"{other}-nft", "-S")
    assert pods.pod.init(*args, "--reconcile").code == 0
    assert "DROP" not in pods.pod.tool(f"{fails}-nft", "-S")


@xtables_backends
@pytest.mark.parametrize("named", [True, False])
def test_cleanup_takes_the_guards_of_a_killed_run(backend: str, named: bool, pods: Net) -> None:
    args = [*DEFAULT, "--ipv6=on", f"--backend={backend}"]
    assert pods.pod.init(*args).code == 0
    pods.pod.tool(tool_of(backend), "-A", "INPUT", "-s", "192.0.2.1/32", "-j", "DROP")
    before = pods.pod.tool(tool_of(backend), "-S")
    pods.pod.tool(tool_of(backend), "-t", "nat", "-F", "ISTIO_OUTPUT")
    killed_after(pods, 1, *args, "--reconcile")
    assert pods.pod.init(*(args if named else DEFAULT), "--cleanup-only").code == 0
    assert pods.pod.tool(tool_of(backend), "-S") == before


@xtables_backends
def test_guards_are_no_obstacle_to_a_first_run(backend: str, pods: Net) -> None:
    text = edits.document([edits.guard(xtables.state.Dump())])
    pods.pod.tool(f"{tool_of(backend)}-restore", "--noflush", text=text)
    assert pods.pod.init(*DEFAULT, "--ipv6=off", f"--backend={backend}").code == 0
    assert "DROP" not in pods.pod.tool(tool_of(backend), "-S")


@xtables_backends
def test_a_table_is_not_applied_if_the_next_one_is_refused(backend: str, pods: Net) -> None:
    """Two tables, one family: mangle would be committed before the tool reads the bad port in nat."""
    run = pods.pod.init("--ipv6=off", "-m", "TPROXY", "-q", "no-such-port", QUIET, f"--backend={backend}")
    assert run.code == 1
    assert "no-such-port" in run.err
    assert "-A" not in pods.pod.tool(f"{tool_of(backend)}-save")


# --- others who change rules ----------------------------------------------------------------


@xtables_backends
@pytest.mark.parametrize("times", [1, 100])
@pytest.mark.parametrize("their", ["-d 192.0.2.1/32 -p tcp -j ACCEPT", "-j ISTIO_OUTPUT"])
def test_a_foreign_change_between_look_and_change_is_looked_at_again(
    backend: str, their: str, times: int, pods: Net
) -> None:
    """It moves our rules, or doubles one. Once: they are mended all the same. At each try: the run gives up."""
    args = [*DEFAULT, "--ipv6=off", f"--backend={backend}", "--json"]
    assert pods.pod.init(*args).code == 0
    pods.pod.tool(tool_of(backend), "-t", "nat", "-I", "OUTPUT", *their.split())
    pods.pod.tool(tool_of(backend), "-t", "nat", "-D", "ISTIO_OUTPUT", "1")

    def work() -> Run:
        done = 0

        def meddled(real: Callable[..., None]) -> Callable[..., None]:
            def change(self: xtables.Restore, wanted: xtables.Changes) -> None:
                nonlocal done
                done += 1
                # The first change are the guards.
                if 1 < done <= 1 + times and any(edit.new for made in wanted.values() for edit in made):
                    HERE.tool(tool_of(backend), "-t", "nat", "-D", "OUTPUT", *their.split(), check=False)
                real(self, wanted)
                if 1 < done <= 1 + times and any(edit.new for made in wanted.values() for edit in made):
                    HERE.tool(tool_of(backend), "-t", "nat", "-I", "OUTPUT", "1", "-j", "ISTIO_OUTPUT")

            return change

        for kind in (xtables.Restore, libiptc.LibIPTC):
            kind.change = meddled(kind.change)  # type: ignore[method-assign]
        return HERE.init(*args, "--reconcile")

    run = Run(*pods.pod.call(work))
    assert "DROP" not in pods.pod.tool(tool_of(backend), "-S")
    assert "somebody else changes rules" in run.err
    if times == 1:
        assert (run.code, run.document["action"]) == (0, "reconciled"), run.err
        assert pods.pod.init(*args).document["action"] == "unchanged"
    else:
        assert run.code == 1
        assert run.err.count("trying again") == program.TRIES - 1
        assert "Run it again" in run.err.splitlines()[-1]


# --- mixed back ends ------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "names"), [("ipv4", "legacy-restore,nft"), ("ipv6", "nft,legacy-restore")])
def test_each_family_keeps_its_back_end(family: str, names: str, pods: Net) -> None:
    """One family has legacy rules already, the other has none: each is detected, read and mended by itself."""
    pods.pod.tool(tool_of("legacy", family), "-A", "INPUT", "-p", "tcp", "--dport", "9", "-j", "DROP")
    args = [*DEFAULT, "--ipv6=on", "--json"]
    run = pods.pod.init(*args)
    assert (run.code, run.document["action"], run.document["backend"]) == (0, "applied", names)
    saved = pods.pod.save()
    holding = {name for name, text in saved.items() if "ISTIO_OUTPUT" in text}
    kinds = dict(zip(("ipv4", "ipv6"), names.replace("-restore", "").split(","), strict=True))
    assert holding == {f"{tool_of(kind, version)}-save" for version, kind in kinds.items()}
    again = pods.pod.init(*args)
    assert (again.code, again.document["action"], again.document["warnings"]) == (0, "unchanged", [])
    for version, kind in kinds.items():
        pods.pod.tool(tool_of(kind, version), "-t", "nat", "-D", "OUTPUT", "-j", "ISTIO_OUTPUT")
    mended = pods.pod.init(*args, "--reconcile")
    assert {drift["family"] for drift in mended.document["drift"]} == {"ipv4", "ipv6"}
    assert pods.pod.init(*args, "--run-validation").code == 0
    assert pods.pod.init(*args, "--cleanup-only").code == 0
    assert "ISTIO" not in "".join(pods.pod.save().values())


# --- foreign chains -------------------------------------------------------------------------


@xtables_backends
def test_a_foreign_chain_that_decides_in_front_is_drift(backend: str, pods: Net) -> None:
    args = [*DEFAULT, "--ipv6=off", f"--backend={backend}", "--json"]
    assert pods.pod.init(*args).code == 0
    for words in (
        ["-N", "THEIRS"],
        ["-A", "THEIRS", "-p", "tcp", "-j", "ACCEPT"],
        ["-I", "OUTPUT", "1", "-j", "THEIRS"],
    ):
        pods.pod.tool(tool_of(backend), "-t", "nat", *words)
    pods.pod.serve(listen(15001), uid=1337)
    pods.peer.serve(listen(80), uid=0)
    assert pods.pod.call(ask(PEER[4], 80), uid=1000)["listener"] == 80, "the foreign chain leaks"
    seen = pods.pod.init(*args)
    assert seen.code == 1
    assert "ipv4 nat OUTPUT in-front" in seen.err
    assert pods.pod.init(*args, "--reconcile").code == 0
    assert pods.pod.call(ask(PEER[4], 80), uid=1000)["listener"] == 15001
    assert pods.pod.init(*args).document["action"] == "unchanged"
    assert "-A THEIRS -p tcp -j ACCEPT" in pods.pod.tool(tool_of(backend), "-t", "nat", "-S")


@xtables_backends
def test_what_is_no_drift_but_decides_is_warned_of_at_every_run(backend: str, pods: Net) -> None:
    """A rule that was there before us; in legacy tables also one that names an address, as nobody knows its age."""
    args = [*DEFAULT, "--ipv6=off", f"--backend={backend}", "--json"]
    theirs = ["-d", "192.0.2.1/32", "-p", "tcp", "-j", "ACCEPT"]
    pods.pod.tool(tool_of(backend), "-t", "nat", "-A", "OUTPUT", *theirs)
    pods.pod.tool(tool_of(backend), "-t", "nat", "-A", "PREROUTING", "-p", "icmp", "-j", "LOG")
    for action in ("applied", "unchanged"):
        run = pods.pod.init(*args)
        assert run.document["action"] == action
        assert run.document["warnings"] == [
            f"a foreign rule decides in front of ours: ipv4 nat OUTPUT {' '.join(theirs)}"
        ]
    pods.pod.tool(tool_of(backend), "-t", "nat", "-D", "OUTPUT", *theirs)
    pods.pod.tool(tool_of(backend), "-t", "nat", "-A", "OUTPUT", *theirs)
    assert pods.pod.init(*args).document["warnings"] == [], "behind ours it decides nothing that we want"


KUBE = """\
*nat
:KUBE-SERVICES - [0:0]
:KUBE-SVC-A - [0:0]
:KUBE-SEP-B - [0:0]
[7:420] -A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
[11:660] -A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A KUBE-SERVICES -d 10.96.0.1/32 -p tcp -m comment --comment "default/kubernetes:https -j ISTIO_OUTPUT" -m tcp --dport 443 -j KUBE-SVC-A
-A KUBE-SVC-A -m statistic --mode random --probability 0.50000000000 -j KUBE-SEP-B
-A KUBE-SEP-B -p tcp -m tcp -j DNAT --to-destination 10.244.0.5:6443
COMMIT
*filter
:KUBE-FIREWALL - [0:0]
[3:180] -A INPUT -j KUBE-FIREWALL
-A INPUT -p udp -j DROP
-A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP
COMMIT
"""


@xtables_backends
def test_kube_proxy_rules_and_their_counters_survive(backend: str, pods: Net) -> None:
    pods.pod.tool(f"{tool_of(backend)}-restore", "-c", text=KUBE)

    def kept() -> list[str]:
        text = pods.pod.tool(f"{tool_of(backend)}-save", "-c")
        return [line for line in text.splitlines() if line.startswith(("[", ":KUBE"))]

    before = kept()
    args = [*DEFAULT, "-m", "TPROXY", "--ipv6=off", "-k", "veth9", "--drop-invalid", f"--backend={backend}"]
    for extra in ([], [], ["--reconcile"], ["--force-apply"], ["--cleanup-only"]):
        assert pods.pod.init(*args, *extra).code == 0, extra
    assert kept() == before


@pytest.mark.parametrize("edit", ["policy drop ;", "type nat hook output priority -99 ;"])
def test_a_native_base_chain_that_was_changed_is_mended(edit: str, pods: Net) -> None:
    args = [*DEFAULT, "--ipv6=off", "--backend=native-nft", "--json"]
    assert pods.pod.init(*args).code == 0
    before = pods.pod.save()["nft"]
    chain = "inet istio-proxy-nat output"
    rules = "counter jump istio-output"
    again = "" if edit.startswith("policy") else f"delete chain {chain}\n"
    text = f"{again}add chain {chain} {{ {edit} }}\n"
    if again:
        text = f"flush chain {chain}\n{text}add rule {chain} {rules}\n"
    pods.pod.tool("nft", "-f", "-", text=text)
    run = pods.pod.init(*args)
    assert run.document["action"] == "reconciled"
    assert [(drift["chain"], drift["kind"]) for drift in run.document["drift"]] == [("output", "changed")]
    assert pods.pod.save()["nft"] == before


def test_libiptc_deletes_nothing_of_others_where_a_chain_changed_meanwhile(pods: Net) -> None:
    """Between the look and the change somebody put a rule in front of ours: positions are stale, texts are not."""
    assert pods.pod.init("-u", "1337", "-c", "eth7", "--ipv6=off", "--backend=legacy").code == 0

    def work() -> str:
        tools = Tools(Log(0), environ=dict(os.environ))
        backend = libiptc.LibIPTC(detect.choose("legacy", False, tools), tools, False, str(lock))
        ours = rules.build(Config(exclude_interfaces="eth7")).ipv4
        stale = edits.cleanup(ours, backend.dump("ipv4"))
        HERE.tool("iptables-legacy", "-t", "nat", "-I", "PREROUTING", "1", "-p", "udp", "-j", "RETURN")
        try:
            backend.change({"ipv4": stale})
        except InitError as error:
            return str(error)
        return ""

    lock = f"/tmp/slt-{os.getpid()}.lock"
    try:
        assert "PREROUTING was changed by somebody else meanwhile" in pods.pod.call(work)
    finally:
        os.unlink(lock)
    assert pods.pod.tool("iptables-legacy", "-t", "nat", "-S", "PREROUTING").splitlines()[1:] == [
        "-A PREROUTING -p udp -j RETURN",
        "-A PREROUTING -i eth7 -j RETURN",
    ]


def test_legacy_output_of_two_lines_is_no_rule(pods: Net, tmp_path: Path) -> None:
    """The reference's measure of rules is three lines."""
    pods.pod.tool("iptables-legacy", "-t", "nat", "-L")
    for lines, name in ((2, "nft"), (3, "legacy")):
        text = "\n".join(["# Generated", "*nat", "COMMIT"][:lines])
        script = f"case $1 in --version) echo 'iptables-save v1.8.9 (legacy)';; *) echo '{text}';; esac"
        env = stand_in(tmp_path, "iptables-legacy-save", script)
        run = pods.pod.init(*DEFAULT, "--ipv6=off", "--json", env=env)
        assert (run.code, run.document["backend"]) == (0, name)


# --- rights and tools -----------------------------------------------------------------------


@pytest.mark.parametrize("args", [(), ("--cleanup-only",), ("--backend=legacy", "--cleanup-only"), ("--reconcile",)])
def test_root_without_capabilities_is_told_so_in_one_line(args: tuple[str, ...], pods: Net) -> None:
    assert pods.pod.init(*DEFAULT, "--ipv6=off", "--backend=legacy").code == 0
    less = ("setpriv", "--bounding-set=-net_admin,-net_raw", "--inh-caps=-net_admin,-net_raw")
    done = pods.pod.program("--ipv6=off", *args, prefix=less)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
    assert "Run as root with NET_ADMIN" in done.stderr
    assert "kernel support" not in done.stderr, "the kernel lacks nothing"
    assert "routes" not in done.stderr, "the rules come first"


def test_cleanup_without_the_tool_is_no_success(pods: Net, tmp_path: Path) -> None:
    assert pods.pod.init(*DEFAULT, "--ipv6=off", "--backend=legacy").code == 0
    code = "import sys; from init import tools; tools._SBIN = (); from init.cli import main; sys.exit(main())"
    prefix = ("env", f"PATH={tmp_path}", f"PYTHONPATH={ROOT}")
    done = pods.pod.program("--ipv6=off", "--cleanup-only", words=("-c", code), prefix=prefix)
    assert done.returncode == 1
    assert "iptables-legacy-save is not installed" in done.stderr


@backends
def test_a_read_only_run_directory(backend: str, pods: Net) -> None:
    script = 'mount -t tmpfs -o ro none /run; exec "$@"'
    done = pods.pod.program("--ipv6=off", f"--backend={backend}", prefix=("unshare", "-m", "sh", "-c", script, "sh"))
    if backend.endswith("nft"):
        assert done.returncode == 0, done.stderr
        return
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "Read-only file system" in done.stderr
    assert "XTABLES_LOCKFILE" in done.stderr


@pytest.mark.parametrize("backend", ["legacy", "legacy-restore"])
def test_no_wait_is_not_for_ever(backend: str, pods: Net, tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with open(path, "w") as held:
        import fcntl

        fcntl.flock(held, fcntl.LOCK_EX)
        run = pods.pod.init(
            "--ipv6=off", QUIET, f"--backend={backend}", "--lock-wait=0s", env={"XTABLES_LOCKFILE": str(path)}
        )
    assert run.code == 1
    assert f"cannot get the xtables lock {path} in 0s: held by pid {os.getpid()}" in run.err


def test_a_table_that_no_kernel_has_is_refused_before_any_rule(pods: Net) -> None:
    run = pods.pod.init("--ipv6=off", "-m", "TPROXY", "-b", "*", "-r", "4294967296", QUIET)
    assert run.code == 1
    assert "not from 1 to 4294967295" in run.err
    assert "ISTIO" not in "".join(pods.pod.save().values())


def test_no_time_is_the_cause_where_there_was_none(pods: Net) -> None:
    run = pods.pod.init(*DEFAULT, "--ipv6=off", "--run-validation", env={"PROBE_TIMEOUT": "abc"})
    assert run.code == 126
    assert "Cause: no time: the probe timeout is 0s" in run.err


@backends
@pytest.mark.parametrize(
    ("args", "value", "rule"),
    [
        (["-u", "nosuch"], "nosuch", "-m owner --uid-owner nosuch -j ISTIO_IN_REDIRECT"),
        (["-u", "1", "-b", "70000"], "70000", "-A ISTIO_INBOUND -p tcp --dport 70000 -j ISTIO_IN_REDIRECT"),
    ],
)
def test_a_value_that_is_refused_is_named_with_its_rule(
    backend: str, args: list[str], value: str, rule: str, pods: Net
) -> None:
    run = pods.pod.init("--ipv6=off", *args, QUIET, f"--backend={backend}")
    assert run.code == 1
    assert run.err.count("\n") == 1
    if backend == "native-nft":
        assert "xtables" not in run.err, "nft is another program"
        assert run.err.count("add rule") == 1, "the first rule that it refused, not all of them"
        assert f" {value} " in run.err
    else:
        assert rule in run.err
        assert "error -" not in run.err


# --- policy routing -------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["legacy", "nft", "native-nft"])
def test_what_is_done_beside_the_rules_is_reported(backend: str, pods: Net) -> None:
    args = [*DEFAULT, "-m", "TPROXY", "--ipv6=on", f"--backend={backend}", "--json"]
    families = ("ipv4", "ipv6")
    everything = [
        "::6",
        *(f"the {name} {what}" for name in families for what in ("rule for mark 1337", "route of table 133")),
    ]

    def added(run: Run) -> list[str]:
        assert run.code == 0, run.err
        return [line.removeprefix("added ").removesuffix(" to lo") for line in run.document["routing"]]

    assert added(pods.pod.init(*args)) == everything
    assert added(pods.pod.init(*args)) == []
    pods.pod.tool("ip", "rule", "del", "fwmark", "1337")
    mended = pods.pod.init(*args)
    assert mended.document["action"] == "unchanged", "the rules"
    assert added(mended) == ["the ipv4 rule for mark 1337"]
    cleaned = pods.pod.init(*args, "--cleanup-only").document["routing"]
    assert [line.removeprefix("removed ").removesuffix(" from lo") for line in cleaned] == everything
    assert pods.pod.init(*args, "--cleanup-only").document["routing"] == []


# --- Docker ---------------------------------------------------------------------------------


def test_capture_all_beside_docker_is_warned_of(pods: Net) -> None:
    text = "*nat\n:DOCKER_OUTPUT - [0:0]\n-A OUTPUT -d 127.0.0.11/32 -j DOCKER_OUTPUT\nCOMMIT\n"
    pods.pod.tool("iptables-nft-restore", "--noflush", text=text)
    args = [*DEFAULT, "--ipv6=off", "--redirect-dns", "--backend=nft", "--json"]
    run = pods.pod.init(*args, "--capture-all-dns")
    assert run.code == 0
    assert any("in a loop" in warning for warning in run.document["warnings"])
    assert run.document["docker_resolver"] is False


# --- where it writes ------------------------------------------------------------------------


def redirected(how: str) -> tuple[str, ...]:
    return ("sh", "-c", f'exec "$@" {how}', "sh")


@pytest.mark.parametrize("stderr", ["2>&-", "2>/dev/full"])
@xtables_backends
def test_a_log_that_nobody_takes_stops_no_run(backend: str, stderr: str, pods: Net) -> None:
    args = ["--ipv6=off", f"--backend={backend}", "--json", "--log_output_level=debug"]
    for extra, action in (([], "applied"), (["--force-apply"], "replaced")):
        done = pods.pod.program(*args, *extra, prefix=redirected(stderr))
        assert done.returncode == 0
        assert json.loads(done.stdout)["action"] == action
    assert "DROP" not in pods.pod.tool(tool_of(backend), "-S"), "the guards are gone"


@pytest.mark.parametrize("stdout", [">&-", ">/dev/full"])
def test_a_report_that_cannot_be_written_is_one_line(stdout: str, pods: Net) -> None:
    args = ["--ipv6=off", "--backend=nft"]
    for extra in (["--help"], ["--dry-run"], ["--dry-run", "--json"], ["--json"]):
        done = pods.pod.program(*args, *extra, prefix=redirected(stdout))
        assert done.returncode == 1, extra
        assert done.stderr.startswith("error: cannot write to standard output: "), extra
        assert done.stderr.count("\n") == 1, extra
    assert "the run is done" in done.stderr
    assert "ISTIO_OUTPUT" in pods.pod.tool("iptables-nft-save")

"""Building, changing and taking away: what is there afterwards, whatever happened in between."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from fabric_lab import Lab, external, link, mounts_below, planned, pod, service, unique_name, up

from lab.errors import InputError, LabError
from lab.fabric import build, namespaces, netlink, paths, record
from lab.fabric.plan import Plan, changes
from lab.fabric.record import Record

pytestmark = pytest.mark.root

RTM_DELLINK = 17
CHECKOUT = Path(__file__).resolve().parents[3]
A, B = "10.244.1.1", "10.244.1.2"
SMALL = (pod("a", A), pod("b", B), external("vendor", "203.0.113.8"))


@pytest.fixture
def name() -> Iterator[str]:
    chosen = unique_name()
    yield chosen
    record.down(chosen)


def nothing_is_left(name: str) -> None:
    directory = paths.run_dir(name)
    assert not directory.exists()
    assert mounts_below(directory) == []
    assert [t.name for t in threading.enumerate() if t.name == "fabric"] == []


def members(inode: int) -> list[int]:
    """Processes in the network namespace with this number."""
    found = []
    for pid in (p for p in os.listdir("/proc") if p.isdigit()):
        with suppress(OSError):
            if os.stat(f"/proc/{pid}/ns/net").st_ino == inode:
                found.append(int(pid))
    return found


# --- taking down -----------------------------------------------------------------------------------------------


def test_down_leaves_nothing_and_twice_is_fine(name: str) -> None:
    kept = Record.create(name)
    build.build(planned(*SMALL), kept)
    assert len(mounts_below(paths.run_dir(name))) == 1 + 5  # their own mount, and a pin for each place
    removed = record.down(name)
    for place in ("node", "outside", "a.shop", "b.shop", "ext-vendor"):
        assert f"namespace {place}" in removed
    nothing_is_left(name)
    assert record.down(name) == []


def test_down_ends_whoever_lives_in_a_namespace_of_the_lab(name: str) -> None:
    """No mark, no record: entering the namespace is enough, or it would live on with the process."""
    kept = Record.create(name)
    build.build(planned(*SMALL), kept)
    pin = paths.netns_path(name, "a.shop")
    inode = pin.stat().st_ino

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(["cat"], stdin=subprocess.PIPE, env={})

    inside, outside = namespaces.inside(pin, start), start()
    try:
        assert members(inode) == [inside.pid]
        record.down(name)
        assert inside.wait(10) == -signal.SIGKILL
        assert outside.poll() is None
        assert members(inode) == []
        nothing_is_left(name)
    finally:
        for child in (inside, outside):
            child.kill()
            child.communicate()


def test_a_namespace_ends_with_its_lab(name: str, tmp_path: Path) -> None:
    """A link that reaches into it from outside goes when the kernel takes the namespace apart."""
    foreign = tmp_path / "foreign"
    foreign.touch()
    subprocess.run(["unshare", f"--net={foreign}", "true"], check=True)
    try:
        build.build(planned(*SMALL), Record.create(name))
        with paths.netns_path(name, "a.shop").open() as there:

            def join() -> None:
                with netlink.Route("foreign") as route:
                    route.run([netlink.veth("here", "02:00:00:00:00:01", "there", "02:00:00:00:00:02", there.fileno())])

            namespaces.inside(foreign, join)
        events = namespaces.inside(foreign, _links)
        with events:
            record.down(name)
            events.settimeout(10)
            while struct.unpack_from("=IH", events.recv(1 << 16))[1] != RTM_DELLINK:
                pass
    finally:
        record.unmount(foreign)


def _links() -> socket.socket:
    """Hears of every link that appears, changes or goes in the calling thread's namespace (rtnetlink(7))."""
    s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
    s.bind((0, 1))  # RTMGRP_LINK
    return s


_SUPERVISOR = """
import os, subprocess, sys
sys.path.insert(0, {tests!r})
from fabric_lab import planned, pod, external
from lab.fabric import build, paths, namespaces
from lab.fabric.record import Record
kept = Record.create({name!r})
build.build(planned({objects}), kept)
def start():
    return subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, env={{**os.environ, **kept.environ}})
children = [namespaces.inside(paths.netns_path({name!r}, place), start) for place in ("node", "a.shop")]
print(*[c.pid for c in children], flush=True)
sys.stdin.read()
"""


def test_down_after_kill_9_of_the_supervisor_leaves_nothing(name: str) -> None:
    objects = ", ".join(f"pod('{p}', '{ip}')" for p, ip in (("a", A), ("b", B)))
    script = _SUPERVISOR.format(name=name, tests=str(Path(__file__).parent), objects=objects)
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=CHECKOUT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as supervisor:
        assert supervisor.stdout is not None
        children = [int(pid) for pid in supervisor.stdout.readline().split()]
        assert record.info(name).state == "running"
        supervisor.kill()
        supervisor.wait()
    assert record.info(name).state == "crashed"
    assert all(record.ProcessId.of(pid) for pid in children)
    record.down(name)
    assert [pid for pid in children if record.ProcessId.of(pid)] == []
    nothing_is_left(name)


def test_pins_without_a_record_and_a_record_without_pins_are_taken_away(name: str) -> None:
    kept = Record.create(name)
    build.build(planned(*SMALL), kept)
    paths.record_file(name).unlink()
    paths.id_link(name).unlink()
    assert record.info(name).state == "crashed"
    record.down(name)
    nothing_is_left(name)

    kept = Record.create(name)
    build.build(planned(*SMALL), kept)
    for place in ("node", "a.shop"):
        record.unmount(paths.netns_path(name, place))
    record.down(name)
    nothing_is_left(name)


def test_a_mount_that_nobody_recorded_goes_and_what_it_shows_stays(name: str, tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    Record.create(name)
    point = paths.pod_dir(name, "a.shop")
    point.mkdir(parents=True)
    subprocess.run(["mount", "--bind", str(tmp_path), str(point)], check=True)
    record.down(name)
    nothing_is_left(name)
    assert (tmp_path / "kept").exists()


# --- half a build ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [0, 60, 150, 300, 450])
def test_a_full_disk_in_the_middle_of_a_build_leaves_nothing_after_down(name: str, room: int) -> None:
    """The record may grow by ``room`` bytes; then writing fails, as on a full disk, in the middle of a line."""
    kept = Record.create(name)
    size = paths.record_file(name).stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, hard))
    try:
        with pytest.raises(LabError, match="cannot keep its record"):
            build.build(planned(*SMALL), kept)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    recorded = {str(e["path"]) for e in kept.entries() if "path" in e}
    assert set(mounts_below(paths.run_dir(name))) <= recorded  # nothing was made that is not in the record
    record.down(name)
    nothing_is_left(name)


@pytest.mark.parametrize("after", [0.001, 0.01, 0.03, 0.06, 0.1])
def test_ctrl_c_at_any_moment_of_a_build_leaves_nothing_after_down(name: str, after: float) -> None:
    many = planned(*(pod(f"p{n}", f"10.244.1.{n + 1}") for n in range(60)))
    kept = Record.create(name)
    with pytest.raises(KeyboardInterrupt), _pressing_ctrl_c(after):
        build.build(many, kept)
    assert len(mounts_below(paths.run_dir(name))) < 63
    record.down(name)
    nothing_is_left(name)


def test_ctrl_c_while_a_lab_is_taken_down_comes_after_that(name: str) -> None:
    build.build(planned(*SMALL), Record.create(name))
    with pytest.raises(KeyboardInterrupt), _pressing_ctrl_c(0.001):
        record.down(name)
    nothing_is_left(name)


@contextmanager
def _pressing_ctrl_c(after: float) -> Iterator[None]:
    """SIGINT from ``after`` seconds on, again and again: an impatient user."""
    pressed = iter([signal.raise_signal] * 20)

    def press(*_: object) -> None:
        for raise_signal in pressed:
            raise_signal(signal.SIGINT)
            break

    before = signal.signal(signal.SIGALRM, press)
    signal.setitimer(signal.ITIMER_REAL, after, 0.002)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_build_that_is_done_again_mends_what_is_missing(name: str) -> None:
    made = planned(*SMALL)
    kept = Record.create(name)
    build.build(made, kept)
    build.remove(made, kept, ["b.shop"])
    build.build(made, kept)
    build.build(made, kept)
    lab = Lab(name, made, kept)
    server = lab.listen("b.shop", B, 7000)
    assert lab.peer_seen("a.shop", B, 7000, server) == A
    for s in lab.sockets:
        s.close()


# --- several at once ------------------------------------------------------------------------------------------------


def test_two_labs_with_the_same_addresses_live_side_by_side() -> None:
    with up(*SMALL) as one, up(*SMALL) as other:
        for lab in (one, other):
            server = lab.listen("b.shop", B, 7000)
            assert lab.peer_seen("a.shop", B, 7000, server) == A
        record.down(other.name)
        server = one.listen("b.shop", B, 7001)
        assert one.peer_seen("a.shop", B, 7001, server) == A


def test_labs_can_be_built_at_the_same_time() -> None:
    names = [unique_name() for _ in range(4)]
    failures: list[BaseException] = []

    def make(name: str) -> None:
        try:
            build.build(planned(*SMALL), Record.create(name))
        except BaseException as e:
            failures.append(e)

    try:
        threads = [threading.Thread(target=make, args=(name,)) for name in names]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert failures == []
        for name in names:
            assert len(mounts_below(paths.run_dir(name))) == 6
    finally:
        for name in names:
            record.down(name)
    for name in names:
        nothing_is_left(name)


def test_of_two_with_one_name_the_second_gets_one_clear_error() -> None:
    with up(*SMALL) as lab:
        with pytest.raises(InputError, match="is already running") as e:
            Record.create(lab.name)
        assert "\n" not in str(e.value)
        assert len(mounts_below(paths.run_dir(lab.name))) == 6


# --- changes ---------------------------------------------------------------------------------------------------------


def change(lab: Lab, new: Plan) -> None:
    """What a reconciliation does to the fabric."""
    difference = changes(lab.plan, new)
    build.remove(lab.plan, lab.record, difference.removed)
    build.add(new, lab.record, difference.added)
    build.update_rules(new, lab.record, lab.plan)
    lab.plan = new


def test_a_running_fabric_takes_up_changes() -> None:
    web = service("web", "10.96.1.1", "[{port: 80, targetPort: main}]", "{app: web}")
    with up(*SMALL, pod("w", "10.244.1.3", "{app: web}"), web, link("l", "{between: [a.shop, '*'], mtu: 1300}")) as lab:
        server = lab.listen("w.shop", "0.0.0.0", 8080)
        assert lab.peer_seen("a.shop", "10.96.1.1", 80, server) == A
        slow = link("l", "{between: [a.shop, b.shop], mtu: 1200, rate: 100mbit}")
        change(lab, planned(pod("a", A), pod("b", B), pod("w", "10.244.1.4", "{app: web}", 9090), web, slow))
        assert not paths.netns_path(lab.name, "ext-vendor").exists()
        server = lab.listen("w.shop", "0.0.0.0", 9090)
        assert lab.peer_seen("a.shop", "10.96.1.1", 80, server) == A
        assert _mtu(lab, "a.shop", "eth0") == 1500
        with pytest.raises(OSError, match="unreachable"):
            lab.connect("a.shop", "10.244.1.3", 8080)
        change(lab, planned(pod("a", A), pod("b", B)))
        change(lab, planned(pod("a", A), pod("b", B)))
        for place in ("node", "a.shop"):
            shown = lab.inside(
                place, lambda: subprocess.run(["tc", "qdisc"], capture_output=True, text=True, check=True).stdout
            )
            assert "htb" not in shown
            assert "tbf" not in shown
        rules = lab.inside(
            "node", lambda: subprocess.run(["ip", "rule"], capture_output=True, text=True, check=True).stdout
        )
        assert len(rules.splitlines()) == 3


def test_a_udp_client_leaves_an_endpoint_that_has_gone() -> None:
    """It keeps its port, so without help the kernel would keep its translation."""
    dns = service("dns", "10.96.1.1", "[{port: 53, protocol: UDP}]", "{app: dns}")
    first, second = pod("one", "10.244.1.3", "{app: dns}"), pod("two", "10.244.1.4", "{app: dns}")
    with up(*SMALL, first, dns) as lab:
        client = lab.udp("a.shop", A, 5353)
        for place, objects in (("one.shop", None), ("two.shop", (*SMALL, second, dns))):
            if objects:
                change(lab, planned(*objects))
            server = lab.udp(place, "0.0.0.0", 53)
            client.sendto(b"?", ("10.96.1.1", 53))
            assert server.recvfrom(10) == (b"?", (A, 5353))


def test_a_build_can_be_stopped_from_another_thread(name: str) -> None:
    stop = namespaces.Stop()
    stop.set()
    kept = Record.create(name)
    with pytest.raises(namespaces.Cancelled):
        build.build(planned(*SMALL), kept, stop=stop)
    record.down(name)
    nothing_is_left(name)


def _mtu(lab: Lab, place: str, interface: str) -> int:
    def ask() -> int:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            import fcntl

            answer = fcntl.ioctl(s, 0x8921, struct.pack("16si", interface.encode(), 0) + b"\0" * 12)
            return int(struct.unpack_from("=i", answer, 16)[0])

    return lab.inside(place, ask)


# --- the host ---------------------------------------------------------------------------------------------------------

# A host with names of ours in use, a firewall that forwards nothing and strict settings that namespaces inherit.
_HOST = """
set -e
ip link set lo up
ip link add outside type veth peer name node
ip link set outside up
ip addr add 10.244.1.1/24 dev outside
nft add table inet sidecarlab-services
nft add chain inet sidecarlab-services forward '{ type filter hook forward priority 0; policy drop; }'
sysctl -qw net.ipv4.conf.all.rp_filter=1 net.ipv4.conf.default.rp_filter=1 net.ipv4.ip_forward=0
"""
_DUMPS = (
    ["ip", "-o", "link"],
    ["ip", "-o", "addr"],
    ["ip", "route", "show", "table", "all"],
    ["ip", "-6", "route", "show", "table", "all"],
    ["ip", "rule"],
    ["ip", "neigh", "show", "nud", "permanent"],
    ["nft", "list", "ruleset"],
    ["iptables-legacy-save"],
    ["sysctl", "-a", "--pattern", r"^net\.(ipv[46]\.(conf\.(all|default)\.|ip_|icmp|ping)|netfilter\.nf_log)"],
)


def _dump() -> dict[str, str]:
    """Everything of a host's namespace that a lab could disturb; times and counters left out."""
    seen = {}
    for command in _DUMPS:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        text = re.sub(r"(valid_lft|preferred_lft|expires) \w+|^#.*|\[\d+:\d+\]", "", done.stdout, flags=re.MULTILINE)
        seen[" ".join(command)] = text
    return seen


def test_the_host_and_a_foreign_namespace_are_as_they_were(tmp_path: Path) -> None:
    """The host is a namespace of the test's own, so that nobody else changes it meanwhile."""
    host, foreign = tmp_path / "host", tmp_path / "foreign"
    for pin in (host, foreign):
        pin.touch()
        subprocess.run(["unshare", f"--net={pin}", "sh", "-c", _HOST], check=True)

    def live() -> None:
        before = _dump()
        assert "policy drop" in before["nft list ruleset"]
        events = _links()
        with up(*SMALL, link("l", "{between: [a.shop, '*'], mtu: 1300}")) as lab:
            server = lab.listen("ext-vendor", "203.0.113.8", 7000)
            assert lab.peer_seen("a.shop", "203.0.113.8", 7000, server) == A
            assert _dump() == before
        assert _dump() == before
        assert b"".join(_read_all(events)) == b""

    try:
        there = namespaces.inside(foreign, _dump)
        namespaces.inside(host, live)
        assert namespaces.inside(foreign, _dump) == there
    finally:
        record.unmount(host)
        record.unmount(foreign)


def _read_all(events: socket.socket) -> Iterator[bytes]:
    events.setblocking(False)
    with events, suppress(BlockingIOError):
        while True:
            yield events.recv(1 << 16)

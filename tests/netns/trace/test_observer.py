"""The observer process: started as a lab starts it, asked as the probe asks it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from istio_rule_sets import ISTIO_NAT

from lab.errors import ObservationError
from lab.trace.client import Client
from lab.trace.flows import Flow

pytestmark = pytest.mark.root

START = "import json, sys; from lab.trace.observer import main; sys.exit(main(json.loads(sys.argv[1])))"


@pytest.fixture
def observer(net, tmp_path: Path) -> Iterator[str]:
    """The socket of an observer of ``pod`` (with traces) and ``peer`` (conntrack only)."""
    path = str(tmp_path / "observer.sock")
    params = {
        "places": {"pod": net.path(net.pod), "peer": {"netns": net.path(net.peer), "trace": False}},
        "socket": path,
    }
    ready = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    ready.bind(str(tmp_path / "notify"))
    ready.settimeout(20)
    process = subprocess.Popen(
        [sys.executable, "-c", START, json.dumps(params)],
        env={**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify")},
    )
    try:
        assert ready.recv(100) == b"READY=1"
        yield path
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        ready.close()
    assert "sidecarlab-trace" not in net.run("nft", "list", "tables")


def test_a_killed_observer_leaves_no_table(net, tmp_path: Path) -> None:
    params = {"places": {"pod": net.path(net.pod)}, "socket": str(tmp_path / "observer.sock")}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready:
        ready.bind(str(tmp_path / "notify"))
        ready.settimeout(20)
        environ = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify")}
        process = subprocess.Popen([sys.executable, "-c", START, json.dumps(params)], env=environ)
        ready.recv(100)
    assert "sidecarlab-trace" in net.run("nft", "list", "tables")
    process.kill()
    process.wait(10)
    assert "sidecarlab-trace" not in net.run("nft", "list", "tables")


def ask(path: str, *questions: dict[str, object]) -> list[dict[str, object]]:
    """Raw lines on one connection, answered in order of asking."""
    with socket.socket(socket.AF_UNIX) as s, s.makefile("rwb") as lines:
        s.connect(path)
        s.settimeout(10)
        for q in questions:
            lines.write(json.dumps(q).encode() + b"\n")
        lines.flush()
        return [json.loads(lines.readline()) for _ in questions]


def test_it_answers_with_a_flows_steps_and_its_translation(net, observer: str) -> None:
    net.run("iptables-legacy-restore", "--noflush", stdin=ISTIO_NAT)
    net.listen(15001)
    s = net.socket()
    s.connect(("198.51.100.7", 80))
    mark = net.socket(socket.SOCK_DGRAM)
    mark.sendto(b"fence", ("10.5.0.1", 9))

    async def query() -> None:
        client = await Client.connect(observer)
        fence = Flow("udp", "10.5.0.2", mark.getsockname()[1], "10.5.0.1", 9)
        seen = await client.flow("pod", "tcp", *s.getsockname(), *s.getpeername(), wait=5, fence=fence)
        assert seen.complete
        chains = [(step.chain, step.position) for step in seen.packets[0].steps if step.hook == "output"]
        assert chains == [("OUTPUT", 1), ("ISTIO_OUTPUT", 6), ("ISTIO_REDIRECT", 1)]
        assert [e.reply.sport for e in seen.conntrack] == [15001]
        entries, count = await client.entries("pod", proto="tcp", dport=80)
        assert [e.original.dport for e in entries] == [80]
        assert (await client.entries("pod", since=count))[0] == []
        await client.close()

    asyncio.run(query())


def test_a_question_waits_for_the_flow_and_no_longer_than_asked(net, observer: str) -> None:
    async def query() -> None:
        client = await Client.connect(observer)
        none = await client.flow("pod", "tcp", "10.5.0.2", 1, wait=0.01)
        assert not none.complete
        assert not none.packets
        s = net.socket(socket.SOCK_DGRAM)
        s.bind(("10.5.0.2", 0))
        asked = asyncio.create_task(client.flow("pod", "udp", *s.getsockname(), wait=10))
        await client.ask(op="status")  # the question before it is waiting now
        s.sendto(b"x", ("10.5.0.1", 9))
        assert [p.flow.dport for p in (await asked).packets] == [9]
        await client.close()

    asyncio.run(query())


def test_a_tracked_flow_is_waited_for_until_conntrack_tells_of_it(net, observer: str) -> None:
    async def query() -> None:
        client = await Client.connect(observer)
        s = net.socket(socket.SOCK_DGRAM)
        s.bind(("10.5.0.2", 0))
        s.sendto(b"x", ("10.5.0.1", 9))  # traced, but nothing in this namespace needs connection tracking
        flow = ("pod", "udp", *s.getsockname())
        assert (await client.flow(*flow, wait=5)).packets
        untracked = await client.flow(*flow, wait=0.01, tracked=True)
        assert (bool(untracked.packets), untracked.conntrack, untracked.complete) == (True, [], False)

        net.run("iptables-legacy-restore", "--noflush", stdin=ISTIO_NAT)
        net.listen(15001)
        c = net.socket()
        c.connect(("198.51.100.7", 80))
        tracked = await client.flow("pod", "tcp", *c.getsockname(), wait=5, tracked=True)
        assert [e.reply.sport for e in tracked.conntrack] == [15001]
        chains = [step.chain for step in tracked.packets[0].steps if step.hook == "output"]
        assert chains == ["OUTPUT", "ISTIO_OUTPUT", "ISTIO_REDIRECT"], "all its rules came before"
        client.ended.add_done_callback(lambda _: ended.append(True))
        await client.close()

    ended: list[bool] = []
    asyncio.run(query())
    assert ended == [True]


def test_attach_and_detach(net, observer: str) -> None:
    assert ask(observer, {"op": "detach", "place": "pod"}) == [{"ok": True, "detached": True}]
    assert "sidecarlab-trace" not in net.run("nft", "list", "tables")
    again = {"op": "attach", "place": "pod", "netns": net.path(net.pod)}
    assert ask(observer, again) == [{"ok": True, "missing": {}}]
    assert "sidecarlab-trace" in net.run("nft", "list", "tables")


def test_conntrack_alone_plants_no_table(net, observer: str) -> None:
    assert "sidecarlab-trace" not in net.run("nft", "list", "tables", ns=net.peer)


def test_packets_report_as_long_as_the_connection_lasts_that_asked_for_it(net, observer: str) -> None:
    lent = {"op": "attach", "place": "peer", "netns": net.path(net.peer), "while_connected": True}

    async def lend() -> None:
        client = await Client.connect(observer)
        await client.ask(**lent)
        assert "sidecarlab-trace" in net.run("nft", "list", "tables", ns=net.peer)
        await client.close()

    asyncio.run(lend())
    (status,) = ask(observer, {"op": "status"})  # whose connection comes after the other's end
    assert status["places"]["peer"] == {"missing": {}, "lost": 0}
    assert "sidecarlab-trace" not in net.run("nft", "list", "tables", ns=net.peer)
    assert "sidecarlab-trace" in net.run("nft", "list", "tables")  # of the other place, which is always traced


@pytest.mark.parametrize(
    ("question", "part"),
    [
        ({"op": "nonsense"}, "unknown op"),
        ({"op": "flow", "place": "nowhere", "proto": "tcp", "src": "::1", "sport": 1}, "is not observed"),
        ({"op": "flow", "place": "pod"}, "not understood"),
        ({"op": "attach", "place": "x", "netns": "/run/netns/slt-none"}, "No such file"),
        ([], "not understood"),
    ],
)
def test_a_wrong_question_is_refused_and_the_observer_lives_on(observer: str, question: object, part: str) -> None:
    refused, status = ask(observer, question, {"op": "status"})
    assert refused["ok"] is False
    assert part in refused["error"]
    assert set(status["places"]) == {"pod", "peer"}


def test_no_observer_is_an_observation_error(tmp_path: Path) -> None:
    with pytest.raises(ObservationError, match="does not answer"):
        asyncio.run(Client.connect(str(tmp_path / "none")))

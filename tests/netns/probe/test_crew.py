"""Driver and judge on a plain network: each kind of flow, each outcome, and what was on the wire."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
from probe_yard import Yard

from lab.errors import ObservationError
from lab.probe import driver
from lab.probe.crew import Crew, Where, launch
from lab.probe.orders import Order, Sent
from lab.runtime import channel

pytestmark = pytest.mark.root

T = TypeVar("T")
B = "10.6.1.2"


def with_crew(work: Callable[[Crew], Awaitable[T]]) -> T:
    async def run() -> T:
        crew = Crew(launch())
        try:
            await crew.ready()
            return await work(crew)
        finally:
            await crew.close()

    return asyncio.run(run())


@pytest.fixture(scope="module")
def sent(yard: Yard) -> dict[str, Sent]:
    """Many flows from ``a`` to ``b`` by name, sent at once."""
    kinds = [(80, "http"), (90, "grpc"), (443, "tls"), (444, "https"), (9000, "tcp"), (9001, "udp")]
    yard.echo("b", kinds, log=str(yard.tmp / "b.log"))
    yard.run("router", "nft", "-f", "-", stdin=ROUTER_FILTER)
    orders = {
        "http": Order(B, 80, "http", path="/hello", headers={"X-One": "1"}),
        "http 503": Order(B, 80, "http", path="/status/503"),
        "http HEAD": Order(B, 80, "http", method="HEAD"),
        "http slow": Order(B, 80, "http", path="/delay/30", timeout=0.5),
        "http to tls": Order(B, 443, "http"),
        "grpc": Order(B, 90, "grpc"),
        "grpc to http": Order(B, 80, "grpc"),
        "tls": Order(B, 443, "tls", sni="some.name.example"),
        "https": Order(B, 444, "tls", path="/over-tls"),
        "tls to tcp": Order(B, 9000, "tls"),
        "tcp": Order(B, 9000, "tcp"),
        "tcp refused": Order(B, 9999, "tcp"),
        "tcp dropped": Order(B, 7000, "tcp", timeout=0.5),
        "tcp unreachable": Order(B, 7001, "tcp"),
        "udp": Order(B, 9001, "udp"),
        "udp refused": Order(B, 9999, "udp"),
        "udp dropped": Order(B, 7000, "udp", timeout=0.5),
        "icmp": Order(B, 0, "icmp"),
        "icmp no-answer": Order("10.6.1.77", 0, "icmp", timeout=0.5),
        "crafted syn": Order(B, 9000, "tcp", crafted=True),
        "crafted syn to closed": Order(B, 9999, "tcp", crafted=True),
        "crafted fin": Order(B, 9000, "tcp", crafted=True, flags="F", timeout=0.3),
        "crafted spoofed": Order(B, 9000, "tcp", crafted=True, spoof="198.51.100.1"),
        "crafted udp": Order(B, 9001, "udp", crafted=True),
        "crafted udp to closed": Order(B, 9999, "udp", crafted=True),
        "crafted icmp": Order(B, 0, "icmp", crafted=True),
        "as 1337": Order(B, 9000, "tcp", uid=1337),
    }

    async def work(crew: Crew) -> dict[str, Sent]:
        done = await asyncio.gather(*(crew.send(yard.where("a"), o) for o in orders.values()))
        return dict(zip(orders, done, strict=True))

    return with_crew(work)


ROUTER_FILTER = """
table inet filter {
  chain forward {
    type filter hook forward priority 0;
    tcp dport 7000 drop
    udp dport 7000 drop
    tcp dport 7001 reject with icmp host-unreachable
  }
}
"""


@pytest.mark.parametrize(
    ("name", "result", "status"),
    [
        ("http", "ok", 200),
        ("http 503", "http-error", 503),
        ("http HEAD", "ok", 200),
        ("http slow", "timeout", None),
        ("grpc", "ok", 200),
        ("tls", "ok", None),
        ("https", "ok", 200),
        ("tcp", "ok", None),
        ("tcp refused", "refused", None),
        ("tcp dropped", "timeout", None),
        ("tcp unreachable", "unreachable", None),
        ("udp", "ok", None),
        ("udp refused", "refused", None),
        ("udp dropped", "no-answer", None),
        ("icmp", "ok", None),
        ("icmp no-answer", "no-answer", None),
        ("crafted syn", "ok", None),
        ("crafted syn to closed", "refused", None),
        ("crafted fin", "no-answer", None),
        ("crafted spoofed", "no-answer", None),
        ("crafted udp", "ok", None),
        ("crafted udp to closed", "refused", None),
        ("crafted icmp", "ok", None),
    ],
)
def test_the_outcome_of_a_flow(sent: dict[str, Sent], name: str, result: str, status: int | None) -> None:
    assert (sent[name].result, sent[name].status) == (result, status), sent[name]


@pytest.mark.parametrize("name", ["http to tls", "grpc to http", "tls to tcp"])
def test_a_wrong_protocol_is_no_success(sent: dict[str, Sent], name: str) -> None:
    assert sent[name].result in ("closed", "http-error", "timeout"), sent[name]


def test_the_far_sides_report_comes_back(sent: dict[str, Sent]) -> None:
    body = sent["http"].body
    assert body is not None
    assert body["path"] == "/hello"
    assert body["headers"]["x-one"] == "1"
    assert body["headers"]["host"] == B
    assert body["peer"] == {"address": "10.6.0.2", "port": sent["http"].sport}
    for name in ("grpc", "https", "tcp", "tls", "udp"):
        body = sent[name].body
        assert body is not None, name
        assert body["peer"]["port"] == sent[name].sport, name
    tls = sent["tls"].body
    assert tls is not None
    assert tls["tls"]["sni"] == "some.name.example"


def test_each_flow_has_its_own_source_and_a_fence(sent: dict[str, Sent]) -> None:
    ports = [s.sport for s in sent.values() if s.proto == "tcp"]
    assert all(ports)
    assert len(set(ports)) == len(ports)
    assert {s.src for n, s in sent.items() if n != "crafted spoofed"} == {"10.6.0.2"}
    assert sent["crafted spoofed"].src == "198.51.100.1"
    assert all(s.fence and s.fence["dst"] == "10.6.0.1" for s in sent.values())


def test_what_crossed_the_wire_is_known_once_the_fence_is_seen(yard: Yard) -> None:
    async def work(crew: Crew) -> None:
        await crew.watch([yard.where("a"), yard.where("b")])
        done = await crew.send(yard.where("a"), Order(B, 9000, "tcp"))
        spoofed = await crew.send(yard.where("a"), Order(B, 9000, "tcp", crafted=True, spoof="198.51.100.1"))
        assert spoofed.fence is not None
        assert await crew.fence_seen("a", spoofed.fence["token"])
        assert not await crew.fence_seen("b", spoofed.fence["token"], wait=0.01)
        left, arrived, never = await crew.find(
            "a",
            [
                {"outgoing": False, "dst": B, "dport": 9000, "sport": done.sport},
                {"outgoing": True, "src": B, "dport": done.sport},
                {"dst": B, "dport": 9999, "since": 2e9},
            ],
        )
        assert [(s.flow.src, s.flow.sport, s.flow.proto) for s in left] == [("10.6.0.2", done.sport, "tcp")]
        assert "S" in left[0].flags
        assert left[0].count >= 4
        assert len(arrived) == 1
        assert never == []
        ((crafted,),) = await crew.find("a", [{"src": "198.51.100.1"}])
        assert (crafted.flow.dst, crafted.flow.sport, crafted.flags) == (B, spoofed.sport, "S")

    with_crew(work)


def test_a_fence_is_sent_towards_a_place_too(yard: Yard) -> None:
    async def work(crew: Crew) -> None:
        await crew.watch([yard.where("b")])
        flow = await crew.send_fence(yard.where("b").router, B)
        assert (flow.src, flow.dst, flow.dport) == ("10.6.1.1", B, 9)

    with_crew(work)


def test_what_cannot_be_done_is_told_in_one_line(yard: Yard) -> None:
    async def work(crew: Crew) -> None:
        nowhere = Where("nowhere", "/run/netns/slt-none", router="/run/netns/slt-none", interface="x")
        with pytest.raises(ObservationError, match=r"the driver cannot|ended with"):
            await crew.send(nowhere, Order(B, 80, "tcp"))
        with pytest.raises(ObservationError, match="the judge cannot"):
            await crew.watch([nowhere])
        with pytest.raises(ObservationError, match="nothing is watched"):
            await crew.find("nowhere", [{}])
        assert (await crew.send(yard.where("a"), Order(B, 9000, "tcp"))).result == "ok"

    with_crew(work)


def test_an_interrupt_while_the_driver_starts_is_no_error_of_its() -> None:
    async def run() -> None:
        crew = Crew(launch())
        waiting = asyncio.create_task(crew.ready())
        await asyncio.sleep(0)
        waiting.cancel()
        try:
            with pytest.raises(asyncio.CancelledError):
                await waiting
        finally:
            await crew.close()

    asyncio.run(run())


def test_an_answer_that_nobody_waits_for_is_dropped() -> None:
    ours, theirs = channel.pair()
    ours.close()
    with theirs:
        driver._tell(theirs, {"id": 1})


def test_nothing_is_left_when_the_crew_is_gone(yard: Yard) -> None:
    async def work(crew: Crew) -> int:
        await crew.watch([yard.where("a")])
        slow = asyncio.create_task(crew.send(yard.where("a"), Order(B, 80, "http", path="/delay/60", timeout=60)))
        await crew.send(yard.where("a"), Order(B, 9000, "tcp"))  # the slow one was ordered before
        slow.cancel()
        return crew._process.pid

    pid = with_crew(work)
    left = subprocess.run(["ps", "--ppid", str(pid), "-o", "pid="], capture_output=True, text=True, check=False).stdout
    assert left.strip() == ""
    log = [json.loads(line) for line in (yard.tmp / "b.log").read_text().splitlines()]
    assert any(e.get("path") == "/delay/60" or e["event"] == "connection" for e in log)

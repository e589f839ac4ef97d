"""Small pure parts: resolv.conf, hosts, the judge's memory, Envoy's lines, followed files."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from lab.probe import fence, resolver
from lab.probe.evidence_log import parse
from lab.probe.journal import Journal
from lab.probe.orders import Order, Query, Sent
from lab.probe.wire import Link
from lab.trace.flows import Flow

RESOLV = """# comment
nameserver 10.96.0.10
nameserver 10.96.0.11
search a.svc.cluster.local svc.cluster.local. cluster.local
options ndots:5 timeout:2
"""


def test_resolv_conf() -> None:
    config = resolver.parse_resolv_conf(RESOLV)
    assert config.servers == ("10.96.0.10", "10.96.0.11")
    assert config.search == ("a.svc.cluster.local", "svc.cluster.local", "cluster.local")
    assert config.ndots == 5
    assert resolver.parse_resolv_conf("") == resolver.ResolvConf()


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("catalog.catalog", "catalog.catalog.a.svc.cluster.local.", "catalog.catalog."),
        ("a.b.c.d.e.f", "a.b.c.d.e.f.", "a.b.c.d.e.f.cluster.local."),
        ("absolute.", "absolute.", "absolute."),
    ],
)
def test_names_are_tried_in_the_order_of_resolv_conf(name: str, first: str, last: str) -> None:
    candidates = resolver.parse_resolv_conf(RESOLV).candidates(name)
    assert (candidates[0], candidates[-1]) == (first, last)


def test_hosts() -> None:
    text = "127.0.0.1 localhost\n10.0.0.7  frontend Front.example # me\n"
    assert resolver.in_hosts(text, "front.EXAMPLE.") == "10.0.0.7"
    assert resolver.in_hosts(text, "me") is None


def test_the_gateway_of_a_routing_table() -> None:
    head = "Iface\tDestination\tGateway\tFlags\n"
    assert fence.gateway(f"{head}eth0\t00000000\t0101FEA9\t0003\n") == "169.254.1.1"
    assert fence.gateway(f"{head}eth0\t0101FEA9\t00000000\t0005\n") is None


def test_fence_tokens() -> None:
    assert fence.token_of(b"sidecarlab-fence-abc") == "abc"
    assert fence.token_of(b"something else") is None


def test_orders_and_answers_survive_the_way() -> None:
    order = Order("h", 80, "http", headers={"a": "b"})
    assert Order(**json.loads(json.dumps(order.to_json()))) == order
    sent = Sent("ok", 200, queries=[Query("n.", "A", "udp", "s", 53, "a", 1, "NOERROR", ["x"])], body={"k": 1})
    assert Sent.from_json(json.loads(json.dumps(sent.to_json()))) == sent


def test_the_links_memory() -> None:
    link = Link(limit=2)
    a, b, c = (Flow("tcp", "10.0.0.1", port, "10.0.0.2", 80) for port in (1, 2, 3))
    link.add(a, False, 1.0, "S")
    link.add(b, False, 2.0, "S")
    link.add(a, False, 3.0, "PA")
    assert [(s.flow, s.count, s.flags) for s in link.find(since=2.5)] == [(a, 2, "SPA")]
    link.add(c, True, 4.0)  # forgets b: a was seen since
    assert [s.flow for s in link.find()] == [a, c]
    assert [s.flow for s in link.find(outgoing=True)] == [c]
    assert link.find(dst="10.0.0.2", dport=81) == []


def test_envoys_empty_values_are_none() -> None:
    line = parse({"kind": "tcp", "listener": "l", "filter_chain": "", "cluster": "-", "route_name": None, "code": 0.0})
    assert (line.filter_chain, line.cluster, line.route_name, line.flags, line.code) == (None, None, None, "-", 0)
    assert parse({"flags": "UH"}).flags == "UH"
    assert parse({"flags": None}).flags == "-"


def test_a_line_is_found_when_it_is_written_and_not_before_the_mark(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"n": 0}\n')

    async def work() -> None:
        journal = Journal()
        journal.follow(path)
        assert journal.mark(path) == 0  # what was there before is not followed
        assert await journal.find(path, lambda line: True, 0, 0.0) is None
        waiting = asyncio.create_task(journal.find(path, lambda line: line["n"] == 2, 0, 10))
        await asyncio.sleep(0)
        with path.open("a") as f:
            f.write('{"n": 1}\nno json\n[]\n{"n":')
            f.flush()
            f.write(" 2}\n")
        assert await waiting == {"n": 2}
        mark = journal.mark(path)
        assert mark == 2
        assert await journal.find(path, lambda line: True, mark, 0.0) is None
        journal.close()

    asyncio.run(work())


def test_a_file_may_appear_later(tmp_path: Path) -> None:
    path = tmp_path / "later.jsonl"

    async def work() -> None:
        journal = Journal()
        waiting = asyncio.create_task(journal.find(path, lambda line: True, journal.mark(path), 10))
        await asyncio.sleep(0)
        path.write_text('{"n": 1}\n')
        assert await waiting == {"n": 1}
        journal.close()

    asyncio.run(work())

"""A flood of connections and lookups while rules change: the judge outside the pod must see none of them."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from init_pod import (
    APP,
    DEFAULT,
    LOOPBACK,
    PEER,
    PEER_RESOLVER,
    PROXY,
    QUIET,
    WAIT,
    Net,
    answer_udp,
    backends,
    listen,
    tool_of,
)

pytestmark = pytest.mark.root

ROUNDS = 5
FENCE_PORT = 9
ETH_P_ALL = 3


@pytest.fixture
def sidecar(pods: Net) -> Net:
    """The sidecar's listeners, which take what is captured."""
    pods.pod.serve(listen(15001), listen(15006), answer_udp(15053, "agent", *LOOPBACK.values()), uid=PROXY)
    return pods


@backends
def test_nothing_leaks_while_rules_are_reconciled(backend: str, sidecar: Net) -> None:
    args = [*DEFAULT, "--ipv6=on", *_dns(), f"--backend={backend}", "--json", QUIET]
    assert sidecar.pod.init(*args).code == 0
    with judge(sidecar) as verdict, flood(sidecar) as sent:
        for _ in range(ROUNDS):
            _drift(sidecar, backend)
            run = sidecar.pod.init(*args, "--reconcile")
            assert (run.code, run.document["action"]) == (0, "reconciled"), run.err
    assert sent() > 1000
    assert verdict() == {"tcp": 0, "udp": 0}


def test_naive_flush_and_add_leaks(sidecar: Net) -> None:
    """The same flood with rules that are flushed and added: so the judge does see leaks when there are any."""
    args = [*DEFAULT, "--ipv6=off", *_dns(), "--backend=nft"]
    document = sidecar.pod.init(*args, "--dry-run").out
    assert sidecar.pod.init(*args).code == 0
    with judge(sidecar) as verdict, flood(sidecar) as sent:
        for _ in range(ROUNDS):
            for table in ("nat", "raw"):
                sidecar.pod.tool("iptables-nft", "-t", table, "-F")
                sidecar.pod.tool("iptables-nft", "-t", table, "-X")
            sidecar.pod.tool("iptables-nft-restore", "--noflush", text=document)
    assert sent() > 1000
    leaked = verdict()
    assert leaked["tcp"] > 0
    assert leaked["udp"] > 0


def _dns() -> list[str]:
    return ["--redirect-dns", f"--dns-servers={','.join(PEER_RESOLVER.values())}"]


def _drift(made: Net, backend: str) -> None:
    """A difference that by itself lets nothing out."""
    if backend == "native-nft":
        made.pod.tool("nft", "add rule inet istio-proxy-nat istio-redirect icmp type echo-request counter return")
    else:
        made.pod.tool(tool_of(backend), "-t", "nat", "-A", "ISTIO_REDIRECT", "-p", "icmp", "-j", "RETURN")


@contextlib.contextmanager
def flood(made: Net) -> Iterator[Callable[[], int]]:
    """Opens connections and sends lookups as fast as it can until the body ends; gives how many."""
    stop_reader, stop_writer = os.pipe()

    def body(pipe: int) -> None:
        count = 0
        while not select.select([stop_reader], [], [], 0)[0]:
            for version in (4, 6):
                family = socket.AF_INET if version == 4 else socket.AF_INET6
                with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as sock:
                    code = sock.connect_ex((PEER[version], 80))
                    assert code in (0, errno.EINPROGRESS, errno.EPERM, errno.EAGAIN), os.strerror(code)
                with (
                    socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock,
                    contextlib.suppress(OSError),
                ):
                    # A guard rule answers with EPERM.
                    sock.sendto(b"?", (PEER_RESOLVER[version], 53))
                count += 2
        os.write(pipe, str(count).encode())

    pid, reader = made.pod.fork(body, APP)
    os.close(stop_reader)
    result: list[int] = []
    try:
        yield lambda: result[0]
    finally:
        os.write(stop_writer, b"x")
        os.close(stop_writer)
        with os.fdopen(reader) as told:
            result.append(int(told.read() or 0))
        os.waitpid(pid, 0)


@contextlib.contextmanager
def judge(made: Net) -> Iterator[Callable[[], dict[str, int]]]:
    """Counts what of the flood arrives outside the pod; the count is final once the fence packet has come."""

    def body(pipe: int) -> None:
        sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 23)
        sock.bind(("eth0", ETH_P_ALL))
        os.write(pipe, b"r")
        seen = {"tcp": 0, "udp": 0}
        while True:
            frame, (_, _, kind, _, _) = sock.recvfrom(2048)
            if kind == socket.PACKET_OUTGOING:
                continue
            proto, port = _parse(frame)
            if (proto, port) == ("udp", FENCE_PORT):
                break
            if (proto, port) in (("tcp", 80), ("udp", 53)):
                seen[proto] += 1
        os.write(pipe, json.dumps(seen).encode())

    pid, reader = made.peer.fork(body)
    assert os.read(reader, 1) == b"r"
    result: list[Any] = []
    try:
        yield lambda: result[0]
    finally:
        made.pod.call(_fence, uid=PROXY)
        if select.select([reader], [], [], WAIT)[0]:
            with os.fdopen(reader) as told:
                result.append(json.loads(told.read()))
        else:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _fence() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.sendto(b"fence", (PEER[4], FENCE_PORT))


def _parse(frame: bytes) -> tuple[str, int]:
    """Protocol and destination port of a frame."""
    (kind,) = struct.unpack_from("!H", frame, 12)
    if kind == 0x0800:
        number, start = frame[23], 14 + (frame[14] & 15) * 4
    elif kind == 0x86DD:
        number, start = frame[20], 54
    else:
        return "", 0
    name = {6: "tcp", 17: "udp"}.get(number, "")
    return (name, struct.unpack_from("!H", frame, start + 2)[0]) if name else ("", 0)

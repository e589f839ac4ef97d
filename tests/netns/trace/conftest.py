"""Two namespaces of a test, ``pod`` (10.5.0.2) and ``peer`` (10.5.0.1), linked by a veth."""

from __future__ import annotations

import ctypes
import itertools
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from lab.trace.places import inside

_numbers = itertools.count()


def sh(*words: str, stdin: str | None = None) -> str:
    done = subprocess.run(words, input=stdin, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
    return done.stdout


@contextmanager
def fsuid(uid: int) -> Iterator[None]:
    """Sockets opened inside belong to ``uid``, as netfilter's owner match sees it."""
    libc = ctypes.CDLL(None)
    libc.setfsgid(uid)
    libc.setfsuid(uid)
    try:
        yield
    finally:
        libc.setfsuid(0)
        libc.setfsgid(0)


@dataclass
class Net:
    pod: str
    peer: str
    opened: list[socket.socket] = field(default_factory=list)

    def path(self, name: str) -> str:
        return f"/run/netns/{name}"

    def run(self, *words: str, ns: str | None = None, stdin: str | None = None) -> str:
        return sh("ip", "netns", "exec", ns or self.pod, *words, stdin=stdin)

    def socket(self, kind: int = socket.SOCK_STREAM, *, ns: str | None = None, uid: int = 1000) -> socket.socket:
        with inside(self.path(ns or self.pod)), fsuid(uid):
            s = socket.socket(socket.AF_INET, kind)
        s.settimeout(5)
        self.opened.append(s)
        return s

    def listen(self, port: int, *, ns: str | None = None, address: str = "0.0.0.0") -> socket.socket:
        s = self.socket(ns=ns, uid=0)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind((address, port))
        s.listen(64)
        return s


@pytest.fixture
def net() -> Iterator[Net]:
    prefix = f"slt-{os.getpid()}-{next(_numbers)}"
    made = Net(f"{prefix}-pod", f"{prefix}-peer")
    for name in (made.pod, made.peer):
        sh("ip", "netns", "add", name)
        sh("ip", "-n", name, "link", "set", "lo", "up")
    try:
        sh("ip", "-n", made.pod, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", made.peer)
        for name, address in ((made.pod, "10.5.0.2/24"), (made.peer, "10.5.0.1/24")):
            sh("ip", "-n", name, "addr", "add", address, "dev", "eth0")
            sh("ip", "-n", name, "link", "set", "eth0", "up")
        sh("ip", "-n", made.pod, "route", "add", "default", "via", "10.5.0.1")
        yield made
    finally:
        for s in made.opened:
            s.close()
        for name in (made.pod, made.peer):
            subprocess.run(["ip", "netns", "del", name], check=False)

"""A pod and a peer for the tests of init: two network namespaces and a veth pair, with real processes inside.

Everything runs in forked children of the test: they enter the namespace, become the wanted user, and tell their
result through a pipe. Servers answer each connection with what they saw.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import itertools
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyroute2  # noqa: F401  (loaded once, so that each forked run is as quick as in the lab)
import pytest

import init.libiptc  # noqa: F401
from init import cli, proof

CLONE_NEWNET = 0x40000000
PR_SET_KEEPCAPS = 8
CAP_NET_ADMIN = 12
IP_TRANSPARENT, IPV6_TRANSPARENT = 19, 75
WAIT = 5.0
PATIENCE = 100.0
"""Seconds after which a child tells where it is and ends: one that keeps the xtables lock would stop all that follow."""

libc = ctypes.CDLL(None, use_errno=True)
_numbers = itertools.count()

LOOPBACK = {4: "127.0.0.1", 6: "::1"}
POD, PEER = {4: "10.9.0.2", 6: "fd09::2"}, {4: "10.9.0.1", 6: "fd09::1"}
PEER_RESOLVER = {4: "10.9.0.53", 6: "fd09::53"}

ROOT = Path(__file__).parents[3]
APP, PROXY = 1000, 1337
QUIET = "--log_output_level=error"
XTABLES = ("legacy", "legacy-restore", "nft")
BACKENDS = (*XTABLES, "native-nft")
xtables_backends = pytest.mark.parametrize("backend", XTABLES)
backends = pytest.mark.parametrize("backend", BACKENDS)
DEFAULT = [
    "-p",
    "15001",
    "-z",
    "15006",
    "-u",
    "1337",
    "-m",
    "REDIRECT",
    "-i",
    "*",
    "-x",
    "",
    "-b",
    "*",
    "-d",
    "15090,15021,15020",
]


class Run(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)


class Place:
    """A network namespace with processes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.children: list[int] = []
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")

    def close(self) -> None:
        for pid in self.children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        ip("netns", "del", self.name)

    def fork(
        self, body: Callable[[int], None], uid: int = 0, gid: int | None = None, net_admin: bool = False
    ) -> tuple[int, int]:
        """Runs ``body(pipe)`` in a child in this place; gives its pid and the reading end."""
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(reader)
                enter(self.name)
                become(uid, uid if gid is None else gid, net_admin)
                body(writer)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(writer)
        return pid, reader

    def start(self, work: Callable[[], Any], uid: int = 0, gid: int | None = None) -> tuple[int, int]:
        """Begins ``work()`` here as ``uid``; ``finish`` gives its JSON-able result."""

        def body(pipe: int) -> None:
            faulthandler.dump_traceback_later(PATIENCE, exit=True)
            os.write(pipe, json.dumps(work()).encode())

        return self.fork(body, uid, gid)

    def finish(self, pid: int, reader: int) -> Any:
        """The result of what was started."""
        try:
            with os.fdopen(reader) as told:
                text = told.read()
        except BaseException:
            os.kill(pid, signal.SIGKILL)
            raise
        finally:
            _, status = os.waitpid(pid, 0)
        assert status == 0, f"a child in {self.name} failed"
        return json.loads(text)

    def call(self, work: Callable[[], Any], uid: int = 0, gid: int | None = None) -> Any:
        """The JSON-able result of ``work()`` done here as ``uid``."""
        return self.finish(*self.start(work, uid, gid))

    def serve(
        self, *servers: Callable[[], Callable[[], None]], uid: int, gid: int | None = None, net_admin: bool = False
    ) -> None:
        """Starts servers that live as long as the place. Each gives its loop once it listens."""

        def body(pipe: int) -> None:
            loops = [server() for server in servers]
            os.write(pipe, b"ready")
            for loop in loops[1:]:
                threading.Thread(target=loop, daemon=True).start()
            loops[0]()

        pid, reader = self.fork(body, uid, gid, net_admin)
        self.children.append(pid)
        with os.fdopen(reader) as told:
            assert told.read(5) == "ready"

    def init(self, *args: str, env: Mapping[str, str] | None = None) -> Run:
        """One run of the program here, in a forked child as the lab does it."""
        return Run(*self.call(lambda: HERE.init(*args, env=env)))

    def program(
        self, *args: str, words: Sequence[str] = ("-m", "init"), prefix: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        """One run as a program of its own, for the user 1337; ``prefix`` is a program that starts it."""
        entered = ["nsenter", f"--net=/run/netns/{self.name}", *prefix, sys.executable, *words]
        argv = [*entered, "-u", "1337", QUIET, *args]
        return subprocess.run(argv, capture_output=True, text=True, check=False, cwd=ROOT, timeout=PATIENCE)

    def tool(self, *argv: str, text: str = "", check: bool = True) -> str:
        """The output of a program run here."""
        return HERE.tool("nsenter", f"--net=/run/netns/{self.name}", *argv, text=text, check=check)

    def save(self) -> dict[str, str]:
        """Rules of every iptables back end, without counters and dates, and of nftables."""
        return dict(self.call(HERE.save))


class Here:
    """What a place can do, for a process that is in it already: many steps for one fork."""

    def init(self, *args: str, env: Mapping[str, str] | None = None) -> Run:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main(args, {"PATH": os.environ["PATH"], **(env or {})})
        return Run(code, out.getvalue(), err.getvalue())

    def tool(self, *argv: str, text: str = "", check: bool = True) -> str:
        done = subprocess.run(argv, input=text, capture_output=True, text=True, check=False, timeout=PATIENCE)
        assert not check or done.returncode == 0, f"{argv}: {done.stderr}"
        return done.stdout

    def save(self) -> dict[str, str]:
        tools = [f"{family}-{kind}-save" for family in ("iptables", "ip6tables") for kind in ("legacy", "nft")]
        return {**{tool: _plain(self.tool(tool)) for tool in tools}, "nft": self.tool("nft", "list", "ruleset", "inet")}


HERE = Here()


class Net(NamedTuple):
    pod: Place
    peer: Place


@contextlib.contextmanager
def net() -> Iterator[Net]:
    """A pod and its peer, addresses of both families on a veth pair."""
    number = next(_numbers)
    names = [f"slt-{os.getpid()}-{number}{side}" for side in "ab"]
    places: list[Place] = []
    try:
        places.append(Place(names[0]))
        places.append(Place(names[1]))
        pod, peer = places
        ip("-n", pod.name, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", peer.name)
        for place, mine in ((pod, POD), (peer, PEER)):
            ip("-n", place.name, "addr", "add", f"{mine[4]}/24", "dev", "eth0")
            ip("-n", place.name, "addr", "add", f"{mine[6]}/64", "dev", "eth0", "nodad")
            ip("-n", place.name, "link", "set", "eth0", "up")
        ip("-n", peer.name, "addr", "add", f"{PEER_RESOLVER[4]}/24", "dev", "eth0")
        ip("-n", peer.name, "addr", "add", f"{PEER_RESOLVER[6]}/64", "dev", "eth0", "nodad")
        yield Net(pod, peer)
    finally:
        for place in places:
            place.close()


def tool_of(backend: str, family: str = "ipv4") -> str:
    """The program that shows and changes the rules of a back end: ``iptables-nft``, ``ip6tables-legacy``."""
    return f"{'iptables' if family == 'ipv4' else 'ip6tables'}-{'legacy' if backend.startswith('legacy') else 'nft'}"


def stand_in(directory: Path, name: str, script: str) -> dict[str, str]:
    """A shell script in place of a tool; gives the environment in which it is found first."""
    path = directory / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return {"PATH": f"{directory}:{os.environ['PATH']}"}


# --- what runs inside -----------------------------------------------------------------------


def listen(port: int, transparent: bool = False) -> Callable[[], Callable[[], None]]:
    """A TCP server on all addresses of both families that answers with what it saw, as JSON."""

    def start() -> Callable[[], None]:
        socks = [_listener(version, port, transparent) for version in (4, 6)]

        def loop() -> None:
            while True:
                for sock in select.select(socks, [], [])[0]:
                    connection, _ = sock.accept()
                    with connection, contextlib.suppress(OSError):
                        connection.sendall(json.dumps(seen(connection, port)).encode())

        return loop

    return start


def relay(port: int, mark: int) -> Callable[[], Callable[[], None]]:
    """Envoy's inbound side in TPROXY mode: takes transparent connections, dials the app from the client's address."""

    def start() -> Callable[[], None]:
        socks = [_listener(version, port, True) for version in (4, 6)]

        def loop() -> None:
            while True:
                for sock in select.select(socks, [], [])[0]:
                    connection, peer = sock.accept()
                    with connection, contextlib.suppress(OSError):
                        mine = {"via": port, "local": connection.getsockname()[:2], "peer": peer[:2]}
                        with socket.socket(connection.family) as upstream:
                            upstream.settimeout(WAIT)
                            _transparent(upstream)
                            upstream.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, mark)
                            upstream.bind((peer[0], 0))
                            upstream.connect(connection.getsockname()[:2])
                            mine["app"] = json.loads(_all(upstream))
                        connection.sendall(json.dumps(mine).encode())

        return loop

    return start


def answer_udp(port: int, text: str, *addresses: str) -> Callable[[], Callable[[], None]]:
    """A UDP server on each address, so that answers come from the one that was asked; they name the asker."""

    def start() -> Callable[[], None]:
        socks = [socket.socket(_family(address), socket.SOCK_DGRAM) for address in addresses]
        for sock, address in zip(socks, addresses, strict=True):
            sock.bind((address, port))

        def loop() -> None:
            while True:
                for sock in select.select(socks, [], [])[0]:
                    _, peer = sock.recvfrom(2048)
                    # A guard rule refuses the answer; the next one may pass.
                    with contextlib.suppress(PermissionError):
                        sock.sendto(f"{text} {peer[0]} {peer[1]}".encode(), peer)

        return loop

    return start


def ask(address: str, port: int, source: str = "") -> Callable[[], Any]:
    """A TCP client: the server's JSON, or ``{"error": ...}``."""

    def work() -> Any:
        try:
            with socket.socket(_family(address)) as sock:
                sock.settimeout(WAIT)
                if source:
                    sock.bind((source, 0))
                sock.connect((address, port))
                name = sock.getsockname()[:2]
                return {**json.loads(_all(sock)), "client": name}
        except OSError as error:
            return {"error": error.strerror or str(error)}

    return work


def ask_udp(address: str, port: int, source_port: int = 0, wait: float = WAIT) -> Callable[[], Any]:
    """A connected UDP client, as resolvers are: it takes an answer from the very address that it asked."""

    def work() -> Any:
        with socket.socket(_family(address), socket.SOCK_DGRAM) as sock:
            sock.settimeout(wait)
            if source_port:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind(("0.0.0.0" if "." in address else "::", source_port))
            sock.connect((address, port))
            try:
                sock.send(b"?")
                return sock.recv(2048).decode()
            except OSError as error:
                return f"error {error.strerror or error}"

    return work


def seen(connection: socket.socket, port: int) -> dict[str, Any]:
    """What a server sees of a connection."""
    try:
        original = list(proof.original_destination(connection))
    except OSError:
        original = None
    return {
        "listener": port,
        "original": original,
        "local": connection.getsockname()[:2],
        "peer": connection.getpeername()[:2],
    }


def enter(name: str) -> None:
    """Moves this process into a namespace made by ``ip netns``."""
    with open(f"/run/netns/{name}") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {name}")


def become(uid: int, gid: int, net_admin: bool = False) -> None:
    """Gives up root, but for CAP_NET_ADMIN if wanted (Envoy has it in TPROXY mode)."""
    if uid == 0 and gid == 0:
        return
    if net_admin:
        libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    if net_admin:
        header = struct.pack("=Ii", 0x20080522, 0)
        bits = 1 << CAP_NET_ADMIN
        if libc.capset(header, struct.pack("=6I", bits, bits, 0, 0, 0, 0)):
            raise OSError(ctypes.get_errno(), "capset")


def ip(*args: str) -> None:
    done = subprocess.run(["ip", *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {args}: {done.stderr}"


def wait_for(what: str, ready: Callable[[], bool], poll: Sequence[int] = ()) -> None:
    """Waits for a condition that nothing announces, with a deadline."""
    deadline = time.monotonic() + WAIT
    while not ready():
        assert time.monotonic() < deadline, f"{what} did not happen"
        select.select(poll, [], [], 0.01)


def _listener(version: int, port: int, transparent: bool) -> socket.socket:
    sock = socket.socket(socket.AF_INET if version == 4 else socket.AF_INET6)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if version == 6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    if transparent:
        _transparent(sock)
    sock.bind(("0.0.0.0" if version == 4 else "::", port))
    sock.listen(512)
    return sock


def _transparent(sock: socket.socket) -> None:
    if sock.family == socket.AF_INET:
        sock.setsockopt(socket.IPPROTO_IP, IP_TRANSPARENT, 1)
    else:
        sock.setsockopt(socket.IPPROTO_IPV6, IPV6_TRANSPARENT, 1)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET if "." in address else socket.AF_INET6


def _all(sock: socket.socket) -> bytes:
    data = b""
    while chunk := sock.recv(4096):
        data += chunk
    return data


def _plain(text: str) -> str:
    kept = [line.split(" [")[0] for line in text.splitlines() if line and not line.startswith("#")]
    return "\n".join(kept)

"""The echo app in a network namespace of its own: wildcard sockets, two families, privileged ports as uid 1000."""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyroute2 import NetNS, netns

pytestmark = pytest.mark.root

DEADLINE = 10.0
# As a pod's app runs: forked as uid 1000 from a process that imported everything; nothing can be imported after that.
AS_APP = """
import os, sys
import lab.apps.preload
from lab.apps import echo
os.setgroups([]); os.setgid(1000); os.setuid(1000)
sys.meta_path.clear()
sys.exit(echo.command_line())
"""
PORTS = ("80:http", "7:tcp", "53:udp", "4317:grpc", "443:https", "444:tls", "9:auto")
ADDRESSES = ("10.9.0.1", "10.9.0.2", "fd00:9::1", "fd00:9::2")


@pytest.fixture(scope="module")
def namespace() -> Iterator[str]:
    name = f"slt-{os.getpid()}-echo"
    with NetNS(name, flags=os.O_CREAT) as ns:
        loopback = ns.link_lookup(ifname="lo")[0]
        ns.link("set", index=loopback, state="up")
        for address in ADDRESSES:
            v6 = ":" in address
            ns.addr("add", index=loopback, address=address, prefixlen=128 if v6 else 32)
    netns.pushns(name)
    try:
        Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").write_text("0")
    finally:
        netns.popns()
    yield name
    netns.remove(name)


@pytest.fixture(scope="module")
def log(namespace: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The event log of an app that listens on all addresses as uid 1000."""
    directory = tmp_path_factory.mktemp("echo")
    log = directory / "log"
    log.touch()
    os.chown(log, 1000, 1000)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready:
        ready.bind(str(directory / "notify"))
        os.chmod(directory / "notify", 0o666)
        for parent in (directory, *directory.parents[:2]):
            os.chmod(parent, 0o755)
        ready.settimeout(DEADLINE)
        netns.pushns(namespace)
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", AS_APP, "--name", "a.b", "--log", str(log)]
                + ["--address", "0.0.0.0", "--address", "::"]
                + [f"--port={port}" for port in PORTS],
                env={**os.environ, "NOTIFY_SOCKET": str(directory / "notify")},
            )
        finally:
            netns.popns()
        try:
            assert ready.recv(100) == b"READY=1"
            yield log
        finally:
            process.kill()
            process.wait()


def opened(namespace: str, address: str, kind: socket.SocketKind) -> socket.socket:
    netns.pushns(namespace)
    try:
        sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, kind)
    finally:
        netns.popns()
    sock.settimeout(DEADLINE)
    return sock


@pytest.mark.parametrize("address", ADDRESSES)
def test_udp_answers_from_the_address_that_was_asked(namespace: str, log: Path, address: str) -> None:
    with opened(namespace, address, socket.SOCK_DGRAM) as sock:
        sock.sendto(b"x", (address, 53))
        data, sender = sock.recvfrom(2000)
    seen = json.loads(data)
    assert sender[:2] == (address, 53)
    assert seen["local"] == {"address": address, "port": 53}


@pytest.mark.parametrize("address", ADDRESSES)
def test_tcp_names_both_ends(namespace: str, log: Path, address: str) -> None:
    with opened(namespace, address, socket.SOCK_STREAM) as sock:
        sock.connect((address, 7))
        sock.sendall(b"x")
        seen = json.loads(sock.makefile("rb").readline())
        assert seen["local"] == {"address": address, "port": 7}
        assert seen["peer"] == {"address": address, "port": sock.getsockname()[1]}
    lines = [json.loads(text) for text in log.read_text().splitlines()]
    assert [e["protocol"] for e in lines if e["event"] == "connection" and e["peer"] == seen["peer"]] == ["tcp"]


@pytest.mark.parametrize("address", ADDRESSES)
def test_grpc_listens_on_both_families(namespace: str, log: Path, address: str) -> None:
    with opened(namespace, address, socket.SOCK_STREAM) as sock:
        sock.connect((address, 4317))
        # HTTP/2's first word is SETTINGS from the server, once it has seen the client's preface (RFC 9113, 3.4).
        sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5))
        assert sock.recv(9)[3] == 4


def test_http_and_https_as_an_unprivileged_app(namespace: str, log: Path) -> None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    for port in (80, 443, 9):
        with opened(namespace, "10.9.0.1", socket.SOCK_STREAM) as raw:
            raw.connect(("10.9.0.1", port))
            with context.wrap_socket(raw, server_hostname="a.b") if port == 443 else raw as sock:
                sock.sendall(b"GET /status/404 HTTP/1.1\r\nHost: a.b\r\nConnection: close\r\n\r\n")
                head, _, body = sock.makefile("rb").read().partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 404 Not Found")
        assert json.loads(body)["local"] == {"address": "10.9.0.1", "port": port}


def test_tls_as_an_unprivileged_app(namespace: str, log: Path) -> None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with opened(namespace, "fd00:9::1", socket.SOCK_STREAM) as raw:
        raw.connect(("fd00:9::1", 444))
        with context.wrap_socket(raw, server_hostname="named.example") as sock:
            sock.sendall(b"x")
            assert json.loads(sock.makefile("rb").readline())["tls"]["sni"] == "named.example"

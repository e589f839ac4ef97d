"""The echo app as a process: readiness, its end, and its errors."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from free_ports import free_port

DEADLINE = 10.0


@pytest.fixture
def notify_socket(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(DEADLINE)
        yield sock


def get(port: int) -> dict[str, object]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE)
    connection.request("GET", "/")
    data: dict[str, object] = json.loads(connection.getresponse().read())
    connection.close()
    return data


def test_program_is_ready_serves_logs_and_ends(notify_socket: socket.socket) -> None:
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "lab.apps.echo", "--port", f"{port}:http", "--name", "a.b", "--address", "127.0.0.1"],
        env={**os.environ, "NOTIFY_SOCKET": str(notify_socket.getsockname())},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert notify_socket.recv(100) == b"READY=1"
        assert get(port)["pod"] == "a.b"
        process.terminate()
        out, _ = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert [json.loads(text)["event"] for text in out.splitlines()] == ["connection", "request"]


def test_ports_from_the_environment(notify_socket: socket.socket) -> None:
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "lab.apps.echo", "--log", ""],
        env={
            **os.environ,
            "NOTIFY_SOCKET": str(notify_socket.getsockname()),
            "ECHO_PORTS": f"{port}:auto",
            "ECHO_NAME": "env.b",
        },
    )
    try:
        assert notify_socket.recv(100) == b"READY=1"
        assert get(port)["app"] == "env"
    finally:
        process.kill()
        process.wait()


FORKING = """
import json, os, sys
import lab.apps.preload
from lab.apps import echo
pid = os.fork()
if pid == 0:
    os._exit(echo.main(json.loads(sys.argv[1])))
print(pid, flush=True)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_main_in_a_forked_child(notify_socket: socket.socket, tmp_path: Path) -> None:
    """In a process of its own: one that has run a gRPC server, as this one may have, cannot be forked."""
    port, log = free_port(), tmp_path / "log"
    params = {
        "ports": [{"port": port, "protocol": "http"}],
        "name": "catalog.catalog",
        "addresses": ["127.0.0.1"],
        "log": str(log),
    }
    process = subprocess.Popen(
        [sys.executable, "-c", FORKING, json.dumps(params)],
        env={**os.environ, "NOTIFY_SOCKET": str(notify_socket.getsockname())},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        assert notify_socket.recv(100) == b"READY=1"
        assert get(port)["app"] == "catalog"
        os.kill(child, signal.SIGTERM)
        assert process.wait(DEADLINE) == 0
    finally:
        if process.poll() is None:
            os.kill(child, signal.SIGKILL)
        process.communicate()
    assert [json.loads(text)["event"] for text in log.read_text().splitlines()] == ["connection", "request"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "error: nothing to serve. Give --port or ECHO_PORTS"),
        (["--port", "80:smtp"], "error: bad echo protocol: port 80: 'smtp'. Use one of"),
        (["--port", "80", "--address", "nowhere"], "error: bad listen address: 'nowhere': not an IP address"),
        (["--port", "0:udp", "--address", "192.0.2.1"], "error: cannot listen: udp port 0 of x: Cannot assign"),
        (["--port", "0:tls", "--certificate", "/none"], "error: cannot use the TLS files: /none"),
    ],
)
def test_errors_are_one_line(arguments: list[str], line: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lab.apps.echo", "--name", "x", *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(line)
    assert done.stderr.count("\n") == 1


def test_neither_http_nor_grpc_is_loaded_for_a_tcp_port() -> None:
    code = "import sys, lab.apps.echo; print([m for m in ('h11', 'grpc', 'cryptography') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE, check=True)
    assert done.stdout.strip() == "[]"

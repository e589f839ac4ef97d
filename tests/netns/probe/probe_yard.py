"""A router namespace with two places behind it, ``a`` (10.6.0.2) and ``b`` (10.6.1.2), and echo apps in them."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lab.probe.crew import Where

_numbers = itertools.count()
_ECHO = "import json, sys; from lab.apps.echo import main; sys.exit(main(json.loads(sys.argv[1])))"


def sh(*words: str, stdin: str | None = None) -> str:
    done = subprocess.run(words, input=stdin, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
    return done.stdout


def path(name: str) -> str:
    return f"/run/netns/{name}"


@dataclass
class Yard:
    """``names`` are the namespaces of ``router``, ``a`` and ``b``."""

    names: dict[str, str]
    tmp: Path
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def where(self, place: str) -> Where:
        return Where(place, path(self.names[place]), router=path(self.names["router"]), interface=f"to-{place}")

    def run(self, place: str, *words: str, stdin: str | None = None) -> str:
        return sh("ip", "netns", "exec", self.names[place], *words, stdin=stdin)

    def echo(self, place: str, ports: Sequence[tuple[int, str]], **params: object) -> None:
        """Starts an echo app and returns when it listens."""
        notify = self.tmp / f"notify-{len(self.started)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready:
            ready.bind(str(notify))
            ready.settimeout(20)
            config = {"name": f"{place}.test", "ports": [{"port": p, "protocol": k} for p, k in ports], **params}
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.names[place], sys.executable, "-c", _ECHO, json.dumps(config)],
                env={**os.environ, "NOTIFY_SOCKET": str(notify)},
            )
            self.started.append(process)
            assert ready.recv(100) == b"READY=1"


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    prefix = f"slt-{os.getpid()}-p{next(_numbers)}"
    made = Yard({k: f"{prefix}-{k}" for k in ("router", "a", "b")}, tmp_path_factory.mktemp("yard"))
    for name in made.names.values():
        sh("ip", "netns", "add", name)
        sh("ip", "-n", name, "link", "set", "lo", "up")
    try:
        router = made.names["router"]
        made.run("router", "sysctl", "-qw", "net.ipv4.ip_forward=1")
        for number, place in enumerate(("a", "b")):
            ns = made.names[place]
            sh("ip", "-n", ns, "link", "add", "eth0", "type", "veth", "peer", "name", f"to-{place}", "netns", router)
            sh("ip", "-n", ns, "addr", "add", f"10.6.{number}.2/24", "dev", "eth0")
            sh("ip", "-n", router, "addr", "add", f"10.6.{number}.1/24", "dev", f"to-{place}")
            sh("ip", "-n", ns, "link", "set", "eth0", "up")
            sh("ip", "-n", router, "link", "set", f"to-{place}", "up")
            sh("ip", "-n", ns, "route", "add", "default", "via", f"10.6.{number}.1")
            made.run(place, "sysctl", "-qw", "net.ipv4.ping_group_range=0 2147483647")
        yield made
    finally:
        for process in made.started:
            process.terminate()
        for process in made.started:
            process.wait(10)
        for name in made.names.values():
            subprocess.run(["ip", "netns", "del", name], check=False)

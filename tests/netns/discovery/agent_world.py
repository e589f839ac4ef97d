"""Run inside a network namespace: discovery on its real ports, and a real agent with Envoy that comes to it over mTLS.

Usage: agent_world.py DIRECTORY (with manifests in it). Prints one JSON object: what discovery says of the proxy, the
certificates that Envoy holds, and what a wrong token gets.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
SERVE = "import json, sys; from lab.discovery.server import main; sys.exit(main(json.loads(sys.argv[1])))"


class Notify:
    """A socket for READY=1."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.settimeout(60)

    def wait(self) -> None:
        assert self._socket.recv(64).startswith(b"READY=1")


def ask(path: Path, **question: Any) -> Any:
    with socket.socket(socket.AF_UNIX) as s:
        s.settimeout(30)
        s.connect(str(path))
        s.sendall(json.dumps(question).encode() + b"\n")
        return json.loads(s.makefile().readline())


def main(directory: Path) -> None:
    control, pod = directory / "control.sock", directory / "pod"
    notify = Notify(directory / "notify")
    environment = {**os.environ, "NOTIFY_SOCKET": str(notify.path), "PYTHONPATH": str(ROOT)}
    params = {"mesh": str(directory / "manifests"), "listen": "127.0.0.1", "socket": str(control), "name": "test"}
    discovery = subprocess.Popen(
        [sys.executable, "-c", SERVE, json.dumps(params)],
        env=environment,
        stderr=(directory / "discovery.log").open("w"),
    )
    agent = None
    try:
        notify.wait()
        for name, text in (
            (
                "var/run/secrets/tokens/istio-token",
                ask(control, op="token", namespace="frontend", account="frontend")["token"],
            ),
            ("var/run/secrets/istio/root-cert.pem", ask(control, op="root")["root"]),
            ("etc/istio/pod/labels", 'app="frontend"\n'),
            ("etc/istio/pod/annotations", ""),
        ):
            (pod / name).parent.mkdir(parents=True, exist_ok=True)
            (pod / name).write_text(text)
        config = {"discoveryAddress": "127.0.0.1:15012", "terminationDrainDuration": "1s"}
        agent = subprocess.Popen(
            [sys.executable, "-m", "agent", "proxy", "sidecar", "--domain", "frontend.svc.cluster.local"],
            cwd=pod,
            stdout=(directory / "agent.log").open("w"),
            stderr=subprocess.STDOUT,
            env={
                **environment,
                "POD_NAME": "frontend-0",
                "POD_NAMESPACE": "frontend",
                "INSTANCE_IP": "10.0.1.5",
                "SERVICE_ACCOUNT": "frontend",
                "ISTIOD_SAN": "istiod.istio-system.svc",
                "PROXY_CONFIG": json.dumps(config),
            },
        )
        notify.wait()
        node = "sidecar~10.0.1.5~frontend-0.frontend~frontend.svc.cluster.local"
        status = ask(control, op="wait", nodes=[node], timeout=30)
        with urllib.request.urlopen("http://127.0.0.1:15000/certs", timeout=10) as answer:
            certificates = json.load(answer)
        print(json.dumps({"settled": status["settled"], "proxy": status["proxies"][node], "certs": certificates}))
    finally:
        for process in (agent, discovery):
            if process is not None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

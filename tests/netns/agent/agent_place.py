"""Namespaces for agents: a node with the far side, and pods on routed links, each with its own resolv.conf."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
DEADLINE = 30.0
DNS, DISCOVERY = "10.96.0.10", "10.96.0.11"
TYPE = "type.googleapis.com/"
CLUSTER, LISTENER = f"{TYPE}envoy.config.cluster.v3.Cluster", f"{TYPE}envoy.config.listener.v3.Listener"
EXTENSION = f"{TYPE}envoy.config.core.v3.TypedExtensionConfig"
NAME_TABLE = f"{TYPE}istio.networking.nds.v1.NameTable"

_numbers = itertools.count(1)


def sh(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=check)


@dataclass
class Namespace:
    """A network namespace; `ip netns exec` binds the files of /etc/netns/NAME over those of /etc."""

    name: str
    etc: Path

    @classmethod
    def create(cls) -> Namespace:
        name = f"slt-{os.getpid()}-ag{next(_numbers)}"
        sh("ip", "netns", "add", name)
        etc = Path("/etc/netns") / name
        etc.mkdir(parents=True)
        (etc / "hosts").write_text("127.0.0.1 localhost\n")
        (etc / "nsswitch.conf").write_text("hosts: files dns\n")
        namespace = cls(name, etc)
        namespace.run("ip", "link", "set", "lo", "up")
        return namespace

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return sh("ip", "netns", "exec", self.name, *command, check=check)

    def popen(self, *command: str, **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["ip", "netns", "exec", self.name, *command], **options)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Sockets opened by this thread belong to the namespace."""
        with open("/proc/thread-self/ns/net") as home, open(f"/run/netns/{self.name}") as target:
            _setns(target.fileno())
            try:
                yield
            finally:
                _setns(home.fileno())

    def delete(self) -> None:
        sh("ip", "netns", "del", self.name, check=False)
        shutil.rmtree(self.etc, ignore_errors=True)


def _setns(descriptor: int) -> None:
    import ctypes

    if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0x40000000) != 0:
        raise OSError(ctypes.get_errno(), "setns")


class Peer:
    """The program agent_peer.py."""

    def __init__(self, node: Namespace, zone: Mapping[str, str], lifetime: float) -> None:
        command = [sys.executable, str(HERE / "agent_peer.py"), "--listen", DISCOVERY, "--dns", DNS]
        command += ["--zone", json.dumps(zone), "--lifetime", str(lifetime)]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = node.popen(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        self.events: list[dict[str, Any]] = []
        self._queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        self.wait("listening")

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(json.loads(line))

    def wait(self, event: str, **fields: Any) -> dict[str, Any]:
        """The next event with these fields; fails after the deadline."""
        while True:
            found = self._queue.get(timeout=DEADLINE)
            self.events.append(found)
            if found["event"] == event and all(found.get(key) == value for key, value in fields.items()):
                return found

    def drain(self) -> list[dict[str, Any]]:
        """Events that have come so far and were not waited for."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._queue.get_nowait())
        self.events += found
        return found

    def send(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()
        self.wait("done", op=command["op"])

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE)
        self._thread.join(DEADLINE)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


@dataclass
class Agent:
    """A running agent as 1337 without capabilities."""

    process: subprocess.Popen[bytes]
    log: Path
    notify: socket.socket

    def wait_ready(self) -> None:
        ready, _, _ = select.select([self.notify], [], [], DEADLINE)
        assert ready, f"not ready:\n{self.log.read_text()}"
        assert self.notify.recv(100) == b"READY=1"

    @property
    def pid(self) -> int:
        return self.process.pid

    def envoy_pid(self) -> int:
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        found = [int(pid) for pid in children if Path(f"/proc/{pid}/comm").read_text().strip() == "envoy"]
        assert len(found) == 1
        return found[0]

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(DEADLINE)

    def text(self) -> str:
        return self.log.read_text()


# Runs as root in the pod's mount namespace: what 1337 cannot walk is bound at public paths, the root is read-only.
WRAPPER = r"""
set -e
base=/mnt/slt-base
mount -t tmpfs -o mode=0755 tmpfs /mnt
mkdir -p $base/checkout $base/packages $base/run
mount --bind "$CHECKOUT" $base/checkout
mount --bind "$PACKAGES" $base/packages
mount --bind "$WORKDIR" $base/run
mount -o remount,bind,ro /
cd $base/run
export PYTHONPATH=$base/checkout:$base/packages PYTHONDONTWRITEBYTECODE=1
unset CHECKOUT PACKAGES WORKDIR
exec setpriv --reuid 1337 --regid 1337 --clear-groups --inh-caps=-all --bounding-set=-all --no-new-privs \
    "$PYTHON" -m agent "$@"
"""


@dataclass
class Pod:
    """A namespace on a routed link, with a working directory of its own."""

    namespace: Namespace
    address: str
    directory: Path
    agents: list[Agent] = field(default_factory=list)

    def start_agent(self, env: Mapping[str, str] | None = None, arguments: Sequence[str] = ()) -> Agent:
        run = self.directory / "run"
        run.mkdir(exist_ok=True)
        os.chown(run, 1337, 1337)
        notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        path = run / f"notify{len(self.agents)}"
        notify.bind(str(path))
        os.chmod(path, 0o666)
        log = self.directory / f"agent{len(self.agents)}.log"
        environment = {
            "PATH": os.environ["PATH"],
            "CHECKOUT": str(ROOT),
            "PACKAGES": str(Path(os.__file__).parent if sys.prefix == sys.base_prefix else site_packages()),
            "WORKDIR": str(run),
            "PYTHON": os.path.realpath(sys.executable),
            "POD_NAME": "client",
            "POD_NAMESPACE": "ns1",
            "SERVICE_ACCOUNT": "default",
            "INSTANCE_IP": self.address,
            "ISTIO_META_DNS_CAPTURE": "true",
            "NOTIFY_SOCKET": f"/mnt/slt-base/run/{path.name}",
            "PROXY_CONFIG": json.dumps(
                {
                    "discoveryAddress": f"{DISCOVERY}:15010",
                    "controlPlaneAuthPolicy": "NONE",
                    "terminationDrainDuration": "100ms",
                    "concurrency": 1,
                }
            ),
            **(env or {}),
        }
        with log.open("wb") as output:
            process = self.namespace.popen(
                "unshare", "--mount", "--propagation", "private", "sh", "-c", WRAPPER, "agent", "proxy", "sidecar",
                *arguments, env=environment, stdout=output, stderr=output,
            )  # fmt: skip
        agent = Agent(process, log, notify)
        self.agents.append(agent)
        return agent

    def dig(self, *arguments: str, server: str = "127.0.0.1", port: int = 15053) -> str:
        command = ["dig", f"@{server}", "-p", str(port), "+tries=1", "+time=5", *arguments]
        return self.namespace.run(*command, check=False).stdout

    def close(self) -> None:
        for agent in self.agents:
            if agent.process.poll() is None:
                agent.process.kill()
                agent.process.wait(DEADLINE)
            agent.notify.close()


def site_packages() -> Path:
    import grpc

    return Path(grpc.__file__).resolve().parents[1]


class World:
    """A node, its far side, and pods."""

    def __init__(self, zone: Mapping[str, str] | None = None, lifetime: float = 3600) -> None:
        self._stack = contextlib.ExitStack()
        self.pods: list[Pod] = []
        try:
            self.node = Namespace.create()
            self._stack.callback(self.node.delete)
            for address in (DNS, DISCOVERY):
                self.node.run("ip", "addr", "add", f"{address}/32", "dev", "lo")
            self.node.run("sysctl", "-qw", "net.ipv4.ip_forward=1")
            self._arguments = (dict(zone or {}), lifetime)
            self.peer = Peer(self.node, *self._arguments)
            self._stack.callback(lambda: self.peer.stop())
        except BaseException:
            self._stack.close()
            raise

    def restart_peer(self) -> None:
        self.peer = Peer(self.node, *self._arguments)

    def pod(self) -> Pod:
        namespace = Namespace.create()
        self._stack.callback(namespace.delete)
        (namespace.etc / "resolv.conf").write_text(
            f"search ns1.svc.cluster.local svc.cluster.local cluster.local\nnameserver {DNS}\noptions ndots:5\n"
        )
        number = len(self.pods) + 1
        address, link = f"10.244.0.{number}", f"p{number}"
        commands = [
            f"link add {link} netns {self.node.name} type veth peer name eth0 netns {namespace.name}",
            f"-n {self.node.name} addr add 169.254.1.1/32 dev {link}",
            f"-n {self.node.name} link set {link} up",
            f"-n {namespace.name} addr add {address}/32 dev eth0",
            f"-n {namespace.name} link set eth0 up",
            f"-n {namespace.name} route add default via 169.254.1.1 dev eth0 onlink",
            f"-n {self.node.name} route add {address}/32 dev {link}",
        ]
        for command in commands:
            sh("ip", *command.split())
        directory = Path(tempfile.mkdtemp(prefix="slt-agent-"))
        self._stack.callback(shutil.rmtree, directory, ignore_errors=True)
        directory.chmod(0o755)
        pod = Pod(namespace, address, directory)
        self._stack.callback(pod.close)
        self.pods.append(pod)
        return pod

    def close(self) -> None:
        self._stack.close()

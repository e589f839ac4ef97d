"""The agent beside Envoy: how fast it starts, what memory it takes, and how fast its DNS answers.

The DNS server is asked by dnsperf with the name table that discovery made of 1000 services; Envoy's own dns_filter gets
the same table and the same questions in the same run.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SERVICES = 1000
HEADLESS_EVERY = 10
RUNS = 5
SECONDS = 3
LATENCY_RATE = 5000
DEADLINE = 30.0
FILTER_PORT = 19053
AGENT_PORT = 15053
CLONE_NEWNET = 0x40000000


def main() -> dict[str, Any]:
    """Needs root.

    Keys: ``envoy_alone_s`` (Envoy with the agent's bootstrap, from exec to live), ``ready_s`` (`python -m agent` from
    exec to READY=1), ``ready_forked_s`` (forked from a process with agent.preload), ``ready_beyond_envoy_s``,
    ``ready_forked_beyond_envoy_s``, ``pss_mb``, ``pss_forked_mb``, ``rss_mb``, ``rss_forked_mb`` (what PSS is where no
    other process maps the same libraries), ``cpu_s``, ``cpu_forked_s`` (processor time of the
    agent until then), ``push_after_outage_s`` (from the return of discovery to a new name's first answer), and under
    ``dns`` queries a second and latencies.
    """
    if os.geteuid() != 0:
        return {"skipped": "needs root"}
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="bench-agent-") as name, _namespace(f"bench-{os.getpid()}-agent") as net:
        work = Path(name)
        with _discovery(work / "small", net, services=5):
            starts = [_exec_agent(work / f"exec{n}", net) for n in range(RUNS)]
            forks = [_fork_agent(work / f"fork{n}", net) for n in range(RUNS)]
            envoy = statistics.median(_envoy_alone(work / "exec0", net) for _ in range(RUNS))
            result["envoy_alone_s"] = envoy
            for prefix, runs in (("", starts), ("_forked", forks)):
                seconds, memory, mapped, processor = (statistics.median(v) for v in zip(*runs, strict=True))
                result[f"ready{prefix}_s"] = seconds
                result[f"ready{prefix}_beyond_envoy_s"] = seconds - envoy
                result[f"pss{prefix}_mb"] = memory
                result[f"rss{prefix}_mb"] = mapped
                result[f"cpu{prefix}_s"] = processor
            result = {key: round(value, 3) for key, value in result.items()}
            for key, value in result.items():
                print(f"{key:<28} {value:9.3f}")
        result["push_after_outage_s"] = round(statistics.median(_outage(work / f"out{n}", net) for n in range(3)), 3)
        print(f"{'push_after_outage_s':<28} {result['push_after_outage_s']:9.3f}")
        with _discovery(work / "big", net, services=SERVICES):
            result["dns"] = _dns(work, net)
    return result


# -- places and processes


@contextmanager
def _namespace(name: str) -> Iterator[str]:
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        for address in ("10.244.0.1/32", "10.96.0.10/32", "10.96.0.11/32"):
            subprocess.run(["ip", "-n", name, "addr", "add", address, "dev", "lo"], check=True)
        yield name
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


def _popen(net: str, *command: str, **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["ip", "netns", "exec", net, *command], **options)


@contextmanager
def _stopped(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        yield process
    finally:
        process.kill()
        process.wait(DEADLINE)


def _notify_socket(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    path.unlink(missing_ok=True)
    sock.bind(str(path))
    sock.settimeout(DEADLINE)
    return sock


@contextmanager
def _discovery(work: Path, net: str, services: int) -> Iterator[None]:
    mesh = work / "mesh"
    mesh.mkdir(parents=True)
    (mesh / "mesh.yaml").write_text(_manifests(services))
    code = "import json, sys; from lab.discovery.server import main; main(json.loads(sys.argv[1]))"
    params = {"mesh": str(mesh), "listen": "10.96.0.11", "socket": "", "name": "bench"}
    with _notify_socket(work / "discovery") as ready, (work / "discovery.log").open("wb") as log:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "NOTIFY_SOCKET": str(work / "discovery")}
        command = [sys.executable, "-c", code, json.dumps(params)]
        with _stopped(_popen(net, *command, env=env, stdout=log, stderr=log)):
            ready.recv(100)
            yield


def _manifests(services: int) -> str:
    objects = [
        'apiVersion: v1\nkind: ConfigMap\nmetadata: {name: istio, namespace: istio-system}\ndata: {mesh: "enableAutoMtls: false"}',
        "apiVersion: security.istio.io/v1\nkind: PeerAuthentication\n"
        "metadata: {name: default, namespace: istio-system}\nspec: {mtls: {mode: DISABLE}}",
        "apiVersion: v1\nkind: Namespace\nmetadata: {name: bench, labels: {istio-injection: enabled}}",
        "apiVersion: v1\nkind: Pod\nmetadata: {name: client, namespace: bench, labels: {app: client}}\n"
        "spec: {containers: [{name: app, ports: [{containerPort: 8080}]}]}\nstatus: {podIP: 10.244.0.1}",
    ]
    for n in range(services):
        address = "None" if n % HEADLESS_EVERY == 0 else f"10.97.{n // 250}.{n % 250 + 1}"
        objects.append(
            f"apiVersion: v1\nkind: Service\nmetadata: {{name: s{n}, namespace: bench}}\n"
            f"spec: {{clusterIP: {address}, ports: [{{name: http, port: 80}}]}}"
        )
        if address == "None":
            addresses = ", ".join(f"{{ip: 10.98.{n // 250}.{k}}}" for k in range(1, 4))
            objects.append(
                f"apiVersion: v1\nkind: Endpoints\nmetadata: {{name: s{n}, namespace: bench}}\n"
                f"subsets: [{{addresses: [{addresses}], ports: [{{name: http, port: 80}}]}}]"
            )
    return "\n---\n".join(objects) + "\n"


def _environment(directory: Path) -> dict[str, str]:
    config = {
        "discoveryAddress": "10.96.0.11:15010",
        "controlPlaneAuthPolicy": "NONE",
        "terminationDrainDuration": "1ms",
        "concurrency": 1,
    }
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "POD_NAME": "client",
        "POD_NAMESPACE": "bench",
        "INSTANCE_IP": "10.244.0.1",
        "ISTIO_META_DNS_CAPTURE": "true",
        "DNS_PROXY_ADDR": f"127.0.0.1:{AGENT_PORT}",
        "PROXY_CONFIG": json.dumps(config),
        "NOTIFY_SOCKET": str(directory / "notify"),
    }


# -- start


Start = tuple[float, float, float, float]


def _exec_agent(directory: Path, net: str) -> Start:
    """Seconds from exec to READY=1, MB of PSS and RSS and seconds of processor time then."""
    directory.mkdir()
    with _notify_socket(directory / "notify") as ready, (directory / "log").open("wb") as log:
        started = time.perf_counter()
        command = [sys.executable, "-m", "agent", "proxy", "sidecar"]
        process = _popen(net, *command, env=_environment(directory), cwd=directory, stdout=log, stderr=log)
        try:
            ready.recv(100)
            return time.perf_counter() - started, *_memory(process.pid), _processor(process.pid)
        finally:
            _end(process.pid)
            process.wait(DEADLINE)


def _fork_agent(directory: Path, net: str) -> Start:
    """The same for an agent that a preloaded process forks; a helper process does it, so that this one stays light."""
    directory.mkdir()
    with _notify_socket(directory / "notify") as ready:
        command = [sys.executable, "-m", "scripts.bench_agent", "zygote", str(directory), f"/run/netns/{net}"]
        helper = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert helper.stdin is not None
        assert helper.stdout is not None
        try:
            helper.stdout.readline()
            started = time.perf_counter()
            helper.stdin.write(b"go\n")
            helper.stdin.flush()
            pid = int(helper.stdout.readline())
            ready.recv(100)
            result = time.perf_counter() - started, *_memory(pid), _processor(pid)
            _end(pid)
            helper.wait(DEADLINE)
            return result
        finally:
            helper.kill()
            helper.wait(DEADLINE)
            helper.stdin.close()
            helper.stdout.close()


def _zygote(directory: str, namespace: str) -> None:
    import agent.cli
    import agent.preload

    print("loaded", flush=True)
    sys.stdin.readline()
    pid = os.fork()
    if pid == 0:
        with open(namespace) as file:
            ctypes.CDLL(None).setns(file.fileno(), CLONE_NEWNET)
        os.chdir(directory)
        log = os.open("log", os.O_CREAT | os.O_WRONLY, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os._exit(agent.cli.main(["proxy", "sidecar"], _environment(Path(directory))))
    print(pid, flush=True)
    os.waitpid(pid, 0)


def _end(pid: int) -> None:
    os.kill(pid, signal.SIGTERM)


def _memory(pid: int) -> tuple[float, float]:
    """(PSS, RSS) in MB."""
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE))
    return int(found["Pss"]) / 1024, int(found["Rss"]) / 1024


def _processor(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _outage(directory: Path, net: str) -> float:
    """Seconds from the READY=1 of a new discovery until the agent answers for a name that only this one has."""
    directory.mkdir()
    command = [sys.executable, "-m", "agent", "proxy", "sidecar"]
    with _notify_socket(directory / "notify") as ready, (directory / "log").open("wb") as log:
        with _discovery(directory / "first", net, services=2):
            process = _popen(net, *command, env=_environment(directory), cwd=directory, stdout=log, stderr=log)
            ready.recv(100)
        with _stopped(process):
            # Long enough for Envoy's back-off to reach its limit.
            time.sleep(3)
            with _discovery(directory / "second", net, services=3):
                started = time.perf_counter()
                _wait_for_name(net, "s2.bench.svc.cluster.local")
                return time.perf_counter() - started


def _wait_for_name(net: str, name: str) -> None:
    import dns.flags
    import dns.message
    import dns.query

    query = dns.message.make_query(name, "A")
    give_up = time.monotonic() + DEADLINE
    with _entered(net):
        while time.monotonic() < give_up:
            answer = dns.query.udp(query, "127.0.0.1", timeout=1, port=AGENT_PORT)
            if answer.flags & dns.flags.AA:
                return
            time.sleep(0.01)
    raise TimeoutError(f"no answer for {name}")


def _envoy_alone(directory: Path, net: str) -> float:
    """Seconds from exec until Envoy says on its admin port that it is there; it has no discovery."""
    from agent.envoy import find_binary

    bootstrap = directory / "bootstrap.json"
    if not bootstrap.exists():
        command = [sys.executable, "-m", "agent", "proxy", "sidecar", "--dry-run"]
        env = _environment(directory)
        done = subprocess.run(command, cwd=directory, env=env, capture_output=True, check=True)
        document = json.loads(done.stdout)["bootstrap"]
        del document["dynamic_resources"]
        bootstrap.write_text(json.dumps(document))
    envoy = find_binary("/usr/local/bin/envoy")
    command = [envoy, "-c", str(bootstrap), "-l", "off", "--disable-hot-restart", "--concurrency", "1"]
    started = time.perf_counter()
    process = _popen(net, *command, cwd=directory)
    with _stopped(process):
        _wait_live(net)
        return time.perf_counter() - started


def _wait_live(net: str, port: int = 15000) -> None:
    give_up = time.monotonic() + DEADLINE
    with _entered(net):
        while time.monotonic() < give_up:
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=1) as sock:
                    sock.sendall(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n")
                    if b" 200 OK" in sock.recv(100):
                        return
            except OSError:
                pass
            time.sleep(0.002)
    raise TimeoutError("Envoy is not live")


@contextmanager
def _entered(net: str) -> Iterator[None]:
    setns = ctypes.CDLL(None).setns
    with open("/proc/thread-self/ns/net") as home, open(f"/run/netns/{net}") as there:
        setns(there.fileno(), CLONE_NEWNET)
        try:
            yield
        finally:
            setns(home.fileno(), CLONE_NEWNET)


# -- DNS


def _dns(work: Path, net: str) -> dict[str, Any]:
    if shutil.which("dnsperf") is None:
        print("dns: skipped, there is no dnsperf")
        return {"skipped": "there is no dnsperf (Debian package dnsperf)"}
    directory = work / "dns"
    directory.mkdir()
    with _notify_socket(directory / "notify") as ready, (directory / "log").open("wb") as log:
        command = [sys.executable, "-m", "agent", "proxy", "sidecar"]
        with _stopped(_popen(net, *command, env=_environment(directory), cwd=directory, stdout=log, stderr=log)):
            ready.recv(100)
            table = _name_table(net)
            names = sorted(table)
            questions = directory / "questions"
            questions.write_text("".join(f"{name} A\n" for name in names))
            _check_shuffle(net, table)
            with _stopped(_dns_filter(directory, net, table)):
                _wait_live(net, 19901)
                return _measure(net, questions, len(names))


def _name_table(net: str) -> dict[str, list[str]]:
    with _entered(net), socket.create_connection(("127.0.0.1", 15020), timeout=DEADLINE) as sock:
        sock.sendall(b"GET /debug/ndsz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = b"".join(iter(lambda: sock.recv(1 << 16), b""))
    table: Mapping[str, Any] = json.loads(answer.partition(b"\r\n\r\n")[2])["table"]
    return {name: entry["ips"] for name, entry in table.items() if name.endswith(".svc.cluster.local.")}


def _check_shuffle(net: str, table: Mapping[str, list[str]]) -> None:
    name = next(name for name, addresses in table.items() if len(addresses) > 2)
    command = ["ip", "netns", "exec", net, "dig", "@127.0.0.1", "-p", str(AGENT_PORT), "+short", name]
    orders = {subprocess.run(command, capture_output=True, check=True).stdout for _ in range(20)}
    if len(orders) < 2:
        raise AssertionError("the agent's answers are not shuffled")


def _dns_filter(directory: Path, net: str, table: Mapping[str, list[str]]) -> subprocess.Popen[bytes]:
    from agent.envoy import find_binary

    domains = [
        {"name": name.rstrip("."), "answer_ttl": "30s", "endpoint": {"address_list": {"address": addresses}}}
        for name, addresses in table.items()
    ]
    config = {
        "admin": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 19901}}},
        "static_resources": {
            "listeners": [
                {
                    "name": "dns",
                    "address": {
                        "socket_address": {"protocol": "UDP", "address": "127.0.0.1", "port_value": FILTER_PORT}
                    },
                    "listener_filters": [
                        {
                            "name": "envoy.filters.udp.dns_filter",
                            "typed_config": {
                                "@type": "type.googleapis.com/envoy.extensions.filters.udp.dns_filter.v3.DnsFilterConfig",
                                "stat_prefix": "dns",
                                "server_config": {"inline_dns_table": {"virtual_domains": domains}},
                            },
                        }
                    ],
                }
            ]
        },
    }
    path = directory / "filter.json"
    path.write_text(json.dumps(config))
    envoy = find_binary("/usr/local/bin/envoy")
    return _popen(net, envoy, "-c", str(path), "--concurrency", "1", "-l", "off", "--disable-hot-restart")


def _measure(net: str, questions: Path, names: int) -> dict[str, Any]:
    """Both servers in turns, so that a busy machine is busy for both."""
    servers = {"agent": AGENT_PORT, "dns_filter": FILTER_PORT}
    rates: dict[str, list[float]] = {server: [] for server in servers}
    lost: dict[str, int] = dict.fromkeys(servers, 0)
    for _ in range(3):
        for server, port in servers.items():
            output = _dnsperf(net, port, questions, "-c", "4", "-q", "200")
            rates[server].append(_number(output, r"Queries per second:\s+([\d.]+)"))
            lost[server] += int(_number(output, r"Queries lost:\s+(\d+)"))
    result: dict[str, Any] = {"names": names}
    for server, port in servers.items():
        result[f"{server}_qps"] = round(statistics.median(rates[server]))
        result[f"{server}_lost"] = lost[server]
        output = _dnsperf(net, port, questions, "-Q", str(LATENCY_RATE), "-v")
        latencies = sorted(float(value) for value in re.findall(r"^> NOERROR \S+ \S+ ([\d.]+)$", output, re.MULTILINE))
        result[f"{server}_p99_ms_at_{LATENCY_RATE}"] = round(latencies[len(latencies) * 99 // 100] * 1000, 3)
    result["agent_to_dns_filter"] = round(result["agent_qps"] / result["dns_filter_qps"], 2)
    for key, value in result.items():
        print(f"dns.{key:<24} {value:>9}")
    return result


def _dnsperf(net: str, port: int, questions: Path, *arguments: str) -> str:
    command = ["dnsperf", "-s", "127.0.0.1", "-p", str(port), "-d", str(questions), "-l", str(SECONDS), *arguments]
    return subprocess.run(
        ["ip", "netns", "exec", net, *command], capture_output=True, text=True, check=True, timeout=DEADLINE
    ).stdout


def _number(text: str, pattern: str) -> float:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"dnsperf did not say {pattern!r}")
    return float(match[1])


if __name__ == "__main__" and sys.argv[1:2] == ["zygote"]:
    _zygote(sys.argv[2], sys.argv[3])

"""Envoy's arguments and its process."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from free_ports import free_port

from agent import proxy_config
from agent.admin import AdminClient
from agent.envoy import (
    EnvoyOptions,
    EnvoyProcess,
    describe_wait_status,
    envoy_args,
    read_override,
    split_component_log,
    uniform_line,
)
from agent.errors import AgentError
from agent.lifecycle import DrainOptions, ProxyAgent, active_connections

DEADLINE = 20.0


def args(config: Mapping[str, Any] | None = None, **options: Any) -> list[str]:
    return envoy_args("b.json", proxy_config.merge(proxy_config.defaults(), config or {}), EnvoyOptions(**options))


def test_the_default_sidecar() -> None:
    assert args({"concurrency": 2}, component_log_level="misc:error", node_ips=["10.0.0.1"]) == [
        *("-c", "b.json", "--drain-time-s", "45", "--drain-strategy", "immediate", "--local-address-ip-version", "v4"),
        *("--file-flush-interval-msec", "1000", "--disable-hot-restart", "--allow-unknown-static-fields"),
        *("-l", "warning", "--component-log-level", "misc:error", "--skip-deprecated-logs", "--concurrency", "2"),
    ]


@pytest.mark.parametrize(
    ("config", "options", "present", "absent"),
    [
        ({}, {"node_ips": ["fd00::1"]}, ["--local-address-ip-version", "v6"], []),
        ({}, {"node_ips": ["fd00::1", "10.0.0.1"]}, ["--local-address-ip-version", "v4"], []),
        ({"fileFlushInterval": "250ms"}, {}, ["--file-flush-interval-msec", "250"], []),
        ({"fileFlushMinSizeKb": 16}, {}, ["--file-flush-min-size-kb", "16"], []),
        ({"fileFlushMinSizeKb": 16}, {"flush_every_line": True}, ["--file-flush-min-size-kb", "16"], []),
        ({}, {"flush_every_line": True}, ["--file-flush-min-size-kb", "0"], []),
        ({}, {}, [], ["--file-flush-min-size-kb", "--concurrency", "--enable-core-dump", "--config-yaml"]),
        ({"concurrency": 0}, {}, [], ["--concurrency"]),
        ({}, {"skip_deprecated_logs": False}, [], ["--skip-deprecated-logs"]),
        ({}, {"core_dump": True}, ["--enable-core-dump"], []),
        ({}, {"override_json": "{}"}, ["--config-yaml", "{}"], []),
        ({}, {"log_level": "info,misc:error,a:b", "component_log_level": "x:y"}, ["info", "misc:error,a:b"], ["x:y"]),
        ({}, {"log_level": "misc:error"}, ["misc:error"], ["-l"]),
        ({"drainDuration": "10s"}, {}, ["--drain-time-s", "10"], []),
    ],
)
def test_arguments(config: dict[str, Any], options: dict[str, Any], present: list[str], absent: list[str]) -> None:
    found = args(config, **options)
    for item in present:
        assert item in found
    for item in absent:
        assert item not in found


def test_levels() -> None:
    assert split_component_log("debug") == ("debug", [])
    assert split_component_log("debug,info,a:b,c:d:e") == ("info", ["a:b"])


def test_override_file(tmp_path: Path) -> None:
    path = tmp_path / "override.yaml"
    path.write_text("a: [$(HOST_IP)]:80\nb: {c: 1}\n".replace("[$(HOST_IP)]:80", "'$(HOST_IP):80'"))
    assert json.loads(read_override(str(path), "10.0.0.1")) == {"a": "10.0.0.1:80", "b": {"c": 1}}
    assert json.loads(read_override(str(path), "fd00::1"))["a"] == "[fd00::1]:80"
    assert read_override(str(tmp_path / "absent"), "") == ""
    assert read_override("", "") == ""


def run_to_end(program: str) -> Any:
    async def main(process: EnvoyProcess) -> Any:
        await process.start(sys.executable, ["-c", program], dict(os.environ))
        return await asyncio.wait_for(process.wait(), DEADLINE)

    process = EnvoyProcess()
    try:
        return asyncio.run(main(process))
    finally:
        process.close()


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("raise SystemExit(0)", ""),
        ("raise SystemExit(3)", "exit status 3"),
        ("import os; os.kill(os.getpid(), 9)", "signal: killed"),
        ("import os; os.kill(os.getpid(), 15)", "signal: terminated"),
    ],
)
def test_how_it_ended(program: str, reason: str) -> None:
    assert run_to_end(program).reason == reason


def test_the_last_critical_line_is_the_reason(capfd: pytest.CaptureFixture[str]) -> None:
    lines = [
        "2026-01-01\\terror\\tenvoy main x.cc:1\\tfirst",
        "2026-01-01\\tcritical\\tenvoy main x.cc:1\\tbad bootstrap",
    ]
    lines.append("2026-01-01\\terror\\tenvoy main x.cc:1\\tlater")
    script = "import sys\n" + "\n".join(f'sys.stderr.write("{line}\\n")' for line in lines) + "\nraise SystemExit(1)"
    status = run_to_end(script)
    assert status.last_error.endswith("bad bootstrap")
    assert "later" in capfd.readouterr().err


BACKTRACE = [
    ("backtrace ./source/server/backtrace.h:173", "Caught Segmentation fault, suspect faulting address 0x1"),
    ("backtrace ./source/server/backtrace.h:157", "Backtrace (use tools/stack_decode.py to get line numbers):"),
    ("backtrace ./source/server/backtrace.h:167", "#0: [0x7fed93274050]"),
]


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    ("before", "reason"), [([], BACKTRACE[0][1]), ([("assert x.cc:1", "assert failure: size > 0")], "size > 0")]
)
def test_what_a_crash_is_about_comes_before_where_it_happened(
    as_json: bool, before: list[tuple[str, str]], reason: str
) -> None:
    def line(place: str, text: str) -> str:
        if as_json:
            return json.dumps({"level": "critical", "scope": f"envoy {place.split()[0]}", "msg": text})
        return f"2026-01-01\tcritical\tenvoy {place}\t{text}"

    lines = [line(*entry) for entry in (*before, *BACKTRACE)]
    script = f"import os, sys\nsys.stderr.write({chr(10).join(lines)!r} + chr(10))\nsys.stderr.flush()\nos.abort()"
    status = run_to_end(script)
    assert status.reason.startswith("signal: aborted")
    assert reason in status.last_error


def test_lines_from_before_the_bootstrap_get_its_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    early = "[2026-11-30 03:40:18.931][911][info][main] [source/server/server.cc:463] epoch [0]"
    assert uniform_line(early, False) == (
        "2026-11-30T03:40:18.931000Z\tinfo\tenvoy main source/server/server.cc:463\tepoch [0]\tthread=911"
    )
    assert json.loads(uniform_line(early, True)) == {
        "time": "2026-11-30T03:40:18.931000Z",
        "level": "info",
        "scope": "envoy main",
        "msg": "epoch [0]",
        "caller": "source/server/server.cc:463",
        "thread": "911",
    }
    for other in ("", "plain", "[2026-13-40 99:99:99.000][1][info][main] [x:1] bad time", '{"level":"info"}'):
        assert uniform_line(other, True) == other


def test_a_binary_that_is_none() -> None:
    async def main(process: EnvoyProcess) -> None:
        await process.start("/nonexistent/envoy", [], {})

    process = EnvoyProcess()
    try:
        with pytest.raises(AgentError, match="fork/exec /nonexistent/envoy: no such file or directory"):
            asyncio.run(main(process))
    finally:
        process.close()


def test_long_arguments_arrive_whole() -> None:
    async def main(process: EnvoyProcess) -> Any:
        long = "x" * 100_000
        program = "import sys; raise SystemExit(len(sys.argv[1]) != 100000)"
        await process.start(sys.executable, ["-c", program, long], dict(os.environ))
        return await asyncio.wait_for(process.wait(), DEADLINE)

    process = EnvoyProcess()
    try:
        assert asyncio.run(main(process)).reason == ""
    finally:
        process.close()


def test_a_launcher_leaves_the_terminals_process_group() -> None:
    process = EnvoyProcess()
    try:

        async def started() -> None:
            await process.start("/bin/sleep", ["3600"], dict(os.environ))

        asyncio.run(started())
        # Ctrl-C reaches a whole group: Envoy must not end before the agent has drained it.
        assert os.getpgid(process.pid) == process.pid != os.getpgid(0)
    finally:
        process.close()


def test_a_launcher_that_is_not_used_ends() -> None:
    process = EnvoyProcess()
    pidfd = os.pidfd_open(process.pid)
    process.close()
    assert select.select([pidfd], [], [], DEADLINE)[0]
    os.close(pidfd)


PARENT = """
import asyncio, os, sys
from agent.envoy import EnvoyProcess
process = EnvoyProcess()
async def main():
    await process.start("/bin/sleep", ["3600"], dict(os.environ))
    print(process.pid, flush=True)
    await process.wait()
asyncio.run(main())
"""


def test_envoy_dies_with_an_agent_that_is_killed() -> None:
    agent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    pid = int(agent.stdout.readline())
    pidfd = os.pidfd_open(pid)
    try:
        assert Path(f"/proc/{pid}/comm").read_text().strip() == "sleep"
        agent.send_signal(signal.SIGKILL)
        agent.wait(DEADLINE)
        assert select.select([pidfd], [], [], DEADLINE)[0], "Envoy outlived the agent"
    finally:
        os.close(pidfd)
        agent.stdout.close()


def test_wait_statuses() -> None:
    assert describe_wait_status(0) == ""
    assert describe_wait_status(255 << 8) == "exit status 255"
    assert describe_wait_status(11) == "signal: segmentation fault"
    assert describe_wait_status(6 | 0x80) == "signal: aborted (core dumped)"


STATS = """\
http.inbound.downstream_cx_active: 7
listener.0.0.0.0_8080.downstream_cx_active: 2
listener.0.0.0.0_8080.worker_0.downstream_cx_active: 2
listener.0.0.0.0_15021.downstream_cx_active: 1
listener.0.0.0.0_15090.downstream_cx_active: 1
listener.10.0.0.1_80.downstream_cx_active: 3
listener.admin.downstream_cx_active: 1
listener.admin.main_thread.downstream_cx_active: 1
listener.envoy_internal_main.downstream_cx_active: 4
"""


def test_active_connections() -> None:
    assert active_connections(STATS, (15021, 15090)) == 5
    assert active_connections(STATS, (15021, 15090, 8080)) == 3
    assert active_connections("", ()) is None


ADMIN = """
import http.server, sys, signal
class Handler(http.server.BaseHTTPRequestHandler):
    counts = iter([b"listener.0.0.0.0_80.downstream_cx_active: 1\\n", b"listener.0.0.0.0_80.downstream_cx_active: 0\\n"])
    def reply(self, body):
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def do_POST(self):
        sys.stdout.write(self.path + "\\n"); sys.stdout.flush(); self.reply(b"OK")
    def do_GET(self):
        sys.stdout.write(self.path + "\\n"); sys.stdout.flush(); self.reply(next(self.counts))
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
sys.stderr.write("listening\\n"); sys.stderr.flush()
server.serve_forever()
"""


def drain(capfd: pytest.CaptureFixture[str], actions: list[str], **options: Any) -> tuple[list[str], float]:
    """Runs a small admin server as the proxy; its requests, and the seconds between cancel and end."""

    async def main(process: EnvoyProcess, port: int) -> float:
        admin = AdminClient("127.0.0.1", port)
        agent = ProxyAgent(process, admin, DrainOptions(**options))
        await process.start(sys.executable, ["-c", ADMIN, str(port)], dict(os.environ))
        cancelled = asyncio.Event()
        running = asyncio.create_task(agent.run(cancelled))
        async with asyncio.timeout(DEADLINE):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    break
                except ConnectionRefusedError:
                    await asyncio.sleep(0.02)
            for action in actions:
                if action == "drain":
                    await agent.drain_now()
                elif action == "quit":
                    agent.disable_draining()
            started = asyncio.get_running_loop().time()
            cancelled.set()
            status = await running
        assert status.reason == "signal: killed"
        return asyncio.get_running_loop().time() - started

    process = EnvoyProcess()
    try:
        seconds = asyncio.run(main(process, free_port()))
    finally:
        process.close()
    return capfd.readouterr().out.split(), seconds


STATS_PATH = "/stats?usedonly&filter=downstream_cx_active$"


def test_sigterm_drains_then_waits_then_aborts(capfd: pytest.CaptureFixture[str]) -> None:
    requests, seconds = drain(capfd, [], termination=0.4)
    assert requests == ["/drain_listeners?inboundonly&graceful"]
    assert seconds >= 0.4


def test_other_proxies_drain_everything(capfd: pytest.CaptureFixture[str]) -> None:
    requests, _ = drain(capfd, [], termination=0.0, sidecar=False)
    assert requests == ["/drain_listeners?graceful"]


def test_sigterm_after_a_drain_aborts_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    requests, seconds = drain(capfd, ["drain"], termination=DEADLINE)
    assert requests == ["/drain_listeners?inboundonly&graceful&skip_exit"]
    assert seconds < DEADLINE


def test_quit_aborts_without_a_drain(capfd: pytest.CaptureFixture[str]) -> None:
    requests, _ = drain(capfd, ["quit"], termination=DEADLINE)
    assert requests == []


def test_waits_for_the_last_connection(capfd: pytest.CaptureFixture[str]) -> None:
    requests, seconds = drain(capfd, [], on_zero_connections=True, minimum=0.5)
    # The minimum, then a look each second.
    assert seconds >= 2.5
    assert requests == ["/drain_listeners?inboundonly&graceful", STATS_PATH, STATS_PATH]

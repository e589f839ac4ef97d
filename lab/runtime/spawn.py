"""One process of a place: what it runs, as whom, with what; and the code that a forked child becomes it by."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

from lab.runtime import kernel
from lab.runtime.identity import ROOT, Identity

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_OOM_SCORE = 500  # when memory ends, the kernel shall take a pod's process and not what keeps the lab in order


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """Either ``argv`` (a program to exec) or ``entry`` (``module:function``, called with ``args`` in the forked child).

    ``env`` is the whole environment but for the lab's mark, which every process gets. ``log`` takes stdout and stderr, is appended to and belongs to the process's uid
    (empty: /dev/null). ``notify``: the process says READY=1 on NOTIFY_SOCKET (sd_notify(3)).
    """

    name: str
    argv: tuple[str, ...] = ()
    entry: str = ""
    args: tuple[object, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    identity: Identity = ROOT
    cwd: str = "/"
    log: str = ""
    notify: bool = False

    def __post_init__(self) -> None:
        if bool(self.argv) == bool(self.entry):
            raise ValueError(f"process {self.name}: either argv or entry")

    def to_json(self) -> dict[str, object]:
        """Plain data for a message."""
        data = asdict(self)
        capabilities = self.identity.capabilities
        data["identity"]["capabilities"] = None if capabilities is None else sorted(capabilities)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ProcessSpec:
        """The inverse of `to_json`."""
        who = data["identity"]
        capabilities = None if who["capabilities"] is None else frozenset(who["capabilities"])
        identity = Identity(who["uid"], who["gid"], capabilities, who["no_new_privs"])
        return cls(
            **{**data, "argv": tuple(data["argv"]), "args": tuple(data["args"]), "identity": identity},
        )


def become(spec: ProcessSpec, told: int = -1) -> NoReturn:
    """Turns the calling, just forked child into the process; never returns.

    Every descriptor but the three standard ones is closed, so nothing of its parent stays open in it. Exit codes: the
    function's own (None is 0), 1 with a traceback in the log for an exception; 126 and 127 as a shell's for a program
    that cannot be started or is not there.

    Args:
        told: a pipe that a program's exec(2) closes, and that gets a byte if there is none.
    """
    code = 70
    try:
        os.setsid()
        reset_signals(exec_next=bool(spec.argv))
        kernel.close_all_but((0, 1, 2, told) if told >= 0 else (0, 1, 2))
        _open_standard_streams(spec)
        _write_quietly("/proc/self/oom_score_adj", str(_OOM_SCORE))
        kernel.name_process(spec.name)
        os.umask(0o022)
        spec.identity.apply()
        code = 0 if _change_directory(spec.cwd) else 126
        if not code:
            code = _exec(spec) if spec.argv else _call(spec)
    except BaseException:
        code = 1
        traceback.print_exc()
    finally:
        _flush()
        if told >= 0:
            os.write(told, b"!")
        os._exit(code)


def run_here(spec: ProcessSpec) -> int:
    """Calls the spec's function in this very process, with the identity, environment and directory that it has already.

    Returns:
        the exit code, as of `become`.
    """
    _open_standard_streams(spec)
    kernel.name_process(spec.name)
    os.umask(0o022)
    try:
        return call_entry(spec.entry, spec.args)
    except SystemExit as end:
        return exit_code(end)
    except KeyboardInterrupt:
        return 130


def reset_signals(*, exec_next: bool = False) -> None:
    """Signal handling as in a fresh Python process, or as in any fresh process if a program comes next."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if number < signal.SIGRTMIN:
            signal.signal(number, signal.SIG_DFL)
    if not exec_next:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def call_entry(name: str, args: tuple[object, ...]) -> int:
    """Calls ``module:function`` and gives its result as an exit code."""
    module, _, function = name.partition(":")
    target: Callable[..., object] = getattr(importlib.import_module(module), function)
    result = target(*args)
    return result if isinstance(result, int) else 0


def exit_code(end: SystemExit) -> int:
    """What Python itself would exit with; a text is printed on stderr first."""
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)  # noqa: T201
    return 1


def _change_directory(path: str) -> bool:
    try:
        os.chdir(path)
    except OSError as e:
        os.write(2, f"working directory {path}: {e.strerror}\n".encode())
        return False
    return True


def _exec(spec: ProcessSpec) -> int:
    try:
        os.execvpe(spec.argv[0], list(spec.argv), dict(spec.env))
    except OSError as e:
        os.write(2, f"{spec.argv[0]}: {e.strerror}\n".encode())
        return 127 if isinstance(e, FileNotFoundError) else 126


def _call(spec: ProcessSpec) -> int:
    os.environ.clear()
    os.environ.update(spec.env)
    gc.enable()
    try:
        return call_entry(spec.entry, spec.args)
    except SystemExit as end:
        return exit_code(end)
    except KeyboardInterrupt:
        return 130


def _open_standard_streams(spec: ProcessSpec) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    out = null
    if spec.log:
        out = os.open(spec.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
        # Envoy opens /dev/stdout by name: that is an open of this file under the process's own uid.
        os.fchown(out, spec.identity.uid, spec.identity.gid)
    for target, fd in ((0, null), (1, out), (2, out)):
        os.dup2(fd, target)
    for fd in {null, out} - {0, 1, 2}:
        os.close(fd)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # a full disk must not change the exit code
            pass


def _write_quietly(path: str, text: str) -> None:
    try:
        with open(path, "w") as f:
            f.write(text)
    except OSError:
        pass

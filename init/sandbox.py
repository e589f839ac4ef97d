"""CNI mode: the host's files with the pod's network.

Each command runs in a mount namespace of its own, with an empty /etc/nsswitch.conf (owner matches must not ask name
services over a network that is half set up) and, for old iptables, the pod's lock file over /run/xtables.lock. If
that cannot be built the command runs without it.

Source: istio/istio: tools/istio-iptables/pkg/dependencies/implementation_linux.go (runInSandbox).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import sys
from collections.abc import Mapping, Sequence

from .log import Log

CLONE_NEWNS = 0x20000
MS_RDONLY, MS_BIND, MS_REC, MS_PRIVATE, MS_SLAVE = 1, 4096, 16384, 1 << 18, 1 << 19
NS_GET_USERNS = 0xB701


def spawn(
    path: str,
    words: Sequence[str],
    environ: Mapping[str, str],
    descriptors: tuple[int, int, int],
    lock_over: str,
    log: Log,
) -> int:
    """Starts a command in its own mount namespace.

    Args:
        path: the program; ``words`` are its arguments, the first one being its name.
        descriptors: what becomes its stdin, stdout and stderr.
        lock_over: bound over /run/xtables.lock if not empty.

    Returns:
        The pid, to be waited for.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number, inheritable=True)
            complaint = _isolate(libc, lock_over)
            if complaint:
                os.write(writer, complaint.encode())
            os.execve(path, list(words), dict(environ))
        finally:
            os._exit(127)
    os.close(writer)
    with os.fdopen(reader) as told:
        complaint = told.read()
    if complaint:
        log.warn(f"cannot build the sandbox, running without it: {complaint}")
    return pid


def enter_user_namespace(network_namespace: str, program: str | None = None) -> list[str]:
    """nsenter's options for a pod whose network namespace belongs to a nested user namespace; else empty.

    Only for a program called ``istio-cni``, as in the reference.
    """
    name = os.path.basename(sys.argv[0] if program is None else program)
    if name != "istio-cni" or not network_namespace:
        return []
    try:
        network = os.open(network_namespace, os.O_RDONLY | os.O_CLOEXEC)
        try:
            owner = fcntl.ioctl(network, NS_GET_USERNS)
        finally:
            os.close(network)
        mine = os.stat("/proc/self/ns/user").st_ino
        nested = os.fstat(owner).st_ino != mine
    except OSError:
        return []
    if not nested:
        os.close(owner)
        return []
    # Stays open: the command reads it through /proc.
    return [f"--user=/proc/{os.getpid()}/fd/{owner}", f"--net={network_namespace}"]


def _isolate(libc: ctypes.CDLL, lock_over: str) -> str:
    """Runs in the child; returns what went wrong."""
    if libc.unshare(CLONE_NEWNS):
        return _said("unshare")
    if libc.mount(None, b"/", None, MS_PRIVATE | MS_REC, None) and libc.mount(
        None, b"/", None, MS_SLAVE | MS_REC, None
    ):
        return _said("make / private")
    if lock_over and libc.mount(lock_over.encode(), b"/run/xtables.lock", None, MS_BIND | MS_RDONLY, None):
        return _said("bind the lock file")
    if libc.mount(b"/dev/null", b"/etc/nsswitch.conf", None, MS_BIND | MS_RDONLY, None):
        return _said("bind over /etc/nsswitch.conf")
    return ""


def _said(what: str) -> str:
    return f"{what}: {os.strerror(ctypes.get_errno())}"

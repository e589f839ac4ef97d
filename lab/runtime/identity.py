"""Who a process of a pod is: uid, gid, capabilities, no new privileges.

Kubernetes' securityContext in four fields. Istio's injected containers: init runs as root with NET_ADMIN and NET_RAW
only, the proxy as 1337 with none (istio/istio: manifests/charts/istio-control/istio-discovery/files/injection-template.yaml).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lab.runtime import kernel

NUMBERS: Mapping[str, int] = {
    name: number
    for number, name in enumerate(
        [
            "CHOWN",
            "DAC_OVERRIDE",
            "DAC_READ_SEARCH",
            "FOWNER",
            "FSETID",
            "KILL",
            "SETGID",
            "SETUID",
            "SETPCAP",
            "LINUX_IMMUTABLE",
            "NET_BIND_SERVICE",
            "NET_BROADCAST",
            "NET_ADMIN",
            "NET_RAW",
            "IPC_LOCK",
            "IPC_OWNER",
            "SYS_MODULE",
            "SYS_RAWIO",
            "SYS_CHROOT",
            "SYS_PTRACE",
            "SYS_PACCT",
            "SYS_ADMIN",
            "SYS_BOOT",
            "SYS_NICE",
            "SYS_RESOURCE",
            "SYS_TIME",
            "SYS_TTY_CONFIG",
            "MKNOD",
            "LEASE",
            "AUDIT_WRITE",
            "AUDIT_CONTROL",
            "SETFCAP",
            "MAC_OVERRIDE",
            "MAC_ADMIN",
            "SYSLOG",
            "WAKE_ALARM",
            "BLOCK_SUSPEND",
            "AUDIT_READ",
            "PERFMON",
            "BPF",
            "CHECKPOINT_RESTORE",
        ]
    )
}
"""Capability names without CAP_ (include/uapi/linux/capability.h)."""

_PR_CAPBSET_DROP = 24
_PR_SET_KEEPCAPS = 8
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_RAISE = 2
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_VERSION_3 = 0x20080522


@dataclass(frozen=True, slots=True)
class Identity:
    """``capabilities`` are names of `NUMBERS`; None keeps whatever the process has (root alone makes sense of that).

    A uid other than 0 with capabilities gets them as ambient ones, so that a program it starts has them too.
    """

    uid: int
    gid: int
    capabilities: frozenset[str] | None = frozenset()
    no_new_privs: bool = True

    def __post_init__(self) -> None:
        unknown = sorted((self.capabilities or frozenset()) - NUMBERS.keys())
        if unknown:
            raise ValueError(f"unknown capability {unknown[0]}")

    def apply(self) -> None:
        """Makes the calling, single-threaded process that identity, for good.

        Raises:
            OSError: the kernel refused, e.g. the caller is not root.
        """
        wanted = self.capabilities
        if wanted is not None:
            for number in range(_last_capability() + 1):
                if number not in {NUMBERS[name] for name in wanted}:
                    kernel.prctl(_PR_CAPBSET_DROP, number)
        kernel.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
        if self.uid and wanted:
            kernel.prctl(_PR_SET_KEEPCAPS, 1)
        os.setgroups([])
        os.setresgid(self.gid, self.gid, self.gid)
        os.setresuid(self.uid, self.uid, self.uid)
        if wanted is not None:
            _set_capabilities(wanted, inheritable=bool(self.uid))
            if self.uid:
                for name in wanted:
                    kernel.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, NUMBERS[name])
        if self.no_new_privs:
            kernel.prctl(_PR_SET_NO_NEW_PRIVS, 1)
        # A change of uid makes a process "not dumpable": /proc/self would belong to root, and opening /dev/stdout
        # (a link into it) would fail until the next exec.
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)


ROOT = Identity(0, 0, None, no_new_privs=False)
INIT = Identity(0, 0, frozenset({"NET_ADMIN", "NET_RAW"}))
PROXY_UID = 1337
APP_UID = 1000
PROXY = Identity(PROXY_UID, PROXY_UID)
APP = Identity(APP_UID, APP_UID)


def of_uid(uid: int, gid: int | None = None) -> Identity:
    """Root keeps everything; everybody else has nothing."""
    if uid == 0 and not gid:
        return ROOT
    return Identity(uid, uid if gid is None else gid)


def _last_capability() -> int:
    return int(Path("/proc/sys/kernel/cap_last_cap").read_text())


def _set_capabilities(names: frozenset[str], *, inheritable: bool) -> None:
    bits = sum(1 << NUMBERS[name] for name in names)
    header = (ctypes.c_uint32 * 2)(_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)()
    for half in range(2):
        part = bits >> (32 * half) & 0xFFFFFFFF
        data[half * 3] = data[half * 3 + 1] = part
        data[half * 3 + 2] = part if inheritable else 0
    kernel.check(kernel.libc().capset(ctypes.byref(header), ctypes.byref(data)), "capset")

"""A kernel without IPv6 (``ipv6.disable=1``): IPv4 works, and who wants IPv6 is told why it cannot be.

A seccomp filter answers socket(AF_INET6) as such a kernel does, for init and for every tool that it starts. Netlink still
reaches the IPv6 of this kernel, so that what is asked of it can be seen.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import socket
import struct
from collections.abc import Callable
from typing import Any

import pytest
from init_pod import BACKENDS, DEFAULT, HERE, Net

pytestmark = pytest.mark.root

PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
SOCKET_CALL = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}
"""Machine -> audit architecture and the number of socket(2)."""


def without_ipv6(work: Callable[[], Any]) -> Callable[[], Any]:
    """``work`` in a process whose kernel knows no AF_INET6."""
    architecture, call = SOCKET_CALL[platform.machine()]
    load, equal, give = 0x20, 0x15, 0x06
    allow, refuse = 0x7FFF0000, 0x00050000 | errno.EAFNOSUPPORT
    # (code, jump if true, jump if false, value): arch and number are words 1 and 0, the first argument begins at byte 16.
    program = [
        (load, 0, 0, 4), (equal, 0, 5, architecture), (load, 0, 0, 0), (equal, 0, 3, call), (load, 0, 0, 16),
        (equal, 0, 1, socket.AF_INET6), (give, 0, 0, refuse), (give, 0, 0, allow),
    ]  # fmt: skip

    def run() -> Any:
        code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in program))
        filtered = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filtered) == 0, ctypes.get_errno()
        with pytest.raises(OSError, match="not supported"):
            socket.socket(socket.AF_INET6)
        return work()

    return run


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_ipv4_works_from_first_to_last(backend: str, pods: Net) -> None:
    pods.pod.tool("ip", "-6", "addr", "flush", "dev", "eth0")
    pods.pod.tool("ip", "-6", "rule", "add", "fwmark", "1337", "lookup", "133")
    args = [*DEFAULT, "-m", "TPROXY", "--dual-stack", f"--backend={backend}", "--json"]
    steps: dict[str, list[str]] = {
        "applied": ["--run-validation"],
        "unchanged": [],
        "replaced": ["--force-apply"],
        "cleaned": ["--cleanup-only"],
    }
    done = pods.pod.call(without_ipv6(lambda: [HERE.init(*args, *extra) for extra in steps.values()]))
    assert [(code, err) for code, _, err in done if code] == []
    assert [f'"action": "{action}"' in out for action, (_, out, _) in zip(steps, done, strict=True)] == [True] * 4
    assert "ISTIO" not in "".join(pods.pod.save().values())
    assert "fwmark 0x539" not in pods.pod.tool("ip", "rule")
    assert "fwmark 0x539" in pods.pod.tool("ip", "-6", "rule"), "nothing of IPv6 was asked of such a kernel"


@pytest.mark.parametrize("extra", [[], ["--cleanup-only"], ["--run-validation", "--skip-rule-apply"]])
@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_who_wants_ipv6_is_told_so_before_anything_is_done(backend: str, extra: list[str], pods: Net) -> None:
    args = [*DEFAULT, "--ipv6=on", f"--backend={backend}", *extra]
    code, _, err = pods.pod.call(without_ipv6(lambda: HERE.init(*args)))
    assert code == 1
    assert err == (
        "error: --ipv6 on: this kernel has no IPv6 (ipv6.disable=1, or built without). Use --ipv6 auto or off\n"
    )
    assert "ISTIO" not in "".join(pods.pod.save().values())


def test_a_dry_run_asks_no_kernel(pods: Net) -> None:
    code, out, _ = pods.pod.call(without_ipv6(lambda: HERE.init(*DEFAULT, "--ipv6=on", "--dry-run")))
    assert code == 0
    assert "# ipv6\n" in out


def test_an_interface_without_ipv6_is_another_thing(pods: Net) -> None:
    """Rules can be written: the kernel still has it."""
    pods.pod.tool("sysctl", "-qw", "net.ipv6.conf.eth0.disable_ipv6=1")
    assert pods.pod.init(*DEFAULT, "--ipv6=on", "--backend=nft").code == 0

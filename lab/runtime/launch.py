"""Starting our own Python processes: the zygote, and the supervisor before it. Imports stay light."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lab.runtime import channel
from lab.runtime.spawn import DEFAULT_PATH

Launched = tuple["subprocess.Popen[bytes]", socket.socket]

MODULES: tuple[str, ...] = (
    "lab.apps.preload",
    "lab.discovery.server",
    "lab.fabric.dns",
    "lab.trace.observer",
    "agent.preload",
    "init.preload",
)
"""What the processes of a lab need (`lab.runtime.workload`); what the node's services need comes first, for they start first. The legacy back end adds `LEGACY_MODULES`."""

LEGACY_MODULES = ("init.preload_legacy",)


def zygote(modules: Sequence[str], environ: Mapping[str, str]) -> Launched:
    """Execs a zygote that imports ``modules``; ``environ`` carries the lab's mark. Returns at once.

    Returns:
        the process, and our end of its channel.
    """
    ours, theirs = channel.pair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "lab.runtime.zygote", str(theirs.fileno()), *modules],
            env={**clean_environ(), **environ},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
    return process, ours


def clean_environ() -> dict[str, str]:
    """An environment for our own Python processes: nothing of the caller's that could change what they do.

    (A proxy variable, for example, would send gRPC elsewhere.) The code is found where ours was.
    """
    checkout = str(Path(__file__).resolve().parents[2])
    return {"PATH": DEFAULT_PATH, "HOME": "/", "LANG": "C.UTF-8", "PYTHONPATH": checkout}

"""Applies a router's rule documents, in the namespace of the calling thread, with the tool that the kernel has."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
from collections.abc import Mapping, Sequence
from typing import Literal

from lab.errors import LabError, ObservationError
from lab.fabric import paths

Backend = Literal["nft", "legacy"]

_NETLINK_NETFILTER = 12
_NFNL_SUBSYS_NFTABLES, _NFT_MSG_NEWGEN, _NFT_MSG_GETGEN = 10, 15, 16
_PROGRAMS: Mapping[Backend, Sequence[str]] = {
    "nft": ("nft",),
    "legacy": ("iptables-legacy-restore", "ip6tables-legacy-restore"),
}


def backend() -> Backend:
    """``nft`` where the kernel has nf_tables and nft(8) is installed, else ``legacy``.

    Raises:
        ObservationError: neither can be used.
    """
    has_nf_tables = kernel_has_nf_tables()
    if has_nf_tables and shutil.which("nft"):
        return "nft"
    if all(shutil.which(p) for p in _PROGRAMS["legacy"]):
        return "legacy"
    missing = "the program nft is missing" if has_nf_tables else "no nf_tables in this kernel, no iptables-legacy here"
    raise ObservationError("services cannot be served", why=missing, next_step="Install nftables and iptables")


def kernel_has_nf_tables() -> bool:
    """Asks for the generation of the ruleset, which changes nothing (include/uapi/linux/netfilter/nf_tables.h)."""
    try:
        s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_NETFILTER)
    except OSError:
        return False
    with s:
        s.settimeout(10)
        kind = _NFNL_SUBSYS_NFTABLES << 8 | _NFT_MSG_GETGEN
        s.send(struct.pack("=IHHIIBBH", 20, kind, 1, 1, 0, socket.AF_UNSPEC, 0, 0))
        answer = s.recv(4096)
    answered: int = struct.unpack_from("=H", answer, 4)[0]
    return answered == _NFNL_SUBSYS_NFTABLES << 8 | _NFT_MSG_NEWGEN


def apply_nft(document: str) -> None:
    """One transaction: all of the document or nothing.

    Raises:
        LabError: nft(8) refused it.
    """
    _run(["nft", "-f", "-"], document, {})


def apply_legacy(document: str, version: int, lab: str) -> None:
    """Replaces the tables that the document names, one by one; ``version`` is 4 or 6.

    Raises:
        LabError: the program refused it.
    """
    program = _PROGRAMS["legacy"][0 if version == 4 else 1]
    # Its lock is a file, by default one of the host's.
    lock = {"XTABLES_LOCKFILE": str(paths.run_dir(lab) / "xtables.lock")}
    _run([program, "--wait"], document, lock)


def _run(command: Sequence[str], document: str, environ: Mapping[str, str]) -> None:
    try:
        done = subprocess.run(
            command, input=document, capture_output=True, text=True, timeout=60, env={**os.environ, **environ}
        )
    except OSError as e:
        raise ObservationError(f"{command[0]} cannot be run", why=str(e.strerror), next_step="Install it") from None
    except subprocess.TimeoutExpired:
        raise LabError(f"{command[0]} does not come to an end", why="60 s have passed") from None
    if done.returncode != 0:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise LabError(f"{command[0]} refused the rules of a lab", why=said[:500])

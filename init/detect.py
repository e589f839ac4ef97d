"""Which iptables to use: by what the kernel does, not by what is installed.

The reference's decision (istio/istio: tools/istio-iptables/pkg/dependencies/implementation.go): a forced one or
failure; legacy if it works and this network namespace already has legacy rules; nft if it works; the plain name.
Differences: legacy is not even tried where the namespace has no legacy table, because trying creates one, and the
next run would then find "rules"; a held lock is a held lock, never a missing module.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from .errors import InitError, LockHeld
from .model import Family
from .tools import Tools, failure, may_change_rules
from .xtables import Binary, may_hold_rules

NAMES: dict[Family, str] = {"ipv4": "iptables", "ipv6": "ip6tables"}
PROBE = "*nat\n-A INPUT -p 255 -j RETURN\n-D INPUT -p 255 -j RETURN\nCOMMIT\n"
"""A rule that matches nothing (protocol 255 is reserved), added and deleted in one commit."""

OLD = (0, 0, 0)
LOCKING_SINCE = (1, 6, 2)
LOCK_FILE_SINCE = (1, 8, 6)


def choose(backend: str, ipv6: bool, tools: Tools) -> Mapping[Family, Binary]:
    """The iptables of each family.

    Args:
        backend: ``auto``, ``legacy``, ``legacy-restore`` or ``nft``.
        ipv6: without it a missing ip6tables is only worth a line.

    Raises:
        InitError: none works; says why.
        LockHeld: another process keeps the xtables lock.
    """
    chosen: dict[Family, Binary] = {"ipv4": _family(backend, "ipv4", tools)}
    try:
        if ipv6 or backend != "auto":
            chosen["ipv6"] = _family(backend, "ipv6", tools)
        else:
            # Nothing is written there: only what an earlier run has left is of interest.
            chosen["ipv6"] = _binary(chosen["ipv4"].name.replace("iptables", "ip6tables"), tools)
    except InitError as error:
        if ipv6:
            raise
        tools.log.info(f"no working ip6tables, which is not needed: {error}")
    return chosen


def _family(backend: str, family: Family, tools: Tools) -> Binary:
    name = NAMES[family]
    if backend == "legacy":
        # libiptc locks and writes by itself; only the save tool is run, which does neither.
        return Binary(f"{name}-legacy", "legacy", locks=False)
    if backend == "legacy-restore":
        return _binary(f"{name}-legacy", tools)
    if backend == "nft":
        return _binary(f"{name}-nft", tools)
    reasons = []
    if may_hold_rules("legacy", family) and has_rules(f"{name}-legacy", tools):
        try:
            return _usable(f"{name}-legacy", tools)
        except InitError as error:
            _final(error)
            reasons.append(str(error))
    for candidate in (f"{name}-nft", name):
        try:
            return _usable(candidate, tools)
        except InitError as error:
            _final(error)
            reasons.append(str(error))
    raise InitError(
        f"no usable {name} for {family}", "; ".join(reasons), "Load ip_tables or nf_tables, or install iptables"
    )


def has_rules(name: str, tools: Tools) -> bool:
    """The namespace has rules of this iptables: three lines of output (the reference's measure)."""
    if not tools.find(f"{name}-save"):
        return False
    result = tools.run([f"{name}-save"])
    return result.code == 0 and result.out.count("\n") >= 3


def usable(backend: str, family: Family, tools: Tools) -> None:
    """Probes the kernel for a back end.

    Raises:
        InitError: it does not work; says what the tool said.
    """
    name = NAMES[family]
    for candidate in {"auto": (f"{name}-nft", f"{name}-legacy"), "nft": (f"{name}-nft",)}.get(
        backend, (f"{name}-legacy",)
    ):
        _usable(candidate, tools)


def _usable(name: str, tools: Tools) -> Binary:
    binary = _binary(name, tools)
    result = tools.run([f"{name}-restore", "--noflush"], PROBE, locks=binary.locks, mount_lock=binary.mount_lock)
    if result.code or "does not exist" in result.err:
        raise failure(f"{name} has no kernel support" if may_change_rules() else f"{name} may not change rules", result)
    return binary


def _binary(name: str, tools: Tools) -> Binary:
    if not tools.find(f"{name}-save"):
        raise InitError(f"{name}-save is not installed", "", "Install the package iptables")
    if name.endswith("-nft"):
        return Binary(name, "nft", locks=False)
    result = tools.run([f"{name}-save", "--version"])
    version, nft = OLD, False
    if result.code == 0 and "unrecognized option" not in result.err:
        found = re.search(r"v([0-9]+(?:\.[0-9]+)+)", result.out)
        if found is None:
            raise InitError(f"{name}-save --version is not understood", repr(result.out.strip()))
        version = _version(found.group(1))
        nft = "nf_tables" in result.out
    if nft:
        return Binary(name, "nft", locks=False)
    locks = version >= LOCKING_SINCE
    mount_lock = locks and version < LOCK_FILE_SINCE and bool(tools.lock_file)
    return Binary(name, "legacy", locks, mount_lock)


def _version(text: str) -> tuple[int, int, int]:
    numbers = [int(part) for part in text.split(".")][:3]
    major, minor, patch = [*numbers, 0, 0][:3]
    return major, minor, patch


def _final(error: InitError) -> None:
    """A held lock or a missing permission is no reason to try another tool."""
    if isinstance(error, LockHeld) or not may_change_rules():
        raise error

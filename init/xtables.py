"""The back ends for iptables: the restore tools (legacy and nft), and libiptc through python-iptables.

Both carry out ``init.edits`` and read the state with the save tool. ``iptables-restore`` commits table by table, so
every document is checked with ``--test`` in all families before the first one is applied; a document of one table is
atomic by itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from . import edits, state
from .errors import InitError
from .model import Family
from .tools import Tools, failure

Kind = Literal["legacy", "nft"]

Changes = Mapping[Family, Sequence[edits.TableEdit]]

LEGACY_NAMES: dict[Family, str] = {"ipv4": "/proc/net/ip_tables_names", "ipv6": "/proc/net/ip6_tables_names"}
NFT_FAMILIES: dict[Family, str] = {"ipv4": "ip", "ipv6": "ip6"}


class Binary(NamedTuple):
    """One iptables in its three programs, e.g. ``iptables-nft``, ``iptables-nft-save``, ``iptables-nft-restore``.

    ``locks``: it takes the xtables lock and knows ``--wait`` (legacy since 1.6.2). ``mount_lock``: it locks one fixed
    file only (before 1.8.6).
    """

    name: str
    kind: Kind
    locks: bool
    mount_lock: bool = False


class Restore:
    """Applies documents with the restore tool."""

    def __init__(self, binaries: Mapping[Family, Binary], tools: Tools, comments: bool = False) -> None:
        self.binaries, self.tools, self.comments = binaries, tools, comments

    @property
    def kinds(self) -> Mapping[Family, Kind]:
        """Each family has its own: one of them may already have legacy rules. Without a tool it counts as IPv4 does."""
        return {"ipv6": self.binaries["ipv4"].kind, **{family: one.kind for family, one in self.binaries.items()}}

    @property
    def name(self) -> str:
        """``nft``, ``legacy-restore``, or both with a comma where IPv4 has one and IPv6 the other."""
        names = {"nft": "nft", "legacy": "legacy-restore"}
        return ",".join(dict.fromkeys(names[self.kinds[family]] for family in NFT_FAMILIES))

    def dump(self, family: Family) -> state.Dump:
        """The present rules of a family; empty if nothing can be there.

        Raises:
            InitError: the save tool fails.
        """
        if family not in self.binaries or not may_hold_rules(self.kinds[family], family):
            return state.Dump()
        binary = self.binaries[family]
        result = self.tools.run([f"{binary.name}-save"])
        if result.code:
            raise failure(f"cannot read the rules with {binary.name}-save", result)
        return state.parse(result.out)

    def ages(self, family: Family, table: str, chain: str) -> list[int]:
        """nft's handles of the rules of a chain, in order; they grow. Empty where there are none (legacy)."""
        if self.kinds[family] != "nft" or not self.tools.find("nft"):
            return []
        result = self.tools.run(["nft", "-j", "list", "chain", NFT_FAMILIES[family], table, chain])
        if result.code:
            return []
        import json

        try:
            return [item["rule"]["handle"] for item in json.loads(result.out)["nftables"] if "rule" in item]
        except (ValueError, KeyError):
            return []

    def change(self, changes: Changes) -> None:
        """Carries out the edits of each family.

        Raises:
            InitError: a document is refused; nothing was changed if the check found it.
            LockHeld: the xtables lock.
        """
        made = {family: edits.document(changes[family], self.comments) for family in changes}
        documents = {family: document for family, document in made.items() if document}
        if sum(document.count("COMMIT\n") for document in documents.values()) > 1:
            for family, document in documents.items():
                self._restore(family, document, "--test")
        for family, document in documents.items():
            self._restore(family, document)

    def _restore(self, family: Family, document: str, *extra: str) -> None:
        binary = self.binaries.get(family)
        if binary is None:
            raise InitError(f"no tool for {family}", "none was found when the back end was chosen")
        argv = [f"{binary.name}-restore", "--noflush", *extra]
        result = self.tools.run(argv, document, locks=binary.locks, mount_lock=binary.mount_lock)
        if result.code:
            line = _line_of(document, result.err)
            raise failure(f"{binary.name}-restore refused the {family} rules{f' ({line})' if line else ''}", result)


NFTTables = Sequence[tuple[str, str]] | None
"""``(family, name)`` of each table; None: not read yet, or not to be had."""


def may_hold_rules(kind: str, family: Family, nft: NFTTables = None) -> bool:
    """False if the kernel says that this network namespace has no such table at all.

    Looking does not create any. Legacy: /proc/net/ip_tables_names; nft: a netlink dump, or what a caller has read of it.
    """
    if kind == "legacy":
        try:
            with open(LEGACY_NAMES[family]) as names:
                return bool(names.read().strip())
        except FileNotFoundError:
            return False
        except OSError:
            return True
    from .netlink import nft_tables

    try:
        tables = nft_tables() if nft is None else nft
        return any(table_family == NFT_FAMILIES[family] for table_family, _ in tables)
    except OSError:
        return True


def _line_of(document: str, said: str) -> str:
    """The line that the tool complained about, if it named one."""
    found = re.search(r"line:? ?(\d+)", said)
    lines = document.splitlines()
    number = int(found.group(1)) if found else 0
    return lines[number - 1] if 0 < number <= len(lines) else ""

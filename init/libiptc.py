"""Legacy tables without a program: python-iptables over libiptc.

The import takes a quarter of a second, so this module is imported only when the legacy back end is used. Merely
opening a table creates it in the network namespace: only tables that are changed are opened, and the library's habit
of opening all of them to look for chain names is bounded.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import glob
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from . import detect, edits, lock, restore
from .canonical import network_of
from .errors import InitError
from .model import (
    Address,
    ConnMark,
    Family,
    Interface,
    Jump,
    Mark,
    Match,
    Owner,
    Port,
    Proto,
    Redirect,
    RestoreMark,
    Rule,
    SaveMark,
    SetMark,
    State,
    Target,
    Zone,
)
from .tools import LOCK_ADVICE, Tools, held, problem
from .xtables import Binary, Changes, Restore


def _load() -> Any:
    """Imports python-iptables without its detours.

    Its search for libraries runs ldconfig, gcc and ld for each of a dozen names (0.2 s, and none of them belongs on a
    machine that runs pods), and its first choice for one path drags in setuptools (0.15 s). During the import a
    library is looked up in the directories where libraries are, and distutils is not to be had.
    """
    arch = str(sysconfig.get_config_var("MULTIARCH") or "")
    places = [f"{root}/{arch}" for root in ("/lib", "/usr/lib", "/usr/local/lib") if arch]
    places += ["/lib64", "/usr/lib64", "/usr/local/lib", "/lib", "/usr/lib"]

    def find(name: str) -> str | None:
        found = (path for place in places for path in sorted(glob.glob(f"{place}/lib{glob.escape(name)}.so.*")))
        path = next(found, None)
        return os.path.basename(path) if path else None

    slow, hidden = ctypes.util.find_library, sys.modules.get("distutils", ...)
    ctypes.util.find_library = find
    sys.modules["distutils"] = None  # type: ignore[assignment]
    try:
        import iptc
    finally:
        ctypes.util.find_library = slow
        if hidden is ...:
            del sys.modules["distutils"]
        else:
            sys.modules["distutils"] = hidden
    return iptc


iptc = _load()


def _options(table: Any) -> Iterator[Any]:
    """The entries of an extension's option table, whatever their size is in this libxtables.

    iptables 1.8.11 appended a member to struct xt_option_entry (48 bytes became 56) under the same library version, so
    python-iptables would see only the first option of each extension there. A table ends with an entry of zeros: if the
    second name is missing at the old distance but there at the new one, entries are larger.
    """
    kind = table._type_
    first = ctypes.cast(table, ctypes.c_void_p).value or 0
    size, larger = ctypes.sizeof(kind), ctypes.sizeof(kind) + 8

    def name_at(offset: int) -> bool:
        return (ctypes.c_void_p.from_address(first + offset).value or 0) > 0xFFFF

    step = larger if not name_at(size) and name_at(larger) else size
    while name_at(0):
        yield kind.from_address(first)
        first += step


def _mend_option_tables(library: Any) -> None:
    """Makes python-iptables walk option tables by `_options`; the two methods are the only ones that do."""

    def lookup(_self: Any, table: Any, name: bytes) -> Any:
        return next((entry for entry in _options(table) if entry.name == name), None)

    def check(_self: Any, name: bytes, given: int, table: Any) -> None:
        for entry in _options(table):
            if entry.flags & library.XTOPT_MAND and not given & (1 << entry.id):
                raise library.XTablesError(f"{name.decode()}: --{entry.name.decode()} must be specified")

    library.xtables._option_lookup = lookup
    library.xtables._options_fcheck = check


_mend_option_tables(iptc.xtables)

_family: Family | None = None
"""The family for which this process has loaded extensions, see ``LibIPTC.change``."""


class LibIPTC(Restore):
    """Applies edits through libiptc; reads the state with the save tool, which comes with the extensions it needs."""

    def __init__(self, binaries: Mapping[Family, Binary], tools: Tools, comments: bool, lock_file: str) -> None:
        super().__init__(binaries, tools, comments)
        self.lock_file = lock_file

    @property
    def name(self) -> str:
        return "legacy"

    def change(self, changes: Changes) -> None:
        """Carries out the edits, one commit for each table, under the xtables lock.

        libxtables keeps only those variants of an extension that fit the family it was first loaded for (REDIRECT is
        one that differs). So a process loads extensions for one family only: IPv6 is done in a forked child, before
        IPv4 in this process. Where IPv4 has come first the restore tool does IPv6.

        Raises:
            InitError: libiptc or the kernel refuses; nothing is committed before every table was accepted by libiptc.
            LockHeld: another process keeps the lock.
        """
        changes = {family: [edit for edit in made if edit] for family, made in changes.items()}
        wanted: list[Family] = [family for family in ("ipv6", "ipv4") if changes.get(family)]
        strange = [family for family in wanted if _family not in (None, family)]
        try:
            with lock.locked(self.lock_file, self.tools.lock_wait) if len(wanted) > len(strange) else nullcontext():
                for family in wanted:
                    if family in strange:
                        continue
                    if len(wanted) > 1 and family == "ipv6":
                        _in_child(lambda: self._change("ipv6", changes["ipv6"]))
                    else:
                        self._change(family, changes[family])
        except TimeoutError:
            raise held(self.tools.lock_wait, self.lock_file) from None
        except lock.CannotOpen as error:
            raise InitError(
                f"cannot open the xtables lock {self.lock_file}",
                str(error),
                LOCK_ADVICE,
            ) from None
        if strange:
            tool = Restore(detect.choose("legacy-restore", True, self.tools), self.tools, self.comments)
            tool.change({family: changes[family] for family in strange})

    def _change(self, family: Family, made: Sequence[edits.TableEdit]) -> None:
        self._look_again(family, made)
        with ExitStack() as stack:
            tables = []
            for edit in made:
                with _explained(family, f"of table {edit.table}"):
                    table = stack.enter_context(_table(family, edit.table))
                    self._carry_out(family, table, edit)
                    tables.append(table)
            for table in tables:
                with _explained(family, f"of table {table.name}"):
                    table.commit()

    def _look_again(self, family: Family, made: Sequence[edits.TableEdit]) -> None:
        """Positions were counted before we had the lock; from here on nobody changes them."""
        deletes = [(edit.table, delete) for edit in made for delete in edit.deletes]
        present = self.dump(family) if deletes else None
        for table, delete in deletes:
            assert present is not None
            if present.chain(table, delete.chain)[delete.position - 1 : delete.position] != [delete.text]:
                raise InitError(
                    f"libiptc refused the {family} rules of table {table}",
                    f"{delete.chain} was changed by somebody else meanwhile",
                    "Run it again",
                )

    def _carry_out(self, family: Family, table: Any, edit: edits.TableEdit) -> None:
        for delete in edit.deletes:
            chain = iptc.Chain(table, delete.chain)
            doomed = chain.rules[delete.position - 1]
            table.delete_entry(delete.chain, doomed.rule, doomed.mask)
        for name in edit.flush:
            table.flush_entries(name)
        for name in edit.drop:
            table.delete_chain(name)
        for name in edit.new:
            table.create_chain(name)
        for rule in edit.rules:
            with _explained(family, f"({restore.line(rule)})"):
                made = entry(family, rule, self.comments)
            if rule.position is None:
                table.append_entry(rule.chain, made)
            else:
                table.insert_entry(rule.chain, made, rule.position - 1)


_entries: dict[tuple[Family, tuple[object, ...], str], Any] = {}


def entry(family: Family, rule: Rule, comments: bool = False) -> Any:
    """The bytes of a rule as libiptc takes them; made once in a process and its forked children.

    Chain and position are no part of them; a jump holds the chain's name until libiptc knows where it is. The
    library's own Chain.append_rule is not used: it parses each extension's output a second time, through fd 1.

    Raises:
        iptc.XTablesError, AttributeError, ValueError: an extension refuses a value.
    """
    key = (family, (rule.matches, type(rule.target), rule.target), rule.comment if comments else "")
    made = _entries.get(key)
    if made is None:
        global _family
        _family = family
        made = _entries[key] = _rule(family, rule, comments).rule
    return made


@contextmanager
def _explained(family: Family, where: str) -> Iterator[None]:
    try:
        yield
    except (iptc.IPTCError, iptc.XTablesError, AttributeError, ValueError) as error:
        said = str(error).replace("b'", "'")
        refused = re.fullmatch(r"'(.*?)': parameter '+(.*?)'+ error -(\d+)", said)
        if refused:
            said = f"{problem(int(refused[3]))}: {refused[1]} does not take {refused[2]!r}"
        step = "Rules of an earlier run are there: use --reconcile or --cleanup-only" if "exist" in said else ""
        raise InitError(f"libiptc refused the {family} rules {where}", said, step) from None


@contextmanager
def _table(family: Family, name: str) -> Iterator[Any]:
    """A table opened in the present network namespace, closed again without a commit of its own."""
    kind = iptc.Table if family == "ipv4" else iptc.Table6
    # Reading a rule the library opens every table that it believes to exist, to tell a chain from a target.
    kind.existing_table_names = {other: other == name for other in kind.ALL}
    kind._cache.pop(name, None)
    table = kind(name, autocommit=False)
    try:
        yield table
    finally:
        kind._cache.pop(name, None)
        table.close()


def _in_child(work: Callable[[], None]) -> None:
    """Runs ``work`` in a forked child and raises here what it raised there."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except InitError as error:
            os.write(writer, "\0".join((error.what, error.why, error.next_step)).encode())
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as told:
        text = told.read()
    _, status = os.waitpid(pid, 0)
    if text:
        raise InitError(*text.split("\0"))
    if status:
        raise InitError(
            "libiptc ended the process", f"exit {os.waitstatus_to_exitcode(status)}", "Use --backend legacy-restore"
        )


def _rule(family: Family, rule: Rule, comments: bool) -> Any:
    made = iptc.Rule() if family == "ipv4" else iptc.Rule6()
    # The protocol goes first: extensions read it when they parse their options.
    for match in sorted(rule.matches, key=lambda match: not isinstance(match, Proto)):
        _add_match(made, match)
    if comments:
        made.create_match("comment").comment = rule.comment
    _set_target(made, rule.target)
    # The extension's last word: REDIRECT fills in how many ranges it has.
    made.target._final_check()
    return made


def _add_match(made: Any, match: Match) -> None:
    if isinstance(match, Proto):
        made.protocol = match.name
    elif isinstance(match, Interface):
        _set_interface(made.get_ip(), match)
    elif isinstance(match, Address):
        # Masked as iptables masks it: the library leaves host bits of IPv6 in, and the restore tool then misses the rule.
        setattr(made, match.side, _negated(match.negate, network_of(match.cidr)))
    elif isinstance(match, Port):
        letter = match.side[0]
        if len(match.ports) > 1:
            made.create_match("multiport").set_parameter(f"{letter}ports", _values(match.negate, ",".join(match.ports)))
        else:
            made.create_match(match.proto).set_parameter(f"{letter}port", _values(match.negate, match.ports[0]))
    elif isinstance(match, Owner):
        made.create_match("owner").set_parameter(f"{match.kind}-owner", _values(match.negate, match.name))
    elif isinstance(match, State):
        made.create_match("conntrack").set_parameter("ctstate", ",".join(match.states))
    elif isinstance(match, Mark):
        made.create_match("mark").set_parameter("mark", _values(match.negate, match.value))
    else:
        assert isinstance(match, ConnMark)
        made.create_match("connmark").set_parameter("mark", match.value)


def _set_interface(ip: Any, match: Interface) -> None:
    """Writes name and mask as iptables does (xtables_parse_interface).

    python-iptables' IPv6 rules compare only the lowest bit of each character ("lo" would match "veth0").
    """
    name = match.name.removesuffix("+").encode()
    setattr(ip, f"{match.direction}iface", name)
    # With the final NUL the whole name must be equal; a "+" leaves it out.
    setattr(ip, f"{match.direction}iface_mask", b"\xff" * (len(name) + (not match.name.endswith("+"))))


def _set_target(made: Any, target: Target) -> None:
    if isinstance(target, Jump):
        # A name that the library knows saves it from looking for the chain in every table.
        made.create_target("ACCEPT").standard_target = target.to
    elif isinstance(target, Redirect):
        made.create_target("REDIRECT").set_parameter("to-ports", target.port)
    elif isinstance(target, SetMark):
        made.create_target("MARK").set_parameter("set-mark", target.value)
    elif isinstance(target, SaveMark):
        made.create_target("CONNMARK").set_parameter("save-mark", "")
    elif isinstance(target, RestoreMark):
        made.create_target("CONNMARK").set_parameter("restore-mark", "")
    elif isinstance(target, Zone):
        made.create_target("CT").set_parameter("zone", str(target.number))
    else:
        made.create_target("TPROXY").set_parameter("tproxy-mark", f"{target.mark}/0xffffffff")
        made.target.set_parameter("on-port", target.port)


def _negated(negate: bool, value: str) -> str:
    return f"!{value}" if negate else value


def _values(negate: bool, value: str) -> str | Sequence[str]:
    return ["!", value] if negate else value

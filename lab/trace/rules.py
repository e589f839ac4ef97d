"""From what the kernel reported to the rule as its owner would write it: text, position, and whether it decided.

Texts come from listings taken in the namespace itself, without comments and counters. Parsing and choosing are pure.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lab.errors import ObservationError
from lab.trace.index import Packet, Step
from lab.trace.places import inside
from lab.verdict import Rule

TERMINAL = frozenset(
    {
        "ACCEPT",
        "DROP",
        "REJECT",
        "RETURN",
        "QUEUE",
        "NFQUEUE",
        "REDIRECT",
        "DNAT",
        "SNAT",
        "MASQUERADE",
        "NETMAP",
        "TPROXY",
    }
)
"""iptables targets that end the walk through a chain; others (MARK, CT, LOG...) let the packet go on."""

_DECIDED = frozenset({"accept", "drop", "return", "queue", "stolen"})
_COMMENT = re.compile(r' ?-m comment --comment (?:"(?:[^"\\]|\\.)*"|\S+)')
_NFT_COUNTER = re.compile(r"\bcounter(?: packets \d+ bytes \d+)? ?")
_NFT_COMMENT = re.compile(r' ?\bcomment "[^"]*"')
_NFT_HANDLE = re.compile(r"^(?P<text>.*?) ?# handle (?P<handle>\d+)\Z", re.DOTALL)
_NFT_TABLE = re.compile(r"table (?P<family>\S+) (?P<table>\S+) \{")
_NFT_CHAIN = re.compile(r"chain (?P<chain>\S+) \{")
_NFT_BASE = re.compile(r"type (?P<type>\S+) hook (?P<hook>\S+) .*?priority [^;]+;(?: policy (?P<policy>\w+);)?")

_FAMILY = {"ip": "ipv4", "ip6": "ipv6"}


@dataclass(frozen=True, slots=True)
class IptablesTable:
    """One table of a save dump: rules by chain, in order, and the policies of its built-in chains."""

    rules: dict[str, list[str]] = field(default_factory=dict)
    policies: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NftChain:
    """One chain of a listing. ``type``, ``hook`` and ``policy`` are empty for a regular chain; rules are (handle, text)."""

    type: str = ""
    hook: str = ""
    policy: str = ""
    rules: list[tuple[int, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Listing:
    """What a namespace holds: iptables tables by (backend, family, table), nft chains by (family, table, chain)."""

    iptables: dict[tuple[str, str, str], IptablesTable] = field(default_factory=dict)
    nft: dict[tuple[str, str, str], NftChain] = field(default_factory=dict)

    def position(self, step: Step) -> int | None:
        """Where in its chain the rule of a step is, from 1; None for a rule that is gone."""
        if step.position is not None or step.handle is None:
            return step.position
        chain = self.nft.get((step.family, step.table, step.chain))
        handles = [h for h, _ in chain.rules] if chain else []
        return handles.index(step.handle) + 1 if step.handle in handles else None

    def text(self, step: Step) -> str | None:
        """The rule of a step as written; None for a rule that is gone."""
        position = self.position(step)
        if position is None:
            return None
        if step.backend == "native-nft":
            return self.nft[(step.family, step.table, step.chain)].rules[position - 1][1]
        table = self.iptables.get((step.backend, _FAMILY[step.family], step.table))
        rules = table.rules.get(step.chain, []) if table else []
        return rules[position - 1] if position <= len(rules) else None

    def decided(self, step: Step) -> bool:
        """Whether the rule of a step ended the walk: a terminal target or RETURN; a jump alone does not."""
        if step.kind != "rule":
            return False
        if step.backend != "legacy":
            return step.verdict in _DECIDED
        return target(self.text(step) or "") in TERMINAL

    def dropped(self, step: Step) -> bool:
        if step.backend != "legacy":
            return step.kind == "rule" and step.verdict == "drop"
        return step.kind == "rule" and target(self.text(step) or "") in ("DROP", "REJECT")

    def hook(self, step: Step) -> str:
        """The hook at which a step happened; empty if its base chain is gone."""
        if step.hook:
            return step.hook
        chain = self.nft.get((step.family, step.table, step.base))
        return chain.hook if chain else ""

    def is_nat(self, step: Step) -> bool:
        if step.backend != "native-nft":
            return step.table == "nat"
        chain = self.nft.get((step.family, step.table, step.base))
        return chain is not None and chain.type == "nat"

    def rule(self, step: Step) -> Rule:
        """The contract's form of a step. A rule that is gone from the namespace has its handle as text."""
        family = step.family if step.backend == "native-nft" else _FAMILY[step.family]
        text = self.text(step) or f"(rule {step.position or step.handle} of {step.chain}, no longer there)"
        return Rule(family, step.backend, step.table, step.chain, self.position(step), text)

    def policy(self, step: Step) -> Rule:
        """The policy of the base chain that a step belongs to."""
        family = step.family if step.backend == "native-nft" else _FAMILY[step.family]
        if step.backend == "native-nft":
            chain = self.nft.get((step.family, step.table, step.base))
            text = f"policy {(chain.policy if chain else '') or 'accept'}"
            return Rule(family, step.backend, step.table, step.base, None, text)
        name = _BUILT_IN.get(self.hook(step), step.base or step.chain)
        table = self.iptables.get((step.backend, family, step.table))
        policy = table.policies.get(name, "ACCEPT") if table else "ACCEPT"
        return Rule(family, step.backend, step.table, name, None, f"-P {name} {policy}")


_BUILT_IN = {
    "prerouting": "PREROUTING",
    "input": "INPUT",
    "forward": "FORWARD",
    "output": "OUTPUT",
    "postrouting": "POSTROUTING",
}


def decide(packet: Packet, listing: Listing, hook: str) -> Rule:
    """The rule that decided over a packet at ``hook``, of the nat traversal of a flow's first packet.

    The last rule there that matched and decided; if a rule of any table dropped the packet, that one; in ``prerouting``
    without a deciding nat rule, one of mangle (TPROXY mode). If nothing decided, the policy of the built-in chain, also
    where the namespace has no nat table at all (then ``backend`` is None: no table reported anything).
    """
    here = [s for s in packet.steps if listing.hook(s) == hook]
    nat = [s for s in here if listing.is_nat(s)]
    dropped = next((s for s in reversed(here) if listing.dropped(s)), None)
    if dropped is not None:
        return listing.rule(dropped)
    if hook == "prerouting":
        mangle = [s for s in here if not listing.is_nat(s) and "mangle" in s.table]
    else:
        mangle = []
    for steps in (nat, mangle):
        decided = next((s for s in reversed(steps) if listing.decided(s)), None)
        if decided is not None:
            return listing.rule(decided)
    if nat:
        return listing.policy(nat[-1])
    name = _BUILT_IN[hook]
    return Rule(packet.flow.family, None, "nat", name, None, f"-P {name} ACCEPT")


def target(text: str) -> str:
    """The ``-j`` target of an iptables rule; empty for a goto or a rule without target."""
    words = shlex.split(text)
    return words[words.index("-j") + 1] if "-j" in words[:-1] else ""


def parse_iptables_save(text: str) -> dict[str, IptablesTable]:
    """Tables of an iptables-save dump by name."""
    tables: dict[str, IptablesTable] = {}
    table = IptablesTable()
    for line in text.splitlines():
        line = re.sub(r"^\[\d+:\d+\] ", "", line.strip())
        if line.startswith("*"):
            table = tables.setdefault(line[1:].strip(), IptablesTable())
        elif line.startswith(":"):
            name, policy = line[1:].split()[:2]
            if policy == "-":
                table.rules.setdefault(name, [])
            else:
                table.policies[name] = policy
        elif line.startswith("-A "):
            table.rules.setdefault(line.split(maxsplit=2)[1], []).append(_COMMENT.sub("", line))
    return tables


def parse_nft_listing(text: str) -> dict[tuple[str, str, str], NftChain]:
    """Chains of ``nft --handle list ruleset`` by (family, table, chain)."""
    chains: dict[tuple[str, str, str], NftChain] = {}
    family = table = ""
    name: str | None = None
    pending = ""
    for raw in text.splitlines():
        line = f"{pending} {raw.strip()}".strip()
        pending = ""
        if match := _NFT_TABLE.match(line):
            family, table = match["family"], match["table"]
        elif name is None:
            if match := _NFT_CHAIN.match(line):
                name = match["chain"]
                chains[(family, table, name)] = NftChain()
        elif line.split(" #")[0] == "}":
            name = None
        elif match := _NFT_BASE.match(line):
            base = NftChain(match["type"], match["hook"], match["policy"] or "accept")
            chains[(family, table, name)] = base
        elif match := _NFT_HANDLE.match(line):
            rule = _NFT_COMMENT.sub("", _NFT_COUNTER.sub("", match["text"]))
            chains[(family, table, name)].rules.append((int(match["handle"]), " ".join(rule.split())))
        else:  # a set or map that goes over several lines
            pending = line
    return chains


def wanted(packets: Iterable[Packet]) -> set[tuple[str, str]]:
    """The (backend, family) pairs whose listings are needed to name these packets' rules."""
    return {(s.backend, s.family) for p in packets for s in p.steps}


def take(netns: str | Path, what: Iterable[tuple[str, str]]) -> Listing:
    """Lists the rules of a namespace, of these (backend, family) pairs alone.

    A legacy table that does not exist must not be looked at: opening it creates it, and later back-end detection would
    say "legacy". A pair named here was seen by its trace, so it exists.

    Raises:
        ObservationError: a listing program is missing or fails.
    """
    with inside(netns):
        return parse(dump(what))


def dump(what: Iterable[tuple[str, str]]) -> dict[str, str]:
    """What `take` lists, of the current namespace, as text: ``BACKEND FAMILY`` (iptables) or ``nft`` to a program's output.

    Raises:
        ObservationError: a listing program is missing or fails.
    """
    pairs = set(what)
    texts = {
        f"{backend} {family}": _run([f"{family}tables-{backend}-save"])
        for backend, family in sorted(pairs)
        if backend != "native-nft"
    }
    if any(backend != "legacy" for backend, _ in pairs):
        texts["nft"] = _run(["nft", "--handle", "list", "ruleset"])
    return texts


def parse(texts: Mapping[str, str]) -> Listing:
    """What `dump` gave."""
    iptables: dict[tuple[str, str, str], IptablesTable] = {}
    nft: dict[tuple[str, str, str], NftChain] = {}
    for key, text in texts.items():
        if key == "nft":
            nft = parse_nft_listing(text)
            continue
        backend, family = key.split()
        for table, content in parse_iptables_save(text).items():
            iptables[(backend, _FAMILY[family], table)] = content
    return Listing(iptables, nft)


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ObservationError(
            "cannot read the rules", command[0], "the program is missing", "Install iptables and nftables"
        ) from None
    if done.returncode:
        raise ObservationError(
            "cannot read the rules",
            command[0],
            done.stderr.strip().splitlines()[-1:][0] if done.stderr.strip() else f"exit {done.returncode}",
            "Run as root",
        )
    return done.stdout

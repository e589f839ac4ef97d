"""Rules to the text that iptables-restore reads, one document for each family.

Source: istio/istio: tools/istio-iptables/pkg/builder/iptables_builder_impl.go (buildRestore): tables in alphabetical
order, ``* name``, the ``-N`` lines (chains that own rules in order of appearance, then chains that are only jumped
to), rules in order of emission, COMMIT.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .model import (
    BUILT_IN_CHAINS,
    VERDICTS,
    Address,
    ConnMark,
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
    RuleSet,
    SaveMark,
    SetMark,
    State,
    Target,
    Transparent,
    Zone,
)


def document(rules: Sequence[Rule], comments: bool = False) -> str:
    """The restore document of one family; empty without rules."""
    return "".join(f"{line}\n" for line in _lines(rules, comments))


def dry_run(rules: RuleSet, comments: bool = False) -> str:
    """What ``--dry-run`` prints: each document under the name of its family."""
    text = "# ipv4\n" + document(rules.ipv4, comments)
    return text + "# ipv6\n" + document(rules.ipv6, comments) if rules.ipv6 else text


def tables(rules: Iterable[Rule]) -> list[str]:
    return sorted({rule.table for rule in rules})


def new_chains(rules: Sequence[Rule], table: str) -> list[str]:
    """Chains that ``table`` needs created, in the order of the ``-N`` lines."""
    here = [rule for rule in rules if rule.table == table]
    owners = (rule.chain for rule in here if rule.chain not in BUILT_IN_CHAINS)
    targets = (rule.target.to for rule in here if isinstance(rule.target, Jump) and rule.target.to not in VERDICTS)
    return list(dict.fromkeys([*owners, *targets]))


def line(rule: Rule, comments: bool = False) -> str:
    """``-A CHAIN ...`` or ``-I CHAIN POSITION ...``."""
    where = f"-A {rule.chain}" if rule.position is None else f"-I {rule.chain} {rule.position}"
    return f"{where} {body(rule, comments)}"


def body(rule: Rule, comments: bool = False) -> str:
    """The rule without its place."""
    parts = [word for match in rule.matches for word in match_words(match)]
    if comments:
        parts += ["-m", "comment", "--comment", f'"{rule.comment}"']
    return " ".join([*parts, *target_words(rule.target)])


def _lines(rules: Sequence[Rule], comments: bool) -> Iterable[str]:
    for table in tables(rules):
        yield f"* {table}"
        for chain in new_chains(rules, table):
            yield f"-N {chain}"
        for rule in rules:
            if rule.table == table:
                yield line(rule, comments)
        yield "COMMIT"


def match_words(match: Match) -> list[str]:
    """A match as iptables' arguments."""
    if isinstance(match, Proto):
        return ["-p", match.name]
    if isinstance(match, Interface):
        return ["-i" if match.direction == "in" else "-o", match.name]
    if isinstance(match, Address):
        return _negated(match.negate, "-s" if match.side == "src" else "-d", match.cidr)
    if isinstance(match, Port):
        letter = match.side[0]
        if len(match.ports) > 1:
            return ["-m", "multiport", *_negated(match.negate, f"--{letter}ports", ",".join(match.ports))]
        return _negated(match.negate, f"--{letter}port", match.ports[0])
    if isinstance(match, Owner):
        return ["-m", "owner", *_negated(match.negate, f"--{match.kind}-owner", match.name)]
    if isinstance(match, State):
        return ["-m", "conntrack", "--ctstate", ",".join(match.states)]
    if isinstance(match, Mark):
        return ["-m", "mark", *_negated(match.negate, "--mark", match.value)]
    assert isinstance(match, ConnMark)
    return ["-m", "connmark", "--mark", match.value]


def target_words(target: Target) -> list[str]:
    """A target as iptables' arguments."""
    if isinstance(target, Jump):
        return ["-j", target.to]
    if isinstance(target, Redirect):
        return ["-j", "REDIRECT", "--to-port" if target.singular else "--to-ports", target.port]
    if isinstance(target, SetMark):
        return ["-j", "MARK", "--set-mark", target.value]
    if isinstance(target, SaveMark):
        return ["-j", "CONNMARK", "--save-mark"]
    if isinstance(target, RestoreMark):
        return ["-j", "CONNMARK", "--restore-mark"]
    if isinstance(target, Zone):
        return ["-j", "CT", "--zone", str(target.number)]
    assert isinstance(target, Transparent)
    return ["-j", "TPROXY", "--tproxy-mark", f"{target.mark}/0xffffffff", "--on-port", target.port]


def _negated(negate: bool, option: str, value: str) -> list[str]:
    return ["!", option, value] if negate else [option, value]

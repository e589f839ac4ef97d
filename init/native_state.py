"""What nftables holds of ours, from its JSON listing, and how it differs from what should be there.

nft lists a rule in its own words (no ``meta l4proto tcp`` where a port match implies it, numbers for names, host bits
masked), so both sides are brought to one form: the matches as a set, the statements in order, no counter values.

Source: nftables: doc/libnftables-json.adoc.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from . import native
from .canonical import masked, network_of, owner_of, port_of
from .model import (
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
    SaveMark,
    SetMark,
    State,
    Target,
    Transparent,
)
from .state import Drift, Kind, kind_of

Form = tuple[frozenset[tuple[str, ...]], tuple[tuple[str, ...], ...]]

_VERDICTS = ("accept", "drop", "return", "continue")


def compare(rules: Sequence[Rule], listing: str) -> list[Drift]:
    """Chains of our tables that are not as ``rules`` want them.

    Args:
        listing: the output of ``nft -j list ruleset inet``.
    """
    chains, found = _read(listing)
    wanted: dict[tuple[str, str], list[Rule]] = {}
    for table in native.TABLES:
        for chain in native.chains(rules, table):
            wanted[table, chain] = []
    for rule in native.placed(rules):
        here = wanted[rule.table, rule.chain]
        here.insert(len(here) if rule.position is None else rule.position, rule)
    drifts = []
    for key in dict.fromkeys([*wanted, *chains]):
        table, chain = key
        want, have = wanted.get(key), found.get(key, [])
        expected = tuple(native.body(rule) for rule in want or ())
        if key not in chains:
            drifts.append(Drift("inet", table, chain, "missing", expected, ()))
            continue
        words = dict(zip(map(form, want or ()), expected, strict=True))
        forms = [of_json(expr) for expr in have]
        actual = tuple(words.get(key, text(expr)) for key, expr in zip(forms, have, strict=True))
        if want is None:
            drifts.append(Drift("inet", table, chain, "unexpected", (), actual))
        elif list(words) != forms or len(words) != len(want):
            drift = _kind([form(rule) for rule in want], forms)
            if drift:
                drifts.append(Drift("inet", table, chain, drift, expected, actual))
        if want is not None and chain in native.BASE_CHAINS[table] and not _hooked(table, chain, chains[key]):
            drifts.append(
                Drift("inet", table, chain, "changed", (_hook(native.BASE_CHAINS[table][chain]),), (str(chains[key]),))
            )
    return drifts


def form(rule: Rule) -> Form:
    """The comparable form of one of our rules."""
    matches = {_match(match) for match in rule.matches}
    ported = any(isinstance(match, Port) for match in rule.matches)
    statements = (
        _transparent(rule.target) if isinstance(rule.target, Transparent) else (("counter",), _target(rule.target))
    )
    return frozenset(_without_protocol(matches) if ported else matches), statements


def of_json(expressions: Sequence[dict[str, Any]]) -> Form:
    """The comparable form of a listed rule."""
    matches: set[tuple[str, ...]] = set()
    statements: list[tuple[str, ...]] = []
    ported = False
    for expression in expressions:
        name, value = next(iter(expression.items()))
        if name == "match":
            left = value["left"]
            key = _key(left)
            ported = ported or key.endswith((" dport", " sport"))
            op = "==" if value["op"] == "in" else value["op"]
            matches.add((key, op, _right(key, value["right"])))
        elif name == "counter":
            statements.append(("counter",))
        elif name in _VERDICTS:
            statements.append((name,))
        elif name in ("jump", "goto"):
            statements.append((name, value["target"]))
        elif name == "redirect":
            statements.append(("redirect", json.dumps(value, sort_keys=True)))
        elif name == "mangle":
            target = value["value"]
            shown = _key(target) if isinstance(target, dict) else str(target)
            statements.append(("set", _key(value["key"]), shown))
        elif name == "tproxy":
            statements.append(
                ("tproxy", value.get("family", ""), json.dumps(value.get("addr")), str(value.get("port")))
            )
        else:
            statements.append(("other", json.dumps(expression, sort_keys=True)))
    return frozenset(_without_protocol(matches) if ported else matches), tuple(statements)


def text(expressions: Sequence[dict[str, Any]]) -> str:
    """A listed rule in nft's words, without counter values; what we never write stays JSON."""
    return " ".join(_word(*next(iter(expression.items()))) for expression in expressions)


def _word(name: str, value: Any) -> str:
    if name == "match":
        key = _key(value["left"])
        if key.startswith("{"):
            return json.dumps({name: value})
        right = _right(key, value["right"])
        if isinstance(value["right"], dict) and "set" in value["right"]:
            right = f"{{ {', '.join(_right(key, item) for item in value['right']['set'])} }}"
        shown = key.removeprefix("meta ") if key != "meta l4proto" else key
        return f"{shown} {'' if value['op'] in ('==', 'in') else value['op'] + ' '}{right}"
    if name == "counter" or name in _VERDICTS:
        return name
    if name in ("jump", "goto"):
        return f"{name} {value['target']}"
    if name == "redirect" and isinstance(value, dict) and set(value) == {"port"}:
        return f"redirect to :{value['port']}"
    if name == "mangle":
        target = value["value"]
        return f"{_key(value['key'])} set {_key(target) if isinstance(target, dict) else target}"
    if name == "tproxy" and "addr" not in value:
        return f"tproxy {value.get('family', '')} to :{value.get('port')}"
    return json.dumps({name: value})


def _read(
    listing: str,
) -> tuple[dict[tuple[str, str], dict[str, Any]], dict[tuple[str, str], list[list[dict[str, Any]]]]]:
    chains: dict[tuple[str, str], dict[str, Any]] = {}
    rules: dict[tuple[str, str], list[list[dict[str, Any]]]] = {}
    for item in json.loads(listing)["nftables"]:
        if "chain" in item and item["chain"]["table"] in native.TABLES:
            chains[item["chain"]["table"], item["chain"]["name"]] = item["chain"]
        elif "rule" in item and item["rule"]["table"] in native.TABLES:
            rules.setdefault((item["rule"]["table"], item["rule"]["chain"]), []).append(item["rule"]["expr"])
    return chains, rules


def _hook(base: tuple[str, str, int]) -> str:
    return f"type {base[0]} hook {base[1]} priority {base[2]}"


def _hooked(table: str, chain: str, found: dict[str, Any]) -> bool:
    kind, hook, priority = native.BASE_CHAINS[table][chain]
    # One step earlier is how the rules stand beside Docker's resolver.
    priorities = (priority, priority - 1) if (table, chain) == (native.NAT, "output") else (priority,)
    return (
        found.get("type") == kind
        and found.get("hook") == hook
        and found.get("prio") in priorities
        and found.get("policy", "accept") == "accept"
    )


def _kind(want: list[Form], have: list[Form]) -> Kind | None:
    return None if want == have else kind_of(want, have)


def _without_protocol(matches: set[tuple[str, ...]]) -> set[tuple[str, ...]]:
    return {match for match in matches if match[0] != "meta l4proto" or match[1] != "=="}


def _key(left: Any) -> str:
    if isinstance(left, dict) and len(left) == 1:
        name, value = next(iter(left.items()))
        if name in ("meta", "ct") and isinstance(value, dict) and set(value) == {"key"}:
            return f"{name} {value['key']}"
        if name == "payload" and set(value) == {"protocol", "field"}:
            return f"{value['protocol']} {value['field']}"
    return json.dumps(left, sort_keys=True)


def _right(key: str, value: Any) -> str:
    if isinstance(value, dict):
        if "prefix" in value:
            return f"{value['prefix']['addr']}/{value['prefix']['len']}"
        if "range" in value:
            return "-".join(map(str, value["range"]))
        if "set" in value:
            return ",".join(sorted(_right(key, item) for item in value["set"]))
        return json.dumps(value, sort_keys=True)
    if isinstance(value, list):
        return ",".join(sorted(map(str, value)))
    if key.endswith(("addr",)):
        return network_of(str(value))
    return str(value)


def _match(match: Match) -> tuple[str, ...]:
    if isinstance(match, Proto):
        return ("meta l4proto", "==", match.name)
    if isinstance(match, Interface):
        return (f"meta {match.direction[0]}ifname", "==", match.name)
    if isinstance(match, Address):
        ip = "ip6" if ":" in match.cidr else "ip"
        return (f"{ip} {match.side[0]}addr", _op(match.negate), network_of(match.cidr))
    if isinstance(match, Port):
        ports = sorted(port_of(port.replace("-", ":")).replace(":", "-") for port in match.ports)
        return (f"{match.proto} {match.side[0]}port", _op(match.negate), ",".join(ports))
    if isinstance(match, Owner):
        return (f"meta sk{match.kind}", _op(match.negate), owner_of(f"--{match.kind}-owner", match.name))
    if isinstance(match, State):
        return ("ct state", "==", ",".join(sorted(state.lower() for state in match.states)))
    if isinstance(match, Mark):
        return ("meta mark", _op(match.negate), _plain(match.value))
    assert isinstance(match, ConnMark)
    return ("ct mark", "==", _plain(match.value))


def _target(target: Target) -> tuple[str, ...]:
    if isinstance(target, Jump):
        return (target.to.lower(),) if target.to in ("ACCEPT", "RETURN", "DROP") else ("jump", target.to)
    if isinstance(target, Redirect):
        port = port_of(target.port)
        return ("redirect", json.dumps({"port": int(port) if port.isdigit() else port}))
    if isinstance(target, SetMark):
        return ("set", "meta mark", _plain(target.value))
    if isinstance(target, SaveMark):
        return ("set", "ct mark", "meta mark")
    if isinstance(target, RestoreMark):
        return ("set", "meta mark", "ct mark")
    assert not isinstance(target, Transparent)
    return ("set", "ct zone", str(target.number))


def _transparent(target: Transparent) -> tuple[tuple[str, ...], ...]:
    family = "ip" if target.family == "ipv4" else "ip6"
    return (
        ("tproxy", family, "null", port_of(target.port)),
        ("set", "meta mark", _plain(target.mark)),
        ("counter",),
        ("accept",),
    )


def _op(negate: bool) -> str:
    return "!=" if negate else "=="


def _plain(mark: str) -> str:
    return str(int(masked(mark).partition("/")[0], 16))

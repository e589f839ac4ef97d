"""Reads nftables rule sets: what ``nft list ruleset`` prints, and the scripts that ``nft -f`` reads.

Known are the expressions of our own rule sets (init's native back end, the node's services) and of kube-proxy's nftables
mode; an expression that is not known becomes a condition or an action that says so. Source: nft(8).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from lab.errors import InputError
from lab.explain import conditions as c
from lab.explain import ruleset as r
from lab.explain.conditions import Condition, Range
from lab.explain.packet import FULL, PROTOCOLS, Family, number

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{};,()]|\n|#[^\n]*|\\\n|[^\s{};,()"#]+')
_FAMILIES: Mapping[str, Literal["ipv4", "ipv6", "inet"]] = {"ip": "ipv4", "ip6": "ipv6", "inet": "inet"}
_PRIORITIES = {"raw": -300, "mangle": -150, "dstnat": -100, "filter": 0, "security": 50, "srcnat": 100}
_OBJECTS = frozenset({"counter", "quota", "limit", "flowtable", "ct", "synproxy", "secmark"})
_STATES = ("invalid", "established", "related", "new", "untracked")


def parse(text: str, file: str = "-", *, canonical: bool = False) -> r.RuleSet:
    """The rule set of a listing or a script.

    Args:
        file: where the text is from, for errors.
        canonical: give each rule the text that nft would list it with (for scripts as init writes them); else texts stay as
            they are, without counters, comments and handles.

    Raises:
        InputError: the text is no nftables rule set, or is cut off.
    """
    reader = _Reader(text, file, canonical)
    reader.run()
    return reader.finish()


def looks_like(text: str) -> bool:
    """Whether a text is an nftables rule set rather than an iptables dump."""
    return bool(
        re.search(
            r"^\s*(?:(?:add|create|insert) )?(?:table|chain|rule) (?:inet|ip6?|arp|bridge|netdev) \S",
            text,
            re.MULTILINE,
        )
    )


@dataclass
class _Chain:
    base: r.Base | None = None
    rules: list[tuple[list[str], int]] = field(default_factory=list)  # tokens, line


@dataclass
class _Table:
    family: str
    name: str
    chains: dict[str, _Chain] = field(default_factory=dict)
    sets: dict[str, list[list[str]]] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)


class _Reader:
    def __init__(self, text: str, file: str, canonical: bool) -> None:
        self.file, self.canonical = file, canonical
        self.tokens: list[tuple[str, int]] = []
        line = 1
        for match in _TOKEN.finditer(text):
            token = match.group()
            if token == "\\\n":
                line += 1
                continue
            if not token.startswith("#"):
                self.tokens.append((token, line))
            line += token == "\n"
        self.at = 0
        self.tables: dict[tuple[str, str], _Table] = {}
        self.unread: list[str] = []

    # --- reading ----------------------------------------------------------------------------

    def where(self) -> str:
        line = self.tokens[min(self.at, len(self.tokens) - 1)][1] if self.tokens else 1
        return f"{self.file}:{line}"

    def bad(self, why: str) -> InputError:
        return InputError(
            "cannot read the nftables rule set", self.where(), why, "Give what `nft list ruleset` printed"
        )

    def next(self) -> str:
        """The next token; the end of the text inside a block means that it is cut off."""
        if self.at >= len(self.tokens):
            raise InputError(
                "the rule set is cut off", self.where(), "a block has no end", "Give the whole output of nft"
            )
        self.at += 1
        return self.tokens[self.at - 1][0]

    def peek(self) -> str:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else ""

    def skip_blank(self) -> None:
        while self.peek() in ("\n", ";"):
            self.at += 1

    def block(self) -> list[str]:
        """The tokens up to the brace that ends a block whose opening brace was read; nested braces stay."""
        depth = 1
        found: list[str] = []
        while True:
            token = self.next()
            depth += (token == "{") - (token == "}")
            if depth == 0:
                return found
            found.append(token)

    def statement(self) -> tuple[list[str], int]:
        """The tokens of a rule: up to the end of its line, outside of braces."""
        depth, line = 0, self.tokens[self.at][1]
        found: list[str] = []
        while self.at < len(self.tokens):
            token = self.peek()
            if depth == 0 and (token in ("\n", ";") or token == "}"):
                return found, line
            self.at += 1
            depth += (token == "{") - (token == "}")
            if token != "\n":
                found.append(token)
        if depth:
            self.next()
        return found, line

    def run(self) -> None:
        self.skip_blank()
        if not self.peek():
            raise InputError("the rule set is empty", self.file, next_step="Give what `nft list ruleset` printed")
        while self.peek():
            self.command()
            self.skip_blank()

    def command(self) -> None:
        word = self.next()
        if word in ("add", "create", "insert", "replace"):
            self.change(self.next(), insert=word == "insert")
        elif word == "table":
            self.table_block(self.next(), self.next())
        elif word in ("flush", "delete", "destroy"):
            self.removal(self.statement()[0])
        else:
            raise self.bad(f"{word!r} begins no command")

    def removal(self, words: list[str]) -> None:
        """A table that is flushed or deleted holds nothing of what came before."""
        if words[:1] == ["ruleset"]:
            self.tables.clear()
        elif words[:1] == ["table"] and len(words) >= 3:
            self.tables.pop((words[1], words[2]), None)
        elif words[:1] == ["chain"] and len(words) >= 4 and (words[1], words[2]) in self.tables:
            chain = self.table(words[1], words[2]).chains.get(words[3])
            if chain is not None:
                chain.rules.clear()

    def table(self, family: str, name: str) -> _Table:
        return self.tables.setdefault((family, name), _Table(family, name))

    def change(self, what: str, *, insert: bool) -> None:
        family, name = self.next(), self.next()
        table = self.table(family, name)
        if what == "table":
            return
        owner = self.next()
        if what == "chain":
            chain = table.chains.setdefault(owner, _Chain())
            if self.peek() == "{":
                self.next()
                self.chain_block(chain)
        elif what == "rule":
            chain = table.chains.setdefault(owner, _Chain())
            index: int | None = 0 if insert else None
            words, line = self.statement()
            if words[:1] in (["index"], ["position"], ["handle"]):
                index, words = int(words[1]), words[2:]
                if not insert:
                    index += 1
            chain.rules.insert(len(chain.rules) if index is None else index, (words, line))
        elif what in ("set", "map"):
            if self.next() != "{":
                raise self.bad(f"{what} {owner} has no definition")
            self.set_block(table, owner, self.block())
        elif what == "element":
            if self.next() != "{":
                raise self.bad("add element without elements")
            table.sets.setdefault(owner, []).extend(_elements(self.block()))
        else:
            self.statement()

    def table_block(self, family: str, name: str) -> None:
        table = self.table(family, name)
        if self.peek() != "{":
            self.statement()
            return
        self.next()
        while True:
            self.skip_blank()
            word = self.next()
            if word == "}":
                return
            if word == "chain":
                chain = table.chains.setdefault(self.next(), _Chain())
                if self.next() != "{":
                    raise self.bad("a chain has no block")
                self.chain_block(chain)
            elif word in ("set", "map"):
                owner = self.next()
                if self.next() != "{":
                    raise self.bad(f"{word} {owner} has no block")
                self.set_block(table, owner, self.block())
            elif word in _OBJECTS:
                while self.next() != "{":
                    pass
                self.block()
            else:
                self.statement()  # flags, comment

    def chain_block(self, chain: _Chain) -> None:
        words: list[str] = []
        while True:
            self.skip_blank()
            if self.peek() == "}":
                self.next()
                break
            tokens, line = self.statement()
            if not tokens:
                self.next()
            elif (tokens[0] == "type" and "hook" in tokens) or (tokens[0] == "policy" and words):
                words += tokens
            elif tokens[0] != "comment":
                chain.rules.append((tokens, line))
        if words:
            chain.base = _base(words)
            if chain.base is None:
                self.unread.append(f"hook {' '.join(words)}")

    def set_block(self, table: _Table, name: str, tokens: list[str]) -> None:
        elements: list[list[str]] = []
        text = [t for t in tokens if t != "\n"]
        if "elements" in text:
            start = text.index("elements")
            opening = text.index("{", start)
            elements = _elements(text[opening + 1 : len(text) - 1 - text[::-1].index("}")])
        table.sets.setdefault(name, []).extend(elements)
        if "type" in text or "typeof" in text:
            begin = text.index("type" if "type" in text else "typeof") + 1
            words = []
            for word in text[begin:]:
                if word in (
                    ";",
                    "flags",
                    "elements",
                    "counter",
                    "timeout",
                    "size",
                    "gc-interval",
                    "auto-merge",
                    "comment",
                    "policy",
                ):
                    break
                words.append(word)
            table.types[name] = " ".join(words)

    # --- meaning ----------------------------------------------------------------------------

    def finish(self) -> r.RuleSet:
        tables: list[r.Table] = []
        sets: dict[str, frozenset[str]] = {}
        for (family, name), table in self.tables.items():
            known = _FAMILIES.get(family)
            if known is None:
                self.unread.append(f"table {family} {name}")
                continue
            chains: dict[str, r.Chain] = {}
            for chain_name, chain in table.chains.items():
                rules = []
                for position, (words, line) in enumerate(chain.rules, 1):
                    parts, shown = _Rule(words, table, known).read()
                    text = shown if self.canonical else as_listed(words)
                    rules.append(r.Rule(chain_name, position, text, tuple(parts), line))
                chains[chain_name] = r.Chain(chain_name, tuple(rules), chain.base)
            tables.append(r.Table(known, name, chains, "native-nft", len(tables)))
            for set_name, elements in table.sets.items():
                sets[f"{family} {name} {set_name}"] = frozenset(" ".join(e) for e in elements)
        return r.RuleSet(tuple(tables), tuple(self.unread), sets)


def _base(words: Sequence[str]) -> r.Base | None:
    """``type nat hook output priority -100 ; policy accept ;``; None for a hook that no routed packet meets."""
    kind = words[words.index("type") + 1]
    hook = words[words.index("hook") + 1]
    if kind not in ("filter", "nat", "route") or hook not in r.HOOKS or "priority" not in words:
        return None
    at = words.index("priority") + 1
    priority = _priority([w for w in words[at : at + 3] if w not in (";", "policy", "accept", "drop")])
    policy: Literal["accept", "drop"] = "accept"
    if "policy" in words and words[words.index("policy") + 1] == "drop":
        policy = "drop"
    return r.Base(hook, kind, priority, policy, f"policy {policy}")  # type: ignore[arg-type]


def _priority(words: Sequence[str]) -> int:
    text = "".join(words)
    match = re.fullmatch(r"([a-z]+)?([+-]?\d+)?", text)
    if match is None:
        return 0
    return _PRIORITIES.get(match[1] or "", 0) + int(match[2] or 0)


def _elements(tokens: Sequence[str]) -> list[list[str]]:
    """The elements of a set or map, each as its tokens; what is said of an element (timeouts, counters) is left out."""
    found: list[list[str]] = []
    current: list[str] = []
    for token in [*tokens, ","]:
        if token == ",":
            if current:
                found.append(_bare(current))
            current = []
        elif token != "\n":
            current.append(token)
    return found


def _bare(words: list[str]) -> list[str]:
    for word in ("timeout", "expires", "counter", "comment", "limit"):
        if word in words[1:]:
            value = words[words.index(":") :] if ":" in words else []
            return words[: words.index(word, 1)] + value
    return words


def as_listed(words: Sequence[str]) -> str:
    """A rule as its owner wrote it, without counters, comments and handles."""
    kept: list[str] = []
    position = 0
    while position < len(words):
        word = words[position]
        if word == "counter":
            position += 1
            if words[position : position + 1] == ["packets"]:
                position += 4
            continue
        if word == "comment":
            position += 2
            continue
        kept.append(word)
        position += 1
    return _joined(kept)


def _joined(words: Sequence[str]) -> str:
    """Words as nft prints them: a comma is followed by a blank in braces only."""
    depth, text = 0, ""
    for word in words:
        depth += (word == "{") - (word == "}")
        if word == "," or not text or (text.endswith(",") and depth == 0):
            text += word
        else:
            text += f" {word}"
    return text


# A way to make conditions of a value: (words of the value, negated, text) -> condition.
_Make = Callable[[Sequence[str], bool, str], Condition]


class _Key(NamedTuple):
    """What is compared: its name as nft lists it, and how a value becomes a condition. ``shown`` renders a value."""

    name: str
    make: _Make
    shown: Callable[[str], str] = str


class _Rule:
    """One rule that is being read."""

    def __init__(self, words: Sequence[str], table: _Table, family: str) -> None:
        self.words, self.table, self.family = list(words), table, family
        self.at = 0
        self.parts: list[r.Part] = []
        self.shown: list[str] = []

    def peek(self, ahead: int = 0) -> str:
        return self.words[self.at + ahead] if self.at + ahead < len(self.words) else ""

    def next(self) -> str:
        self.at += 1
        return self.words[self.at - 1] if self.at <= len(self.words) else ""

    def take(self, *words: str) -> bool:
        if self.words[self.at : self.at + len(words)] == list(words):
            self.at += len(words)
            return True
        return False

    def read(self) -> tuple[list[r.Part], str]:
        while self.at < len(self.words):
            start = self.at
            try:
                known = self.one()
            except (ValueError, IndexError, KeyError):
                known = False
            if not known:
                self.at = start
                self.unknown()
        return self.parts, self._text()

    def _text(self) -> str:
        """The texts of the parts; nft leaves out a protocol that a port names anyway."""
        ported = {s.split(" ")[0] for s in self.shown if re.match(r"(?:tcp|udp|sctp) [sd]port ", s)}
        return " ".join(s for s in self.shown if not (s.startswith("meta l4proto ") and s.split(" ")[2] in ported))

    def add(self, part: r.Part, shown: str) -> bool:
        self.parts.append(part)
        self.shown.append(shown)
        return True

    def unknown(self) -> None:
        """An expression that is not known: everything up to the next known verdict belongs to it."""
        start = self.at
        self.at += 1
        while self.at < len(self.words) and self.peek() not in _VERDICTS and self.peek() not in ("counter", "comment"):
            if self.peek() == "{":
                self._braces()
            else:
                self.at += 1
        text = _joined(self.words[start : self.at])
        self.add(c.Unknown(text, "this expression is not evaluated"), text)

    def _braces(self) -> list[str]:
        depth = 0
        found: list[str] = []
        while self.at < len(self.words):
            word = self.next()
            depth += (word == "{") - (word == "}")
            if depth == 0:
                return found[1:]
            found.append(word)
        return found[1:]

    def one(self) -> bool:
        word = self.peek()
        if word == "counter":
            self.at += 1
            if self.take("packets"):
                self.at += 3
            return True
        if word == "comment":
            self.at += 2
            return True
        for read in (self.verdict, self.effect, self.translation, self.limit):
            if read():
                return True
        return self.comparison()

    # --- statements -------------------------------------------------------------------------

    def verdict(self) -> bool:
        word = self.peek()
        if word in ("accept", "drop", "return"):
            self.at += 1
            return self.add(r.Verdict(word), word)  # type: ignore[arg-type]
        if word in ("jump", "goto"):
            self.at += 1
            target = self.next()
            return self.add(r.Jump(target, goto=word == "goto"), f"{word} {target}")
        if word == "continue":
            self.at += 1
            return True
        if word == "queue":
            text = _joined(self.words[self.at :])
            self.at = len(self.words)
            return self.add(r.Verdict("queue"), text)
        if word == "reject":
            text = as_listed(self.words[self.at :])
            self.at = len(self.words)
            # What nft takes from such an answer it does not list again.
            if text.startswith(("reject with icmp ", "reject with icmp type")):
                self.parts.append(c.IPVersion("meta nfproto ipv4", "ipv4"))
            elif text.startswith("reject with icmpv6"):
                self.parts.append(c.IPVersion("meta nfproto ipv6", "ipv6"))
            elif "tcp reset" in text:
                self.parts.append(c.Transport("meta l4proto tcp", frozenset({6})))
            return self.add(r.Reject(_reject_word(text)), text)
        return False

    def effect(self) -> bool:
        start = self.at
        if self.take("meta", "nftrace", "set") or self.take("nftrace", "set"):
            self.at += 1
            return self.add(r.NoEffect("trace"), _joined(self.words[start : self.at]))
        if self.take("log"):
            while self.peek() and self.peek() not in _VERDICTS and self.peek() not in ("counter", "comment"):
                self.at += 1
            return self.add(r.NoEffect("log"), _joined(self.words[start : self.at]))
        if self.peek() in ("meta", "mark", "ct") and self._mark_set():
            return True
        if self.take("ct", "zone", "set"):
            value = self.next()
            return self.add(r.SetZone(int(value, 0), retracks=True), f"ct zone set {value}")
        if self.take("notrack"):
            return self.add(r.NoTrack(), "notrack")
        if self.take("ct", "helper", "set") or self.take("ct", "timeout", "set"):
            self.at += 1
            return self.add(r.NoEffect("ct"), _joined(self.words[start : self.at]))
        if self.take("tproxy"):
            return self._tproxy(start)
        return False

    def _mark_set(self) -> bool:
        start = self.at
        if self.take("meta", "mark", "set") or self.take("mark", "set"):
            of: Literal["packet", "connection"] = "packet"
        elif self.take("ct", "mark", "set"):
            of = "connection"
        else:
            return False
        name = "meta mark set" if of == "packet" else "ct mark set"
        source = self._mark_source()
        if source is None:
            value = int(self.next(), 0)
            return self.add(r.SetMark(of, value), f"{name} 0x{value:08x}")
        shown = {"packet": "meta mark", "connection": "ct mark"}[source]
        if source == "connection":
            self.parts.append(c.Connected("ct mark"))
        operator = {"and": "&", "or": "|", "xor": "^"}.get(self.peek(), self.peek())
        if operator not in ("&", "|", "^"):
            if source == of:
                return self.add(r.NoEffect("mark"), f"{name} {shown}")
            action = r.SaveMark() if of == "connection" else r.RestoreMark()
            return self.add(action, f"{name} {shown}")
        self.at += 1
        value = int(self.next(), 0)
        if source != of or self.peek() in ("&", "|", "^", "and", "or", "xor"):
            self.at = start
            return False
        mask = {"&": FULL ^ value, "|": value, "^": 0}[operator]
        return self.add(
            r.SetMark(of, 0 if operator == "&" else value, mask), f"{name} {shown} {operator} 0x{value:08x}"
        )

    def _mark_source(self) -> Literal["packet", "connection"] | None:
        if self.take("ct", "mark"):
            return "connection"
        return "packet" if self.take("meta", "mark") or self.take("mark") else None

    def _tproxy(self, start: int) -> bool:
        family = self.next() if self.peek() in ("ip", "ip6") else ""
        if not self.take("to"):
            raise ValueError
        _, _, port = self.next().rpartition(":")
        text = _joined(self.words[start : self.at])
        if family:
            # The statement breaks the rule for packets of the other family.
            self.parts.append(c.IPVersion(f"tproxy {family}", "ipv4" if family == "ip" else "ipv6"))
        self.parts.append(r.Tproxy(int(port), ends=False))
        self.shown.append(text)
        return True

    def translation(self) -> bool:
        start = self.at
        word = self.peek()
        if word == "redirect":
            self.at += 1
            ports = self._to_ports()
            return self.add(r.Redirect(ports), self._said(start))
        if word == "masquerade":
            self.at += 1
            ports = self._to_ports()
            return self.add(r.Masquerade(ports), self._said(start))
        if word not in ("dnat", "snat"):
            return False
        self.at += 1
        family: Family | None = None if self.family == "inet" else self.family  # type: ignore[assignment]
        if self.peek() in ("ip", "ip6"):
            family = "ipv4" if self.next() == "ip" else "ipv6"
        self.take("addr", ".", "port") or self.take("addr")
        if not self.take("to"):
            raise ValueError
        what: Literal["src", "dst"] = "dst" if word == "dnat" else "src"
        if self.take("numgen"):
            return self._spread(what, family, start)
        ends = [self.next()]
        if self.take("."):
            ends.append(self.next())
        end = _nat_end(ends)
        self._flags()
        return self.add(r.Translate(what, (end,), family), self._said(start))

    def _spread(self, what: Literal["src", "dst"], family: Family | None, start: int) -> bool:
        """``numgen random mod N map { 0 : ADDRESS . PORT, ... }``: each its share."""
        self.at += 1  # random or inc
        if not self.take("mod"):
            raise ValueError
        modulus = int(self.next())
        if not self.take("map"):
            raise ValueError
        shares: list[tuple[float, r.Action]] = []
        for element in _elements(self._braces()):
            key, value = element[: element.index(":")], element[element.index(":") + 1 :]
            low, _, high = key[0].partition("-")
            share = (int(high or low) - int(low) + 1) / modulus
            shares.append((share, r.Translate(what, (_nat_end([v for v in value if v != "."]),), family)))
        self._flags()
        return self.add(r.Spread(tuple(shares)), self._said(start))

    def _flags(self) -> None:
        while self.peek() in ("random", "fully-random", "persistent", ","):
            self.at += 1

    def _to_ports(self) -> Range | None:
        ports: Range | None = None
        if self.take("to"):
            low, _, high = self.next().lstrip(":").partition("-")
            ports = (int(low), int(high or low))
        self._flags()
        return ports

    def _said(self, start: int) -> str:
        return as_listed(self.words[start : self.at])

    def limit(self) -> bool:
        if self.peek() != "limit":
            return False
        start = self.at
        while (
            self.peek()
            and self.peek() not in _VERDICTS
            and self.peek() not in ("counter", "comment", "log", "meta", "ct")
        ):
            self.at += 1
        text = _joined(self.words[start : self.at])
        return self.add(c.Unknown(text, "it depends on the rate of packets"), text)

    # --- comparisons ------------------------------------------------------------------------

    def comparison(self) -> bool:
        start = self.at
        if self.take("numgen"):
            return self._numgen_vmap(start)
        key = self.key()
        if key is None:
            return False
        keys = [key]
        while self.take("."):
            more = self.key()
            if more is None:
                return False
            keys.append(more)
        if self.take("vmap"):
            return self._vmap(keys, start)
        mask = None
        if self.peek() in ("&", "and") and len(keys) == 1:
            self.at += 1
            mask = self._value()
        operator = self.next() if self.peek() in ("==", "!=", "!", "<", ">", "<=", ">=", "eq", "ne") else ""
        negated = operator in ("!=", "ne")
        value = self._value()
        text = f"{' . '.join(k.name for k in keys)}{' & ' + ' '.join(mask) if mask else ''}"
        text += f"{' !=' if negated else '' if operator in ('', '==', 'eq') else ' ' + operator} "
        if operator in ("<", ">", "<=", ">="):
            value = _inequality(operator, value[0])
            return self.add(keys[0].make(value, False, text + value[0]), text + value[0])
        if keys[0].name == "tcp flags" and self.take("/"):
            # How newer programs write a mask: ``tcp flags syn / fin,syn,rst,ack``.
            mask = self._value()
            text += f"{','.join(v for v in value if v != ',')} / {','.join(v for v in mask if v != ',')}"
            wanted = _flag_names([v for v in value if v != ","])
            return self.add(c.TcpFlags(text, _flag_names([v for v in mask if v != ","]), wanted, negated), text)
        if keys[0].name == "tcp flags" and operator in ("", "!") and mask is None and value[0] not in ("{", "0"):
            # Flags without an operator: any of them is set; with "!": none is.
            text += ",".join(v for v in value if v != ",")
            any_of = _flag_names([v for v in value if v != ","])
            return self.add(c.TcpFlags(text, any_of, frozenset(), operator != "!"), text)
        if operator == "!":
            return False
        if mask is not None:
            return self._masked(keys[0], mask, value, negated, text + " ".join(value))
        if value[:1] == ["{"] or (value[0].startswith("@") and len(value) == 1):
            elements = self._members(value)
            if elements is None:
                text += value[0]
                return self.add(c.Unknown(text, "the set is not in the rule set"), text)
            text += value[0] if value[0].startswith("@") else f"{{ {', '.join(_joined(e) for e in elements)} }}"
            alternatives = tuple(self._together(keys, element) for element in elements)
            if len(keys) == 1 and len(alternatives) == 1 and not negated and len(alternatives[0]) == 1:
                return self.add(alternatives[0][0], text)
            # A comparison with a set still needs its protocol or family to be there, negated or not.
            for needed in dict.fromkeys(condition for k in keys for condition in _needs(k.name)):
                self.parts.append(needed)
            return self.add(c.AnyOf(text, alternatives, negated), text)
        if len(keys) > 1:
            text += _joined(value)
            return self.add(c.AnyOf(text, (self._together(keys, value),), negated), text)
        if key.name == "ct state":
            value = [s for s in _STATES if s in value] if set(value) - {","} <= set(_STATES) else value
        shown = text + ",".join(keys[0].shown(v) for v in value if v != ",")
        return self.add(key.make([v for v in value if v != ","], negated, shown), shown)

    def _value(self) -> list[str]:
        """The words of a right hand side: ``{ ... }``, a list with commas, a flag expression, one word, or a concatenation."""
        if self.peek() == "{":
            return ["{", *self._braces()]
        if self.peek() == "(":
            found = []
            while self.peek() and self.peek() != ")":
                found.append(self.next())
            self.at += 1
            return found[1:]
        found = [self.next()]
        while self.peek() in (",", ".", "|"):
            found.append(self.next())
            found.append(self.next())
        return [w for w in found if w not in (".", "|")]

    def _members(self, value: list[str]) -> list[list[str]] | None:
        if value[0] == "{":
            return _elements(value[1:])
        return self.table.sets.get(value[0][1:])

    def _together(self, keys: Sequence[_Key], element: Sequence[str]) -> tuple[Condition, ...]:
        values = [w for w in element if w not in (".",)]
        if len(values) != len(keys):
            raise ValueError
        return tuple(
            key.make([value], False, f"{key.name} {value}")
            for key, value in zip(keys, values, strict=True)
            if value != "*"
        )

    def _masked(self, key: _Key, mask: list[str], value: list[str], negated: bool, text: str) -> bool:
        if key.name in ("meta mark", "ct mark"):
            of: Literal["packet", "connection"] = "packet" if key.name == "meta mark" else "connection"
            return self.add(c.Mark(text, of, int(value[0], 0), int(mask[0], 0), negated, strict=True), text)
        if key.name == "tcp flags":
            wanted = frozenset() if value == ["0x0"] or value == ["0"] else _flag_names(value)
            return self.add(c.TcpFlags(text, _flag_names(mask), wanted, negated), text)
        raise ValueError

    def _vmap(self, keys: Sequence[_Key], start: int) -> bool:
        elements = self._members(["{", *self._braces()] if self.peek() == "{" else [self.next()])
        text = _joined(self.words[start : self.at])
        if elements is None:
            return self.add(r.UnknownAction(text, "the map is not in the rule set"), text)
        entries = []
        for element in elements:
            at = element.index(":")
            entries.append((self._together(keys, element[:at]), _map_verdict(element[at + 1 :])))
        return self.add(r.VerdictMap(tuple(entries)), text)

    def _numgen_vmap(self, start: int) -> bool:
        """``numgen random mod N vmap { 0 : goto A, ... }`` as a chain of choices."""
        self.at += 1
        if not self.take("mod"):
            raise ValueError
        modulus = int(self.next())
        if not self.take("vmap"):
            raise ValueError
        elements = self._members(["{", *self._braces()] if self.peek() == "{" else [self.next()]) or []
        text = _joined(self.words[start : self.at])
        entries: list[tuple[tuple[Condition, ...], r.Verdict | r.Jump | r.UnknownAction]] = []
        left = modulus
        for element in elements:
            at = element.index(":")
            entries.append(((c.Chance(f"{text}: {element[0]}", 1 / left),), _map_verdict(element[at + 1 :])))
            left -= 1
        return self.add(r.VerdictMap(tuple(entries)), text)

    def key(self) -> _Key | None:
        """The left hand side; None if it is not known."""
        for words, key in _KEYS:
            if self.take(*words):
                return key
        return None


def _needs(name: str) -> Iterator[Condition]:
    proto, _, rest = name.partition(" ")
    if rest in ("dport", "sport") and proto in ("tcp", "udp", "sctp"):
        yield c.Transport(f"meta l4proto {proto}", frozenset({PROTOCOLS[proto]}))
    elif name in ("ip saddr", "ip daddr", "ip protocol"):
        yield c.IPVersion("meta nfproto ipv4", "ipv4")
    elif name in ("ip6 saddr", "ip6 daddr", "ip6 nexthdr"):
        yield c.IPVersion("meta nfproto ipv6", "ipv6")


_VERDICTS = frozenset(
    {"accept", "drop", "return", "jump", "goto", "reject", "queue", "redirect", "dnat", "snat", "masquerade"}
)


def _map_verdict(words: Sequence[str]) -> r.Verdict | r.Jump | r.UnknownAction:
    if words[0] in ("accept", "drop", "return"):
        return r.Verdict(words[0])  # type: ignore[arg-type]
    if words[0] in ("jump", "goto"):
        return r.Jump(words[1], goto=words[0] == "goto")
    return r.UnknownAction(_joined(words))


def _reject_word(text: str) -> str:
    """iptables' word for an nft reject."""
    if text == "reject":
        return "icmp-port-unreachable"
    if "tcp reset" in text:
        return "tcp-reset"
    kind = text.split(" ")[-1]
    if text.startswith("reject with icmpv6"):
        return {
            "no-route": "icmp6-no-route", "admin-prohibited": "icmp6-adm-prohibited", "addr-unreachable": "icmp6-addr-unreachable",
            "port-unreachable": "icmp6-port-unreachable",
        }.get(kind, f"icmp6-{kind}")  # fmt: skip
    return {
        "port-unreachable": "icmp-port-unreachable", "host-unreachable": "icmp-host-unreachable", "no-route": "icmp-net-unreachable",
        "net-unreachable": "icmp-net-unreachable", "prot-unreachable": "icmp-proto-unreachable", "admin-prohibited": "icmp-admin-prohibited",
        "net-prohibited": "icmp-net-prohibited", "host-prohibited": "icmp-host-prohibited",
    }.get(kind, f"icmp-{kind}")  # fmt: skip


def _nat_end(words: Sequence[str]) -> tuple[str | None, str | None, Range | None]:
    """``1.2.3.4``, ``1.2.3.4:80``, ``[::1]:80``, ``:80``, or address and port apart."""
    from lab.explain.iptables_save import nat_end

    if len(words) == 2:
        low, _, high = words[1].partition("-")
        first, last, _ = nat_end(words[0])
        return first, last, (int(low), int(high or low))
    return nat_end(words[0])


def _inequality(operator: str, value: str) -> list[str]:
    number_ = int(value, 0)
    low, high = {"<": (0, number_ - 1), "<=": (0, number_), ">": (number_ + 1, FULL), ">=": (number_, FULL)}[operator]
    return [f"{low}-{high}"]


def _range(text: str) -> Range:
    low, dash, high = text.partition("-")
    return (int(low, 0), int(high, 0) if dash else int(low, 0))


def _address_key(side: c.Side, ip: str) -> _Make:
    family: Family = "ipv4" if ip == "ip" else "ipv6"

    def make(values: Sequence[str], negated: bool, text: str) -> Condition:
        return c.Between(text, side, family, tuple(_addresses(v) for v in values), negated)

    return make


def _addresses(text: str) -> Range:
    if "/" in text:
        network = ipaddress.ip_network(text, strict=False)
        return int(network.network_address), int(network.broadcast_address)
    low, _, high = text.partition("-")
    return number(low), number(high or low)


def _port_key(side: c.Side, proto: str) -> _Make:
    protos = frozenset({PROTOCOLS[proto]}) if proto != "th" else frozenset()

    def make(values: Sequence[str], negated: bool, text: str) -> Condition:
        return c.Ports(text, side, tuple(_port_range(v) for v in values), negated, protos)

    return make


def _port_range(text: str) -> Range:
    try:
        return _range(text)
    except ValueError:
        from lab.explain.iptables_save import port_range

        return port_range(text, "-")


def _interface_key(direction: Literal["in", "out"]) -> _Make:
    def make(values: Sequence[str], negated: bool, text: str) -> Condition:
        return c.Interface(text, direction, tuple(v.strip('"') for v in values), negated)

    return make


def _owner_key(kind: Literal["uid", "gid"]) -> _Make:
    def make(values: Sequence[str], negated: bool, text: str) -> Condition:
        try:
            return c.Owner(text, kind, tuple(_range(v) for v in values), negated, strict=True)
        except ValueError:
            if values == ["root"]:
                return c.Owner(text, kind, ((0, 0),), negated, strict=True)
            return c.Unknown(text, "users and groups of that machine are not known by name")

    return make


def _mark_key(of: Literal["packet", "connection"]) -> _Make:
    def make(values: Sequence[str], negated: bool, text: str) -> Condition:
        return c.MarkIn(text, of, tuple(_range(v) for v in values), negated)

    return make


def _transport(values: Sequence[str], negated: bool, text: str) -> Condition:
    numbers = frozenset(PROTOCOLS[v] if v in PROTOCOLS else int(v) for v in values)
    return c.Transport(text, numbers, negated)


def _version(values: Sequence[str], negated: bool, text: str) -> Condition:
    families: Mapping[str, Family] = {"ipv4": "ipv4", "ip": "ipv4", "ipv6": "ipv6", "ip6": "ipv6"}
    return c.IPVersion(text, families[values[0]], negated)


def _state(values: Sequence[str], negated: bool, text: str) -> Condition:
    states = frozenset(v.upper() for v in values)
    if states - {s.upper() for s in _STATES}:
        raise ValueError
    return c.State(text, states, negated)


def _flag_names(words: Sequence[str]) -> frozenset[str]:
    return frozenset(part.upper() for word in words for part in word.split("|"))


def _flags_key(values: Sequence[str], negated: bool, text: str) -> Condition:
    wanted = _flag_names(values)
    return c.TcpFlags(text, frozenset({"FIN", "SYN", "RST", "PSH", "ACK", "URG"}), wanted, negated)


def _icmp_key(number_: int) -> _Make:
    def make(values: Sequence[str], negated: bool, text: str) -> Condition:
        from lab.explain.iptables_save import ICMP_NAMES

        names = {**ICMP_NAMES[number_], "nd-neighbor-solicit": (135, None), "nd-neighbor-advert": (136, None)}
        types = tuple((names[v][0], names[v][0]) if v in names else _range(v) for v in values)
        return c.Icmp(text, number_, types, negate=negated)

    return make


def _fib(side: c.Side) -> _Make:
    def make(values: Sequence[str], negated: bool, text: str) -> Condition:
        return c.AddressType(text, side, frozenset(v.upper() for v in values), negated, strict=True)

    return make


def _quoted(value: str) -> str:
    return value if value.startswith('"') else f'"{value}"'


def _host(value: str) -> str:
    return value.removesuffix("/32").removesuffix("/128") if "/128" in value or "." in value else value


def _hex(value: str) -> str:
    return f"0x{int(value, 0):08x}"


def _direction(values: Sequence[str], negated: bool, text: str) -> Condition:
    return c.Direction(text, values[0] in ("reply", "1"), negated)


_PLAIN: Mapping[tuple[str, ...], _Key] = {
    ("iifname",): _Key("iifname", _interface_key("in"), _quoted),
    ("oifname",): _Key("oifname", _interface_key("out"), _quoted),
    ("iif",): _Key("iif", _interface_key("in"), _quoted),
    ("oif",): _Key("oif", _interface_key("out"), _quoted),
    ("skuid",): _Key("meta skuid", _owner_key("uid")),
    ("skgid",): _Key("meta skgid", _owner_key("gid")),
    ("mark",): _Key("meta mark", _mark_key("packet"), _hex),
    ("l4proto",): _Key("meta l4proto", _transport),
    ("nfproto",): _Key("meta nfproto", _version),
    ("protocol",): _Key("meta protocol", _version),
}
_KEYS: tuple[tuple[tuple[str, ...], _Key], ...] = (
    *((("meta", *words), key) for words, key in _PLAIN.items()),
    *((words, key) for words, key in _PLAIN.items() if words[0] not in ("l4proto", "nfproto", "protocol")),
    *(
        ((ip, f"{side[0]}addr"), _Key(f"{ip} {side[0]}addr", _address_key(side, ip), _host))
        for ip in ("ip", "ip6")
        for side in ("src", "dst")
    ),
    (("ip", "protocol"), _Key("ip protocol", _transport)),
    (("ip6", "nexthdr"), _Key("ip6 nexthdr", _transport)),
    *(
        ((proto, f"{side[0]}port"), _Key(f"{proto} {side[0]}port", _port_key(side, proto)))
        for proto in ("tcp", "udp", "sctp", "th")
        for side in ("src", "dst")
    ),
    (("tcp", "flags"), _Key("tcp flags", _flags_key)),
    (("icmp", "type"), _Key("icmp type", _icmp_key(1))),
    (("icmpv6", "type"), _Key("icmpv6 type", _icmp_key(58))),
    (("ct", "state"), _Key("ct state", _state)),
    (("ct", "mark"), _Key("ct mark", _mark_key("connection"), _hex)),
    (("ct", "zone"), _Key("ct zone", lambda v, n, t: c.Zone(t, tuple(_range(x) for x in v), n))),
    (("ct", "direction"), _Key("ct direction", _direction)),
    (("ct", "status"), _Key("ct status", lambda v, n, t: c.Status(t, frozenset(v), n))),
    (("fib", "daddr", "type"), _Key("fib daddr type", _fib("dst"))),
    (("fib", "saddr", "type"), _Key("fib saddr type", _fib("src"))),
)  # fmt: skip

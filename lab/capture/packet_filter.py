"""Which packets to keep, as pcap-filter(7) writes it, as far as a flow tells. Pure.

::

    expression  = term {("or" | "||") term}
    term        = factor {["and" | "&&"] factor}
    factor      = ("not" | "!") factor | "(" expression ")" | primitive
    primitive   = "tcp" | "udp" | "icmp" | "icmp6" | "ip" | "ip6" | "arp"
                | ["src" | "dst"] "host" ADDRESS | ["src" | "dst"] "net" NETWORK
                | ["src" | "dst"] "port" NUMBER | ["src" | "dst"] "portrange" NUMBER-NUMBER
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from typing import TypeVar

from lab.errors import InputError
from lab.trace.flows import Flow

T = TypeVar("T")

Keep = Callable[[int, Flow | None], bool]
"""Takes an Ethernet type and the packet's flow, if it has one."""

_WORD = re.compile(r"\s*(\(|\)|!|&&|\|\||[^\s()!]+)")
_PROTOCOLS = {"tcp": "tcp", "udp": "udp", "icmp": "icmp", "icmp6": "icmpv6"}
_TYPES = {"ip": 0x0800, "ip6": 0x86DD, "arp": 0x0806}


def parse(text: str) -> Keep:
    """The filter that a text describes; an empty one keeps everything.

    Raises:
        InputError: it is no such expression.
    """
    if not text.strip():
        return lambda _kind, _flow: True
    parser = _Parser(text)
    found = parser.expression()
    if parser.word is not None:
        raise parser.error(f'"{parser.word}" is too much')
    return found


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._words = _WORD.findall(text)
        self._at = 0

    @property
    def word(self) -> str | None:
        return self._words[self._at] if self._at < len(self._words) else None

    def error(self, why: str) -> InputError:
        return InputError(
            f"--filter {self._text}",
            why=why,
            next_step='Write e.g. "tcp and port 8080 and not host 10.96.0.10" (pcap-filter: protocols, host, net, port, portrange)',
        )

    def _next(self) -> str:
        word = self.word
        if word is None:
            raise self.error("it ends too early")
        self._at += 1
        return word

    def _accept(self, *words: str) -> bool:
        if self.word in words:
            self._at += 1
            return True
        return False

    def expression(self) -> Keep:
        left = self._term()
        while self._accept("or", "||"):
            left = _either(left, self._term())
        return left

    def _term(self) -> Keep:
        left = self._factor()
        while self._accept("and", "&&") or self.word not in (None, "or", "||", ")"):
            left = _both(left, self._factor())
        return left

    def _factor(self) -> Keep:
        if self._accept("not", "!"):
            inner = self._factor()
            return lambda kind, flow: not inner(kind, flow)
        if self._accept("("):
            inner = self.expression()
            if not self._accept(")"):
                raise self.error("a parenthesis is not closed")
            return inner
        return self._primitive()

    def _primitive(self) -> Keep:
        word = self._next()
        if word in _PROTOCOLS:
            proto = _PROTOCOLS[word]
            return lambda _kind, flow: flow is not None and flow.proto == proto
        if word in _TYPES:
            wanted = _TYPES[word]
            return lambda kind, _flow: kind == wanted
        side = word if word in ("src", "dst") else ""
        what = self._next() if side else word
        if what == "host":
            address = self._value(ipaddress.ip_address, "address")
            return _ends(side, lambda a, _port: ipaddress.ip_address(a) == address)
        if what == "net":
            network = self._value(ipaddress.ip_network, "network")
            return _ends(side, lambda a, _port: ipaddress.ip_address(a) in network)
        if what == "port":
            low = high = self._port(self._next())
        elif what == "portrange":
            first, _, last = self._next().partition("-")
            low, high = self._port(first), self._port(last)
        else:
            raise self.error(f'"{what}" is not understood')
        ports = _ends(side, lambda _a, port: low <= port <= high)
        return lambda kind, flow: flow is not None and flow.proto in ("tcp", "udp") and ports(kind, flow)

    def _value(self, make: Callable[[str], T], what: str) -> T:
        word = self._next()
        try:
            return make(word)
        except ValueError:
            raise self.error(f'"{word}" is no {what}') from None

    def _port(self, word: str) -> int:
        if not word.isdigit() or int(word) > 65535:
            raise self.error(f'"{word}" is no port')
        return int(word)


def _either(one: Keep, other: Keep) -> Keep:
    return lambda kind, flow: one(kind, flow) or other(kind, flow)


def _both(one: Keep, other: Keep) -> Keep:
    return lambda kind, flow: one(kind, flow) and other(kind, flow)


def _ends(side: str, test: Callable[[str, int], bool]) -> Keep:
    def keep(_kind: int, flow: Flow | None) -> bool:
        if flow is None:
            return False
        ends = {"src": ((flow.src, flow.sport),), "dst": ((flow.dst, flow.dport),)}
        return any(test(*end) for end in ends.get(side, (*ends["src"], *ends["dst"])))

    return keep

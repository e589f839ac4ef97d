"""Environment variables as Istio reads them: absent or invalid means the default, never zero.

Source: istio/istio: pkg/env/var.go.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from agent.duration import parse_duration

log = logging.getLogger("default")
T = TypeVar("T")

_TRUE = frozenset(("1", "t", "T", "TRUE", "true", "True"))
_FALSE = frozenset(("0", "f", "F", "FALSE", "false", "False"))
_INTEGER = re.compile(r"[+-]?[0-9]+")


def parse_bool(text: str) -> bool:
    """Go's strconv.ParseBool.

    Raises:
        ValueError: any other spelling, the empty string too.
    """
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError(f'invalid boolean "{text}"')


_SURROGATE = re.compile("[\ud800-\udfff]")


def well_formed(value: Any) -> Any:
    """`value` (as JSON has them) with U+FFFD for what is no UTF-8 in its texts, as Go writes JSON."""
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {well_formed(key): well_formed(member) for key, member in value.items()}
    return [well_formed(member) for member in value] if isinstance(value, list) else value


def parse_int(text: str) -> int:
    """Go's strconv.Atoi: digits with an optional sign, 64 bits.

    Raises:
        ValueError: anything else.
    """
    if _INTEGER.fullmatch(text) is None or not text.isascii() or not -(1 << 63) <= int(text) < 1 << 63:
        raise ValueError(f'invalid integer "{text}"')
    return int(text)


@dataclass(frozen=True)
class Environment:
    """Typed reading of one environment."""

    values: Mapping[str, str]

    def string(self, name: str, default: str = "") -> str:
        return self.values.get(name, default)

    def lookup(self, name: str) -> str | None:
        return self.values.get(name)

    def boolean(self, name: str, default: bool) -> bool:
        return self._parsed(name, default, parse_bool)

    def integer(self, name: str, default: int) -> int:
        return self._parsed(name, default, parse_int)

    def number(self, name: str, default: float) -> float:
        return self._parsed(name, default, float)

    def seconds(self, name: str, default: float) -> float:
        """A duration variable, in seconds."""
        return self._parsed(name, default, lambda text: parse_duration(text) / 1e9)

    def with_prefix(self, prefix: str) -> dict[str, str]:
        """Variables that start with `prefix`, without it."""
        return {key[len(prefix) :]: value for key, value in self.values.items() if key.startswith(prefix)}

    def _parsed(self, name: str, default: T, parse: Callable[[str], T]) -> T:
        text = self.values.get(name)
        if text is None:
            return default
        try:
            return parse(text)
        except ValueError:
            log.warning("Invalid environment variable value `%s` for %s, defaulting to %s", text, name, default)
            return default

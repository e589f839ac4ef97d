"""Go duration strings (``1h30m``, ``45s``, ``250ms``), the form of every duration in Istio's configuration."""

from __future__ import annotations

import re
from fractions import Fraction

_UNITS = {
    "ns": 1,
    "us": 1_000,
    "µs": 1_000,  # U+00B5
    "μs": 1_000,  # U+03BC
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "m": 60_000_000_000,
    "h": 3_600_000_000_000,
}
_PART = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)")
_LIMIT = 1 << 63


def parse_duration(text: str) -> int:
    """Nanoseconds of a Go duration string.

    Raises:
        ValueError: not a Go duration, or beyond its 64 bits (Go: time.ParseDuration).
    """
    sign, rest = 1, text
    if rest[:1] in ("+", "-"):
        sign, rest = (-1 if rest[0] == "-" else 1), rest[1:]
    if rest == "0":
        return 0
    total, position = Fraction(0), 0
    while position < len(rest):
        part = _PART.match(rest, position)
        if part is None:
            raise ValueError(f'invalid duration "{text}"')
        number = part[1] + "0" if part[1].endswith(".") else part[1]
        total += Fraction(number if number[0] != "." else "0" + number) * _UNITS[part[2]]
        position = part.end()
    if not rest or total >= _LIMIT:
        raise ValueError(f'invalid duration "{text}"')
    return sign * int(total)


def format_duration(nanoseconds: int) -> str:
    """The string that Go's Duration.String() gives: ``1m0s``, ``1h30m0s``, ``250ms``, ``0s``."""
    if nanoseconds == 0:
        return "0s"
    sign, value = ("-" if nanoseconds < 0 else ""), abs(nanoseconds)
    for unit in ("ns", "µs", "ms"):
        if value < _UNITS[unit] * 1000:
            return f"{sign}{_decimal(value, _UNITS[unit])}{unit}"
    minutes, rest = divmod(value, _UNITS["m"])
    hours, minutes = divmod(minutes, 60)
    text = f"{_decimal(rest, _UNITS['s'])}s"
    if hours or minutes:
        text = f"{minutes}m{text}"
    return f"{sign}{hours}h{text}" if hours else sign + text


def _decimal(value: int, unit: int) -> str:
    whole, rest = divmod(value, unit)
    if not rest:
        return str(whole)
    return f"{whole}.{str(rest).rjust(len(str(unit)) - 1, '0').rstrip('0')}"

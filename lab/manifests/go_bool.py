"""Booleans in annotations, as Go's strconv.ParseBool reads them (the agent has its own: this room imports none of it)."""

from __future__ import annotations

_WORDS = {
    **dict.fromkeys(("1", "t", "T", "true", "True", "TRUE"), True),
    **dict.fromkeys(("0", "f", "F", "false", "False", "FALSE"), False),
}


def parse_bool(text: str) -> bool | None:
    """What a text says; None for any other spelling, the empty string too."""
    return _WORDS.get(text)

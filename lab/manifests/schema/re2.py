"""Regular expressions as Envoy's engine has them: RE2's, checked with Python's.

Source: https://github.com/google/re2/wiki/Syntax.
"""

from __future__ import annotations

import re

_TOKEN = re.compile(
    r"""(?P<unknown> \\[1-9Z]                    # a backreference; the end of the text
          | \(\?(?:<?[=!]|[>(#]|P=)             # looking around, atomic, conditional, a comment, a backreference
          | (?:[*+?]|\{\d+(?:,\d*)?\})\+ )       # a repetition that gives nothing back
      | (?P<counted> \{\d+(?:,\d*)?\} )
      | \\. | \[\^?\]?(?:\\.|[^\]\\])*\] | .     # an escape, a class, a character
    """,
    re.VERBOSE | re.DOTALL,
)
_REPETITIONS = 1000


def regex(value: str) -> str:
    """The same text. Raises ValueError if it is empty, or no regular expression of RE2's."""
    if not value:
        raise ValueError("it must not be empty")
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"it is no regular expression: {error}") from None
    for token in _TOKEN.finditer(value):
        counts = [int(count) for count in re.findall(r"\d+", token["counted"] or "")]
        if token["unknown"] or max(counts, default=0) > _REPETITIONS:
            raise ValueError(f'it is no regular expression of RE2, Envoy\'s engine, which has no "{token.group()}"')
    return value

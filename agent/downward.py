"""The downward-API file format: one ``key="quoted value"`` a line, quoted as Go quotes strings.

Source: istio/istio: pkg/bootstrap/config.go (ParseDownwardAPI); Go: strconv.Unquote.
"""

from __future__ import annotations

import re

from agent.files import read_text

_SIMPLE = {"a": 7, "b": 8, "f": 12, "n": 10, "r": 13, "t": 9, "v": 11, "\\": 92}
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{3})|(.))", re.DOTALL)


def unquote(text: str) -> str:
    """Interprets a Go string literal (``"..."`` or a raw one in back quotes), or a quoted single character.

    Raises:
        ValueError: not a valid literal.
    """
    if len(text) < 2 or text[0] != text[-1] or text[0] not in "\"`'":
        raise ValueError("invalid syntax")
    quote, body = text[0], text[1:-1]
    if quote == "`":
        if "`" in body:
            raise ValueError("invalid syntax")
        return body.replace("\r", "")
    if "\n" in body:
        raise ValueError("invalid syntax")
    out = bytearray()
    position = 0
    while position < len(body):
        character = body[position]
        if character == quote:
            raise ValueError("invalid syntax")
        if character != "\\":
            out += character.encode("utf-8", "surrogateescape")
            position += 1
            continue
        escape = _ESCAPE.match(body, position)
        if escape is None:
            raise ValueError("invalid syntax")
        out += _escaped(escape, quote)
        position = escape.end()
    value = out.decode("utf-8", "surrogateescape")
    if quote == "'" and len(value) != 1:
        raise ValueError("invalid syntax")
    return value


def _escaped(escape: re.Match[str], quote: str) -> bytes:
    hexadecimal, short, long, octal, other = escape.groups()
    if hexadecimal:
        return bytes((int(hexadecimal, 16),))
    if octal:
        if int(octal, 8) > 255:
            raise ValueError("invalid syntax")
        return bytes((int(octal, 8),))
    if short or long:
        point = int(short or long, 16)
        if point > 0x10FFFF or 0xD800 <= point < 0xE000:
            raise ValueError("invalid syntax")
        return chr(point).encode()
    if other == quote:
        return quote.encode()
    if other in _SIMPLE:
        return bytes((_SIMPLE[other],))
    raise ValueError("invalid syntax")


def parse_downward_api(text: str) -> dict[str, str]:
    """Keys and values of a downward-API file; lines without ``=`` are skipped.

    Raises:
        ValueError: a value is not a Go string literal; the whole file is then unusable.
    """
    values: dict[str, str] = {}
    for line in text.split("\n"):
        key, separator, quoted = line.partition("=")
        if not separator:
            continue
        try:
            values[key] = unquote(quoted)
        except ValueError as error:
            raise ValueError(f"failed to unquote {quoted}: {error}") from None
    return values


def read_downward_api(path: str) -> dict[str, str]:
    """Reads a downward-API file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is malformed.
    """
    return parse_downward_api(read_text(path, errors="surrogateescape"))

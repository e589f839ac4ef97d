"""Which list items may become a word of a rule.

The reference hands list items to its tools as they are, inside a text that is split at blanks, so that
``80 -j ACCEPT`` would become three arguments. Here an item is one word or an error. Leading and trailing blanks are
kept out of the word but are no error: the reference's tools skip them too.
"""

from __future__ import annotations

import re
from ipaddress import AddressValueError, IPv4Address, IPv6Address

from .errors import InitError

# No quote, backslash, blank, control character, nor what nft reads as syntax; the first character is no option dash,
# negation, comment or set sign.
_WORD = re.compile(r"[A-Za-z0-9_.:/*+%=~\u0080-\U0010ffff][A-Za-z0-9_.:/*+%=~@-\U0010ffff-]*")
_FORBIDDEN = re.compile(r"[\s\"'\\`;{}()\[\]<>|&$#,!^\x00-\x1f\x7f-\x9f]")


def split(text: str) -> list[str]:
    """Splits at commas and drops empty items; blanks are kept (istio/istio: tools/common/config/types.go)."""
    return [item for item in text.split(",") if item]


def word(text: str, source: str) -> str:
    """``text`` as one word of a rule.

    Raises:
        InitError: it is empty or could be read as more than one argument.
    """
    stripped = text.strip(" ")
    if not stripped:
        raise InitError(f"{source} is empty", "a rule needs a value there")
    if not _WORD.fullmatch(stripped) or _FORBIDDEN.search(stripped):
        raise InitError(f"{source} holds {text!r}", "it would not be read as one argument of a rule")
    return stripped


def words(text: str, source: str) -> tuple[str, ...]:
    """The items of a comma list, each one word. Raises InitError."""
    return tuple(word(item, source) for item in split(text))


def interface(text: str, source: str) -> str:
    """An interface name: one word that a kernel could have (at most 15 bytes). Raises InitError."""
    name = word(text, source)
    if len(name.encode()) > 15:
        raise InitError(f"{source} holds {name!r}", "an interface name has at most 15 bytes")
    return name


def prefix(text: str) -> tuple[str, bool, bool]:
    """Reads ``address/length`` as Go's netip.ParsePrefix does.

    Returns:
        The text with a canonical address and its host bits kept, whether it is IPv4, whether it is a loopback address.

    Raises:
        InitError: not a prefix; a bare address and ``*`` are none either.
    """
    address, slash, length = text.rpartition("/")
    if not slash:
        raise InitError(f"invalid CIDR {text!r}", "it has no prefix length", "Write address/length, or * alone for all")
    if not re.fullmatch(r"0|[1-9][0-9]{0,2}", length) or "%" in address:
        raise InitError(
            f"invalid CIDR {text!r}", f"bad prefix length {length!r}" if "%" not in address else "it has a zone"
        )
    parsed = _address(address)
    if parsed is None:
        raise InitError(f"invalid CIDR {text!r}", f"{address!r} is not an IP address")
    if int(length) > parsed.max_prefixlen:
        raise InitError(f"invalid CIDR {text!r}", f"prefix length {length} is out of range")
    inner = parsed.ipv4_mapped if isinstance(parsed, IPv6Address) else parsed
    return f"{show(parsed)}/{length}", isinstance(parsed, IPv4Address), (inner or parsed).is_loopback


def show(address: IPv4Address | IPv6Address) -> str:
    """An address as Go prints it (IPv4-mapped ones with a dotted tail, whatever the Python version)."""
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return f"::ffff:{mapped}" if mapped else str(address)


def server(text: str) -> IPv4Address | IPv6Address | None:
    """A DNS server that is an IP literal, else None. A zone (``fe80::1%eth0``) is none that a rule can match."""
    return None if "%" in text else _address(text)


def _address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        return IPv6Address(text) if ":" in text else IPv4Address(text)
    except (AddressValueError, ValueError):
        return None

"""Which list items may become a word of a rule.

The reference hands list items to its tools as they are, inside a text that is split at blanks, so that
``80 -j ACCEPT`` would become three arguments. Here an item is one word or an error. Leading and trailing blanks are
kept out of the word but are no error: the reference's tools skip them too.
"""

from __future__ import annotations

from ipaddress import AddressValueError, IPv4Address, IPv6Address

from .errors import InitError

_FORBIDDEN = frozenset("\"'\\`;{}()[]<>|&$#,!^")
"""What iptables-restore or nft would read as syntax."""
_FIRST = frozenset("-@")
"""What would make a word an option or a set."""


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
    odd = any(char in _FORBIDDEN or char.isspace() or not char.isprintable() for char in stripped)
    if odd or stripped[0] in _FIRST:
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
    if "%" in address:
        raise InitError(f"invalid CIDR {text!r}", "a zone has no place in a prefix")
    if not (length.isascii() and length.isdigit()) or len(length) > 3 or (length[0] == "0" and length != "0"):
        raise InitError(f"invalid CIDR {text!r}", f"bad prefix length {length!r}")
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

"""One form for rules that mean the same, whether we wrote them or iptables-save printed them.

iptables-save adds what is implied (``-m tcp``, masks), prints numbers for names and masks off host bits. Two rules
are the same if their canonical forms are equal; comments and counters do not count. The order of matches inside a
rule is the tool's business and does not count either.

Source: iptables 1.8.9: extensions/libxt_*.c (the save functions), iptables/xshared.c.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from functools import lru_cache
from ipaddress import ip_interface

Canonical = tuple[tuple[object, ...], ...]

_SHORT = {
    "-p": "--protocol", "-s": "--source", "-d": "--destination", "-i": "--in-interface", "-o": "--out-interface",
    "-j": "--jump", "-g": "--goto", "-m": "--match", "--src": "--source", "--dst": "--destination",
    "--dport": "--destination-port", "--sport": "--source-port", "--dports": "--destination-ports",
    "--sports": "--source-ports", "--to-port": "--to-ports", "--state": "--ctstate",
}  # fmt: skip
# Matches that say all they mean with their options; another one without options still means something.
_PLAIN_MATCHES = frozenset({"tcp", "udp", "multiport", "owner", "conntrack", "state", "mark", "connmark", "comment"})
_ANY = frozenset({"0.0.0.0/0", "::/0"})


def split(text: str) -> list[str]:
    """The words of a rule; quotes as iptables-save writes them."""
    if '"' not in text:
        return text.split()
    import shlex

    return shlex.split(text)


@lru_cache(maxsize=4096)
def canonical(text: str) -> Canonical:
    """The canonical form of a rule without its chain."""
    items: list[tuple[object, ...]] = []
    module, negate = "", False
    for option, values in _options(split(text)):
        if option == "!":
            negate = True
            continue
        option = _SHORT.get(option, option)
        if option == "--match":
            module = values[0] if values else ""
            if module not in _PLAIN_MATCHES:
                items.append(("match", negate, module))
        elif option not in ("--comment", "--set-counters", "-c"):
            item = _item(option, values, negate, module)
            if item is not None:
                items.append(item)
            if option in ("--jump", "--goto"):
                module = values[0] if values else ""
        negate = False
    return tuple(sorted(items, key=repr))


def jump(text: str) -> str:
    """The target or chain that the rule jumps or goes to; empty if it has none."""
    for item in canonical(text):
        if item[0] in ("--jump", "--goto"):
            return str(item[2])
    return ""


def goes(text: str) -> bool:
    """The rule goes (``-g``) instead of jumping: a RETURN in the chain does not come back to it."""
    return any(item[0] == "--goto" for item in canonical(text))


def _options(words: list[str]) -> Iterator[tuple[str, list[str]]]:
    position = 0
    while position < len(words):
        option = words[position]
        position += 1
        values = []
        if option != "!":
            # A "!" between values (old style negation) starts the next option.
            while position < len(words) and not words[position].startswith("-") and words[position] != "!":
                values.append(words[position])
                position += 1
        yield option, values


def _item(option: str, values: list[str], negate: bool, module: str) -> tuple[object, ...] | None:
    value = values[0] if values else ""
    if option == "--protocol":
        name = _protocol(value)
        return None if name == "all" and not negate else (option, negate, name)
    if option in ("--source", "--destination"):
        network = network_of(value)
        return None if network in _ANY and not negate else (option, negate, network)
    if option in ("--in-interface", "--out-interface") and value == "+":
        return None
    if option in ("--destination-port", "--source-port"):
        return (option, negate, port_of(value))
    if option in ("--destination-ports", "--source-ports"):
        return (option, negate, ",".join(port_of(port) for port in value.split(",")))
    if option in ("--uid-owner", "--gid-owner"):
        return (option, negate, owner_of(option, value))
    if option == "--ctstate":
        return (option, negate, ",".join(sorted(value.upper().split(","))))
    if option == "--mark":
        return (f"{module}{option}", negate, masked(value))
    reader = _TARGET_OPTIONS.get((module, option))
    if reader is not None:
        return reader(value)
    return (option, negate, *values)


def _set_mark(value: str) -> tuple[object, ...]:
    number, _, mask = value.partition("/")
    value_bits, mask_bits = _number(number), _number(mask) if mask else 0xFFFFFFFF
    return ("--set-xmark", False, f"{value_bits:#x}/{value_bits | mask_bits:#x}")


def _on_ip(value: str) -> tuple[object, ...] | None:
    return None if value in ("0.0.0.0", "::") else ("--on-ip", False, value)


def _full_mask(option: str) -> Callable[[str], tuple[object, ...] | None]:
    return lambda value: None if _number(value) == 0xFFFFFFFF else (option, False, value)


_TARGET_OPTIONS: dict[tuple[str, str], Callable[[str], tuple[object, ...] | None]] = {
    ("REDIRECT", "--to-ports"): lambda value: ("--to-ports", False, port_of(value.replace("-", ":")).replace(":", "-")),
    ("MARK", "--set-mark"): _set_mark,
    ("MARK", "--set-xmark"): lambda value: ("--set-xmark", False, masked(value)),
    ("CONNMARK", "--nfmask"): _full_mask("--nfmask"),
    ("CONNMARK", "--ctmask"): _full_mask("--ctmask"),
    ("TPROXY", "--on-ip"): _on_ip,
    ("TPROXY", "--on-port"): lambda value: ("--on-port", False, str(_number(value))),
    ("TPROXY", "--tproxy-mark"): lambda value: ("--tproxy-mark", False, masked(value)),
    ("CT", "--zone"): lambda value: ("--zone", False, str(_number(value))),
}


def _number(text: str) -> int:
    """C's strtoul with base 0; text that is no number keeps its own value (it then equals nothing the kernel has)."""
    try:
        return int("0o" + text, 0) if re.fullmatch(r"0[0-7]+", text) else int(text, 0)
    except ValueError:
        return -1


def masked(text: str) -> str:
    """A mark as ``0xVALUE/0xMASK``."""
    value, _, mask = text.partition("/")
    return f"{_number(value):#x}/{_number(mask) if mask else 0xFFFFFFFF:#x}"


def _protocol(text: str) -> str:
    names = {"0": "all", "1": "icmp", "6": "tcp", "17": "udp", "58": "ipv6-icmp", "icmpv6": "ipv6-icmp"}
    return names.get(text.lower(), text.lower())


def network_of(text: str) -> str:
    """A prefix with its host bits masked off."""
    try:
        return str(ip_interface(text).network)
    except ValueError:
        return text


def port_of(text: str) -> str:
    """A port or range with numbers for names."""
    low, colon, high = text.partition(":")
    if not colon:
        return _service(low)
    low, high = _service(low or "0"), _service(high or "65535")
    return low if low == high else f"{low}:{high}"


def _service(text: str) -> str:
    number = _number(text)
    if number >= 0:
        return str(number)
    for proto in ("tcp", "udp"):
        try:
            return str(socket.getservbyname(text, proto))
        except OSError:
            continue
    return text


def owner_of(option: str, text: str) -> str:
    """User or group as the number or range that iptables stores."""
    if re.fullmatch(r"[0-9]+(-[0-9]+)?", text):
        low, dash, high = text.partition("-")
        return str(int(low)) if not dash or int(low) == int(high) else f"{int(low)}-{int(high)}"
    import grp
    import pwd

    try:
        return str(pwd.getpwnam(text).pw_uid if option == "--uid-owner" else grp.getgrnam(text).gr_gid)
    except KeyError:
        return text

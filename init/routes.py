"""TPROXY's policy routing, and ``::6`` on lo: what rules alone cannot do.

TPROXY: packets with the mark go by a table whose only route makes every address local, so that they reach Envoy's
transparent socket. ``::6`` is the IPv6 twin of 127.0.0.6, which IPv4's 127/8 allows for nothing.

The import of pyroute2 takes 0.2 s, so it happens only where there is something to change. Unlike the reference, a
second run finds its rule and is content.

Source: istio/istio: tools/common/tproxy/run_linux.go.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from . import environment
from .config import Config
from .errors import InitError
from .log import Log

HELPER = "::6"
RTN_LOCAL, RT_SCOPE_HOST, RT_SCOPE_UNIVERSE = 2, 254, 0
IF_INET6 = "/proc/net/if_inet6"
_NAMES: dict[int, str] = {socket.AF_INET: "ipv4", socket.AF_INET6: "ipv6"}


def numbers(config: Config) -> tuple[int, int] | None:
    """Mark and table of the policy rule, or None if the configuration needs none.

    Raises:
        InitError: one is no plain decimal number of 32 bits (``0x539`` is a mark for iptables, but none here), or 0: a
            rule for mark 0 would take every packet, table 0 is none.
    """
    if not (config.tproxy and config.inbound_ports_include):
        return None
    return (
        _decimal(config.inbound_tproxy_mark, "--istio-inbound-tproxy-mark"),
        _decimal(config.inbound_tproxy_route_table, "--istio-inbound-tproxy-route-table"),
    )


def configure(config: Config, log: Log) -> list[str]:
    """Adds what is missing of ``::6``, the policy rule and the route; gives what it added, one phrase each.

    Raises:
        InitError: the kernel refuses.
    """
    policy = numbers(config)
    helper = config.ipv6 and not has_helper()
    if not helper and policy is None:
        return []
    with _netlink() as route:
        lo = _lo(route)
        done = _Done(log)
        if helper:
            address = {"index": lo, "address": HELPER, "prefixlen": 128}
            done.attempt("add ::6 to lo", route.addr, address, errno.EEXIST)
        if policy is not None:
            mark, table = policy
            for family in _families(config):
                if not list(_rules(route, family, mark, table)):
                    what = f"add the {_NAMES[family]} rule for mark {mark}"
                    done.attempt(what, route.rule, _policy(family, mark, table))
                what = f"add the {_NAMES[family]} route of table {table}"
                done.attempt(what, route.route, _route(family, table, lo), errno.EEXIST)
    return done.said


def remove(config: Config, log: Log) -> list[str]:
    """Takes away what ``configure`` adds, as far as it is there, in both families; gives what it removed.

    Raises:
        InitError: the kernel refuses.
    """
    helper = has_helper()
    try:
        mark = _decimal(config.inbound_tproxy_mark, "")
        table = _decimal(config.inbound_tproxy_route_table, "")
    except InitError:
        # Nothing can have been made with these.
        mark, table = 0, 0
    with _netlink() as route:
        lo = _lo(route)
        done = _Done(log)
        if helper:
            address = {"index": lo, "address": HELPER, "prefixlen": 128}
            done.attempt("remove ::6 from lo", route.addr, address, errno.EADDRNOTAVAIL)
        families = (socket.AF_INET, socket.AF_INET6) if environment.has_ipv6() else (socket.AF_INET,)
        for family in families if mark and table else ():
            for rule in list(_rules(route, family, mark, table)):
                request = {**_policy(family, mark, table), "priority": rule.get("priority")}
                what = f"remove the {_NAMES[family]} rule for mark {mark}"
                done.attempt(what, route.rule, request, errno.ENOENT)
            what = f"remove the {_NAMES[family]} route of table {table}"
            done.attempt(what, route.route, _route(family, table, lo), errno.ESRCH, errno.ENOENT)
    return done.said


def has_helper() -> bool:
    """``::6`` is on lo."""
    try:
        lines = Path(IF_INET6).read_text().splitlines()
    except OSError:
        return False
    address = socket.inet_pton(socket.AF_INET6, HELPER).hex()
    return any(line.split()[0] == address and line.split()[-1] == "lo" for line in lines)


def _netlink() -> Any:
    from pyroute2 import IPRoute

    return IPRoute()


def _lo(route: Any) -> int:
    found = route.link_lookup(ifname="lo")
    if not found:
        raise InitError("failed to configure routes", "there is no interface lo")
    return int(found[0])


def _families(config: Config) -> tuple[int, ...]:
    return (socket.AF_INET, socket.AF_INET6) if config.ipv6 else (socket.AF_INET,)


def _route(family: int, table: int, lo: int) -> dict[str, object]:
    everything = "0.0.0.0/0" if family == socket.AF_INET else "::/0"
    scope = RT_SCOPE_HOST if family == socket.AF_INET else RT_SCOPE_UNIVERSE
    return {"family": family, "dst": everything, "oif": lo, "table": table, "type": RTN_LOCAL, "scope": scope}


def _policy(family: int, mark: int, table: int) -> dict[str, object]:
    # The priority that the kernel would choose: right before the main table.
    return {"family": family, "fwmark": mark, "table": table, "priority": 32765}


def _rules(route: Any, family: int, mark: int, table: int) -> Any:
    for rule in route.get_rules(family=family):
        if rule.get("fwmark") == mark and rule.get("table") == table:
            yield rule


class _Done:
    """What was changed, each said in the log and kept in ``said``."""

    def __init__(self, log: Log) -> None:
        self.log, self.said = log, list[str]()

    def attempt(self, what: str, call: Callable[..., object], request: Mapping[str, object], *tolerated: int) -> None:
        """Calls a pyroute2 method as ``call(verb, **request)``, the verb being the first word of ``what``."""
        from pyroute2 import NetlinkError

        verb, rest = what.split(" ", 1)
        try:
            call({"remove": "del"}.get(verb, verb), **request)
        except NetlinkError as error:
            if error.code not in tolerated:
                raise InitError(
                    "failed to configure routes", f"cannot {what}: {error.args[-1]}", _step(error.code)
                ) from None
        except OSError as error:
            raise InitError("failed to configure routes", f"cannot {what}: {error}") from None
        else:
            self.said.append(f"{verb.removesuffix('e')}ed {rest}")
            self.log.info(self.said[-1])


def _step(code: int) -> str:
    if code in (errno.EPERM, errno.EACCES):
        return "Run as root with NET_ADMIN; for IPv6, see net.ipv6.conf.lo.disable_ipv6"
    return "Set lo up" if code == errno.ENETDOWN else ""


def _decimal(text: str, source: str) -> int:
    stripped = text.strip()
    if not (stripped.isascii() and stripped.lstrip("+").isdigit()):
        raise InitError("failed to configure routes", f"{source} {text!r} is no decimal number")
    # Python refuses to read some thousands of digits.
    number = int(stripped) if len(stripped) < 100 else 0
    if not 0 < number < 1 << 32:
        raise InitError("failed to configure routes", f"{source} {text[:100]!r} is not from 1 to 4294967295")
    return number

"""resolv.conf as the DNS server reads it: servers and search domains, nothing else.

Source: miekg/dns: clientconfig.go (ClientConfigFromReader), which istio/istio: pkg/dns/client/dns.go uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ResolvConf:
    """`servers` are addresses, `search` domains without a trailing dot unless written so."""

    servers: Sequence[str] = ()
    search: Sequence[str] = ()


def parse_resolv_conf(text: str) -> ResolvConf:
    """Reads the text of a resolv.conf; ``options`` and anything unknown is ignored, the last ``search`` wins."""
    servers: list[str] = []
    search: list[str] = []
    for line in text.splitlines():
        if line.startswith(("#", ";")):
            continue
        words = line.split()
        if len(words) < 2:
            if words and words[0] == "search":
                search = []
            continue
        if words[0] == "nameserver":
            servers.append(words[1])
        elif words[0] == "domain":
            search = [words[1]]
        elif words[0] == "search":
            search = words[1:]
    return ResolvConf(tuple(servers), tuple(search))

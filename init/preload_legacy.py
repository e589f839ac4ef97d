"""``init.preload`` for the legacy back end: python-iptables, and the rules of the usual sidecar made once.

The libiptc entries of the rules that an injected sidecar gets by default (IPv4) are made here, which loads iptables'
extensions and asks the kernel which of their revisions it knows. No table is opened, no rule is applied, no thread is
started. Without root or without the library it does less, silently: then each child does it for itself.
"""

from __future__ import annotations

import contextlib

from . import preload, rules
from .config import Config

__all__ = ["preload"]

USUAL = Config(
    inbound_interception_mode="REDIRECT",
    inbound_ports_include="*",
    inbound_ports_exclude="15090,15021,15020",
    outbound_ip_ranges_include="*",
    redirect_dns=True,
    dns_servers_v4=("10.96.0.10",),
)
"""What the injector asks for, with DNS capture."""


def _warm() -> None:
    try:
        from . import libiptc
    except (ImportError, OSError):
        return
    with contextlib.suppress(libiptc.iptc.XTablesError, libiptc.iptc.IPTCError, OSError):
        for config in (USUAL, USUAL._replace(redirect_dns=False)):
            for rule in rules.build(config).ipv4:
                libiptc.entry("ipv4", rule)


_warm()

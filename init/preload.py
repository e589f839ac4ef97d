"""For a process that will fork one child for each pod: importing this loads what init needs, so that a child has it.

Beyond imports it makes the libiptc entries of the rules that an injected sidecar gets by default (IPv4), which loads
iptables' extensions and asks the kernel which of their revisions it knows, and it loads libnftables. No table is
opened, no rule is made, no thread is started. Without root or without the libraries it does less, silently: then
each child does it for itself.
"""

from __future__ import annotations

import contextlib

from . import cli, libnftables, native_state, nftables, program, routes, rules, xtables
from .config import Config

__all__ = ["cli", "native_state", "nftables", "program", "routes", "xtables"]


def _warm() -> None:
    try:
        from . import libiptc
    except (ImportError, OSError):
        return
    usual = Config(
        inbound_interception_mode="REDIRECT",
        inbound_ports_include="*",
        inbound_ports_exclude="15090,15021,15020",
        outbound_ip_ranges_include="*",
        redirect_dns=True,
        dns_servers_v4=("10.96.0.10",),
    )
    with contextlib.suppress(libiptc.iptc.XTablesError, libiptc.iptc.IPTCError, OSError):
        for config in (usual, usual._replace(redirect_dns=False)):
            for rule in rules.build(config).ipv4:
                libiptc.entry("ipv4", rule)


libnftables.load()
_warm()

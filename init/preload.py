"""For a process that will fork one child for each pod: importing this loads what init needs, and libnftables.

The legacy back end needs more: ``init.preload_legacy``.
"""

from __future__ import annotations

from . import cli, libnftables, native_state, nftables, program, routes, xtables

__all__ = ["cli", "native_state", "nftables", "program", "routes", "xtables"]

libnftables.load()

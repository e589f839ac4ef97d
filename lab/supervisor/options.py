"""How a lab is brought up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Options:
    """``backend`` is what ``--iptables`` takes, ``timeout`` how long it may take in seconds.

    ``detach``: the lab outlives whoever started it; ``temporary``: it is there for one run of tests. ``runtime``: ``netns``, or ``docker`` for pods as containers of the
    engine at ``engine``, with ``image`` as ours.
    """

    backend: str = "auto"
    timeout: float = 60.0
    detach: bool = False
    runtime: str = "netns"
    engine: str = ""
    image: str = ""
    temporary: bool = False

"""One place of a lab, as whoever starts it is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lab.runtime.mounts import View


@dataclass(frozen=True, slots=True)
class PlaceSpec:
    """A place to start: its pinned network namespace, and for all but the node a view of files of its own.

    ``notify_dir`` is where READY=1 sockets lie, as the place's processes see it.
    """

    name: str
    netns: str
    notify_dir: str
    hostname: str = ""
    view: View | None = None
    sysctls: Mapping[str, str] = field(default_factory=dict)

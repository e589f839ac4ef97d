"""Discovery and DNS as containers: the same servers as a lab's, from manifest files."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace

from lab.manifests.load import load
from lab.manifests.model import Mesh

_EVERYWHERE = "0.0.0.0"


def discovery(files: Sequence[str]) -> int:
    """Serves xDS until SIGTERM.

    Raises:
        InputError: bad manifests, or a port that is taken.
    """
    from lab.discovery import server

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stdout)
    asyncio.run(server.serve(lambda: load(files), _EVERYWHERE, ""))
    return 0


def dns(files: Sequence[str]) -> int:
    """Answers what Docker's resolver does not know itself, so that no lookup leaves the machine, until SIGTERM.

    Names of containers are Docker's to answer (network aliases). There are no service addresses here for anybody without
    a sidecar, so no Service has a name either.

    Raises:
        InputError: bad manifests, or port 53 is taken.
    """
    asyncio.run(_serve_dns(load(files)))
    return 0


async def _serve_dns(mesh: Mesh) -> None:
    from lab.fabric import dns as server
    from lab.fabric import zone

    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    answering = server.Server(zone.build(replace(mesh, services=(), pods=()), 1), server.QueryLog(""))
    await answering.start([_EVERYWHERE], server.PORT)
    await ended.wait()
    await answering.stop()

"""Envoy's life under the agent: run, drain, end.

Source: istio/istio: pkg/envoy/agent.go, pkg/envoy/admin.go.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from agent.admin import AdminClient, AdminError
from agent.envoy import EnvoyProcess, ExitStatus

log = logging.getLogger("default")

CHECK_SECONDS = 1.0
DRAIN_TIMEOUT = 5.0
STATS_TIMEOUT = 2.0
_ACTIVE = "/stats?usedonly&filter=downstream_cx_active$"
MAX_FAILURES = 4


@dataclass(frozen=True)
class DrainOptions:
    """How to end.

    Args:
        sidecar: drain inbound listeners alone.
        termination: seconds between the drain and the end.
        minimum: seconds before connections are counted, with `on_zero_connections`.
        on_zero_connections: end when no connection is left.
        known_ports: of Envoy's own listeners, which do not count.
    """

    sidecar: bool = True
    termination: float = 5.0
    minimum: float = 5.0
    on_zero_connections: bool = False
    known_ports: Sequence[int] = (15021, 15090)


def active_connections(stats: str, known_ports: Sequence[int]) -> int | None:
    """Downstream connections of all listeners but the agent's own; None if there are no such statistics."""
    if not stats:
        return None
    known = {f"listener.0.0.0.0_{port}.downstream_cx_active" for port in known_ports if port}
    known |= {"listener.admin.downstream_cx_active", "listener.admin.main_thread.downstream_cx_active"}
    total = 0
    for line in stats.splitlines():
        parts = line.split(":")
        if len(parts) != 2:
            continue
        name, value = parts[0], parts[1].strip()
        if not name.startswith("listener.") or "worker_" in name or name.startswith("listener.envoy_internal_"):
            continue
        if name not in known and value.isdigit():
            total += int(value)
    return total


class ProxyAgent:
    """Runs one Envoy to its end."""

    def __init__(self, envoy: EnvoyProcess, admin: AdminClient, options: DrainOptions) -> None:
        self._envoy, self._admin, self._options = envoy, admin, options
        self._skip_drain = False

    def disable_draining(self) -> None:
        """The end, when it comes, is immediate."""
        self._skip_drain = True

    async def drain_now(self) -> None:
        """Drains and goes on running; the end is then immediate."""
        log.info("Agent draining proxy")
        await self._drain(skip_exit=True)
        self.disable_draining()

    async def _drain(self, *, skip_exit: bool) -> None:
        query = ("inboundonly&" if self._options.sidecar else "") + "graceful" + ("&skip_exit" if skip_exit else "")
        try:
            await self._admin.request("POST", f"/drain_listeners?{query}", DRAIN_TIMEOUT)
        except AdminError as error:
            log.warning("Error in invoking drain listeners endpoint: %s", error)

    async def run(self, cancelled: asyncio.Event) -> ExitStatus:
        """Waits until Envoy ends, or ends it once `cancelled` is set."""
        exited = asyncio.create_task(self._envoy.wait())
        stop = asyncio.create_task(cancelled.wait())
        try:
            await asyncio.wait({exited, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not exited.done():
                await self._terminate(exited)
                log.info("Agent has successfully terminated")
                return await exited
            status = exited.result()
            if status.killed:
                log.warning("Envoy may have been out of memory killed. Check memory usage and limits.")
            if status.reason:
                cause = f": {status.last_error}" if status.last_error else ""
                log.error("Envoy exited with error: %s%s", status.reason, cause)
            else:
                log.info("Envoy exited normally")
            return status
        finally:
            stop.cancel()

    async def _terminate(self, exited: asyncio.Task[ExitStatus]) -> None:
        log.info("Agent draining Proxy for termination")
        if self._skip_drain:
            log.info("Agent already drained, exiting immediately")
        else:
            await self._drain(skip_exit=False)
            if self._options.on_zero_connections:
                await self._wait_for_connections(exited)
            else:
                log.info("Graceful termination period is %gs, starting...", self._options.termination)
                await asyncio.wait({exited}, timeout=self._options.termination)
        if exited.done():
            log.info("Graceful termination logic ended prematurely, envoy process terminated early")
            return
        log.warning("Aborting proxy")
        self._envoy.abort()
        await exited
        log.info("Envoy aborted normally")

    async def _wait_for_connections(self, exited: asyncio.Task[ExitStatus]) -> None:
        options = self._options
        log.info("Agent draining proxy for %gs, then waiting for active connections to terminate...", options.minimum)
        await asyncio.wait({exited}, timeout=options.minimum)
        failures = 0
        while not exited.done():
            # Envoy has no event for its last connection, so the count is asked for each second, as Istio does.
            await asyncio.wait({exited}, timeout=CHECK_SECONDS)
            if exited.done():
                return
            try:
                count = active_connections(
                    await self._admin.request("GET", _ACTIVE, STATS_TIMEOUT), options.known_ports
                )
            except AdminError as error:
                failures += 1
                log.warning("unable to get listener stats from Envoy (%d of %d): %s", failures, MAX_FAILURES + 1, error)
                if failures > MAX_FAILURES:
                    return
                continue
            failures = 0
            if count is None:
                log.info("downstream_cx_active are not available. Skipping active connections check...")
                return
            if count == 0:
                log.info("There are no more active connections. terminating proxy...")
                return
            log.info("There are still %d active connections", count)

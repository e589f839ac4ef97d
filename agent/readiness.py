"""Readiness of a proxy: Envoy has configuration and workers, files and the name table are there.

Source: istio/istio: pilot/cmd/pilot-agent/status/ready/probe.go, pilot/cmd/pilot-agent/status/util/stats.go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agent.admin import AdminClient, AdminError, parse_stats

# "|" must not stand in a URL as it is.
_UPDATE_STATS = (
    "/stats?usedonly&filter=^(cluster_manager\\.cds%7Clistener_manager\\.lds)\\.(update_success%7Cupdate_rejected)$"
)
_SERVER_STATS = "/stats?usedonly&filter=^(server\\.state%7Clistener_manager\\.workers_started)"
UPDATE_TIMEOUT = 1.0
SERVER_TIMEOUT = 3.0


class NotReady(Exception):
    """Why the proxy is not ready."""


class EnvoyReadiness:
    """Both checks of Envoy; each is remembered once it has passed."""

    def __init__(self, admin: AdminClient) -> None:
        self._admin = admin
        self._updated = False
        self._started = False
        self.terminated = False

    async def check(self) -> None:
        """Returns if Envoy is ready.

        Raises:
            NotReady: with the reason.
        """
        if self.terminated:
            raise NotReady("server is terminated")
        if not self._updated:
            await self._check_updates()
            self._updated = True
        if not self._started:
            await self._check_server()
            self._started = True

    async def _stats(self, path: str, timeout: float) -> dict[str, int]:
        try:
            return parse_stats(await self._admin.request("GET", path, timeout))
        except AdminError as error:
            raise NotReady(f"failed to get stats from Envoy: {error}") from None

    async def _check_updates(self) -> None:
        stats = await self._stats(_UPDATE_STATS, UPDATE_TIMEOUT)
        success = {
            "cds": stats.get("cluster_manager.cds.update_success", 0),
            "lds": stats.get("listener_manager.lds.update_success", 0),
        }
        rejected = {
            "cds": stats.get("cluster_manager.cds.update_rejected", 0),
            "lds": stats.get("listener_manager.lds.update_rejected", 0),
        }
        if all(success.values()):
            return
        shown = ", ".join(f"{kind}: {success[kind]} successful, {rejected[kind]} rejected" for kind in success)
        if not any(success.values()) and not any(rejected.values()):
            raise NotReady(f"config not received from XDS server (is Istiod running?): {shown}")
        if any(rejected.values()):
            raise NotReady(f"config received from XDS server, but was rejected: {shown}")
        raise NotReady(f"config not fully received from XDS server: {shown}")

    async def _check_server(self) -> None:
        stats = await self._stats(_SERVER_STATS, SERVER_TIMEOUT)
        state, workers = stats.get("server.state"), stats.get("listener_manager.workers_started")
        if state != 0:
            names = {0: "LIVE", 1: "DRAINING", 2: "PRE_INITIALIZING", 3: "INITIALIZING"}
            raise NotReady(
                f"server is not live, current state is: {'unknown' if state is None else names.get(state, state)}"
            )
        if workers != 1:
            raise NotReady("workers have not yet started")


Check = Callable[[], str]


class Readiness:
    """All checks of a proxy, in order.

    Args:
        envoy: None without Envoy.
        checks: further checks; each gives an empty string or the reason why not.
    """

    def __init__(self, envoy: EnvoyReadiness | None, checks: Sequence[Check]) -> None:
        self.envoy = envoy
        self._checks = checks

    async def check(self) -> None:
        """Returns if the proxy is ready.

        Raises:
            NotReady: with the reason of the first check that fails.
        """
        if self.envoy is not None:
            await self.envoy.check()
        for check in self._checks:
            reason = check()
            if reason:
                raise NotReady(reason)

"""HTTP of the control plane: ``/ready``, ``/metrics``, ``/version`` and ``/debug/*`` (15014 and 8080).

Source of the paths and shapes: istio/istio: pilot/pkg/xds/debug.go.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from lab.discovery import debug
from lab.discovery.ads import DiscoveryServer

VERSION = "1.32-lab"


class HttpServers:
    """The same handlers on several ports."""

    def __init__(self, server: DiscoveryServer) -> None:
        self._server = server
        self._runners: list[web.AppRunner] = []

    async def listen(self, host: str, port: int) -> int:
        """Serves on host:port; returns the bound port. Raises OSError if it is taken."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/ready", self._ready),
                web.get("/metrics", self._metrics),
                web.get("/version", self._version),
                web.get("/debug/{name}", self._debug),
                web.get("/debug", self._debug),
            ]
        )
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        self._runners.append(runner)
        site = web.TCPSite(runner, host, port)
        await site.start()
        bound: int = runner.addresses[0][1]
        return bound

    async def close(self) -> None:
        for runner in self._runners:
            await runner.cleanup()

    async def _ready(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, _request: web.Request) -> web.Response:
        return web.Response(text=VERSION)

    async def _metrics(self, _request: web.Request) -> web.Response:
        metrics = self._server.metrics
        metrics.gauge("pilot_info", 1, version=VERSION)
        return web.Response(body=metrics.exposition(), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _debug(self, request: web.Request) -> web.Response:
        name = request.match_info.get("name", "list")
        try:
            answer: Any = debug.answer(self._server, name, request.query)
        except LookupError as e:
            return web.Response(status=404, text=f"{e}\n")
        except ValueError as e:
            return web.Response(status=400, text=f"{e}\n")
        return web.json_response(answer)

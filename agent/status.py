"""The status server on 15020.

Source: istio/istio: pilot/cmd/pilot-agent/status/server.go.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from agent.dns.table import KUBERNETES, entries
from agent.readiness import NotReady, Readiness

if TYPE_CHECKING:
    from aiohttp import web

    from agent.app_probe import AppProber
    from agent.dns.server import DNSServer
    from agent.scrape import Scraper

log = logging.getLogger("default")
probes_log = logging.getLogger("probes")


def is_loopback(peer: str | None) -> bool:
    """True for a loopback address, IPv4-mapped ones too."""
    try:
        address = ipaddress.ip_address((peer or "").partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def listen_socket(port: int) -> socket.socket:
    """A TCP socket on every address of both families, or of IPv4 where there is no IPv6.

    Raises:
        OSError: the port cannot be bound.
    """
    try:
        sock = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    except OSError:
        sock = None  # type: ignore[assignment]
    if sock is not None:
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            sock.bind(("::", port))
            return sock
        except OSError as error:
            sock.close()
            if error.errno not in (97, 99):
                raise
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("0.0.0.0", port))
    except OSError:
        sock.close()
        raise
    return sock


class StatusServer:
    """Readiness, metrics, drain and application probes over plain HTTP.

    Args:
        readiness: the checks.
        scraper: merges metrics.
        prober: application probes.
        dns: None without a DNS server.
        drain: starts draining.
        quit: ends the agent at once.
        local_metrics_only: agent metrics for loopback peers alone.
    """

    def __init__(
        self,
        readiness: Readiness,
        scraper: Scraper,
        prober: AppProber,
        dns: DNSServer | None,
        drain: Callable[[], Awaitable[None]],
        quit: Callable[[], None],
        *,
        local_metrics_only: bool = False,
        profiling: bool = True,
    ) -> None:
        self._readiness, self._scraper, self._prober, self._dns = readiness, scraper, prober, dns
        self._drain, self._quit = drain, quit
        self._local_metrics_only, self._profiling = local_metrics_only, profiling
        self._runner: web.ServerRunner | None = None
        self._was_ready: bool | None = None

    async def start(self, port: int) -> None:
        """Listens; a port that cannot be bound is only logged."""
        from aiohttp import web

        try:
            sock = listen_socket(port)
        except OSError as error:
            log.error("Error listening on status port: %s", error.strerror)
            return
        server = web.Server(self._handle, access_log=None)
        self._runner = web.ServerRunner(server)
        await self._runner.setup()
        await web.SockSite(self._runner, sock, shutdown_timeout=1).start()
        log.info("Opening status port %d", port)

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        from aiohttp import web

        path = request.path
        if path == "/healthz/ready":
            return await self._ready()
        if path in ("/stats/prometheus", "/metrics"):
            if self._local_metrics_only and not is_loopback(request.remote):
                return web.Response(status=403, text="Only requests from localhost are allowed\n")
            return await self._scraper.serve(request)
        if path in ("/quitquitquit", "/drain"):
            return await self._end(request)
        if path.startswith(("/app-health/", "/app-lifecycle/")):
            return await self._prober.serve(request)
        if path == "/debug/ndsz":
            return self._ndsz(request)
        if path.startswith("/debug/pprof/") and self._profiling:
            return self._profile(request)
        return web.Response(status=404, text="404 page not found\n")

    async def _ready(self) -> web.Response:
        from aiohttp import web

        try:
            await self._readiness.check()
        except NotReady as reason:
            if self._was_ready is not False:
                probes_log.warning("Envoy proxy is NOT ready: %s", reason)
            self._was_ready = False
            return web.Response(status=503)
        if self._was_ready is not True:
            probes_log.info("Envoy proxy is ready")
        self._was_ready = True
        return web.Response(status=200)

    async def _end(self, request: web.BaseRequest) -> web.Response:
        from aiohttp import web

        if not is_loopback(request.remote):
            return web.Response(status=403, text="Only requests from localhost are allowed\n")
        if request.method != "POST":
            return web.Response(status=405, text="405 Method Not Allowed\n", headers={"Allow": "POST"})
        if request.path == "/drain":
            log.info("handling drain")
            await self._drain()
        else:
            log.info("handling quitquitquit, notifying pilot-agent to exit")
            self._quit()
        return web.Response(text="OK")

    def _ndsz(self, request: web.BaseRequest) -> web.Response:
        from aiohttp import web

        if not is_loopback(request.remote):
            return web.Response(status=403, text="Only requests from localhost are allowed\n")
        table = self._dns.name_table if self._dns is not None else None
        if self._dns is None or table is None:
            return web.Response(status=404, text="{}", content_type="application/json")
        shown: dict[str, dict[str, object]] = {}
        for host, names, ipv4, ipv6 in entries(table.table, self._dns.names):
            ips = [str(ipaddress.ip_address(packed)) for packed in (*ipv4, *ipv6)]
            for name in names:
                shown[name] = {"ips": ips, "registry": KUBERNETES, "host": host}
        return web.json_response({"table": dict(sorted(shown.items()))}, dumps=lambda data: json.dumps(data, indent=2))

    def _profile(self, request: web.BaseRequest) -> web.Response:
        """What Python can say in place of Go's pprof: the stack of every thread."""
        import sys
        import traceback

        from aiohttp import web

        if not is_loopback(request.remote):
            return web.Response(status=403, text="Only requests from localhost are allowed\n")
        stacks = [
            f"thread {identity}:\n{''.join(traceback.format_stack(frame))}"
            for identity, frame in sys._current_frames().items()
        ]
        return web.Response(text="\n".join(stacks))

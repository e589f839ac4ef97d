"""The status server on 15020.

Source: istio/istio: pilot/cmd/pilot-agent/status/server.go.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import logging
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from agent.dns.table import KUBERNETES, entries
from agent.http import Response
from agent.http_server import Request, Server, text_response
from agent.readiness import NotReady, Readiness

if TYPE_CHECKING:
    from agent.app_probe import AppProber
    from agent.dns.server import DNSServer
    from agent.protos import nds_pb2
    from agent.scrape import Scraper

log = logging.getLogger("default")


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
        return _bound(socket.AF_INET6, "::", port)
    except OSError as error:
        if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            raise
    return _bound(socket.AF_INET, "0.0.0.0", port)


def _bound(family: socket.AddressFamily, host: str, port: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family is socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind((host, port))
    except (OSError, OverflowError):
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
        self._server = Server(self._handle)
        self._was_ready: bool | None = None
        self._not_ready = ""

    async def start(self, port: int) -> None:
        """Listens; a port that cannot be bound is only logged."""
        try:
            sock = listen_socket(port)
        except (OSError, OverflowError) as error:
            log.error("Error listening on status port: %s", getattr(error, "strerror", None) or error)
            return
        await self._server.start(sock)
        log.info("Opening status port %d", port)

    async def stop(self) -> None:
        await self._server.stop()

    async def _handle(self, request: Request) -> Response:
        path = request.path
        if path == "/healthz/ready":
            return await self._ready()
        if path in ("/stats/prometheus", "/metrics"):
            if self._local_metrics_only and not is_loopback(request.peer):
                return _FORBIDDEN
            return await self._scraper.serve(request)
        if path in ("/quitquitquit", "/drain"):
            return await self._end(request)
        if path.startswith(("/app-health/", "/app-lifecycle/")):
            return await self._prober.serve(request)
        if path == "/debug/ndsz" or (path.startswith("/debug/pprof/") and self._profiling):
            if not is_loopback(request.peer):
                return _FORBIDDEN
            return self._ndsz() if path == "/debug/ndsz" else text_response(200, _stacks())
        return text_response(404, "404 page not found\n")

    async def _ready(self) -> Response:
        try:
            await self._readiness.check()
        except NotReady as reason:
            if str(reason) != self._not_ready:
                log.warning("Envoy proxy is NOT ready: %s", reason)
            self._was_ready, self._not_ready = False, str(reason)
            return Response(503)
        if self._was_ready is not True:
            log.info("Envoy proxy is ready")
        self._was_ready, self._not_ready = True, ""
        return Response(200)

    async def _end(self, request: Request) -> Response:
        if not is_loopback(request.peer):
            return _FORBIDDEN
        if request.method != "POST":
            return text_response(405, "Method Not Allowed\n", ("Allow", "POST"))
        if request.path == "/drain":
            log.info("handling /drain, starting drain")
            await self._drain()
        else:
            log.info("handling /quitquitquit, notifying pilot-agent to exit")
            self._quit()
        return text_response(200, "OK")

    def _ndsz(self) -> Response:
        table = self._dns.name_table if self._dns is not None else None
        headers = (("Content-Type", "application/json"),)
        if self._dns is None or table is None:
            return Response(404, b"{}", headers)
        # Names that were made from an entry have no registry of their own (istio/istio: pkg/istio-agent/agent.go).
        shown: dict[str, dict[str, object]] = {host: _entry(info) for host, info in table.table.items()}
        for _, names, ipv4, ipv6 in entries(table.table, self._dns.names):
            ips = [str(ipaddress.ip_address(packed)) for packed in (*ipv4, *ipv6)]
            for name in names:
                shown.setdefault(name, {"ips": ips, "registry": KUBERNETES})
        body = json.dumps({"table": dict(sorted(shown.items()))}, separators=(",", ":"))
        return Response(200, body.encode(), headers)


def _entry(info: nds_pb2.NameTable.NameInfo) -> dict[str, object]:
    """An entry of the name table as discovery sent it; what is unset is left out."""
    shown: dict[str, object] = {"ips": list(info.ips), "registry": info.registry}
    shown |= {"shortname": info.shortname, "namespace": info.namespace, "altHosts": list(info.alt_hosts)}
    return {key: value for key, value in shown.items() if value}


_FORBIDDEN = text_response(403, "Only requests from localhost are allowed\n")


def _stacks() -> str:
    """What Python can say in place of Go's pprof: the stack of every thread."""
    return "\n".join(
        f"thread {identity}:\n{''.join(traceback.format_stack(frame))}"
        for identity, frame in sys._current_frames().items()
    )

"""HTTP of the control plane: ``/ready``, ``/metrics``, ``/version`` and ``/debug/*`` (15014 and 8080).

Source of the paths and shapes: istio/istio: pilot/pkg/xds/debug.go.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from urllib.parse import parse_qsl

from agent.http import Request, Response, Server, text_response
from lab.discovery import debug
from lab.discovery.ads import DiscoveryServer

VERSION = "1.32-lab"
DEBUG = "/debug/"


class HttpServers:
    """The same handlers on several ports."""

    def __init__(self, server: DiscoveryServer) -> None:
        self._server = server
        self._listening: list[Server] = []
        self._pages: dict[str, Callable[[], Response]] = {
            "/ready": lambda: Response(200),
            "/version": lambda: text_response(200, VERSION),
            "/metrics": self._metrics,
        }

    async def listen(self, host: str, port: int) -> int:
        """Serves on host:port; returns the bound port. Raises OSError if it is taken."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.create_server((host, port), family=family, backlog=128)
        server = Server(self._answer)
        await server.start(sock)
        self._listening.append(server)
        return int(sock.getsockname()[1])

    async def close(self) -> None:
        for server in self._listening:
            await server.stop()

    async def _answer(self, request: Request) -> Response:
        path = request.path
        is_debug = path == "/debug" or (path.startswith(DEBUG) and "/" not in path.removeprefix(DEBUG))
        page = self._pages.get(path)
        if page is None and not is_debug:
            return text_response(404, "404: Not Found")
        if request.method not in ("GET", "HEAD"):
            return text_response(405, "405: Method Not Allowed", ("Allow", "GET,HEAD"))
        return page() if page is not None else self._debug(request)

    def _metrics(self) -> Response:
        metrics = self._server.metrics
        metrics.gauge("pilot_info", 1, version=VERSION)
        return Response(200, metrics.exposition(), (("Content-Type", "text/plain; version=0.0.4"),))

    def _debug(self, request: Request) -> Response:
        name = request.path.removeprefix("/debug").removeprefix("/") or "list"
        try:
            answer = debug.answer(self._server, name, dict(parse_qsl(request.query)))
        except LookupError as e:
            return text_response(404, f"{e}\n")
        except ValueError as e:
            return text_response(400, f"{e}\n")
        body = json.dumps(answer).encode()
        return Response(200, body, (("Content-Type", "application/json; charset=utf-8"),))

"""HTTP of the control plane: ``/ready``, ``/metrics``, ``/version`` and ``/debug/*`` (15014 and 8080).

Source of the paths and shapes: istio/istio: pilot/pkg/xds/debug.go.
"""

from __future__ import annotations

import functools
import json
import logging
import socket
from collections.abc import Callable
from urllib.parse import parse_qsl

from agent.http import Response
from agent.http_server import Request, Server, text_response
from lab.discovery import debug, debug_access
from lab.discovery.ads import DiscoveryServer
from lab.discovery.auth import Authenticator, Forbidden, Unauthenticated

log = logging.getLogger("discovery")

VERSION = "1.32-lab"
DEBUG = "/debug/"


class HttpServers:
    """The same handlers on several ports."""

    def __init__(self, server: DiscoveryServer, authenticator: Authenticator) -> None:
        self._server, self._authenticator = server, authenticator
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
        server = Server(functools.partial(self._answer, host))
        await server.start(sock)
        self._listening.append(server)
        return int(sock.getsockname()[1])

    async def close(self) -> None:
        for server in self._listening:
            await server.stop()

    async def _answer(self, host: str, request: Request) -> Response:
        path = request.path
        is_debug = path == "/debug" or (path.startswith(DEBUG) and "/" not in path.removeprefix(DEBUG))
        page = self._pages.get(path)
        if page is None and not is_debug:
            return text_response(404, "404: Not Found")
        if request.method not in ("GET", "HEAD"):
            return text_response(405, "405: Method Not Allowed", ("Allow", "GET,HEAD"))
        return page() if page is not None else self._debug(host, request)

    def _metrics(self) -> Response:
        metrics = self._server.metrics
        metrics.gauge("pilot_info", 1, version=VERSION)
        return Response(200, metrics.exposition(), (("Content-Type", "text/plain; version=0.0.4"),))

    def _debug(self, host: str, request: Request) -> Response:
        name = request.path.removeprefix("/debug").removeprefix("/")
        if not name:
            return _json(debug.listed())  # as istiod's list for people, for everybody
        query = dict(parse_qsl(request.query, keep_blank_values=True))
        try:
            debug.known(name)
            namespace = debug_access.over_http(
                self._authenticator,
                self._server.push_context.mesh_config.root_namespace,
                name,
                peer=request.peer,
                listen=host,
                authorization=request.header("authorization"),
            )
            return _json(debug.answer(self._server, name, query, namespace))
        except Unauthenticated as e:
            log.error("debug refused peer=%s path=%s status=401: %s", request.peer, request.path, e)
            return Response(401)
        except Forbidden as e:
            log.warning("debug refused peer=%s path=%s status=403: %s", request.peer, request.path, e)
            return Response(403)
        except LookupError as e:
            return text_response(404, f"{e}\n")
        except ValueError as e:
            return text_response(400, f"{e}\n")


def _json(answer: object) -> Response:
    return Response(200, json.dumps(answer).encode(), (("Content-Type", "application/json; charset=utf-8"),))

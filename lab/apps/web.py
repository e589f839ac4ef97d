"""HTTP/1.1 ports of the echo app: every request is answered by what was seen of it.

Paths that do more: ``/status/CODE`` answers that status, ``/delay/SECONDS`` waits first (at most 60), ``/close`` ends the
connection without an answer (FIN), ``/reset`` does so by RST.
"""

from __future__ import annotations

import asyncio
import re

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from lab.apps.events import EventLog
from lab.apps.ports import EchoConfig
from lab.apps.report import endpoint, flow, headers, line, tls
from lab.apps.streams import reset

_STATUS = re.compile(r"/status/([1-9][0-9][0-9])/?")
_DELAY = re.compile(r"/delay/([0-9]+(?:\.[0-9]+)?)/?")
MAX_DELAY = 60.0  # seconds


class HTTPEcho:
    """A factory of protocols, one per connection, for a port that speaks HTTP/1.1."""

    def __init__(self, config: EchoConfig, log: EventLog, protocol: str) -> None:
        """Needs a running event loop."""
        self._config, self._log, self._protocol = config, log, protocol
        self._server = web.Server(self._answer, access_log=None)

    def __call__(self) -> RequestHandler:
        return self._server()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        transport = request.transport
        if transport is None:
            raise ConnectionResetError
        received = 0
        async for chunk in request.content.iter_any():
            received += len(chunk)
        seen = {
            **flow(
                self._config,
                endpoint(transport.get_extra_info("peername")),
                endpoint(transport.get_extra_info("sockname")),
                tls(transport.get_extra_info("ssl_object")),
            ),
            "method": request.method,
            "path": request.raw_path,
            "headers": headers(request.headers.items()),
            "host": request.headers.get("Host"),
            "received": received,
        }
        self._log.write("request", {"protocol": self._protocol, **seen})
        path = request.path
        if path == "/close":
            transport.close()
        elif path == "/reset":
            reset(transport)
        elif match := _DELAY.fullmatch(path):
            await asyncio.sleep(min(float(match[1]), MAX_DELAY))
        status = int(match[1]) if (match := _STATUS.fullmatch(path)) else 200
        if status < 200 or status in (204, 304):  # these have no content (RFC 9110, 15)
            return web.Response(status=status)
        return web.Response(status=status, body=line(seen), content_type="application/json")

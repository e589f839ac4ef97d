"""The debug port 15004: what discovery knows about this proxy, asked on the proxy's own stream.

Agents had it until January 2025: ``/debug/<p>?resourceName=r`` becomes a request of type ``istio.io/debug/<p>``.
Source: istio/istio 1.14: pkg/istio-agent/xds_proxy.go (makeTapHandler, initDebugInterface).
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from typing import Any
from urllib.parse import parse_qs

from agent.http import Request, Response, Server, text_response
from agent.xds_proxy import DEBUG_PREFIX, XdsProxy

log = logging.getLogger("xdsproxy")

PORT = 15004
TIMEOUT_SECONDS = 5.0


class DebugPort:
    """Serves HTTP on the loopback address."""

    def __init__(self, xds: XdsProxy, localhost: str) -> None:
        self._xds, self._localhost = xds, localhost
        self._server = Server(self._handle)
        self._lock = asyncio.Lock()

    async def start(self, port: int = PORT) -> None:
        """Listens; a port that cannot be bound is only logged."""
        family = socket.AF_INET6 if ":" in self._localhost else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((self._localhost, port))
        except OSError as error:
            sock.close()
            log.error("Error listening on debug port %d: %s", port, error.strerror)
            return
        await self._server.start(sock)
        log.info("starting Http debug server at %s:%d", self._localhost, port)

    async def stop(self) -> None:
        await self._server.stop()

    async def _handle(self, request: Request) -> Response:
        if not request.path.startswith("/debug/") or len(request.path) == len("/debug/"):
            return text_response(404, "404 page not found\n")
        kind = request.path.removeprefix("/debug/")
        names = parse_qs(request.query).get("resourceName", [])[:1]
        async with self._lock:
            try:
                answer = await self._xds.debug(f"{DEBUG_PREFIX}/{kind}", names, TIMEOUT_SECONDS)
            except ConnectionError as error:
                return text_response(503, f"{error}\n")
            except TimeoutError:
                return text_response(504, f"timed out waiting for discovery to answer {kind}\n")
        body = json.dumps(readable(answer), indent=2)
        return Response(200, body.encode(), (("Content-Type", "application/json"),))


def readable(response: Any) -> dict[str, Any]:
    """A discovery response as JSON; a resource that is no known protobuf message is shown as its text."""
    resources = []
    for item in response.resources:
        resource = getattr(item, "resource", item)
        resources.append({"@type": resource.type_url, "value": _value(resource)})
    return {"typeUrl": response.type_url, "resources": resources}


def _value(resource: Any) -> Any:
    from google.protobuf import json_format

    try:
        return json_format.MessageToDict(resource, preserving_proto_field_name=True)
    except (TypeError, ValueError, json_format.Error):
        pass
    text = resource.value.decode("utf-8", "replace")
    try:
        return json.loads(text)
    except ValueError:
        return text

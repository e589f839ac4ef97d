"""The debug port 15004: what discovery knows about this proxy, asked on the proxy's own stream.

Agents had it until January 2025: ``/debug/<p>?resourceName=r`` becomes a request of type ``istio.io/debug/<p>``, and
``/debug?resourceName=r`` one of type ``istio.io/debug``.
Source: istio/istio 1.14: pkg/istio-agent/xds_proxy.go (makeTapHandler, initDebugInterface).
"""

from __future__ import annotations

import asyncio
import base64
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
        except (OSError, OverflowError) as error:
            sock.close()
            log.error("Error listening on debug port %d: %s", port, getattr(error, "strerror", None) or error)
            return
        await self._server.start(sock)
        log.info("starting Http debug server at %s:%d", self._localhost, port)

    async def stop(self) -> None:
        await self._server.stop()

    async def _handle(self, request: Request) -> Response:
        path = request.path
        if path != "/debug" and (not path.startswith("/debug/") or path == "/debug/"):
            return text_response(404, "404 page not found\n")
        type_url = DEBUG_PREFIX + path.removeprefix("/debug")
        names = parse_qs(request.query).get("resourceName", [])[:1]
        async with self._lock:
            try:
                answer = await self._xds.debug(type_url, names, TIMEOUT_SECONDS)
            except ConnectionError as error:
                return text_response(503, f"{error}\n")
            except TimeoutError:
                return text_response(504, f"timed out waiting for discovery to answer {type_url}\n")
        # Loading the messages of a config dump takes a while, and DNS is not to wait for that.
        shown = await asyncio.to_thread(readable, answer)
        return Response(200, json.dumps(shown, indent=2).encode(), (("Content-Type", "application/json"),))


def readable(response: Any) -> dict[str, Any]:
    """A discovery response as JSON, in the form of a state-of-the-world one.

    A resource that is no known protobuf message is shown under ``value``: as JSON or text if it is that, else in base64.
    """
    resources = [_shown(getattr(item, "resource", item)) for item in response.resources]
    version = response.system_version_info if hasattr(response, "system_version_info") else response.version_info
    return {
        "versionInfo": version,
        "typeUrl": response.type_url,
        "nonce": response.nonce,
        "resources": resources,
    }


def _shown(resource: Any) -> dict[str, Any]:
    from google.protobuf import json_format
    from google.protobuf.message import DecodeError

    from agent.message_types import MessageTypes

    types: Any = MessageTypes()  # all that json_format asks of a pool
    try:
        found: dict[str, Any] = json_format.MessageToDict(resource, descriptor_pool=types)
    except (TypeError, ValueError, json_format.Error, DecodeError):
        return {"@type": resource.type_url, "value": _text(resource.value)}
    return found


def _text(data: bytes) -> Any:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return base64.b64encode(data).decode()
    try:
        return json.loads(text)
    except ValueError:
        return text

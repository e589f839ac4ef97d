"""The debug port 15004: what discovery knows about this proxy, asked on the proxy's own stream.

Agents had it until January 2025: ``/debug/<p>?resourceName=r`` becomes a request of type ``istio.io/debug/<p>``, and
``/debug?resourceName=r`` one of type ``istio.io/debug``. Since 1.14.5 it takes the questions over gRPC too.
Source: istio/istio 1.14.6: pkg/istio-agent/xds_proxy.go (makeTapHandler, initDebugInterface).
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from agent.http import Response
from agent.http_server import Request, Server, text_response
from agent.xds_proxy import DEBUG_PREFIX, XdsProxy

if TYPE_CHECKING:
    from agent.debug_stream import DebugStreams

log = logging.getLogger("xdsproxy")

PORT = 15004
SOCKET = "DEBUG"
TIMEOUT_SECONDS = 5.0
IDLE_SECONDS = 30.0
READ_SIZE = 65536
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # RFC 9113, 3.4


class DebugPort:
    """Serves HTTP/1.1, and gRPC for what begins as HTTP/2, on the loopback address.

    Args:
        xds: whose stream the questions ride on.
        localhost: the address.
        path: of the Unix socket that gRPC is served on behind the port, made when somebody speaks it.
    """

    def __init__(self, xds: XdsProxy, localhost: str, path: str) -> None:
        self._xds, self._localhost, self._path = xds, localhost, path
        self._server = Server(self._handle)
        self._listener: asyncio.Server | None = None
        self._streams: DebugStreams | None = None
        self._relays: set[asyncio.Task[None]] = set()
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
        self._listener = await asyncio.start_server(self._accept, sock=sock)
        log.info("starting Http debug server at %s:%d", self._localhost, port)

    async def stop(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for task in self._relays:
            task.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)
        await self._server.stop()
        if self._streams is not None:
            await self._streams.stop()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._relays.add(task)
        try:
            head = await _head(reader)
            if head.startswith(PREFACE):
                await self._grpc().relay(head, reader, writer)
            else:
                await self._server.accept(_Begun(head, reader), writer)
        except (OSError, TimeoutError) as error:
            log.debug("a connection to the debug port broke: %s", error)
        except asyncio.CancelledError:
            pass
        finally:
            self._relays.discard(task)
            writer.close()

    def _grpc(self) -> DebugStreams:
        from agent.debug_stream import DebugStreams

        if self._streams is None:
            self._streams = DebugStreams(self._path, self._ask)
        return self._streams

    async def _ask(self, type_url: str, names: Sequence[str], timeout: float) -> Any:
        async with self._lock:
            return await self._xds.debug(type_url, names, timeout)

    async def _handle(self, request: Request) -> Response:
        path = request.path
        if path != "/debug" and (not path.startswith("/debug/") or path == "/debug/"):
            return text_response(404, "404 page not found\n")
        type_url = DEBUG_PREFIX + path.removeprefix("/debug")
        names = parse_qs(request.query).get("resourceName", [])[:1]
        try:
            answer = await self._ask(type_url, names, TIMEOUT_SECONDS)
        except ConnectionError as error:
            return text_response(503, f"{error}\n")
        except TimeoutError:
            return text_response(504, f"timed out waiting for discovery to answer {type_url}\n")
        # Loading the messages of a config dump takes a while, and DNS is not to wait for that.
        shown = await asyncio.to_thread(readable, answer)
        return Response(200, json.dumps(shown, indent=2).encode(), (("Content-Type", "application/json"),))


async def _head(reader: asyncio.StreamReader) -> bytes:
    """The first bytes: enough to tell HTTP/2 from HTTP/1.1."""
    head = b""
    async with asyncio.timeout(IDLE_SECONDS):
        while len(head) < len(PREFACE) and PREFACE.startswith(head):
            more = await reader.read(READ_SIZE)
            if not more:
                break
            head += more
    return head


class _Begun(asyncio.StreamReader):
    """A stream whose first bytes have been read already."""

    def __init__(self, head: bytes, rest: asyncio.StreamReader) -> None:
        super().__init__()
        self._head, self._rest = head, rest

    async def read(self, n: int = -1) -> bytes:
        if not self._head:
            return await self._rest.read(n)
        cut = len(self._head) if n < 0 else n
        head, self._head = self._head[:cut], self._head[cut:]
        return head


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

"""ADS on the debug port: one debug question a stream, asked on the proxy's own stream to discovery.

``istioctl`` asked so through agents (``--xds-via-agents``).
Source: istio/istio 1.14.6: pkg/istio-agent/tap_proxy.go.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from agent.reflection import Reflection
from agent.xds_proxy import DEBUG_PREFIX, DELTA, SERVICE, SOTW, serve_unix

log = logging.getLogger("xdsproxy")

TIMEOUT_SECONDS = 15.0
READ_SIZE = 65536

Ask = Callable[[str, Sequence[str], float], Awaitable[Any]]


class DebugStreams:
    """A gRPC server that HTTP/2 connections are led to.

    Args:
        path: of its Unix socket.
        ask: type URL, resource names and seconds to discovery's response.
    """

    def __init__(self, path: str, ask: Ask) -> None:
        self._path, self._ask = path, ask
        self._server: grpc.aio.Server | None = None
        self._starting = asyncio.Lock()

    async def relay(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carries a connection that began with `head` to its end.

        Raises:
            OSError: the server's socket cannot be made, or the connection broke.
        """
        async with self._starting:
            if self._server is None:
                methods = {SOTW.method: self._sotw, DELTA.method: self._delta}
                self._server = await serve_unix(self._path, SERVICE, methods, (), (Reflection(SERVICE),))
        far_reader, far_writer = await asyncio.open_unix_connection(self._path)
        far_writer.write(head)
        ways = [asyncio.create_task(_copy(reader, far_writer)), asyncio.create_task(_copy(far_reader, writer))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            far_writer.close()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)

    async def _sotw(self, requests: AsyncIterator[bytes], context: Any) -> None:
        async for data in requests:
            try:
                request = SOTW.request.FromString(data)
            except DecodeError:
                await context.abort(grpc.StatusCode.INTERNAL, "malformed discovery request")
            # Other types get an empty stream.
            if request.type_url.startswith(f"{DEBUG_PREFIX}/"):
                await self._question(request, context)
            return

    async def _question(self, request: Any, context: Any) -> None:
        try:
            answer = await self._ask(request.type_url, request.resource_names, TIMEOUT_SECONDS)
        except ConnectionError as error:
            log.error("failed to call tap request: %s", error)
            await context.abort(grpc.StatusCode.UNKNOWN, str(error))
        except TimeoutError:
            text = f"timed out waiting for discovery to answer {request.type_url}"
            log.error("failed to call tap request: %s", text)
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, text)
        await context.write(as_sotw(answer).SerializeToString())

    async def _delta(self, _requests: AsyncIterator[bytes], context: Any) -> None:
        await context.abort(grpc.StatusCode.UNKNOWN, "not implemented")


def as_sotw(response: Any) -> Any:
    """A discovery response in the state-of-the-world form, whichever form it came in."""
    if not hasattr(response, "system_version_info"):
        return response
    return SOTW.response(
        version_info=response.system_version_info,
        resources=[item.resource for item in response.resources],
        type_url=response.type_url,
        nonce=response.nonce,
    )


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(READ_SIZE):
        writer.write(data)
        await writer.drain()

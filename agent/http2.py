"""A client's end of an HTTP/2 connection, one request at a time; h2 is loaded by whoever needs one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings

from agent.http import Response
from agent.http_client import HTTPError

READ_SIZE = 65536
# What Kubernetes and Istio set: a connection that is silent for so long is asked for a sign of life.
READ_IDLE_SECONDS = 30.0
PING_SECONDS = 15.0
# They belong to a connection of HTTP/1.1 (RFC 9113, 8.2.2); the authority has a field of its own.
_LEFT_OUT = frozenset(("connection", "host", "keep-alive", "proxy-connection", "te", "transfer-encoding", "upgrade"))


class HTTP2Connection:
    """Speaks on a connection that both sides agreed on.

    Args:
        reader, writer: of the connection; whoever made them closes them.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        config = h2.config.H2Configuration(client_side=True, header_encoding=None)
        self._h2 = h2.connection.H2Connection(config)
        no_push = {h2.settings.SettingCodes.ENABLE_PUSH: 0}
        self._h2.local_settings = h2.settings.Settings(client=True, initial_values=no_push)
        self._h2.initiate_connection()
        self.usable = True

    async def get(
        self, authority: str, path: str, headers: Iterable[tuple[str, str]], limit: int, thrown_away: int
    ) -> Response:
        """The answer to a GET, with at most `limit` bytes of its body.

        Args:
            thrown_away: bytes after them that are read so that the connection can be used again.

        Raises:
            HTTPError: no whole answer; the connection cannot be used again.
            ConnectionError: likewise, and the server has not looked at the request.
        """
        try:
            return await self._exchange(authority, path, headers, limit, thrown_away)
        except h2.exceptions.H2Error as error:
            self.usable = False
            raise HTTPError(f"http2: {error or type(error).__name__}") from None
        except BaseException:
            self.usable = False
            raise

    async def _exchange(
        self, authority: str, path: str, headers: Iterable[tuple[str, str]], limit: int, thrown_away: int
    ) -> Response:
        stream = self._h2.get_next_available_stream_id()
        sent = [(":method", "GET"), (":scheme", "https"), (":authority", authority), (":path", path)]
        sent += [(name.lower(), value) for name, value in headers if name.lower() not in _LEFT_OUT]
        self._h2.send_headers(stream, sent, end_stream=True)
        status, received, body, size = 0, list[tuple[str, str]](), b"", 0
        while True:
            for event in await self._events(stream):
                if isinstance(event, h2.events.ResponseReceived):
                    fields = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in event.headers]
                    status = int(dict(fields)[":status"])
                    received = [field for field in fields if field[0] != ":status"]
                elif isinstance(event, h2.events.DataReceived):
                    body += event.data[: limit - len(body)]
                    size += len(event.data)
                    if size > limit + thrown_away:
                        self.usable = False
                        return Response(status, body, received)
                    self._h2.acknowledge_received_data(event.flow_controlled_length, stream)
                elif isinstance(event, h2.events.StreamEnded):
                    self._writer.write(self._h2.data_to_send())
                    return Response(status, body, received)
                elif isinstance(event, h2.events.StreamReset):
                    if event.error_code == h2.errors.ErrorCodes.REFUSED_STREAM:
                        raise ConnectionResetError("http2: stream refused")
                    raise HTTPError(f"http2: stream error: {event.error_code!s}")

    async def _events(self, stream: int) -> list[h2.events.Event]:
        """What comes in next of this stream."""
        self._writer.write(self._h2.data_to_send())
        await self._writer.drain()
        events = self._h2.receive_data(await self._read())
        for event in events:
            if isinstance(event, h2.events.ConnectionTerminated):
                # The server ends the connection; what it has begun to work on it still answers.
                self.usable = False
                if (event.last_stream_id or 0) < stream:
                    raise ConnectionResetError("http2: server sent GOAWAY")
        return [event for event in events if getattr(event, "stream_id", stream) == stream]

    async def _read(self) -> bytes:
        try:
            async with asyncio.timeout(READ_IDLE_SECONDS):
                data = await self._reader.read(READ_SIZE)
        except TimeoutError:
            self._h2.ping(b"alive?!?")
            self._writer.write(self._h2.data_to_send())
            try:
                async with asyncio.timeout(PING_SECONDS):
                    data = await self._reader.read(READ_SIZE)
            except TimeoutError:
                raise HTTPError("http2: client connection lost") from None
        if not data:
            raise HTTPError("http2: connection closed without an answer")
        return data

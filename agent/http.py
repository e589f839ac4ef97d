"""What the HTTP/1.1 server and client of the agent share: messages, and h11 on the agent's event loop.

A web framework would cost more memory and start-up time than the rest of the agent's code together; h11 itself is
loaded with the first exchange.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import h11

Headers = Sequence[tuple[str, str]]

READ_SIZE = 65536


def header(headers: Headers, name: str) -> str:
    """The first value of a header, empty if there is none; `name` in lower case."""
    return next((value for key, value in headers if key.lower() == name), "")


@dataclass(frozen=True)
class Response:
    """An answer, sent or received.

    Args:
        stream: more of the body, sent as it comes.
        close: called when it has been sent, or cannot be.
    """

    status: int
    body: bytes = b""
    headers: Headers = field(default_factory=tuple)
    stream: AsyncIterator[bytes] | None = None
    close: Callable[[], Awaitable[None]] | None = None

    def header(self, name: str) -> str:
        return header(self.headers, name)


async def next_event(connection: h11.Connection, reader: asyncio.StreamReader) -> object:
    """The next event of a connection (h11), read from its stream as far as is needed. Raises h11.RemoteProtocolError."""
    import h11

    while (event := connection.next_event()) is h11.NEED_DATA:
        connection.receive_data(await reader.read(READ_SIZE))
    return event

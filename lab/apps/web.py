"""HTTP/1.1 ports of the echo app: every request is answered by what was seen of it.

Paths that do more: ``/status/CODE`` answers that status, ``/delay/SECONDS`` waits first (at most 60), ``/close`` ends the
connection without an answer (FIN), ``/reset`` does so by RST.

A web framework would take a tenth of a lab's start-up for this one handler, so h11 speaks the protocol.
"""

from __future__ import annotations

import asyncio
import re
from email.utils import formatdate
from http import HTTPStatus
from typing import cast
from urllib.parse import unquote, urlsplit

import h11

from lab.apps.events import EventLog
from lab.apps.ports import EchoConfig
from lab.apps.report import endpoint, flow, headers, line, tls
from lab.apps.streams import reset

_STATUS = re.compile(r"/status/([1-9][0-9][0-9])/?")
_DELAY = re.compile(r"/delay/([0-9]+(?:\.[0-9]+)?)/?")
MAX_DELAY = 60.0  # seconds
MAX_HEAD = 1 << 17  # bytes; Envoy passes 60 KiB of headers by default


class HTTPEcho:
    """A factory of protocols, one per connection, for a port that speaks HTTP/1.1."""

    def __init__(self, config: EchoConfig, log: EventLog, protocol: str) -> None:
        self.config, self.log, self.protocol = config, log, protocol

    def __call__(self) -> asyncio.Protocol:
        return _Connection(self)


class _Connection(asyncio.Protocol):
    """One connection. Requests are answered one after the other, pipelined ones too."""

    def __init__(self, echo: HTTPEcho) -> None:
        self._echo = echo
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
        self._transport: asyncio.Transport | None = None
        self._request: h11.Request | None = None
        self._received = 0
        self._waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._http.receive_data(data)
        if self._waiting is None:
            self._go_on()

    def eof_received(self) -> bool:
        self.data_received(b"")
        # A client may end its side and still wait for the answer; over TLS asyncio knows no half-closed connection.
        encrypted = self._transport is not None and self._transport.get_extra_info("ssl_object") is not None
        return self._waiting is not None and not encrypted

    def connection_lost(self, _exc: Exception | None) -> None:
        self._transport = None
        if self._waiting is not None:
            self._waiting.cancel()

    def _go_on(self) -> None:
        """Takes what has come, up to the end of it or to a request whose answer has to wait."""
        try:
            while self._transport is not None and self._waiting is None and self._take():
                pass
        except h11.RemoteProtocolError as error:
            if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                self._send(error.error_status_hint, f"{error}\n".encode(), "text/plain; charset=utf-8")
            self._end()

    def _take(self) -> bool:
        event = self._http.next_event()
        if isinstance(event, h11.Request):
            self._request, self._received = event, 0
            if self._http.they_are_waiting_for_100_continue:
                self._write(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue"))
        elif isinstance(event, h11.Data):
            self._received += len(event.data)
        elif isinstance(event, h11.EndOfMessage):
            self._answer()
        elif isinstance(event, h11.ConnectionClosed):
            self._end()
            return False
        else:  # more must come first
            return False
        return True

    def _answer(self) -> None:
        transport, request = self._transport, self._request
        if transport is None or request is None:
            return
        pairs = [(_text(name), _text(value)) for name, value in request.headers.raw_items()]
        given = headers(pairs)
        seen = {
            **flow(
                self._echo.config,
                endpoint(transport.get_extra_info("peername")),
                endpoint(transport.get_extra_info("sockname")),
                tls(transport.get_extra_info("ssl_object")),
            ),
            "method": _text(request.method),
            "path": _text(request.target),
            "headers": given,
            "host": given.get("host"),
            "received": self._received,
        }
        self._echo.log.write("request", {"protocol": self._echo.protocol, **seen})
        path = unquote(urlsplit(_text(request.target)).path)
        if path == "/close":
            transport.close()
        elif path == "/reset":
            reset(transport)
        elif match := _DELAY.fullmatch(path):
            delay = min(float(match[1]), MAX_DELAY)
            self._waiting = asyncio.get_running_loop().call_later(delay, self._answer_late, line(seen))
        else:
            match = _STATUS.fullmatch(path)
            self._reply(int(match[1]) if match else 200, line(seen))

    def _answer_late(self, body: bytes) -> None:
        self._waiting = None
        self._reply(200, body)
        self._go_on()

    def _reply(self, status: int, body: bytes) -> None:
        if 100 < status < 200:
            if status != HTTPStatus.SWITCHING_PROTOCOLS:  # there is nothing to switch to
                self._write(h11.InformationalResponse(status_code=status, headers=[], reason=_reason(status)))
            status = 200
        self._send(status, body, "application/json")
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
        else:
            self._end()

    def _send(self, status: int, body: bytes, kind: str) -> None:
        fields = [("Date", formatdate(usegmt=True))]
        empty = status in (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)  # RFC 9110, 15
        if not empty:
            fields += [("Content-Type", kind), ("Content-Length", str(len(body)))]
        self._write(h11.Response(status_code=status, headers=fields, reason=_reason(status)))
        if not empty and not (self._request is not None and self._request.method == b"HEAD"):
            self._write(h11.Data(data=body))
        self._write(h11.EndOfMessage())

    def _write(self, event: h11.InformationalResponse | h11.Response | h11.Data | h11.EndOfMessage) -> None:
        data = self._http.send(event)
        if data and self._transport is not None:
            self._transport.write(data)

    def _end(self) -> None:
        if self._transport is not None:
            self._transport.close()


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _reason(status: int) -> bytes:
    try:
        return HTTPStatus(status).phrase.encode()
    except ValueError:
        return b""

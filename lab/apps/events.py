"""The echo app's event log: one JSON object a line, visible to readers at once.

Every line has ``time`` (seconds since the epoch), ``event``, ``protocol``, ``app``, ``pod``, ``peer`` and ``local``. Events:

- ``connection``: a TCP connection was accepted (written before its first byte);
- ``tls-error``: its TLS handshake failed (``error``);
- ``bytes``: the first bytes of a TCP or TLS echo (``received``);
- ``request``: an HTTP or gRPC request (``method``, ``path``, ``headers``, ``tls``);
- ``datagram``: a UDP datagram (``received``).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping

from lab.apps.report import line
from lab.errors import InputError


class EventLog:
    """Appends events to a file (``-`` is stdout, an empty path is nowhere)."""

    def __init__(self, path: str) -> None:
        """Opens the file.

        Raises:
            InputError: it cannot be opened for writing.
        """
        self._close = path not in ("", "-")
        self._fd = -1
        if path == "-":
            self._fd = sys.stdout.fileno()
        elif path:
            try:
                self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            except OSError as e:
                raise InputError("cannot write the event log", path, e.strerror or str(e)) from e

    def write(self, event: str, data: Mapping[str, object]) -> None:
        """Writes one event; one write call, so that lines never mix."""
        if self._fd >= 0:
            os.write(self._fd, line({"time": round(time.time(), 6), "event": event, **data}))

    def close(self) -> None:
        if self._close:
            os.close(self._fd)
        self._fd, self._close = -1, False

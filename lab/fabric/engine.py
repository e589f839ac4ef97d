"""Takes a lab's containers away, over the engine's own socket. Light on purpose: `lab down` works when nothing else does.

Source: Docker Engine API 1.41, /containers/json and /containers/{id}.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lab.errors import LabError

LABEL = "sidecarlab.dev/id"
"""The label that every container of a lab carries; its value is the lab's id."""

DEFAULT = "unix:///var/run/docker.sock"
_TIMEOUT = 30.0
_AT_ONCE = 8


def address() -> str:
    """Of the engine that this environment names (DOCKER_HOST), as the docker command finds it."""
    return os.environ.get("DOCKER_HOST") or DEFAULT


def remove(engine: str, lab_id: str) -> list[str]:
    """Ends and removes all containers of a lab; their names. Twice is fine.

    Args:
        engine: ``unix:///PATH``.

    Raises:
        LabError: the engine does not answer, or cannot.
    """
    filters = urllib.parse.quote(json.dumps({"label": [f"{LABEL}={lab_id}"]}))
    found = _ask(engine, "GET", f"/containers/json?all=1&filters={filters}")
    if not found:
        return []
    # Each takes a third of a second, most of which the engine waits.
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(lambda one: _ask(engine, "DELETE", f"/containers/{one['Id']}?force=1&v=1"), found))
    return [f"container {(one.get('Names') or [one['Id'][:12]])[0].lstrip('/')}" for one in found]


def _ask(engine: str, method: str, path: str) -> Any:
    try:
        connection = _UnixConnection(engine)
        try:
            connection.request(method, path)
            response = connection.getresponse()
            body = response.read()
        finally:
            connection.close()
    except (OSError, http.client.HTTPException) as e:
        raise LabError("the container engine does not answer", engine, str(e), "Is it running?") from None
    # 404: somebody else removed it; 409: its removal is under way.
    if response.status >= 400 and response.status not in (404, 409):
        why = body.decode(errors="replace").strip()[:200]
        raise LabError("the container engine refuses", engine, why)
    return json.loads(body) if body and response.status < 400 else []


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, engine: str) -> None:
        super().__init__("localhost", timeout=_TIMEOUT)
        self._path = engine.removeprefix("unix://")

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)

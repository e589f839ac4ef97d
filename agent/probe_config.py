"""Which probes of the application the kubelet sends to the agent (``ISTIO_KUBE_APP_PROBERS``).

Source: istio/istio: pilot/cmd/pilot-agent/status/server.go (validateAppKubeProber).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from agent.errors import AgentError

_PATH = re.compile(r"/(app-health|app-lifecycle)/[^/]+/(livez|readyz|startupz|prestopz|poststartz)")


@dataclass(frozen=True)
class Prober:
    """One probe; `kind` is ``httpGet``, ``tcpSocket`` or ``grpc``; `timeout` in seconds, 0 as Kubernetes wrote it."""

    kind: str
    port: int
    path: str = "/"
    https: bool = False
    service: str = ""
    timeout: int = 0


def parse_probers(text: str) -> dict[str, Prober]:
    """The map of ``ISTIO_KUBE_APP_PROBERS``.

    Raises:
        AgentError: not JSON, a path that is no probe's, not exactly one kind, or a port that is no integer.
    """
    if not text:
        return {}
    try:
        raw = json.loads(text)
        if not isinstance(raw, dict):
            raise ValueError("not an object")
    except ValueError as error:
        raise AgentError("failed to decode app prober", error) from None
    return {path: _prober(path, value) for path, value in raw.items()}


def _prober(path: str, raw: Any) -> Prober:
    if _PATH.fullmatch(path) is None:
        raise AgentError(f"invalid path {path}", f"must be in form of regex pattern ^{_PATH.pattern}$")
    kinds = [kind for kind in ("httpGet", "tcpSocket", "grpc") if isinstance(raw, dict) and raw.get(kind) is not None]
    if len(kinds) != 1:
        raise AgentError(f"invalid prober type for {path}", "must be one of type httpGet, tcpSocket or gRPC")
    action = raw[kinds[0]]
    port = action.get("port") if isinstance(action, dict) else None
    if isinstance(port, bool) or not isinstance(port, int):
        raise AgentError(f"invalid prober config for {path}", "the port must be int type")
    timeout = raw.get("timeoutSeconds") or 0
    if isinstance(timeout, bool) or not isinstance(timeout, int):
        raise AgentError(f"invalid prober config for {path}", "timeoutSeconds must be int type")
    target = str(action.get("path") or "/")
    return Prober(
        kind=kinds[0],
        port=port,
        path=target if target.startswith("/") else f"/{target}",
        https=str(action.get("scheme", "")) == "HTTPS",
        service=str(action.get("service") or ""),
        timeout=timeout,
    )

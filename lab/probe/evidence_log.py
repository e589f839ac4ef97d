"""Envoy's evidence lines (see lab.discovery.access_log), with empty values made None."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class EnvoyLine:
    """One line: a request (``http``), a connection (``tcp``), or a connection that no filter chain took (``listener``).

    Addresses are ``IP:PORT`` as Envoy writes them. ``flags`` is ``-`` where Envoy set none.
    """

    kind: str
    listener: str | None = None
    filter_chain: str | None = None
    route_config: str | None = None
    virtual_host: str | None = None
    route_name: str | None = None
    cluster: str | None = None
    endpoint: str | None = None
    upstream_local: str | None = None
    downstream_local: str | None = None
    downstream_remote: str | None = None
    downstream_direct_local: str | None = None
    flags: str = "-"
    details: str | None = None
    termination: str | None = None
    upstream_failure: str | None = None
    code: int = 0
    sni: str | None = None
    tls_version: str | None = None
    peer_san: str | None = None
    upstream_tls_version: str | None = None
    upstream_peer_san: str | None = None
    request_id: str | None = None


_TEXTS = [f for f in EnvoyLine.__dataclass_fields__ if f not in ("kind", "flags", "code")]


def parse(line: Mapping[str, Any]) -> EnvoyLine:
    """One line of the log. Envoy writes null or ``-`` for what is not there, depending on the operator."""
    values = {name: _text(line.get(name)) for name in _TEXTS}
    code = line.get("code")
    return EnvoyLine(
        kind=str(line.get("kind", "")),
        flags=_text(line.get("flags")) or "-",
        code=int(code) if isinstance(code, int | float) else 0,
        **values,
    )


def address(text: str | None) -> tuple[str, int] | None:
    """``IP:PORT`` or ``[IP]:PORT`` as (address, port); None for what is no such thing (a pipe, an internal listener)."""
    host, _, port = (text or "").rpartition(":")
    if not host or not port.isdigit():
        return None
    return host.strip("[]"), int(port)


def written(host: str, port: int) -> str:
    """An address as Envoy writes it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _text(value: Any) -> str | None:
    return None if value in (None, "", "-") else str(value)

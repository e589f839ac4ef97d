"""Which endpoints of the application are scraped (``ISTIO_PROMETHEUS_ANNOTATIONS``).

Source: istio/istio: pilot/cmd/pilot-agent/status/server.go (NewServer).
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from agent.environment import parse_int
from agent.errors import AgentError

RESERVED_PORTS = {
    15000: "Envoy admin",
    15001: "outbound traffic capture",
    15004: "pilot debug",
    15006: "inbound traffic capture",
    15008: "HBONE tunnel",
    15020: "pilot-agent status / merged Prometheus",
    15021: "Envoy health",
    15053: "DNS proxy",
    15090: "Envoy Prometheus (already merged)",
}


@dataclass(frozen=True)
class ScrapeTarget:
    """One endpoint of the application."""

    port: int
    path: str


def parse_scrape_config(text: str | None, status_port: int) -> list[ScrapeTarget]:
    """The targets of ``ISTIO_PROMETHEUS_ANNOTATIONS``; none if it is unset or says ``scrape: "false"``.

    Raises:
        AgentError: not JSON, or a port that cannot be scraped.
    """
    if text is None:
        return []
    problem = "invalid prometheus scrape configuration"
    try:
        config = json.loads(text)
        if not isinstance(config, dict):
            raise ValueError("not an object")
        raw = config.get("targets") or [{"port": config.get("port") or "80", "path": config.get("path") or "/metrics"}]
        pairs = [(str(target.get("port", "")), str(target.get("path") or "/metrics")) for target in raw]
    except (ValueError, AttributeError, TypeError) as error:
        raise AgentError("failed to unmarshal ISTIO_PROMETHEUS_ANNOTATIONS", error) from None
    if config.get("scrape") == "false":
        return []
    targets = []
    for port_text, path in pairs:
        try:
            port = parse_int(port_text)
        except ValueError:
            port = 0
        if not 1 <= port <= 65535:
            raise AgentError(problem, f'invalid target port "{port_text}"')
        if port == status_port:
            raise AgentError(problem, f"port {port_text} is the agent's own, which would be a recursive loop")
        if port in RESERVED_PORTS:
            raise AgentError(problem, f"target port {port_text} is reserved for Istio ({RESERVED_PORTS[port]})")
        targets.append(ScrapeTarget(port, path))
    return targets

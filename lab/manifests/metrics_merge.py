"""Metrics of the app: Istio's injector takes the pod's Prometheus annotations for the agent, which then serves all metrics.

Sources: istio/istio: pkg/kube/inject/webhook.go (applyPrometheusMerge), pilot/cmd/pilot-agent/status/server.go
(ParseScrapeTargets, IstioReservedPortReason).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from lab.manifests.go_bool import parse_bool
from lab.manifests.injection import PROXY_PORTS
from lab.manifests.model import MeshConfig, Pod

MERGE = "prometheus.istio.io/merge-metrics"
_NAMES = {
    "prometheus_io_scrape": "scrape",
    "prometheus_io_path": "path",
    "prometheus_io_port": "port",
    "prometheus_istio_io_scrape_targets": "targets",
}


class BadAnnotation(ValueError):
    """A value that the injector refuses; ``name`` is the annotation."""

    def __init__(self, name: str, value: str, why: str) -> None:
        super().__init__(why)
        self.name, self.value = name, value


@dataclass
class _Written:
    """The annotations by what they say, each with its name; Prometheus takes any separator for ``_``."""

    names: dict[str, str] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)


def _read(annotations: Mapping[str, str]) -> _Written:
    found = _Written()
    for name, value in annotations.items():
        meaning = _NAMES.get(re.sub(r"[^a-zA-Z0-9_]", "_", name))
        if meaning is not None:
            found.names[meaning], found.values[meaning] = name, value
    return found


def named(annotations: Mapping[str, str]) -> Collection[str]:
    """The annotations that say what to scrape."""
    return _read(annotations).names.values()


def merged(pod: Pod, config: MeshConfig) -> Pod:
    """The pod as the injector leaves it: what to scrape is in ``scrape``, and its annotations name the agent.

    Raises:
        BadAnnotation: a port that the agent cannot scrape.
    """
    written = _read(pod.meta.annotations)
    values = written.values
    switch = pod.meta.annotations.get(MERGE, "")
    wanted = parse_bool(switch) if switch else config.enable_prometheus_merge
    if wanted is None:
        raise BadAnnotation(MERGE, switch, 'it must be "true" or "false"')
    status_port = config.status_port
    if (
        not pod.injected
        or not wanted
        or parse_bool(values.get("scrape", "")) is False
        or values.get("port") == str(status_port)
    ):
        return pod
    targets = _targets(values.get("targets", ""))
    for name, port in [("targets", port) for port, _ in targets] or [("port", values.get("port", ""))]:
        if port or name == "targets":
            _check(written.names[name], values[name], port, status_port)
    told: dict[str, object] = {key: values.get(key, "") for key in ("scrape", "path", "port")}
    if targets:
        told["port"], told["path"] = targets[0]  # for agents that know of one target only
        told["targets"] = [{"port": port, "path": path} for port, path in targets]
    kept = {name: value for name, value in pod.meta.annotations.items() if name not in written.names.values()}
    now = {"port": str(status_port), "path": "/stats/prometheus", "scrape": "true"}
    annotations = {**kept, **{f"prometheus.io/{key}": value for key, value in now.items()}}
    return replace(
        pod,
        meta=replace(pod.meta, annotations=annotations),
        scrape=json.dumps(told, separators=(",", ":")) if any(told.values()) else "",
    )


def _targets(text: str) -> list[tuple[str, str]]:
    """``port:path,port:path``; a path left out is /metrics. A list with an empty port counts as not written."""
    found = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        port, _, path = (part.strip() for part in entry.partition(":"))
        if not port:
            return []
        found.append((port, path or "/metrics"))
    return found


def _check(name: str, value: str, port: str, status_port: int) -> None:
    number = int(port) if re.fullmatch(r"\+?[0-9]{1,9}", port) else 0
    if not 1 <= number <= 65535:
        raise BadAnnotation(name, value, f'"{port}" is no port')
    if number == status_port:
        raise BadAnnotation(name, value, f"port {port} is the agent's own, it would scrape itself")
    if number in PROXY_PORTS:
        raise BadAnnotation(name, value, f"port {port} is one of the proxy's own")

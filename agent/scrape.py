"""Merged metrics: the agent's own, Envoy's and the application's in one exposition.

Source: istio/istio: pilot/cmd/pilot-agent/status/server.go (handleStats).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from agent.http import HTTPError, Request, Response, Target, fetch
from agent.metrics import Metrics
from agent.scrape_config import ScrapeTarget

log = logging.getLogger("default")

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS_TYPE = "application/openmetrics-text"
_OPEN_METRICS = {
    "1.0.0": f"{OPEN_METRICS_TYPE}; version=1.0.0; charset=utf-8",
    "0.0.1": f"{OPEN_METRICS_TYPE}; version=0.0.1; charset=utf-8",
    "": f"{OPEN_METRICS_TYPE}; version=0.0.1; charset=utf-8",
}
BODY_LIMIT = 10 * 1024 * 1024
ENVOY_TYPES = ("text/*", "text/plain")
APP_TYPES = (*ENVOY_TYPES, OPEN_METRICS_TYPE)
_DEFAULT_ACCEPT = "text/plain;version=0.0.4"


def _media_type(text: str) -> tuple[str, dict[str, str]]:
    # Imported here: a third of a megabyte that only a scrape needs.
    from email.message import Message

    message = Message()
    message["Content-Type"] = text
    parameters = message.get_params() or []
    media_type = parameters[0][0].strip().lower() if parameters else ""
    if not media_type or (media_type != "*" and media_type.count("/") != 1) or " " in media_type:
        raise ValueError(f"bad encoding {text!r}")
    return media_type, {key.lower(): value for key, value in parameters[1:] if key.lower() != "q"}


def allowed_accept(header: str, allowed: Sequence[str]) -> str:
    """The Accept header to pass on: only `allowed` types, weighted anew in their order."""
    try:
        wanted = [_media_type(item) for item in header.split(",")]
    except ValueError:
        return _DEFAULT_ACCEPT
    chosen: list[tuple[str, dict[str, str]]] = []
    used: set[str] = set()
    for media_type, parameters in wanted:
        replaced = True
        if media_type in ("*/*", "*"):
            media_type, parameters = "text/plain", {"version": "0.0.4"}
        elif media_type == "application/*":
            media_type, parameters = OPEN_METRICS_TYPE, {"version": "0.0.1"}
        else:
            replaced = False
        if media_type not in allowed:
            continue
        key = ";".join([media_type, *sorted(f"{name}={value}" for name, value in parameters.items())])
        if replaced and key in used:
            continue
        used.add(key)
        chosen.append((media_type, parameters))
    if not chosen:
        return _DEFAULT_ACCEPT
    parts = []
    for index, (media_type, parameters) in enumerate(chosen):
        weighted = {**parameters, "q": f"0.{len(chosen) - index}"}
        parts.append("; ".join([media_type, *(f"{name}={weighted[name]}" for name in sorted(weighted))]))
    return ",".join(parts)


def exposition_format(content_type: str) -> str:
    """The Content-Type of a merged response whose application answered with `content_type`."""
    try:
        media_type, parameters = _media_type(content_type)
    except ValueError:
        return TEXT
    if media_type != OPEN_METRICS_TYPE:
        return TEXT
    return _OPEN_METRICS.get(parameters.get("version", ""), TEXT)


def merge_bodies(bodies: Sequence[tuple[str, bytes]]) -> tuple[str, bytes]:
    """Content-Type and body of several targets' answers; only one ``# EOF`` may end an OpenMetrics exposition."""
    formats = {exposition_format(content_type) for content_type, _ in bodies}
    merged_format = formats.pop() if len(formats) == 1 else TEXT
    parts = []
    for _, body in bodies:
        trimmed = body.rstrip(b" \t\r\n")
        part = trimmed.removesuffix(b"# EOF") if trimmed.endswith(b"# EOF") else body
        parts.append(part if not part or part.endswith(b"\n") else part + b"\n")
    if merged_format != TEXT:
        parts.append(b"# EOF\n")
    return merged_format, b"".join(parts)


class Scraper:
    """Serves ``/stats/prometheus``.

    Args:
        envoy_port: of Envoy's own stats, None to leave them out.
    """

    def __init__(self, metrics: Metrics, envoy_port: int | None, targets: Sequence[ScrapeTarget]) -> None:
        self._metrics, self._envoy_port, self._targets = metrics, envoy_port, targets

    async def serve(self, request: Request) -> Response:
        """The merged exposition; what cannot be scraped is left out and counted."""
        self._metrics.scrapes_total.value += 1
        accept = request.header("accept")
        jobs = []
        if self._envoy_port is not None:
            path = "/stats/prometheus" + (f"?{request.query}" if request.query else "")
            envoy_target = ScrapeTarget(self._envoy_port, path)
            jobs.append(self._scrape("envoy", envoy_target, request, allowed_accept(accept, ENVOY_TYPES), None))
        app_accept = allowed_accept(accept, APP_TYPES)
        limit = BODY_LIMIT if len(self._targets) > 1 else None
        jobs += [self._scrape("application", target, request, app_accept, limit) for target in self._targets]
        results = await asyncio.gather(*jobs)
        envoy = results.pop(0) if self._envoy_port is not None else None
        apps = [result for result in results if result is not None]
        content_type, app_body = TEXT, b""
        if len(self._targets) == 1 and apps:
            content_type, app_body = exposition_format(apps[0][0]), apps[0][1]
        elif apps:
            content_type, app_body = merge_bodies(apps)
        body = self._metrics.render().encode() + (envoy[1] if envoy else b"") + app_body
        return Response(200, body, (("Content-Type", content_type),))

    async def _scrape(
        self, kind: str, target: ScrapeTarget, request: Request, accept: str, limit: int | None
    ) -> tuple[str, bytes] | None:
        passed = ("User-Agent", "X-Prometheus-Scrape-Timeout-Seconds")
        headers = [(name, request.header(name.lower())) for name in passed if request.header(name.lower())]
        headers.append(("Accept", accept))
        timeout = None
        try:
            timeout = float(request.header("x-prometheus-scrape-timeout-seconds")) or None
        except ValueError:
            pass
        try:
            response = await fetch(
                Target("localhost", target.port), "GET", target.path, headers, timeout=timeout, limit=limit
            )
            if response.status != 200:
                raise HTTPError(f"status code: {response.status}")
        except HTTPError as error:
            log.error("failed scraping %s metrics from port %d %r: %s", kind, target.port, target.path, error)
            self._metrics.scrape_failures_total.add(kind)
            return None
        return response.header("content-type"), response.body

"""Merged metrics: the agent's own, Envoy's and the application's in one exposition.

Source: istio/istio: pilot/cmd/pilot-agent/status/server.go (handleStats).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Sequence

from agent.http import Response
from agent.http_client import HTTPError, Incoming, Target, exchange, fetch
from agent.http_server import Request
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
        accept = allowed_accept(request.header("accept"), APP_TYPES)
        if len(self._targets) != 1:
            envoy, *apps = await asyncio.gather(
                self._envoy(request), *(self._whole("application", t, request, accept) for t in self._targets)
            )
            answers = [answer for answer in apps if answer is not None]
            content_type, app_body = merge_bodies(answers) if answers else (TEXT, b"")
            return Response(200, self._own(envoy) + app_body, (("Content-Type", content_type),))
        # A single target is passed on as it comes: its size is the application's affair.
        envoy_job = asyncio.create_task(self._envoy(request))
        stack = contextlib.AsyncExitStack()
        try:
            incoming = await self._open(self._targets[0], request, accept, stack)
            body = self._own(await envoy_job)
        except BaseException:
            envoy_job.cancel()
            await stack.aclose()
            raise
        if incoming is None:
            return Response(200, body, (("Content-Type", TEXT),))
        headers = (("Content-Type", exposition_format(incoming.header("content-type"))),)
        return Response(200, body, headers, self._passed_on(incoming, self._targets[0]), stack.aclose)

    def _own(self, envoy: tuple[str, bytes] | None) -> bytes:
        return self._metrics.render().encode() + (envoy[1] if envoy else b"")

    async def _envoy(self, request: Request) -> tuple[str, bytes] | None:
        if self._envoy_port is None:
            return None
        target = ScrapeTarget(self._envoy_port, "/stats/prometheus" + (f"?{request.query}" if request.query else ""))
        accept = allowed_accept(request.header("accept"), ENVOY_TYPES)
        return await self._whole("envoy", target, request, accept, None)

    async def _open(
        self, target: ScrapeTarget, request: Request, accept: str, stack: contextlib.AsyncExitStack
    ) -> Incoming | None:
        try:
            incoming = await stack.enter_async_context(
                exchange(
                    Target("localhost", target.port),
                    "GET",
                    target.path,
                    _headers(request, accept),
                    timeout=_timeout(request),
                )
            )
            if incoming.status != 200:
                raise HTTPError(f"status code: {incoming.status}")
        except HTTPError as error:
            self._failed("application", target, error)
            await stack.aclose()
            return None
        return incoming

    async def _passed_on(self, incoming: Incoming, target: ScrapeTarget) -> AsyncIterator[bytes]:
        try:
            async for piece in incoming.pieces:
                yield piece
        except HTTPError as error:
            self._failed("application", target, error)

    async def _whole(
        self, kind: str, target: ScrapeTarget, request: Request, accept: str, limit: int | None = BODY_LIMIT
    ) -> tuple[str, bytes] | None:
        try:
            response = await fetch(
                Target("localhost", target.port),
                "GET",
                target.path,
                _headers(request, accept),
                timeout=_timeout(request),
                limit=limit,
            )
            if response.status != 200:
                raise HTTPError(f"status code: {response.status}")
        except HTTPError as error:
            self._failed(kind, target, error)
            return None
        return response.header("content-type"), response.body

    def _failed(self, kind: str, target: ScrapeTarget, error: HTTPError) -> None:
        log.error("failed scraping %s metrics from port %d %r: %s", kind, target.port, target.path, error)
        self._metrics.scrape_failures_total.add(kind)


def _headers(request: Request, accept: str) -> list[tuple[str, str]]:
    passed = ("User-Agent", "X-Prometheus-Scrape-Timeout-Seconds")
    return [
        *((name, request.header(name.lower())) for name in passed if request.header(name.lower())),
        ("Accept", accept),
    ]


def _timeout(request: Request) -> float | None:
    """Seconds that the scraper waits; None if it does not say so in a usable way."""
    try:
        seconds = float(request.header("x-prometheus-scrape-timeout-seconds"))
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds else None

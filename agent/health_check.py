"""The workload's health check outside Kubernetes (ProxyConfig ``readinessProbe``), reported to discovery.

Source: istio/istio: pkg/istio-agent/health/health_check.go, pkg/istio-agent/health/health_probers.go.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from agent import grpc_health, redirect
from agent.http_client import HTTPError, Target, connect, fetch
from agent.protos import proxy_config_pb2 as pb
from agent.readiness import EnvoyReadiness, NotReady
from agent.xds_proxy import HealthEvent

if TYPE_CHECKING:
    import ssl

log = logging.getLogger("healthcheck")

USER_AGENT = "istio-probe/1.0"


class ProbeFailed(Exception):
    """Why the workload is unhealthy."""


class Thresholds:
    """Turns single results into events: only a change counts, once as many results in a row say so."""

    def __init__(self, success: int, failure: int) -> None:
        self._limits = {True: max(1, success), False: max(1, failure)}
        self._counts = {True: 0, False: 0}
        self._state: bool | None = None

    def add(self, healthy: bool) -> bool:
        """Counts a result; True if it is the one that changes the state."""
        self._counts[healthy] += 1
        self._counts[not healthy] = 0
        if self._counts[healthy] != self._limits[healthy] or self._state is healthy:
            return False
        self._counts[healthy] = 0
        self._state = healthy
        return True


class WorkloadHealthCheck:
    """Probes the application for as long as it runs.

    Args:
        probe: of ProxyConfig.
        envoy: must be ready before the application is asked; None without Envoy.
        default_host: the first node address.
        ipv6: bind ``::6`` instead of 127.0.0.6.
        report: gets each change.
    """

    def __init__(
        self,
        probe: pb.ReadinessProbe,
        envoy: EnvoyReadiness | None,
        default_host: str,
        *,
        ipv6: bool,
        report: Callable[[HealthEvent], None],
    ) -> None:
        self._probe, self._envoy, self._host, self._report = probe, envoy, default_host, report
        self._source = "::6" if ipv6 else "127.0.0.6"
        self._timeout = float(probe.timeout_seconds or 1)
        self._thresholds = Thresholds(probe.success_threshold or 1, probe.failure_threshold or 1)

    async def run(self) -> None:
        """Waits the initial delay, then probes at once and each period."""
        await asyncio.sleep(self._probe.initial_delay_seconds)
        loop = asyncio.get_running_loop()
        period = float(self._probe.period_seconds or 10)
        due = loop.time()
        while True:
            await self._once()
            due = max(due + period, loop.time())
            await asyncio.sleep(due - loop.time())

    async def _once(self) -> None:
        reason = ""
        try:
            if self._envoy is not None:
                await self._envoy.check()
            async with asyncio.timeout(self._timeout):
                await self._application()
        except (ProbeFailed, NotReady, grpc_health.Unhealthy, HTTPError, OSError) as error:
            reason = str(error) or type(error).__name__
        if self._thresholds.add(not reason):
            log.info("threshold hit, marking as %s", f"unhealthy: {reason}" if reason else "healthy")
            self._report(HealthEvent(not reason, reason))

    async def _application(self) -> None:
        kind = self._probe.WhichOneof("health_check_method")
        if kind == "http_get":
            await self._http(self._probe.http_get)
        elif kind == "tcp_socket":
            tcp = self._probe.tcp_socket
            (await connect(Target(tcp.host or self._host, tcp.port))).close()
        elif kind == "grpc":
            host = f"[{self._host}]" if ":" in self._host else self._host
            await grpc_health.check(
                f"{host}:{self._probe.grpc.port}", self._probe.grpc.service, self._timeout, USER_AGENT
            )
        elif kind == "exec":
            await self._exec(list(self._probe.exec.command))
        else:
            raise ProbeFailed("no health check method")

    async def _http(self, http: pb.ReadinessProbe.HTTPHealthCheckConfig) -> None:
        headers = [(item.name, item.value) for item in http.http_headers]
        if not any(name.lower() == "user-agent" for name, _ in headers):
            headers.append(("User-Agent", USER_AGENT))
        https = http.scheme.lower() == "https"
        target = Target(http.host or self._host, http.port, self._source, self._tls() if https else None)
        path = http.path if http.path.startswith("/") else f"/{http.path}"
        for _ in range(redirect.MAX_REDIRECTS):
            response = await fetch(target, "GET", path, headers, timeout=None, limit=10240, cut=True)
            url = redirect.location(response, target, path)
            if url is None:
                break
            if redirect.is_absolute(response):
                headers = [(name, value) for name, value in headers if name.lower() != "host"]
            target, path = redirect.followed(url, self._source, self._tls)
        else:
            raise ProbeFailed("stopped after 10 redirects")
        if not 200 <= response.status < 400:
            raise ProbeFailed(f"status code was not from [200,400), bad code {response.status}")

    @staticmethod
    def _tls() -> ssl.SSLContext:
        import ssl

        # Istio compares the lower-cased scheme with "HTTPS", so it does verify here.
        return ssl.create_default_context()

    async def _exec(self, command: list[str]) -> None:
        if not command:
            raise ProbeFailed("no command")
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL
        )
        try:
            status = await process.wait()
        except asyncio.CancelledError:
            process.kill()
            await process.wait()
            raise
        if status:
            raise ProbeFailed(f"exit status {status}")

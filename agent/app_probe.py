"""Application probes that the kubelet sends to the agent (``/app-health/...``, ``/app-lifecycle/...``).

Each goes to the pod's own address from 127.0.0.6 (::6), which the traffic rules let through.

Source: istio/istio: pilot/cmd/pilot-agent/status/server.go (handleAppProbe), pilot/cmd/pilot-agent/status/dialer_others.go.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Mapping

from agent import grpc_health, redirect
from agent.http import Headers, Response
from agent.http_client import HTTPError, Target, connect
from agent.http_server import Request, text_response
from agent.probe_client import ProbeClient
from agent.probe_config import Prober

log = logging.getLogger("probes")

BODY_LIMIT = 10 * 1024


class AppProber:
    """Runs probes.

    Args:
        probers: by path.
        destination: the pod's address, or ``localhost``.
        status_port: the agent's own, replaced in forwarded Host headers.
        ipv6: bind ``::6`` instead of 127.0.0.6.
        http2: HTTP/2 for HTTPS where the application has it.
        keep: leave connections open between probes.
    """

    def __init__(
        self,
        probers: Mapping[str, Prober],
        destination: str,
        status_port: int,
        *,
        ipv6: bool,
        http2: bool = True,
        keep: bool = False,
    ) -> None:
        self._probers, self._destination, self._status_port = probers, destination, status_port
        self._source = "::6" if ipv6 else "127.0.0.6"
        self._clients = {
            path: ProbeClient(http2=http2, keep=keep) for path, prober in probers.items() if prober.kind == "httpGet"
        }

    def close(self) -> None:
        """Closes the connections that were kept."""
        for client in self._clients.values():
            client.close()

    async def serve(self, request: Request) -> Response:
        """The answer to the kubelet."""
        prober = self._probers.get(request.path)
        if prober is None:
            log.error("Prober does not exists url %s", request.path)
            return text_response(400, f"app prober config does not exists for {request.path}")
        if prober.kind == "httpGet":
            return await self._http(prober, request)
        probe = self._tcp if prober.kind == "tcpSocket" else self._grpc
        return Response(200 if await probe(prober, request.header("user-agent")) else 500)

    def _target(self, prober: Prober) -> Target:
        return Target(self._destination, prober.port, self._source)

    async def _http(self, prober: Prober, request: Request) -> Response:
        client, path = self._clients[request.path], prober.path
        target = dataclasses.replace(self._target(prober), tls=client.tls if prober.https else None)
        left_out = ("host", "content-length", "transfer-encoding")
        headers = [(name, value) for name, value in request.headers if name.lower() not in left_out]
        headers.append(("Host", self._host(request.header("host") or target.authority, prober.port)))
        try:
            async with asyncio.timeout(prober.timeout or None):
                for _ in range(redirect.MAX_REDIRECTS):
                    answer = await client.get(target, path, headers, BODY_LIMIT)
                    if not 300 <= answer.status < 400:
                        return Response(answer.status, answer.body, _content_type(answer))
                    url = redirect.location(answer, target, path)
                    if url is None or url.hostname != target.host.lower():
                        # A redirect needs a Location, so it is a plain success here; so is one to elsewhere.
                        return Response(200)
                    if redirect.is_absolute(answer):
                        headers[-1] = ("Host", url.netloc)
                    target, path = redirect.followed(url, target.source, lambda: client.tls)
            raise HTTPError("stopped after 10 redirects")
        except (HTTPError, TimeoutError) as error:
            log.error(
                "Request to probe app failed: %s, original URL path = %s, app URL path = %s",
                str(error) or "timeout",
                request.path,
                prober.path,
            )
            return Response(500)

    def _host(self, host: str, port: int) -> str:
        name, separator, own = host.rpartition(":")
        return f"{name}:{port}" if separator and own == str(self._status_port) else host

    async def _tcp(self, prober: Prober, _agent: str) -> bool:
        try:
            async with asyncio.timeout(prober.timeout or None):
                (await connect(self._target(prober))).close()
        except (OSError, TimeoutError):
            return False
        return True

    async def _grpc(self, prober: Prober, agent: str) -> bool:
        if prober.timeout <= 0:
            log.error("grpc request not finished within timeout: timeoutSeconds is 0")
            return False
        try:
            async with asyncio.timeout(prober.timeout), self._relay(prober) as address:
                await grpc_health.check(address, prober.service, prober.timeout, agent)
        except (grpc_health.Unhealthy, OSError, TimeoutError) as error:
            log.error("grpc probe failed: %s", str(error) or "timeout")
            return False
        return True

    @contextlib.asynccontextmanager
    async def _relay(self, prober: Prober) -> AsyncIterator[str]:
        """A Unix socket that leads to the application: gRPC cannot choose a connection's source address."""
        tasks: list[asyncio.Task[None]] = []

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                far_reader, far_writer = await asyncio.open_connection(sock=await connect(self._target(prober)))
            except OSError:
                writer.close()
                return
            tasks.append(asyncio.create_task(_copy(reader, far_writer)))
            tasks.append(asyncio.create_task(_copy(far_reader, writer)))

        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "probe")
            server = await asyncio.start_unix_server(accept, path)
            try:
                yield f"unix:{path}"
            finally:
                server.close()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


def _content_type(response: Response) -> Headers:
    value = response.header("content-type")
    return (("Content-Type", value),) if value else ()

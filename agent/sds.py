"""The SDS server on the workload socket.

Source: istio/istio: security/pkg/nodeagent/sds/sdsservice.go, security/pkg/nodeagent/sds/server.go, pkg/xds/server.go.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError

from agent.errors import AgentError
from agent.metrics import Metrics
from agent.protos import private_key_method_pb2
from agent.protos import proxy_config_pb2 as pb
from agent.secrets import FILE_ROOT, ROOT, Secret, SecretError, SecretManager
from agent.xds_proxy import StreamEnded, serve_unix

if TYPE_CHECKING:
    from envoy.extensions.transport_sockets.tls.v3 import secret_pb2
    from envoy.service.discovery.v3 import discovery_pb2

log = logging.getLogger("sds")

SERVICE = "envoy.service.secret.v3.SecretDiscoveryService"
SECRET_TYPE = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret"
START_ATTEMPTS = 5
_PROVIDERS = "type.googleapis.com/envoy.extensions.private_key_providers"
_KEY_METHODS = {
    "cryptomb": f"{_PROVIDERS}.cryptomb.v3alpha.CryptoMbPrivateKeyMethodConfig",
    "qat": f"{_PROVIDERS}.qat.v3alpha.QatPrivateKeyMethodConfig",
}


def is_root(name: str) -> bool:
    """True for names of validation contexts."""
    return name == ROOT or name.startswith(FILE_ROOT)


def envoy_secret(name: str, secret: Secret, crl: str, provider: pb.PrivateKeyProvider | None) -> secret_pb2.Secret:
    """The protobuf form of a secret.

    Args:
        crl: path of a revocation list; empty for none.
        provider: a private-key provider of ProxyConfig, None for plain keys.
    """
    from envoy.extensions.transport_sockets.tls.v3 import secret_pb2

    message = secret_pb2.Secret(name=name)
    if is_root(name):
        message.validation_context.trusted_ca.inline_bytes = secret.root
        if crl:
            message.validation_context.crl.filename = crl
        return message
    certificate = message.tls_certificate
    certificate.certificate_chain.inline_bytes = secret.chain
    kind = provider.WhichOneof("provider") if provider is not None else None
    if provider is None or kind is None:
        certificate.private_key.inline_bytes = secret.key
        return message
    chosen = getattr(provider, kind)
    certificate.private_key_provider.provider_name = kind
    certificate.private_key_provider.fallback = chosen.fallback.value
    certificate.private_key_provider.typed_config.CopyFrom(_key_method(kind, chosen, secret.key))
    return message


def _key_method(kind: str, chosen: Any, key: bytes) -> AnyMessage:
    method = private_key_method_pb2.PrivateKeyMethod(poll_delay=chosen.poll_delay)
    method.private_key.inline_bytes = key
    return AnyMessage(type_url=_KEY_METHODS[kind], value=method.SerializeToString())


@dataclass(eq=False)
class _Client:
    """One stream and what it watches; `names` is None before the first request and after unsubscribing."""

    number: int
    names: frozenset[str] | None = None
    nonce: str = ""
    pushes: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)  # gRPC takes one message at a time


class SDSServer:
    """Serves secrets to Envoy and pushes changed ones."""

    def __init__(
        self,
        path: str,
        secrets: SecretManager,
        metrics: Metrics,
        *,
        crl: str = "",
        provider: pb.PrivateKeyProvider | None = None,
    ) -> None:
        self._path, self._secrets, self._metrics, self._crl, self._provider = path, secrets, metrics, crl, provider
        self._clients: set[_Client] = set()
        self._numbers = itertools.count(1)
        self._versions = itertools.count(1)
        self._server: grpc.aio.Server | None = None
        secrets.on_change(self.push, self.is_watched)

    async def start(self, options: Sequence[tuple[str, Any]]) -> None:
        """Listens, with up to five attempts.

        Raises:
            AgentError: the socket cannot be made.
        """
        pause = 1.0
        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                self._server = await serve_unix(self._path, SERVICE, {"StreamSecrets": self._stream}, options)
                log.info("Starting SDS server for workload certificates, listening on %s", self._path)
                return
            except OSError as error:
                log.error("SDS grpc server failed to start: %s", error)
                if attempt == START_ATTEMPTS:
                    raise AgentError("failed to start the SDS server", error) from None
            await asyncio.sleep(pause)
            pause *= 2

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    def push(self, name: str) -> None:
        """Sends `name` anew on every stream that watches it."""
        for client in self._clients:
            if client.names is not None and name in client.names:
                client.pushes.put_nowait(name)

    def is_watched(self) -> bool:
        """True if a stream watches a workload certificate or the root."""
        return any(client.names for client in self._clients)

    async def _stream(self, requests: AsyncIterator[bytes], context: Any) -> None:
        client = _Client(next(self._numbers))
        self._clients.add(client)
        tasks = [
            asyncio.create_task(self._requests(client, requests, context)),
            asyncio.create_task(self._pushes(client, context)),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except StreamEnded as ended:
            await context.abort(ended.code, ended.details)
        finally:
            self._clients.discard(client)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _requests(self, client: _Client, requests: AsyncIterator[bytes], context: Any) -> None:
        from envoy.service.discovery.v3 import discovery_pb2

        first = True
        async for data in requests:
            try:
                request = discovery_pb2.DiscoveryRequest.FromString(data)
            except DecodeError:
                raise StreamEnded(grpc.StatusCode.INVALID_ARGUMENT, "malformed request") from None
            if first and not request.node.id:
                raise StreamEnded(grpc.StatusCode.INVALID_ARGUMENT, "missing node information")
            first = False
            names = wanted(client, request, self._metrics)
            if names:
                await self._send(client, names, context)

    async def _pushes(self, client: _Client, context: Any) -> None:
        while True:
            name = await client.pushes.get()
            if client.names is not None and name in client.names:
                await self._send(client, [name], context)

    def _existing_crl(self) -> str:
        return self._crl if self._crl and os.path.exists(self._crl) else ""

    async def _send(self, client: _Client, names: Iterable[str], context: Any) -> None:
        import uuid

        from envoy.service.discovery.v3 import discovery_pb2

        response = discovery_pb2.DiscoveryResponse(type_url=SECRET_TYPE)
        crl = self._existing_crl()
        for name in names:
            try:
                secret = await self._secrets.generate(name)
            except SecretError as error:
                log.warning("failed to generate secret for %s: %s", name, error)
                raise StreamEnded(grpc.StatusCode.UNKNOWN, f"failed to generate secret for {name}: {error}") from None
            response.resources.add().Pack(envoy_secret(name, secret, crl, self._provider))
        response.version_info = f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}/{next(self._versions)}"
        async with client.writing:
            response.nonce = client.nonce = str(uuid.uuid4())
            await context.write(response.SerializeToString())
        log.info("SDS: PUSH resources=%s", ",".join(names))


def wanted(client: _Client, request: discovery_pb2.DiscoveryRequest, metrics: Metrics) -> list[str]:
    """The names to answer a request with; updates what the stream watches.

    Source: istio/istio: pkg/xds/server.go (ShouldRespond).
    """
    names = frozenset(request.resource_names)
    if request.HasField("error_detail"):
        text = " ".join(request.error_detail.message.split()).replace('"', "'")
        log.warning('nack type=Secret error="%s"', text)
        metrics.pilot_total_xds_rejects.add(SECRET_TYPE)
        return []
    if not names:
        client.names = None
        return []
    if client.names is None or not request.response_nonce:
        client.names = names
        return list(request.resource_names)
    if request.response_nonce != client.nonce:
        log.debug("expired nonce %s", request.response_nonce)
        metrics.pilot_xds_expired_nonce.add(SECRET_TYPE)
        return []
    added = [name for name in request.resource_names if name not in client.names]
    client.names = names
    return added

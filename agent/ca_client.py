"""The client of the mesh's certificate authority.

Source: istio/istio: security/pkg/nodeagent/caclient/providers/citadel/client.go, pkg/security/retry.go.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from agent.errors import AgentError
from agent.metrics import Metrics
from agent.protos import ca_pb2
from agent.security import SecurityOptions
from agent.upstream import load_client_certificate, read_root, server_name
from agent.xds_proxy import channel_options

if TYPE_CHECKING:
    from agent.tls_relay import TLSRelay

log = logging.getLogger("citadelclient")

METHOD = "/istio.v1.auth.IstioCertificateService/CreateCertificate"
ATTEMPTS = 5
FIRST_PAUSE = 0.1
RETRIED = frozenset(
    (
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
    )
)


class CAError(Exception):
    """The certificate authority did not issue a certificate."""


class CAClient:
    """Signs requests.

    Args:
        options: address, root and client certificate.
        metadata: of each call.
        keepalive: interval and timeout in seconds.
    """

    def __init__(
        self,
        options: SecurityOptions,
        metadata: Callable[[], Sequence[tuple[str, str | bytes]]],
        metrics: Metrics,
        keepalive: tuple[float, float],
    ) -> None:
        self._options, self._metadata, self._metrics, self._keepalive = options, metadata, metrics, keepalive
        self._channel: grpc.aio.Channel | None = None
        self._relay: TLSRelay | None = None

    def _connect(self) -> grpc.aio.Channel:
        if self._channel is None:
            arguments = channel_options(*self._keepalive)
            address = self._options.ca_address
            if not self._options.ca_root:
                self._channel = grpc.aio.insecure_channel(address, options=arguments)
            elif self._options.policy is not None:
                from agent.tls_relay import TLSRelay

                name = self._options.ca_server_name or server_name(address)
                root, policy = self._options.ca_root, self._options.policy
                self._relay = TLSRelay(
                    self._options.relay, address, name, policy, lambda: read_root(root), self._client_certificate
                )
                self._channel = self._relay.channel(arguments)
            else:
                name = self._options.ca_server_name or server_name(address)
                credentials = grpc.ssl_channel_credentials(
                    read_root(self._options.ca_root), *self._client_certificate()
                )
                arguments += [("grpc.ssl_target_name_override", name), ("grpc.default_authority", name)]
                self._channel = grpc.aio.secure_channel(address, credentials, options=arguments)
        return self._channel

    def _client_certificate(self) -> tuple[bytes | None, bytes | None]:
        directory = self._options.prov_cert
        if not directory:
            return None, None
        return load_client_certificate(os.path.join(directory, "key.pem"), os.path.join(directory, "cert-chain.pem"))

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close(None)
            self._channel = None
        if self._relay is not None:
            await self._relay.close()
            self._relay = None

    async def sign(self, csr: bytes, seconds: int) -> list[str]:
        """The chain for a request: leaf first, root last, PEM each.

        Args:
            csr: PEM.
            seconds: lifetime asked for.

        Raises:
            CAError: after the last attempt, or for an error that a retry cannot change.
        """
        request = ca_pb2.IstioCertificateRequest(csr=csr.decode(), validity_duration=seconds)
        request.metadata["CertSigner"] = self._options.cert_signer
        started = time.monotonic()
        self._metrics.num_outgoing_requests.add("csr")
        try:
            response = await self._call(request)
            if len(response.cert_chain) < 2:
                raise CAError("invalid empty CertChain")
            return list(response.cert_chain)
        except CAError as error:
            self._metrics.num_failed_outgoing_requests.add("csr")
            log.error("failed to sign CSR: %s", error)
            # The next call connects anew, and reads a root that may have changed.
            await self.close()
            raise
        finally:
            self._metrics.outgoing_latency.add("csr", (time.monotonic() - started) * 1000)

    async def _call(self, request: ca_pb2.IstioCertificateRequest) -> ca_pb2.IstioCertificateResponse:
        pause = FIRST_PAUSE
        attempt = 1
        while True:
            try:
                channel = self._connect()
            except AgentError as error:
                raise CAError(f"cannot connect to the CA: {error}") from None
            call = channel.unary_unary(
                METHOD,
                request_serializer=ca_pb2.IstioCertificateRequest.SerializeToString,
                response_deserializer=ca_pb2.IstioCertificateResponse.FromString,
            )
            try:
                response: ca_pb2.IstioCertificateResponse = await call(request, metadata=tuple(self._metadata()))
                return response
            except grpc.aio.AioRpcError as error:
                if attempt >= ATTEMPTS or error.code() not in RETRIED:
                    why = (self._relay.problem if self._relay is not None else "") or error.details() or ""
                    details = " ".join(why.split())
                    raise CAError(f"create certificate: {error.code().name} {details}") from None
            self._metrics.num_outgoing_retries.add("csr")
            await asyncio.sleep(pause * random.uniform(0.9, 1.1))
            pause *= 2
            attempt += 1

"""The certificate service on the secure port (istio/istio: security/pkg/server/ca/server.go)."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc

from agent.protos import ca_pb2
from lab.discovery.auth import Authenticator, Unauthenticated
from lab.discovery.ca import CAError, CertificateAuthority
from lab.discovery.metrics import Metrics

log = logging.getLogger("ca")

SERVICE = "istio.v1.auth.IstioCertificateService"


class CertificateService:
    """Signs CSRs for the identity that the caller proved, whatever the CSR asks for."""

    def __init__(self, authority: CertificateAuthority, authenticator: Authenticator, metrics: Metrics) -> None:
        self._authority, self._authenticator, self._metrics = authority, authenticator, metrics

    async def create_certificate(self, request: Any, context: Any) -> Any:
        """CreateCertificate: [leaf, root]; Unauthenticated without identity, InvalidArgument for a bad CSR or lifetime."""
        self._metrics.count("citadel_server_csr_count")
        try:
            identities = self._authenticator.identify(context)
        except Unauthenticated as e:
            self._metrics.count("citadel_server_authentication_failure_count")
            log.warning("refused peer=%s: %s", context.peer(), e)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"request authenticate failure: {e}")
        if request.metadata.fields.get("ImpersonatedIdentity") is not None:
            # only node agents of ambient meshes may ask for somebody else
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "request impersonation authentication failure")
        try:
            chain = await asyncio.to_thread(
                self._authority.sign, request.csr, identities, int(request.validity_duration)
            )
        except CAError as e:
            self._metrics.count("citadel_server_csr_sign_err_count")
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"CSR signing error: {e}")
        self._metrics.count("citadel_server_success_cert_issuance_count")
        log.info("issued identity=%s", ",".join(identities))
        return ca_pb2.IstioCertificateResponse(cert_chain=chain)

    def grpc_handlers(self) -> Any:
        handler = grpc.unary_unary_rpc_method_handler(
            self.create_certificate,
            ca_pb2.IstioCertificateRequest.FromString,
            ca_pb2.IstioCertificateResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"CreateCertificate": handler})

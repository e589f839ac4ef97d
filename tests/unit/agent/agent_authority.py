"""A small certificate authority on gRPC, for tests: plain text or TLS."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from agent.ca_client import METHOD
from agent.protos import ca_pb2

PEM = serialization.Encoding.PEM


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


@dataclass
class Issuer:
    """A self-signed root that issues leaves of a given lifetime in seconds."""

    name: str = "root"
    lifetime: float = 3600
    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))

    def __post_init__(self) -> None:
        subject = x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, self.name)])
        self.certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject)
            .public_key(self.key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now() - datetime.timedelta(hours=1))
            .not_valid_after(now() + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self.key, hashes.SHA256())
        )

    @property
    def pem(self) -> str:
        return self.certificate.public_bytes(PEM).decode()

    def issue(self, public_key: Any, names: Sequence[x509.GeneralName]) -> str:
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(self.certificate.subject)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now() - datetime.timedelta(minutes=1))
            .not_valid_after(now() + datetime.timedelta(seconds=self.lifetime))
            .add_extension(x509.SubjectAlternativeName(names), critical=True)
            .sign(self.key, hashes.SHA256())
        )
        return certificate.public_bytes(PEM).decode()

    def pair(self, dns_name: str) -> tuple[bytes, bytes]:
        """Key and certificate for a server, PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        pem = key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        return pem, self.issue(key.public_key(), [x509.DNSName(dns_name)]).encode()


class Authority:
    """The gRPC service. `failures` are status codes of the next calls; `chain` replaces the answer if set."""

    def __init__(self, issuer: Issuer, tls_name: str = "") -> None:
        self.issuer, self._tls_name = issuer, tls_name
        self.requests: list[ca_pb2.IstioCertificateRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.failures: list[grpc.StatusCode] = []
        self.chain: list[str] | None = None
        self._came = asyncio.Event()

    async def __aenter__(self) -> Authority:
        self._server = grpc.aio.server()
        service, method = METHOD.strip("/").split("/")
        handler = grpc.unary_unary_rpc_method_handler(
            self._create,
            request_deserializer=ca_pb2.IstioCertificateRequest.FromString,
            response_serializer=ca_pb2.IstioCertificateResponse.SerializeToString,
        )
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        if self._tls_name:
            credentials = grpc.ssl_server_credentials([self.issuer.pair(self._tls_name)])
            self.port = self._server.add_secure_port("127.0.0.1:0", credentials)
        else:
            self.port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)

    async def received(self, count: int) -> None:
        """Waits until that many requests have come."""
        while len(self.requests) < count:
            self._came.clear()
            await self._came.wait()

    async def _create(self, request: Any, context: Any) -> ca_pb2.IstioCertificateResponse:
        self.requests.append(request)
        self._came.set()
        self.metadata.append(dict(context.invocation_metadata()))
        if self.failures:
            await context.abort(self.failures.pop(0), "told to fail")
        if self.chain is not None:
            return ca_pb2.IstioCertificateResponse(cert_chain=self.chain)
        csr = x509.load_pem_x509_csr(request.csr.encode())
        names = csr.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        leaf = self.issuer.issue(csr.public_key(), list(names))
        return ca_pb2.IstioCertificateResponse(cert_chain=[leaf, self.issuer.pem])

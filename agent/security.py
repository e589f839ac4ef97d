"""Security options: identity, certificate authority and certificate files of a workload.

Source: istio/istio: pilot/cmd/pilot-agent/options/security.go, pkg/istio-agent/agent.go, pkg/istio-agent/plugins.go.
"""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import dataclass, field

from agent import compliance, paths
from agent.compliance import Policy
from agent.csr import KeyOptions, spiffe_id
from agent.errors import AgentError
from agent.options import ProxyOptions
from agent.protos import proxy_config_pb2 as pb
from agent.proxy_config import split_host_port

log = logging.getLogger("default")

CITADEL = "Citadel"
GKE = "GkeWorkloadCertificate"
PLAINTEXT_PORT = ":15010"
SOCKET_TIMEOUT_SECONDS = 1.0


@dataclass(frozen=True)
class CertificateFiles:
    """Paths of chain, key and root in PEM."""

    chain: str
    key: str
    root: str

    def all_exist(self) -> bool:
        return all(os.path.exists(path) for path in (self.chain, self.key, self.root))

    @staticmethod
    def in_directory(directory: str, names: tuple[str, str, str]) -> CertificateFiles:
        return CertificateFiles(*(os.path.join(directory, name) for name in names))


_WELL_KNOWN = ("cert-chain.pem", "key.pem", "root-cert.pem")
CA_RELAY = "CA"
_GKE = ("certificates.pem", "private_key.pem", "ca_certificates.pem")


@dataclass(frozen=True)
class SecurityOptions:
    """How a workload gets its certificates.

    Args:
        identity: SPIFFE id.
        ca_address: ``host:port``.
        ca_server_name: overrides the name in the CA's certificate; empty for the address's host.
        ca_root: path or ``SYSTEM``; empty for plaintext.
        prov_cert: directory of a client certificate; empty for none.
        ttl: seconds asked for.
        grace_ratio: part of a lifetime that is left when it is renewed.
        grace_jitter: up or down on that ratio.
        files: well-known certificate files, used instead of the CA where they exist.
        no_ca: files only.
        output_directory: where issued certificates are written; empty for nowhere.
        output_mode: of those files.
        file_retry: seconds before the first retry of reading a file.
        policy: what TLS with the CA may be, None for what gRPC does.
        relay: the Unix socket that TLS under a policy lies behind.
    """

    identity: str
    ca_address: str
    ca_server_name: str = ""
    ca_root: str = ""
    prov_cert: str = ""
    cert_signer: str = ""
    ttl: float = 86400.0
    grace_ratio: float = 0.5
    grace_jitter: float = 0.01
    key: KeyOptions = field(default_factory=KeyOptions)
    files: CertificateFiles = field(default_factory=lambda: CertificateFiles.in_directory(paths.CERTS_DIR, _WELL_KNOWN))
    no_ca: bool = False
    prefetch: bool = True
    output_directory: str = ""
    output_mode: int = 0o600
    file_retry: float = 0.1
    crl: str = ""
    policy: Policy | None = None
    relay: str = ""


def socket_is_alive(path: str) -> bool:
    """True if something accepts connections on a Unix socket within a second."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
        sock.settimeout(SOCKET_TIMEOUT_SECONDS)
        try:
            sock.connect(path)
        except OSError:
            return False
    return True


@dataclass(frozen=True)
class WorkloadSocket:
    """Where the SDS server listens, and whether a foreign one already serves the workload's certificates."""

    path: str
    foreign: bool


def workload_socket(options: ProxyOptions) -> WorkloadSocket:
    """Decides between our own SDS server and a foreign one on the workload socket; a dead socket is removed.

    Raises:
        AgentError: the configured file name is a path, or names a socket that nobody serves.
    """
    name = options.environment.string("WORKLOAD_IDENTITY_SOCKET_FILE", "socket")
    if os.path.basename(name) != name or not name:
        raise AgentError(f"workload identity socket file override {name!r} must be a file name, not a path")
    path = os.path.join(paths.WORKLOAD_SOCKET_DIR, name)
    if socket_is_alive(path):
        log.info("existing workload SDS socket found at %s, serving only files", path)
        return WorkloadSocket(paths.CREDENTIAL_FILES_SOCKET, foreign=True)
    if name != "socket":
        raise AgentError("workload identity socket override set, but no healthy socket was found", path)
    if os.path.exists(path):
        log.warning("existing workload SDS socket %s did not respond, removing it", path)
        os.unlink(path)
    return WorkloadSocket(path, foreign=False)


def resolve(options: ProxyOptions, *, serve_only_files: bool) -> SecurityOptions:
    """The security options of a proxy.

    Raises:
        AgentError: options that exclude each other, an unknown provider, or no root certificate for the CA.
    """
    env, config = options.environment, options.config
    if env.string("JWT_POLICY") == "first-party-jwt":
        log.warning("Using deprecated JWT policy 'first-party-jwt'; treating as 'third-party-jwt'")
    fetcher = env.string("CREDENTIAL_FETCHER_TYPE", "JWT")
    if fetcher not in ("", "JWT"):
        raise AgentError("failed to create credential fetcher", f"invalid credential fetcher type {fetcher}")
    if env.string("ECC_SIGNATURE_ALGORITHM") not in ("", "ECDSA"):
        raise AgentError(f"invalid ECC_SIGNATURE_ALGORITHM {env.string('ECC_SIGNATURE_ALGORITHM')}", "", "Use ECDSA")
    file_mounted = env.boolean("FILE_MOUNTED_CERTS", False)
    prov_cert = env.string("PROV_CERT")
    if file_mounted and prov_cert:
        raise AgentError("invalid options: PROV_CERT and FILE_MOUNTED_CERTS are mutually exclusive")
    files = CertificateFiles.in_directory(paths.CERTS_DIR, _WELL_KNOWN)
    credentials = CertificateFiles.in_directory(paths.WORKLOAD_CREDENTIALS_DIR, _WELL_KNOWN)
    if credentials.all_exist():
        log.info("workload certificate files detected in %s, switching to file mode", paths.WORKLOAD_CREDENTIALS_DIR)
        files, file_mounted = credentials, True
    provider = env.string("CA_PROVIDER", CITADEL)
    ca_address = env.string("CA_ADDR") or config.discovery_address
    if "googleapis.com" in ca_address:
        provider = "GoogleCA"
    if provider == GKE:
        files = CertificateFiles.in_directory(paths.WORKLOAD_CREDENTIALS_DIR, _GKE)
    no_ca = file_mounted or serve_only_files or provider == GKE
    if not no_ca and provider != CITADEL:
        raise AgentError(f"CA provider {provider!r} not registered")
    # The discovery address is the CA's when no other is given, so what holds for it (plaintext) holds for the CA.
    plaintext = ca_address.endswith(PLAINTEXT_PORT) or (
        not env.string("CA_ADDR") and config.control_plane_auth_policy == pb.NONE
    )
    if not no_ca and not plaintext:
        try:
            split_host_port(ca_address)
        except ValueError as error:
            raise AgentError("invalid CA address", error) from None
    ttl = env.seconds("SECRET_TTL", 86400.0)
    return SecurityOptions(
        identity=spiffe_id(
            env.string("TRUST_DOMAIN", "cluster.local"), options.namespace, env.string("SERVICE_ACCOUNT")
        ),
        ca_address=ca_address,
        ca_server_name="" if env.string("CA_ADDR") else env.string("ISTIOD_SAN"),
        ca_root="" if plaintext or no_ca else ca_root(options),
        prov_cert=prov_cert,
        cert_signer=env.string("ISTIO_META_CERT_SIGNER"),
        ttl=ttl,
        grace_ratio=env.number("SECRET_GRACE_PERIOD_RATIO", 0.5),
        grace_jitter=env.number("SECRET_GRACE_PERIOD_RATIO_JITTER", 0.01),
        key=KeyOptions(
            rsa_bits=env.integer("WORKLOAD_RSA_KEY_SIZE", 2048),
            ecdsa=env.string("ECC_SIGNATURE_ALGORITHM") == "ECDSA",
            curve=env.string("ECC_CURVE", "P256"),
            pkcs8=env.boolean("PKCS8_KEY", False),
        ),
        files=files,
        no_ca=no_ca,
        # A mesh without mutual TLS never asks for a certificate, and a key costs a fifth of the agent's start.
        prefetch=not no_ca and not plaintext,
        output_directory=env.string("OUTPUT_CERTS"),
        output_mode=0o644 if env.string("KUBERNETES_SERVICE_HOST") else 0o600,
        file_retry=env.seconds("FILE_DEBOUNCE_DURATION", 0.1),
        policy=None if plaintext or no_ca else compliance.policy(env),
        relay=os.path.join(config.config_path, CA_RELAY),
        crl=paths.CRL if env.boolean("PILOT_ENABLE_CA_CRL", True) else "",
    )


def ca_root(options: ProxyOptions) -> str:
    """Path of the root certificate for the CA, or ``SYSTEM``.

    Raises:
        AgentError: there is none.
    """
    env = options.environment
    configured = env.string("CA_ROOT_CA")
    provider = env.string("PILOT_CERT_PROVIDER", "istiod")
    if configured == "SYSTEM":
        return configured
    if configured:
        path = configured
    elif provider == "custom":
        path = os.path.join(paths.CERTS_DIR, "root-cert.pem")
    elif env.string("PROV_CERT"):
        return os.path.join(env.string("PROV_CERT"), "root-cert.pem")
    elif provider == "none":
        raise AgentError("root CA file for CA required but configured provider as none")
    else:
        path = paths.ISTIOD_ROOT_CERT
    if not os.path.exists(path):
        raise AgentError("root CA file for CA does not exist", path)
    return path

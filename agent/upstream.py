"""How the agent reaches discovery: address, TLS, token and headers.

Source: istio/istio: pkg/istio-agent/xds_proxy.go (buildUpstreamClientDialOpts), pkg/istio-agent/agent.go
(FindRootCAForXDS), pilot/pkg/grpc/tls.go, security/pkg/nodeagent/caclient/credentials.go.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence

import grpc
import grpc.aio

from agent import compliance, paths
from agent.errors import AgentError
from agent.files import read_file, read_text
from agent.options import ProxyOptions
from agent.protos import proxy_config_pb2 as pb
from agent.proxy_config import split_host_port
from agent.xds_proxy import Upstream, channel_options

log = logging.getLogger("xdsproxy")

RELAY = "DISCOVERY"  # beside the socket for Envoy
SYSTEM_ROOTS = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/pki/tls/cacert.pem",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/cert.pem",
    "/usr/local/etc/ssl/cert.pem",
    "/etc/certs/ca-certificates.crt",
)


def read_token(path: str = paths.TOKEN) -> str:
    """The service account token, empty if there is none."""
    try:
        return read_text(path).strip()
    except (OSError, ValueError) as error:
        log.debug("failed to fetch token from file: %s", error)
        return ""


_HEADER_NAME = re.compile(r"[0-9a-z_.-]+")
_HEADER_VALUE = re.compile(r"[ -~]*")


def call_metadata(options: ProxyOptions, header_prefix: str) -> list[tuple[str, str | bytes]]:
    """Metadata of one call: cluster, configured headers, token. The token file is read each time.

    What gRPC does not carry is left out with a warning; a call with it would fail in a way that no retry mends.
    """
    env = options.environment
    metadata = [("clusterid", env.string("ISTIO_META_CLUSTER_ID"))]
    metadata += [(key.lower(), value) for key, value in env.with_prefix(header_prefix).items()]
    token = read_token()
    if token:
        metadata.append(("authorization", f"Bearer {token}"))
    carried: list[tuple[str, str | bytes]] = []
    for key, value in metadata:
        binary = key.endswith("-bin")
        if _HEADER_NAME.fullmatch(key) is None or not (binary or _HEADER_VALUE.fullmatch(value)):
            log.warning("leaving out the header %r: its name or its value is none that gRPC carries", key)
            continue
        carried.append((key, value.encode("utf-8", "surrogateescape") if binary else value))
    return carried


def discovery(options: ProxyOptions) -> Upstream:
    """The upstream of the xDS proxy.

    Raises:
        AgentError: the root certificate is missing.
    """
    env, config = options.environment, options.config
    arguments = channel_options(
        env.seconds("GRPC_KEEPALIVE_INTERVAL", 30.0), env.seconds("GRPC_KEEPALIVE_TIMEOUT", 10.0)
    )
    if config.control_plane_auth_policy == pb.NONE:

        def plaintext() -> grpc.aio.Channel:
            return grpc.aio.insecure_channel(config.discovery_address, options=arguments)

        return Upstream(config.discovery_address, plaintext, lambda: call_metadata(options, "XDS_HEADER_"))
    root_path = xds_root(options)
    read_root(root_path)
    name = env.string("ISTIOD_SAN") or server_name(config.discovery_address)
    policy = compliance.policy(env)
    if policy is not None:
        from agent.tls_relay import TLSRelay

        relay = TLSRelay(
            os.path.join(config.config_path, RELAY),
            config.discovery_address,
            name,
            policy,
            lambda: read_root(root_path),
            lambda: client_certificate(options),
        )
        return Upstream(
            config.discovery_address,
            lambda: relay.channel(arguments),
            lambda: call_metadata(options, "XDS_HEADER_"),
            relay.close,
            lambda: relay.problem,
        )

    def encrypted() -> grpc.aio.Channel:
        key, chain = client_certificate(options)
        credentials = grpc.ssl_channel_credentials(read_root(root_path), key, chain)
        return grpc.aio.secure_channel(
            config.discovery_address,
            credentials,
            options=[*arguments, ("grpc.ssl_target_name_override", name), ("grpc.default_authority", name)],
        )

    return Upstream(config.discovery_address, encrypted, lambda: call_metadata(options, "XDS_HEADER_"))


def server_name(address: str) -> str:
    """The name that the server's certificate must carry.

    Raises:
        AgentError: not ``host:port``.
    """
    try:
        host, _ = split_host_port(address)
    except ValueError as error:
        raise AgentError("invalid control plane address", error) from None
    return "istiod.istio-system.svc" if "localhost" in host else host


def read_root(path: str) -> bytes | None:
    """The root certificates at `path`; ``SYSTEM`` are the machine's.

    Raises:
        AgentError: they cannot be read.
    """
    if path == "SYSTEM":
        path = system_roots()
    if not path:
        raise AgentError("failed to find root CA cert", "this system has no CA bundle")
    try:
        return read_file(path)
    except OSError as error:
        raise AgentError(f"failed to find root CA cert {path}", error.strerror) from None


def system_roots() -> str:
    """Path of the machine's CA bundle, empty if there is none."""
    return next((path for path in SYSTEM_ROOTS if os.path.exists(path)), "")


def xds_root(options: ProxyOptions) -> str:
    """Path of the root certificate for discovery, or ``SYSTEM``.

    Raises:
        AgentError: there is none.
    """
    env = options.environment
    configured = env.string("XDS_ROOT_CA")
    if configured == "SYSTEM":
        return configured
    mounted = os.path.join(paths.CERTS_DIR, "root-cert.pem")
    if configured:
        path = configured
    elif os.path.exists(mounted):
        path = mounted
    elif env.string("PROV_CERT"):
        return os.path.join(env.string("PROV_CERT"), "root-cert.pem")
    elif env.boolean("FILE_MOUNTED_CERTS", False):
        path = options.config.proxy_metadata.get("ISTIO_META_TLS_CLIENT_ROOT_CERT", "")
    elif env.string("PILOT_CERT_PROVIDER", "istiod") == "none":
        raise AgentError("root CA file for XDS required but configured provider as none")
    else:
        path = paths.ISTIOD_ROOT_CERT
    if not os.path.exists(path):
        raise AgentError("root CA file for XDS does not exist", path)
    return path


def client_certificate(options: ProxyOptions) -> tuple[bytes | None, bytes | None]:
    """Key and chain for mutual TLS with discovery; nothing if they are missing."""
    env = options.environment
    paths_to_read: Sequence[str]
    if env.string("PROV_CERT"):
        directory = env.string("PROV_CERT")
        paths_to_read = (os.path.join(directory, "key.pem"), os.path.join(directory, "cert-chain.pem"))
    elif env.boolean("FILE_MOUNTED_CERTS", False):
        metadata = options.config.proxy_metadata
        paths_to_read = (
            metadata.get("ISTIO_META_TLS_CLIENT_KEY", ""),
            metadata.get("ISTIO_META_TLS_CLIENT_CERT_CHAIN", ""),
        )
    else:
        return None, None
    return load_client_certificate(*paths_to_read)


def load_client_certificate(key_path: str, chain_path: str) -> tuple[bytes | None, bytes | None]:
    """Key and chain of a client certificate; nothing, with a warning, if it cannot be read or has expired.

    Source: istio/istio: pilot/pkg/grpc/tls.go (getTLSDialOption).
    """
    import datetime

    from cryptography import x509

    try:
        key, chain = read_file(key_path), read_file(chain_path)
        expires = x509.load_pem_x509_certificate(chain).not_valid_after_utc
    except (OSError, ValueError) as error:
        log.warning("no client certificate for the control plane, using the token: %s", " ".join(str(error).split()))
        return None, None
    if expires <= datetime.datetime.now(datetime.UTC):
        log.warning("the client certificate %s has expired, using the token", chain_path)
        return None, None
    return key, chain

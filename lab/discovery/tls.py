"""TLS contexts: what sidecars ask of each other, and what a DestinationRule asks of a server.

Sources: istio/istio: pilot/pkg/security/authn/utils/utils.go, pilot/pkg/security/model/authentication.go,
pilot/pkg/networking/core/cluster_tls.go.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from envoy.config.core.v3 import base_pb2, config_source_pb2, grpc_service_pb2
from envoy.extensions.transport_sockets.raw_buffer.v3 import raw_buffer_pb2
from envoy.extensions.transport_sockets.tls.v3 import common_pb2, secret_pb2, tls_pb2
from envoy.type.matcher.v3 import string_pb2

from lab.discovery import protoconv

CIPHERS = (
    "ECDHE-ECDSA-AES256-GCM-SHA384",
    "ECDHE-RSA-AES256-GCM-SHA384",
    "ECDHE-ECDSA-AES128-GCM-SHA256",
    "ECDHE-RSA-AES128-GCM-SHA256",
    "AES256-GCM-SHA384",
    "AES128-GCM-SHA256",
)

ALPN_MTLS_HTTP = ("istio-http/1.0", "istio-http/1.1", "istio-h2")
ALPN_MTLS_TCP = ("istio-peer-exchange", "istio")
ALPN_MTLS_ALL = ("istio", "istio-peer-exchange", *ALPN_MTLS_HTTP)


@cache
def sds(name: str) -> Any:
    """A secret from the agent's SDS server, waited for for ever."""
    source = config_source_pb2.ConfigSource(
        api_config_source=config_source_pb2.ApiConfigSource(
            api_type="GRPC",
            transport_api_version="V3",
            set_node_on_first_message_only=True,
            grpc_services=[
                grpc_service_pb2.GrpcService(envoy_grpc=grpc_service_pb2.GrpcService.EnvoyGrpc(cluster_name="sds-grpc"))
            ],
        ),
        initial_fetch_timeout=protoconv.duration(0),
        resource_api_version="V3",
    )
    return secret_pb2.SdsSecretConfig(name=name, sds_config=source)


def transport_socket(context: Any) -> Any:
    return base_pb2.TransportSocket(name=protoconv.TLS_SOCKET, typed_config=protoconv.to_any(context))


@cache
def raw_buffer() -> Any:
    return base_pb2.TransportSocket(
        name=protoconv.RAW_BUFFER_SOCKET, typed_config=protoconv.to_any(raw_buffer_pb2.RawBuffer())
    )


def _combined(sans: Sequence[Any], root: str) -> Any:
    return tls_pb2.CommonTlsContext.CombinedCertificateValidationContext(
        default_validation_context=common_pb2.CertificateValidationContext(match_subject_alt_names=sans),
        validation_context_sds_secret_config=sds(root),
    )


def downstream(trust_domains: Sequence[str], http: bool) -> Any:
    """The transport socket of an inbound mTLS chain: a certificate of the mesh is required of the client."""
    context = tls_pb2.DownstreamTlsContext(
        require_client_certificate=protoconv.boolean(True),
        common_tls_context=tls_pb2.CommonTlsContext(
            tls_params=common_pb2.TlsParameters(
                tls_minimum_protocol_version="TLSv1_2", tls_maximum_protocol_version="TLSv1_3", cipher_suites=CIPHERS
            ),
            alpn_protocols=("h2", "http/1.1") if http else ("istio-peer-exchange", "h2", "http/1.1"),
            tls_certificate_sds_secret_configs=[sds("default")],
            combined_validation_context=_combined(
                [string_pb2.StringMatcher(prefix=f"spiffe://{domain}/") for domain in trust_domains], "ROOTCA"
            ),
        ),
    )
    return transport_socket(context)


def _client_params() -> Any:
    return common_pb2.TlsParameters(tls_minimum_protocol_version="TLSv1_2", tls_maximum_protocol_version="TLSv1_3")


def istio_mutual(sni: str, sans: Sequence[str], http2: bool) -> Any:
    """The transport socket of a cluster that speaks mesh mTLS; without ``sans`` any certificate of the mesh is taken."""
    context = tls_pb2.UpstreamTlsContext(
        sni=sni,
        common_tls_context=tls_pb2.CommonTlsContext(
            tls_params=_client_params(),
            alpn_protocols=("istio-peer-exchange", "istio", "h2") if http2 else ("istio-peer-exchange", "istio"),
            tls_certificate_sds_secret_configs=[sds("default")],
            combined_validation_context=_combined([string_pb2.StringMatcher(exact=san) for san in sans], "ROOTCA"),
        ),
    )
    return transport_socket(context)


def originate(
    *,
    sni: str,
    sans: Sequence[str],
    ca_file: str,
    client_certificate: str,
    private_key: str,
    skip_verify: bool,
    http2: bool,
    credential: str = "",
    mutual: bool = False,
) -> Any:
    """The transport socket of DestinationRule tls SIMPLE or MUTUAL; files are fetched as SDS resources of the agent."""
    common = tls_pb2.CommonTlsContext(tls_params=_client_params())
    if credential:
        if mutual:
            common.tls_certificate_sds_secret_configs.append(sds(f"kubernetes://{credential}"))
        root = f"kubernetes://{credential}-cacert"
    else:
        if client_certificate:
            common.tls_certificate_sds_secret_configs.append(sds(f"file-cert:{client_certificate}~{private_key}"))
        root = f"file-root:{ca_file or 'system'}"
    if skip_verify:
        common.validation_context.SetInParent()
    else:
        common.combined_validation_context.CopyFrom(
            _combined([string_pb2.StringMatcher(exact=san) for san in sans], root)
        )
    if http2:
        common.alpn_protocols.append("h2")
    return transport_socket(tls_pb2.UpstreamTlsContext(sni=sni, common_tls_context=common))

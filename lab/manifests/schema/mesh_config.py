"""Schemas of MeshConfig (the ``mesh`` key of the ``istio`` ConfigMap) and ProxyConfig.

Source: istio/api: mesh/v1alpha1/config.proto, mesh/v1alpha1/proxy.proto.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from lab.manifests.schema.base import (
    DnsLabel,
    Duration,
    EnvName,
    Milliseconds,
    MillisecondsOrNone,
    Port,
    PositiveDuration,
    ProcessText,
    Spec,
    WholeSeconds,
    words,
)
from lab.manifests.schema.config import ExportTo
from lab.manifests.schema.connection_pool import ConnectionPoolSettings, Count
from lab.manifests.schema.destination_rule import ClientTLSSettings, OutlierDetection
from lab.manifests.schema.locality import LocalityLoadBalancerSetting
from lab.manifests.schema.metadata import LabelSelector
from lab.manifests.schema.retry import HTTPRetry


class OutboundTrafficPolicy(Spec):
    mode: Literal["REGISTRY_ONLY", "ALLOW_ANY", "ALLOW_ANY_DYNAMIC_DNS"] = "REGISTRY_ONLY"
    tls: ClientTLSSettings | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.tls is not None and self.mode != "ALLOW_ANY_DYNAMIC_DNS":
            raise ValueError("tls needs mode ALLOW_ANY_DYNAMIC_DNS")
        return self


class DefaultTrafficPolicy(Spec):
    connection_pool: ConnectionPoolSettings | None = None
    outlier_detection: OutlierDetection | None = None


Visibility = Literal["VISIBILITY_UNSPECIFIED", "PUBLIC", "NAMESPACE", "NONE"]


class VisibilityMatchRule(Spec):
    namespace_selector: LabelSelector


class VisibilityPolicy(Spec):
    matching_rules: list[VisibilityMatchRule] = Field(default_factory=list)
    visibility: Visibility = "VISIBILITY_UNSPECIFIED"


class ServiceEntryVisibility(Spec):
    default_visibility: Visibility = "VISIBILITY_UNSPECIFIED"
    policies: list[VisibilityPolicy] = Field(default_factory=list)
    apply_to_sidecars: bool = False


class InboundTrafficPolicy(Spec):
    mode: Literal["PASSTHROUGH", "LOCALHOST"] = "PASSTHROUGH"


class ProxyPathNormalization(Spec):
    normalization: Literal["DEFAULT", "NONE", "BASE", "MERGE_SLASHES", "DECODE_AND_MERGE_SLASHES"] = "DEFAULT"


class ProxyConfig(Spec):
    """What agents are handed unchanged; the fields without a type here are theirs to read."""

    config_path: str = ""
    binary_path: str = ""
    service_cluster: str = ""
    tracing_service_name: Literal[
        "", "APP_LABEL_AND_NAMESPACE", "CANONICAL_NAME_ONLY", "CANONICAL_NAME_AND_NAMESPACE"
    ] = ""
    drain_duration: WholeSeconds | None = None
    discovery_address: str = ""
    proxy_admin_port: Port | None = None
    control_plane_auth_policy: Literal["NONE", "MUTUAL_TLS", "INHERIT", ""] = ""
    custom_config_file: str = ""
    stat_name_length: Annotated[int, Field(ge=0)] = 0
    concurrency: Annotated[int, Field(ge=0)] | None = None
    proxy_bootstrap_template_path: str = ""
    interception_mode: Literal["REDIRECT", "TPROXY", "NONE"] = "REDIRECT"
    proxy_metadata: dict[EnvName, ProcessText] = Field(default_factory=dict)
    runtime_values: dict[str, str] = Field(default_factory=dict)
    status_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    extra_stat_tags: list[str] = Field(default_factory=list)
    termination_drain_duration: Duration | None = None
    mesh_id: ProcessText = ""
    hold_application_until_proxy_starts: bool = False
    file_flush_interval: Duration | None = None
    file_flush_min_size_kb: Annotated[int, Field(ge=0)] | None = None
    ca_certificates_pem: list[str] = Field(default_factory=list)
    tracing: object = None
    sds: object = None
    zipkin_address: str = ""
    statsd_udp_address: str = ""
    envoy_metrics_service_address: str = ""
    envoy_access_log_service: object = None
    envoy_metrics_service: object = None
    discovery_refresh_delay: Duration | None = None
    availability_zone: str = ""
    gateway_topology: object = None
    readiness_probe: object = None
    proxy_stats_matcher: object = None
    image: object = None
    private_key_provider: object = None
    proxy_headers: object = None
    stats_compression: bool = False
    connection_settings: object = None


class TcpKeepalive(Spec):
    """As of a connection pool, but here admission looks at no duration."""

    probes: Count = 0
    time: Duration = 0.0
    interval: Duration = 0.0


class MeshConfig(Spec):
    UNUSED = words(
        "hboneIdleTimeout ingressClass ingressService ingressControllerMode ingressSelector enableEnvoyAccessLogService configSources"
        " caCertificates zoneAwareLbSetting inboundClusterStatName outboundClusterStatName certificates serviceSettings serviceScopeConfigs"
        " verifyCertificateAtClient ca extensionProviders defaultProviders"
        " meshMTLS tlsDefaults thriftConfig"
    )

    proxy_listen_port: Annotated[int, Field(ge=0, le=65535)] = 15001
    proxy_inbound_listen_port: Port = 15006
    proxy_http_port: Annotated[int, Field(ge=0, le=65535)] = 0
    connect_timeout: Annotated[Milliseconds, Field(le=3600)] = 10.0
    protocol_detection_timeout: MillisecondsOrNone = 0.0
    enable_tracing: bool = True
    enable_prometheus_merge: bool = True
    access_log_file: str = ""
    access_log_format: str = ""
    access_log_encoding: Literal["TEXT", "JSON"] = "TEXT"
    disable_envoy_listener_log: bool = False
    default_config: ProxyConfig = Field(default_factory=ProxyConfig)
    outbound_traffic_policy: OutboundTrafficPolicy = Field(
        default_factory=lambda: OutboundTrafficPolicy(mode="ALLOW_ANY")
    )
    inbound_traffic_policy: InboundTrafficPolicy = Field(default_factory=InboundTrafficPolicy)
    enable_auto_mtls: bool = True
    trust_domain: Annotated[ProcessText, Field(min_length=1)] = "cluster.local"
    trust_domain_aliases: list[str] = Field(default_factory=list)
    default_service_export_to: ExportTo = Field(default_factory=lambda: ["*"])
    default_virtual_service_export_to: ExportTo = Field(default_factory=lambda: ["*"])
    default_destination_rule_export_to: ExportTo = Field(default_factory=lambda: ["*"])
    root_namespace: DnsLabel = "istio-system"
    locality_lb_setting: LocalityLoadBalancerSetting | None = None
    dns_refresh_rate: PositiveDuration = 60.0
    h2_upgrade_policy: Literal["DO_NOT_UPGRADE", "UPGRADE"] = Field("DO_NOT_UPGRADE", alias="h2UpgradePolicy")
    discovery_selectors: list[LabelSelector] = Field(default_factory=list)
    path_normalization: ProxyPathNormalization = Field(default_factory=ProxyPathNormalization)
    tcp_keepalive: TcpKeepalive | None = None
    default_traffic_policy: DefaultTrafficPolicy | None = None
    service_entry_visibility: ServiceEntryVisibility | None = None
    default_http_retry_policy: HTTPRetry | None = None
    default_inbound_http_retry_policy: HTTPRetry | None = None

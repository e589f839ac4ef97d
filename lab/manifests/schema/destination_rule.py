"""Schema of DestinationRule.

Source: istio/api: networking/v1alpha3/destination_rule.proto;
rules of istio/istio: pkg/config/validation/validation.go (ValidateDestinationRule).
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from lab.manifests.schema.base import DnsLabel, Duration, Milliseconds, PositiveDuration, Spec, words
from lab.manifests.schema.config import STATUS, ExportTo, PodSelector, PortSelector, RouteHost, one_of
from lab.manifests.schema.connection_pool import ConnectionPoolSettings, Count
from lab.manifests.schema.locality import LocalityLoadBalancerSetting, Percent
from lab.manifests.schema.metadata import Labels, Object


class RingHash(Spec):
    minimum_ring_size: Count = 0


class MagLev(Spec):
    table_size: Annotated[int, Field(lt=5000011)]

    @field_validator("table_size")
    @classmethod
    def _prime(cls, value: int) -> int:
        if value < 2 or any(value % divisor == 0 for divisor in range(2, math.isqrt(value) + 1)):
            raise ValueError("maglev needs a prime number")
        return value


class CookieAttribute(Spec):
    name: str
    value: str = ""


class HTTPCookie(Spec):
    name: Annotated[str, Field(min_length=1)]
    path: str = ""
    ttl: Duration | None = None
    attributes: list[CookieAttribute] = Field(default_factory=list)


class ConsistentHashLB(Spec):
    http_header_name: str | None = None
    http_cookie: HTTPCookie | None = None
    use_source_ip: bool | None = None
    http_query_parameter_name: str | None = None
    ring_hash: RingHash | None = None
    maglev: MagLev | None = None
    minimum_ring_size: Count = 0

    @model_validator(mode="after")
    def _whole(self) -> Self:
        one_of(self, "http_header_name", "http_cookie", "use_source_ip", "http_query_parameter_name", required=True)
        one_of(self, "ring_hash", "maglev")
        if self.minimum_ring_size and (self.ring_hash is not None or self.maglev is not None):
            raise ValueError("minimumRingSize is the old form of ringHash: only one of both, and not with maglev")
        return self


class WarmupConfiguration(Spec):
    duration: Milliseconds
    minimum_percent: Annotated[float, Field(ge=0, le=100)] | None = None
    aggression: Annotated[float, Field(gt=0)] | None = None


class LoadBalancerSettings(Spec):
    UNUSED = words("zoneAwareLbSetting")

    simple: Literal["UNSPECIFIED", "LEAST_CONN", "RANDOM", "PASSTHROUGH", "ROUND_ROBIN", "LEAST_REQUEST"] | None = None
    consistent_hash: ConsistentHashLB | None = None
    locality_lb_setting: LocalityLoadBalancerSetting | None = None
    warmup_duration_secs: PositiveDuration | None = None
    warmup: WarmupConfiguration | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        one_of(self, "simple", "consistent_hash")
        return self


class OutlierDetection(Spec):
    consecutive_errors: Count = 0
    split_external_local_origin_errors: bool = False
    consecutive_local_origin_failures: Count | None = None
    consecutive_gateway_errors: Count | None = None
    consecutive_5xx_errors: Count | None = Field(None, alias="consecutive5xxErrors")
    interval: Milliseconds | None = None
    base_ejection_time: Milliseconds | None = None
    max_ejection_percent: Percent = 0
    min_health_percent: Percent = 0
    outlier_detection_http_error_codes: list[Annotated[int, Field(ge=100, le=599)]] = Field(default_factory=list)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.consecutive_local_origin_failures and not self.split_external_local_origin_errors:
            raise ValueError("consecutiveLocalOriginFailures needs splitExternalLocalOriginErrors")
        return self


class ClientTLSSettings(Spec):
    mode: Literal["DISABLE", "SIMPLE", "MUTUAL", "ISTIO_MUTUAL"] = "DISABLE"
    client_certificate: str = ""
    private_key: str = ""
    ca_certificates: str = ""
    ca_crl: str = ""
    credential_name: str = ""
    subject_alt_names: list[str] = Field(default_factory=list)
    sni: str = ""
    insecure_skip_verify: bool | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        files = self.client_certificate or self.private_key or self.ca_certificates
        if self.mode == "ISTIO_MUTUAL" and (files or self.credential_name):
            raise ValueError("mode ISTIO_MUTUAL uses Istio's own certificates: no files and no credentialName")
        if self.mode == "MUTUAL" and not self.credential_name and not (self.client_certificate and self.private_key):
            raise ValueError("mode MUTUAL needs clientCertificate and privateKey, or credentialName")
        if self.mode in ("SIMPLE", "MUTUAL") and self.credential_name and (files or self.ca_crl):
            raise ValueError("credentialName and files exclude each other")
        credential = self.credential_name if self.mode == "SIMPLE" else ""
        if self.insecure_skip_verify and (self.ca_certificates or self.subject_alt_names or credential):
            raise ValueError("insecureSkipVerify takes nothing to verify the server with")
        return self


class PortTrafficPolicy(Spec):
    port: PortSelector
    load_balancer: LoadBalancerSettings | None = None
    connection_pool: ConnectionPoolSettings | None = None
    outlier_detection: OutlierDetection | None = None
    tls: ClientTLSSettings | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if not (self.load_balancer or self.connection_pool or self.outlier_detection or self.tls):
            raise ValueError(f"the settings of port {self.port.number} need at least one field")
        return self


class TunnelSettings(Spec):
    protocol: Literal["CONNECT", "POST", ""] = ""
    target_host: Annotated[str, Field(min_length=1)]
    target_port: Annotated[int, Field(ge=1, le=65535)]


class ProxyProtocol(Spec):
    version: Literal["V1", "V2"] = "V1"


class RetryBudget(Spec):
    percent: Annotated[float, Field(ge=0, le=100)] | None = None
    min_retry_concurrency: Count = 0
    budget_interval: Duration | None = None


class TrafficPolicy(Spec):
    load_balancer: LoadBalancerSettings | None = None
    connection_pool: ConnectionPoolSettings | None = None
    outlier_detection: OutlierDetection | None = None
    tls: ClientTLSSettings | None = None
    port_level_settings: list[PortTrafficPolicy] = Field(default_factory=list)
    tunnel: TunnelSettings | None = None
    proxy_protocol: ProxyProtocol | None = None
    retry_budget: RetryBudget | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if not any(getattr(self, name) for name in type(self).model_fields):
            raise ValueError("a trafficPolicy needs at least one field")
        if self.tunnel is not None and self.proxy_protocol is not None:
            raise ValueError("tunnel and proxyProtocol exclude each other")
        ports = [entry.port.number for entry in self.port_level_settings]
        twice = [port for index, port in enumerate(ports) if port in ports[:index]]
        if twice:
            raise ValueError(f"portLevelSettings has port {twice[0]} twice")
        return self


class Subset(Spec):
    name: DnsLabel
    labels: Labels = Field(default_factory=dict)
    traffic_policy: TrafficPolicy | None = None


class DestinationRuleSpec(Spec):
    host: RouteHost
    traffic_policy: TrafficPolicy | None = None
    subsets: list[Subset] = Field(default_factory=list)
    export_to: ExportTo = Field(default_factory=list)
    workload_selector: PodSelector | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        names = [subset.name for subset in self.subsets]
        twice = [name for index, name in enumerate(names) if name in names[:index]]
        if twice:
            raise ValueError(f'subset "{twice[0]}" is written twice')
        return self


class DestinationRule(Object):
    BOOKKEEPING = STATUS

    spec: DestinationRuleSpec

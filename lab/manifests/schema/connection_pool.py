"""Connection pool settings, shared by DestinationRule and Sidecar.

Source: istio/api: networking/v1alpha3/destination_rule.proto (ConnectionPoolSettings);
rules of istio/istio: pkg/config/validation/validation.go (validateConnectionPool).
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from lab.manifests.schema.base import Milliseconds, MillisecondsOrNone, Spec

Count = Annotated[int, Field(ge=0, le=2**31 - 1)]


class TcpKeepalive(Spec):
    probes: Count = 0
    time: Milliseconds = 0.0
    interval: Milliseconds = 0.0


class TCPSettings(Spec):
    max_connections: Count = 0
    connect_timeout: Milliseconds | None = None
    tcp_keepalive: TcpKeepalive | None = None
    max_connection_duration: Milliseconds | None = None
    idle_timeout: MillisecondsOrNone | None = None


class ConnectionKeepalive(Spec):
    interval: Milliseconds
    timeout: Milliseconds


class HTTPSettings(Spec):
    http1_max_pending_requests: Count = Field(0, alias="http1MaxPendingRequests")
    http2_max_requests: Count = Field(0, alias="http2MaxRequests")
    max_requests_per_connection: Count = 0
    max_retries: Count = 0
    idle_timeout: Milliseconds | None = None
    h2_upgrade_policy: Literal["DEFAULT", "DO_NOT_UPGRADE", "UPGRADE"] = Field("DEFAULT", alias="h2UpgradePolicy")
    use_client_protocol: bool = False
    max_concurrent_streams: Count = 0
    http2_keep_alive: ConnectionKeepalive | None = Field(None, alias="http2KeepAlive")

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.use_client_protocol and self.h2_upgrade_policy == "UPGRADE":
            raise ValueError("useClientProtocol and h2UpgradePolicy UPGRADE exclude each other")
        return self


class ConnectionPoolSettings(Spec):
    tcp: TCPSettings | None = None
    http: HTTPSettings | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.tcp is None and self.http is None:
            raise ValueError("a connectionPool needs tcp or http")
        return self

"""Schema of Sidecar.

Source: istio/api: networking/v1alpha3/sidecar.proto; rules of istio/istio: pkg/config/validation/validation.go (ValidateSidecar).
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from lab.manifests.addresses import is_address
from lab.manifests.schema.base import Spec, duplicate, is_dns_label, is_socket_path, words
from lab.manifests.schema.config import STATUS, Destination, WorkloadSelector
from lab.manifests.schema.connection_pool import ConnectionPoolSettings
from lab.manifests.schema.metadata import Object


def _sidecar_host(value: str) -> str:
    namespace, slash, name = value.partition("/")
    if not slash or "/" in name:
        raise ValueError("a Sidecar host is written NAMESPACE/HOST, with exactly one '/'")
    bare = namespace.removeprefix("~")
    if namespace not in ("*", ".", "~", "~.") and not is_dns_label(bare):
        raise ValueError('the namespace must be "*", ".", "~" or a name')
    if not name or ("*" in name and not (name == "*" or (name.startswith("*.") and "*" not in name[2:]))):
        raise ValueError('the host must be "*", a name, or "*." and a name')
    return value


CaptureMode = Literal["DEFAULT", "IPTABLES", "NONE"]


class SidecarPort(Spec):
    UNUSED = words("targetPort")

    number: Annotated[int, Field(ge=0, le=65535)]
    protocol: str = ""
    name: str = ""


class IstioIngressListener(Spec):
    UNUSED = words("tls")

    port: SidecarPort
    bind: str = ""
    capture_mode: CaptureMode = "DEFAULT"
    default_endpoint: str = ""
    connection_pool: ConnectionPoolSettings | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.port.number == 0:
            raise ValueError("an ingress port is 1 to 65535")
        if self.bind and not is_address(self.bind):
            raise ValueError("bind is an IP address")
        if self.default_endpoint:
            where, _, port = self.default_endpoint.rpartition(":")
            unix = self.default_endpoint.startswith("unix:///")
            if not unix and (
                where not in ("127.0.0.1", "0.0.0.0", "[::1]", "[::]")
                or not port.isdigit()
                or not 0 < int(port) < 65536
            ):
                raise ValueError(
                    "defaultEndpoint is 127.0.0.1:PORT, 0.0.0.0:PORT, [::1]:PORT, [::]:PORT or unix:///PATH"
                )
        return self


class IstioEgressListener(Spec):
    hosts: Annotated[list[Annotated[str, AfterValidator(_sidecar_host)]], Field(min_length=1)]
    port: SidecarPort | None = None
    bind: str = ""
    capture_mode: CaptureMode = "DEFAULT"

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.port is None:
            return self
        socket = self.bind.startswith("unix://")
        if self.port.number == 0:
            if not socket or not is_socket_path(self.bind.removeprefix("unix://")):
                raise ValueError("port 0 needs a bind of unix:///PATH")
            if self.capture_mode == "IPTABLES":
                raise ValueError("captureMode IPTABLES is not for Unix sockets")
        elif self.bind and not is_address(self.bind):
            raise ValueError("bind is an IP address" + (", or a Unix socket with port 0" if socket else ""))
        return self


class OutboundTrafficPolicy(Spec):
    mode: Literal["REGISTRY_ONLY", "ALLOW_ANY"] = "REGISTRY_ONLY"
    egress_proxy: Destination | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.egress_proxy is not None:
            if self.mode != "ALLOW_ANY":
                raise ValueError("egressProxy needs mode ALLOW_ANY")
            if self.egress_proxy.port is None or "." not in self.egress_proxy.host:
                raise ValueError("egressProxy needs a fully qualified host and a port")
        return self


class SidecarSpec(Spec):
    workload_selector: WorkloadSelector | None = None
    ingress: list[IstioIngressListener] = Field(default_factory=list)
    egress: list[IstioEgressListener] = Field(default_factory=list)
    inbound_connection_pool: ConnectionPoolSettings | None = None
    outbound_traffic_policy: OutboundTrafficPolicy | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if not (self.ingress or self.egress or self.inbound_connection_pool or self.outbound_traffic_policy):
            raise ValueError("a Sidecar needs ingress, egress, inboundConnectionPool or outboundTrafficPolicy")
        for index, listener in enumerate(self.egress):
            if listener.port is None and index != len(self.egress) - 1:
                raise ValueError(
                    "an egress listener without port is the catch-all: there is one at most, and it comes last"
                )
        egress = [(entry.port.number or entry.bind) for entry in self.egress if entry.port is not None]
        again = duplicate(egress)
        if again is not None:
            raise ValueError(f"egress port {again} is used twice")
        ports = [listener.port.number for listener in self.ingress]
        twice = [port for index, port in enumerate(ports) if port in ports[:index]]
        if twice:
            raise ValueError(f"ingress port {twice[0]} is used twice")
        return self


class Sidecar(Object):
    BOOKKEEPING = STATUS

    spec: SidecarSpec

"""Schemas of ServiceEntry, WorkloadEntry, Sidecar and PeerAuthentication.

Source: istio/api: networking/v1alpha3/{service_entry,workload_entry,sidecar}.proto,
security/v1beta1/peer_authentication.proto; rules of istio/istio: pkg/config/validation/validation.go.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from lab.manifests.schema.base import Host, IPAddress, IPOrCIDR, Port, Spec, is_dns_label, words
from lab.manifests.schema.connection_pool import ConnectionPoolSettings
from lab.manifests.schema.kubernetes import LabelKey, Labels, Object

_ISTIO_STATUS = words("status")


def _export_to(value: str) -> str:
    if value not in (".", "*", "~") and not is_dns_label(value):
        raise ValueError('it must be ".", "*", "~" or the name of a namespace')
    return value


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


ExportTo = list[Annotated[str, AfterValidator(_export_to)]]


class WorkloadSelector(Spec):
    labels: dict[LabelKey, str] = Field(default_factory=dict)


class PodSelector(Spec):
    """istio.type.v1beta1.WorkloadSelector: the same with another field name."""

    match_labels: dict[LabelKey, str] = Field(default_factory=dict)


class ServiceEntryPort(Spec):
    number: Port
    name: str
    protocol: str = ""
    target_port: Port | None = None


class WorkloadEntrySpec(Spec):
    address: str = ""
    ports: dict[str, Port] = Field(default_factory=dict)
    labels: Labels = Field(default_factory=dict)
    network: str = ""
    locality: str = ""
    weight: Annotated[int, Field(ge=0)] = 0
    service_account: str = ""


class ServiceEntrySpec(Spec):
    hosts: Annotated[list[Host], Field(min_length=1)]
    addresses: list[IPOrCIDR] = Field(default_factory=list)
    ports: list[ServiceEntryPort] = Field(default_factory=list)
    location: Literal["MESH_EXTERNAL", "MESH_INTERNAL"] = "MESH_EXTERNAL"
    resolution: Literal["NONE", "STATIC", "DNS", "DNS_ROUND_ROBIN", "DYNAMIC_DNS"] = "NONE"
    endpoints: list[WorkloadEntrySpec] = Field(default_factory=list)
    workload_selector: WorkloadSelector | None = None
    export_to: ExportTo = Field(default_factory=list)
    subject_alt_names: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.endpoints and self.workload_selector:
            raise ValueError("endpoints and workloadSelector exclude each other")
        if "*" in self.hosts:
            raise ValueError('"*" is no host of a ServiceEntry')
        wildcard = any(host.startswith("*") for host in self.hosts)
        if self.resolution == "NONE" and self.endpoints:
            raise ValueError("resolution NONE takes no endpoints")
        if self.resolution in ("DNS", "DNS_ROUND_ROBIN") and wildcard and not self.endpoints:
            raise ValueError("a wildcard host cannot be looked up: resolution DNS needs endpoints here")
        if self.resolution == "DNS_ROUND_ROBIN" and len(self.endpoints) > 1:
            raise ValueError("resolution DNS_ROUND_ROBIN takes one endpoint at most")
        if self.resolution == "DYNAMIC_DNS" and not wildcard:
            raise ValueError("resolution DYNAMIC_DNS is for wildcard hosts")
        for what, values in (
            ("port name", [port.name for port in self.ports]),
            ("port number", [port.number for port in self.ports]),
        ):
            twice = [value for index, value in enumerate(values) if value in values[:index]]
            if twice:
                raise ValueError(f"{what} {twice[0]} is used twice")
        names = {port.name for port in self.ports}
        for endpoint in self.endpoints:
            if not endpoint.address:
                raise ValueError("an endpoint needs an address")
            for name in endpoint.ports:
                if name not in names:
                    raise ValueError(
                        f'endpoint {endpoint.address} names port "{name}", which is none of the entry\'s ports'
                    )
        return self


class ServiceEntryAddress(Spec):
    value: IPAddress
    host: str = ""


class ServiceEntryStatus(Spec):
    BOOKKEEPING = words("conditions validationMessages observedGeneration")

    addresses: list[ServiceEntryAddress] = Field(default_factory=list)


class ServiceEntry(Object):
    spec: ServiceEntrySpec
    status: ServiceEntryStatus | None = None


class WorkloadEntry(Object):
    BOOKKEEPING = _ISTIO_STATUS

    spec: WorkloadEntrySpec


class SidecarPort(Spec):
    UNUSED = words("targetPort")

    number: Annotated[int, Field(ge=0, le=65535)]
    protocol: str = ""
    name: str = ""


class Destination(Spec):
    host: Annotated[str, Field(min_length=1)]
    subset: str = ""
    port: PortSelector | None = None


class PortSelector(Spec):
    number: Port


CaptureMode = Literal["DEFAULT", "IPTABLES", "NONE"]


class IstioIngressListener(Spec):
    UNUSED = words("tls")

    port: SidecarPort
    bind: str = ""
    capture_mode: CaptureMode = "DEFAULT"
    default_endpoint: str = ""
    connection_pool: ConnectionPoolSettings | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
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
        ports = [listener.port.number for listener in self.ingress]
        twice = [port for index, port in enumerate(ports) if port in ports[:index]]
        if twice:
            raise ValueError(f"ingress port {twice[0]} is used twice")
        return self


class Sidecar(Object):
    BOOKKEEPING = _ISTIO_STATUS

    spec: SidecarSpec


class MutualTLS(Spec):
    mode: Literal["UNSET", "DISABLE", "PERMISSIVE", "STRICT"] = "UNSET"


class PeerAuthenticationSpec(Spec):
    selector: PodSelector | None = None
    mtls: MutualTLS = MutualTLS()
    port_level_mtls: dict[str, MutualTLS] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        for port in self.port_level_mtls:
            if not port.isdigit() or not 0 < int(port) < 65536:
                raise ValueError(f'"{port}" in portLevelMtls is no port number')
        if self.port_level_mtls and not (self.selector and self.selector.match_labels):
            raise ValueError("portLevelMtls needs a selector")
        return self


class PeerAuthentication(Object):
    BOOKKEEPING = _ISTIO_STATUS

    spec: PeerAuthenticationSpec = PeerAuthenticationSpec()

"""Schemas of ServiceEntry and WorkloadEntry.

Source: istio/api: networking/v1alpha3/service_entry.proto, workload_entry.proto;
rules of istio/istio: pkg/config/validation/validation.go (ValidateServiceEntry).
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from lab.manifests.protocol import of_istio_port
from lab.manifests.schema.base import DnsLabel, Host, IPAddress, IPOrCIDR, Port, Spec, is_socket_path, words
from lab.manifests.schema.config import STATUS, ExportTo, WorkloadSelector
from lab.manifests.schema.metadata import Labels, Object

_TELL_HOSTS_APART = words("HTTP HTTP2 GRPC GRPC-Web HTTP_PROXY HTTPS TLS")


class ServiceEntryPort(Spec):
    number: Port
    name: DnsLabel
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
        if self.resolution == "DYNAMIC_DNS":
            self._looked_up()
        if self.resolution not in ("NONE", "STATIC") and any("/" in address for address in self.addresses):
            raise ValueError("addresses may be CIDRs with resolution NONE or STATIC only")
        classes = {of_istio_port(port.protocol) for port in self.ports}
        if self.resolution != "NONE" and len(self.hosts) > 1 and not classes <= _TELL_HOSTS_APART:
            raise ValueError("several hosts need HTTP or TLS ports, or resolution NONE: nothing else tells them apart")
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
            if endpoint.address.startswith("unix://"):
                self._socket(endpoint)
            for name in endpoint.ports:
                if name not in names:
                    raise ValueError(
                        f'endpoint {endpoint.address} names port "{name}", which is none of the entry\'s ports'
                    )
        return self

    def _looked_up(self) -> None:
        """Rules of hosts that are looked up per request."""
        if not all(host.startswith("*") for host in self.hosts):
            raise ValueError("resolution DYNAMIC_DNS is for wildcard hosts")
        if self.addresses or self.endpoints:
            raise ValueError("resolution DYNAMIC_DNS takes no addresses and no endpoints")
        for port in self.ports:
            if of_istio_port(port.protocol) not in ("HTTP", "TLS", "GRPC", "HTTP2"):
                raise ValueError(f"resolution DYNAMIC_DNS takes HTTP, HTTP2, GRPC and TLS ports; {port.number} is none")

    def _socket(self, endpoint: WorkloadEntrySpec) -> None:
        if self.resolution != "STATIC":
            raise ValueError(f"endpoint {endpoint.address}: a Unix socket needs resolution STATIC")
        if not is_socket_path(endpoint.address.removeprefix("unix://")):
            raise ValueError(f"endpoint {endpoint.address}: a Unix socket is written unix:///PATH")
        if endpoint.ports or len(self.ports) != 1:
            raise ValueError(f"endpoint {endpoint.address}: with a Unix socket an entry has one port, and it no ports")


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
    BOOKKEEPING = STATUS

    spec: WorkloadEntrySpec

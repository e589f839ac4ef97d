"""Schemas of EndpointSlice and Endpoints. Source of the field lists: kubernetes/api: discovery/v1/types.go, core/v1/types.go."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lab.manifests.schema.base import DnsLabel, IPAddress, Port, Spec, words
from lab.manifests.schema.metadata import Object, Transport


class TargetRef(Spec):
    BOOKKEEPING = words("apiVersion fieldPath resourceVersion uid")

    kind: str = ""
    name: str = ""
    namespace: str = ""


class EndpointConditions(Spec):
    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class Endpoint(Spec):
    UNUSED = words("deprecatedTopology hints nodeName zone")

    addresses: Annotated[list[str], Field(min_length=1)]
    conditions: EndpointConditions = Field(default_factory=EndpointConditions)
    hostname: DnsLabel = ""
    target_ref: TargetRef | None = None


class EndpointPort(Spec):
    UNUSED = words("appProtocol")

    port: Port
    name: str = ""
    protocol: Transport = "TCP"


class EndpointSlice(Object):
    address_type: Literal["IPv4", "IPv6", "FQDN"]
    endpoints: list[Endpoint] = Field(default_factory=list)
    ports: list[EndpointPort] = Field(default_factory=list)


class EndpointsAddress(Spec):
    UNUSED = words("nodeName")

    ip: IPAddress
    hostname: DnsLabel = ""
    target_ref: TargetRef | None = None


class EndpointsSubset(Spec):
    addresses: list[EndpointsAddress] = Field(default_factory=list)
    not_ready_addresses: list[EndpointsAddress] = Field(default_factory=list)
    ports: list[EndpointPort] = Field(default_factory=list)


class Endpoints(Object):
    subsets: list[EndpointsSubset] = Field(default_factory=list)

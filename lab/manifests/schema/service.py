"""Schema of Service. Source of the field list: kubernetes/api: core/v1/types.go."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from lab.manifests.schema.base import ClusterIP, DnsLabel, DnsName, Port, Spec, TargetPort, words
from lab.manifests.schema.metadata import LabelKey, Object, Transport


def _target_port(value: object) -> object:
    """0 and an empty name mean "not set" (kubernetes/kubernetes: pkg/apis/core/v1/defaults.go, SetDefaults_Service)."""
    return None if value == "" or (value == 0 and not isinstance(value, bool)) else value


class ServicePort(Spec):
    UNUSED = words("nodePort")

    port: Port
    name: DnsLabel = ""
    protocol: Transport = "TCP"
    target_port: Annotated[TargetPort | None, BeforeValidator(_target_port)] = None
    app_protocol: str = ""


class ServiceSpec(Spec):
    UNUSED = words(
        "allocateLoadBalancerNodePorts externalIPs externalTrafficPolicy healthCheckNodePort loadBalancerClass loadBalancerIP"
        " loadBalancerSourceRanges sessionAffinity sessionAffinityConfig topologyKeys"
    )

    type: Literal["ClusterIP", "NodePort", "LoadBalancer", "ExternalName"] = "ClusterIP"
    ports: list[ServicePort] = Field(default_factory=list)
    selector: dict[LabelKey, str] = Field(default_factory=dict)
    cluster_ip: ClusterIP = Field("", alias="clusterIP")
    cluster_ips: list[ClusterIP] = Field(default_factory=list, alias="clusterIPs")
    external_name: DnsName = ""
    publish_not_ready_addresses: bool = False
    internal_traffic_policy: Literal["Cluster", "Local"] = "Cluster"
    traffic_distribution: Literal["", "PreferClose", "PreferSameZone", "PreferSameNode"] = ""
    ip_families: list[Literal["IPv4", "IPv6"]] = Field(default_factory=list)
    ip_family_policy: Literal["SingleStack", "PreferDualStack", "RequireDualStack"] = "SingleStack"


class Service(Object):
    BOOKKEEPING = words("status")

    spec: ServiceSpec

"""Schemas of the Kubernetes kinds that the lab reads (core v1, apps/v1, discovery.k8s.io/v1).

Source of the field lists: kubernetes/api: core/v1/types.go, apps/v1/types.go, discovery/v1/types.go.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from lab.manifests.schema.base import DnsLabel, DnsName, IPAddress, Port, Spec, Timestamp, is_dns_name, words


def _label_key(key: str) -> str:
    prefix, slash, name = key.rpartition("/")
    if slash and not is_dns_name(prefix):
        raise ValueError("the prefix of a key is a DNS name")
    if not re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", name):
        raise ValueError(
            "a key is at most 63 letters, digits, '-', '_' and '.', and begins and ends with a letter or digit"
        )
    return key


def _label_value(value: str) -> str:
    if value and not re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", value):
        raise ValueError(
            "a label's value is at most 63 letters, digits, '-', '_' and '.', and begins and ends with a letter or digit"
        )
    return value


def _port_name(name: str) -> str:
    if not re.fullmatch(r"(?=.*[a-z])[a-z0-9]+(-[a-z0-9]+)*", name) or len(name) > 15:
        raise ValueError(
            "a port's name is at most 15 lower case letters, digits and single '-', with at least one letter"
        )
    return name


LabelKey = Annotated[str, AfterValidator(_label_key)]
Labels = dict[LabelKey, Annotated[str, AfterValidator(_label_value)]]
Annotations = dict[LabelKey, str]
PortName = Annotated[str, AfterValidator(_port_name)]
Transport = Literal["TCP", "UDP"]


class ObjectMeta(Spec):
    UNUSED = words("generateName clusterName")
    BOOKKEEPING = words(
        "uid resourceVersion generation managedFields ownerReferences finalizers selfLink deletionTimestamp deletionGracePeriodSeconds"
    )

    name: DnsName
    namespace: DnsLabel = ""
    labels: Labels = Field(default_factory=dict)
    annotations: Annotations = Field(default_factory=dict)
    creation_timestamp: Timestamp = 0.0


class TemplateMeta(ObjectMeta):
    """metadata of a pod template: without a name of its own."""

    name: DnsName = ""


class Object(Spec):
    """What every object begins with; kinds add ``spec``."""

    api_version: str
    kind: str
    metadata: ObjectMeta


class Namespace(Object):
    UNUSED = words("spec")
    BOOKKEEPING = words("status")


class LabelSelectorRequirement(Spec):
    key: LabelKey
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: list[str] = Field(default_factory=list)


class LabelSelector(Spec):
    match_labels: dict[LabelKey, str] = Field(default_factory=dict)
    match_expressions: list[LabelSelectorRequirement] = Field(default_factory=list)


class ContainerPort(Spec):
    UNUSED = words("hostPort hostIP")

    container_port: Port
    name: PortName = ""
    protocol: Transport = "TCP"


class ObjectFieldSelector(Spec):
    field_path: str
    api_version: str = "v1"


class EnvVarSource(Spec):
    UNUSED = words("configMapKeyRef secretKeyRef resourceFieldRef fileKeyRef")

    field_ref: ObjectFieldSelector | None = None


class EnvVar(Spec):
    name: str
    value: str | None = None
    value_from: EnvVarSource | None = None


class SecurityContext(Spec):
    UNUSED = words(
        "allowPrivilegeEscalation appArmorProfile capabilities privileged procMount readOnlyRootFilesystem runAsNonRoot seLinuxOptions seccompProfile windowsOptions"
    )

    run_as_user: Annotated[int, Field(ge=0, le=4294967294)] | None = None
    run_as_group: Annotated[int, Field(ge=0, le=4294967294)] | None = None


class PodSecurityContext(SecurityContext):
    UNUSED = words(
        "appArmorProfile fsGroup fsGroupChangePolicy runAsNonRoot seLinuxChangePolicy seLinuxOptions seccompProfile supplementalGroups supplementalGroupsPolicy sysctls windowsOptions"
    )


class Container(Spec):
    UNUSED = words(
        "envFrom imagePullPolicy lifecycle livenessProbe readinessProbe startupProbe resizePolicy resources restartPolicy restartPolicyRules stdin stdinOnce"
        " terminationMessagePath terminationMessagePolicy tty volumeDevices volumeMounts"
    )

    name: DnsLabel
    image: str = ""
    command: list[str] = Field(default_factory=list)
    args: list[str] = Field(default_factory=list)
    env: list[EnvVar] = Field(default_factory=list)
    ports: list[ContainerPort] = Field(default_factory=list)
    security_context: SecurityContext | None = None
    working_dir: str = ""


class PodDNSConfig(Spec):
    UNUSED = words("nameservers options")

    searches: list[str] = Field(default_factory=list)


class PodSpec(Spec):
    UNUSED = words(
        "activeDeadlineSeconds affinity automountServiceAccountToken dnsPolicy enableServiceLinks ephemeralContainers hostAliases hostIPC hostPID hostUsers"
        " hostnameOverride imagePullSecrets initContainers nodeName nodeSelector os overhead preemptionPolicy priority priorityClassName readinessGates"
        " resourceClaims resources restartPolicy runtimeClassName schedulerName schedulingGates setHostnameAsFQDN shareProcessNamespace"
        " terminationGracePeriodSeconds tolerations topologySpreadConstraints volumes workloadRef"
    )

    containers: Annotated[list[Container], Field(min_length=1)]
    service_account_name: DnsName = ""
    service_account: DnsName = ""
    hostname: DnsLabel = ""
    subdomain: DnsLabel = ""
    dns_config: PodDNSConfig | None = None
    security_context: PodSecurityContext | None = None
    host_network: bool = False


class PodIP(Spec):
    ip: IPAddress


class PodCondition(Spec):
    BOOKKEEPING = words("lastProbeTime lastTransitionTime reason message observedGeneration")

    type: str
    status: Literal["True", "False", "Unknown"]


class PodStatus(Spec):
    BOOKKEEPING = words(
        "allocatedResources containerStatuses ephemeralContainerStatuses extendedResourceClaimStatus hostIP hostIPs initContainerStatuses message"
        " nominatedNodeName observedGeneration phase qosClass reason resize resourceClaimStatuses resources startTime"
    )

    pod_ip: IPAddress = Field("", alias="podIP")
    pod_ips: list[PodIP] = Field(default_factory=list, alias="podIPs")
    conditions: list[PodCondition] = Field(default_factory=list)


class Pod(Object):
    spec: PodSpec
    status: PodStatus | None = None


class PodTemplate(Spec):
    metadata: TemplateMeta
    spec: PodSpec


class DeploymentSpec(Spec):
    UNUSED = words("minReadySeconds paused progressDeadlineSeconds revisionHistoryLimit strategy")

    selector: LabelSelector
    template: PodTemplate
    replicas: Annotated[int, Field(ge=0, le=250)] = 1


class Deployment(Object):
    BOOKKEEPING = words("status")

    spec: DeploymentSpec


class ServicePort(Spec):
    UNUSED = words("nodePort")

    port: Port
    name: DnsLabel = ""
    protocol: Transport = "TCP"
    target_port: Port | PortName | None = None
    app_protocol: str = ""


class ServiceSpec(Spec):
    UNUSED = words(
        "allocateLoadBalancerNodePorts externalIPs externalTrafficPolicy healthCheckNodePort loadBalancerClass loadBalancerIP"
        " loadBalancerSourceRanges sessionAffinity sessionAffinityConfig trafficDistribution topologyKeys"
    )

    type: Literal["ClusterIP", "NodePort", "LoadBalancer", "ExternalName"] = "ClusterIP"
    ports: list[ServicePort] = Field(default_factory=list)
    selector: dict[LabelKey, str] = Field(default_factory=dict)
    cluster_ip: IPAddress | Literal["None", ""] = Field("", alias="clusterIP")
    cluster_ips: list[IPAddress | Literal["None"]] = Field(default_factory=list, alias="clusterIPs")
    external_name: DnsName = ""
    publish_not_ready_addresses: bool = False
    internal_traffic_policy: Literal["Cluster", "Local"] = "Cluster"
    ip_families: list[Literal["IPv4", "IPv6"]] = Field(default_factory=list)
    ip_family_policy: Literal["SingleStack", "PreferDualStack", "RequireDualStack"] = "SingleStack"


class Service(Object):
    BOOKKEEPING = words("status")

    spec: ServiceSpec


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
    conditions: EndpointConditions = EndpointConditions()
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


class ConfigMap(Object):
    UNUSED = words("binaryData immutable")

    data: dict[str, str] = Field(default_factory=dict)

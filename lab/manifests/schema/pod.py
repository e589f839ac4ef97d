"""Schema of Pod. Source of the field lists: kubernetes/api: core/v1/types.go."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lab.manifests.schema.base import DnsLabel, DnsName, EnvName, IPAddress, Port, PortName, ProcessText, Spec, words
from lab.manifests.schema.metadata import Object, Transport
from lab.manifests.schema.probe import Lifecycle, Probe


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
    name: EnvName
    value: ProcessText | None = None
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
        "envFrom imagePullPolicy resizePolicy resources restartPolicy restartPolicyRules stdin stdinOnce"
        " terminationMessagePath terminationMessagePolicy tty volumeDevices volumeMounts"
    )

    name: DnsLabel
    image: str = ""
    command: list[ProcessText] = Field(default_factory=list)
    args: list[ProcessText] = Field(default_factory=list)
    env: list[EnvVar] = Field(default_factory=list)
    ports: list[ContainerPort] = Field(default_factory=list)
    security_context: SecurityContext | None = None
    working_dir: ProcessText = ""
    readiness_probe: Probe | None = None
    liveness_probe: Probe | None = None
    startup_probe: Probe | None = None
    lifecycle: Lifecycle | None = None


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

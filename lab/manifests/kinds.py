"""The kinds that manifests may hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

SCOPED: Literal["namespace"] = "namespace"
CLUSTER: Literal["cluster"] = "cluster"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind that the lab acts on; ``schema`` is MODULE:CLASS in ``lab.manifests.schema``, imported when first met."""

    schema: str
    versions: tuple[str, ...]
    scope: Literal["namespace", "cluster"] = SCOPED


_NETWORKING, _SECURITY, _LAB = "networking.istio.io", "security.istio.io", "sidecarlab.dev"
_ISTIO_VERSIONS = ("v1", "v1beta1", "v1alpha3")

KINDS: Mapping[tuple[str, str], Kind] = {
    ("", "Namespace"): Kind("metadata:Namespace", ("v1",), CLUSTER),
    ("", "Pod"): Kind("pod:Pod", ("v1",)),
    ("", "Service"): Kind("service:Service", ("v1",)),
    ("", "Endpoints"): Kind("endpoints:Endpoints", ("v1",)),
    ("", "ConfigMap"): Kind("metadata:ConfigMap", ("v1",)),
    ("apps", "Deployment"): Kind("deployment:Deployment", ("v1",)),
    ("discovery.k8s.io", "EndpointSlice"): Kind("endpoints:EndpointSlice", ("v1", "v1beta1")),
    (_NETWORKING, "ServiceEntry"): Kind("service_entry:ServiceEntry", _ISTIO_VERSIONS),
    (_NETWORKING, "WorkloadEntry"): Kind("service_entry:WorkloadEntry", _ISTIO_VERSIONS),
    (_NETWORKING, "Sidecar"): Kind("sidecar:Sidecar", _ISTIO_VERSIONS),
    (_NETWORKING, "DestinationRule"): Kind("destination_rule:DestinationRule", _ISTIO_VERSIONS),
    (_NETWORKING, "VirtualService"): Kind("virtual_service:VirtualService", _ISTIO_VERSIONS),
    (_SECURITY, "PeerAuthentication"): Kind("peer_authentication:PeerAuthentication", ("v1", "v1beta1")),
    (_LAB, "ExternalHost"): Kind("external_host:ExternalHost", ("v1alpha1",), CLUSTER),
    (_LAB, "Link"): Kind("link:Link", ("v1alpha1",), CLUSTER),
    (_LAB, "TrafficTest"): Kind("traffic_test:TrafficTest", ("v1alpha1",), CLUSTER),
}

ACCEPTED: frozenset[tuple[str, str]] = frozenset(
    (group, kind)
    for group, kinds in {
        "": "ServiceAccount Secret PersistentVolume PersistentVolumeClaim LimitRange ResourceQuota Event Node",
        "rbac.authorization.k8s.io": "Role RoleBinding ClusterRole ClusterRoleBinding",
        "policy": "PodDisruptionBudget",
        "autoscaling": "HorizontalPodAutoscaler",
        "storage.k8s.io": "StorageClass",
        "scheduling.k8s.io": "PriorityClass",
        "apiextensions.k8s.io": "CustomResourceDefinition",
        "telemetry.istio.io": "Telemetry",
    }.items()
    for kind in kinds.split()
)
"""Known kinds without effect on where traffic goes: accepted with a warning."""

_DEPLOYMENT = "Write it as a Deployment or as Pods."
REFUSED: Mapping[tuple[str, str], str] = {
    ("apps", "StatefulSet"): _DEPLOYMENT,
    ("apps", "DaemonSet"): _DEPLOYMENT,
    ("apps", "ReplicaSet"): _DEPLOYMENT,
    ("", "ReplicationController"): _DEPLOYMENT,
    ("batch", "Job"): _DEPLOYMENT,
    ("batch", "CronJob"): _DEPLOYMENT,
    ("networking.k8s.io", "NetworkPolicy"): "Remove it.",
    ("networking.k8s.io", "Ingress"): "Remove it.",
    (_NETWORKING, "Gateway"): "Remove it: the lab runs sidecars only.",
    (_NETWORKING, "EnvoyFilter"): "Remove it.",
    (_NETWORKING, "ProxyConfig"): "Use defaultConfig in the istio ConfigMap, or the annotation proxy.istio.io/config.",
    (_NETWORKING, "WorkloadGroup"): "Write WorkloadEntries.",
    (_SECURITY, "AuthorizationPolicy"): "Remove it.",
    (_SECURITY, "RequestAuthentication"): "Remove it.",
    ("extensions.istio.io", "WasmPlugin"): "Remove it.",
    ("gateway.networking.k8s.io", "Gateway"): "Remove it: the lab runs sidecars only.",
    ("gateway.networking.k8s.io", "HTTPRoute"): "Write a VirtualService.",
    ("gateway.networking.k8s.io", "GRPCRoute"): "Write a VirtualService.",
}
"""Known kinds that would change where traffic goes, so that ignoring them would lie; each with what to do."""

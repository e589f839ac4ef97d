"""Sidecar injection: which pods get one, and what its two containers are started with.

Sources: istio/istio: pkg/kube/inject/inject.go (injectRequired), pkg/kube/inject/validate.go,
manifests/charts/istio-control/istio-discovery/templates/mutatingwebhook.yaml and files/injection-template.yaml.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast

from lab.manifests import app_probes
from lab.manifests.model import Mesh, Pod

if TYPE_CHECKING:
    from lab.manifests.item import Item
    from lab.manifests.schema import deployment

INJECT = "sidecar.istio.io/inject"
STATUS = "sidecar.istio.io/status"
PROXY_CONFIG = "proxy.istio.io/config"
PROXY_CONTAINER = "istio-proxy"
PROXY_UID = 1337
PROXY_PORTS = frozenset({15000, 15001, 15004, 15006, 15008, 15020, 15021, 15053, 15090})
"""Ports of agent and Envoy in a pod (https://istio.io/latest/docs/ops/deployment/application-requirements/)."""
IGNORED_NAMESPACES = frozenset({"kube-system", "kube-public", "kube-node-lease", "local-path-storage"})
_TRUE = frozenset({"y", "yes", "true", "on"})


def decide(
    namespace: str, namespace_labels: Mapping[str, str], labels: Mapping[str, str], annotations: Mapping[str, str]
) -> bool:
    """Whether Istio would inject a sidecar into a pod.

    First the webhook's selectors (namespace label ``istio-injection`` or ``istio.io/rev``, pod label
    ``sidecar.istio.io/inject``), then the injector's own rules (that label, else the annotation of the same name).
    """
    if namespace in IGNORED_NAMESPACES:
        return False
    label = labels.get(INJECT)
    switch = namespace_labels.get("istio-injection")
    revision = namespace_labels.get("istio.io/rev")
    if switch is not None:
        called = switch == "enabled" and label != "false"
    elif revision is not None:
        called = revision == "default" and label != "false"
    else:
        called = label == "true" or (labels.get("istio.io/rev") == "default" and label != "false")
    if not called:
        return False
    asked = label if label is not None else annotations.get(INJECT, "")
    return asked == "" or asked.lower() in _TRUE


def decided(item: Item, namespace_labels: Mapping[str, str]) -> bool:
    """Whether a Pod, or the pods of a Deployment, have a sidecar: injected, or with the injector's mark already."""
    labels, annotations = item.meta.labels, item.meta.annotations
    if item.kind == "Deployment":
        template = cast("deployment.Deployment", item.schema).spec.template.metadata
        labels, annotations = template.labels, template.annotations
    return STATUS in annotations or decide(item.meta.namespace, namespace_labels, labels, annotations)


def _cidrs(value: str) -> None:
    for part in value.split(",") if value else []:
        try:
            ipaddress.ip_network(part.strip(), strict=False)
        except ValueError:
            raise ValueError(f'"{part}" is no CIDR') from None
        if "/" not in part:
            raise ValueError(f'"{part}" has no prefix length')


def _cidrs_or_all(value: str) -> None:
    if value != "*":
        _cidrs(value)


def _ports(value: str) -> None:
    for part in value.split(",") if value else []:
        if not part.strip().isdigit() or int(part) > 65535:
            raise ValueError(f'"{part}" is no port')


def _ports_or_all(value: str) -> None:
    if value != "*":
        _ports(value)


def _interfaces(value: str) -> None:
    for part in value.split(","):
        if not re.fullmatch(r"[a-zA-Z][a-zA-Z0-9_.-]{0,14}", part.strip()):
            raise ValueError(f'"{part}" is no interface name')


def _mode(value: str) -> None:
    if value not in ("REDIRECT", "TPROXY", "NONE"):
        raise ValueError("it must be REDIRECT, TPROXY or NONE")


def _bool(value: str) -> None:
    if value.lower() not in _TRUE | {"n", "no", "false", "off", ""}:
        raise ValueError('it must be "true" or "false"')


ANNOTATIONS: Mapping[str, Callable[[str], None]] = {
    INJECT: _bool,
    "sidecar.istio.io/interceptionMode": _mode,
    "traffic.sidecar.istio.io/includeOutboundIPRanges": _cidrs_or_all,
    "traffic.sidecar.istio.io/excludeOutboundIPRanges": _cidrs,
    "traffic.sidecar.istio.io/includeInboundPorts": _ports_or_all,
    "traffic.sidecar.istio.io/excludeInboundPorts": _ports,
    "traffic.sidecar.istio.io/includeOutboundPorts": _ports,
    "traffic.sidecar.istio.io/excludeOutboundPorts": _ports,
    "traffic.sidecar.istio.io/excludeInterfaces": _interfaces,
    "istio.io/reroute-virtual-interfaces": _interfaces,
    "traffic.sidecar.istio.io/kubevirtInterfaces": _interfaces,
    "status.sidecar.istio.io/port": _ports,
}
"""The annotations that steer interception, each with the check that admission makes (ValueError)."""

OTHER_ANNOTATIONS = frozenset(
    {
        STATUS,
        PROXY_CONFIG,
        app_probes.REWRITE,
        "sidecar.istio.io/logLevel",
        "sidecar.istio.io/componentLogLevel",
        "sidecar.istio.io/agentLogLevel",
    }
)
"""Further ``sidecar.istio.io`` annotations that the lab acts on."""

_UNUSED = (
    "bootstrapOverride capNetBindService discoveryAddress enableCoreDump extraStatTags nativeSidecar proxyCPU"
    " proxyCPULimit proxyImage proxyImageType proxyMemory proxyMemoryLimit statsCompression"
    " statsHistogramBuckets statsInclusionPrefixes statsInclusionRegexps statsInclusionSuffixes userVolume userVolumeMount"
)
UNUSED_ANNOTATIONS = frozenset(f"sidecar.istio.io/{name}" for name in _UNUSED.split())


def proxy_config(mesh: Mesh, pod: Pod) -> dict[str, object]:
    """The pod's ProxyConfig as written: the mesh's defaultConfig under the annotation ``proxy.istio.io/config``.

    Fields replace each other whole, except proxyMetadata and proxyHeaders, which merge key by key
    (istio/istio: pkg/config/mesh/mesh.go, MergeProxyConfig). Defaults are left to the agent.
    """
    merged = dict(mesh.mesh_config.default_config)
    for key, value in pod.proxy_config.items():
        old = merged.get(key)
        if key in ("proxyMetadata", "proxyHeaders") and isinstance(old, Mapping) and isinstance(value, Mapping):
            merged[key] = {**old, **value}
        else:
            merged[key] = value
    return merged


def _metadata(mesh: Mesh, pod: Pod) -> dict[str, str]:
    metadata = proxy_config(mesh, pod).get("proxyMetadata", {})
    return {str(key): str(value) for key, value in sorted(metadata.items())} if isinstance(metadata, Mapping) else {}


def interception_mode(mesh: Mesh, pod: Pod) -> str:
    """REDIRECT, TPROXY or NONE: the annotation, else ProxyConfig."""
    return pod.meta.annotations.get("sidecar.istio.io/interceptionMode") or str(
        proxy_config(mesh, pod).get("interceptionMode", "REDIRECT")
    )


def _excluded_inbound(status_port: str, excluded: str) -> str:
    """The list for ``-d``; the status port joins it unless it is there already, 0 or empty (template.go: excludeInboundPort)."""
    if status_port.strip() in ("", "0"):
        return excluded
    ports = [part.strip() for part in excluded.split(",") if part.strip()]
    return excluded if status_port.strip() in ports else ",".join([*ports, status_port.strip()])


def init_args(mesh: Mesh, pod: Pod) -> list[str]:
    """The flags of the pod's init container; an empty list if it has none (not injected, or interception NONE)."""
    mode = interception_mode(mesh, pod)
    if not pod.injected or mode == "NONE":
        return []
    notes = pod.meta.annotations

    def traffic(name: str, default: str) -> str:
        return notes.get(f"traffic.sidecar.istio.io/{name}", default)

    excluded = _excluded_inbound(notes.get("status.sidecar.istio.io/port", "15020"), traffic("excludeInboundPorts", ""))
    args = [
        "-p",
        str(mesh.mesh_config.proxy_listen_port),
        "-z",
        str(mesh.mesh_config.proxy_inbound_listen_port),
        "-u",
        str(PROXY_UID),
        "-m",
        mode,
    ]
    args += ["-i", traffic("includeOutboundIPRanges", "*"), "-x", traffic("excludeOutboundIPRanges", "")]
    args += ["-b", traffic("includeInboundPorts", "*"), "-d", f"15090,15021,{excluded}"]
    for name, flag in (("includeOutboundPorts", "-q"), ("excludeOutboundPorts", "-o")):
        if f"traffic.sidecar.istio.io/{name}" in notes:
            args += [flag, traffic(name, "")]
    virtual = notes.get("istio.io/reroute-virtual-interfaces", notes.get("traffic.sidecar.istio.io/kubevirtInterfaces"))
    if virtual is not None:
        args += ["-k", virtual]
    if "traffic.sidecar.istio.io/excludeInterfaces" in notes:
        args += ["-c", traffic("excludeInterfaces", "")]
    return [*args, f"--log_output_level={notes.get('sidecar.istio.io/agentLogLevel', 'default:info')}"]


def init_env(mesh: Mesh, pod: Pod) -> dict[str, str]:
    """The environment of the init container: everything in proxyMetadata."""
    return _metadata(mesh, pod) if pod.injected else {}


def agent_args(mesh: Mesh, pod: Pod) -> list[str]:
    """The arguments of the istio-proxy container, ``proxy sidecar`` first; an empty list without injection."""
    if not pod.injected:
        return []
    notes = pod.meta.annotations
    return [
        "proxy",
        "sidecar",
        "--domain",
        f"{pod.meta.namespace}.svc.{mesh.domain_suffix}",
        f"--proxyLogLevel={notes.get('sidecar.istio.io/logLevel', 'warning')}",
        f"--proxyComponentLogLevel={notes.get('sidecar.istio.io/componentLogLevel', 'misc:error')}",
        f"--log_output_level={notes.get('sidecar.istio.io/agentLogLevel', 'default:info')}",
    ]


def agent_env(mesh: Mesh, pod: Pod) -> dict[str, str]:
    """The environment of the istio-proxy container, as the injection template writes it; empty without injection."""
    if not pod.injected:
        return {}
    config = mesh.mesh_config
    ports = [
        {"name": port.name, "containerPort": port.port, "protocol": port.protocol}
        if port.name
        else {"containerPort": port.port, "protocol": port.protocol}
        for container in pod.containers
        for port in container.ports
    ]
    api = {"Pod": "v1", "ReplicationController": "v1", "Job": "batch/v1", "CronJob": "batch/v1"}.get(
        pod.owner_kind, "apps/v1"
    )
    owner = pod.owner_name or pod.meta.name
    asked = {
        "ISTIO_KUBE_APP_PROBERS": app_probes.probers(pod, config.status_port),
        "ISTIO_PROMETHEUS_ANNOTATIONS": pod.scrape,
    }
    effective = proxy_config(mesh, pod)
    return {
        "PILOT_CERT_PROVIDER": "istiod",
        "POD_NAME": pod.meta.name,
        "POD_NAMESPACE": pod.meta.namespace,
        "INSTANCE_IP": pod.ip,
        "SERVICE_ACCOUNT": pod.service_account,
        "HOST_IP": mesh.fabric.gateway,
        "PROXY_CONFIG": json.dumps(effective, separators=(",", ":")),
        "ISTIO_META_POD_PORTS": json.dumps(ports, separators=(",", ":")),
        "ISTIO_META_APP_CONTAINERS": ",".join(container.name for container in pod.containers),
        "ISTIO_META_CLUSTER_ID": "Kubernetes",
        "ISTIO_META_NODE_NAME": "node",
        "ISTIO_META_INTERCEPTION_MODE": interception_mode(mesh, pod),
        "ISTIO_META_WORKLOAD_NAME": owner,
        "ISTIO_META_OWNER": f"kubernetes://apis/{api}/namespaces/{pod.meta.namespace}/{pod.owner_kind.lower()}s/{owner}",
        "ISTIO_META_MESH_ID": str(effective.get("meshId") or config.trust_domain),
        "TRUST_DOMAIN": config.trust_domain,
        # A control plane without TLS has its CA on the same plaintext port: the agent then uses discoveryAddress.
        **({} if effective.get("controlPlaneAuthPolicy") == "NONE" else {"CA_ADDR": "istiod.istio-system.svc:15012"}),
        **{name: value for name, value in asked.items() if value},
        **_metadata(mesh, pod),
    }

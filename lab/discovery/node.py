"""The proxy's node: what an Envoy (through its agent) says about itself in its first request."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lab.manifests.model import Mesh, Pod

DEFAULT_CLUSTER_ID = "Kubernetes"


class NodeError(ValueError):
    """The node of a request is unusable; the text goes back to the proxy (gRPC InvalidArgument)."""


@dataclass(frozen=True, slots=True)
class Node:
    """A sidecar proxy (istio/istio: pilot/pkg/model/context.go).

    ``ips`` holds the pod's addresses, the first one is the one that names it. ``metadata`` is plain
    JSON data; ``labels`` are the workload's labels as the node reports them.
    """

    id: str
    ips: tuple[str, ...]
    namespace: str
    name: str = ""
    cluster: str = ""
    domain: str = ""
    type: str = "sidecar"
    labels: Mapping[str, str] = field(default_factory=dict)
    locality: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def text(self, key: str) -> str:
        """A metadata value as a string, ``""`` if unset."""
        value = self.metadata.get(key)
        if value is None:
            return ""
        return value if isinstance(value, str) else str(value)

    def flag(self, key: str) -> bool:
        """A metadata boolean; agents write them as the strings ``true`` and ``1``."""
        value = self.metadata.get(key)
        return value is True or (isinstance(value, str) and value.lower() in ("true", "1"))

    @property
    def dns_capture(self) -> bool:
        return self.flag("DNS_CAPTURE")

    @property
    def interception_mode(self) -> str:
        mode = self.text("INTERCEPTION_MODE")
        return mode if mode in ("TPROXY", "NONE") else "REDIRECT"

    @property
    def http10(self) -> bool:
        return self.text("HTTP10") == "1"

    @property
    def evidence(self) -> str:
        """Path of the evidence log, ``""`` if none is wanted."""
        return self.text("SIDECARLAB_EVIDENCE")

    @property
    def cluster_id(self) -> str:
        return self.text("CLUSTER_ID") or DEFAULT_CLUSTER_ID

    @property
    def proxy_metadata(self) -> Mapping[str, Any]:
        config = self.metadata.get("PROXY_CONFIG")
        found = config.get("proxyMetadata") if isinstance(config, Mapping) else None
        return found if isinstance(found, Mapping) else {}

    @property
    def families(self) -> tuple[int, ...]:
        """Address families this proxy is configured for, the primary first: ``(4,)``, ``(6,)``, ``(4, 6)`` or ``(6, 4)``.

        Both only with ISTIO_DUAL_STACK, which is set in proxyMetadata as for a real agent; else a pod with
        both kinds of addresses is an IPv4 one (istio/istio: pilot/pkg/model/context.go, pkg/features).
        """
        seen = list(dict.fromkeys(6 if ":" in ip else 4 for ip in self.ips))
        if len(seen) == 2 and str(self.proxy_metadata.get("ISTIO_DUAL_STACK", "")).lower() not in ("true", "1"):
            return (4,)
        return tuple(seen) or (4,)

    @property
    def wildcards(self) -> tuple[str, ...]:
        return tuple("0.0.0.0" if family == 4 else "::" for family in self.families)

    @property
    def localhosts(self) -> tuple[str, ...]:
        return tuple("127.0.0.1" if family == 4 else "::1" for family in self.families)

    def supports(self, address: str) -> bool:
        """Whether an IP or CIDR is of a family that this proxy has."""
        return (6 if ":" in address else 4) in self.families


def split_locality(locality: str) -> str:
    """A locality label as ``region/zone/subzone``; dots stand for slashes if there are none."""
    return locality if "/" in locality else locality.replace(".", "/")


def parse(
    id: str, cluster: str = "", metadata: Mapping[str, Any] | None = None, locality: tuple[str, str, str] = ("", "", "")
) -> Node:
    """A Node from the fields of an xDS node message.

    ``id`` is ``<type>~<ip>~<pod>.<ns>~<ns>.svc.<domain>``. Raises NodeError when it is not, or holds no address.
    """
    metadata = metadata or {}
    parts = id.split("~")
    if len(parts) != 4:
        raise NodeError(f"missing parts in the service node {id!r}: expected <type>~<ip>~<id>~<domain>")
    kind, ip, name, domain = parts
    if kind not in ("sidecar", "router", "waypoint", "ztunnel"):
        raise NodeError(f"invalid node type {kind!r} in {id!r}")
    wanted = str(metadata.get("INSTANCE_IPS") or ip)
    ips = []
    for text in wanted.split(","):
        try:
            ips.append(str(ipaddress.ip_address(text.strip())))
        except ValueError:
            continue
    if not ips:
        raise NodeError(f"no valid IP address in the node id {id!r} or its metadata")
    labels = metadata.get("LABELS") or metadata.get("STATIC_LABELS") or {}
    labels = {str(k): str(v) for k, v in labels.items()} if isinstance(labels, Mapping) else {}
    namespace = str(metadata.get("NAMESPACE") or "") or domain.split(".")[0]
    label = labels.get("topology.istio.io/locality") or labels.get("istio-locality") or ""
    return Node(
        id=id,
        ips=tuple(ips),
        namespace=namespace,
        name=name,
        cluster=cluster,
        domain=domain,
        type=kind,
        labels=labels,
        locality=split_locality(label) if label else "/".join(p for p in locality if p),
        metadata=metadata,
    )


def _proxy_config(mesh: Mesh, pod: Pod) -> dict[str, Any]:
    """The effective ProxyConfig of a pod: mesh default, then its annotation (istio/istio: pilot/cmd/pilot-agent/config)."""
    config: dict[str, Any] = dict(mesh.mesh_config.default_config)
    written = pod.meta.annotations.get("proxy.istio.io/config", "")
    if written:
        import yaml  # only pods with the annotation pay for it

        overlay = yaml.safe_load(written)
        for key, value in (overlay if isinstance(overlay, dict) else {}).items():
            if key == "proxyMetadata" and isinstance(value, Mapping):
                value = {**(config.get("proxyMetadata") or {}), **value}
            config[key] = value
    return config


def node_for_pod(mesh: Mesh, pod: Pod) -> Node:
    """The Node that the agent of ``pod`` would present to discovery."""
    config = _proxy_config(mesh, pod)
    meta: dict[str, Any] = {"PROXY_CONFIG": config}
    for key, value in (config.get("proxyMetadata") or {}).items():
        if key.startswith("ISTIO_META_"):
            meta[key.removeprefix("ISTIO_META_")] = str(value)
    mode = pod.meta.annotations.get("sidecar.istio.io/interceptionMode") or config.get("interceptionMode") or "REDIRECT"
    meta.setdefault("CLUSTER_ID", DEFAULT_CLUSTER_ID)
    meta.update(
        {
            "INTERCEPTION_MODE": str(mode),
            "INSTANCE_IPS": ",".join(pod.ips),
            "LABELS": dict(pod.meta.labels),
            "NAME": pod.meta.name,
            "NAMESPACE": pod.meta.namespace,
            "SERVICE_ACCOUNT": pod.service_account,
            "WORKLOAD_NAME": pod.owner_name or pod.meta.name,
        }
    )
    domain = f"{pod.meta.namespace}.svc.{mesh.domain_suffix}"
    return parse(
        f"sidecar~{pod.ip}~{pod.name}~{domain}", f"{pod.owner_name or pod.meta.name}.{pod.meta.namespace}", meta
    )

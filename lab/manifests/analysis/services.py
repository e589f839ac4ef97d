"""Doubts about the names of a Service's ports.

Source: istio/istio: pkg/config/analysis/analyzers/service/portname.go.
"""

from __future__ import annotations

from collections.abc import Iterator

from lab.manifests.analysis.finding import Finding
from lab.manifests.model import Mesh


def findings(mesh: Mesh) -> Iterator[Finding]:
    """IST0118 and, for an ExternalName, IST0150; not of the control plane's own Services."""
    for service in mesh.services:
        labels = service.meta.labels
        if "istio" in labels or labels.get("release") == "istio":
            continue
        for index, port in enumerate(service.ports):
            unsaid = port.protocol == "AUTO"
            path = ("spec", "ports", index)
            said = f'the name "{port.name}" of port {port.port} says no protocol' if port.name else ""
            said = said or f"port {port.port} has no name that says its protocol"
            if port.app_protocol:
                said = f'appProtocol "{port.app_protocol}" of port {port.port}, which counts instead of its name, says no protocol'
            if service.external_name and (unsaid or port.name == "tcp"):
                message = f"{said}, as ports of an ExternalName should"
                yield Finding("IST0150", "Service", service.meta, path, message)
            elif unsaid and not service.external_name:
                message = (
                    f"{said}, so proxies detect it; http, tcp or another of Istio's words in front would tell them"
                )
                yield Finding("IST0118", "Service", service.meta, path, message, "info")

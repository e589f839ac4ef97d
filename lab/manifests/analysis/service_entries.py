"""Doubts about ServiceEntries.

Source: istio/istio: pkg/config/analysis/analyzers/serviceentry.
"""

from __future__ import annotations

from collections.abc import Iterator

from lab.manifests.analysis.finding import Finding, mapping, meet
from lab.manifests.model import Mesh, ServiceEntry


def findings(mesh: Mesh) -> Iterator[Finding]:
    """IST0134 and IST0177."""
    metadata = mapping(mesh.mesh_config.default_config.get("proxyMetadata"))
    captured = str(metadata.get("ISTIO_META_DNS_CAPTURE", "")).lower() == "true"
    protocols: dict[tuple[str, int], tuple[str, ServiceEntry]] = {}
    for entry in mesh.service_entries:
        for index, port in enumerate(entry.ports):
            if port.protocol in ("TCP", "AUTO") and not entry.addresses and not captured:
                yield Finding(
                    "IST0134",
                    "ServiceEntry",
                    entry.meta,
                    ("spec", "ports", index),
                    f"it has no addresses, so that its {port.protocol} port takes everything to port {port.port};"
                    " addresses, or DNS capture, would tell it apart",
                )
            for host in entry.hosts:
                protocol, other = protocols.setdefault((host, port.port), (port.protocol, entry))
                if protocol != port.protocol and meet(mesh, other.meta, other.export_to, entry.meta, entry.export_to):
                    yield Finding(
                        "IST0177",
                        "ServiceEntry",
                        entry.meta,
                        ("spec", "ports", index),
                        f"port {port.port} of {host} is {port.protocol} here, but {protocol} in {other.meta.key}",
                    )

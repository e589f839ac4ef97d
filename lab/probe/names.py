"""What the manifests call an address. Pure."""

from __future__ import annotations

from lab.manifests.model import Mesh


def of(mesh: Mesh) -> dict[str, str]:
    """Every address that the manifests (or the lab itself) gave to something, with words for it."""
    fabric = mesh.fabric
    found = {fabric.gateway: "the node"}
    for entry in mesh.service_entries:
        found |= dict.fromkeys(entry.addresses, f"ServiceEntry {entry.meta.name}.{entry.meta.namespace}")
        for host, addresses in entry.auto_addresses.items():
            found |= dict.fromkeys(addresses, f"automatic address of {host}")
    for external in mesh.external_hosts:
        found |= dict.fromkeys(external.addresses, f"external host {external.meta.name}")
    for pod in mesh.pods:
        found |= dict.fromkeys(pod.ips, f"pod {pod.name}")
    for service in mesh.services:
        found |= dict.fromkeys(service.cluster_ips, f"VIP of {service.meta.name}.{service.meta.namespace}")
    found |= {a: "cluster DNS" for a in (fabric.dns, fabric.dns6) if a}
    found |= {a: "discovery" for a in (fabric.discovery, fabric.discovery6) if a}
    return found

"""Services and their endpoints to the model."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from lab.manifests import protocol
from lab.manifests.addresses import Claim, ServiceDraft, one_per_family
from lab.manifests.document import locate
from lab.manifests.item import Item
from lab.manifests.model import EndpointAddress, EndpointSlice, Service, ServicePort
from lab.manifests.problems import Problems

if TYPE_CHECKING:
    from lab.manifests.schema import endpoints as endpoints_schema
    from lab.manifests.schema import service as schema


def service(item: Item, claims: list[Claim], problems: Problems) -> ServiceDraft:
    """A Service object; ``spec.clusterIP(s)`` pin its addresses."""
    body = cast("schema.Service", item.schema)
    spec = body.spec
    external = spec.type == "ExternalName"
    headless = not external and (spec.cluster_ip == "None" or "None" in spec.cluster_ips)
    ips = [ip for ip in spec.cluster_ips if ip != "None"] or (
        [spec.cluster_ip] if spec.cluster_ip not in ("", "None") else []
    )
    if external:
        if not spec.external_name:
            problems.error(
                locate(item.document, ("spec",)),
                'missing field "externalName"',
                f"{item.subject}: type ExternalName needs it",
            )
        if ips or spec.cluster_ip:
            problems.error(
                locate(item.document, ("spec", "clusterIP")),
                "address on an ExternalName service",
                f"{item.subject}: it has none",
                "Remove clusterIP.",
            )
        ips = []
    elif spec.external_name:
        problems.error(
            locate(item.document, ("spec", "externalName")),
            "externalName without its type",
            f"{item.subject}: set type: ExternalName",
        )
    elif not spec.ports and not headless:
        problems.error(
            locate(item.document, ("spec",)),
            'missing field "ports"',
            f"{item.subject}: a service with a cluster address has ports",
        )
    if spec.type in ("NodePort", "LoadBalancer"):
        problems.warn(
            locate(item.document, ("spec", "type")), f"{item.subject}: type {spec.type} acts as ClusterIP in the lab"
        )
    if spec.cluster_ips and spec.cluster_ip and spec.cluster_ip != spec.cluster_ips[0]:
        problems.error(
            locate(item.document, ("spec", "clusterIPs")),
            "two addresses for one service",
            f"{item.subject}: clusterIP is not the first of clusterIPs",
        )
    one_per_family(ips, item.subject, locate(item.document, ("spec", "clusterIPs")), problems)
    claims.extend(
        Claim(ip, item.subject, locate(item.document, ("spec", "clusterIPs" if spec.cluster_ips else "clusterIP")))
        for ip in ips
    )
    families: tuple[int, ...] = ()
    if headless:
        written = [4 if family == "IPv4" else 6 for family in spec.ip_families]
        families = tuple(written)
        if spec.ip_family_policy != "SingleStack":
            families = tuple(dict.fromkeys((*written, 4, 6)))
    elif not external:
        wanted = (
            [4 if family == "IPv4" else 6 for family in spec.ip_families]
            or [ipaddress.ip_address(ip).version for ip in ips]
            or [4]
        )
        if spec.ip_family_policy != "SingleStack" and len(wanted) == 1:
            wanted.append(10 - wanted[0])
        families = tuple(dict.fromkeys(wanted))
    return ServiceDraft(
        Service(
            meta=item.meta,
            cluster_ips=tuple(ips),
            ports=tuple(_service_ports(spec, item, problems)),
            selector={} if external else dict(spec.selector),
            headless=headless,
            external_name=spec.external_name if external else "",
            publish_not_ready=spec.publish_not_ready_addresses,
            internal_traffic_policy_local=spec.internal_traffic_policy == "Local",
            traffic_distribution=spec.traffic_distribution,
            families=families if headless else (),
        ),
        () if headless else families,
    )


def _service_ports(spec: schema.ServiceSpec, item: Item, problems: Problems) -> Iterator[ServicePort]:
    names: set[str] = set()
    numbers: set[tuple[int, str]] = set()
    for index, port in enumerate(spec.ports):
        source = locate(item.document, ("spec", "ports", index))
        if len(spec.ports) > 1 and not port.name:
            problems.error(source, 'missing field "name"', f"{item.subject}: with several ports each needs a name")
        if port.name and port.name in names:
            problems.error(
                source, f'port name "{port.name}" used twice', f"{item.subject}: names of ports are unique in a service"
            )
        if (port.port, port.protocol) in numbers:
            problems.error(
                source, f"port {port.port}/{port.protocol} used twice", f"{item.subject}: a service has each port once"
            )
        names.add(port.name)
        numbers.add((port.port, port.protocol))
        target = port.target_port if port.target_port is not None else port.port
        yield ServicePort(
            port.port,
            port.name,
            protocol.of_service_port(port.port, port.protocol, port.name, port.app_protocol),
            target,
            port.protocol,
            port.app_protocol,
        )


def _target_pod(ref: endpoints_schema.TargetRef | None, namespace: str) -> str:
    return f"{ref.namespace or namespace}/{ref.name}" if ref is not None and ref.kind == "Pod" else ""


def endpoint_slice(item: Item, problems: Problems) -> EndpointSlice | None:
    """An EndpointSlice; None for what Istio ignores (FQDN addresses, no service)."""
    body = cast("endpoints_schema.EndpointSlice", item.schema)
    name = item.meta.labels.get("kubernetes.io/service-name", "")
    if not name:
        problems.warn(
            item.meta.source,
            f"{item.subject}: without the label kubernetes.io/service-name it belongs to no service and is ignored",
        )
        return None
    if body.address_type == "FQDN":
        problems.warn(
            locate(item.document, ("addressType",)), f"{item.subject}: slices of type FQDN are ignored, as Istio does"
        )
        return None
    addresses = []
    for index, endpoint in enumerate(body.endpoints):
        for address in endpoint.addresses:
            try:
                ip = ipaddress.ip_address(address)
            except ValueError:
                problems.error(
                    locate(item.document, ("endpoints", index, "addresses")),
                    f'bad address "{address}"',
                    f"{item.subject}: it is no IP address",
                )
                continue
            if f"IPv{ip.version}" != body.address_type:
                problems.error(
                    locate(item.document, ("endpoints", index, "addresses")),
                    f'bad address "{address}"',
                    f"{item.subject}: addressType is {body.address_type}",
                )
            conditions = endpoint.conditions
            addresses.append(
                EndpointAddress(
                    ip=str(ip),
                    ready=conditions.ready is not False,
                    serving=conditions.serving,
                    terminating=conditions.terminating,
                    hostname=endpoint.hostname,
                    target_pod=_target_pod(endpoint.target_ref, item.meta.namespace),
                )
            )
    return EndpointSlice(item.meta, name, tuple(addresses), {port.name: port.port for port in body.ports})


def endpoints(item: Item) -> list[EndpointSlice]:
    """A legacy Endpoints object as the slices that Kubernetes' mirroring controller makes of it: one per subset."""
    body = cast("endpoints_schema.Endpoints", item.schema)
    result = []
    for subset in body.subsets:
        pairs = [(address, True) for address in subset.addresses] + [
            (address, False) for address in subset.not_ready_addresses
        ]
        result.append(
            EndpointSlice(
                item.meta,
                item.meta.name,
                tuple(
                    EndpointAddress(
                        address.ip,
                        ready,
                        ready,
                        False,
                        address.hostname,
                        _target_pod(address.target_ref, item.meta.namespace),
                    )
                    for address, ready in pairs
                ),
                {port.name: port.port for port in subset.ports},
            )
        )
    return result

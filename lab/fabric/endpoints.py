"""The ready endpoints of a Kubernetes Service, as cluster DNS names them: pure, from the mesh alone.

Source of the rules: kubernetes/kubernetes: staging/src/k8s.io/endpointslice/{reconciler,utils}.go,
pkg/controller/endpoint/endpoints_controller.go.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from lab.fabric.services import selected, target_port
from lab.manifests.model import EndpointSlice, Pod, Service


@dataclass(frozen=True, slots=True)
class EndpointPort:
    """A service port as one endpoint serves it."""

    name: str
    port: int
    transport: Literal["TCP", "UDP"] = "TCP"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One address behind a service. ``hostname`` is set only where a pod (or slice) was given one for this service."""

    ip: str
    ports: tuple[EndpointPort, ...] = ()
    hostname: str = ""


def ready_endpoints(service: Service, pods: Iterable[Pod], slices: Iterable[EndpointSlice]) -> tuple[Endpoint, ...]:
    """The ready endpoints of a service, in the order of pods, then of written slices; an address once.

    A service that publishes not-ready addresses counts all as ready. ExternalName services have none.

    Args:
        service: the service.
        pods: at least the pods of its namespace.
        slices: at least the EndpointSlices of its namespace.
    """
    if service.external_name:
        return ()
    found: dict[str, Endpoint] = {}
    for pod in selected(service, pods):
        for endpoint in _of_pod(service, pod):
            found.setdefault(endpoint.ip, endpoint)
    for written in slices:
        if (written.meta.namespace, written.service) == (service.meta.namespace, service.meta.name):
            for endpoint in _of_slice(service, written):
                found.setdefault(endpoint.ip, endpoint)
    return tuple(found.values())


def _of_pod(service: Service, pod: Pod) -> Iterator[Endpoint]:
    ports = tuple(
        EndpointPort(port.name, number, port.transport)
        for port in service.ports
        if (number := target_port(port, pod)) is not None
    )
    hostname = pod.hostname if pod.subdomain == service.meta.name else ""
    for ip in service.addresses_of(pod):
        yield Endpoint(ip, ports, hostname)


def _of_slice(service: Service, written: EndpointSlice) -> Iterator[Endpoint]:
    ports = tuple(
        EndpointPort(port.name, written.ports[port.name], port.transport)
        for port in service.ports
        if port.name in written.ports
    )
    for address in written.addresses:
        if address.ready or service.publish_not_ready:
            yield Endpoint(address.ip, ports, address.hostname)

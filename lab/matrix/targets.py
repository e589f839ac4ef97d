"""What can be reached in a mesh: the columns of a matrix. Pure.

Each port of each Service, of each pod by its own address, and of each host outside: what an ExternalHost serves and what a
ServiceEntry declares.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lab.errors import InputError
from lab.explain.packet import endpoint
from lab.manifests.model import ExternalHost, FlowProtocol, Mesh, Protocol, Service, ServiceEntry

Kind = Literal["service", "pod", "external", "test"]
Key = tuple[Kind, str, int, bool]
"""What a target is known by in two meshes: kind, name, port, whether it is UDP."""

_SERVED: Mapping[str, FlowProtocol] = {
    "http": "http", "https": "tls", "tls": "tls", "tcp": "tcp", "udp": "udp", "grpc": "grpc", "auto": "http",
}  # fmt: skip
"""What a client speaks to an echo app's port."""
_DECLARED: Mapping[Protocol, FlowProtocol] = {
    "HTTP": "http", "HTTP_PROXY": "http", "HTTP2": "grpc", "GRPC": "grpc", "GRPC-Web": "grpc", "HTTPS": "tls",
    "TLS": "tls", "TCP": "tcp", "MONGO": "tcp", "REDIS": "tcp", "MYSQL": "tcp", "UDP": "udp", "AUTO": "http",
}  # fmt: skip
"""The same for a port that was declared to Istio; one whose protocol is detected gets HTTP."""


@dataclass(frozen=True, slots=True)
class Target:
    """One port of something. ``host`` is what a client asks for: a name, or a pod's address. Kind ``test``: a TrafficTest asks for it.

    ``name`` is ``NAME.NAMESPACE`` of a service or pod, the host of anything else. ``declared``: a ServiceEntry has this host
    and port; None for what is no host outside.
    """

    kind: Kind
    name: str
    host: str
    port: int
    protocol: FlowProtocol
    declared: bool | None = None

    @property
    def key(self) -> Key:
        return self.kind, self.name, self.port, self.protocol == "udp"

    @property
    def label(self) -> str:
        """As a table names it; a pod's own address is told from a service of the same name."""
        return f"{'pod ' if self.kind == 'pod' else ''}{endpoint(self.name, self.port)}"

    def to_json(self) -> dict[str, object]:
        return {
            "kind": self.kind,
            "name": self.name,
            "host": self.host,
            "port": self.port,
            "protocol": self.protocol,
            "declared": self.declared,
        }


def targets(mesh: Mesh) -> tuple[Target, ...]:
    """Everything that can be reached, in the order of the manifests; each host and port once."""
    found: dict[Key, Target] = {}
    for target in (*_services(mesh), *_pods(mesh), *_machines(mesh), *_entries(mesh)):
        found.setdefault(target.key, target)
    return tuple(found.values())


def chosen(found: Sequence[Target], wanted: Sequence[str]) -> tuple[Target, ...]:
    """The targets that one of the texts names: a name or host, with or without port, ``*`` and ``?`` standing for anything.

    Raises:
        InputError: a text names none.
    """
    if not wanted:
        return tuple(found)
    kept: dict[Key, Target] = {}
    for text in wanted:
        named = [target for target in found if _is_called(target, text)]
        if not named:
            known = ", ".join(dict.fromkeys(t.label for t in found)) or "none"
            raise InputError(
                f"--to {text}",
                why=f"nothing in the mesh is called so; there are: {known}",
                next_step="Name one of them; `lab explain --to` takes any host",
            )
        kept |= {target.key: target for target in named}
    return tuple(target for target in found if target.key in kept)


def _is_called(target: Target, text: str) -> bool:
    names = {target.name, target.host, target.label}
    if target.kind != "external":
        name, _, namespace = target.name.partition(".")
        names.add(f"{namespace}/{name}")
    names |= {endpoint(name, target.port) for name in names}
    return any(fnmatch.fnmatchcase(name.lower(), text.lower()) for name in names)


def _services(mesh: Mesh) -> Iterator[Target]:
    for service in mesh.services:
        name = f"{service.meta.name}.{service.meta.namespace}"
        host = service.host(mesh.domain_suffix)
        for port in service.ports:
            protocol = "udp" if port.transport == "UDP" else _DECLARED[port.protocol]
            yield Target("service", name, host, port.port, protocol)
        if service.external_name and not service.ports:
            for number, protocol in _behind(mesh, service.external_name):
                yield Target("service", name, host, number, protocol)


def _behind(mesh: Mesh, host: str) -> Iterator[tuple[int, FlowProtocol]]:
    """The ports of what an ExternalName stands for."""
    for service in mesh.services:
        if service.host(mesh.domain_suffix) == host:
            yield from _ports(service)
    for machine in mesh.external_hosts:
        if host in machine.hosts:
            yield from ((port.port, _SERVED[port.protocol]) for port in machine.ports)


def _ports(service: Service) -> Iterator[tuple[int, FlowProtocol]]:
    for port in service.ports:
        yield port.port, "udp" if port.transport == "UDP" else _DECLARED[port.protocol]


def _pods(mesh: Mesh) -> Iterator[Target]:
    from lab.runtime.workload import echo_protocol

    for pod in mesh.pods:
        for container in pod.containers:
            for port in container.ports:
                spoken = echo_protocol(mesh, pod, port.port, port.name, port.protocol)
                yield Target("pod", pod.name, pod.ip, port.port, _SERVED[spoken])


def _machines(mesh: Mesh) -> Iterator[Target]:
    for machine in mesh.external_hosts:
        for host in machine.hosts:
            for port in machine.ports:
                yield Target(
                    "external", host, host, port.port, _SERVED[port.protocol], _is_declared(mesh, host, port.port)
                )


def _entries(mesh: Mesh) -> Iterator[Target]:
    """Declared hosts, also those that no machine of the lab has; a wildcard is no host that a client could ask for."""
    for entry in mesh.service_entries:
        for host in entry.hosts:
            if not host.startswith("*"):
                served = _machine_of(mesh, host)
                for port in entry.ports:
                    spoken = next((p.protocol for p in served.ports if p.port == port.port), "") if served else ""
                    protocol = _SERVED[spoken] if spoken else _DECLARED[port.protocol]
                    yield Target("external", host, host, port.port, protocol, True)


def _machine_of(mesh: Mesh, host: str) -> ExternalHost | None:
    return next((machine for machine in mesh.external_hosts if host in machine.hosts), None)


def _is_declared(mesh: Mesh, host: str, port: int) -> bool:
    return any(_has(entry, host) and any(p.port == port for p in entry.ports) for entry in mesh.service_entries)


def _has(entry: ServiceEntry, host: str) -> bool:
    return any(host == own or (own.startswith("*.") and host.endswith(own[1:])) or own == "*" for own in entry.hosts)

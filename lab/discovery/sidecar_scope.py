"""SidecarScope: what of the mesh one namespace's proxies may see, per egress listener.

Source: istio/istio: pilot/pkg/model/sidecar.go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from lab.discovery import destination_rule, virtual_service
from lab.discovery import host as hosts
from lab.discovery.registry import KUBERNETES, Port, Service
from lab.manifests import model

if TYPE_CHECKING:
    from lab.discovery.push_context import PushContext


@dataclass(slots=True)
class HostClassification:
    """The imports of one namespace part of ``namespace/dnsName``."""

    exact: set[str] = field(default_factory=set)
    all: list[str] = field(default_factory=list)
    excluded: list[str] = field(default_factory=list)

    def imports(self, host: str) -> bool:
        """The service's host must be within an imported pattern, not the other way round."""
        return host in self.exact or any(hosts.subset_of(host, pattern) for pattern in self.all)

    def excludes(self, host: str) -> bool:
        return any(hosts.subset_of(host, pattern) for pattern in self.excluded)

    def imports_virtual_service(self, host: str) -> bool:
        """A VirtualService's host matches in both directions: ``*.com`` is kept by an import of ``a.com``."""
        return host in self.exact or any(hosts.matches(host, pattern) for pattern in self.all)


def classify(entries: Iterable[str], namespace: str) -> dict[str, HostClassification]:
    """Egress hosts by namespace part; ``.`` is ``namespace``, a leading ``~`` excludes (in all namespaces if alone)."""
    out: dict[str, HostClassification] = {}
    for entry in entries:
        if entry.count("/") != 1:
            continue  # refused by validation; Istio skips it with a log line
        part, _, name = entry.partition("/")
        excluded = part.startswith("~")
        if excluded:
            part = part[1:] or "*"
        held = out.setdefault(namespace if part == "." else part, HostClassification())
        if excluded:
            held.excluded.append(name)
            continue
        if not hosts.is_wildcard(name):
            held.exact.add(name)
        held.all.append(name)
    return out


@dataclass(frozen=True, slots=True)
class EgressListener:
    """One egress listener of a Sidecar (``written`` is None for the built-in catch-all) and what it imports."""

    written: model.SidecarEgress | None
    services: tuple[Service, ...]
    virtual_services: tuple[virtual_service.VirtualService, ...]

    @property
    def port(self) -> int | None:
        return self.written.port if self.written else None

    @property
    def bind(self) -> str:
        return self.written.bind if self.written else ""

    @property
    def matches_port(self) -> bool:
        """Whether it imports only services that expose its very port, trimmed to it."""
        return bool(self.written and self.written.port and self.written.port_protocol != "HTTP_PROXY")


@dataclass(slots=True)
class SidecarScope:
    """What proxies of ``namespace`` that are governed by ``sidecar`` (None: the default) see."""

    namespace: str
    sidecar: model.Sidecar | None
    egress: tuple[EgressListener, ...]
    services: tuple[Service, ...]
    outbound_traffic_policy: model.OutboundTrafficPolicy
    by_host: dict[str, Service]
    rules: dict[str, list[destination_rule.DestinationRule]]

    @property
    def name(self) -> str:
        return self.sidecar.meta.key if self.sidecar else "default-sidecar"

    @property
    def ingress(self) -> tuple[model.SidecarIngress, ...]:
        return self.sidecar.ingress if self.sidecar else ()

    def listener_for_route(self, port: int, bind: str = "") -> EgressListener | None:
        """The egress listener that owns a route: the first of that port (for sockets: of that bind), else the catch-all."""
        for listener in self.egress:
            if listener.port is None:
                return listener
            if listener.port == port and (port != 0 or listener.bind == bind):
                return listener
        return None

    def destination_rule(
        self, host: str, labels: Mapping[str, str], outbound: bool = True
    ) -> destination_rule.DestinationRule | None:
        rules = self.rules.get(host)
        return destination_rule.select(rules, self.namespace, labels, outbound) if rules else None

    def inbound_connection_pool(self, port: int) -> model.ConnectionPool | None:
        """The pool for one inbound port: that of the ingress listener, else the Sidecar's, else None."""
        if self.sidecar is None:
            return None
        for ingress in self.sidecar.ingress:
            if ingress.port == port and ingress.connection_pool is not None:
                return ingress.connection_pool
        return self.sidecar.inbound_connection_pool


def _trim(service: Service, ports: Sequence[Port]) -> Service:
    return service if len(ports) == len(service.ports) else replace(service, ports=tuple(ports))


def _matching_listener_port(service: Service, number: int) -> Service | None:
    ports = [p for p in service.ports if p.port == number][:1]
    return _trim(service, ports) if ports else None


def _matching_destination_ports(service: Service, numbers: set[int]) -> Service | None:
    if not numbers or 0 in numbers:
        return service
    ports = [p for p in service.ports if p.port in numbers]
    return _trim(service, ports) if ports else None


def _select_services(
    services: Iterable[Service], namespace: str, imports: Mapping[str, HostClassification], listener_port: int
) -> list[Service]:
    everywhere = imports.get("*")
    out: list[Service] = []
    for service in services:
        own = imports.get(service.namespace)
        if (own and own.excludes(service.host)) or (everywhere and everywhere.excludes(service.host)):
            continue
        for part in (own, everywhere):
            if part is None or not part.imports(service.host):
                continue
            found = _matching_listener_port(service, listener_port) if listener_port else service
            if found is None:
                continue
            if found.aliases:
                kept = tuple(a for a in found.aliases if part.imports(a[0]))
                found = found if kept == found.aliases else replace(found, aliases=kept)
            out.append(found)
            break
    # one namespace per host: the proxy's own, else the first seen, with a Kubernetes service displacing an entry
    chosen: dict[str, tuple[str, bool]] = {}
    for service in out:
        candidate = (service.namespace, service.registry == KUBERNETES)
        held = chosen.get(service.host)
        if (
            held is None
            or service.namespace == namespace
            or (not held[1] and candidate[1] and (candidate[0] == namespace or held[0] != namespace))
        ):
            chosen[service.host] = candidate
    return [s for s in out if chosen[s.host][0] == s.namespace]


def _select_virtual_services(
    push: PushContext, namespace: str, imports: Mapping[str, HostClassification]
) -> list[virtual_service.VirtualService]:
    everywhere = imports.get("*")
    out: list[virtual_service.VirtualService] = []
    seen: set[tuple[str, str]] = set()
    for vs in push.virtual_services_for(namespace):
        if vs.key in seen:
            continue
        own = imports.get(vs.namespace)
        for name in vs.hosts:
            if (own and own.excludes(name)) or (everywhere and everywhere.excludes(name)):
                continue
            if any(part is not None and part.imports_virtual_service(name) for part in (own, everywhere)):
                out.append(vs)
                seen.add(vs.key)
                break
    return out


class _Services:
    """The union of imported services, merged per host as CDS needs it."""

    def __init__(self) -> None:
        self.list: list[Service] = []
        self.index: dict[str, int] = {}

    def add(self, service: Service | None) -> None:
        if service is None:
            return
        at = self.index.get(service.host)
        if at is None:
            self.index[service.host] = len(self.list)
            self.list.append(service)
            return
        held = self.list[at]
        if held is service or (held.registry == KUBERNETES and service.registry != KUBERNETES):
            return
        if held.registry != KUBERNETES and service.registry == KUBERNETES:
            self.list[at] = service
            return
        mergeable = (
            held.namespace == service.namespace
            and held.resolution == service.resolution
            and held.selector == service.selector
            and held.export_to == service.export_to
        )
        if not mergeable or held.ports == service.ports:
            return
        numbers = {p.port for p in held.ports}
        extra = tuple(p for p in service.ports if p.port not in numbers)
        self.list[at] = replace(held, ports=held.ports + extra)


def build(push: PushContext, namespace: str, sidecar: model.Sidecar | None) -> SidecarScope:
    """The scope of ``sidecar`` for proxies of ``namespace`` (a root Sidecar's ``./*`` still means the proxy's own)."""
    written = sidecar.egress if sidecar else ()
    listeners: list[EgressListener] = []
    for egress in written or (None,):
        imports = classify(egress.hosts if egress else ("*/*",), namespace)
        port = egress.port if egress and egress.port and egress.port_protocol != "HTTP_PROXY" else 0
        listeners.append(
            EgressListener(
                egress,
                tuple(_select_services(push.services_exported_to(namespace), namespace, imports, port or 0)),
                tuple(_select_virtual_services(push, namespace, imports)),
            )
        )
    union = _Services()
    for listener in listeners:
        for service in listener.services:
            union.add(service)
        # a VirtualService's destinations widen CDS past the imports; an ExternalName brings itself, not what it stands for
        for vs in listener.virtual_services:
            for host, ports in virtual_service.destinations(vs, namespace).items():
                found = push.best_service(host, namespace)
                if found is None:
                    continue
                if listener.matches_port:
                    union.add(_matching_listener_port(found, listener.port or 0))
                else:
                    union.add(_matching_destination_ports(found, ports))
    policy = push.mesh_config.outbound_traffic_policy
    if sidecar is not None and sidecar.outbound_traffic_policy is not None:
        policy = sidecar.outbound_traffic_policy
    rules = {}
    for service in union.list:
        found_rules = push.destination_rules.lookup(namespace, service.host, service.namespace)
        if found_rules:
            rules[service.host] = found_rules
    return SidecarScope(
        namespace=namespace,
        sidecar=sidecar,
        egress=tuple(listeners),
        services=tuple(union.list),
        outbound_traffic_policy=policy,
        by_host={s.host: s for s in union.list},
        rules=rules,
    )

"""The service registry: Kubernetes Services, Pods and ServiceEntries become services and endpoints.

Pure: a :class:`Registry` is an index over one frozen :class:`~lab.manifests.model.Mesh`.
Sources of the rules: istio/istio: pilot/pkg/serviceregistry/kube/conversion.go,
pilot/pkg/serviceregistry/serviceentry/conversion.go, pkg/kube/namespace/filter.go.
"""

from __future__ import annotations

import copy
import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

from lab.discovery import node as node_module
from lab.discovery.changes import EndpointChanges
from lab.manifests import model

Resolution = Literal["ClientSideLB", "DNSLB", "DNSRoundRobinLB", "Passthrough", "Alias", "DynamicDNS"]
Health = Literal["HEALTHY", "UNHEALTHY", "DRAINING", "UNKNOWN"]

KUBERNETES = "Kubernetes"
EXTERNAL = "External"
TLS_MODE_LABEL = "security.istio.io/tlsMode"

_HTTP = frozenset(("HTTP", "HTTP2", "GRPC", "GRPC-Web", "HTTP_PROXY"))
_HTTP2 = frozenset(("HTTP2", "GRPC", "GRPC-Web"))
_TLS = frozenset(("HTTPS", "TLS"))


@dataclass(frozen=True, slots=True)
class Port:
    """A service port. ``target`` is a number, or the name of a container port; 0 means the same number."""

    port: int
    name: str
    protocol: model.Protocol
    target: int | str = 0

    @property
    def listener_class(self) -> Literal["HTTP", "TCP", "AUTO", "NONE"]:
        """What kind of listener the protocol asks for (istio/istio: pilot/pkg/networking/networking.go)."""
        if self.protocol in _HTTP:
            return "HTTP"
        if self.protocol == "AUTO":
            return "AUTO"
        return "NONE" if self.protocol == "UDP" else "TCP"

    @property
    def is_http2(self) -> bool:
        return self.protocol in _HTTP2

    @property
    def is_tls(self) -> bool:
        return self.protocol in _TLS


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One address that serves one port of a service (istio/istio: pilot/pkg/model/service.go: IstioEndpoint)."""

    addresses: tuple[str, ...]  # IPs, one DNS name, or one unix:///path; the first is the primary
    port: int
    port_name: str
    namespace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    tls_mode: str = "disabled"
    identity: str = ""
    locality: str = ""
    weight: int = 1
    health: Health = "UNKNOWN"
    workload: str = ""
    canonical: str = ""
    revision: str = ""
    hostname: str = ""
    subdomain: str = ""

    @property
    def address(self) -> str:
        return self.addresses[0]

    @property
    def is_ip(self) -> bool:
        return _is_ip(self.addresses[0])


@dataclass(frozen=True, slots=True)
class Service:
    """A service as Istio's model has it; a ServiceEntry gives one per host and address.

    ``addresses`` are VIPs or CIDRs, empty for ``0.0.0.0``. ``export_to`` is None for everybody, else the
    namespaces that see it (empty: nobody).
    """

    host: str
    namespace: str
    name: str
    registry: str
    resolution: Resolution
    ports: tuple[Port, ...]
    addresses: tuple[str, ...] = ()
    auto_addresses: tuple[str, ...] = ()
    mesh_external: bool = False
    export_to: frozenset[str] | None = None
    created: float = 0.0
    order: int = 0
    selector: Mapping[str, str] | None = None
    subject_alt_names: tuple[str, ...] = ()
    publish_not_ready: bool = False
    aliases: tuple[tuple[str, str], ...] = ()  # (host, namespace) of the ExternalNames that end here
    alias_of: str = ""
    race_connect: bool = False
    traffic_distribution: str = ""

    @property
    def key(self) -> tuple[str, str]:
        return (self.host, self.namespace)

    @property
    def headless(self) -> bool:
        return self.resolution == "Passthrough" and self.registry == KUBERNETES

    def port_by_number(self, number: int) -> Port | None:
        return next((p for p in self.ports if p.port == number), None)

    def vips(self, node: node_module.Node) -> tuple[str, ...]:
        """Addresses and CIDRs under which ``node`` reaches the service, primary first; empty for 0.0.0.0.

        An auto-allocated address counts for proxies with DNS capture only
        (istio/istio: pilot/pkg/model/service.go: GetAllAddressesForProxy).
        """
        usable = [a for a in self.addresses if node.supports(a)]
        if not usable and not self.addresses and node.dns_capture:
            usable = [a for a in self.auto_addresses if node.supports(a)]
        if not usable and self.registry == EXTERNAL:
            usable = list(self.addresses[:1])  # what a ServiceEntry writes counts whatever its family
        first = node.families[0]
        return tuple(sorted(usable, key=lambda a: (6 if ":" in a else 4) != first))

    def listens_on(self, node: node_module.Node) -> tuple[str, ...]:
        """Addresses and CIDRs of the service's own listeners; empty for 0.0.0.0.

        They are its ``vips``. One that has addresses, but none of the proxy's families, is still not everywhere
        (istio/istio: pilot/pkg/model/service.go: GetAddressForProxy).
        """
        return self.vips(node) or self.addresses[:1]

    def visible_to(self, namespace: str) -> bool:
        return self.export_to is None or namespace in self.export_to


@dataclass(frozen=True, slots=True)
class ServiceTarget:
    """A port of the proxy's own workload: the service port and the number the workload listens on."""

    service: Service
    port: Port
    target_port: int


@lru_cache(maxsize=65536)
def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _subset(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return all(labels.get(k) == v for k, v in selector.items())


def export_set(values: Iterable[str], default: Sequence[str], namespace: str) -> frozenset[str] | None:
    """Namespaces that an exportTo list reaches: None for all, empty for nobody.

    ``*`` wins over everything, then ``~``; ``.`` is the object's own namespace
    (istio/istio: pilot/pkg/model/push_context.go).
    """
    entries = [v for v in values if v] or list(default)
    if "*" in entries:
        return None
    if "~" in entries:
        return frozenset()
    return frozenset(namespace if v == "." else v for v in entries)


def select_namespaces(mesh: model.Mesh) -> frozenset[str] | None:
    """Namespaces that discoverySelectors let through; None means all (no selectors)."""
    selectors = mesh.mesh_config.discovery_selectors
    if not selectors:
        return None
    labels: dict[str, Mapping[str, str]] = {ns.meta.name: ns.meta.labels for ns in mesh.namespaces}
    for kind in (mesh.pods, mesh.services, mesh.service_entries, mesh.sidecars, mesh.peer_authentications):
        for item in kind:
            labels.setdefault(item.meta.namespace, {})
    return frozenset(
        name
        for name, own in labels.items()
        # Kubernetes puts the name label on every namespace
        if any(s.matches({**own, "kubernetes.io/metadata.name": name}) for s in selectors)
    )


_CANONICAL_NAME = ("service.istio.io/canonical-name", "app.kubernetes.io/name", "app")
_CANONICAL_REVISION = ("service.istio.io/canonical-revision", "app.kubernetes.io/version", "version")


def _first_label(labels: Mapping[str, str], keys: Sequence[str], default: str) -> str:
    return next((labels[k] for k in keys if labels.get(k)), default)


def _locality_labels(labels: Mapping[str, str], locality: str, node_name: str = "") -> dict[str, str]:
    """Endpoint labels with the topology labels added, so that subsets can select on them."""
    out = dict(labels)
    names = ("topology.kubernetes.io/region", "topology.kubernetes.io/zone", "topology.istio.io/subzone")
    out.update({name: part for name, part in zip(names, locality.split("/"), strict=False) if part})
    out["topology.istio.io/cluster"] = node_module.DEFAULT_CLUSTER_ID
    if node_name:
        out["kubernetes.io/hostname"] = node_name
    return out


class Registry:
    """Index of services and endpoints of one mesh, after discoverySelectors."""

    def __init__(self, mesh: model.Mesh) -> None:
        self.mesh_config = mesh.mesh_config
        self.selected = select_namespaces(mesh)
        self._read_workloads(mesh)
        self._entries: dict[tuple[str, str], list[model.ServiceEntry]] = {}
        self._kubernetes: dict[tuple[str, str], model.Service] = {}
        self.services = self._build_services()
        self.by_host: dict[str, dict[str, Service]] = {}
        self._by_namespace: dict[str, list[Service]] = {}
        for service in self.services:
            self._by_namespace.setdefault(service.namespace, []).append(service)
            known = self.by_host.setdefault(service.host, {})
            held = known.get(service.namespace)
            if held is None or (held.registry != KUBERNETES and service.registry == KUBERNETES):
                known[service.namespace] = service
        self._endpoints: dict[tuple[str, str], tuple[Endpoint, ...]] = {}
        self._pod_endpoints: dict[str, Endpoint] = {}
        self._known_identities: dict[tuple[str, str], frozenset[str]] = {}

    def _read_workloads(self, mesh: model.Mesh) -> None:
        """Indexes of what endpoints are made from: pods, workload entries and slices."""
        self.mesh = mesh
        self.pods = tuple(p for p in mesh.pods if self.reads(p.meta.namespace))
        self.workload_entries = tuple(w for w in mesh.workload_entries if self.reads(w.meta.namespace))
        self._pods_by_ip = {ip: p for p in self.pods for ip in p.ips}
        self._pods_by_name = {(p.meta.namespace, p.meta.name): p for p in self.pods}
        self._pods_by_label: dict[tuple[str, str, str], list[model.Pod]] = {}
        for pod in self.pods:
            for key, value in pod.meta.labels.items():
                self._pods_by_label.setdefault((pod.meta.namespace, key, value), []).append(pod)
        self._slices: dict[tuple[str, str], list[model.EndpointSlice]] = {}
        for piece in mesh.endpoint_slices:
            if self.reads(piece.meta.namespace):
                self._slices.setdefault((piece.meta.namespace, piece.service), []).append(piece)

    def with_endpoints(self, mesh: model.Mesh, changes: EndpointChanges) -> tuple[Registry, list[Service]] | None:
        """A registry with the same services and the endpoints of ``mesh``, and the services whose endpoints changed.

        None if the change reaches further than EDS: a service got an identity that its clusters do not accept yet,
        or its listeners, name table entry or clusters are made from its endpoints.
        """
        fresh = copy.copy(self)
        fresh._read_workloads(mesh)
        touched = {p.name for p in changes.pods}
        fresh._pod_endpoints = {n: e for n, e in self._pod_endpoints.items() if n not in touched}
        fresh._endpoints = dict(self._endpoints)
        fresh._known_identities = dict(self._known_identities)
        changed: list[Service] = []
        seen: set[tuple[str, str]] = set()
        for service in self.services:
            if service.key in seen or not self._affected(service, changes):
                continue
            seen.add(service.key)
            before = self.endpoints(service)
            fresh._endpoints.pop(service.key, None)
            after = fresh.endpoints(service)
            if before == after:
                continue
            if service.resolution != "ClientSideLB":
                return None
            known = frozenset(self.identities(service))
            if not frozenset(fresh.identities(service)) <= known:
                return None
            fresh._known_identities[service.key] = known
            changed.append(service)
        return fresh, changed

    def _affected(self, service: Service, changes: EndpointChanges) -> bool:
        if service.selector:
            if service.namespace in changes.workload_namespaces:
                return True
            for pod in changes.pods:
                if pod.meta.namespace == service.namespace and _subset(service.selector, pod.meta.labels):
                    return True
        if (service.namespace, service.name) in changes.services:
            return True
        # a written slice may name a pod that came or went
        return bool(changes.pods) and (service.namespace, service.name) in self._slices

    def reads(self, namespace: str) -> bool:
        """Whether discoverySelectors let objects of ``namespace`` be read."""
        return self.selected is None or namespace in self.selected

    # --- services -------------------------------------------------------------------------

    def _build_services(self) -> tuple[Service, ...]:
        out = [self._from_kubernetes(s) for s in self.mesh.services if self.reads(s.meta.namespace)]
        for entry in self.mesh.service_entries:
            if self.reads(entry.meta.namespace):
                out.extend(self._from_entry(entry))
        out = self._with_aliases(out)
        # oldest first; names decide among the equally old (pilot/pkg/model/push_context.go: SortServicesByCreationTime)
        out.sort(key=lambda s: (s.created, f"{s.name}.{s.namespace}", s.order))
        return tuple(out)

    def _from_kubernetes(self, service: model.Service) -> Service:
        suffix = self.mesh.domain_suffix
        host = service.host(suffix)
        self._kubernetes[(host, service.meta.namespace)] = service
        notes = service.meta.annotations
        written = [v.strip() for v in notes.get("networking.istio.io/exportTo", "").split(",")]
        accounts = [
            f"spiffe://{self.mesh_config.trust_domain}/ns/{service.meta.namespace}/sa/{a.strip()}"
            for a in notes.get("alpha.istio.io/kubernetes-serviceaccounts", "").split(",")
            if a.strip()
        ]
        accounts += [
            f"spiffe://{a.strip()}"
            for a in notes.get("alpha.istio.io/canonical-serviceaccounts", "").split(",")
            if a.strip()
        ]
        namespace = next((n for n in self.mesh.namespaces if n.meta.name == service.meta.namespace), None)
        distribution = "networking.istio.io/traffic-distribution"
        if service.external_name:
            resolution: Resolution = "Alias"
        else:
            resolution = "Passthrough" if service.headless else "ClientSideLB"
        return Service(
            host=host,
            namespace=service.meta.namespace,
            name=service.meta.name,
            registry=KUBERNETES,
            resolution=resolution,
            ports=tuple(
                Port(p.port, p.name, "UDP" if p.transport == "UDP" else p.protocol, p.target or p.port)
                for p in service.ports
            ),
            addresses=service.cluster_ips,
            mesh_external=bool(service.external_name),
            export_to=export_set(written, self.mesh_config.default_service_export_to, service.meta.namespace),
            created=service.meta.created,
            order=service.meta.order,
            selector=service.selector or None,
            subject_alt_names=tuple(accounts),
            publish_not_ready=service.publish_not_ready,
            alias_of=service.external_name.rstrip("."),
            traffic_distribution=service.traffic_distribution
            or notes.get(distribution, namespace.meta.annotations.get(distribution, "") if namespace else ""),
        )

    def _entry_exports(self, entry: model.ServiceEntry) -> frozenset[str] | None:
        """Who sees a ServiceEntry: its exportTo, cut down to what serviceEntryVisibility grants its namespace."""
        own, cap = entry.meta.namespace, self.mesh_config.service_entry_visibility
        written = export_set(entry.export_to, self.mesh_config.default_service_export_to, own)
        if not cap.apply_to_sidecars:
            return written
        labels = next((n.meta.labels for n in self.mesh.namespaces if n.meta.name == own), {})
        granted = cap.of({**labels, "kubernetes.io/metadata.name": own})
        if granted == "PUBLIC":
            return written
        seen_at_home = granted == "NAMESPACE" and (written is None or own in written)
        return frozenset((own,)) if seen_at_home else frozenset()

    def _from_entry(self, entry: model.ServiceEntry) -> list[Service]:
        resolution: Resolution = {
            "NONE": "Passthrough",
            "STATIC": "ClientSideLB",
            "DNS": "DNSLB",
            "DNS_ROUND_ROBIN": "DNSRoundRobinLB",
            "DYNAMIC_DNS": "DynamicDNS",
        }[entry.resolution]  # type: ignore[assignment]
        out = []
        for host in entry.hosts:
            self._entries.setdefault((host, entry.meta.namespace), []).append(entry)
            base = Service(
                host=host,
                namespace=entry.meta.namespace,
                name=host,
                registry=EXTERNAL,
                resolution=resolution,
                ports=tuple(Port(p.port, p.name, p.protocol, p.target or p.port) for p in entry.ports),
                auto_addresses=tuple(entry.auto_addresses.get(host, ())),
                mesh_external=entry.location == "MESH_EXTERNAL",
                export_to=self._entry_exports(entry),
                created=entry.meta.created,
                order=entry.meta.order,
                selector=entry.workload_selector,
                subject_alt_names=entry.subject_alt_names,
                race_connect=entry.meta.annotations.get("istio.io/connect-strategy") == "RACE_FIRST_TCP_CONNECT",
                traffic_distribution=entry.meta.annotations.get("networking.istio.io/traffic-distribution", ""),
            )
            out.extend([replace(base, addresses=(_bare(a),)) for a in entry.addresses] or [base])
        return out

    @staticmethod
    def _with_aliases(services: list[Service]) -> list[Service]:
        """ExternalName hosts become aliases of the concrete service they end at; loops and unknown ends give nothing."""
        aliases = {s.host: s for s in services if s.resolution == "Alias"}
        if not aliases:
            return services
        concrete = {s.host for s in services if s.resolution != "Alias"}
        ends: dict[str, list[tuple[str, str]]] = {}
        for alias in aliases.values():
            seen, target = {alias.host}, alias.alias_of
            while target in aliases and target not in seen:
                seen.add(target)
                target = aliases[target].alias_of
            if target in concrete:
                ends.setdefault(target, []).append(alias.key)
        return [
            replace(s, aliases=tuple(sorted(ends[s.host]))) if s.resolution != "Alias" and s.host in ends else s
            for s in services
        ]

    # --- endpoints ------------------------------------------------------------------------

    def endpoints(self, service: Service) -> tuple[Endpoint, ...]:
        """All endpoints of a service, of every port, in the order of the manifests.

        They are those of its host and namespace: a scope may have imported the service without some of its ports.
        """
        found = self._endpoints.get(service.key)
        if found is None:
            whole = self.by_host.get(service.host, {}).get(service.namespace, service)
            if service.registry == KUBERNETES:
                found = tuple(self._kubernetes_endpoints(whole))
            else:
                found = tuple(self._entry_endpoints(service))
            self._endpoints[service.key] = found
        return found

    def port_endpoints(self, service: Service, port: Port) -> list[Endpoint]:
        """Endpoints of one service port; they are found by the port's *name*."""
        return [e for e in self.endpoints(service) if e.port_name == port.name]

    def identities(self, service: Service) -> tuple[str, ...]:
        """SPIFFE ids (or written SANs) a server of this service may present, sorted, under every trust domain alias."""
        own = {e.identity for e in self.endpoints(service) if e.identity} | set(service.subject_alt_names)
        own |= self._known_identities.get(service.key, frozenset())
        config = self.mesh_config
        prefix = f"spiffe://{config.trust_domain}/"
        for name in list(own):
            if name.startswith(prefix):
                own.update(f"spiffe://{alias}/{name.removeprefix(prefix)}" for alias in config.trust_domain_aliases)
        return tuple(sorted(own))

    def identity(self, namespace: str, account: str) -> str:
        return f"spiffe://{self.mesh_config.trust_domain}/ns/{namespace}/sa/{account}"

    def _pods_selected(self, namespace: str, selector: Mapping[str, str]) -> list[model.Pod]:
        first = next(iter(selector.items()), None)
        if first is None:
            return []
        candidates = self._pods_by_label.get((namespace, *first), [])
        return [p for p in candidates if _subset(selector, p.meta.labels)]

    def _pod_endpoint(self, pod: model.Pod) -> Endpoint:
        """What an endpoint has from its pod, whatever the port."""
        found = self._pod_endpoints.get(pod.name)
        if found is None:
            labels = pod.meta.labels
            locality = node_module.split_locality(labels.get("istio-locality", ""))
            workload = pod.owner_name or pod.meta.name
            revision = _first_label(labels, _CANONICAL_REVISION, "latest")
            found = Endpoint(
                addresses=pod.ips,
                port=0,
                port_name="",
                namespace=pod.meta.namespace,
                labels=_locality_labels(labels, locality),
                tls_mode=labels.get(TLS_MODE_LABEL, "istio" if pod.injected else "disabled"),
                identity=self.identity(pod.meta.namespace, pod.service_account or "default"),
                locality=locality,
                health="HEALTHY" if pod.ready else "UNHEALTHY",
                workload=workload,
                canonical=_first_label(labels, _CANONICAL_NAME, workload),
                revision="" if revision == "latest" else revision,
                hostname=pod.hostname,
                subdomain=pod.subdomain,
            )
            self._pod_endpoints[pod.name] = found
        return found

    @staticmethod
    def _container_port(pod: model.Pod, target: int | str, udp: bool) -> int:
        if isinstance(target, int):
            return target
        for container in pod.containers:
            for port in container.ports:
                if port.name == target and (port.protocol == "UDP") == udp:
                    return port.port
        return 0

    def _kubernetes_endpoints(self, service: Service) -> list[Endpoint]:
        out: list[Endpoint] = []
        written = self._kubernetes.get(service.key)
        if written is None or written.external_name:
            return out
        if service.selector:
            for pod in self._pods_selected(service.namespace, service.selector):
                base = self._pod_endpoint(pod)
                addresses = written.addresses_of(pod)
                if not addresses:
                    continue
                if addresses != base.addresses:
                    base = replace(base, addresses=addresses)
                if service.publish_not_ready and base.health != "HEALTHY":
                    base = replace(base, health="HEALTHY")
                for port in service.ports:
                    number = self._container_port(pod, port.target, port.protocol == "UDP")
                    if number:
                        out.append(replace(base, port=number, port_name=port.name))
            for workload in self.workload_entries:
                if workload.meta.namespace == service.namespace and _subset(
                    service.selector, {**workload.meta.labels, **workload.endpoint.labels}
                ):
                    out.extend(
                        self._workload_endpoint(workload.endpoint, port, service.namespace, workload.meta)
                        for port in service.ports
                    )
        for piece in self._slices.get((service.namespace, service.name), ()):
            out.extend(self._slice_endpoints(service, piece))
        return out

    def _slice_endpoints(self, service: Service, piece: model.EndpointSlice) -> list[Endpoint]:
        out = []
        for one in piece.addresses:
            terminating = True if one.terminating is None else one.terminating
            health: Health
            if one.ready or service.publish_not_ready:
                health = "HEALTHY"
            elif terminating:
                # a terminating endpoint is sent for persistent sessions only, which need Istio's own feature flag
                continue
            else:
                health = "UNHEALTHY"
            pod = None
            if one.target_pod:
                namespace, _, name = one.target_pod.rpartition("/")
                pod = self._pods_by_name.get((namespace or service.namespace, name))
                if pod is None:
                    continue  # held back until the pod is known: its labels are needed
            else:
                # written by hand: the pod of that address, if it is of the slice's namespace (endpointslice.go: getPod)
                pod = self._pods_by_ip.get(one.ip)
                if pod is not None and pod.meta.namespace != service.namespace:
                    pod = None
            base = (
                self._pod_endpoint(pod)
                if pod
                else Endpoint((one.ip,), 0, "", service.namespace, _locality_labels({}, ""))
            )
            for name, number in piece.ports.items():
                out.append(
                    replace(
                        base,
                        addresses=(one.ip,),
                        port=number,
                        port_name=name,
                        health=health,
                        hostname=one.hostname or base.hostname,
                    )
                )
        return out

    def _workload_endpoint(
        self, written: model.WorkloadEndpoint, port: Port, namespace: str, meta: model.Meta | None = None
    ) -> Endpoint:
        """An endpoint of a ServiceEntry or a WorkloadEntry (serviceentry/conversion.go: convertEndpoint)."""
        labels = {**(meta.labels if meta else {}), **written.labels}
        locality = written.locality or node_module.split_locality(labels.get("istio-locality", ""))
        target = port.target if isinstance(port.target, int) else 0
        if written.address.startswith("unix://"):
            number = 0
        else:
            number = written.ports.get(port.name) or target or port.port
        workload = meta.name if meta else ""
        revision = _first_label(labels, _CANONICAL_REVISION, "latest")
        return Endpoint(
            addresses=(written.address,),
            port=number,
            port_name=port.name,
            namespace=namespace,
            labels=_locality_labels(labels, locality),
            tls_mode=labels.get(TLS_MODE_LABEL) or ("istio" if written.service_account else "disabled"),
            identity=self.identity(namespace, written.service_account) if written.service_account else "",
            locality=locality,
            weight=written.weight or 1,
            workload=workload,
            canonical=_first_label(labels, _CANONICAL_NAME, workload),
            revision="" if revision == "latest" else revision,
        )

    def _entry_endpoints(self, service: Service) -> list[Endpoint]:
        out: list[Endpoint] = []
        for entry in self._entries.get(service.key, ()):
            ports = [Port(p.port, p.name, p.protocol, p.target or p.port) for p in entry.ports]
            if entry.workload_selector is not None:
                for pod in self._pods_selected(service.namespace, entry.workload_selector):
                    if not pod.ready:
                        continue  # an entry selects ready pods only (kube/controller/pod.go: onEvent)
                    base = replace(self._pod_endpoint(pod), health="UNKNOWN")
                    out.extend(replace(base, port=int(p.target) or p.port, port_name=p.name) for p in ports)
                for workload in self.workload_entries:
                    labels = {**workload.meta.labels, **workload.endpoint.labels}
                    if workload.meta.namespace == service.namespace and _subset(entry.workload_selector, labels):
                        out.extend(
                            self._workload_endpoint(workload.endpoint, p, service.namespace, workload.meta)
                            for p in ports
                        )
            elif entry.endpoints:
                out.extend(self._workload_endpoint(e, p, service.namespace) for e in entry.endpoints for p in ports)
            elif entry.resolution in ("DNS", "DNS_ROUND_ROBIN"):
                # the host itself is the endpoint, and it is never meshed
                own = model.WorkloadEndpoint(address=service.host, labels={TLS_MODE_LABEL: "disabled"})
                out.extend(self._workload_endpoint(own, p, service.namespace) for p in ports)
        return out

    # --- the proxy's own workload ---------------------------------------------------------

    def pod_of(self, node: node_module.Node) -> model.Pod | None:
        """The pod behind a node: by its address, else by its name."""
        for ip in node.ips:
            pod = self._pods_by_ip.get(ip)
            if pod is not None:
                return pod
        name, _, namespace = node.name.rpartition(".")
        return self._pods_by_name.get((namespace, name))

    def service_targets(self, node: node_module.Node) -> tuple[ServiceTarget, ...]:
        """Service ports that this proxy's workload serves, by the age of the services, each target port and protocol once.

        Services exported to nobody count too (istio/istio: pilot/pkg/serviceregistry/kube/controller).
        """
        pod = self.pod_of(node)
        namespace = pod.meta.namespace if pod else node.namespace
        labels = pod.meta.labels if pod else node.labels
        out: list[ServiceTarget] = []
        seen: set[tuple[int, str]] = set()

        def add(service: Service, port: Port, number: int) -> None:
            if number and (number, port.protocol) not in seen:
                seen.add((number, port.protocol))
                out.append(ServiceTarget(service, port, number))

        own = set(node.ips)
        for service in self._by_namespace.get(namespace, ()):
            if service.registry == KUBERNETES:
                if service.selector and _subset(service.selector, labels):
                    for port in service.ports:
                        if pod is not None:
                            add(service, port, self._container_port(pod, port.target, port.protocol == "UDP"))
                        elif isinstance(port.target, int):
                            add(service, port, port.target)
                continue
            for endpoint in self.endpoints(service):
                if own & set(endpoint.addresses) and endpoint.namespace == node.namespace:
                    matching = next((p for p in service.ports if p.name == endpoint.port_name), None)
                    if matching is not None:
                        add(service, matching, endpoint.port)
        return tuple(out)


def _bare(address: str) -> str:
    """A host prefix (/32, /128) as the plain address, other CIDRs unchanged."""
    if "/" not in address:
        return address
    network = ipaddress.ip_network(address, strict=False)
    return str(network.network_address) if network.prefixlen == network.max_prefixlen else str(network)

"""Checks across objects: what each of them cannot know by itself.

The warnings follow what ``istioctl analyze`` tells (istio/istio: pkg/config/analysis/analyzers), as far as the
lab acts on the objects; errors are kept for what would make a lab that cannot work, and for what Istio refuses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from lab.manifests import analysis, executable
from lab.manifests.analysis.finding import mapping, maps, selects, strings
from lab.manifests.analysis.virtual_services import destinations
from lab.manifests.document import locate
from lab.manifests.injection import PROXY_PORTS
from lab.manifests.item import Items, value_at
from lab.manifests.model import Level, Mesh, Meta, Pod, RawConfig, Service, Sidecar, Source
from lab.manifests.problems import Problems, did_you_mean

_UNKNOWN_HOST = {"DestinationRule": "IST0174", "VirtualService": "IST0101"}


def check(mesh: Mesh, items: Items, problems: Problems) -> None:
    """Adds what is wrong (errors) or doubtful (warnings) to ``problems``."""
    checks = _Checks(mesh, items, problems)
    checks.pods()
    checks.services()
    checks.endpoint_slices()
    checks.service_entries()
    checks.sidecars()
    checks.peer_authentications()
    checks.destination_rules()
    checks.virtual_services()
    for found in analysis.findings(mesh, items):
        checks.add(found)
    checks.links()
    checks.traffic_tests()


def _subject(kind: str, meta: Meta) -> str:
    return f"{kind} {meta.key}" if meta.namespace else f"{kind} {meta.name}"


class _Checks:
    def __init__(self, mesh: Mesh, items: Items, problems: Problems) -> None:
        self._mesh, self._items, self._problems = mesh, items, problems
        self._pods_of: dict[str, list[Pod]] = defaultdict(list)
        for pod in mesh.pods:
            self._pods_of[pod.meta.namespace].append(pod)
        self._namespaces = {namespace.meta.name for namespace in mesh.namespaces}
        self._hosts = {service.host(mesh.domain_suffix) for service in mesh.services}
        self._hosts |= {host for entry in mesh.service_entries for host in entry.hosts}

    def _at(self, kind: str, meta: Meta, *path: str | int) -> Source:
        item = self._items.get((kind, meta.key))
        return locate(item.document, path) if item else meta.source

    def _warn(
        self, kind: str, meta: Meta, path: Sequence[str | int], message: str, code: str = "", level: Level = "warning"
    ) -> None:
        self._problems.warn(self._at(kind, meta, *path), f"{_subject(kind, meta)}: {message}".rstrip(), code, level)

    def add(self, found: analysis.Finding) -> None:
        self._warn(found.kind, found.meta, found.path, found.message, found.code, found.level)

    def _error(
        self, kind: str, meta: Meta, path: Sequence[str | int], what: str, why: str, next_step: str = ""
    ) -> None:
        self._problems.error(self._at(kind, meta, *path), what, f"{_subject(kind, meta)}: {why}", next_step)

    def _writer(self, pod: Pod) -> tuple[str, Meta]:
        """The object that a pod was written as: itself, or the Deployment that makes it."""
        written = (
            self._items.get(("Pod", pod.meta.key))
            or self._items["Deployment", f"{pod.meta.namespace}/{pod.owner_name}"]
        )
        return written.kind, written.meta

    # --- Kubernetes ---

    def pods(self) -> None:
        labels = {namespace.meta.name: namespace.meta.labels for namespace in self._mesh.namespaces}
        told = set()
        refused: set[tuple[Source, str]] = set()
        for pod in self._mesh.pods:
            kind, meta = self._writer(pod)
            if (kind, meta.key) in told:
                continue
            told.add((kind, meta.key))
            executable.check(self._mesh, pod, self._items[kind, meta.key], self._items, self._problems, refused)
            for container in pod.containers:
                for port in container.ports:
                    if pod.injected and port.port in PROXY_PORTS and port.protocol == "TCP":
                        self._warn(
                            kind,
                            meta,
                            ("spec",),
                            f"port {port.port} of container {container.name} is one of the proxy's own",
                        )
            inject = pod.meta.annotations.get("sidecar.istio.io/inject", "").lower()
            if inject in ("true", "yes", "on", "y") and not pod.injected:
                of_namespace = labels.get(pod.meta.namespace, {})
                reason = (
                    "the namespace forbids it"
                    if "istio-injection" in of_namespace
                    else "only the label of that name reaches the injector"
                )
                self._warn(
                    kind, meta, ("metadata",), f"annotation sidecar.istio.io/inject has no effect here: {reason}"
                )
        for namespace in self._mesh.namespaces:
            value = namespace.meta.labels.get("istio-injection")
            if value is not None and value not in ("enabled", "disabled"):
                hint = did_you_mean(value, ("enabled", "disabled"))
                self._warn(
                    "Namespace",
                    namespace.meta,
                    ("metadata", "labels", "istio-injection"),
                    f'istio-injection "{value}" injects nothing. {hint}',
                )
            revision = namespace.meta.labels.get("istio.io/rev", "default")
            if value is None and revision != "default":
                self._warn(
                    "Namespace",
                    namespace.meta,
                    ("metadata", "labels", "istio.io/rev"),
                    f'no control plane of revision "{revision}" is here, only "default": its pods get no sidecar',
                )

    def services(self) -> None:
        with_endpoints = {(entry.meta.namespace, entry.service) for entry in self._mesh.endpoint_slices}
        for service in self._mesh.services:
            if service.external_name:
                continue
            if not service.selector:
                if (service.meta.namespace, service.meta.name) not in with_endpoints:
                    self._warn(
                        "Service", service.meta, ("spec",), "it has no selector and no endpoints are written for it"
                    )
                continue
            chosen = [
                pod for pod in self._pods_of[service.meta.namespace] if selects(service.selector, pod.meta.labels)
            ]
            workloads = [
                entry
                for entry in self._mesh.workload_entries
                if entry.meta.namespace == service.meta.namespace
                and selects(service.selector, {**entry.meta.labels, **entry.endpoint.labels})
            ]
            if not chosen and not workloads:
                self._warn("Service", service.meta, ("spec", "selector"), "it selects no pod, so it has no endpoints")
            for pod in chosen:
                self._target_ports(service, pod)

    def _target_ports(self, service: Service, pod: Pod) -> None:
        declared = [port for container in pod.containers for port in container.ports]
        echo = all(not container.command for container in pod.containers)
        for index, port in enumerate(service.ports):
            path = ("spec", "ports", index, "targetPort")
            if isinstance(port.target, str):
                if not any(found.name == port.target and found.protocol == port.transport for found in declared):
                    hint = did_you_mean(port.target, [found.name for found in declared if found.name])
                    self._warn(
                        "Service",
                        service.meta,
                        path,
                        f'no container of pod {pod.name} has a port named "{port.target}". {hint}',
                    )
            elif echo and not any(found.port == port.target and found.protocol == port.transport for found in declared):
                self._warn(
                    "Service",
                    service.meta,
                    path,
                    f"no container of pod {pod.name} declares port {port.target}, so its echo app does not listen there",
                )

    def endpoint_slices(self) -> None:
        services = {service.meta.key: service for service in self._mesh.services}
        for entry in self._mesh.endpoint_slices:
            kind = "EndpointSlice" if ("EndpointSlice", entry.meta.key) in self._items else "Endpoints"
            service = services.get(f"{entry.meta.namespace}/{entry.service}")
            if service is None:
                self._warn(
                    kind,
                    entry.meta,
                    ("metadata",),
                    f"there is no Service {entry.service} in namespace {entry.meta.namespace}",
                )
                continue
            if service.selector:
                self._warn(
                    kind,
                    entry.meta,
                    ("metadata",),
                    f"Service {entry.service} has a selector: Kubernetes makes its endpoints itself",
                )
            for name in entry.ports:
                if not any(port.name == name for port in service.ports):
                    self._warn(
                        kind,
                        entry.meta,
                        ("ports",),
                        f'Service {entry.service} has no port named "{name}", and Istio matches endpoints by port name',
                    )

    # --- Istio ---

    def service_entries(self) -> None:
        for entry in self._mesh.service_entries:
            self._exports("ServiceEntry", entry.meta, entry.export_to)
            for index, namespace in enumerate(entry.export_to):
                self._known_namespace("ServiceEntry", entry.meta, ("spec", "exportTo", index), namespace)
            if entry.workload_selector is not None:
                labels = [pod.meta.labels for pod in self._pods_of[entry.meta.namespace]]
                labels += [
                    {**found.meta.labels, **found.endpoint.labels}
                    for found in self._mesh.workload_entries
                    if found.meta.namespace == entry.meta.namespace
                ]
                if not any(selects(entry.workload_selector, found) for found in labels):
                    self._warn("ServiceEntry", entry.meta, ("spec", "workloadSelector"), "it selects no workload")
            elif entry.resolution == "STATIC" and not entry.endpoints:
                self._warn(
                    "ServiceEntry",
                    entry.meta,
                    ("spec", "resolution"),
                    "resolution STATIC without endpoints: requests to it find no upstream",
                )

    def _exports(self, kind: str, meta: Meta, values: Sequence[str], *, selector: bool = False) -> None:
        """Rules of exportTo (istio/istio: pkg/config/validation/validation.go: validateExportTo)."""
        own = [meta.namespace if value == "." else value for value in values]
        why = ""
        if len(set(own)) < len(own):
            why = f'"{next(value for value in own if own.count(value) > 1)}" is there twice ("." is the own namespace)'
        elif "*" in own and len(own) > 1:
            why = '"*" stands alone'
        elif "~" in own and kind != "ServiceEntry":
            why = f'"~" is for a ServiceEntry only, not for a {kind}'
        elif "~" in own and len(own) > 1:
            why = '"~" stands alone'
        elif selector and own and own != [meta.namespace]:
            why = "a rule with workloadSelector is of its own namespace only"
        if why:
            self._error(kind, meta, ("spec", "exportTo"), "bad exportTo", why)

    def _known_namespace(self, kind: str, meta: Meta, path: Sequence[str | int], name: str) -> None:
        if name not in (".", "*", "~") and name not in self._namespaces:
            self._warn(kind, meta, path, f'there is no namespace "{name}". {did_you_mean(name, self._namespaces)}')

    def sidecars(self) -> None:
        root = self._mesh.mesh_config.root_namespace
        whole: dict[str, Sidecar] = {}
        chosen: dict[str, Sidecar] = {}
        for sidecar in self._mesh.sidecars:
            meta = sidecar.meta
            if sidecar.workload_selector is None:
                other = whole.setdefault(meta.namespace, sidecar)
                if other is not sidecar:
                    self._warn(
                        "Sidecar",
                        meta,
                        ("spec",),
                        f"{other.meta.key} already is the namespace's Sidecar without selector; the oldest wins, nothing is merged",
                        "IST0111",
                    )
            else:
                pods = [
                    pod for pod in self._pods_of[meta.namespace] if selects(sidecar.workload_selector, pod.meta.labels)
                ]
                if not pods:
                    self._warn(
                        "Sidecar",
                        meta,
                        ("spec", "workloadSelector"),
                        "it selects no pod"
                        + (
                            " (in the root namespace a selector reaches that namespace only)"
                            if meta.namespace == root
                            else ""
                        ),
                        "IST0101",
                    )
                for pod in pods:
                    other = chosen.setdefault(pod.name, sidecar)
                    if other is not sidecar:
                        self._warn(
                            "Sidecar",
                            meta,
                            ("spec", "workloadSelector"),
                            f"{other.meta.key} already selects pod {pod.name}; the oldest wins, nothing is merged",
                            "IST0110",
                        )
            for index, egress in enumerate(sidecar.egress):
                for position, host in enumerate(egress.hosts):
                    self._egress_host(meta, ("spec", "egress", index, "hosts", position), host)

    def _egress_host(self, meta: Meta, path: Sequence[str | int], written: str) -> None:
        namespace, _, host = written.partition("/")
        name = namespace.removeprefix("~")
        if name and name not in ("*", "."):
            self._known_namespace("Sidecar", meta, path, name)
        if "*" in host or host in self._hosts:
            return
        if "." not in host:
            where = meta.namespace if name in ("", ".", "*") else name
            self._warn(
                "Sidecar",
                meta,
                path,
                f'"{host}" is a short name and matches nothing. Did you mean "{namespace}/{host}.{where}.svc.{self._mesh.domain_suffix}"?',
            )
        else:
            self._warn("Sidecar", meta, path, f'no service has the host "{host}". {did_you_mean(host, self._hosts)}')

    def peer_authentications(self) -> None:
        root = self._mesh.mesh_config.root_namespace
        whole: dict[str, str] = {}
        for policy in self._mesh.peer_authentications:
            meta = policy.meta
            if policy.selector is None:
                other = whole.setdefault(meta.namespace, meta.key)
                if other != meta.key:
                    self._warn(
                        "PeerAuthentication",
                        meta,
                        ("spec",),
                        f"{other} already is the namespace's policy without selector; the oldest wins",
                    )
            elif meta.namespace == root:
                self._warn(
                    "PeerAuthentication",
                    meta,
                    ("spec", "selector"),
                    "with a selector in the root namespace it has no effect on other namespaces",
                )
            elif not any(selects(policy.selector, pod.meta.labels) for pod in self._pods_of[meta.namespace]):
                self._warn("PeerAuthentication", meta, ("spec", "selector"), "it selects no pod")

    def _expand(self, host: str, namespace: str) -> str:
        return analysis.full_name(host, namespace, self._mesh.domain_suffix)

    def _known_host(self, config: RawConfig, path: Sequence[str | int], host: str) -> None:
        full, code = self._expand(host, config.meta.namespace), _UNKNOWN_HOST[config.kind]
        if full.startswith("*"):
            if not any(known.endswith(full[1:]) for known in self._hosts):
                why = f'no service has a host that ends in "{full[1:]}"'
                self._warn(config.kind, config.meta, path, why, code)
        elif full not in self._hosts and not any(
            known.startswith("*.") and full.endswith(known[1:]) for known in self._hosts
        ):
            why = f'no service has the host "{full}". {did_you_mean(full, self._hosts)}'
            self._warn(config.kind, config.meta, path, why, code)

    def destination_rules(self) -> None:
        for rule in self._mesh.destination_rules:
            self._exports(
                rule.kind, rule.meta, strings(rule.spec.get("exportTo")), selector="workloadSelector" in rule.spec
            )
            host = str(rule.spec.get("host", ""))
            self._known_host(rule, ("spec", "host"), host)
            full = self._expand(host, rule.meta.namespace)
            behind = self._labels_behind(full)
            for index, subset in enumerate(maps(rule.spec.get("subsets"))):
                labels = subset.get("labels")
                if behind is not None and isinstance(labels, Mapping) and not any(selects(labels, at) for at in behind):
                    self._warn(
                        rule.kind,
                        rule.meta,
                        ("spec", "subsets", index, "labels"),
                        f'subset "{subset.get("name")}" selects none of the pods of {full}',
                        "IST0173",
                    )

    def _labels_behind(self, host: str) -> list[Mapping[str, str]] | None:
        """The labels of everything that a host's selector selects, or of its endpoints; None if it has neither."""
        selectors = [
            (service.meta.namespace, service.selector)
            for service in self._mesh.services
            if service.host(self._mesh.domain_suffix) == host and service.selector
        ]
        entries = [entry for entry in self._mesh.service_entries if host in entry.hosts]
        selectors += [
            (entry.meta.namespace, entry.workload_selector) for entry in entries if entry.workload_selector is not None
        ]
        labels: list[Mapping[str, str]] = [endpoint.labels for entry in entries for endpoint in entry.endpoints]
        if not selectors and not labels:
            return None
        for namespace, selector in selectors:
            found = [pod.meta.labels for pod in self._pods_of[namespace]]
            found += [
                {**entry.meta.labels, **entry.endpoint.labels}
                for entry in self._mesh.workload_entries
                if entry.meta.namespace == namespace
            ]
            labels += [each for each in found if selects(selector, each)]
        return labels

    def virtual_services(self) -> None:
        subsets: dict[str, set[str]] = defaultdict(set)
        for rule in self._mesh.destination_rules:
            full = self._expand(str(rule.spec.get("host", "")), rule.meta.namespace)
            subsets[full] |= {str(subset.get("name")) for subset in maps(rule.spec.get("subsets"))}
        for service in self._mesh.virtual_services:
            self._exports(service.kind, service.meta, strings(service.spec.get("exportTo")))
            self._claims(service)
            for path, destination in destinations(service.spec):
                host = str(destination.get("host", ""))
                self._known_host(service, (*path, "host"), host)
                subset = destination.get("subset")
                full = self._expand(host, service.meta.namespace)
                if subset and str(subset) not in subsets[full]:
                    hint = did_you_mean(str(subset), subsets[full])
                    self._warn(
                        service.kind,
                        service.meta,
                        (*path, "subset"),
                        f'no DestinationRule gives {full} a subset "{subset}": requests get 503 NC. {hint}',
                        "IST0101",
                    )

    def _claims(self, service: RawConfig) -> None:
        """Claims of JWTs are for gateways (istio/istio: pkg/config/validation/validation.go, ValidateVirtualService)."""
        from lab.manifests.schema.virtual_service import is_claim

        gateways = strings(service.spec.get("gateways"))
        if gateways and "mesh" not in gateways:
            return
        for number, rule in enumerate(maps(service.spec.get("http"))):
            for index, match in enumerate(maps(rule.get("match"))):
                for field in ("headers", "withoutHeaders"):
                    for name in mapping(match.get(field)):
                        if is_claim(name):
                            self._error(
                                service.kind,
                                service.meta,
                                ("spec", "http", number, "match", index, field, name),
                                f'match on the JWT claim "{name}"',
                                "sidecars (gateway mesh) know no claims, only gateways do",
                                "Match a header.",
                            )

    # --- our own kinds ---

    def _places(self) -> list[str]:
        return [pod.name for pod in self._mesh.pods] + [host.meta.name for host in self._mesh.external_hosts]

    def links(self) -> None:
        places = self._places()
        for link in self._mesh.links:
            for index, place in enumerate(link.between):
                if place != "*" and place not in places:
                    self._error(
                        "Link",
                        link.meta,
                        ("spec", "between", index),
                        f'unknown place "{place}"',
                        "no such pod or ExternalHost",
                        did_you_mean(place, places),
                    )

    def traffic_tests(self) -> None:
        pods = {pod.name: pod for pod in self._mesh.pods}
        hosts = [host.meta.name for host in self._mesh.external_hosts]
        for test in self._mesh.tests:
            source, item = test.flow_from, self._items["TrafficTest", test.meta.key]
            if source.pod and source.pod not in pods:
                self._error(
                    "TrafficTest",
                    test.meta,
                    ("spec", "from", "pod"),
                    f'unknown pod "{source.pod}"',
                    "no such pod in the mesh",
                    did_you_mean(source.pod, pods),
                )
            if source.external and source.external not in hosts:
                self._error(
                    "TrafficTest",
                    test.meta,
                    ("spec", "from", "external"),
                    f'unknown ExternalHost "{source.external}"',
                    "no such ExternalHost",
                    did_you_mean(source.external, hosts),
                )
            if source.spoof and not test.to.crafted:
                self._error(
                    "TrafficTest",
                    test.meta,
                    ("spec", "from", "spoof"),
                    "spoof without crafted",
                    "only a crafted packet can have a forged source",
                    "Set to.crafted: true.",
                )
            written = value_at(item, "spec", "to", "pod")
            if isinstance(written, str) and test.to.host == written:
                self._error(
                    "TrafficTest",
                    test.meta,
                    ("spec", "to", "pod"),
                    f'unknown pod "{written}"',
                    "no such pod in the mesh",
                    did_you_mean(written, pods),
                )
            inbound = test.expect.get("inbound")
            expected = inbound.get("pod") if isinstance(inbound, Mapping) else None
            if isinstance(expected, str) and expected not in pods:
                self._error(
                    "TrafficTest",
                    test.meta,
                    ("spec", "expect", "inbound", "pod"),
                    f'unknown pod "{expected}"',
                    "no such pod in the mesh",
                    did_you_mean(expected, pods),
                )

"""Manifests in, a Mesh out: the one door to this room.

Reads Kubernetes and Istio YAML and our own kinds, refuses what it does not know, says where (file:line),
decides injection, makes pods of Deployments, and gives everything an address.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lab.errors import InputError
from lab.manifests import addresses, istio, metrics_merge, semantics, sidecarlab
from lab.manifests.addresses import Claim, ServiceDraft
from lab.manifests.document import Map, Seq, locate, parse
from lab.manifests.files import read_text
from lab.manifests.item import Item
from lab.manifests.kinds import ACCEPTED, KINDS, REFUSED, SCOPED, Kind
from lab.manifests.model import (
    EndpointSlice,
    ExternalHost,
    Link,
    Mesh,
    MeshConfig,
    Meta,
    Namespace,
    PeerAuthentication,
    Pod,
    RawConfig,
    ServiceEntry,
    Sidecar,
    Source,
    WorkloadEntry,
)
from lab.manifests.pods import deployment_pods, pod_of, resolve_environment
from lab.manifests.problems import Problems, did_you_mean
from lab.manifests.schema.base import Reading, read
from lab.manifests.schema.metadata import Object
from lab.manifests.services import endpoint_slice, endpoints, service


def load(paths: Sequence[str | Path], name: str | None = None, previous: Mesh | None = None) -> Mesh:
    """The mesh that files and directories (their ``*.yaml`` and ``*.yml``, sorted) describe together.

    Args:
        paths: files or directories.
        name: the lab's name; by default that of the first path, without extension.
        previous: the mesh as it runs now: what is in both keeps the addresses that it has there.

    Raises:
        InputError: the first of the errors that ``check`` would list.
    """
    mesh, errors = check(paths, name, previous)
    if mesh is None:
        raise errors[0]
    return mesh


def load_text(text: str, file: str = "-", name: str = "lab") -> Mesh:
    """The mesh that a YAML text describes; raises InputError."""
    problems = Problems()
    mesh = _build([(file, text)], name, problems)
    if mesh is None:
        raise problems.errors[0]
    return mesh


def texts(paths: Sequence[str | Path]) -> list[tuple[str, str]]:
    """The names and contents of files and directories, in the order in which `load` reads them; raises InputError."""
    return [(str(file), read_text(file)) for file in _files(paths)]


def load_texts(found: Sequence[tuple[str, str]], name: str, previous: Mesh | None = None) -> Mesh:
    """The mesh that texts (file name, content) describe together; as `load`."""
    problems = Problems()
    mesh = _build(found, name, problems, previous)
    if mesh is None:
        raise problems.errors[0]
    return mesh


def check(
    paths: Sequence[str | Path], name: str | None = None, previous: Mesh | None = None
) -> tuple[Mesh | None, list[InputError]]:
    """The mesh, or None and every error that was found, in the order of the files."""
    try:
        found = texts(paths)
    except InputError as error:
        return None, [error]
    problems = Problems()
    mesh = _build(found, name or lab_name(Path(paths[0])), problems, previous)
    return mesh, problems.errors


def lab_name(path: str | Path) -> str:
    """A name for a lab made of a file's or directory's name: lower case letters, digits and ``-``."""
    base = os.path.basename(os.path.realpath(path))
    stem = re.sub(r"\.ya?ml$", "", base)
    return re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:40] or "lab"


def _files(paths: Sequence[str | Path]) -> list[Path]:
    if not paths:
        raise InputError(
            "no manifests", "", "no file or directory was named", "Name one, e.g. topologies/quickstart.yaml."
        )
    files: list[Path] = []
    for path in paths:
        files += _in_directory(Path(path)) if os.path.isdir(path) else [_existing(path)]
    return list(dict.fromkeys(files))


def _in_directory(path: Path) -> list[Path]:
    try:
        found = sorted(entry for entry in path.iterdir() if entry.suffix in (".yaml", ".yml") and entry.is_file())
    except OSError as error:
        why = error.strerror or str(error)
        raise InputError("cannot read a directory", str(path), why, "Name one that can be read.") from None
    if not found:
        raise InputError("no manifests", str(path), "the directory holds no *.yaml or *.yml", "Name another.")
    return found


def _existing(path: str | Path) -> Path:
    if not str(path):  # Path("") would be the current directory
        raise InputError("empty file name", next_step="Name a manifest file or a directory of them.")
    try:
        os.stat(path)
    except FileNotFoundError:
        raise InputError("no such file", str(path), "", "Name a manifest file or a directory of them.") from None
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        why = getattr(error, "strerror", "") or str(error)
        raise InputError("cannot read", str(path), why, "Name a file that can be read.") from None
    return Path(path)


# --- reading --------------------------------------------------------------------------------


@dataclass
class _Objects:
    """What was read, by kind, each under NAMESPACE/NAME."""

    items: dict[str, dict[str, Item]] = field(default_factory=dict)

    def of(self, *kinds: str) -> list[Item]:
        found = [item for kind in kinds for item in self.items.get(kind, {}).values()]
        return sorted(found, key=lambda item: item.meta.order)

    def by_key(self) -> dict[tuple[str, str], Item]:
        return {(kind, key): item for kind, same in self.items.items() for key, item in same.items()}


def _flatten(document: Map, problems: Problems) -> list[Map]:
    """The objects of a ``List`` (what ``kubectl get -o yaml`` prints), or the document itself."""
    if document.get("kind") != "List":
        return [document]
    items = document.get("items")
    if not isinstance(items, Seq):
        problems.error(document.source("items"), "bad List", "items must be a list of objects")
        return []
    found = []
    for index, entry in enumerate(items):
        if isinstance(entry, Map):
            found.append(entry)
        else:
            problems.error(Source(document.file, items.lines[index]), "bad List", "each item must be an object")
    return found


def _kind(document: Map, problems: Problems) -> Kind | None:
    """The known kind of a document; None after an error, or for a kind that is accepted without effect."""
    api, kind = document.get("apiVersion"), document.get("kind")
    for key, value in (("apiVersion", api), ("kind", kind)):
        if not isinstance(value, str) or not value:
            problems.error(document.source(key), f'missing field "{key}"', "every object has apiVersion and kind")
            return None
    assert isinstance(api, str)
    assert isinstance(kind, str)
    group, _, version = api.rpartition("/")
    known = KINDS.get((group, kind))
    if known is None:
        if (group, kind) in ACCEPTED:
            problems.warn(document.source("kind"), f"{kind} ({api}) is accepted, but the lab does not act on it")
        elif (group, kind) in REFUSED:
            problems.error(
                document.source("kind"),
                f'kind "{kind}" not supported',
                f"{api} {kind} changes where traffic goes, and the lab cannot do that",
                REFUSED[group, kind],
            )
        else:
            groups = [other for other, name in KINDS if name == kind]
            if groups:
                versions = KINDS[groups[0], kind].versions
                right = f"{groups[0]}/{versions[0]}" if groups[0] else versions[0]
                problems.error(
                    document.source("apiVersion"),
                    f'unknown apiVersion "{api}"',
                    f"{kind} is not in it",
                    f'Write "{right}".',
                )
            else:
                hint = did_you_mean(kind, [name for _, name in KINDS])
                problems.error(
                    document.source("kind"), f'unknown kind "{kind}"', f"the lab knows no {kind} in {api}", hint
                )
        return None
    if version not in known.versions:
        right = f"{group}/{known.versions[0]}" if group else known.versions[0]
        problems.error(
            document.source("apiVersion"),
            f'unknown apiVersion "{api}"',
            f"{kind} has version {' or '.join(known.versions)}",
            f'Write "{right}".',
        )
        return None
    return known


def _schema(kind: Kind) -> type[Object]:
    module, _, name = kind.schema.partition(":")
    found: type[Object] = getattr(importlib.import_module(f"lab.manifests.schema.{module}"), name)
    return found


def _read(document: Map, order: int, problems: Problems) -> Item | None:
    known = _kind(document, problems)
    if known is None:
        return None
    kind = str(document["kind"])
    metadata = document.get("metadata")
    written = metadata.get("name", "?") if isinstance(metadata, Map) else "?"
    namespace = metadata.get("namespace") if isinstance(metadata, Map) else None
    if known.scope == SCOPED and not namespace:
        namespace = "default"
    subject = f"{kind} {namespace}/{written}" if known.scope == SCOPED else f"{kind} {written}"
    before = len(problems.errors)
    schema = read(_schema(known), document, Reading(problems, subject))
    if schema is None or len(problems.errors) > before:
        return None
    meta = Meta(
        name=schema.metadata.name,
        namespace=str(namespace) if known.scope == SCOPED else "",
        labels=dict(schema.metadata.labels),
        annotations=dict(schema.metadata.annotations),
        created=schema.metadata.creation_timestamp,
        order=order,
        source=document.source(),
    )
    if known.scope != SCOPED and namespace:
        problems.warn(
            document.source("metadata"), f"{subject} does not live in a namespace: metadata.namespace is ignored"
        )
    return Item(kind, meta, schema, document)


def _collect(texts: Sequence[tuple[str, str]], problems: Problems) -> _Objects:
    objects = _Objects()
    order = 0
    for file, text in texts:
        try:
            documents = parse(text, file)
        except InputError as error:
            problems.errors.append(error)
            continue
        for document in documents:
            for entry in _flatten(document, problems):
                order += 1
                item = _read(entry, order, problems)
                if item is None:
                    continue
                same = objects.items.setdefault(item.kind, {})
                first = same.setdefault(item.meta.key, item)
                if first is not item:
                    problems.error(
                        item.meta.source,
                        f"{item.subject} written twice",
                        f"it is already at {first.meta.source}",
                        "Rename or remove one.",
                    )
    return objects


# --- building -------------------------------------------------------------------------------


def _mesh_config(objects: _Objects, problems: Problems) -> MeshConfig:
    found: list[tuple[Item, Map]] = []
    for item in objects.of("ConfigMap"):
        if item.meta.name != "istio":
            problems.warn(item.meta.source, f"{item.subject} is accepted, but the lab does not act on it")
            continue
        try:
            document = istio.mesh_document(item)
        except InputError as error:
            problems.errors.append(error)
            continue
        if document is not None:
            found.append((item, document))
    if not found:
        return MeshConfig()
    if len(found) > 1:
        problems.error(
            found[1][0].meta.source,
            "two mesh configurations",
            f"{found[1][0].subject} and {found[0][0].subject} ({found[0][0].meta.source}) both set one",
            "Keep one.",
        )
    from lab.manifests.schema.mesh_config import MeshConfig as Schema

    item, document = found[0]
    schema = read(Schema, document, Reading(problems, f"MeshConfig in {item.subject}"))
    return istio.mesh_config_of(schema, document) if schema is not None else MeshConfig()


def _namespaces(objects: _Objects, config: MeshConfig, problems: Problems) -> list[Namespace]:
    """The declared namespaces, and those that objects live in without declaring them."""
    found: dict[str, Namespace] = {}
    for item in objects.of("Namespace"):
        labels = {"kubernetes.io/metadata.name": item.meta.name, **item.meta.labels}
        found[item.meta.name] = Namespace(replace(item.meta, labels=labels))
    for item in objects.of(*(kind for _, kind in KINDS)):
        name = item.meta.namespace
        if name and name not in found:
            if name not in ("default", "kube-system", config.root_namespace):
                problems.warn(
                    item.meta.source,
                    f'namespace "{name}" is not declared: it is made without labels, so without injection',
                )
            found[name] = Namespace(
                Meta(name, labels={"kubernetes.io/metadata.name": name}, order=item.meta.order, source=item.meta.source)
            )
    return list(found.values())


def _pods(
    objects: _Objects,
    config: MeshConfig,
    labels: Mapping[str, Mapping[str, str]],
    claims: list[Claim],
    problems: Problems,
) -> list[Pod]:
    found: dict[str, Pod] = {}
    for item in objects.of("Pod", "Deployment"):
        of_namespace = labels.get(item.meta.namespace, {})
        made = (
            [pod_of(item, of_namespace, claims, problems)]
            if item.kind == "Pod"
            else list(deployment_pods(item, of_namespace, problems))
        )
        try:
            made = [metrics_merge.merged(pod, config) for pod in made]
        except metrics_merge.BadAnnotation as error:
            path = ("metadata",) if item.kind == "Pod" else ("spec", "template", "metadata")
            problems.error(
                locate(item.document, (*path, "annotations", error.name)),
                f'bad value "{error.value}" of annotation {error.name}',
                f"{item.subject}: {error}",
            )
        for pod in made:
            first = found.setdefault(pod.meta.key, pod)
            if first is not pod:
                problems.error(
                    item.meta.source,
                    f"Pod {pod.meta.key} exists twice",
                    f"{item.subject} and {first.meta.source} both make it",
                    "Rename one.",
                )
    return list(found.values())


def _endpoint_slices(objects: _Objects, services: Sequence[ServiceDraft], problems: Problems) -> list[EndpointSlice]:
    selecting = {draft.service.meta.key for draft in services if draft.service.selector}
    found: list[EndpointSlice] = []
    for item in objects.of("EndpointSlice", "Endpoints"):
        if item.kind == "Endpoints" and item.meta.key in selecting:
            problems.warn(
                locate(item.document, ("metadata",)),
                f"{item.subject}: its Service has a selector: Kubernetes overwrites these endpoints with its own",
            )
        elif item.kind == "Endpoints":
            found += endpoints(item)
        elif (made := endpoint_slice(item, problems)) is not None:
            found.append(made)
    return found


def _build(
    texts: Sequence[tuple[str, str]], name: str, problems: Problems, previous: Mesh | None = None
) -> Mesh | None:
    """The mesh, or None if ``problems`` holds an error."""
    objects = _collect(texts, problems)
    config = _mesh_config(objects, problems)
    namespaces = _namespaces(objects, config, problems)
    claims: list[Claim] = []
    labels = {namespace.meta.name: namespace.meta.labels for namespace in namespaces}
    pods = _pods(objects, config, labels, claims, problems)
    services: list[ServiceDraft] = [service(item, claims, problems) for item in objects.of("Service")]
    slices = _endpoint_slices(objects, services, problems)
    entries: list[ServiceEntry] = [istio.service_entry(item, problems) for item in objects.of("ServiceEntry")]
    workloads: list[WorkloadEntry] = [istio.workload_entry(item) for item in objects.of("WorkloadEntry")]
    sidecars: list[Sidecar] = [istio.sidecar(item, problems) for item in objects.of("Sidecar")]
    policies: list[PeerAuthentication] = [istio.peer_authentication(item) for item in objects.of("PeerAuthentication")]
    rules: list[RawConfig] = [istio.raw_config(item) for item in objects.of("DestinationRule")]
    routes: list[RawConfig] = [istio.raw_config(item) for item in objects.of("VirtualService")]
    hosts: list[ExternalHost] = [sidecarlab.external_host(item, claims) for item in objects.of("ExternalHost")]
    links: list[Link] = [sidecarlab.link(item) for item in objects.of("Link")]
    try:
        dual_stack = _dual_stack(config, services, claims)
        placed = addresses.assign(
            namespaces, pods, services, hosts, entries, claims, problems, dual_stack=dual_stack, previous=previous
        )
    except InputError as error:
        problems.errors.append(error)
        return None
    pods, whole_services, hosts, entries, fabric = placed
    pods = [resolve_environment(pod, fabric.gateway) for pod in pods]
    by_name = {pod.name: pod.ip for pod in pods}
    tests = [sidecarlab.traffic_test(item, by_name) for item in objects.of("TrafficTest")]
    mesh = Mesh(
        name=name,
        files=tuple(file for file, _ in texts),
        mesh_config=config,
        fabric=fabric,
        namespaces=tuple(namespaces),
        pods=tuple(pods),
        services=tuple(whole_services),
        endpoint_slices=tuple(slices),
        service_entries=tuple(entries),
        workload_entries=tuple(workloads),
        sidecars=tuple(sidecars),
        destination_rules=tuple(rules),
        virtual_services=tuple(routes),
        peer_authentications=tuple(policies),
        external_hosts=tuple(hosts),
        links=tuple(links),
        tests=tuple(tests),
    )
    if not problems.errors:
        semantics.check(mesh, objects.by_key(), problems)
    problems.errors.sort(key=_place(texts))
    if problems.errors:
        return None
    return replace(mesh, warnings=tuple(problems.warnings))


def _dual_stack(config: MeshConfig, services: Sequence[ServiceDraft], claims: Sequence[Claim]) -> bool:
    """Whether pods get IPv6 too: asked for by ISTIO_DUAL_STACK, by a Service or by a pinned IPv6 address."""
    metadata = config.default_config.get("proxyMetadata")
    asked = isinstance(metadata, Mapping) and str(metadata.get("ISTIO_DUAL_STACK", "")).lower() == "true"
    return asked or any(6 in draft.families for draft in services) or any(":" in claim.address for claim in claims)


def _place(texts: Sequence[tuple[str, str]]) -> Callable[[InputError], tuple[int, int]]:
    """A sort key: errors in the order of the files and their lines."""
    order = {file: index for index, (file, _) in enumerate(texts)}

    def place(error: InputError) -> tuple[int, int]:
        file, _, line = error.where.rpartition(":")
        return (order.get(file, len(order)), int(line)) if line.isdigit() else (order.get(error.where, len(order)), 0)

    return place

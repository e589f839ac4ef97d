"""What the lab starts a pod's processes with must be something that Linux takes: no NUL characters, no endless strings.

Names and values that are bad as written are the schemas' (`EnvName`, `ProcessText`). Here is what is made of them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, cast

from lab.manifests import app_probes, injection, istio, metrics_merge
from lab.manifests.document import Map, locate, parse
from lab.manifests.item import Item, Items
from lab.manifests.model import Mesh, Pod, Source
from lab.manifests.problems import Problems

if TYPE_CHECKING:
    from lab.manifests.schema import deployment
    from lab.manifests.schema import pod as schema

MAX_BYTES = 131_071
"""Of one argument, or of one variable with its name and "=". Source: torvalds/linux: include/uapi/linux/binfmts.h
(MAX_ARG_STRLEN: 32 pages of 4 KiB, with the NUL at the end)."""

Place = tuple[str, Source]
"""An object, and a line of it."""


def _why(text: str) -> str:
    """Why no process can be started with a text; empty if one can."""
    if "\0" in text:
        return "a process can be given no NUL character"
    if len(text) * 4 <= MAX_BYTES:
        return ""
    size = len(text.encode(errors="surrogatepass"))
    return f"Linux takes {MAX_BYTES:,} bytes, this makes {size:,}" if size > MAX_BYTES else ""


def check(mesh: Mesh, pod: Pod, writer: Item, items: Items, problems: Problems, told: set[tuple[Source, str]]) -> None:
    """Adds an error for each variable and argument that no process of the pod can be started with.

    Args:
        writer: the Pod or Deployment that the pod was written as.
        told: what was told of other pods, and is now of this one; what is written for the whole mesh is told once.
    """
    for (subject, source), what, why in _bad(mesh, pod, _Places(mesh, pod, writer, items)):
        if (source, what) not in told:
            problems.error(source, what, f"{subject}: {why}", "Shorten it." if "bytes" in why else "")
            told.add((source, what))


def _bad(mesh: Mesh, pod: Pod, places: _Places) -> Iterator[tuple[Place, str, str]]:
    for container in pod.containers:
        for name, value in container.env.items():
            if why := _why(f"{name}={value}"):
                yield places.variable(container.name, name), f"bad value of env {name}", why
        if not container.command:
            continue  # the echo app, which is given no arguments
        for field, texts in (("command", container.command), ("args", container.args)):
            for index, text in enumerate(texts):
                if why := _why(text):
                    place = places.container(container.name, field, index)
                    yield place, f"bad {field}[{index}] of container {container.name}", why
    metadata = injection.init_env(mesh, pod)
    sidecar = {**metadata, **injection.agent_env(mesh, pod)}
    bad = {name: why for name, value in sidecar.items() if (why := _why(f"{name}={value}"))}
    if any(name in metadata for name in bad if name != "PROXY_CONFIG"):
        bad.pop("PROXY_CONFIG", None)  # it holds the same once more
    for name, why in bad.items():
        yield places.agent_variable(name), f"bad value of the sidecar's variable {name}", why
    for text in (*injection.init_args(mesh, pod), *injection.agent_args(mesh, pod)):
        if why := _why(text):
            yield places.annotation(places.inside(text)), "bad argument of the sidecar", why


def _largest(config: Mapping[str, object]) -> str:
    return max(config, key=lambda name: len(json.dumps(config[name])))


class _Places:
    """Where the parts of a pod are written."""

    def __init__(self, mesh: Mesh, pod: Pod, writer: Item, items: Items) -> None:
        self._mesh, self._pod, self._writer, self._items = mesh, pod, writer, items
        self._at: tuple[str, ...] = ()
        self._spec: schema.PodSpec
        if writer.kind == "Deployment":
            self._at = ("spec", "template")
            template = cast("deployment.Deployment", writer.schema).spec.template
            self._spec, self._notes = template.spec, template.metadata.annotations
        else:
            self._spec, self._notes = cast("schema.Pod", writer.schema).spec, writer.schema.metadata.annotations

    def _place(self, *path: str | int) -> Place:
        return self._writer.subject, locate(self._writer.document, (*self._at, *path))

    def container(self, name: str, *path: str | int) -> Place:
        """A field of a container."""
        index = next(index for index, one in enumerate(self._spec.containers) if one.name == name)
        return self._place("spec", "containers", index, *path)

    def variable(self, container: str, name: str) -> Place:
        """A variable of a container; of two with one name the last counts."""
        written = next(one for one in self._spec.containers if one.name == container).env
        index = max(index for index, entry in enumerate(written) if entry.name == name)
        return self.container(container, "env", index, "value" if written[index].value else "name")

    def inside(self, text: str) -> list[str]:
        """The annotations whose values are part of a text."""
        return [name for name, value in self._notes.items() if value and value in text]

    def annotation(self, names: Collection[str], *path: str) -> Place:
        """The longest of these annotations, the pod's metadata without any; ``path`` leads on in its own YAML."""
        if not names:
            return self._place("metadata")
        name = max(names, key=lambda one: len(self._notes[one]))
        subject, source = self._place("metadata", "annotations", name)
        if not path:
            return subject, source
        return subject, locate(parse(self._notes[name], source.file, source.line)[0], path)

    def _mesh_config(self, *path: str) -> Place:
        for (kind, _), item in self._items.items():
            document: Map | None = None
            if kind == "ConfigMap" and item.meta.name == "istio":
                document = istio.mesh_document(item)
            if document is not None:
                return item.subject, locate(document, path)
        return self._place("metadata")

    def agent_variable(self, name: str) -> Place:
        """What a variable of the sidecar, or most of it, is made of."""
        if name == "ISTIO_PROMETHEUS_ANNOTATIONS":
            return self.annotation(metrics_merge.named(self._notes))
        if name == "ISTIO_KUBE_APP_PROBERS":
            every = [(container.name, probe) for container in self._pod.containers for probe in container.probes]
            container, largest = max(every, key=lambda one: len(json.dumps(one[1].action)))
            return self.container(container, *app_probes.FIELDS[largest.name])
        if name in ("ISTIO_META_POD_PORTS", "ISTIO_META_APP_CONTAINERS"):
            return self._place("spec", "containers")
        if name == "TRUST_DOMAIN":
            return self._mesh_config("trustDomain")
        own, shared = self._pod.proxy_config, self._mesh.mesh_config.default_config
        for path in ("proxyMetadata", name), ("meshId",) if name == "ISTIO_META_MESH_ID" else ():
            if path and _has(own, path):
                return self.annotation([injection.PROXY_CONFIG], *path)
            if path and _has(shared, path):
                return self._mesh_config("defaultConfig", *path)
        if name == "PROXY_CONFIG" and len(json.dumps(own)) > len(json.dumps(shared)):
            return self.annotation([injection.PROXY_CONFIG], _largest(own))
        if name == "PROXY_CONFIG":
            return self._mesh_config("defaultConfig", _largest(shared))
        return self._mesh_config("trustDomain") if name == "ISTIO_META_MESH_ID" else self._place("metadata")


def _has(config: object, path: tuple[str, ...]) -> bool:
    for key in path:
        if not isinstance(config, Mapping) or key not in config:
            return False
        config = config[key]
    return True

"""Doubts about injection.

Source: istio/istio: pkg/config/analysis/analyzers/injection/injection.go and image-auto.go.
"""

from __future__ import annotations

from collections.abc import Iterator

from lab.manifests import injection
from lab.manifests.analysis.finding import Finding, maps
from lab.manifests.item import Item, Items, value_at
from lab.manifests.model import Mesh

_SWITCH, _REVISION, _DATAPLANE = "istio-injection", "istio.io/rev", "istio.io/dataplane-mode"
_CONTROL_PLANE = "istio-system"


def findings(mesh: Mesh, items: Items) -> Iterator[Finding]:
    yield from _namespaces(mesh, items)
    yield from _without_proxy(mesh, items)
    yield from _auto_image(mesh, items)


def _namespaces(mesh: Mesh, items: Items) -> Iterator[Finding]:
    """IST0123 and IST0102, of namespaces that are written; whatever another value than enabled says is meant."""
    for namespace in mesh.namespaces:
        meta, labels = namespace.meta, namespace.meta.labels
        if meta.name == _CONTROL_PLANE or ("Namespace", meta.key) not in items:
            continue
        switch = labels.get(_SWITCH)
        told = [] if switch is None else [f"{_SWITCH}={switch}"]
        if switch in (None, "enabled"):
            told += [f"{label}={labels[label]}" for label in (_REVISION, _DATAPLANE) if label in labels]
        if len(told) > 1:
            message = f"{' and '.join(told)} both say how its pods join the mesh; keep one"
            yield Finding("IST0123", "Namespace", meta, ("metadata", "labels"), message)
        ignored = meta.name in injection.IGNORED_NAMESPACES  # a label there would change nothing
        if not ignored and not switch and _REVISION not in labels and labels.get(_DATAPLANE) != "ambient":
            yield Finding(
                "IST0102",
                "Namespace",
                meta,
                ("metadata", "name"),
                "no label says whether its pods get a sidecar, so they get none unless they ask for it;"
                " write istio-injection: enabled, or disabled",
                "info",
            )


def _without_proxy(mesh: Mesh, items: Items) -> Iterator[Finding]:
    """IST0103: pods of an injected namespace that get no proxy, other than by a plain ``false``."""
    injected = {one.meta.name for one in mesh.namespaces if one.meta.labels.get(_SWITCH) == "enabled"}
    told = set()
    for pod in mesh.pods:
        asked = pod.meta.labels.get(injection.INJECT, pod.meta.annotations.get(injection.INJECT, ""))
        if pod.injected or pod.meta.namespace not in injected or asked.lower() == "false":
            continue
        writer = items.get(("Pod", pod.meta.key)) or items["Deployment", f"{pod.meta.namespace}/{pod.owner_name}"]
        if writer.meta.key in told:
            continue
        told.add(writer.meta.key)
        why = f'{injection.INJECT} is "{asked}"'
        if pod.meta.namespace in injection.IGNORED_NAMESPACES:
            why = "the injector passes by the namespaces of the system"
        message = f"it gets no sidecar in a namespace that is injected: {why}"
        yield Finding("IST0103", writer.kind, writer.meta, (*_template(writer), "metadata"), message)


def _template(item: Item) -> tuple[str, ...]:
    return ("spec", "template") if item.kind == "Deployment" else ()


def _auto_image(mesh: Mesh, items: Items) -> Iterator[Finding]:
    """IST0146 and IST0147: a container that only the injector could replace."""
    labels = {namespace.meta.name: namespace.meta.labels for namespace in mesh.namespaces}
    for (kind, _), item in items.items():
        if kind not in ("Pod", "Deployment"):
            continue
        path = (*_template(item), "spec", "containers")
        for index, container in enumerate(maps(value_at(item, *path))):
            auto = container.get("name") == injection.PROXY_CONTAINER and container.get("image") == "auto"
            if auto and not injection.decided(item, labels.get(item.meta.namespace, {})):
                code = "IST0147" if kind == "Pod" else "IST0146"
                message = "image: auto is for the injector to replace, and nothing is injected here"
                yield Finding(code, kind, item.meta, (*path, index), message)

"""Doubts about Istio's annotations: unknown, on a kind that they are not for, deprecated, or of a bad value.

Source: istio/istio: pkg/config/analysis/analyzers/annotations/annotations.go, pkg/kube/inject/validate.go;
names and kinds: istio/api: annotation/annotations.yaml.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from lab.manifests import injection
from lab.manifests.analysis.finding import Finding, mapping
from lab.manifests.item import Item, Items, value_at
from lab.manifests.model import Mesh
from lab.manifests.problems import did_you_mean

_KINDS: Mapping[str, tuple[str, ...]] = {
    "Pod": (
        *injection.ANNOTATIONS,
        *injection.OTHER_ANNOTATIONS,
        *injection.UNUSED_ANNOTATIONS,
        "prometheus.istio.io/merge-metrics",
        *(f"sidecar.istio.io/{name}" for name in ("statsFlushInterval", "statsEvictionInterval", "statsHistogramBins")),
        *(f"readiness.status.sidecar.istio.io/{name}" for name in ("initialDelaySeconds", "periodSeconds")),
        *(f"readiness.status.sidecar.istio.io/{name}" for name in ("failureThreshold", "applicationPorts")),
        "proxy.istio.io/overrides",
        "inject.istio.io/templates",
        "istio.io/rev",
        *(f"ambient.istio.io/{name}" for name in ("redirection", "bypass-inbound-capture", "dns-capture")),
    ),
    "Service": (
        *(f"alpha.istio.io/{whose}-serviceaccounts" for whose in ("kubernetes", "canonical")),
        "networking.istio.io/exportTo",
        "traffic.istio.io/nodeSelector",
    ),
    "Namespace": ("topology.istio.io/controlPlaneClusters",),
    "Namespace, Service, ServiceEntry": (
        "networking.istio.io/traffic-distribution",
        "istio.io/use-waypoint-canary-weight",
    ),
    "WorkloadEntry": tuple(
        f"istio.io/{name}" for name in ("autoRegistrationGroup", "workloadController", "connectedAt", "disconnectedAt")
    ),
    "AuthorizationPolicy": ("istio.io/dry-run",),
    "Ingress": ("kubernetes.io/ingress.class",),
    "Gateway": (
        "ambient.istio.io/waypoint-inbound-binding",
        *(f"gateway.istio.io/{name}" for name in ("service-account", "name-override")),
        "networking.istio.io/service-type",
    ),
    "": ("galley.istio.io/analyze-suppress", "gateway.istio.io/controller-version"),
}
_FOR = {name: kinds for kinds, names in _KINDS.items() for name in names}
"""The kinds that an annotation is for; none: all."""
_IGNORED = frozenset({injection.STATUS, "gateway.istio.io/controller-version", "istio.io/rev"})
_DEPRECATED: Mapping[str, str] = {
    injection.INJECT: f'write the label "{injection.INJECT}" instead',
    **dict.fromkeys(_KINDS["Service"][:2], ""),
    **{
        f"sidecar.istio.io/{name}": ""
        for name in (
            "discoveryAddress",
            "statsInclusionPrefixes",
            "statsInclusionSuffixes",
            "statsInclusionRegexps",
            "extraStatTags",
            "statsCompression",
        )
    },
    "traffic.sidecar.istio.io/kubevirtInterfaces": "",
}


def _number(value: str) -> None:
    if not re.fullmatch(r"[0-9]+", value) or int(value) >= 2**32:
        raise ValueError("it must be a whole number")


def _bool(value: str) -> None:
    if value not in ("1", "t", "T", "true", "TRUE", "True", "0", "f", "F", "false", "FALSE", "False"):
        raise ValueError("it must be true or false")


def _quantity(value: str) -> None:
    if not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([numkMGTPE]|[KMGTPE]i|[eE][+-]?\d+)?", value):
        raise ValueError("it must be a quantity, e.g. 100m or 128Mi")


_VALUES: Mapping[str, Callable[[str], None]] = {
    **{f"readiness.status.sidecar.istio.io/{n}": _number for n in ("initialDelaySeconds", "periodSeconds")},
    "readiness.status.sidecar.istio.io/failureThreshold": _number,
    "prometheus.istio.io/merge-metrics": _bool,
    **{f"sidecar.istio.io/proxy{name}": _quantity for name in ("CPU", "CPULimit", "Memory", "MemoryLimit")},
}
"""Values that nothing in the lab reads; what steers a proxy is refused where it is read."""


def findings(mesh: Mesh, items: Items) -> Iterator[Finding]:
    """IST0107, IST0108, IST0125 and IST0135 of Namespaces, Services, Pods and Deployments, and of the pods that these make."""
    made = {(pod.meta.namespace, pod.owner_name) for pod in mesh.pods if pod.owner_kind == "Deployment"}
    for (kind, _), item in items.items():
        if kind in ("Namespace", "Service", "Pod", "Deployment"):
            yield from _of(item, kind, ("metadata",), item.meta.labels)
        if kind == "Deployment" and (item.meta.namespace, item.meta.name) in made:
            path = ("spec", "template", "metadata")
            yield from _of(item, "Pod", path, mapping(value_at(item, *path, "labels")))


def _of(item: Item, kind: str, path: tuple[str, ...], labels: Mapping[str, object]) -> Iterator[Finding]:
    for name, value in mapping(value_at(item, *path, "annotations")).items():
        here = (*path, "annotations", name)
        prefix = name.partition("/")[0]
        if name in _IGNORED or (not prefix.endswith("istio.io") and name != "kubernetes.io/ingress.class"):
            continue
        kinds = _FOR.get(name)
        if kinds is None:
            message = f"Istio has no annotation {name}. {did_you_mean(name, _FOR)}"
            yield Finding("IST0108", item.kind, item.meta, here, message)
            continue
        if name in _DEPRECATED and not (name == injection.INJECT and name in labels):
            message = f"annotation {name} is deprecated; {_DEPRECATED[name]}".removesuffix("; ")
            yield Finding("IST0135", item.kind, item.meta, here, message, "info")
        if kinds and kind not in kinds.split(", "):
            where = " (its place is spec.template.metadata)" if kind == "Deployment" and kinds == "Pod" else ""
            message = f"annotation {name} has no effect here: it is for {kinds}, not for {kind}{where}"
            yield Finding("IST0107", item.kind, item.meta, here, message)
        elif name in _VALUES:
            try:
                _VALUES[name](str(value))
            except ValueError as error:
                message = f'bad value "{value}" of annotation {name}: {error}'
                yield Finding("IST0125", item.kind, item.meta, here, message)

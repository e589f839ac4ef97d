"""Probes and hooks of app containers: what Istio's injector lets the agent answer in the app's stead.

A kubelet has no certificate and its probes would be captured, so the injector points them to the agent's status port and
tells the agent (``ISTIO_KUBE_APP_PROBERS``) what to ask the app. The lab has no kubelet: nobody asks unless a user does.
Source: istio/istio: pkg/kube/inject/app_probe.go.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from lab.manifests.document import locate
from lab.manifests.go_bool import parse_bool
from lab.manifests.item import Item
from lab.manifests.model import AppProbe, Pod
from lab.manifests.problems import Problems

if TYPE_CHECKING:
    from lab.manifests.schema import pod as schema
    from lab.manifests.schema import probe

REWRITE = "sidecar.istio.io/rewriteAppHTTPProbers"


FIELDS: Mapping[str, tuple[str, ...]] = {
    "readyz": ("readinessProbe",),
    "livez": ("livenessProbe",),
    "startupz": ("startupProbe",),
    "prestopz": ("lifecycle", "preStop"),
    "poststartz": ("lifecycle", "postStart"),
}
"""Under the last part of the path at which the agent answers, the field of a container."""


def rewritten(annotations: Mapping[str, str]) -> bool:
    """Whether the injector hands the probes of an injected pod to the agent. A value that is no boolean counts as not written."""
    return parse_bool(annotations.get(REWRITE, "")) is not False


def read(
    container: schema.Container, item: Item, path: tuple[str | int, ...], *, asked: bool, problems: Problems
) -> tuple[AppProbe, ...]:
    """The probes of a container that an agent can answer.

    Args:
        path: where the container is written.
        asked: whether there is an agent that answers; otherwise each probe is a warning.
    """
    ports = {port.name: port.container_port for port in container.ports if port.name}
    found = []
    for field, name, handler in _written(container):
        source = locate(item.document, (*path, *field))
        subject = f"{item.subject}: {'.'.join(field)} of container {container.name}"
        made = _action(handler)
        if made is None or not asked:
            problems.warn(source, f"{subject} is accepted, but the lab has no kubelet that would act on it")
            continue
        kind, action = made
        port = action["port"]
        if isinstance(port, str):
            if port not in ports:
                problems.warn(
                    source,
                    f'{subject} asks port "{port}", but the container has none of that name: the agent answers 400',
                )
                continue
            action["port"] = ports[port]
        found.append(AppProbe(name, kind, action, getattr(handler, "timeout_seconds", 0)))
    return tuple(found)


def _written(container: schema.Container) -> Iterator[tuple[tuple[str, ...], str, probe.Handler]]:
    """Each with its field, and the last part of the path under which the agent answers."""
    hooks = container.lifecycle
    every: dict[str, probe.Handler | None] = {
        "readyz": container.readiness_probe,
        "livez": container.liveness_probe,
        "startupz": container.startup_probe,
        "prestopz": hooks.pre_stop if hooks else None,
        "poststartz": hooks.post_start if hooks else None,
    }
    yield from ((FIELDS[name], name, handler) for name, handler in every.items() if handler is not None)


def _action(handler: probe.Handler) -> tuple[str, dict[str, object]] | None:
    """Kind and action in Kubernetes' own form; None for what happens inside the container."""
    for kind in ("http_get", "tcp_socket", "grpc"):
        written = getattr(handler, kind, None)
        if written is not None:
            alias = type(handler).model_fields[kind].alias or kind
            action = written.model_dump(by_alias=True)
            return alias, {key: value for key, value in action.items() if value or key in ("port", "service")}
    return None


def answered(pod: Pod, status_port: int) -> dict[str, AppProbe]:
    """The probes that the pod's agent answers, by the path on its status port.

    A probe of the status port itself is one that was rewritten before. Source of the paths: istio/istio:
    pilot/cmd/pilot-agent/status/server.go (FormatProberURL).
    """
    found = {}
    for container in pod.containers:
        for probe_ in container.probes:
            kind = "app-lifecycle" if probe_.name in ("prestopz", "poststartz") else "app-health"
            if probe_.kind == "grpc" or probe_.action["port"] != status_port:
                found[f"/{kind}/{container.name}/{probe_.name}"] = probe_
    return found


def probers(pod: Pod, status_port: int) -> str:
    """The value of ``ISTIO_KUBE_APP_PROBERS``, JSON; empty if there is nothing to answer."""
    told: dict[str, dict[str, object]] = {}
    for path, probe_ in answered(pod, status_port).items():
        told[path] = {probe_.kind: dict(probe_.action)}
        if probe_.timeout:
            told[path]["timeoutSeconds"] = probe_.timeout
    return json.dumps(told, sort_keys=True, separators=(",", ":")) if told else ""

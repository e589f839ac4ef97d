"""Pods and Deployments to the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from lab.errors import InputError
from lab.manifests import app_probes, injection
from lab.manifests.addresses import Claim, one_per_family
from lab.manifests.document import locate, parse, plain
from lab.manifests.item import Item
from lab.manifests.model import Container, ContainerPort, LabelExpression, LabelSelector, Meta, Pod
from lab.manifests.problems import Problems
from lab.manifests.schema.base import Reading, read

if TYPE_CHECKING:
    from lab.manifests.schema import deployment, metadata
    from lab.manifests.schema import pod as schema

_FIELD = "\0field:"
"""Marks an environment variable whose value is known once addresses are."""
_FIELDS = frozenset(
    {
        "metadata.name",
        "metadata.namespace",
        "metadata.uid",
        "spec.serviceAccountName",
        "spec.nodeName",
        "status.podIP",
        "status.podIPs",
        "status.hostIP",
    }
)


def _environment(
    container: schema.Container, item: Item, path: tuple[str | int, ...], problems: Problems
) -> dict[str, str]:
    result = {}
    for index, entry in enumerate(container.env):
        value = entry.value or ""
        if entry.value_from is not None and entry.value_from.field_ref is not None:
            wanted = entry.value_from.field_ref.field_path
            if wanted not in _FIELDS:
                problems.warn(
                    locate(item.document, (*path, "env", index)),
                    f"{item.subject}: env {entry.name}: fieldPath {wanted} is not resolved by the lab",
                )
            else:
                value = _FIELD + wanted
        result[entry.name] = value
    return result


def _containers(
    spec: schema.PodSpec, item: Item, path: tuple[str | int, ...], problems: Problems, *, asked: bool
) -> tuple[Container, ...]:
    result: list[Container] = []
    for index, container in enumerate(spec.containers):
        if container.name == injection.PROXY_CONTAINER:
            problems.warn(
                locate(item.document, (*path, "containers", index)),
                f"{item.subject}: container istio-proxy is left out, the lab starts its own agent",
            )
            continue
        where = (*path, "containers", index)
        if any(other.name == container.name for other in result):
            problems.error(
                locate(item.document, where),
                f'container "{container.name}" written twice',
                f"{item.subject}: names of containers are unique in a pod",
            )
        if container.args and not container.command:
            problems.warn(
                locate(item.document, (*where, "args")),
                f"{item.subject}: container {container.name} has args but no command, so it runs the echo app; args are not used",
            )
        context = container.security_context
        shared = spec.security_context
        user = (
            context.run_as_user
            if context and context.run_as_user is not None
            else shared.run_as_user
            if shared
            else None
        )
        group = (
            context.run_as_group
            if context and context.run_as_group is not None
            else shared.run_as_group
            if shared
            else None
        )
        if user == injection.PROXY_UID:
            problems.warn(
                locate(item.document, (*where, "securityContext")),
                f"{item.subject}: container {container.name} runs as 1337, the proxy's uid: none of its traffic is captured",
                "IST0144",
            )
        result.append(
            Container(
                name=container.name,
                image=container.image,
                command=tuple(container.command),
                args=tuple(container.args),
                env=_environment(container, item, where, problems),
                ports=tuple(ContainerPort(port.container_port, port.name, port.protocol) for port in container.ports),
                run_as_user=user,
                run_as_group=group,
                working_dir=container.working_dir,
                probes=app_probes.read(container, item, where, asked=asked, problems=problems),
            )
        )
    seen: dict[tuple[int, str], str] = {}
    for container_ in result:
        for port in container_.ports:
            key = (port.port, port.protocol)
            if key in seen:
                problems.error(
                    locate(item.document, (*path, "containers")),
                    f"port {port.port}/{port.protocol} declared twice",
                    f"{item.subject}: containers {seen[key]} and {container_.name} share one network namespace",
                )
            seen[key] = container_.name
    return tuple(result)


def _proxy_config(
    annotations: Mapping[str, str], item: Item, path: tuple[str | int, ...], problems: Problems
) -> dict[str, object]:
    text = annotations.get(injection.PROXY_CONFIG)
    if text is None:
        return {}
    from lab.manifests.schema.mesh_config import ProxyConfig

    source = locate(item.document, (*path, "annotations", injection.PROXY_CONFIG))
    try:
        documents = parse(text, source.file, source.line)
    except InputError as error:
        problems.errors.append(error)
        return {}
    if not documents:
        return {}
    read(ProxyConfig, documents[0], Reading(problems, f"{item.subject}, annotation {injection.PROXY_CONFIG}"))
    data = plain(documents[0])
    return data if isinstance(data, dict) else {}


def _check_annotations(
    annotations: Mapping[str, str], item: Item, path: tuple[str | int, ...], problems: Problems
) -> None:
    for name, value in annotations.items():
        source = locate(item.document, (*path, "annotations", name))
        check = injection.ANNOTATIONS.get(name)
        if check is not None:
            try:
                check(value)
            except ValueError as error:
                problems.error(source, f'bad value "{value}" of annotation {name}', f"{item.subject}: {error}")
        elif name in injection.UNUSED_ANNOTATIONS:
            problems.warn(source, f"{item.subject}: annotation {name} is accepted, but the lab does not act on it")


def _owner(item: Item) -> tuple[str, str]:
    """Kind and name of the workload that a pod belongs to (istio/istio: pkg/kube/util.go, GetWorkloadMetaFromPod)."""
    for owner in item.schema.metadata.owner_references:
        if owner.controller:
            suffix = f"-{item.meta.labels.get('pod-template-hash', '')}"
            if owner.kind == "ReplicaSet" and suffix != "-" and owner.name.endswith(suffix):
                return "Deployment", owner.name.removesuffix(suffix)
            return owner.kind, owner.name
    return item.kind, item.meta.name


def _pod(
    meta: Meta,
    spec: schema.PodSpec,
    item: Item,
    spec_path: tuple[str | int, ...],
    meta_path: tuple[str | int, ...],
    namespace_labels: Mapping[str, str],
    problems: Problems,
) -> Pod:
    if spec.host_network:
        problems.error(
            locate(item.document, (*spec_path, "hostNetwork")),
            "host network not supported",
            f"{item.subject}: a pod of the lab always has its own network namespace",
            "Remove hostNetwork.",
        )
    injected = injection.STATUS in meta.annotations or injection.decide(
        meta.namespace, namespace_labels, meta.labels, meta.annotations
    )
    _check_annotations(meta.annotations, item, meta_path, problems)
    proxy_config = _proxy_config(meta.annotations, item, meta_path, problems)
    owner_kind, owner_name = _owner(item)
    labels = dict(meta.labels)
    if injected:
        canonical = labels.get("app.kubernetes.io/name") or labels.get("app") or owner_name
        revision = labels.get("app.kubernetes.io/version") or labels.get("version") or "latest"
        labels = {
            **labels,
            "security.istio.io/tlsMode": labels.get("security.istio.io/tlsMode", "istio"),
            "service.istio.io/canonical-name": labels.get("service.istio.io/canonical-name", canonical),
            "service.istio.io/canonical-revision": labels.get("service.istio.io/canonical-revision", revision),
        }
    return Pod(
        meta=replace(meta, labels=labels),
        ips=(),
        containers=_containers(
            spec, item, spec_path, problems, asked=injected and app_probes.rewritten(meta.annotations)
        ),
        injected=injected,
        service_account=spec.service_account_name or spec.service_account or "default",
        hostname=spec.hostname,
        subdomain=spec.subdomain,
        owner_kind=owner_kind,
        owner_name=owner_name,
        dns_search=tuple(spec.dns_config.searches) if spec.dns_config else (),
        proxy_config=proxy_config,
    )


def pod_of(item: Item, namespace_labels: Mapping[str, str], claims: list[Claim], problems: Problems) -> Pod:
    """A Pod object; ``status.podIP(s)`` pin its addresses, a Ready condition of False makes it not ready."""
    body = cast("schema.Pod", item.schema)
    made = _pod(item.meta, body.spec, item, ("spec",), ("metadata",), namespace_labels, problems)
    if body.status is None:
        return made
    ips = [entry.ip for entry in body.status.pod_ips]
    if body.status.pod_ip and ips and body.status.pod_ip != ips[0]:
        problems.error(
            locate(item.document, ("status", "podIPs")),
            "two addresses for one pod",
            f"{item.subject}: podIP {body.status.pod_ip} is not the first of podIPs",
        )
    if not ips and body.status.pod_ip:
        ips = [body.status.pod_ip]
    one_per_family(ips, item.subject, locate(item.document, ("status", "podIPs")), problems)
    claims.extend(
        Claim(ip, item.subject, locate(item.document, ("status", "podIPs" if body.status.pod_ips else "podIP")))
        for ip in ips
    )
    ready = all(condition.status == "True" for condition in body.status.conditions if condition.type == "Ready")
    return replace(made, ips=tuple(ips), ready=ready)


def deployment_pods(item: Item, namespace_labels: Mapping[str, str], problems: Problems) -> Iterator[Pod]:
    """The pods of a Deployment, ``NAME-0`` and upward."""
    body = cast("deployment.Deployment", item.schema)
    template = body.spec.template
    selector = body.spec.selector
    if not selector.match_labels and not selector.match_expressions:
        problems.error(
            locate(item.document, ("spec", "selector")),
            "empty selector",
            f"{item.subject}: spec.selector must select the template's labels",
        )
    elif not label_selector(selector).matches(template.metadata.labels):
        problems.error(
            locate(item.document, ("spec", "selector")),
            "selector does not match the template",
            f"{item.subject}: spec.selector must match spec.template.metadata.labels",
        )
    quiet = problems
    for index in range(body.spec.replicas):
        meta = replace(
            item.meta,
            name=f"{item.meta.name}-{index}",
            labels=dict(template.metadata.labels),
            annotations=dict(template.metadata.annotations),
        )
        yield _pod(
            meta,
            template.spec,
            item,
            ("spec", "template", "spec"),
            ("spec", "template", "metadata"),
            namespace_labels,
            quiet,
        )
        quiet = Problems()  # the other replicas have the same problems


def label_selector(selector: metadata.LabelSelector) -> LabelSelector:
    """A Kubernetes label selector in the model."""
    return LabelSelector(
        dict(selector.match_labels),
        tuple(LabelExpression(e.key, e.operator, tuple(e.values)) for e in selector.match_expressions),
    )


def resolve_environment(pod: Pod, node_ip: str) -> Pod:
    """The pod with the values of ``valueFrom.fieldRef`` filled in; its addresses must be set."""
    values = {
        "metadata.name": pod.meta.name,
        "metadata.namespace": pod.meta.namespace,
        "metadata.uid": f"{pod.meta.namespace}/{pod.meta.name}",
        "spec.serviceAccountName": pod.service_account,
        "spec.nodeName": "node",
        "status.podIP": pod.ip,
        "status.podIPs": ",".join(pod.ips),
        "status.hostIP": node_ip,
    }
    if not any(value.startswith(_FIELD) for container in pod.containers for value in container.env.values()):
        return pod
    return replace(
        pod,
        containers=tuple(
            replace(
                container,
                env={
                    name: values[value.removeprefix(_FIELD)] if value.startswith(_FIELD) else value
                    for name, value in container.env.items()
                },
            )
            for container in pod.containers
        ),
    )

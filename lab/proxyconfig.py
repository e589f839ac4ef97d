"""``lab proxy-config``: what a proxy has (its own admin port), or what discovery would send it (from files alone).

Both come as ``{"pod", "source": "proxy"|"discovery", KIND: ...}`` with each resource whole, as protobuf JSON with
snake_case field names (docs/reference.md).
"""

from __future__ import annotations

import dataclasses
import http.client
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lab.errors import InputError, LabError

if TYPE_CHECKING:
    from lab.manifests.model import Mesh, Pod

ADMIN_PORT = 15000
STATUS_PORT = 15020
LISTED = ("listeners", "routes", "clusters", "endpoints", "secrets")
EVIDENCE_PATH = "/run/sidecar/log/evidence.jsonl"


def meshed_pod(mesh: Mesh, name: str) -> Pod:
    """The pod ``POD.NAMESPACE`` (or ``NAMESPACE/POD``) that has a sidecar.

    Raises:
        InputError: there is no such pod, or it has no proxy.
    """
    pod = mesh.pod(name)
    if pod is None:
        known = ", ".join(p.name for p in mesh.pods if p.injected) or "none"
        raise InputError(f"no pod {name!r} in {mesh.name}", why=f"meshed pods: {known}", next_step="Name one of them")
    if not pod.injected:
        raise InputError(
            f"pod {pod.name} has no proxy",
            str(pod.meta.source),
            "it is not injected",
            "Label its namespace istio-injection: enabled",
        )
    return pod


def from_files(mesh: Mesh, name: str, kind: str, *, evidence: bool = False) -> dict[str, Any]:
    """What discovery would send to the pod's proxy; needs no root and nothing running.

    Raises:
        InputError: no such meshed pod.
    """
    pod = meshed_pod(mesh, name)
    document: dict[str, Any] = {"pod": pod.name, "source": "discovery"}
    if kind in ("bootstrap", "all"):
        document["bootstrap"] = _bootstrap(mesh, pod, evidence)
    if kind != "bootstrap":
        from lab.discovery import snapshot
        from lab.discovery.node import node_for_pod

        node = node_for_pod(mesh, pod)
        if evidence:
            node = dataclasses.replace(node, metadata={**node.metadata, "SIDECARLAB_EVIDENCE": EVIDENCE_PATH})
        resources = snapshot.to_json(snapshot.generate(mesh, node))
        resources.setdefault("secrets", [])  # discovery sends a sidecar none: its agent serves them
        document |= {k: v for k, v in resources.items() if kind in (k, "all")}
    return document


def _bootstrap(mesh: Mesh, pod: Pod, evidence: bool) -> Any:
    """The bootstrap that the agent's own code makes of this pod's injected flags, environment and addresses."""
    from agent import options, proxy_config
    from agent.environment import Environment
    from agent.errors import AgentError
    from agent.flags import parse
    from agent.node import dns_domain
    from agent.run import dry_run
    from lab.manifests.injection import agent_args, agent_env

    environment = Environment(
        {**agent_env(mesh, pod), **({"ISTIO_META_SIDECARLAB_EVIDENCE": EVIDENCE_PATH} if evidence else {})}
    )
    parsed = parse(agent_args(mesh, pod)[1:], options.PROXY_FLAGS, ignore_unknown=True)
    try:
        config = proxy_config.construct(
            None,
            environment.string("PROXY_CONFIG"),
            pod.meta.annotations,
            service_cluster=parsed.string("serviceCluster"),
            concurrency=parsed.integer("concurrency"),
            cpu_limit=environment.integer("ISTIO_CPU_LIMIT", 0),
            resolve_statsd=lambda address: address,  # a name cannot be looked up where nothing runs
        )
        return dry_run(
            options.ProxyOptions(
                proxy_type=options.SIDECAR,
                domain=dns_domain(environment.string("POD_NAMESPACE"), parsed.string("domain")),
                addresses=pod.ips,
                environment=environment,
                config=config,
                labels=pod.meta.labels,
                annotations=pod.meta.annotations,
                flags=parsed,
            )
        )["bootstrap"]
    except AgentError as error:
        raise InputError(f"pod {pod.name}: {error}", str(pod.meta.source)) from None


def from_proxy(lab: str, name: str, kind: str) -> dict[str, Any]:
    """What the running proxy has, from Envoy's ``/config_dump`` (and the agent's ``/debug/ndsz`` for the name table).

    ``kind`` is one of the sections, ``all`` of them, or ``xds``: all but the name table.

    Raises:
        InputError: no such meshed pod. LabError: its Envoy does not answer.
    """
    from lab import lifecycle

    pod = meshed_pod(lifecycle.stored_mesh(lab), name)
    document: dict[str, Any] = {"pod": pod.name, "source": "proxy"}
    if kind != "nds":
        document |= {
            k: v
            for k, v in _sorted_dump(_fetch(lab, pod, "/config_dump?include_eds")).items()
            if kind in (k, "all", "xds")
        }
    if kind in ("nds", "all"):
        table = _fetch(lab, pod, "/debug/ndsz", STATUS_PORT, absent=True)
        if table is None and kind == "nds":
            raise InputError(
                f"{pod.name} has no name table",
                why="its agent serves no DNS",
                next_step='Set proxyMetadata ISTIO_META_DNS_CAPTURE: "true"',
            )
        document["nds"] = table or {"table": {}}
    return document


def _fetch(lab: str, pod: Pod, path: str, port: int = ADMIN_PORT, *, absent: bool = False) -> Any:
    """GETs JSON from a loopback port of the pod; None for a 404 if what is asked for may be ``absent``."""
    from lab.fabric import paths
    from lab.runtime import enter

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        # A socket stays in the namespace it was made in, so only the connect happens there.
        with enter.netns(paths.netns_path(lab, pod.name)):
            connection.connect()
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read()
    except OSError as error:
        raise LabError(
            f"no answer from port {port} of {pod.name}", why=str(error), next_step="See `lab inspect` and its agent.log"
        ) from None
    finally:
        connection.close()
    if absent and response.status == 404:
        return None
    if response.status != 200:
        raise LabError(f"{path} of {pod.name}: HTTP status {response.status}", why=body.decode(errors="replace")[:200])
    return json.loads(body)


def _sorted_dump(dump: Mapping[str, Any]) -> dict[str, Any]:
    """A config_dump's sections as lists of bare resources."""
    out: dict[str, Any] = {"bootstrap": None, **{kind: [] for kind in LISTED}}
    for section in dump.get("configs", ()):
        kind = section.get("@type", "").rpartition(".")[2]
        if kind == "BootstrapConfigDump":
            out["bootstrap"] = section.get("bootstrap")
        elif kind == "ListenersConfigDump":
            for entry in section.get("dynamic_listeners", ()):
                state = entry.get("active_state") or entry.get("warming_state") or {}
                _add(out["listeners"], state.get("listener"))
            _add_all(out["listeners"], section.get("static_listeners", ()), "listener")
        elif kind == "ClustersConfigDump":
            for group in ("dynamic_active_clusters", "dynamic_warming_clusters", "static_clusters"):
                _add_all(out["clusters"], section.get(group, ()), "cluster")
        elif kind == "RoutesConfigDump":
            for group in ("dynamic_route_configs", "static_route_configs"):
                _add_all(out["routes"], section.get(group, ()), "route_config")
        elif kind == "EndpointsConfigDump":
            for group in ("dynamic_endpoint_configs", "static_endpoint_configs"):
                _add_all(out["endpoints"], section.get(group, ()), "endpoint_config")
        elif kind == "SecretsConfigDump":
            for group in ("dynamic_active_secrets", "dynamic_warming_secrets", "static_secrets"):
                _add_all(out["secrets"], section.get(group, ()), "secret")
    return out


def _add(to: list[Any], resource: Mapping[str, Any] | None) -> None:
    if resource:
        to.append({key: value for key, value in resource.items() if key != "@type"})


def _add_all(to: list[Any], entries: Any, key: str) -> None:
    for entry in entries:
        _add(to, entry.get(key))


def print_summary(document: Mapping[str, Any]) -> None:
    """One line a resource, as ``istioctl proxy-config`` would list it; the bootstrap whole."""
    from lab.show import console, table

    screen = console()
    screen.print(f"{document['pod']}: from {document['source']}")
    for kind in ("listeners", "routes", "clusters", "endpoints", "secrets"):
        if kind not in document:
            continue
        out = table((kind.upper(), "", ""))
        for resource in document[kind]:
            out.add_row(*_summary(kind, resource))
        screen.print(out)
    if "nds" in document:
        out = table(("NAME TABLE", "", ""))
        for host, info in sorted(document["nds"].get("table", {}).items()):
            out.add_row(host, ",".join(info.get("ips", ())), info.get("registry", ""))
        screen.print(out)
    if document.get("bootstrap") is not None:
        screen.print_json(data=document["bootstrap"])


def _summary(kind: str, resource: Mapping[str, Any]) -> tuple[str, str, str]:
    if kind == "listeners":
        address = resource.get("address", {}).get("socket_address", {})
        chains = [c.get("name", "-") for c in resource.get("filter_chains", ())]
        default = resource.get("default_filter_chain", {}).get("name")
        return (
            resource.get("name", "-"),
            f"{address.get('address', '-')}:{address.get('port_value', '-')}",
            ",".join([*chains, *([f"default:{default}"] if default else [])]),
        )
    if kind == "routes":
        return resource.get("name", "-"), ",".join(v.get("name", "-") for v in resource.get("virtual_hosts", ())), ""
    if kind == "clusters":
        return (
            resource.get("name", "-"),
            resource.get("type", resource.get("cluster_type", {}).get("name", "STATIC")),
            "",
        )
    if kind == "endpoints":
        found = [
            "{}:{} {}".format(
                e["endpoint"]["address"]["socket_address"]["address"],
                e["endpoint"]["address"]["socket_address"]["port_value"],
                e.get("health_status", "UNKNOWN"),
            )
            for locality in resource.get("endpoints", ())
            for e in locality.get("lb_endpoints", ())
            if "socket_address" in e.get("endpoint", {}).get("address", {})
        ]
        return resource.get("cluster_name", "-"), ",".join(found), ""
    return resource.get("name", "-"), "", ""

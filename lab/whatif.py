"""Changes of a mesh, and of a flow in it, that could flip the flow's verdict: candidates for `lab.explain.counterfactual`.

Only what bears on the flow is tried: what excluded it from capture, who it runs as, and what keeps its host out of the
proxy's configuration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from lab import explaining
from lab.explain import counterfactual
from lab.explain.counterfactual import Candidate, Counterfactual
from lab.explaining import MeshWorld, Told
from lab.manifests.model import Mesh, MTLSMode, Pod, ServiceEntry, ServiceEntryPort, TrafficTest
from lab.verdict import Verdict

_EXCLUDED_AS = {
    "excludeOutboundPorts": "port",
    "excludeOutboundIPRanges": "the range",
    "excludeInboundPorts": "port",
}
_EXCLUDED = {
    "excludeOutboundPorts": "outbound",
    "excludeOutboundIPRanges": "outbound",
    "excludeInboundPorts": "inbound",
}


def counterfactuals(world: MeshWorld, test: TrafficTest, told: Told) -> tuple[Counterfactual, ...]:
    """The smallest changes that would flip this verdict."""
    return counterfactual.find(told.verdict, _candidates(world, test, told))


def _candidates(world: MeshWorld, test: TrafficTest, told: Told) -> Iterator[Candidate]:
    mesh, found = world.mesh, told.verdict
    source = mesh.pod(test.flow_from.pod) if test.flow_from.pod else None
    if source is not None:
        for text, uid in counterfactual.uids(world.place(source.name).rules, test.flow_from.uid):
            changed = dataclasses.replace(test, flow_from=dataclasses.replace(test.flow_from, uid=uid))
            yield text, _run(world, changed)
    far = mesh.pod(found.inbound.pod) if found.inbound and found.inbound.pod else None
    for pod, side in ((source, "outbound"), (far, "inbound")):
        if pod is not None:
            yield from _annotations(world, test, pod, side)
            yield from _injection(world, test, pod)
    if found.outbound is not None and found.outbound.captured:
        yield from _unknown_host(world, test, found)
    if found.outcome is not None and found.outcome.result != "ok":
        yield from _policies(world, test)


def _run(world: MeshWorld, test: TrafficTest, mesh: Mesh | None = None) -> Callable[[], Verdict]:
    """The verdict of a changed flow, or of the same one in a changed mesh."""

    def run() -> Verdict:
        changed = world if mesh is None else MeshWorld(mesh, world.backend)
        return explaining.predict(changed, test).verdict

    return run


def _annotations(world: MeshWorld, test: TrafficTest, pod: Pod, side: str) -> Iterator[Candidate]:
    """Without each item that is excluded from capture."""
    for name, of in _EXCLUDED.items():
        key = f"traffic.sidecar.istio.io/{name}"
        written = pod.meta.annotations.get(key, "")
        if of != side or not written:
            continue
        for item in written.split(","):
            kept = ",".join(i for i in written.split(",") if i != item)
            changed = _with_annotations(pod, {key: kept})
            yield (
                f"{_EXCLUDED_AS[name]} {item} were not excluded ({key} of {pod.name})",
                _run(world, test, _with_pod(world.mesh, pod, changed)),
            )


def _injection(world: MeshWorld, test: TrafficTest, pod: Pod) -> Iterator[Candidate]:
    if not pod.injected:
        changed = dataclasses.replace(pod, injected=True)
        yield f"{pod.name} had a sidecar", _run(world, test, _with_pod(world.mesh, pod, changed))


def _unknown_host(world: MeshWorld, test: TrafficTest, found: Verdict) -> Iterator[Candidate]:
    """What keeps the host from being known to the client's proxy."""
    mesh = world.mesh
    cluster = found.envoy.cluster if found.envoy else None
    known = cluster is not None and cluster.startswith("outbound|")
    if known:
        return
    source = mesh.pod(test.flow_from.pod)
    assert source is not None
    here = source.meta.namespace
    yield from _exported(world, test, here)
    yield from _scoped(world, test, here)
    host = test.to.authority.partition(":")[0] or test.to.host
    # A Service is known already where it may be seen; an entry of its name would only be in its way.
    if not explaining.is_address(host) and not any(_names(test, s.host(mesh.domain_suffix)) for s in mesh.services):
        entry = ServiceEntry(
            meta=dataclasses.replace(source.meta, name="declared", labels={}, annotations={}),
            hosts=(host,),
            ports=(ServiceEntryPort(test.to.port, "declared", _PROTOCOLS.get(test.to.protocol, "TCP")),),
            resolution="DNS",
        )
        changed = dataclasses.replace(mesh, service_entries=(*mesh.service_entries, entry))
        yield f"a ServiceEntry declared {host} with port {test.to.port}", _run(world, test, changed)
    mode = mesh.mesh_config.outbound_traffic_policy.mode
    other: Literal["ALLOW_ANY", "REGISTRY_ONLY"] = "ALLOW_ANY" if mode == "REGISTRY_ONLY" else "REGISTRY_ONLY"
    policy = dataclasses.replace(mesh.mesh_config.outbound_traffic_policy, mode=other)
    config = dataclasses.replace(mesh.mesh_config, outbound_traffic_policy=policy)
    yield f"the outboundTrafficPolicy were {other}", _run(world, test, dataclasses.replace(mesh, mesh_config=config))


_PROTOCOLS: Mapping[str, Any] = {"http": "HTTP", "grpc": "GRPC", "tls": "TLS", "tcp": "TCP"}


def _exported(world: MeshWorld, test: TrafficTest, here: str) -> Iterator[Candidate]:
    """With ``exportTo`` of the Service or ServiceEntry that has the host reaching the client's namespace."""
    mesh = world.mesh
    key = "networking.istio.io/exportTo"
    for service in mesh.services:
        written = service.meta.annotations.get(key, "")
        if (
            written
            and here not in written.split(",")
            and written != "*"
            and _names(test, service.host(mesh.domain_suffix))
        ):
            meta = dataclasses.replace(service.meta, annotations={**service.meta.annotations, key: f"{written},{here}"})
            if "~" in written:
                meta = dataclasses.replace(meta, annotations={**service.meta.annotations, key: here})
            services = tuple(dataclasses.replace(s, meta=meta) if s is service else s for s in mesh.services)
            yield (
                f"exportTo of Service {service.meta.key} included {here}",
                _run(world, test, dataclasses.replace(mesh, services=services)),
            )
    for entry in mesh.service_entries:
        hidden = bool(entry.export_to) and not {here, "*"} & set(entry.export_to)
        if hidden and any(_names(test, host) for host in entry.hosts):
            allowed = (here,) if "~" in entry.export_to else (*entry.export_to, here)
            entries = tuple(
                dataclasses.replace(e, export_to=allowed) if e is entry else e for e in mesh.service_entries
            )
            yield (
                f"exportTo of ServiceEntry {entry.meta.key} included {here}",
                _run(world, test, dataclasses.replace(mesh, service_entries=entries)),
            )


def _scoped(world: MeshWorld, test: TrafficTest, here: str) -> Iterator[Candidate]:
    """With the Sidecars that could apply importing the host's namespace."""
    mesh = world.mesh
    owners = {s.meta.namespace for s in mesh.services if _names(test, s.host(mesh.domain_suffix))}
    owners |= {e.meta.namespace for e in mesh.service_entries if any(_names(test, h) for h in e.hosts)}
    for sidecar in mesh.sidecars:
        if sidecar.meta.namespace not in (here, mesh.mesh_config.root_namespace):
            continue
        for owner in sorted(owners):
            egress = tuple(
                e if e.port is not None else dataclasses.replace(e, hosts=(*_without_none(e.hosts), f"{owner}/*"))
                for e in sidecar.egress
            )
            sidecars = tuple(dataclasses.replace(s, egress=egress) if s is sidecar else s for s in mesh.sidecars)
            yield (
                f"Sidecar {sidecar.meta.key} imported {owner}/*",
                _run(world, test, dataclasses.replace(mesh, sidecars=sidecars)),
            )
    selectors = mesh.mesh_config.discovery_selectors
    labels = {n.meta.name: n.meta.labels for n in mesh.namespaces}
    hidden = sorted(o for o in owners if selectors and not any(s.matches(labels.get(o, {})) for s in selectors))
    if hidden:
        config = dataclasses.replace(mesh.mesh_config, discovery_selectors=())
        yield (
            f"discoverySelectors selected namespace {hidden[0]}",
            _run(world, test, dataclasses.replace(mesh, mesh_config=config)),
        )


def _without_none(hosts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(h for h in hosts if h != "~/*")


def _names(test: TrafficTest, host: str) -> bool:
    """Whether what the flow asks for can mean a service's host."""
    asked = (test.to.authority.partition(":")[0] or test.to.host).rstrip(".").lower()
    host = host.lower()
    if host.startswith("*."):
        return asked.endswith(host[1:])
    return asked == host or ("." in asked and host.startswith(f"{asked}.")) or host.startswith(f"{asked}.")


def _policies(world: MeshWorld, test: TrafficTest) -> Iterator[Candidate]:
    """Without each rule of the mesh that could forbid or reroute it."""
    mesh = world.mesh
    for policy in mesh.peer_authentications:
        if policy.mode == "STRICT" or "STRICT" in policy.port_modes.values():
            modes: dict[int, MTLSMode] = dict.fromkeys(policy.port_modes, "PERMISSIVE")
            softer = dataclasses.replace(policy, mode="PERMISSIVE", port_modes=modes)
            policies = tuple(softer if p is policy else p for p in mesh.peer_authentications)
            yield (
                f"PeerAuthentication {policy.meta.key} were PERMISSIVE",
                _run(world, test, dataclasses.replace(mesh, peer_authentications=policies)),
            )
    for rule in mesh.virtual_services:
        less = dataclasses.replace(mesh, virtual_services=tuple(r for r in mesh.virtual_services if r is not rule))
        yield f"there were no VirtualService {rule.meta.key}", _run(world, test, less)
    for rule in mesh.destination_rules:
        less = dataclasses.replace(mesh, destination_rules=tuple(r for r in mesh.destination_rules if r is not rule))
        yield f"there were no DestinationRule {rule.meta.key}", _run(world, test, less)
    for pod in mesh.pods:
        if not pod.ready:
            ready = _with_pod(mesh, pod, dataclasses.replace(pod, ready=True))
            yield f"pod {pod.name} were ready", _run(world, test, ready)


def _with_pod(mesh: Mesh, pod: Pod, changed: Pod) -> Mesh:
    return dataclasses.replace(mesh, pods=tuple(changed if p is pod else p for p in mesh.pods))


def _with_annotations(pod: Pod, notes: Mapping[str, str]) -> Pod:
    return dataclasses.replace(pod, meta=dataclasses.replace(pod.meta, annotations={**pod.meta.annotations, **notes}))

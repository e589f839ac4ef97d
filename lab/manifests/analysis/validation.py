"""What Istio's admission accepts with a warning (IST0133).

Source: istio/istio: pkg/config/validation/validation.go and virtualservice.go, pkg/config/validation/agent/validation.go.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping

from lab.manifests.analysis.finding import Finding, mapping, maps, strings
from lab.manifests.item import Item, Items, value_at
from lab.manifests.model import Mesh
from lab.manifests.protocol import of_istio_port

_Path = tuple[str | int, ...]
_Told = Iterator[tuple[_Path, str]]

_LARGE_BODY = 100 * 1024
_HTTP = ("HTTP", "HTTP2", "GRPC", "GRPC-Web", "HTTP_PROXY")


def findings(mesh: Mesh, items: Items) -> Iterator[Finding]:
    for (kind, _), item in items.items():
        for path, message in _told(kind, item):
            yield Finding("IST0133", kind, item.meta, path, message)
    yield from _mesh_config(mesh, items)


def _told(kind: str, item: Item) -> _Told:
    spec = mapping(value_at(item, "spec"))
    if kind == "Sidecar":
        yield from _empty_selector(spec, "workloadSelector", "labels")
        yield from _sidecar(spec, item.meta.namespace)
    elif kind == "ServiceEntry":
        yield from _empty_selector(spec, "workloadSelector", "labels")
        yield from _service_entry(spec)
    elif kind == "PeerAuthentication":
        yield from _empty_selector(spec, "selector", "matchLabels")
    elif kind == "DestinationRule":
        yield from _empty_selector(spec, "workloadSelector", "matchLabels")
        yield from _policy(mapping(spec.get("trafficPolicy")), ("spec", "trafficPolicy"))
        for index, subset in enumerate(maps(spec.get("subsets"))):
            yield from _policy(mapping(subset.get("trafficPolicy")), ("spec", "subsets", index, "trafficPolicy"))
    elif kind == "VirtualService":
        yield from _virtual_service(spec)
    elif kind == "WorkloadEntry" and not spec.get("address") and spec.get("network"):
        yield ("spec",), "it has a network but no address"


def _empty_selector(spec: Mapping[str, object], field: str, labels: str) -> _Told:
    if field in spec and not mapping(spec[field]).get(labels):
        yield ("spec", field), f"{field} without labels is none at all: the object is for the whole namespace"


def _sidecar(spec: Mapping[str, object], own: str) -> _Told:
    for index, listener in enumerate(maps(spec.get("ingress"))):
        port = mapping(listener.get("port"))
        http = mapping(listener.get("connectionPool")).get("http")
        if http and of_istio_port(str(port.get("protocol") or "")) not in _HTTP:
            path: _Path = ("spec", "ingress", index, "connectionPool", "http")
            yield path, f"port {port.get('number')} is not HTTP, so that only tcp settings of its pool count"
    for index, listener in enumerate(maps(spec.get("egress"))):
        seen: dict[str, set[str]] = {}
        place: _Path = ("spec", "egress", index, "hosts")
        for position, written in enumerate(strings(listener.get("hosts"))):
            namespace, _, host = written.partition("/")
            if namespace.startswith("~"):
                continue
            same = seen.setdefault(own if namespace == "." else namespace, set())
            if host in same or "*" in same or (host == "*" and same):
                yield (*place, position), f'host "{written}" is told twice, by itself or by others'
            same.add(host)
        if "*" in seen.get("*", ()) and len(seen) > 1:
            yield place, '"*/*" takes everything, so that no other host adds anything'


def _service_entry(spec: Mapping[str, object]) -> _Told:
    ports = [of_istio_port(str(port.get("protocol") or "")) for port in maps(spec.get("ports"))]
    hosts = strings(spec.get("hosts"))
    resolution = spec.get("resolution", "NONE")
    if resolution == "NONE" and "workloadSelector" in spec:
        yield ("spec", "workloadSelector"), "a workloadSelector is of no use with resolution NONE"
    tcp = any(protocol in ("TCP", "HTTPS", "TLS", "MONGO", "REDIS", "MYSQL") for protocol in ports)
    if resolution in ("DNS", "DNS_ROUND_ROBIN") and spec.get("addresses") and tcp and len(hosts) > 1:
        yield ("spec", "hosts"), "with addresses and a TCP or TLS port, write one host: all of them share the addresses"


def _policy(policy: Mapping[str, object], path: _Path) -> _Told:
    places = [(policy, path)]
    places += [
        (setting, (*path, "portLevelSettings", index))
        for index, setting in enumerate(maps(policy.get("portLevelSettings")))
    ]
    for settings, here in places:
        outlier, balancer = settings.get("outlierDetection"), mapping(settings.get("loadBalancer"))
        if mapping(outlier).get("consecutiveErrors"):
            where: _Path = (*here, "outlierDetection", "consecutiveErrors")
            yield where, "consecutiveErrors is deprecated; write consecutiveGatewayErrors or consecutive5xxErrors"
        if mapping(balancer.get("consistentHash")).get("minimumRingSize"):
            where = (*here, "loadBalancer", "consistentHash", "minimumRingSize")
            yield where, "minimumRingSize is deprecated; write ringHash"
        locality = mapping(balancer.get("localityLbSetting"))
        if (locality.get("failover") or locality.get("failoverPriority")) and outlier is None:
            where = (*here, "loadBalancer", "localityLbSetting")
            yield where, "failover needs outlierDetection: nothing else tells that a locality fails"


def _virtual_service(spec: Mapping[str, object]) -> _Told:
    for number, rule in enumerate(maps(spec.get("http"))):
        path: _Path = ("spec", "http", number)
        if rule.get("mirrorPercent") is not None:
            yield (*path, "mirrorPercent"), "mirrorPercent is deprecated; write mirrorPercentage"
        abort = mapping(rule.get("fault")).get("abort")
        if abort is not None and not {"httpStatus", "grpcStatus"} & set(mapping(abort)):
            yield (*path, "fault", "abort"), "an abort without httpStatus or grpcStatus aborts nothing"
        body = mapping(mapping(rule.get("directResponse")).get("body"))
        size = max(len(str(body.get(kind, "")).encode()) for kind in ("string", "bytes"))
        if size > _LARGE_BODY:
            yield (*path, "directResponse", "body"), f"a body of {size} bytes goes to every proxy"
    for number, rule in enumerate(maps(spec.get("tls"))):
        for index, match in enumerate(maps(rule.get("match"))):
            for position, name in enumerate(strings(match.get("sniHosts"))):
                if _is_address(name):
                    path = ("spec", "tls", number, "match", index, "sniHosts", position)
                    yield path, f'"{name}" is an address, and hardly any client sends that as SNI'


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _mesh_config(mesh: Mesh, items: Items) -> Iterator[Finding]:
    """The warnings about MeshConfig, at the ConfigMap that holds it."""
    raw = mesh.mesh_config.raw
    holder = next(
        (item for (kind, _), item in items.items() if kind == "ConfigMap" and item.meta.name == "istio"), None
    )
    if holder is None:
        return
    inbound = mapping(raw.get("defaultInboundHttpRetryPolicy"))
    for field in ("perTryTimeout", "retryRemoteLocalities", "retryIgnorePreviousHosts"):
        if field in inbound:
            message = f"{field} has no effect in defaultInboundHttpRetryPolicy"
            yield Finding("IST0133", "ConfigMap", holder.meta, ("data", "mesh"), message)

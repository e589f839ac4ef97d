"""Doubts that are not about references: objects that undo each other, and parts of them that are never used.

Each is one of ``istioctl analyze``; its code is given. Source: istio/istio: pkg/config/analysis/analyzers,
pkg/config/validation/validation.go (analyzeUnreachableHTTPRules).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lab.manifests.model import Mesh, Meta, RawConfig, ServiceEntry, ServicePort


@dataclass(frozen=True, slots=True)
class Finding:
    """A doubt about one object, and the path of what it is about."""

    kind: str
    meta: Meta
    path: tuple[str | int, ...]
    message: str


def findings(mesh: Mesh) -> Iterator[Finding]:
    """All of them, by kind, each in the order of the manifests."""
    yield from _external_names(mesh)
    yield from _entries(mesh)
    for rule in mesh.destination_rules:
        yield from _unverified(rule)
    yield from _same_hosts(mesh)
    for service in mesh.virtual_services:
        for protocol in ("http", "tls", "tcp"):
            yield from _unused(service, protocol)
        yield from _missing_ports(mesh, service)


def _maps(value: object) -> list[Mapping[str, object]]:
    return [entry for entry in value if isinstance(entry, Mapping)] if isinstance(value, list) else []


def _map(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _words(value: object) -> list[str]:
    return [str(entry) for entry in value] if isinstance(value, list) else []


def full_name(host: str, namespace: str, suffix: str) -> str:
    """A host of a rule in full: a name without a dot is a service of the rule's namespace."""
    return host if "." in host or host.startswith("*") else f"{host}.{namespace}.svc.{suffix}"


# --- services ---------------------------------------------------------------------------------


def _external_names(mesh: Mesh) -> Iterator[Finding]:
    """IST0150."""
    for service in mesh.services:
        for index, port in enumerate(service.ports):
            if service.external_name and (port.protocol == "AUTO" or port.name == "tcp"):
                yield Finding(
                    "Service",
                    service.meta,
                    ("spec", "ports", index),
                    f'the name "{port.name}" of port {port.port} says no protocol, as ports of an ExternalName should',
                )


def _entries(mesh: Mesh) -> Iterator[Finding]:
    """IST0134 and IST0177."""
    metadata = _map(mesh.mesh_config.default_config.get("proxyMetadata"))
    captured = str(metadata.get("ISTIO_META_DNS_CAPTURE", "")).lower() == "true"
    protocols: dict[tuple[str, int], tuple[str, ServiceEntry]] = {}
    for entry in mesh.service_entries:
        for index, port in enumerate(entry.ports):
            if port.protocol in ("TCP", "AUTO") and not entry.addresses and not captured:
                yield Finding(
                    "ServiceEntry",
                    entry.meta,
                    ("spec", "ports", index),
                    f"it has no addresses, so that its {port.protocol} port takes everything to port {port.port};"
                    " addresses, or DNS capture, would tell it apart",
                )
            for host in entry.hosts:
                protocol, other = protocols.setdefault((host, port.port), (port.protocol, entry))
                if protocol != port.protocol and _meet(mesh, other.meta, other.export_to, entry.meta, entry.export_to):
                    yield Finding(
                        "ServiceEntry",
                        entry.meta,
                        ("spec", "ports", index),
                        f"port {port.port} of {host} is {port.protocol} here, but {protocol} in {other.meta.key}",
                    )


def _meet(mesh: Mesh, one: Meta, one_to: Sequence[str], other: Meta, other_to: Sequence[str]) -> bool:
    """Whether some namespace sees both of two exported objects."""
    reach = []
    for meta, values in ((one, one_to), (other, other_to)):
        own = {meta.namespace if value == "." else value for value in values or ("*",)}
        reach.append({namespace.meta.name for namespace in mesh.namespaces} if "*" in own else own)
    return bool(reach[0] & reach[1])


# --- rules ------------------------------------------------------------------------------------


def _unverified(rule: RawConfig) -> Iterator[Finding]:
    """IST0128 and IST0129."""
    policy = _map(rule.spec.get("trafficPolicy"))
    places: list[tuple[tuple[str | int, ...], object]] = [(("spec", "trafficPolicy", "tls"), policy.get("tls"))]
    places += [
        (("spec", "trafficPolicy", "portLevelSettings", index, "tls"), setting.get("tls"))
        for index, setting in enumerate(_maps(policy.get("portLevelSettings")))
    ]
    for path, written in places:
        tls = _map(written)
        known = tls.get("caCertificates") or (tls.get("credentialName") and "workloadSelector" in rule.spec)
        if tls.get("mode") in ("SIMPLE", "MUTUAL") and not known and not tls.get("insecureSkipVerify"):
            yield Finding(
                rule.kind,
                rule.meta,
                path,
                f"mode {tls['mode']} without caCertificates: the server is verified by the CAs of the system alone",
            )


def _same_hosts(mesh: Mesh) -> Iterator[Finding]:
    """IST0109."""
    seen: dict[str, list[RawConfig]] = defaultdict(list)
    for service in mesh.virtual_services:
        gateways = _words(service.spec.get("gateways"))
        if gateways and "mesh" not in gateways:
            continue
        to = _words(service.spec.get("exportTo")) or mesh.mesh_config.default_virtual_service_export_to
        for index, written in enumerate(_words(service.spec.get("hosts"))):
            host = full_name(written, service.meta.namespace, mesh.domain_suffix)
            for other in seen[host]:
                other_to = _words(other.spec.get("exportTo")) or mesh.mesh_config.default_virtual_service_export_to
                if _meet(mesh, other.meta, other_to, service.meta, to):
                    yield Finding(
                        service.kind,
                        service.meta,
                        ("spec", "hosts", index),
                        f"{other.meta.key} is for {host} as well, and a proxy takes one of them only",
                    )
                    break
            seen[host].append(service)


def _nameless(match: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in match.items() if key != "name"}


def _unused(service: RawConfig, protocol: str) -> Iterator[Finding]:
    """IST0130 and IST0131: rules and matches behind others that take all they could."""
    everything: int | None = None
    before: list[tuple[int, dict[str, object]]] = []
    for number, rule in enumerate(_maps(service.spec.get(protocol))):
        path: tuple[str | int, ...] = ("spec", protocol, number)
        if everything is not None:
            message = f"it is never used: {protocol}[{everything}] matches everything"
            yield Finding(service.kind, service.meta, path, message)
            continue
        matches = [_nameless(match) for match in _maps(rule.get("match"))]
        for index, match in enumerate(matches):
            owner = next((at for at, earlier in before if _takes(earlier, match)), None)
            if owner is not None:
                message = f"the match is never used: one of {protocol}[{owner}] takes all of it"
                yield Finding(service.kind, service.meta, (*path, "match", index), message)
            before.append((number, match))
        if not matches or {"uri": {"prefix": "/"}} in matches:
            everything = number


def _takes(earlier: Mapping[str, object], later: Mapping[str, object]) -> bool:
    """Whether the earlier of two matches takes all of the later one: it is the same, or has a shorter prefix."""
    if earlier == later:
        return True
    short, whole = _map(earlier.get("uri")).get("prefix"), _map(later.get("uri"))
    long = whole.get("prefix") or whole.get("exact")
    rest = {key: value for key, value in earlier.items() if key != "uri"}
    same = rest == {key: value for key, value in later.items() if key != "uri"}
    return same and isinstance(short, str) and isinstance(long, str) and long.startswith(short)


def _missing_ports(mesh: Mesh, service: RawConfig) -> Iterator[Finding]:
    """As IST0112: a destination that must name its port. Without one it is of the port that the client asked for."""
    suffix = mesh.domain_suffix
    ports: dict[str, tuple[ServicePort, ...]] = {one.host(suffix): one.ports for one in mesh.services}
    own = service.meta.namespace
    asked = {
        port.port
        for host in _words(service.spec.get("hosts"))
        for port in ports.get(full_name(host, own, suffix), ())
        if port.protocol in ("HTTP", "HTTP2", "GRPC", "GRPC-Web", "AUTO")
    }
    for number, rule in enumerate(_maps(service.spec.get("http"))):
        named = {int(str(match["port"])) for match in _maps(rule.get("match")) if match.get("port")}
        for index, target in enumerate(_maps(rule.get("route"))):
            destination = _map(target.get("destination"))
            host = full_name(str(destination.get("host", "")), own, suffix)
            if destination.get("port") or host not in ports:
                continue
            missing = sorted((named or asked) - {port.port for port in ports[host]})
            if missing:
                yield Finding(
                    service.kind,
                    service.meta,
                    ("spec", "http", number, "route", index, "destination"),
                    f"{host} has no port {missing[0]}, which clients of the rule ask for: name its port, or they get 503 NC",
                )

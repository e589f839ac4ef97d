"""The node's rules, as one document: what kube-proxy does with Services, and no way for what nobody has. Pure: no I/O.

A virtual port is one (ClusterIP, protocol, port); a packet to it goes to one of its endpoints at random. Without
endpoints, and on a port that the ClusterIP does not have, it is rejected. The source stays, except where the chosen
endpoint is the sender itself (hairpin): then it becomes the node's, or the answer would not pass the node.
Sources of the rules: kubernetes/kubernetes: pkg/proxy/nftables/proxier.go and pkg/proxy/iptables/proxier.go. One thing
differs: kube-proxy rejects TCP, too, by ICMP, which a connecting socket takes as the same "connection refused". Over a
veth that error arrives while connect(2) still holds the socket; the kernel then drops it and a client hears of the
next one only, a second later. So TCP gets a reset here.

What leaves by the node's way outside, where every address without a route goes, and is for nobody there is rejected as a
router without a route does it (net unreachable; no route). The kernel's own answer has a limit, five for a sender and then one a
second (linux: net/ipv4/route.c, ip_error), whose settings are those of the whole machine; a rule's has none here, because the
node's icmp_ratemask takes it away.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lab.fabric import paths
from lab.manifests.model import EndpointAddress, Mesh, Pod, Service, ServicePort

TABLE = "sidecarlab-services"


@dataclass(frozen=True, slots=True)
class Endpoint:
    ip: str
    port: int


@dataclass(frozen=True, slots=True)
class VirtualPort:
    """One (ClusterIP, protocol, port) of the Service ``NAMESPACE/NAME`` and where it leads; all of one IP family."""

    service: str
    ip: str
    transport: Literal["tcp", "udp"]
    port: int
    endpoints: tuple[Endpoint, ...]

    @property
    def chain(self) -> str:
        """The name of its nftables chain. A family has its own, as it has its own endpoints."""
        family = "6" if ":" in self.ip else "4"
        return f"service{family}-{self.service}/{self.transport}/{self.port}"

    @property
    def short_chain(self) -> str:
        """The name of its iptables chain, which may have 28 characters."""
        return "SVC-" + hashlib.sha256(self.chain.encode()).hexdigest()[:16].upper()


def virtual_ports(mesh: Mesh) -> tuple[VirtualPort, ...]:
    """Every virtual port of the mesh, in the order of the manifests.

    Headless and ExternalName services have none.
    """
    pods: dict[str, list[Pod]] = {}
    for pod in mesh.pods:
        pods.setdefault(pod.meta.namespace, []).append(pod)
    found = []
    for service in mesh.services:
        if service.headless or service.external_name:
            continue
        chosen = selected(service, pods.get(service.meta.namespace, []))
        for port in service.ports:
            endpoints = [*_of_pods(port, chosen), *_written(mesh, service, port)]
            for ip in service.cluster_ips:
                same_family = dict.fromkeys(e for e in endpoints if (":" in e.ip) == (":" in ip))
                found.append(
                    VirtualPort(
                        service=service.meta.key,
                        ip=ip,
                        transport="udp" if port.transport == "UDP" else "tcp",
                        port=port.port,
                        endpoints=tuple(same_family),
                    )
                )
    return tuple(found)


def stale_flows(old: Iterable[VirtualPort], new: Iterable[VirtualPort]) -> list[tuple[VirtualPort, Endpoint]]:
    """UDP endpoints of ``old`` that their virtual port has no more: their flows must be forgotten."""
    now = {(p.ip, p.transport, p.port): set(p.endpoints) for p in new}
    return [
        (port, endpoint)
        for port in old
        if port.transport == "udp"
        for endpoint in port.endpoints
        if endpoint not in now.get((port.ip, port.transport, port.port), set())
    ]


def selected(service: Service, pods: Iterable[Pod]) -> list[Pod]:
    """The ready pods (of its namespace) that a service selects; without a selector it selects none."""
    if not service.selector:
        return []
    wanted = service.selector.items()
    return [
        p
        for p in pods
        if p.meta.namespace == service.meta.namespace
        and (p.ready or service.publish_not_ready)
        and all(p.meta.labels.get(key) == value for key, value in wanted)
    ]


def target_port(port: ServicePort, pod: Pod) -> int | None:
    """The number that a service port has on ``pod``; None where no container of it has a port of that name."""
    if isinstance(port.target, int):
        return port.target or port.port
    for container in pod.containers:
        for declared in container.ports:
            if declared.name == port.target and declared.protocol == port.transport:
                return declared.port
    return None


def _of_pods(port: ServicePort, pods: Iterable[Pod]) -> list[Endpoint]:
    return [Endpoint(ip, number) for p in pods if (number := target_port(port, p)) is not None for ip in p.ips]


def _written(mesh: Mesh, service: Service, port: ServicePort) -> list[Endpoint]:
    slices = [
        s for s in mesh.endpoint_slices if s.service == service.meta.name and s.meta.namespace == service.meta.namespace
    ]
    all_of_port = [(a, s.ports[port.name]) for s in slices if port.name in s.ports for a in s.addresses]
    ready = [(a, n) for a, n in all_of_port if service.publish_not_ready or a.ready]
    # kube-proxy: where nothing is ready, what still serves while it terminates (pkg/proxy/topology.go).
    usable = ready or [(a, n) for a, n in all_of_port if _serves(a)]
    return [Endpoint(a.ip, number) for a, number in usable]


def _serves(address: EndpointAddress) -> bool:
    return bool(address.terminating) and (address.serving if address.serving is not None else address.ready)


def nft_document(ports: Sequence[VirtualPort], node_ips: Mapping[int, str], outside: Sequence[str]) -> str:
    """The whole table, replacing an older one in the same transaction.

    Args:
        ports: what to serve.
        node_ips: the node's own address by IP version (4, 6), the source of hairpin traffic.
        outside: all addresses that the way outside leads to.
    """
    lines = [f"table inet {TABLE}", f"delete table inet {TABLE}", f"table inet {TABLE} {{"]
    for version in (4, 6):
        lines += _sets(version, [p for p in ports if (":" in p.ip) == (version == 6)])
        lines += _collection("set", f"outside{version}", _ADDRESS[version], _of_version(outside, version))
    for port in ports:
        if port.endpoints:
            lines += _service_chain(port)
    lines += [
        "  chain refuse {",
        "    meta l4proto tcp reject with tcp reset",
        "    reject",
        "  }",
        "  chain services {",
        "    ip daddr . meta l4proto . th dport vmap @services4",
        "    ip6 daddr . meta l4proto . th dport vmap @services6",
        "  }",
        "  chain unserved {",
        "    ip daddr @addresses4 goto refuse",
        "    ip6 daddr @addresses6 goto refuse",
        "  }",
        *_hook("prerouting", "nat", "prerouting", "dstnat", "jump services"),
        *_hook("output", "nat", "output", "-100", "jump services"),
        "  chain unrouted {",
        "    ip daddr != @outside4 reject with icmp net-unreachable",
        "    ip6 daddr != @outside6 reject with icmpv6 no-route",
        "  }",
        *_hook("filter-forward", "filter", "forward", "filter", _UNSERVED, f'oifname "{paths.OUTSIDE}" jump unrouted'),
        *_hook("filter-output", "filter", "output", "filter", _UNSERVED),
        "  chain postrouting {",
        "    type nat hook postrouting priority srcnat; policy accept;",
    ]
    if 4 in node_ips:
        lines.append(f"    ct status dnat ip saddr . ip daddr @hairpin4 snat ip to {node_ips[4]}")
    if 6 in node_ips:
        lines.append(f"    ct status dnat ip6 saddr . ip6 daddr @hairpin6 snat ip6 to {node_ips[6]}")
    return "\n".join([*lines, "  }", "}", ""])


_UNSERVED = "ct state new jump unserved"
_ADDRESS: Mapping[int, str] = {4: "ipv4_addr", 6: "ipv6_addr"}


def _of_version(addresses: Iterable[str], version: int) -> list[str]:
    return list(dict.fromkeys(a for a in addresses if (":" in a) == (version == 6)))


def _sets(version: int, ports: Sequence[VirtualPort]) -> list[str]:
    kind = _ADDRESS[version]
    services = [f"{p.ip} . {p.transport} . {p.port} : goto {p.chain}" for p in ports if p.endpoints]
    hairpin = dict.fromkeys(f"{e.ip} . {e.ip}" for p in ports for e in p.endpoints)
    addresses = dict.fromkeys(p.ip for p in ports)
    return [
        *_collection("map", f"services{version}", f"{kind} . inet_proto . inet_service : verdict", services),
        *_collection("set", f"addresses{version}", kind, list(addresses)),
        *_collection("set", f"hairpin{version}", f"{kind} . {kind}", list(hairpin)),
    ]


def _collection(kind: str, name: str, of: str, elements: Sequence[str]) -> list[str]:
    lines = [f"  {kind} {name} {{", f"    type {of}"]
    if elements:
        lines.append(f"    elements = {{ {', '.join(elements)} }}")
    return [*lines, "  }"]


def _hook(chain: str, kind: str, hook: str, priority: str, *rules: str) -> list[str]:
    return [
        f"  chain {chain} {{",
        f"    type {kind} hook {hook} priority {priority}; policy accept;",
        *(f"    {rule}" for rule in rules),
        "  }",
    ]


def _service_chain(port: VirtualPort) -> list[str]:
    family = "ip6" if ":" in port.ip else "ip"
    count = len(port.endpoints)
    targets = ", ".join(f"{n} : {e.ip} . {e.port}" for n, e in enumerate(port.endpoints))
    # Only tcp and udp come here; dnat to a port needs to know that.
    return [
        f"  chain {port.chain} {{",
        f"    meta l4proto {port.transport} dnat {family} addr . port to numgen random mod {count} map {{ {targets} }}",
        "  }",
    ]


def legacy_document(ports: Sequence[VirtualPort], version: int, node_ip: str, outside: Sequence[str]) -> str:
    """The same for ``iptables-legacy-restore`` (or ip6tables), where the kernel has no nf_tables."""
    ports = [p for p in ports if (":" in p.ip) == (version == 6)]
    served = [p for p in ports if p.endpoints]
    nat = ["*nat", ":PREROUTING ACCEPT [0:0]", ":INPUT ACCEPT [0:0]", ":OUTPUT ACCEPT [0:0]"]
    nat += [":POSTROUTING ACCEPT [0:0]", ":SERVICES - [0:0]"]
    nat += [f":{p.short_chain} - [0:0]" for p in served]
    nat += ["-A PREROUTING -j SERVICES", "-A OUTPUT -j SERVICES"]
    for ip in dict.fromkeys(e.ip for p in served for e in p.endpoints):
        nat.append(f"-A POSTROUTING -s {ip} -d {ip} -m conntrack --ctstate DNAT -j SNAT --to-source {node_ip}")
    for p in served:
        nat.append(f"-A SERVICES -d {p.ip} -p {p.transport} -m {p.transport} --dport {p.port} -j {p.short_chain}")
    for p in served:
        for n, e in enumerate(p.endpoints):
            left = len(p.endpoints) - n
            chance = f"-m statistic --mode random --probability {1 / left:.10f} " if left > 1 else ""
            target = f"[{e.ip}]:{e.port}" if version == 6 else f"{e.ip}:{e.port}"
            nat.append(f"-A {p.short_chain} -p {p.transport} {chance}-j DNAT --to-destination {target}")
    filters = ["*filter", ":INPUT ACCEPT [0:0]", ":FORWARD ACCEPT [0:0]", ":OUTPUT ACCEPT [0:0]", ":UNSERVED - [0:0]"]
    filters.append(":UNROUTED - [0:0]")
    filters += [f"-A {chain} -m conntrack --ctstate NEW -j UNSERVED" for chain in ("FORWARD", "OUTPUT")]
    filters.append(f"-A FORWARD -o {paths.OUTSIDE} -j UNROUTED")
    for ip in dict.fromkeys(p.ip for p in ports):
        filters.append(f"-A UNSERVED -d {ip} -p tcp -j REJECT --reject-with tcp-reset")
        filters.append(f"-A UNSERVED -d {ip} -j REJECT")
    filters += [f"-A UNROUTED -d {ip} -j RETURN" for ip in _of_version(outside, version)]
    filters.append(
        f"-A UNROUTED -j REJECT --reject-with {'icmp6-no-route' if version == 6 else 'icmp-net-unreachable'}"
    )
    return "\n".join([*nat, "COMMIT", *filters, "COMMIT", ""])

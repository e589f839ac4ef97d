"""NDS: the name table that a proxy's agent answers DNS from (istio/istio: pkg/dns/server/name_table.go)."""

from __future__ import annotations

from typing import Any

from agent.protos import nds_pb2
from lab.discovery.proxy import Proxy
from lab.discovery.registry import KUBERNETES, Service


def _headless_entries(proxy: Proxy, service: Service) -> tuple[list[str], dict[str, tuple[list[str], str]]]:
    """(addresses of the ready endpoints, per pod: name -> (addresses, short name)) of a headless service."""
    addresses: list[str] = []
    pods: dict[str, tuple[list[str], str]] = {}
    for endpoint in proxy.push.registry.endpoints(service):
        if endpoint.health not in ("HEALTHY", "UNKNOWN") or not endpoint.is_ip:
            continue
        own = [a for a in endpoint.addresses if proxy.node.supports(a)]
        addresses.extend(a for a in own if a not in addresses)
        if endpoint.hostname and endpoint.subdomain:
            short = f"{endpoint.hostname}.{endpoint.subdomain}"
            rest = service.host.partition(".")[2]
            held = pods.setdefault(f"{short}.{rest}", ([], short))[0]
            held.extend(a for a in own if a not in held)
    return addresses, pods


def name_table(proxy: Proxy) -> Any:
    """The NameTable of a proxy: services of its scope that have an address for it."""
    return proxy.memo("name_table", lambda: _build(proxy))


def _build(proxy: Proxy) -> Any:
    table = nds_pb2.NameTable()

    def put(host: str, ips: list[str], service: Service, short: str) -> None:
        if not ips:
            return
        held = table.table.get(host)
        if held is not None and host in table.table:
            if held.registry == KUBERNETES or service.registry == KUBERNETES:
                if held.registry == KUBERNETES:
                    return  # a Kubernetes service wins over entries that share its name
                table.table[host].Clear()
            else:
                table.table[host].ips.extend(ip for ip in ips if ip not in held.ips)
                return
        info = table.table[host]
        info.ips.extend(ips)
        info.registry = service.registry
        if service.registry == KUBERNETES:
            info.shortname = short
            info.namespace = service.namespace

    # every service of the listeners counts, not only the merged ones: an entry has one service per address
    seen: set[int] = set()
    for egress in proxy.scope.egress:
        for service in egress.services:
            if id(service) in seen or service.resolution == "Alias":
                continue
            seen.add(id(service))
            vips = [a for a in service.vips(proxy.node) if "/" not in a]
            if vips:
                put(service.host, vips, service, service.name)
            elif service.headless:
                addresses, pods = _headless_entries(proxy, service)
                for host, (ips, short) in pods.items():
                    put(host, ips, service, short)
                put(service.host, addresses, service, service.name)
    return table

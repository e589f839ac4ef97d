"""Which of a pod's addresses a Service's endpoints have, by the families of the Service."""

from __future__ import annotations

import pytest
from mesh_text import S, build, mesh_config, namespace, of, out, pod, service

from lab.fabric.endpoints import ready_endpoints

FOUR, SIX = "10.1.0.2", "fd00::2"
MESH = mesh_config("defaultConfig: {proxyMetadata: {ISTIO_DUAL_STACK: 'true'}}")
CLIENT = namespace("a") + pod("client", "a", ips='[{ip: 10.1.0.1}, {ip: "fd00::1"}]')
SERVER = namespace("b") + pod("server", "b", ips=f'[{{ip: {FOUR}}}, {{ip: "{SIX}"}}]')
PORTS = "[{name: http, port: 8080}]"


@pytest.mark.parametrize(
    ("families", "addresses"),
    [
        ("ipFamilies: [IPv4]", [FOUR]),
        ("ipFamilies: [IPv6]", [SIX]),
        ("ipFamilies: [IPv4, IPv6], ipFamilyPolicy: RequireDualStack", [FOUR, SIX]),
    ],
)
def test_endpoints_have_the_families_of_their_service(families: str, addresses: list[str]) -> None:
    text = service("server", "b", PORTS, more=f", {families}")
    found = of(MESH, CLIENT, SERVER, text).endpoints[out(8080, f"server.b{S}")]
    (endpoint,) = (e.endpoint for locality in found.endpoints for e in locality.lb_endpoints)
    told = [endpoint.address, *(more.address for more in endpoint.additional_addresses)]
    assert [address.socket_address.address for address in told] == addresses


CAPTURE = mesh_config("defaultConfig: {proxyMetadata: {ISTIO_DUAL_STACK: 'true', ISTIO_META_DNS_CAPTURE: 'true'}}")
TCP = "[{name: tcp, port: 9000}]"


@pytest.mark.parametrize(
    ("families", "addresses"),
    [
        ("", [FOUR]),  # the cluster's first family
        ("ipFamilies: [IPv4]", [FOUR]),
        ("ipFamilies: [IPv6]", [SIX]),
        ("ipFamilyPolicy: PreferDualStack", [FOUR, SIX]),
        ("ipFamilies: [IPv6, IPv4], ipFamilyPolicy: RequireDualStack", [FOUR, SIX]),
    ],
)
def test_headless_services_lead_to_addresses_of_their_families(families: str, addresses: list[str]) -> None:
    text = service("server", "b", TCP, more=f", clusterIP: None{', ' if families else ''}{families}")
    found = of(CAPTURE, CLIENT, SERVER, text)
    assert list(found.name_table.table[f"server.b{S}"].ips) == addresses
    (listener,) = [one for one in found.listeners.values() if one.name.endswith("_9000")]
    told = [listener.address, *(more.address for more in listener.additional_addresses)]
    assert [address.socket_address.address for address in told] == addresses
    mesh = build(CAPTURE, CLIENT, SERVER, text)
    assert [e.ip for e in ready_endpoints(mesh.services[0], mesh.pods, ())] == addresses


def test_a_headless_service_of_an_ipv6_cluster() -> None:
    client = namespace("a") + pod("client", "a", "fd00::1")
    server = namespace("b") + pod("server", "b", "fd00::2")
    found = of(CAPTURE, client, server, service("server", "b", TCP, more=", clusterIP: None"))
    assert list(found.name_table.table[f"server.b{S}"].ips) == ["fd00::2"]

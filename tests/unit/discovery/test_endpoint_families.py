"""Which of a pod's addresses a Service's endpoints have, by the families of the Service."""

from __future__ import annotations

import pytest
from mesh_text import S, mesh_config, namespace, of, out, pod, service

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

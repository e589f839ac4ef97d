"""Endpoints of a host do not depend on which proxy, or which of its definitions, was asked about first."""

from __future__ import annotations

from mesh_text import CLIENT, S, build, istio, namespace, out, pod, service

from lab.discovery import snapshot
from lab.discovery.push_context import PushContext

NARROW = istio(
    "Sidecar",
    "narrow",
    "a",
    "egress: [{port: {number: 9000, protocol: TCP, name: tcp}, hosts: ['*/*']}, {hosts: ['~/*']}]",
)
SERVER = namespace("b") + pod("server", "b", "10.2.0.1") + pod("other", "b", "10.2.0.2")
BOTH = service("server", "b", "[{name: http, port: 8080}, {name: tcp, port: 9000, targetPort: 8080}]")


def test_a_proxy_that_imports_one_port_takes_none_from_the_others() -> None:
    mesh = build(CLIENT, SERVER, BOTH, NARROW)
    push = PushContext(mesh)
    for name in ("client.a", "other.b"):
        asked = mesh.pod(name)
        assert asked is not None
        found = snapshot.generate(push, snapshot.node_for_pod(mesh, asked)).endpoints
    (locality,) = found[out(8080, f"server.b{S}")].endpoints
    assert [one.endpoint.address.socket_address.address for one in locality.lb_endpoints] == ["10.2.0.1"]


ENTRIES = (
    istio(
        "ServiceEntry",
        "dns",
        "a",
        "hosts: [api.example]\nresolution: DNS\nports: [{number: 80, name: http, protocol: HTTP}]",
    ),
    istio(
        "ServiceEntry",
        "none",
        "a",
        "hosts: [api.example]\nresolution: NONE\nports: [{number: 81, name: http, protocol: HTTP}]",
    ),
)


def test_entries_of_one_host_each_bring_their_own_endpoints() -> None:
    push = PushContext(build(CLIENT, *ENTRIES))
    services = [s for s in push.registry.services if s.host == "api.example"]
    wanted = [("api.example", 80)]
    for first in services:
        fresh = PushContext(push.mesh).registry
        fresh.endpoints(first)
        assert [[(e.address, e.port) for e in fresh.endpoints(s)] for s in services] == [wanted] * len(services)

"""The topologies that we ship."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from itertools import takewhile
from pathlib import Path

import pytest

from lab.manifests import load
from lab.manifests.model import Mesh, OutboundTrafficPolicy, Source

HERE = Path(__file__).parents[3] / "topologies"
ALL = sorted(HERE.glob("*.yaml"))


def topology(name: str) -> Mesh:
    return load.load([HERE / f"{name}.yaml"])


DOUBTS = {
    "result-matrix": [
        'no DestinationRule gives routed.shop.svc.cluster.local a subset "v9"',
        'the name "unnamed" of port 9005 says no protocol',
    ],
    "wildcard-egress": ['no service has the host "a.wild.example"'],
}
"""What a topology does wrong on purpose, to show what becomes of it."""


@pytest.mark.parametrize("file", ALL, ids=lambda file: file.stem)
def test_loads_without_a_doubt(file: Path) -> None:
    mesh = load.load([file])
    doubts = DOUBTS.get(file.stem, [])
    assert len(mesh.warnings) == len(doubts), mesh.warnings
    for warning, doubt in zip(mesh.warnings, doubts, strict=True):
        assert doubt in warning.message
    assert mesh.name == file.stem
    assert mesh.tests


@pytest.mark.parametrize("file", ALL, ids=lambda file: file.stem)
def test_begins_with_a_comment_that_says_what_it_shows(file: Path) -> None:
    heading = list(takewhile(lambda line: line.startswith("# "), file.read_text().splitlines()))
    said = " ".join(line.removeprefix("# ") for line in heading)
    assert len(said.split()) >= 8, "one sentence at least"
    assert said.endswith(".")
    assert "---" not in said
    assert all(len(line) <= 130 for line in heading)


def _bare(value: object) -> object:
    """The same without lines, files and positions."""
    if isinstance(value, Source):
        return None
    if isinstance(value, tuple):
        return tuple(_bare(item) for item in value)
    if isinstance(value, Mapping):
        return {key: _bare(item) for key, item in value.items()}
    if hasattr(value, "__dataclass_fields__"):
        return {f.name: _bare(getattr(value, f.name)) for f in fields(value) if f.name != "order"}  # type: ignore[arg-type]
    return value


@pytest.mark.parametrize("name", ["quickstart", "four-namespaces"])
def test_registry_only_is_the_same_mesh(name: str) -> None:
    allow = topology(name)
    block = topology("registry-only" if name == "quickstart" else f"{name}-registry-only")
    assert block.mesh_config.outbound_traffic_policy == OutboundTrafficPolicy("REGISTRY_ONLY")

    def mesh(of: Mesh) -> object:
        config = replace(of.mesh_config, outbound_traffic_policy=OutboundTrafficPolicy(), raw={})
        return _bare(replace(of, name="", files=(), tests=(), mesh_config=config))

    assert mesh(allow) == mesh(block)


def test_quickstart_has_what_the_demo_shows() -> None:
    mesh = topology("quickstart")
    assert {pod.name: pod.injected for pod in mesh.pods} == {
        "frontend.frontend": True,
        "catalog.catalog": True,
        "payments.payments": True,
        "tracing.observability": True,
        "legacy.legacy": False,
    }
    services = {service.host(): [(port.port, port.protocol) for port in service.ports] for service in mesh.services}
    assert services == {
        "frontend.frontend.svc.cluster.local": [(8080, "HTTP")],
        "catalog.catalog.svc.cluster.local": [(8080, "HTTP")],
        "payments.payments.svc.cluster.local": [(8080, "HTTP")],
        "tracing.observability.svc.cluster.local": [(4317, "GRPC")],
        "legacy.legacy.svc.cluster.local": [(8080, "HTTP")],
    }
    (entry,) = mesh.service_entries
    assert entry.auto_addresses["api.vendor.example"][0] == "240.240.0.1"
    for host in mesh.external_hosts:
        ports = {(port.port, port.protocol) for port in host.ports}
        assert {(80, "http"), (443, "tls"), (9000, "tcp"), (9001, "udp")} <= ports
    config = mesh.mesh_config.default_config
    assert config == {"proxyMetadata": {"ISTIO_META_DNS_CAPTURE": "true"}}, "else the mesh's defaults"
    assert mesh.mesh_config.enable_auto_mtls
    assert mesh.peer_authentications == ()


def test_four_namespaces_have_the_addresses_of_the_worked_example() -> None:
    mesh = topology("four-namespaces")
    assert {pod.name: (pod.ip, pod.service_account, pod.owner_name, pod.injected) for pod in mesh.pods} == {
        "frontend-0.frontend": ("10.0.1.5", "frontend", "frontend", True),
        "catalog-0.catalog": ("10.0.2.5", "catalog", "catalog", True),
        "payments-0.payments": ("10.0.3.5", "payments", "payments", True),
        "tracing-0.observability": ("10.0.4.5", "tracing", "tracing", True),
    }
    assert {service.meta.name: service.cluster_ips for service in mesh.services} == {
        "frontend": ("10.96.0.10",),
        "catalog": ("10.96.0.20",),
        "payments": ("10.96.0.30",),
        "tracing": ("10.96.0.40",),
    }
    assert (mesh.fabric.dns, mesh.fabric.discovery) == ("10.96.0.11", "10.96.0.12")


def test_loading_imports_nothing_heavy() -> None:
    code = (
        "import sys; from lab.manifests import load; load.load([sys.argv[1]]);"
        "heavy = {'grpc', 'scapy', 'pyroute2', 'docker', 'rich', 'h11', 'cryptography', 'google.protobuf'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code, str(HERE / "quickstart.yaml")], check=True, timeout=60)

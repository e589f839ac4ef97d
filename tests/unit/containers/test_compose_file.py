"""docker-compose.yml says by hand what injection would say of its manifests; here the two are compared."""

from __future__ import annotations

import ipaddress
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lab.containers import paths
from lab.manifests import injection
from lab.manifests.load import load
from lab.manifests.model import Mesh, Pod

ROOT = Path(__file__).parents[3]
POLICIES = ("ALLOW_ANY", "REGISTRY_ONLY")
OWN_FLAGS = ("--log_output_level=default:info",)  # the default: not written down
LEFT_OUT = {"HOST_IP", "ISTIO_META_NODE_NAME"}  # there is no node


def mesh_of(policy: str) -> Mesh:
    here = ROOT / "topologies" / "compose"
    return load([here / "mesh.yaml", here / f"{policy}.yaml"])


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    document = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return dict(document["services"])


MESH = mesh_of("ALLOW_ANY")
MESHED = [pod for pod in MESH.pods if pod.injected]


def containers(pod: Pod) -> list[str]:
    roles = ("pod", "init", "proxy", "app", "prober") if pod.injected else ("pod", "app", "prober")
    return [f"{role}-{pod.meta.name}" for role in roles]


@pytest.mark.parametrize("policy", POLICIES)
def test_manifests_load_without_a_doubt(policy: str) -> None:
    mesh = mesh_of(policy)
    assert mesh.warnings == ()
    assert mesh.mesh_config.outbound_traffic_policy.mode == policy


def test_every_container_is_accounted_for(services: dict[str, dict[str, Any]]) -> None:
    expected = {name for pod in MESH.pods for name in containers(pod)}
    expected |= {host.meta.name for host in MESH.external_hosts} | {"discovery", "dns", "tests"}
    assert set(services) == expected


@pytest.mark.parametrize("pod", MESHED, ids=lambda pod: pod.name)
def test_init_is_as_injected(services: dict[str, dict[str, Any]], pod: Pod) -> None:
    service = services[f"init-{pod.meta.name}"]
    wanted = [a for a in injection.init_args(MESH, pod) if a not in OWN_FLAGS]
    assert service["command"] == ["python", "-m", "init", *wanted]
    assert service["environment"] == injection.init_env(MESH, pod)


@pytest.mark.parametrize("pod", MESHED, ids=lambda pod: pod.name)
def test_proxy_is_as_injected(services: dict[str, dict[str, Any]], pod: Pod) -> None:
    service = services[f"proxy-{pod.meta.name}"]
    wanted = [a for a in injection.agent_args(MESH, pod) if a not in OWN_FLAGS]
    assert service["command"] == ["python", "-m", "agent", *wanted]
    environment = dict(service["environment"])
    labels = {k: v for k, v in pod.meta.labels.items() if "istio.io/" not in k}
    assert json.loads(environment.pop("ISTIO_METAJSON_LABELS")) == labels
    assert environment.pop("ISTIO_META_SIDECARLAB_EVIDENCE") == str(paths.evidence_file(pod.name))
    assert environment == {k: v for k, v in injection.agent_env(MESH, pod).items() if k not in LEFT_OUT}


@pytest.mark.parametrize("pod", MESH.pods, ids=lambda pod: pod.name)
def test_a_pods_network_is_its_owners(services: dict[str, dict[str, Any]], pod: Pod) -> None:
    owner, *others = containers(pod)
    network = services[owner]["networks"]["mesh"]
    assert network["ipv4_address"] == pod.ip
    assert f"{pod.name}.svc.cluster.local" in network["aliases"]
    assert services[owner]["dns_search"][0] == f"{pod.meta.namespace}.svc.cluster.local"
    for name in others:
        assert services[name]["network_mode"] == f"service:{owner}"


@pytest.mark.parametrize("pod", MESHED, ids=lambda pod: pod.name)
def test_no_packet_leaves_before_the_rules_stand(services: dict[str, dict[str, Any]], pod: Pod) -> None:
    name = pod.meta.name
    rules = {f"init-{name}": {"condition": "service_completed_successfully"}}
    for role in ("proxy", "app", "prober"):
        assert rules.items() <= services[f"{role}-{name}"]["depends_on"].items()
    assert services[f"app-{name}"]["depends_on"][f"proxy-{name}"] == {"condition": "service_healthy"}
    assert services[f"pod-{name}"]["command"] == ["sleep", "infinity"]


@pytest.mark.parametrize("pod", MESH.pods, ids=lambda pod: pod.name)
def test_the_app_serves_the_ports_of_the_manifest(services: dict[str, dict[str, Any]], pod: Pod) -> None:
    command = services[f"app-{pod.meta.name}"]["command"]
    served = {int(m[1]) for word in command if (m := re.match(r"--port=(\d+):", word))}
    assert served == {port.port for container in pod.containers for port in container.ports}


def test_external_hosts_are_where_the_manifests_say(services: dict[str, dict[str, Any]]) -> None:
    for host in MESH.external_hosts:
        service = services[host.meta.name]
        assert service["networks"]["mesh"]["ipv4_address"] == host.addresses[0]
        assert tuple(service["networks"]["mesh"]["aliases"]) == host.hosts
        served = {m[1] for word in service["command"] if (m := re.match(r"--port=(\S+)", word))}
        assert served == {f"{port.port}:{port.protocol}" for port in host.ports}


def test_nobody_has_more_rights_than_the_work_needs(services: dict[str, dict[str, Any]]) -> None:
    wanted = {"init": ["NET_ADMIN", "NET_RAW"], "prober": ["NET_ADMIN", "NET_RAW", "SETUID", "SETGID"]}
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service.get("cap_add", []) == wanted.get(name.split("-")[0], []), name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["read_only"] is True, name
        assert "privileged" not in service, name
        assert "pid" not in service, name
        if name.startswith("proxy-"):
            assert service["user"] == "1337:1337"
        if name.startswith("app-"):
            assert service["user"] == "1000:1000"


def test_containers_without_a_fixed_address_get_none_that_is_fixed() -> None:
    document = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    (config,) = document["networks"]["mesh"]["ipam"]["config"]
    subnet, dynamic = ipaddress.ip_network(config["subnet"]), ipaddress.ip_network(config["ip_range"])
    fixed = [
        ipaddress.ip_address(service["networks"]["mesh"]["ipv4_address"])
        for service in document["services"].values()
        if isinstance(service.get("networks"), dict)
    ]
    assert len(set(fixed)) == len(fixed) == len(MESH.pods) + len(MESH.external_hosts) + 2
    assert all(address in subnet and address not in dynamic for address in fixed)


def test_the_image_installs_what_the_lock_file_of_everything_has() -> None:
    def versions(name: str) -> dict[str, str]:
        return dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / name).read_text(), re.MULTILINE))

    run, everything = versions("requirements-run.lock"), versions("requirements.lock")
    assert run
    assert run.items() <= everything.items()
    assert "pytest" not in run

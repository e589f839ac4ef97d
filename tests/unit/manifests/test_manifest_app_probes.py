"""Probes of app containers as the injector hands them to the agent."""

from __future__ import annotations

import json

import pytest

from agent.probe_config import parse_probers
from lab.errors import InputError
from lab.manifests import injection
from lab.manifests.load import load_text
from lab.manifests.model import Mesh

POD = """apiVersion: v1
kind: Namespace
metadata: {name: shop, labels: {istio-injection: enabled}}
---
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: shop, ANNOTATIONS}
spec:
  containers:
  - name: web
    ports: [{name: http, containerPort: 8080}]
    PROBES
"""


def pod(probes: str, annotations: str = "labels: {}") -> Mesh:
    return load_text(POD.replace("PROBES", probes).replace("ANNOTATIONS", annotations))


def told(mesh: Mesh) -> dict[str, object]:
    environment = injection.agent_env(mesh, mesh.pods[0]).get("ISTIO_KUBE_APP_PROBERS", "")
    parse_probers(environment)  # the agent takes it
    found: dict[str, object] = json.loads(environment or "{}")
    return found


@pytest.mark.parametrize(
    ("written", "path", "value"),
    [
        (
            "readinessProbe: {httpGet: {path: /ok, port: http, httpHeaders: [{name: a, value: b}]}, timeoutSeconds: 3}",
            "/app-health/web/readyz",
            {
                "httpGet": {
                    "path": "/ok",
                    "port": 8080,
                    "scheme": "HTTP",
                    "httpHeaders": [{"name": "a", "value": "b"}],
                },
                "timeoutSeconds": 3,
            },
        ),
        (
            "livenessProbe: {httpGet: {port: 8443, scheme: HTTPS}}",
            "/app-health/web/livez",
            {"httpGet": {"path": "/", "port": 8443, "scheme": "HTTPS"}, "timeoutSeconds": 1},
        ),
        (
            "startupProbe: {tcpSocket: {port: http}}",
            "/app-health/web/startupz",
            {"tcpSocket": {"port": 8080}, "timeoutSeconds": 1},
        ),
        (
            "startupProbe: {grpc: {port: 9090, service: up}}",
            "/app-health/web/startupz",
            {"grpc": {"port": 9090, "service": "up"}, "timeoutSeconds": 1},
        ),
        (
            "lifecycle: {preStop: {httpGet: {path: /bye, port: 8080}}}",
            "/app-lifecycle/web/prestopz",
            {"httpGet": {"path": "/bye", "port": 8080, "scheme": "HTTP"}},
        ),
        (
            "lifecycle: {postStart: {tcpSocket: {port: 8080}}}",
            "/app-lifecycle/web/poststartz",
            {"tcpSocket": {"port": 8080}},
        ),
    ],
)
def test_the_agent_is_told(written: str, path: str, value: dict[str, object]) -> None:
    assert told(pod(written)) == {path: value}


@pytest.mark.parametrize(
    "written",
    [
        "livenessProbe: {exec: {command: [cat]}}",
        "lifecycle: {postStart: {sleep: {seconds: 3}}}",
        "readinessProbe: {httpGet: {port: 15020, path: /app-health/web/readyz}}",
    ],
)
def test_what_happens_in_the_container_and_what_was_rewritten_before_is_not_the_agents(written: str) -> None:
    assert told(pod(written)) == {}


def test_a_port_by_a_name_that_the_container_does_not_have_is_left_out_and_told() -> None:
    mesh = pod("readinessProbe: {httpGet: {port: web}}")
    assert told(mesh) == {}
    (warning,) = mesh.warnings
    assert 'readinessProbe of container web asks port "web", but the container has none of that name' in str(warning)
    assert warning.source.line == 12


@pytest.mark.parametrize(
    "written",
    [
        "readinessProbe: {httpGet: {port: PORT}}",
        "livenessProbe: {tcpSocket: {port: PORT}}",
        "lifecycle: {preStop: {httpGet: {port: PORT}}}",
        "lifecycle: {postStart: {tcpSocket: {port: PORT}}}",
    ],
)
@pytest.mark.parametrize("port", ['""', '"8080"', "Http", "a--b", "-a", "sixteen-letters-"])
def test_what_can_be_no_ports_name_is_refused_with_its_line(written: str, port: str) -> None:
    with pytest.raises(InputError, match=r"\.port: .*: a port's name is at most 15 lower case letters") as failure:
        pod(written.replace("PORT", port))
    assert failure.value.where.endswith(":12")


@pytest.mark.parametrize("written", ["timeoutSeconds: 2147483648", "timeoutSeconds: -1"])
def test_seconds_are_an_int32(written: str) -> None:
    with pytest.raises(InputError, match="timeoutSeconds"):
        pod(f"livenessProbe: {{tcpSocket: {{port: 1}}, {written}}}")
    assert pod("livenessProbe: {tcpSocket: {port: 1}, timeoutSeconds: 2147483647}")


@pytest.mark.parametrize("port", ['""', "0"])
def test_an_empty_target_port_of_a_service_is_its_port(port: str) -> None:
    service = f"---\napiVersion: v1\nkind: Service\nmetadata: {{name: s}}\nspec: {{ports: [{{port: 80, targetPort: {port}}}]}}\n"
    (found,) = load_text(service).services
    assert found.ports[0].target == 80


def test_timings_are_told_in_one_warning() -> None:
    (warning,) = pod("livenessProbe: {tcpSocket: {port: 1}, periodSeconds: 5, failureThreshold: 2}").warnings
    assert "spec.containers[0].livenessProbe.periodSeconds, " in str(warning)
    assert "failureThreshold" in str(warning)


@pytest.mark.parametrize(
    ("probes", "annotations"),
    [
        ("livenessProbe: {tcpSocket: {port: 1}}", 'annotations: {sidecar.istio.io/rewriteAppHTTPProbers: "false"}'),
        ("livenessProbe: {tcpSocket: {port: 1}}", 'labels: {sidecar.istio.io/inject: "false"}'),
        ("livenessProbe: {exec: {command: [cat]}}", "labels: {}"),
    ],
)
def test_a_probe_that_no_agent_answers_is_told(probes: str, annotations: str) -> None:
    mesh = pod(probes, annotations)
    assert told(mesh) == {}
    (warning,) = mesh.warnings
    assert "livenessProbe of container web is accepted, but the lab has no kubelet" in str(warning)


def test_an_annotation_that_is_no_boolean_counts_as_not_written() -> None:
    mesh = pod("livenessProbe: {tcpSocket: {port: 1}}", 'annotations: {sidecar.istio.io/rewriteAppHTTPProbers: "no"}')
    assert list(told(mesh)) == ["/app-health/web/livez"]


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("livenessProbe: {}", "exactly one of exec, httpGet, tcpSocket and grpc is needed"),
        ("livenessProbe: {tcpSocket: {port: 1}, grpc: {port: 2}}", "exactly one of"),
        ("livenessProbe: {httpGet: {path: /}}", "port"),
        ("livenessProbe: {grpc: {port: http}}", "expected an integer"),
        ("livenessProbe: {httpGet: {port: 1, schema: HTTP}}", 'Did you mean "scheme"?'),
        ("lifecycle: {preStop: {grpc: {port: 1}}}", 'unknown field "grpc"'),
    ],
)
def test_a_bad_probe_is_one_line(written: str, why: str) -> None:
    with pytest.raises(InputError) as error:
        pod(written)
    assert why in str(error.value)
    assert ":12" in str(error.value)

"""Prometheus annotations as the injector hands them to the agent."""

from __future__ import annotations

import json

import pytest

from agent.scrape_config import RESERVED_PORTS, ScrapeTarget, parse_scrape_config
from lab.errors import InputError
from lab.manifests import injection
from lab.manifests.load import load_text
from lab.manifests.model import Mesh

OURS = {"prometheus.io/port": "15020", "prometheus.io/path": "/stats/prometheus", "prometheus.io/scrape": "true"}


def pod(annotations: dict[str, str], mesh_config: str = "", labels: str = "{}") -> Mesh:
    text = f"""apiVersion: v1
kind: Namespace
metadata: {{name: shop, labels: {{istio-injection: enabled}}}}
---
apiVersion: v1
kind: Pod
metadata: {{name: web, namespace: shop, labels: {labels}, annotations: {json.dumps(annotations)}}}
spec: {{containers: [{{name: web}}]}}
"""
    config = (
        "---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: istio, namespace: istio-system}\ndata: {mesh: '%s'}\n"
    )
    return load_text(text + (config % mesh_config if mesh_config else ""))


def scraped(mesh: Mesh) -> list[ScrapeTarget]:
    return parse_scrape_config(injection.agent_env(mesh, mesh.pods[0]).get("ISTIO_PROMETHEUS_ANNOTATIONS"), 15020)


@pytest.mark.parametrize(
    ("annotations", "targets"),
    [
        ({}, []),
        ({"prometheus.io/scrape": "true"}, [ScrapeTarget(80, "/metrics")]),
        ({"prometheus.io/port": "9100"}, [ScrapeTarget(9100, "/metrics")]),
        ({"prometheus.io/port": "9100", "prometheus.io/path": "/m"}, [ScrapeTarget(9100, "/m")]),
        ({"prometheus.io.port": "9100", "prometheus-io/path": "/m"}, [ScrapeTarget(9100, "/m")]),
        (
            {"prometheus.istio.io/scrape-targets": "9090:/m, 9091", "prometheus.io/port": "1"},
            [ScrapeTarget(9090, "/m"), ScrapeTarget(9091, "/metrics")],
        ),
        ({"prometheus.istio.io/scrape-targets": ":/m", "prometheus.io/port": "9100"}, [ScrapeTarget(9100, "/metrics")]),
    ],
)
def test_the_agent_scrapes_the_app_and_prometheus_the_agent(
    annotations: dict[str, str], targets: list[ScrapeTarget]
) -> None:
    mesh = pod({**annotations, "note": "kept"})
    assert scraped(mesh) == targets
    assert mesh.pods[0].meta.annotations == {"note": "kept", **OURS}


@pytest.mark.parametrize(
    ("annotations", "mesh_config", "labels"),
    [
        ({"prometheus.io/scrape": "false", "prometheus.io/port": "9100"}, "", "{}"),
        ({"prometheus.istio.io/merge-metrics": "false", "prometheus.io/port": "9100"}, "", "{}"),
        ({"prometheus.io/port": "9100"}, "enablePrometheusMerge: false", "{}"),
        ({"prometheus.io/port": "15020"}, "", "{}"),  # injected before
        ({"prometheus.io/port": "9100"}, "", '{sidecar.istio.io/inject: "false"}'),
    ],
)
def test_what_is_not_to_be_merged_stays(annotations: dict[str, str], mesh_config: str, labels: str) -> None:
    mesh = pod(annotations, mesh_config, labels)
    assert mesh.pods[0].meta.annotations == annotations
    assert scraped(mesh) == []


def test_the_agent_refuses_the_same_ports() -> None:
    assert set(RESERVED_PORTS) == injection.PROXY_PORTS


def test_the_pods_word_beats_the_meshs() -> None:
    notes = {"prometheus.istio.io/merge-metrics": "true", "prometheus.io/port": "9100"}
    assert scraped(pod(notes, "enablePrometheusMerge: false")) == [ScrapeTarget(9100, "/metrics")]


def test_the_meshs_own_status_port() -> None:
    config = "defaultConfig: {statusPort: 16020}"
    assert pod({}, config).pods[0].meta.annotations["prometheus.io/port"] == "16020"
    with pytest.raises(InputError, match="the agent's own"):
        pod({"prometheus.istio.io/scrape-targets": "16020"}, config)


@pytest.mark.parametrize(
    ("annotations", "named", "why"),
    [
        ({"prometheus.io/port": "http"}, "prometheus.io/port", '"http" is no port'),
        ({"prometheus.io/port": "70000"}, "prometheus.io/port", '"70000" is no port'),
        ({"prometheus.io/port": "15090"}, "prometheus.io/port", "port 15090 is one of the proxy's own"),
        (
            {"prometheus.istio.io/scrape-targets": "9090,15000"},
            "prometheus.istio.io/scrape-targets",
            "port 15000 is one of the proxy's own",
        ),
        ({"prometheus.istio.io/merge-metrics": "perhaps"}, "prometheus.istio.io/merge-metrics", 'must be "true" or'),
    ],
)
def test_a_port_that_cannot_be_scraped_is_refused(annotations: dict[str, str], named: str, why: str) -> None:
    with pytest.raises(InputError) as error:
        pod(annotations)
    assert str(error.value).startswith(f'bad value "{annotations[named]}" of annotation {named}: -:7: Pod shop/web: ')
    assert why in str(error.value)

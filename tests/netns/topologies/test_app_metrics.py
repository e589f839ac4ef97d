"""The app's metrics, served by the agent together with Envoy's and its own."""

from __future__ import annotations

import os
import urllib.request
from pathlib import Path

import pytest

from lab import lifecycle
from lab.fabric import paths
from lab.manifests.load import load
from lab.runtime import enter

pytestmark = pytest.mark.root

ROOT = Path(__file__).parents[3]


def test_one_scrape_gives_all_three() -> None:
    mesh = load([ROOT / "topologies" / "app-probes.yaml"], name=f"slt-{os.getpid()}-metrics")
    pod = mesh.pod("web.shop")
    assert pod is not None
    where = {key.partition("/")[2]: value for key, value in pod.meta.annotations.items()}
    with lifecycle.running(mesh) as lab, enter.netns(paths.netns_path(lab.name, "kubelet.node")):
        url = f"http://{pod.ip}:{where['port']}{where['path']}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            names = {line.partition(b"{")[0].partition(b" ")[0] for line in answer}
    assert {b"istio_agent_startup_duration_seconds", b"envoy_server_live", b"orders_total"} <= names

"""Every resource of a topology is accepted by a stock Envoy, and both protocols give the same names."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.discovery import snapshot
from lab.discovery.node import Node
from lab.manifests import load

pytestmark = pytest.mark.root

TOPOLOGIES = sorted((Path(__file__).parents[3] / "topologies").glob("*.yaml"))


def names(dump: dict[str, Any]) -> dict[str, set[str]]:
    """Names of the dynamic resources in a config_dump, and of its EDS clusters."""
    out: dict[str, set[str]] = {"listeners": set(), "routes": set(), "clusters": set(), "endpoints": set()}
    for section in dump["configs"]:
        for item in section.get("dynamic_listeners", []):
            out["listeners"].add(item["name"])
            assert "error_state" not in item, item["error_state"]
        for key in ("dynamic_active_clusters", "dynamic_warming_clusters"):
            out["clusters"].update(i["cluster"]["name"] for i in section.get(key, []))
        out["routes"].update(i["route_config"]["name"] for i in section.get("dynamic_route_configs", []))
        out["endpoints"].update(
            i["endpoint_config"]["cluster_name"]
            for i in section.get("dynamic_endpoint_configs", [])
            if i["endpoint_config"].get("cluster_name", "").startswith("outbound|")
        )
    out["routes"] = {r for r in out["routes"] if not r.startswith("inbound|") and r != "InboundPassthroughCluster"}
    return out


AT_ONCE = 4  # Envoys


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda p: p.stem)
def test_every_resource_is_accepted(topology: Path, run_envoy: Callable[..., Any]) -> None:
    """Those of every sidecar, by two Envoys, one on delta and one on state of the world."""
    mesh = load.load([topology])
    nodes = [snapshot.node_for_pod(mesh, pod) for pod in mesh.pods if pod.injected]
    assert nodes
    turns = asyncio.Semaphore(AT_ONCE)

    async def scenario(node: Node, flavour: str) -> None:
        expected = snapshot.generate(mesh, node)
        wanted = {"CDS", "LDS"} | ({"RDS"} if expected.routes else set()) | ({"EDS"} if expected.endpoints else set())
        async with turns, run_envoy(mesh, node, flavour) as envoy:
            status = await envoy.acked(*wanted)
            assert all("error" not in t for t in status["types"].values()), json.dumps(status, indent=1)
            found = names(await envoy.config_dump())
            assert found["clusters"] == set(expected.clusters), node.name
            assert found["listeners"] == set(expected.listeners), node.name
            assert found["routes"] == set(expected.routes), node.name
            assert found["endpoints"] >= set(expected.endpoints), node.name  # and those of clusters without EDS

    async def all_of_them() -> None:
        async with asyncio.TaskGroup() as group:
            for node in nodes:
                for flavour in ("delta", "sotw"):
                    group.create_task(scenario(node, flavour))

    asyncio.run(all_of_them())

"""The cloud that the environment names (spec: agent 2.1, 6)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from agent.environment import Environment
from agent.node import Locality
from agent.platform import discover

STATIC = {"GCP_METADATA": "proj|123|clus|us-central1-c"}
EXPECTED = {
    "gcp_project": "proj",
    "gcp_project_number": "123",
    "gcp_gke_cluster_name": "clus",
    "gcp_location": "us-central1-c",
    "gcp_gke_cluster_url": "https://container.googleapis.com/v1/projects/proj/locations/us-central1-c/clusters/clus",
}
RESOLV = "nameserver 10.0.0.1\nsearch ns.svc.cluster.local us-central1-f.c.proj.internal google.internal\n"


@pytest.mark.parametrize(
    ("env", "metadata", "locality"),
    [
        ({}, {}, Locality()),
        (STATIC, EXPECTED, Locality("us-central1", "us-central1-f")),
        ({**STATIC, "CLOUD_PLATFORM": "GCP"}, EXPECTED, Locality("us-central1", "us-central1-f")),
        ({**STATIC, "CLOUD_PLATFORM": "moon"}, EXPECTED, Locality("us-central1", "us-central1-f")),
        ({**STATIC, "CLOUD_PLATFORM": "none"}, {}, Locality()),
        ({**STATIC, "CLOUD_PLATFORM": "aws"}, {}, Locality()),
        (
            {**STATIC, "GCP_QUOTA_PROJECT": "q", "GCP_ZONE": "europe-west1-b"},
            {**EXPECTED, "gcp_quota_project": "q", "gcp_zone": "europe-west1-b"},
            Locality("europe-west1", "europe-west1-b"),
        ),
        ({**STATIC, "GCP_ZONE": "nowhere"}, {**EXPECTED, "gcp_zone": "nowhere"}, Locality()),
        ({"GCP_METADATA": "only|three|parts"}, {}, Locality()),
        ({"GCP_QUOTA_PROJECT": "q"}, {}, Locality()),
    ],
)
def test_platforms(env: dict[str, str], metadata: dict[str, str], locality: Locality, tmp_path: Path) -> None:
    (tmp_path / "resolv.conf").write_text(RESOLV)
    found = discover(Environment(env), str(tmp_path / "resolv.conf"))
    assert (found.metadata, found.locality) == (metadata, locality)


@pytest.mark.parametrize("content", ["nameserver 10.0.0.1\n", None])
def test_a_zone_that_is_not_in_resolv_conf(
    content: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if content is not None:
        (tmp_path / "resolv.conf").write_text(content)
    found = discover(Environment(STATIC), str(tmp_path / "resolv.conf"))
    assert (found.metadata, found.locality) == (EXPECTED, Locality())
    assert "Failed to load the zone name of the pod from resolv.conf" in caplog.text


@pytest.mark.parametrize("name", ["aws", "azure", "gcp"])
def test_clouds_that_would_have_to_be_asked(name: str, caplog: pytest.LogCaptureFixture) -> None:
    assert discover(Environment({"CLOUD_PLATFORM": name})).metadata == {}
    assert f"CLOUD_PLATFORM is {name}, but the metadata server" in caplog.text


def test_the_platform_reaches_the_node(tmp_path: Path) -> None:
    env = {**STATIC, "GCP_ZONE": "us-west1-a"}
    labels = tmp_path / "etc/istio/pod/labels"
    for written, expected in (
        ("", {"region": "us-west1", "zone": "us-west1-a"}),
        ("r.z.s", {"region": "r", "zone": "z"}),
    ):
        labels.parent.mkdir(parents=True, exist_ok=True)
        labels.write_text(f'istio-locality="{written}"\n')
        command = [sys.executable, "-m", "agent", "proxy", "sidecar", "--dry-run"]
        path = ":".join(filter(None, sys.path))
        done = subprocess.run(
            command, cwd=tmp_path, env={"PYTHONPATH": path, **env}, capture_output=True, text=True, check=True
        )
        node = json.loads(done.stdout)["node"]
        assert node["metadata"]["PLATFORM_METADATA"] == EXPECTED | {"gcp_zone": "us-west1-a"}
        assert expected.items() <= node["locality"].items()

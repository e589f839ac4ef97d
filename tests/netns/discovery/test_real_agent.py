"""The real agent against the real control plane: TLS on 15012, a token, a certificate from the CA, a ready Envoy."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.root

TOPOLOGY = Path(__file__).parents[3] / "topologies" / "four-namespaces.yaml"


def test_agent_gets_its_certificate_and_its_configuration(tmp_path: Path) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare(1)")
    manifests = tmp_path / "manifests"
    manifests.mkdir()
    # the mesh defaults: auto-mTLS and PERMISSIVE
    text = TOPOLOGY.read_text().replace("enableAutoMtls: false", "enableAutoMtls: true")
    (manifests / "mesh.yaml").write_text(text.replace("{mtls: {mode: DISABLE}}", "{mtls: {mode: PERMISSIVE}}"))
    script = Path(__file__).with_name("agent_world.py")
    setup = 'ip link set lo up; ip addr add 10.0.1.5/32 dev lo; exec "$@"'
    done = subprocess.run(
        ["unshare", "--net", "--", "sh", "-c", setup, "sh", sys.executable, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr + (tmp_path / "agent.log").read_text()[-2000:]
    found = json.loads(done.stdout)
    assert found["settled"]
    assert found["proxy"]["nack"] is None
    assert {"CDS", "EDS", "LDS", "RDS"} <= set(found["proxy"]["types"])
    identities = {
        name["uri"]
        for certificate in found["certs"]["certificates"]
        for one in certificate["cert_chain"]
        for name in one.get("subject_alt_names", [])
        if "uri" in name
    }
    assert identities == {"spiffe://cluster.local/ns/frontend/sa/frontend"}
    assert "issued identity=spiffe://cluster.local/ns/frontend/sa/frontend" in (tmp_path / "discovery.log").read_text()

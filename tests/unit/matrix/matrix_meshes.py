"""Meshes for the tests of ``lab matrix`` and ``lab diff``."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from lab.explaining import MeshWorld
from lab.manifests.load import load
from lab.matrix.matrix import matrix
from lab.matrix.sides import Side

ROOT = Path(__file__).parents[3]
QUICKSTART = ROOT / "topologies" / "quickstart.yaml"
REGISTRY_ONLY = ROOT / "topologies" / "registry-only.yaml"

STRICT = """\
apiVersion: security.istio.io/v1
kind: PeerAuthentication
metadata: {name: default, namespace: catalog}
spec: {mtls: {mode: STRICT}}
"""
NARROW = """\
apiVersion: networking.istio.io/v1
kind: Sidecar
metadata: {name: default, namespace: frontend}
spec:
  outboundTrafficPolicy: {mode: REGISTRY_ONLY}
  egress: [{hosts: ["./*", "catalog/*"]}]
"""
NO_MTLS = """\
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: catalog, namespace: catalog}
spec: {host: catalog.catalog.svc.cluster.local, trafficPolicy: {tls: {mode: DISABLE}}}
"""
CANARY = """\
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: catalog, namespace: catalog}
spec:
  hosts: [catalog.catalog.svc.cluster.local]
  http:
  - name: split
    route:
    - {destination: {host: catalog.catalog.svc.cluster.local}, weight: 90}
    - {destination: {host: payments.payments.svc.cluster.local}, weight: 10}
"""


@lru_cache(maxsize=4)
def known(path: Path) -> Side:
    """The side of one file; what was predicted of it once is known."""
    return side(path)


def side(*files: Path | str, previous: Side | None = None) -> Side:
    before = previous.mesh if previous else None
    mesh = load([str(f) for f in files], before.name if before else None, before)
    return Side(", ".join(map(str, files)), MeshWorld(mesh))


def words(*files: Path | str) -> dict[tuple[str, str], str]:
    """The matrix of files: (source, label of the target) to the word that a table has."""
    found = matrix(side(*files).world)
    return {(cell.source, cell.target.label): cell.word for cell in found.cells}

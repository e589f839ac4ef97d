"""What no process can be started with is refused with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.cli import main
from lab.errors import InputError
from lab.manifests.executable import MAX_BYTES
from lab.manifests.load import load_text
from lab.manifests.model import Mesh

MANIFEST = """apiVersion: v1
kind: ConfigMap
metadata: {name: istio, namespace: istio-system}
data:
  mesh: |
    trustDomain: td
    MESH
---
apiVersion: v1
kind: Namespace
metadata: {name: shop, labels: {istio-injection: enabled}}
---
OBJECT
"""
POD = """apiVersion: v1
kind: Pod
metadata:
  name: web
  namespace: shop
  annotations:
    NOTE
spec:
  containers:
  - name: web
    ports: [{containerPort: 8080}]
    FIELD"""
DEPLOYMENT = """apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: shop}
spec:
  replicas: 3
  selector: {matchLabels: {app: web}}
  template:
    metadata:
      labels: {app: web}
      annotations:
        NOTE
    spec:
      containers:
      - name: web
        ports: [{containerPort: 8080}]
        FIELD"""


def loaded(where: str, text: str, written: str = POD) -> Mesh:
    """The text with its own indentation in the place of NOTE, FIELD or MESH."""
    whole = MANIFEST.replace("OBJECT", written)
    line = next(line for line in whole.splitlines() if line.strip() == where)
    indent = line.removesuffix(where)
    whole = whole.replace(where, text.replace("\n", "\n" + indent))
    for other, nothing in (("NOTE", "a: b"), ("FIELD", "image: web"), ("MESH", "accessLogFile: /x")):
        whole = whole.replace(other, nothing)
    return load_text(whole)


def line_of(where: str, more: int, written: str) -> int:
    whole = MANIFEST.replace("OBJECT", written)
    return next(n for n, line in enumerate(whole.splitlines(), 1) if line.strip() == where) + more


BIG = "x" * MAX_BYTES
HALF = "x" * 70_000


@pytest.mark.parametrize("written", [POD, DEPLOYMENT])
@pytest.mark.parametrize(
    ("where", "text", "more", "why"),
    [
        ("FIELD", 'env:\n- name: A\n  value: "a\\0b"', 2, "env[0].value: .*NUL"),
        ("FIELD", 'env:\n- name: "A=B"', 1, "env[0].name: .*printable ASCII"),
        ("FIELD", 'env:\n- name: "A\\0B"', 1, "env[0].name: .*printable ASCII"),
        ("FIELD", 'env:\n- name: "Ä"', 1, "env[0].name: .*printable ASCII"),
        ("FIELD", 'env:\n- name: ""', 1, "env[0].name: .*printable ASCII"),
        ("FIELD", 'command:\n- a\n- "\\0"', 2, "command[1]: .*NUL"),
        ("FIELD", 'args:\n- "\\0"', 1, "args[0]: .*NUL"),
        ("FIELD", 'workingDir: "/\\0"', 0, "workingDir: .*NUL"),
        ("FIELD", f"env:\n- name: A\n  value: {BIG}", 2, "bad value of env A: .*131,071 bytes, this makes 131,073"),
        ("FIELD", f"command:\n- a\n- {BIG}x", 2, r"bad command[1] of container web: .*this makes 131,072"),
        ("FIELD", f"command: [a]\nargs:\n- {BIG}x", 2, r"bad args[0] of container web: .*this makes 131,072"),
        ("FIELD", f"livenessProbe: {{tcpSocket: {{port: 1}}}}\nreadinessProbe: {{httpGet: {{port: 1, path: /{BIG}}}}}", 1, "ISTIO_KUBE_APP_PROBERS"),
        ("NOTE", f'prometheus.io/scrape: "true"\nprometheus.io/path: /{BIG}', 1, "ISTIO_PROMETHEUS_ANNOTATIONS"),
        ("NOTE", f"proxy.istio.io/config: |\n  concurrency: 1\n  proxyMetadata:\n    A: {HALF}\n    B: {HALF}", 2, "PROXY_CONFIG"),
        ("NOTE", f"proxy.istio.io/config: |\n  proxyMetadata:\n    A: b\n    B: {BIG}", 3, "variable B"),
        ("NOTE", 'proxy.istio.io/config: |\n  proxyMetadata:\n    A: "\\0"', 2, "proxyMetadata.A: .*NUL"),
        ("NOTE", 'proxy.istio.io/config: |\n  proxyMetadata:\n    "A=": b', 2, "bad value .A=. of .*printable ASCII"),
        ("NOTE", 'proxy.istio.io/config: |\n  proxyMetadata:\n    "": b', 2, "printable ASCII"),
        ("NOTE", 'proxy.istio.io/config: |\n  meshId: "\\0"', 1, "meshId: .*NUL"),
        ("NOTE", 'a: b\nsidecar.istio.io/logLevel: "info\\0"', 1, "argument of the sidecar: .*NUL"),
        ("MESH", f"defaultConfig:\n  proxyMetadata:\n    A: b\n    B: {BIG}", 3, "variable B"),
        ("MESH", f"defaultConfig:\n  concurrency: 1\n  serviceCluster: {BIG}", 2, "PROXY_CONFIG"),
        ("MESH", 'defaultConfig:\n  proxyMetadata:\n    "A=": b', 2, "bad value .A=. of .*printable ASCII"),
    ],
)  # fmt: skip
def test_it_is_refused_with_its_line(where: str, text: str, more: int, why: str, written: str) -> None:
    with pytest.raises(InputError, match=why.replace("[", r"\[")) as failure:
        loaded(where, text, written)
    first = str(failure.value).splitlines()[0]
    assert f":{line_of(where, more, written)}: " in first


@pytest.mark.parametrize(
    "text", [f"env:\n- name: A\n  value: {BIG[2:]}", f"command: [a, {BIG}]", 'env:\n- name: "any printable-name!"']
)
def test_what_linux_takes_is_taken(text: str) -> None:
    assert loaded("FIELD", text)


def test_what_is_written_for_the_whole_mesh_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = POD.replace("name: web\n  namespace", "name: other\n  namespace")
    whole = MANIFEST.replace("OBJECT", f"{POD}\n---\n{other}").replace("NOTE", "a: b").replace("FIELD", "image: web")
    file = tmp_path / "mesh.yaml"
    file.write_text(whole.replace("MESH", f"defaultConfig: {{proxyMetadata: {{B: {BIG}}}}}"))
    assert main(["validate", str(file)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert sum("variable B" in line for line in lines) == 1
    assert all(line.count("mesh.yaml:7: ") == 1 for line in lines)

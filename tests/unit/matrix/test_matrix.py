"""Who reaches whom, and how: the fields of a matrix, what is in it, and how it is shown."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from matrix_meshes import CANARY, NO_MTLS, QUICKSTART, REGISTRY_ONLY, ROOT, STRICT, known, side, words

from lab import asking
from lab.errors import InputError
from lab.explain import compare
from lab.explaining import MeshWorld, predict
from lab.manifests.load import load, load_text
from lab.matrix import table
from lab.matrix.matrix import Matrix, as_test, matrix, sources
from lab.matrix.targets import chosen, targets

MESHED = ("frontend.frontend", "catalog.catalog", "payments.payments", "tracing.observability")


@pytest.fixture(scope="module")
def quickstart() -> Matrix:
    return matrix(known(QUICKSTART).world)


@pytest.fixture(scope="module")
def told(quickstart: Matrix) -> dict[tuple[str, str], str]:
    return {(cell.source, cell.target.label): cell.word for cell in quickstart.cells}


def test_every_pod_meets_every_service_pod_and_host_outside(quickstart: Matrix) -> None:
    assert [source.name for source in quickstart.sources] == [*MESHED, "legacy.legacy"]
    assert [(t.label, t.protocol, t.declared) for t in quickstart.targets] == [
        ("frontend.frontend:8080", "http", None),
        ("catalog.catalog:8080", "http", None),
        ("payments.payments:8080", "http", None),
        ("tracing.observability:4317", "grpc", None),
        ("legacy.legacy:8080", "http", None),
        ("pod frontend.frontend:8080", "http", None),
        ("pod catalog.catalog:8080", "http", None),
        ("pod catalog.catalog:9090", "http", None),
        ("pod payments.payments:8080", "http", None),
        ("pod tracing.observability:4317", "grpc", None),
        ("pod legacy.legacy:8080", "http", None),
        ("api.vendor.example:80", "http", True),
        ("api.vendor.example:443", "tls", True),
        ("api.vendor.example:9000", "tcp", False),
        ("api.vendor.example:9001", "udp", False),
        ("unknown.example:80", "http", False),
        ("unknown.example:443", "tls", False),
        ("unknown.example:8081", "http", False),
        ("unknown.example:9000", "tcp", False),
        ("unknown.example:9001", "udp", False),
    ]
    pairs = [(cell.source, cell.target) for cell in quickstart.cells]
    assert pairs == [(s.name, t) for s in quickstart.sources for t in quickstart.targets]


@pytest.mark.parametrize("client", MESHED)
def test_a_pod_with_a_proxy(client: str, told: dict[tuple[str, str], str]) -> None:
    assert told[client, "catalog.catalog:8080"] == "mTLS"
    assert told[client, "legacy.legacy:8080"] == "plaintext"
    assert told[client, "pod legacy.legacy:8080"] == "passthrough"
    assert told[client, "api.vendor.example:80"] == "plaintext"
    assert told[client, "api.vendor.example:443"] == "TLS"
    assert told[client, "unknown.example:80"] == "passthrough"
    assert told[client, "unknown.example:9001"] == "direct"
    # The port is not declared, so that the name's automatic address leads nowhere.
    assert told[client, "api.vendor.example:9000"].startswith("failed")


def test_what_is_not_captured_is_direct(told: dict[tuple[str, str], str]) -> None:
    assert {word for (source, _), word in told.items() if source == "legacy.legacy"} == {"direct"}
    assert told["payments.payments", "unknown.example:9000"] == "direct"  # an excluded port
    assert told["frontend.frontend", "unknown.example:9000"] == "passthrough"
    assert told["catalog.catalog", "pod catalog.catalog:8080"] == "direct"  # its own address


def test_registry_only_blocks_and_says_how() -> None:
    found = words(REGISTRY_ONLY)
    assert found["frontend.frontend", "unknown.example:80"] == "blocked 502"
    assert found["frontend.frontend", "unknown.example:443"] == "blocked closed UH"
    assert found["frontend.frontend", "catalog.catalog:8080"] == "mTLS"
    assert found["legacy.legacy", "unknown.example:80"] == "direct"


def test_strict_blocks_at_the_far_proxy(tmp_path: Path) -> None:
    (tmp_path / "strict.yaml").write_text(STRICT)
    found = words(QUICKSTART, tmp_path / "strict.yaml")
    assert found["legacy.legacy", "catalog.catalog:8080"] == "blocked closed NR at catalog.catalog"
    assert found["legacy.legacy", "payments.payments:8080"] == "direct"
    assert found["frontend.frontend", "catalog.catalog:8080"] == "mTLS"
    assert found["frontend.frontend", "pod catalog.catalog:8080"].endswith("NR at catalog.catalog")


def test_a_rule_that_turns_tls_off_is_seen(tmp_path: Path) -> None:
    (tmp_path / "rule.yaml").write_text(NO_MTLS)
    found = words(QUICKSTART, tmp_path / "rule.yaml")
    assert found["frontend.frontend", "catalog.catalog:8080"] == "plaintext"
    assert found["frontend.frontend", "payments.payments:8080"] == "mTLS"


def test_weights_name_every_cluster(tmp_path: Path) -> None:
    (tmp_path / "canary.yaml").write_text(CANARY)
    found = matrix(side(QUICKSTART, tmp_path / "canary.yaml").world, ["frontend.frontend"], ["catalog.catalog"])
    cell = found.cells[0]
    assert (cell.word, cell.reaches) == ("mTLS", True)
    assert (
        cell.via
        == "outbound|8080||catalog.catalog.svc.cluster.local or outbound|8080||payments.payments.svc.cluster.local"
    )
    assert [course["chance"] for course in cell.to_json()["courses"]] == [0.9, 0.1]


def test_what_is_not_the_same_each_time_names_its_ways() -> None:
    """A headless service leads to its client's own pod, past the proxy, or to the other one."""
    found = matrix(known(ROOT / "topologies" / "headless.yaml").world, ["db-0.data"], ["db.data:9000"])
    (cell,) = found.cells
    assert (cell.how, cell.reaches, cell.word) == ("undecided", True, "direct or plaintext")
    assert cell.to_json()["ways"] == ["direct", "plaintext"]


def test_an_unknown_host_that_is_looked_up_by_its_header_is_passed_through() -> None:
    found = words(ROOT / "topologies" / "allow-any-dynamic-dns.yaml")
    assert found["client.shop", "other.example:80"] == "passthrough"


def test_a_field_is_the_verdict_that_explain_gives(quickstart: Matrix) -> None:
    """Not a second opinion: the question that `lab explain` asks gets the same answer."""
    mesh = load([QUICKSTART])
    for cell in quickstart.cells[::7]:
        to = f"{cell.target.host}:{cell.target.port}"
        question = asking.Question(to=to, source=cell.source, protocol=cell.target.protocol)
        asked = asking.of_mesh(mesh, question, changes=False)
        assert compare.differences(cell.verdict, asked.verdict) == []
        assert asked.to_json()["sentence"] == cell.sentence


@pytest.mark.parametrize("name", ["result-matrix", "virtual-service", "dual-stack", "service-entries"])
def test_shared_work_changes_no_verdict(name: str) -> None:
    """A field that is predicted alone, by a world of its own, is the same."""
    mesh = load([ROOT / "topologies" / f"{name}.yaml"])
    found = matrix(MeshWorld(mesh))
    assert len(found.cells) == len(mesh.pods) * len(targets(mesh))
    by_name = {source.name: source for source in found.sources}
    for cell in found.cells[:: max(1, len(found.cells) // 5)]:
        alone = predict(MeshWorld(mesh), as_test(by_name[cell.source], cell.target))
        assert alone.verdict == cell.verdict


def test_what_is_asked_for_can_be_named() -> None:
    mesh = load([QUICKSTART])
    every = targets(mesh)

    def names(*wanted: str) -> list[str]:
        return [target.label for target in chosen(every, wanted)]

    assert names("catalog.catalog:8080") == ["catalog.catalog:8080", "pod catalog.catalog:8080"]
    assert names("catalog/catalog") == ["catalog.catalog:8080", "pod catalog.catalog:8080", "pod catalog.catalog:9090"]
    assert names("catalog.catalog.svc.cluster.local") == ["catalog.catalog:8080"]
    assert names("unknown.example:443", "legacy.legacy") == [
        "legacy.legacy:8080",
        "pod legacy.legacy:8080",
        "unknown.example:443",
    ]
    assert names("*.example:80") == ["api.vendor.example:80", "unknown.example:80"]
    assert [s.name for s in sources(mesh, ["catalog/catalog", "unknown"])] == ["catalog.catalog", "unknown"]
    with pytest.raises(InputError, match=r"--to nowhere: nothing in the mesh is called so; there are: frontend"):
        names("nowhere")
    with pytest.raises(InputError, match=r"--from nobody: no pod and no ExternalHost"):
        sources(mesh, ["nobody"])


def test_a_host_outside_can_be_a_source() -> None:
    found = matrix(known(QUICKSTART).world, ["unknown"], ["catalog.catalog"])
    assert {cell.word for cell in found.cells} == {"direct"}
    assert {cell.far_captured for cell in found.cells} == {True}


ODD = """\
apiVersion: v1
kind: Namespace
metadata: {name: shop, labels: {istio-injection: enabled}}
---
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: shop}
spec: {containers: [{name: app}]}
---
apiVersion: v1
kind: Service
metadata: {name: alias, namespace: shop}
spec: {type: ExternalName, externalName: machine.example}
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: declared, namespace: shop}
spec:
  hosts: [nobody.example, "*.wild.example"]
  resolution: NONE
  ports: [{number: 80, name: http, protocol: HTTP}]
---
apiVersion: sidecarlab.dev/v1alpha1
kind: ExternalHost
metadata: {name: machine}
spec: {hosts: [machine.example, a.wild.example], ports: [{port: 80, protocol: http}, {port: 5000, protocol: tcp}]}
"""


def test_aliases_and_declared_hosts_without_a_machine_are_targets_too() -> None:
    found = {(t.kind, t.label, t.declared) for t in targets(load_text(ODD))}
    assert found == {
        ("service", "alias.shop:80", None),
        ("service", "alias.shop:5000", None),
        ("external", "machine.example:80", False),
        ("external", "machine.example:5000", False),
        ("external", "a.wild.example:80", True),
        ("external", "a.wild.example:5000", False),
        ("external", "nobody.example:80", True),
    }


# --- as it is shown ---------------------------------------------------------------------------


def shown(found: Matrix, width: int) -> list[str]:
    return [click.unstyle(line).rstrip() for line in table.lines(found, width)]


def test_a_matrix_that_fits_is_a_table(quickstart: Matrix) -> None:
    lines = shown(quickstart, 200)
    assert lines[0].split() == ["TO", *(source.name for source in quickstart.sources)]
    (row,) = [line for line in lines if line.startswith("legacy.legacy:8080 (http)")]
    assert row.split()[2:] == ["plaintext", "plaintext", "plaintext", "plaintext", "direct"]
    rows = lines[1 : lines.index("")]
    assert len(rows) == len(quickstart.targets)
    starts = [[m.start() for m in re.finditer(r"(?<=  )\S", line)] for line in (lines[0], row)]
    assert starts[0] == starts[1]


def test_a_matrix_that_does_not_fit_is_told_target_by_target(quickstart: Matrix) -> None:
    lines = shown(quickstart, 80)
    assert max(map(len, lines[: lines.index("")])) <= 80
    at = lines.index("catalog.catalog:8080 (http)")
    assert lines[at + 1] == "  mTLS                frontend.frontend, catalog.catalog, payments.payments,"
    assert lines[at + 2] == "                      tracing.observability"
    assert lines[at + 3] == "  direct (plaintext)  legacy.legacy"
    every = lines[lines.index("unknown.example:9001 (udp)") + 1]
    assert every == "  direct (plaintext)  all 5"


def test_the_many_of_a_wide_matrix_are_told_last_and_not_by_name() -> None:
    pods = "".join(
        f"---\napiVersion: v1\nkind: Pod\nmetadata: {{name: p{n}, namespace: shop}}\nspec: {{containers: [{{name: app}}]}}\n"
        for n in range(9)
    )
    mesh = load_text(ODD + pods + "status: {podIP: 10.244.9.9}\n")
    lines = shown(matrix(MeshWorld(mesh), wanted_to=["nobody.example"]), 60)
    assert lines[:2] == ["nobody.example:80 (http)", "  failed unreachable  all 10"]


@pytest.mark.parametrize("width", [40, 80, 200, 1000])
def test_a_summary_counts_every_field_once(quickstart: Matrix, width: int) -> None:
    line = next(line for line in shown(quickstart, width) if line.startswith("quickstart: "))
    assert sum(map(int, re.findall(r"(\d+) (?!sources?|targets?)", line))) == len(quickstart.cells)


def lab(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lab", *args], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )


FIELD = {
    "from", "to", "how", "ways", "reaches", "wire", "captured", "listener", "route", "virtual_host", "cluster", "endpoint", "far",
    "blocked_by", "result", "status", "grpc_status", "flags", "courses", "undecided", "sentence",
}  # fmt: skip


def test_json_has_the_shape_that_is_documented() -> None:
    done = lab(
        "matrix", "topologies/registry-only.yaml", "--from", "frontend.frontend", "--to", "unknown.example:80", "--json"
    )
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document["name"] == "registry-only"
    assert document["source"] == "manifests"
    assert document["from"] == [{"pod": "frontend.frontend", "external": None, "meshed": True}]
    target = {"kind": "external", "name": "unknown.example", "host": "unknown.example", "port": 80, "protocol": "http"}
    assert document["to"] == [{**target, "declared": False}]
    (field,) = document["cells"]
    assert set(field) == FIELD
    assert field["to"] == {**target, "declared": False, "address": "203.0.113.20"}
    assert (field["how"], field["reaches"], field["captured"], field["blocked_by"]) == (
        "blocked",
        False,
        True,
        "frontend.frontend",
    )
    assert (field["result"], field["status"], field["virtual_host"]) == ("http-error", 502, "block_all")
    assert set(re.findall(r"`(\w+)`", (ROOT / "docs/reference.md").read_text())) >= FIELD


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("nowhere",), 'no lab that runs and no file is called "nowhere"'),
        (("nowhere.yaml",), "no such file: nowhere.yaml"),
        (("topologies/quickstart.yaml", "--to", "nowhere"), "--to nowhere: nothing in the mesh is called so"),
        (("topologies/quickstart.yaml", "--from", "nobody"), "--from nobody: no pod and no ExternalHost is called so"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(args: tuple[str, ...], words: str) -> None:
    done = lab("matrix", *args)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {words}")
    assert done.stderr.count("\n") == 1

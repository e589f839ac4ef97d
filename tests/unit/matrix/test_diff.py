"""What a change of manifests changes: flows, pushes, pods; against what TrafficTests expect of either side."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import click
import pytest
from matrix_meshes import CANARY, NARROW, NO_MTLS, QUICKSTART, REGISTRY_ONLY, ROOT, STRICT, known, side

from lab.manifests.model import Mesh
from lab.matrix import difference
from lab.matrix.changes import KINDS, Change, Kind
from lab.matrix.difference import Difference
from lab.matrix.matrix import matrix

MESHED = ("frontend.frontend", "catalog.catalog", "payments.payments", "tracing.observability")
Flow = tuple[str, str, int, str]


def compared(old: Sequence[Path], new: Sequence[Path]) -> Difference:
    before = known(*old) if len(old) == 1 else side(*old)
    return difference.between(before, side(*new, previous=before))


def text_of(found: Difference) -> str:
    return click.unstyle("\n".join(found.lines(1000)))


def flows(changes: Iterable[Change]) -> set[Flow]:
    return {(c.source, c.target.host, c.target.port, c.target.protocol) for c in changes}


@pytest.fixture(scope="module")
def registry_only() -> Difference:
    return compared([QUICKSTART], [REGISTRY_ONLY])


def expected(mesh: Mesh) -> dict[Flow, bool]:
    """Which flows to a host outside the TrafficTests of a mesh expect to work, sent as the app."""
    found = {}
    for test in mesh.tests:
        result = test.expect.get("outcome")
        if isinstance(result, Mapping) and test.flow_from.pod and test.flow_from.uid == 1000:
            found[test.flow_from.pod, test.to.host, test.to.port, test.to.protocol] = result["result"] == "ok"
    return found


def test_registry_only_breaks_just_what_the_tests_of_both_sides_say(registry_only: Difference) -> None:
    before, after = expected(registry_only.before.mesh), expected(registry_only.after.mesh)
    both = before.keys() & after.keys()
    told = {flow for flow in both if before[flow] and not after[flow]}
    assert told == {
        ("frontend.frontend", "unknown.example", 80, "http"),
        ("frontend.frontend", "unknown.example", 443, "tls"),
        ("frontend.frontend", "unknown.example", 9000, "tcp"),
        ("frontend.frontend", "unknown.example", 8081, "http"),
    }
    breaks = flows(registry_only.flows.of("breaks"))
    assert breaks & both == told
    # Beyond what the tests send: whatever went through PassthroughCluster, and nothing else.
    passed = {
        (cell.source, cell.target.host, cell.target.port, cell.target.protocol)
        for cell in matrix(registry_only.before.world).cells
        if cell.cluster == "PassthroughCluster" and cell.reaches
    }
    assert breaks == passed
    assert not registry_only.flows.of("opens")
    assert flows(registry_only.flows.of("fails-otherwise")) == {
        *((pod, "api.vendor.example", 9000, "tcp") for pod in MESHED if pod != "payments.payments"),
        ("frontend.frontend", "unknown.example", 80, "tcp"),  # a test of the second side alone
    }
    assert {change.kind for change in registry_only.flows.changes} == {"breaks", "fails-otherwise"}


def test_a_change_names_the_tests_that_send_it(registry_only: Difference) -> None:
    named = {name for change in registry_only.flows.of("breaks") for name in change.tests}
    assert named == {
        f"unknown-host-{what}{end}"
        for what in ("http", "tls", "tcp", "http-without-listener")
        for end in ("", "-is-blocked")
    }


def test_registry_only_pushes_what_holds_the_policy(registry_only: Difference) -> None:
    assert {(p.proxy, p.type) for p in registry_only.pushed} == {(pod, t) for pod in MESHED for t in ("LDS", "RDS")}
    for push in registry_only.pushed:
        assert push.added == push.removed == ()
        assert ("virtualOutbound" in push.changed) == (push.type == "LDS")
    assert not registry_only.places


def overlaid(tmp_path: Path, text: str) -> Difference:
    (tmp_path / "more.yaml").write_text(text)
    return compared([QUICKSTART], [QUICKSTART, tmp_path / "more.yaml"])


def test_strict_breaks_whoever_has_no_proxy_and_whoever_goes_past_the_service(tmp_path: Path) -> None:
    found = overlaid(tmp_path, STRICT)
    assert [str(ref) for ref in found.objects.added] == ["PeerAuthentication catalog/default"]
    breaks = found.flows.of("breaks")
    assert {(c.source, c.target.label) for c in breaks if c.target.kind == "service"} == {
        ("legacy.legacy", "catalog.catalog:8080")
    }
    assert {c.target.label for c in breaks if c.target.kind == "pod"} == {
        "pod catalog.catalog:8080",
        "pod catalog.catalog:9090",
    }
    assert {c.after.blocked_by for c in breaks if c.after} == {"catalog.catalog"}
    # What had mTLS has it still. TrafficTests are compared, too: to a port on which nothing listens it fails earlier.
    assert {c.kind for c in found.flows.changes} == {"breaks", "fails-otherwise"}
    assert {c.tests for c in found.flows.of("fails-otherwise")} == {("port-that-no-container-declares",)}
    named = {name for c in breaks for name in c.tests}
    assert {"no-sidecar-to-catalog", "port-without-service", "from-outside-to-a-pod"} <= named
    assert {p.proxy for p in found.pushed if p.type == "LDS"} == {"catalog.catalog"}


def test_a_sidecar_that_imports_less_breaks_what_it_leaves_out(tmp_path: Path) -> None:
    found = overlaid(tmp_path, NARROW)
    assert {c.source for c in found.flows.changes} == {"frontend.frontend"}
    breaks = {c.target.label for c in found.flows.of("breaks") if c.target.kind != "test"}
    assert breaks == {
        "payments.payments:8080",
        "tracing.observability:4317",
        "legacy.legacy:8080",
        "pod catalog.catalog:8080",
        "pod catalog.catalog:9090",
        "pod payments.payments:8080",
        "pod tracing.observability:4317",
        "pod legacy.legacy:8080",
        "api.vendor.example:80",
        "api.vendor.example:443",
        "unknown.example:80",
        "unknown.example:443",
        "unknown.example:8081",
        "unknown.example:9000",
    }
    cds = next(p for p in found.pushed if p.type == "CDS")
    assert cds.proxy == "frontend.frontend"
    assert "outbound|8080||payments.payments.svc.cluster.local" in cds.removed
    assert cds.added == ()
    # Its pods go on: a Sidecar is news to discovery alone.
    assert not found.places


def test_an_export_that_is_narrowed_is_a_route_less(tmp_path: Path) -> None:
    text = QUICKSTART.read_text()
    whole = "metadata: {name: catalog, namespace: catalog}\nspec:\n  clusterIP"
    assert text.count(whole) == 1
    narrow = whole.replace("catalog}", 'catalog, annotations: {networking.istio.io/exportTo: "payments"}}')
    (tmp_path / "mesh.yaml").write_text(text.replace(whole, narrow))
    found = compared([QUICKSTART], [tmp_path / "mesh.yaml"])
    assert [str(ref) for ref in found.objects.changed] == ["Service catalog/catalog"]
    exposed = found.flows.of("exposes")
    # Under ALLOW_ANY it still works, but past the mesh: no mTLS.
    assert {(c.source, c.target.label) for c in exposed if c.target.kind == "service"} == {
        (pod, "catalog.catalog:8080") for pod in MESHED if pod != "payments.payments"
    }
    assert {(c.before.word, c.after.word) for c in exposed if c.before and c.after} == {("mTLS", "passthrough")}
    assert not [c for c in found.flows.changes if c.source == "payments.payments"]


def test_mtls_that_comes_back_secures(tmp_path: Path) -> None:
    (tmp_path / "rule.yaml").write_text(NO_MTLS)
    found = compared([QUICKSTART, tmp_path / "rule.yaml"], [QUICKSTART])
    assert {c.kind for c in found.flows.changes} == {"secures"}
    assert {c.source for c in found.flows.changes} == set(MESHED)
    lines = text_of(found).splitlines()
    assert any(line.endswith("catalog.catalog:8080 (http): plaintext | mTLS  [catalog-through-mesh]") for line in lines)


def test_another_cluster_is_another_way(tmp_path: Path) -> None:
    found = overlaid(tmp_path, CANARY)
    assert {c.kind for c in found.flows.changes} == {"reroutes"}
    change = found.flows.changes[0]
    keys = {key for key, _, _ in change.differences}
    assert {"cluster", "courses", "route"} <= keys


def test_other_weights_are_another_way_too(tmp_path: Path) -> None:
    one, other = tmp_path / "one.yaml", tmp_path / "other.yaml"
    one.write_text(CANARY)
    other.write_text(CANARY.replace("weight: 90", "weight: 50").replace("weight: 10", "weight: 50"))
    found = compared([QUICKSTART, one], [QUICKSTART, other])
    assert {c.kind for c in found.flows.changes} == {"reroutes"}
    assert {key for c in found.flows.changes for key, _, _ in c.differences} == {"courses"}
    text = text_of(found)
    assert "90% outbound|8080||catalog" in text
    assert "50% outbound|8080||payments" in text


MORE = """\
apiVersion: v1
kind: Pod
metadata: {name: extra, namespace: payments, labels: {app: extra}}
spec: {containers: [{name: app, ports: [{name: http, containerPort: 8080}]}]}
---
apiVersion: v1
kind: Service
metadata: {name: extra, namespace: payments}
spec: {selector: {app: extra}, ports: [{name: http, port: 8080}]}
"""


def test_a_pod_and_a_service_more_are_new_flows_and_move_nobody(tmp_path: Path) -> None:
    found = overlaid(tmp_path, MORE)
    assert [str(ref) for ref in found.objects.added] == ["Pod payments/extra", "Service payments/extra"]
    assert {c.kind for c in found.flows.changes} == {"new"}
    assert {c.target.label for c in found.flows.changes if c.source != "extra.payments"} == {
        "extra.payments:8080",
        "pod extra.payments:8080",
    }
    assert found.places.added == ("extra.payments",)
    lines = text_of(found).splitlines()
    assert [line for line in lines if "flows, " in line] == [
        "  to extra.payments:8080 (http): 5 flows, all of which work",
        "  to pod extra.payments:8080 (http): 5 flows, all of which work",
        "  from extra.payments: 22 flows, 20 of which work",
    ]
    back = compared([QUICKSTART, tmp_path / "more.yaml"], [QUICKSTART])
    assert {c.kind for c in back.flows.changes} == {"gone"}
    assert {c.after for c in back.flows.changes} == {None}


def test_two_meshes_that_share_nothing_are_all_new_and_gone() -> None:
    """No flow is made up between a pod of one side and a target of the other."""
    old, new = known(QUICKSTART), known(ROOT / "topologies" / "mtls-strict.yaml")
    found = difference.between(old, new)
    counts = {kind: len(found.flows.of(kind)) for kind in KINDS}
    fields = [len(matrix(side.world).cells) for side in (old, new)]
    assert {kind for kind, count in counts.items() if count} == {"new", "gone"}
    assert counts["gone"] >= fields[0]
    assert counts["new"] >= fields[1]
    assert counts["gone"] + counts["new"] == found.flows.compared
    assert text_of(found).endswith(f"{found.flows.compared} of {found.flows.compared} flows differ")


def test_what_starts_again_is_named(tmp_path: Path) -> None:
    text = QUICKSTART.read_text()
    assert text.count('excludeOutboundPorts: "9000"') == 1
    (tmp_path / "mesh.yaml").write_text(text.replace('excludeOutboundPorts: "9000"', 'excludeOutboundPorts: "9002"'))
    found = compared([QUICKSTART], [tmp_path / "mesh.yaml"])
    assert found.places.replaced == ("payments.payments",)
    assert "would start again: payments.payments" in text_of(found)
    change = next(c for c in found.flows.changes if c.target.label == "unknown.example:9000")
    assert (change.kind, change.before and change.before.word, change.after and change.after.word) == (
        "reroutes",
        "direct",
        "passthrough",
    )


@pytest.mark.parametrize("path", [QUICKSTART, REGISTRY_ONLY])
def test_no_change_is_no_difference(path: Path) -> None:
    found = compared([path], [path])
    assert not found
    assert list(found.lines(80)) == ["no difference"]


def test_nothing_differs_where_only_the_text_does(tmp_path: Path) -> None:
    """Comments and moved lines: the flows are compared all the same where a lab runs, so they must be equal then, too."""
    (tmp_path / "mesh.yaml").write_text("# moved by a line\n" + QUICKSTART.read_text())
    assert not compared([QUICKSTART], [tmp_path / "mesh.yaml"])


# --- as a command -----------------------------------------------------------------------------


def lab(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lab", "diff", *args], capture_output=True, text=True, timeout=100, check=False, cwd=ROOT
    )


def test_the_command_says_before_and_after_and_its_code_is_that_of_diff(tmp_path: Path) -> None:
    (tmp_path / "strict.yaml").write_text(STRICT)
    done = lab("topologies/quickstart.yaml", f"topologies/quickstart.yaml,{tmp_path}/strict.yaml")
    assert (done.returncode, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "+ PeerAuthentication catalog/default"
    assert (
        "  legacy.legacy -> catalog.catalog:8080 (http): direct (plaintext) | blocked closed NR at catalog.catalog"
        "  [no-sidecar-to-catalog]"
    ) in lines
    same = lab("topologies/quickstart.yaml", "topologies/quickstart.yaml")
    assert (same.returncode, same.stdout) == (0, "no difference\n")
    bad = lab("topologies/quickstart.yaml", "nowhere")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr == 'error: no lab that runs and no file is called "nowhere". See `lab ls`, or give a FILE\n'


def test_json_has_the_shape_that_is_documented(tmp_path: Path) -> None:
    document = json.loads(json.dumps(overlaid(tmp_path, STRICT).to_json()))
    assert set(document) == {"before", "after", "equal", "objects", "flows", "changes", "pushes", "places"}
    assert document["equal"] is False
    assert document["before"] == {"name": str(QUICKSTART), "source": "manifests"}
    assert document["objects"]["added"] == [{"kind": "PeerAuthentication", "namespace": "catalog", "name": "default"}]
    change = next(c for c in document["changes"] if c["to"]["kind"] == "service")
    assert set(change) == {"kind", "from", "uid", "to", "tests", "before", "after", "differences"}
    assert (change["kind"], change["from"], change["before"]["how"], change["after"]["how"]) == (
        "breaks",
        "legacy.legacy",
        "direct",
        "blocked",
    )
    assert {"key": "how", "before": "direct", "after": "blocked"} in change["differences"]
    assert document["flows"]["different"] == len(document["changes"])
    assert all(set(push) == {"proxy", "type", "added", "removed", "changed"} for push in document["pushes"])
    reference = (ROOT / "docs/reference.md").read_text()
    told = set(re.findall(r"`([\w-]+)`", reference))
    kinds: tuple[Kind, ...] = KINDS
    assert {*document, *change, *kinds} <= told

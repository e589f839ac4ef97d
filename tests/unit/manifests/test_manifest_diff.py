"""What lies between two meshes, and manifests laid over others."""

from __future__ import annotations

import pytest

from lab.manifests import diff
from lab.manifests.diff import Ref
from lab.manifests.document import parse
from lab.manifests.load import load_text, load_texts
from lab.manifests.merge import merge

CONFIG = """
apiVersion: v1
kind: ConfigMap
metadata: {name: istio, namespace: istio-system}
data:
  mesh: |
    outboundTrafficPolicy: {mode: ALLOW_ANY}
"""
SHOP = """
apiVersion: v1
kind: Namespace
metadata: {name: shop, labels: {istio-injection: enabled}}
"""
WEB = """
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: shop, labels: {app: web}}
spec: {containers: [{name: app, ports: [{name: http, containerPort: 8080}]}]}
"""
SERVICE = """
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {selector: {app: web}, ports: [{name: http, port: 8080}]}
"""
DB = WEB.replace("web", "db")


def joined(*documents: str) -> str:
    return "---".join(documents)


def test_nothing_lies_between_the_same_objects_in_other_lines_and_another_order() -> None:
    old = load_text(joined(CONFIG, SHOP, WEB, DB))
    new = load_text(joined("\n# a comment\n" + SHOP, "\n" + CONFIG, DB, WEB))
    pinned = load_texts([("-", joined("\n# a comment\n" + SHOP, "\n" + CONFIG, DB, WEB))], "lab", old)
    assert not diff.between(old, pinned)
    assert diff.between(old, new).changed == (Ref("Pod", "shop", "db"), Ref("Pod", "shop", "web")), "addresses changed"


def test_each_object_is_added_removed_or_changed() -> None:
    old = load_text(joined(CONFIG, SHOP, WEB, SERVICE))
    new = load_text(joined(CONFIG.replace("ALLOW_ANY", "REGISTRY_ONLY"), SHOP, DB, SERVICE.replace("8080", "9090")))
    found = diff.between(old, new)
    assert found.added == (Ref("Pod", "shop", "db"),)
    assert found.removed == (Ref("Pod", "shop", "web"),)
    assert found.changed == (Ref("MeshConfig", "", "mesh"), Ref("Service", "shop", "web"))
    assert found.to_json()["added"] == [{"kind": "Pod", "namespace": "shop", "name": "db"}]
    assert str(found.changed[1]) == "Service shop/web"


def objects(texts: list[tuple[str, str]]) -> list[tuple[str, str, int]]:
    return [(str(document["kind"]), file, document.line) for file, text in texts for document in parse(text, file)]


def test_a_replaced_object_leaves_its_lines_and_all_others_keep_theirs() -> None:
    current = [("a", joined(SHOP, WEB, SERVICE))]
    merged = merge(current, [("b", WEB.replace("8080", "9090"))])
    assert objects(merged) == [
        *(found for found in objects(current) if found[0] != "Pod"),
        ("Pod", "b", 2),
    ]
    assert "8080" in merged[0][1], "the service's port"
    assert "Pod" not in merged[0][1]


@pytest.mark.parametrize("header", ["apiVersion: v1\nkind: Pod\n", "--- {kind: Pod, apiVersion: v1, "])
def test_the_namespace_and_the_kind_are_part_of_the_name(header: str) -> None:
    other = (
        header + "metadata: {name: web, namespace: other}}\n"
        if header.endswith(", ")
        else header + "metadata: {name: web, namespace: other}\n"
    )
    current = [("a", joined(WEB, SERVICE))]
    merged = merge(current, [("b", other)])
    assert merged == [*current, ("b", other)]


def test_an_object_without_a_namespace_lives_in_default() -> None:
    written = WEB.replace("namespace: shop", "namespace: default")
    assert merge([("a", written)], [("b", WEB.replace(", namespace: shop", ""))]) == [
        ("b", WEB.replace(", namespace: shop", ""))
    ]


def test_a_file_that_holds_nothing_any_more_is_gone_and_applying_twice_is_the_same() -> None:
    first = merge([("a", joined(SHOP, WEB))], [("b", SERVICE)])
    assert merge(first, [("b2", SERVICE)]) == [first[0], ("b2", SERVICE)]


def test_an_item_of_a_list_is_replaced_alone() -> None:
    indented = [f"- {text.strip()}".replace("\n", "\n  ") for text in (WEB, SERVICE)]
    listed = "apiVersion: v1\nkind: List\nitems:\n" + "\n".join(indented) + "\n"
    merged = merge([("a", joined(SHOP, "\n" + listed, DB))], [("b", WEB)])
    kinds = [kind for kind, _, _ in objects(merged)]
    assert kinds == ["Namespace", "List", "Pod", "Pod"]
    (left,) = [d for d in parse(merged[0][1], "a") if d["kind"] == "List"]
    assert [item["kind"] for item in left["items"]] == ["Service"]  # type: ignore[index, attr-defined]
    assert load_texts(merged, "lab").pod("web.shop") is not None

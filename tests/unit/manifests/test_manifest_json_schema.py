"""The JSON Schema of our own kinds, held against what the loader accepts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lab.manifests.document import parse, plain
from lab.manifests.schema import json_schema

TOPOLOGIES = Path(__file__).parents[3] / "topologies"


def problems(schema: dict[str, Any], root: dict[str, Any], value: Any, path: str = "$") -> list[str]:
    """What a value lacks, by the few keywords that the schema uses."""
    if "$ref" in schema:
        return problems(root["$defs"][schema["$ref"].rpartition("/")[2]], root, value, path)
    if "const" in schema:
        return [] if value == schema["const"] else [f"{path}: not {schema['const']}"]
    if "enum" in schema:
        return [] if value in schema["enum"] else [f"{path}: not one of {schema['enum']}"]
    if "anyOf" in schema:
        tried = [problems(option, root, value, path) for option in schema["anyOf"]]
        return [] if [] in tried else tried[0]
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float)}
    wanted = schema.get("type")
    if wanted == "null":
        return [] if value is None else [f"{path}: not null"]
    if wanted and (not isinstance(value, kinds[wanted]) or (isinstance(value, bool) and wanted != "boolean")):
        return [f"{path}: not {wanted}"]
    found: list[str] = []
    if wanted == "object":
        known = schema.get("properties", {})
        found += [f"{path}: no {name}" for name in schema.get("required", []) if name not in value]
        for name, item in value.items():
            if name in known:
                found += problems(known[name], root, item, f"{path}.{name}")
            elif schema.get("additionalProperties") is False:
                found.append(f"{path}: unknown {name}")
    elif wanted == "array":
        for index, item in enumerate(value):
            found += problems(schema.get("items", {}), root, item, f"{path}[{index}]")
    return found


def own(document: Any) -> bool:
    return document["apiVersion"] == "sidecarlab.dev/v1alpha1"


def test_every_object_of_ours_in_the_topologies_fits() -> None:
    schema = json_schema()
    seen = set()
    for file in TOPOLOGIES.glob("*.yaml"):
        for document in filter(own, parse(file.read_text(), file.name)):
            value = plain(document)
            assert [] in [problems(option, schema, value) for option in schema["oneOf"]], (file.name, document.line)
            seen.add(document["kind"])
    assert {"ExternalHost", "TrafficTest"} <= seen


def test_what_the_loader_refuses_does_not_fit() -> None:
    schema = json_schema()
    good: dict[str, Any] = {
        "apiVersion": "sidecarlab.dev/v1alpha1",
        "kind": "TrafficTest",
        "metadata": {"name": "t"},
        "spec": {"from": {"pod": "a.b"}, "to": {"host": "c", "port": 80}, "expect": {"outcome": {"status": None}}},
    }

    def fits(value: object) -> bool:
        return [] in [problems(option, schema, value) for option in schema["oneOf"]]

    assert fits(good)
    assert not fits(good | {"kind": "Traffictest"})
    assert not fits(good | {"spec": good["spec"] | {"form": {}}})
    assert not fits(good | {"spec": good["spec"] | {"to": {"host": "c", "port": "80"}}})
    assert not fits(good | {"spec": good["spec"] | {"expect": {"outcome": {"result": "fine"}}}})
    assert not fits({key: value for key, value in good.items() if key != "spec"})

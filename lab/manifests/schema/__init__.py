"""Schemas of everything that manifests may hold, one file a kind; see ``base`` for their rules."""

from __future__ import annotations

import importlib
from typing import Any

_OWN = {"ExternalHost": "external_host", "Link": "link", "TrafficTest": "traffic_test"}
API_VERSION = "sidecarlab.dev/v1alpha1"


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of our own kinds: a document is one of them."""
    from pydantic.json_schema import models_json_schema

    models = {kind: getattr(importlib.import_module(f"{__name__}.{module}"), kind) for kind, module in _OWN.items()}
    refs, definitions = models_json_schema([(model, "validation") for model in models.values()], by_alias=True)
    named = definitions["$defs"]
    branches = []
    for kind, model in models.items():
        reference = refs[model, "validation"]
        properties = named[reference["$ref"].rpartition("/")[2]]["properties"]
        properties["apiVersion"], properties["kind"] = {"const": API_VERSION}, {"const": kind}
        branches.append(reference)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Kinds of {API_VERSION}",
        "oneOf": branches,
        "$defs": named,
    }

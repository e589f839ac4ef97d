"""Schema of our own kind Link: properties of the path between two places."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator, Field

from lab.manifests.schema.base import Spec
from lab.manifests.schema.metadata import Object


def rate(text: str) -> int:
    """Bits per second of ``10mbit``, ``1.5gbit``, ``64kbit`` or ``800bit``; raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(k|m|g)?bit", text.strip().lower())
    if not match or not float(match[1]):
        raise ValueError('a rate is written "10mbit", "64kbit" or "1gbit"')
    return int(float(match[1]) * {None: 1, "k": 10**3, "m": 10**6, "g": 10**9}[match[2]])


def _rate(value: object) -> int:
    return rate(value if isinstance(value, str) else "")


def _percent(value: object) -> object:
    if isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?%", value):
        return float(value[:-1])
    return value


class LinkSpec(Spec):
    """The path between two places. What needs netem (delay, jitter, reordering) is refused by name."""

    between: Annotated[
        list[str],
        Field(min_length=2, max_length=2, description='two places: POD.NAMESPACE, the name of an ExternalHost, or "*"'),
    ]
    mtu: Annotated[int, Field(ge=68, le=65535)] | None = None
    rate: Annotated[int, BeforeValidator(_rate, json_schema_input_type=str)] = 0
    loss: Annotated[float, BeforeValidator(_percent, json_schema_input_type=str | float), Field(ge=0, le=100)] = 0.0
    cut: bool = False


class Link(Object):
    spec: LinkSpec

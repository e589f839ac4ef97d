"""What several Istio kinds share: selectors, exportTo, destinations."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, field_validator

from lab.manifests.schema.base import Host, MaybeLabel, Port, Spec, is_dns_label, words
from lab.manifests.schema.metadata import LabelKey

STATUS = words("status")


def _export_to(value: str) -> str:
    if value not in (".", "*", "~") and not is_dns_label(value):
        raise ValueError('it must be ".", "*", "~" or the name of a namespace')
    return value


ExportTo = list[Annotated[str, AfterValidator(_export_to)]]


RouteHost = Annotated[Host, Field(min_length=1)]
"""A host of a VirtualService or DestinationRule: a name, a short name, or a wildcard."""


def one_of(spec: Spec, *fields: str, required: bool = False) -> None:
    """Raises ValueError if more than one of the fields is set (a protobuf oneof), or none although one is required."""
    present = [name for name in fields if getattr(spec, name) is not None]
    names = [type(spec).model_fields[name].alias or name for name in fields]
    if len(present) > 1:
        raise ValueError(f"only one of {', '.join(names)} may be set")
    if required and not present:
        raise ValueError(f"one of {', '.join(names)} is needed")


class WorkloadSelector(Spec):
    labels: dict[LabelKey, str] = Field(default_factory=dict)


class PodSelector(Spec):
    """istio.type.v1beta1.WorkloadSelector: the same with another field name."""

    match_labels: dict[LabelKey, str] = Field(default_factory=dict)


class PortSelector(Spec):
    number: Port


class Destination(Spec):
    host: RouteHost
    subset: MaybeLabel = ""

    @field_validator("host")
    @classmethod
    def _one_host(cls, value: str) -> str:
        if value == "*":
            raise ValueError('"*" is no destination')
        return value

    port: PortSelector | None = None

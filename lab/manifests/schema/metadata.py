"""Schemas of what all kinds share: metadata, labels, selectors; and of Namespace and ConfigMap.

Source: kubernetes/apimachinery: pkg/apis/meta/v1/types.go.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from lab.manifests.schema.base import DnsLabel, DnsName, Spec, Timestamp, is_dns_name, words


def _label_key(key: str) -> str:
    prefix, slash, name = key.rpartition("/")
    if slash and not is_dns_name(prefix):
        raise ValueError("the prefix of a key is a DNS name")
    if not re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", name):
        raise ValueError(
            "a key is at most 63 letters, digits, '-', '_' and '.', and begins and ends with a letter or digit"
        )
    return key


def _label_value(value: str) -> str:
    if value and not re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", value):
        raise ValueError(
            "a label's value is at most 63 letters, digits, '-', '_' and '.', and begins and ends with a letter or digit"
        )
    return value


LabelKey = Annotated[str, AfterValidator(_label_key)]
Labels = dict[LabelKey, Annotated[str, AfterValidator(_label_value)]]
Annotations = dict[LabelKey, str]
Transport = Literal["TCP", "UDP"]


class OwnerReference(Spec):
    BOOKKEEPING = words("uid blockOwnerDeletion")

    api_version: str
    kind: str
    name: DnsName
    controller: bool = False


class ObjectMeta(Spec):
    UNUSED = words("generateName clusterName")
    BOOKKEEPING = words(
        "uid resourceVersion generation managedFields finalizers selfLink deletionTimestamp deletionGracePeriodSeconds"
    )

    name: DnsName
    namespace: DnsLabel = ""
    labels: Labels = Field(default_factory=dict)
    annotations: Annotations = Field(default_factory=dict)
    creation_timestamp: Timestamp = 0.0
    owner_references: list[OwnerReference] = Field(default_factory=list)


class Object(Spec):
    """What every object begins with; kinds add ``spec``."""

    api_version: str
    kind: str
    metadata: ObjectMeta


class Namespace(Object):
    UNUSED = words("spec")
    BOOKKEEPING = words("status")


class ConfigMap(Object):
    UNUSED = words("binaryData immutable")

    data: dict[str, str] = Field(default_factory=dict)


class LabelSelectorRequirement(Spec):
    key: LabelKey
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: list[str] = Field(default_factory=list)


class LabelSelector(Spec):
    match_labels: dict[LabelKey, str] = Field(default_factory=dict)
    match_expressions: list[LabelSelectorRequirement] = Field(default_factory=list)

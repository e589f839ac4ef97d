"""Schema of Deployment. Source of the field list: kubernetes/api: apps/v1/types.go."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from lab.manifests.schema.base import DnsName, Spec, words
from lab.manifests.schema.metadata import LabelSelector, Object, ObjectMeta
from lab.manifests.schema.pod import PodSpec


class TemplateMeta(ObjectMeta):
    """metadata of a pod template: without a name of its own."""

    name: DnsName = ""


class PodTemplate(Spec):
    metadata: TemplateMeta
    spec: PodSpec


class DeploymentSpec(Spec):
    UNUSED = words("minReadySeconds paused progressDeadlineSeconds revisionHistoryLimit strategy")

    selector: LabelSelector
    template: PodTemplate
    replicas: Annotated[int, Field(ge=0, le=250)] = 1


class Deployment(Object):
    BOOKKEEPING = words("status")

    spec: DeploymentSpec

"""Checks across objects: what each of them cannot know by itself."""

from __future__ import annotations

from collections.abc import Mapping

from lab.manifests.document import locate
from lab.manifests.item import Item
from lab.manifests.model import Mesh
from lab.manifests.problems import Problems, did_you_mean


def check(mesh: Mesh, tests: Mapping[str, Item], problems: Problems) -> None:
    """Adds what is wrong (errors) or doubtful (warnings) to ``problems``."""
    _traffic_tests(mesh, tests, problems)


def _traffic_tests(mesh: Mesh, items: Mapping[str, Item], problems: Problems) -> None:
    pods = [pod.name for pod in mesh.pods]
    hosts = [host.meta.name for host in mesh.external_hosts]
    for test in mesh.tests:
        item = items[test.meta.key]
        if test.flow_from.pod and test.flow_from.pod not in pods:
            problems.error(
                locate(item.document, ("spec", "from", "pod")),
                f'unknown pod "{test.flow_from.pod}"',
                f"{item.subject}: no such pod in the mesh",
                did_you_mean(test.flow_from.pod, pods),
            )
        if test.flow_from.external and test.flow_from.external not in hosts:
            problems.error(
                locate(item.document, ("spec", "from", "external")),
                f'unknown ExternalHost "{test.flow_from.external}"',
                f"{item.subject}: no such ExternalHost",
                did_you_mean(test.flow_from.external, hosts),
            )

"""Who reaches whom, and how: the predicted verdict of every source and target of a mesh. Pure but for what its world reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lab.errors import InputError
from lab.explain.predict import distribution
from lab.explain.telling import sentence
from lab.explaining import MeshWorld, predict
from lab.manifests.model import FlowFrom, FlowTo, Mesh, Meta, TrafficTest
from lab.matrix.cells import Cell, cell
from lab.matrix.targets import Target, chosen, targets
from lab.verdict import Verdict

APP_UID = 1000


@dataclass(frozen=True, slots=True)
class Source:
    """A pod, or an ExternalHost. ``meshed``: it has a proxy."""

    name: str
    external: bool = False
    meshed: bool = False

    def flow_from(self) -> FlowFrom:
        return FlowFrom(external=self.name) if self.external else FlowFrom(pod=self.name, uid=APP_UID)

    def to_json(self) -> dict[str, Any]:
        return {
            "pod": None if self.external else self.name,
            "external": self.name if self.external else None,
            "meshed": self.meshed,
        }


@dataclass(frozen=True, slots=True)
class Matrix:
    """``live``: made of what a running lab has, not of what its manifests say. Cells are in the order of sources, then targets."""

    name: str
    sources: tuple[Source, ...]
    targets: tuple[Target, ...]
    cells: tuple[Cell, ...]
    live: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "source": "lab" if self.live else "manifests",
            "from": [source.to_json() for source in self.sources],
            "to": [target.to_json() for target in self.targets],
            "cells": [found.to_json() for found in self.cells],
        }


def sources(mesh: Mesh, wanted: Sequence[str] = ()) -> tuple[Source, ...]:
    """The pods, or what is wanted of pods and external hosts, by name.

    Raises:
        InputError: a name is that of neither.
    """
    pods = [Source(pod.name, meshed=pod.injected) for pod in mesh.pods]
    if not wanted:
        return tuple(pods)
    found: dict[Source, None] = {}
    for name in wanted:
        pod = mesh.pod(name)
        if pod is not None:
            found[Source(pod.name, meshed=pod.injected)] = None
        elif any(host.meta.name == name for host in mesh.external_hosts):
            found[Source(name, external=True)] = None
        else:
            known = ", ".join((*(p.name for p in pods), *(h.meta.name for h in mesh.external_hosts))) or "none"
            raise InputError(
                f"--from {name}",
                why=f"no pod and no ExternalHost is called so; there are: {known}",
                next_step="Name one of them",
            )
    return tuple(found)


def matrix(
    world: MeshWorld, wanted_from: Sequence[str] = (), wanted_to: Sequence[str] = (), *, live: bool = False
) -> Matrix:
    """The matrix of a mesh.

    Args:
        wanted_from: pods and ExternalHosts (see `sources`); all pods if empty.
        wanted_to: see `lab.matrix.targets.chosen`; everything if empty.

    Raises:
        InputError: something that is wanted does not exist.
    """
    mesh = world.mesh
    rows, columns = sources(mesh, wanted_from), chosen(targets(mesh), wanted_to)
    return Matrix(mesh.name, rows, columns, tuple(_cells(world, rows, columns)), live)


def _cells(world: MeshWorld, rows: Sequence[Source], columns: Sequence[Target]) -> Iterator[Cell]:
    for source in rows:
        for target in columns:
            yield flow(world, source, target)


def flow(world: MeshWorld, source: Source, target: Target) -> Cell:
    """The predicted field of one flow."""
    return predicted(world, as_test(source, target), source.name, target)


def as_test(source: Source, target: Target) -> TrafficTest:
    """The flow of a field as a test that expects nothing: what ``lab explain`` asks, and what a probe can send."""
    to = FlowTo(target.host, target.port, target.protocol)
    return TrafficTest(Meta(f"{source.name} -> {target.label}"), source.flow_from(), to, {})


def predicted(world: MeshWorld, test: TrafficTest, source: str, target: Target) -> Cell:
    """The field of a test's flow."""
    told = predict(world, test)
    parts: tuple[Verdict, ...] = told.parts() if len(told.journeys) > 1 else ()
    courses = distribution(told.journeys) if parts else ()
    return cell(source, target, told.verdict, courses, parts, sentence(told.verdict, told.journeys))

"""Which places and processes of a running lab a changed mesh lets live. Pure: two meshes in, names out.

What decides is what would be started (`lab.runtime.workload`): a pod whose labels changed is the same pod, as a kubelet
would see it, and one whose proxy gets other arguments is another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lab.fabric import paths
from lab.manifests.model import ExternalHost, Mesh, Pod
from lab.runtime import workload
from lab.runtime.spawn import ProcessSpec

_SECRETIVE = ("https", "tls")


@dataclass(frozen=True, slots=True)
class Turnover:
    """Names of places (pods ``POD.NAMESPACE``, external hosts ``ext-NAME``).

    ``replaced`` are ended and started again as something else, mostly under the same address. ``restarted`` are
    processes of pods that live on: their echo app speaks another protocol, because a Service says so now.
    """

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    restarted: Mapping[str, tuple[ProcessSpec, ...]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.replaced or self.restarted)

    def to_json(self) -> dict[str, list[str]]:
        return {
            "added": list(self.added),
            "removed": list(self.removed),
            "replaced": list(self.replaced),
            "restarted": list(self.restarted),
        }


def between(old: Mesh, new: Mesh) -> Turnover:
    """What must come, go and change for the places of ``old`` to be those of ``new``."""
    before, after = _places(old), _places(new)
    replaced: list[str] = []
    restarted: dict[str, tuple[ProcessSpec, ...]] = {}
    for name, then in after.items():
        now = before.get(name)
        if now is None:
            continue
        if isinstance(now, Pod) != isinstance(then, Pod) or _frame(old, now) != _frame(new, then):
            replaced.append(name)
        elif isinstance(now, Pod) and isinstance(then, Pod):
            ran = {spec.name: _essence(spec) for spec in workload.apps(old, now)}
            other = tuple(spec for spec in workload.apps(new, then) if ran.get(spec.name) != _essence(spec))
            if other:
                restarted[name] = other
    return Turnover(
        added=tuple(name for name in after if name not in before),
        removed=tuple(name for name in before if name not in after),
        replaced=tuple(replaced),
        restarted=restarted,
    )


def _places(mesh: Mesh) -> dict[str, Pod | ExternalHost]:
    hosts = {paths.external_place(host.meta.name): host for host in mesh.external_hosts}
    return {**{pod.name: pod for pod in mesh.pods}, **hosts}


def _frame(mesh: Mesh, what: Pod | ExternalHost) -> object:
    """All that a place is made of and cannot change while it lives."""
    if isinstance(what, Pod):
        return (
            what.ips,
            what.containers,
            workload.pod_place(mesh.name, mesh, what, ()),
            # The back end is that of the lab, and no matter here.
            workload.init(mesh, what, "auto"),
            workload.agent(mesh, what),
            [file for file in workload.pod_files(what) if file.path not in workload.DOWNWARD],
        )
    return what.addresses, workload.external_place(mesh.name, mesh, what, ()), workload.external_app(what)


def _essence(spec: ProcessSpec) -> ProcessSpec:
    """The names in an echo app's certificate are nothing where no port shows it."""
    if not spec.entry:
        return spec
    (params,) = spec.args
    assert isinstance(params, dict)
    if any(port["protocol"] in _SECRETIVE for port in params["ports"]):
        return spec
    return replace(spec, args=({**params, "hosts": []},))

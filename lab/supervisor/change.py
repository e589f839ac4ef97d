"""A running lab made another one, or left as it was.

Order: discovery and DNS hear of the new mesh, in which new pods are not ready yet; new places are made and started, then
those that take another's name or address; when all are ready and no Envoy refused anything, everybody hears that they
are; then old places go, the services' rules change, and last the copy of the manifests does. Until then every step can be
undone, and is if a later one fails.
"""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.errors import InputError, LabError
from lab.fabric import paths
from lab.manifests import stored
from lab.manifests.model import Mesh
from lab.runtime import files, kernel, turnover, workload
from lab.runtime.lines import ask
from lab.runtime.spawn import ProcessSpec

if TYPE_CHECKING:
    from lab.fabric.plan import Plan
    from lab.supervisor.lab import Supervisor

_SETTLE = 5.0  # seconds that proxies may take to answer what they are sent
_RELOAD = 30.0  # seconds that reading a mesh may take


class Change:
    """One change of one lab; use it once."""

    def __init__(self, lab: Supervisor, new: Mesh, staged: Path, timeout: float) -> None:
        """``timeout`` is how long new pods may take to be ready, in seconds.

        Raises:
            InputError: the change cannot be made while the lab runs.
        """
        from lab.fabric import plan

        self._lab, self._new, self._staged, self._timeout = lab, new, staged, timeout
        self._old = lab.mesh
        self._plans = {id(mesh): plan.plan(mesh) for mesh in (self._old, new)}
        self._turnover = turnover.between(self._old, new)
        self._undo: list[Callable[[], Awaitable[None]]] = []
        self._moved = False
        """Places have gone or come: what a Link does to the interfaces of new ones is still to be done."""
        self._ruled = False
        _refuse_what_stays(self._old, new, self._plan(self._old), self._plan(new))
        if lab.runtime != "netns" and self._turnover:
            they = sorted({name for names in self._turnover.to_json().values() for name in names})
            some = ", ".join(they[:3]) + (f" and {len(they) - 3} more" if len(they) > 3 else "")
            raise InputError(
                f"{some} cannot come, go or change while the lab runs",
                f"lab {self._old.name}",
                f"its runtime is {lab.runtime}",
                f"lab down {self._old.name}, then lab up",
            )

    async def run(self) -> None:
        """Does it.

        Raises:
            LabError: it cannot be, and the lab is as it was.
        """
        try:
            await self._forward()
        except BaseException as e:
            if self._lab.ending:
                raise
            left = await self._back()
            if left and isinstance(e, LabError):
                why = f"{e.why}; and not all is as it was: {'; '.join(left)}"
                raise InputError(e.what, e.where, why, e.next_step) from None
            raise

    async def _forward(self) -> None:
        coming, going = self._turnover, self._turnover.removed
        wanted = {a for name in coming.added for a in self._plan(self._new).place(name).addresses}
        yielding = [name for name in going if wanted & set(self._plan(self._old).place(name).addresses)]
        given = {a for name in yielding for a in self._plan(self._old).place(name).addresses}
        given |= {a for name in coming.replaced for a in self._plan(self._old).place(name).addresses}
        late = [n for n in coming.added if given & set(self._plan(self._new).place(n).addresses)]
        first = [name for name in coming.added if name not in late]
        before = await self._lab.nacks()

        await self._publish(_not_ready(self._new, {*coming.added, *coming.replaced}))
        self._lab.mesh = self._new
        await self._arrive(first, self._new)
        await self._leave([*yielding, *coming.replaced], self._old)
        await self._arrive([*late, *coming.replaced], self._new)
        for place, specs in coming.restarted.items():
            for spec in specs:
                await self._restart(place, spec)
        self._write_downward(self._new)
        await self._publish(self._new)
        await self._settle(before)
        await self._leave([name for name in going if name not in yielding], self._old)
        await self._rules(self._new, self._old)
        self._commit()

    async def _back(self) -> list[str]:
        """Undoes what was done, last things first; what could not be undone, for people to read."""
        self._lab.mesh = self._old
        left: list[str] = []

        async def publish() -> None:
            await self._publish(self._old)

        async def rules() -> None:
            await self._rules(self._old, self._new if self._ruled else self._old)

        for step in (publish, *reversed(self._undo), rules):
            try:
                await step()
            except (LabError, OSError) as e:
                left.append(str(e))
        self._write_downward(self._old)
        return left

    # --- steps ------------------------------------------------------------------------------

    async def _publish(self, mesh: Mesh) -> None:
        """Discovery and cluster DNS serve ``mesh`` from now on; the manifests' copy stays what it is."""
        stored.save(mesh, paths.manifests_dir(self._lab.name))
        for socket in (files.discovery_socket(self._lab.name), files.dns_socket(self._lab.name)):
            answer = await ask(socket, {"op": "reload"}, timeout=_RELOAD)
            if not answer.get("ok"):
                raise LabError("the new manifests are not served", str(socket), str(answer.get("error")))

    async def _arrive(self, names: Collection[str], mesh: Mesh) -> None:
        if not names:
            return
        self._undo.append(lambda: self._take_away(names, mesh))
        await self._bring(names, mesh)

    async def _leave(self, names: Collection[str], mesh: Mesh) -> None:
        if not names:
            return
        self._undo.append(lambda: self._bring(names, mesh))
        await self._take_away(names, mesh)

    async def _bring(self, names: Collection[str], mesh: Mesh) -> None:
        from lab.fabric import build

        lab, plan = self._lab, self._plan(mesh)
        self._moved = True
        await lab.in_fabric(lambda: build.add(plan, lab.record, names))
        lab.admit(names, mesh)
        await lab.start(names, self._timeout)

    async def _take_away(self, names: Collection[str], mesh: Mesh) -> None:
        from lab.fabric import build

        lab, plan = self._lab, self._plan(mesh)
        await lab.dismiss(names)
        await lab.in_fabric(lambda: build.remove(plan, lab.record, names))
        for name in names:
            shutil.rmtree(paths.pod_dir(lab.name, name), ignore_errors=True)
            lab.record.add("removed", place=name)

    async def _restart(self, place: str, spec: ProcessSpec) -> None:
        old = self._lab.spec(place, spec.name)

        async def undo() -> None:
            await self._lab.restart(place, spec.name, old)

        self._undo.append(undo)
        try:
            await self._lab.restart(place, spec.name, spec)
        except TimeoutError:
            raise InputError(f"{spec.name} of {place} did not become ready", why="it was started again") from None

    async def _rules(self, mesh: Mesh, previous: Mesh) -> None:
        from lab.fabric import build

        lab, plan, before = self._lab, self._plan(mesh), self._plan(previous)
        if plan.services == before.services and plan.links == before.links and not self._moved:
            return
        self._ruled = True
        await lab.in_fabric(lambda: build.update_rules(plan, lab.record, before))

    async def _settle(self, before: Mapping[str, str]) -> None:
        """Waits until every proxy has answered.

        Raises:
            InputError: one that ran well refuses its new listeners or clusters.
        """
        question = {"op": "wait", "timeout": _SETTLE}
        with suppress(LabError):
            await ask(files.discovery_socket(self._lab.name), question, timeout=2 * _SETTLE)
        for pod, error in (await self._lab.nacks()).items():
            if error.startswith(("LDS", "CDS")) and before.get(pod) != error:
                raise InputError(f"pod {pod} rejects its new configuration", why=f"its Envoy rejected {error}")

    def _write_downward(self, mesh: Mesh) -> None:
        """Labels and annotations of pods that live on, as a kubelet refreshes its downward API volume."""
        for pod in mesh.pods:
            for owned in workload.pod_files(pod):
                path = paths.pod_dir(self._lab.name, pod.name) / owned.path
                if owned.path in workload.DOWNWARD and path.exists() and path.read_text() != owned.text:
                    path.write_text(owned.text or "")

    def _commit(self) -> None:
        """The copy of the manifests becomes the new one, at once."""
        directory = paths.manifests_dir(self._lab.name)
        stored.save(self._new, directory, self._staged)
        kernel.exchange(str(self._staged), str(directory))
        shutil.rmtree(self._staged, ignore_errors=True)
        stored.save(self._new, directory)
        self._lab.adopt(self._new)

    def _plan(self, mesh: Mesh) -> Plan:
        return self._plans[id(mesh)]


def _not_ready(mesh: Mesh, names: Collection[str]) -> Mesh:
    """The mesh before some of its pods are ready."""
    return replace(mesh, pods=tuple(replace(p, ready=False) if p.name in names else p for p in mesh.pods))


def _refuse_what_stays(old: Mesh, new: Mesh, before: Plan, after: Plan) -> None:
    """What the lab's own processes were started with cannot change under them."""
    fixed: list[tuple[str, Any, Any]] = [
        ("IPv6", before.ipv6, after.ipv6),
        ("the lab's own addresses", (before.node, before.outside), (after.node, after.outside)),
        ("trustDomain", old.mesh_config.trust_domain, new.mesh_config.trust_domain),
        ("rootNamespace", old.mesh_config.root_namespace, new.mesh_config.root_namespace),
    ]
    for what, then, now in fixed:
        if then != now:
            raise InputError(
                f"{what} cannot change while lab {old.name} runs",
                why="its node and control plane were started with it",
                next_step=f"lab down {old.name}, then lab up",
            )

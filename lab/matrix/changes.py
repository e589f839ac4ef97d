"""What a change of manifests changes in the flows of a mesh: those whose predicted verdict is another. Pure.

Flows are the fields of both matrices and what TrafficTests of either side send. A client does not change with the mesh: what is
on both sides is asked as the first side says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from lab.explaining import MeshWorld
from lab.manifests.model import FlowFrom, FlowTo, Mesh, Meta, TrafficTest
from lab.matrix.cells import Cell
from lab.matrix.matrix import APP_UID, Source, as_test, predicted, sources
from lab.matrix.targets import Key, Target, targets

T = TypeVar("T")

Kind = Literal[
    "breaks", "opens", "secures", "exposes", "reroutes", "fails-otherwise", "uncertain", "lookup", "new", "gone"
]
KINDS: tuple[Kind, ...] = (
    "breaks", "opens", "exposes", "secures", "reroutes", "fails-otherwise", "uncertain", "lookup", "new", "gone",
)  # fmt: skip
"""``breaks``: it worked; ``opens``: it does now. ``secures``: it works with mTLS, which it did not have; ``exposes``: the
reverse. ``reroutes``: it works another way. ``fails-otherwise``: it fails another way. ``uncertain``: whether it works is not
known on one side. ``lookup``: only its name is resolved otherwise. ``new``, ``gone``: its source or target is on one side alone."""


@dataclass(frozen=True, slots=True)
class Change:
    """A flow with another verdict. ``tests`` are the TrafficTests that send just this; ``differences`` what is not the same."""

    kind: Kind
    source: str
    uid: int
    target: Target
    before: Cell | None
    after: Cell | None
    tests: tuple[str, ...] = ()
    differences: tuple[tuple[str, Any, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "from": self.source,
            "uid": self.uid,
            "to": self.target.to_json(),
            "tests": list(self.tests),
            "before": self.before.to_json() if self.before else None,
            "after": self.after.to_json() if self.after else None,
            "differences": [{"key": key, "before": was, "after": now} for key, was, now in self.differences],
        }


@dataclass(frozen=True, slots=True)
class Changes:
    """``compared`` counts the flows that were looked at."""

    compared: int = 0
    changes: tuple[Change, ...] = ()

    def of(self, kind: Kind) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.kind == kind)


@dataclass(frozen=True, slots=True)
class _Asked:
    """One flow, as each side would send it; None where that side has no such source or target."""

    source: str
    uid: int
    target: Target
    before: TrafficTest | None
    after: TrafficTest | None
    tests: tuple[str, ...] = ()


def between(old: MeshWorld, new: MeshWorld) -> Changes:
    """The flows whose verdict differs, in the order of `KINDS`, then of the manifests."""
    asked = list(_fields(old.mesh, new.mesh))
    found: list[tuple[_Asked, Cell | None, Cell | None]] = [_both(old, new, flow) for flow in asked]
    known = {_way(before or after): n for n, (_, before, after) in enumerate(found)}
    for flow in _tests(old.mesh, new.mesh):
        answer = _both(old, new, flow)
        same = known.get(_way(answer[1] or answer[2])) if _is_plain(flow) else None
        if same is None:
            found.append(answer)
        else:
            base, before, after = found[same]
            found[same] = (dataclasses.replace(base, tests=(*base.tests, *flow.tests)), before, after)
    changes = [change for flow, before, after in found if (change := _change(flow, before, after))]
    changes.sort(key=lambda change: KINDS.index(change.kind))
    return Changes(len(found), tuple(changes))


def _both(old: MeshWorld, new: MeshWorld, flow: _Asked) -> tuple[_Asked, Cell | None, Cell | None]:
    before = predicted(old, flow.before, flow.source, flow.target) if flow.before else None
    after = predicted(new, flow.after, flow.source, flow.target) if flow.after else None
    return flow, before, after


# --- which flows ------------------------------------------------------------------------------


def _fields(old: Mesh, new: Mesh) -> Iterator[_Asked]:
    """The fields of both matrices."""
    rows = {source.name: source for mesh in (new, old) for source in sources(mesh)}
    here, there = ({target.key: target for target in targets(mesh)} for mesh in (old, new))
    for name in _in_order([s.name for s in sources(old)], [s.name for s in sources(new)]):
        for key in _in_order(list(here), list(there)):
            client = here.get(key) or there[key]
            before, after = _field(old, rows[name], here, client), _field(new, rows[name], there, client)
            if before or after:
                yield _Asked(name, APP_UID, client, before, after)


def _field(mesh: Mesh, source: Source, known: Mapping[Key, Target], client: Target) -> TrafficTest | None:
    own = known.get(client.key)
    if own is None or mesh.pod(source.name) is None:
        return None
    return as_test(source, dataclasses.replace(own, protocol=client.protocol))


def _tests(old: Mesh, new: Mesh) -> Iterator[_Asked]:
    """What TrafficTests of either side send, each flow once; lookups are a part of every flow to a name."""
    named: dict[str, list[str]] = {}
    flows: dict[str, tuple[FlowFrom, FlowTo]] = {}
    for test in (*old.tests, *new.tests):
        if test.to.protocol in ("dns", "dns-tcp"):
            continue
        key = repr((test.flow_from, test.to))
        flows.setdefault(key, (test.flow_from, test.to))
        if test.meta.name not in named.setdefault(key, []):
            named[key].append(test.meta.name)
    for key, (start, to) in flows.items():
        target = Target("test", to.host, to.host, to.port, to.protocol)
        test = TrafficTest(Meta(named[key][0]), start, to, {})
        before, after = (test if _has(mesh, start) else None for mesh in (old, new))
        if before or after:
            yield _Asked(start.pod or start.external, start.uid, target, before, after, tuple(named[key]))


def _has(mesh: Mesh, start: FlowFrom) -> bool:
    if start.external:
        return any(host.meta.name == start.external for host in mesh.external_hosts)
    return mesh.pod(start.pod) is not None


def _is_plain(flow: _Asked) -> bool:
    """Whether a test sends what a field of a matrix would: nothing special but where to."""
    test = flow.before or flow.after
    assert test is not None
    to = FlowTo(test.to.host, test.to.port, test.to.protocol)
    return test.to == to and test.flow_from == FlowFrom(pod=test.flow_from.pod, uid=APP_UID)


def _way(found: Cell | None) -> tuple[object, ...]:
    assert found is not None
    to = found.verdict.to
    return found.source, found.verdict.source.uid, to.address or to.host, to.port, to.protocol


def _in_order(old: Sequence[T], new: Sequence[T]) -> list[T]:
    """What is in either, the old ones first."""
    return list(dict.fromkeys((*old, *new)))


# --- what differs -----------------------------------------------------------------------------

_LOOKUP = "dns."


def _change(flow: _Asked, before: Cell | None, after: Cell | None) -> Change | None:
    if before is None or after is None:
        kind: Kind = "new" if before is None else "gone"
        return Change(kind, flow.source, flow.uid, flow.target, before, after, flow.tests)
    was, now = _essence(before), _essence(after)
    differing = tuple((key, was[key], now[key]) for key in was if was[key] != now[key])
    if not differing:
        return None
    kind = _kind(before, after, [key for key, _, _ in differing])
    return Change(kind, flow.source, flow.uid, flow.target, before, after, flow.tests, differing)


def _kind(before: Cell, after: Cell, keys: Sequence[str]) -> Kind:
    if before.reaches != after.reaches:
        if before.reaches is None or after.reaches is None:
            return "uncertain"
        return "opens" if after.reaches else "breaks"
    if all(key.startswith(_LOOKUP) for key in keys):
        return "lookup"
    if before.reaches is False:
        return "fails-otherwise"
    if before.wire != after.wire and "mtls" in (before.wire, after.wire):
        return "secures" if after.wire == "mtls" else "exposes"
    return "reroutes"


def _essence(found: Cell) -> dict[str, Any]:
    """What makes a verdict another one: the way and the end, but no rule's text and no address of a pod that has a name."""
    v = found.verdict
    near, far, dns, outcome = v.envoy, v.inbound, v.dns, v.outcome
    return {
        "how": found.how,
        "result": outcome.result if outcome else None,
        "status": outcome.status if outcome else None,
        "grpc_status": outcome.grpc_status if outcome else None,
        "flags": found.flags,
        "blocked_by": found.blocked_by,
        "wire": found.wire,
        "captured": found.captured,
        "listener": near.listener if near else None,
        "filter_chain": near.filter_chain if near else None,
        "route": near.route_name if near else None,
        "virtual_host": near.virtual_host if near else None,
        "cluster": " or ".join(found.clusters) or None,
        "endpoint": near.endpoint if near and found.far is None else None,
        "far.pod": found.far,
        "far.captured": found.far_captured,
        "far.filter_chain": far.filter_chain if far else None,
        "far.cluster": far.cluster if far else None,
        "peer_seen_by_app": far.peer_seen_by_app if far else None,
        "courses": _courses(found),
        "dns.captured": dns.captured if dns else None,
        "dns.answered_by": dns.answered_by if dns else None,
        "dns.rcode": dns.rcode if dns else None,
        "dns.answers": list(dns.answers) if dns and dns.answers is not None else None,
    }


def _courses(found: Cell) -> list[dict[str, Any]]:
    """Where it is not the same each time: what becomes of it how often."""
    chances: dict[tuple[Any, ...], float] = {}
    for course in map(dict, found.courses):
        key = tuple(course[name] for name in ("cluster", "reached", "result", "status"))
        chances[key] = chances.get(key, 0.0) + course["chance"]
    names = ("cluster", "reached", "result", "status")
    return [
        {**dict(zip(names, key, strict=True)), "chance": round(chance, 6)}
        for key, chance in sorted(chances.items(), key=lambda item: str(item[0]))
    ]

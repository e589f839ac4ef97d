"""What a change of the mesh costs: endpoints alone, or a full push; and that both give what a fresh start gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from four_namespaces import CATALOG, FRONTEND, build
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.discovery import snapshot
from lab.discovery.proxy import proxy_for
from lab.discovery.push_context import PushContext
from lab.manifests import model

NAME = f"outbound|8080||{CATALOG}"


def frontend(mesh: model.Mesh) -> Any:
    pod = mesh.pod("frontend-0.frontend")
    assert pod is not None
    return snapshot.node_for_pod(mesh, pod)


def with_pods(mesh: model.Mesh, *pods: model.Pod) -> model.Mesh:
    return replace(mesh, pods=pods)


def catalog_pod(mesh: model.Mesh, index: int, **changes: Any) -> model.Pod:
    first = mesh.pod("catalog-0.catalog")
    assert first is not None
    meta = replace(first.meta, name=f"catalog-{index}", order=100 + index)
    return replace(first, meta=meta, ips=(f"10.0.2.{5 + index}",), **changes)


def test_second_endpoint_concerns_its_own_service_alone() -> None:
    mesh = build()
    push = PushContext(mesh)
    before = snapshot.generate(push, frontend(mesh))
    larger = with_pods(mesh, *mesh.pods, catalog_pod(mesh, 1))
    after_push, hosts = push.advance(larger)
    assert hosts == {CATALOG}
    after = snapshot.generate(after_push, frontend(mesh))
    assert {n for n in after.endpoints if after.endpoints[n] != before.endpoints[n]} == {NAME}
    assert len(after.endpoints[NAME].endpoints[0].lb_endpoints) == 2
    assert after.clusters == before.clusters


def test_readiness_is_an_endpoint_change() -> None:
    mesh = build()
    unready = with_pods(mesh, *(replace(p, ready=p.name != "catalog-0.catalog") for p in mesh.pods))
    push, hosts = PushContext(mesh).advance(unready)
    assert hosts == {CATALOG}
    assignment = snapshot.generate(push, frontend(mesh)).endpoints[NAME]
    assert assignment.endpoints[0].lb_endpoints[0].health_status == 2


def test_last_endpoint_gone_keeps_the_accepted_identities() -> None:
    mesh = build()
    push = PushContext(mesh)
    before = snapshot.generate(push, frontend(mesh))
    empty, hosts = push.advance(with_pods(mesh, *(p for p in mesh.pods if p.meta.name != "catalog-0")))
    assert hosts == {CATALOG}
    after = snapshot.generate(empty, frontend(mesh))
    assert not after.endpoints[NAME].endpoints
    assert after.clusters[NAME] == before.clusters[NAME]


def test_new_service_account_is_a_full_push() -> None:
    mesh = build()
    other = catalog_pod(mesh, 1, service_account="other")
    assert PushContext(mesh).advance(with_pods(mesh, *mesh.pods, other))[1] is None


def test_first_endpoint_is_a_full_push() -> None:
    mesh = build()
    none = with_pods(mesh, *(p for p in mesh.pods if p.meta.name != "catalog-0"))
    assert PushContext(none).advance(mesh)[1] is None


def test_moved_lines_are_no_change() -> None:
    mesh = build()
    moved = build("# a comment\n---\n")
    shifted = replace(
        moved,
        services=tuple(replace(s, meta=replace(s.meta, source=model.Source("x", 99), order=7)) for s in moved.services),
    )
    assert PushContext(mesh).advance(shifted)[1] == frozenset()


def test_changed_service_is_a_full_push() -> None:
    mesh = build()
    changed = replace(mesh, services=(replace(mesh.services[0], cluster_ips=("10.96.0.99",)), *mesh.services[1:]))
    assert PushContext(mesh).advance(changed)[1] is None


def test_changed_labels_of_a_pod_are_a_full_push() -> None:
    mesh = build()
    pod = mesh.pods[0]
    relabelled = replace(pod, meta=replace(pod.meta, labels={**pod.meta.labels, "new": "1"}))
    assert PushContext(mesh).advance(with_pods(mesh, relabelled, *mesh.pods[1:]))[1] is None


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=4), st.data())
def test_any_sequence_of_pods_ends_where_a_fresh_start_does(steps: list[tuple[int, bool]], data: Any) -> None:
    mesh = build()
    push, current = PushContext(mesh), mesh
    for index, ready in steps:
        pods = {p.name: p for p in current.pods}
        new = catalog_pod(mesh, index, ready=ready)
        if new.name in pods and data.draw(st.booleans()):
            del pods[new.name]
        else:
            pods[new.name] = new
        current = with_pods(mesh, *pods.values())
        push, _ = push.advance(current)
    node = frontend(mesh)
    got, fresh = snapshot.generate(push, node), snapshot.generate(PushContext(current), node)
    assert got.endpoints == fresh.endpoints
    assert got.listeners == fresh.listeners
    assert got.routes == fresh.routes
    assert set(got.clusters) == set(fresh.clusters)


def test_proxies_of_one_scope_share_their_resources() -> None:
    mesh = build()
    push = PushContext(mesh)
    catalog = mesh.pod("catalog-0.catalog")
    assert catalog is not None
    a = snapshot.cluster_set(proxy_for(push, frontend(mesh)))
    b = snapshot.cluster_set(proxy_for(push, snapshot.node_for_pod(mesh, catalog)))
    assert a[f"outbound|8080||{FRONTEND}"] is b[f"outbound|8080||{FRONTEND}"]

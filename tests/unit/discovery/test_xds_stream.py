"""The protocol of one stream: what each request and push is answered with, over delta and state of the world."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from envoy.config.cluster.v3 import cluster_pb2
from envoy.service.discovery.v3 import discovery_pb2
from four_namespaces import CATALOG, FRONTEND, PAYMENTS, TRACING, build, sidecar

from lab.discovery import snapshot, xds
from lab.discovery.proxy import proxy_for
from lab.discovery.push_context import PushContext
from lab.discovery.resources import CDS, EDS, HEALTH, LDS, NDS, RDS, View
from lab.manifests import model

EDS_NAME = f"outbound|8080||{CATALOG}"
OTHER = f"outbound|8080||{FRONTEND}"


class Client:
    """One stream and the peer's side of it, without a network."""

    def __init__(self, flavour: xds.Flavour, mesh: model.Mesh | None = None) -> None:
        self.mesh = mesh or build()
        self.push_context = PushContext(self.mesh)
        pod = self.mesh.pod("frontend-0.frontend")
        assert pod is not None
        self.node = snapshot.node_for_pod(self.mesh, pod)
        self.flavour = flavour
        self.stream = xds.Stream(flavour, "v1")
        self.stream.node = self.node
        self.stream.view = View(proxy_for(self.push_context, self.node))
        self.nonces: dict[str, str] = {}

    def _decode(self, responses: list[xds.Response]) -> list[Any]:
        kind = discovery_pb2.DeltaDiscoveryResponse if self.flavour == "delta" else discovery_pb2.DiscoveryResponse
        out = [kind.FromString(r.body) for r in responses]
        for response in out:
            self.nonces[response.type_url] = response.nonce
        return out

    def send(self, type_url: str, **fields: Any) -> list[Any]:
        kind = discovery_pb2.DeltaDiscoveryRequest if self.flavour == "delta" else discovery_pb2.DiscoveryRequest
        return self._decode(self.stream.request(kind(type_url=type_url, **fields)))

    def ack(self, type_url: str, **fields: Any) -> list[Any]:
        return self.send(type_url, response_nonce=self.nonces[type_url], **fields)

    def nack(self, type_url: str, message: str, **fields: Any) -> list[Any]:
        return self.ack(type_url, error_detail={"code": 13, "message": message}, **fields)

    def push(self, mesh: model.Mesh) -> list[Any]:
        self.push_context, hosts = self.push_context.advance(mesh)
        view = View(proxy_for(self.push_context, self.node))
        if hosts is None:
            return self._decode(self.stream.push(view, "v2"))
        return self._decode(self.stream.push_endpoints(view, "v2", hosts))


def names(response: Any) -> list[str]:
    if isinstance(response, discovery_pb2.DeltaDiscoveryResponse):
        return [r.name for r in response.resources]
    return [cluster_pb2.Cluster.FromString(r.value).name for r in response.resources]  # CDS alone


# --- the first request ------------------------------------------------------------------------------


def test_first_request_needs_a_node() -> None:
    stream = xds.Stream("delta", "v1")
    with pytest.raises(xds.ProtocolError, match="missing node information"):
        stream.identify(discovery_pb2.DeltaDiscoveryRequest(type_url=CDS))


@pytest.mark.parametrize(
    "node_id", ["sidecar~10.0.0.1~a.b", "sidecar~~a.b~b.svc.cluster.local", "sidecar~x~a.b~c", "pod~10.0.0.1~a.b~c"]
)
def test_unusable_node_ids(node_id: str) -> None:
    stream = xds.Stream("delta", "v1")
    with pytest.raises(xds.ProtocolError):
        stream.identify(discovery_pb2.DeltaDiscoveryRequest(type_url=CDS, node={"id": node_id}))


def test_health_information_before_the_node_is_ignored() -> None:
    stream = xds.Stream("delta", "v1")
    assert not stream.identify(discovery_pb2.DeltaDiscoveryRequest(type_url=HEALTH))
    request = discovery_pb2.DeltaDiscoveryRequest(type_url=CDS, node={"id": "sidecar~10.0.0.1~a.b~b.svc.cluster.local"})
    assert stream.identify(request)
    assert stream.node is not None
    assert (stream.node.namespace, stream.node.ips) == ("b", ("10.0.0.1",))


# --- delta -----------------------------------------------------------------------------------------------


def test_delta_wildcard_gives_everything_once() -> None:
    client = Client("delta")
    (response,) = client.send(CDS)
    assert len(response.resources) == 8
    assert response.system_version_info == "v1"
    assert all(r.version == "" for r in response.resources)
    assert client.ack(CDS) == []
    assert client.ack(CDS) == []


def test_delta_named_types_answer_what_is_subscribed() -> None:
    client = Client("delta")
    (response,) = client.send(EDS, resource_names_subscribe=[EDS_NAME])
    assert names(response) == [EDS_NAME]
    (more,) = client.ack(EDS, resource_names_subscribe=[OTHER])
    assert names(more) == [OTHER]
    assert client.ack(EDS, resource_names_unsubscribe=[OTHER]) == []
    assert client.stream.watches[EDS].names == {EDS_NAME}


def test_delta_unknown_names_get_empty_resources() -> None:
    client = Client("delta")
    (eds,) = client.send(EDS, resource_names_subscribe=["outbound|1||nobody.example", "nonsense"])
    assert [len(r.resource.value) > 0 for r in eds.resources] == [True, True]
    (rds,) = client.send(RDS, resource_names_subscribe=["9999", "no-such-route"])
    assert names(rds) == ["9999", "no-such-route"]


def test_stale_nonce_is_ignored() -> None:
    client = Client("delta")
    client.send(EDS, resource_names_subscribe=[EDS_NAME])
    assert client.send(EDS, response_nonce="old", resource_names_subscribe=[OTHER]) == []
    assert client.stream.watches[EDS].names == {EDS_NAME}


def test_empty_nonce_on_a_watched_type_changes_the_subscription() -> None:
    client = Client("delta")
    client.send(EDS, resource_names_subscribe=[EDS_NAME])
    (response,) = client.send(EDS, resource_names_subscribe=[OTHER])
    assert names(response) == [OTHER]
    assert not client.stream.watches[EDS].acks


def test_reconnect_lists_what_vanished() -> None:
    client = Client("delta")
    (response,) = client.send(CDS, initial_resource_versions={EDS_NAME: "x", "outbound|80||gone.example": "x"})
    assert len(response.resources) == 8
    assert list(response.removed_resources) == ["outbound|80||gone.example"]


def test_clusters_answered_again_bring_endpoints_with_them() -> None:
    client = Client("delta")
    client.send(EDS, resource_names_subscribe=[EDS_NAME])
    cds, eds = client.send(CDS)
    assert (cds.type_url, eds.type_url) == (CDS, EDS)
    assert names(eds) == [EDS_NAME]


def test_nack_is_kept_until_the_next_ack_and_nothing_is_resent() -> None:
    client = Client("delta")
    client.send(CDS)
    assert client.nack(CDS, "cluster x: bad", resource_names_subscribe=["y"]) == []
    watch = client.stream.watches[CDS]
    assert (watch.error, watch.nacks, watch.settled) == ("cluster x: bad", 1, True)
    assert watch.version_acked == ""
    (response,) = client.push(build(sidecar('["./*"]')))
    assert set(response.removed_resources) >= {EDS_NAME}
    client.ack(CDS)
    assert client.stream.watches[CDS].error == ""
    assert client.stream.watches[CDS].version_acked == "v2"


def subscribe_all(client: Client) -> None:
    client.send(CDS)
    client.send(
        EDS, resource_names_subscribe=[EDS_NAME, OTHER, f"outbound|8080||{PAYMENTS}", f"outbound|4317||{TRACING}"]
    )
    client.send(LDS)
    client.send(RDS, resource_names_subscribe=["8080", "4317"])
    client.send(NDS)


def test_unchanged_mesh_pushes_nothing() -> None:
    client = Client("delta")
    subscribe_all(client)
    mesh = client.mesh
    assert client.push(replace(mesh, peer_authentications=())) == []
    # a new object with an old content, so that it is a full push
    changed = replace(mesh, mesh_config=replace(mesh.mesh_config, access_log_encoding="JSON"))
    assert client.push(changed) == []


def test_push_sends_what_changed_in_order() -> None:
    client = Client("delta")
    subscribe_all(client)
    responses = client.push(build(sidecar('["./*", "catalog/*"]')))
    assert [r.type_url for r in responses] == [CDS, EDS, LDS, RDS, NDS]
    cds, eds, lds, rds, nds = responses
    assert (len(cds.resources), set(cds.removed_resources)) == (
        0,
        {f"outbound|8080||{PAYMENTS}", f"outbound|4317||{TRACING}"},
    )
    assert set(names(eds)) == {f"outbound|8080||{PAYMENTS}", f"outbound|4317||{TRACING}"}
    assert (len(lds.resources), list(lds.removed_resources)) == (0, ["0.0.0.0_4317"])
    assert names(rds) == ["4317", "8080"]
    assert len(nds.resources) == 1


def test_endpoint_change_sends_that_cluster_alone() -> None:
    client = Client("delta")
    subscribe_all(client)
    mesh = client.mesh
    unready = replace(mesh, pods=tuple(replace(p, ready=p.name != "catalog-0.catalog") for p in mesh.pods))
    (response,) = client.push(unready)
    assert (response.type_url, names(response)) == (EDS, [EDS_NAME])


def test_changed_cluster_brings_its_endpoints_again() -> None:
    """Envoy warms a changed cluster anew and waits for EDS, though the endpoints are the same."""
    client = Client("delta")
    subscribe_all(client)
    mesh = client.mesh
    slower = replace(mesh, mesh_config=replace(mesh.mesh_config, connect_timeout=3.0))
    cds, eds = client.push(slower)
    assert len(cds.resources) == 8
    assert len(eds.resources) == 4


# --- state of the world ------------------------------------------------------------------------------------


def test_sotw_wildcard_and_ack() -> None:
    client = Client("sotw")
    (response,) = client.send(CDS)
    assert (len(names(response)), response.version_info) == (8, "v1")
    assert client.ack(CDS) == []


def test_sotw_added_names_alone_are_answered() -> None:
    client = Client("sotw")
    client.send(EDS, resource_names=[EDS_NAME])
    (response,) = client.ack(EDS, resource_names=[EDS_NAME, OTHER])
    assert len(response.resources) == 1
    assert client.ack(EDS, resource_names=[OTHER]) == []
    assert client.stream.watches[EDS].names == {OTHER}


def test_sotw_empty_names_unsubscribe_named_types() -> None:
    client = Client("sotw")
    client.send(EDS, resource_names=[EDS_NAME])
    assert client.ack(EDS) == []
    assert EDS not in client.stream.watches


def test_sotw_first_request_of_a_reconnecting_client_is_answered() -> None:
    client = Client("sotw")
    (response,) = client.send(EDS, resource_names=[EDS_NAME], response_nonce="of-another-stream", version_info="old")
    assert len(response.resources) == 1


def test_sotw_empty_nonce_on_a_watched_type_asks_for_everything_again() -> None:
    client = Client("sotw")
    client.send(EDS, resource_names=[EDS_NAME])
    (response,) = client.send(EDS, resource_names=[EDS_NAME, OTHER])
    assert len(response.resources) == 2


def test_sotw_clusters_make_the_next_endpoint_ack_answered() -> None:
    client = Client("sotw")
    client.send(EDS, resource_names=[EDS_NAME])
    client.send(CDS)
    (response,) = client.ack(EDS, resource_names=[EDS_NAME])
    assert len(response.resources) == 1
    assert client.ack(EDS, resource_names=[EDS_NAME]) == []


def test_sotw_push_sends_whole_wildcard_types_and_changed_names() -> None:
    client = Client("sotw")
    client.send(CDS)
    client.send(EDS, resource_names=[EDS_NAME, OTHER])
    client.send(LDS)
    client.send(RDS, resource_names=["8080"])
    cds, lds, rds = client.push(build(sidecar('["./*", "catalog/*"]')))
    assert (cds.type_url, len(names(cds))) == (CDS, 6)
    assert (lds.type_url, len(lds.resources)) == (LDS, 3)
    assert rds.type_url == RDS


def test_both_flavours_give_the_same_resources() -> None:
    delta, sotw = Client("delta"), Client("sotw")
    for type_url in (CDS, LDS, NDS):
        (a,), (b,) = delta.send(type_url), sotw.send(type_url)
        assert [r.resource.value for r in a.resources] == [r.value for r in b.resources]

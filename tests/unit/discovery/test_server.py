"""The discovery process over real sockets: both gRPC ports, the CA, HTTP, the control socket, live reload."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from envoy.service.discovery.v3 import discovery_pb2
from four_namespaces import CATALOG, build, manifests, sidecar
from google.protobuf import json_format, struct_pb2

from agent.protos import ca_pb2
from lab.discovery import snapshot
from lab.discovery.ads import DiscoveryServer
from lab.discovery.ca import CertificateAuthority
from lab.discovery.node import Node
from lab.discovery.resources import CDS, EDS, LDS, NDS
from lab.discovery.server import Discovery
from lab.errors import InputError
from lab.manifests import model

PEM = serialization.Encoding.PEM
_address = itertools.count(os.getpid() * 8)


def unused_address() -> str:
    """A loopback address of this test alone: the ports of discovery are fixed."""
    n = next(_address)
    return f"127.{n // 62500 % 200 + 20}.{n // 250 % 250}.{n % 250 + 1}"


def node_of(mesh: model.Mesh, pod: str = "frontend-0.frontend") -> Node:
    found = mesh.pod(pod)
    assert found is not None
    return snapshot.node_for_pod(mesh, found)


def node_message(node: Node) -> dict[str, Any]:
    metadata = struct_pb2.Struct()
    metadata.update({**node.metadata, "PROXY_CONFIG": dict(node.metadata["PROXY_CONFIG"])})
    return {"id": node.id, "cluster": node.cluster, "metadata": metadata}


class Running:
    """One discovery with the mesh it loads; change ``mesh`` and reload."""

    def __init__(self, directory: Path) -> None:
        self.mesh = build()
        self.address = unused_address()
        self.control_path = directory / "control.sock"
        self.discovery = Discovery(lambda: self.mesh, self.address, str(self.control_path))

    async def control(self, **request: Any) -> dict[str, Any]:
        reader, writer = await asyncio.open_unix_connection(str(self.control_path), limit=2**22)
        writer.write(json.dumps(request).encode() + b"\n")
        answer: dict[str, Any] = json.loads(await reader.readline())
        writer.close()
        await writer.wait_closed()
        return answer

    def secure_channel(self, chain: str = "", key: str = "", root: str = "") -> Any:
        credentials = grpc.ssl_channel_credentials(
            (root or self.discovery.authority.root_pem).encode(),
            key.encode() or None,
            chain.encode() or None,
        )
        name = (("grpc.ssl_target_name_override", "istiod.istio-system.svc"),)
        return grpc.aio.secure_channel(f"{self.address}:15012", credentials, options=name)

    def plain_channel(self) -> Any:
        return grpc.aio.insecure_channel(f"{self.address}:15010")


@contextlib.asynccontextmanager
async def running(directory: Path) -> AsyncIterator[Running]:
    found = Running(directory)
    await found.discovery.start()
    try:
        yield found
    finally:
        await found.discovery.stop()


def run(scenario: Callable[[Running], Coroutine[Any, Any, None]], directory: Path) -> None:
    async def whole() -> None:
        async with asyncio.timeout(30), running(directory) as found:
            await scenario(found)

    asyncio.run(whole())


class Ads:
    """A client of one delta stream."""

    def __init__(self, channel: Any, node: Node, token: str = "") -> None:
        call = channel.stream_stream(
            "/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources",
            request_serializer=discovery_pb2.DeltaDiscoveryRequest.SerializeToString,
            response_deserializer=discovery_pb2.DeltaDiscoveryResponse.FromString,
        )
        self._call = call(metadata=(("authorization", f"Bearer {token}"),) if token else None)
        self._node: dict[str, Any] | None = node_message(node)

    async def send(self, type_url: str, **fields: Any) -> None:
        request = discovery_pb2.DeltaDiscoveryRequest(type_url=type_url, node=self._node, **fields)
        self._node = None
        await self._call.write(request)

    async def receive(self) -> Any:
        response = await self._call.read()
        if response is grpc.aio.EOF:
            raise AssertionError(f"{await self._call.code()}: {await self._call.details()}")
        return response

    async def fetch(self, type_url: str, **fields: Any) -> Any:
        await self.send(type_url, **fields)
        response = await self.receive()
        await self.send(type_url, response_nonce=response.nonce)
        return response

    async def refused(self) -> tuple[Any, str]:
        """(status code, details) of a stream that the server ends."""
        with contextlib.suppress(grpc.RpcError):
            while await self._call.read() is not grpc.aio.EOF:
                pass
        return await self._call.code(), str(await self._call.details())


# --- xDS ---------------------------------------------------------------------------------------


def test_reload_pushes_what_changed(tmp_path: Path) -> None:
    async def scenario(lab: Running) -> None:
        async with lab.plain_channel() as channel:
            ads = Ads(channel, node_of(lab.mesh))
            assert len((await ads.fetch(CDS)).resources) == 8
            await ads.fetch(LDS)
            name = f"outbound|8080||{CATALOG}"
            await ads.fetch(EDS, resource_names_subscribe=[name])
            lab.mesh = build(sidecar('["./*", "catalog/*"]'))
            assert await lab.control(op="reload") == {"ok": True}
            cds, lds = await ads.receive(), await ads.receive()
            assert (cds.type_url, len(cds.resources), len(cds.removed_resources)) == (CDS, 0, 2)
            assert (lds.type_url, list(lds.removed_resources)) == (LDS, ["0.0.0.0_4317"])
            status = await lab.control(op="status")
            assert status["last_push"]["kind"] == "full"

    run(scenario, tmp_path)


def test_nack_shows_with_its_text_and_wait_tells_of_it(tmp_path: Path) -> None:
    async def scenario(lab: Running) -> None:
        node = node_of(lab.mesh)
        async with lab.plain_channel() as channel:
            ads = Ads(channel, node)
            await ads.send(CDS)
            response = await ads.receive()
            waiting = asyncio.create_task(lab.control(op="wait", nodes=[node.id], timeout=20))
            await ads.send(CDS, response_nonce=response.nonce, error_detail={"code": 13, "message": "cluster: no way"})
            answer = await waiting
            assert answer["settled"]
            assert answer["proxies"][node.id]["nack"] == {"type": "CDS", "error": "cluster: no way"}
            (page,) = [s for s in await debug(lab, "syncz") if s["proxy"] == "frontend-0.frontend"]
            assert page["resources"][CDS]["lastError"] == "cluster: no way"
            assert 'pilot_total_xds_rejects{type="cds"} 1' in await get(lab, 15014, "/metrics")

    run(scenario, tmp_path)


def test_wait_says_when_a_node_does_not_come(tmp_path: Path) -> None:
    async def scenario(lab: Running) -> None:
        answer = await lab.control(op="wait", nodes=["sidecar~10.9.9.9~x.y~y.svc.cluster.local"], timeout=0.05)
        assert not answer["settled"]

    run(scenario, tmp_path)


def test_reload_of_bad_manifests_keeps_what_is(tmp_path: Path) -> None:
    async def scenario(lab: Running) -> None:
        def broken() -> model.Mesh:
            raise InputError("unknown field", "x.yaml:3")

        lab.discovery.control.load = broken
        assert await lab.control(op="reload") == {"error": "unknown field: x.yaml:3"}
        assert await lab.control(op="nonsense") == {"error": "unknown op 'nonsense'"}
        async with lab.plain_channel() as channel:
            assert len((await Ads(channel, node_of(lab.mesh)).fetch(CDS)).resources) == 8

    run(scenario, tmp_path)


def test_events_close_together_are_one_push(tmp_path: Path) -> None:
    async def scenario(lab: Running) -> None:
        server = lab.discovery.server
        for hosts in ('["./*"]', '["catalog/*"]', '["payments/*"]'):
            server.update(build(sidecar(hosts)))
        assert await server.settled(10)
        assert server.metrics.counters["pilot_push_triggers"] == {(("type", "config"),): 1}
        assert server.metrics.counters["pilot_inbound_updates"] == {(("type", "config"),): 3}

    run(scenario, tmp_path)


def test_events_that_do_not_end_are_pushed_at_the_maximum(tmp_path: Path) -> None:
    async def scenario(lab: Running) -> None:
        server = DiscoveryServer(lab.mesh, debounce_after=3600, debounce_max=0.05)
        server.update(build(sidecar('["./*"]')))
        assert await server.settled(10)
        assert server.metrics.counters["pilot_push_triggers"] == {(("type", "config"),): 1}

    run(scenario, tmp_path)


def test_proxy_that_does_not_read_holds_up_nobody(tmp_path: Path) -> None:
    async def scenario(lab: Running) -> None:
        many = [
            f"apiVersion: v1\nkind: Service\nmetadata: {{name: s{i}, namespace: catalog}}\n"
            "spec: {ports: [{name: http, port: 80}]}\n---\n"
            for i in range(400)
        ]
        lab.mesh = build(*many)
        await lab.discovery.server.push(lab.mesh)
        options = (
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.http2.bdp_probe", 0),  # or the window grows until everything fits
            ("grpc.http2.lookahead_bytes", 65536),
        )
        async with (
            grpc.aio.insecure_channel(f"{lab.address}:15010", options=options) as deaf_channel,
            grpc.aio.insecure_channel(f"{lab.address}:15010", options=options) as channel,
        ):
            deaf = Ads(deaf_channel, node_of(lab.mesh, "catalog-0.catalog"))
            await deaf.send(CDS)  # and never reads what comes: more than a stream's window holds
            ads = Ads(channel, node_of(lab.mesh))
            assert len((await ads.fetch(CDS)).resources) == 408
            lab.mesh = build(*many, sidecar('["./*"]'))
            await lab.control(op="reload")
            pushed = await ads.receive()
            assert len(pushed.removed_resources) == 403
            writing = [c.node.name for c in lab.discovery.server.connections if c.node and c.lock.locked()]
            assert "catalog-0.catalog" in writing

    run(scenario, tmp_path)


# --- the secure port ------------------------------------------------------------------------------


async def token(lab: Running, namespace: str, account: str, **more: Any) -> str:
    return str((await lab.control(op="token", namespace=namespace, account=account, **more))["token"])


def test_secure_port_takes_the_right_token(tmp_path: Path) -> None:
    async def scenario(lab: Running) -> None:
        async with lab.secure_channel() as channel:
            ads = Ads(channel, node_of(lab.mesh), await token(lab, "frontend", "frontend"))
            assert len((await ads.fetch(CDS)).resources) == 8
            (client,) = (await debug(lab, "adsz"))["clients"]
            assert client["identities"] == ["spiffe://cluster.local/ns/frontend/sa/frontend"]

    run(scenario, tmp_path)


@pytest.mark.parametrize(
    ("identity", "code", "why"),
    [
        (None, grpc.StatusCode.UNAUTHENTICATED, "neither a client certificate nor a bearer token"),
        (("catalog", "catalog", {}), grpc.StatusCode.PERMISSION_DENIED, "no identities"),
        (("frontend", "other", {}), grpc.StatusCode.PERMISSION_DENIED, "frontend/frontend"),
        (("frontend", "frontend", {"seconds": -5}), grpc.StatusCode.UNAUTHENTICATED, "expired"),
    ],
)
def test_secure_port_refuses_others(identity: Any, code: Any, why: str, tmp_path: Path) -> None:
    async def scenario(lab: Running) -> None:
        bearer = await token(lab, identity[0], identity[1], **identity[2]) if identity else ""
        async with lab.secure_channel() as channel:
            ads = Ads(channel, node_of(lab.mesh), bearer)
            if code == grpc.StatusCode.PERMISSION_DENIED:
                await ads.send(CDS)  # it names the node
            found, details = await ads.refused()
            assert found == code
            assert why in details

    run(scenario, tmp_path)


def test_token_of_another_key_is_refused(tmp_path: Path) -> None:
    from lab.discovery.tokens import TokenIssuer

    async def scenario(lab: Running) -> None:
        async with lab.secure_channel() as channel:
            ads = Ads(channel, node_of(lab.mesh), TokenIssuer().issue("frontend", "frontend"))
            assert (await ads.refused())[0] == grpc.StatusCode.UNAUTHENTICATED

    run(scenario, tmp_path)


def request_for(*uris: str) -> tuple[str, str]:
    """(key PEM, CSR PEM) that asks for these URI SANs."""
    key = ec.generate_private_key(ec.SECP256R1())
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    if uris:
        names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(u) for u in uris])
        builder = builder.add_extension(names, critical=False)
    csr = builder.sign(key, hashes.SHA256()).public_bytes(PEM).decode()
    private = key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()).decode()
    return private, csr


async def create_certificate(channel: Any, csr: str, bearer: str = "", **fields: Any) -> Any:
    call = channel.unary_unary(
        "/istio.v1.auth.IstioCertificateService/CreateCertificate",
        request_serializer=ca_pb2.IstioCertificateRequest.SerializeToString,
        response_deserializer=ca_pb2.IstioCertificateResponse.FromString,
    )
    metadata = (("authorization", f"Bearer {bearer}"),) if bearer else None
    return await call(ca_pb2.IstioCertificateRequest(csr=csr, **fields), metadata=metadata)


def test_ca_signs_for_the_caller_not_for_what_the_csr_says(tmp_path: Path) -> None:
    async def scenario(lab: Running) -> None:
        _, csr = request_for("spiffe://cluster.local/ns/payments/sa/payments")
        async with lab.secure_channel() as channel:
            answer = await create_certificate(channel, csr, await token(lab, "frontend", "frontend"))
        leaf, root = (x509.load_pem_x509_certificate(c.encode()) for c in answer.cert_chain)
        leaf.verify_directly_issued_by(root)
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        identities = names.get_values_for_type(x509.UniformResourceIdentifier)
        assert identities == ["spiffe://cluster.local/ns/frontend/sa/frontend"]
        lifetime = leaf.not_valid_after_utc - datetime.now(UTC)
        assert 23.9 < lifetime.total_seconds() / 3600 <= 24
        assert root.public_bytes(PEM).decode() == (await lab.control(op="root"))["root"]

    run(scenario, tmp_path)


def test_issued_certificate_is_a_client_certificate(tmp_path: Path) -> None:
    async def scenario(lab: Running) -> None:
        key, csr = request_for()
        async with lab.secure_channel() as channel:
            bearer = await token(lab, "frontend", "frontend")
            answer = await create_certificate(channel, csr, bearer, validity_duration=600)
        async with lab.secure_channel("".join(answer.cert_chain), key) as channel:
            assert len((await Ads(channel, node_of(lab.mesh)).fetch(CDS)).resources) == 8
            other = Ads(channel, node_of(lab.mesh, "catalog-0.catalog"))
            await other.send(CDS)
            assert (await other.refused())[0] == grpc.StatusCode.PERMISSION_DENIED

    run(scenario, tmp_path)


def test_certificate_of_a_foreign_ca_does_not_get_in(tmp_path: Path) -> None:
    async def scenario(lab: Running) -> None:
        key, csr = request_for()
        chain = CertificateAuthority().sign(csr, ["spiffe://cluster.local/ns/frontend/sa/frontend"])
        async with lab.secure_channel("".join(chain), key) as channel:
            with pytest.raises(grpc.RpcError) as refused:
                await create_certificate(channel, csr)
            assert refused.value.code() == grpc.StatusCode.UNAVAILABLE

    run(scenario, tmp_path)


@pytest.mark.parametrize(
    ("csr", "bearer", "fields", "code"),
    [
        (True, False, {}, grpc.StatusCode.UNAUTHENTICATED),
        (False, True, {}, grpc.StatusCode.INVALID_ARGUMENT),
        (True, True, {"validity_duration": 91 * 86400}, grpc.StatusCode.INVALID_ARGUMENT),
        (True, True, {"metadata": {"ImpersonatedIdentity": "x"}}, grpc.StatusCode.UNAUTHENTICATED),
    ],
    ids=["no identity", "no CSR", "too long", "impersonation"],
)
def test_ca_refuses(csr: bool, bearer: bool, fields: dict[str, Any], code: Any, tmp_path: Path) -> None:
    async def scenario(lab: Running) -> None:
        text = request_for()[1] if csr else "nonsense"
        proof = await token(lab, "frontend", "frontend") if bearer else ""
        async with lab.secure_channel() as channel:
            with pytest.raises(grpc.RpcError) as refused:
                await create_certificate(channel, text, proof, **fields)
            assert refused.value.code() == code

    run(scenario, tmp_path)


def test_ca_is_not_on_the_plaintext_port(tmp_path: Path) -> None:
    async def scenario(lab: Running) -> None:
        async with lab.plain_channel() as channel:
            with pytest.raises(grpc.RpcError) as refused:
                await create_certificate(channel, request_for()[1], await token(lab, "frontend", "frontend"))
            assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED

    run(scenario, tmp_path)


def test_server_certificate_has_istiods_names(tmp_path: Path) -> None:
    async def scenario(lab: Running) -> None:
        context = ssl.create_default_context(cadata=lab.discovery.authority.root_pem)
        for name in ("istiod.istio-system.svc", "istiod.istio-system.svc.cluster.local"):
            _, writer = await asyncio.open_connection(lab.address, 15012, ssl=context, server_hostname=name)
            writer.close()
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                await writer.wait_closed()

    run(scenario, tmp_path)


# --- HTTP ------------------------------------------------------------------------------------------


def _fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        return str(response.read().decode())


async def get(lab: Running, port: int, path: str) -> str:
    if lab.discovery._http is None:
        await lab.discovery.start_http()
    return await asyncio.to_thread(_fetch, f"http://{lab.address}:{port}{path}")


async def debug(lab: Running, page: str) -> Any:
    return json.loads(await get(lab, 8080, f"/debug/{page}"))


def test_debug_pages(tmp_path: Path) -> None:
    async def scenario(lab: Running) -> None:
        lab.mesh = build(sidecar('["./*"]'))
        await lab.discovery.server.push(lab.mesh)
        services = await debug(lab, "registryz")
        assert {s["hostname"] for s in services} >= {CATALOG}
        (catalog,) = [e for e in await debug(lab, "endpointz") if e["svc"] == f"{CATALOG}:http"]
        assert catalog["ep"][0]["Addresses"] == ["10.0.2.5"]
        (config,) = await debug(lab, "configz")
        assert (config["kind"], config["metadata"]["name"]) == ("Sidecar", "default")
        assert await debug(lab, "syncz") == []
        assert (await debug(lab, "mesh"))["trust_domain"] == "cluster.local"
        async with lab.plain_channel() as channel:
            ads = Ads(channel, node_of(lab.mesh))
            await ads.fetch(CDS)
            sections = (await debug(lab, "config_dump?proxyID=frontend-0.frontend"))["configs"]
            assert [s["@type"].rpartition(".")[2].removesuffix("ConfigDump") for s in sections] == [
                "Bootstrap", "Clusters", "Listeners", "ScopedRoutes", "Routes", "Secrets", "Ecds",
            ]  # fmt: skip
            clusters = {c["cluster"]["name"] for c in sections[1]["dynamicActiveClusters"]}
            assert clusters == set(snapshot.generate(lab.mesh, node_of(lab.mesh)).clusters)
            assert sections[2].get("dynamicListeners", []) == [], "the proxy does not watch listeners"
            assert (await debug(lab, "ndsz?proxyID=frontend-0.frontend")) == {}
            await ads.fetch(NDS)
            (names,) = (await debug(lab, "ndsz?proxyID=frontend-0.frontend"))["configs"]
            assert names["table"]["frontend.frontend.svc.cluster.local"]["registry"] == "Kubernetes"
            whole = (await debug(lab, "config_dump?proxyID=frontend-0.frontend&include_eds"))["configs"]
            assert [s["@type"].rpartition(".")[2] for s in whole if s not in sections] == ["EndpointsConfigDump"]
            scope = await debug(lab, "sidecarz?proxyID=frontend-0.frontend")
            assert scope["services"] == ["frontend.frontend.svc.cluster.local"]
        for path, code in (
            ("/debug/nothing", 404),
            ("/debug/sidecarz?proxyID=nobody.here", 404),
            ("/debug/config_dump?proxyID=frontend-0.frontend&types=xyz", 404),
            ("/debug/ndsz", 400),
        ):
            with pytest.raises(urllib.error.HTTPError) as missing:
                await get(lab, 8080, path)
            assert missing.value.code == code
        for page in await debug(lab, "list"):
            if "proxyID" not in page and page.rpartition("/")[2] not in (
                "sidecarz",
                "config_dump",
                "edsz",
                "clusterz",
                "ecdsz",
                "ndsz",
            ):
                await debug(lab, page.rpartition("/")[2])

    run(scenario, tmp_path)


# --- debug questions over xDS -----------------------------------------------------------------------------


async def question(ads: Ads, type_url: str, *names: str) -> dict[str, Any]:
    """What a debug question is answered with: resource name -> message or JSON."""
    await ads.send(type_url, resource_names_subscribe=names)
    response = await ads.receive()
    assert response.type_url == type_url
    out: dict[str, Any] = {}
    for item in response.resources:
        if item.resource.type_url == "istio.io/debug":
            out[item.name] = json.loads(item.resource.value)
        else:
            shown = json_format.MessageToDict(item.resource)
            out[item.name or shown["@type"].rpartition(".")[2]] = shown
    return out


def test_debug_questions_ride_on_ads(tmp_path: Path) -> None:
    async def scenario(lab: Running) -> None:
        async with lab.secure_channel() as channel:
            other = Ads(channel, node_of(lab.mesh, "catalog-0.catalog"), await token(lab, "catalog", "catalog"))
            await other.fetch(CDS)
            ads = Ads(channel, node_of(lab.mesh), await token(lab, "frontend", "frontend"))
            await ads.fetch(CDS)
            await ads.send(LDS)
            listeners = await ads.receive()
            await ads.send(LDS, response_nonce=listeners.nonce, error_detail={"code": 13, "message": "no way"})
            (synced,) = (await question(ads, "istio.io/debug/syncz")).items()
            assert synced[0] == "frontend-0.frontend", "the proxies of its own namespace alone"
            assert synced[1]["@type"] == "type.googleapis.com/envoy.service.status.v3.ClientConfig"
            assert synced[1]["node"]["metadata"] == {"CLUSTER_ID": "Kubernetes", "NAMESPACE": "frontend"}
            states = {c["typeUrl"]: c for c in synced[1]["genericXdsConfigs"]}
            assert {u: c["configStatus"] for u, c in states.items()} == {CDS: "SYNCED", LDS: "ERROR"}
            assert states[LDS]["errorState"]["details"] == "no way"
            assert states[CDS]["lastUpdated"] > "2020"
            dump = await question(ads, "istio.io/debug/config_dump", "frontend-0.frontend")
            clusters = {c["cluster"]["name"] for c in dump["ClustersConfigDump"]["dynamicActiveClusters"]}
            assert clusters == set(snapshot.generate(lab.mesh, node_of(lab.mesh)).clusters)
            assert await question(ads, "istio.io/debug/config_dump", "catalog-0.catalog") == {}
            assert await question(ads, "istio.io/debug/config_dump", "frontend-0.frontend", "catalog-0.catalog") == {}
            assert await question(ads, "istio.io/debug/config_dump") == dump, "its own"
            name = "edsz?proxyID=frontend-0.frontend"
            assert await question(ads, "istio.io/debug", name) == {name: {}}, "it watches no endpoints"
            assert await question(ads, "istio.io/debug/edsz") == {name: {}}
            assert set(lab.discovery.server.status()["proxies"][node_of(lab.mesh).id]["types"]) == {"CDS", "LDS"}

    run(scenario, tmp_path)


def test_debug_questions_over_state_of_the_world(tmp_path: Path) -> None:
    """From the root namespace, which sees all."""

    async def scenario(lab: Running) -> None:
        metadata = {"NAMESPACE": "istio-system", "CLUSTER_ID": "Kubernetes"}
        person = {"id": "sidecar~10.9.9.9~person.istio-system~istio-system.svc.cluster.local", "metadata": metadata}
        async with lab.secure_channel() as channel:
            ads = Ads(channel, node_of(lab.mesh), await token(lab, "frontend", "frontend"))
            await ads.fetch(CDS)
            call = channel.stream_stream(
                "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources",
                request_serializer=discovery_pb2.DiscoveryRequest.SerializeToString,
                response_deserializer=discovery_pb2.DiscoveryResponse.FromString,
            )(metadata=(("authorization", f"Bearer {await token(lab, 'istio-system', 'person')}"),))
            await call.write(discovery_pb2.DiscoveryRequest(type_url="istio.io/debug/syncz", node=person))
            (synced,) = (await call.read()).resources
            assert json_format.MessageToDict(synced)["node"]["id"] == "frontend-0.frontend"
            await call.write(discovery_pb2.DiscoveryRequest(type_url="istio.io/debug", resource_names=["registryz"]))
            answer = await call.read()
            assert CATALOG in {s["hostname"] for s in json.loads(answer.resources[0].value)}
            # an acknowledgement is no question
            ack = discovery_pb2.DiscoveryRequest(
                type_url="istio.io/debug", resource_names=["registryz"], response_nonce=answer.nonce
            )
            await call.write(ack)
            await call.write(discovery_pb2.DiscoveryRequest(type_url="istio.io/debug", resource_names=["nothing"]))
            answer = await call.read()
            assert answer.resources[0].value == b"no such page: /debug/nothing. See /debug/list\n"
            call.cancel()

    run(scenario, tmp_path)


@pytest.mark.parametrize(
    ("secure", "type_url", "names", "code", "why"),
    [
        (False, "istio.io/debug/syncz", [], grpc.StatusCode.UNAUTHENTICATED, "authentication required"),
        (False, "istio.io/debug", ["ndsz"], grpc.StatusCode.UNAUTHENTICATED, "authentication required"),
        (
            True,
            "istio.io/debug",
            ["registryz"],
            grpc.StatusCode.PERMISSION_DENIED,
            "not available for current identity",
        ),
        (True, "istio.io/debug", [], grpc.StatusCode.INVALID_ARGUMENT, "exactly one debug request"),
    ],
)
def test_debug_questions_that_are_refused(
    secure: bool, type_url: str, names: list[str], code: Any, why: str, tmp_path: Path
) -> None:
    async def scenario(lab: Running) -> None:
        async with lab.secure_channel() if secure else lab.plain_channel() as channel:
            ads = Ads(channel, node_of(lab.mesh), await token(lab, "frontend", "frontend"))
            await ads.fetch(CDS)
            await ads.send(type_url, resource_names_subscribe=names)
            found, details = await ads.refused()
            assert found == code
            assert why in details

    run(scenario, tmp_path)


def test_metrics_and_readiness(tmp_path: Path) -> None:
    async def scenario(lab: Running) -> None:
        assert await get(lab, 8080, "/ready") == ""
        async with lab.plain_channel() as channel:
            await Ads(channel, node_of(lab.mesh)).fetch(CDS)
            text = await get(lab, 15014, "/metrics")
        assert 'pilot_xds_pushes{type="cds"} 1' in text
        assert "pilot_services 4.0" in text
        assert "pilot_xds 1.0" in text
        assert "pilot_pushcontext_init_seconds_count 1" in text

    run(scenario, tmp_path)


# --- the process --------------------------------------------------------------------------------------


def test_process_says_ready_serves_and_ends_on_sigterm(tmp_path: Path) -> None:
    (tmp_path / "manifests").mkdir()
    (tmp_path / "manifests" / "mesh.yaml").write_text(manifests())
    notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    notify.bind(str(tmp_path / "notify"))
    notify.settimeout(20)
    address = unused_address()
    params = {"mesh": str(tmp_path / "manifests"), "listen": address, "socket": str(tmp_path / "c.sock"), "name": "t"}
    code = "import json, sys; from lab.discovery.server import main; sys.exit(main(json.loads(sys.argv[1])))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(params)],
        env={**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify")},
        stderr=subprocess.PIPE,
    )
    try:
        assert notify.recv(64) == b"READY=1"
        with socket.socket(socket.AF_UNIX) as control:
            control.settimeout(10)
            control.connect(str(tmp_path / "c.sock"))
            control.sendall(b'{"op": "status"}\n')
            assert json.loads(control.makefile().readline())["proxies"] == {}
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        notify.close()
        process.kill()
        process.communicate()


def test_taken_address_is_one_line(tmp_path: Path) -> None:
    async def scenario(lab: Running) -> None:
        second = Discovery(lambda: lab.mesh, lab.address)
        with pytest.raises(InputError, match=r"cannot listen: 127\.[0-9.]+:15010"):
            await second.start()
        await second.stop()

    run(scenario, tmp_path)

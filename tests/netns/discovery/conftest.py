"""A stock Envoy in a network namespace of its own, on xDS from a server in this process (over a Unix socket)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.client
import json
import os
import shutil
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import envoy._bin
import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from envoy.extensions.transport_sockets.tls.v3 import secret_pb2
from envoy.service.discovery.v3 import discovery_pb2

from lab.discovery import protoconv
from lab.discovery.ads import DiscoveryServer
from lab.discovery.ca import CertificateAuthority, spiffe_id
from lab.discovery.node import Node
from lab.discovery.server import start
from lab.manifests import model

ENVOY = next(Path(p) / "envoy" for p in envoy._bin.__path__)


def _pipe_cluster(name: str, path: Path) -> dict[str, Any]:
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "1s",
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
                "explicit_http_config": {"http2_protocol_options": {}},
            }
        },
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": {"pipe": {"path": str(path)}}}}]}],
        },
    }


def bootstrap(node: Node, xds: Path, sds: Path, admin: Path, flavour: str) -> dict[str, Any]:
    ads = {"ads": {}, "initial_fetch_timeout": "0s", "resource_api_version": "V3"}
    return {
        "node": {"id": node.id, "cluster": node.cluster, "metadata": dict(node.metadata)},
        "admin": {"address": {"pipe": {"path": str(admin)}}},
        "static_resources": {"clusters": [_pipe_cluster("xds-grpc", xds), _pipe_cluster("sds-grpc", sds)]},
        "dynamic_resources": {
            "lds_config": ads,
            "cds_config": ads,
            "ads_config": {
                "api_type": "DELTA_GRPC" if flavour == "delta" else "GRPC",
                "transport_api_version": "V3",
                "set_node_on_first_message_only": True,
                "grpc_services": [{"envoy_grpc": {"cluster_name": "xds-grpc"}}],
            },
        },
    }


@functools.cache
def _authority() -> CertificateAuthority:
    return CertificateAuthority()


def _workload_secrets(node: Node) -> dict[str, Any]:
    """The secrets that a real agent would serve: a certificate of the mesh's CA for the node's identity, and its root."""
    authority = _authority()
    account = node.text("SERVICE_ACCOUNT") or "default"
    key = ec.generate_private_key(ec.SECP256R1())
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    chain = authority.sign(request.public_bytes(pem).decode(), [spiffe_id("cluster.local", node.namespace, account)])
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()).decode()
    certificate = secret_pb2.Secret(
        name="default",
        tls_certificate={"certificate_chain": {"inline_string": chain[0]}, "private_key": {"inline_string": private}},
    )
    root = {"trusted_ca": {"inline_string": authority.root_pem}}
    return {
        "default": certificate,
        "ROOTCA": secret_pb2.Secret(name="ROOTCA", validation_context=root),
        "file-root:system": secret_pb2.Secret(name="file-root:system", validation_context=root),
    }


async def start_sds(path: Path, node: Node) -> Any:
    """A state-of-the-world SDS server on a Unix socket."""
    secrets = _workload_secrets(node)

    async def stream(requests: AsyncIterator[Any], context: Any) -> None:
        async for request in requests:
            if request.response_nonce:
                continue
            found = [protoconv.to_any(secrets[n]) for n in request.resource_names if n in secrets]
            await context.write(
                discovery_pb2.DiscoveryResponse(version_info="1", nonce="1", type_url=request.type_url, resources=found)
            )

    handler = grpc.stream_stream_rpc_method_handler(
        stream, discovery_pb2.DiscoveryRequest.FromString, discovery_pb2.DiscoveryResponse.SerializeToString
    )
    server = grpc.aio.server()
    name = "envoy.service.secret.v3.SecretDiscoveryService"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {"StreamSecrets": handler}),))
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    return server


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=5)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(5)
        self.sock.connect(str(self._path))


class RunningEnvoy:
    """One Envoy with the discovery server that feeds it."""

    def __init__(self, server: DiscoveryServer, node: Node, admin: Path, log: Path, pid: int, xds: Path) -> None:
        self.server, self.node, self._admin, self.log, self.pid, self.xds = server, node, admin, log, pid, xds

    def status(self) -> dict[str, Any]:
        return self.server.status()["proxies"][self.node.id]

    def _watching(self, types: set[str]) -> bool:
        proxies = self.server.status()["proxies"]
        if self.node.id not in proxies:
            return False
        known = proxies[self.node.id]["types"]
        return types <= set(known) and all(t["settled"] for t in known.values())

    async def acked(self, *types: str) -> dict[str, Any]:
        """Waits until Envoy has answered everything of these types; its status."""
        assert await self.server.wait_for(lambda: self._watching(set(types)), 20), self.log.read_text()[-3000:]
        return self.status()

    def _get(self, path: str) -> bytes:
        connection = _UnixConnection(self._admin)
        try:
            connection.request("GET", path)
            return connection.getresponse().read()
        finally:
            connection.close()

    async def get(self, path: str) -> bytes:
        return await asyncio.to_thread(self._get, path)

    async def config_dump(self) -> dict[str, Any]:
        return json.loads(await self.get("/config_dump?include_eds"))


@pytest.fixture
def run_envoy(tmp_path: Path) -> Callable[..., contextlib.AbstractAsyncContextManager[RunningEnvoy]]:
    """``async with run_envoy(mesh, node, flavour)``: Envoy and its discovery; both are gone afterwards."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare(1)")

    @contextlib.asynccontextmanager
    async def run(
        mesh: model.Mesh,
        node: Node,
        flavour: str = "delta",
        *,
        beside: RunningEnvoy | None = None,
        addresses: Sequence[str] = (),
    ) -> AsyncIterator[RunningEnvoy]:
        """In a new namespace with ``addresses`` on lo, or in that of ``beside`` and on its discovery server."""
        directory = tmp_path / f"{flavour}-{node.name}"
        directory.mkdir()
        admin, log = directory / "admin", directory / "envoy.log"
        grpc_server = None
        if beside is None:
            xds, server = directory / "xds", DiscoveryServer(mesh)
            grpc_server = await start(server, f"unix:{xds}")
            enter = ["unshare", "--net", "--"]
            setup = "ip link set lo up; " + "".join(f"ip addr add {a}/32 dev lo; " for a in addresses)
        else:
            xds, server = beside.xds, beside.server
            enter, setup = ["nsenter", "-n", "-t", str(beside.pid), "--"], ""
        sds_path = directory / "sds"
        sds = await start_sds(sds_path, node)
        config = directory / "bootstrap.json"
        config.write_text(json.dumps(bootstrap(node, xds, sds_path, admin, flavour)))
        # Who is put beside this one enters its namespace by its pid, so it must be there first.
        there, enters = os.pipe()
        with log.open("wb") as out:
            process = await asyncio.create_subprocess_exec(
                *enter, "sh", "-c", f'{setup}exec "$@" </dev/null', "sh",
                str(ENVOY), "-c", str(config), "--concurrency", "1", "-l", "warning", "--file-flush-min-size-kb", "0", "--use-dynamic-base-id",
                stdin=enters, stdout=out, stderr=out,
            )  # fmt: skip
        os.close(enters)
        try:
            with os.fdopen(there, "rb") as pipe:
                await asyncio.to_thread(pipe.read)
            yield RunningEnvoy(server, node, admin, log, process.pid, xds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            if grpc_server is not None:
                await grpc_server.stop(grace=None)
            await sds.stop(grace=None)

    return run

"""The way to discovery: plain text or TLS, names, roots, client certificates, tokens (spec: agent 9.3)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import uvloop
from agent_authority import Issuer

from agent import flags, options, upstream
from agent.errors import AgentError
from agent.metrics import Metrics
from agent.xds_proxy import CLUSTER_TYPE, DELTA, SERVICE, Upstream, XdsProxy, server_options

DEADLINE = 10.0


def run(job: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(DEADLINE):
            await job()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(limited())


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def resolved(env: Mapping[str, str], **config: Any) -> options.ProxyOptions:
    parsed = flags.parse([], options.PROXY_FLAGS, ignore_unknown=True)
    return options.resolve(parsed, {"PROXY_CONFIG": json.dumps(config), **env})


# Under a policy it is OpenSSL that does the TLS.
POLICIES = pytest.mark.parametrize("policy", ["", "fips-140-2", "fips-140-3"])


class SecureDiscovery:
    """A TLS gRPC server that answers each cluster request, and tells whom it met."""

    def __init__(self, issuer: Issuer, name: str, client_root: Issuer | None = None) -> None:
        self._issuer, self._name, self._client_root = issuer, name, client_root
        self.metadata: list[dict[str, str]] = []
        self.identities: list[list[bytes]] = []

    async def __aenter__(self) -> SecureDiscovery:
        async def serve(requests: AsyncIterator[bytes], context: Any) -> None:
            self.metadata.append(dict(context.invocation_metadata()))
            self.identities.append(list(context.peer_identities() or []))
            async for _ in requests:
                await context.write(DELTA.response(type_url=CLUSTER_TYPE, nonce="1").SerializeToString())

        self._server = grpc.aio.server()
        handlers = {DELTA.method: grpc.stream_stream_rpc_method_handler(serve)}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        root = self._client_root.pem.encode() if self._client_root else None
        credentials = grpc.ssl_server_credentials(
            [self._issuer.pair(self._name)], root, require_client_auth=root is not None
        )
        self.port = self._server.add_secure_port("127.0.0.1:0", credentials)
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)


async def one_exchange(proxy_options: options.ProxyOptions, path: Path) -> grpc.StatusCode | None:
    """What Envoy gets for one request: None for an answer, else the status of the stream's end."""
    return await exchange_with(upstream.discovery(proxy_options), Metrics(), path)


async def exchange_with(reached: Upstream, metrics: Metrics, path: Path) -> grpc.StatusCode | None:
    proxy = XdsProxy(str(path / "XDS"), reached, metrics, {})
    await proxy.start(server_options(100, 4 << 20, 30, 10))
    try:
        async with grpc.aio.insecure_channel(
            f"unix:{path / 'XDS'}", options=[("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            call = channel.stream_stream(f"/{SERVICE}/{DELTA.method}")()
            await call.write(DELTA.request(type_url=CLUSTER_TYPE).SerializeToString())
            try:
                answer = await call.read()
            except grpc.aio.AioRpcError as error:
                return error.code()
            if answer is grpc.aio.EOF:
                code: grpc.StatusCode = await call.code()
                return code
            assert DELTA.response.FromString(answer).nonce == "1"
            call.cancel()
            return None
    finally:
        await proxy.stop()


@POLICIES
def test_tls_with_a_token_that_is_read_for_each_call(tmp_path: Path, policy: str) -> None:
    async def job() -> None:
        issuer = Issuer()
        root = tmp_path / "var/run/secrets/istio/root-cert.pem"
        token = tmp_path / "var/run/secrets/tokens/istio-token"
        for path in (root, token):
            path.parent.mkdir(parents=True, exist_ok=True)
        root.write_text(issuer.pem)
        async with SecureDiscovery(issuer, "istiod.istio-system.svc") as discovery:
            env = {
                "COMPLIANCE_POLICY": policy,
                "ISTIO_META_CLUSTER_ID": "c1",
                "XDS_HEADER_X-Extra": "1",
                "ISTIOD_SAN": "istiod.istio-system.svc",
            }
            proxy = resolved(env, discoveryAddress=f"127.0.0.1:{discovery.port}")
            assert await one_exchange(proxy, tmp_path) is None
            assert "authorization" not in discovery.metadata[-1]
            for text in ("first\n", "second"):
                token.write_text(text)
                assert await one_exchange(proxy, tmp_path) is None
                assert discovery.metadata[-1]["authorization"] == f"Bearer {text.strip()}"
            assert discovery.metadata[-1]["clusterid"] == "c1"
            assert discovery.metadata[-1]["x-extra"] == "1"

    run(job)


@POLICIES
def test_a_new_root_counts_from_the_next_connection(tmp_path: Path, policy: str) -> None:
    async def job() -> None:
        first, second = Issuer("first"), Issuer("second")
        root = tmp_path / "root.pem"
        root.write_text(first.pem)
        async with SecureDiscovery(second, "d.example") as discovery:
            env = {"COMPLIANCE_POLICY": policy, "XDS_ROOT_CA": str(root), "ISTIOD_SAN": "d.example"}
            proxy = resolved(env, discoveryAddress=f"127.0.0.1:{discovery.port}")
            assert await one_exchange(proxy, tmp_path) is grpc.StatusCode.UNAVAILABLE
            root.write_text(second.pem)
            assert await one_exchange(proxy, tmp_path) is None

    run(job)


@POLICIES
def test_a_root_that_vanishes_ends_the_stream_and_not_the_agent(tmp_path: Path, policy: str) -> None:
    async def job() -> None:
        root = tmp_path / "root.pem"
        root.write_text(Issuer().pem)
        reached = upstream.discovery(
            resolved({"COMPLIANCE_POLICY": policy, "XDS_ROOT_CA": str(root)}, discoveryAddress="127.0.0.1:1")
        )
        root.unlink()
        metrics = Metrics()
        assert await exchange_with(reached, metrics, tmp_path) is grpc.StatusCode.UNAVAILABLE
        assert metrics.istiod_connection_failures.value == 1

    run(job)


@POLICIES
def test_another_name_is_refused(tmp_path: Path, policy: str) -> None:
    async def job() -> None:
        issuer = Issuer()
        root = tmp_path / "root.pem"
        root.write_text(issuer.pem)
        async with SecureDiscovery(issuer, "someone.else") as discovery:
            env = {"COMPLIANCE_POLICY": policy, "XDS_ROOT_CA": str(root), "ISTIOD_SAN": "istiod.istio-system.svc"}
            proxy = resolved(env, discoveryAddress=f"127.0.0.1:{discovery.port}")
            assert await one_exchange(proxy, tmp_path) is grpc.StatusCode.UNAVAILABLE

    run(job)


@POLICIES
def test_a_client_certificate_for_the_control_plane(tmp_path: Path, policy: str) -> None:
    async def job() -> None:
        issuer = Issuer()
        key, chain = issuer.pair("vm.example")
        for name, content in (("key.pem", key), ("cert-chain.pem", chain), ("root-cert.pem", issuer.pem.encode())):
            (tmp_path / name).write_bytes(content)
        async with SecureDiscovery(issuer, "d.example", client_root=issuer) as discovery:
            env = {"COMPLIANCE_POLICY": policy, "PROV_CERT": str(tmp_path), "ISTIOD_SAN": "d.example"}
            proxy = resolved(env, discoveryAddress=f"127.0.0.1:{discovery.port}")
            assert await one_exchange(proxy, tmp_path) is None
            assert discovery.identities == [[b"vm.example"]]

    run(job)


@pytest.mark.parametrize(
    ("env", "files", "expected"),
    [
        ({}, ["var/run/secrets/istio/root-cert.pem"], "./var/run/secrets/istio/root-cert.pem"),
        ({}, ["etc/certs/root-cert.pem", "var/run/secrets/istio/root-cert.pem"], "./etc/certs/root-cert.pem"),
        ({"XDS_ROOT_CA": "mine.pem"}, ["mine.pem", "etc/certs/root-cert.pem"], "mine.pem"),
        ({"XDS_ROOT_CA": "SYSTEM"}, [], "SYSTEM"),
        ({"PROV_CERT": "/vm"}, [], "/vm/root-cert.pem"),
    ],
)
def test_which_root(env: dict[str, str], files: list[str], expected: str) -> None:
    for name in files:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("x")
    assert upstream.xds_root(resolved(env)) == expected


def test_file_mounted_roots_come_from_proxy_metadata() -> None:
    Path("r.pem").write_text("x")
    proxy = resolved({"FILE_MOUNTED_CERTS": "true"}, proxyMetadata={"ISTIO_META_TLS_CLIENT_ROOT_CERT": "r.pem"})
    assert upstream.xds_root(proxy) == "r.pem"


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({}, "root CA file for XDS does not exist"),
        ({"XDS_ROOT_CA": "absent.pem"}, "root CA file for XDS does not exist: absent.pem"),
        ({"PILOT_CERT_PROVIDER": "none"}, "configured provider as none"),
    ],
)
def test_a_missing_root_is_fatal(env: dict[str, str], message: str) -> None:
    with pytest.raises(AgentError, match=message):
        upstream.discovery(resolved(env))


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("istiod.example:15012", "istiod.example"),
        ("localhost:15012", "istiod.istio-system.svc"),
        ("[fd00::1]:15012", "fd00::1"),
    ],
)
def test_server_names(address: str, name: str) -> None:
    assert upstream.server_name(address) == name


def test_a_discovery_address_that_is_none_is_one_line() -> None:
    with pytest.raises(AgentError, match='invalid control plane address: unable to split "garbage"'):
        upstream.server_name("garbage")


def test_a_client_certificate_that_is_no_use_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    key, chain = tmp_path / "key.pem", tmp_path / "chain.pem"

    def loaded(pair: tuple[bytes, bytes]) -> tuple[bytes | None, bytes | None]:
        key.write_bytes(pair[0])
        chain.write_bytes(pair[1])
        return upstream.load_client_certificate(str(key), str(chain))

    good = Issuer().pair("vm.example")
    assert loaded(good) == good
    assert loaded(Issuer(lifetime=-1).pair("vm.example")) == (None, None)
    assert "has expired, using the token" in caplog.text
    assert loaded((good[0], b"rubbish")) == (None, None)
    assert "no client certificate for the control plane" in caplog.text


@pytest.mark.parametrize(
    ("env", "token", "expected"),
    [
        ({"XDS_HEADER_X_Y": "1"}, "t", [("clusterid", ""), ("x_y", "1"), ("authorization", "Bearer t")]),
        ({"XDS_HEADER_A B": "1", "XDS_HEADER_": "2", "XDS_HEADER_:P": "3"}, "", [("clusterid", "")]),
        ({"ISTIO_META_CLUSTER_ID": "\u00fc", "XDS_HEADER_C": "a\nb", "XDS_HEADER_D": "\udcff"}, "", []),
        ({"XDS_HEADER_K-bin": "\u00fc"}, "", [("clusterid", ""), ("k-bin", b"\xc3\xbc")]),
        ({}, "two\nlines", [("clusterid", "")]),
    ],
)
def test_metadata_is_what_grpc_carries(
    env: dict[str, str], token: str, expected: list[tuple[str, str | bytes]]
) -> None:
    Path("var/run/secrets/tokens").mkdir(parents=True)
    Path("var/run/secrets/tokens/istio-token").write_text(token)
    assert upstream.call_metadata(resolved(env), "XDS_HEADER_") == expected

"""COMPLIANCE_POLICY towards discovery: what TLS an Envoy in front of it sees, and which ones are refused (spec: agent 2.2)."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import uvloop
from agent_authority import Issuer
from cryptography import x509
from free_ports import free_port

from agent import compliance, flags, options, upstream
from agent.envoy import find_binary
from agent.http_client import Target, fetch
from agent.metrics import Metrics
from agent.tls_relay import is_for
from agent.xds_proxy import CLUSTER_TYPE, DELTA, SERVICE, XdsProxy, server_options

DEADLINE = 20.0
NAME = "istiod.istio-system.svc"


def run(job: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(DEADLINE):
            await job()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(limited())


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Front:
    """An Envoy with TLS in front of a discovery that answers; its counters tell what TLS it was."""

    def __init__(self, port: int, admin: int, root: Path) -> None:
        self.port, self._admin, self._root = port, Target("127.0.0.1", admin), root

    async def reached(self, policy: str, directory: Path, metrics: Metrics | None = None, asked: int = 1) -> bool:
        """True if an agent under `policy` gets an answer of discovery to each of `asked` requests."""
        env = {"COMPLIANCE_POLICY": policy, "XDS_ROOT_CA": str(self._root), "ISTIOD_SAN": NAME}
        config = json.dumps({"discoveryAddress": f"127.0.0.1:{self.port}"})
        parsed = flags.parse([], options.PROXY_FLAGS, ignore_unknown=True)
        discovery = upstream.discovery(options.resolve(parsed, {"PROXY_CONFIG": config, **env}))
        proxy = XdsProxy(str(directory / "XDS"), discovery, metrics or Metrics(), {})
        await proxy.start(server_options(100, 4 << 20, 30, 10))
        try:
            local = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
            async with grpc.aio.insecure_channel(f"unix:{directory}/XDS", options=local) as channel:
                call = channel.stream_stream(f"/{SERVICE}/{DELTA.method}")()
                for number in range(asked):
                    nonce = str(number) * 300_000  # more than fits into one record of TLS, and one read
                    await call.write(DELTA.request(type_url=CLUSTER_TYPE, response_nonce=nonce).SerializeToString())
                    try:
                        answer = await call.read()
                    except grpc.aio.AioRpcError:
                        return False
                    assert DELTA.response.FromString(answer).nonce == nonce
                call.cancel()
                return True
        finally:
            await proxy.stop()

    async def seen(self) -> set[str]:
        """Versions, cipher suites and key exchanges of the connections so far."""
        text = (await fetch(self._admin, "GET", "/stats?filter=ssl&usedonly", timeout=DEADLINE)).body.decode()
        names = (line.partition(":")[0].rpartition(".ssl.")[2] for line in text.splitlines())
        return {name for name in names if name.startswith(("versions.", "ciphers.", "curves."))}


@contextlib.asynccontextmanager
async def front(tmp_path: Path, **parameters: Any) -> AsyncIterator[Front]:
    """`parameters` are Envoy's of TLS."""

    async def serve(requests: AsyncIterator[bytes], context: Any) -> None:
        async for data in requests:
            request = DELTA.request.FromString(data)
            answer = DELTA.response(type_url=CLUSTER_TYPE, nonce=request.response_nonce)
            await context.write(answer.SerializeToString())

    server = grpc.aio.server()
    handlers = {DELTA.method: grpc.stream_stream_rpc_method_handler(serve)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    behind = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    issuer = Issuer()
    key, chain = issuer.pair(NAME)
    (tmp_path / "root.pem").write_text(issuer.pem)
    (tmp_path / "pair.pem").write_bytes(key + chain)
    port, admin = free_port(), free_port()
    pem = {"filename": str(tmp_path / "pair.pem")}
    tls = {
        "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
        "common_tls_context": {
            "alpn_protocols": ["h2"],
            "tls_params": parameters,
            "tls_certificates": [{"certificate_chain": pem, "private_key": pem}],
        },
    }
    relay = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy",
        "stat_prefix": "discovery",
        "cluster": "discovery",
    }

    def address(number: int) -> dict[str, Any]:
        return {"socket_address": {"address": "127.0.0.1", "port_value": number}}

    chain_of_filters = {
        "filters": [{"name": "relay", "typed_config": relay}],
        "transport_socket": {"name": "tls", "typed_config": tls},
    }
    endpoints = [{"lb_endpoints": [{"endpoint": {"address": address(behind)}}]}]
    bootstrap = {
        "admin": {"address": address(admin)},
        "static_resources": {
            "listeners": [{"name": "front", "address": address(port), "filter_chains": [chain_of_filters]}],
            "clusters": [{"name": "discovery", "load_assignment": {"cluster_name": "d", "endpoints": endpoints}}],
        },
    }
    (tmp_path / "envoy.json").write_text(json.dumps(bootstrap))
    command = [find_binary("/usr/local/bin/envoy"), "-c", str(tmp_path / "envoy.json"), "--disable-hot-restart"]
    process = await asyncio.create_subprocess_exec(
        *command, "--concurrency", "1", "-l", "info", stderr=asyncio.subprocess.PIPE
    )
    try:
        assert process.stderr is not None
        while b"starting main dispatch loop" not in await process.stderr.readline():
            assert process.returncode is None
        yield Front(port, admin, tmp_path / "root.pem")
    finally:
        process.kill()
        await process.wait()
        await server.stop(None)


TLS_1_2, TLS_1_3 = {"tls_maximum_protocol_version": "TLSv1_2"}, {"tls_minimum_protocol_version": "TLSv1_3"}
ANYTHING = {
    "tls_maximum_protocol_version": "TLSv1_3",
    "ecdh_curves": ["X25519MLKEM768", "X25519", "P-384", "P-256"],
    "cipher_suites": ["ECDHE-ECDSA-CHACHA20-POLY1305", "ECDHE-ECDSA-AES256-GCM-SHA384"],
}


@pytest.mark.parametrize(
    ("policy", "version", "cipher", "curve"),
    [
        ("fips-140-2", "TLSv1.2", "ECDHE-ECDSA-AES256-GCM-SHA384", "P-256"),
        ("fips-140-3", "TLSv1.3", "TLS_AES_", "P-384"),
        ("pqc", "TLSv1.3", "TLS_AES_", "X25519MLKEM768"),
    ],
)
def test_what_a_policy_agrees_on(policy: str, version: str, cipher: str, curve: str, tmp_path: Path) -> None:
    async def job() -> None:
        async with front(tmp_path, **ANYTHING) as discovery:
            assert await discovery.reached(policy, tmp_path, asked=3)
            seen = await discovery.seen()
            assert f"versions.{version}" in seen
            assert f"curves.{curve}" in seen
            assert any(name.startswith(f"ciphers.{cipher}") for name in seen)
            assert len(seen) == 3
            assert not (tmp_path / "etc/istio/proxy" / upstream.RELAY).exists()

    run(job)


@pytest.mark.parametrize(
    ("policy", "parameters", "reason"),
    [
        ("fips-140-2", TLS_1_3, "protocol version"),
        ("fips-140-2", {**TLS_1_2, "cipher_suites": ["ECDHE-ECDSA-CHACHA20-POLY1305"]}, "handshake failure"),
        ("fips-140-2", {**TLS_1_2, "ecdh_curves": ["P-384"]}, "handshake failure"),
        ("fips-140-3", {**TLS_1_3, "ecdh_curves": ["X25519"]}, "handshake failure"),
        ("fips-140-3", {**TLS_1_2, "cipher_suites": ["ECDHE-ECDSA-AES128-SHA"]}, "handshake failure"),
        ("pqc", TLS_1_2, "protocol version"),
        ("pqc", {**TLS_1_3, "ecdh_curves": ["X25519", "P-256"]}, "handshake failure"),
    ],
)
def test_what_a_policy_does_not_agree_on(
    policy: str, parameters: dict[str, Any], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def job() -> None:
        async with front(tmp_path, **parameters) as discovery:
            metrics = Metrics()
            assert not await discovery.reached(policy, tmp_path, metrics)
            # A failure to connect, and no connection that ended.
            assert metrics.istiod_connection_failures.value == 1
            assert f"no TLS with 127.0.0.1:{discovery.port}: " in caplog.text
            assert reason in caplog.text
            assert f"UNAVAILABLE: no TLS with 127.0.0.1:{discovery.port}: " in caplog.text  # what Envoy is told
            # gRPC by itself takes that, but for cipher suites that it has not.
            assert await discovery.reached("", tmp_path) is ("cipher_suites" not in parameters)

    run(job)


def test_an_unknown_policy_is_none_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def job() -> None:
        async with front(tmp_path, **TLS_1_3) as discovery:
            assert await discovery.reached("fips-140-9", tmp_path)
            assert 'unknown compliance policy: "fips-140-9"' in caplog.text

    run(job)


def test_a_server_that_cannot_be_reached_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def job() -> None:
        async with front(tmp_path) as discovery:
            pass
        assert not await discovery.reached("pqc", tmp_path)
        assert f"no TLS with 127.0.0.1:{discovery.port}: Connection refused" in caplog.text

    run(job)


def test_the_relay_is_for_the_agents_user_alone(tmp_path: Path) -> None:
    async def job() -> None:
        parsed = flags.parse([], options.PROXY_FLAGS, ignore_unknown=True)
        (tmp_path / "root.pem").write_text(Issuer().pem)
        env = {"COMPLIANCE_POLICY": "pqc", "XDS_ROOT_CA": "root.pem"}
        reached = upstream.discovery(options.resolve(parsed, env))
        channel = reached.connect()
        assert Path("etc/istio/proxy", upstream.RELAY).stat().st_mode & 0o777 == 0o600
        await channel.close(None)
        assert reached.close is not None
        await reached.close()

    run(job)


@pytest.mark.parametrize(
    ("names", "name", "fits"),
    [
        ([x509.DNSName("a.example")], "A.example.", True),
        ([x509.DNSName("b.example"), x509.DNSName("a.example")], "a.example", True),
        ([x509.DNSName("*.example")], "a.example", True),
        ([x509.DNSName("*.example")], "b.a.example", False),
        ([x509.DNSName("*.example")], "example", False),
        ([x509.DNSName("*")], "a", False),
        ([x509.DNSName("10.0.0.1")], "10.0.0.1", False),
        ([x509.UniformResourceIdentifier("spiffe://a/b")], "a", False),
    ],
)
def test_names_of_certificates(names: list[x509.GeneralName], name: str, fits: bool) -> None:
    issuer = Issuer()
    certificate = x509.load_pem_x509_certificate(issuer.issue(issuer.key.public_key(), names).encode())
    assert is_for(certificate, name) is fits


def test_policies_have_the_references_names() -> None:
    assert set(compliance.POLICIES) == {"fips-140-2", "fips-140-3", "pqc"}

"""Certificates: CSR, CA client, cache and renewal, files, and the SDS server (spec: agent 11)."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import uvloop
from agent_authority import Authority, Issuer
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from envoy.extensions.transport_sockets.tls.v3 import secret_pb2
from envoy.service.discovery.v3 import discovery_pb2
from google.rpc import status_pb2

from agent import proxy_config
from agent.ca_client import CAClient, CAError
from agent.compliance import POLICIES, Policy
from agent.csr import KeyOptions, generate_csr, spiffe_id
from agent.errors import AgentError
from agent.metrics import Metrics
from agent.sds import SECRET_TYPE, SERVICE, SDSServer, envoy_secret
from agent.secrets import DEFAULT, ROOT, Secret, SecretError, SecretManager, merge_roots, rotation_delay
from agent.security import CertificateFiles, SecurityOptions
from agent.watch import FileWatcher
from agent.xds_proxy import server_options

DEADLINE = 20.0
ROOT_DIRECTORY = Path(__file__).resolve().parents[3]
IDENTITY = "spiffe://cluster.local/ns/default/sa/reviews"


def run(job: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(DEADLINE):
            await job()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(limited())


@pytest.mark.parametrize(
    ("options", "kind", "header"),
    [
        (KeyOptions(), rsa.RSAPrivateKey, b"-----BEGIN RSA PRIVATE KEY-----"),
        (KeyOptions(pkcs8=True), rsa.RSAPrivateKey, b"-----BEGIN PRIVATE KEY-----"),
        (KeyOptions(ecdsa=True), ec.EllipticCurvePrivateKey, b"-----BEGIN EC PRIVATE KEY-----"),
        (KeyOptions(ecdsa=True, curve="P384"), ec.EllipticCurvePrivateKey, b"-----BEGIN EC PRIVATE KEY-----"),
    ],
)
def test_csr(options: KeyOptions, kind: type[Any], header: bytes) -> None:
    key_pem, csr_pem = generate_csr(IDENTITY, options)
    assert key_pem.startswith(header)
    key = serialization.load_pem_private_key(key_pem, None)
    assert isinstance(key, kind)
    csr = x509.load_pem_x509_csr(csr_pem)
    assert csr.is_signature_valid
    assert csr.public_key() == key.public_key()
    names = csr.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    assert names.critical
    assert names.value.get_values_for_type(x509.UniformResourceIdentifier) == [IDENTITY]
    assert len(list(names.value)) == 1
    assert csr.subject.rfc4514_string() == "O="
    if isinstance(key, ec.EllipticCurvePrivateKey):
        assert key.curve.name == ("secp384r1" if options.curve == "P384" else "secp256r1")


def test_each_csr_has_a_new_key() -> None:
    options = KeyOptions(ecdsa=True)
    assert generate_csr(IDENTITY, options)[0] != generate_csr(IDENTITY, options)[0]


def test_small_rsa_keys_are_an_error() -> None:
    with pytest.raises(AgentError, match="requested key size 1024 is smaller than the minimum of 2048 bits"):
        KeyOptions(rsa_bits=1024)


def test_spiffe_id() -> None:
    assert spiffe_id("cluster.local", "default", "reviews") == IDENTITY


@pytest.mark.parametrize(
    ("ratio", "jitter", "sign", "expected"),
    [
        (0.5, 0.01, 0.0, 43200.0),
        (0.5, 0.01, 1.0, 42336.0),
        (0.5, 0.01, -1.0, 44064.0),
        (1.5, 0.0, 0.0, 0.0),
        (-0.5, 0.0, 0.0, 86400.0),
        (0.0, 0.0, 0.0, 86400.0),
    ],
)
def test_rotation_delay_of_a_day(ratio: float, jitter: float, sign: float, expected: float) -> None:
    assert rotation_delay(1086400.0, 1000000.0, ratio, jitter, 1000000.0, sign) == pytest.approx(expected)


def test_an_expired_certificate_is_renewed_at_once() -> None:
    assert rotation_delay(100.0, 50.0, 0.5, 0.0, 200.0, 0.0) == 0.0


def test_merged_roots_are_sorted_and_unique() -> None:
    one, two = Issuer("one").pem.encode(), Issuer("two").pem.encode()
    merged = merge_roots(two + one, one.replace(b"\n", b"\r\n"), b"rubbish")
    assert merged == b"".join(sorted([one, two]))


def options(authority: Authority | None = None, **settings: Any) -> SecurityOptions:
    address = f"127.0.0.1:{authority.port}" if authority is not None else "127.0.0.1:1"
    defaults: dict[str, Any] = {"key": KeyOptions(ecdsa=True), "prefetch": False, "file_retry": 0.05}
    return SecurityOptions(IDENTITY, address, **{**defaults, **settings})


def client(security: SecurityOptions, metrics: Metrics | None = None, token: str = "t0ken") -> CAClient:
    def metadata() -> list[tuple[str, str]]:
        return [("clusterid", "Kubernetes"), ("authorization", f"Bearer {token}")]

    return CAClient(security, metadata, metrics or Metrics(), (30.0, 10.0))


def test_what_the_ca_gets(tmp_path: Path) -> None:
    async def job() -> None:
        async with Authority(Issuer()) as authority:
            security = options(authority, cert_signer="signer", ttl=86400.0)
            secrets = SecretManager(security, client(security), Metrics())
            secret = await secrets.generate(DEFAULT)
            request = authority.requests[0]
            assert request.validity_duration == 86400
            assert request.metadata["CertSigner"] == "signer"
            assert authority.metadata[0]["clusterid"] == "Kubernetes"
            assert authority.metadata[0]["authorization"] == "Bearer t0ken"
            chain = x509.load_pem_x509_certificates(secret.chain)
            assert [cert.subject for cert in chain][1] == authority.issuer.certificate.subject
            assert len(chain) == 2
            key = serialization.load_pem_private_key(secret.key, None)
            assert chain[0].public_key() == key.public_key()
            root = await secrets.generate(ROOT)
            assert root.root == authority.issuer.pem.encode()
            assert root.key == root.chain == b""
            other = await secrets.generate("anything-else")
            assert other.chain == secret.chain
            assert len(authority.requests) == 1
            await secrets.close()

    run(job)
    assert list(tmp_path.iterdir()) == []


def test_requests_at_once_make_one_certificate() -> None:
    async def job() -> None:
        async with Authority(Issuer()) as authority:
            security = options(authority)
            secrets = SecretManager(security, client(security), Metrics())
            made = await asyncio.gather(*(secrets.generate(name) for name in (DEFAULT, ROOT) * 5))
            assert len({secret.chain for secret in made if secret.chain}) == 1
            assert len(authority.requests) == 1
            await secrets.close()

    run(job)


@pytest.mark.parametrize("policy", [None, *POLICIES.values()], ids=["none", *POLICIES])
def test_tls_to_the_ca(tmp_path: Path, policy: Policy | None) -> None:
    async def job() -> None:
        issuer = Issuer()
        under: dict[str, Any] = {"policy": policy, "relay": str(tmp_path / "CA")}
        root = tmp_path / "root.pem"
        root.write_text(issuer.pem)
        async with Authority(issuer, tls_name="istiod.istio-system.svc") as authority:
            good = options(authority, ca_root=str(root), ca_server_name="istiod.istio-system.svc", **under)
            ca = client(good)
            assert len(await ca.sign(generate_csr(IDENTITY, good.key)[1], 60)) == 2
            await ca.close()
            wrong = options(authority, ca_root=str(root), ca_server_name="someone.else", **under)
            ca = client(wrong)
            with pytest.raises(CAError, match="UNAVAILABLE"):
                await ca.sign(generate_csr(IDENTITY, wrong.key)[1], 60)
            # A root that is gone is a failure like another: whoever renews a certificate tries again.
            root.unlink()
            with pytest.raises(CAError, match="cannot connect to the CA: failed to find root CA cert"):
                await ca.sign(generate_csr(IDENTITY, wrong.key)[1], 60)
            await ca.close()

    run(job)


def test_retries_of_the_ca_client() -> None:
    async def job() -> None:
        async with Authority(Issuer()) as authority:
            metrics = Metrics()
            security = options(authority)
            ca = client(security, metrics)
            csr = generate_csr(IDENTITY, security.key)[1]
            codes = grpc.StatusCode
            authority.failures = [codes.UNAVAILABLE, codes.RESOURCE_EXHAUSTED, codes.INTERNAL, codes.ABORTED]
            assert len(await ca.sign(csr, 60)) == 2
            assert len(authority.requests) == 5
            assert metrics.num_outgoing_retries.values == {"csr": 4}
            authority.failures = [codes.UNAUTHENTICATED]
            with pytest.raises(CAError, match="UNAUTHENTICATED told to fail"):
                await ca.sign(csr, 60)
            assert len(authority.requests) == 6
            assert metrics.num_failed_outgoing_requests.values == {"csr": 1}
            assert metrics.num_outgoing_requests.values == {"csr": 2}
            authority.chain = ["only one"]
            with pytest.raises(CAError, match="invalid empty CertChain"):
                await ca.sign(csr, 60)
            await ca.close()

    run(job)


def test_the_fifth_failure_is_the_last() -> None:
    async def job() -> None:
        async with Authority(Issuer()) as authority:
            security = options(authority)
            ca = client(security)
            authority.failures = [grpc.StatusCode.UNAVAILABLE] * 9
            with pytest.raises(CAError):
                await ca.sign(generate_csr(IDENTITY, security.key)[1], 60)
            assert len(authority.requests) == 5
            await ca.close()

    run(job)


class SDSRig:
    """An SDS server with its secrets, and Envoy's side."""

    def __init__(self, tmp_path: Path, security: SecurityOptions, with_ca: bool = True, **server: Any) -> None:
        self.path = str(tmp_path / "socket")
        self.metrics = Metrics()
        ca = client(security, self.metrics) if with_ca else None
        self.secrets = SecretManager(security, ca, self.metrics)
        self.server = SDSServer(self.path, self.secrets, self.metrics, **server)
        self._calls: list[Any] = []

    async def __aenter__(self) -> SDSRig:
        await self.server.start(server_options(100, 4 << 20, 30, 10))
        self.secrets.start()
        self.channel = grpc.aio.insecure_channel(f"unix:{self.path}", options=[("grpc.use_local_subchannel_pool", 1)])
        return self

    async def __aexit__(self, *_: object) -> None:
        for call in self._calls:
            call.cancel()
        await self.channel.close(None)
        await self.secrets.close()
        await self.server.stop()

    def stream(self) -> Any:
        call = self.channel.stream_stream(
            f"/{SERVICE}/StreamSecrets",
            request_serializer=discovery_pb2.DiscoveryRequest.SerializeToString,
            response_deserializer=discovery_pb2.DiscoveryResponse.FromString,
        )()
        self._calls.append(call)
        return call

    async def ask(self, *names: str) -> tuple[Any, Any]:
        call = self.stream()
        request = discovery_pb2.DiscoveryRequest(type_url=SECRET_TYPE, resource_names=names)
        request.node.id = "sidecar~1.2.3.4~a.b~c"
        await call.write(request)
        return call, await call.read()


def secrets_of(response: Any) -> dict[str, secret_pb2.Secret]:
    found = {}
    for resource in response.resources:
        secret = secret_pb2.Secret()
        assert resource.Unpack(secret)
        found[secret.name] = secret
    return found


def ack(response: Any, *names: str, error: str = "") -> discovery_pb2.DiscoveryRequest:
    request = discovery_pb2.DiscoveryRequest(
        type_url=SECRET_TYPE, resource_names=names, response_nonce=response.nonce, version_info=response.version_info
    )
    if error:
        request.error_detail.CopyFrom(status_pb2.Status(code=13, message=error))
    return request


def test_a_stream_of_secrets(tmp_path: Path) -> None:
    async def job() -> None:
        async with Authority(Issuer()) as authority, SDSRig(tmp_path, options(authority)) as rig:
            assert os.stat(rig.path).st_mode & 0o777 == 0o666
            call, response = await rig.ask(DEFAULT)
            secret = secrets_of(response)[DEFAULT]
            assert secret.tls_certificate.private_key.inline_bytes.startswith(b"-----BEGIN EC PRIVATE KEY")
            assert secret.tls_certificate.certificate_chain.inline_bytes.count(b"BEGIN CERTIFICATE") == 2
            assert response.type_url == SECRET_TYPE
            assert response.version_info.endswith("/1")
            await call.write(ack(response, DEFAULT))
            await call.write(ack(response, DEFAULT, error="no"))
            await call.write(ack(response, DEFAULT, ROOT))
            added = await call.read()
            found = secrets_of(added)
            assert list(found) == [ROOT]
            assert found[ROOT].validation_context.trusted_ca.inline_bytes == authority.issuer.pem.encode()
            assert added.nonce != response.nonce
            await call.write(ack(response, DEFAULT, ROOT, "third"))
            await call.write(ack(added))
            rig.server.push(ROOT)
            await call.write(ack(added, ROOT))
            again = await call.read()
            assert list(secrets_of(again)) == [ROOT]

    run(job)


def test_only_watching_streams_get_a_push(tmp_path: Path) -> None:
    async def job() -> None:
        async with Authority(Issuer()) as authority, SDSRig(tmp_path, options(authority)) as rig:
            certificate, _ = await rig.ask(DEFAULT)
            root, _ = await rig.ask(ROOT)
            rig.server.push(ROOT)
            assert list(secrets_of(await root.read())) == [ROOT]
            rig.server.push(DEFAULT)
            assert list(secrets_of(await certificate.read())) == [DEFAULT]

    run(job)


def test_a_request_without_a_nonce_asks_for_everything_again(tmp_path: Path) -> None:
    async def job() -> None:
        async with Authority(Issuer()) as authority, SDSRig(tmp_path, options(authority)) as rig:
            call, _ = await rig.ask(DEFAULT, ROOT)
            again = discovery_pb2.DiscoveryRequest(type_url=SECRET_TYPE, resource_names=[DEFAULT, ROOT])
            await call.write(again)
            assert set(secrets_of(await call.read())) == {DEFAULT, ROOT}

    run(job)


def test_who_asks_for_a_new_root_gets_it_once(tmp_path: Path) -> None:
    async def job() -> None:
        async with Authority(Issuer()) as authority, SDSRig(tmp_path, options(authority)) as rig:
            await rig.secrets.generate(DEFAULT)
            rig.secrets._drop_workload()
            authority.issuer = Issuer("other")
            pushed: list[str] = []
            rig.secrets.on_change(pushed.append, lambda: True)
            assert (await rig.secrets.generate(ROOT)).root == authority.issuer.pem.encode()
            assert pushed == []
            rig.secrets._drop_workload()
            authority.issuer = Issuer("third")
            await rig.secrets.generate(DEFAULT)
            assert pushed == [ROOT]

    run(job)


def test_pushes_and_answers_at_once_share_a_stream(tmp_path: Path) -> None:
    async def job() -> None:
        async with Authority(Issuer()) as authority, SDSRig(tmp_path, options(authority)) as rig:
            for number in range(50):
                call, first = await rig.ask(DEFAULT)
                more = discovery_pb2.DiscoveryRequest(type_url=SECRET_TYPE, response_nonce=first.nonce)
                more.resource_names.extend([DEFAULT, ROOT, f"other-{number}"])
                await call.write(more)
                for _ in range(5):
                    rig.server.push(DEFAULT)
                for _ in range(5):
                    assert await call.read() is not grpc.aio.EOF, await call.details()
                call.cancel()

    run(job)


@pytest.mark.parametrize("method", ["FetchSecrets", "DeltaSecrets"])
def test_other_methods_are_unimplemented(tmp_path: Path, method: str) -> None:
    async def job() -> None:
        async with SDSRig(tmp_path, options(), with_ca=False) as rig:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await rig.channel.unary_unary(f"/{SERVICE}/{method}")(b"")
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

    run(job)


def test_a_first_request_without_a_node_is_refused(tmp_path: Path) -> None:
    async def job() -> None:
        async with SDSRig(tmp_path, options(), with_ca=False) as rig:
            call = rig.stream()
            await call.write(discovery_pb2.DiscoveryRequest(resource_names=[DEFAULT]))
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT

    run(job)


def test_a_secret_that_cannot_be_made_ends_the_stream(tmp_path: Path) -> None:
    async def job() -> None:
        async with SDSRig(tmp_path, options(), with_ca=False) as rig:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await rig.ask(DEFAULT)
            assert caught.value.code() is grpc.StatusCode.UNKNOWN
            assert "failed to generate secret for default" in (caught.value.details() or "")

    run(job)


def test_rotation_pushes_a_new_certificate_and_not_an_unchanged_root(tmp_path: Path) -> None:
    async def job() -> None:
        async with Authority(Issuer(lifetime=2.0)) as authority, SDSRig(tmp_path, options(authority)) as rig:
            call, first = await rig.ask(DEFAULT)
            root, _ = await rig.ask(ROOT)
            second = await call.read()
            third = await call.read()
            chains = {
                secrets_of(r)[DEFAULT].tls_certificate.certificate_chain.inline_bytes for r in (first, second, third)
            }
            keys = {secrets_of(r)[DEFAULT].tls_certificate.private_key.inline_bytes for r in (first, second, third)}
            assert len(chains) == len(keys) == 3
            assert len(authority.requests) == 3
            rig.server.push(ROOT)
            await root.read()

    run(job)


def test_a_new_root_is_pushed(tmp_path: Path) -> None:
    async def job() -> None:
        async with Authority(Issuer(lifetime=1.5)) as authority, SDSRig(tmp_path, options(authority)) as rig:
            await rig.ask(DEFAULT)
            call, first = await rig.ask(ROOT)
            authority.issuer = Issuer("other", lifetime=60)
            second = await call.read()
            pems = [secrets_of(r)[ROOT].validation_context.trusted_ca.inline_bytes for r in (first, second)]
            assert pems[0] != pems[1] == authority.issuer.pem.encode()

    run(job)


def test_a_certificate_that_nobody_watches_is_not_renewed(tmp_path: Path) -> None:
    async def job() -> None:
        async with Authority(Issuer(lifetime=0.8)) as authority, SDSRig(tmp_path, options(authority)) as rig:
            await rig.secrets.generate(DEFAULT)
            assert rig.secrets._rotation is not None
            await rig.secrets._rotation
            assert len(authority.requests) == 1
            await rig.ask(DEFAULT)
            assert len(authority.requests) == 2

    run(job)


def test_certificates_that_have_expired_are_not_asked_for_without_a_pause(tmp_path: Path) -> None:
    async def job() -> None:
        async with Authority(Issuer(lifetime=-5)) as authority, SDSRig(tmp_path, options(authority)) as rig:
            started = asyncio.get_running_loop().time()
            await rig.ask(DEFAULT)
            await authority.received(3)
            # Half a second, then one.
            assert asyncio.get_running_loop().time() - started >= 1.4
            authority.issuer = Issuer()
            await authority.received(4)
            assert rig.secrets._rotation is not None

    run(job)


def test_renewal_goes_on_while_the_ca_fails(tmp_path: Path) -> None:
    async def job() -> None:
        async with Authority(Issuer(lifetime=1.6)) as authority, SDSRig(tmp_path, options(authority)) as rig:
            call, first = await rig.ask(DEFAULT)
            authority.failures = [grpc.StatusCode.PERMISSION_DENIED]
            second = await call.read()
            assert secrets_of(first) != secrets_of(second)
            assert rig.metrics.num_failed_outgoing_requests.values == {"csr": 1}
            expiry = [line for line in rig.metrics.render().splitlines() if line.startswith("istio_agent_cert_expiry")]
            assert expiry[0].startswith('istio_agent_cert_expiry_seconds{resource_name="default"} ')

    run(job)


def test_prefetch_retries_until_the_ca_answers(tmp_path: Path) -> None:
    async def job() -> None:
        async with Authority(Issuer()) as authority:
            authority.failures = [grpc.StatusCode.PERMISSION_DENIED]
            async with SDSRig(tmp_path, options(authority, prefetch=True)) as rig:
                await authority.received(2)
                call, _ = await rig.ask(DEFAULT)
                assert len(authority.requests) == 2
                call.cancel()

    run(job)


def test_a_trust_bundle_widens_the_root_and_renews(tmp_path: Path) -> None:
    async def job() -> None:
        async with Authority(Issuer()) as authority, SDSRig(tmp_path, options(authority)) as rig:
            certificate, first = await rig.ask(DEFAULT)
            root, _ = await rig.ask(ROOT)
            extra = Issuer("extra").pem.encode()
            rig.secrets.update_trust_bundle(extra)
            bundle = secrets_of(await root.read())[ROOT].validation_context.trusted_ca.inline_bytes
            assert bundle == merge_roots(extra, authority.issuer.pem.encode())
            assert bundle.count(b"BEGIN CERTIFICATE") == 2
            assert secrets_of(await certificate.read()) != secrets_of(first)
            rig.secrets.update_trust_bundle(extra)
            assert len(authority.requests) == 2

    run(job)


def write_pair(directory: Path, issuer: Issuer, name: str = "workload") -> CertificateFiles:
    key, chain = issuer.pair(name)
    files = CertificateFiles(*(str(directory / name) for name in ("cert-chain.pem", "key.pem", "root-cert.pem")))
    Path(files.key).write_bytes(key)
    Path(files.chain).write_bytes(chain)
    Path(files.root).write_text(issuer.pem)
    return files


def test_mounted_files_take_precedence_and_changes_are_pushed(tmp_path: Path) -> None:
    async def job() -> None:
        directory = tmp_path / "certs"
        directory.mkdir()
        files = write_pair(directory, Issuer("first"))
        async with SDSRig(tmp_path, options(files=files), with_ca=False) as rig:
            certificate, first = await rig.ask(DEFAULT)
            root, response = await rig.ask(ROOT)
            secret = secrets_of(first)[DEFAULT].tls_certificate
            assert secret.certificate_chain.inline_bytes == Path(files.chain).read_bytes()
            assert secret.private_key.inline_bytes == Path(files.key).read_bytes()
            assert (
                secrets_of(response)[ROOT].validation_context.trusted_ca.inline_bytes == Path(files.root).read_bytes()
            )
            write_pair(directory, Issuer("second"))
            pushed = secrets_of(await certificate.read())[DEFAULT].tls_certificate
            assert pushed.certificate_chain.inline_bytes == Path(files.chain).read_bytes()
            new_root = secrets_of(await root.read())[ROOT].validation_context.trusted_ca.inline_bytes
            assert new_root == Path(files.root).read_bytes()

    run(job)


def test_named_files(tmp_path: Path) -> None:
    async def job() -> None:
        files = write_pair(tmp_path, Issuer())
        pair, root = f"file-cert:{files.chain}~{files.key}", f"file-root:{files.root}"
        async with SDSRig(tmp_path, options(), with_ca=False, crl=files.root) as rig:
            _, response = await rig.ask(pair, root)
            found = secrets_of(response)
            assert found[pair].tls_certificate.certificate_chain.inline_bytes == Path(files.chain).read_bytes()
            assert found[root].validation_context.trusted_ca.inline_bytes == Path(files.root).read_bytes()
            assert found[root].validation_context.crl.filename == files.root
            with pytest.raises(SecretError, match="invalid resource name"):
                await rig.secrets.generate("file-cert:/only/one")

    run(job)


def test_the_system_bundle() -> None:
    async def job() -> None:
        secrets = SecretManager(options(), None, Metrics())
        if os.path.exists("/etc/ssl/certs/ca-certificates.crt"):
            assert (await secrets.generate("file-root:system")).root.count(b"BEGIN CERTIFICATE") > 10
        else:
            with pytest.raises(SecretError, match="no CA bundle"):
                await secrets.generate("file-root:system")
        await secrets.close()

    run(job)


def test_bad_certificates_in_a_root_file_are_skipped(tmp_path: Path) -> None:
    async def job() -> None:
        good = Issuer().pem
        path = tmp_path / "root.pem"
        path.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n" + good)
        secrets = SecretManager(options(), None, Metrics())
        assert (await secrets.generate(f"file-root:{path}")).root == good.encode()
        await secrets.close()

    run(job)


def test_a_key_that_does_not_fit_is_waited_for(tmp_path: Path) -> None:
    async def job() -> None:
        files = write_pair(tmp_path, Issuer())
        good = Path(files.key).read_bytes()
        Path(files.key).write_bytes(Issuer().pair("x")[0])
        secrets = SecretManager(options(files=files), None, Metrics())
        waiting = asyncio.create_task(secrets.generate(DEFAULT))
        done, _ = await asyncio.wait({waiting}, timeout=0.1)
        assert not done
        Path(files.key).write_bytes(good)
        assert (await waiting).key == good
        await secrets.close()

    run(job)


ENCRYPTED_KEY = """
import asyncio, fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from agent import secrets
from agent.metrics import Metrics
from agent.security import SecurityOptions
secrets.FILE_TIMEOUT_SECONDS = 0.0
manager = secrets.SecretManager(SecurityOptions("spiffe://a/ns/b/sa/c", "x:15010"), None, Metrics())
try:
    asyncio.run(manager.generate("file-cert:chain.pem~key.pem"))
except secrets.SecretError as error:
    print(error)
"""


def test_a_key_with_a_password_is_an_error_and_no_question_at_the_terminal(tmp_path: Path) -> None:
    pem, chain = Issuer().pair("x.example")
    key: Any = serialization.load_pem_private_key(pem, None)
    locked = serialization.BestAvailableEncryption(b"secret")
    (tmp_path / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)
    )
    (tmp_path / "chain.pem").write_bytes(chain)
    ours, theirs = os.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", ENCRYPTED_KEY], stdin=theirs, capture_output=True, text=True, timeout=DEADLINE,
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT_DIRECTORY)}, start_new_session=True, check=True,
        )  # fmt: skip
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.stdout.startswith("failed to load chain.pem")


def test_output_certificates(tmp_path: Path) -> None:
    async def job() -> None:
        output = tmp_path / "out"
        output.mkdir()
        async with Authority(Issuer()) as authority:
            security = options(authority, output_directory=str(output), output_mode=0o640)
            secrets = SecretManager(security, client(security), Metrics())
            secret = await secrets.generate(DEFAULT)
            await secrets.generate(ROOT)
            assert (output / "key.pem").read_bytes() == secret.key
            assert (output / "cert-chain.pem").read_bytes() == secret.chain
            assert (output / "root-cert.pem").read_text() == authority.issuer.pem
            assert {path.stat().st_mode & 0o777 for path in output.iterdir()} == {0o640}
            before = {path.name: path.stat().st_ino for path in output.iterdir()}
            await secrets.generate(DEFAULT)
            assert {path.name: path.stat().st_ino for path in output.iterdir()} == before
            await secrets.close()

    run(job)


def test_output_directory_is_not_read_back_as_mounted_files(tmp_path: Path) -> None:
    async def job() -> None:
        files = write_pair(tmp_path, Issuer("stale"))
        async with Authority(Issuer("ca")) as authority:
            security = options(authority, files=files, output_directory=str(tmp_path))
            secrets = SecretManager(security, client(security), Metrics())
            await secrets.generate(DEFAULT)
            assert len(authority.requests) == 1
            await secrets.close()

    run(job)


@pytest.mark.parametrize("way", ["write", "rename", "recreate", "kubernetes"])
def test_watching_a_file(tmp_path: Path, way: str) -> None:
    async def job() -> None:
        counter = itertools.count()
        path = tmp_path / "root.pem"
        if way == "kubernetes":
            for version in ("..v1", "..v2"):
                (tmp_path / version).mkdir()
                (tmp_path / version / "root.pem").write_text(version)
            (tmp_path / "..data").symlink_to("..v1")
            path.symlink_to("..data/root.pem")
        else:
            path.write_text("old")
        changed: asyncio.Queue[int] = asyncio.Queue()
        watcher = FileWatcher()
        watcher.watch(str(path), "key", lambda: changed.put_nowait(next(counter)))
        watcher.watch(str(path), "key", lambda: pytest.fail("watched twice"))
        for _ in range(2):
            if way == "write":
                path.write_text(path.read_text() + "more")
            elif way == "rename":
                new = tmp_path / "new"
                new.write_text("replaced")
                new.rename(path)
            elif way == "recreate":
                path.unlink()
                await asyncio.sleep(0)
                path.write_text("created")
            else:
                target = "..v2" if os.readlink(tmp_path / "..data") == "..v1" else "..v1"
                (tmp_path / "..tmp").symlink_to(target)
                (tmp_path / "..tmp").rename(tmp_path / "..data")
            await changed.get()
        watcher.close()

    run(job)


def test_private_key_providers() -> None:
    secret = Secret(b"chain", b"key")
    layer = {"privateKeyProvider": {"cryptomb": {"pollDelay": "10ms", "fallback": True}}}
    provider = proxy_config.merge(proxy_config.defaults(), layer).private_key_provider
    certificate = envoy_secret(DEFAULT, secret, "", provider).tls_certificate
    assert certificate.private_key_provider.provider_name == "cryptomb"
    assert certificate.private_key_provider.fallback is True
    config = certificate.private_key_provider.typed_config
    assert config.type_url.endswith("cryptomb.v3alpha.CryptoMbPrivateKeyMethodConfig")
    assert b"key" in config.value
    assert not certificate.HasField("private_key")

"""Extension configurations with remote Wasm modules: from a real HTTP server and registry to a file (spec: agent 10)."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import hashlib
import http.server
import io
import json
import os
import socket
import tarfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from envoy.config.core.v3 import extension_pb2
from envoy.extensions.filters.http.rbac.v3 import rbac_pb2
from envoy.extensions.filters.http.router.v3 import router_pb2
from envoy.extensions.filters.http.wasm.v3 import wasm_pb2
from envoy.extensions.filters.network.rbac.v3 import rbac_pb2 as network_rbac_pb2
from envoy.extensions.filters.network.wasm.v3 import wasm_pb2 as network_wasm_pb2
from google.protobuf import json_format
from google.protobuf.any_pb2 import Any as AnyMessage
from udpa.type.v1 import typed_struct_pb2

from agent.environment import Environment
from agent.metrics import Metrics
from agent.wasm import login
from agent.wasm.cache import ModuleCache, Wanted
from agent.wasm.convert import ConversionError, convert
from agent.wasm.fetch import FetchError, refused, unwrap
from agent.wasm.oci import _unsafe
from agent.wasm.options import WasmOptions, from_environment

MODULE = b"\0asm\1\0\0\0" + bytes(range(64))
OTHER = b"\0asm\1\0\0\0other"
SUM = hashlib.sha256(MODULE).hexdigest()
DEADLINE = 20.0


def run(job: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(DEADLINE):
            await job()

    asyncio.run(limited())


class Site:
    """An HTTP server on the loopback address: path -> (status, headers, body), or a function of the request's headers."""

    def __init__(self) -> None:
        self.pages: dict[str, Any] = {}
        self.asked: list[str] = []
        site = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.asked.append(self.path)
                page = site.pages.get(self.path.partition("?")[0], (404, {}, b""))
                status, headers, body = page(self) if callable(page) else page
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                """Nobody reads it."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join(DEADLINE)
        self.server.server_close()

    def url(self, path: str) -> str:
        return f"http://{self.host}{path}"

    def serve(self, path: str, body: bytes, status: int = 200, **headers: str) -> str:
        self.pages[path] = (status, headers, body)
        return self.url(path)


@pytest.fixture
def site() -> Iterator[Site]:
    found = Site()
    with contextlib.closing(found):
        yield found


class Rig:
    def __init__(self, tmp_path: Path, **options: Any) -> None:
        self.directory = tmp_path / "data"
        self.metrics = Metrics()
        self.cache = ModuleCache(WasmOptions(directory=str(self.directory), **{"attempts": 1, **options}), self.metrics)

    async def get(self, url: str, **more: Any) -> bytes:
        return Path(await self.cache.get(Wanted(url, **{"timeout": DEADLINE, **more}))).read_bytes()

    async def convert(self, *resources: AnyMessage) -> list[Any]:
        """The extension configurations that come out."""
        found = []
        for resource in await convert(resources, self.cache, self.metrics):
            config = extension_pb2.TypedExtensionConfig()
            assert resource.Unpack(config)
            found.append(config)
        return found


def packed(message: Any) -> AnyMessage:
    out = AnyMessage()
    out.Pack(message)
    return out


def resource(inner: Any, name: str = "ns.plugin") -> AnyMessage:
    config = extension_pb2.TypedExtensionConfig(name=name)
    config.typed_config.Pack(inner)
    return packed(config)


def plugin(code: dict[str, Any], kind: Any = wasm_pb2.Wasm, **more: Any) -> Any:
    vm = {"runtime": "envoy.wasm.runtime.v8", "code": code, **more.pop("vm", {})}
    return json_format.ParseDict({"config": {"name": "p", "vm_config": vm, **more}}, kind())


def remote(url: str, sha256: str = "nil", timeout: str = "10s") -> dict[str, Any]:
    return {"remote": {"http_uri": {"uri": url, "timeout": timeout, "cluster": "_"}, "sha256": sha256}}


def file_of(config: Any, kind: Any = wasm_pb2.Wasm) -> bytes:
    wasm = kind()
    assert config.typed_config.Unpack(wasm)
    return Path(wasm.config.vm_config.code.local.filename).read_bytes()


# --- conversion -----------------------------------------------------------------------------------


def test_a_remote_module_becomes_a_local_file(tmp_path: Path, site: Site) -> None:
    async def job() -> None:
        rig = Rig(tmp_path)
        values = {"ISTIO_META_WASM_PLUGIN_RESOURCE_VERSION": "1", "MINE": "kept"}
        wasm = plugin(remote(site.serve("/m.wasm", MODULE), SUM), vm={"environment_variables": {"key_values": values}})
        network = plugin(remote(site.url("/m.wasm")), network_wasm_pb2.Wasm)
        untouched = resource(router_pb2.Router())
        local = resource(plugin({"local": {"filename": "/x.wasm"}}))
        first, second, third, fourth = await rig.convert(resource(wasm), resource(network), untouched, local)
        assert first.name == "ns.plugin"
        assert file_of(first) == MODULE
        out = wasm_pb2.Wasm()
        first.typed_config.Unpack(out)
        assert dict(out.config.vm_config.environment_variables.key_values) == {"MINE": "kept"}
        name = hashlib.sha256(site.url("/m.wasm").encode()).hexdigest()
        assert out.config.vm_config.code.local.filename == str(rig.directory / name / f"{SUM}.wasm")
        assert file_of(second, network_wasm_pb2.Wasm) == MODULE
        assert resource(router_pb2.Router()) == packed(third)
        assert packed(fourth) == local
        assert rig.metrics.wasm_config_conversion_count.values == {"success": 2, "no_remote_load": 2}
        assert rig.metrics.wasm_config_conversion_duration.counts != [0] * 16

    run(job)


def test_a_typed_struct_becomes_the_real_type(tmp_path: Path, site: Site) -> None:
    async def job() -> None:
        data = json_format.MessageToDict(plugin(remote(site.serve("/m.wasm", MODULE))))
        struct = typed_struct_pb2.TypedStruct(type_url="type.googleapis.com/envoy.extensions.filters.http.wasm.v3.Wasm")
        struct.value.update(data)
        (found,) = await Rig(tmp_path).convert(resource(struct))
        assert file_of(found) == MODULE

    run(job)


@pytest.mark.parametrize(
    ("more", "prefix", "rules"),
    [
        ({}, "wasm-default-deny", True),
        ({"fail_open": True}, "wasm-default-allow", False),
        ({"failure_policy": "FAIL_OPEN"}, "wasm-default-allow", False),
        ({"failure_policy": "FAIL_CLOSED", "fail_open": True}, "wasm-default-deny", True),
    ],
)
def test_what_cannot_be_fetched_lets_all_through_or_nothing(
    more: dict[str, Any], prefix: str, rules: bool, tmp_path: Path, site: Site
) -> None:
    async def job() -> None:
        rig = Rig(tmp_path)
        wasm = plugin(remote(site.url("/absent.wasm")), **more)
        network = plugin(remote(site.url("/absent.wasm")), network_wasm_pb2.Wasm, **more)
        first, second = await rig.convert(resource(wasm), resource(network))
        http_filter, network_filter = rbac_pb2.RBAC(), network_rbac_pb2.RBAC()
        assert first.typed_config.Unpack(http_filter)
        assert second.typed_config.Unpack(network_filter)
        assert (http_filter.rules_stat_prefix, http_filter.HasField("rules")) == (prefix, rules)
        assert (network_filter.stat_prefix, network_filter.HasField("rules")) == (prefix, rules)
        assert rig.metrics.wasm_config_conversion_count.values == {"fetch_failure": 2}
        assert rig.metrics.wasm_remote_fetch_count.values == {"download_failure": 2}

    run(job)


def test_what_is_no_extension_or_has_no_code_is_refused(tmp_path: Path, site: Site) -> None:
    async def job() -> None:
        rig = Rig(tmp_path)
        good = resource(plugin(remote(site.serve("/m.wasm", MODULE))))
        for bad, why in (
            (packed(router_pb2.Router()), "failed to unmarshal"),
            (packed(extension_pb2.TypedExtensionConfig(name="x")), "does not contain any typed config"),
            (resource(plugin({})), "no remote and local load found"),
            (AnyMessage(type_url=good.type_url, value=b"\xff\xff"), "failed to unmarshal"),
        ):
            with pytest.raises(ConversionError, match=why):
                await rig.convert(good, bad)
        hintless = plugin({"remote": {"sha256": "nil"}})
        (found,) = await rig.convert(resource(hintless))
        assert found.typed_config.type_url.endswith("RBAC")
        secretless = plugin(
            remote(site.url("/m.wasm")),
            vm={"environment_variables": {"key_values": {"ISTIO_META_WASM_IMAGE_PULL_SECRET": ""}}},
        )
        (found,) = await rig.convert(resource(secretless))
        assert found.typed_config.type_url.endswith("RBAC")
        counts = rig.metrics.wasm_config_conversion_count.values
        assert (counts["unmarshal_failure"], counts["miss_remote_fetch_hint"], counts["fetch_failure"]) == (4, 1, 1)

    run(job)


# --- the cache --------------------------------------------------------------------------------------


def test_a_module_is_fetched_once(tmp_path: Path, site: Site) -> None:
    async def job() -> None:
        rig = Rig(tmp_path)
        url = site.serve("/m.wasm", MODULE)
        for wanted in ({}, {"checksum": SUM}, {"version": "2"}, {"resource": "other"}):
            assert await rig.get(url, **wanted) == MODULE
        assert site.asked == ["/m.wasm"]
        assert rig.metrics.wasm_cache_lookup_count.values == {"false": 1, "true": 3}
        assert rig.metrics.wasm_cache_entries.value == 1

    run(job)


def test_always_asks_again_when_the_plugin_changed(tmp_path: Path, site: Site) -> None:
    async def job() -> None:
        rig = Rig(tmp_path)
        url = site.serve("/m.wasm", MODULE)
        assert await rig.get(url, policy="Always", resource="r", version="1") == MODULE
        site.serve("/m.wasm", OTHER)
        assert await rig.get(url, policy="Always", resource="r", version="1") == MODULE
        assert await rig.get(url, policy="Always", resource="r", version="2") == OTHER
        assert len(site.asked) == 2

    run(job)


def test_modules_that_nobody_uses_are_removed(tmp_path: Path, site: Site) -> None:
    async def job() -> None:
        rig = Rig(tmp_path, expiry=0.0)
        url = site.serve("/m.wasm", MODULE)
        assert await rig.get(url) == MODULE
        rig.cache.purge()
        assert list(rig.directory.rglob("*.wasm")) == []
        assert rig.metrics.wasm_cache_entries.value == 0
        assert await rig.get(url) == MODULE
        assert len(site.asked) == 2

    run(job)


@pytest.mark.parametrize(
    ("body", "more", "why", "result"),
    [
        (MODULE, {"checksum": "0" * 64}, "has checksum", "checksum_mismatched"),
        (b"<html>", {}, "is invalid", "fetch_failure"),
        (b"\0as", {}, "is invalid", "fetch_failure"),
        (MODULE * 20, {"max_size": 1000}, "more than 1000 bytes", "download_failure"),
        (MODULE, {"blocked": "127.0.0.0/8"}, "blocked CIDR range 127.0.0.0/8", "download_failure"),
    ],
)
def test_modules_that_are_refused(
    body: bytes, more: dict[str, Any], why: str, result: str, tmp_path: Path, site: Site
) -> None:
    async def job() -> None:
        options = from_environment(Environment({"BLOCKED_CIDRS_IN_WASM_FETCH": str(more.pop("blocked", ""))}))
        rig = Rig(tmp_path, blocked=options.blocked, **{k: more.pop(k) for k in ("max_size",) if k in more})
        with pytest.raises(FetchError, match=why):
            await rig.get(site.serve("/m.wasm", body), **more)
        assert rig.metrics.wasm_remote_fetch_count.values == {result: 1}
        assert list(tmp_path.rglob("*.wasm")) == []

    run(job)


def test_other_schemes_are_refused(tmp_path: Path) -> None:
    async def job() -> None:
        module = tmp_path / "m.wasm"
        module.write_bytes(MODULE)
        with pytest.raises(FetchError, match="unsupported Wasm module downloading URL scheme: file"):
            await Rig(tmp_path).get(module.as_uri())

    run(job)


# --- HTTP -------------------------------------------------------------------------------------------


def test_busy_servers_are_asked_again_and_others_not(tmp_path: Path, site: Site) -> None:
    async def job() -> None:
        answers = iter([(503, {}, b""), (200, {}, MODULE)])
        site.pages["/m.wasm"] = lambda _: next(answers)
        assert await Rig(tmp_path, attempts=3).get(site.url("/m.wasm")) == MODULE
        assert len(site.asked) == 2
        for status in (404, 501):
            site.asked.clear()
            with pytest.raises(FetchError, match=f"after 1 attempts, last error: .*status code {status}"):
                await Rig(tmp_path, attempts=3).get(site.serve("/no.wasm", b"", status))
            assert len(site.asked) == 1

    run(job)


def test_redirects_are_followed_but_not_to_refused_addresses(tmp_path: Path, site: Site) -> None:
    async def job() -> None:
        site.serve("/m.wasm", MODULE)
        assert await Rig(tmp_path).get(site.serve("/there", b"", 302, Location=site.url("/m.wasm"))) == MODULE
        away = site.serve("/away", b"", 302, Location="http://169.254.169.254/latest")
        with pytest.raises(FetchError, match=r"169\.254\.169\.254 is link-local"):
            await Rig(tmp_path).get(away)

    run(job)


def archive(name: str, data: bytes, compressed: bool = True) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as files:
        member = tarfile.TarInfo(name)
        member.size = len(data)
        files.addfile(member, io.BytesIO(data))
    return gzip.compress(out.getvalue()) if compressed else out.getvalue()


@pytest.mark.parametrize(
    ("data", "inner"),
    [
        (MODULE, MODULE),
        (gzip.compress(MODULE), MODULE),
        (archive("any", MODULE, compressed=False), MODULE),
        (archive("any", gzip.compress(MODULE)), MODULE),
        (b"text", b"text"),
        (gzip.compress(b"text"), gzip.compress(b"text")),
        (gzip.compress(MODULE)[:20], gzip.compress(MODULE)[:20]),
    ],
)
def test_wrappings(data: bytes, inner: bytes) -> None:
    assert unwrap(data, 1 << 20) == inner


@pytest.mark.parametrize(
    ("address", "ok"),
    [
        ("10.0.0.1", True),
        ("127.0.0.1", True),
        ("169.254.169.254", False),
        ("::ffff:169.254.169.254", False),
        ("fe80::1", False),
        ("100.100.100.200", False),
        ("fd00:ec2::254", False),
        ("192.0.2.7", False),
    ],
)
def test_addresses(address: str, ok: bool) -> None:
    options = from_environment(Environment({"BLOCKED_CIDRS_IN_WASM_FETCH": "192.0.2.0/24, nonsense"}))
    assert (refused(address, options) == "") is ok


# --- registries --------------------------------------------------------------------------------------


def push(site: Site, name: str, layers: list[tuple[str, bytes]], media_type: str = "") -> str:
    """Puts an image in the registry; its digest."""
    entries = []
    for kind, data in layers:
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        site.serve(f"/v2/{name}/blobs/{digest}", data)
        entries.append({"mediaType": kind, "digest": digest, "size": len(data)})
    manifest: dict[str, Any] = {"schemaVersion": 2, "layers": entries}
    if media_type:
        manifest["mediaType"] = media_type
    body = json.dumps(manifest).encode()
    digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
    for reference in ("v1", "latest", digest):
        site.serve(f"/v2/{name}/manifests/{reference}", body)
    return digest


OCI_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
DOCKER = (
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.image.rootfs.diff.tar.gzip",
)
WASM_LAYER = "application/vnd.module.wasm.content.layer.v1+wasm"


@pytest.mark.parametrize(
    ("layers", "media_type"),
    [
        ([(OCI_LAYER, archive("readme", b"x")), (OCI_LAYER, archive("./plugin.wasm", MODULE))], ""),
        ([(DOCKER[1], archive("plugin.wasm", MODULE))], DOCKER[0]),
        ([("application/vnd.module.wasm.config.v1+json", b"{}"), (WASM_LAYER, MODULE)], ""),
    ],
    ids=["OCI", "Docker", "artifact"],
)
def test_images(layers: list[tuple[str, bytes]], media_type: str, tmp_path: Path, site: Site) -> None:
    async def job() -> None:
        rig = Rig(tmp_path)
        digest = push(site, "team/plugin", layers, media_type)
        plain = digest.removeprefix("sha256:")
        assert await rig.get(f"oci://{site.host}/team/plugin:v1", checksum=plain) == MODULE
        asked = len(site.asked)
        # another name of the same image: the manifest says so, and nothing is downloaded again
        assert await rig.get(f"oci://{site.host}/team/plugin:latest") == MODULE
        assert site.asked[asked:] == ["/v2/team/plugin/manifests/latest"]
        assert await rig.get(f"oci://{site.host}/team/plugin@{digest}") == MODULE
        assert len(site.asked) == asked + 1
        with pytest.raises(FetchError, match="has checksum"):
            await rig.get(f"oci://{site.host}/team/plugin:v1", checksum="0" * 64)
        with pytest.raises(FetchError, match="could not fetch manifest: status code 404"):
            await rig.get(f"oci://{site.host}/team/other:v1")

    run(job)


def test_images_that_hold_no_module(tmp_path: Path, site: Site) -> None:
    async def job() -> None:
        rig = Rig(tmp_path)
        for layers, why in (
            ([], "greater than zero"),
            ([(OCI_LAYER, archive("readme", b"x"))], r"plugin\.wasm not found"),
            ([(OCI_LAYER, b"x")], "could not extract"),
            ([("text/plain", b"x")], "invalid format as an OCI image: its layers are text/plain"),
        ):
            push(site, "bad", layers)
            with pytest.raises(FetchError, match=why):
                await rig.get(f"oci://{site.host}/bad:v1")
        digest = push(site, "bad", [(WASM_LAYER, MODULE), ("x", b"")])
        blob = f"/v2/bad/blobs/sha256:{SUM}"
        site.serve(blob, OTHER)
        with pytest.raises(FetchError, match="what came is not sha256:"):
            await rig.get(f"oci://{site.host}/bad@{digest}")

    run(job)


def test_an_index_leads_to_its_image(tmp_path: Path, site: Site) -> None:
    async def job() -> None:
        digest = push(site, "many", [("c", b"{}"), (WASM_LAYER, MODULE)])
        entries = [
            {"digest": "sha256:" + "1" * 64, "platform": {"os": "linux", "architecture": "arm64"}},
            {"digest": digest, "platform": {"os": "linux", "architecture": "amd64"}},
        ]
        index = {"mediaType": "application/vnd.oci.image.index.v1+json", "manifests": entries}
        site.serve("/v2/many/manifests/all", json.dumps(index).encode())
        assert await Rig(tmp_path).get(f"oci://{site.host}/many:all") == MODULE

    run(job)


@pytest.mark.parametrize(
    "secret", [{"auth": base64.b64encode(b"me:word").decode()}, {"username": "me", "password": "word"}]
)
def test_a_pull_secret_opens_a_registry(secret: dict[str, str], tmp_path: Path, site: Site) -> None:
    async def job() -> None:
        push(site, "private", [("c", b"{}"), (WASM_LAYER, MODULE)])
        for path, page in list(site.pages.items()):

            def guarded(request: Any, page: Any = page) -> Any:
                if request.headers.get("Authorization") == f"Basic {base64.b64encode(b'me:word').decode()}":
                    return page
                return 401, {"WWW-Authenticate": 'Basic realm="http://registry.example"'}, b""

            site.pages[path] = guarded
        url = f"oci://{site.host}/private:v1"
        with pytest.raises(FetchError, match="status code 401"):
            await Rig(tmp_path).get(url)
        config = json.dumps({"auths": {site.host: secret}}).encode()
        assert await Rig(tmp_path).get(url, secret=config) == MODULE
        with pytest.raises(FetchError, match="no Docker configuration"):
            await Rig(tmp_path).get(url, secret=b"{}")

    run(job)


@pytest.mark.parametrize("key", ["{host}", "https://{host}", "http://{host}/v2/", "{host}/private"])
def test_without_a_secret_the_machines_own_logins_count(key: str, tmp_path: Path, site: Site) -> None:
    async def job() -> None:
        login = base64.b64encode(b"me:word").decode()
        push(site, "private", [("c", b"{}"), (WASM_LAYER, MODULE)])
        for path, page in list(site.pages.items()):

            def guarded(request: Any, page: Any = page) -> Any:
                if request.headers.get("Authorization") == f"Basic {login}":
                    return page
                return 401, {"WWW-Authenticate": 'Basic realm="http://registry.example"'}, b""

            site.pages[path] = guarded
        url = f"oci://{site.host}/private:v1"
        config = tmp_path / "docker" / "config.json"
        config.parent.mkdir()
        config.write_text(json.dumps({"auths": {"other.example": {}, key.format(host=site.host): {"auth": login}}}))
        own = from_environment(Environment({"DOCKER_CONFIG": str(config.parent)})).docker_config
        assert own == str(config)
        assert await Rig(tmp_path, docker_config=own).get(url) == MODULE
        config.write_text('{"auths": {"other.example": {"auth": "eA=="}}}')
        with pytest.raises(FetchError, match="status code 401"):
            await Rig(tmp_path, docker_config=own).get(url)
        config.write_text("rubbish")
        with pytest.raises(FetchError, match=r"config\.json is no Docker configuration"):
            await Rig(tmp_path, docker_config=own).get(url)

    run(job)


@pytest.mark.parametrize(
    ("files", "env", "expected"),
    [
        (["d/config.json", "h/.docker/config.json"], {"DOCKER_CONFIG": "d", "HOME": "h"}, "d/config.json"),
        (["h/.docker/config.json"], {"HOME": "h"}, "h/.docker/config.json"),
        (["h/.docker/config.json", "a.json"], {"HOME": "h", "REGISTRY_AUTH_FILE": "a.json"}, "h/.docker/config.json"),
        (["a.json"], {"HOME": "h", "REGISTRY_AUTH_FILE": "a.json", "XDG_RUNTIME_DIR": "x"}, "a.json"),
        (
            ["x/containers/auth.json"],
            {"REGISTRY_AUTH_FILE": "a.json", "XDG_RUNTIME_DIR": "x"},
            "x/containers/auth.json",
        ),
        (["h/.config/containers/auth.json"], {"HOME": "h", "XDG_RUNTIME_DIR": "x"}, "h/.config/containers/auth.json"),
        (["c/containers/auth.json"], {"HOME": "h", "XDG_CONFIG_HOME": "c"}, "c/containers/auth.json"),
        ([], {"DOCKER_CONFIG": "d", "HOME": "h", "XDG_RUNTIME_DIR": "x"}, ""),
    ],
)
def test_where_this_machines_logins_are(
    files: list[str], env: dict[str, str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in files:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("{}")
    assert from_environment(Environment(env)).docker_config == expected


def helper(tmp_path: Path, name: str, body: str) -> dict[str, str]:
    """A credential helper, as a script; the environment that it is found in. It writes down what it is asked."""
    directory = tmp_path / "bin"
    directory.mkdir(exist_ok=True)
    program = directory / f"docker-credential-{name}"
    program.write_text(f'#!/bin/sh\nread -r key\necho "$1 $key" >> {tmp_path}/asked\n{body}\n')
    program.chmod(0o755)
    return {"PATH": f"{directory}:{os.environ['PATH']}", "DOCKER_CONFIG": str(tmp_path)}


def guard(site: Site, authorization: str, challenge: str) -> None:
    """Closes every page to those who do not say `authorization`."""
    for path, page in list(site.pages.items()):

        def guarded(request: Any, page: Any = page) -> Any:
            if request.headers.get("Authorization") == authorization:
                return page
            return 401, {"WWW-Authenticate": challenge}, b""

        site.pages[path] = guarded


ME = f"Basic {base64.b64encode(b'me:word').decode()}"
ANSWER = """echo '{"ServerURL": "x", "Username": "me", "Secret": "word"}'"""
UNKNOWN = "echo credentials not found in native keychain; exit 1"


@pytest.mark.parametrize("setting", ["credHelpers", "credsStore"])
@pytest.mark.parametrize("secret", [True, False])
def test_a_credential_helper_knows_the_login(setting: str, secret: bool, tmp_path: Path, site: Site) -> None:
    async def job() -> None:
        push(site, "private", [("c", b"{}"), (WASM_LAYER, MODULE)])
        guard(site, ME, 'Basic realm="http://registry.example"')
        env = helper(tmp_path, "mine", ANSWER)
        # A file's own entry for a registry that a helper has does not count.
        config: dict[str, Any] = {"auths": {site.host: {"auth": "eDp5"}}}
        config |= {setting: "mine"} if setting == "credsStore" else {"credsStore": "no", setting: {site.host: "mine"}}
        if setting == "credHelpers":
            helper(tmp_path, "no", UNKNOWN)
        text = json.dumps(config)
        (tmp_path / "config.json").write_text("{}" if secret else text)
        options = from_environment(Environment(env))
        rig = Rig(tmp_path, docker_config=options.docker_config, environment=options.environment)
        got = await rig.get(f"oci://{site.host}/private:v1", **({"secret": text.encode()} if secret else {}))
        assert got == MODULE
        asked = (tmp_path / "asked").read_text().splitlines()
        wanted = [f"get {site.host}/private", f"get {site.host}"]
        assert asked == (wanted[:1] if setting == "credsStore" else wanted)

    run(job)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("echo locked; exit 3", "error getting credentials: docker-credential-mine: exit status 3: locked"),
        ("echo rubbish", "error getting credentials: docker-credential-mine answers without JSON"),
        ("exec sleep 100", "error getting credentials: docker-credential-mine does not answer"),
        ("", "error getting credentials: docker-credential-mine answers without JSON"),
        (None, "error getting credentials: docker-credential-mine: No such file or directory"),
        (UNKNOWN, "could not fetch manifest: status code 401"),
        ("yes", "error getting credentials: docker-credential-mine answers with more than 64 KiB"),
        ("head -c 50000 /dev/zero | tr '\\0' '['", "docker-credential-mine answers without JSON"),
        (
            """printf %s '{"Username": "me\\r\\nX-Evil: 1", "Secret": "word"}'""",
            "the answer of docker-credential-mine: the login for HOST/private has control characters",
        ),
        (
            """printf %s '{"Username": "<token>", "Secret": "word\\u0000"}'""",
            "the answer of docker-credential-mine: the login for HOST/private has control characters",
        ),
    ],
)
def test_credential_helpers_that_do_not_help(body: str | None, reason: str, tmp_path: Path, site: Site) -> None:
    async def job() -> None:
        push(site, "private", [("c", b"{}"), (WASM_LAYER, MODULE)])
        guard(site, ME, 'Basic realm="http://registry.example"')
        env = helper(tmp_path, "other" if body is None else "mine", body or "")
        (tmp_path / "config.json").write_text('{"credsStore": "mine"}')
        options = from_environment(Environment(env))
        rig = Rig(tmp_path, docker_config=options.docker_config, environment=options.environment)
        with pytest.raises(FetchError) as caught:
            await rig.get(f"oci://{site.host}/private:v1", timeout=0.5)
        assert str(caught.value).endswith(reason.replace("HOST", site.host))
        assert "word" not in str(caught.value)
        assert "\n" not in str(caught.value)

    run(job)


@pytest.mark.parametrize("answer", ['{"Username": null, "Secret": null}', "{}"])
def test_a_helper_without_a_name_knows_nobody(answer: str, tmp_path: Path) -> None:
    options = from_environment(Environment(helper(tmp_path, "mine", f"echo '{answer}'")))
    found = login.find(b'{"credsStore": "mine"}', "r.example", "x", options, time.monotonic() + DEADLINE)
    assert found == login.NOBODY


def test_a_helper_gives_a_password_alone(tmp_path: Path) -> None:
    answer = """echo '{"Username": null, "Secret": "word"}'"""
    options = from_environment(Environment(helper(tmp_path, "mine", answer)))
    found = login.find(b'{"credsStore": "mine"}', "r.example", "x", options, time.monotonic() + DEADLINE)
    assert base64.b64decode(found.basic) == b":word"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("[" * 100_000, "WHAT is no Docker configuration"),
        ('{"auths": {"r.example": {"username": "me", "password": "wo\\rrd"}}}', "WHAT: the login for r.example has"),
        ('{"auths": {"r.example": {"auth": "bWU6d29yZA==\\r\\nX-Evil: 1"}}}', "WHAT: the login for r.example has"),
        ('{"auths": {"r.example": {"auth": "bWU6d29yZAo="}}}', "WHAT: the login for r.example has control characters"),
        (
            '{"auths": {"r.example": {"registrytoken": "a\\nb"}}}',
            "WHAT: the login for r.example has control characters",
        ),
    ],
)
@pytest.mark.parametrize("secret", [True, False])
def test_logins_that_cannot_be_used(config: str, reason: str, secret: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    options = from_environment(Environment({"DOCKER_CONFIG": str(tmp_path)}))
    with pytest.raises(FetchError) as caught:
        login.find(config.encode() if secret else b"", "r.example", "x", options, time.monotonic() + DEADLINE)
    what = "the image pulling secret" if secret else str(tmp_path / "config.json")
    assert str(caught.value).startswith(reason.replace("WHAT", what))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "ok"),
    [
        ('{"auths": {"HOST": {"auth": "bWU6d29yZA=="}}}', True),
        ('{"auths": {"HOST/private": {"auth": "bWU6d29yZA=="}}}', True),
        ('{"auths": {"other.example": {"auth": "bWU6d29yZA=="}}}', False),
        ('{"auths": {"HOST": {"auth": "bWU6d29yZA=="}, "x": {}}}', False),
        ('{"auths": {"HOST": {"auth": "bWU6d29yZA=="}}, "credsStore": "mine"}', False),
        ('{"auths": {"HOST": {"auth": "bWU="}}}', False),
        ('{"auths": {"HOST": {"auth": "bWU6d29yZAo="}}}', False),
        ("[" * 100_000, False),
        ("rubbish", False),
        ("", False),
    ],
)
def test_logins_in_the_environment_come_first(text: str, ok: bool, tmp_path: Path, site: Site) -> None:
    async def job() -> None:
        push(site, "private", [("c", b"{}"), (WASM_LAYER, MODULE)])
        guard(site, ME, 'Basic realm="http://registry.example"')
        (tmp_path / "config.json").write_text(json.dumps({"auths": {site.host: {"auth": "eDp5"}}}))
        env = {"DOCKER_CONFIG": str(tmp_path), "DOCKER_AUTH_CONFIG": text.replace("HOST", site.host)}
        options = from_environment(Environment(env))
        rig = Rig(tmp_path, docker_config=options.docker_config, environment=options.environment)
        if ok:
            assert await rig.get(f"oci://{site.host}/private:v1") == MODULE
        else:
            with pytest.raises(FetchError, match="status code 401"):
                await rig.get(f"oci://{site.host}/private:v1")

    run(job)


@pytest.mark.parametrize("oauth", [True, False])
def test_an_identity_token_becomes_an_access_token(
    oauth: bool, tmp_path: Path, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookup = socket.getaddrinfo

    def resolve(host: Any, *more: Any, **named: Any) -> Any:
        # A realm on a loopback address is refused.
        return lookup("127.0.0.1" if host == "auth.example" else host, *more, **named)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)

    async def job() -> None:
        push(site, "private", [("c", b"{}"), (WASM_LAYER, MODULE)])
        realm = f"http://auth.example:{site.server.server_port}/token"
        guard(site, "Bearer opened", f'Bearer realm="{realm}",service="s",scope="repository:private:pull"')
        forms: list[dict[str, list[str]]] = []

        def token(request: Any) -> Any:
            if request.command == "POST":
                forms.append(parse_qs(request.rfile.read(int(request.headers["Content-Length"])).decode()))
                return (200, {}, b'{"access_token": "opened"}') if oauth else (404, {}, b"")
            return 200, {}, b'{"token": "opened"}'

        site.pages["/token"] = token
        env = helper(tmp_path, "mine", """echo '{"Username": "<token>", "Secret": "identity"}'""")
        (tmp_path / "config.json").write_text('{"credsStore": "mine"}')
        options = from_environment(Environment(env))
        rig = Rig(tmp_path, docker_config=options.docker_config, environment=options.environment)
        assert await rig.get(f"oci://{site.host}/private:v1") == MODULE
        (form,) = forms
        assert form.pop("client_id")
        assert form == {
            "grant_type": ["refresh_token"],
            "refresh_token": ["identity"],
            "service": ["s"],
            "scope": ["repository:private:pull"],
        }

    run(job)


def test_a_registry_token_is_the_access_token(tmp_path: Path, site: Site) -> None:
    async def job() -> None:
        push(site, "private", [("c", b"{}"), (WASM_LAYER, MODULE)])
        guard(site, "Bearer opened", 'Bearer realm="http://auth.example/token"')
        config = json.dumps({"auths": {site.host: {"registrytoken": "opened"}}}).encode()
        assert await Rig(tmp_path).get(f"oci://{site.host}/private:v1", secret=config) == MODULE

    run(job)


def test_a_registry_cannot_send_the_agent_to_a_private_realm(tmp_path: Path, site: Site) -> None:
    async def job() -> None:
        site.serve(
            "/v2/x/manifests/v1", b"", 401, **{"WWW-Authenticate": f'Bearer realm="{site.url("/token")}",service="s"'}
        )
        with pytest.raises(
            FetchError, match="rejected unsafe bearer realm: realm targets private/loopback/link-local IP"
        ):
            await Rig(tmp_path).get(f"oci://{site.host}/x:v1")
        assert site.asked == ["/v2/x/manifests/v1"]

    run(job)


@pytest.mark.parametrize(
    ("realm", "ok"),
    [
        ("https://auth.example/token", True),
        ("http://203.0.114.9/token", True),
        ("file:///etc/passwd", False),
        ("https://localhost/x", False),
        ("http://metadata.google.internal/x", False),
        ("http://10.0.0.1/x", False),
        ("http://[::1]/x", False),
        ("https:///x", False),
    ],
)
def test_realms(realm: str, ok: bool) -> None:
    assert (_unsafe(realm) == "") is ok

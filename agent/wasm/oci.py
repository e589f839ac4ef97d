"""Modules in images of a registry: manifest, access token, and the layer that holds the module. Blocks; run it in a thread.

Sources: istio/istio: pkg/wasm/imagefetcher.go; opencontainers/distribution-spec: spec.md (Pull);
distribution/distribution: docs/content/spec/auth/token.md, docs/content/spec/auth/oauth.md.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import ipaddress
import json
import re
import tarfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode, urlsplit

from agent.wasm import fetch, login
from agent.wasm.fetch import FetchError, Status
from agent.wasm.login import DOCKER_HUB, Login
from agent.wasm.options import WasmOptions

_INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
_DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
_MANIFESTS = ("application/vnd.oci.image.manifest.v1+json", _DOCKER_MANIFEST, *_INDEXES)
_DOCKER_LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"
_OCI_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
_WASM_LAYER = "application/vnd.module.wasm.content.layer.v1+wasm"
_PLUGIN = "plugin.wasm"
_CLIENT = "sidecarlab"
_REALM = re.compile(r'realm="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Image:
    """An image whose manifest is known. ``base`` is the URL of its repository, ``checksum`` its manifest's."""

    base: str
    checksum: str
    manifest: Mapping[str, Any]
    headers: Mapping[str, str]
    insecure: bool


def find(url: str, secret: bytes, options: WasmOptions, *, insecure: bool, deadline: float) -> Image:
    """The image that ``oci://HOST/NAME[:TAG][@DIGEST]`` names. ``secret`` is a Docker configuration, or empty:
    then that of the machine counts.

    Raises:
        FetchError: it cannot be had.
    """
    host, repository, reference = _parse(url)
    registry = "registry-1.docker.io" if host in DOCKER_HUB else host
    try:
        credentials = login.find(secret, host, repository, options, deadline)
    except FetchError as error:
        raise FetchError(f"could not fetch manifest: {error}") from None
    problem: FetchError | None = None
    # A registry on this machine, or one that need not be checked, may speak plain HTTP.
    for scheme in ("https", "http") if insecure or _is_local(host) else ("https",):
        base = f"{scheme}://{registry}/v2/{repository}"
        try:
            return _manifest(base, reference, credentials, options, insecure, deadline)
        except Status as status:
            raise FetchError(f"could not fetch manifest: {status}") from None
        except FetchError as error:
            problem = error
    raise FetchError(f"could not fetch manifest: {problem}")


def pull(image: Image, options: WasmOptions, *, deadline: float) -> bytes:
    """The module in an image.

    Raises:
        FetchError: it has none, or it cannot be had.
    """
    layers = list(image.manifest.get("layers") or ())
    if not layers:
        raise FetchError("number of layers must be greater than zero")
    last = layers[-1]
    if last.get("mediaType") == (_DOCKER_LAYER if image.manifest.get("mediaType") == _DOCKER_MANIFEST else _OCI_LAYER):
        return _from_archive(_blob(image, last, options, deadline), options)
    module = next((layer for layer in layers if layer.get("mediaType") == _WASM_LAYER), None)
    if module is None or len(layers) != 2:
        types = ", ".join(str(layer.get("mediaType")) for layer in layers)
        raise FetchError(f"the given image is in invalid format as an OCI image: its layers are {types}")
    return _blob(image, module, options, deadline)


def _parse(url: str) -> tuple[str, str, str]:
    """(host, repository, tag or digest)."""
    rest = url.removeprefix("oci://")
    name, at, digest = rest.partition("@")
    host, slash, repository = name.partition("/")
    if not slash or not repository:
        raise FetchError(f"could not parse url in image reference: {url}")
    head, colon, tag = repository.rpartition(":")
    if colon and "/" not in tag:
        repository = head
    else:
        tag = "latest"
    if host in DOCKER_HUB and "/" not in repository:
        repository = f"library/{repository}"
    return host, repository, digest if at else tag


def _is_local(host: str) -> bool:
    name = urlsplit(f"//{host}").hostname or ""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def _manifest(
    base: str, reference: str, credentials: Login, options: WasmOptions, insecure: bool, deadline: float
) -> Image:
    headers = {"Accept": ", ".join(_MANIFESTS)}

    def get(wanted: str) -> bytes:
        url = f"{base}/manifests/{wanted}"
        try:
            return fetch.request(url, options, insecure=insecure, deadline=deadline, headers=headers)[1]
        except Status as status:
            if status.code != 401 or "Authorization" in headers:
                raise
            headers["Authorization"] = _authorization(status, credentials, options, insecure, deadline)
        return fetch.request(url, options, insecure=insecure, deadline=deadline, headers=headers)[1]

    body = _checked(get(reference), reference)
    manifest = _json(body)
    if manifest.get("mediaType") in _INDEXES or "manifests" in manifest:
        chosen = _of_platform(manifest)
        body = _checked(get(chosen), chosen)
        manifest = _json(body)
    authorization = {k: v for k, v in headers.items() if k == "Authorization"}
    return Image(base, hashlib.sha256(body).hexdigest(), manifest, authorization, insecure)


def _of_platform(index: Mapping[str, Any]) -> str:
    """The digest for linux/amd64 (a module runs anywhere), else the first."""
    entries = [entry for entry in index.get("manifests") or () if isinstance(entry, Mapping)]
    if not entries:
        raise FetchError("could not fetch image: its index is empty")
    wanted = {"os": "linux", "architecture": "amd64"}
    chosen = next((e for e in entries if wanted.items() <= dict(e.get("platform") or {}).items()), entries[0])
    return str(chosen.get("digest"))


def _authorization(status: Status, credentials: Login, options: WasmOptions, insecure: bool, deadline: float) -> str:
    """The Authorization header that a registry asks for: basic, or a token from its realm."""
    challenges = status.headers.get_all("WWW-Authenticate") or []
    for challenge in challenges:
        for realm in _REALM.findall(challenge):
            why = _unsafe(realm)
            if why:
                raise FetchError(f"rejected unsafe bearer realm: {why}")
    bearer = next((c for c in challenges if c.lower().startswith("bearer ")), "")
    if not bearer:
        if not credentials.basic:
            raise status
        return f"Basic {credentials.basic}"
    if credentials.registry_token:
        return f"Bearer {credentials.registry_token}"
    fields = dict(re.findall(r'(\w+)="([^"]*)"', bearer))
    wanted = {key: fields[key] for key in ("service", "scope") if key in fields}
    found = _json(_token(fields.get("realm", ""), wanted, credentials, options, insecure, deadline))
    token = found.get("token") or found.get("access_token")
    if not token:
        raise FetchError("the realm gave no token")
    return f"Bearer {token}"


def _token(
    realm: str, wanted: Mapping[str, str], credentials: Login, options: WasmOptions, insecure: bool, deadline: float
) -> bytes:
    """What a token service answers: to an identity token over OAuth 2, if it has that, else to basic credentials."""
    if credentials.identity_token:
        grant = {"client_id": _CLIENT, "grant_type": "refresh_token", "refresh_token": credentials.identity_token}
        form = urlencode({**wanted, **grant}).encode()
        try:
            return fetch.request(realm, options, insecure=insecure, deadline=deadline, data=form)[1]
        except Status as status:
            if status.code != 404:
                raise
    url = f"{realm}{'&' if '?' in realm else '?'}{urlencode(wanted)}"
    headers = {"Authorization": f"Basic {credentials.basic}"} if credentials.basic else {}
    return fetch.request(url, options, insecure=insecure, deadline=deadline, headers=headers)[1]


def _unsafe(realm: str) -> str:
    """Why no token may be asked for there, empty if it may."""
    parts = urlsplit(realm)
    if parts.scheme not in ("http", "https"):
        return f'realm scheme "{parts.scheme}" not allowed'
    host = parts.hostname or ""
    if not host:
        return "realm missing host"
    if host in ("localhost", "metadata.google.internal"):
        return f"realm targets {host}"
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return ""
    private = address.is_private or address.is_loopback or address.is_link_local
    return "realm targets private/loopback/link-local IP" if private else ""


def _blob(image: Image, layer: Mapping[str, Any], options: WasmOptions, deadline: float) -> bytes:
    digest = str(layer.get("digest"))
    url = f"{image.base}/blobs/{digest}"
    return _checked(
        fetch.request(url, options, insecure=image.insecure, deadline=deadline, headers=image.headers)[1], digest
    )


def _checked(body: bytes, reference: str) -> bytes:
    """The body, if it is what its digest says."""
    if reference.startswith("sha256:") and hashlib.sha256(body).hexdigest() != reference.removeprefix("sha256:"):
        raise FetchError(f"what came is not {reference}")
    return body


def _json(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError as error:
        raise FetchError(f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise FetchError("not a JSON object")
    return found


def _from_archive(data: bytes, options: WasmOptions) -> bytes:
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as unpacked:
            archive = io.BytesIO(unpacked.read(options.max_size))
        with tarfile.open(fileobj=archive, mode="r:") as files:
            for member in files:
                content = files.extractfile(member) if member.name.rpartition("/")[2] == _PLUGIN else None
                if content is not None:
                    return content.read(options.max_size)
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise FetchError(f"could not extract wasm binary: {error}") from None
    raise FetchError(f"{_PLUGIN} not found in the archive")

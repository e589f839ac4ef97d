"""Modules in images of a registry: manifest, access token, and the layer that holds the module. Blocks; run it in a thread.

Sources: istio/istio: pkg/wasm/imagefetcher.go; opencontainers/distribution-spec: spec.md (Pull);
distribution/distribution: docs/content/spec/auth/token.md.
"""

from __future__ import annotations

import base64
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

from agent.files import read_file
from agent.wasm import fetch
from agent.wasm.fetch import FetchError, Status
from agent.wasm.options import WasmOptions

_DOCKER_HUB = ("docker.io", "index.docker.io")
_INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
_DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
_MANIFESTS = ("application/vnd.oci.image.manifest.v1+json", _DOCKER_MANIFEST, *_INDEXES)
_DOCKER_LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"
_OCI_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
_WASM_LAYER = "application/vnd.module.wasm.content.layer.v1+wasm"
_PLUGIN = "plugin.wasm"
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
    registry = "registry-1.docker.io" if host in _DOCKER_HUB else host
    problem: FetchError | None = None
    # A registry on this machine, or one that need not be checked, may speak plain HTTP.
    for scheme in ("https", "http") if insecure or _is_local(host) else ("https",):
        base = f"{scheme}://{registry}/v2/{repository}"
        try:
            return _manifest(base, reference, _login(secret, host, repository, options), options, insecure, deadline)
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
    if host in _DOCKER_HUB and "/" not in repository:
        repository = f"library/{repository}"
    return host, repository, digest if at else tag


def _is_local(host: str) -> bool:
    name = urlsplit(f"//{host}").hostname or ""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def _login(secret: bytes, host: str, repository: str, options: WasmOptions) -> str:
    """What a Docker configuration has for an image, as basic credentials; empty if it has nothing.

    Without a secret it is the machine's own configuration, as for Docker (google/go-containerregistry:
    pkg/authn/keychain.go); its credential helpers are not run.
    """
    try:
        if secret:
            auths: Mapping[str, Any] = json.loads(secret)["auths"]
        else:
            auths = _own_logins(options)
        entry = _entry(auths, host, repository)
        if entry.get("auth"):
            return str(entry["auth"])
        if entry.get("username"):
            return base64.b64encode(f"{entry['username']}:{entry.get('password', '')}".encode()).decode()
    except (ValueError, KeyError, TypeError, AttributeError):
        what = "the image pulling secret" if secret else options.docker_config
        raise FetchError(f"{what} is no Docker configuration") from None
    return ""


def _own_logins(options: WasmOptions) -> Mapping[str, Any]:
    try:
        # Read each time: it may be mounted, and changed, while the agent runs.
        content = read_file(options.docker_config) if options.docker_config else b"{}"
    except OSError:
        return {}
    found: Mapping[str, Any] = json.loads(content).get("auths") or {}
    return found


def _entry(auths: Mapping[str, Any], host: str, repository: str) -> Mapping[str, Any]:
    """The entry for the repository, else for its registry, whose key may be a URL."""
    hub = ("https://index.docker.io/v1/",) if host in _DOCKER_HUB else ()
    for key in (f"{host}/{repository}", host, *hub):
        if key in auths:
            return dict(auths[key])
    for key in auths:
        if key.removeprefix("https://").removeprefix("http://").partition("/")[0] == host:
            return dict(auths[key])
    return {}


def _manifest(base: str, reference: str, login: str, options: WasmOptions, insecure: bool, deadline: float) -> Image:
    headers = {"Accept": ", ".join(_MANIFESTS)}

    def get(wanted: str) -> bytes:
        url = f"{base}/manifests/{wanted}"
        try:
            return fetch.request(url, options, insecure=insecure, deadline=deadline, headers=headers)[1]
        except Status as status:
            if status.code != 401 or "Authorization" in headers:
                raise
            headers["Authorization"] = _authorization(status, login, options, insecure, deadline)
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


def _authorization(status: Status, login: str, options: WasmOptions, insecure: bool, deadline: float) -> str:
    """The Authorization header that a registry asks for: basic, or a token from its realm."""
    challenges = status.headers.get_all("WWW-Authenticate") or []
    for challenge in challenges:
        for realm in _REALM.findall(challenge):
            why = _unsafe(realm)
            if why:
                raise FetchError(f"rejected unsafe bearer realm: {why}")
    bearer = next((c for c in challenges if c.lower().startswith("bearer ")), "")
    if not bearer:
        if not login:
            raise status
        return f"Basic {login}"
    fields = dict(re.findall(r'(\w+)="([^"]*)"', bearer))
    query = urlencode({key: fields[key] for key in ("service", "scope") if key in fields})
    separator = "&" if "?" in fields.get("realm", "") else "?"
    headers = {"Authorization": f"Basic {login}"} if login else {}
    answer = fetch.request(
        f"{fields.get('realm', '')}{separator}{query}", options, insecure=insecure, deadline=deadline, headers=headers
    )
    found = _json(answer[1])
    token = found.get("token") or found.get("access_token")
    if not token:
        raise FetchError("the realm gave no token")
    return f"Bearer {token}"


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

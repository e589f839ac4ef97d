"""Modules that were fetched: files ``<directory>/<hash of the name>/<checksum>.wasm``, kept as long as they are used.

Source: istio/istio: pkg/wasm/cache.go.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import time
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from agent.metrics import Metrics
from agent.wasm import fetch
from agent.wasm.fetch import FetchError
from agent.wasm.options import WasmOptions

log = logging.getLogger("wasm")

PullPolicy = Literal["UNSPECIFIED_POLICY", "IfNotPresent", "Always"]
_OCI = "oci://"


@dataclass(frozen=True, slots=True)
class Wanted:
    """One module as a resource asks for it. ``checksum`` is SHA-256 in hex, of an image its manifest's; empty: any."""

    url: str
    checksum: str = ""
    resource: str = ""
    version: str = ""
    timeout: float = 5.0
    policy: PullPolicy = "UNSPECIFIED_POLICY"
    secret: bytes = b""


@dataclass(slots=True)
class _Entry:
    path: str
    used: float
    urls: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Latest:
    """The checksum that a URL had last, and the version of each resource that asked for it."""

    checksum: str = ""
    versions: dict[str, str] = field(default_factory=dict)


class ModuleCache:
    """Lives in one event loop; fetches run in threads."""

    def __init__(self, options: WasmOptions, metrics: Metrics) -> None:
        self._options, self._metrics = options, metrics
        self._modules: dict[tuple[str, str], _Entry] = {}
        self._latest: dict[str, _Latest] = {}

    async def get(self, wanted: Wanted) -> str:
        """The path of the module's file.

        Raises:
            FetchError: it cannot be had.
        """
        known, checksum = self._look_up(wanted)
        if known is not None:
            return known.path
        scheme, host = urlsplit(wanted.url).scheme, urlsplit(wanted.url).netloc
        if scheme not in ("http", "https", "oci"):
            raise FetchError(f"unsupported Wasm module downloading URL scheme: {scheme}")
        deadline = time.monotonic() + wanted.timeout
        insecure = self._options.allows_insecure(host)
        count = self._metrics.wasm_remote_fetch_count
        if scheme == "oci":
            from agent.wasm import oci

            try:
                image = await asyncio.to_thread(
                    oci.find, wanted.url, wanted.secret, self._options, insecure=insecure, deadline=deadline
                )
            except FetchError as error:
                count.add("manifest_failure")
                raise FetchError(f"could not fetch Wasm OCI image: {error}") from None
            found, data = image.checksum, b""
        else:
            try:
                data = await asyncio.to_thread(
                    fetch.fetch, wanted.url, self._options, insecure=insecure, deadline=deadline
                )
            except FetchError:
                count.add("download_failure")
                raise
            image, found = None, hashlib.sha256(data).hexdigest()
        if checksum and checksum != found:
            count.add("checksum_mismatched")
            raise FetchError(
                f"module downloaded from {wanted.url} has checksum {found}, which does not match: {checksum}"
            )
        entry = self._modules.get((_name(wanted.url), found))
        if entry is None and image is not None:
            try:
                data = await asyncio.to_thread(oci.pull, image, self._options, deadline=deadline)
            except FetchError as error:
                count.add("download_failure")
                raise FetchError(f"could not fetch Wasm binary: {error}") from None
        if entry is None and not fetch.is_module(data):
            count.add("fetch_failure")
            raise FetchError(f"fetched Wasm binary from {wanted.url} is invalid")
        count.add("success")
        return self._add(wanted, found, data, entry).path

    def _look_up(self, wanted: Wanted) -> tuple[_Entry | None, str]:
        """The module if it is there and need not be asked for again, and the checksum that it must have."""
        checksum = wanted.checksum or _digest(wanted.url)
        latest = self._latest.get(wanted.url)
        if not checksum and latest is not None:
            if _keeps(wanted) or latest.versions.get(wanted.resource) == wanted.version:
                checksum = latest.checksum
            latest.versions[wanted.resource] = wanted.version
        entry = self._modules.get((_name(wanted.url), checksum))
        self._metrics.wasm_cache_lookup_count.add("true" if entry is not None else "false")
        if entry is not None:
            entry.used = time.monotonic()
            self._remember(wanted, checksum, entry)
        return entry, checksum

    def _add(self, wanted: Wanted, checksum: str, data: bytes, entry: _Entry | None) -> _Entry:
        if entry is None:
            name = _name(wanted.url)
            directory = os.path.join(
                os.path.abspath(self._options.directory), hashlib.sha256(name.encode()).hexdigest()
            )
            path = os.path.join(directory, f"{checksum}.wasm")
            try:
                os.makedirs(directory, mode=0o755, exist_ok=True)
                with open(path, "wb") as file:
                    file.write(data)
            except OSError as error:
                raise FetchError(f"cannot write {path}: {error.strerror}") from None
            entry = self._modules[name, checksum] = _Entry(path, 0.0)
            self._metrics.wasm_cache_entries.value = len(self._modules)
        entry.used = time.monotonic()
        self._remember(wanted, checksum, entry)
        return entry

    def _remember(self, wanted: Wanted, checksum: str, entry: _Entry) -> None:
        if _digest(wanted.url):
            return  # such a URL never means another module
        latest = self._latest.setdefault(wanted.url, _Latest())
        latest.checksum = checksum
        latest.versions[wanted.resource] = wanted.version
        entry.urls.add(wanted.url)

    def purge(self) -> None:
        """Removes the files that nobody has asked for in time."""
        for key, entry in list(self._modules.items()):
            if time.monotonic() - entry.used <= self._options.expiry:
                continue
            with contextlib.suppress(FileNotFoundError):
                os.unlink(entry.path)
            del self._modules[key]
            for url in entry.urls:
                self._latest.pop(url, None)
            log.debug("removed stale Wasm module %s", entry.path)
        self._metrics.wasm_cache_entries.value = len(self._modules)

    async def keep_tidy(self) -> None:
        """Purges from time to time, for ever."""
        while True:
            await asyncio.sleep(self._options.purge_interval)
            self.purge()


def _keeps(wanted: Wanted) -> bool:
    """Whether what was fetched once is good whatever the resource's version."""
    if wanted.policy != "UNSPECIFIED_POLICY":
        return wanted.policy == "IfNotPresent"
    return not (wanted.url.startswith(_OCI) and wanted.url.endswith(":latest"))


def _name(url: str) -> str:
    """What a module is called whatever its tag or digest."""
    if not url.startswith(_OCI):
        return url
    name = url.partition("@")[0]
    head, colon, tag = name.rpartition(":")
    return head if colon and "/" not in tag and head != "oci" else name


def _digest(url: str) -> str:
    """The SHA-256 in the name of an image, empty if there is none."""
    return url.rpartition("@sha256:")[2] if url.startswith(_OCI) and "@sha256:" in url else ""

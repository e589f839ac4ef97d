"""The workload's secrets: certificates from the CA or from files, their cache and their renewal.

Keys live in memory only, unless ``OUTPUT_CERTS`` asks for files.

Source: istio/istio: security/pkg/nodeagent/cache/secretcache.go, security/pkg/nodeagent/util/util.go.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
import ssl
import time
import warnings
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from agent.ca_client import CAClient, CAError
from agent.csr import generate_csr
from agent.files import read_file, write_if_changed
from agent.metrics import Metrics
from agent.security import SecurityOptions
from agent.upstream import system_roots
from agent.watch import FileWatcher

log = logging.getLogger("cache")

DEFAULT = "default"
ROOT = "ROOTCA"
FILE_CERT = "file-cert:"
FILE_ROOT = "file-root:"
SYSTEM_ROOT = "file-root:system"
FILE_TIMEOUT_SECONDS = 10.0
RETRY_FIRST = 0.5
RETRY_LAST = 60.0
NO_LIFE_SECONDS = 0.1

_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----\r?\n?", re.DOTALL)
T = TypeVar("T")


class SecretError(Exception):
    """A secret cannot be made."""


@dataclass(frozen=True)
class Secret:
    """Either a key with its chain, or roots; PEM bytes. `expires` is seconds since the epoch, 0 if unknown."""

    chain: bytes = b""
    key: bytes = b""
    root: bytes = b""
    expires: float = 0.0
    received: float = 0.0


def certificate_expiry(chain: bytes) -> float:
    """When the first certificate of a PEM chain ends, in seconds since the epoch.

    Raises:
        SecretError: it is no certificate.
    """
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(chain).not_valid_after_utc.timestamp()
    except ValueError as error:
        raise SecretError(f"failed to extract expiration time from certificate: {error}") from None


def rotation_delay(expires: float, received: float, ratio: float, jitter: float, now: float, sign: float) -> float:
    """Seconds from `now` until a certificate is renewed, not below 0.

    Args:
        expires: end of the certificate, `received` when it came, both seconds since the epoch.
        ratio: part of the lifetime that is kept as grace.
        jitter: `sign` (-1..1) times this is added to the ratio.
    """
    grace = (expires - received) * min(1.0, max(0.0, ratio + sign * jitter))
    return max(0.0, expires - grace - now)


def merge_roots(*bundles: bytes) -> bytes:
    """All certificates of PEM bundles, sorted, each once."""
    found = {_with_newline(match.group(0)) for bundle in bundles for match in _PEM.finditer(bundle)}
    return b"".join(sorted(found))


def _with_newline(pem: bytes) -> bytes:
    return pem.replace(b"\r\n", b"\n").rstrip(b"\n") + b"\n"


def valid_roots(bundle: bytes) -> bytes:
    """The certificates of a bundle that parse.

    Raises:
        SecretError: none does.
    """
    from cryptography import x509

    good = []
    for match in _PEM.finditer(bundle):
        pem = _with_newline(match.group(0))
        try:
            with warnings.catch_warnings():
                # Old roots of operating systems have serial numbers that cryptography only warns about.
                warnings.simplefilter("ignore")
                x509.load_pem_x509_certificate(pem)
        except ValueError as error:
            log.error("skipping a root certificate: %s", error)
            continue
        good.append(pem)
    if not good:
        raise SecretError("no valid root certificate")
    return b"".join(good)


class SecretManager:
    """Makes secrets by name and tells when one has changed."""

    def __init__(self, options: SecurityOptions, client: CAClient | None, metrics: Metrics) -> None:
        self._options, self._client, self._metrics = options, client, metrics
        self._workload: Secret | None = None
        self._root = b""
        self._trust_bundle = b""
        self._lock = asyncio.Lock()
        self._watcher = FileWatcher()
        self._tasks: set[asyncio.Task[None]] = set()
        self._rotation: asyncio.Task[None] | None = None
        self._pause = RETRY_FIRST  # before a certificate without any life left is renewed
        self._changed: Callable[[str], None] = lambda _: None
        self._watched: Callable[[], bool] = lambda: False

    def on_change(self, changed: Callable[[str], None], watched: Callable[[], bool]) -> None:
        """Registers who pushes: `changed` gets a secret's name, `watched` tells if anybody wants the certificate."""
        self._changed, self._watched = changed, watched

    def start(self) -> None:
        """Fetches certificate and root ahead of the first request, if there is a CA."""
        if self._options.prefetch and self._client is not None:
            self._spawn(self._prefetch())

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._watcher.close()
        if self._client is not None:
            await self._client.close()

    def _spawn(self, job: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(job)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _prefetch(self) -> None:
        async def both() -> None:
            await self.generate(DEFAULT)
            await self.generate(ROOT)

        await self._with_retries(both, "failed to warm certificate")

    async def _with_retries(self, job: Callable[[], Awaitable[T]], what: str) -> T:
        pause = RETRY_FIRST
        while True:
            try:
                return await job()
            except SecretError as error:
                log.warning("%s: %s; retrying in %.1fs", what, error, pause)
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(pause * 1.5, RETRY_LAST)

    async def generate(self, name: str) -> Secret:
        """The secret `name`: ``default``, ``ROOTCA``, ``file-cert:CHAIN~KEY``, ``file-root:PATH``, any other as default.

        Raises:
            SecretError: it cannot be made.
        """
        secret = await self._from_file(name)
        if secret is None:
            secret = await self._from_ca(name)
            if name in (DEFAULT, ROOT):
                self._write_output(secret)
        return secret

    def update_trust_bundle(self, bundle: bytes) -> None:
        """Takes further roots from ProxyConfig; a change renews everything."""
        merged = merge_roots(bundle)
        if merged == self._trust_bundle:
            return
        self._trust_bundle = merged
        self._changed(ROOT)
        self._drop_workload()
        self._changed(DEFAULT)

    # -- files

    def _files_are_own_output(self) -> bool:
        output = self._options.output_directory
        return bool(output) and os.path.realpath(os.path.dirname(self._options.files.chain)) == os.path.realpath(output)

    async def _from_file(self, name: str) -> Secret | None:
        files, own = self._options.files, self._files_are_own_output()
        if name == ROOT and not own and _has_content(files.root):
            root = await self._root_file(files.root, name)
            self._root = root.root
            return Secret(root=merge_roots(root.root, self._trust_bundle))
        if name == DEFAULT and not own and _has_content(files.chain) and _has_content(files.key):
            return await self._pair_file(files.chain, files.key, name)
        if name == SYSTEM_ROOT:
            path = system_roots()
            if not path:
                raise SecretError("this system has no CA bundle")
            return await self._root_file(path, name)
        if name.startswith(FILE_ROOT):
            return await self._root_file(name.removeprefix(FILE_ROOT), name)
        if name.startswith(FILE_CERT):
            chain, separator, key = name.removeprefix(FILE_CERT).partition("~")
            if not separator or "~" in key:
                raise SecretError(f"invalid resource name {name!r}")
            return await self._pair_file(chain, key, name)
        return None

    async def _root_file(self, path: str, name: str) -> Secret:
        bundle = await self._read_with_retries(lambda: valid_roots(read_file(path)), path)
        self._watch(path, name)
        return Secret(root=bundle)

    async def _pair_file(self, chain: str, key: str, name: str) -> Secret:
        def load() -> tuple[bytes, bytes]:
            # Also checks that the key belongs to the certificate. OpenSSL would ask at a terminal for a lacking password.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(chain, key, password="")
            return read_file(chain), read_file(key)

        chain_pem, key_pem = await self._read_with_retries(load, chain)
        self._watch(chain, name)
        return Secret(chain_pem, key_pem, expires=certificate_expiry(chain_pem), received=time.time())

    async def _read_with_retries(self, load: Callable[[], T], path: str) -> T:
        pause, deadline = self._options.file_retry, time.monotonic() + FILE_TIMEOUT_SECONDS
        while True:
            try:
                return load()
            except (OSError, ssl.SSLError, SecretError) as error:
                if time.monotonic() + pause > deadline:
                    self._metrics.num_file_secret_failures_total.value += 1
                    raise SecretError(f"failed to load {path}: {error}") from None
            await asyncio.sleep(pause)
            pause *= 1.5

    def _watch(self, path: str, name: str) -> None:
        try:
            self._watcher.watch(path, name, lambda: self._file_changed(name))
        except OSError as error:
            self._metrics.num_file_watcher_failures_total.value += 1
            log.error("error adding watcher for file %s: %s", path, error)

    def _file_changed(self, name: str) -> None:
        log.info("event for file certificate, pushing %s to proxy", name)
        self._changed(name)

    # -- the CA

    async def _from_ca(self, name: str) -> Secret:
        async with self._lock:
            workload = self._workload
            if workload is None:
                workload = await self._issue()
                self._install(workload)
                if name != ROOT and self._set_root(workload.root):
                    self._changed(ROOT)
                elif name == ROOT:
                    self._set_root(workload.root)
        return self._view(workload, name)

    def _view(self, workload: Secret, name: str) -> Secret:
        if name == ROOT:
            return Secret(root=merge_roots(workload.root, self._trust_bundle))
        return Secret(workload.chain, workload.key, expires=workload.expires, received=workload.received)

    def _set_root(self, root: bytes) -> bool:
        """Remembers the CA's root; True if there was another one before."""
        changed = bool(self._root) and self._root != root
        self._root = root
        return changed

    async def _issue(self) -> Secret:
        if self._client is None:
            raise SecretError("attempted to fetch secret, but ca client is nil")
        # Making an RSA key takes long enough to hold up DNS answers.
        key, csr = await asyncio.to_thread(generate_csr, self._options.identity, self._options.key)
        try:
            certificates = await self._client.sign(csr, int(self._options.ttl))
        except CAError as error:
            raise SecretError(f"failed to generate workload certificate: {error}") from None
        pems = [_with_newline(pem.encode()) for pem in certificates]
        chain = b"".join(pems)
        return Secret(chain, key, pems[-1], certificate_expiry(chain), time.time())

    def _install(self, workload: Secret) -> None:
        self._workload = workload
        self._metrics.cert_expiry_seconds.set_function(DEFAULT, lambda: workload.expires - time.time())
        delay = rotation_delay(
            workload.expires,
            workload.received,
            self._options.grace_ratio,
            self._options.grace_jitter,
            time.time(),
            random.uniform(-1, 1),
        )
        if delay > NO_LIFE_SECONDS:
            self._pause = RETRY_FIRST
        else:
            # A CA with a wrong clock, or a ratio of 1: without a pause it would be asked without end.
            delay, self._pause = self._pause, min(2 * self._pause, RETRY_LAST)
        log.info("generated new workload certificate ttl=%.0fs renewal in %.0fs", workload.expires - time.time(), delay)
        if self._rotation is not None and self._rotation is not asyncio.current_task():
            self._rotation.cancel()
        self._rotation = self._spawn(self._rotate(workload, delay))

    def _drop_workload(self) -> None:
        self._workload = None
        if self._rotation is not None:
            self._rotation.cancel()
            self._rotation = None

    async def _rotate(self, old: Secret, delay: float) -> None:
        await asyncio.sleep(delay)
        if self._workload is not old:
            return
        if not self._watched():
            self._workload = None
            return
        # The old certificate is served until there is a new one.
        new = await self._with_retries(self._issue, "failed to renew the workload certificate")
        async with self._lock:
            if self._workload is not old:
                return
            self._install(new)
            root_changed = self._set_root(new.root)
        self._write_output(self._view(new, DEFAULT))
        if root_changed:
            log.info("Root cert has changed, start rotating root cert")
            self._write_output(self._view(new, ROOT))
            self._changed(ROOT)
        self._changed(DEFAULT)

    def _write_output(self, secret: Secret) -> None:
        directory = self._options.output_directory
        if not directory:
            return
        contents = (("key.pem", secret.key), ("cert-chain.pem", secret.chain), ("root-cert.pem", secret.root))
        try:
            for name, content in contents:
                if content:
                    write_if_changed(os.path.join(directory, name), content, self._options.output_mode)
        except OSError as error:
            log.error("error when output the resource: %s", error)


def _has_content(path: str) -> bool:
    try:
        return os.path.getsize(path) > 0
    except OSError:
        return False

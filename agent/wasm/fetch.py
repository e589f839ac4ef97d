"""One module over HTTP(S), in a thread: retries, redirects, addresses that are refused, gzip and tar around the module.

Sources: istio/istio: pkg/wasm/httpfetcher.go, pkg/wasm/ssrf.go.
"""

from __future__ import annotations

import functools
import gzip
import http.client
import io
import ipaddress
import socket
import ssl
import tarfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Mapping
from typing import Any

from agent.wasm.options import WasmOptions

MAGIC = b"\0asm"
HEADER = 8
"""Bytes of a module's magic number and version."""

_METADATA = frozenset(map(ipaddress.ip_address, ("100.100.100.200", "fd00:ec2::254")))
"""Cloud metadata services that are not link-local."""
_FIRST_PAUSE = 0.5
_FACTOR = 1.5
_FINAL = frozenset((501, 505, 511))


class FetchError(Exception):
    """A module that could not be had; one line."""


class Status(FetchError):
    """An answer other than 200."""

    def __init__(self, code: int, headers: Any, body: bytes = b"") -> None:
        super().__init__(f"status code {code}")
        self.code, self.headers, self.body = code, headers, body


def is_module(data: bytes) -> bool:
    return len(data) >= HEADER and data.startswith(MAGIC)


def fetch(url: str, options: WasmOptions, *, insecure: bool, deadline: float) -> bytes:
    """A module, unwrapped. ``deadline`` is a time of time.monotonic(). Blocks.

    Raises:
        FetchError: it cannot be had.
    """
    pause, last, attempt = _FIRST_PAUSE, "", 0
    for attempt in range(1, max(1, options.attempts) + 1):
        try:
            _, body = request(url, options, insecure=insecure, deadline=deadline)
            return unwrap(body, options.max_size)
        except Status as status:
            last = f"wasm module download request failed: {status}"
            if status.code < 500 or status.code in _FINAL:
                break
        except FetchError as error:
            last = str(error)
        if time.monotonic() + pause >= deadline:
            break
        if attempt < options.attempts:
            time.sleep(pause)
            pause *= _FACTOR
    raise FetchError(f"wasm module download failed after {attempt} attempts, last error: {last}")


def request(
    url: str,
    options: WasmOptions,
    *,
    insecure: bool,
    deadline: float,
    headers: Mapping[str, str] | None = None,
    data: bytes | None = None,
) -> tuple[Any, bytes]:
    """(headers, body) of one GET, or of a POST of the form `data`; redirects are followed.

    Raises:
        Status: another answer than 200. FetchError: none, or one that is too long.
    """
    opener = urllib.request.OpenerDirector()
    for handler in (
        _Http(options),
        _Https(options, _tls(insecure)),
        urllib.request.HTTPRedirectHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    timeout = min(options.request_timeout, deadline - time.monotonic())
    if timeout <= 0:
        raise FetchError("deadline exceeded")
    try:
        with opener.open(urllib.request.Request(url, data, dict(headers or {})), timeout=timeout) as answer:
            body = answer.read(options.max_size + 1)
    except urllib.error.HTTPError as error:
        with error:
            raise Status(error.code, error.headers, error.read(65536)) from None
    except urllib.error.URLError as error:
        raise FetchError(str(error.reason)) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise FetchError(str(error) or type(error).__name__) from None
    if len(body) > options.max_size:
        raise FetchError(f"{url} has more than {options.max_size} bytes")
    return answer.headers, body


@functools.cache
def _tls(insecure: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def refused(address: str, options: WasmOptions) -> str:
    """Why nothing may be fetched from an address, empty if it may."""
    ip = ipaddress.ip_address(address)
    mapped = getattr(ip, "ipv4_mapped", None)
    ip = mapped or ip
    if ip.is_link_local:
        return f"connection blocked: resolved IP {ip} is link-local"
    if ip in _METADATA:
        return f"connection blocked: resolved IP {ip} is a known cloud metadata address"
    for network in options.blocked:
        if ip in network:
            return f"connection blocked: resolved IP {ip} is in blocked CIDR range {network}"
    return ""


def _dial(options: WasmOptions, address: tuple[str, int], timeout: float, *_: object) -> socket.socket:
    """As socket.create_connection, but what a name resolves to is looked at first."""
    problem: OSError | None = None
    for _family, _kind, _protocol, _name, place in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        why = refused(str(place[0]).partition("%")[0], options)
        if why:
            raise OSError(why)
        try:
            return socket.create_connection((str(place[0]), int(place[1])), timeout)
        except OSError as error:
            problem = error
    raise problem or OSError(f"{address[0]} has no address")


class _Http(urllib.request.HTTPHandler):
    def __init__(self, options: WasmOptions) -> None:
        super().__init__()
        self._options = options

    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_connection_of(http.client.HTTPConnection, self._options), req)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, options: WasmOptions, context: ssl.SSLContext) -> None:
        super().__init__(context=context)
        self._options, self._tls = options, context

    def https_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_connection_of(http.client.HTTPSConnection, self._options), req, context=self._tls)


def _connection_of(kind: Any, options: WasmOptions) -> Any:
    def make(*arguments: Any, **named: Any) -> Any:
        connection = kind(*arguments, **named)
        connection._create_connection = functools.partial(_dial, options)
        return connection

    return make


def unwrap(data: bytes, limit: int) -> bytes:
    """The module in gzip or in a tar file of one, or what came if there is none in it."""
    inner = data
    while not is_module(inner):
        try:
            if inner.startswith(b"\x1f\x8b"):
                with gzip.GzipFile(fileobj=io.BytesIO(inner)) as file:
                    inner = file.read(limit)
            elif inner[257:262] == b"ustar":
                with tarfile.open(fileobj=io.BytesIO(inner), mode="r:") as archive:
                    member = archive.next()
                    content = archive.extractfile(member) if member is not None else None
                    if content is None:
                        return data
                    inner = content.read(limit)
            else:
                return data
        except (OSError, EOFError, zlib.error, tarfile.TarError):
            return data
    return inner

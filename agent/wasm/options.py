"""What the environment says about fetching Wasm modules (istio/istio: pkg/wasm/options.go, pkg/features/security.go)."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from agent.environment import Environment

DIRECTORY = "./var/lib/istio/data"

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True)
class WasmOptions:
    """``insecure`` are hosts whose certificates are not checked (``*``: all); times are in seconds, sizes in bytes."""

    directory: str = DIRECTORY
    insecure: frozenset[str] = frozenset()
    expiry: float = 24 * 3600.0
    purge_interval: float = 3600.0
    request_timeout: float = 15.0
    attempts: int = 5
    max_size: int = 256 << 20
    blocked: tuple[Network, ...] = ()

    def allows_insecure(self, host: str) -> bool:
        return "*" in self.insecure or host in self.insecure


def from_environment(env: Environment) -> WasmOptions:
    """Ranges that cannot be read block nothing, as in Istio."""
    blocked: list[Network] = []
    for text in _words(env.string("BLOCKED_CIDRS_IN_WASM_FETCH")):
        try:
            blocked.append(ipaddress.ip_network(text, strict=False))
        except ValueError:
            continue
    return WasmOptions(
        insecure=frozenset(_words(env.string("WASM_INSECURE_REGISTRIES"))),
        expiry=env.seconds("WASM_MODULE_EXPIRY", WasmOptions.expiry),
        purge_interval=env.seconds("WASM_PURGE_INTERVAL", WasmOptions.purge_interval),
        request_timeout=env.seconds("WASM_HTTP_REQUEST_TIMEOUT", WasmOptions.request_timeout),
        attempts=env.integer("WASM_HTTP_REQUEST_MAX_RETRIES", WasmOptions.attempts),
        max_size=env.integer("ISTIO_WASM_MAX_BINARY_SIZE_BYTES", WasmOptions.max_size),
        blocked=tuple(blocked),
    )


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]

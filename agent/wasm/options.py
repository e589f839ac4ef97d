"""What the environment says about fetching Wasm modules (istio/istio: pkg/wasm/options.go, pkg/features/security.go)."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from agent.environment import Environment

DIRECTORY = "./var/lib/istio/data"

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True)
class WasmOptions:
    """``insecure`` are hosts whose certificates are not checked (``*``: all); times are in seconds, sizes in bytes.

    ``docker_config`` is the file with logins for images that come without a secret, empty for none; ``environment`` is
    what the credential helpers run with that it names.
    """

    directory: str = DIRECTORY
    insecure: frozenset[str] = frozenset()
    expiry: float = 24 * 3600.0
    purge_interval: float = 3600.0
    request_timeout: float = 15.0
    attempts: int = 5
    max_size: int = 256 << 20
    blocked: tuple[Network, ...] = ()
    docker_config: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)

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
        docker_config=_docker_config(env),
        environment=env.values,
    )


def _docker_config(env: Environment) -> str:
    """The file with this machine's logins to registries, empty if there is none: Docker's, else Podman's."""
    home, docker = env.string("HOME"), env.string("DOCKER_CONFIG")
    places = [os.path.join(docker, "config.json")] if docker else []
    if not docker and home:
        places.append(os.path.join(home, ".docker", "config.json"))
    places.append(env.string("REGISTRY_AUTH_FILE"))
    own = env.string("XDG_CONFIG_HOME") or (os.path.join(home, ".config") if home else "")
    directories = filter(None, (env.string("XDG_RUNTIME_DIR"), own))
    places += [os.path.join(directory, "containers", "auth.json") for directory in directories]
    return next((place for place in places if os.path.isfile(place)), "")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]

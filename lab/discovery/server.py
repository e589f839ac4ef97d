"""The discovery process: plaintext and secure gRPC, HTTP for people and scrapers, and the control socket.

Ports and their meaning: istio/istio: pilot/cmd/pilot-discovery/app/cmd.go, pilot/pkg/bootstrap/server.go.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from lab.discovery import keys as keys_module
from lab.discovery.ads import DiscoveryServer
from lab.discovery.auth import Authenticator
from lab.discovery.ca_service import CertificateService
from lab.discovery.control import Control
from lab.discovery.metrics import Metrics
from lab.discovery.secure_port import SecurePort, server_context
from lab.errors import InputError
from lab.manifests import model

log = logging.getLogger("discovery")

PLAINTEXT_PORT = 15010
SECURE_PORT = 15012
MONITORING_PORT = 15014
HTTP_PORT = 8080

GRPC_OPTIONS = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 15_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_concurrent_streams", 100_000),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),
)


def join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _taken(address: str, cause: object) -> InputError:
    return InputError("cannot listen", address, str(cause), "Is another control plane there?")


async def start(server: DiscoveryServer, *addresses: str, services: tuple[Any, ...] = ()) -> Any:
    """Starts gRPC in plaintext on ``IP:PORT``, ``unix:PATH`` or ``unix-abstract:NAME``. Raises InputError if one is taken."""
    grpc_server = grpc.aio.server(options=GRPC_OPTIONS)
    grpc_server.add_generic_rpc_handlers((server.grpc_handlers(), *services))
    for address in addresses:
        try:
            grpc_server.add_insecure_port(address)
        except RuntimeError as e:
            await grpc_server.stop(grace=None)
            raise _taken(address, e) from None
    await grpc_server.start()
    return grpc_server


def istiod_names(root_namespace: str, suffix: str) -> tuple[str, ...]:
    """DNS names of the control plane's certificate (istio/istio: pilot/pkg/bootstrap/certcontroller.go)."""
    return (
        f"istiod.{root_namespace}.svc",
        f"istiod.{root_namespace}.svc.{suffix}",
        f"istiod.{root_namespace}",
        f"istiod-remote.{root_namespace}.svc",
        f"istio-pilot.{root_namespace}.svc",
        "istiod",
    )


def notify_ready() -> None:
    """READY=1 to NOTIFY_SOCKET (sd_notify(3)), if there is one."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s, contextlib.suppress(OSError):
        s.sendto(b"READY=1", "\0" + path[1:] if path.startswith("@") else path)


class Discovery:
    """Everything of one control plane; ``start`` and ``stop`` it. Addresses are bound on ``listen`` (an IP).

    ``keys`` is the path of the file with what signs, which is made if it is not there; without one, that is new.
    """

    def __init__(self, load: Callable[[], model.Mesh], listen: str, control: str = "", keys: str = "") -> None:
        with ThreadPoolExecutor(1) as threads:
            loading = threads.submit(keys_module.load, keys)
            mesh = load()
        signing = loading.result()
        self.mesh_config = mesh.mesh_config
        self.listen = listen
        self._control_path = control
        self.metrics = Metrics()
        self.issuer = signing.issuer()
        self.authority = signing.authority(mesh.mesh_config.trust_domain)
        if keys and signing.root is None:
            keys_module.save(keys, signing, self.authority)
        # gRPC behind the secure port: an address that nobody can guess
        self._inner = f"sidecarlab-xds-{secrets.token_hex(16)}"
        names = istiod_names(mesh.mesh_config.root_namespace, mesh.domain_suffix)
        self.secure = SecurePort(server_context(self.authority, names), self._inner)
        self.authenticator = Authenticator(
            mesh.mesh_config.trust_domain, self.issuer, self.secure.certificate_identities
        )
        self.server = DiscoveryServer(mesh, authenticator=self.authenticator, metrics=self.metrics)
        self.control = Control(self.server, load, self.issuer, self.authority)
        self._grpc: list[Any] = []
        self._sockets: list[asyncio.Server] = []
        self._http: Any = None

    async def start(self) -> None:
        """Listens on 15010, 15012 and the control socket. Raises InputError if an address is taken."""
        certificates = CertificateService(self.authority, self.authenticator, self.metrics).grpc_handlers()
        self._grpc.append(await start(self.server, join(self.listen, PLAINTEXT_PORT)))
        self._grpc.append(await start(self.server, f"unix-abstract:{self._inner}", services=(certificates,)))
        try:
            await self.secure.start(self.listen, SECURE_PORT)
        except OSError as e:
            raise _taken(join(self.listen, SECURE_PORT), e.strerror or e) from None
        if self._control_path:
            self._sockets.append(await asyncio.start_unix_server(self.control.serve, self._control_path))

    async def start_http(self) -> None:
        """Metrics on 15014 and debug on 8080; apart, because nobody waits for them and their imports are slow."""
        http = await asyncio.to_thread(_import_http)
        self._http = http.HttpServers(self.server, self.authenticator)
        for port in (MONITORING_PORT, HTTP_PORT):
            try:
                await self._http.listen(self.listen, port)
            except OSError as e:
                log.error("cannot listen address=%s: %s", join(self.listen, port), e)

    async def stop(self) -> None:
        for one in self._sockets:
            one.close()
        if self._http is not None:
            await self._http.close()
        await self.secure.close()
        for grpc_server in self._grpc:
            await grpc_server.stop(grace=None)
        self._grpc.clear()  # grpc wants them gone while the loop runs


def _import_http() -> Any:
    from lab.discovery import http_servers

    return http_servers


async def serve(load: Callable[[], model.Mesh], listen: str, control: str, keys: str = "") -> None:
    """Runs discovery until SIGTERM or SIGINT."""
    discovery = Discovery(load, listen, control, keys)
    await discovery.start()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    notify_ready()
    http = loop.create_task(discovery.start_http())
    await stop.wait()
    http.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await http
    await discovery.stop()


def main(params: dict[str, Any]) -> int:
    """Entry of the lab's discovery process.

    params: ``mesh`` (directory of manifests), ``listen`` (IP), ``socket`` (control socket path), ``name`` (lab), ``keys``
    (path of the file with what it signs with).
    """
    from lab.manifests import stored

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    name = str(params.get("name") or "lab")
    control = str(params.get("socket") or "")
    if control:
        Path(control).unlink(missing_ok=True)

    def load() -> model.Mesh:
        return stored.load(str(params["mesh"]), name)

    asyncio.run(serve(load, str(params["listen"]), control, str(params.get("keys") or "")))
    return 0

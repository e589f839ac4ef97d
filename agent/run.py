"""One `proxy` run: starts every part in Istio's order, waits for Envoy's end, stops everything.

Source: istio/istio: pkg/istio-agent/agent.go (Run), pilot/cmd/pilot-agent/app/cmd.go.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import importlib
import json
import logging
import os
import resource
import signal
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from agent import compliance, paths
from agent import options as agent_options
from agent.admin import AdminClient
from agent.app_probe import AppProber
from agent.bootstrap import XDS_SOCKET, build_bootstrap, lightstep_token_file
from agent.dns.server import DNSOptions, DNSServer
from agent.dns.table import ProxyNames
from agent.envoy import EnvoyProcess, envoy_args, envoy_environment, find_binary
from agent.errors import AgentError
from agent.grpc_bootstrap import DEFAULT_PATH, GRPCReadiness, build_grpc_bootstrap, write_grpc_bootstrap
from agent.lifecycle import DrainOptions, ProxyAgent
from agent.metrics import Metrics
from agent.node import Node
from agent.notify import notify
from agent.options import ProxyOptions
from agent.probe_config import parse_probers
from agent.protos import proxy_config_pb2 as pb
from agent.proxy_config import to_dict
from agent.readiness import EnvoyReadiness, NotReady, Readiness
from agent.scrape import Scraper
from agent.scrape_config import parse_scrape_config
from agent.status import StatusServer

if TYPE_CHECKING:
    from agent.debug_port import DebugPort
    from agent.sds import SDSServer
    from agent.secrets import SecretManager
    from agent.wasm.cache import ModuleCache
    from agent.xds_proxy import XdsProxy

log = logging.getLogger("default")

ENVOY_USER = (1337, 1337)
READY_FIRST_PAUSE = 0.005
READY_LAST_PAUSE = 1.0


def dry_run(options: ProxyOptions) -> dict[str, Any]:
    """What `proxy` would use, as the contract's JSON object."""
    node = agent_options.make_node(options)
    source = agent_options.bootstrap_source(options)
    path = source or bootstrap_path(options)
    bootstrap = None if source else build_bootstrap(node, options.config, agent_options.bootstrap_options(options))
    return {
        "node": {"id": node.id, "metadata": node.metadata, "locality": node.locality.to_dict()},
        "proxy_config": to_dict(options.config),
        "bootstrap": bootstrap,
        "envoy_args": envoy_args(path, options.config, agent_options.envoy_options(options, node)),
    }


def bootstrap_path(options: ProxyOptions) -> str:
    """Where the generated bootstrap goes."""
    # Without "./", as Go's path.Join gives it.
    return os.path.normpath(os.path.join(options.config.config_path, "envoy-rev.json"))


class Agent:
    """The parts of one sidecar agent."""

    def __init__(self, options: ProxyOptions, envoy: EnvoyProcess | None) -> None:
        """Computes everything that can fail without I/O on sockets.

        Raises:
            AgentError: the configuration cannot be used.
        """
        self.options, self._envoy = options, envoy
        env = options.environment
        self.metrics = Metrics()
        self._admin = AdminClient(options.localhost, options.config.proxy_admin_port)
        self._cancelled = asyncio.Event()
        self._configured = asyncio.Event()
        self._table_received = asyncio.Event()
        self._dns = self._make_dns() if options.dns_enabled else None
        self._xds: XdsProxy | None = None
        self._secrets: SecretManager | None = None
        self._sds: SDSServer | None = None
        self._debug_port: DebugPort | None = None
        self._modules: ModuleCache | None = None
        self._serve_only_files = False
        self._tasks: list[asyncio.Task[None]] = []
        self._proxy_agent: ProxyAgent | None = None
        if envoy is not None:
            self._proxy_agent = ProxyAgent(envoy, self._admin, self._drain_options())
        self._grpc_bootstrap = env.string("GRPC_XDS_BOOTSTRAP", DEFAULT_PATH)
        checks: list[Callable[[], str]] = []
        if self._grpc_bootstrap:
            checks.append(GRPCReadiness(self._grpc_bootstrap).check)
        if self._dns is not None:
            checks.append(self._dns.check_ready)
        self._readiness = Readiness(EnvoyReadiness(self._admin) if envoy is not None else None, checks)
        targets = parse_scrape_config(
            env.lookup("ISTIO_PROMETHEUS_ANNOTATIONS") if options.sidecar else None, options.config.status_port
        )
        merge_envoy = envoy is not None and env.boolean("PILOT_AGENT_MERGE_ENVOY_STATS", True)
        pod_ip = env.string("INSTANCE_IP")
        legacy = env.boolean("REWRITE_PROBE_LEGACY_LOCALHOST_DESTINATION", False)
        self._prober = AppProber(
            parse_probers(env.string("ISTIO_KUBE_APP_PROBERS")),
            "localhost" if legacy else pod_ip,
            options.config.status_port,
            ipv6=options.ipv6 or ":" in pod_ip,
            http2=env.boolean("ISTIO_ENABLE_HTTP2_PROBING", True),
            keep=env.boolean("ENABLE_PROBE_KEEPALIVE_CONNECTIONS", False),
        )
        self._status = StatusServer(
            self._readiness,
            Scraper(self.metrics, options.prometheus_port if merge_envoy else None, targets),
            self._prober,
            self._dns,
            self._drain_now,
            self._quit,
            local_metrics_only=env.boolean("METRICS_LOCALHOST_ACCESS_ONLY", False),
            profiling=options.flags.boolean("profiling"),
        )

    def _make_dns(self) -> DNSServer:
        env = self.options.environment
        return DNSServer(
            DNSOptions(
                address=env.string("DNS_PROXY_ADDR"),
                names=ProxyNames(self.options.namespace, self.options.domain),
                parallel=env.boolean("DNS_FORWARD_PARALLEL", False),
                timeout=env.seconds("DNS_FORWARD_TIMEOUT", 5.0),
                root=os.geteuid() == 0,
            ),
            self.metrics,
        )

    def _drain_options(self) -> DrainOptions:
        options, env = self.options, self.options.environment
        return DrainOptions(
            sidecar=options.sidecar,
            termination=options.config.termination_drain_duration.ToNanoseconds() / 1e9,
            minimum=env.seconds("MINIMUM_DRAIN_DURATION", 5.0),
            on_zero_connections=env.boolean("EXIT_ON_ZERO_ACTIVE_CONNECTIONS", False),
            known_ports=(
                options.status_port,
                options.prometheus_port,
                env.integer("ENVOY_SECURE_METRICS_PORT", 0),
                env.integer("ENVOY_SECURE_MERGED_METRICS_PORT", 0),
            ),
        )

    async def run(self) -> None:
        """Runs to the end of Envoy, or to SIGTERM or SIGINT.

        Raises:
            AgentError: a part cannot start.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        bootstrap = ""
        try:
            if self.options.config.status_port > 0:
                await self._status.start(self.options.config.status_port)
            if self._dns is not None:
                await self._dns.start()
            await self._start_sds()
            await self._start_xds()
            node = self._make_node()
            if self._grpc_bootstrap:
                self._write_grpc_bootstrap(node)
            self._spawn(self._watch_readiness())
            self._start_health_check()
            if self._envoy is None or self._proxy_agent is None:
                await self._cancelled.wait()
                return
            bootstrap = await self._start_envoy(node)
            load_while_envoy_starts()
            await self._proxy_agent.run(self._cancelled)
        finally:
            if self._readiness.envoy is not None:
                self._readiness.envoy.terminated = True
            await self._stop()
            if bootstrap:
                _remove(bootstrap)

    def _spawn(self, job: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(job))

    def _make_node(self) -> Node:
        from agent.security import socket_is_alive

        return agent_options.make_node(
            self.options,
            credential_socket=socket_is_alive(paths.CREDENTIAL_SOCKET),
            file_credentials=self._serve_only_files,
        )

    def _write_grpc_bootstrap(self, node: Node) -> None:
        socket = os.path.join(self.options.config.config_path, XDS_SOCKET)
        certificates = self.options.environment.string("OUTPUT_CERTS")
        write_grpc_bootstrap(self._grpc_bootstrap, build_grpc_bootstrap(node, socket, certificates))

    def _start_health_check(self) -> None:
        config = self.options.config
        if not config.HasField("readiness_probe") or self._xds is None:
            return
        from agent.health_check import WorkloadHealthCheck

        legacy = self.options.environment.boolean("REWRITE_PROBE_LEGACY_LOCALHOST_DESTINATION", False)
        check = WorkloadHealthCheck(
            config.readiness_probe,
            self._readiness.envoy,
            "localhost" if legacy or not self.options.addresses else self.options.addresses[0],
            ipv6=self.options.ipv6,
            report=self._xds.send_health,
        )
        self._spawn(check.run())

    def _keepalive(self) -> tuple[float, float]:
        env = self.options.environment
        return env.seconds("GRPC_KEEPALIVE_INTERVAL", 30.0), env.seconds("GRPC_KEEPALIVE_TIMEOUT", 10.0)

    def _server_options(self) -> list[tuple[str, Any]]:
        from agent.xds_proxy import server_options

        env = self.options.environment
        streams = env.integer("ISTIO_GPRC_MAXSTREAMS", 100000)
        return server_options(streams, env.integer("ISTIO_GPRC_MAXRECVMSGSIZE", 4 * 1024 * 1024), *self._keepalive())

    async def _start_sds(self) -> None:
        from agent import security
        from agent.ca_client import CAClient
        from agent.sds import SDSServer
        from agent.secrets import SecretManager
        from agent.upstream import call_metadata

        socket = security.workload_socket(self.options)
        self._serve_only_files = socket.foreign
        resolved = security.resolve(self.options, serve_only_files=socket.foreign)
        client = None
        if not resolved.no_ca:
            log.info("CA Endpoint %s, provider %s", resolved.ca_address, security.CITADEL)
            metadata = functools.partial(call_metadata, self.options, "CA_HEADER_")
            client = CAClient(resolved, metadata, self.metrics, self._keepalive())
        self._secrets = SecretManager(resolved, client, self.metrics)
        config = self.options.config
        self._sds = SDSServer(
            socket.path,
            self._secrets,
            self.metrics,
            crl=resolved.crl,
            provider=config.private_key_provider if config.HasField("private_key_provider") else None,
        )
        await self._sds.start(self._server_options())
        self._secrets.start()

    async def _start_xds(self) -> None:
        from agent import debug_port, upstream
        from agent.protos import nds_pb2
        from agent.xds_proxy import NAME_TABLE_TYPE, PROXY_CONFIG_TYPE, Handler, XdsProxy

        env = self.options.environment
        handlers: dict[str, Handler] = {}
        dns = self._dns
        if dns is not None:

            async def apply_table(data: bytes) -> None:
                await dns.update(nds_pb2.NameTable.FromString(data))
                self._table_received.set()

            handlers[NAME_TABLE_TYPE] = apply_table
        secrets = self._secrets
        if secrets is not None and env.boolean("PROXY_CONFIG_XDS_AGENT", False):

            def apply_proxy_config(data: bytes) -> None:
                certificates = pb.ProxyConfig.FromString(data).ca_certificates_pem
                secrets.update_trust_bundle("\n".join(certificates).encode())

            handlers[PROXY_CONFIG_TYPE] = apply_proxy_config
        self._xds = XdsProxy(
            os.path.join(self.options.config.config_path, XDS_SOCKET),
            upstream.discovery(self.options),
            self.metrics,
            handlers,
            self._xds_request,
            self._convert if env.boolean("ISTIO_AGENT_ENABLE_WASM_REMOTE_LOAD_CONVERSION", True) else None,
        )
        try:
            await self._xds.start(self._server_options())
        except OSError as error:
            raise AgentError("failed to start xds proxy", error) from None
        if env.boolean("PROXY_XDS_DEBUG_VIA_AGENT", True):
            self._debug_port = debug_port.DebugPort(
                self._xds, self.options.localhost, os.path.join(self.options.config.config_path, debug_port.SOCKET)
            )
            await self._debug_port.start(env.integer("PROXY_XDS_DEBUG_VIA_AGENT_PORT", debug_port.PORT))

    async def _convert(self, resources: list[Any]) -> list[Any]:
        """Extension configurations with their Wasm modules fetched; what it needs is loaded with the first."""
        from agent.wasm.cache import ModuleCache
        from agent.wasm.convert import convert
        from agent.wasm.options import from_environment

        if self._modules is None:
            self._modules = ModuleCache(from_environment(self.options.environment), self.metrics)
            self._spawn(self._modules.keep_tidy())
        return await convert(resources, self._modules, self.metrics)

    def _xds_request(self, type_url: str, nonce: str, error: str) -> None:
        from agent.xds_proxy import LISTENER_TYPE

        if type_url == LISTENER_TYPE and nonce and not error:
            self._configured.set()

    async def _start_envoy(self, node: Node) -> str:
        """Writes the bootstrap and starts Envoy; the path to delete when Envoy has ended."""
        options, env = self.options, self.options.environment
        assert self._envoy is not None
        path = agent_options.bootstrap_source(options)
        written = ""
        if not path:
            path = written = bootstrap_path(options)
            _write_bootstrap(
                path, build_bootstrap(node, options.config, agent_options.bootstrap_options(options)), options
            )
        await self._envoy.start(
            find_binary(options.config.binary_path),
            envoy_args(path, options.config, agent_options.envoy_options(options, node)),
            envoy_environment(env.values, env.string(compliance.VARIABLE)),
        )
        return written

    async def _watch_readiness(self) -> None:
        """Reports the first time that the proxy is ready; the xDS stream says when it is worth asking."""
        if self._envoy is not None:
            await self._configured.wait()
        if self._dns is not None:
            await self._table_received.wait()
        pause = READY_FIRST_PAUSE
        while True:
            try:
                await self._readiness.check()
                break
            except NotReady as reason:
                log.debug("not ready: %s", reason)
            # Envoy warms what it was sent and has no event for the end of that.
            await asyncio.sleep(pause)
            pause = min(2 * pause, READY_LAST_PAUSE)
        seconds = time.monotonic() - self.metrics.started
        self.metrics.startup_duration_seconds.value = seconds
        log.info("Readiness succeeded in %.3fs", seconds)
        # What has been loaded stays: the collector need not look at it again, which would hold up DNS answers.
        gc.freeze()
        self._notify("READY=1")

    def _notify(self, message: str) -> None:
        try:
            notify(self.options.environment.string("NOTIFY_SOCKET"), message)
        except OSError as error:
            log.warning("failed to notify %s: %s", message, error.strerror)

    def _signalled(self, number: signal.Signals) -> None:
        if not self._cancelled.is_set():
            log.info("received %s, shutting down", number.name)
            self._notify("STOPPING=1")
            self._cancel()

    def _cancel(self) -> None:
        if self._readiness.envoy is not None:
            self._readiness.envoy.terminated = True
        self._cancelled.set()

    def _quit(self) -> None:
        if self._proxy_agent is None:
            log.error("cannot quit: Envoy is disabled")
            return
        self._proxy_agent.disable_draining()
        self._cancel()

    async def _drain_now(self) -> None:
        if self._proxy_agent is None:
            log.error("cannot drain: Envoy is disabled")
            return
        await self._proxy_agent.drain_now()

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._debug_port is not None:
            await self._debug_port.stop()
        if self._xds is not None:
            await self._xds.stop()
        if self._secrets is not None:
            await self._secrets.close()
        if self._sds is not None:
            await self._sds.stop()
        if self._dns is not None:
            await self._dns.stop()
        await self._status.stop()
        self._prober.close()


def load_while_envoy_starts() -> None:
    """Imports what is needed only once Envoy speaks: it boots on another processor meanwhile."""
    for module in (
        "dns.message",
        "dns.rdtypes.ANY.OPT",
        "envoy.extensions.transport_sockets.tls.v3.secret_pb2",
        "envoy.service.discovery.v3.discovery_pb2",
        "h11",
    ):
        importlib.import_module(module)


def _write_bootstrap(path: str, bootstrap: dict[str, Any], options: ProxyOptions) -> None:
    try:
        os.makedirs(options.config.config_path, mode=0o700, exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            json.dump(bootstrap, file, separators=(",", ":"))
        if options.config.tracing.WhichOneof("tracer") == "lightstep":
            with open(lightstep_token_file(options.config), "w", encoding="utf-8") as file:
                file.write(options.config.tracing.lightstep.access_token)
    except OSError as error:
        raise AgentError("failed to write the Envoy bootstrap", error) from None


def _remove(path: str) -> None:
    try:
        os.remove(path)
    except OSError as error:
        log.warning("Failed to delete config file %s: %s", path, error.strerror)


def run_proxy(options: ProxyOptions) -> None:
    """Runs the agent in this process until it ends; the calling process must still have a single thread.

    Raises:
        AgentError: a part cannot start.
    """
    import uvloop

    envoy: EnvoyProcess | None = None
    if not options.disable_envoy:
        dns_address = options.environment.string("DNS_PROXY_ADDR")
        as_root = os.geteuid() == 0 and dns_address.endswith(":53")
        envoy = EnvoyProcess(ENVOY_USER if as_root else None, log_as_json=options.flags.boolean("log_as_json"))
    _prepare_process()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_main(options, envoy))
    finally:
        if envoy is not None:
            envoy.close()


def _prepare_process() -> None:
    """As Go's runtime does: as many open files as are allowed."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _main(options: ProxyOptions, envoy: EnvoyProcess | None) -> None:
    await Agent(options, envoy).run()

"""Everything the agent is told: flags, environment and files, read once at start.

Source: istio/istio: pilot/cmd/pilot-agent/app/cmd.go, pilot/cmd/pilot-agent/options/.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent import compliance, network, paths, platform, proxy_config
from agent.bootstrap import BootstrapOptions
from agent.downward import read_downward_api
from agent.environment import Environment
from agent.envoy import EnvoyOptions, read_override
from agent.errors import AgentError, UsageError
from agent.files import read_text
from agent.flags import Flag, Parsed
from agent.log import DEFAULT_LEVELS
from agent.node import Node, NodeOptions, build_node, dns_domain, node_id, pilot_san
from agent.protos import proxy_config_pb2 as pb

log = logging.getLogger("default")

SIDECAR = "sidecar"
PROXY_TYPES = (SIDECAR, "router", "waypoint", "ztunnel", "agentgateway")
EXCLUDE_INTERFACES = "traffic.sidecar.istio.io/excludeInterfaces"

LOG_FLAGS = (
    Flag(
        "log_output_level", DEFAULT_LEVELS, "Comma-separated levels: scope:level, scopes as default, xdsproxy, dns, all"
    ),
    Flag("log_as_json", False, "Log JSON objects; Envoy too"),
    Flag("log_target", "stdout", "Comma-separated: stdout, stderr or paths"),
    Flag("log_stacktrace_level", "default:none", "Accepted, unused"),
    Flag("log_caller", "", "Accepted, unused"),
    Flag("vklog", 0, "Accepted, unused"),
)
PROXY_FLAGS = (
    Flag("domain", "", "DNS domain suffix; ${POD_NAMESPACE}.svc.cluster.local if empty"),
    Flag("meshConfig", paths.MESH_CONFIG, "File with a MeshConfig"),
    Flag("stsPort", 0, "Only copied into the node metadata"),
    Flag("tokenManagerPlugin", "", "Accepted, unused"),
    Flag("serviceCluster", "istio-proxy", "Used if ProxyConfig has an empty serviceCluster"),
    Flag("proxyLogLevel", "warning", "Envoy's log level; may hold components: info,misc:error"),
    Flag("proxyComponentLogLevel", "", "Envoy's component log levels"),
    Flag("concurrency", 0, "Envoy's worker threads; overrides ProxyConfig"),
    Flag("templateFile", "", "A complete bootstrap to use in place of the generated one"),
    Flag("outlierLogPath", "", "Envoy's outlier event log"),
    Flag("profiling", True, "Stacks of all threads under /debug/pprof/ on the status port"),
    Flag("dry-run", False, "Print node, ProxyConfig, bootstrap and Envoy's arguments as JSON, start nothing"),
    *LOG_FLAGS,
)


@dataclass(frozen=True)
class ProxyOptions:
    """The resolved configuration of one `proxy` run."""

    proxy_type: str
    domain: str
    addresses: Sequence[str]
    environment: Environment
    config: pb.ProxyConfig
    labels: Mapping[str, str] | None
    annotations: Mapping[str, str] | None
    flags: Parsed

    @property
    def sidecar(self) -> bool:
        return self.proxy_type == SIDECAR

    @property
    def id(self) -> str:
        env = self.environment
        return node_id(
            self.proxy_type, self.addresses, env.string("POD_NAME"), env.string("POD_NAMESPACE"), self.domain
        )

    @property
    def namespace(self) -> str:
        return self.environment.string("POD_NAMESPACE")

    @property
    def ipv6(self) -> bool:
        """True if every address is IPv6."""
        return network.all_ipv6(self.addresses)

    @property
    def localhost(self) -> str:
        return "::1" if self.ipv6 else "127.0.0.1"

    @property
    def status_port(self) -> int:
        return self.environment.integer("ENVOY_STATUS_PORT", 15021)

    @property
    def prometheus_port(self) -> int:
        return self.environment.integer("ENVOY_PROMETHEUS_PORT", 15090)

    @property
    def disable_envoy(self) -> bool:
        return self.environment.boolean("DISABLE_ENVOY", False)

    @property
    def dns_enabled(self) -> bool:
        """True if the DNS server runs."""
        capture = self._metadata_boolean("DNS_CAPTURE")
        return (capture and self.sidecar) or self._metadata_boolean("ENABLE_DNS_SERVER")

    def _metadata_boolean(self, key: str) -> bool:
        return self.environment.boolean(f"ISTIO_META_{key}", False)

    @property
    def workload_socket(self) -> str:
        """Path of the SDS socket."""
        return os.path.join(
            paths.WORKLOAD_SOCKET_DIR, self.environment.string("WORKLOAD_IDENTITY_SOCKET_FILE", "socket")
        )


def resolve(parsed: Parsed, environ: Mapping[str, str]) -> ProxyOptions:
    """Reads files and addresses, and merges ProxyConfig.

    Raises:
        AgentError: wrong arguments or configuration.
    """
    environment = Environment(environ)
    proxy_type = parsed.arguments[0] if parsed.arguments else SIDECAR
    if proxy_type not in PROXY_TYPES:
        raise UsageError(f"invalid proxy Type: {proxy_type}")
    annotations = _optional_file(paths.POD_ANNOTATIONS, "annotations")
    labels = _optional_file(paths.POD_LABELS, "labels")
    mesh_file = None
    try:
        mesh_file = read_text(parsed.string("meshConfig"))
    except FileNotFoundError:
        pass
    except OSError as error:
        raise UsageError(f"failed to read mesh config file {parsed.string('meshConfig')}", error.strerror) from None
    except ValueError as error:
        raise UsageError(f"failed to read mesh config file {parsed.string('meshConfig')}", error) from None
    config = proxy_config.construct(
        mesh_file,
        environment.string("PROXY_CONFIG"),
        annotations or {},
        service_cluster=parsed.string("serviceCluster"),
        concurrency=parsed.integer("concurrency"),
        cpu_limit=environment.integer("ISTIO_CPU_LIMIT", 0),
        mesh_path=parsed.string("meshConfig"),
        resolve_statsd=lambda address: network.resolve(address, proxy_config.split_host_port),
    )
    if parsed.string("templateFile") and not config.custom_config_file:
        config.proxy_bootstrap_template_path = parsed.string("templateFile")
    excluded = [name for name in (annotations or {}).get(EXCLUDE_INTERFACES, "").split(",") if name]
    addresses = network.proxy_addresses(environment.string("INSTANCE_IP"), network.settled_addresses(), excluded)
    return ProxyOptions(
        proxy_type=proxy_type,
        domain=dns_domain(environment.string("POD_NAMESPACE"), parsed.string("domain")),
        addresses=addresses,
        environment=environment,
        config=config,
        labels=labels,
        annotations=annotations,
        flags=parsed,
    )


def _optional_file(path: str, what: str) -> Mapping[str, str] | None:
    try:
        return read_downward_api(path)
    except FileNotFoundError as error:
        log.debug("failed to read pod %s: %s", what, error)
    except (OSError, ValueError) as error:
        log.warning("failed to read pod %s: %s", what, error)
    return None


def make_node(options: ProxyOptions, *, credential_socket: bool = False, file_credentials: bool = False) -> Node:
    """The node of this proxy.

    Raises:
        AgentError: metadata that does not fit.
    """
    env, config = options.environment, options.config
    discovery = env.lookup("PEER_METADATA_DISCOVERY")
    mutual = config.control_plane_auth_policy == pb.MUTUAL_TLS
    where = platform.discover(env)
    return build_node(
        env,
        NodeOptions(
            id=options.id,
            proxy_config=proxy_config.to_dict(config),
            instance_ips=options.addresses,
            labels=options.labels,
            annotations=options.annotations,
            sts_port=options.flags.integer("stsPort"),
            pilot_san=[pilot_san(config.discovery_address)] if mutual else [],
            outlier_log_path=options.flags.string("outlierLogPath"),
            envoy_status_port=options.status_port,
            envoy_prometheus_port=options.prometheus_port,
            envoy_secure_metrics_port=env.integer("ENVOY_SECURE_METRICS_PORT", 0),
            envoy_secure_merged_metrics_port=env.integer("ENVOY_SECURE_MERGED_METRICS_PORT", 0),
            exit_on_zero_active_connections=env.boolean("EXIT_ON_ZERO_ACTIVE_CONNECTIONS", False),
            metadata_discovery=None if discovery is None else env.boolean("PEER_METADATA_DISCOVERY", False),
            envoy_skip_deprecated_logs=env.boolean("ENVOY_SKIP_DEPRECATED_LOGS", True),
            workload_identity_socket_file=env.string("WORKLOAD_IDENTITY_SOCKET_FILE", "socket"),
            credential_socket_exists=credential_socket,
            file_credentials=file_credentials,
            platform_metadata=where.metadata,
            platform_locality=where.locality,
        ),
    )


def bootstrap_options(options: ProxyOptions) -> BootstrapOptions:
    env = options.environment
    return BootstrapOptions(
        instance_ips=tuple(dict.fromkeys(options.addresses)),
        delta_xds=env.boolean("ISTIO_DELTA_XDS", True),
        dual_stack=env.boolean("ISTIO_DUAL_STACK", False),
        log_as_json=options.flags.boolean("log_as_json"),
        status_port_proxy_protocol=env.boolean("ENVOY_STATUS_PORT_ENABLE_PROXY_PROTOCOL", False),
        strip_fragment=env.boolean("HTTP_STRIP_FRAGMENT_FROM_PATH_UNSAFE_IF_DISABLED", True),
        compliance_policy=env.string(compliance.VARIABLE),
        host_ip=env.string("HOST_IP"),
    )


def envoy_options(options: ProxyOptions, node: Node) -> EnvoyOptions:
    env = options.environment
    return EnvoyOptions(
        log_level=options.flags.string("proxyLogLevel"),
        component_log_level=options.flags.string("proxyComponentLogLevel"),
        node_ips=options.addresses,
        skip_deprecated_logs=env.boolean("ENVOY_SKIP_DEPRECATED_LOGS", True),
        core_dump=env.boolean("ISTIO_ENVOY_ENABLE_CORE_DUMP", False),
        override_json=read_override(env.string("ISTIO_BOOTSTRAP_OVERRIDE"), env.string("HOST_IP")),
        # A reader that waits for evidence must not wait for Envoy's buffer to fill.
        flush_every_line=bool(node.metadata.get("SIDECARLAB_EVIDENCE")),
    )


def bootstrap_source(options: ProxyOptions) -> str:
    """Path of a complete bootstrap that replaces the generated one; empty if there is none.

    Istio's templates are Go templates. One without actions is a bootstrap; with them it is refused, as this agent does not
    render them.

    Raises:
        AgentError: the template cannot be read, or would have to be rendered.
    """
    env, config = options.environment, options.config
    template = env.string("ISTIO_BOOTSTRAP")
    if not template and config.custom_config_file:
        return config.custom_config_file
    template = template or config.proxy_bootstrap_template_path
    if template:
        _check_template(template)
    return template


def _check_template(path: str) -> None:
    try:
        text = read_text(path)
    except OSError as error:
        raise AgentError(f"failed to read the bootstrap template {path}", error.strerror) from None
    except UnicodeDecodeError:
        raise AgentError(f"failed to read the bootstrap template {path}", "it is no text") from None
    for number, line in enumerate(text.split("\n"), 1):
        if "{{" in line:
            raise AgentError(
                f"bootstrap template {path}, line {number}",
                "Go template actions are not rendered",
                "Give a complete bootstrap (JSON or YAML; ISTIO_BOOTSTRAP, customConfigFile,"
                " proxyBootstrapTemplatePath), or change the generated one with ISTIO_BOOTSTRAP_OVERRIDE.",
            )

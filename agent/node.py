"""Identity of a proxy: node id, metadata and locality.

Source: istio/istio: pkg/bootstrap/config.go (GetNodeMetaData), pkg/model/proxy.go, pilot/cmd/pilot-agent/app/cmd.go.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent import __version__
from agent.environment import Environment, parse_bool, well_formed
from agent.errors import AgentError

log = logging.getLogger("default")

META_PREFIX = "ISTIO_META_"
METAJSON_PREFIX = "ISTIO_METAJSON_"
LOCALITY_LABEL = "istio-locality"
TOPOLOGY_LOCALITY_LABEL = "topology.istio.io/locality"

# Metadata keys with a type; anything else passes through as it came.
_STRINGS = frozenset(
    [
        "ISTIO_VERSION",
        "ISTIO_REVISION",
        "NAMESPACE",
        "NODE_NAME",
        "WORKLOAD_NAME",
        "INTERCEPTION_MODE",
        "SERVICE_ACCOUNT",
        "HTTP_PROXY_PORT",
        "MESH_ID",
        "CLUSTER_ID",
        "NETWORK",
        "TLS_SERVER_CERT_CHAIN",
        "TLS_SERVER_KEY",
        "TLS_SERVER_ROOT_CERT",
        "TLS_CLIENT_CERT_CHAIN",
        "TLS_CLIENT_KEY",
        "TLS_CLIENT_ROOT_CERT",
        "BASE",
        "IDLE_TIMEOUT",
        "HTTP10",
        "GENERATOR",
        "DNS_PROXY_ADDR",
        "AUTO_REGISTER_GROUP",
        "WORKLOAD_ENTRY",
        "UNPRIVILEGED_POD",
        "STS_PORT",
        "CLOUDRUN_ADDR",
        "WORKLOAD_IDENTITY_SOCKET_FILE",
        "NAME",
        "OWNER",
        "OUTLIER_LOG_PATH",
        "APP_CONTAINERS",
        "ISTIO_PROXY_SHA",
    ]
)
_BOOLEANS = frozenset(
    [
        "ENABLE_SELF_DISCOVERY",
        "DNS_CAPTURE",
        "DNS_AUTO_ALLOCATE",
        "ENABLE_HBONE",
        "DISABLE_HBONE_SEND",
        "EXIT_ON_ZERO_ACTIVE_CONNECTIONS",
        "INBOUND_LISTENER_EXACT_BALANCE",
        "OUTBOUND_LISTENER_EXACT_BALANCE",
        "METADATA_DISCOVERY",
        "ENVOY_SKIP_DEPRECATED_LOGS",
    ]
)
_MAPS = frozenset(("LABELS", "STATIC_LABELS", "ANNOTATIONS", "PLATFORM_METADATA"))
_NUMBERS = frozenset(
    ("ENVOY_STATUS_PORT", "ENVOY_PROMETHEUS_PORT", "ENVOY_SECURE_METRICS_PORT", "ENVOY_SECURE_MERGED_METRICS_PORT")
)
_COMMA_LISTS = frozenset(("INSTANCE_IPS", "REQUESTED_NETWORK_VIEW"))


@dataclass(frozen=True)
class Locality:
    """Where a workload runs."""

    region: str = ""
    zone: str = ""
    sub_zone: str = ""

    def to_dict(self) -> dict[str, str]:
        parts = {"region": self.region, "zone": self.zone, "sub_zone": self.sub_zone}
        return {key: value for key, value in parts.items() if value}


@dataclass(frozen=True)
class Node:
    """One proxy as discovery sees it; `metadata` is ready for the bootstrap (sorted keys, no empty typed values)."""

    id: str
    metadata: dict[str, Any]
    locality: Locality


@dataclass(frozen=True)
class NodeOptions:
    """What metadata is computed from, apart from the environment and files."""

    id: str
    proxy_config: Mapping[str, Any]
    instance_ips: Sequence[str]
    labels: Mapping[str, str] | None = None
    annotations: Mapping[str, str] | None = None
    sts_port: int = 0
    pilot_san: Sequence[str] = ()
    outlier_log_path: str = ""
    envoy_status_port: int = 15021
    envoy_prometheus_port: int = 15090
    envoy_secure_metrics_port: int = 0
    envoy_secure_merged_metrics_port: int = 0
    exit_on_zero_active_connections: bool = False
    metadata_discovery: bool | None = None
    envoy_skip_deprecated_logs: bool = True
    workload_identity_socket_file: str = "socket"
    credential_socket_exists: bool = False
    file_credentials: bool = False
    platform_metadata: Mapping[str, str] = field(default_factory=dict)
    platform_locality: Locality = field(default_factory=Locality)
    version: str = __version__


def node_id(proxy_type: str, addresses: Sequence[str], pod_name: str, namespace: str, domain: str) -> str:
    """``TYPE~first IP~POD.NAMESPACE~DOMAIN``."""
    return f"{proxy_type}~{addresses[0] if addresses else ''}~{pod_name}.{namespace}~{domain}"


def dns_domain(namespace: str, domain: str) -> str:
    """The DNS part of a node id; ``NAMESPACE.svc.cluster.local`` if `domain` is empty."""
    return domain or f"{namespace}.svc.cluster.local"


def pilot_san(discovery_address: str) -> str:
    """The name that discovery's certificate must carry."""
    host = discovery_address.split(":", 1)[0]
    return "istiod.istio-system.svc" if host == "localhost" else host


def locality_of(label: str) -> tuple[str, Locality]:
    """The sanitised locality label and its parts; dots stand for slashes if there is no slash."""
    if "/" not in label:
        label = label.replace(".", "/")
    parts = [*label.split("/"), "", ""]
    return label, Locality(parts[0], parts[1], parts[2])


def _raw_metadata(environment: Environment, proxy_metadata: Mapping[str, str]) -> dict[str, Any]:
    raw: dict[str, Any] = {
        key.removeprefix(META_PREFIX): value for key, value in proxy_metadata.items() if key.startswith(META_PREFIX)
    }
    raw.update(environment.with_prefix(META_PREFIX))
    for key, text in environment.with_prefix(METAJSON_PREFIX).items():
        try:
            value = json.loads(text)
            if not isinstance(value, dict):
                raise ValueError("not an object")
        except ValueError as error:
            log.warning("Env variable %s%s [%s] failed json unmarshal: %s", METAJSON_PREFIX, key, text, error)
            continue
        raw.update(value)
    if environment.string("DNS_PROXY_ADDR"):
        raw["DNS_PROXY_ADDR"] = environment.string("DNS_PROXY_ADDR")
    return raw


def _typed(key: str, value: Any) -> Any:
    """`value` in the form its typed field has.

    Raises:
        ValueError: it does not fit.
    """
    if value is None:
        return None
    if key in _STRINGS:
        if not isinstance(value, str):
            raise ValueError("not a string")
        return value
    if key in _BOOLEANS:
        if isinstance(value, bool):
            return value
        if not isinstance(value, str):
            raise ValueError("not a boolean")
        return parse_bool(value) if value else False
    if key in _MAPS:
        if not isinstance(value, dict) or not all(isinstance(member, str) for member in value.values()):
            raise ValueError("not a map of strings")
        return dict(value)
    if key in _NUMBERS:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError("not a number")
        return value
    if key in _COMMA_LISTS:
        if not isinstance(value, str):
            raise ValueError("not a string")
        return value
    if key == "PILOT_SAN":
        if not isinstance(value, list) or not all(isinstance(member, str) for member in value):
            raise ValueError("not a list of strings")
        return list(value)
    if key == "POD_PORTS":
        return _pod_ports(value)
    if key == "PROXY_CONFIG" and not isinstance(value, dict):
        raise ValueError("not an object")
    return value


_TYPED_KEYS = _STRINGS | _BOOLEANS | _MAPS | _NUMBERS | _COMMA_LISTS | {"PILOT_SAN", "POD_PORTS", "PROXY_CONFIG"}


def _pod_ports(value: Any) -> str:
    """POD_PORTS is a JSON array inside a string; it is read and written back compactly."""
    if not isinstance(value, str):
        raise ValueError("not a string")
    if not value:
        return ""
    ports = json.loads(value)
    if not isinstance(ports, list) or not all(isinstance(port, dict) for port in ports):
        raise ValueError("not a JSON array of ports")
    return json.dumps(ports, separators=(",", ":"))


def _labels_from_environment(environment: Environment) -> dict[str, str]:
    text = environment.lookup("ISTIO_METAJSON_LABELS")
    if text is None:
        return {}
    try:
        value = json.loads(text)
        if isinstance(value, dict) and all(isinstance(member, str) for member in value.values()):
            return value
    except ValueError:
        pass
    log.warning("Env variable with value %r failed json unmarshal", text)
    return {}


def build_node(environment: Environment, options: NodeOptions) -> Node:
    """Assembles the node of a proxy; pure but for warnings it logs.

    Raises:
        AgentError: a value does not fit its typed field.
    """
    raw = _raw_metadata(environment, options.proxy_config.get("proxyMetadata", {}))
    typed: dict[str, Any] = {}
    for key, value in raw.items():
        if key not in _TYPED_KEYS:
            continue
        try:
            typed[key] = _typed(key, value)
        except ValueError as error:
            raise AgentError(f"failed to decode node metadata {key}={value!r}", error) from None
    _compute(typed, environment, options)
    locality = _labels_and_locality(typed, environment, options)
    if options.credential_socket_exists:
        raw["credential"] = "true"
    if options.file_credentials:
        raw["file-credential"] = "true"
    discovery = options.metadata_discovery
    typed["METADATA_DISCOVERY"] = bool(typed.get("ENABLE_HBONE")) if discovery is None else discovery
    metadata = {key: "true" if value is True else value for key, value in typed.items() if value}
    metadata["METADATA_DISCOVERY"] = "true" if typed["METADATA_DISCOVERY"] else "false"
    for key, value in raw.items():
        metadata.setdefault(key, value)
    # Envoy refuses a bootstrap with half a surrogate in it.
    return Node(well_formed(options.id), well_formed(dict(sorted(metadata.items()))), locality)


def _compute(typed: dict[str, Any], environment: Environment, options: NodeOptions) -> None:
    if not typed.get("ISTIO_VERSION"):
        typed["ISTIO_VERSION"] = options.version
    typed["INSTANCE_IPS"] = ",".join(dict.fromkeys(options.instance_ips))
    if options.sts_port:
        typed["STS_PORT"] = str(options.sts_port)
    typed["ENVOY_STATUS_PORT"] = options.envoy_status_port
    typed["ENVOY_PROMETHEUS_PORT"] = options.envoy_prometheus_port
    typed["ENVOY_SECURE_METRICS_PORT"] = options.envoy_secure_metrics_port
    typed["ENVOY_SECURE_MERGED_METRICS_PORT"] = options.envoy_secure_merged_metrics_port
    typed["EXIT_ON_ZERO_ACTIVE_CONNECTIONS"] = options.exit_on_zero_active_connections
    typed["ENVOY_SKIP_DEPRECATED_LOGS"] = options.envoy_skip_deprecated_logs
    typed["WORKLOAD_IDENTITY_SOCKET_FILE"] = options.workload_identity_socket_file
    typed["PROXY_CONFIG"] = dict(sorted(options.proxy_config.items()))
    typed["PILOT_SAN"] = list(options.pilot_san)
    typed["OUTLIER_LOG_PATH"] = options.outlier_log_path
    for key, variable in (("NAME", "POD_NAME"), ("NAMESPACE", "POD_NAMESPACE"), ("SERVICE_ACCOUNT", "SERVICE_ACCOUNT")):
        if environment.lookup(variable) is not None:
            typed[key] = environment.string(variable)
    if options.platform_metadata:
        typed["PLATFORM_METADATA"] = dict(options.platform_metadata)


def _labels_and_locality(typed: dict[str, Any], environment: Environment, options: NodeOptions) -> Locality:
    static = _labels_from_environment(environment)
    if static:
        typed["LABELS"], typed["STATIC_LABELS"] = dict(static), dict(static)
    if options.labels is not None:
        labels = dict(typed.get("STATIC_LABELS") or {})
        labels.update({key: value for key, value in options.labels.items() if key != "pod-template-hash"})
        typed["LABELS"] = labels
    if options.annotations is not None:
        typed["ANNOTATIONS"] = {**(typed.get("ANNOTATIONS") or {}), **options.annotations}
    labels = typed.get("LABELS") or {}
    label = labels.get(TOPOLOGY_LOCALITY_LABEL) or labels.get(LOCALITY_LABEL, "")
    if not label:
        return options.platform_locality
    label, locality = locality_of(label)
    labels[LOCALITY_LABEL] = label
    return locality

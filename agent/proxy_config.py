"""ProxyConfig: defaults, layers, their merge, and what may not be in it.

Layers, lowest first: defaults, the mesh file's ``defaultConfig``, ``PROXY_CONFIG``, the annotation
``proxy.istio.io/config``; after validation the annotations for discovery address and status port.

Source: istio/istio: pilot/cmd/pilot-agent/config/config.go, pkg/config/mesh/mesh.go,
pkg/config/validation/agent/validation.go.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf import json_format

from agent import paths
from agent.duration import parse_duration
from agent.environment import parse_int, well_formed
from agent.errors import AgentError
from agent.protos import proxy_config_pb2 as pb
from agent.wrong_types import wrong_types

log = logging.getLogger("default")

CONFIG_ANNOTATION = "proxy.istio.io/config"
DISCOVERY_ANNOTATION = "sidecar.istio.io/discoveryAddress"
STATUS_PORT_ANNOTATION = "status.sidecar.istio.io/port"

# These members of proxyHeaders keep the lower layer's value when an overlay leaves them unset.
_INHERITED_HEADERS = ("forwarded_client_cert", "request_id", "attempt_count", "server", "envoy_debug_headers")

_LABEL = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)")


def defaults() -> pb.ProxyConfig:
    """Istio's built-in ProxyConfig."""
    config = pb.ProxyConfig(
        config_path=paths.CONFIG_DIR,
        binary_path=paths.ENVOY_BINARY,
        service_cluster="istio-proxy",
        proxy_admin_port=15000,
        status_port=15020,
        control_plane_auth_policy=pb.MUTUAL_TLS,
        discovery_address="istiod.istio-system.svc:15012",
        stat_name_length=189,
    )
    config.drain_duration.seconds = 45
    config.termination_drain_duration.seconds = 5
    return config


def parse_yaml(text: str) -> dict[str, Any]:
    """A YAML (or JSON) mapping; empty text is an empty mapping.

    Raises:
        ValueError: not YAML, or not a mapping.
    """
    data: Any
    try:
        # JSON is YAML; what the injector writes is JSON, and PyYAML need not be loaded for it.
        data = json.loads(text)
    except ValueError:
        data = _load_yaml(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ValueError(f"expected a mapping, got {type(data).__name__}")
    return data


# What a plain scalar may be besides text, a boolean or null: PyYAML also knows dates and numbers to the base of 60.
_INTEGER = re.compile(r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0o?[0-7_]+|0|[1-9][0-9_]*)$")
_FLOAT = re.compile(
    r"(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_YAML_TAG = "tag:yaml.org,2002:"


@functools.cache
def _yaml_loader() -> Any:
    """A safe loader that reads scalars as Istio's does (go-yaml 2 below sigs.k8s.io/yaml)."""
    import yaml

    # libyaml is some ten times faster; PyYAML may have been built without it.
    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    changed = {"int": _INTEGER, "float": _FLOAT}
    resolvers = {
        first: [
            (tag, changed.get(tag.removeprefix(_YAML_TAG), pattern))
            for tag, pattern in pairs
            if tag != f"{_YAML_TAG}timestamp"
        ]
        for first, pairs in base.yaml_implicit_resolvers.items()
    }
    return type("Loader", (base,), {"yaml_implicit_resolvers": resolvers})


def _load_yaml(text: str) -> Any:
    import yaml

    try:
        loader = _yaml_loader()(text)
        try:
            # The first document alone, as Istio does.
            return loader.get_data()
        finally:
            loader.dispose()
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(" ".join(str(error).split())) from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def merge(base: pb.ProxyConfig, overlay: Mapping[str, Any]) -> pb.ProxyConfig:
    """`base` with every field that `overlay` sets replaced whole; neither is changed.

    ``proxyMetadata`` is united key by key; five members of ``proxyHeaders`` fall back to `base`. Unknown fields and
    nulls are ignored, names may be camelCase or snake_case, durations are Go's.

    Raises:
        ValueError: a value does not fit its field.
    """
    try:
        layer = pb.ProxyConfig()
        fields = normalised(pb.ProxyConfig.DESCRIPTOR, overlay)
        # Unknown fields are gone already; an unknown enum value must stay an error.
        json_format.ParseDict(fields, layer)
    except (json_format.ParseError, TypeError, ValueError) as error:
        told = "; ".join(wrong_types(pb.ProxyConfig.DESCRIPTOR, overlay)) or " ".join(str(error).split())
        raise ValueError(f"could not parse proxy config: {told}") from None
    merged = pb.ProxyConfig()
    merged.CopyFrom(base)
    by_json_name = {field.json_name: field for field in pb.ProxyConfig.DESCRIPTOR.fields}
    for name in fields:
        field = by_json_name.get(name)
        if field is None:
            continue
        if field.name == "proxy_metadata":
            merged.proxy_metadata.update(layer.proxy_metadata)
            continue
        _replace(merged, layer, field)
    if "proxyHeaders" in fields and base.HasField("proxy_headers"):
        for member in _INHERITED_HEADERS:
            _inherit(merged.proxy_headers, base.proxy_headers, member)
    return merged


def _replace(target: pb.ProxyConfig, source: pb.ProxyConfig, field: Any) -> None:
    # An empty scalar in the overlay is an explicit value: it must win over the base.
    target.ClearField(field.name)
    partial = pb.ProxyConfig()
    partial.CopyFrom(source)
    for other in pb.ProxyConfig.DESCRIPTOR.fields:
        if other.name != field.name:
            partial.ClearField(other.name)
    target.MergeFrom(partial)


def _inherit(target: pb.ProxyConfig.ProxyHeaders, base: pb.ProxyConfig.ProxyHeaders, member: str) -> None:
    field = pb.ProxyConfig.ProxyHeaders.DESCRIPTOR.fields_by_name[member]
    if field.message_type is None:
        if not getattr(target, member):
            setattr(target, member, getattr(base, member))
    elif not target.HasField(member) and base.HasField(member):
        getattr(target, member).CopyFrom(getattr(base, member))


def normalised(message: Any, value: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping with camelCase names, without nulls, and with durations in protobuf's own form."""
    fields = {name: field for field in message.fields for name in (field.name, field.json_name)}
    result: dict[str, Any] = {}
    for key, item in value.items():
        if item is None:
            continue
        field = fields.get(str(key))
        if field is not None:
            result[field.json_name] = _normalised_value(field, item)
    return result


def _normalised_value(field: Any, item: Any) -> Any:
    nested = field.message_type
    if nested is None:
        return item
    if nested.full_name == "google.protobuf.Duration":
        return _protobuf_duration(item)
    if nested.GetOptions().map_entry:
        inner = nested.fields_by_name["value"]
        if not isinstance(item, Mapping):
            return item
        return {_key(key): _normalised_value(inner, member) for key, member in item.items() if member is not None}
    if nested.full_name.startswith("google.protobuf."):
        return item
    if field.is_repeated:
        return (
            [normalised(nested, one) if isinstance(one, Mapping) else one for one in item]
            if isinstance(item, list)
            else item
        )
    return normalised(nested, item) if isinstance(item, Mapping) else item


def _key(key: Any) -> str:
    # YAML reads "on" and the like as a boolean, which JSON's keys spell so.
    return str(key).lower() if isinstance(key, bool) else str(key)


def _protobuf_duration(item: Any) -> Any:
    if not isinstance(item, str):
        return item
    nanoseconds = parse_duration(item)
    sign, (seconds, rest) = ("-" if nanoseconds < 0 else ""), divmod(abs(nanoseconds), 1_000_000_000)
    return f"{sign}{seconds}.{rest:09d}s" if rest else f"{sign}{seconds}s"


def to_dict(config: pb.ProxyConfig) -> dict[str, Any]:
    """The configuration as protobuf JSON with camelCase names."""
    return {key: _whole_numbers(value) for key, value in json_format.MessageToDict(config).items()}


def _whole_numbers(value: Any) -> Any:
    # Go prints a double without a fraction as an integer.
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _whole_numbers(member) for key, member in value.items()}
    return [_whole_numbers(member) for member in value] if isinstance(value, list) else value


def construct(
    mesh_file: str | None,
    environment: str,
    annotations: Mapping[str, str],
    *,
    service_cluster: str = "istio-proxy",
    concurrency: int = 0,
    cpu_limit: int = 0,
    resolve_statsd: Callable[[str], str] | None = None,
    mesh_path: str = paths.MESH_CONFIG,
) -> pb.ProxyConfig:
    """Merges all layers and validates the result.

    Args:
        mesh_file: text of the mesh configuration file, None if there is no such file.
        environment: text of ``PROXY_CONFIG``.
        annotations: the pod's annotations.
        service_cluster: used when a layer sets an empty serviceCluster.
        concurrency: overrides the concurrency if not 0.
        cpu_limit: used as concurrency if no layer sets one.
        resolve_statsd: turns ``host:port`` into ``address:port``; raises OSError or ValueError.
        mesh_path: what errors call the mesh configuration file.

    Raises:
        AgentError: a layer cannot be parsed, or the result is not valid.
    """
    config = defaults()
    if mesh_file:
        config = _apply_mesh_file(mesh_path, mesh_file, config)
    if environment:
        config = _apply_layer("environment", environment, config)
    if annotations.get(CONFIG_ANNOTATION):
        config = _apply_layer("annotation", annotations[CONFIG_ANNOTATION], config)
    if not config.HasField("concurrency") and cpu_limit:
        log.info("cpu limit detected as %d, setting concurrency", cpu_limit)
        config.concurrency.value = cpu_limit
    if concurrency:
        log.warning("legacy --concurrency=%d flag detected; prefer to use ProxyConfig", concurrency)
        config.concurrency.value = concurrency
    if config.concurrency.value == 0 and cpu_limit < (os.cpu_count() or 1):
        # Istio also warns where there is no limit at all, which is no trouble on a machine of one's own.
        level = logging.WARNING if cpu_limit else logging.DEBUG
        log.log(level, "concurrency is 0: one worker per CPU (%s), but the CPU limit is %d", os.cpu_count(), cpu_limit)
    if config.WhichOneof("cluster_name") == "service_cluster" and not config.service_cluster:
        config.service_cluster = service_cluster
    if config.statsd_udp_address and resolve_statsd is not None:
        try:
            config.statsd_udp_address = resolve_statsd(config.statsd_udp_address)
        except (OSError, ValueError) as error:
            log.warning("resolve StatsdUdpAddress failed: %s", error)
            config.statsd_udp_address = ""
    problems = validate(config)
    if problems:
        raise AgentError("failed to get proxy config", "; ".join(problems))
    return _apply_annotations(config, annotations)


def _apply_mesh_file(path: str, text: str, base: pb.ProxyConfig) -> pb.ProxyConfig:
    """`base` with the ``defaultConfig`` of a MeshConfig, all of which must be valid."""
    from agent import mesh_config

    text = well_formed(text)
    log.info("Apply mesh config from file %s %s", path, " ".join(text.split()))
    try:
        data = parse_yaml(text)
        layer = data.get("defaultConfig") or {}
        if not isinstance(layer, dict):
            raise ValueError("defaultConfig must be a mapping")
        try:
            mesh, config = mesh_config.parse(data), merge(base, layer)
        except ValueError as error:
            wrong = [*mesh_config.type_problems(data), *wrong_types(pb.ProxyConfig.DESCRIPTOR, layer, "defaultConfig.")]
            raise ValueError(f"failed to convert to proto: {'; '.join(wrong)}" if wrong else str(error)) from None
        if problems := mesh_config.problems(mesh) + validate(config):
            raise ValueError("; ".join(problems))
    except ValueError as error:
        raise AgentError(f"failed to unmarshal mesh config from file {path}", error) from None
    if "ISTIO_META_DNS_AUTO_ALLOCATE" in config.proxy_metadata:
        log.warning("warnings occurred during mesh validation: 'ISTIO_META_DNS_AUTO_ALLOCATE' is deprecated")
    return config


def _apply_layer(name: str, text: str, base: pb.ProxyConfig) -> pb.ProxyConfig:
    text = well_formed(text)
    log.info("Apply proxy config from %s %s", name, " ".join(text.split()))
    try:
        return merge(base, parse_yaml(text))
    except ValueError as error:
        raise AgentError(f"failed to unmarshal mesh config from {name}", error) from None


def _apply_annotations(config: pb.ProxyConfig, annotations: Mapping[str, str]) -> pb.ProxyConfig:
    if DISCOVERY_ANNOTATION in annotations:
        config.discovery_address = annotations[DISCOVERY_ANNOTATION]
    if STATUS_PORT_ANNOTATION in annotations:
        try:
            config.status_port = parse_int(annotations[STATUS_PORT_ANNOTATION])
        except ValueError as error:
            log.error("Invalid annotation %s: %s", STATUS_PORT_ANNOTATION, error)
            config.status_port = 0
    return config


def split_host_port(address: str) -> tuple[str, str]:
    """Go's net.SplitHostPort.

    Raises:
        ValueError: not ``host:port`` or ``[host]:port``.
    """
    if address.startswith("["):
        host, closing, rest = address[1:].partition("]")
        if not closing or not rest.startswith(":") or ":" in rest[1:]:
            raise ValueError(f'unable to split "{address}"')
        return host, rest[1:]
    host, separator, port = address.rpartition(":")
    if not separator or ":" in host or "[" in address or "]" in address:
        raise ValueError(f'unable to split "{address}"')
    return host, port


def _address_problem(address: str) -> str:
    try:
        host, port = split_host_port(address)
        number = parse_int(port)
    except ValueError as error:
        return str(error)
    if not 1 <= number <= 65535:
        return f"port number {number} must be in the range 1..65535"
    if _is_fqdn(host) or _is_ip(host):
        return ""
    return f'"{host}" is not a valid hostname or an IP address'


def _is_fqdn(name: str) -> bool:
    return bool(name) and len(name) <= 255 and not label_problem(name)


def label_problem(domain: str) -> str:
    """What is wrong with the labels of a domain name, empty if nothing; it may end in a dot.

    Source: istio/istio: pkg/config/validation/agent/validation.go (ValidateDNS1123Labels).
    """
    *labels, last = domain.split(".")
    with contextlib.suppress(ValueError):
        parse_int(last)
        return f'domain name "{domain}" invalid (top level domain "{last}" cannot be all-numeric)'
    if last or not labels:
        labels.append(last)
    wrong = next((label for label in labels if _LABEL.fullmatch(label) is None), None)
    return "" if wrong is None else f'domain name "{domain}" invalid (label "{wrong}" invalid)'


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def validate(config: pb.ProxyConfig) -> list[str]:
    """What is wrong with a merged configuration; empty if it is valid."""
    problems: list[str] = []

    def require(condition: bool, problem: str) -> None:
        if not condition:
            problems.append(problem)

    def address(value: str, what: str) -> None:
        problem = _address_problem(value)
        require(not problem, f"{what} {problem}")

    require(bool(config.config_path), "config path must be set")
    require(bool(config.binary_path), "binary path must be set")
    naming = config.WhichOneof("cluster_name")
    require(naming is not None, "oneof service cluster or tracing service name must be specified")
    require(naming != "service_cluster" or bool(config.service_cluster), "service cluster must be specified")
    drain = config.drain_duration.ToNanoseconds()
    require(drain >= 1_000_000, "invalid drain duration: duration must be greater than 1ms")
    require(
        drain % 1_000_000_000 == 0, "invalid drain duration: drain time only supports durations to seconds precision"
    )
    if config.discovery_address:
        address(config.discovery_address, "invalid discovery address:")
    else:
        problems.append("discovery address must be set to the proxy discovery service")
    tracer = config.tracing.WhichOneof("tracer")
    if tracer == "zipkin":
        address(config.tracing.zipkin.address.replace("$(HOST_IP)", "127.0.0.1", 1), "invalid zipkin config:")
    elif tracer == "datadog":
        address(config.tracing.datadog.address.replace("$(HOST_IP)", "127.0.0.1", 1), "invalid datadog config:")
    elif tracer == "lightstep":
        address(config.tracing.lightstep.address, "invalid lightstep config: invalid lightstep address:")
        require(bool(config.tracing.lightstep.access_token), "invalid lightstep config: access token is required")
    if config.tracing.HasField("tls_settings"):
        problems += [f"invalid tracing TLS config: {problem}" for problem in _tls_problems(config.tracing.tls_settings)]
    if config.statsd_udp_address:
        address(config.statsd_udp_address, f'invalid statsd udp address "{config.statsd_udp_address}":')
    for service, value in (
        ("metrics", config.envoy_metrics_service_address),
        ("metrics", config.envoy_metrics_service.address),
        ("access log", config.envoy_access_log_service.address),
    ):
        if value:
            address(value, f'invalid envoy {service} service address "{value}":')
    for port, what in ((config.proxy_admin_port, "proxy admin"), (config.status_port, "status")):
        require(1 <= port <= 65535, f"invalid {what} port: port number {port} must be in the range 1..65535")
    require(
        config.control_plane_auth_policy in (pb.NONE, pb.MUTUAL_TLS),
        f"invalid authentication policy: unrecognized control plane auth policy {config.control_plane_auth_policy}",
    )
    if config.HasField("private_key_provider"):
        problems += _private_key_provider_problems(config.private_key_provider)
    if config.HasField("connection_settings"):
        problems += _connection_settings_problems(config.connection_settings)
    return problems


def _tls_problems(tls: pb.ClientTLSSettings) -> list[str]:
    """Source: istio/istio: pkg/config/validation/agent/validation.go (ValidateTLS)."""
    modes = pb.ClientTLSSettings
    problems: list[str] = []
    if tls.credential_name.startswith("configmap://"):
        problems.append('invalid configmap:// credentialName: namespace must match the configuration namespace ""')
    if tls.insecure_skip_verify.value:
        if tls.mode == modes.SIMPLE and (tls.ca_certificates or tls.credential_name or tls.subject_alt_names):
            problems.append(
                "cannot specify CaCertificates or CredentialName or SubjectAltNames when InsecureSkipVerify is set true"
            )
        if tls.mode == modes.MUTUAL and (tls.ca_certificates or tls.subject_alt_names):
            problems.append("cannot specify CaCertificates or SubjectAltNames when InsecureSkipVerify is set true")
    if tls.mode in (modes.SIMPLE, modes.MUTUAL) and tls.credential_name:
        if tls.client_certificate or tls.ca_certificates or tls.private_key or tls.ca_crl:
            problems.append("cannot specify client certificates or CA certificate or CA CRL If credentialName is set")
        return problems
    if tls.mode == modes.MUTUAL:
        missing = [name for name in ("client_certificate", "private_key") if not getattr(tls, name)]
        problems += [f"{name.replace('_', ' ')} required for mutual tls" for name in missing]
    return problems


def _private_key_provider_problems(provider: pb.PrivateKeyProvider) -> list[str]:
    prefix = "invalid private key provider configuration:"
    kind = provider.WhichOneof("provider")
    if kind is None:
        return [f"{prefix} private key provider configuration is required"]
    chosen = provider.cryptomb if kind == "cryptomb" else provider.qat
    if not chosen.HasField("poll_delay"):
        return [f"{prefix} pollDelay is required"]
    if chosen.poll_delay.ToNanoseconds() == 0:
        return [f"{prefix} pollDelay must be non zero"]
    return []


def _connection_settings_problems(settings: pb.ProxyConfig.ConnectionSettings) -> list[str]:
    prefix = "invalid connection settings:"
    problems = []
    for field, value in settings.ListFields():
        if field.message_type is None:
            continue
        if field.message_type.full_name == "google.protobuf.Duration":
            if value.ToNanoseconds() < 0:
                problems.append(f"{prefix} {field.name} must be non-negative")
        elif field.message_type.full_name == "google.protobuf.Int32Value":
            if field.name.endswith("buffer_limit_bytes"):
                minimum, wanted = 0, "be non-negative"
            elif field.name.startswith("http2_initial"):
                minimum, wanted = 65535, "be at least 65535"
            else:
                minimum, wanted = 1, "be positive"
            if value.value < minimum:
                problems.append(f"{prefix} {field.name} must {wanted}")
    return problems

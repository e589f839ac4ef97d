"""The mesh configuration file (``--meshConfig``): what Istio refuses in it, and what it warns of.

Only ``defaultConfig`` concerns a proxy, but a file that is no valid MeshConfig is not used at all.
Source: istio/istio: pkg/config/mesh/mesh.go (ApplyMeshConfig), pkg/config/validation/agent/validation.go
(ValidateMeshConfig).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from google.protobuf import json_format

from agent.environment import parse_int
from agent.protos import mesh_config_pb2 as pb
from agent.proxy_config import label_problem, normalised
from agent.wrong_types import wrong_types

log = logging.getLogger("default")

MILLISECOND = 1_000_000
CONNECT_TIMEOUT_LIMIT = 3600 * 1_000_000_000

_LABEL = r"[a-zA-Z0-9](?:[-a-zA-Z0-9]*[a-zA-Z0-9])?"
_WILDCARD_LABEL = re.compile(rf"(\*|(\*|\*-)?{_LABEL})")
_TOPOLOGY = ("topology.kubernetes.io/region", "topology.kubernetes.io/zone", "topology.istio.io/subzone")
_CURVES = frozenset(("P-224", "P-256", "P-521", "P-384", "X25519", "X25519Kyber768Draft00", "X25519MLKEM768"))
_RETRY_ON = frozenset(
    (
        *("5xx", "gateway-error", "reset", "reset-before-request", "connect-failure", "retriable-4xx"),
        *("refused-stream", "retriable-status-codes", "retriable-headers", "envoy-ratelimited"),
        *("http3-post-connect-failure", "cancelled", "deadline-exceeded", "internal", "resource-exhausted"),
        "unavailable",
    )
)
_STATUS_CODES = frozenset(str(status.value) for status in HTTPStatus)


def parse(data: Mapping[str, Any]) -> pb.MeshConfig:
    """Istio's defaults with what a file sets; unknown fields are left out.

    Raises:
        ValueError: a value does not fit its field.
    """
    config = pb.MeshConfig(proxy_listen_port=15001, trust_domain="cluster.local")
    config.connect_timeout.seconds = 10
    config.protocol_detection_timeout.seconds = 0
    try:
        json_format.ParseDict(normalised(pb.MeshConfig.DESCRIPTOR, _own(data)), config)
    except (json_format.ParseError, TypeError) as error:
        raise ValueError(f"failed to convert to proto: {' '.join(str(error).split())}") from None
    return config


def type_problems(data: Mapping[str, Any]) -> list[str]:
    """Each value that does not fit its field, with its path."""
    return list(wrong_types(pb.MeshConfig.DESCRIPTOR, _own(data)))


def _own(data: Mapping[str, Any]) -> dict[str, Any]:
    # What it says of proxies is merged elsewhere.
    return {key: value for key, value in data.items() if key not in ("defaultConfig", "default_config")}


def problems(config: pb.MeshConfig) -> list[str]:
    """What is wrong with it; warnings are logged."""
    found: list[str] = []
    if not 1 <= config.proxy_listen_port <= 65535:
        found.append(f"invalid proxy listen port: port number {config.proxy_listen_port} must be in the range 1..65535")
    found += _prefixed("invalid connect timeout:", _connect_timeout(config.connect_timeout))
    if config.protocol_detection_timeout.ToNanoseconds() % MILLISECOND:
        found.append("invalid protocol detection timeout: only durations to ms precision are supported")
    if config.HasField("locality_lb_setting"):
        found += _locality(config.locality_lb_setting)
    if config.HasField("zone_aware_lb_setting"):
        found += _zone_aware(config.zone_aware_lb_setting)
    for number, settings in enumerate(config.service_settings):
        for host in settings.hosts:
            found += _prefixed(f"serviceSettings[{number}], host `{host}`:", _wildcard_domain(host))
    found += _prefixed("trustDomain:", _trust_domain(config.trust_domain))
    # They are a set, in order.
    for number, alias in enumerate(sorted(set(config.trust_domain_aliases))):
        found += _prefixed(f"trustDomainAliases[{number}], domain `{alias}`:", _trust_domain(alias))
    if config.mesh_mTLS.ecdh_curves:
        found.append("mesh TLS does not support ECDH curves configuration")
    if config.HasField("default_traffic_policy"):
        found += _traffic_policy(config.default_traffic_policy)
    if config.HasField("default_inbound_http_retry_policy"):
        policy = config.default_inbound_http_retry_policy
        found += _prefixed("invalid default inbound http retry policy:", _retry(policy))
    warned = list(_warnings(config))
    if warned:
        log.warning("warnings occurred during mesh validation: %s", "; ".join(warned))
    return found


def _prefixed(prefix: str, texts: Iterable[str]) -> list[str]:
    return [f"{prefix} {text}" for text in texts]


def _duration(value: Any) -> list[str]:
    nanoseconds = value.ToNanoseconds()
    if nanoseconds < MILLISECOND:
        return ["duration must be greater than 1ms"]
    return ["only durations to ms precision are supported"] if nanoseconds % MILLISECOND else []


def _connect_timeout(value: Any) -> list[str]:
    if wrong := _duration(value):
        return wrong
    if value.ToNanoseconds() > CONNECT_TIMEOUT_LIMIT:
        return [f"time {value.ToNanoseconds() / 1e9:g}s must be >1ms and <1h0m0s"]
    return []


def _trust_domain(domain: str) -> list[str]:
    if not domain:
        return ["empty domain name not allowed"]
    labels = domain.removesuffix(".").split(".")
    valid = all(re.fullmatch(_LABEL, label) and len(label) <= 63 for label in labels)
    return [] if valid else [f'trust domain name "{domain}" invalid']


def _wildcard_domain(domain: str) -> list[str]:
    if len(domain) > 255:
        return [f'domain name "{domain}" too long (max 255)']
    if not domain:
        return ["empty domain name not allowed"]
    first, dot, rest = domain.partition(".")
    if _WILDCARD_LABEL.fullmatch(first) is None or len(first) > 63:
        return [f'domain name "{domain}" invalid (label "{first}" invalid)']
    problem = label_problem(rest) if dot else ""
    return [problem] if problem else []


def _locality(setting: Any) -> list[str]:
    if setting.distribute and setting.failover:
        return ["can not simultaneously specify 'distribute' and 'failover'"]
    if setting.failover:
        for label in setting.failover_priority:
            if label in _TOPOLOGY:
                return [f"can not simultaneously set 'failover' and topology label '{label}' in 'failover_priority'"]
    found: list[str] = []
    for item in setting.distribute:
        if any(not 1 <= weight <= 100 for weight in item.to.values()):
            return [*found, "locality weight must be in range [1, 100]"]
        total = sum(item.to.values())
        if total != 100:
            return [*found, f"total locality weight {total} != 100"]
        found += _localities(list(item.to))
    found += _localities([getattr(item, "from") for item in setting.distribute])
    return found + _failover(setting.failover, "locality lb failover", "only specify region")


def _zone_aware(setting: Any) -> list[str]:
    found = [
        f"'failover_priority' for zone aware lb must not use topology label '{label}';"
        " region- and zone-level routing are handled automatically"
        for label in setting.failover_priority
        if label in _TOPOLOGY
    ]
    only = "only specifies region; zone and subzone failover are handled automatically"
    return found + _failover(setting.failover, "zone aware lb failover", only)


def _failover(items: Iterable[Any], what: str, only: str) -> list[str]:
    found: list[str] = []
    for item in items:
        ends = (getattr(item, "from"), item.to)
        if ends[0] == ends[1]:
            found.append(f"{what} settings must specify different regions")
        if any("/" in end for end in ends):
            found.append(f"{what} {only}")
        if any("*" in end for end in ends):
            found.append(f"{what} region should not contain '*' wildcard")
    return found


def _localities(names: Sequence[str]) -> list[str]:
    """What is wrong with REGION/ZONE/SUBZONE, any of which may be cut short or end in ``*``: no two may overlap."""
    seen: list[tuple[str, ...]] = []
    for name in names:
        if name.count("*") > 1 or ("*" in name and not name.endswith("*")):
            return [f"locality {name} wildcard '*' number can not exceed 1 and must be in the end"]
        parts = tuple(name.split("/", 2))
        if not all(parts):
            return [f"locality {name} must not contain empty region/zone/subzone info"]
        if any(_covers(before, parts) for before in seen):
            return [f"locality {name} overlap with previous specified ones"]
        seen.append(parts)
    return []


def _covers(before: tuple[str, ...], parts: tuple[str, ...]) -> bool:
    """True if Istio takes a locality for a part of an earlier one, or a region for one of an earlier zone."""
    if before[0] == "*":
        return True
    if before[0] != parts[0]:
        return False
    if len(parts) == 1 or len(before) == 1 or before[1] == "*":
        return True
    if before[1] != parts[1]:
        return False
    return len(parts) == 2 or len(before) == 2 or before[2] in ("*", parts[2])


def _traffic_policy(policy: Any) -> list[str]:
    found: list[str] = []
    if policy.HasField("connection_pool"):
        pool = policy.connection_pool
        if not pool.HasField("http") and not pool.HasField("tcp"):
            found.append("connection pool must have at least one field")
        found += [*_http_pool(pool.http), *_tcp_pool(pool.tcp)]
    if policy.HasField("outlier_detection"):
        outlier = policy.outlier_detection
        found += _durations(outlier, "base_ejection_time", "interval")
        if not outlier.split_external_local_origin_errors and outlier.consecutive_local_origin_failures.value > 0:
            found.append(
                "outlier detection consecutive local origin failures is specified,"
                " but split external local origin errors is set to false"
            )
        for percent in (outlier.max_ejection_percent, outlier.min_health_percent):
            if not 0 <= percent <= 100:
                found.append(f"percentage {percent} is not in range 0..100")
    return found


def _http_pool(http: Any) -> Iterator[str]:
    limits = ("http1_max_pending_requests", "http2_max_requests", "max_requests_per_connection", "max_retries")
    for name in (*limits, "max_concurrent_streams"):
        if getattr(http, name) < 0:
            yield f"{name.replace('_', ' ')} must be non-negative"
    yield from _durations(http, "idle_timeout")
    if http.h2_upgrade_policy == pb.ConnectionPoolSettings.HTTPSettings.UPGRADE and http.use_client_protocol:
        yield "use client protocol must not be true when H2UpgradePolicy is UPGRADE"


def _tcp_pool(tcp: Any) -> Iterator[str]:
    if tcp.max_connections < 0:
        yield "max connections must be non-negative"
    yield from _durations(tcp, "connect_timeout", "max_connection_duration")
    if abs(tcp.idle_timeout.ToNanoseconds()) >= MILLISECOND:  # 0 is no limit
        yield from _duration(tcp.idle_timeout)
    yield from _durations(tcp.tcp_keepalive, "time", "interval")


def _durations(message: Any, *names: str) -> list[str]:
    return [text for name in names if message.HasField(name) for text in _duration(getattr(message, name))]


def _retry(retry: Any) -> list[str]:
    found: list[str] = []
    if retry.attempts < 0:
        found.append("attempts cannot be negative")
    if retry.attempts == 0:
        if retry.HasField("per_try_timeout") or retry.retry_on or retry.HasField("retry_remote_localities"):
            found.append("http retry policy configured when attempts are set to 0 (disabled)")
        if retry.HasField("backoff"):
            found.append("backoff configured when attempts are set to 0 (disabled)")
    found += _durations(retry, "per_try_timeout", "backoff")
    for policy in retry.retry_on.split(",") if retry.retry_on else ():
        if policy not in _RETRY_ON and not _is_status(policy):
            found.append(f'"{policy}" is not a valid retryOn policy')
    return found


def _is_status(text: str) -> bool:
    try:
        return str(parse_int(text)) in _STATUS_CODES
    except ValueError:
        return False


def _warnings(config: pb.MeshConfig) -> Iterator[str]:
    curves = list(config.tls_defaults.ecdh_curves)
    unknown = sorted(set(curves) - _CURVES)
    twice = sorted({curve for curve in curves if curve in _CURVES and curves.count(curve) > 1})
    if unknown:
        yield f"detected unrecognized ECDH curves: [{' '.join(unknown)}]"
    if twice:
        yield f"detected duplicate ECDH curves: [{' '.join(twice)}]"
    retry = config.default_inbound_http_retry_policy
    for field in ("per_try_timeout", "retry_remote_localities", "retry_ignore_previous_hosts"):
        if retry.HasField(field):
            name = retry.DESCRIPTOR.fields_by_name[field].json_name
            yield f"{name} is ignored by the default inbound http retry policy"

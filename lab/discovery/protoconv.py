"""Small protobuf helpers: Any, durations, addresses, and the names Envoy and Istio use for things."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from functools import cache
from typing import Any

from envoy.config.core.v3 import address_pb2, base_pb2, config_source_pb2
from google.protobuf import any_pb2, duration_pb2, struct_pb2, wrappers_pb2

PASSTHROUGH_CLUSTER = "PassthroughCluster"
BLACK_HOLE_CLUSTER = "BlackHoleCluster"
ALLOW_ANY_DYNAMIC_DNS_CLUSTER = "AllowAnyDynamicDNSCluster"
INBOUND_PASSTHROUGH_CLUSTER = "InboundPassthroughCluster"
PASSTHROUGH_FILTER_CHAIN = "PassthroughFilterChain"
VIRTUAL_OUTBOUND = "virtualOutbound"
VIRTUAL_INBOUND = "virtualInbound"

HTTP_CONNECTION_MANAGER = "envoy.filters.network.http_connection_manager"
TCP_PROXY = "envoy.filters.network.tcp_proxy"
TLS_SOCKET = "envoy.transport_sockets.tls"
RAW_BUFFER_SOCKET = "envoy.transport_sockets.raw_buffer"
HTTP_PROTOCOL_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"

MAX_UINT32 = 4294967295


def to_any(message: Any) -> Any:
    """A message as google.protobuf.Any; equal messages give equal bytes."""
    return any_pb2.Any(
        type_url=f"type.googleapis.com/{message.DESCRIPTOR.full_name}",
        value=message.SerializeToString(deterministic=True),
    )


def duration(seconds: float) -> Any:
    whole = int(seconds)
    return duration_pb2.Duration(seconds=whole, nanos=round((seconds - whole) * 1_000_000_000))


def uint32(value: int) -> Any:
    return wrappers_pb2.UInt32Value(value=value)


def boolean(value: bool) -> Any:
    return wrappers_pb2.BoolValue(value=value)


def struct(data: Mapping[str, Any]) -> Any:
    """A Struct; values are strings, numbers, booleans, None, lists or mappings."""
    if all(type(v) is str for v in data.values()):  # by far the most common, and much quicker so
        return struct_pb2.Struct(fields={k: struct_pb2.Value(string_value=v) for k, v in data.items()})
    out = struct_pb2.Struct()
    out.update(data)
    return out


def socket_address(host: str, port: int) -> Any:
    """An Address: an IP (or name) and port, or a ``unix:///path`` pipe."""
    if host.startswith("unix://"):
        return address_pb2.Address(pipe=address_pb2.Pipe(path=host.removeprefix("unix://")))
    return address_pb2.Address(socket_address=address_pb2.SocketAddress(address=host, port_value=port))


def cidr_range(text: str) -> Any:
    network = ipaddress.ip_network(text, strict=False)
    return address_pb2.CidrRange(address_prefix=str(network.network_address), prefix_len=uint32(network.prefixlen))


@cache
def ads() -> Any:
    """The ADS config source, which waits for ever: a listener or cluster warms until its resource comes."""
    return config_source_pb2.ConfigSource(
        ads=config_source_pb2.AggregatedConfigSource(),
        initial_fetch_timeout=duration(0),
        resource_api_version="V3",
    )


def metadata(**filters: Mapping[str, Any]) -> Any:
    return base_pb2.Metadata(filter_metadata={name: struct(data) for name, data in filters.items()})


def cluster_name(direction: str, port: int, subset: str, host: str) -> str:
    """Istio's subset key, e.g. ``outbound|8080||catalog.catalog.svc.cluster.local``."""
    return f"{direction}|{port}|{subset}|{host}"


def parse_cluster_name(name: str) -> tuple[str, int, str, str] | None:
    """(direction, port, subset, host) of a subset key, None if it is none."""
    parts = name.split("|")
    if len(parts) != 4 or not parts[1].isdigit():
        return None
    return parts[0], int(parts[1]), parts[2], parts[3]

"""What a proxy was last given, in the form of Envoy's own ``/config_dump``, so that the two can be compared.

Source: istio/istio: pilot/pkg/xds/debug.go (connectionConfigDump, getConfigDumpByResourceType).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from envoy.admin.v3 import config_dump_pb2, config_dump_shared_pb2

from lab.discovery import protoconv
from lab.discovery.resources import CDS, ECDS, EDS, LDS, RDS, SDS, SHORT, Encoded

if TYPE_CHECKING:
    from lab.discovery.ads import Connection

_TYPES = {short.lower(): type_url for type_url, short in SHORT.items()}


def _watched(connection: Connection, type_url: str) -> list[Encoded]:
    """The resources of one type that the proxy asked for, none if it does not watch the type."""
    stream = connection.stream
    watch = stream.watches.get(type_url)
    if watch is None or stream.view is None:
        return []
    if watch.wildcard:
        return list(stream.view.wildcard(type_url).values())
    return stream.view.named(type_url, sorted(watch.names))


def of_types(connection: Connection, types: Sequence[str]) -> Any:
    """A ConfigDump with the bare resources of some types (``cds``, ``nds`` and so on) that the proxy watches.

    Raises LookupError for an unknown type.
    """
    unknown = [t for t in types if t not in _TYPES]
    if unknown:
        raise LookupError(f"unknown type {unknown[0]!r}: give some of {', '.join(sorted(_TYPES))}")
    found = [r for t in types for r in _watched(connection, _TYPES[t])]
    return config_dump_pb2.ConfigDump(configs=[protoconv.to_any(r.message) for r in found])


def whole(connection: Connection, *, include_eds: bool = False) -> Any:
    """A ConfigDump with the sections of Envoy's: clusters, listeners, routes and so on, as discovery would send them now.

    The version of each is that of the last push. The sections that discovery knows nothing of are empty.
    """
    version = connection.stream.version

    def packed(type_url: str) -> list[tuple[str, Any]]:
        return [(r.name, protoconv.to_any(r.message)) for r in _watched(connection, type_url)]

    sections: list[Any] = [
        config_dump_pb2.BootstrapConfigDump(),
        config_dump_shared_pb2.ClustersConfigDump(
            version_info=version,
            dynamic_active_clusters=[
                config_dump_shared_pb2.ClustersConfigDump.DynamicCluster(cluster=c) for _, c in packed(CDS)
            ],
        ),
    ]
    if include_eds:
        one = config_dump_shared_pb2.EndpointsConfigDump.DynamicEndpointConfig
        sections.append(
            config_dump_shared_pb2.EndpointsConfigDump(
                dynamic_endpoint_configs=[one(version_info=version, endpoint_config=e) for _, e in packed(EDS)]
            )
        )
    listener = config_dump_shared_pb2.ListenersConfigDump
    route = config_dump_shared_pb2.RoutesConfigDump.DynamicRouteConfig
    secret = config_dump_pb2.SecretsConfigDump.DynamicSecret
    filters = config_dump_shared_pb2.EcdsConfigDump
    sections += [
        listener(
            version_info=version,
            dynamic_listeners=[
                listener.DynamicListener(
                    name=name, active_state=listener.DynamicListenerState(version_info=version, listener=item)
                )
                for name, item in packed(LDS)
            ],
        ),
        config_dump_shared_pb2.ScopedRoutesConfigDump(),
        config_dump_shared_pb2.RoutesConfigDump(
            dynamic_route_configs=[route(version_info=version, route_config=r) for _, r in packed(RDS)]
        ),
        config_dump_pb2.SecretsConfigDump(
            dynamic_active_secrets=[secret(version_info=version, secret=s) for _, s in packed(SDS)]
        ),
        filters(ecds_filters=[filters.EcdsFilterConfig(version_info=version, ecds_filter=f) for _, f in packed(ECDS)]),
    ]
    return config_dump_pb2.ConfigDump(configs=[protoconv.to_any(section) for section in sections])

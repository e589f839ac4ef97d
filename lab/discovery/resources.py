"""Encoded resources: every message is serialised once per push, however many proxies get it.

A response is put together from these bytes. That is allowed by the wire format: concatenated fields of one
message are that message (protobuf encoding guide, "Last One Wins").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from envoy.service.discovery.v3 import discovery_pb2

from lab.discovery import endpoints, name_table, protoconv, routes, snapshot
from lab.discovery.proxy import Proxy

PREFIX = "type.googleapis.com/"
CDS = PREFIX + "envoy.config.cluster.v3.Cluster"
EDS = PREFIX + "envoy.config.endpoint.v3.ClusterLoadAssignment"
LDS = PREFIX + "envoy.config.listener.v3.Listener"
RDS = PREFIX + "envoy.config.route.v3.RouteConfiguration"
SDS = PREFIX + "envoy.extensions.transport_sockets.tls.v3.Secret"
ECDS = PREFIX + "envoy.config.core.v3.TypedExtensionConfig"
NDS = PREFIX + "istio.networking.nds.v1.NameTable"
PCDS = PREFIX + "istio.mesh.v1alpha1.ProxyConfig"
HEALTH = PREFIX + "istio.v1.HealthInformation"
DEBUG = "istio.io/debug"

PUSH_ORDER = (CDS, EDS, LDS, RDS, SDS, ECDS, NDS, PCDS)
WILDCARD = frozenset((CDS, LDS, NDS, PCDS))
SHORT = {CDS: "CDS", EDS: "EDS", LDS: "LDS", RDS: "RDS", SDS: "SDS", ECDS: "ECDS", NDS: "NDS", PCDS: "PCDS"}


def short(type_url: str) -> str:
    return SHORT.get(type_url, type_url.removeprefix(PREFIX))


@dataclass(frozen=True, slots=True)
class Encoded:
    """One resource: its name, a hash of its content, and its fields of a SotW and a delta response."""

    name: str
    version: str
    sotw: bytes
    delta: bytes
    message: Any


def encode(name: str, message: Any) -> Encoded:
    return encode_packed(name, protoconv.to_any(message), message)


def encode_packed(name: str, packed: Any, message: Any) -> Encoded:
    """A resource that is an Any already."""
    version = blake2b(packed.value, digest_size=12).hexdigest()
    sotw = discovery_pb2.DiscoveryResponse(resources=[packed]).SerializeToString()
    wrapped = discovery_pb2.Resource(name=name, resource=packed)
    delta = discovery_pb2.DeltaDiscoveryResponse(resources=[wrapped]).SerializeToString()
    return Encoded(name, version, sotw, delta, message)


class View:
    """What one proxy gets of each type, computed when asked for."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self._wildcard: dict[str, Mapping[str, Encoded]] = {}
        self._versions: dict[str, Mapping[str, str]] = {}

    def _encoded(self, name: str, message: Any) -> Encoded:
        table = self.proxy.push.encoded
        found: Encoded | None = table.get(id(message))
        if found is None or found.message is not message:
            found = table[id(message)] = encode(name, message)
        return found

    def wildcard(self, type_url: str) -> Mapping[str, Encoded]:
        """All resources of a wildcard type, in order."""
        found = self._wildcard.get(type_url)
        if found is None:
            proxy = self.proxy
            if type_url == CDS:
                messages = snapshot.cluster_set(proxy)
            elif type_url == LDS:
                messages = snapshot.listener_set(proxy)
            elif type_url == NDS:
                messages = {"": name_table.name_table(proxy)}
            else:
                messages = {}
            found = self._wildcard[type_url] = {n: self._encoded(n, m) for n, m in messages.items()}
        return found

    def versions(self, type_url: str) -> Mapping[str, str]:
        """name -> content hash of all resources of a wildcard type."""
        found = self._versions.get(type_url)
        if found is None:
            found = self._versions[type_url] = {n: e.version for n, e in self.wildcard(type_url).items()}
        return found

    def named(self, type_url: str, names: Iterable[str]) -> list[Encoded]:
        """Resources of a by-name type; every EDS and RDS name gets an answer, other types have none."""
        proxy = self.proxy
        if type_url == EDS:
            return [self._encoded(n, endpoints.load_assignment(proxy, n)) for n in names]
        if type_url == RDS:
            return [self._encoded(n, routes.route_configuration(proxy, n)) for n in names]
        return []


def sotw_response(type_url: str, version: str, nonce: str, resources: Sequence[Encoded]) -> bytes:
    """A serialised DiscoveryResponse."""
    head = discovery_pb2.DiscoveryResponse(version_info=version, type_url=type_url, nonce=nonce)
    head.control_plane.identifier = CONTROL_PLANE
    return b"".join((head.SerializeToString(), *(r.sotw for r in resources)))


def delta_response(
    type_url: str, version: str, nonce: str, resources: Sequence[Encoded], removed: Iterable[str]
) -> bytes:
    """A serialised DeltaDiscoveryResponse."""
    head = discovery_pb2.DeltaDiscoveryResponse(
        system_version_info=version, type_url=type_url, nonce=nonce, removed_resources=sorted(removed)
    )
    head.control_plane.identifier = CONTROL_PLANE
    return b"".join((head.SerializeToString(), *(r.delta for r in resources)))


CONTROL_PLANE = '{"Component":"istiod","ID":"sidecarlab","Info":{"version":"1.32-lab"}}'

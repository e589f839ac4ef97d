"""The xDS protocol of one stream, without I/O: requests and pushes in, serialised responses out.

Sources: istio/istio: pkg/xds/server.go, pilot/pkg/xds/ads.go, pilot/pkg/xds/delta.go.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lab.discovery import node as node_module
from lab.discovery.node import Node
from lab.discovery.resources import (
    CDS,
    EDS,
    HEALTH,
    PUSH_ORDER,
    WILDCARD,
    Encoded,
    View,
    delta_response,
    sotw_response,
)

Flavour = Literal["delta", "sotw"]


class ProtocolError(ValueError):
    """The stream cannot go on; the text goes to the peer with gRPC status InvalidArgument."""


@dataclass(slots=True)
class Watch:
    """One type on one stream.

    ``names`` is what a by-name type asked for (unused for wildcard types), ``sent`` the content hash of every resource
    that the peer holds from us. ``error`` is Envoy's text of the last NACK, until the next ACK. ``sent_at`` is when the
    last response was written (seconds since 1970), 0 before the first; the server notes it.
    """

    type_url: str
    names: set[str] = field(default_factory=set)
    wildcard: bool = False
    nonce_sent: str = ""
    nonce_acked: str = ""
    nonce_nacked: str = ""
    version_sent: str = ""
    version_acked: str = ""
    sent: Mapping[str, str] = field(default_factory=dict)
    always_respond: bool = False
    error: str = ""
    nacks: int = 0
    acks: int = 0
    pushes: int = 0
    sent_at: float = 0.0

    @property
    def settled(self) -> bool:
        """Whether the peer has answered the last response, by ACK or NACK."""
        return self.nonce_sent in (self.nonce_acked, self.nonce_nacked)


@dataclass(frozen=True, slots=True)
class Response:
    """One response to be written; ``resources`` and ``removed`` count what is in it."""

    type_url: str
    body: bytes
    resources: int
    removed: int


def node_from_proto(message: Any) -> Node:
    """The Node of a request's node message. Raises NodeError for an unusable one."""
    from google.protobuf import json_format

    metadata = json_format.MessageToDict(message.metadata) if message.HasField("metadata") else {}
    place = message.locality
    return node_module.parse(message.id, message.cluster, metadata, (place.region, place.zone, place.sub_zone))


class Stream:
    """One ADS stream of one proxy. ``view`` is set by the server before anything is answered."""

    def __init__(self, flavour: Flavour, version: str) -> None:
        self.flavour: Flavour = flavour
        self.node: Node | None = None
        self.view: View | None = None
        self.version = version
        self.watches: dict[str, Watch] = {}

    # --- requests -----------------------------------------------------------------------------

    def identify(self, request: Any) -> bool:
        """Takes the node from the first request that matters; False for one to be ignored.

        Raises ProtocolError when the first request has no node.
        """
        if self.node is not None:
            return True
        if request.type_url == HEALTH and not request.node.id:
            return False
        if not request.node.id:
            raise ProtocolError("missing node information")
        try:
            self.node = node_from_proto(request.node)
        except node_module.NodeError as e:
            raise ProtocolError(str(e)) from None
        return True

    def request(self, request: Any) -> list[Response]:
        """Answers one DiscoveryRequest or DeltaDiscoveryRequest."""
        type_url = request.type_url
        if type_url == HEALTH or not type_url:
            return []
        watch = self.watches.get(type_url)
        if request.HasField("error_detail"):
            if watch is not None:
                watch.error = request.error_detail.message or f"rejected with code {request.error_detail.code}"
                watch.nonce_nacked = request.response_nonce
                watch.nacks += 1
            return []
        out = self._delta(request, watch) if self.flavour == "delta" else self._sotw(request, watch)
        if type_url == CDS and out:
            out.extend(self._endpoints_after_clusters())
        return out

    def _endpoints_after_clusters(self) -> list[Response]:
        """Envoy keeps clusters warming until EDS comes, so a CDS answer is followed by EDS if that is watched."""
        watch = self.watches.get(EDS)
        if watch is None or not watch.names:
            return []
        if self.flavour == "sotw":
            watch.always_respond = True
            return []
        return self._send(watch, self._named(EDS, watch.names), ())

    def _ack(self, watch: Watch) -> None:
        watch.nonce_acked = watch.nonce_sent
        watch.version_acked = watch.version_sent
        watch.error = ""
        watch.acks += 1

    def _sotw(self, request: Any, watch: Watch | None) -> list[Response]:
        type_url = request.type_url
        names = set(request.resource_names)
        if type_url not in WILDCARD and not names:
            self.watches.pop(type_url, None)  # an empty list unsubscribes
            return []
        if watch is None or not request.response_nonce:
            # new, or a client that came back with a nonce of another stream
            watch = self.watches[type_url] = Watch(type_url, names, type_url in WILDCARD)
            return self._send_all(watch)
        if request.response_nonce != watch.nonce_sent:
            return []
        self._ack(watch)
        if watch.wildcard:
            return []
        added, watch.names = names - watch.names, names
        watch.sent = {n: v for n, v in watch.sent.items() if n in names}
        if watch.always_respond:
            watch.always_respond = False
            return self._send(watch, self._named(type_url, watch.names), ())
        return self._send(watch, self._named(type_url, added), ()) if added else []

    def _delta(self, request: Any, watch: Watch | None) -> list[Response]:
        type_url = request.type_url
        subscribe, unsubscribe = set(request.resource_names_subscribe), set(request.resource_names_unsubscribe)
        if watch is None:
            wildcard = type_url in WILDCARD or "*" in subscribe or not (subscribe or request.initial_resource_versions)
            watch = self.watches[type_url] = Watch(type_url, wildcard=wildcard)
            # what the client still holds from an earlier stream, so that what vanished meanwhile can be removed
            held = set(request.initial_resource_versions)
            watch.names = (subscribe | held) - unsubscribe - {"*"}
            watch.sent = dict.fromkeys(held, "")
            return self._send_all(watch)
        if request.response_nonce:
            if request.response_nonce != watch.nonce_sent:
                return []
            self._ack(watch)
        if watch.wildcard:
            return []
        if unsubscribe:
            watch.names -= unsubscribe
            watch.sent = {n: v for n, v in watch.sent.items() if n not in unsubscribe}
        if not subscribe:
            return []
        watch.names |= subscribe
        return self._send(watch, self._named(type_url, subscribe), ())

    # --- pushes -------------------------------------------------------------------------------

    def push_endpoints(self, view: View, version: str, hosts: frozenset[str]) -> list[Response]:
        """The response for changed endpoints of some services: EDS of their clusters, nothing else."""
        self.view, self.version = view, version
        watch = self.watches.get(EDS)
        if watch is None:
            return []
        names = [n for n in watch.names if n.rpartition("|")[2] in hosts]
        resources = [r for r in self._named(EDS, names) if watch.sent.get(r.name) != r.version]
        return self._send(watch, resources, ()) if resources else []

    def push(self, view: View, version: str) -> list[Response]:
        """Responses that bring the peer to ``view``: what changed, in push order; nothing for types that did not."""
        self.view, self.version = view, version
        out: list[Response] = []
        rewarmed: set[str] = set()
        for type_url in PUSH_ORDER:
            watch = self.watches.get(type_url)
            if watch is None:
                continue
            if watch.wildcard:
                changed, removed = self._difference(watch)
                if type_url == CDS:
                    rewarmed = {
                        e.message.eds_cluster_config.service_name
                        for e in changed
                        if e.message.HasField("eds_cluster_config")
                    }
                if not changed and not removed:
                    continue
                if self.flavour == "sotw":
                    changed = list(view.wildcard(type_url).values())
                out.extend(self._send(watch, changed, removed))
                continue
            resources = [
                r
                for r in self._named(type_url, watch.names)
                if watch.sent.get(r.name) != r.version or (type_url == EDS and r.name in rewarmed)
            ]
            if resources:
                out.extend(self._send(watch, resources, ()))
        return out

    def _difference(self, watch: Watch) -> tuple[list[Encoded], set[str]]:
        """(changed or new resources, removed names) of a wildcard type against what was sent."""
        assert self.view is not None
        versions = self.view.versions(watch.type_url)
        if watch.sent is versions:
            return [], set()
        names = {n for n, v in versions.items() if watch.sent.get(n) != v}
        resources = self.view.wildcard(watch.type_url)
        return [r for n, r in resources.items() if n in names], set(watch.sent) - set(versions)

    def _named(self, type_url: str, names: Iterable[str]) -> list[Encoded]:
        assert self.view is not None
        return self.view.named(type_url, sorted(names))

    def _send_all(self, watch: Watch) -> list[Response]:
        assert self.view is not None
        if watch.wildcard:
            resources = list(self.view.wildcard(watch.type_url).values())
        else:
            resources = self._named(watch.type_url, watch.names)
        removed = set(watch.sent) - {r.name for r in resources}
        return self._send(watch, resources, removed)

    def _send(self, watch: Watch, resources: list[Encoded], removed: Iterable[str]) -> list[Response]:
        assert self.view is not None
        removed = set(removed)
        nonce = f"{self.version}{uuid.uuid4()}"
        if self.flavour == "delta":
            body = delta_response(watch.type_url, self.version, nonce, resources, removed)
        else:
            body = sotw_response(watch.type_url, self.version, nonce, resources)
        watch.nonce_sent, watch.version_sent = nonce, self.version
        watch.pushes += 1
        if watch.wildcard:
            watch.sent = self.view.versions(watch.type_url)
        else:
            sent = dict(watch.sent)
            for name in removed:
                sent.pop(name, None)
            sent.update((r.name, r.version) for r in resources)
            watch.sent = sent
            watch.names -= removed
        return [Response(watch.type_url, body, len(resources), len(removed))]

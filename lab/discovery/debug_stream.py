"""Debug questions that come over xDS: ``istio.io/debug`` names a page of ``/debug/*``, ``istio.io/debug/<page>`` is one.

Only an authenticated proxy gets answers, and one outside the root namespace those about its own namespace alone.
Sources: istio/istio: pilot/pkg/xds/debuggen.go, pilot/pkg/xds/statusgen.go (with ENABLE_DEBUG_ENDPOINT_AUTH, the default).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from envoy.service.status.v3 import csds_pb2
from google.protobuf import any_pb2, timestamp_pb2

from lab.discovery import config_dump, debug, debug_access, protoconv
from lab.discovery.auth import Unauthenticated
from lab.discovery.resources import DEBUG, Encoded, encode, encode_packed
from lab.discovery.xds import ProtocolError, Watch

if TYPE_CHECKING:
    from lab.discovery.ads import Connection, DiscoveryServer


def answer(server: DiscoveryServer, asker: Connection, type_url: str, names: Sequence[str]) -> list[Encoded]:
    """The resources of the response. ``istio.io/debug/syncz`` gives one ClientConfig for each proxy,
    ``istio.io/debug/config_dump`` the sections of the config dump of the one proxy that ``names`` holds; any other page
    is that of ``istio.io/debug``. Without a name the question is about the asker (where istiod answers with nothing).

    Raises:
        Unauthenticated, Forbidden: the asker may not see that.
        ProtocolError: the question names nothing, or several things.
    """
    assert asker.node is not None
    if not asker.identities:
        raise Unauthenticated("authentication required")
    root = server.push_context.mesh_config.root_namespace
    namespace = "" if asker.node.namespace == root else asker.node.namespace
    if type_url == f"{DEBUG}/syncz":
        return _syncz(server, namespace)
    if type_url != DEBUG:
        proxies = names or [asker.node.name]
        if type_url == f"{DEBUG}/config_dump":
            return _config_dump(server, namespace, proxies)
        page = type_url.removeprefix(DEBUG).strip("/")
        names = [f"{page}?proxyID={proxy}" for proxy in proxies]
    if len(names) != 1:
        raise ProtocolError("exactly one debug request is required")
    return [_page(server, namespace, names[0], asker.identities)]


def _page(server: DiscoveryServer, namespace: str, name: str, identities: Sequence[str]) -> Encoded:
    """A page of ``/debug/*`` as JSON text, or the text of its error."""
    url = urlsplit(name)
    if namespace:
        debug_access.visible(url.path, namespace, server.push_context.mesh_config.root_namespace, identities)
    query = dict(parse_qsl(url.query, keep_blank_values=True))
    try:
        text = json.dumps(debug.answer(server, url.path, query, namespace))
    except (LookupError, ValueError) as e:
        text = f"{e}\n"
    packed = any_pb2.Any(type_url=DEBUG, value=text.encode())
    return encode_packed(name, packed, packed)


def _syncz(server: DiscoveryServer, namespace: str) -> list[Encoded]:
    out = []
    for connection in server.connections:
        node = connection.node
        if node is None or "PROXY_CONFIG" not in node.metadata or namespace not in ("", node.namespace):
            continue
        told = {"CLUSTER_ID": node.cluster_id, "NAMESPACE": node.namespace, "ISTIO_VERSION": node.text("ISTIO_VERSION")}
        watches = sorted(connection.stream.watches.values(), key=lambda w: w.type_url)
        config = csds_pb2.ClientConfig(
            node={"id": node.name, "metadata": protoconv.struct({k: v for k, v in told.items() if v})},
            generic_xds_configs=[_generic(watch) for watch in watches],
        )
        out.append(encode(node.name, config))
    return out


def _generic(watch: Watch) -> Any:
    """What one proxy has of one type."""
    sent = timestamp_pb2.Timestamp()
    sent.FromMilliseconds(int(watch.sent_at * 1000))
    one = csds_pb2.ClientConfig.GenericXdsConfig(type_url=watch.type_url, last_updated=sent)
    if watch.error:
        one.config_status = csds_pb2.ERROR
        one.error_state.last_update_attempt.CopyFrom(sent)
        one.error_state.details = watch.error
    elif not watch.nonce_sent:
        one.config_status = csds_pb2.NOT_SENT
    else:
        one.config_status = csds_pb2.SYNCED if watch.nonce_acked == watch.nonce_sent else csds_pb2.STALE
    return one


def _config_dump(server: DiscoveryServer, namespace: str, names: Sequence[str]) -> list[Encoded]:
    if len(names) != 1:
        return []
    try:
        connection = debug.connection_of(server, names[0], namespace)
    except LookupError:
        return []
    return [encode_packed("", section, section) for section in config_dump.whole(connection).configs]

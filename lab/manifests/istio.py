"""Istio objects and MeshConfig to the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from lab.errors import InputError
from lab.manifests import protocol
from lab.manifests.addresses import is_address
from lab.manifests.document import Map, locate, parse, plain
from lab.manifests.item import Item
from lab.manifests.model import (
    ConnectionPool,
    HTTPPool,
    MeshConfig,
    OutboundTrafficPolicy,
    PeerAuthentication,
    RawConfig,
    ServiceEntry,
    ServiceEntryPort,
    ServiceEntryVisibility,
    Sidecar,
    SidecarEgress,
    SidecarIngress,
    TCPPool,
    Visibility,
    WorkloadEndpoint,
    WorkloadEntry,
)
from lab.manifests.pods import label_selector
from lab.manifests.problems import Problems, did_you_mean

if TYPE_CHECKING:
    from lab.manifests.schema import connection_pool, mesh_config, metadata
    from lab.manifests.schema import peer_authentication as pa
    from lab.manifests.schema import service_entry as se
    from lab.manifests.schema import sidecar as sc

_PROTOCOLS = (
    "HTTP",
    "HTTPS",
    "HTTP2",
    "GRPC",
    "GRPC-Web",
    "HTTP_PROXY",
    "TLS",
    "TCP",
    "MONGO",
    "REDIS",
    "MYSQL",
    "UDP",
)


def _protocol(word: str, item: Item, path: tuple[str | int, ...], problems: Problems) -> None:
    """Refuses a word that names no protocol; none at all is detected by Envoy.

    Source: istio/istio: pkg/config/validation/validation.go (ValidateProtocol, for ServiceEntry and Sidecar alike).
    """
    if word and not protocol.is_word(word):
        known = f"Use one of {', '.join(_PROTOCOLS)}, or leave it out: then Envoy detects it."
        problems.error(
            locate(item.document, path),
            f'unsupported protocol "{word}"',
            f"{item.subject}: Istio refuses it",
            did_you_mean(word, _PROTOCOLS) or known,
        )


def _endpoint(entry: se.WorkloadEntrySpec) -> WorkloadEndpoint:
    return WorkloadEndpoint(
        address=entry.address,
        ports=dict(entry.ports),
        labels=dict(entry.labels),
        network=entry.network,
        locality=entry.locality,
        weight=entry.weight,
        service_account=entry.service_account,
    )


def service_entry(item: Item, problems: Problems) -> ServiceEntry:
    """A ServiceEntry; automatic addresses already in its status are kept."""
    body = cast("se.ServiceEntry", item.schema)
    spec = body.spec
    for index, port in enumerate(spec.ports):
        _protocol(port.protocol, item, ("spec", "ports", index, "protocol"), problems)
    for index, endpoint in enumerate(spec.endpoints):
        if (
            spec.resolution == "STATIC"
            and not is_address(endpoint.address)
            and not endpoint.address.startswith("unix://")
        ):
            problems.error(
                locate(item.document, ("spec", "endpoints", index, "address")),
                f'bad address "{endpoint.address}"',
                f"{item.subject}: with resolution STATIC an endpoint is an IP address or unix:///PATH",
            )
    written: dict[str, tuple[str, ...]] = {}
    for address in body.status.addresses if body.status else []:
        for host in [address.host] if address.host else spec.hosts:
            written[host] = (*written.get(host, ()), address.value)
    return ServiceEntry(
        meta=item.meta,
        hosts=tuple(spec.hosts),
        ports=tuple(
            ServiceEntryPort(port.number, port.name, protocol.of_istio_port(port.protocol), port.target_port or 0)
            for port in spec.ports
        ),
        addresses=tuple(spec.addresses),
        location=spec.location,
        resolution=spec.resolution,
        endpoints=tuple(_endpoint(endpoint) for endpoint in spec.endpoints),
        workload_selector=dict(spec.workload_selector.labels) if spec.workload_selector else None,
        export_to=tuple(spec.export_to),
        subject_alt_names=tuple(spec.subject_alt_names),
        auto_addresses=written,
    )


def workload_entry(item: Item) -> WorkloadEntry:
    body = cast("se.WorkloadEntry", item.schema)
    return WorkloadEntry(item.meta, _endpoint(body.spec))


def _pool(settings: connection_pool.ConnectionPoolSettings | None) -> ConnectionPool | None:
    if settings is None:
        return None
    tcp, http = settings.tcp, settings.http
    return ConnectionPool(
        tcp=TCPPool(
            max_connections=tcp.max_connections,
            connect_timeout=tcp.connect_timeout,
            keepalive=(tcp.tcp_keepalive.probes, tcp.tcp_keepalive.time, tcp.tcp_keepalive.interval)
            if tcp.tcp_keepalive
            else None,
            max_connection_duration=tcp.max_connection_duration,
            idle_timeout=tcp.idle_timeout,
        )
        if tcp
        else None,
        http=HTTPPool(
            http1_max_pending_requests=http.http1_max_pending_requests,
            http2_max_requests=http.http2_max_requests,
            max_requests_per_connection=http.max_requests_per_connection,
            max_retries=http.max_retries,
            idle_timeout=http.idle_timeout,
            h2_upgrade_policy=http.h2_upgrade_policy,
            use_client_protocol=http.use_client_protocol,
            max_concurrent_streams=http.max_concurrent_streams,
        )
        if http
        else None,
    )


def sidecar(item: Item, problems: Problems) -> Sidecar:
    body = cast("sc.Sidecar", item.schema)
    spec = body.spec
    ports = [("ingress", index, listener.port) for index, listener in enumerate(spec.ingress)]
    ports += [("egress", index, listener.port) for index, listener in enumerate(spec.egress) if listener.port]
    for what, index, port in ports:
        _protocol(port.protocol, item, ("spec", what, index, "port", "protocol"), problems)
    paths: list[tuple[tuple[str | int, ...], connection_pool.ConnectionPoolSettings | None]] = [
        (("spec", "inboundConnectionPool"), spec.inbound_connection_pool)
    ]
    paths += [
        (("spec", "ingress", index, "connectionPool"), entry.connection_pool)
        for index, entry in enumerate(spec.ingress)
    ]
    for path, pool in paths:
        if pool and pool.http and pool.http.http2_keep_alive:
            source = locate(item.document, (*path, "http", "http2KeepAlive"))
            problems.warn(
                source, f"{item.subject}: http2KeepAlive of an inbound pool is accepted, but the lab does not act on it"
            )
    policy = spec.outbound_traffic_policy
    proxy = policy.egress_proxy if policy else None
    return Sidecar(
        meta=item.meta,
        workload_selector=dict(spec.workload_selector.labels) if spec.workload_selector else None,
        egress=tuple(
            SidecarEgress(
                hosts=tuple(listener.hosts),
                port=listener.port.number if listener.port else None,
                port_protocol=protocol.of_istio_port(listener.port.protocol) if listener.port else "AUTO",
                port_name=listener.port.name if listener.port else "",
                bind=listener.bind,
                capture_mode=listener.capture_mode,
            )
            for listener in spec.egress
        ),
        ingress=tuple(
            SidecarIngress(
                port=listener.port.number,
                protocol=protocol.of_istio_port(listener.port.protocol),
                name=listener.port.name,
                bind=listener.bind,
                capture_mode=listener.capture_mode,
                default_endpoint=listener.default_endpoint,
                connection_pool=_pool(listener.connection_pool),
            )
            for listener in spec.ingress
        ),
        outbound_traffic_policy=OutboundTrafficPolicy(
            policy.mode, (proxy.host, proxy.port.number, proxy.subset) if proxy and proxy.port else None
        )
        if policy
        else None,
        inbound_connection_pool=_pool(spec.inbound_connection_pool),
    )


def peer_authentication(item: Item) -> PeerAuthentication:
    body = cast("pa.PeerAuthentication", item.schema)
    spec = body.spec
    return PeerAuthentication(
        meta=item.meta,
        selector=dict(spec.selector.match_labels) if spec.selector and spec.selector.match_labels else None,
        mode=spec.mtls.mode,
        port_modes={int(port): setting.mode for port, setting in spec.port_level_mtls.items()},
    )


def raw_config(item: Item) -> RawConfig:
    """A DestinationRule or VirtualService; its spec was checked and is kept as written."""
    spec = plain(item.document.get("spec"))
    assert isinstance(spec, dict)
    return RawConfig("DestinationRule" if item.kind == "DestinationRule" else "VirtualService", item.meta, spec)


def mesh_document(item: Item) -> Map | None:
    """The text of the key ``mesh`` of the ``istio`` ConfigMap as a document whose lines are those of the file.

    Raises:
        InputError: it is no YAML mapping.
    """
    body = cast("metadata.ConfigMap", item.schema)
    text = body.data.get("mesh")
    if text is None:
        return None
    source = locate(item.document, ("data", "mesh"))
    documents = parse(text, source.file, source.line)
    if len(documents) > 1:
        raise InputError(
            "bad MeshConfig", str(documents[1].source()), f"{item.subject}: data.mesh holds more than one document"
        )
    return documents[0] if documents else None


def _visibility(written: mesh_config.ServiceEntryVisibility | None) -> ServiceEntryVisibility:
    def known(value: mesh_config.Visibility) -> Visibility:
        return "PUBLIC" if value == "VISIBILITY_UNSPECIFIED" else value

    if written is None:
        return ServiceEntryVisibility()
    return ServiceEntryVisibility(
        known(written.default_visibility),
        tuple(
            (tuple(label_selector(rule.namespace_selector) for rule in one.matching_rules), known(one.visibility))
            for one in written.policies
        ),
        written.apply_to_sidecars,
    )


def mesh_config_of(config: mesh_config.MeshConfig, document: Map) -> MeshConfig:
    """MeshConfig from its checked form; ``defaultConfig`` is kept as written."""
    raw = plain(document)
    assert isinstance(raw, dict)
    default_config = raw.get("defaultConfig") or {}
    return MeshConfig(
        trust_domain=config.trust_domain,
        trust_domain_aliases=tuple(config.trust_domain_aliases),
        root_namespace=config.root_namespace,
        outbound_traffic_policy=OutboundTrafficPolicy(config.outbound_traffic_policy.mode),
        inbound_localhost=config.inbound_traffic_policy.mode == "LOCALHOST",
        discovery_selectors=tuple(label_selector(selector) for selector in config.discovery_selectors),
        default_service_export_to=tuple(config.default_service_export_to),
        default_virtual_service_export_to=tuple(config.default_virtual_service_export_to),
        default_destination_rule_export_to=tuple(config.default_destination_rule_export_to),
        service_entry_visibility=_visibility(config.service_entry_visibility),
        proxy_listen_port=config.proxy_listen_port,
        proxy_inbound_listen_port=config.proxy_inbound_listen_port,
        proxy_http_port=config.proxy_http_port,
        connect_timeout=config.connect_timeout,
        protocol_detection_timeout=config.protocol_detection_timeout,
        enable_auto_mtls=config.enable_auto_mtls,
        enable_tracing=config.enable_tracing,
        enable_prometheus_merge=config.enable_prometheus_merge,
        access_log_file=config.access_log_file,
        access_log_encoding=config.access_log_encoding,
        access_log_format=config.access_log_format,
        disable_envoy_listener_log=config.disable_envoy_listener_log,
        h2_upgrade=config.h2_upgrade_policy == "UPGRADE",
        dns_refresh_rate=config.dns_refresh_rate,
        locality_lb_enabled=config.locality_lb_setting is None or config.locality_lb_setting.enabled is not False,
        path_normalization=config.path_normalization.normalization,
        default_config=default_config if isinstance(default_config, Mapping) else {},
        source=document.source(),
        raw=raw,
    )

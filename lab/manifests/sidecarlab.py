"""Our own kinds to the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from lab.manifests.addresses import Claim
from lab.manifests.document import locate, plain
from lab.manifests.item import Item
from lab.manifests.model import ExternalHost, ExternalPort, FlowFrom, FlowTo, Link, Retry, TrafficTest

if TYPE_CHECKING:
    from lab.manifests.schema import external_host as host_schema
    from lab.manifests.schema import link as link_schema
    from lab.manifests.schema import traffic_test as test_schema


def external_host(item: Item, claims: list[Claim]) -> ExternalHost:
    """An ExternalHost; ``spec.addresses`` pin its addresses."""
    body = cast("host_schema.ExternalHost", item.schema)
    spec = body.spec
    claims.extend(
        Claim(ip, item.subject, locate(item.document, ("spec", "addresses", index)))
        for index, ip in enumerate(spec.addresses)
    )
    return ExternalHost(
        meta=item.meta,
        hosts=tuple(spec.hosts),
        addresses=tuple(spec.addresses),
        ports=tuple(ExternalPort(port.port, port.protocol, port.name) for port in spec.ports),
    )


def link(item: Item) -> Link:
    body = cast("link_schema.Link", item.schema)
    spec = body.spec
    return Link(item.meta, (spec.between[0], spec.between[1]), spec.mtu or 0, spec.rate, spec.loss, spec.cut)


_DEFAULT_PORTS = {"dns": 53, "dns-tcp": 53}


def traffic_test(item: Item, pod_addresses: Mapping[str, str]) -> TrafficTest:
    """A TrafficTest. A destination written as a pod becomes that pod's address (an unknown one stays as written).

    Args:
        item: the object.
        pod_addresses: POD.NAMESPACE to its first address.
    """
    body = cast("test_schema.TrafficTest", item.schema)
    spec, to = body.spec, body.spec.to
    expect = plain(item.document["spec"])
    assert isinstance(expect, dict)
    return TrafficTest(
        meta=item.meta,
        flow_from=FlowFrom(
            pod=pod_name(spec.from_.pod), external=spec.from_.external, uid=spec.from_.uid, spoof=spec.from_.spoof
        ),
        to=FlowTo(
            host=to.host or pod_addresses.get(pod_name(to.pod), to.pod),
            port=to.port if to.port is not None else _DEFAULT_PORTS.get(to.protocol, 0),
            protocol=to.protocol,
            path=to.path,
            method=to.method,
            headers=dict(to.headers),
            authority=to.authority,
            sni=to.sni,
            crafted=to.crafted,
            flags=to.flags,
            server=to.server,
            query_type=to.query_type,
            silent=to.silent,
        ),
        expect=expect["expect"],
        timeout=spec.timeout,
        retry=Retry(spec.retry.attempts, spec.retry.interval),
    )


def pod_name(written: str) -> str:
    """``NAMESPACE/POD`` and ``POD.NAMESPACE`` as ``POD.NAMESPACE``."""
    if "/" in written:
        namespace, _, pod = written.partition("/")
        return f"{pod}.{namespace}"
    return written

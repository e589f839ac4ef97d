"""Makes the namespaces, links, routes and rules of a plan, changes them and takes single ones away.

The root namespace is never touched: a veth pair is made from inside the pod's namespace with its other end directly in
the router's, and every program that changes rules is started inside the namespace that it changes. Taking all of a lab
away is `lab.fabric.record.down`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress

from lab.errors import LabError
from lab.fabric import links, namespaces, netfilter, netlink, paths, services
from lab.fabric.namespaces import Stop, sysctl
from lab.fabric.plan import ROUTER_MAC, UPLINKS, Place, Plan, Router
from lab.fabric.record import Record

_LOOPBACK = 1  # its index in every namespace
_PATH_RULES = 1_000  # priority of the first rule of a Link with an MTU between two places; they come first
_UPLINK_RULES = 10_000
_PATH_TABLES = 1_000
_SCOPES = ("all", "default", "lo")  # of settings per interface: lo exists before they are made
_DEFAULT_MTU = 1500  # of a new veth


def build(plan: Plan, record: Record, *, backend: netfilter.Backend | None = None, stop: Stop | None = None) -> None:
    """Makes the whole fabric. Doing it again on one that exists mends what is missing.

    Everything is recorded before it is made; on an error or an interrupt the caller takes it away with
    `lab.fabric.record.down`, and nothing is being made any more when this returns or raises.

    Args:
        plan: what to make.
        record: the lab's record.
        backend: how services are served; chosen by what the kernel has if None.
        stop: for a caller in another thread than the main one, whom no signal interrupts: ends the build early.

    Raises:
        LabError: the kernel or a program refused; the first is named.
        Cancelled: ``stop`` was set.
    """

    def work(stop: Stop) -> None:
        namespaces.prepare(record)
        _make_routers(plan, record)
        _add(plan, record, plan.places, stop)
        stop.check()
        _apply_rules(plan, record, backend)

    namespaces.apart(work, stop)


def add(plan: Plan, record: Record, places: Iterable[str]) -> None:
    """Makes the namespaces and links of some places of ``plan``; what exists of them is kept.

    Services and links between places are another thing: `update_rules`.
    """
    chosen = [plan.place(name) for name in places]
    namespaces.apart(lambda stop: _add(plan, record, chosen, stop))


def remove(plan: Plan, record: Record, places: Iterable[str]) -> None:
    """Takes away the links and the pins of some places of ``plan`` (the one they were made by). Twice is fine.

    A namespace ends with the last process in it, which is the caller's to end.
    """
    chosen = [plan.place(name) for name in places]

    def work(_stop: Stop) -> None:
        for router in UPLINKS:
            gone = [p.interface for p in chosen if p.router == router]
            if gone and namespaces.is_pinned(paths.netns_path(record.name, router)):
                namespaces.enter(paths.netns_path(record.name, router))
                with netlink.Route(router) as route:
                    route.run([netlink.link_delete(name) for name in gone if _index(name)])
        for place in chosen:
            namespaces.unpin(record, place.name)

    namespaces.apart(work)


def update_rules(
    plan: Plan, record: Record, previous: Plan | None = None, *, backend: netfilter.Backend | None = None
) -> None:
    """Makes services and the links of ``plan`` the ones in force, each in one transaction.

    With ``previous``, what its Links did to MTUs, rates and paths is undone first, and UDP flows to endpoints that
    went are forgotten. Its places must be gone by now if they are not in ``plan``, and those of ``plan`` must exist.
    """

    def work(_stop: Stop) -> None:
        if previous is not None:
            _undo_links(previous, plan, record)
        _apply_rules(plan, record, backend)
        stale = services.stale_flows(previous.services, plan.services) if previous is not None else []
        if stale:
            from lab.fabric import conntrack

            namespaces.enter(paths.netns_path(record.name, paths.NODE))
            conntrack.forget(stale)

    namespaces.apart(work)


# --- all below runs in a thread that may change its namespace ---------------------------------------------


def _make_routers(plan: Plan, record: Record) -> None:
    namespaces.make(record, paths.OUTSIDE)
    _router_settings(plan.ipv6)
    outside = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        namespaces.make(record, paths.NODE)
        _router_settings(plan.ipv6)
        with netlink.Route(paths.NODE) as route:
            if not _index(UPLINKS[paths.NODE]):
                # The two ends differ by one bit, or each would take the other's frames for its own.
                route.run(
                    [netlink.veth(UPLINKS[paths.NODE], ROUTER_MAC, UPLINKS[paths.OUTSIDE], _OTHER_ROUTER_MAC, outside)]
                )
            route.run(_router_requests(plan.node, plan.outside, plan.ipv6, _OTHER_ROUTER_MAC))
    finally:
        os.close(outside)
    namespaces.enter(paths.netns_path(record.name, paths.OUTSIDE))
    with netlink.Route(paths.OUTSIDE) as route:
        route.run(_router_requests(plan.outside, plan.node, plan.ipv6, ROUTER_MAC) + _no_way_back(plan.ipv6))


_OTHER_ROUTER_MAC = "ee:ee:ee:ee:ee:ef"


def _router_requests(me: Router, other: Router, ipv6: bool, other_mac: str) -> list[netlink.Request]:
    uplink = _index(UPLINKS[me.name])
    requests = [netlink.link_up(_LOOPBACK), netlink.link_up(uplink)]
    requests += [netlink.address(_LOOPBACK, a) for a in me.addresses]
    requests.append(netlink.neighbour(uplink, other.own4, other_mac))
    requests.append(netlink.route(uplink, via=other.own4, source=me.own4))
    if ipv6:
        requests.append(netlink.address(uplink, me.link_local))
        requests.append(netlink.neighbour(uplink, other.link_local, other_mac))
        requests.append(netlink.route(uplink, via=other.link_local, source=me.own6))
    return requests


def _no_way_back(ipv6: bool) -> list[netlink.Request]:
    """What nobody has is unreachable here, and does not go to and fro: what the node itself sends, which no rule of its rejects."""
    requests = []
    for family in (socket.AF_INET, socket.AF_INET6) if ipv6 else (socket.AF_INET,):
        uplink = UPLINKS[paths.OUTSIDE]
        requests.append(netlink.rule(family, _UPLINK_RULES, incoming=uplink, suppress=0))
        requests.append(netlink.rule(family, _UPLINK_RULES + 1, incoming=uplink, unreachable=True))
    return requests


def _add(plan: Plan, record: Record, places: Sequence[Place], stop: Stop) -> None:
    for name in UPLINKS:
        pin = paths.netns_path(record.name, name)
        attached = [p for p in places if p.router == name]
        if not attached:
            continue
        router = plan.router(name)
        try:
            fd = os.open(pin, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as e:
            raise LabError("a lab has no such namespace", str(pin), str(e.strerror)) from None
        try:
            for place in attached:
                stop.check()
                _make_place(plan, record, place, router, fd)
        finally:
            os.close(fd)
        namespaces.enter(pin)
        with netlink.Route(name) as route:
            requests = []
            for place in attached:
                requests += _attachment(place, router)
            route.run(requests)


def _make_place(plan: Plan, record: Record, place: Place, router: Router, router_fd: int) -> None:
    namespaces.make(record, place.name)
    _place_settings(plan.ipv6)
    mtu = plan.links.mtu(place.name)
    with netlink.Route(place.name) as route:
        eth0 = _index("eth0")
        if not eth0:
            # Made from here and not from the router: all of the pod's requests need one socket.
            route.run([netlink.veth("eth0", place.mac, place.interface, ROUTER_MAC, router_fd, mtu)])
            eth0 = _index("eth0")
        requests = [netlink.link_up(_LOOPBACK)]
        requests += [netlink.address(eth0, a) for a in place.addresses]
        families = {netlink.family(a) for a in place.addresses}
        if socket.AF_INET in families:
            requests.append(netlink.neighbour(eth0, router.own4, ROUTER_MAC))
            source = next(a for a in place.addresses if ":" not in a)
            requests.append(netlink.route(eth0, via=router.own4, source=source))
        if socket.AF_INET6 in families:
            requests.append(netlink.neighbour(eth0, router.link_local, ROUTER_MAC))
            source = next(a for a in place.addresses if ":" in a)
            requests.append(netlink.route(eth0, via=router.link_local, source=source))
        route.run(requests)


def _attachment(place: Place, router: Router) -> list[netlink.Request]:
    index = _index(place.interface)
    requests = [netlink.link_up(index)]
    if any(":" in a for a in place.addresses):
        requests.append(netlink.address(index, router.link_local))
    for a in place.addresses:
        requests.append(netlink.neighbour(index, a, place.mac))
        requests.append(netlink.route(index, a, source=router.own6 if ":" in a else router.own4))
    return requests


def _apply_rules(plan: Plan, record: Record, backend: netfilter.Backend | None) -> None:
    for router in (plan.node, plan.outside):
        namespaces.enter(paths.netns_path(record.name, router.name))
        chosen = backend or netfilter.backend()
        own = router.sources
        with_services = router.name == paths.NODE
        if chosen == "nft":
            documents = [services.nft_document(plan.services, own, plan.beyond)] if with_services else []
            netfilter.apply_nft("".join([*documents, links.nft_document(plan.links, router.name)]))
        else:
            for version, ip in own.items():
                if with_services:
                    document = services.legacy_document(plan.services, version, ip, plan.beyond)
                    netfilter.apply_legacy(document, version, record.name)
                if plan.links.drops or plan.links.classes:
                    document = links.legacy_document(plan.links, router.name, version)
                    netfilter.apply_legacy(document, version, record.name)
        with netlink.Route(router.name) as route:
            route.run(_path_requests(plan, router.name))
            route.run(_rate_requests(plan, router.name))
            route.run(_mtu_requests(plan, router.name))
    for place in plan.places:
        buckets = [b for b in plan.links.buckets if b.place == place.name]
        mtu = plan.links.mtu(place.name)
        if buckets or mtu:
            namespaces.enter(paths.netns_path(record.name, place.name))
            with netlink.Route(place.name) as route:
                route.run([netlink.qdisc_tbf(_index(b.interface), b.rate) for b in buckets])
                if mtu:
                    route.run([netlink.link_mtu(_index("eth0"), mtu)])


def _undo_links(old: Plan, new: Plan, record: Record) -> None:
    kept = {p.name for p in new.places}
    for router in UPLINKS:
        namespaces.enter(paths.netns_path(record.name, router))
        requests = []
        for number, path in enumerate(p for p in old.links.paths if p.router == router):
            family = netlink.family(path.source)
            table = _PATH_TABLES + number
            requests.append(netlink.rule(family, _PATH_RULES + number, table=table, delete=True))
            index = _index(path.interface)
            if index:
                requests.append(netlink.route(index, path.destination, table=table, delete=True))
        limited = [b.interface for b in old.links.buckets if b.place == router]
        limited += [c.interface for c in old.links.classes if c.router == router]
        requests += [netlink.qdisc_delete(i) for name in dict.fromkeys(limited) if (i := _index(name))]
        sized = [p.interface for p in old.places if p.router == router and old.links.mtu(p.name)]
        requests += [netlink.link_mtu(i, _DEFAULT_MTU) for name in sized if (i := _index(name))]
        with netlink.Route(router) as route:
            route.run(requests)
    for place in old.places:
        limited = [b.interface for b in old.links.buckets if b.place == place.name]
        if place.name in kept and (limited or old.links.mtu(place.name)):
            namespaces.enter(paths.netns_path(record.name, place.name))
            with netlink.Route(place.name) as route:
                route.run([netlink.qdisc_delete(_index(name)) for name in limited])
                route.run([netlink.link_mtu(_index("eth0"), _DEFAULT_MTU)])


def _path_requests(plan: Plan, router: str) -> list[netlink.Request]:
    requests = []
    for number, path in enumerate(p for p in plan.links.paths if p.router == router):
        table = _PATH_TABLES + number
        index = _index(path.interface)
        requests.append(netlink.route(index, path.destination, table=table, mtu=path.mtu))
        requests.append(
            netlink.rule(
                netlink.family(path.source),
                _PATH_RULES + number,
                source=path.source,
                destination=path.destination,
                table=table,
            )
        )
    return requests


def _rate_requests(plan: Plan, router: str) -> list[netlink.Request]:
    requests = [netlink.qdisc_tbf(_index(b.interface), b.rate) for b in plan.links.buckets if b.place == router]
    classes = [c for c in plan.links.classes if c.router == router]
    requests += [netlink.qdisc_htb(_index(name)) for name in dict.fromkeys(c.interface for c in classes)]
    requests += [netlink.class_htb(_index(c.interface), c.minor, c.rate) for c in classes]
    return requests


def _mtu_requests(plan: Plan, router: str) -> list[netlink.Request]:
    sized = [(p, plan.links.mtu(p.name)) for p in plan.places if p.router == router]
    return [netlink.link_mtu(_index(p.interface), mtu) for p, mtu in sized if mtu]


def _router_settings(ipv6: bool) -> None:
    sysctl("net/ipv4/ip_forward", "1")
    for scope in _SCOPES:
        # What the host set for itself is inherited here (net.core.devconf_inherit_init_net).
        sysctl(f"net/ipv4/conf/{scope}/rp_filter", "0")  # forged sources are part of the tests
        sysctl(f"net/ipv4/conf/{scope}/send_redirects", "0")  # every pod is one hop away, whatever the way back
        sysctl(f"net/ipv4/conf/{scope}/accept_redirects", "0")
        sysctl(f"net/ipv4/conf/{scope}/arp_ignore", "0")
    _ipv6_settings(ipv6)
    if ipv6:
        sysctl("net/ipv6/conf/all/forwarding", "1")
    _every_icmp_error(ipv6)


def _place_settings(ipv6: bool) -> None:
    sysctl("net/ipv4/ip_unprivileged_port_start", "0")
    sysctl("net/ipv4/ping_group_range", "0 2147483647")
    sysctl("net/ipv4/ip_forward", "0")
    for scope in _SCOPES:
        sysctl(f"net/ipv4/conf/{scope}/rp_filter", "0")
        sysctl(f"net/ipv4/conf/{scope}/accept_redirects", "0")
        sysctl(f"net/ipv4/conf/{scope}/route_localnet", "0")
    _ipv6_settings(ipv6)
    _every_icmp_error(ipv6)


def _every_icmp_error(ipv6: bool) -> None:
    """A test may provoke many refusals; each must be told, so no type of message counts against the limits.

    Both masks belong to a namespace (linux: net/ipv4/sysctl_net_ipv4.c, ipv4_net_table; net/ipv6/icmp.c, ipv6_icmp_table_template).
    """
    sysctl("net/ipv4/icmp_ratemask", "0")
    if ipv6:
        sysctl("net/ipv6/icmp/ratemask", "0", optional=True)  # of types, of which 0 is none


def _ipv6_settings(ipv6: bool) -> None:
    """Links to come have the IPv6 that the plan gives them, and say nothing of their own; lo keeps ::1."""
    sysctl("net/ipv6/conf/default/disable_ipv6", "0" if ipv6 else "1", optional=not ipv6)
    if ipv6:
        sysctl("net/ipv6/conf/default/addr_gen_mode", "1")  # no link-local address by itself, so no noise from it
        sysctl("net/ipv6/conf/default/accept_ra", "0")


def _index(interface: str) -> int:
    """Its index in the namespace of the calling thread; 0 if there is none."""
    with suppress(OSError):
        return socket.if_nametoindex(interface)
    return 0

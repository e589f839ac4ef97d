"""Configurations for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from init.config import Config

PORTS = st.lists(st.integers(1, 65535).map(str), max_size=3, unique=True).map(",".join)
SOME_PORTS = st.lists(st.integers(1, 65535).map(str), min_size=1, max_size=3, unique=True).map(",".join)
IDS = st.lists(st.integers(0, 70000).map(str), min_size=1, max_size=3, unique=True).map(",".join)
INTERFACES = st.lists(st.from_regex(r"[a-zA-Z][a-zA-Z0-9_.-]{0,14}", fullmatch=True), max_size=2, unique=True).map(
    ",".join
)
ADDRESSES_V4 = st.ip_addresses(v=4).map(str)
ADDRESSES_V6 = st.ip_addresses(v=6).map(str)
CIDRS = st.lists(
    st.one_of(
        st.tuples(ADDRESSES_V4, st.integers(1, 32)).map(lambda pair: f"{pair[0]}/{pair[1]}"),
        st.tuples(ADDRESSES_V6, st.integers(1, 128)).map(lambda pair: f"{pair[0]}/{pair[1]}"),
    ),
    max_size=3,
).map(",".join)
# Docker's resolver is a case of its own.
SERVERS_V4 = st.lists(ADDRESSES_V4.filter(lambda address: address != "127.0.0.11"), max_size=2, unique=True)
SERVERS_V6 = st.lists(ADDRESSES_V6, max_size=2, unique=True)


@st.composite
def configs(draw: st.DrawFn, ipv6: bool | None = None, lists: bool = True) -> Config:
    """Any valid configuration. Without ``lists`` the addresses of the user are left out."""
    groups = draw(st.one_of(st.just("*"), st.just(""), IDS))
    return Config(
        proxy_port=draw(st.integers(1, 65535).map(str)),
        inbound_capture_port=draw(st.integers(1, 65535).map(str)),
        inbound_tunnel_port=draw(st.integers(1, 65535).map(str)),
        proxy_uid=draw(IDS),
        proxy_gid=draw(IDS),
        inbound_interception_mode=draw(st.sampled_from(["", "REDIRECT", "TPROXY"])),
        inbound_ports_include=draw(st.one_of(st.just("*"), PORTS)),
        inbound_ports_exclude=draw(PORTS),
        exclude_interfaces=draw(INTERFACES),
        outbound_ip_ranges_include=draw(st.one_of(st.just("*"), CIDRS if lists else st.just(""))),
        outbound_ip_ranges_exclude=draw(CIDRS) if lists else "",
        outbound_ports_include=draw(PORTS),
        outbound_ports_exclude=draw(PORTS),
        kube_virt_interfaces=draw(INTERFACES),
        inbound_tproxy_mark=draw(st.integers(1, 0xFFFFFFFF).map(str)),
        owner_groups_include=groups,
        owner_groups_exclude=draw(IDS) if groups == "*" else "",
        loopback_cidr=draw(st.sampled_from(["127.0.0.1/32", "127.0.0.0/8", "127.0.0.1/24"])),
        redirect_dns=draw(st.booleans()),
        capture_all_dns=draw(st.booleans()),
        dns_servers_v4=tuple(draw(SERVERS_V4)),
        dns_servers_v6=tuple(draw(SERVERS_V6)),
        drop_invalid=draw(st.booleans()),
        ipv6=draw(st.booleans()) if ipv6 is None else ipv6,
    )

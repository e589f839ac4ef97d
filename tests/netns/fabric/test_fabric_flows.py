"""Packets through a real fabric."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fabric_lab import DEADLINE, Backend, Lab, external, link, pod, service, tcp_syn, udp_packet, up

from lab.errors import ObservationError
from lab.fabric import netfilter

pytestmark = pytest.mark.root

A, B, C, D = "10.244.1.1", "10.244.1.2", "10.244.1.3", "10.244.1.4"
WEB, BARE, EMPTY, OUT = "10.96.1.1", "10.96.1.2", "10.96.1.3", "10.96.1.4"
VENDOR, VENDOR2 = "203.0.113.8", "203.0.113.9"

SLICE = """
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: out-1, namespace: shop, labels: {kubernetes.io/service-name: out}}
addressType: IPv4
ports: [{name: http, port: 8081, protocol: TCP}]
endpoints: [{addresses: [203.0.113.9]}]
"""
SHOP = (
    pod("a", A, "{app: client}"),
    pod("b", B, "{app: web}", 8080),
    pod("c", C, "{app: web}", 9090),
    pod("d", D),
    service(
        "web", WEB, "[{name: tcp, port: 80, targetPort: main}, {name: udp, port: 53, protocol: UDP}]", "{app: web}"
    ),
    service("self", BARE, "[{port: 80, targetPort: main}]", "{app: client}"),
    service("empty", EMPTY, "[{name: t, port: 80}, {name: u, port: 53, protocol: UDP}]", "{app: nobody}"),
    service("out", OUT, "[{name: http, port: 80}]"),
    SLICE,
    external("vendor", VENDOR, VENDOR2),
    external("other", "203.0.113.20"),
)


@pytest.fixture(scope="module", params=["nft", "legacy"])
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    backend: Backend = request.param
    if backend == "nft" and not netfilter.kernel_has_nf_tables():
        pytest.skip("no nf_tables in this kernel")
    try:
        with up(*SHOP, backend=backend) as made:
            yield made
    except ObservationError as e:
        if backend == "legacy":
            pytest.skip(f"no legacy iptables here: {e}")
        raise


def test_a_pod_reaches_a_pod_and_is_seen_by_its_own_address(lab: Lab) -> None:
    server = lab.listen("b.shop", "0.0.0.0", 7000)
    assert lab.peer_seen("a.shop", B, 7000, server) == A


def test_a_pod_reaches_an_external_host_and_is_reached_by_it(lab: Lab) -> None:
    outside = lab.listen("ext-vendor", VENDOR2, 7001)
    assert lab.peer_seen("a.shop", VENDOR2, 7001, outside) == A
    inside = lab.listen("a.shop", "0.0.0.0", 7002)
    assert lab.peer_seen("ext-vendor", A, 7002, inside) == VENDOR


def test_external_hosts_reach_each_other_without_the_node(lab: Lab) -> None:
    server = lab.listen("ext-other", "203.0.113.20", 7003)
    tap = lab.sniff("node", "outside")
    assert lab.peer_seen("ext-vendor", "203.0.113.20", 7003, server) == VENDOR
    fence = lab.udp("a.shop")
    fence.sendto(b"fence", ("203.0.113.20", 9))
    on_the_way: list[bytes] = []  # also the ends of earlier tests' connections
    while not on_the_way or not on_the_way[-1].endswith(b"fence"):
        on_the_way.append(tap.recv(2048))
    assert socket.inet_aton(VENDOR) + socket.inet_aton("203.0.113.20") not in {p[12:20] for p in on_the_way}


def test_loopback_is_up_everywhere(lab: Lab) -> None:
    for place in lab.plan.namespaces:
        server = lab.listen(place, "127.0.0.1", 7004)
        assert lab.peer_seen(place, "127.0.0.1", 7004, server) == "127.0.0.1"


def test_the_node_answers_on_the_gateway_the_dns_and_the_discovery_address(lab: Lab) -> None:
    for n, address in enumerate(lab.plan.node.addresses):
        server = lab.listen("node", address, 7010 + n)
        assert lab.peer_seen("a.shop", address, 7010 + n, server) == A


def test_an_address_that_nobody_has_is_unreachable_at_once(lab: Lab) -> None:
    for place in ("a.shop", "ext-vendor"):
        with pytest.raises(OSError, match="Network is unreachable") as e:
            lab.connect(place, "198.51.100.1", 80)
        assert e.value.errno == errno.ENETUNREACH


MANY = 40


def each_connection(lab: Lab, place: str, address: str, port: int) -> set[str]:
    """How so many connections end that a place opens at once; ``open`` of one that has not ended by the deadline."""

    def opened() -> socket.socket:
        s = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        s.setblocking(False)
        s.connect_ex((address, port))
        return s

    sockets = lab.inside(place, lambda: [opened() for _ in range(MANY)])
    lab.sockets += sockets
    ends: set[str] = set()
    waiting = {s.fileno(): s for s in sockets}
    poll = select.poll()
    for fd in waiting:
        poll.register(fd, select.POLLOUT)
    deadline = time.monotonic() + DEADLINE
    while waiting and (left := deadline - time.monotonic()) > 0:
        for fd, _ in poll.poll(left * 1000):
            poll.unregister(fd)
            ends.add(errno.errorcode.get(waiting.pop(fd).getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), "connected"))
    return ends | ({"open"} if waiting else set())


def each_datagram(lab: Lab, place: str, address: str, port: int) -> set[str]:
    """What so many senders of one datagram each are told, sent at once; they ask to be told everything (IP_RECVERR)."""
    six = ":" in address

    def sent() -> socket.socket:
        s = socket.socket(socket.AF_INET6 if six else socket.AF_INET, socket.SOCK_DGRAM)
        s.setsockopt(socket.IPPROTO_IPV6 if six else socket.IPPROTO_IP, _IPV6_RECVERR if six else _IP_RECVERR, 1)
        s.settimeout(DEADLINE)
        s.connect((address, port))
        s.send(b"?")
        return s

    sockets = lab.inside(place, lambda: [sent() for _ in range(MANY)])
    lab.sockets += sockets
    ends: set[str] = set()
    for s in sockets:
        try:
            ends.add(s.recv(1).decode())
        except TimeoutError:
            return ends | {"nothing"}
        except OSError as e:
            ends.add(errno.errorcode[e.errno or 0])
    return ends


@pytest.mark.parametrize("place", ["a.shop", "ext-vendor"])
def test_of_many_flows_to_what_nobody_has_each_is_told(lab: Lab, place: str) -> None:
    """A router without a route says so to one sender five times, then once a second."""
    for address in ("198.51.100.1", "10.244.1.77"):
        assert each_connection(lab, place, address, 80) == {"ENETUNREACH"}
        assert each_datagram(lab, place, address, 9) == {"ENETUNREACH"}


@pytest.mark.parametrize(("place", "address"), [("a.shop", B), ("a.shop", VENDOR), ("ext-vendor", B)])
def test_of_many_flows_to_a_closed_port_each_is_told(lab: Lab, place: str, address: str) -> None:
    assert each_connection(lab, place, address, 7098) == {"ECONNREFUSED"}
    assert each_datagram(lab, place, address, 7098) == {"ECONNREFUSED"}


def test_the_machine_s_own_limits_stay() -> None:
    """What a lab sets is set in its namespaces alone."""

    def masks() -> list[str]:
        return [Path("/proc/sys/net", key).read_text().strip() for key in ("ipv4/icmp_ratemask", "ipv6/icmp/ratemask")]

    before = masks()
    with up(pod("a", A, more=f", podIPs: [{{ip: {A}}}, {{ip: '{A6}'}}]"), external("vendor", VENDOR)) as lab:
        assert [lab.inside(place, masks) for place in lab.plan.namespaces] == [["0", "0"]] * 4
        assert masks() == before != ["0", "0"]


def test_a_port_that_nobody_listens_on_is_refused(lab: Lab) -> None:
    with pytest.raises(ConnectionRefusedError):
        lab.connect("a.shop", B, 7099)


def test_a_service_spreads_over_its_endpoints_and_keeps_the_source(lab: Lab) -> None:
    servers = {B: lab.listen("b.shop", "0.0.0.0", 8080), C: lab.listen("c.shop", "0.0.0.0", 9090)}
    seen = {B: 0, C: 0}
    for _ in range(40):  # all on one side: once in 2^39
        client = lab.connect("a.shop", WEB, 80)
        ready, _, _ = select.select(list(servers.values()), [], [], DEADLINE)
        (ip,) = [ip for ip, server in servers.items() if server in ready]
        connection, peer = servers[ip].accept()
        assert peer[0] == A
        assert client.getpeername() == (WEB, 80)
        seen[ip] += 1
        connection.close()
        client.close()
    for server in servers.values():
        server.close()
    assert all(seen.values())


def test_a_udp_service_answers_from_its_own_address(lab: Lab) -> None:
    servers = [lab.udp("b.shop", "0.0.0.0", 53), lab.udp("c.shop", "0.0.0.0", 53)]
    client = lab.udp("a.shop")
    client.sendto(b"question", (WEB, 53))
    ready, _, _ = select.select(servers, [], [], DEADLINE)
    data, peer = ready[0].recvfrom(100)
    assert (data, peer[0]) == (b"question", A)
    ready[0].sendto(b"answer", peer)
    assert client.recvfrom(100) == (b"answer", (WEB, 53))


def test_written_endpoints_lead_out_of_the_cluster(lab: Lab) -> None:
    server = lab.listen("ext-vendor", VENDOR2, 8081)
    assert lab.peer_seen("a.shop", OUT, 80, server) == A


def refused_at_once(lab: Lab, place: str, address: str, port: int) -> None:
    """The first SYN is answered; the kernel would send a lost one again."""
    client = lab.socket(place, socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    with pytest.raises(ConnectionRefusedError):
        client.connect((address, port))
    info = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    assert struct.unpack_from("=I", info, _TOTAL_RETRANS) == (0,)


@pytest.mark.parametrize("address", [EMPTY, pytest.param(WEB, id="a port that the service does not have")])
def test_where_a_service_has_nothing_it_refuses_at_once(lab: Lab, address: str) -> None:
    port = 80 if address == EMPTY else 81
    refused_at_once(lab, "a.shop", address, port)
    refused_at_once(lab, "node", address, port)
    refused_at_once(lab, "ext-vendor", address, port)


def test_many_refusals_are_each_told(lab: Lab) -> None:
    """The kernel's usual limit is a few ICMP errors a second for one target."""
    client = lab.udp("a.shop")
    client.connect((EMPTY, 53))
    for _ in range(50):
        client.send(b"?")
        with pytest.raises(ConnectionRefusedError):
            client.recv(1)


def test_a_pod_that_meets_itself_behind_its_service_sees_the_node(lab: Lab) -> None:
    server = lab.listen("a.shop", "0.0.0.0", 8080)
    assert lab.peer_seen("a.shop", BARE, 80, server) == "169.254.1.1"
    assert lab.peer_seen("b.shop", BARE, 80, server) == B
    server.close()


def test_the_node_itself_reaches_services_and_pods(lab: Lab) -> None:
    server = lab.listen("a.shop", "0.0.0.0", 8080)
    assert lab.peer_seen("node", BARE, 80, server) == "169.254.1.1"
    assert lab.peer_seen("node", A, 8080, server) == "169.254.1.1"
    server.close()


@pytest.mark.parametrize("forged", ["198.51.100.7", D, VENDOR, WEB])
def test_a_forged_source_arrives(lab: Lab, forged: str) -> None:
    target = lab.udp("b.shop", "0.0.0.0", 7100)
    raw = lab.socket("a.shop", socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
    raw.sendto(udp_packet(forged, B, 4444, 7100, b"who"), (B, 0))
    assert target.recvfrom(100) == (b"who", (forged, 4444))
    target.close()


def test_the_answer_to_a_forged_syn_goes_to_the_one_it_names(lab: Lab) -> None:
    lab.listen("b.shop", "0.0.0.0", 7101)
    named = lab.socket("d.shop", socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_TCP)
    raw = lab.socket("a.shop", socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
    raw.sendto(tcp_syn(D, B, 4445, 7101), (B, 0))
    answer = named.recv(100)
    sport, dport, flags = *struct.unpack("!HH", answer[20:24]), answer[33]
    assert (socket.inet_ntoa(answer[12:16]), sport, dport, flags) == (B, 7101, 4445, 0x12)


def test_nothing_but_the_flow_is_on_a_link(lab: Lab) -> None:
    """No ARP, no IPv6 noise: neighbours are fixed."""
    place = lab.plan.place("d.shop")
    tap = lab.socket("node", socket.AF_PACKET, socket.SOCK_RAW, 0)
    lab.inside("node", lambda: tap.bind((place.interface, 0x0003)))
    target = lab.udp("d.shop", D, 7102)
    lab.udp("a.shop").sendto(b"one", (D, 7102))
    assert target.recv(100) == b"one"
    target.sendto(b"two", (B, 7103))
    frames = [tap.recv(2048), tap.recv(2048)]
    assert [f[12:14] for f in frames] == [b"\x08\x00", b"\x08\x00"]
    assert [f[-3:] for f in frames] == [b"one", b"two"]


def test_a_pod_may_bind_low_ports_and_ping_without_privileges(lab: Lab) -> None:
    def settings() -> tuple[list[str], list[str]]:
        here = Path("/proc/sys/net/ipv4")
        return (here / "ip_unprivileged_port_start").read_text().split(), (
            here / "ping_group_range"
        ).read_text().split()

    for place in ("a.shop", "ext-vendor"):
        assert lab.inside(place, settings) == (["0"], ["0", "2147483647"])


# --- links ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["nft", "legacy"])
def backend(request: pytest.FixtureRequest) -> Backend:
    chosen: Backend = request.param
    if chosen == "nft" and not netfilter.kernel_has_nf_tables():
        pytest.skip("no nf_tables in this kernel")
    if chosen == "legacy" and not os.path.exists("/proc/net/ip_tables_names"):
        pytest.skip("no legacy iptables in this kernel")
    return chosen


@pytest.mark.parametrize("between", ["[a.shop, b.shop]", "[a.shop, '*']"])
def test_a_cut_link_loses_all_and_others_lose_nothing(between: str, backend: Backend) -> None:
    with up(*SHOP, link("l", f"{{between: {between}, cut: true}}"), backend=backend) as lab:
        target = lab.udp("b.shop", B, 7200)
        tap = lab.sniff("node", lab.plan.place("a.shop").interface)
        lab.udp("a.shop").sendto(b"cut", (B, 7200))
        assert tap.recv(2048).endswith(b"cut")  # it has left the pod
        lab.udp("c.shop").sendto(b"fence", (B, 7200))
        assert target.recvfrom(100)[0] == b"fence"


def test_a_lossy_link_loses_its_share(backend: Backend) -> None:
    with up(*SHOP, link("l", "{between: [a.shop, vendor], loss: 50%}"), backend=backend) as lab:
        target = lab.udp("ext-vendor", VENDOR, 7200)
        sender = lab.udp("a.shop")
        for _ in range(400):
            sender.sendto(b"perhaps", (VENDOR, 7200))
        lab.udp("b.shop").sendto(b"fence", (VENDOR, 7200))
        arrived = 0
        while target.recv(100) != b"fence":
            arrived += 1
        assert 120 < arrived < 280  # eight standard deviations


def test_the_mtu_of_a_place_is_its_interface_s() -> None:
    with up(*SHOP, link("l", "{between: [a.shop, '*'], mtu: 1300}")) as lab:
        client = lab.udp("a.shop")
        client.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_DO)
        client.connect((B, 7300))
        assert client.getsockopt(socket.IPPROTO_IP, _IP_MTU) == 1300
        with pytest.raises(OSError, match="Message too long"):
            client.send(b"x" * 1400)


def test_the_mtu_of_a_path_is_told_by_the_router() -> None:
    """RFC 1191: the packet that does not fit comes back as an ICMP error that names the MTU; other paths keep theirs."""
    with up(*SHOP, link("l", "{between: [a.shop, b.shop], mtu: 1200}")) as lab:
        target = lab.udp("b.shop", B, 7300)
        client = lab.udp("a.shop")
        client.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_DO)
        client.setsockopt(socket.IPPROTO_IP, _IP_RECVERR, 1)
        client.connect((B, 7300))
        client.send(b"x" * 1400)  # the pod knows of 1500
        poll = select.poll()
        poll.register(client, 0)
        assert poll.poll(DEADLINE * 1000), "no ICMP error came back"
        assert client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.EMSGSIZE
        assert client.getsockopt(socket.IPPROTO_IP, _IP_MTU) == 1200
        client.send(b"y" * 1100)
        assert target.recv(2000) == b"y" * 1100
        lab.udp("c.shop").sendto(b"z" * 1400, (B, 7300))
        assert target.recv(2000) == b"z" * 1400


@pytest.mark.parametrize("between", ["[a.shop, b.shop]", "[a.shop, '*']", "[a.shop, vendor]"])
def test_a_slow_link_is_slow_and_others_are_not(between: str, backend: Backend) -> None:
    place, address = ("ext-vendor", VENDOR) if "vendor" in between else ("b.shop", B)
    with up(*SHOP, link("l", f"{{between: {between}, rate: 8mbit}}"), backend=backend) as lab:
        size = 400_000  # bytes: 0.4 s at 8 Mbit/s
        assert _seconds(lab, "a.shop", place, address, size) > 0.25
        assert min(_seconds(lab, "c.shop", place, address, size) for _ in range(3)) < 0.2


def _seconds(lab: Lab, client: str, place: str, address: str, size: int) -> float:
    server = lab.listen(place, address, 0)
    sender = lab.connect(client, address, server.getsockname()[1])
    receiver, _ = server.accept()
    lab.sockets.append(receiver)
    receiver.settimeout(DEADLINE)
    sender.setblocking(False)
    begin = time.monotonic()
    data = memoryview(b"x" * size)
    received = 0
    while received < size:
        readable, writable, _ = select.select([receiver], [sender] if data else [], [], DEADLINE)
        assert readable or writable, f"stalled after {received} bytes"
        if writable:
            data = data[sender.send(data) :]
        if readable:
            received += len(receiver.recv(1 << 16))
    return time.monotonic() - begin


_TOTAL_RETRANS = 100  # offset of tcpi_total_retrans in struct tcp_info, include/uapi/linux/tcp.h
_IP_MTU_DISCOVER, _IP_PMTUDISC_DO, _IP_RECVERR, _IP_MTU = 10, 2, 11, 14  # include/uapi/linux/in.h
_IPV6_RECVERR = 25  # include/uapi/linux/in6.h


# --- IPv6 -------------------------------------------------------------------------------------------------------

A6, B6, WEB6, VENDOR6 = "fd00:1::a", "fd00:1::b", "fd00:2::1", "fd00:3::8"


@pytest.fixture(scope="module")
def dual(backend: Backend) -> Iterator[Lab]:
    objects = (
        pod("a", A, "{app: client}", more=f", podIPs: [{{ip: {A}}}, {{ip: '{A6}'}}]"),
        pod("b", B6, "{app: web}"),
        service("web", WEB6, "[{port: 80, targetPort: main}]", "{app: web}"),
        service("self", "fd00:2::2", "[{port: 80, targetPort: main}]", "{app: client}"),
        service("empty", "fd00:2::3", "[{port: 80}]", "{app: nobody}"),
        external("vendor", VENDOR, VENDOR6),
    )
    with up(*objects, backend=backend) as made:
        yield made


def test_ipv6_pods_services_and_external_hosts_meet(dual: Lab) -> None:
    server = dual.listen("b.shop", "::", 8080)
    assert dual.peer_seen("a.shop", B6, 8080, server) == A6
    assert dual.peer_seen("a.shop", WEB6, 80, server) == A6
    assert dual.peer_seen("ext-vendor", B6, 8080, server) == VENDOR6
    outside = dual.listen("ext-vendor", VENDOR6, 7400)
    assert dual.peer_seen("a.shop", VENDOR6, 7400, outside) == A6


def test_ipv6_hairpin_refusal_and_unreachable_are_as_in_ipv4(dual: Lab) -> None:
    server = dual.listen("a.shop", "::", 8080)
    assert dual.peer_seen("a.shop", "fd00:2::2", 80, server) == dual.plan.node.own6
    assert dual.peer_seen("b.shop", "fd00:2::2", 80, server) == B6
    refused_at_once(dual, "a.shop", "fd00:2::3", 80)
    with pytest.raises(OSError, match="unreachable"):
        dual.connect("a.shop", "fd00:99::1", 80)


@pytest.mark.parametrize("place", ["a.shop", "ext-vendor"])
def test_of_many_ipv6_flows_each_is_told(dual: Lab, place: str) -> None:
    """Of a connection only its second SYN, a second later, finds a socket that listens to such an answer."""
    assert each_connection(dual, place, "fd00:99::1", 80) == {"ENETUNREACH"}
    assert each_datagram(dual, place, "fd00:99::1", 9) == {"ENETUNREACH"}
    assert each_datagram(dual, place, B6, 7098) == {"ECONNREFUSED"}

"""Packets: what the rules do to real connections, on every back end, in both families."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from init_pod import (
    APP,
    BACKENDS,
    DEFAULT,
    LOOPBACK,
    PEER,
    PEER_RESOLVER,
    POD,
    PROXY,
    Net,
    Place,
    answer_udp,
    ask,
    ask_udp,
    backends,
    listen,
    net,
    relay,
)

pytestmark = pytest.mark.root

DIRECT_PORTS = (15008, 15020, 15021, 15090)
PASSTHROUGH = {4: "127.0.0.6", 6: "::6"}

versions = pytest.mark.parametrize("version", [4, 6])


@pytest.fixture(scope="module", params=BACKENDS)
def redirect(request: pytest.FixtureRequest) -> Iterator[Net]:
    """The default sidecar with DNS capture, and its processes."""
    with net() as made:
        servers = ",".join(PEER_RESOLVER.values())
        run = made.pod.init(
            *DEFAULT, "--ipv6=on", "--redirect-dns", f"--dns-servers={servers}", f"--backend={request.param}"
        )
        assert run.code == 0, run.err
        made.pod.serve(
            listen(15001), listen(15006), answer_udp(15053, "agent", *LOOPBACK.values()), listen(15053), uid=PROXY
        )
        made.pod.serve(listen(8080), *map(listen, DIRECT_PORTS), uid=APP)
        made.peer.serve(
            listen(80),
            listen(25),
            answer_udp(53, "upstream", *PEER.values(), *PEER_RESOLVER.values()),
            answer_udp(5000, "peer", *PEER.values()),
            listen(53),
            uid=0,
        )
        yield made


@versions
def test_peer_to_app_is_captured_inbound(redirect: Net, version: int) -> None:
    got = redirect.peer.call(ask(POD[version], 8080))
    assert (got["listener"], got["original"]) == (15006, [POD[version], 8080])


@versions
@pytest.mark.parametrize("port", DIRECT_PORTS)
def test_peer_to_the_sidecar_own_ports_is_direct(redirect: Net, version: int, port: int) -> None:
    assert redirect.peer.call(ask(POD[version], port))["listener"] == port


@versions
def test_app_to_remote_is_captured_outbound(redirect: Net, version: int) -> None:
    got = redirect.pod.call(ask(PEER[version], 80), uid=APP)
    assert (got["listener"], got["original"]) == (15001, [PEER[version], 80])


@versions
def test_root_is_captured_like_any_app(redirect: Net, version: int) -> None:
    assert redirect.pod.call(ask(PEER[version], 80), uid=0)["listener"] == 15001


@versions
def test_app_to_its_own_address_is_direct(redirect: Net, version: int) -> None:
    got = redirect.pod.call(ask(POD[version], 8080), uid=APP)
    assert (got["listener"], got["peer"][0]) == (8080, POD[version])


@versions
def test_app_over_loopback_is_direct(redirect: Net, version: int) -> None:
    assert redirect.pod.call(ask(LOOPBACK[version], 8080), uid=APP)["listener"] == 8080


@versions
def test_envoy_to_its_own_pod_is_captured_inbound(redirect: Net, version: int) -> None:
    got = redirect.pod.call(ask(POD[version], 8080), uid=PROXY)
    assert (got["listener"], got["original"]) == (15006, [POD[version], 8080])


@versions
def test_a_proxy_group_under_another_user_is_let_out_only_over_the_wire(redirect: Net, version: int) -> None:
    # Rule B of the user comes first: over lo every other user passes, whatever its group.
    assert redirect.pod.call(ask(POD[version], 8080), uid=APP, gid=PROXY)["listener"] == 8080
    assert redirect.pod.call(ask(PEER[version], 80), uid=APP, gid=PROXY)["listener"] == 80


@versions
def test_envoy_to_the_tunnel_port_of_its_own_pod_is_direct(redirect: Net, version: int) -> None:
    assert redirect.pod.call(ask(POD[version], 15008), uid=PROXY)["listener"] == 15008


@versions
def test_envoy_inbound_to_app_is_direct(redirect: Net, version: int) -> None:
    got = redirect.pod.call(ask(POD[version], 8080, PASSTHROUGH[version]), uid=PROXY)
    assert (got["listener"], got["peer"][0]) == (8080, PASSTHROUGH[version])


@versions
def test_envoy_to_remote_is_direct(redirect: Net, version: int) -> None:
    got = redirect.pod.call(ask(PEER[version], 80), uid=PROXY)
    assert (got["listener"], got["peer"][0]) == (80, POD[version])


@versions
def test_udp_other_than_dns_is_direct(redirect: Net, version: int) -> None:
    assert redirect.pod.call(ask_udp(PEER[version], 5000), uid=APP).startswith(f"peer {POD[version]} ")


@versions
def test_dns_of_the_app_goes_to_the_agent(redirect: Net, version: int) -> None:
    assert redirect.pod.call(ask_udp(PEER_RESOLVER[version], 53), uid=APP).startswith("agent ")
    got = redirect.pod.call(ask(PEER_RESOLVER[version], 53), uid=APP)
    assert (got["listener"], got["original"]) == (15053, [PEER_RESOLVER[version], 53])


@versions
def test_dns_of_the_agent_goes_upstream(redirect: Net, version: int) -> None:
    assert redirect.pod.call(ask_udp(PEER_RESOLVER[version], 53), uid=PROXY).startswith("upstream ")
    assert redirect.pod.call(ask(PEER_RESOLVER[version], 53), uid=PROXY)["listener"] == 53


@versions
def test_dns_to_a_server_that_is_not_listed_is_no_dns_capture(redirect: Net, version: int) -> None:
    assert redirect.pod.call(ask_udp(PEER[version], 53), uid=APP).startswith("upstream ")
    assert redirect.pod.call(ask(PEER[version], 53), uid=APP)["listener"] == 15001


@versions
def test_two_zones_keep_app_and_agent_apart_on_one_source_port(redirect: Net, version: int) -> None:
    """Without zones the agent's query would match the app's entry and be answered by the agent itself."""
    for _ in range(2):
        assert redirect.pod.call(ask_udp(PEER_RESOLVER[version], 53, 20000), uid=APP).startswith("agent ")
        assert redirect.pod.call(ask_udp(PEER_RESOLVER[version], 53, 20000), uid=PROXY).startswith("upstream ")


# --- lists ----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=BACKENDS)
def listed(request: pytest.FixtureRequest) -> Iterator[Net]:
    """Only what is listed is captured."""
    with net() as made:
        run = made.pod.init(
            "--ipv6=on", "-u", "1337", "-b", "8080", "-q", "7000", "-o", "25", "-c", "lo", f"--backend={request.param}",
            "-i", f"{PEER_RESOLVER[4]}/32,{PEER_RESOLVER[6]}/128", "-x", "10.9.0.99/32",
        )  # fmt: skip
        assert run.code == 0, run.err
        made.pod.serve(listen(15001), listen(15006), uid=PROXY)
        made.pod.serve(listen(8080), listen(8081), uid=APP)
        made.peer.serve(listen(80), listen(25), listen(7000), uid=0)
        yield made


@versions
def test_only_listed_inbound_ports_are_captured(listed: Net, version: int) -> None:
    assert listed.peer.call(ask(POD[version], 8080))["listener"] == 15006
    assert listed.peer.call(ask(POD[version], 8081))["listener"] == 8081


@versions
def test_only_listed_ranges_and_ports_are_captured_outbound(listed: Net, version: int) -> None:
    assert listed.pod.call(ask(PEER_RESOLVER[version], 80), uid=APP)["listener"] == 15001
    assert listed.pod.call(ask(PEER[version], 80), uid=APP)["listener"] == 80
    assert listed.pod.call(ask(PEER[version], 7000), uid=APP)["listener"] == 15001


@versions
def test_an_excluded_outbound_port_is_direct_even_in_a_listed_range(listed: Net, version: int) -> None:
    assert listed.pod.call(ask(PEER_RESOLVER[version], 25), uid=APP)["listener"] == 25


@versions
def test_an_excluded_interface_is_ignored(listed: Net, version: int) -> None:
    assert listed.pod.call(ask(POD[version], 8080), uid=PROXY)["listener"] == 8080


@backends
def test_owner_groups(backend: str, pods: Net) -> None:
    env = {"ISTIO_OUTBOUND_OWNER_GROUPS": "2000,2001"}
    assert pods.pod.init("--ipv6=on", "-u", "1337", "-i", "*", f"--backend={backend}", env=env).code == 0
    pods.pod.serve(listen(15001), uid=PROXY)
    pods.peer.serve(listen(80), uid=0)
    for version in (4, 6):
        captured = {
            gid: pods.pod.call(ask(PEER[version], 80), uid=APP, gid=gid)["listener"] for gid in (2000, 2001, 2002)
        }
        assert captured == {2000: 15001, 2001: 15001, 2002: 80}


@backends
def test_a_virtual_interface_is_outbound(backend: str, pods: Net) -> None:
    """Traffic that comes in by a virtual interface (a guest of the pod) goes to the outbound port."""
    run = pods.pod.init(*DEFAULT, "--ipv6=on", "-k", "eth0", f"--backend={backend}")
    assert run.code == 0, run.err
    pods.pod.serve(listen(15001), listen(15006), uid=PROXY)
    for version in (4, 6):
        got = pods.peer.call(ask(POD[version], 8080))
        assert (got["listener"], got["original"]) == (15001, [POD[version], 8080])


# --- TPROXY ---------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=BACKENDS)
def tproxy(request: pytest.FixtureRequest) -> Iterator[Net]:
    """TPROXY for all inbound ports; the relay stands for Envoy with its original source filter."""
    with net() as made:
        _start_tproxy(made, request.param, "*")
        yield made


def _start_tproxy(made: Net, backend: str, ports: str) -> None:
    run = made.pod.init(
        "--ipv6=on", "-u", "1337", "-m", "TPROXY", "-i", "*", "-b", ports, "-d", "15090,15021,15020", f"--backend={backend}"
    )  # fmt: skip
    assert run.code == 0, run.err
    # As Istio's injection template has it: user 0 (rule B lets it reach the app over lo), group 1337, NET_ADMIN only.
    made.pod.serve(relay(15006, 1337), listen(15001), uid=0, gid=PROXY, net_admin=True)
    made.pod.serve(listen(8080), listen(8081), listen(15020), uid=APP)
    made.peer.serve(listen(80), uid=0)


@versions
def test_the_app_sees_the_real_address_of_the_client(tproxy: Net, version: int) -> None:
    got = tproxy.peer.call(ask(POD[version], 8080))
    assert got["via"] == 15006
    assert got["local"] == [POD[version], 8080], "the destination is kept"
    assert got["peer"] == got["client"], "the source is kept"
    assert got["app"]["listener"] == 8080
    assert got["app"]["peer"][0] == got["client"][0], "the app sees the client's address"
    assert got["client"][0] in (PEER[version], PEER_RESOLVER[version])


@versions
def test_tproxy_excluded_port_is_direct(tproxy: Net, version: int) -> None:
    assert tproxy.peer.call(ask(POD[version], 15020))["listener"] == 15020


@versions
def test_tproxy_app_to_remote_is_captured_outbound(tproxy: Net, version: int) -> None:
    got = tproxy.pod.call(ask(PEER[version], 80), uid=APP)
    assert (got["listener"], got["original"]) == (15001, [PEER[version], 80])


@versions
def test_tproxy_app_to_its_own_address_is_direct(tproxy: Net, version: int) -> None:
    assert tproxy.pod.call(ask(POD[version], 8080), uid=APP)["listener"] == 8080


@versions
def test_tproxy_envoy_inbound_to_app_is_direct(tproxy: Net, version: int) -> None:
    assert tproxy.pod.call(ask(POD[version], 8080, PASSTHROUGH[version]), uid=0, gid=PROXY)["listener"] == 8080


@versions
def test_tproxy_envoy_outbound_to_its_own_pod_is_captured_inbound(tproxy: Net, version: int) -> None:
    got = tproxy.pod.call(ask(POD[version], 8080), uid=0, gid=PROXY)
    assert got["via"] == 15006
    assert got["app"]["listener"] == 8080


@versions
def test_tproxy_envoy_to_remote_is_direct(tproxy: Net, version: int) -> None:
    assert tproxy.pod.call(ask(PEER[version], 80), uid=0, gid=PROXY)["listener"] == 80


@backends
def test_tproxy_for_listed_ports_only(backend: str, pods: Net) -> None:
    _start_tproxy(pods, backend, "8080")
    for version in (4, 6):
        got = pods.peer.call(ask(POD[version], 8080))
        assert (got["via"], got["app"]["peer"][0]) == (15006, got["client"][0])
        assert pods.peer.call(ask(POD[version], 8081))["listener"] == 8081


@backends
def test_a_second_tproxy_run_is_content_and_cleanup_takes_all(backend: str, pods: Net) -> None:
    args = ["--ipv6=on", "-u", "1337", "-m", "TPROXY", "-b", "*", f"--backend={backend}"]
    before = routing(pods.pod)
    assert pods.pod.init(*args).code == 0
    with_rules = routing(pods.pod)
    assert "fwmark 0x539 lookup 133" in with_rules
    assert "local default dev lo" in with_rules
    assert "::6/128" in with_rules
    assert pods.pod.init(*args).code == 0
    assert routing(pods.pod) == with_rules
    assert pods.pod.init(*args, "--cleanup-only").code == 0
    assert routing(pods.pod) == before
    assert pods.pod.init(*args, "--cleanup-only").code == 0, "twice is fine"


def routing(pod: Place) -> str:
    """Policy rules, the table of TPROXY and the addresses of lo."""
    argvs = [[*family, *rest] for family in (["-4"], ["-6"]) for rest in (["rule"], ["route", "show", "table", "133"])]
    return "".join(pod.tool("ip", *argv, check=False) for argv in [*argvs, ["addr", "show", "lo"]])

"""Docker's resolver: 127.0.0.11 is answered inside the pod's namespace by a process of Docker on a random port."""

from __future__ import annotations

import pytest
from init_pod import APP, DEFAULT, PROXY, Net, answer_udp, ask_udp, backends, listen, tool_of

pytestmark = pytest.mark.root

RESOLVER, PORT = "127.0.0.11", 38211
DNS = ["--redirect-dns", f"--dns-servers={RESOLVER}"]


def dockerd(made: Net, backend: str) -> None:
    """What dockerd sets up in a container's namespace (moby/moby: libnetwork/resolver_unix.go)."""
    rules = (
        "*nat\n:DOCKER_OUTPUT - [0:0]\n:DOCKER_POSTROUTING - [0:0]\n"
        f"-A OUTPUT -d {RESOLVER}/32 -j DOCKER_OUTPUT\n-A POSTROUTING -d {RESOLVER}/32 -j DOCKER_POSTROUTING\n"
        f"-A DOCKER_OUTPUT -d {RESOLVER}/32 -p tcp -m tcp --dport 53 -j DNAT --to-destination {RESOLVER}:{PORT}\n"
        f"-A DOCKER_OUTPUT -d {RESOLVER}/32 -p udp -m udp --dport 53 -j DNAT --to-destination {RESOLVER}:{PORT}\n"
        f"-A DOCKER_POSTROUTING -s {RESOLVER}/32 -p tcp -m tcp --sport {PORT} -j SNAT --to-source :53\n"
        f"-A DOCKER_POSTROUTING -s {RESOLVER}/32 -p udp -m udp --sport {PORT} -j SNAT --to-source :53\nCOMMIT\n"
    )
    made.pod.tool(f"{tool_of(backend)}-restore", "--noflush", text=rules)
    made.pod.serve(answer_udp(PORT, "docker", RESOLVER), uid=0)
    made.pod.serve(answer_udp(15053, "agent", "127.0.0.1"), listen(15001), uid=PROXY)


@backends
def test_app_is_captured_and_the_agent_reaches_docker(backend: str, pods: Net) -> None:
    dockerd(pods, backend)
    assert pods.pod.call(ask_udp(RESOLVER, 53), uid=APP).startswith("docker "), "the simulation works without our rules"
    run = pods.pod.init(*DEFAULT, "--ipv6=off", *DNS, f"--backend={backend}")
    assert run.code == 0, run.err
    assert "deviation from the reference" in run.err
    for _ in range(2):
        # One source port for both, as a busy pod will have it: the zones keep the flows apart.
        for port in (0, 21000):
            assert pods.pod.call(ask_udp(RESOLVER, 53, port), uid=APP).startswith("agent ")
            assert pods.pod.call(ask_udp(RESOLVER, 53, port), uid=PROXY).startswith("docker ")


@backends
def test_the_deviation_is_what_keeps_both_working(backend: str, pods: Net) -> None:
    """With the reference's rules behind Docker's jump the app is not captured, and the agent gets no answer."""
    dockerd(pods, backend)
    # The reference's rules: another listed server, so that no deviation is made, and ours added by hand.
    document = pods.pod.init(*DEFAULT, "--ipv6=off", *DNS, f"--backend={backend}", "--dry-run").out
    assert f"-s {RESOLVER}/32 -j CT --zone 1" in document or f"ip saddr {RESOLVER}/32 counter ct zone set 1" in document
    zone = (f"-p udp -s {RESOLVER}/32 -j CT", f"meta l4proto udp ip saddr {RESOLVER}/32 counter ct")
    plain = "".join(f"{line}\n" for line in document.splitlines() if not any(words in line for words in zone))
    assert plain.count("\n") == document.count("\n") - 1
    plain = plain.replace("-I OUTPUT 1 -j ISTIO_OUTPUT", "-A OUTPUT -j ISTIO_OUTPUT").replace(
        "priority -101", "priority -100"
    )
    tool = ["nft", "-f", "-"] if backend == "native-nft" else [f"{tool_of(backend)}-restore", "--noflush"]
    pods.pod.tool(*tool, text=plain)
    if backend != "native-nft":
        # Of two nft hooks with one priority either may be first.
        assert pods.pod.call(ask_udp(RESOLVER, 53, wait=0.3), uid=APP).startswith("error"), (
            "neither captured nor answered"
        )
    assert pods.pod.call(ask_udp(RESOLVER, 53, wait=0.3), uid=PROXY).startswith("error"), "no answer"


@backends
def test_second_run_and_cleanup_with_docker(backend: str, pods: Net) -> None:
    dockerd(pods, backend)
    before = pods.pod.save()
    args = [*DEFAULT, "--ipv6=off", *DNS, f"--backend={backend}", "--json"]
    assert pods.pod.init(*args).document["docker_resolver"] is True
    assert pods.pod.init(*args).document["action"] == "unchanged"
    assert pods.pod.init(*args, "--force-apply").code == 0
    assert pods.pod.call(ask_udp(RESOLVER, 53), uid=APP).startswith("agent ")
    assert pods.pod.init(*args, "--cleanup-only").code == 0
    after = pods.pod.save()
    for tool, text in before.items():
        rules = [line for line in text.splitlines() if line.startswith("-A")]
        assert [line for line in after[tool].splitlines() if line.startswith("-A")] == rules


@pytest.mark.parametrize("backend", ["legacy", "nft"])
def test_docker_first_is_drift_and_is_mended(backend: str, pods: Net) -> None:
    dockerd(pods, backend)
    args = [*DEFAULT, "--ipv6=off", *DNS, f"--backend={backend}", "--json"]
    assert pods.pod.init(*args).code == 0
    tool = tool_of(backend)
    pods.pod.tool(tool, "-t", "nat", "-D", "OUTPUT", "-j", "ISTIO_OUTPUT")
    pods.pod.tool(tool, "-t", "nat", "-A", "OUTPUT", "-j", "ISTIO_OUTPUT")
    assert pods.pod.init(*args).code == 1
    assert pods.pod.init(*args, "--reconcile").code == 0
    assert pods.pod.call(ask_udp(RESOLVER, 53), uid=APP).startswith("agent ")


@backends
def test_only_then(backend: str, pods: Net) -> None:
    """No deviation without Docker's jump, or with another server."""
    args = [*DEFAULT, "--ipv6=off", f"--backend={backend}", "--json"]
    assert pods.pod.init(*args, *DNS).document["docker_resolver"] is False
    assert pods.pod.init(*args, "--cleanup-only").code == 0
    dockerd(pods, backend)
    assert pods.pod.init(*args, "--redirect-dns", "--dns-servers=10.9.0.53").document["docker_resolver"] is False
    if backend != "native-nft":
        rules = pods.pod.tool(tool_of(backend), "-t", "nat", "-S", "OUTPUT").splitlines()
        assert rules[1:] == [f"-A OUTPUT -d {RESOLVER}/32 -j DOCKER_OUTPUT", "-A OUTPUT -j ISTIO_OUTPUT"]
    assert pods.pod.init(*args, "--redirect-dns", "--dns-servers=10.9.0.53").document["action"] == "unchanged"

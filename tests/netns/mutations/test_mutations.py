"""What is broken on purpose must be seen: exactly the rows that it concerns fail, and their verdicts say why."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from mutation_lab import Mutant, must_fail, mutant, mutated_source

from lab.fabric import paths
from lab.manifests.model import TrafficTest
from lab.runtime import workload
from lab.runtime.identity import APP, PROXY, Identity

pytestmark = pytest.mark.root

FRONTEND, CATALOG = "frontend.frontend", "catalog.catalog"
POLICY = "-P OUTPUT ACCEPT"


@pytest.fixture(scope="module")
def quickstart() -> Iterator[Mutant]:
    with mutant("quickstart.yaml", f"slt-{os.getpid()}-mutant") as lab:
        yield lab


def part(expect: Mapping[str, Any], *keys: str) -> Any:
    """An expectation, None where there is none."""
    for key in keys:
        expect = expect.get(key) or {}  # type: ignore[assignment]
    return expect or None


def captured_by_frontend(test: TrafficTest, expect: Mapping[str, Any]) -> bool:
    return test.flow_from.pod == FRONTEND and part(expect, "outbound", "redirected_to") == 15001


def test_unmutated_everything_holds(quickstart: Mutant) -> None:
    must_fail(quickstart.verify(), set())


def test_the_redirect_is_deleted(quickstart: Mutant) -> None:
    with quickstart.rules(FRONTEND) as iptables:
        iptables("-t", "nat", "-F", "ISTIO_REDIRECT")
        verdicts = quickstart.verify()
    concerned = quickstart.those(captured_by_frontend)
    must_fail(verdicts, concerned)
    for name in concerned:
        v = verdicts[name]
        assert "outbound.captured: expected true, got false" in v.differences
        assert v.outbound is not None
        assert v.outbound.rule is not None
        assert v.outbound.rule.text == POLICY


def test_the_redirect_of_udp_53_is_deleted(quickstart: Mutant) -> None:
    with quickstart.rules(FRONTEND) as iptables:
        server = f"{quickstart.mesh.fabric.dns}/32"
        rule = ["-p", "udp", "--dport", "53", "-d", server, "-j", "REDIRECT", "--to-ports", "15053"]
        iptables("-t", "nat", "-D", "ISTIO_OUTPUT_DNS", *rule)
        verdicts = quickstart.verify()
    concerned = quickstart.those(
        lambda t, e: (
            t.flow_from.pod == FRONTEND and part(e, "dns", "redirected_to") == 15053 and t.to.protocol != "dns-tcp"
        )
    )
    must_fail(verdicts, concerned)
    for name in concerned:
        v = verdicts[name]
        assert "dns.captured: expected true, got false" in v.differences
        assert v.dns is not None
        assert v.dns.rule is not None
        assert (v.dns.rule.text, v.dns.answered_by) == (POLICY, "cluster-dns")


def test_the_zone_rules_are_deleted(quickstart: Mutant) -> None:
    with quickstart.rules(FRONTEND) as iptables:
        for chain in ("ISTIO_OUTPUT_DNS", "ISTIO_INBOUND"):
            iptables("-t", "raw", "-F", chain)
        verdicts = quickstart.verify()
    concerned = quickstart.those(
        lambda t, e: (
            t.flow_from.pod == FRONTEND
            and (part(e, "dns", "zone") is not None or part(e, "dns", "forwarded", "zone") is not None)
        )
    )
    must_fail(verdicts, concerned)
    for name in concerned:
        assert any(".zone: expected" in d and d.endswith("got 0") for d in verdicts[name].differences)


def test_a_foreign_return_stands_first(quickstart: Mutant) -> None:
    with quickstart.rules(FRONTEND) as iptables:
        comment = ["-m", "comment", "--comment", "some other tool"]
        iptables("-t", "nat", "-I", "OUTPUT", "1", "-p", "tcp", "--dport", "80", *comment, "-j", "RETURN")
        verdicts = quickstart.verify()
    concerned = quickstart.those(
        lambda t, e: t.flow_from.pod == FRONTEND and t.to.port == 80 and part(e, "outbound", "rule") is not None
    )
    must_fail(verdicts, concerned)
    for name in concerned:
        v = verdicts[name]
        assert v.outbound is not None
        assert v.outbound.rule is not None
        assert (v.outbound.rule.chain, v.outbound.rule.position) == ("OUTPUT", 1)
        assert v.outbound.rule.text == "-A OUTPUT -p tcp -m tcp --dport 80 -j RETURN"


def test_envoy_runs_as_1338(quickstart: Mutant) -> None:
    pod = quickstart.mesh.pod(FRONTEND)
    assert pod is not None
    spec = workload.agent(quickstart.mesh, pod)
    assert spec is not None
    envoy = Path(f"/proc/{quickstart.pid(FRONTEND, 'envoy')}/cmdline").read_text().rstrip("\0").split("\0")
    with quickstart.instead_of(FRONTEND, "agent", "envoy") as starter:
        for path in (directory := paths.pod_dir(quickstart.lab.name, FRONTEND), *directory.rglob("*")):
            if not path.is_symlink():
                path.chmod(path.stat().st_mode | (0o777 if path.is_dir() else 0o666))
        anyone = ["sh", "-c", 'umask 0; exec "$@"', "sh"]
        agent = [*anyone, sys.executable, "-P", "-m", "agent", *spec.args[0]]
        starter.start(agent, PROXY, {**spec.env, "DISABLE_ENVOY": "true"}, spec.cwd)
        starter.start([*anyone, *envoy], Identity(1338, 1338), spec.env, spec.cwd)
        starter.wait_ready()
        with quickstart.not_in_circles(15001, 1338, FRONTEND):
            verdicts = quickstart.verify()
    concerned = quickstart.those(captured_by_frontend)
    must_fail(verdicts, concerned)
    for name in concerned:
        v = verdicts[name]
        assert v.outbound is not None
        assert (v.outbound.captured, v.outbound.redirected_to) == (True, 15001)
    # A connection that goes in circles may have no line in the log: it does not end. Those that have one say where they went.
    again = [v.envoy.upstream for v in verdicts.values() if v.envoy and v.envoy.upstream and v.envoy.upstream.captured]
    assert again, [(n, verdicts[n].envoy, verdicts[n].outcome, verdicts[n].seconds) for n in concerned]
    assert {u.redirected_to for u in again} == {15001}
    assert {u.rule.text for u in again if u.rule} == {"-A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001"}
    # Over lo rule B takes an Envoy with the wrong uid for the app: nothing sends it to the inbound listener.
    own = verdicts["own-service-goes-through-both-sides"]
    assert own.inbound is None or own.inbound.captured is False


def test_the_agents_dns_is_stopped(quickstart: Mutant) -> None:
    pod = quickstart.mesh.pod(FRONTEND)
    assert pod is not None
    spec = workload.agent(quickstart.mesh, pod)
    assert spec is not None
    with quickstart.instead_of(FRONTEND, "agent", "envoy") as starter:
        agent = [sys.executable, "-P", "-m", "agent", *spec.args[0]]
        starter.start(agent, PROXY, {**spec.env, "ISTIO_META_DNS_CAPTURE": "false"}, spec.cwd)
        starter.wait_ready()
        concerned = quickstart.those(
            lambda t, e: t.flow_from.pod == FRONTEND and t.flow_from.uid != 1337 and not t.to.host[0].isdigit()
        )
        verdicts = quickstart.verify(hopeless=concerned)
    must_fail(verdicts, concerned)
    for name in concerned:
        v = verdicts[name]
        assert v.dns is not None
        assert (v.dns.redirected_to, v.dns.answered_by) == (15053, None)
        assert v.outcome is not None
        # A refusal of UDP gets lost between conntrack's zones.
        last = "refused" if quickstart.tests[name].to.protocol == "dns-tcp" else "no-answer"
        assert last in (v.outcome.result, (v.outcome.error or "").rpartition(" ")[2])


def test_the_app_listens_on_loopback_only(quickstart: Mutant) -> None:
    with quickstart.instead_of(CATALOG, "app") as starter:
        for port, address in ((8080, "127.0.0.1"), (9090, "0.0.0.0")):
            echo = [sys.executable, "-m", "lab.apps.echo", "--name", CATALOG, "--port", f"{port}:http"]
            starter.start([*echo, "--address", address, "--log", ""], APP, {})
            starter.wait_ready()
        verdicts = quickstart.verify()
    concerned = quickstart.those(
        lambda t, e: part(e, "inbound", "pod") == CATALOG and part(e, "inbound", "cluster") == "inbound|8080||"
    )
    must_fail(verdicts, concerned)
    for name in concerned:
        v = verdicts[name]
        assert v.inbound is not None
        assert (v.inbound.captured, v.inbound.redirected_to) == (True, 15006)
        assert "UF" in (v.inbound.response_flags or "")
        assert "refused" in (v.inbound.details or "").lower()


NO_127_0_0_6 = """

_made_inbound_clusters = inbound_clusters


def inbound_clusters(proxy):
    for cluster in _made_inbound_clusters(proxy):
        if cluster.name.startswith("inbound|"):
            cluster.ClearField("upstream_bind_config")
        yield cluster
"""


def test_127_0_0_6_is_dropped_from_the_inbound_cluster(tmp_path: Path) -> None:
    name = f"slt-{os.getpid()}-source"
    with mutated_source("quickstart.yaml", name, tmp_path, "lab/discovery/clusters.py", NO_127_0_0_6) as lab:
        injected = [p.name for p in lab.mesh.pods if p.injected]
        with lab.not_in_circles(15006, 1337, *injected):
            verdicts = lab.verify()
    concerned = lab.those(lambda t, e: (part(e, "inbound", "cluster") or "").startswith("inbound|"))
    must_fail(verdicts, concerned)
    for name in concerned:
        v = verdicts[name]
        assert v.inbound is not None
        assert v.inbound.captured is True
        assert any(d.startswith("inbound.peer_seen_by_app: expected") for d in v.differences)


ALLOW_ANY = """

_made_route_configuration = route_configuration


def route_configuration(proxy, name):
    from envoy.config.route.v3 import route_components_pb2 as r

    config = _made_route_configuration(proxy, name)
    for host in config.virtual_hosts:
        if host.name == "block_all":
            host.name = "allow_any"
            to = r.RouteAction(cluster="PassthroughCluster")
            host.routes[0].CopyFrom(r.Route(name="allow_any", match=r.RouteMatch(prefix="/"), route=to))
    return config
"""


def test_block_all_is_swapped_for_allow_any(tmp_path: Path) -> None:
    name = f"slt-{os.getpid()}-any"
    with mutated_source("registry-only.yaml", name, tmp_path, "lab/discovery/routes.py", ALLOW_ANY) as lab:
        verdicts = lab.verify()
    concerned = lab.those(lambda t, e: part(e, "envoy", "virtual_host") == "block_all")
    must_fail(verdicts, concerned)
    for name in concerned:
        v = verdicts[name]
        assert v.envoy is not None
        assert (v.envoy.virtual_host, v.envoy.cluster) == ("allow_any", "PassthroughCluster")
        assert v.wire is not None
        assert v.wire.left_pod is True

"""A server that neither speaks nor hears that its client went away: Envoy then has nothing to write of the connection."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from lab import lifecycle
from lab.lifecycle import Lab
from lab.manifests.load import load
from lab.manifests.model import FlowFrom, FlowTo, Mesh, Meta, TrafficTest
from lab.probe import runner

pytestmark = pytest.mark.root

MANIFEST = """
apiVersion: v1
kind: Namespace
metadata: {name: in, labels: {istio-injection: enabled}}
---
apiVersion: v1
kind: Pod
metadata: {name: client, namespace: in}
spec: {containers: [{name: app}]}
---
apiVersion: v1
kind: Pod
metadata: {name: server, namespace: out, labels: {app: server}}
spec:
  containers:
  - name: app
    command: [python3, -c]
    args:
    - |
      import socket
      listener, kept = socket.create_server(("", 9000)), []
      while True:
          kept.append(listener.accept())
---
apiVersion: v1
kind: Service
metadata: {name: server, namespace: out}
spec: {selector: {app: server}, ports: [{name: tcp-mute, port: 9000}, {name: any, port: 9001}]}
---
apiVersion: v1
kind: Service
metadata: {name: refusing, namespace: out}
spec: {selector: {app: server}, ports: [{name: tcp-no, port: 9000, targetPort: 9999}]}
"""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Mesh:
    path = tmp_path_factory.mktemp("mute") / "mute.yaml"
    path.write_text(MANIFEST)
    return load([path], name=f"slt-{os.getpid()}-mute")


@pytest.fixture(scope="module")
def lab(mesh: Mesh) -> Iterator[Lab]:
    with lifecycle.running(mesh) as running:
        yield running


def test_what_another_test_tried_in_vain_is_not_taken_for_the_held_connection(lab: Lab, mesh: Mesh) -> None:
    # The first port has to be looked at for a protocol: Envoy waits with the client. Nobody listens at the second.
    waits = FlowTo("server.out", 9001, "tcp", silent=True)
    refused = FlowTo("refusing.out", 9000, "tcp")
    tests = [
        TrafficTest(Meta("waits"), FlowFrom(pod="client.in"), waits, {"wire": {"left_pod": False}}, timeout=2.0),
        TrafficTest(Meta("refused"), FlowFrom(pod="client.in"), refused, {"wire": {"left_pod": True}}),
    ]
    verdicts = runner.run_tests(lab.name, mesh, tests)
    assert [(v.passed, v.skipped, v.differences) for v in verdicts] == [(True, None, ())] * 2


@pytest.mark.parametrize("silent", [True, False])
def test_that_nothing_left_is_not_said_of_a_connection_that_envoy_holds(lab: Lab, mesh: Mesh, silent: bool) -> None:
    to = FlowTo("server.out", 9000, "tcp", silent=silent)
    test = TrafficTest(Meta("mute"), FlowFrom(pod="client.in"), to, {"wire": {"left_pod": False}}, timeout=1.0)
    (verdict,) = runner.run_tests(lab.name, mesh, [test])
    assert verdict.outcome is not None
    assert verdict.outcome.result == "timeout"
    assert verdict.outbound is not None
    assert verdict.outbound.captured is True
    assert verdict.wire is None
    assert verdict.passed is None
    assert verdict.skipped is not None
    assert "the Envoy of client.in still holds the connection" in verdict.skipped

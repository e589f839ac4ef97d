"""What is refused, where, and with which hint; what is accepted with a warning."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.errors import InputError
from lab.manifests import load

POD = "apiVersion: v1\nkind: Pod\nmetadata: {name: p, namespace: default}\n"
SERVICE = "apiVersion: v1\nkind: Service\nmetadata: {name: s}\n"
DEPLOYMENT = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: d}\n"
TEST = (
    POD
    + "spec: {containers: [{name: app}]}\n---\napiVersion: sidecarlab.dev/v1alpha1\nkind: TrafficTest\nmetadata: {name: t}\n"
)
ISTIO = "apiVersion: networking.istio.io/v1\nkind: %s\nmetadata: {name: i}\n"
MESH = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: istio, namespace: istio-system}\ndata:\n  mesh: |\n"


def errors_of(text: str) -> list[InputError]:
    problems = load.Problems()
    mesh = load._build([("f.yaml", text)], "t", problems)
    assert (mesh is None) == bool(problems.errors)
    return problems.errors


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # kinds
        ("kind: Pod\n", 'missing field "apiVersion": f.yaml:1: every object has apiVersion and kind'),
        (
            "apiVersion: v1\nkind: Servce\n",
            'unknown kind "Servce": f.yaml:2: the lab knows no Servce in v1. Did you mean "Service"?',
        ),
        (
            "apiVersion: example.com/v1\nkind: Widget\n",
            'unknown kind "Widget": f.yaml:2: the lab knows no Widget in example.com/v1',
        ),
        (
            "apiVersion: v1\nkind: Deployment\n",
            'unknown apiVersion "v1": f.yaml:1: Deployment is not in it. Write "apps/v1".',
        ),
        (
            "apiVersion: networking.istio.io/v2\nkind: Sidecar\n",
            'unknown apiVersion "networking.istio.io/v2": f.yaml:1: Sidecar has version v1 or v1beta1 or v1alpha3.'
            ' Write "networking.istio.io/v1".',
        ),
        (
            "apiVersion: networking.istio.io/v1\nkind: Gateway\n",
            'kind "Gateway" not supported: f.yaml:2: networking.istio.io/v1 Gateway changes where traffic goes, and the lab'
            " cannot do that. Remove it: the lab runs sidecars only.",
        ),
        # fields
        (
            SERVICE + "spec:\n  selectr: {app: a}\n  ports: [{port: 80}]\n",
            'unknown field "selectr": f.yaml:5: Service default/s has no spec.selectr. Did you mean "selector"?',
        ),
        (
            DEPLOYMENT
            + "spec:\n  replcias: 2\n  selector: {matchLabels: {a: b}}\n  template: {metadata: {labels: {a: b}}, spec: {containers: [{name: c}]}}\n",
            'unknown field "replcias": f.yaml:5: Deployment default/d has no spec.replcias. Did you mean "replicas"?',
        ),
        (
            POD + "spec:\n  containers:\n  - name: app\n    ports:\n    - containerprot: 80\n",
            'unknown field "containerprot": f.yaml:8: Pod default/p has no spec.containers[0].ports[0].containerprot.'
            ' Did you mean "containerPort"?',
        ),
        (
            SERVICE + "spec:\n  ports: [{prt: 80, zzz: 1, port: 80}]\n",
            'unknown field "zzz": f.yaml:5: Service default/s has no spec.ports[0].zzz.'
            " Known here: appProtocol, name, nodePort, port, protocol, targetPort.",
        ),
        (
            SERVICE + "spec:\n  ports:\n  - name: http\n",
            'missing field "port": f.yaml:6: Service default/s: spec.ports[0] needs it',
        ),
        (
            "apiVersion: v1\nkind: Pod\nspec: {}\n",
            'missing field "metadata": f.yaml:1: Pod default/?: the object needs it',
        ),
        # types and values
        (
            SERVICE + 'spec: {ports: [{port: "80"}]}\n',
            'bad type of spec.ports[0].port: f.yaml:4: Service default/s: expected an integer, found a string "80". Write it without quotes.',
        ),
        (
            POD + "spec:\n  containers: [{name: app, env: [{name: A, value: yes}]}]\n",
            "bad type of spec.containers[0].env[0].value: f.yaml:5: Pod default/p: expected a string, found a boolean true. Put it in quotes.",
        ),
        (
            POD + "spec:\n  containers: [{name: app, command: [sleep, 5]}]\n",
            'bad type of spec.containers[0].command[1]: f.yaml:5: Pod default/p: expected a string, found an integer 5. Quote it: "5".',
        ),
        (
            POD + "spec: {containers: {}}\n",
            "bad type of spec.containers: f.yaml:4: Pod default/p: expected a list, found a mapping",
        ),
        (
            SERVICE + "spec: {ports: [{port: 70000}]}\n",
            "bad value 70000 of spec.ports[0].port: f.yaml:4: Service default/s: a port is 1 to 65535",
        ),
        (
            SERVICE + "spec: {ports: [{port: 80, targetPort: true}]}\n",
            "bad value true of spec.ports[0].targetPort: f.yaml:4: Service default/s: a target port is a number, or the name of a container's port",
        ),
        (
            SERVICE + "spec: {type: NodePrt, ports: [{port: 80}]}\n",
            "bad value \"NodePrt\" of spec.type: f.yaml:4: Service default/s: expected 'ClusterIP', 'NodePort', 'LoadBalancer' or"
            " 'ExternalName'. Did you mean \"NodePort\"?",
        ),
        (
            SERVICE + "spec: {clusterIP: none, ports: [{port: 80}]}\n",
            'bad value "none" of spec.clusterIP: f.yaml:4: Service default/s: it is no IP address',
        ),
        (
            SERVICE
            + "spec: {ports: [{port: 80}], selector: {app: a}}\n---\n"
            + SERVICE
            + "spec: {ports: [{port: 81}]}\n",
            "Service default/s written twice: f.yaml:6: it is already at f.yaml:1. Rename or remove one.",
        ),
        (
            SERVICE + "spec: {ports: [{port: 80}, {port: 81, name: b}]}\n",
            'missing field "name": f.yaml:4: Service default/s: with several ports each needs a name',
        ),
        (
            SERVICE + "spec: {ports: [{port: 80, name: a}, {port: 81, name: a}]}\n",
            'port name "a" used twice: f.yaml:4: Service default/s: names of ports are unique in a service',
        ),
        (
            SERVICE + "spec: {ports: [{port: 80, name: a}, {port: 80, name: b}]}\n",
            "port 80/TCP used twice: f.yaml:4: Service default/s: a service has each port once",
        ),
        (
            SERVICE + "spec: {type: ExternalName}\n",
            'missing field "externalName": f.yaml:4: Service default/s: type ExternalName needs it',
        ),
        (
            SERVICE + "spec: {selector: {a: b}}\n",
            'missing field "ports": f.yaml:4: Service default/s: a service with a cluster address has ports',
        ),
        (
            POD.replace("p,", "P_1,"),
            'bad value "P_1" of metadata.name: f.yaml:3: Pod default/P_1: a name is made of lower case letters,',
        ),
        (
            POD + "spec: {hostNetwork: true, containers: [{name: a}]}\n",
            "host network not supported: f.yaml:4: Pod default/p: a pod of the lab always has its own network namespace. Remove hostNetwork.",
        ),
        (
            POD
            + "spec: {containers: [{name: a, ports: [{containerPort: 80}]}, {name: b, ports: [{containerPort: 80}]}]}\n",
            "port 80/TCP declared twice: f.yaml:4: Pod default/p: containers a and b share one network namespace",
        ),
        (
            DEPLOYMENT
            + "spec:\n  selector: {matchLabels: {a: x}}\n  template: {metadata: {labels: {a: b}}, spec: {containers: [{name: c}]}}\n",
            "selector does not match the template: f.yaml:5: Deployment default/d: spec.selector must match spec.template.metadata.labels",
        ),
        (
            DEPLOYMENT.replace("name: d", "name: p")
            + "spec: {selector: {matchLabels: {a: b}}, template: {metadata: {labels: {a: b}}, spec: {containers: [{name: c}]}}}\n---\n"
            + POD.replace("name: p", "name: p-0")
            + "spec: {containers: [{name: app}]}\n",
            "Pod default/p-0 exists twice: f.yaml:6: Pod default/p-0 and f.yaml:1 both make it. Rename one.",
        ),
        # Istio
        (
            ISTIO % "ServiceEntry"
            + "spec:\n  hosts: [a.example]\n  resolution: STATIC\n  endpoints: [{address: b.example}]\n",
            'bad address "b.example": f.yaml:7: ServiceEntry default/i: with resolution STATIC an endpoint is an IP address or unix:///PATH',
        ),
        (
            ISTIO % "ServiceEntry" + "spec: {hosts: ['*.a.example'], resolution: DNS}\n",
            "bad value of spec: f.yaml:4: ServiceEntry default/i: a wildcard host cannot be looked up: resolution DNS needs endpoints here",
        ),
        (
            ISTIO % "Sidecar" + "spec:\n  egress:\n  - hosts: [catalog]\n",
            'bad value "catalog" of spec.egress[0].hosts[0]: f.yaml:6: Sidecar default/i: a Sidecar host is written NAMESPACE/HOST',
        ),
        (
            ISTIO % "Sidecar" + "spec: {}\n",
            "bad value of spec: f.yaml:4: Sidecar default/i: a Sidecar needs ingress, egress,",
        ),
        (
            ISTIO % "Sidecar" + "spec: {egress: [{hosts: ['*/*']}, {hosts: ['./*'], port: {number: 80}}]}\n",
            "bad value of spec: f.yaml:4: Sidecar default/i: an egress listener without port is the catch-all",
        ),
        (
            ISTIO % "DestinationRule"
            + "spec:\n  host: a\n  trafficPolicy:\n    connectionPool: {tcp: {maxConections: 1}}\n",
            'unknown field "maxConections": f.yaml:7: DestinationRule default/i has no spec.trafficPolicy.connectionPool.tcp.maxConections.'
            ' Did you mean "maxConnections"?',
        ),
        (
            ISTIO % "DestinationRule" + "spec: {host: a, trafficPolicy: {outlierDetection: {interval: fast}}}\n",
            'bad value "fast" of spec.trafficPolicy.outlierDetection.interval: f.yaml:4: DestinationRule default/i: a duration is',
        ),
        (
            ISTIO % "VirtualService"
            + "spec: {hosts: [a], http: [{match: [{uri: {exact: /, prefix: /}}], route: [{destination: {host: a}}]}]}\n",
            "bad value of spec.http[0].match[0].uri: f.yaml:4: VirtualService default/i: only one of exact, prefix, regex may be set",
        ),
        (
            ISTIO % "VirtualService"
            + "spec: {hosts: [a], http: [{redirect: {uri: /}, route: [{destination: {host: a}}]}]}\n",
            "bad value of spec.http[0]: f.yaml:4: VirtualService default/i: an HTTP route has exactly one of",
        ),
        (
            ISTIO % "VirtualService" + "spec: {hosts: ['*'], tcp: [{route: [{destination: {host: a}}]}]}\n",
            'bad value of spec: f.yaml:4: VirtualService default/i: host "*" is not allowed for sidecars',
        ),
        (
            "apiVersion: security.istio.io/v1\nkind: PeerAuthentication\nmetadata: {name: i}\nspec: {portLevelMtls: {80: {mode: STRICT}}}\n",
            "bad value of spec: f.yaml:4: PeerAuthentication default/i: portLevelMtls needs a selector",
        ),
        # MeshConfig
        (
            MESH + "    enableAutoMtls: 'false'\n",
            'bad type of enableAutoMtls: f.yaml:6: MeshConfig in ConfigMap istio-system/istio: expected true or false, found a string "false". Write it without quotes.',
        ),
        (
            MESH + "    trustDomain: a\n    outboundTrafficPolcy: {}\n",
            'unknown field "outboundTrafficPolcy": f.yaml:7: MeshConfig in ConfigMap istio-system/istio has no outboundTrafficPolcy. Did you mean "outboundTrafficPolicy"?',
        ),
        (
            MESH + "    outboundTrafficPolicy:\n      mode: ALLOW_SOME\n",
            'bad value "ALLOW_SOME" of outboundTrafficPolicy.mode: f.yaml:7: MeshConfig',
        ),
        (
            MESH + "    outboundTrafficPolicy: {mode: ALLOW_ANY, tls: {mode: SIMPLE}}\n",
            "bad value of outboundTrafficPolicy: f.yaml:6: MeshConfig in ConfigMap istio-system/istio: tls needs mode ALLOW_ANY_DYNAMIC_DNS",
        ),
        (
            "apiVersion: networking.istio.io/v1\nkind: Sidecar\nmetadata: {name: s, namespace: a}\n"
            "spec: {outboundTrafficPolicy: {mode: ALLOW_ANY_DYNAMIC_DNS}}\n",
            'bad value "ALLOW_ANY_DYNAMIC_DNS" of spec.outboundTrafficPolicy.mode: f.yaml:4: Sidecar a/s',
        ),
        (MESH + "    a: [\n", "bad YAML: f.yaml:7"),
        (
            MESH + "    trustDomain: a\n---\n" + MESH.replace("istio-system", "other") + "    trustDomain: b\n",
            "two mesh configurations: f.yaml:8: ConfigMap other/istio and ConfigMap istio-system/istio (f.yaml:1) both set one. Keep one.",
        ),
        # TrafficTest
        (
            TEST + "spec: {from: {pod: q.default}, to: {host: a, port: 80}, expect: {outcome: {result: ok}}}\n",
            'unknown pod "q.default": f.yaml:9: TrafficTest t: no such pod in the mesh. Did you mean "p.default"?',
        ),
        (
            TEST + "spec: {from: {pod: p.default}, to: {pod: x.default, port: 80}, expect: {outcome: {result: ok}}}\n",
            'unknown pod "x.default": f.yaml:9: TrafficTest t: no such pod in the mesh',
        ),
        (
            TEST + "spec: {from: {pod: p.default}, to: {host: a}, expect: {outcome: {result: ok}}}\n",
            "bad value of spec.to: f.yaml:9: TrafficTest t: protocol http needs a port",
        ),
        (
            TEST
            + "spec: {from: {pod: p.default, external: e}, to: {host: a, port: 80}, expect: {outcome: {result: ok}}}\n",
            "bad value of spec.from: f.yaml:9: TrafficTest t: exactly one of pod and external is needed",
        ),
        (
            TEST
            + "spec: {from: {pod: p.default}, to: {host: a, port: 80, silent: true}, expect: {outcome: {result: ok}}}\n",
            "bad value of spec.to: f.yaml:9: TrafficTest t: only a tcp connection can be silent",
        ),
        (
            TEST + "spec: {from: {pod: p.default}, to: {host: a, port: 80}, expect: {}}\n",
            "bad value of spec.expect: f.yaml:9: TrafficTest t: expect is empty: such a test cannot fail",
        ),
        (
            TEST + "spec: {from: {pod: p.default}, to: {host: a, port: 80}, expect: {envoy: {clustr: x}}}\n",
            'unknown field "clustr": f.yaml:9: TrafficTest t has no spec.expect.envoy.clustr. Did you mean "cluster"?',
        ),
        (
            TEST + "spec: {from: {pod: p.default}, to: {host: a, port: 80}, expect: {outcome: {result: okay}}}\n",
            "bad value \"okay\" of spec.expect.outcome.result: f.yaml:9: TrafficTest t: expected 'ok', 'http-error'",
        ),
        (
            TEST
            + "spec: {from: {pod: p.default, spoof: 1.2.3.4}, to: {host: a, port: 80}, expect: {outcome: {result: ok}}}\n",
            "spoof without crafted: f.yaml:9: TrafficTest t: only a crafted packet can have a forged source. Set to.crafted: true.",
        ),
        (
            TEST
            + "spec: {from: {pod: p.default}, to: {host: a, port: 80}, timeout: 5, expect: {outcome: {result: ok}}}\n",
            "bad value 5 of spec.timeout: f.yaml:9: TrafficTest t: a duration is a number with a unit",
        ),
        # ExternalHost, Link
        (
            "apiVersion: sidecarlab.dev/v1alpha1\nkind: ExternalHost\nmetadata: {name: e}\nspec: {hosts: [a_b!], ports: [{port: 80, protocol: http}]}\n",
            'bad value "a_b!" of spec.hosts[0]: f.yaml:4: ExternalHost e: it is no host name',
        ),
        (
            "apiVersion: sidecarlab.dev/v1alpha1\nkind: Link\nmetadata: {name: l}\nspec: {between: [a.b, '*'], delay: 5ms}\n",
            'unknown field "delay": f.yaml:4: Link l has no spec.delay. Known here: between, cut, loss, mtu, rate.',
        ),
        (
            TEST.replace("TrafficTest", "Link") + "spec: {between: [p.defalt, '*'], mtu: 1400}\n",
            'unknown place "p.defalt": f.yaml:9: Link t: no such pod or ExternalHost. Did you mean "p.default"?',
        ),
    ],
)
def test_refused(text: str, message: str) -> None:
    errors = errors_of(text)
    assert errors
    assert any(str(error).startswith(message) for error in errors), [str(error) for error in errors]


def test_a_mistyped_field_is_not_told_as_missing_too() -> None:
    (error,) = errors_of(POD + "spec: {contaniers: [{name: app}]}\n")
    assert str(error).endswith('Did you mean "containers"?')


def test_all_errors_are_collected_in_order_of_files_and_lines(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(SERVICE + "spec: {ports: [{port: 0}], slector: {}}\n---\nkind: Pod\n")
    (tmp_path / "b.yml").write_text("a: [\n")
    (tmp_path / "c.txt").write_text("not a manifest: [\n")
    mesh, errors = load.check([tmp_path])
    assert mesh is None
    places = [error.where.removeprefix(f"{tmp_path}/") for error in errors]
    assert places == ["a.yaml:4", "a.yaml:4", "a.yaml:6", "b.yml:2"]
    with pytest.raises(InputError) as caught:
        load.load([tmp_path])
    assert str(caught.value) == str(errors[0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: [], "no manifests: no file or directory was named"),
        (lambda d: [d / "absent.yaml"], "no such file: "),
        (lambda d: [d], "no manifests: "),
    ],
)
def test_nothing_to_read(tmp_path: Path, make: object, message: str) -> None:
    assert callable(make)
    _, (error,) = load.check(make(tmp_path))
    assert str(error).startswith(message)


def test_a_binary_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_bytes(b"\xff\xfe\x00")
    _, (error,) = load.check([file])
    assert str(error) == f"not a text file: {file}:1: manifests are UTF-8. Save it as UTF-8."


@pytest.mark.parametrize(
    ("text", "line", "named"),
    [
        (POD + "spec:\n  tolerations: []\n  containers: [{name: app}]\n", 5, "spec.tolerations"),
        (
            POD + "spec:\n  containers:\n  - name: app\n    volumeMounts: [{anything: goes}]\n",
            7,
            "spec.containers[0].volumeMounts",
        ),
        (
            SERVICE + "spec:\n  sessionAffinity: None\n  clusterIP: None\n  ports: [{port: 80}]\n  selector: {}\n",
            5,
            "spec.sessionAffinity",
        ),
        (
            POD.replace("}", ", uid: x, resourceVersion: '1'}") + "spec: {containers: [{name: app}]}\n",
            3,
            "metadata.uid, metadata.resourceVersion",
        ),
        (MESH + "    thriftConfig: {}\n", 6, "thriftConfig"),
        ("apiVersion: v1\nkind: ServiceAccount\nmetadata: {name: x}\n", 2, "ServiceAccount"),
        ("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: other}\n", 1, "ConfigMap default/other"),
        (SERVICE + "spec: {type: LoadBalancer, ports: [{port: 80}]}\n", 4, "acts as ClusterIP"),
        (POD + "spec: {containers: [{name: app, args: [x]}]}\n", 4, "args but no command"),
        (POD + "spec: {containers: [{name: app}, {name: istio-proxy}]}\n", 4, "istio-proxy is left out"),
        (POD.replace("default", "shop") + "spec: {containers: [{name: app}]}\n", 1, 'namespace "shop" is not declared'),
    ],
)
def test_accepted_with_a_warning_that_names_it(text: str, line: int, named: str) -> None:
    mesh = load.load_text(text, "f.yaml")
    found = [warning for warning in mesh.warnings if named in warning.message]
    assert [str(warning.source) for warning in found] == [f"f.yaml:{line}"], mesh.warnings


def test_null_means_not_set() -> None:
    mesh = load.load_text(SERVICE + "spec: {selector: null, type: null, ports: [{port: 80, name: null}]}\n")
    assert mesh.services[0].selector == {}


def test_lists_of_objects_are_read() -> None:
    text = "apiVersion: v1\nkind: List\nitems:\n- apiVersion: v1\n  kind: Pod\n  metadata: {name: a}\n  spec: {containers: [{name: app}]}\n"
    assert [pod.name for pod in load.load_text(text).pods] == ["a.default"]
    assert errors_of("apiVersion: v1\nkind: List\nitems: [5]\n")[0].where == "f.yaml:3"


def test_names_of_labs() -> None:
    assert load.lab_name(Path("topologies/four_Namespaces.yaml")) == "four-namespaces"
    assert load.lab_name(Path("/x/Überlab.yml")) == "berlab"
    assert load.load_text(POD + "spec: {containers: [{name: a}]}\n", name="n").name == "n"

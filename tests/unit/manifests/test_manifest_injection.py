"""Who is injected, and what init and agent are started with (spec init 11, agent 1, 2 and 6)."""

from __future__ import annotations

import json

import pytest

from lab.manifests import injection, load
from lab.manifests.model import Mesh, Pod

ON, OFF, BARE = {"istio-injection": "enabled"}, {"istio-injection": "disabled"}, dict[str, str]()
REV = {"istio.io/rev": "default"}
INJECT = "sidecar.istio.io/inject"


@pytest.mark.parametrize(
    ("namespace", "labels", "annotations", "injected"),
    [
        (ON, {}, {}, True),
        (ON, {INJECT: "false"}, {}, False),
        (ON, {}, {INJECT: "false"}, False),
        (ON, {INJECT: "true"}, {INJECT: "false"}, True),  # the label beats the annotation
        (ON, {}, {INJECT: "on"}, True),
        (ON, {}, {INJECT: "perhaps"}, False),
        (OFF, {}, {}, False),
        (OFF, {INJECT: "true"}, {}, False),  # no webhook looks at such a namespace
        (BARE, {}, {}, False),
        (BARE, {INJECT: "true"}, {}, True),
        (BARE, {}, {INJECT: "true"}, False),  # the annotation does not reach the webhook
        (BARE, {INJECT: "false"}, {}, False),
        (REV, {}, {}, True),
        (REV, {INJECT: "false"}, {}, False),
        ({"istio.io/rev": "canary"}, {}, {}, False),
        (BARE, {"istio.io/rev": "default"}, {}, True),
    ],
)
def test_decision(
    namespace: dict[str, str], labels: dict[str, str], annotations: dict[str, str], injected: bool
) -> None:
    assert injection.decide("shop", namespace, labels, annotations) is injected


def test_system_namespaces_are_never_injected() -> None:
    assert not injection.decide("kube-system", ON, {INJECT: "true"}, {})


def mesh(annotations: dict[str, str] | None = None, config: str = "", ports: str = "[]") -> tuple[Mesh, Pod]:
    notes = json.dumps(annotations or {})
    text = f"""
apiVersion: v1
kind: Namespace
metadata: {{name: shop, labels: {{istio-injection: enabled}}}}
---
apiVersion: v1
kind: Pod
metadata: {{name: web, namespace: shop, labels: {{app: web, version: v3}}, annotations: {notes}}}
spec:
  serviceAccountName: seller
  containers: [{{name: app, ports: {ports}}}, {{name: helper}}]
---
apiVersion: v1
kind: ConfigMap
metadata: {{name: istio, namespace: istio-system}}
data:
  mesh: |
    enableTracing: true
{config}"""
    made = load.load_text(text)
    pod = made.pod("web.shop")
    assert pod is not None
    return made, pod


def test_default_init_arguments() -> None:
    made, pod = mesh()
    assert injection.init_args(made, pod) == [
        *("-p", "15001", "-z", "15006", "-u", "1337", "-m", "REDIRECT", "-i", "*", "-x", "", "-b", "*"),
        *("-d", "15090,15021,15020", "--log_output_level=default:info"),
    ]
    assert injection.init_env(made, pod) == {}


def test_annotations_become_flags_in_the_injectors_order() -> None:
    made, pod = mesh(
        {
            "traffic.sidecar.istio.io/includeOutboundIPRanges": "10.0.0.0/8",
            "traffic.sidecar.istio.io/excludeOutboundIPRanges": "10.1.0.0/16,10.2.0.0/16",
            "traffic.sidecar.istio.io/includeInboundPorts": "80,443",
            "traffic.sidecar.istio.io/excludeInboundPorts": "9000",
            "traffic.sidecar.istio.io/includeOutboundPorts": "5432",
            "traffic.sidecar.istio.io/excludeOutboundPorts": "",
            "traffic.sidecar.istio.io/excludeInterfaces": "net1",
            "traffic.sidecar.istio.io/kubevirtInterfaces": "k6t-old",
            "istio.io/reroute-virtual-interfaces": "k6t-net1",
            "sidecar.istio.io/interceptionMode": "TPROXY",
            "sidecar.istio.io/agentLogLevel": "all:debug",
        },
        "    proxyListenPort: 16001\n    proxyInboundListenPort: 16006\n",
    )
    assert injection.init_args(made, pod) == [
        *("-p", "16001", "-z", "16006", "-u", "1337", "-m", "TPROXY", "-i", "10.0.0.0/8"),
        *("-x", "10.1.0.0/16,10.2.0.0/16", "-b", "80,443", "-d", "15090,15021,9000,15020"),
        *("-q", "5432", "-o", "", "-k", "k6t-net1", "-c", "net1", "--log_output_level=all:debug"),
    ]


@pytest.mark.parametrize(
    ("status_port", "excluded", "flag"),
    [
        ("15020", "", "15090,15021,15020"),
        ("0", "", "15090,15021,"),
        ("", "80", "15090,15021,80"),
        ("15020", "80,15020", "15090,15021,80,15020"),
        ("7777", "80, 81", "15090,15021,80,81,7777"),
    ],
)
def test_the_status_port_joins_the_excluded_ones(status_port: str, excluded: str, flag: str) -> None:
    made, pod = mesh(
        {
            "status.sidecar.istio.io/port": status_port,
            "traffic.sidecar.istio.io/excludeInboundPorts": excluded,
        }
    )
    args = injection.init_args(made, pod)
    assert args[args.index("-d") + 1] == flag


def test_interception_none_has_no_init_container() -> None:
    made, pod = mesh({"sidecar.istio.io/interceptionMode": "NONE"})
    assert injection.init_args(made, pod) == []
    assert injection.agent_env(made, pod)["ISTIO_META_INTERCEPTION_MODE"] == "NONE"


def test_without_injection_there_is_nothing_to_start() -> None:
    made, pod = mesh({INJECT: "false"})
    assert not pod.injected
    assert (injection.init_args(made, pod), injection.agent_args(made, pod)) == ([], [])
    assert (injection.init_env(made, pod), injection.agent_env(made, pod)) == ({}, {})


def test_proxy_config_annotation_is_laid_over_the_mesh_default() -> None:
    made, pod = mesh(
        {"proxy.istio.io/config": "concurrency: 2\nproxyMetadata: {B: pod, C: pod}\ntracing: {sampling: 1}\n"},
        "    defaultConfig:\n      discoveryAddress: istiod.istio-system.svc:15010\n"
        "      proxyMetadata: {A: mesh, B: mesh}\n      tracing: {zipkin: {address: z}}\n",
    )
    assert injection.proxy_config(made, pod) == {
        "discoveryAddress": "istiod.istio-system.svc:15010",
        "proxyMetadata": {"A": "mesh", "B": "pod", "C": "pod"},
        "tracing": {"sampling": 1},
        "concurrency": 2,
    }
    assert injection.init_env(made, pod) == {"A": "mesh", "B": "pod", "C": "pod"}
    assert json.loads(injection.agent_env(made, pod)["PROXY_CONFIG"]) == injection.proxy_config(made, pod)


def test_agent_arguments_and_environment() -> None:
    made, pod = mesh(
        {"sidecar.istio.io/logLevel": "debug"},
        "    trustDomain: example.org\n    defaultConfig: {proxyMetadata: {ISTIO_META_DNS_CAPTURE: 'true'}}\n",
        "[{name: http, containerPort: 8080}, {containerPort: 53, protocol: UDP}]",
    )
    assert injection.agent_args(made, pod) == [
        *("proxy", "sidecar", "--domain", "shop.svc.cluster.local", "--proxyLogLevel=debug"),
        *("--proxyComponentLogLevel=misc:error", "--log_output_level=default:info"),
    ]
    env = injection.agent_env(made, pod)
    assert env == {
        "PILOT_CERT_PROVIDER": "istiod",
        "CA_ADDR": "istiod.istio-system.svc:15012",
        "POD_NAME": "web",
        "POD_NAMESPACE": "shop",
        "INSTANCE_IP": "10.244.1.1",
        "SERVICE_ACCOUNT": "seller",
        "HOST_IP": "169.254.1.1",
        "PROXY_CONFIG": '{"proxyMetadata":{"ISTIO_META_DNS_CAPTURE":"true"}}',
        "ISTIO_META_POD_PORTS": '[{"name":"http","containerPort":8080,"protocol":"TCP"},'
        '{"containerPort":53,"protocol":"UDP"}]',
        "ISTIO_META_APP_CONTAINERS": "app,helper",
        "ISTIO_META_CLUSTER_ID": "Kubernetes",
        "ISTIO_META_NODE_NAME": "node",
        "ISTIO_META_INTERCEPTION_MODE": "REDIRECT",
        "ISTIO_META_WORKLOAD_NAME": "web",
        "ISTIO_META_OWNER": "kubernetes://apis/v1/namespaces/shop/pods/web",
        "ISTIO_META_MESH_ID": "example.org",
        "TRUST_DOMAIN": "example.org",
        "ISTIO_META_DNS_CAPTURE": "true",
    }


def test_injected_pods_carry_istios_labels() -> None:
    _, pod = mesh()
    assert pod.meta.labels == {
        "app": "web",
        "version": "v3",
        "security.istio.io/tlsMode": "istio",
        "service.istio.io/canonical-name": "web",
        "service.istio.io/canonical-revision": "v3",
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("traffic.sidecar.istio.io/includeOutboundIPRanges", "10.0.0.1"),
        ("traffic.sidecar.istio.io/excludeOutboundIPRanges", "*"),
        ("traffic.sidecar.istio.io/excludeInboundPorts", "*"),
        ("traffic.sidecar.istio.io/excludeOutboundPorts", "70000"),
        ("traffic.sidecar.istio.io/includeInboundPorts", "http"),
        ("traffic.sidecar.istio.io/excludeInterfaces", "0net"),
        ("sidecar.istio.io/interceptionMode", "redirect"),
        ("sidecar.istio.io/inject", "perhaps"),
    ],
)
def test_admission_refuses_bad_annotations(name: str, value: str) -> None:
    with pytest.raises(load.InputError) as caught:
        mesh({name: value})
    assert name in str(caught.value)
    assert caught.value.where == "-:8"


def test_a_mistyped_annotation_is_told() -> None:
    made, _ = mesh({"traffic.sidecar.istio.io/excludeOutboundPort": "80"})
    (warning,) = made.warnings
    assert 'Did you mean "traffic.sidecar.istio.io/excludeOutboundPorts"?' in warning.message

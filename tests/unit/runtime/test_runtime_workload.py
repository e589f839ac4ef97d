"""What runs in each place of a mesh, as whom and with what."""

from __future__ import annotations

from lab.manifests.load import load_text
from lab.manifests.model import Mesh, Pod
from lab.runtime import workload
from lab.runtime.identity import INIT, PROXY, Identity
from lab.runtime.mounts import POD_DIR

MESH = """
apiVersion: v1
kind: Namespace
metadata: {name: shop, labels: {istio-injection: enabled}}
---
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: shop, labels: {app: web}, annotations: {note: 'a "b"'}}
spec:
  containers:
  - {name: main, ports: [{name: http-web, containerPort: 8080}, {name: metrics, containerPort: 9100}, {containerPort: 53, protocol: UDP}]}
  - {name: extra, ports: [{name: tcp-db, containerPort: 5432}]}
  - {name: side, image: x, command: [sleep], args: ["1000"], env: [{name: A, value: b}], workingDir: /tmp, securityContext: {runAsUser: 0}}
---
apiVersion: v1
kind: Pod
metadata: {name: plain, namespace: shop, labels: {sidecar.istio.io/inject: "false"}}
spec:
  hostname: other
  subdomain: group
  containers:
  - {name: main, command: [nc, "-l"], securityContext: {runAsUser: 77, runAsGroup: 78}}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec:
  clusterIP: 10.96.1.1
  selector: {app: web}
  ports:
  - {name: http, port: 80, targetPort: http-web}
  - {name: grpc-db, port: 5432}
---
apiVersion: sidecarlab.dev/v1alpha1
kind: ExternalHost
metadata: {name: vendor}
spec: {hosts: [api.vendor.example], addresses: [203.0.113.10], ports: [{port: 443, protocol: tls}]}
"""


def mesh() -> Mesh:
    return load_text(MESH, name="shop")


def pod(name: str) -> Pod:
    found = mesh().pod(name)
    assert found is not None
    return found


def test_init_is_root_with_two_capabilities() -> None:
    init = workload.init(mesh(), pod("web.shop"), "legacy")
    assert init is not None
    assert init.identity == INIT
    (arguments,) = init.args
    assert isinstance(arguments, list)
    assert arguments[-2:] == ["--backend=legacy", "--strict"]
    assert arguments[:2] == ["-p", "15001"]


def test_agent_is_1337_without_capabilities_in_the_pods_directory() -> None:
    agent = workload.agent(mesh(), pod("web.shop"))
    assert agent is not None
    assert (agent.identity, agent.cwd, agent.notify) == (PROXY, POD_DIR, True)
    assert agent.env["ISTIO_META_SIDECARLAB_EVIDENCE"] == "/run/sidecar/log/evidence.jsonl"
    assert agent.env["POD_NAME"] == "web"


def test_with_tproxy_the_proxy_is_root_with_one_capability_and_the_proxys_group() -> None:
    tproxy = MESH.replace("""note: 'a "b"'""", "sidecar.istio.io/interceptionMode: TPROXY")
    changed = load_text(tproxy, name="shop")
    found = changed.pod("web.shop")
    assert found is not None
    agent = workload.agent(changed, found)
    assert agent is not None
    assert agent.identity == Identity(0, 1337, frozenset({"NET_ADMIN"}))


def test_pod_without_sidecar_has_neither() -> None:
    assert workload.init(mesh(), pod("plain.shop"), "nft") is None
    assert workload.agent(mesh(), pod("plain.shop")) is None


def test_containers_without_command_are_one_echo_app() -> None:
    app, side = workload.apps(mesh(), pod("web.shop"))
    assert (app.name, app.entry, app.identity) == ("app", "lab.apps.echo:main", Identity(1000, 1000))
    (params,) = app.args
    assert isinstance(params, dict)
    assert [(p["port"], p["protocol"]) for p in params["ports"]] == [
        (8080, "http"),  # the Service's port by target name
        (9100, "auto"),  # in no Service, and its name says nothing
        (53, "udp"),
        (5432, "grpc"),  # the Service's word, not the container port's name
    ]
    assert params["hosts"] == ["web.shop", "web.shop.svc.cluster.local"]
    assert (side.name, side.argv, side.cwd) == ("side", ("sleep", "1000"), "/tmp")
    assert side.identity == Identity(0, 0, frozenset()), "a root without capabilities"
    assert side.env["A"] == "b"
    assert not side.notify


def test_command_runs_as_whom_the_manifest_says() -> None:
    (app,) = workload.apps(mesh(), pod("plain.shop"))
    assert (app.name, app.argv, app.identity) == ("app", ("nc", "-l"), Identity(77, 78))
    assert app.log == "/run/sidecar/log/app.log"


def test_files_of_a_pod() -> None:
    owned = {o.path: o for o in workload.pod_files(pod("web.shop"))}
    assert 'note="a \\"b\\""' in (owned["etc/istio/pod/annotations"].text or "").splitlines()
    assert 'app="web"' in (owned["etc/istio/pod/labels"].text or "").splitlines()
    assert owned["log/echo.jsonl"].uid == 1000
    assert {o.uid for path, o in owned.items() if path != "log/echo.jsonl"} == {1337}
    directories = [o.path for o in workload.pod_files(pod("web.shop")) if o.text is None]
    assert all(os_parent in (*directories[:i], "") for i, d in enumerate(directories) for os_parent in [parent(d)])


def parent(path: str) -> str:
    return path.rpartition("/")[0]


def test_place_of_a_pod_looks_like_kubernetes() -> None:
    spec = workload.pod_place("shop", mesh(), pod("plain.shop"), ("/usr",))
    assert spec.netns == "/run/sidecarlab/shop/ns/plain.shop"
    assert spec.hostname == "other"
    assert spec.view is not None
    assert spec.view.pod_dir == "/run/sidecarlab/shop/pods/plain.shop"
    assert spec.view.files["/etc/resolv.conf"].startswith("search shop.svc.cluster.local svc.cluster.local")
    assert "\tother.group.shop.svc.cluster.local\tother\n" in spec.view.files["/etc/hosts"]
    assert spec.sysctls["net.ipv4.ip_unprivileged_port_start"] == "0"
    assert spec.sysctls["net.ipv4.ping_group_range"] == "0 2147483647"


def test_external_host_runs_the_echo_app() -> None:
    (host,) = mesh().external_hosts
    app = workload.external_app(host)
    (params,) = app.args
    assert isinstance(params, dict)
    assert params["ports"] == [{"port": 443, "name": "", "protocol": "tls"}]
    assert params["hosts"] == ["api.vendor.example", "203.0.113.10"]
    assert app.identity == Identity(1000, 1000)
    assert workload.external_place("shop", mesh(), host, ()).name == "ext-vendor"


def test_services_of_the_node_have_no_more_than_they_need() -> None:
    discovery, dns = workload.discovery("shop", mesh()), workload.cluster_dns("shop", mesh())
    assert discovery.identity.capabilities == frozenset()
    assert dns.identity.capabilities == frozenset({"NET_BIND_SERVICE"})
    assert discovery.args == (
        {
            "mesh": "/run/sidecarlab/shop/manifests",
            "listen": mesh().fabric.discovery,
            "socket": "/run/sidecarlab/shop/discovery.sock",
            "keys": "/run/sidecarlab/shop/control-plane.pem",
            "name": "shop",
        },
    )
    assert workload.node_place("shop").view is None

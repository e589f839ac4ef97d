"""Each kind, read into the model."""

from __future__ import annotations

from lab.manifests import load
from lab.manifests.model import (
    ConnectionPool,
    EndpointAddress,
    ExternalPort,
    FlowFrom,
    FlowTo,
    HTTPPool,
    LabelExpression,
    LabelSelector,
    Mesh,
    OutboundTrafficPolicy,
    Retry,
    ServiceEntryPort,
    ServicePort,
    SidecarEgress,
    SidecarIngress,
    TCPPool,
    WorkloadEndpoint,
)


def mesh(text: str) -> Mesh:
    return load.load_text(text, "f.yaml")


def test_pod() -> None:
    made = mesh("""
apiVersion: v1
kind: Pod
metadata: {name: web, labels: {app: web}, creationTimestamp: "2024-01-31T12:00:00Z"}
spec:
  serviceAccountName: seller
  hostname: web-host
  subdomain: webs
  dnsConfig: {searches: [example.org]}
  securityContext: {runAsUser: 2000, runAsGroup: 2001}
  containers:
  - name: app
    image: example.org/web:1
    command: [/bin/sh, -c]
    args: [sleep 1]
    workingDir: /srv
    env:
    - {name: A, value: "1"}
    - {name: IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
    - {name: ME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
    ports: [{name: http, containerPort: 80}, {containerPort: 53, protocol: UDP}]
  - name: helper
    securityContext: {runAsUser: 3000}
status:
  podIPs: [{ip: 10.9.9.9}]
  conditions: [{type: Ready, status: "False"}, {type: Initialized, status: "True"}]
""")
    (pod,) = made.pods
    app, helper = pod.containers
    assert (pod.name, pod.ips, pod.ready, pod.injected) == ("web.default", ("10.9.9.9",), False, False)
    assert (pod.service_account, pod.hostname, pod.subdomain, pod.dns_search) == (
        "seller",
        "web-host",
        "webs",
        ("example.org",),
    )
    assert (pod.owner_kind, pod.owner_name, pod.meta.created) == ("Pod", "web", 1706702400.0)
    assert (app.image, app.command, app.args, app.working_dir) == (
        "example.org/web:1",
        ("/bin/sh", "-c"),
        ("sleep 1",),
        "/srv",
    )
    assert app.env == {"A": "1", "IP": "10.9.9.9", "ME": "web"}
    assert [(port.name, port.port, port.protocol) for port in app.ports] == [("http", 80, "TCP"), ("", 53, "UDP")]
    assert (app.run_as_user, app.run_as_group, helper.run_as_user, helper.run_as_group) == (2000, 2001, 3000, 2001)
    assert made.pod("default/web") is pod


def test_deployment_becomes_pods() -> None:
    made = mesh("""
apiVersion: v1
kind: Namespace
metadata: {name: shop, labels: {istio-injection: enabled}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: shop, annotations: {sidecar.istio.io/inject: "false"}}
spec:
  replicas: 3
  selector: {matchExpressions: [{key: app, operator: In, values: [web]}]}
  template:
    metadata: {labels: {app: web}, annotations: {traffic.sidecar.istio.io/excludeOutboundPorts: "80"}}
    spec: {containers: [{name: app, ports: [{containerPort: 80}]}]}
""")
    assert [pod.name for pod in made.pods] == ["web-0.shop", "web-1.shop", "web-2.shop"]
    assert {(pod.owner_kind, pod.owner_name, pod.injected) for pod in made.pods} == {("Deployment", "web", True)}
    assert made.pods[0].meta.annotations["traffic.sidecar.istio.io/excludeOutboundPorts"] == "80"
    assert "sidecar.istio.io/inject" not in made.pods[0].meta.annotations
    assert made.pods[0].meta.labels["service.istio.io/canonical-name"] == "web"


def test_no_replicas_no_pods() -> None:
    made = mesh("""
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 0
  selector: {matchLabels: {app: web}}
  template: {metadata: {labels: {app: web}}, spec: {containers: [{name: app}]}}
""")
    assert made.pods == ()


def test_owner_of_a_pod_as_a_cluster_prints_it() -> None:
    made = mesh("""
apiVersion: v1
kind: Pod
metadata:
  name: web-5d4f-x
  labels: {pod-template-hash: 5d4f}
  ownerReferences: [{apiVersion: apps/v1, kind: ReplicaSet, name: web-5d4f, controller: true}]
spec: {containers: [{name: app}]}
---
apiVersion: v1
kind: Pod
metadata:
  name: db-0
  ownerReferences: [{apiVersion: apps/v1, kind: StatefulSet, name: db, controller: true}]
spec: {containers: [{name: app}]}
""")
    assert [(pod.owner_kind, pod.owner_name) for pod in made.pods] == [("Deployment", "web"), ("StatefulSet", "db")]


def test_services() -> None:
    made = mesh("""
apiVersion: v1
kind: Pod
metadata: {name: web, labels: {app: web}}
spec: {containers: [{name: app, ports: [{name: web, containerPort: 8080}, {containerPort: 9090}]}]}
---
apiVersion: v1
kind: Service
metadata: {name: web, annotations: {networking.istio.io/exportTo: "."}}
spec:
  clusterIP: 10.96.7.7
  selector: {app: web}
  publishNotReadyAddresses: true
  internalTrafficPolicy: Local
  trafficDistribution: PreferClose
  ports:
  - {name: http-web, port: 80, targetPort: web}
  - {name: other, port: 81, targetPort: 9090, appProtocol: grpc}
  - {name: dns, port: 53, protocol: UDP, targetPort: 9090}
""")
    (service,) = made.services
    assert service.host() == "web.default.svc.cluster.local"
    assert service.cluster_ips == ("10.96.7.7",)
    assert (service.publish_not_ready, service.internal_traffic_policy_local) == (True, True)
    assert service.traffic_distribution == "PreferClose"
    assert service.ports == (
        ServicePort(80, "http-web", "HTTP", "web", "TCP"),
        ServicePort(81, "other", "GRPC", 9090, "TCP", "grpc"),
        ServicePort(53, "dns", "UDP", 9090, "UDP"),
    )
    assert service.meta.annotations == {"networking.istio.io/exportTo": "."}


def test_endpoints_written_by_hand() -> None:
    made = mesh("""
apiVersion: v1
kind: Service
metadata: {name: db}
spec: {ports: [{name: tcp, port: 5432}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: db-1, labels: {kubernetes.io/service-name: db}}
addressType: IPv4
endpoints:
- {addresses: [10.1.1.1], hostname: a, targetRef: {kind: Pod, name: p}}
- {addresses: [10.1.1.2], conditions: {ready: false, serving: true, terminating: true}}
ports: [{name: tcp, port: 5433}]
---
apiVersion: v1
kind: Endpoints
metadata: {name: db}
subsets:
- addresses: [{ip: 10.1.1.3}]
  notReadyAddresses: [{ip: 10.1.1.4}]
  ports: [{name: tcp, port: 5434}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: db-2, labels: {kubernetes.io/service-name: db}}
addressType: FQDN
endpoints: [{addresses: [db.example]}]
""")
    slice_, mirrored = made.endpoint_slices
    assert slice_.addresses == (
        EndpointAddress("10.1.1.1", True, None, None, "a", "default/p"),
        EndpointAddress("10.1.1.2", False, True, True),
    )
    assert (slice_.service, slice_.ports) == ("db", {"tcp": 5433})
    assert mirrored.addresses == (
        EndpointAddress("10.1.1.3", True, True, False),
        EndpointAddress("10.1.1.4", False, False, False),
    )
    assert (mirrored.service, mirrored.ports) == ("db", {"tcp": 5434})
    assert any("FQDN are ignored" in warning.message for warning in made.warnings)


def test_service_entry_and_workload_entry() -> None:
    made = mesh("""
apiVersion: networking.istio.io/v1beta1
kind: ServiceEntry
metadata: {name: ext}
spec:
  hosts: [a.example]
  addresses: [192.0.2.1/32, 198.51.100.0/24]
  location: MESH_INTERNAL
  resolution: STATIC
  exportTo: [.]
  subjectAltNames: [spiffe://x/y]
  ports: [{number: 80, name: http, protocol: http, targetPort: 8080}, {number: 443, name: tls}]
  endpoints:
  - {address: 192.0.2.9, ports: {http: 81}, labels: {v: "1"}, locality: r/z, weight: 5, serviceAccount: sa, network: net}
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: socket}
spec:
  hosts: [a.example, "*.b.example"]
  resolution: STATIC
  ports: [{number: 80, name: http, protocol: HTTP}]
  endpoints: [{address: "unix:///run/x"}]
---
apiVersion: networking.istio.io/v1
kind: WorkloadEntry
metadata: {name: vm, labels: {app: vm}}
spec: {address: 192.0.2.10, serviceAccount: vm}
""")
    entry, socket = made.service_entries
    assert entry.addresses == ("192.0.2.1", "198.51.100.0/24")
    assert entry.ports == (ServiceEntryPort(80, "http", "HTTP", 8080), ServiceEntryPort(443, "tls", "AUTO"))
    assert (entry.location, entry.resolution, entry.export_to) == ("MESH_INTERNAL", "STATIC", (".",))
    assert entry.endpoints == (WorkloadEndpoint("192.0.2.9", {"http": 81}, {"v": "1"}, "net", "r/z", 5, "sa"),)
    assert (socket.hosts, socket.endpoints) == (("a.example", "*.b.example"), (WorkloadEndpoint("unix:///run/x"),))
    assert entry.auto_addresses == {}
    assert made.workload_entries[0].endpoint == WorkloadEndpoint("192.0.2.10", service_account="vm")
    assert made.warnings == ()


def test_sidecar() -> None:
    made = mesh("""
apiVersion: v1
kind: Pod
metadata: {name: web, labels: {app: web}}
spec: {containers: [{name: app}]}
---
apiVersion: networking.istio.io/v1
kind: Sidecar
metadata: {name: s}
spec:
  workloadSelector: {labels: {app: web}}
  outboundTrafficPolicy: {mode: ALLOW_ANY, egressProxy: {host: gw.default.svc.cluster.local, port: {number: 80}, subset: v1}}
  inboundConnectionPool: {http: {http1MaxPendingRequests: 1, idleTimeout: 1m, h2UpgradePolicy: UPGRADE}}
  ingress:
  - port: {number: 8080, protocol: HTTP, name: web}
    defaultEndpoint: 127.0.0.1:80
    captureMode: NONE
    bind: 1.2.3.4
    connectionPool:
      tcp: {maxConnections: 2, connectTimeout: 1.5s, tcpKeepalive: {probes: 3, time: 1h, interval: 100ms}}
  egress:
  - {port: {number: 9080, protocol: tcp, name: t}, bind: 127.0.0.9, captureMode: NONE, hosts: ["*/*"]}
  - {hosts: [./*, "~/x.example"]}
""")
    (sidecar,) = made.sidecars
    assert sidecar.workload_selector == {"app": "web"}
    assert sidecar.outbound_traffic_policy == OutboundTrafficPolicy(
        "ALLOW_ANY", ("gw.default.svc.cluster.local", 80, "v1")
    )
    assert sidecar.inbound_connection_pool == ConnectionPool(
        http=HTTPPool(http1_max_pending_requests=1, idle_timeout=60.0, h2_upgrade_policy="UPGRADE")
    )
    assert sidecar.ingress == (
        SidecarIngress(
            8080,
            "HTTP",
            "web",
            "1.2.3.4",
            "NONE",
            "127.0.0.1:80",
            ConnectionPool(tcp=TCPPool(2, 1.5, (3, 3600.0, 0.1))),
        ),
    )
    assert sidecar.egress == (
        SidecarEgress(("*/*",), 9080, "TCP", "t", "127.0.0.9", "NONE"),
        SidecarEgress(("./*", "~/x.example")),
    )


def test_peer_authentication() -> None:
    made = mesh("""
apiVersion: security.istio.io/v1beta1
kind: PeerAuthentication
metadata: {name: p}
spec: {selector: {matchLabels: {app: web}}, mtls: {mode: STRICT}, portLevelMtls: {8080: {mode: DISABLE}}}
---
apiVersion: security.istio.io/v1
kind: PeerAuthentication
metadata: {name: q}
spec: {}
""")
    p, q = made.peer_authentications
    assert (p.selector, p.mode, p.port_modes) == ({"app": "web"}, "STRICT", {8080: "DISABLE"})
    assert (q.selector, q.mode, q.port_modes) == (None, "UNSET", {})


def test_destination_rule_and_virtual_service_are_kept_as_written() -> None:
    made = mesh("""
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: d}
spec:
  host: web
  trafficPolicy:
    loadBalancer: {consistentHash: {httpCookie: {name: c, ttl: 0s}, maglev: {tableSize: 11}}}
    outlierDetection: {consecutive5xxErrors: 0, interval: 5m}
    portLevelSettings: [{port: {number: 80}, tls: {mode: DISABLE}}]
  subsets: [{name: v1, labels: {v: "1"}}]
---
apiVersion: networking.istio.io/v1alpha3
kind: VirtualService
metadata: {name: v}
spec:
  hosts: [web, a.example]
  http:
  - name: first
    match: [{uri: {prefix: /a}, headers: {x: {regex: a.*}}, withoutHeaders: {z: {}}}]
    route: [{destination: {host: web, subset: v1, port: {number: 80}}, weight: 1}, {destination: {host: web}, weight: 0}]
    fault: {delay: {fixedDelay: 1s, percentage: {value: 0.5}}, abort: {httpStatus: 503}}
    retries: {attempts: 0}
    timeout: 1ms
    mirrors: [{destination: {host: web}}]
    corsPolicy: {allowOrigins: [{exact: "*"}], maxAge: 1h}
    headers: {request: {set: {a: b}, remove: [c]}}
  - directResponse: {status: 418, body: {string: tea}}
  tls: [{match: [{sniHosts: [a.example]}], route: [{destination: {host: web}}]}]
  tcp: [{route: [{destination: {host: web}}]}]
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {ports: [{name: http, port: 80}], selector: {app: web}}
---
apiVersion: v1
kind: Pod
metadata: {name: web, labels: {app: web, v: "1"}}
spec: {containers: [{name: app, ports: [{containerPort: 80}]}]}
""")
    assert made.warnings == ()
    (rule,), (route,) = made.destination_rules, made.virtual_services
    assert (rule.kind, rule.meta.key) == ("DestinationRule", "default/d")
    assert rule.spec["subsets"] == [{"name": "v1", "labels": {"v": "1"}}]
    assert type(rule.spec["trafficPolicy"]) is dict
    http = route.spec["http"]
    assert isinstance(http, list)
    assert http[0]["timeout"] == "1ms"
    assert http[0]["retries"] == {"attempts": 0}


def test_mesh_config() -> None:
    made = mesh("""
apiVersion: v1
kind: ConfigMap
metadata: {name: istio, namespace: anywhere}
data:
  mesh: |
    trustDomain: example.org
    trustDomainAliases: [old.example.org]
    rootNamespace: anywhere
    outboundTrafficPolicy: {mode: REGISTRY_ONLY}
    inboundTrafficPolicy: {mode: LOCALHOST}
    discoverySelectors:
    - matchLabels: {a: b}
      matchExpressions: [{key: c, operator: Exists}]
    defaultServiceExportTo: [.]
    connectTimeout: 1m
    enableAutoMtls: false
    enableTracing: false
    accessLogFile: /dev/stdout
    accessLogEncoding: JSON
    h2UpgradePolicy: UPGRADE
    dnsRefreshRate: 5s
    localityLbSetting: {enabled: false}
    pathNormalization: {normalization: MERGE_SLASHES}
    defaultConfig:
      discoveryAddress: istiod.anywhere.svc:15010
      tracing: {sampling: 10}
""")
    config = made.mesh_config
    assert (config.trust_domain, config.trust_domain_aliases, config.root_namespace) == (
        "example.org",
        ("old.example.org",),
        "anywhere",
    )
    assert (config.outbound_traffic_policy.mode, config.inbound_localhost) == ("REGISTRY_ONLY", True)
    assert config.discovery_selectors == (LabelSelector({"a": "b"}, (LabelExpression("c", "Exists"),)),)
    assert (config.default_service_export_to, config.default_virtual_service_export_to) == ((".",), ("*",))
    assert (config.connect_timeout, config.dns_refresh_rate) == (60.0, 5.0)
    assert (config.enable_auto_mtls, config.enable_tracing, config.h2_upgrade, config.locality_lb_enabled) == (
        False,
        False,
        True,
        False,
    )
    assert (config.access_log_file, config.access_log_encoding, config.path_normalization) == (
        "/dev/stdout",
        "JSON",
        "MERGE_SLASHES",
    )
    assert config.default_config == {
        "discoveryAddress": "istiod.anywhere.svc:15010",
        "tracing": {"sampling": 10},
    }
    assert made.warnings == ()


def test_mesh_config_defaults() -> None:
    made = mesh("apiVersion: v1\nkind: Namespace\nmetadata: {name: a, labels: {x: z}}\n")
    assert made.mesh_config.outbound_traffic_policy.mode == "ALLOW_ANY"
    assert made.mesh_config.enable_auto_mtls
    assert made.namespaces[0].meta.labels == {"kubernetes.io/metadata.name": "a", "x": "z"}


def test_our_own_kinds() -> None:
    made = mesh("""
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: default}
spec: {containers: [{name: app}]}
status: {podIP: 10.9.9.9}
---
apiVersion: sidecarlab.dev/v1alpha1
kind: ExternalHost
metadata: {name: far}
spec:
  hosts: [far.example, www.far.example]
  addresses: [203.0.113.7]
  ports: [{port: 53, protocol: udp}, {port: 53, protocol: tcp}, {port: 443, protocol: https, name: web}]
---
apiVersion: sidecarlab.dev/v1alpha1
kind: Link
metadata: {name: thin}
spec: {between: [web.default, far], mtu: 1280, rate: 1.5mbit, loss: 2.5%, cut: true}
---
apiVersion: sidecarlab.dev/v1alpha1
kind: TrafficTest
metadata: {name: crafted}
spec:
  from: {external: far, spoof: 1.2.3.4}
  to: {pod: default/web, port: 80, protocol: tcp, crafted: true, flags: SA}
  timeout: 500ms
  retry: {attempts: 3, interval: 100ms}
  expect: {envoy: {cluster: null}, wire: {packets: [{proto: tcp}]}}
---
apiVersion: sidecarlab.dev/v1alpha1
kind: TrafficTest
metadata: {name: lookup}
spec:
  from: {pod: default/web, uid: 1337}
  to: {host: far.example, protocol: dns-tcp, queryType: AAAA, server: 9.9.9.9}
  expect: {dns: {answers: []}}
""")
    (host,), (link,), (crafted, lookup) = made.external_hosts, made.links, made.tests
    assert host.hosts == ("far.example", "www.far.example")
    assert host.ports == (ExternalPort(53, "udp"), ExternalPort(53, "tcp"), ExternalPort(443, "https", "web"))
    assert (link.between, link.mtu, link.rate_bits, link.loss_percent, link.cut) == (
        ("web.default", "far"),
        1280,
        1_500_000,
        2.5,
        True,
    )
    assert crafted.flow_from == FlowFrom(external="far", spoof="1.2.3.4")
    assert crafted.to == FlowTo("10.9.9.9", 80, "tcp", crafted=True, flags="SA")
    assert (crafted.timeout, crafted.retry) == (0.5, Retry(3, 0.1))
    assert crafted.expect == {"envoy": {"cluster": None}, "wire": {"packets": [{"proto": "tcp"}]}}
    assert lookup.flow_from == FlowFrom("web.default", uid=1337)
    assert lookup.to == FlowTo("far.example", 53, "dns-tcp", server="9.9.9.9", query_type="AAAA")
    assert (lookup.timeout, lookup.retry) == (5.0, Retry())
    assert str(lookup.meta.source) == "f.yaml:31"

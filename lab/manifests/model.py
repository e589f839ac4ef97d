"""The typed, validated model of a mesh: what manifests become, and what every other room reads.

All objects are frozen. Times are seconds (float), addresses are strings as written in
canonical form (``ipaddress`` normalised), ports are ints. ``Source`` says where an object was
written, for error messages. Kubernetes and Istio semantics: see ``lab.manifests.load``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

GrpcStatus = Literal[
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
]
"""Of gRPC, in the order of their numbers (grpc/grpc: doc/statuscodes.md)."""

Protocol = Literal[
    "HTTP", "HTTP2", "GRPC", "GRPC-Web", "HTTP_PROXY", "HTTPS", "TLS", "TCP", "MONGO", "REDIS", "MYSQL", "UDP", "AUTO"
]
"""Istio's protocol of a port after selection (istio/istio: pkg/config/protocol/instance.go).

``AUTO`` is Istio's "Unsupported": detected by Envoy at run time.
"""


@dataclass(frozen=True, slots=True)
class Source:
    """Where an object or field was written; ``line`` counts from 1, 0 means unknown."""

    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else (self.file or "-")


@dataclass(frozen=True, slots=True)
class Meta:
    """metadata of a Kubernetes object. ``created`` orders "oldest wins" (seconds since the epoch, 0 if unset)."""

    name: str
    namespace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    created: float = 0.0
    order: int = 0  # position in the input, the last tie-breaker after (created, name, namespace)
    source: Source = Source()

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class LabelExpression:
    """One matchExpressions entry."""

    key: str
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LabelSelector:
    """A Kubernetes label selector; everything in it is ANDed, empty matches all."""

    match_labels: Mapping[str, str] = field(default_factory=dict)
    match_expressions: tuple[LabelExpression, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        for key, value in self.match_labels.items():
            if labels.get(key) != value:
                return False
        for e in self.match_expressions:
            has = e.key in labels
            ok = {
                "In": has and labels.get(e.key) in e.values,
                "NotIn": not has or labels[e.key] not in e.values,
                "Exists": has,
                "DoesNotExist": not has,
            }[e.operator]
            if not ok:
                return False
        return True


# --- Kubernetes -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Namespace:
    meta: Meta


@dataclass(frozen=True, slots=True)
class ContainerPort:
    port: int
    name: str = ""
    protocol: Literal["TCP", "UDP"] = "TCP"


@dataclass(frozen=True, slots=True)
class AppProbe:
    """A probe or hook of a container that its pod's agent answers instead.

    ``name`` ends the agent's path: readyz, livez, startupz, prestopz or poststartz; ``kind`` is httpGet, tcpSocket or grpc, and
    ``action`` what Kubernetes has below it, with the port as a number. ``timeout`` in seconds, 0 is none.
    """

    name: str
    kind: str
    action: Mapping[str, object]
    timeout: int = 0


@dataclass(frozen=True, slots=True)
class Container:
    """One app container. Without ``command`` it runs the echo app on its ports."""

    name: str
    image: str = ""
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    ports: tuple[ContainerPort, ...] = ()
    run_as_user: int | None = None
    run_as_group: int | None = None
    working_dir: str = ""
    probes: tuple[AppProbe, ...] = ()


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod, written as such or made from a Deployment; ``ip`` is set, ``injected`` is decided.

    ``ips`` holds every address (IPv4 first unless the manifest says otherwise); ``ip`` is the first.
    ``proxy_config`` is the annotation ``proxy.istio.io/config`` as plain data with camelCase keys, as written.
    ``scrape`` says which metrics of the app its agent merges (``ISTIO_PROMETHEUS_ANNOTATIONS``); empty is none.
    """

    meta: Meta
    ips: tuple[str, ...]
    containers: tuple[Container, ...]
    injected: bool
    service_account: str = "default"
    hostname: str = ""
    subdomain: str = ""
    owner_kind: str = "Pod"
    owner_name: str = ""
    dns_search: tuple[str, ...] = ()
    ready: bool = True
    proxy_config: Mapping[str, object] = field(default_factory=dict)
    scrape: str = ""

    @property
    def ip(self) -> str:
        return self.ips[0]

    @property
    def name(self) -> str:
        """``POD.NAMESPACE``, the way istioctl writes a pod."""
        return f"{self.meta.name}.{self.meta.namespace}"


@dataclass(frozen=True, slots=True)
class ServicePort:
    """A service port; ``target`` is a number or the name of a container port."""

    port: int
    name: str = ""
    protocol: Protocol = "AUTO"
    target: int | str = 0
    transport: Literal["TCP", "UDP"] = "TCP"
    app_protocol: str = ""


@dataclass(frozen=True, slots=True)
class Service:
    """A Kubernetes Service. ``cluster_ips`` is empty for headless and ExternalName services.

    ``families`` (4 and 6) is what ipFamilies and ipFamilyPolicy of a headless service say, empty if they say nothing.
    """

    meta: Meta
    cluster_ips: tuple[str, ...]
    ports: tuple[ServicePort, ...]
    selector: Mapping[str, str] = field(default_factory=dict)
    headless: bool = False
    external_name: str = ""
    publish_not_ready: bool = False
    internal_traffic_policy_local: bool = False
    traffic_distribution: str = ""
    families: tuple[int, ...] = ()

    def host(self, suffix: str = "cluster.local") -> str:
        return f"{self.meta.name}.{self.meta.namespace}.svc.{suffix}"

    def addresses_of(self, pod: Pod) -> tuple[str, ...]:
        """The addresses of a pod that the service leads to: Kubernetes makes EndpointSlices of its families alone.

        A headless service that names no family has the cluster's first one, which is that of a pod's first address
        (kubernetes/kubernetes: pkg/registry/core/service/storage/alloc.go, pkg/controller/endpointslice).
        """
        of = {ip: 6 if ":" in ip else 4 for ip in (*self.cluster_ips, *pod.ips)}
        wanted = {of[ip] for ip in self.cluster_ips} or set(self.families) or {of[ip] for ip in pod.ips[:1]}
        return tuple(ip for ip in pod.ips if of[ip] in wanted)


@dataclass(frozen=True, slots=True)
class EndpointAddress:
    """One address of a written Endpoints/EndpointSlice object."""

    ip: str
    ready: bool = True
    serving: bool | None = None
    terminating: bool | None = None
    hostname: str = ""
    target_pod: str = ""  # namespace/name, if targetRef names a Pod


@dataclass(frozen=True, slots=True)
class EndpointSlice:
    """Endpoints written by hand for a Service without selector."""

    meta: Meta
    service: str
    addresses: tuple[EndpointAddress, ...]
    ports: Mapping[str, int] = field(default_factory=dict)  # port name -> number


# --- Istio ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkloadEndpoint:
    """A ServiceEntry endpoint or a WorkloadEntry's address part."""

    address: str
    ports: Mapping[str, int] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    network: str = ""
    locality: str = ""
    weight: int = 0
    service_account: str = ""


@dataclass(frozen=True, slots=True)
class WorkloadEntry:
    meta: Meta
    endpoint: WorkloadEndpoint


@dataclass(frozen=True, slots=True)
class ServiceEntryPort:
    port: int
    name: str
    protocol: Protocol = "AUTO"
    target: int = 0  # 0: same as port


@dataclass(frozen=True, slots=True)
class ServiceEntry:
    """``auto_addresses`` maps a host to its auto-allocated addresses (only for eligible hosts)."""

    meta: Meta
    hosts: tuple[str, ...]
    ports: tuple[ServiceEntryPort, ...]
    addresses: tuple[str, ...] = ()
    location: Literal["MESH_EXTERNAL", "MESH_INTERNAL"] = "MESH_EXTERNAL"
    resolution: Literal["NONE", "STATIC", "DNS", "DNS_ROUND_ROBIN", "DYNAMIC_DNS"] = "NONE"
    endpoints: tuple[WorkloadEndpoint, ...] = ()
    workload_selector: Mapping[str, str] | None = None
    export_to: tuple[str, ...] = ()
    subject_alt_names: tuple[str, ...] = ()
    auto_addresses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TCPPool:
    max_connections: int = 0
    connect_timeout: float | None = None
    keepalive: tuple[int, float, float] | None = None  # probes, time, interval; 0 = unset inside
    max_connection_duration: float | None = None
    idle_timeout: float | None = None


@dataclass(frozen=True, slots=True)
class HTTPPool:
    http1_max_pending_requests: int = 0
    http2_max_requests: int = 0
    max_requests_per_connection: int = 0
    max_retries: int = 0
    idle_timeout: float | None = None
    h2_upgrade_policy: Literal["DEFAULT", "DO_NOT_UPGRADE", "UPGRADE"] = "DEFAULT"
    use_client_protocol: bool = False
    max_concurrent_streams: int = 0


@dataclass(frozen=True, slots=True)
class ConnectionPool:
    tcp: TCPPool | None = None
    http: HTTPPool | None = None


@dataclass(frozen=True, slots=True)
class OutboundTrafficPolicy:
    mode: Literal["ALLOW_ANY", "REGISTRY_ONLY", "ALLOW_ANY_DYNAMIC_DNS"] = "ALLOW_ANY"  # the last for the mesh alone
    egress_proxy: tuple[str, int, str] | None = None  # host, port, subset


@dataclass(frozen=True, slots=True)
class SidecarEgress:
    hosts: tuple[str, ...]
    port: int | None = None
    port_protocol: Protocol = "AUTO"
    port_name: str = ""
    bind: str = ""
    capture_mode: Literal["DEFAULT", "IPTABLES", "NONE"] = "DEFAULT"


@dataclass(frozen=True, slots=True)
class SidecarIngress:
    port: int
    protocol: Protocol = "AUTO"
    name: str = ""
    bind: str = ""
    capture_mode: Literal["DEFAULT", "IPTABLES", "NONE"] = "DEFAULT"
    default_endpoint: str = ""
    connection_pool: ConnectionPool | None = None


@dataclass(frozen=True, slots=True)
class Sidecar:
    meta: Meta
    workload_selector: Mapping[str, str] | None = None
    egress: tuple[SidecarEgress, ...] = ()
    ingress: tuple[SidecarIngress, ...] = ()
    outbound_traffic_policy: OutboundTrafficPolicy | None = None
    inbound_connection_pool: ConnectionPool | None = None


MTLSMode = Literal["UNSET", "DISABLE", "PERMISSIVE", "STRICT"]


@dataclass(frozen=True, slots=True)
class PeerAuthentication:
    meta: Meta
    selector: Mapping[str, str] | None = None
    mode: MTLSMode = "UNSET"
    port_modes: Mapping[int, MTLSMode] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RawConfig:
    """A DestinationRule or VirtualService whose ``spec`` is kept as checked plain data (camelCase keys, as written)."""

    kind: Literal["DestinationRule", "VirtualService"]
    meta: Meta
    spec: Mapping[str, object]


Visibility = Literal["PUBLIC", "NAMESPACE", "NONE"]


@dataclass(frozen=True, slots=True)
class ServiceEntryVisibility:
    """How far ServiceEntries of a namespace can be seen at most, whatever they export.

    ``policies`` are (selectors of namespace labels that all must match, visibility); the first that matches wins.
    """

    default: Visibility = "PUBLIC"
    policies: tuple[tuple[tuple[LabelSelector, ...], Visibility], ...] = ()
    apply_to_sidecars: bool = False

    def of(self, namespace_labels: Mapping[str, str]) -> Visibility:
        for selectors, visibility in self.policies:
            if all(selector.matches(namespace_labels) for selector in selectors):
                return visibility
        return self.default


@dataclass(frozen=True, slots=True)
class MeshConfig:
    """The MeshConfig fields that the lab acts on (defaults: istio/istio: pkg/config/mesh/mesh.go).

    ``default_config`` is the ProxyConfig as plain data with camelCase keys, handed to agents unchanged.
    """

    trust_domain: str = "cluster.local"
    trust_domain_aliases: tuple[str, ...] = ()
    root_namespace: str = "istio-system"
    outbound_traffic_policy: OutboundTrafficPolicy = OutboundTrafficPolicy()
    inbound_localhost: bool = False  # inboundTrafficPolicy LOCALHOST
    discovery_selectors: tuple[LabelSelector, ...] = ()
    default_service_export_to: tuple[str, ...] = ("*",)
    default_virtual_service_export_to: tuple[str, ...] = ("*",)
    default_destination_rule_export_to: tuple[str, ...] = ("*",)
    service_entry_visibility: ServiceEntryVisibility = ServiceEntryVisibility()
    proxy_listen_port: int = 15001
    proxy_inbound_listen_port: int = 15006
    proxy_http_port: int = 0
    connect_timeout: float = 10.0
    protocol_detection_timeout: float = 0.0
    enable_auto_mtls: bool = True
    enable_tracing: bool = True
    enable_prometheus_merge: bool = True
    access_log_file: str = ""
    access_log_encoding: Literal["TEXT", "JSON"] = "TEXT"
    access_log_format: str = ""
    disable_envoy_listener_log: bool = False
    h2_upgrade: bool = False
    dns_refresh_rate: float = 60.0
    locality_lb_enabled: bool = True
    path_normalization: Literal["DEFAULT", "NONE", "BASE", "MERGE_SLASHES", "DECODE_AND_MERGE_SLASHES"] = "DEFAULT"
    default_config: Mapping[str, object] = field(default_factory=dict)
    source: Source = Source()
    raw: Mapping[str, object] = field(default_factory=dict)  # the whole MeshConfig as written

    @property
    def status_port(self) -> int:
        """The agents' status port, defaultConfig.statusPort."""
        written = self.default_config.get("statusPort")
        return written if isinstance(written, int) else 15020


# --- sidecarlab.dev/v1alpha1 ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExternalPort:
    """A port of an ExternalHost; protocol ``http``, ``https`` (TLS, then HTTP), ``tls`` (TLS, then echo), ``tcp``, ``udp`` or ``grpc``."""

    port: int
    protocol: Literal["http", "https", "tls", "tcp", "udp", "grpc"]
    name: str = ""


@dataclass(frozen=True, slots=True)
class ExternalHost:
    """A machine outside the mesh: names that cluster DNS resolves, addresses (set), ports it serves with the echo app."""

    meta: Meta
    hosts: tuple[str, ...]
    addresses: tuple[str, ...]
    ports: tuple[ExternalPort, ...]


@dataclass(frozen=True, slots=True)
class Link:
    """Properties of the path between two places (a pod ``POD.NS``, an external host's name, or ``*``)."""

    meta: Meta
    between: tuple[str, str]
    mtu: int = 0
    rate_bits: int = 0
    loss_percent: float = 0.0
    cut: bool = False


FlowProtocol = Literal["http", "grpc", "tcp", "tls", "udp", "dns", "dns-tcp", "icmp"]


@dataclass(frozen=True, slots=True)
class FlowFrom:
    """Where a flow starts: a pod (``POD.NAMESPACE``), or an ExternalHost by name. ``spoof`` is a forged source address."""

    pod: str = ""
    external: str = ""
    uid: int = 1000
    spoof: str = ""


@dataclass(frozen=True, slots=True)
class FlowTo:
    """Where a flow goes. ``host`` is a name (looked up from the source pod) or an address.

    ``crafted`` sends one hand-made packet (raw socket) instead of a kernel connection; ``flags`` are its TCP flags.
    ``silent`` opens a TCP connection and waits for the other side to speak first.
    ``authority`` replaces the HTTP Host header (default: host, with the port unless 80), ``sni`` the TLS server name.
    For ``dns`` flows ``host`` is the name that is looked up and ``server`` the resolver (default: resolv.conf's first).
    """

    host: str
    port: int = 0
    protocol: FlowProtocol = "http"
    path: str = "/"
    method: str = "GET"
    headers: Mapping[str, str] = field(default_factory=dict)
    authority: str = ""
    sni: str = ""
    crafted: bool = False
    flags: str = "S"
    server: str = ""
    query_type: Literal["A", "AAAA", "TXT", "SRV", "MX", "CNAME", "PTR"] = "A"
    silent: bool = False


@dataclass(frozen=True, slots=True)
class Retry:
    attempts: int = 1
    interval: float = 0.0


@dataclass(frozen=True, slots=True)
class TrafficTest:
    """One flow and the verdict it must have. ``expect`` is any subset of a verdict, as written."""

    meta: Meta
    flow_from: FlowFrom
    to: FlowTo
    expect: Mapping[str, object]
    timeout: float = 5.0
    retry: Retry = Retry()


Level = Literal["info", "warning"]


@dataclass(frozen=True, slots=True)
class Warning:
    """Something accepted but not acted on, or a semantic doubt; shown, never fatal.

    ``code`` is what ``istioctl analyze`` calls it (IST0118), empty for what is the lab's own.
    """

    source: Source
    message: str
    code: str = ""
    level: Level = "warning"

    def __str__(self) -> str:
        return f"{self.level}: {self.source}: {self.message}" + (f" [{self.code}]" if self.code else "")


@dataclass(frozen=True, slots=True)
class Fabric:
    """Addresses that belong to the lab itself, chosen so that no manifest claims them."""

    dns: str  # cluster DNS, 10.96.0.10 or the next free address
    discovery: str  # address of the control plane (ports 15010, 15012, 15014, 8080)
    gateway: str = "169.254.1.1"  # the node's address on every pod link
    dns6: str = ""
    discovery6: str = ""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Everything a lab is made of. Names are unique per kind and namespace; addresses are unique and set."""

    name: str
    files: tuple[str, ...]
    mesh_config: MeshConfig
    fabric: Fabric
    namespaces: tuple[Namespace, ...] = ()
    pods: tuple[Pod, ...] = ()
    services: tuple[Service, ...] = ()
    endpoint_slices: tuple[EndpointSlice, ...] = ()
    service_entries: tuple[ServiceEntry, ...] = ()
    workload_entries: tuple[WorkloadEntry, ...] = ()
    sidecars: tuple[Sidecar, ...] = ()
    destination_rules: tuple[RawConfig, ...] = ()
    virtual_services: tuple[RawConfig, ...] = ()
    peer_authentications: tuple[PeerAuthentication, ...] = ()
    external_hosts: tuple[ExternalHost, ...] = ()
    links: tuple[Link, ...] = ()
    tests: tuple[TrafficTest, ...] = ()
    warnings: tuple[Warning, ...] = ()
    domain_suffix: str = "cluster.local"

    def pod(self, name: str) -> Pod | None:
        """The pod called ``POD.NAMESPACE`` or ``NAMESPACE/POD``, or None."""
        if "/" in name:
            namespace, _, pod = name.partition("/")
            name = f"{pod}.{namespace}"
        return next((p for p in self.pods if p.name == name), None)

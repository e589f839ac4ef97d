"""Random small meshes and requests, of the vocabulary that decides where a proxy sends what.

Pods and machines outside are always the same (`GROUND`), so that a running lab can become each mesh. A mesh is a list of documents, each
of which can be left out.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from lab.manifests.model import FlowFrom, FlowTo, Meta, TrafficTest

Document = Mapping[str, Any]

NAMESPACES = ("one", "two", "plain")
PODS = {
    "client.one": {"app": "client", "version": "v1"},
    "alpha.one": {"app": "alpha", "version": "v1"},
    "beta.two": {"app": "beta", "version": "v1"},
    "gamma.two": {"app": "beta", "version": "v2"},
    "plain.plain": {"app": "plain", "version": "v1"},
}
ADDRESSES = {name: f"10.244.{n}.10" for n, name in enumerate(PODS, 101)}
OUTSIDE = {"vendor": "203.0.113.10", "other": "203.0.113.20"}
NAMES_OUTSIDE = {"vendor": ("api.vendor.example", "www.vendor.example"), "other": ("other.example",)}
_APP_PORTS = {"http": 8080, "tcp": 9000, "grpc": 7070, "https": 8443}
POLICIES = ("ALLOW_ANY", "REGISTRY_ONLY")
NOBODY = "203.0.113.99"
"""An address that no pod and no machine outside has."""
TIMEOUT = 1.0
"""Seconds a client waits; some flows get no answer at all."""


def config(policy: str) -> Document:
    """The mesh's own settings."""
    mesh = f"outboundTrafficPolicy: {{mode: {policy}}}\ndefaultConfig: {{proxyMetadata: {{ISTIO_META_DNS_CAPTURE: 'true'}}}}\n"
    meta = {"name": "istio", "namespace": "istio-system"}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {"mesh": mesh}}


def _object(kind: str, name: str, namespace: str, spec: Mapping[str, Any], **meta: Any) -> Document:
    group = {"Service": "v1", "PeerAuthentication": "security.istio.io/v1"}.get(kind, "networking.istio.io/v1")
    return {
        "apiVersion": group,
        "kind": kind,
        "metadata": {"name": name, "namespace": namespace, **meta},
        "spec": dict(spec),
    }


def ground() -> list[Document]:
    """What every mesh has: namespaces, pods with a program on each port, a Service that says what it speaks, machines outside."""
    made: list[Document] = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "istio-system"}}]
    for name in NAMESPACES:
        labels = {} if name == "plain" else {"istio-injection": "enabled"}
        made.append({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
    for key, labels in PODS.items():
        name, _, namespace = key.partition(".")
        ports = [{"name": kind, "containerPort": port} for kind, port in _APP_PORTS.items()]
        made.append(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name, "namespace": namespace, "labels": dict(labels)},
                "spec": {"serviceAccountName": name, "containers": [{"name": "app", "ports": ports}]},
                "status": {"podIP": ADDRESSES[key]},
            }
        )
        if labels["version"] == "v1":
            own = [{"name": kind, "port": port, "targetPort": kind} for kind, port in _APP_PORTS.items()]
            made.append(_object("Service", name, namespace, {"selector": {"app": labels["app"]}, "ports": own}))
    for name, address in OUTSIDE.items():
        ports = [{"port": port, "protocol": kind} for port, kind in _OUTSIDE_PORTS.items()]
        spec = {"hosts": list(NAMES_OUTSIDE[name]), "addresses": [address], "ports": ports}
        made.append(
            {"apiVersion": "sidecarlab.dev/v1alpha1", "kind": "ExternalHost", "metadata": {"name": name}, "spec": spec}
        )
    return made


_OUTSIDE_PORTS = {80: "http", 443: "https", 9000: "tcp", 8080: "http", 7070: "grpc"}

_SERVICE_PORTS = (
    {"name": "http", "port": 80, "targetPort": 8080},
    {"name": "http-web", "port": 8080, "targetPort": 8080},
    {"name": "web", "port": 81, "targetPort": 8080},
    {"name": "tcp", "port": 9000, "targetPort": 9000},
    {"name": "data", "port": 9001, "targetPort": 9000},
    {"name": "grpc", "port": 7070, "targetPort": 7070},
    {"name": "https", "port": 443, "targetPort": 8443},
    {"name": "tls-x", "port": 8443, "targetPort": 8443},
    {"name": "tcp-web", "port": 82, "targetPort": 8080},
    {"name": "http-data", "port": 83, "targetPort": 9000},
    {"name": "known", "port": 84, "targetPort": 8080, "appProtocol": "http"},
    {"name": "http-closed", "port": 85, "targetPort": 8099},
)

_ENTRY_PORTS = (
    {"number": 80, "name": "http", "protocol": "HTTP"},
    {"number": 443, "name": "tls", "protocol": "TLS"},
    {"number": 443, "name": "https", "protocol": "HTTPS"},
    {"number": 9000, "name": "tcp", "protocol": "TCP"},
    {"number": 8080, "name": "http-alt", "protocol": "HTTP"},
    {"number": 8080, "name": "auto", "protocol": ""},
    {"number": 81, "name": "http-moved", "protocol": "HTTP", "targetPort": 8080},
    {"number": 7070, "name": "grpc", "protocol": "GRPC"},
)

_PATHS = ("/", "/v1/items", "/v1", "/v2?debug=1", "/other", "/status/503", "/status/404", "/V1/items")
_HEADERS: tuple[Mapping[str, str], ...] = ({}, {}, {}, {"x-user": "ann"}, {"x-user": "bob", "x-kind": "a"})
_UNKNOWN = ("unknown.example", "nobody.two.svc.cluster.local")


class Maker:
    """Draws one mesh, and requests to it, from a random number generator."""

    def __init__(self, seed: str) -> None:
        self.draw = random.Random(seed)
        self.services: list[tuple[str, str, list[Mapping[str, Any]]]] = [
            (labels["app"], name.partition(".")[2], [{"port": port} for port in _APP_PORTS.values()])
            for name, labels in PODS.items()
            if labels["version"] == "v1"
        ]
        self.entries: list[tuple[str, list[Mapping[str, Any]]]] = []

    def _some(self, what: Sequence[Any], low: int, high: int) -> list[Any]:
        return self.draw.sample(list(what), min(len(what), self.draw.randint(low, high)))

    def _maybe(self, chance: float) -> bool:
        return self.draw.random() < chance

    def _exported(self, nobody: bool = False) -> dict[str, Any]:
        # only what has hosts of its own can be exported to nobody
        choices = (["."], ["~" if nobody else "."], ["*"], ["two"], ["one", "two"], ["plain"])
        return {"exportTo": self.draw.choice(choices)} if self._maybe(0.25) else {}

    def mesh(self) -> list[Document]:
        """The documents of a mesh beside the ground, its settings first."""
        draw = self.draw
        made: list[Document] = [config(draw.choice(POLICIES))]
        made += [self._service(n) for n in range(draw.randint(2, 5))]
        made += [self._entry(n) for n in range(draw.randint(1, 4))]
        made += [self._rule(n) for n in range(draw.randint(0, 3))]
        made += [self._virtual_service(n) for n in range(draw.randint(1, 4))]
        made += self._authentication()
        made += self._sidecars()
        return made

    def _service(self, number: int) -> Document:
        draw = self.draw
        name, namespace = f"s{number}", draw.choice(NAMESPACES)
        app = draw.choice(
            {"one": ("client", "alpha"), "two": ("beta", "beta", "nobody"), "plain": ("plain",)}[namespace]
        )
        ports = self._some(_SERVICE_PORTS, 1, 4)
        spec: dict[str, Any] = {"selector": {"app": app}, "ports": ports}
        if self._maybe(0.15):
            spec["clusterIP"] = "None"
        export = self._exported(nobody=True).get("exportTo")
        notes = {"annotations": {"networking.istio.io/exportTo": ",".join(export)}} if export else {}
        self.services.append((name, namespace, ports))
        return _object("Service", name, namespace, spec, **notes)

    def _entry(self, number: int) -> Document:
        draw = self.draw
        host = draw.choice(
            (
                "api.vendor.example",
                "www.vendor.example",
                "other.example",
                "*.vendor.example",
                "made.example",
                "made2.example",
            )
        )
        ports: dict[int, Mapping[str, Any]] = {}
        for port in self._some(_ENTRY_PORTS, 1, 4):
            ports.setdefault(port["number"], port)
        resolution = draw.choice(("NONE", "STATIC", "DNS", "DNS_ROUND_ROBIN"))
        if host.startswith("*") and resolution.startswith("DNS"):
            resolution = "NONE"
        spec: dict[str, Any] = {"hosts": [host], "ports": list(ports.values()), "resolution": resolution}
        spec["location"] = draw.choice(("MESH_EXTERNAL", "MESH_EXTERNAL", "MESH_INTERNAL"))
        if self._maybe(0.4):
            made_up = "203.0.113.0/29" if resolution == "NONE" else "240.250.0.7"
            block = "240.250.0.8" if resolution.startswith("DNS") else "203.0.113.0/28"
            spec["addresses"] = [draw.choice((OUTSIDE["vendor"], made_up, block))]
        if resolution == "STATIC":
            spec["endpoints"] = [{"address": draw.choice((*OUTSIDE.values(), ADDRESSES["beta.two"]))}]
        elif resolution != "NONE" and self._maybe(0.3):
            spec["endpoints"] = [{"address": draw.choice(("other.example", "api.vendor.example"))}]
        elif resolution != "NONE" and host.startswith("made"):
            spec["endpoints"] = [{"address": "other.example"}]
        spec |= self._exported(nobody=True)
        self.entries.append((host, list(ports.values())))
        return _object("ServiceEntry", f"e{number}", draw.choice((*NAMESPACES, "istio-system")), spec)

    def _hosts(self) -> list[str]:
        return [f"{n}.{ns}.svc.cluster.local" for n, ns, _ in self.services] + [host for host, _ in self.entries]

    def _rule(self, number: int) -> Document:
        draw = self.draw
        spec: dict[str, Any] = {"host": draw.choice(self._hosts())}
        if self._maybe(0.7):
            mode = draw.choice(("DISABLE", "ISTIO_MUTUAL", "SIMPLE"))
            policy: dict[str, Any] = {"tls": {"mode": mode}}
            if self._maybe(0.3):
                policy["portLevelSettings"] = [
                    {
                        "port": {"number": draw.choice((80, 8080, 9000))},
                        "tls": {"mode": draw.choice(("DISABLE", "SIMPLE"))},
                    }
                ]
            spec["trafficPolicy"] = policy
        if self._maybe(0.6):
            spec["subsets"] = [{"name": v, "labels": {"version": v}} for v in ("v1", "v2")]
        spec |= self._exported()
        return _object("DestinationRule", f"d{number}", draw.choice((*NAMESPACES, "istio-system")), spec)

    def _destination(self) -> dict[str, Any]:
        draw = self.draw
        host = draw.choice([h for h in self._hosts() if not h.startswith("*")])
        found: dict[str, Any] = {"host": host}
        if self._maybe(0.6):
            found["port"] = {"number": draw.choice((80, 8080, 9000, 443))}
        if self._maybe(0.25):
            found["subset"] = draw.choice(("v1", "v2", "v3"))
        return found

    def _match(self) -> dict[str, Any]:
        draw = self.draw
        found: dict[str, Any] = {}
        if self._maybe(0.6):
            found["uri"] = draw.choice(
                (
                    {"prefix": "/v1"},
                    {"exact": "/v1"},
                    {"regex": "/v[0-9]/.*"},
                    {"prefix": "/"},
                    {"exact": "/status/503"},
                )
            )
            if self._maybe(0.2):
                found["ignoreUriCase"] = True
        if self._maybe(0.25):
            found["headers"] = {"x-user": draw.choice(({"exact": "ann"}, {"prefix": "b"}, {"regex": "a.*"}))}
        if self._maybe(0.1):
            found["withoutHeaders"] = {"x-kind": {"exact": "a"}}
        if self._maybe(0.15):
            found["method"] = {"exact": draw.choice(("GET", "POST"))}
        if self._maybe(0.1):
            found["queryParams"] = {"debug": {"exact": "1"}}
        if self._maybe(0.15):
            found["port"] = draw.choice((80, 8080))
        if self._maybe(0.1):
            found["authority"] = {"prefix": draw.choice(("s", "api"))}
        if self._maybe(0.15):
            found["sourceLabels"] = {"app": draw.choice(("client", "beta"))}
        return found

    def _http_route(self) -> dict[str, Any]:
        draw = self.draw
        found: dict[str, Any] = {}
        if self._maybe(0.3):
            found["name"] = draw.choice(("first", "second"))
        if self._maybe(0.7):
            found["match"] = [self._match() for _ in range(draw.randint(1, 2))]
        kind = draw.random()
        if kind < 0.1:
            found["redirect"] = {"uri": "/elsewhere", "redirectCode": draw.choice((301, 302, 307))}
            return found
        if kind < 0.2:
            found["directResponse"] = {"status": draw.choice((200, 418, 503))}
            return found
        if self._maybe(0.2):
            shares = draw.choice(((100, 0), (50, 50), (0, 100)))
            found["route"] = [{"destination": self._destination(), "weight": w} for w in shares]
        else:
            found["route"] = [{"destination": self._destination()}]
        if self._maybe(0.2):
            found["rewrite"] = draw.choice(
                (
                    {"uri": "/new"},
                    {"authority": "rewritten.example"},
                    {"uriRegexRewrite": {"match": "/v[0-9]", "rewrite": "/vX"}},
                )
            )
        if self._maybe(0.15):
            found["fault"] = {"abort": {"httpStatus": draw.choice((400, 503)), "percentage": {"value": 100}}}
        if self._maybe(0.2):
            attempts, condition = draw.choice((0, 2)), draw.choice(("5xx", "connect-failure", "503"))
            found["retries"] = {"attempts": attempts, **({"retryOn": condition} if attempts else {})}
        return found

    def _virtual_service(self, number: int) -> Document:
        draw = self.draw
        host = draw.choice(self._hosts())
        spec: dict[str, Any] = {"hosts": [host]}
        if self._maybe(0.85):
            spec["http"] = [self._http_route() for _ in range(draw.randint(1, 3))]
        if "http" not in spec or self._maybe(0.25):
            spec["tcp"] = [
                {
                    **({"match": [{"port": draw.choice((9000, 9001, 443))}]} if self._maybe(0.6) else {}),
                    "route": [{"destination": self._destination()}],
                }
            ]
        if self._maybe(0.25) and "*" not in host:
            match = [{"sniHosts": [host], **({"port": 443} if self._maybe(0.7) else {})}]
            spec["tls"] = [{"match": match, "route": [{"destination": self._destination()}]}]
        spec |= self._exported()
        return _object("VirtualService", f"v{number}", draw.choice((*NAMESPACES, "istio-system")), spec)

    def _authentication(self) -> list[Document]:
        draw = self.draw
        modes = ("STRICT", "PERMISSIVE", "DISABLE")
        made: list[Document] = []
        if self._maybe(0.4):
            made.append(
                _object("PeerAuthentication", "default", "istio-system", {"mtls": {"mode": draw.choice(modes)}})
            )
        if self._maybe(0.4):
            where = draw.choice(("one", "two"))
            made.append(
                _object("PeerAuthentication", "default", where, {"mtls": {"mode": draw.choice((*modes, "UNSET"))}})
            )
        if self._maybe(0.4):
            spec = {
                "selector": {"matchLabels": {"app": "beta"}},
                "mtls": {"mode": draw.choice(modes)},
                "portLevelMtls": {draw.choice(("8080", "9000", "80")): {"mode": draw.choice(modes)}},
            }
            made.append(_object("PeerAuthentication", "own", "two", spec))
        return made

    def _imports(self) -> list[str]:
        names = [f"{ns}/{n}.{ns}.svc.cluster.local" for n, ns, _ in self.services]
        names += [f"*/{host}" for host, _ in self.entries]
        usual = ["./*", "*/*", "two/*", "one/*", "istio-system/*", "~/*", "*/*.vendor.example"]
        chosen = self._some(names, 1, 2) if self._maybe(0.4) else self._some(usual, 1, 3)
        return ["~/*"] if "~/*" in chosen else chosen

    def _sidecars(self) -> list[Document]:
        draw = self.draw
        made: list[Document] = []
        for name, namespace, chance in (
            ("default", "one", 0.35),
            ("default", "two", 0.25),
            ("own", "one", 0.3),
            ("default", "istio-system", 0.1),
        ):
            if not self._maybe(chance):
                continue
            spec: dict[str, Any] = {"egress": [{"hosts": self._imports()}]}
            if self._maybe(0.3):
                port = draw.choice(
                    (
                        {"number": 80, "protocol": "HTTP", "name": "http"},
                        {"number": 9000, "protocol": "TCP", "name": "tcp"},
                    )
                )
                spec["egress"].insert(0, {"port": port, "hosts": self._imports()})
            if self._maybe(0.3):
                spec["outboundTrafficPolicy"] = {"mode": draw.choice(POLICIES)}
            if name == "own":
                spec["workloadSelector"] = {"labels": {"app": "client"}}
            elif namespace == "two" and self._maybe(0.3):
                spec["ingress"] = [
                    {"port": {"number": 8080, "protocol": "HTTP", "name": "http"}, "defaultEndpoint": "127.0.0.1:8080"}
                ]
            made.append(_object("Sidecar", name, namespace, spec))
        return made

    # --- requests ---------------------------------------------------------------------------

    def request(self, number: int) -> TrafficTest:
        """A flow of the mesh that `mesh` made."""
        draw = self.draw
        source = draw.choice(("client.one",) * 6 + ("beta.two",) * 3 + ("plain.plain",) * 2 + ("alpha.one",))
        kind = draw.random()
        if kind < 0.5:
            name, namespace, ports = draw.choice(self.services)
            host = f"{name}.{namespace}" + draw.choice(("", ".svc.cluster.local"))
        elif kind < 0.75:
            host, ports = draw.choice(self.entries)
            host = host.replace("*", draw.choice(("api", "www", "none")))
        elif kind < 0.85:
            host, ports = draw.choice(list(ADDRESSES.values())), [{"port": p} for p in _APP_PORTS.values()]
        elif kind < 0.93:
            host = draw.choice((*OUTSIDE.values(), *(n for names in NAMES_OUTSIDE.values() for n in names), NOBODY))
            ports = [{"port": p} for p in _OUTSIDE_PORTS]
        else:
            host, ports = draw.choice(_UNKNOWN), [{"port": 80}, {"port": 9000}]
        chosen = draw.choice(ports)
        port = int(chosen.get("port") or chosen.get("number"))
        if self._maybe(0.1):
            port = draw.choice((80, 8080, 9000, 443, 5555))
        usual = {9000: "tcp", 9001: "tcp", 443: "tls", 8443: "tls", 7070: "grpc"}.get(port, "http")
        protocol = usual if self._maybe(0.8) else draw.choice(("http", "tcp", "tls", "grpc"))
        to = FlowTo(host, port, protocol)  # type: ignore[arg-type]
        if protocol in ("http", "tls"):
            to = FlowTo(
                host,
                port,
                protocol,  # type: ignore[arg-type]
                path=draw.choice(_PATHS),
                method=draw.choice(("GET", "GET", "GET", "POST")),
                headers=draw.choice(_HEADERS),
                authority=draw.choice(self._hosts()).replace("*", "api") if self._maybe(0.15) else "",
                sni=draw.choice(self._hosts()).replace("*", "api") if protocol == "tls" and self._maybe(0.2) else "",
            )
        return TrafficTest(Meta(f"request-{number}"), FlowFrom(pod=source), to, {}, TIMEOUT)

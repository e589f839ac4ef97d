"""Objects that undo each other, and parts that are never used: as istioctl analyze tells, each at its line."""

from __future__ import annotations

import pytest

from lab.manifests import load

BASE = """\
apiVersion: v1
kind: Namespace
metadata: {name: shop, labels: {istio-injection: disabled}}
---
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: shop, labels: {app: web}}
spec: {containers: [{name: app, ports: [{containerPort: 8080}]}]}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {selector: {app: web}, ports: [{name: http, port: 80, targetPort: 8080}]}
---
apiVersion: v1
kind: Service
metadata: {name: other, namespace: shop}
spec: {selector: {app: web}, ports: [{name: http, port: 8080}]}
---
"""  # what follows begins in line 20
WEB, OTHER = "{destination: {host: web}}", "{destination: {host: other, port: {number: 8080}}}"


def made(kind: str, spec: str, name: str = "x", namespace: str = "shop") -> str:
    """An object of six lines at least; its spec begins in its fifth."""
    return (
        f"apiVersion: networking.istio.io/v1\nkind: {kind}\nmetadata: {{name: {name}, namespace: {namespace}}}\n"
        f"spec:\n{spec}---\n"
    )


def routes(*rules: str, name: str = "x", hosts: str = "[web]", more: str = "") -> str:
    lines = "".join(f"  - {rule}\n" for rule in rules)
    return made("VirtualService", f"  hosts: {hosts}\n{more}  http:\n{lines}", name)


def told(text: str) -> list[tuple[str, str]]:
    return [(str(w.source), w.message) for w in load.load_text(BASE + text.removesuffix("---\n"), "f.yaml").warnings]


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (
            routes(f"route: [{WEB}]") + routes(f"route: [{WEB}]", name="z", hosts="[web.shop.svc.cluster.local]"),
            32,
            "VirtualService shop/z: shop/x is for web.shop.svc.cluster.local as well, and a proxy takes one of them only",
        ),
        (
            routes(f"route: [{WEB}]", f"{{match: [{{uri: {{exact: /a}}}}], route: [{WEB}]}}"),
            27,
            "VirtualService shop/x: it is never used: http[0] matches everything",
        ),
        (
            routes(f"{{match: [{{uri: {{prefix: /}}}}], route: [{WEB}]}}", f"route: [{WEB}]"),
            27,
            "VirtualService shop/x: it is never used: http[0] matches everything",
        ),
        (
            routes(
                f"{{match: [{{name: a, uri: {{exact: /a}}}}], route: [{WEB}]}}",
                f"{{match: [{{uri: {{exact: /b}}}}, {{name: b, uri: {{exact: /a}}}}], route: [{WEB}]}}",
            ),
            27,
            "VirtualService shop/x: the match is never used: one of http[0] takes all of it",
        ),
        (
            routes(
                f"{{match: [{{uri: {{prefix: /a}}, method: {{exact: GET}}}}], route: [{WEB}]}}",
                f"{{match: [{{uri: {{prefix: /a/b}}, method: {{exact: GET}}}}], route: [{WEB}]}}",
            ),
            27,
            "VirtualService shop/x: the match is never used: one of http[0] takes all of it",
        ),
        (
            routes("route: [{destination: {host: other}}]"),
            26,
            "VirtualService shop/x: other.shop.svc.cluster.local has no port 80, which clients of the rule ask for:"
            " name its port, or they get 503 NC",
        ),
        (
            made("DestinationRule", "  host: web\n  trafficPolicy:\n    tls: {mode: SIMPLE}\n"),
            26,
            "DestinationRule shop/x: mode SIMPLE without caCertificates: the server is verified by the CAs of the system alone",
        ),
        (
            made(
                "DestinationRule",
                "  host: web\n  trafficPolicy:\n    portLevelSettings:\n    - port: {number: 80}\n      tls: {mode: SIMPLE}\n",
            ),
            28,
            "DestinationRule shop/x: mode SIMPLE without caCertificates: the server is verified by the CAs of the system alone",
        ),
        (
            made(
                "ServiceEntry",
                "  hosts: [a.example]\n  ports:\n  - {number: 443, name: tls, protocol: TLS}\n  - {number: 9, name: t, protocol: TCP}\n",
            ),
            27,
            "ServiceEntry shop/x: it has no addresses, so that its TCP port takes everything to port 9;"
            " addresses, or DNS capture, would tell it apart",
        ),
        (
            made("ServiceEntry", "  hosts: [a.example]\n  ports: [{number: 80, name: a, protocol: HTTP}]\n")
            + made("ServiceEntry", "  hosts: [a.example]\n  ports: [{number: 80, name: a, protocol: GRPC}]\n", "z"),
            32,
            "ServiceEntry shop/z: port 80 of a.example is GRPC here, but HTTP in shop/x",
        ),
        (
            "apiVersion: v1\nkind: Service\nmetadata: {name: x, namespace: shop}\nspec:\n  type: ExternalName\n"
            "  externalName: a.example\n  ports:\n  - {port: 80, name: tcp}\n",
            27,
            'Service shop/x: the name "tcp" of port 80 says no protocol, as ports of an ExternalName should',
        ),
    ],
)
def test_doubt(text: str, line: int, message: str) -> None:
    assert (f"f.yaml:{line}", message) in told(text)


@pytest.mark.parametrize(
    "text",
    [
        # one is for nobody that sees the other
        routes(f"route: [{WEB}]", more="  exportTo: [default]\n")
        + routes(f"route: [{WEB}]", name="z", more="  exportTo: [.]\n"),
        # neither takes all of the other
        routes(
            f"{{match: [{{uri: {{prefix: /a}}, method: {{exact: GET}}}}], route: [{WEB}]}}",
            f"{{match: [{{uri: {{prefix: /a/b}}}}], route: [{OTHER}]}}",
            f"{{match: [{{uri: {{exact: /}}}}, {{uri: {{regex: /a.*}}}}], route: [{WEB}]}}",
            f"route: [{WEB}]",
        ),
        routes(f"{{match: [{{port: 8080}}], route: [{WEB.replace('web', 'other')}]}}", f"route: [{WEB}]"),
        made(
            "ServiceEntry",
            "  hosts: [a.example]\n  addresses: [192.0.2.1]\n  ports: [{number: 9, name: t, protocol: TCP}]\n",
        ),
        made("DestinationRule", "  host: web\n  trafficPolicy: {tls: {mode: SIMPLE, caCertificates: /ca.pem}}\n"),
    ],
)
def test_no_doubt(text: str) -> None:
    assert told(text) == []


def test_a_virtual_service_for_a_gateway_is_in_nobodys_way() -> None:
    text = routes(f"route: [{WEB}]") + routes(f"route: [{WEB}]", name="z", more="  gateways: [some/gateway]\n")
    assert told(text) == [("f.yaml:33", 'VirtualService shop/z: there is no gateway "some/gateway"')]


def test_dns_capture_tells_entries_apart() -> None:
    capture = (
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: istio, namespace: istio-system}\ndata:\n  mesh: |\n"
        "    defaultConfig: {proxyMetadata: {ISTIO_META_DNS_CAPTURE: 'true'}}\n---\n"
    )
    entry = made("ServiceEntry", "  hosts: [a.example]\n  ports: [{number: 9, name: t, protocol: TCP}]\n")
    assert not [m for _, m in told(capture + entry) if "no addresses" in m]
    assert [m for _, m in told(entry) if "no addresses" in m]

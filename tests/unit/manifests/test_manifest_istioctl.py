"""What istioctl analyze tells by a code of its own: each at its line, at its level, and not where it does not."""

from __future__ import annotations

import pytest

from lab.manifests import load

NAMESPACE = "apiVersion: v1\nkind: Namespace\nmetadata:\n  name: shop\n  labels: {%s}\n---\n"
INJECTED = NAMESPACE % "istio-injection: enabled"
PLAIN = NAMESPACE % "istio-injection: disabled"


def workload(labels: str = "{app: web}", replicas: int = 1, meta: str = "", template: str = "") -> str:
    return (
        f"apiVersion: apps/v1\nkind: Deployment\nmetadata:\n  name: web\n  namespace: shop\n{meta}spec:\n"
        f"  replicas: {replicas}\n  selector: {{matchLabels: {{app: web}}}}\n  template:\n"
        f"    metadata:\n      labels: {labels}\n{template}    spec:\n      containers:\n      - name: app\n"
        "        ports: [{containerPort: 80}, {containerPort: 53, protocol: UDP}, {containerPort: 53}, {containerPort: 8080, name: web}]\n---\n"
    )


def service(name: str, *ports: str, meta: str = "", more: str = "  selector: {app: web}\n") -> str:
    lines = "".join(f"  - {{{port}}}\n" for port in ports)
    return (
        f"apiVersion: v1\nkind: Service\nmetadata:\n  name: {name}\n  namespace: shop\n{meta}spec:\n{more}"
        f"  ports:\n{lines}---\n"
    )


def istio(kind: str, spec: str, api: str = "networking.istio.io/v1") -> str:
    return f"apiVersion: {api}\nkind: {kind}\nmetadata: {{name: x, namespace: shop}}\nspec:\n{spec}---\n"


def routes(http: str, more: str = "  hosts: [web]\n", kind: str = "http") -> str:
    return istio("VirtualService", f"{more}  {kind}:\n{http}")


def told(text: str) -> list[tuple[str, int, str, str]]:
    mesh = load.load_text(text.removesuffix("---\n"), "f")
    return [(w.code, w.source.line, w.level, w.message) for w in mesh.warnings if w.code]


WEB = service("web", "port: 80, name: http", "port: 8080, name: http-more, targetPort: web")
ONE = service("one", "port: 80, name: http")
BOTH = PLAIN + workload() + ONE
TO = "  - route: [{destination: {host: %s}}]\n"


@pytest.mark.parametrize(
    ("text", "code", "line", "level", "message"),
    [
        (
            NAMESPACE % "team: a",
            "IST0102",
            4,
            "info",
            "Namespace shop: no label says whether its pods get a sidecar, so they get none unless they ask for it;"
            " write istio-injection: enabled, or disabled",
        ),
        (
            NAMESPACE % "istio-injection: enabled, istio.io/rev: canary",
            "IST0123",
            5,
            "warning",
            "Namespace shop: istio-injection=enabled and istio.io/rev=canary both say how its pods join the mesh; keep one",
        ),
        (
            INJECTED + workload('{app: web, sidecar.istio.io/inject: "no"}'),
            "IST0103",
            16,
            "warning",
            'Deployment shop/web: it gets no sidecar in a namespace that is injected: sidecar.istio.io/inject is "no"',
        ),
        (
            (INJECTED + workload()).replace("shop", "kube-system"),
            "IST0103",
            16,
            "warning",
            "Deployment kube-system/web: it gets no sidecar in a namespace that is injected: "
            "the injector passes by the namespaces of the system",
        ),
        (
            PLAIN + workload() + service("a", "port: 80, name: http, appProtocol: bogus"),
            "IST0118",
            31,
            "info",
            'Service shop/a: appProtocol "bogus" of port 80, which counts instead of its name, says no protocol, so proxies '
            "detect it; http, tcp or another of Istio's words in front would tell them",
        ),
        (
            PLAIN + workload().replace("- name: app\n", "- {name: istio-proxy, image: auto}\n      - name: app\n"),
            "IST0146",
            20,
            "warning",
            "Deployment shop/web: image: auto is for the injector to replace, and nothing is injected here",
        ),
        (
            PLAIN
            + "apiVersion: v1\nkind: Pod\nmetadata: {name: x, namespace: shop}\nspec:\n  containers:\n"
            + "  - {name: app}\n  - {name: istio-proxy, image: auto}\n",
            "IST0147",
            13,
            "warning",
            "Pod shop/x: image: auto is for the injector to replace, and nothing is injected here",
        ),
        (
            INJECTED
            + workload(replicas=0)
            + service("dns", "port: 53, name: tcp-dns", "port: 53, name: dns, protocol: UDP"),
            "IST0116",
            10,
            "warning",
            "Deployment shop/web: Services lead to it on port 53 by TCP and UDP: dns",
        ),
        (
            INJECTED
            + workload()
            + service("a", "port: 80, name: http")
            + service("b", "port: 81, name: http, targetPort: 80"),
            "IST0137",
            10,
            "warning",
            "Deployment shop/web: Services lead to its port 80 from different ports (80, 81): a, b",
        ),
        (
            INJECTED + workload() + service("a", "port: 80, name: web"),
            "IST0118",
            31,
            "info",
            'Service shop/a: the name "web" of port 80 says no protocol, so proxies detect it; http, tcp or another of'
            " Istio's words in front would tell them",
        ),
        (
            PLAIN + service("a", "port: 80, name: tcp", more="  type: ExternalName\n  externalName: a.example\n"),
            "IST0150",
            16,
            "warning",
            'Service shop/a: the name "tcp" of port 80 says no protocol, as ports of an ExternalName should',
        ),
        (
            INJECTED + workload(meta="  annotations: {sidecar.istio.io/interceptionMode: TPROXY}\n"),
            "IST0107",
            12,
            "warning",
            "Deployment shop/web: annotation sidecar.istio.io/interceptionMode has no effect here: it is for Pod, not for"
            " Deployment (its place is spec.template.metadata)",
        ),
        (
            INJECTED + workload(template="      annotations:\n        networking.istio.io/exportTo: '*'\n"),
            "IST0107",
            19,
            "warning",
            "Deployment shop/web: annotation networking.istio.io/exportTo has no effect here: it is for Service, not for Pod",
        ),
        (
            PLAIN
            + workload()
            + service("one", "port: 80, name: http", meta="  annotations: {networking.istio.io/exportto: '.'}\n"),
            "IST0108",
            28,
            "warning",
            "Service shop/one: Istio has no annotation networking.istio.io/exportto."
            ' Did you mean "networking.istio.io/exportTo"?',
        ),
        (
            INJECTED + workload(template="      annotations:\n        sidecar.istio.io/inject: 'true'\n"),
            "IST0135",
            19,
            "info",
            "Deployment shop/web: annotation sidecar.istio.io/inject is deprecated; write the label"
            ' "sidecar.istio.io/inject" instead',
        ),
        (
            INJECTED + workload(template="      annotations:\n        sidecar.istio.io/proxyCPU: much\n"),
            "IST0125",
            19,
            "warning",
            'Deployment shop/web: bad value "much" of annotation sidecar.istio.io/proxyCPU: it must be a quantity, e.g. 100m or 128Mi',
        ),
        *(
            (
                PLAIN + workload() + WEB + ONE + text,
                "IST0112",
                line,
                "warning",
                "VirtualService shop/x: web.shop.svc.cluster.local has the ports 80, 8080, and none is named: it is the one"
                " that the client asked for",
            )
            for text, line in (
                (routes(TO % "web"), 50),
                (
                    routes(
                        "  - match: [{sniHosts: [web.shop]}]\n    route: [{destination: {host: web}}]\n",
                        "  hosts: [web.shop]\n",
                        "tls",
                    ),
                    51,
                ),
                (routes(TO % "web", kind="tcp"), 50),
                (routes(TO % "one" + "    mirror: {host: web}\n"), 51),
                (routes(TO % "one" + "    mirrors: [{destination: {host: web}}]\n"), 51),
            )
        ),
        (
            BOTH + routes("  - route: [{destination: {host: one, port: {number: 81}}}]\n"),
            "IST0101",
            39,
            "warning",
            "VirtualService shop/x: one.shop.svc.cluster.local has no port 81",
        ),
        (
            BOTH
            + routes(
                TO % "one", "  hosts: [web]\n  gateways:\n  - mesh\n  - shop/gw~istio-autogenerated-k8s-gateway~l\n"
            ),
            "IST0165",
            40,
            "warning",
            "VirtualService shop/x: gateway shop/gw~istio-autogenerated-k8s-gateway~l is one that Istio makes for itself of a"
            " Kubernetes Gateway",
        ),
        (
            BOTH + routes(TO % "one" + "    fault: {delay: {percent: 5, fixedDelay: 1s}}\n"),
            "IST0002",
            40,
            "warning",
            "VirtualService shop/x: percent is deprecated; write percentage",
        ),
        (
            BOTH
            + istio(
                "ServiceEntry",
                "  hosts: [a.example]\n  resolution: STATIC\n  ports: [{number: 80, name: http, protocol: HTTP}]\n"
                "  endpoints: [{address: 10.9.9.9, labels: {v: '1'}}]\n",
            )
            + istio(
                "DestinationRule",
                "  host: a.example\n  subsets:\n  - {name: v1, labels: {v: '1'}}\n  - {name: v2, labels: {v: '2'}}\n",
            ),
            "IST0173",
            49,
            "warning",
            'DestinationRule shop/x: subset "v2" selects none of the pods of a.example',
        ),
    ],
)
def test_told(text: str, code: str, line: int, level: str, message: str) -> None:
    assert (code, line, level, message) in told(text)


@pytest.mark.parametrize(
    ("kind", "spec", "line", "message"),
    [
        (
            "Sidecar",
            "  workloadSelector: {}\n  egress: [{hosts: [./*]}]\n",
            37,
            "workloadSelector without labels is none at all",
        ),
        (
            "Sidecar",
            "  ingress:\n  - port: {number: 9, protocol: TCP}\n    connectionPool:\n      tcp: {maxConnections: 1}\n      http: {maxRetries: 1}\n",
            41,
            "port 9 is not HTTP, so that only tcp settings of its pool count",
        ),
        (
            "Sidecar",
            "  egress:\n  - hosts:\n    - ./*\n    - shop/one.shop.svc.cluster.local\n",
            40,
            'host "shop/one.shop.svc.cluster.local" is told twice',
        ),
        ("Sidecar", "  egress:\n  - hosts: ['*/*', ./*]\n", 38, '"*/*" takes everything'),
        (
            "DestinationRule",
            "  host: one\n  trafficPolicy:\n    outlierDetection: {consecutiveErrors: 3}\n",
            39,
            "consecutiveErrors is deprecated; write consecutiveGatewayErrors or consecutive5xxErrors",
        ),
        (
            "DestinationRule",
            "  host: one\n  trafficPolicy:\n    loadBalancer:\n      consistentHash:\n        useSourceIp: true\n        minimumRingSize: 9\n",
            42,
            "minimumRingSize is deprecated; write ringHash",
        ),
        (
            "DestinationRule",
            "  host: one\n  subsets:\n  - name: v1\n    labels: {app: web}\n    trafficPolicy:\n      loadBalancer:\n"
            "        localityLbSetting: {failover: [{from: a, to: b}]}\n",
            43,
            "failover needs outlierDetection: nothing else tells that a locality fails",
        ),
        (
            "VirtualService",
            "  hosts: [one]\n  http:\n  - route: [{destination: {host: one}}]\n    mirrorPercent: 3\n",
            40,
            "mirrorPercent is deprecated; write mirrorPercentage",
        ),
        (
            "VirtualService",
            "  hosts: [one]\n  http:\n  - route: [{destination: {host: one}}]\n    fault:\n      abort: {percentage: {value: 5}}\n",
            41,
            "an abort without httpStatus or grpcStatus aborts nothing",
        ),
        (
            "VirtualService",
            "  hosts: [one]\n  http:\n  - directResponse:\n      status: 200\n      body: {string: "
            + "x" * 102401
            + "}\n",
            41,
            "a body of 102401 bytes goes to every proxy",
        ),
        (
            "VirtualService",
            "  hosts: [192.0.2.1]\n  tls:\n  - match: [{sniHosts: [192.0.2.1]}]\n    route: [{destination: {host: one}}]\n",
            39,
            '"192.0.2.1" is an address, and hardly any client sends that as SNI',
        ),
        (
            "ServiceEntry",
            "  hosts: [a.example]\n  ports: [{number: 80, name: http, protocol: HTTP}]\n  workloadSelector: {labels: {app: web}}\n",
            39,
            "a workloadSelector is of no use with resolution NONE",
        ),
        (
            "ServiceEntry",
            "  hosts: [a.example, b.example]\n  addresses: [192.0.2.1]\n  ports: [{number: 443, name: tls, protocol: TLS}]\n  resolution: DNS\n",
            37,
            "with addresses and a TCP or TLS port, write one host: all of them share the addresses",
        ),
        ("WorkloadEntry", "  network: n1\n", 36, "it has a network but no address"),
    ],
)
def test_admission_warns(kind: str, spec: str, line: int, message: str) -> None:
    found = [
        (at, text)
        for code, at, level, text in told(BOTH + istio(kind, spec))
        if (code, level) == ("IST0133", "warning")
    ]
    assert [at for at, text in found if text.startswith(f"{kind} shop/x: {message}")] == [line], found


@pytest.mark.parametrize(
    "text",
    [
        # the control plane's own namespace and Services; a namespace that is not written
        "apiVersion: v1\nkind: Namespace\nmetadata: {name: istio-system}\n",
        PLAIN + service("a", "port: 80, name: web", meta="  labels: {istio: pilot}\n", more="  clusterIP: None\n"),
        service("a", "port: 80, name: http"),
        # another word for a namespace
        NAMESPACE % "istio.io/rev: canary",
        NAMESPACE % "istio-injection: disabled, istio.io/rev: canary",
        NAMESPACE % "istio.io/dataplane-mode: ambient",
        # pods that are not in the mesh, and other pods
        PLAIN
        + workload()
        + service("a", "port: 80, name: http")
        + service("b", "port: 81, name: http, targetPort: 80"),
        INJECTED
        + workload('{app: web, sidecar.istio.io/inject: "false"}')
        + service("a", "port: 80, name: http")
        + service("b", "port: 81, name: http, targetPort: 80"),
        INJECTED + workload() + service("a", "port: 80, name: http") + service("b", "port: 80, name: http"),
        # well-known ports, and a name that says it
        PLAIN + service("a", "port: 3306, name: db", "port: 80, name: odd, appProtocol: http"),
        # a destination with a port, or of one port
        PLAIN + workload() + WEB + ONE + routes("  - route: [{destination: {host: web, port: {number: 80}}}]\n"),
        BOTH + routes(TO % "one"),
        INJECTED
        + workload(
            template="      annotations: {sidecar.istio.io/interceptionMode: TPROXY, sidecar.istio.io/proxyCPU: 100m}\n"
        ),
        # a label would change nothing
        NAMESPACE.replace("shop", "kube-system").replace("%s", "a: b"),
        BOTH + istio("Sidecar", "  egress: [{hosts: [./*, '*/one.shop.svc.cluster.local', ~shop/a.example]}]\n"),
    ],
)
def test_not_told(text: str) -> None:
    assert told(text) == []

"""What Istio's admission refuses, the lab refuses, and says where (istio/istio: pkg/config/validation)."""

from __future__ import annotations

import pytest

from lab.errors import InputError
from lab.manifests import load

NAMESPACE = "apiVersion: v1\nkind: Namespace\nmetadata: {name: a}\n---\n"


def written(kind: str, spec: str) -> str:
    """An object whose spec begins in line 9."""
    group = "security" if kind == "PeerAuthentication" else "networking"
    return f"{NAMESPACE}apiVersion: {group}.istio.io/v1\nkind: {kind}\nmetadata: {{name: x, namespace: a}}\nspec:\n  {spec}\n"


def refusal(kind: str, spec: str) -> str:
    with pytest.raises(InputError) as caught:
        load.load_text(written(kind, spec), "f.yaml")
    return str(caught.value)


PORT = "ports: [{number: 90, name: tcp, protocol: TCP}]"
TO = "route: [{destination: {host: a}}]"
POLICY = "host: a, trafficPolicy: "


@pytest.mark.parametrize(
    ("kind", "spec", "why"),
    [
        (
            "ServiceEntry",
            "{hosts: ['*.x.example'], resolution: DYNAMIC_DNS, " + PORT + "}",
            "HTTP, HTTP2, GRPC and TLS",
        ),
        ("ServiceEntry", "{hosts: ['*.x.example', y.example], resolution: DYNAMIC_DNS}", "is for wildcard hosts"),
        ("ServiceEntry", "{hosts: ['*.x.example'], resolution: DYNAMIC_DNS, addresses: [192.0.2.1]}", "no addresses"),
        (
            "ServiceEntry",
            "{hosts: ['*.x.example'], resolution: DYNAMIC_DNS, endpoints: [{address: 192.0.2.1}]}",
            "no endpoints",
        ),
        ("ServiceEntry", "{hosts: [x.example, y.example], resolution: DNS, " + PORT + "}", "nothing else tells them"),
        ("ServiceEntry", "{hosts: [x.example], resolution: DNS, addresses: [192.0.2.0/24]}", "may be CIDRs with"),
        (
            "ServiceEntry",
            "{hosts: [x.example], resolution: DNS, endpoints: [{address: 'unix:///x'}], " + PORT + "}",
            "needs resolution STATIC",
        ),
        (
            "ServiceEntry",
            "{hosts: [x.example], resolution: STATIC, endpoints: [{address: 'unix:///x', ports: {tcp: 3}}], "
            + PORT
            + "}",
            "an entry has one port, and it no ports",
        ),
        (
            "ServiceEntry",
            "{hosts: [x.example], resolution: STATIC, endpoints: [{address: 'unix://x'}], " + PORT + "}",
            "written unix:///PATH",
        ),
        ("ServiceEntry", "{hosts: [x.example], ports: [{number: 90, name: A_B}]}", "it must be a DNS label"),
        ("ServiceEntry", "{hosts: [x.example], exportTo: ['*', a]}", '"*" stands alone'),
        ("ServiceEntry", "{hosts: [x.example], exportTo: ['~', b]}", '"~" stands alone'),
        ("ServiceEntry", "{hosts: [x.example], exportTo: ['.', a]}", '"a" is there twice'),
        ("VirtualService", "{hosts: [a], exportTo: ['~'], http: [{" + TO + "}]}", "is for a ServiceEntry only"),
        ("DestinationRule", "{host: a, exportTo: ['~']}", "is for a ServiceEntry only"),
        (
            "DestinationRule",
            "{host: a, exportTo: [b], workloadSelector: {matchLabels: {a: b}}}",
            "of its own namespace only",
        ),
        ("DestinationRule", "{" + POLICY + "{}}", "needs at least one field"),
        ("DestinationRule", "{" + POLICY + "{portLevelSettings: [{port: {number: 8}}]}}", "port 8 need at least one"),
        ("DestinationRule", "{" + POLICY + "{connectionPool: {}}}", "needs tcp or http"),
        (
            "DestinationRule",
            "{" + POLICY + "{connectionPool: {http: {useClientProtocol: true, h2UpgradePolicy: UPGRADE}}}}",
            "exclude each other",
        ),
        (
            "DestinationRule",
            "{" + POLICY + "{connectionPool: {http: {http2KeepAlive: {interval: 1s}}}}}",
            'missing field "timeout"',
        ),
        (
            "DestinationRule",
            "{" + POLICY + "{tunnel: {targetHost: b.example, targetPort: 1}, proxyProtocol: {version: V2}}}",
            "tunnel and proxyProtocol",
        ),
        (
            "DestinationRule",
            "{" + POLICY + "{outlierDetection: {consecutiveLocalOriginFailures: 3}}}",
            "needs splitExternalLocalOriginErrors",
        ),
        (
            "DestinationRule",
            "{" + POLICY + "{loadBalancer: {consistentHash: {useSourceIp: true, maglev: {tableSize: 10}}}}}",
            "a prime number",
        ),
        (
            "DestinationRule",
            "{"
            + POLICY
            + "{loadBalancer: {consistentHash: {useSourceIp: true, minimumRingSize: 8, ringHash: {minimumRingSize: 8}}}}}",
            "only one of both",
        ),
        (
            "DestinationRule",
            "{" + POLICY + "{loadBalancer: {localityLbSetting: {failover: [{from: r1, to: r1}]}}}}",
            "from one region to another",
        ),
        (
            "DestinationRule",
            "{"
            + POLICY
            + "{loadBalancer: {localityLbSetting: {failover: [{from: r1, to: r2}], failoverPriority: [topology.kubernetes.io/zone]}}}}",
            "excludes topology labels",
        ),
        (
            "DestinationRule",
            "{" + POLICY + "{tls: {mode: SIMPLE, insecureSkipVerify: true, caCertificates: /ca}}}",
            "nothing to verify the server with",
        ),
        (
            "DestinationRule",
            "{" + POLICY + "{tls: {mode: MUTUAL, credentialName: c, caCertificates: /ca}}}",
            "credentialName and files",
        ),
        ("DestinationRule", "{host: a, subsets: [{name: v1.0, labels: {v: '1'}}]}", "it must be a DNS label"),
        ("VirtualService", "{hosts: [a], http: [{match: [{headers: {'': {}}}], " + TO + "}]}", "no name of a header"),
        ("VirtualService", "{hosts: [a], http: [{match: [{headers: {x: {prefix: ''}}}], " + TO + "}]}", "at least 1"),
        ("VirtualService", "{hosts: [a], http: [{match: [{uri: {regex: ''}}], " + TO + "}]}", "must not be empty"),
        ("VirtualService", "{hosts: [a], http: [{match: [{headers: {x: {regex: '*'}}}], " + TO + "}]}", "no regular"),
        ("VirtualService", "{hosts: [a], http: [{redirect: {}}]}", "a redirect needs uri"),
        ("VirtualService", "{hosts: [a], http: [{redirect: {uri: /a, prefixRewrite: /b}}]}", "exclude each other"),
        ("VirtualService", "{hosts: [a], http: [{redirect: {scheme: ftp}}]}", "'http' or 'https'"),
        (
            "VirtualService",
            "{hosts: [a], http: [{match: [{uri: {exact: /x}}], redirect: {prefixRewrite: /b}}]}",
            "needs prefix matches",
        ),
        ("VirtualService", "{hosts: [a], http: [{rewrite: {}, " + TO + "}]}", "a rewrite needs"),
        (
            "VirtualService",
            "{hosts: [a], http: [{rewrite: {uriRegexRewrite: {match: x}}, " + TO + "}]}",
            'field "rewrite"',
        ),
        (
            "VirtualService",
            "{hosts: [a], http: [{rewrite: {uri: /a}, directResponse: {status: 200}}]}",
            "directResponse and rewrite",
        ),
        (
            "VirtualService",
            "{hosts: [a], http: [{fault: {abort: {httpStatus: 500}}, redirect: {uri: /x}}]}",
            "redirect and fault",
        ),
        (
            "VirtualService",
            "{hosts: [a], http: [{fault: {abort: {grpcStatus: UNAVAILBLE}}, " + TO + "}]}",
            'Did you mean "UNAVAILABLE"?',
        ),
        ("VirtualService", "{hosts: [a], http: [{retries: {attempts: -1}, " + TO + "}]}", "greater than or equal to 0"),
        ("VirtualService", "{hosts: [a], http: [{retries: {retryOn: 5xx}, " + TO + "}]}", "switches retries off"),
        (
            "VirtualService",
            "{hosts: [a], http: [{retries: {attempts: 2, retryOn: 'reset,gateway-eror'}, " + TO + "}]}",
            'Did you mean "gateway-error"?',
        ),
        (
            "VirtualService",
            "{hosts: [a], http: [{headers: {request: {set: {host: b}}}, rewrite: {authority: c}, " + TO + "}]}",
            "more than once",
        ),
        (
            "VirtualService",
            "{hosts: [a], http: [{headers: {response: {remove: [':status']}}, " + TO + "}]}",
            "no header that can be changed",
        ),
        (
            "VirtualService",
            "{hosts: [a], http: [{headers: {response: {set: {Host: b}}}, " + TO + "}]}",
            "no header that",
        ),
        ("VirtualService", "{http: [{delegate: {name: b}}]}", "cannot delegate further"),
        ("VirtualService", "{hosts: [a.b.example, '*.example'], http: [{" + TO + "}]}", "overlap"),
        (
            "VirtualService",
            "{hosts: [a.example], tls: [{match: [{sniHosts: [b.example]}], " + TO + "}]}",
            "within none",
        ),
        (
            "VirtualService",
            "{hosts: [a], tcp: [{route: [{destination: {host: a}}, {destination: {host: b}}]}]}",
            "must not add up to 0",
        ),
        ("VirtualService", "{hosts: [a], http: [{route: [{destination: {host: '*'}}]}]}", '"*" is no destination'),
        ("VirtualService", "{hosts: [a], http: [{route: [{destination: {host: a, subset: v1.0}}]}]}", "DNS label"),
        ("Sidecar", "{egress: [{port: {number: 80}, bind: 'unix:///x', hosts: ['*/*']}]}", "a Unix socket with port 0"),
        ("Sidecar", "{egress: [{port: {number: 80}, bind: localhost, hosts: ['*/*']}]}", "bind is an IP address"),
        ("Sidecar", "{egress: [{port: {number: 0}, hosts: ['*/*']}]}", "port 0 needs a bind"),
        (
            "Sidecar",
            "{egress: [{port: {number: 0}, bind: 'unix:///x', captureMode: IPTABLES, hosts: ['*/*']}]}",
            "not for Unix sockets",
        ),
        (
            "Sidecar",
            "{egress: [{port: {number: 80}, hosts: ['*/*']}, {port: {number: 80}, hosts: ['./*']}]}",
            "egress port 80 is used twice",
        ),
        ("Sidecar", "{ingress: [{port: {number: 0}}]}", "an ingress port is 1 to 65535"),
        ("Sidecar", "{ingress: [{port: {number: 80}, bind: 'unix:///x'}]}", "bind is an IP address"),
        *(
            ("DestinationRule", "{" + POLICY + "{" + written + "}}", why)
            for written, why in (
                ("outlierDetection: {interval: 100us}", "at least 1ms"),
                ("outlierDetection: {baseEjectionTime: 0s}", 'bad value "0s"'),
                ("outlierDetection: {interval: 1.5ms}", "whole milliseconds"),
                ("connectionPool: {http: {idleTimeout: 0s}}", "at least 1ms"),
                ("connectionPool: {http: {http2KeepAlive: {interval: 1s, timeout: 0s}}}", "at least 1ms"),
                ("connectionPool: {tcp: {connectTimeout: 0.9ms}}", "at least 1ms"),
                ("connectionPool: {tcp: {maxConnectionDuration: 0s}}", "at least 1ms"),
                ("connectionPool: {tcp: {idleTimeout: 2.5ms}}", "whole milliseconds"),
                ("connectionPool: {tcp: {tcpKeepalive: {time: 0s}}}", "at least 1ms"),
                ("connectionPool: {tcp: {tcpKeepalive: {interval: 0s}}}", "at least 1ms"),
                ("loadBalancer: {warmup: {duration: 0s}}", "at least 1ms"),
            )
        ),
        *(
            ("VirtualService", "{hosts: [a], http: [{" + written + ", " + TO + "}]}", why)
            for written, why in (
                ("fault: {abort: {http2Error: REFUSED_STREAM}}", "no faults of HTTP/2"),
                ("fault: {abort: {httpStatus: 500, grpcStatus: OK}}", "only one of"),
                ("timeout: 0s", "at least 1ms"),
                ("timeout: 100us", "at least 1ms"),
                ("timeout: 1.0001s", "whole milliseconds"),
                ("retries: {attempts: 1, perTryTimeout: 0s}", "at least 1ms"),
                ("retries: {attempts: 1, backoff: 10us}", "at least 1ms"),
                ("fault: {delay: {fixedDelay: 0s}}", "at least 1ms"),
                ("corsPolicy: {maxAge: 0s}", "at least 1ms"),
                ("corsPolicy: {maxAge: 1500ms}", "whole seconds"),
                *(
                    ("headers: {request: {set: {x: '" + value + "'}}}", "no value of a header")
                    for value in (
                        "50%",
                        "%A",
                        "%A(b%",
                        "%A()%",
                        "%A([b])%",
                        '%A(["b" "c"])%',
                        '%A(["b"]c)%',
                        "%A(b) c%",
                        "%%%",
                    )
                ),
                ('headers: {response: {add: {x: "a\\nb"}}}', "no control characters"),
                ("match: [{headers: {'@request.auth.claims.group': {exact: a}}}]", "only gateways do"),
                ("match: [{withoutHeaders: {'@Request.auth.claims[group][id]': {exact: a}}}]", "only gateways do"),
                ("match: [{headers: {'@request.auth.claims': {exact: a}}}]", "no name of a header"),
                (r"match: [{uri: {regex: '/(?!a)b'}}]", 'has no "(?!"'),
                (r"match: [{headers: {x: {regex: '(a)\1'}}}]", r'has no "\1"'),
                (r"match: [{headers: {x: {regex: 'a++'}}}]", 'has no "++"'),
                (r"match: [{headers: {x: {regex: 'a{2,1001}'}}}]", 'has no "{2,1001}"'),
            )
        ),
    ],
)
def test_refused(kind: str, spec: str, why: str) -> None:
    message = refusal(kind, spec)
    assert why in message
    assert "f.yaml:8" in message or "f.yaml:9" in message


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("ServiceEntry", "{hosts: [x.example, y.example], resolution: NONE, " + PORT + "}"),
        ("ServiceEntry", "{hosts: [x.example], resolution: STATIC, addresses: [192.0.2.0/24], " + PORT + "}"),
        ("ServiceEntry", "{hosts: [x.example], exportTo: ['~']}"),
        ("VirtualService", "{hosts: [a], http: [{match: [{withoutHeaders: {x: {regex: '*'}}}], " + TO + "}]}"),
        ("VirtualService", "{hosts: [a], http: [{match: [{uri: {prefix: ''}}], " + TO + "}]}"),
        ("VirtualService", "{hosts: ['*.example'], tls: [{match: [{sniHosts: ['*.a.example']}], " + TO + "}]}"),
        ("VirtualService", "{hosts: [a], http: [{retries: {attempts: 2, retryOn: '5xx,503'}, " + TO + "}]}"),
        (
            "DestinationRule",
            "{" + POLICY + "{loadBalancer: {simple: ROUND_ROBIN, warmup: {duration: 1s, aggression: 0.5}}}}",
        ),
        (
            "DestinationRule",
            "{"
            + POLICY
            + "{connectionPool: {tcp: {idleTimeout: 0s, connectTimeout: 1ms, tcpKeepalive: {time: 1.001s}}}}}",
        ),
        *(
            ("VirtualService", "{hosts: [a], http: [{headers: {request: {add: {x: '" + value + "'}}}, " + TO + "}]}")
            for value in (
                "",
                "50%%",
                "a%REQ(:path)%b %START_TIME%",
                '%A( ["b","c\\)" , "d"] )  %',
                "%A(b\\)c)%",
                "%%%A%",
            )
        ),
        ("VirtualService", "{hosts: [a], http: [{timeout: 1ms, corsPolicy: {maxAge: 2s}, " + TO + "}]}"),
        (
            "VirtualService",
            "{hosts: [a], gateways: [x/y], http: [{match: [{headers: {'@request.auth.claims.a': {exact: b}}}], "
            + TO
            + "}]}",
        ),
        *(
            ("VirtualService", "{hosts: [a], http: [{match: [{uri: {regex: '" + regex + "'}}], " + TO + "}]}")
            for regex in (r"\+\+[)(?!]{2,1000}", r"[]+]+?(?:a|(?P<n>b))\A\z".replace(r"\z", "$"), r"(?i)/a\{2000\}x*?")
        ),
        ("DestinationRule", "{host: a, exportTo: ['.'], workloadSelector: {matchLabels: {a: b}}}"),
        ("Sidecar", "{egress: [{port: {number: 0}, bind: 'unix:///x', hosts: ['*/*']}]}"),
        (
            "Sidecar",
            "{egress: [{port: {number: 0}, bind: 'unix://@x', hosts: ['*/*']}, {bind: '::1', hosts: ['*/*']}]}",
        ),
    ],
)
def test_taken(kind: str, spec: str) -> None:
    load.load_text(written(kind, spec), "f.yaml")


def test_a_claim_is_refused_at_its_line() -> None:
    spec = "hosts: [a]\n  gateways: [mesh, x/y]\n  http:\n  - match:\n    - headers:\n        x-a: {exact: b}\n"
    spec += "        '@request.auth.claims.group': {exact: admin}\n    route: [{destination: {host: a}}]"
    assert refusal("VirtualService", spec) == (
        'match on the JWT claim "@request.auth.claims.group": f.yaml:15: VirtualService a/x: sidecars (gateway mesh) know no'
        " claims, only gateways do. Match a header."
    )


def mesh_config(*lines: str) -> str:
    text = "".join(f"    {line}\n" for line in lines)
    return (
        f"apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: istio, namespace: istio-system}}\ndata:\n  mesh: |\n{text}"
    )


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("connectTimeout: 0.5ms", "at least 1ms"),
        ("connectTimeout: 61m", "less than or equal to 3600"),
        ("protocolDetectionTimeout: 0.5ms", "whole milliseconds"),
        ("defaultConfig: {drainDuration: 1500ms}", "whole seconds"),
        ("defaultConfig: {drainDuration: 0s}", "at least 1ms"),
        ("defaultTrafficPolicy: {outlierDetection: {interval: 0s}}", "at least 1ms"),
    ],
)
def test_durations_of_the_mesh_that_are_refused(line: str, why: str) -> None:
    with pytest.raises(InputError) as caught:
        load.load_text(mesh_config(line), "f.yaml")
    assert (why in str(caught.value), "f.yaml:6" in str(caught.value)) == (True, True), caught.value


def test_durations_of_the_mesh_that_admission_does_not_look_at() -> None:
    load.load_text(mesh_config("tcpKeepalive: {time: 0s, interval: 100us}", "protocolDetectionTimeout: 0s"), "f.yaml")

"""A stock Envoy accepts what discovery makes of every feature, and holds the resources that were generated."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.discovery import snapshot
from lab.manifests import load

pytestmark = pytest.mark.root

BASE = """
apiVersion: v1
kind: Namespace
metadata: {name: a, labels: {istio-injection: enabled}}
---
apiVersion: v1
kind: Namespace
metadata: {name: b, labels: {istio-injection: enabled}}
---
apiVersion: v1
kind: Pod
metadata: {name: client, namespace: a, labels: {app: client}}
spec: {containers: [{name: app, ports: [{containerPort: 8080}]}]}
---
apiVersion: v1
kind: Pod
metadata: {name: server, namespace: b, labels: {app: server, version: v1}}
spec: {containers: [{name: app, ports: [{containerPort: 8080}]}]}
---
apiVersion: v1
kind: Service
metadata: {name: client, namespace: a}
spec:
  selector: {app: client}
  ports:
  - {name: http, port: 8080}
  - {name: tcp-db, port: 9000}
  - {name: other, port: 9100}
  - {name: https-x, port: 9443}
  - {name: grpc, port: 7000}
  - {name: grpc-web, port: 7001}
  - {name: mongo, port: 27017}
  - {name: udp-x, port: 5000, protocol: UDP}
---
apiVersion: v1
kind: Service
metadata: {name: server, namespace: b}
spec:
  selector: {app: server}
  ports:
  - {name: http, port: 8080}
  - {name: tcp-db, port: 9000}
  - {name: other, port: 9100}
  - {name: grpc, port: 7000}
---
apiVersion: v1
kind: Service
metadata: {name: headless, namespace: b}
spec:
  clusterIP: None
  selector: {app: server}
  ports: [{name: http, port: 8081}, {name: tcp-db, port: 9001}, {name: other, port: 9101}, {name: tls-x, port: 9444}]
---
"""

MESH = """
apiVersion: v1
kind: ConfigMap
metadata: {{name: istio, namespace: istio-system}}
data:
  mesh: |
    {fields}
---
"""


def mesh_config(*fields: str) -> str:
    return MESH.format(fields="\n    ".join(fields))


def peer_authentication(mode: str, extra: str = "") -> str:
    return f"""
apiVersion: security.istio.io/v1
kind: PeerAuthentication
metadata: {{name: default, namespace: istio-system}}
spec: {{mtls: {{mode: {mode}}}}}
---
{extra}
"""


def istio(kind: str, name: str, spec: str, group: str = "networking.istio.io/v1", namespace: str = "a") -> str:
    indented = "\n".join("  " + line for line in spec.strip("\n").splitlines())
    return f"apiVersion: {group}\nkind: {kind}\nmetadata: {{name: {name}, namespace: {namespace}}}\nspec:\n{indented}\n---\n"


SERVICE_ENTRIES = "".join(
    istio("ServiceEntry", f"e{index}", spec)
    for index, spec in enumerate(
        (
            "hosts: [static.example]\nresolution: STATIC\nendpoints: [{address: 203.0.113.7}]\n"
            "ports: [{number: 80, name: http, protocol: HTTP}, {number: 443, name: tls, protocol: TLS}]",
            "hosts: [dns.example]\nresolution: DNS\nports: [{number: 80, name: http, protocol: HTTP, targetPort: 8080}]",
            "hosts: [logical.example]\nresolution: DNS_ROUND_ROBIN\nports: [{number: 81, name: http, protocol: HTTP2}]",
            "hosts: [none.example]\nresolution: NONE\nports: [{number: 444, name: tls, protocol: TLS, targetPort: 1444}]",
            "hosts: ['*.wild.example']\nresolution: NONE\nports: [{number: 443, name: tls, protocol: TLS}, {number: 80, name: http, protocol: HTTP}]",
            "hosts: ['*.dynamic.example']\nresolution: DYNAMIC_DNS\nports: [{number: 445, name: tls, protocol: TLS}, {number: 82, name: http, protocol: HTTP}]",
            "hosts: [cidr.example]\nresolution: NONE\naddresses: [198.51.100.0/24]\nports: [{number: 5432, name: tcp, protocol: TCP}, {number: 5433, name: tls, protocol: TLS}]",
            "hosts: [pods.example]\nresolution: STATIC\nlocation: MESH_INTERNAL\nworkloadSelector: {labels: {app: client}}\nports: [{number: 9999, name: http, protocol: HTTP}]",
        )
    )
)

DESTINATION_RULES = istio(
    "DestinationRule",
    "pools",
    """
host: server.b.svc.cluster.local
trafficPolicy:
  connectionPool:
    tcp: {maxConnections: 1, connectTimeout: 2s, tcpKeepalive: {probes: 3, time: 10s, interval: 5s}, maxConnectionDuration: 30s, idleTimeout: 40s}
    http: {http1MaxPendingRequests: 1, http2MaxRequests: 2, maxRetries: 3, maxRequestsPerConnection: 4, idleTimeout: 5s, maxConcurrentStreams: 6}
  outlierDetection: {consecutive5xxErrors: 3, consecutiveGatewayErrors: 0, interval: 1s, baseEjectionTime: 2s, maxEjectionPercent: 50, minHealthPercent: 20, splitExternalLocalOriginErrors: true, consecutiveLocalOriginFailures: 2}
  loadBalancer: {consistentHash: {httpCookie: {name: user, path: /, ttl: 60s}}}
  retryBudget: {percent: 30, minRetryConcurrency: 5}
  portLevelSettings:
  - port: {number: 7000}
    connectionPool: {http: {maxConcurrentStreams: 7}}
    loadBalancer: {simple: ROUND_ROBIN, warmup: {duration: 10s}}
subsets:
- {name: v1, labels: {version: v1}, trafficPolicy: {loadBalancer: {consistentHash: {useSourceIp: true, maglev: {tableSize: 1009}}}}}
- {name: v2, labels: {version: v2}, trafficPolicy: {loadBalancer: {simple: PASSTHROUGH}, tls: {mode: ISTIO_MUTUAL}}}
""",
) + istio(
    "DestinationRule",
    "tls",
    """
host: headless.b.svc.cluster.local
trafficPolicy: {tls: {mode: SIMPLE, sni: x.example}, proxyProtocol: {version: V2}}
""",
)

VIRTUAL_SERVICE = istio(
    "VirtualService",
    "rules",
    """
hosts: [server.b.svc.cluster.local]
http:
- name: header
  match:
  - {name: h, headers: {x-user: {exact: jo}, x-any: {}}, withoutHeaders: {x-no: {prefix: a}}, method: {regex: "GET|PUT"}, queryParams: {q: {exact: "1"}}, uri: {prefix: /api}, ignoreUriCase: true}
  - {uri: {exact: /one}, authority: {prefix: server}, scheme: {exact: http}}
  - {uri: {regex: "/r/[0-9]+"}}
  route:
  - {destination: {host: server.b.svc.cluster.local, subset: v1}, weight: 90, headers: {request: {set: {x-w: a}, remove: [x-gone]}}}
  - {destination: {host: server.b.svc.cluster.local, subset: v2}, weight: 10}
  - {destination: {host: client}, weight: 0}
  rewrite: {uri: /v2, authority: other.example}
  timeout: 3s
  retries: {attempts: 5, perTryTimeout: 1s, retryOn: "5xx,503,reset", backoff: 30ms}
  fault: {delay: {percentage: {value: 50}, fixedDelay: 1s}, abort: {percentage: {value: 10}, httpStatus: 418}}
  mirrors: [{destination: {host: client, port: {number: 8080}}, percentage: {value: 12.5}}]
  headers: {request: {add: {x-a: "1"}, set: {x-b: "2"}}, response: {remove: [server]}}
  corsPolicy: {allowOrigins: [{exact: "https://a.example"}], allowMethods: [GET], maxAge: 1h, allowCredentials: true}
- match: [{uri: {prefix: /old}}]
  redirect: {uri: /new, authority: new.example, redirectCode: 308, scheme: https, port: 8443}
- match: [{uri: {prefix: /teapot}}]
  directResponse: {status: 418, body: {string: "short and stout"}}
- match: [{uri: {prefix: /regex}}]
  rewrite: {uriRegexRewrite: {match: "^/regex/(.*)$", rewrite: "/x/\\\\1"}}
  route: [{destination: {host: server.b.svc.cluster.local, port: {number: 8080}}}]
- route: [{destination: {host: server.b.svc.cluster.local}}]
  retries: {attempts: 0}
tcp:
- match: [{port: 9000, destinationSubnets: [10.0.0.0/8]}]
  route: [{destination: {host: server.b.svc.cluster.local, port: {number: 9000}}, weight: 60}, {destination: {host: client, port: {number: 9000}}, weight: 40}]
""",
) + istio(
    "VirtualService",
    "tls",
    """
hosts: [headless.b.svc.cluster.local, one.example, "*.two.example"]
tls:
- match: [{port: 9444, sniHosts: [one.example, "*.two.example"]}]
  route: [{destination: {host: server.b.svc.cluster.local, port: {number: 9000}}}]
""",
)

SIDECAR = istio(
    "Sidecar",
    "scoped",
    """
workloadSelector: {labels: {app: client}}
outboundTrafficPolicy: {mode: REGISTRY_ONLY}
inboundConnectionPool: {http: {http1MaxPendingRequests: 3}}
ingress:
- {port: {number: 8080, protocol: HTTP, name: http}, defaultEndpoint: "127.0.0.1:8081", connectionPool: {tcp: {maxConnections: 2}}}
- {port: {number: 9000, protocol: TCP, name: tcp}, defaultEndpoint: "0.0.0.0:9001"}
- {port: {number: 9200, protocol: HTTP, name: sock}, defaultEndpoint: "unix:///tmp/app.sock"}
- {port: {number: 9300, protocol: HTTP, name: real}, bind: 127.0.0.1, captureMode: NONE}
egress:
- {port: {number: 8080, protocol: HTTP, name: http}, hosts: ["b/*"]}
- {port: {number: 3128, protocol: HTTP_PROXY, name: proxy}, captureMode: NONE, hosts: ["*/*"]}
- {port: {number: 9000, protocol: TCP, name: tcp}, bind: 127.0.0.1, captureMode: NONE, hosts: ["b/server.b.svc.cluster.local"]}
- {hosts: ["./*", "~b/headless.b.svc.cluster.local"]}
""",
)

CASES = {
    "plain": mesh_config("enableAutoMtls: false") + peer_authentication("DISABLE"),
    "permissive": "",
    "strict": peer_authentication("STRICT"),
    "port-modes": peer_authentication("STRICT")
    + istio(
        "PeerAuthentication",
        "own",
        "selector: {matchLabels: {app: client}}\nmtls: {mode: PERMISSIVE}\nportLevelMtls: {9000: {mode: DISABLE}, 6666: {mode: STRICT}}",
        "security.istio.io/v1",
    ),
    "registry-only": mesh_config("outboundTrafficPolicy: {mode: REGISTRY_ONLY}"),
    "log-text": mesh_config("accessLogFile: /dev/stdout"),
    "log-json": mesh_config("accessLogFile: /dev/stdout", "accessLogEncoding: JSON"),
    "log-format": mesh_config(
        "accessLogFile: /dev/stdout", 'accessLogFormat: "%START_TIME% %REQ_WITHOUT_QUERY(:PATH)% %CEL(request.path)%"'
    ),
    "dns-capture": mesh_config("defaultConfig: {proxyMetadata: {ISTIO_META_DNS_CAPTURE: 'true'}}") + SERVICE_ENTRIES,
    "service-entries": SERVICE_ENTRIES,
    "destination-rules": DESTINATION_RULES,
    "virtual-services": DESTINATION_RULES + VIRTUAL_SERVICE,
    "sidecar": SIDECAR,
    "all": SIDECAR.replace("scoped", "other").replace("app: client", "app: none")
    + SERVICE_ENTRIES
    + DESTINATION_RULES
    + VIRTUAL_SERVICE,
}


@pytest.mark.parametrize("case", CASES)
def test_feature_is_accepted(case: str, run_envoy: Callable[..., Any], tmp_path: Path) -> None:
    mesh = load.load_text(BASE + CASES[case], f"{case}.yaml")
    pod = mesh.pod("client.a")
    assert pod is not None
    plain = snapshot.node_for_pod(mesh, pod)
    evidence = {**plain.metadata, "SIDECARLAB_EVIDENCE": str(tmp_path / "evidence.jsonl")}
    node = dataclasses.replace(plain, metadata=evidence)
    expected = snapshot.generate(mesh, node)

    async def scenario() -> None:
        async with run_envoy(mesh, node) as envoy:
            wanted = (
                {"CDS", "LDS"} | ({"RDS"} if expected.routes else set()) | ({"EDS"} if expected.endpoints else set())
            )
            status = await envoy.acked(*wanted)
            assert status["nack"] is None, json.dumps(status["nack"])
            assert status["types"]["CDS"]["resources"] == len(expected.clusters)
            assert status["types"]["LDS"]["resources"] == len(expected.listeners)
            for kind, count in (("RDS", len(expected.routes)), ("EDS", len(expected.endpoints))):
                assert status["types"].get(kind, {}).get("resources", 0) == count
            dump = await envoy.config_dump()
            listeners = [i["name"] for s in dump["configs"] for i in s.get("dynamic_listeners", [])]
            assert set(listeners) == set(expected.listeners)

    asyncio.run(scenario())

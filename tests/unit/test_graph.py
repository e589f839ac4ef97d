"""The picture of a mesh."""

from __future__ import annotations

import dataclasses
import html.parser
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from functools import cache
from pathlib import Path

import pytest

from lab.errors import InputError
from lab.explaining import predict_all
from lab.graph import OUTSIDE, Edge, Graph, Node, graph, render
from lab.manifests.load import load, load_text
from lab.manifests.model import FlowFrom, FlowTo, Mesh, Meta, TrafficTest
from lab.verdict import Verdict

ROOT = Path(__file__).parents[2]
TOPOLOGIES = sorted((ROOT / "topologies").glob("*.yaml"))

TEXT = """\
apiVersion: v1
kind: Namespace
metadata: {name: istio-system}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: istio, namespace: istio-system}
data: {mesh: "outboundTrafficPolicy: {mode: REGISTRY_ONLY}"}
---
apiVersion: security.istio.io/v1
kind: PeerAuthentication
metadata: {name: default, namespace: istio-system}
spec: {mtls: {mode: STRICT}}
---
apiVersion: v1
kind: Namespace
metadata: {name: shop, labels: {istio-injection: enabled}}
---
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: shop, labels: {app: web}}
spec: {containers: [{name: app, ports: [{containerPort: 8080}]}]}
status: {podIP: 10.244.0.9}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec:
  clusterIP: 10.96.1.1
  selector: {app: web}
  ports: [{name: http, port: 80, targetPort: 8080}]
---
apiVersion: networking.istio.io/v1
kind: Sidecar
metadata: {name: narrow, namespace: shop}
spec:
  egress: [{hosts: ["./*"]}]
---
apiVersion: v1
kind: Namespace
metadata: {name: old}
---
apiVersion: v1
kind: Pod
metadata: {name: client, namespace: old}
spec: {containers: [{name: app}]}
---
apiVersion: v1
kind: Service
metadata: {name: shop, namespace: old}
spec: {type: ExternalName, externalName: web.shop.svc.cluster.local}
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: vendor, namespace: shop}
spec:
  hosts: [api.vendor.example]
  resolution: DNS
  ports: [{number: 443, name: tls, protocol: TLS}]
---
apiVersion: sidecarlab.dev/v1alpha1
kind: ExternalHost
metadata: {name: vendor}
spec:
  hosts: [api.vendor.example]
  addresses: [203.0.113.5]
  ports: [{port: 443, protocol: tls}]
---
apiVersion: sidecarlab.dev/v1alpha1
kind: TrafficTest
metadata: {name: by-short-name}
spec: {from: {pod: web.shop}, to: {host: web, port: 80}, expect: {outcome: {result: ok}}}
---
apiVersion: sidecarlab.dev/v1alpha1
kind: TrafficTest
metadata: {name: by-vip}
spec: {from: {pod: web.shop}, to: {host: 10.96.1.1, port: 80}, expect: {outcome: {result: ok}}}
---
apiVersion: sidecarlab.dev/v1alpha1
kind: TrafficTest
metadata: {name: by-alias}
spec: {from: {pod: client.old}, to: {host: shop, port: 80}, expect: {outcome: {result: ok}}}
---
apiVersion: sidecarlab.dev/v1alpha1
kind: TrafficTest
metadata: {name: by-pod-address}
spec: {from: {pod: client.old}, to: {host: 10.244.0.9, port: 8080, protocol: tcp}, expect: {outcome: {result: ok}}}
---
apiVersion: sidecarlab.dev/v1alpha1
kind: TrafficTest
metadata: {name: declared}
spec: {from: {pod: web.shop}, to: {host: api.vendor.example, port: 443, protocol: tls}, expect: {outcome: {result: ok}}}
---
apiVersion: sidecarlab.dev/v1alpha1
kind: TrafficTest
metadata: {name: nowhere}
spec: {from: {pod: web.shop}, to: {host: nowhere.example, port: 80}, expect: {outcome: {result: no-answer}}}
---
apiVersion: sidecarlab.dev/v1alpha1
kind: TrafficTest
metadata: {name: lookup}
spec: {from: {pod: web.shop}, to: {host: web, protocol: dns}, expect: {dns: {captured: true}}}
"""
MESH = load_text(TEXT, name="small")
CAPTURING = load_text(
    TEXT.replace(
        "outboundTrafficPolicy: {mode: REGISTRY_ONLY}",
        "{outboundTrafficPolicy: {mode: ALLOW_ANY}, defaultConfig: {proxyMetadata: {ISTIO_META_DNS_CAPTURE: 'true'}}}",
    )
)


@cache
def topology(path: Path) -> tuple[Mesh, list[Verdict]]:
    """A topology and what is predicted of it, once for all pictures."""
    mesh = load([path])
    return mesh, predict_all(mesh)


def picture(mesh: Mesh, output: str) -> str:
    return render(mesh, predict_all(mesh), output)


DRAWN = graph(MESH, predict_all(MESH))
OUTPUTS = ("mermaid", "dot", "html")


def node(node_id: str, drawn: Graph = DRAWN) -> Node:
    (found,) = [n for n in drawn.nodes if n.id == node_id]
    return found


def test_nodes_say_what_they_are() -> None:
    assert node("meshed_pod_web_shop").lines == ("web", "10.244.0.9", "sidecar")
    assert node("pod_client_old").lines[2] == "no sidecar"
    assert node("service_shop_web").lines == ("web", "10.96.1.1", "80 HTTP")
    assert node("service_old_shop").lines == ("shop", "ExternalName")
    assert node("service_entry_shop_vendor").lines[0] == "api.vendor.example"
    assert node("service_entry_shop_vendor").group == "shop"
    assert node("external_host_vendor").group == OUTSIDE
    assert node("unknown_host_nowhere_example").group == OUTSIDE


def test_edges_say_who_is_behind_whom_and_what_tests_send() -> None:
    assert set(DRAWN.edges) == {
        Edge("service_shop_web", "meshed_pod_web_shop", "selects"),
        Edge("service_old_shop", "service_shop_web", "alias"),
        Edge("service_entry_shop_vendor", "external_host_vendor", "declares"),
        Edge("meshed_pod_web_shop", "service_shop_web", "test", "http 80"),
        # "web" is the pod's own name, and nothing listens there on the service's port.
        Edge("meshed_pod_web_shop", "meshed_pod_web_shop", "fails", "http 80: refused"),
        # STRICT lets no client without a proxy in.
        Edge("pod_client_old", "service_old_shop", "fails", "http 80: closed"),
        Edge("pod_client_old", "meshed_pod_web_shop", "fails", "tcp 8080: closed"),
        Edge("meshed_pod_web_shop", "service_entry_shop_vendor", "test", "tls 443"),
        Edge("meshed_pod_web_shop", "unknown_host_nowhere_example", "fails", "http 80: unreachable"),
    }


def test_an_automatic_address_is_shown_where_somebody_is_told_it() -> None:
    """Without DNS capture nobody is: the name has the machine's own address."""
    assert node("service_entry_shop_vendor").lines == ("api.vendor.example", "443 TLS", "MESH_EXTERNAL DNS")
    drawn = graph(CAPTURING, predict_all(CAPTURING))
    lines = node("service_entry_shop_vendor", drawn).lines
    assert lines == ("api.vendor.example", "240.240.0.1, 2001:2::1", "443 TLS", "MESH_EXTERNAL DNS")


def test_a_flow_to_a_port_that_the_entry_does_not_declare_does_not_pass_through_it() -> None:
    """It goes to the machine (or, with an automatic address, to nobody), past the ServiceEntry."""
    for mesh, edge in (
        (MESH, Edge("meshed_pod_web_shop", "external_host_vendor", "fails", "tcp 9000: closed")),
        (
            CAPTURING,
            Edge("meshed_pod_web_shop", "unknown_host_api_vendor_example", "fails", "tcp 9000: closed"),
        ),
    ):
        changed = with_test(mesh, FlowTo("api.vendor.example", 9000, "tcp"))
        drawn = graph(changed, predict_all(changed))
        assert edge in drawn.edges
    assert node("unknown_host_api_vendor_example", drawn).lines == ("api.vendor.example", "240.240.0.1")


def test_a_flow_to_an_automatic_address_that_nobody_has_leads_to_nobody() -> None:
    changed = with_test(MESH, FlowTo("240.240.0.1", 443, "tls"))
    drawn = graph(changed, predict_all(changed))
    assert Edge("meshed_pod_web_shop", "unknown_host_240_240_0_1", "fails", "tls 443: closed") in drawn.edges


def test_a_flow_leads_to_the_service_whose_cluster_has_it() -> None:
    """Not to the one that was asked for, where a VirtualService says otherwise."""
    rewritten = load_text(
        (ROOT / "topologies/quickstart.yaml").read_text()
        + """---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: catalog, namespace: catalog}
spec:
  hosts: [catalog.catalog.svc.cluster.local]
  http: [{route: [{destination: {host: payments.payments.svc.cluster.local}}]}]
"""
    )
    ways = {
        e.target for e in graph(rewritten, predict_all(rewritten)).edges if e.source == "meshed_pod_frontend_frontend"
    }
    assert "service_catalog_catalog" not in ways
    assert "service_payments_payments" in ways


def with_test(mesh: Mesh, to: FlowTo) -> Mesh:
    test = TrafficTest(Meta("one"), FlowFrom(pod="web.shop"), to, {})
    return dataclasses.replace(mesh, tests=(test,))


def test_notes_say_what_holds_for_mesh_and_namespace() -> None:
    assert DRAWN.notes == ("outbound REGISTRY_ONLY", "mTLS STRICT")
    notes = {g.name: g.notes for g in DRAWN.groups}
    assert notes == {"shop": ("Sidecar narrow: egress ./*",), "old": (), OUTSIDE: ()}


@pytest.mark.parametrize("path", TOPOLOGIES, ids=lambda p: p.name)
@pytest.mark.parametrize("output", OUTPUTS)
def test_every_pod_and_edge_of_a_topology_is_in_every_picture(path: Path, output: str) -> None:
    mesh, verdicts = topology(path)
    drawn, text = graph(mesh, verdicts), render(mesh, verdicts, output)
    assert len([n for n in drawn.nodes if n.kind in ("pod", "meshed-pod")]) == len(mesh.pods)
    for pod in mesh.pods:
        assert pod.ip in text
    arrows = re.findall(r" -->| -\.->| -\.-x| -&gt;| --&gt;| -\.-&gt;| -> ", text)
    assert len(arrows) == len(drawn.edges)


def test_an_edge_never_leads_to_a_node_that_is_not_there() -> None:
    ids = [n.id for n in DRAWN.nodes]
    assert len(ids) == len(set(ids))
    assert {end for e in DRAWN.edges for end in (e.source, e.target)} <= set(ids)


def test_two_names_that_look_alike_are_two_nodes() -> None:
    text = "".join(
        f"---\napiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: {ns}}}\nspec: {{containers: [{{name: a}}]}}\n"
        for name, ns in (("a-b", "c"), ("a", "b-c"))
    )
    drawn = graph(load_text(text), ())
    assert [n.id for n in drawn.nodes] == ["pod_a_b_c", "pod_a_b_c_2"]
    assert [n.group for n in drawn.nodes] == ["c", "b-c"]


def test_a_picture_is_the_same_each_time() -> None:
    assert [picture(MESH, output) for output in OUTPUTS] == [picture(MESH, output) for output in OUTPUTS]


def test_mermaid_and_html_escape_what_is_syntax() -> None:
    evil = '"]<script>'
    drawn = Graph(evil, (), (), (Node("a", "pod", (evil,), "g"),), ())
    from lab.graph import Group, dot, mermaid, page

    drawn = Graph(evil, (), (Group("g"),), drawn.nodes, (Edge("a", "a", "test", evil),))
    assert "#34;]#60;script#62;" in mermaid(drawn)
    assert evil not in mermaid(drawn)
    assert r'label="\"]<script>"' in dot(drawn)
    assert "<script" not in page(drawn)


class Page(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.diagram = ""
        self.rows = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)
        self.rows += tag == "tr"
        self.loads += [f"{tag} {key}" for key, _ in attrs if key in ("src", "href")]
        self.loads += [tag] if tag in ("script", "link", "img", "iframe") else []

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "pre":
            self.diagram += data


def test_the_page_stands_alone_and_holds_tables_and_diagram() -> None:
    page = Page()
    page.feed(picture(MESH, "html"))
    page.close()
    assert page.open == []
    assert page.loads == []
    assert page.diagram.strip() == picture(MESH, "mermaid").strip()
    assert page.rows == len(DRAWN.nodes) + len(DRAWN.edges) + len(DRAWN.groups) + 1


@pytest.mark.skipif(shutil.which("dot") is None, reason="dot is not installed (package graphviz)")
@pytest.mark.parametrize("path", TOPOLOGIES, ids=lambda p: p.name)
def test_svg_has_every_node_and_edge(path: Path) -> None:
    mesh, verdicts = topology(path)
    drawn = graph(mesh, verdicts)
    tree = ET.fromstring(render(mesh, verdicts, "svg"))
    classes = [e.get("class") for e in tree.iter()]
    assert classes.count("node") == len(drawn.nodes)
    assert classes.count("edge") == len(drawn.edges)
    assert classes.count("cluster") == len(drawn.groups)


def test_svg_without_graphviz_names_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        InputError, match=r"cannot draw SVG: dot: Graphviz is not installed\. Install the package graphviz"
    ):
        picture(MESH, "svg")


def test_svg_tells_what_dot_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "dot"
    broken.write_text("#!/bin/sh\necho 'no fonts' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(InputError, match="cannot draw SVG: dot: no fonts"):
        picture(MESH, "svg")


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(InputError, match="unknown picture format: gif"):
        picture(MESH, "gif")


def test_the_command_prints_the_picture() -> None:
    command = [sys.executable, "-m", "lab", "graph", str(ROOT / "topologies/quickstart.yaml"), "-o", "dot"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == picture(load([ROOT / "topologies/quickstart.yaml"]), "dot").strip()

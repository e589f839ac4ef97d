"""The picture of a mesh: Mesh -> nodes and edges -> Mermaid, Graphviz or a page. Pure, but for ``svg``, which runs ``dot``.

Namespaces are groups. A Service points at the pods that it selects, an ExternalName at what it is another name for, a ServiceEntry at
the machines outside that have its hosts. A dashed edge is what TrafficTests send, and leads where their predicted verdicts say: to the
Service or ServiceEntry whose cluster has the flow, else to whatever has the address. One that ends in a cross does not get there.
"""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lab.errors import InputError
from lab.manifests.injection import init_env
from lab.manifests.model import ExternalHost, Mesh, Pod, Service, ServiceEntry, Sidecar, TrafficTest
from lab.verdict import Verdict

NodeKind = Literal["pod", "meshed-pod", "service", "service-entry", "external-host", "unknown-host"]
EdgeKind = Literal["selects", "alias", "declares", "test", "fails"]
"""``fails`` is a test whose flow does not work."""

OUTSIDE = "outside the mesh"
_DOT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Node:
    """``lines`` are its name and what is worth saying about it; ``group`` is a namespace, or ``OUTSIDE``."""

    id: str
    kind: NodeKind
    lines: tuple[str, ...]
    group: str


@dataclass(frozen=True, slots=True)
class Group:
    """A namespace (or the outside); ``notes`` say what holds for all in it."""

    name: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Edge:
    source: str
    target: str
    kind: EdgeKind
    label: str = ""


@dataclass(frozen=True, slots=True)
class Graph:
    """Groups, nodes and edges in the order of the manifests; ``notes`` hold for the whole mesh."""

    name: str
    notes: tuple[str, ...]
    groups: tuple[Group, ...]
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]


def graph(mesh: Mesh, verdicts: Sequence[Verdict]) -> Graph:
    """The picture's content. ``verdicts`` are the predictions for the mesh's tests, in their order."""
    return _Drawing(mesh).graph(verdicts)


def render(mesh: Mesh, verdicts: Sequence[Verdict], output: str) -> str:
    """The picture as text.

    Args:
        mesh: what to draw.
        verdicts: see `graph`.
        output: ``mermaid``, ``dot``, ``svg`` or ``html``.

    Raises:
        InputError: the output is none of these, or ``svg`` without Graphviz.
    """
    drawn = graph(mesh, verdicts)
    if output == "mermaid":
        return mermaid(drawn)
    if output == "dot":
        return dot(drawn)
    if output == "html":
        return page(drawn)
    if output == "svg":
        return svg(dot(drawn))
    raise InputError("unknown picture format", output, "", "Use mermaid, dot, svg or html")


# --- what is in the picture -------------------------------------------------------------------


class _Drawing:
    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._nodes: dict[str, Node] = {}
        self._edges: dict[tuple[str, str, EdgeKind], list[str]] = {}
        self._pods = {p.name: self._node(_pod_kind(p), p.name, _pod_lines(p), p.meta.namespace) for p in mesh.pods}
        self._services = {
            s.meta.key: self._node("service", s.meta.key, _service_lines(s), s.meta.namespace) for s in mesh.services
        }
        named = any(_captures_dns(mesh, pod) for pod in mesh.pods)
        self._entries = {
            e.meta.key: self._node("service-entry", e.meta.key, _entry_lines(e, named), e.meta.namespace)
            for e in mesh.service_entries
        }
        self._machines = {
            h.meta.name: self._node("external-host", h.meta.name, _machine_lines(h), OUTSIDE)
            for h in mesh.external_hosts
        }
        self._by_name = dict(self._names())
        self._by_address = dict(self._addresses())

    def graph(self, verdicts: Sequence[Verdict]) -> Graph:
        for service in self._mesh.services:
            self._service(service)
        for entry in self._mesh.service_entries:
            self._entry(entry)
        for test, verdict in zip(self._mesh.tests, verdicts, strict=True):
            self._test(test, verdict)
        return Graph(
            name=self._mesh.name,
            notes=tuple(_mesh_notes(self._mesh)),
            groups=tuple(self._groups()),
            nodes=tuple(self._nodes.values()),
            edges=tuple(Edge(*key, ", ".join(dict.fromkeys(labels))) for key, labels in self._edges.items()),
        )

    def _node(self, kind: NodeKind, name: str, lines: Iterable[str], group: str) -> str:
        """Adds a node; its id is made of kind and name, so that a picture changes only where the mesh does."""
        base = re.sub(r"\W", "_", f"{kind}_{name}", flags=re.ASCII)
        node_id, number = base, 2
        while node_id in self._nodes:
            node_id, number = f"{base}_{number}", number + 1
        self._nodes[node_id] = Node(node_id, kind, tuple(line for line in lines if line), group)
        return node_id

    def _edge(self, source: str, target: str, kind: EdgeKind, label: str = "") -> None:
        labels = self._edges.setdefault((source, target, kind), [])
        if label:
            labels.append(label)

    def _names(self) -> Iterator[tuple[str, str]]:
        """Names a client may use, later ones winning: a ServiceEntry stands before the machine that it declares."""
        for host in self._mesh.external_hosts:
            for name in host.hosts:
                yield name.lower(), self._machines[host.meta.name]
        for entry in self._mesh.service_entries:
            for name in entry.hosts:
                yield name.lower(), self._entries[entry.meta.key]
        for service in self._mesh.services:
            yield service.host(self._mesh.domain_suffix), self._services[service.meta.key]

    def _addresses(self) -> Iterator[tuple[str, str]]:
        """Who has an address: what a ServiceEntry declares is nobody's, unless its cluster has the flow."""
        for host in self._mesh.external_hosts:
            for address in host.addresses:
                yield address, self._machines[host.meta.name]
        for pod in self._mesh.pods:
            for address in pod.ips:
                yield address, self._pods[pod.name]
        for service in self._mesh.services:
            for address in service.cluster_ips:
                yield address, self._services[service.meta.key]

    def _find(self, host: str, namespace: str) -> str | None:
        """The node that a client in a namespace reaches by a name or address: as resolv.conf's search list completes it."""
        if host in self._by_address:
            return self._by_address[host]
        name = host.rstrip(".").lower()
        suffix = self._mesh.domain_suffix
        for end in ("", f".{namespace}.svc.{suffix}", f".svc.{suffix}", f".{suffix}"):
            found = self._by_name.get(name + end)
            if found is not None:
                return found
        labels = name.split(".")
        for cut in range(1, len(labels)):
            found = self._by_name.get(".".join(["*", *labels[cut:]]))
            if found is not None:
                return found
        return None

    def _service(self, service: Service) -> None:
        source = self._services[service.meta.key]
        if service.external_name:
            name = service.external_name
            self._edge(source, self._find(name, "") or self._unknown(name), "alias")
            return
        wanted = service.selector.items()
        for pod in self._mesh.pods:
            same = pod.meta.namespace == service.meta.namespace
            if wanted and same and all(pod.meta.labels.get(key) == value for key, value in wanted):
                self._edge(source, self._pods[pod.name], "selects")
        for written in self._mesh.endpoint_slices:
            if (written.meta.namespace, written.service) == (service.meta.namespace, service.meta.name):
                for address in written.addresses:
                    found = self._by_address.get(address.ip)
                    self._edge(source, found or self._unknown(address.ip), "selects")

    def _entry(self, entry: ServiceEntry) -> None:
        source = self._entries[entry.meta.key]
        for host in self._mesh.external_hosts:
            named = {*entry.hosts, *(e.address for e in entry.endpoints)} & {*host.hosts, *host.addresses}
            if named:
                self._edge(source, self._machines[host.meta.name], "declares")
        wanted = (entry.workload_selector or {}).items()
        for pod in self._mesh.pods:
            same = pod.meta.namespace == entry.meta.namespace
            if wanted and same and all(pod.meta.labels.get(key) == value for key, value in wanted):
                self._edge(source, self._pods[pod.name], "selects")

    def _test(self, test: TrafficTest, verdict: Verdict) -> None:
        if test.to.protocol in ("dns", "dns-tcp"):
            return  # a lookup ends at a resolver, which is no part of the mesh
        pod = self._mesh.pod(test.flow_from.pod) if test.flow_from.pod else None
        source = self._pods[pod.name] if pod else self._machines.get(test.flow_from.external)
        if source is None:
            return
        label = f"{test.to.protocol} {test.to.port}" if test.to.port else test.to.protocol
        outcome = verdict.outcome
        works = outcome is None or outcome.result == "ok"
        if outcome is None:
            label += ": undecided"
        elif not works:
            label += f": {outcome.result if outcome.status is None else outcome.status}"
        self._edge(source, self._target(test, verdict, pod), "test" if works else "fails", label)

    def _target(self, test: TrafficTest, verdict: Verdict, pod: Pod | None) -> str:
        """The node that a flow makes for."""
        cluster = (verdict.envoy.cluster or "") if verdict.envoy else ""
        if cluster.startswith("outbound|"):
            known = self._by_name.get(cluster.rpartition("|")[2].lower())
            if known is not None:
                return self._alias(test.to.host, pod) or known
        address = verdict.to.address
        if address is None:
            return self._unknown(test.to.host)
        found = self._alias(test.to.host, pod) or self._by_address.get(address)
        return found or self._unknown(test.to.host, *([address] if address != test.to.host else []))

    def _alias(self, host: str, pod: Pod | None) -> str | None:
        """The ExternalName service that a client means by a name, which has an edge of its own to what it stands for."""
        found = self._find(host, pod.meta.namespace if pod else "")
        named = (s for s in self._mesh.services if s.external_name)
        return found if any(self._services[s.meta.key] == found for s in named) else None

    def _unknown(self, host: str, *more: str) -> str:
        """The node of a host that nothing in the manifests has, at an address that nobody has."""
        lines = (host, *more)
        for node in self._nodes.values():
            if node.kind == "unknown-host" and node.lines == lines:
                return node.id
        return self._node("unknown-host", host, lines, OUTSIDE)

    def _groups(self) -> Iterator[Group]:
        used = dict.fromkeys(node.group for node in self._nodes.values())
        for name in [n for n in used if n != OUTSIDE]:
            yield Group(name, tuple(_namespace_notes(self._mesh, name)))
        if OUTSIDE in used:
            yield Group(OUTSIDE)


def _captures_dns(mesh: Mesh, pod: Pod) -> bool:
    return pod.injected and init_env(mesh, pod).get("ISTIO_META_DNS_CAPTURE", "").lower() in ("true", "1", "t")


def _pod_kind(pod: Pod) -> NodeKind:
    return "meshed-pod" if pod.injected else "pod"


def _pod_lines(pod: Pod) -> tuple[str, ...]:
    return pod.meta.name, ", ".join(pod.ips), "sidecar" if pod.injected else "no sidecar"


def _service_lines(service: Service) -> tuple[str, ...]:
    if service.external_name:
        return service.meta.name, "ExternalName"
    ports = ", ".join(f"{p.port} {p.protocol if p.transport == 'TCP' else 'UDP'}" for p in service.ports)
    return service.meta.name, "headless" if service.headless else ", ".join(service.cluster_ips), ports


def _entry_lines(entry: ServiceEntry, named: bool) -> tuple[str, ...]:
    """``named``: some client is told the automatic addresses, which only the agents' DNS servers know."""
    ports = ", ".join(f"{p.port} {p.protocol}" for p in entry.ports)
    automatic = (a for found in entry.auto_addresses.values() for a in found) if named else ()
    addresses = dict.fromkeys([*entry.addresses, *automatic])
    return *entry.hosts, ", ".join(addresses), ports, f"{entry.location} {entry.resolution}"


def _machine_lines(host: ExternalHost) -> tuple[str, ...]:
    return *host.hosts, ", ".join(host.addresses), ", ".join(f"{p.port} {p.protocol}" for p in host.ports)


def _mesh_notes(mesh: Mesh) -> Iterator[str]:
    policy = mesh.mesh_config.outbound_traffic_policy.mode
    yield f"outbound {policy}"
    for authentication in mesh.peer_authentications:
        if authentication.meta.namespace == mesh.mesh_config.root_namespace and authentication.selector is None:
            yield f"mTLS {authentication.mode}"


def _namespace_notes(mesh: Mesh, namespace: str) -> Iterator[str]:
    for sidecar in mesh.sidecars:
        if sidecar.meta.namespace == namespace:
            yield _sidecar_note(sidecar)
    if namespace == mesh.mesh_config.root_namespace:
        return
    for authentication in mesh.peer_authentications:
        if authentication.meta.namespace == namespace:
            where = f" for {_selector(authentication.selector)}" if authentication.selector else ""
            yield f"mTLS {authentication.mode}{where}"


def _sidecar_note(sidecar: Sidecar) -> str:
    hosts = ", ".join(dict.fromkeys(host for listener in sidecar.egress for host in listener.hosts))
    where = f" for {_selector(sidecar.workload_selector)}" if sidecar.workload_selector else ""
    policy = f", outbound {sidecar.outbound_traffic_policy.mode}" if sidecar.outbound_traffic_policy else ""
    return f"Sidecar {sidecar.meta.name}{where}: egress {hosts or 'as the mesh'}{policy}"


def _selector(labels: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in labels.items())


# --- Mermaid ----------------------------------------------------------------------------------

_MERMAID_SHAPES: dict[NodeKind, tuple[str, str]] = {
    "pod": ("[", "]"),
    "meshed-pod": ("[", "]"),
    "service": ("([", "])"),
    "service-entry": ("{{", "}}"),
    "external-host": ("[/", "/]"),
    "unknown-host": ("[/", "/]"),
}
_STYLES: dict[NodeKind, tuple[str, str]] = {  # fill, border
    "pod": ("#ffffff", "#555555"),
    "meshed-pod": ("#e3f2fd", "#1565c0"),
    "service": ("#f1f8e9", "#558b2f"),
    "service-entry": ("#fff8e1", "#ff8f00"),
    "external-host": ("#eeeeee", "#555555"),
    "unknown-host": ("#ffebee", "#c62828"),
}


def mermaid(drawn: Graph) -> str:
    """A Mermaid flowchart."""
    lines = ["---", f'title: "{_mermaid_text(_title(drawn))}"', "---", "flowchart LR"]
    for number, group in enumerate(drawn.groups):
        lines.append(f'  subgraph group_{number}["{_mermaid_lines((group.name, *group.notes))}"]')
        for node in drawn.nodes:
            if node.group == group.name:
                opening, closing = _MERMAID_SHAPES[node.kind]
                lines.append(
                    f'    {node.id}{opening}"{_mermaid_lines(node.lines)}"{closing}:::{_mermaid_class(node.kind)}'
                )
        lines.append("  end")
    for edge in drawn.edges:
        arrow = {"test": "-.->", "fails": "-.-x"}.get(edge.kind, "-->")
        text = edge.label or ("" if edge.kind == "selects" else edge.kind)
        label = f'|"{_mermaid_text(text)}"|' if text else ""
        lines.append(f"  {edge.source} {arrow}{label} {edge.target}")
    for kind in dict.fromkeys(node.kind for node in drawn.nodes):
        fill, border = _STYLES[kind]
        lines.append(f"  classDef {_mermaid_class(kind)} fill:{fill},stroke:{border},color:#000")
    return "\n".join(lines) + "\n"


def _mermaid_class(kind: NodeKind) -> str:
    return kind.replace("-", "_")


def _mermaid_lines(lines: Sequence[str]) -> str:
    return "<br/>".join(map(_mermaid_text, lines))


def _mermaid_text(text: str) -> str:
    """Mermaid's entity codes for what it would read as syntax or HTML."""
    return re.sub(r'[#"<>&`]', lambda m: f"#{ord(m[0])};", " ".join(text.split()))


def _title(drawn: Graph) -> str:
    return " · ".join((drawn.name, *drawn.notes))


# --- Graphviz ---------------------------------------------------------------------------------

_DOT_SHAPES: dict[NodeKind, str] = {
    "pod": "box",
    "meshed-pod": "box",
    "service": "ellipse",
    "service-entry": "hexagon",
    "external-host": "parallelogram",
    "unknown-host": "parallelogram",
}


def dot(drawn: Graph) -> str:
    """A Graphviz digraph."""
    lines = [
        f"digraph {_dot_text([drawn.name])} {{",
        f"  graph [rankdir=LR, compound=true, fontname=sans, labelloc=t, label={_dot_text([_title(drawn)])}]",
        "  node [fontname=sans, fontsize=10, style=filled]",
        "  edge [fontname=sans, fontsize=9]",
    ]
    for number, group in enumerate(drawn.groups):
        lines.append(f"  subgraph cluster_{number} {{")
        lines.append(f"    label={_dot_text([group.name, *group.notes])}")
        for node in drawn.nodes:
            if node.group == group.name:
                fill, border = _STYLES[node.kind]
                shape = f"shape={_DOT_SHAPES[node.kind]}, fillcolor={_dot_text([fill])}, color={_dot_text([border])}"
                lines.append(f"    {node.id} [label={_dot_text(node.lines)}, {shape}]")
        lines.append("  }")
    for edge in drawn.edges:
        text = edge.label or ("" if edge.kind == "selects" else edge.kind)
        style = ", style=dashed, constraint=false" if edge.kind in ("test", "fails") else ""
        if edge.kind == "fails":
            style += ', color="#c62828", fontcolor="#c62828", arrowhead=tee'
        lines.append(f"  {edge.source} -> {edge.target} [label={_dot_text([text])}{style}]")
    return "\n".join([*lines, "}", ""])


def _dot_text(lines: Iterable[str]) -> str:
    escaped = (" ".join(line.split()).replace("\\", "\\\\").replace('"', '\\"') for line in lines)
    return '"' + "\\n".join(escaped) + '"'


def svg(source: str) -> str:
    """A Graphviz source as SVG, drawn by ``dot``.

    Raises:
        InputError: ``dot`` is not installed, or it fails.
    """
    if shutil.which("dot") is None:
        raise InputError(
            "cannot draw SVG",
            "dot",
            "Graphviz is not installed",
            "Install the package graphviz, or use -o mermaid or -o html",
        )
    try:
        done = subprocess.run(
            ["dot", "-Tsvg"], input=source, capture_output=True, encoding="utf-8", timeout=_DOT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise InputError("cannot draw SVG", "dot", str(e)) from e
    if done.returncode != 0:
        raise InputError("cannot draw SVG", "dot", done.stderr.strip() or f"exit code {done.returncode}")
    return done.stdout


# --- a page -----------------------------------------------------------------------------------

_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font-family: sans-serif; margin: 2em; }}
table {{ border-collapse: collapse; margin-bottom: 2em; }}
th, td {{ border: 1px solid #ccc; padding: .3em .6em; text-align: left; vertical-align: top; }}
pre {{ background: #f6f6f6; padding: 1em; overflow-x: auto; }}
</style>
</head>
<body>
<h1>{title}</h1>
{tables}
<h2>Diagram source (Mermaid)</h2>
<pre class="mermaid">
{mermaid}</pre>
</body>
</html>
"""


def page(drawn: Graph) -> str:
    """A page that stands alone: tables of all nodes and edges, and the diagram's source. It loads nothing."""
    names = {node.id: f"{_kind(node.kind)} {node.lines[0]} ({node.group})" for node in drawn.nodes}
    tables = []
    for group in drawn.groups:
        tables.append(f"<h2>{html.escape(group.name)}</h2>")
        tables += [f"<p>{html.escape(note)}</p>" for note in group.notes]
        rows = [(_kind(n.kind), n.lines[0], "; ".join(n.lines[1:])) for n in drawn.nodes if n.group == group.name]
        tables.append(_table(("kind", "name", "what"), rows))
    if drawn.edges:
        tables.append("<h2>Edges</h2>")
        tables.append(
            _table(
                ("from", "", "to", "what"), [(names[e.source], e.kind, names[e.target], e.label) for e in drawn.edges]
            )
        )
    return _PAGE.format(title=html.escape(_title(drawn)), tables="\n".join(tables), mermaid=html.escape(mermaid(drawn)))


def _kind(kind: NodeKind) -> str:
    return kind.replace("-", " ")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["<table>", "<tr>" + "".join(f"<th>{html.escape(h)}</th>" for h in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    return "\n".join([*lines, "</table>"])

"""What people see on a terminal: tables of labs and pods, and the plan of ``lab up --dry-run``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from lab.manifests.model import Mesh, Pod


def console() -> Console:
    """A console that colours only on a terminal and never cuts a line when piped (width 200)."""
    return Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 200)


def table(columns: Iterable[str]) -> Table:
    """A plain table without boxes, so that it reads the same on a terminal and in a log."""
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        made.add_column(column, no_wrap=True, overflow="fold")
    return made


def labs_table(labs: Iterable[Mapping[str, Any]]) -> None:
    """Prints ``lab ls``."""
    out = table(("NAME", "STATE", "PID"))
    for lab in labs:
        out.add_row(str(lab["name"]), str(lab["state"]), str(lab["pid"] or "-"))
    console().print(out)


def inspect_table(info: Mapping[str, Any]) -> None:
    """Prints ``lab inspect``: one line a pod, then what its proxy rejected."""
    screen = console()
    backend = info.get("iptables") or "-"
    screen.print(f"{info['name']}: {len(info['pods'])} pods, iptables back end {backend}, pid {info['pid']}")
    out = table(("POD", "IP", "READY", "AGENT", "ENVOY", "APP"))
    for pod in info["pods"]:
        pids = pod["pids"]
        out.add_row(
            f"{pod['name']}.{pod['namespace']}",
            pod["ip"],
            "yes" if pod["ready"] else "no",
            *(str(pids.get(role) or "-") for role in ("agent", "envoy", "app")),
        )
    screen.print(out)
    for pod in info["pods"]:
        if pod.get("nack"):
            screen.print(f"{pod['name']}.{pod['namespace']}: configuration rejected by Envoy: {pod['nack']}")


def plan_document(mesh: Mesh, backend: str) -> dict[str, Any]:
    """What ``lab up`` would make, as plain data: addresses, and for meshed pods the exact rules of init."""
    return {
        "name": mesh.name,
        "iptables": backend,
        "fabric": {"dns": mesh.fabric.dns, "discovery": mesh.fabric.discovery},
        "pods": [_pod_plan(mesh, pod, backend) for pod in mesh.pods],
        "services": [
            {"host": s.host(mesh.domain_suffix), "addresses": list(s.cluster_ips), "ports": [p.port for p in s.ports]}
            for s in mesh.services
        ],
        "external_hosts": [
            {"name": h.meta.name, "hosts": list(h.hosts), "addresses": list(h.addresses)} for h in mesh.external_hosts
        ],
        "tests": [t.meta.name for t in mesh.tests],
    }


def _pod_plan(mesh: Mesh, pod: Pod, backend: str) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": pod.name, "ips": list(pod.ips), "injected": pod.injected, "init": None}
    if pod.injected:
        from lab.manifests.injection import init_args

        entry["init"] = [*init_args(mesh, pod), f"--backend={backend}"]
    return entry


def plan_text(document: Mapping[str, Any]) -> str:
    """The plan as text, one thing a line."""
    lines = [
        f"lab {document['name']}: iptables {document['iptables']}, cluster DNS {document['fabric']['dns']}, "
        f"discovery {document['fabric']['discovery']}"
    ]
    for pod in document["pods"]:
        lines.append(f"pod {pod['name']} {' '.join(pod['ips'])} {'with' if pod['injected'] else 'without'} sidecar")
        if pod["init"]:
            lines.append(f"  init {' '.join(repr(a) if not a or ' ' in a else a for a in pod['init'])}")
    for service in document["services"]:
        ports = ",".join(map(str, service["ports"]))
        lines.append(f"service {service['host']} {' '.join(service['addresses']) or 'headless'} ports {ports}")
    lines += [
        f"external host {host['name']} {' '.join(host['addresses'])} ({', '.join(host['hosts'])})"
        for host in document["external_hosts"]
    ]
    lines.append(f"{len(document['tests'])} traffic tests")
    return "\n".join(lines)

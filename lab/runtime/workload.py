"""What runs in each place of a mesh, as whom, with which arguments and environment. Pure: a mesh in, specs out.

Entry points of higher rooms go by name; the zygote imports them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from lab.fabric import paths
from lab.manifests import injection, protocol
from lab.manifests.model import Container, ExternalHost, Mesh, Pod, Protocol, ServicePort
from lab.runtime import etc, files
from lab.runtime.identity import APP_UID, INIT, PROXY, PROXY_UID, ROOT, Identity
from lab.runtime.mounts import NOTIFY_DIR, POD_DIR, View
from lab.runtime.place import PlaceSpec
from lab.runtime.spawn import DEFAULT_PATH, ProcessSpec

_SYSCTLS: Mapping[str, str] = {
    "net.ipv4.ip_unprivileged_port_start": "0",
    "net.ipv4.ping_group_range": "0 2147483647",
}
_ECHO_PROTOCOLS: Mapping[Protocol, str] = {
    "HTTP": "http",
    "HTTP_PROXY": "http",
    "HTTP2": "grpc",
    "GRPC": "grpc",
    "GRPC-Web": "grpc",
    "HTTPS": "https",
    "TLS": "tls",
    "TCP": "tcp",
    "MONGO": "tcp",
    "REDIS": "tcp",
    "MYSQL": "tcp",
    "UDP": "udp",
    "AUTO": "auto",
}


DOWNWARD = ("etc/istio/pod/labels", "etc/istio/pod/annotations")
"""Files of a pod's own directory that follow its metadata while it runs."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A file or directory of a pod's own directory: its path below it, text (None: a directory) and owner."""

    path: str
    uid: int
    text: str | None = None


# --- the node -----------------------------------------------------------------------------------


def node_place(lab: str) -> PlaceSpec:
    """The place of what serves the lab; it sees the host's files."""
    return PlaceSpec(paths.NODE, str(paths.netns_path(lab, paths.NODE)), str(files.notify_dir(lab)))


def discovery(lab: str, mesh: Mesh) -> ProcessSpec:
    """The control plane."""
    params = {
        "mesh": str(paths.manifests_dir(lab)),
        "listen": mesh.fabric.discovery,
        "socket": str(files.discovery_socket(lab)),
        "keys": str(files.discovery_keys(lab)),
        "name": mesh.name,
    }
    return _service(lab, "discovery", "lab.discovery.server:main", params, Identity(0, 0))


def cluster_dns(lab: str, mesh: Mesh) -> ProcessSpec:
    """Cluster DNS."""
    params = {
        "manifests": str(paths.manifests_dir(lab)),
        "listen": [address for address in (mesh.fabric.dns, mesh.fabric.dns6) if address],
        "log": str(files.dns_queries(lab)),
        "socket": str(files.dns_socket(lab)),
        "name": mesh.name,
    }
    return _service(lab, "dns", "lab.fabric.dns:main", params, Identity(0, 0, frozenset({"NET_BIND_SERVICE"})))


def observer(lab: str) -> ProcessSpec:
    """The kernel's evidence; it enters every place's network namespace, hence root with all capabilities."""
    params = {"places": {}, "socket": str(files.observer_socket(lab))}
    return _service(lab, "observer", "lab.trace.observer:main", params, ROOT)


def _service(lab: str, name: str, entry: str, params: object, identity: Identity) -> ProcessSpec:
    return ProcessSpec(
        name=name,
        entry=entry,
        args=(params,),
        env={"PATH": DEFAULT_PATH, "LANG": "C.UTF-8"},
        identity=identity,
        log=str(files.log(lab, name)),
        notify=True,
    )


# --- pods ---------------------------------------------------------------------------------------


def pod_place(lab: str, mesh: Mesh, pod: Pod, expose: Sequence[str]) -> PlaceSpec:
    """The place of a pod; ``expose`` is what its processes must be able to read (`mounts.program_paths`)."""
    hostname = pod.hostname or pod.meta.name
    domain = f"{pod.subdomain}.{pod.meta.namespace}.svc.{mesh.domain_suffix}" if pod.subdomain else ""
    search = (*etc.cluster_search(pod.meta.namespace, mesh.domain_suffix), *pod.dns_search)
    return _isolated(lab, mesh, pod.name, hostname, etc.hosts(pod.ips, hostname, domain), search, expose)


def init(mesh: Mesh, pod: Pod, backend: str) -> ProcessSpec | None:
    """The init container; None where the pod has none."""
    arguments = injection.init_args(mesh, pod)
    if not arguments:
        return None
    return ProcessSpec(
        name="init",
        entry="init.cli:main",
        args=([*arguments, f"--backend={backend}", "--strict"],),
        env={"PATH": DEFAULT_PATH, "HOME": "/tmp", **injection.init_env(mesh, pod)},
        identity=INIT,
        log=files.inside(files.INIT_LOG),
    )


def agent(mesh: Mesh, pod: Pod) -> ProcessSpec | None:
    """The agent, which starts Envoy; None where the pod has no sidecar."""
    arguments = injection.agent_args(mesh, pod)
    if not arguments:
        return None
    return ProcessSpec(
        name="agent",
        entry="agent.cli:main",
        args=(arguments,),
        env={
            "PATH": DEFAULT_PATH,
            "HOME": POD_DIR,
            "HOSTNAME": pod.hostname or pod.meta.name,
            "ISTIO_META_SIDECARLAB_EVIDENCE": files.inside(files.EVIDENCE),
            **injection.agent_env(mesh, pod),
        },
        identity=_proxy(mesh, pod),
        cwd=POD_DIR,
        log=files.inside(files.AGENT_LOG),
        notify=True,
    )


def apps(mesh: Mesh, pod: Pod) -> tuple[ProcessSpec, ...]:
    """The app's processes: one for each container with a command, and one echo app for the ports of all others.

    The first is called ``app``, others by their container's name.
    """
    echoing = [c for c in pod.containers if not c.command]
    return tuple(
        _command(pod, container, name) if container.command else _echo_app(mesh, pod, echoing, name)
        for name, container in containers(pod).items()
    )


def containers(pod: Pod) -> dict[str, Container]:
    """The containers of a pod by the name of their process; the first that echoes stands for all that do."""
    found: dict[str, Container] = {}
    echoes = False
    for container in pod.containers:
        if container.command or not echoes:
            found["app" if not found else _name(container, found)] = container
            echoes = echoes or not container.command
    return found


def pod_files(pod: Pod) -> tuple[Owner, ...]:
    """What the pod's own directory holds before anything runs; the agent works in it."""
    app = _app_identity(pod.containers[0]) if pod.containers else Identity(APP_UID, APP_UID)
    return (
        *_directories(PROXY_UID),
        Owner("etc", PROXY_UID),
        Owner("etc/istio", PROXY_UID),
        Owner("etc/istio/pod", PROXY_UID),
        Owner(DOWNWARD[0], PROXY_UID, etc.downward_api(pod.meta.labels)),
        Owner(DOWNWARD[1], PROXY_UID, etc.downward_api(pod.meta.annotations)),
        *(Owner(path, PROXY_UID) for path in _parents(files.TOKEN, files.ROOT_CERT)),
        Owner(files.ECHO, app.uid, ""),
    )


def _proxy(mesh: Mesh, pod: Pod) -> Identity:
    """With TPROXY it is root with a capability (IP_TRANSPARENT) and the proxy's group, as Istio injects it.

    The uid matters: what Envoy sends to its app under the client's address goes over lo, where init's rules let only
    other uids pass (ISTIO_OUTPUT, ``! --uid-owner 1337 -j RETURN``) and catch the proxy's own.
    """
    if injection.interception_mode(mesh, pod) == "TPROXY":
        return Identity(0, PROXY_UID, frozenset({"NET_ADMIN"}))
    return PROXY


def _app_identity(container: Container) -> Identity:
    uid = APP_UID if container.run_as_user is None else container.run_as_user
    return Identity(uid, uid if container.run_as_group is None else container.run_as_group)


def _app_env(hostname: str, container: Container | None = None) -> dict[str, str]:
    return {
        "PATH": DEFAULT_PATH,
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "HOSTNAME": hostname,
        **(container.env if container else {}),
    }


def _name(container: Container, others: Iterable[str]) -> str:
    taken = {*others, "init", "agent"}
    return container.name if container.name not in taken else f"app-{container.name}"


def _command(pod: Pod, container: Container, name: str) -> ProcessSpec:
    return ProcessSpec(
        name=name,
        argv=(*container.command, *container.args),
        env=_app_env(pod.hostname or pod.meta.name, container),
        identity=_app_identity(container),
        cwd=container.working_dir or "/",
        log=files.inside(files.APP_LOG.replace("app", name)),
    )


def _echo_app(mesh: Mesh, pod: Pod, containers: Sequence[Container], name: str) -> ProcessSpec:
    ports = [
        {"port": p.port, "name": p.name, "protocol": echo_protocol(mesh, pod, p.port, p.name, p.protocol)}
        for c in containers
        for p in c.ports
    ]
    services = [s.host(mesh.domain_suffix) for s in mesh.services if _selects(s.selector, s.meta.namespace, pod)]
    return _echo(
        pod.name, ports, [pod.name, *services], pod.ips, name, _app_identity(containers[0]), _app_env(pod.meta.name)
    )


def echo_protocol(mesh: Mesh, pod: Pod, port: int, name: str, transport: str) -> str:
    """What the echo app speaks on a container port: what the Services that lead to it say, else what its name says."""
    for service in mesh.services:
        if _selects(service.selector, service.meta.namespace, pod):
            for service_port in service.ports:
                if service_port.transport == transport and _leads_to(service_port, port, name):
                    return _ECHO_PROTOCOLS[service_port.protocol]
    return _ECHO_PROTOCOLS[protocol.of_service_port(port, transport, name)]


def _leads_to(service_port: ServicePort, port: int, name: str) -> bool:
    target = service_port.target or service_port.port
    return target in (port, name) if isinstance(target, int) else target == name


def _selects(selector: Mapping[str, str], namespace: str, pod: Pod) -> bool:
    labels = pod.meta.labels
    return bool(selector) and namespace == pod.meta.namespace and selector.items() <= dict(labels).items()


# --- external hosts -----------------------------------------------------------------------------


def external_place(lab: str, mesh: Mesh, host: ExternalHost, expose: Sequence[str]) -> PlaceSpec:
    """The place of an external host."""
    name = host.meta.name
    return _isolated(
        lab, mesh, paths.external_place(name), name, etc.hosts(host.addresses, name), (mesh.domain_suffix,), expose
    )


def external_app(host: ExternalHost) -> ProcessSpec:
    """The echo app on the host's ports."""
    ports = [{"port": p.port, "name": p.name, "protocol": p.protocol} for p in host.ports]
    name = host.meta.name
    who = Identity(APP_UID, APP_UID)
    return _echo(name, ports, [*host.hosts, *host.addresses], host.addresses, "app", who, _app_env(name))


def external_files() -> tuple[Owner, ...]:
    """What an external host's own directory holds before anything runs."""
    return (*_directories(APP_UID), Owner(files.ECHO, APP_UID, ""))


# --- both ---------------------------------------------------------------------------------------


def _isolated(
    lab: str, mesh: Mesh, place: str, hostname: str, hosts: str, search: Sequence[str], expose: Sequence[str]
) -> PlaceSpec:
    nameservers = [address for address in (mesh.fabric.dns, mesh.fabric.dns6) if address]
    return PlaceSpec(
        name=place,
        netns=str(paths.netns_path(lab, place)),
        notify_dir=NOTIFY_DIR,
        hostname=hostname,
        view=View(
            pod_dir=str(paths.pod_dir(lab, place)),
            expose=tuple(expose),
            files={
                "/etc/resolv.conf": etc.resolv_conf(nameservers, search),
                "/etc/hosts": hosts,
                "/etc/nsswitch.conf": etc.NSSWITCH,
                "/etc/hostname": f"{hostname}\n",
            },
        ),
        sysctls=_SYSCTLS,
    )


def _echo(
    pod: str,
    ports: Sequence[Mapping[str, object]],
    hosts: Sequence[str],
    addresses: Sequence[str],
    process: str,
    identity: Identity,
    env: Mapping[str, str],
) -> ProcessSpec:
    families = {":" in address for address in addresses}
    params = {
        "ports": list(ports),
        "name": pod,
        "hosts": list(hosts),
        "addresses": [any_address for is_six, any_address in ((False, "0.0.0.0"), (True, "::")) if is_six in families],
        "log": files.inside(files.ECHO),
    }
    return ProcessSpec(
        name=process,
        entry="lab.apps.echo:main",
        args=(params,),
        env=env,
        identity=identity,
        cwd="/",
        log=files.inside(files.APP_LOG.replace("app", process)),
        notify=True,
    )


def _parents(*paths_below: str) -> list[str]:
    """The directories that files lie in, outermost first."""
    found = {str(parent) for path in paths_below for parent in PurePosixPath(path).parents if parent.name}
    return sorted(found)


def _directories(uid: int) -> tuple[Owner, ...]:
    """The log directory is its owner's alone: in one that all may write to, the kernel may refuse root to append to
    another's file (proc(5): protected_regular)."""
    return Owner("", uid), Owner(os.path.dirname(files.APP_LOG), uid)

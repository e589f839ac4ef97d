"""``lab explain``: from what was typed to a prediction: of manifests, of a running lab, or of dumps alone."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from lab.errors import InputError, ObservationError
from lab.explain.explained import Explained
from lab.explain.packet import NOTHING

if TYPE_CHECKING:
    from lab.explain.counterfactual import Counterfactual
    from lab.explain.ruleset import RuleSet
    from lab.explain.xds import Config
    from lab.explaining import Backend
    from lab.manifests.model import FlowProtocol, FlowTo, Mesh, TrafficTest

PORTS: Mapping[str, int] = {"http": 80, "tls": 443, "dns": 53, "dns-tcp": 53}
"""The port that a protocol has where none was typed."""


class Question(NamedTuple):
    """What was typed. ``port`` 0: none."""

    to: str
    source: str = ""
    protocol: FlowProtocol = "http"
    uid: int | None = None
    direction: Literal["in", "out"] = "out"
    from_ip: str = ""
    to_ip: str = ""
    path: str = "/"
    method: str = "GET"
    headers: Mapping[str, str] = NOTHING
    authority: str = ""
    sni: str = ""

    def target(self) -> tuple[str, int]:
        """Host and port of ``--to``.

        Raises:
            InputError: it is none, or the protocol needs a port.
        """
        host, port = split(self.to)
        if port == 0 and self.protocol in PORTS and self.protocol not in ("dns", "dns-tcp"):
            port = PORTS[self.protocol]
        if port == 0 and self.protocol in ("tcp", "udp", "grpc"):
            raise InputError(
                f"--to {self.to}", why=f"protocol {self.protocol} needs a port", next_step="Write HOST:PORT"
            )
        return host, port


def split(text: str) -> tuple[str, int]:
    """``HOST``, ``HOST:PORT``, ``[IPV6]:PORT`` or a bare IPv6 address; port 0 if there is none. Raises InputError."""
    try:
        return str(ipaddress.ip_address(text.strip("[]"))), 0
    except ValueError:
        pass
    host, colon, port = text.rpartition(":")
    if not colon:
        return text, 0
    if not host or not port.isdigit() or not 0 < int(port) < 65536 or (":" in host and not host.startswith("[")):
        raise InputError(f"--to {text}", why="it is no HOST:PORT", next_step="Write e.g. catalog.catalog:8080")
    return host.strip("[]"), int(port)


def of_mesh(
    mesh: Mesh,
    question: Question,
    backend: Backend = "auto",
    *,
    rules: Callable[[str], RuleSet | None] | None = None,
    configs: Callable[[str], Config | None] | None = None,
    kept: Callable[[str, Callable[[], Any]], Any] | None = None,
    why: bool = False,
    changes: bool = True,
) -> Explained:
    """The prediction for a flow of a mesh.

    Args:
        rules, configs: what a pod really has, by its name, instead of what init and discovery would make.
        kept: see `lab.explaining.MeshWorld`.

    Raises:
        InputError: no such pod, or nothing sensible was typed.
    """
    from lab import explaining

    if not question.source:
        raise InputError("where does the flow begin?", next_step="Give --from POD.NAMESPACE")
    test = as_test(mesh, question)
    world = explaining.MeshWorld(
        mesh,
        backend,
        rules_of=rules,
        envoy_of=configs,
        kept=kept,
    )
    told = explaining.predict(world, test, why=why)
    others: tuple[Counterfactual, ...] = ()
    if changes:

        def flipping() -> tuple[Counterfactual, ...]:
            from lab import whatif

            return whatif.counterfactuals(world, test, told)

        # They are made of other meshes, which no key of the world's stands for.
        others = kept(f"changes {backend} {question}", flipping) if kept else flipping()
    return Explained(told.verdict, told.journeys, told.questions, counterfactuals=others)


def of_files(files: Sequence[str], question: Question, backend: Backend = "auto", *, why: bool = False) -> Explained:
    """The prediction for a flow of the mesh that manifests describe. Raises InputError."""
    from lab.memory import Memory

    memory = Memory.of(files)
    found = of_mesh(memory.mesh(), question, backend, kept=memory.get, why=why)
    memory.save()
    return found


def as_test(mesh: Mesh, question: Question, name: str = "explain", timeout: float = 5.0) -> TrafficTest:
    """The flow that was typed, as a test that expects nothing. Raises InputError."""
    from lab.manifests.model import FlowFrom, Meta, TrafficTest

    host, port = question.target()
    pod = mesh.pod(question.source)
    external = next((h.meta.name for h in mesh.external_hosts if h.meta.name == question.source), "")
    target = mesh.pod(host)
    if target is not None and not any(host in s.host(mesh.domain_suffix) for s in mesh.services):
        host = target.ip
    where = FlowFrom(
        pod="" if pod is None and external else question.source,
        external=external if pod is None else "",
        uid=1000 if question.uid is None else question.uid,
        spoof=question.from_ip,
    )
    to = _to(question, host, port)
    return TrafficTest(Meta(name), where, to, {}, timeout)


def _to(question: Question, host: str, port: int) -> FlowTo:
    from lab.manifests.model import FlowTo

    return FlowTo(
        host=host,
        port=0 if question.protocol == "icmp" else port,
        protocol=question.protocol,
        path=question.path,
        method=question.method,
        headers=question.headers,
        authority=question.authority,
        sni=question.sni,
    )


def of_dumps(
    question: Question, rules: Sequence[str], config: str | None, sets: Sequence[str] = (), *, why: bool = False
) -> Explained:
    """The prediction from dumps alone. Raises InputError."""
    from lab import dumpworld
    from lab.explaining import payload

    host, port = question.target()
    asked = dumpworld.Asked(
        host=host,
        port=port,
        payload=payload(_to(question, host, port)),
        protocol=question.protocol,
        direction=question.direction,
        uid=1000 if question.uid is None else question.uid,
        source=_address(question.from_ip, "--from-ip"),
        address=_address(question.to_ip, "--to-ip"),
    )
    return dumpworld.explain(dumpworld.read(rules, config, sets), asked, why=why)


def _address(text: str, option: str) -> str:
    if not text:
        return ""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise InputError(f"{option} {text}", why="it is no IP address") from None


class Live(NamedTuple):
    """A running lab as it is now: its manifests and its back end. ``rules`` and ``configs`` ask a meshed pod for its own, once."""

    mesh: Mesh
    backend: Backend
    rules: Callable[[str], RuleSet | None]
    configs: Callable[[str], Config | None]


def live(name: str) -> Live:
    """What the meshed pods of a running lab have, each asked when it is first needed.

    Raises:
        InputError: no such lab. What it returns raises ObservationError: a pod's rules cannot be listed, and LabError: its Envoy
            does not answer.
    """
    from lab import lifecycle, proxyconfig
    from lab.explain.xds import from_resources

    mesh = lifecycle.stored_mesh(name)
    backend: Backend = lifecycle.inspect(name).get("iptables") or "auto"
    meshed = {pod.name for pod in mesh.pods if pod.injected}

    @cache
    def rules(pod: str) -> RuleSet | None:
        return live_rules(name, pod, backend) if pod in meshed else None

    @cache
    def config(pod: str) -> Config | None:
        return from_resources(proxyconfig.from_proxy(name, pod, "xds"), "proxy") if pod in meshed else None

    return Live(mesh, backend, rules, config)


def of_lab(name: str, question: Question, *, why: bool = False) -> Explained:
    """The prediction for a running lab: with the rules and the configuration that its pods have now.

    Raises:
        InputError: no such pod. ObservationError: a pod's rules cannot be listed.
    """
    now = live(name)
    return of_mesh(now.mesh, question, now.backend, rules=now.rules, configs=now.configs, why=why)


def live_rules(lab: str, place: str, backend: str) -> RuleSet:
    """The rules of a place as the kernel has them.

    Raises:
        ObservationError: the listing program fails.
    """
    from lab.explain import iptables_save, nft_text
    from lab.explain.ruleset import RuleSet
    from lab.fabric import paths
    from lab.trace.places import inside

    with inside(paths.netns_path(lab, place)):
        if backend == "native-nft":
            text = _run(["nft", "list", "ruleset"])
            return nft_text.parse(text, "nft") if text.strip() else RuleSet()
        found = RuleSet()
        for tool, family in (("iptables", "ipv4"), ("ip6tables", "ipv6")):
            text = _run([f"{tool}-{backend}-save"])
            if text.strip():
                found = found.joined(iptables_save.parse(text, family, f"{tool}-save", backend))  # type: ignore[arg-type]
        return found


def _run(command: Sequence[str]) -> str:
    import subprocess

    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        why = "the program is missing"
        raise ObservationError("cannot list the rules", command[0], why, "Install iptables and nftables") from None
    if done.returncode:
        raise ObservationError("cannot list the rules", command[0], done.stderr.strip()[-200:], "Run as root")
    return done.stdout

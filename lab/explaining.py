"""Predictions of a mesh's flows: everything that `lab.explain` needs, taken from a Mesh (or from dumps), and nothing run.

Rules come from init, xDS resources from discovery, names from the agent's own table and cluster DNS, services from the
node's own document: the very code that a running lab uses, so that a prediction says what that code means.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal

from lab.errors import InputError
from lab.explain.flow import ClientTls, Request
from lab.explain.journey import Journey, follow, rejected, silent
from lab.explain.packet import Family, Host, Packet
from lab.explain.predict import Flow, Question, verdict
from lab.explain.ruleset import Backend as RuleBackend
from lab.explain.ruleset import RuleSet
from lab.explain.upstream import Resolve
from lab.explain.walk import Fate, Walker
from lab.explain.world import Payload, Place, Result, Speaks, Transit
from lab.explain.xds import Config
from lab.verdict import From, To, Verdict

if TYPE_CHECKING:
    from agent.dns.table import LookupTable
    from lab.discovery.snapshot import Resources
    from lab.fabric.plan import Router
    from lab.fabric.zone import Zone
    from lab.manifests.model import ExternalHost, FlowTo, Mesh, Pod, TrafficTest

Backend = Literal["auto", "legacy", "nft", "native-nft"]

APP_UID, PROXY_UID = 1000, 1337
DNS_PORT = 15053
NODE, OUTSIDE = "node", "outside"
TPROXY_MARK = 1337
_NODE_INTERFACE = "pods"
_DNS_TYPES = {"A": 1, "CNAME": 5, "PTR": 12, "MX": 15, "TXT": 16, "AAAA": 28, "SRV": 33}


@dataclass(frozen=True, slots=True)
class Told:
    """A prediction with all that it was made from. ``why`` of the walks: see `predict`."""

    verdict: Verdict
    journeys: tuple[Journey, ...]
    questions: tuple[Question, ...]
    flow: Flow

    def parts(self) -> tuple[Verdict, ...]:
        """The verdict of each course alone, where there are several."""
        if len(self.journeys) < 2:
            return (self.verdict,)
        return tuple(verdict(self.flow, (journey,), self.questions) for journey in self.journeys)


def predict_all(mesh: Mesh, tests: Iterable[TrafficTest] | None = None, backend: Backend = "auto") -> list[Verdict]:
    """The predicted verdict of each test, not yet compared with what it expects."""
    world = MeshWorld(mesh, backend)
    return [predict(world, test).verdict for test in (mesh.tests if tests is None else tests)]


def predict(world: MeshWorld, test: TrafficTest, *, why: bool = False) -> Told:
    """The prediction for one flow.

    Args:
        why: also remember rules that did not match.

    Raises:
        InputError: the flow begins at a place that the mesh does not have.
    """
    start = world.start(test)
    to = test.to
    source = From(
        test.flow_from.pod or None, test.flow_from.uid, test.flow_from.external or None, test.flow_from.spoof or None
    )
    port = to.port or None
    base = Flow(
        source=source,
        to=To(to.host, None, port, to.protocol),
        test=test.meta.name,
        timeout=test.timeout,
        observed=bool(test.flow_from.pod),
        pods=world.pod_names,
    )
    if to.protocol in ("dns", "dns-tcp"):
        return _lookup(world, base, test, start, why)
    address, questions, unresolved = world.resolve(start, to.host, test.flow_from.uid, why=why)
    if address is None:
        flow = base._replace(to=To(to.host, None, port, to.protocol))
        return Told(verdict(flow, (), questions, test.expect, unresolved), (), tuple(questions), flow)
    # Several addresses come in a random order, and a program takes the first.
    addresses = questions[-1].answers if questions else (address,)
    flow = base._replace(to=To(to.host, address, port, to.protocol), several=len(addresses) > 1)
    journeys: tuple[Journey, ...] = ()
    for one in addresses:
        packet = _packet(world.place(start), one, to, test.flow_from.uid, test.flow_from.spoof)
        found = follow(world, start, packet, payload(to), why=why)
        if to.crafted:
            found = tuple(_crafted(j, packet.flags, bool(test.flow_from.spoof)) for j in found[:1])
        journeys += tuple(j._replace(chance=j.chance / len(addresses)) for j in found)
    return Told(verdict(flow, journeys, questions, test.expect), journeys, tuple(questions), flow)


def _crafted(journey: Journey, flags: frozenset[str], spoofed: bool) -> Journey:
    """The journey of one hand-made packet: no connection comes of it, so no proxy tells of it, and what answers it is the kernel
    of whoever has the port (linux: net/ipv4/tcp_input.c, tcp_rcv_state_process)."""
    listening = journey.decision is not None or journey.served is not None
    result: Result = "no-answer"
    if journey.reached is None or journey.result in ("unreachable", "no-answer"):
        result = "no-answer" if journey.result in ("timeout", "no-answer") else journey.result
        transit = journey.transit
        if (
            transit is not None
            and transit.fate is not None
            and transit.fate.end == "rejected"
            and result == "no-answer"
        ):
            result = "unreachable"  # raw sockets hear of what no UDP socket is told
    elif journey.packet.proto != 6:
        result = "ok" if listening or journey.packet.proto in (1, 58) else "refused"
    elif "RST" in flags:
        result = "no-answer"
    elif not listening or "ACK" in flags:
        result = "refused"
    elif "SYN" in flags and "FIN" not in flags:
        result = "ok"
    return journey._replace(
        decision=None, endpoint=None, next=None, served=None, speaks=None, status=None, grpc_status=None, peer=None,
        flags=None, details=None, delay=0.0, result="no-answer" if spoofed else result, doubts=(),
    )  # fmt: skip


def _lookup(world: MeshWorld, base: Flow, test: TrafficTest, start: str, why: bool) -> Told:
    to = test.to
    place = world.place(start)
    server = to.server or world.nameserver()
    proto = 6 if to.protocol == "dns-tcp" else 17
    names = world.candidates(start, to.host) if to.query_type in ("A", "AAAA") else [to.host]
    questions: list[Question] = []
    for name in names:
        questions.append(
            world.ask(place, name, to.query_type, server, proto, test.flow_from.uid, to.port or 53, why=why)
        )
        if questions[-1].answers or questions[-1].rcode is None:
            break
    flow = base._replace(to=To(to.host, server, to.port or 53, to.protocol), is_lookup=True)
    return Told(verdict(flow, (), questions, test.expect), (), tuple(questions), flow)


def payload(to: FlowTo) -> Payload:
    """What the probe's driver sends for a flow (lab.probe.flows)."""
    host = f"[{to.host}]" if ":" in to.host else to.host
    usual = 443 if to.protocol == "tls" else 80
    headers = {k.lower(): v for k, v in to.headers.items()}
    if to.protocol == "grpc":
        path = to.path if to.path != "/" else "/sidecarlab.Echo/Call"
        headers = {"content-type": "application/grpc", **headers}
        return Payload("h2", None, Request(to.authority or f"{host}:{to.port}", path, "POST", headers))
    authority = to.authority or (host if to.port == usual else f"{host}:{to.port}")
    request = Request(authority, to.path, to.method, headers)
    if to.protocol == "http":
        return Payload("http1", None, request)
    if to.protocol == "tls":
        sni = to.sni or to.host
        return Payload("http1", ClientTls("" if is_address(sni) else sni), request._replace(scheme="https"))
    return Payload("silent" if to.silent else "opaque")


_FLAGS = {"F": "FIN", "S": "SYN", "R": "RST", "P": "PSH", "A": "ACK", "U": "URG"}


def _packet(place: Place, address: str, to: FlowTo, uid: int, spoof: str = "") -> Packet:
    """The first packet of a flow, as it leaves its socket."""
    six = ":" in address
    local = bool(place.host.is_local(address))
    own = next((a for a in place.addresses if (":" in a) == six), "::" if six else "0.0.0.0")
    proto = {"udp": 17, "icmp": 58 if six else 1}.get(to.protocol, 6)
    flags = frozenset({"SYN"})
    state = "NEW"
    if to.crafted and proto == 6:
        flags = frozenset(_FLAGS[f] for f in to.flags if f in _FLAGS)
        state = tcp_state(flags)
    return Packet(
        proto, spoof or (address if local else own), address, 0, to.port, uid=uid, gid=uid, flags=flags, state=state,
        icmp_type=128 if proto == 58 else 8,
    )  # fmt: skip


def tcp_state(flags: frozenset[str]) -> str:
    """What connection tracking calls the first packet of a TCP flow (linux: net/netfilter/nf_conntrack_proto_tcp.c).

    A SYN alone begins a connection; an ACK without SYN or FIN is taken as one that began earlier (tcp_loose); a set of flags that no
    stack sends, and anything else, is invalid.
    """
    known = flags & {"FIN", "SYN", "RST", "ACK", "URG"}
    valid = [
        {"SYN"}, {"SYN", "URG"}, {"SYN", "ACK"}, {"RST"}, {"RST", "ACK"}, {"FIN", "ACK"}, {"FIN", "ACK", "URG"}, {"ACK"},
        {"ACK", "URG"},
    ]  # fmt: skip
    if known not in valid or "RST" in known:
        return "INVALID"
    if "SYN" in known:
        return "INVALID" if "ACK" in known else "NEW"
    return "INVALID" if "FIN" in known else "NEW"


def is_address(text: str) -> bool:
    """Whether a text is an IP address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


_Resolved = tuple[str | None, tuple[Question, ...], str | None]


class MeshWorld:
    """A mesh on paper. Everything is made when it is first asked for and kept.

    ``rules_of`` and ``envoy_of`` replace what would be generated for a place (a running lab's own rules and configuration).
    ``kept`` gives back what was made for a key in an earlier run, or makes it (`lab.memory.Memory.get`).
    """

    def __init__(
        self,
        mesh: Mesh,
        backend: Backend = "auto",
        *,
        rules_of: Callable[[str], RuleSet | None] | None = None,
        envoy_of: Callable[[str], Config | None] | None = None,
        kept: Callable[[str, Callable[[], Any]], Any] | None = None,
    ) -> None:
        self.mesh, self.backend = mesh, backend
        self._own: dict[str, Any] = {}
        self._kept = kept or self._keep
        self._rules_of, self._envoy_of = rules_of, envoy_of
        self._places: dict[str, Place] = {}
        self._walkers: dict[str, Walker] = {}
        self._resolved: dict[tuple[str, str, int, bool], _Resolved] = {}
        self._envoys: dict[str, Config | None] = {}
        self._pods = {p.name: p for p in mesh.pods}
        self.pod_names = frozenset(self._pods)

    def _keep(self, key: str, make: Callable[[], Any]) -> Any:
        if key not in self._own:
            self._own[key] = make()
        return self._own[key]

    @property
    def busy(self) -> bool:
        """Whether a pod runs a program of its own."""
        return any(container.command for pod in self.mesh.pods for container in pod.containers)

    # --- places -----------------------------------------------------------------------------

    @cached_property
    def _routers(self) -> tuple[Router, Router]:
        from lab.fabric.plan import routers

        return routers(self.mesh)

    @cached_property
    def _owners(self) -> dict[str, str]:
        """The place of each address that the node forwards to."""
        # Remembered: a question asked again imports no plan.
        found = dict.fromkeys(self._kept("outside", lambda: self._routers[1].addresses), OUTSIDE)
        found |= {a: f"ext-{h.meta.name}" for h in self.mesh.external_hosts for a in h.addresses}
        return found | {ip: p.name for p in self.mesh.pods for ip in p.ips}

    def start(self, test: TrafficTest) -> str:
        """The place where a flow begins. Raises InputError."""
        source = test.flow_from
        if source.external:
            name = f"ext-{source.external}"
            if not any(h.meta.name == source.external for h in self.mesh.external_hosts):
                raise InputError(f"no ExternalHost {source.external!r} in {self.mesh.name}")
            return name
        pod = self.mesh.pod(source.pod)
        if pod is None:
            known = ", ".join(p.name for p in self.mesh.pods) or "none"
            raise InputError(
                f"no pod {source.pod!r} in {self.mesh.name}", why=f"pods: {known}", next_step="Name one of them"
            )
        return pod.name

    def place(self, name: str) -> Place:
        if name not in self._places:
            self._places[name] = self._kept(f"place {self.backend} {name}", lambda: self._make(name))
        return self._places[name]

    def walker(self, name: str) -> Walker:
        """The rules of a place; every walk through them is made once."""
        if name not in self._walkers:
            place = self.place(name)
            self._walkers[name] = Walker(place.rules, place.host)
        return self._walkers[name]

    def _make(self, name: str) -> Place:
        if name == NODE:
            return self._node()
        if name == OUTSIDE:
            addresses = self._routers[1].addresses
            return Place(OUTSIDE, Host({"lo": ("127.0.0.1", "::1", *addresses)}), addresses=addresses, listening={})
        pod = self._pods.get(name)
        if pod is not None:
            return self._pod(pod)
        for host in self.mesh.external_hosts:
            if name == f"ext-{host.meta.name}":
                return self._external(host)
        raise KeyError(name)

    def _pod(self, pod: Pod) -> Place:
        from lab.manifests.app_probes import answered
        from lab.manifests.injection import init_args, interception_mode

        meshed = pod.injected
        tproxy = meshed and interception_mode(self.mesh, pod) == "TPROXY"
        host = Host(
            {"lo": ("127.0.0.1", "::1"), "eth0": pod.ips},
            local_marks=frozenset({TPROXY_MARK}) if tproxy else frozenset(),
        )
        rules = self._rules_of(pod.name) if self._rules_of else None
        if rules is None:
            rules = pod_rules(self.mesh, pod, self.backend) if init_args(self.mesh, pod) else RuleSet()
        from lab.runtime import workload

        agent = workload.agent(self.mesh, pod)
        listening, hidden = self._listening(pod)
        trust = self.mesh.mesh_config.trust_domain
        return Place(
            name=pod.name,
            host=host,
            rules=rules,
            addresses=pod.ips,
            listening=listening,
            loopback_only=hidden,
            identity=f"spiffe://{trust}/ns/{pod.meta.namespace}/sa/{pod.service_account}" if meshed else "",
            meshed=meshed,
            proxy_uid=agent.identity.uid if agent else PROXY_UID,
            proxy_gid=agent.identity.gid if agent else PROXY_UID,
            probes=answered(pod, self.mesh.mesh_config.status_port),
        )

    def _listening(self, pod: Pod) -> tuple[dict[tuple[int, int], Speaks], frozenset[int]]:
        from lab.runtime.workload import echo_protocol

        found: dict[tuple[int, int], Speaks] = {}
        for container in pod.containers:
            for port in container.ports:
                proto = 17 if port.protocol == "UDP" else 6
                speaks: Speaks = "unknown"
                if not container.command:
                    speaks = echo_protocol(self.mesh, pod, port.port, port.name, port.protocol)  # type: ignore[assignment]
                found[proto, port.port] = speaks
        if pod.injected:
            found[6, 15020] = "status"
            found[6, 15000] = "admin"
            if self._captures_dns(pod):
                found[6, DNS_PORT] = found[17, DNS_PORT] = "dns"
        return found, frozenset({15000, DNS_PORT} if pod.injected else ())

    def _external(self, host: ExternalHost) -> Place:
        listening: dict[tuple[int, int], Speaks] = {
            (17 if p.protocol == "udp" else 6, p.port): p.protocol for p in host.ports
        }
        addresses = {"lo": ("127.0.0.1", "::1"), "eth0": host.addresses}
        return Place(f"ext-{host.meta.name}", Host(addresses), addresses=host.addresses, listening=listening)

    def _node(self) -> Place:
        from lab.explain import nft_text
        from lab.fabric import plan, services

        node, outside = self._routers
        document = services.nft_document(
            services.virtual_ports(self.mesh), node.sources, plan.beyond(self.mesh, outside)
        )
        rules = nft_text.parse(document, "services")
        listening: dict[tuple[int, int], Speaks] = {(17, 53): "dns", (6, 53): "dns"}
        listening |= {(6, port): "grpc" for port in (15010, 15012)}
        host = Host(
            {"lo": ("127.0.0.1", "::1", *node.addresses)},
            ways={ip: _NODE_INTERFACE for pod in self.mesh.pods for ip in pod.ips},
            uplink=OUTSIDE,
            forwarding=True,
        )
        return Place(NODE, host, rules, node.addresses, listening)

    def envoy(self, name: str) -> Config | None:
        if name not in self._envoys:
            pod = self._pods.get(name)
            made = self._envoy_of(name) if self._envoy_of else None
            if made is None and pod is not None and pod.injected:
                made = self._kept(f"envoy {name}", lambda: self._push.envoy(pod))
            self._envoys[name] = made
        return self._envoys[name]

    def resources(self, pod: Pod) -> Resources:
        """What discovery has for a pod's proxy, whatever the proxy itself has now."""
        return self._push.resources(pod)

    # --- between places ---------------------------------------------------------------------

    def transit(self, packet: Packet, source: str) -> tuple[Transit, ...]:
        """Through the node: its rules translate what is for a service, and reject what nobody has or serves."""
        arriving = packet._replace(
            iif=_NODE_INTERFACE, oif="", tracked=False, zone=None, snat_done=False, dnat_done=False, snat=False,
            dnat=False, original=None, mark=0, ctmark=0, uid=None, gid=None,
        )  # fmt: skip
        return tuple(self._carried(fate, packet, source) for fate in self.walker(NODE).receive(arriving))

    def _carried(self, fate: Fate, packet: Packet, source: str) -> Transit:
        now, chance = fate.packet, fate.chance
        target = NODE if fate.end == "delivered" else self._owners.get(now.dst)
        cut = self._cut(source, target)
        if cut:
            return Transit(None, now, silent(packet), fate, chance, cut)
        if fate.end in ("rejected", "dropped"):
            why = fate.why if target is not None else f"nothing has the address {now.dst}: {fate.why}"
            return Transit(None, now, rejected(fate, packet, local=False), fate, chance, why)
        if fate.end == "undecided":
            return Transit(None, now, "unknown", fate, chance, fate.why)
        assert target is not None  # the node's rules let nothing else out
        return Transit(target, now, None, fate, chance)

    def _cut(self, source: str, target: str | None) -> str:
        """Says which cut Link drops what ``source`` sends to ``target`` (None: nobody); empty if none does.

        One between all places takes what routers forward, and not what is for the router itself (lab.fabric.links).
        """
        router = NODE if source in self._pods else OUTSIDE
        names = {name if name in self._pods else name.removeprefix("ext-") for name in (source, target) if name}
        for link in self.mesh.links:
            ends = {_place_name(end) for end in link.between}
            if not link.cut:
                continue
            if ends == names or ("*" in ends and ends & names) or (ends == {"*"} and target != router):
                return f"the link between {source} and {target or 'all others'} is cut"
        return ""

    # --- names ------------------------------------------------------------------------------

    @cached_property
    def zone(self) -> Zone:
        from lab.fabric import zone

        return zone.build(self.mesh)

    def lookup(self, place: str) -> Resolve:  # noqa: ARG002 - the same for every place
        """Envoy asks the servers of resolv.conf itself, as the proxy's user, which no rule captures: cluster DNS."""

        def found(host: str) -> Sequence[str]:
            for kind in ("A", "AAAA"):
                _, answers = self.cluster_dns(host.rstrip(".") + ".", kind)
                if answers:
                    return answers
            return ()

        return found

    def cluster_dns(self, name: str, kind: str) -> tuple[str, tuple[str, ...]]:
        """(rcode, answers of that type) of cluster DNS."""
        found: tuple[str, tuple[str, ...]] = self._kept(f"dns {kind} {name}", lambda: self._cluster_dns(name, kind))
        return found

    def _cluster_dns(self, name: str, kind: str) -> tuple[str, tuple[str, ...]]:
        import dns.exception
        import dns.name
        import dns.rcode
        import dns.rdatatype

        try:
            asked = dns.name.from_text(name)
        except dns.exception.DNSException:
            return "FORMERR", ()
        wanted = dns.rdatatype.from_text(kind)
        answer = self.zone.lookup(asked, wanted)
        found = tuple(_answer_text(record) for rrset in answer.answer if rrset.rdtype == wanted for record in rrset)
        return dns.rcode.to_text(answer.rcode), found

    def nameserver(self) -> str:
        """The first server of every place's resolv.conf."""
        return self.mesh.fabric.dns or self.mesh.fabric.dns6

    def search(self, place: str) -> tuple[str, ...]:
        pod = self._pods.get(place)
        suffix = self.mesh.domain_suffix
        if pod is None:
            return (suffix,)
        return (f"{pod.meta.namespace}.svc.{suffix}", f"svc.{suffix}", suffix, *pod.dns_search)

    def candidates(self, place: str, name: str) -> list[str]:
        """The absolute names that a resolver tries, in order (resolv.conf(5): search, ndots:5)."""
        if name.endswith("."):
            return [name]
        searched = [f"{name}.{domain}." for domain in self.search(place)]
        return [f"{name}.", *searched] if name.count(".") >= 5 else [*searched, f"{name}."]

    def resolve(self, start: str, host: str, uid: int, *, why: bool = False) -> _Resolved:
        """(address, the questions asked for it, why it has none), as a program at ``start`` finds it."""
        key = (start, host, uid, why)
        if key not in self._resolved:
            self._resolved[key] = self._resolve(*key)
        return self._resolved[key]

    def _resolve(self, start: str, host: str, uid: int, why: bool) -> _Resolved:
        if is_address(host):
            return str(ipaddress.ip_address(host)), (), None
        place = self.place(start)
        in_hosts = self._hosts_file(start, host)
        if in_hosts:
            return in_hosts, (), None
        server = self.nameserver()
        asked: list[Question] = []
        for kind in ("A", "AAAA"):
            for candidate in self.candidates(start, host):
                question = self.ask(place, candidate, kind, server, 17, uid, why=why)
                asked.append(question)
                if question.answers:
                    return question.answers[0], tuple(asked), None
                if question.rcode is None:
                    return None, tuple(asked), f"{host} was not resolved: {question.error or 'no answer'}"
        kept = tuple(q for q in asked if q.type == "A")
        return None, kept, f"{host} was not resolved: {kept[-1].rcode}"

    def _hosts_file(self, start: str, host: str) -> str | None:
        wanted = host.rstrip(".").lower()
        if wanted == "localhost":
            return "127.0.0.1"
        pod = self._pods.get(start)
        if pod is None:
            own = next((h for h in self.mesh.external_hosts if f"ext-{h.meta.name}" == start), None)
            return own.addresses[0] if own and wanted == own.meta.name.lower() else None
        hostname = pod.hostname or pod.meta.name
        domain = f"{pod.subdomain}.{pod.meta.namespace}.svc.{self.mesh.domain_suffix}" if pod.subdomain else ""
        names = {hostname.lower(), *([f"{hostname}.{domain}".lower()] if domain else [])}
        return pod.ip if wanted in names else None

    def ask(
        self,
        place: Place,
        name: str,
        kind: str,
        server: str,
        proto: int,
        uid: int,
        port: int = 53,
        *,
        why: bool = False,
    ) -> Question:
        """What becomes of one DNS question."""
        six = ":" in server
        local = bool(place.host.is_local(server))
        own = next((a for a in place.addresses if (":" in a) == six), "::" if six else "0.0.0.0")
        packet = Packet(proto, server if local else own, server, 0, port, uid=uid, gid=uid)
        fates = self.walker(place.name).send(packet, why=why)
        if len(fates) != 1:
            doubts = tuple(dict.fromkeys(d for f in fates for d in f.assumed))
            return Question(name, kind, server, fates[0], None, None, None, (), doubts=doubts)
        fate = fates[0]
        if fate.end == "undecided":
            return Question(name, kind, server, fate, None, None, None, (), doubts=(fate.why,))
        if fate.end == "delivered":
            speaks = (place.listening or {}).get((proto, fate.packet.dport))
            captured = (fate.packet.dst, fate.packet.dport) != (server, port)
            if speaks != "dns":
                error = "refused"
                return Question(
                    name, kind, server, fate, fate.packet.dport if captured else None, None, None, (), error=error
                )
            return self._by_agent(place, name, kind, server, fate, proto)
        if fate.end != "left":
            return Question(name, kind, server, fate, None, None, None, (), error=_question_error(fate))
        return self._by_server(place, name, kind, server, fate, port)

    def _by_server(self, place: Place, name: str, kind: str, server: str, fate: Fate, port: int) -> Question:
        transits = self.transit(fate.packet, place.name)
        transit = transits[0]
        if transit.reached == NODE and server in (self.mesh.fabric.dns, self.mesh.fabric.dns6) and port == 53:
            rcode, answers = self.cluster_dns(name, kind)
            return Question(name, kind, server, fate, None, "cluster-dns", rcode, answers)
        error = "refused" if transit.result == "refused" else transit.result or "no-answer"
        return Question(name, kind, server, fate, None, None, None, (), error=str(error))

    def _by_agent(self, place: Place, name: str, kind: str, server: str, fate: Fate, proto: int) -> Question:
        """The agent answers what its table knows, and asks cluster DNS for the rest."""
        port = fate.packet.dport
        pod = self._pods.get(place.name)
        assert pod is not None
        if kind in ("A", "AAAA"):
            local = self._kept(f"name {pod.name} {name}", lambda: self._local_name(pod, name))
            if local is not None:
                answers = local[kind == "AAAA"]
                return Question(name, kind, server, fate, port, "agent", "NOERROR", answers)
        upstream = self.nameserver()
        own = next((a for a in place.addresses if (":" in a) == (":" in upstream)), "0.0.0.0")
        question = Packet(proto, own, upstream, 0, 53, uid=place.proxy_uid, gid=place.proxy_gid)
        onward = self.walker(place.name).send(question)[0]
        if onward.end != "left":
            return Question(name, kind, server, fate, port, "agent", "SERVFAIL", ())
        rcode, answers = self.cluster_dns(name, kind)
        return Question(name, kind, server, fate, port, "cluster-dns", rcode, answers, forwarded=onward)

    def _local_name(self, pod: Pod, name: str) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """IPv4 and IPv6 addresses of a name that the agent knows itself; None if it does not."""
        from agent.dns.table import ProxyNames, build_table, wire_name

        def build() -> LookupTable:
            domain = f"{pod.meta.namespace}.svc.{self.mesh.domain_suffix}"
            names = ProxyNames(pod.meta.namespace, domain, self.search(pod.name))
            return build_table(self._push.resources(pod).name_table, names)

        table: LookupTable = self._kept(f"names {pod.name}", build)
        found = table.lookup(wire_name(name) or b"\0")
        if found is None:
            return None
        return _addresses(found.ipv4), _addresses(found.ipv6)

    @cached_property
    def _push(self) -> _Push:
        return _Push(self.mesh)

    def _captures_dns(self, pod: Pod) -> bool:
        from lab.manifests.injection import init_env

        return init_env(self.mesh, pod).get("ISTIO_META_DNS_CAPTURE", "").lower() in ("true", "1", "t")


def _place_name(name: str) -> str:
    if "/" in name:
        namespace, _, pod = name.partition("/")
        return f"{pod}.{namespace}"
    return name


def _question_error(fate: Fate) -> str:
    return "refused" if fate.end == "rejected" else "no-answer"


def _addresses(packed: Iterable[bytes]) -> tuple[str, ...]:
    return tuple(str(ipaddress.ip_address(a)) for a in packed)


def _answer_text(record: Any) -> str:
    """A record as the probe's resolver writes it."""
    kind = record.rdtype.name
    if kind in ("A", "AAAA"):
        return str(record.address)
    if kind == "TXT":
        return b"".join(record.strings).decode("utf-8", "replace")
    if kind == "MX":
        return f"{record.preference} {str(record.exchange).rstrip('.')}"
    if kind == "SRV":
        return f"{record.priority} {record.weight} {record.port} {str(record.target).rstrip('.')}"
    return str(record.target).rstrip(".")


# --- what a pod has ---------------------------------------------------------------------------


def pod_rules(mesh: Mesh, pod: Pod, backend: Backend = "auto") -> RuleSet:
    """The rules that init makes for a pod, as the kernel would list them.

    Raises:
        InputError: init would refuse its settings.
    """
    from init import restore, rules
    from init.config import from_flags, validate
    from init.environment import local_address
    from init.errors import InitError
    from init.flags import parse
    from lab.manifests.injection import init_args, init_env

    environ = init_env(mesh, pod)
    try:
        parsed = parse(init_args(mesh, pod), environ)
        config = from_flags(parsed, environ)
        uid = config.proxy_uid or str(PROXY_UID)
        _, ipv6 = local_address([ipaddress.ip_address(ip) for ip in pod.ips], config.dual_stack)
        config = config._replace(proxy_uid=uid, proxy_gid=config.proxy_gid or uid, ipv6=ipv6, host_ip=pod.ip)
        if config.redirect_dns and not config.capture_all_dns:
            servers = [a for a in (mesh.fabric.dns, mesh.fabric.dns6) if a]
            config = config._replace(
                dns_servers_v4=tuple(a for a in servers if ":" not in a),
                dns_servers_v6=tuple(a for a in servers if ":" in a),
            )
        validate(config, parsed.text("force-iptables-binary"))
        if backend == "native-nft":
            from init import native
            from lab.explain import nft_text

            return nft_text.parse(native.script(native.build(config)), "init", canonical=True)
        both = rules.build(config)
    except InitError as error:
        raise InputError(f"init refuses the settings of {pod.name}", str(pod.meta.source), str(error)) from None
    known = None if backend == "auto" else backend
    found = _parsed(restore.document(both.ipv4), "ipv4", known)
    return found.joined(_parsed(restore.document(both.ipv6), "ipv6", known)) if both.ipv6 else found


@lru_cache(maxsize=64)
def _parsed(document: str, family: Family, backend: RuleBackend | None) -> RuleSet:
    """Most pods of a mesh have the same rules."""
    from lab.explain import iptables_save

    return iptables_save.parse(document, family, "init", backend, canonical=True)


class _Push:
    """What discovery has for the proxies of a mesh; what several of them get is made once."""

    def __init__(self, mesh: Mesh) -> None:
        from lab.discovery.push_context import PushContext

        self._context = PushContext(mesh)
        self._resources: dict[str, Resources] = {}
        self._plain: dict[int, dict[str, Any]] = {}

    def resources(self, pod: Pod) -> Resources:
        """The resources of a pod's proxy."""
        from lab.discovery import snapshot
        from lab.discovery.node import node_for_pod

        if pod.name not in self._resources:
            node = node_for_pod(self._context.mesh, pod)
            self._resources[pod.name] = snapshot.generate(self._context, node)
        return self._resources[pod.name]

    def envoy(self, pod: Pod) -> Config:
        """What a pod's Envoy has: discovery's resources, and the listeners of its bootstrap."""
        found = self.resources(pod)
        listeners = {name: self._json(message) for name, message in found.listeners.items()}
        clusters = {name: self._json(message) for name, message in found.clusters.items()}
        return Config(
            listeners={**listeners, **{x["name"]: x for x in bootstrap_listeners(pod)}},
            routes={name: self._json(message) for name, message in found.routes.items()},
            clusters={**clusters, **{x["name"]: x for x in bootstrap_clusters(pod)}},
            endpoints={name: self._json(message) for name, message in found.endpoints.items()},
            source="discovery",
        )

    def _json(self, message: Any) -> dict[str, Any]:
        """A message as protobuf JSON. Messages are known by identity: the resources keep them alive."""
        from lab.discovery.snapshot import plain

        found = self._plain.get(id(message))
        if found is None:
            found = self._plain[id(message)] = plain(message)
        return found


def bootstrap_listeners(pod: Pod) -> Iterator[dict[str, Any]]:
    """Ports 15090 (metrics) and 15021 (health), as the agent's bootstrap has them (agent.bootstrap)."""
    wildcard = "::" if ":" in pod.ip else "0.0.0.0"
    for port, path, cluster in ((15090, "/stats/prometheus", "prometheus_stats"), (15021, "/healthz/ready", "agent")):
        routes = [{"match": {"prefix": path}, "route": {"cluster": cluster}}]
        manager = {
            "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
            "route_config": {"virtual_hosts": [{"name": "backend", "domains": ["*"], "routes": routes}]},
        }
        yield {
            "name": f"{wildcard}_{port}",
            "address": {"socket_address": {"address": wildcard, "port_value": port}},
            "filter_chains": [{"filters": [{"name": "hcm", "typed_config": manager}]}],
        }


def bootstrap_clusters(pod: Pod) -> Iterator[dict[str, Any]]:
    """Where those two listeners lead: Envoy's admin port and the agent's status port."""
    own = "::1" if ":" in pod.ip else "127.0.0.1"
    for name, port in (("prometheus_stats", 15000), ("agent", 15020)):
        address = {"socket_address": {"address": own, "port_value": port}}
        endpoints = [{"lb_endpoints": [{"endpoint": {"address": address}}]}]
        yield {"name": name, "type": "STATIC", "load_assignment": {"cluster_name": name, "endpoints": endpoints}}

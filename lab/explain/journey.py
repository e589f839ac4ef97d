"""Follows one connection, and those that proxies make for it, to its end: rules, node, rules, Envoy, and on from there.

A journey is one connection attempt. Where a proxy takes it, the proxy's own connection is the next journey. What cannot be
said makes several journeys of one, or ends it with a doubt.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from lab.explain import envoy
from lab.explain.app_probe import PREFIXES, probed
from lab.explain.envoy import Decision
from lab.explain.flow import ClientTls, Connection, Request
from lab.explain.packet import Packet, loopback
from lab.explain.ruleset import Hook, Redirect
from lab.explain.upstream import Endpoint, UpstreamTls
from lab.explain.walk import Fate, Pass
from lab.explain.world import Payload, Place, Result, Served, Speaks, Transit, World, serve

MOST_JOURNEYS = 64
DEEPEST = 8


class Journey(NamedTuple):
    """One connection: ``packet`` is its first, as its sender made it.

    ``sent`` is what the rules of ``start`` made of it (None for a sender without known rules), ``transit`` what happened
    between, ``reached`` where it came to, ``received`` what the rules there made of it (None over ``lo``). ``port`` is where
    it was delivered, ``captured`` whether that is not where it wanted to go. Then a proxy decided (``decision``, ``endpoint``, and
    ``next`` its own connection), or a program answered (``served``). ``result`` and ``status`` are what the sender gets;
    ``error`` is what its kernel says where it is unreachable, ``flags`` and ``details`` what the proxy writes about it; ``identity`` is that of the place which was reached.
    """

    start: str
    packet: Packet
    sent: Fate | None = None
    transit: Transit | None = None
    reached: str | None = None
    received: Fate | None = None
    port: int | None = None
    captured: bool = False
    decision: Decision | None = None
    endpoint: Endpoint | None = None
    next: Journey | None = None
    speaks: Speaks | None = None
    served: Served | None = None
    result: Result = "unknown"
    status: int | None = None
    flags: str | None = None
    details: str | None = None
    grpc_status: int | None = None
    delay: float = 0.0
    error: str = ""
    peer: str | None = None
    identity: str = ""
    request: Request | None = None
    chance: float = 1.0
    doubts: tuple[str, ...] = ()

    @property
    def local(self) -> bool:
        """It never left the place where it began."""
        return self.reached is not None and self.reached == self.start and self.received is None

    @property
    def captured_at_start(self) -> bool:
        return self.captured and self.local

    @property
    def last(self) -> Journey:
        return self.next.last if self.next is not None else self


def follow(
    world: World, start: str, packet: Packet, payload: Payload, *, why: bool = False, depth: int = 0
) -> tuple[Journey, ...]:
    """Everything that can become of a connection that ``start`` opens; chances add up to 1."""
    found: list[Journey] = []
    for journey in _follow(world, start, packet, payload, why, depth):
        found.append(journey)
        if len(found) >= MOST_JOURNEYS:
            break
    return tuple(found)


def _follow(world: World, start: str, packet: Packet, payload: Payload, why: bool, depth: int) -> Iterator[Journey]:
    place = world.place(start)
    base = Journey(start, packet)
    if depth > DEEPEST:
        yield base._replace(result="loop")
        return
    for sent in world.walker(start).send(packet, why=why):
        now = base._replace(sent=sent, chance=base.chance * sent.chance, doubts=sent.assumed)
        if sent.end == "left":
            for transit in world.transit(sent.packet, start):
                yield from _arrive(
                    world, now._replace(transit=transit, chance=now.chance * transit.chance), payload, why, depth
                )
        elif sent.end == "delivered":
            yield from _delivered(world, now._replace(reached=start), place, sent, payload, why, depth)
        else:
            yield _ended(now, sent, local=True)


def arrive(world: World, place: str, packet: Packet, payload: Payload, *, why: bool = False) -> tuple[Journey, ...]:
    """Everything that can become of a packet that arrives at ``place`` from outside."""
    transit = Transit(place, packet)
    return tuple(_arrive(world, Journey("outside", packet, transit=transit), payload, why, 0))


def at_proxy(
    world: World, place: str, packet: Packet, port: int, payload: Payload, *, inbound: bool
) -> tuple[Journey, ...]:
    """What a proxy does with a connection that came to its ``port``, whatever rule brought it there."""
    hook: Hook = "prerouting" if inbound else "output"
    taken = packet._replace(dst="::1" if ":" in packet.dst else "127.0.0.1", dport=port)
    fate = Fate("delivered", taken, (Pass(hook, packet, taken, ()),))
    start = Journey("outside" if inbound else place, packet, reached=place)
    start = start._replace(received=fate) if inbound else start._replace(sent=fate)
    return tuple(_delivered(world, start, world.place(place), fate, payload, False, 0))


def _ended(journey: Journey, fate: Fate, *, local: bool) -> Journey:
    """A rule ended it."""
    if fate.end == "undecided":
        return journey._replace(doubts=(*journey.doubts, fate.why))
    result = rejected(fate, journey.packet, local=local)
    return journey._replace(result=result, error=_unreachable(fate) if result == "unreachable" else "")


_ERRORS = {
    "icmp-net-unreachable": "Network is unreachable",
    "icmp6-no-route": "Network is unreachable",
    "icmp6-adm-prohibited": "Permission denied",
}

_NOT_FATAL = frozenset(("icmp-net-unreachable", "icmp-host-unreachable", "icmp6-no-route", "icmp6-addr-unreachable"))
"""Answers that a UDP socket is not told of (linux: the same tables)."""


def _unreachable(fate: Fate | None) -> str:
    """The error of a connection that is unreachable (linux: icmp_err_convert, net/ipv6/icmp.c: tab_unreach)."""
    if fate is None or fate.end not in ("rejected", "dropped"):
        return "Network is unreachable"  # a router has no route
    return _ERRORS.get(fate.why, "No route to host") if fate.end == "rejected" else "Operation not permitted"


def silent(packet: Packet) -> Result:
    """What a sender makes of hearing nothing."""
    return "timeout" if packet.proto == 6 else "no-answer"


def rejected(fate: Fate, packet: Packet, *, local: bool) -> Result:
    """What a sender hears of a packet that was dropped or rejected (linux: net/ipv4/icmp.c icmp_err_convert)."""
    if fate.end == "dropped":
        # A packet of one's own that is dropped is an error of send(2): EPERM.
        return (
            "unreachable"
            if local and fate.passes and fate.passes[-1].hook in ("output", "postrouting")
            else silent(packet)
        )
    if fate.why in ("tcp-reset", "icmp-port-unreachable", "icmp6-port-unreachable", "icmp-proto-unreachable"):
        return "refused"
    return silent(packet) if packet.proto == 17 and fate.why in _NOT_FATAL else "unreachable"


def _arrive(world: World, journey: Journey, payload: Payload, why: bool, depth: int) -> Iterator[Journey]:
    transit = journey.transit
    assert transit is not None
    if transit.reached is None:
        doubts = (
            (*journey.doubts, transit.why) if transit.result in (None, "unknown") and transit.why else journey.doubts
        )
        error = _unreachable(transit.fate) if transit.result == "unreachable" else ""
        yield journey._replace(result=transit.result or "unknown", doubts=doubts, error=error)
        return
    place = world.place(transit.reached)
    arriving = transit.packet._replace(iif=place.host.uplink, oif="", tracked=False, zone=None, snat_done=False, dnat_done=False,
                       snat=False, dnat=False, original=None, mark=0, ctmark=0, tproxy=None)  # fmt: skip
    for received in world.walker(place.name).receive(arriving, why=why):
        now = journey._replace(
            reached=place.name,
            received=received,
            chance=journey.chance * received.chance,
            doubts=(*journey.doubts, *received.assumed),
        )
        if received.end == "delivered":
            yield from _delivered(world, now, place, received, payload, why, depth)
        else:
            yield _ended(now, received, local=False)


def _delivered(
    world: World, journey: Journey, place: Place, fate: Fate, payload: Payload, why: bool, depth: int
) -> Iterator[Journey]:
    """The packet is given to whoever listens."""
    packet = fate.packet
    before = fate.passes[0].before if fate.passes else packet
    port = packet.tproxy or packet.dport
    moved = (packet.dst, packet.dport) != (before.dst, before.dport)
    captured = packet.tproxy is not None or moved or _redirected(fate)
    journey = journey._replace(port=port, captured=captured, identity=place.identity)
    if packet.proto != 6:
        yield _datagram(journey, place, packet, before)
        return
    original = (before.dst, before.dport)
    config = world.envoy(place.name) if place.meshed else None
    connection = Connection(
        src=packet.src, dst=original[0], dport=original[1], port=port, speech=payload.speech, tls=payload.tls,
        request=payload.request, sport=packet.sport, inner=payload.inner,
    )  # fmt: skip
    if config is not None and envoy.listens(config, connection):
        for decision in envoy.decide(config, connection, world.lookup(place.name)):
            now = journey._replace(
                decision=decision,
                chance=journey.chance * decision.chance,
                doubts=(*journey.doubts, *decision.doubts),
            )
            yield from _decided(world, now, place, payload, why, depth)
        return
    yield _answered(journey, place, packet, payload)


def _redirected(fate: Fate) -> bool:
    """Whether a REDIRECT was hit, also one to the port that the packet went to anyway."""
    return any(
        s.matched and s.rule is not None and any(isinstance(part, Redirect) for part in s.rule.parts)
        for passed in fate.passes
        for s in passed.steps
    )


def _datagram(journey: Journey, place: Place, packet: Packet, before: Packet) -> Journey:
    if packet.proto in (1, 58):
        return journey._replace(result="ok")
    if place.listening is None:
        return _unknown(journey)
    speaks = place.listening.get((packet.proto, packet.dport))
    if speaks is None:
        return journey._replace(result="refused")
    return journey._replace(speaks=speaks, result="ok", peer=before.src, served=Served("ok", told=True))


def _answered(journey: Journey, place: Place, packet: Packet, payload: Payload) -> Journey:
    """A program other than Envoy, or nobody, takes the connection."""
    if place.listening is None:
        return _unknown(journey)
    speaks = place.listening.get((6, packet.dport))
    if speaks is None or (packet.dport in place.loopback_only and not loopback(packet.dst)):
        return journey._replace(result="refused")
    served = serve(speaks, payload)
    if speaks == "status" and served.status == 404 and payload.request is not None:
        path = payload.request.path.partition("?")[0]
        served = probed(place, path) if path.startswith(PREFIXES) else served
    doubts = journey.doubts
    if served.result == "unknown":
        doubts = (*doubts, f"what the program in {place.name} answers on port {packet.dport} is not known")
    return journey._replace(
        speaks=speaks,
        served=served,
        result=served.result,
        status=served.status,
        grpc_status=0 if speaks == "grpc" and served.status == 200 else None,
        delay=served.delay,
        peer=(served.peer or packet.src) if served.told else None,
        request=payload.request,
        doubts=doubts,
    )


def _decided(
    world: World, journey: Journey, place: Place, payload: Payload, why: bool, depth: int
) -> Iterator[Journey]:
    """A proxy has the connection: it answers, closes, or connects to an endpoint of its cluster."""
    decision = journey.decision
    assert decision is not None
    payload = _unwrapped(payload, decision)
    if decision.waits:
        yield journey._replace(result="silence")
        return
    if decision.closed and decision.upstream is not None and decision.upstream.endpoints:
        yield _by_proxy(journey, decision._replace(flags=_tried(world, place, decision, depth)), payload)
        return
    if decision.answer is not None or decision.closed or decision.upstream is None:
        yield _by_proxy(journey, decision, payload)
        return
    if world.busy and decision.upstream.limits:
        yield _overflow(journey, decision, payload)
        limits = ", ".join(decision.upstream.limits)
        journey = journey._replace(
            doubts=(*journey.doubts, f"other traffic may use up cluster {decision.cluster} ({limits})")
        )
    for endpoint in decision.upstream.endpoints:
        now = journey._replace(endpoint=endpoint, chance=journey.chance * endpoint.share)
        if endpoint.doubt:
            now = now._replace(doubts=(*now.doubts, endpoint.doubt))
        onward = _payload(decision, endpoint, payload, place)
        source = decision.source or decision.upstream.source(endpoint.address) or _source(place, endpoint.address)
        first = Packet(
            6, source, endpoint.address, 0, endpoint.port, uid=place.proxy_uid, gid=place.proxy_gid, mark=decision.mark
        )
        for next_ in follow(world, place.name, first, onward, why=why, depth=depth + 1):
            yield _joined(world, now, decision, endpoint, next_, payload)
    if not decision.upstream.endpoints:
        yield _unknown(journey)


def _tried(world: World, place: Place, decision: Decision, depth: int) -> str:
    """The flags of a TCP proxy that has begun to connect when its client's handshake fails: a refusal comes before that."""
    assert decision.upstream is not None
    endpoint = decision.upstream.endpoints[0]
    source = decision.upstream.source(endpoint.address) or _source(place, endpoint.address)
    first = Packet(6, source, endpoint.address, 0, endpoint.port, uid=place.proxy_uid, gid=place.proxy_gid)
    found = follow(world, place.name, first, Payload("silent"), depth=depth + 1)
    return "UF,URX" if found[0].result == "refused" else decision.flags


def _overflow(journey: Journey, decision: Decision, payload: Payload) -> Journey:
    """What a circuit breaker that is open makes of a flow."""
    limits = ", ".join(decision.upstream.limits) if decision.upstream else ""
    doubts = (*journey.doubts, f"other traffic may use up cluster {decision.cluster} ({limits})")
    journey = journey._replace(doubts=doubts, flags="UO")
    if not decision.http:
        return journey._replace(result="closed")
    grpc = payload.request is not None and payload.request.grpc
    details = "upstream_reset_before_response_started{overflow}"
    return journey._replace(result="ok", status=200 if grpc else 503, grpc_status=14 if grpc else None, details=details)


def _unknown(journey: Journey) -> Journey:
    """Its end is not known; doubts say why."""
    return journey._replace(result="unknown")


def _source(place: Place, destination: str) -> str:
    """The address that the kernel chooses for a connection."""
    if loopback(destination) or (place.host.is_local(destination)):
        return destination
    six = ":" in destination
    own = next((a for a in place.addresses if (":" in a) == six), None)
    return own or ("::" if six else "0.0.0.0")


def _unwrapped(payload: Payload, decision: Decision) -> Payload:
    """The payload after the proxy ended its TLS, if it did."""
    return payload._replace(tls=payload.inner, inner=None) if decision.tls else payload


def _payload(decision: Decision, endpoint: Endpoint, payload: Payload, place: Place) -> Payload:
    """What the proxy sends on."""
    if decision.http:
        payload = Payload(decision.speech, None, decision.request)
    tls = endpoint.tls
    if tls is None:
        return payload
    alpn = decision.alpn or tls.alpn
    if not alpn and decision.http:
        alpn = ("h2",) if decision.speech == "h2" else ("http/1.1",)
    client = ClientTls(tls.sni, alpn, place.identity if tls.certificate else "")
    return payload._replace(tls=client, inner=payload.tls)


def _by_proxy(journey: Journey, decision: Decision, payload: Payload) -> Journey:
    """The proxy itself ends it."""
    flags = decision.flags
    if decision.closed:
        # Bytes that came and were not read make a reset of the end (linux: tcp_close).
        unread = decision.filter_chain is None and payload.first_bytes != "silent"
        result: Result = "reset" if unread else "closed"
        return journey._replace(result=result, flags=flags, details=decision.details)
    if decision.answer is None:
        return _unknown(journey)
    grpc = decision.request is not None and decision.request.grpc
    return journey._replace(
        # A client that did not speak HTTP still gets the bytes of the answer.
        result="ok",
        status=None if payload.request is None else 200 if grpc else decision.answer,
        grpc_status=envoy.grpc_status(decision.answer) if grpc else None,
        flags=flags,
        details=decision.details,
        delay=decision.delay,
    )


def _joined(
    world: World,
    journey: Journey,
    decision: Decision,
    endpoint: Endpoint,
    next_: Journey,
    inner: Payload,
) -> Journey:
    """What the sender gets of what the proxy's own connection got."""
    doubts = tuple(dict.fromkeys((*journey.doubts, *next_.doubts)))
    now = journey._replace(next=next_, chance=journey.chance * next_.chance, doubts=doubts)
    result = next_.result
    if endpoint.tls is not None and result in ("ok", "closed", "reset"):
        refused = _tls_refused(world, endpoint.tls, next_)
        if refused:
            result = "tls-refused"
            now = now._replace(details=refused)
    if result == "unknown":
        return now._replace(flags=None)
    if result == "loop":
        # It lasts until the client gives up.
        details = "downstream_remote_disconnect" if decision.http else None
        return now._replace(result="loop", flags="DC" if decision.http else None, details=details)
    if result == "no-answer":
        result = "timeout"
    delay = decision.delay + next_.delay
    if decision.timeout and next_.delay > decision.timeout and result == "ok":
        return now._replace(result="ok", status=504, flags="UT", details="response_timeout", delay=decision.timeout)
    if decision.http and result == "ok" and next_.status is None:
        # Bytes that are no HTTP response.
        details = "upstream_reset_before_response_started{protocol_error}"
        grpc = inner.request is not None and inner.request.grpc
        return now._replace(
            result="ok",
            status=200 if grpc else 502,
            grpc_status=envoy.grpc_status(502) if grpc else None,
            flags="UPE",
            details=details,
        )
    in_headers = next_.grpc_status if next_.peer is None else None  # a proxy's own answer has no trailers
    reply = envoy.reply(decision, result, next_.status, next_.error, in_headers)
    if reply.result == "closed" and result != "closed" and not decision.tls and inner.first_bytes != "silent":
        reply = reply._replace(result="reset")  # what its listener filters saw of the client was never read
    grpc = inner.request is not None and inner.request.grpc
    local = decision.http and result != "ok"
    code = next_.grpc_status
    if decision.http and decision.speech == "http1" and next_.peer is not None:
        code = None  # it comes in trailers, which HTTP/1.1 does not carry on
    if local and grpc and reply.status is not None:
        code = envoy.grpc_status(reply.status)
    return now._replace(
        result=reply.result,
        status=200 if local and grpc else reply.status,
        grpc_status=code,
        flags=reply.flags,
        details=reply.details,
        delay=delay,
        peer=next_.peer,
    )


def _tls_refused(world: World, tls: UpstreamTls, next_: Journey) -> str:
    """Why a client that speaks this TLS would not take the server; empty if it would."""
    while next_.decision is not None and not next_.decision.tls and next_.next is not None:
        next_ = next_.next  # a proxy that handed the bytes on
    server = next_.decision
    if server is not None and server.tls:
        identity = world.place(next_.reached or next_.start).identity
        if tls.sans and not any(_is_san(kind, value, identity) for kind, value in tls.sans):
            return f"the server is {identity or 'without an identity'}, which the client does not accept"
        return ""
    if next_.served is not None and next_.speaks in ("https", "tls"):
        return "the server's certificate is its own" if tls.trust else ""
    return "the server does not speak TLS"


def _is_san(kind: str, value: str, identity: str) -> bool:
    return {"exact": identity == value, "prefix": identity.startswith(value), "suffix": identity.endswith(value)}[kind]

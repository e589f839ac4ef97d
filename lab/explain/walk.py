"""Walks a packet through a rule set: every hook in the kernel's order, every chain by priority.

A question without an answer (a random choice, a set of unknown members, an unknown match) makes two walks of one, so the
result is every fate that the packet can have. Where they agree the doubt does not matter.

Sources: Linux include/uapi/linux/netfilter_ipv4.h (priorities), net/netfilter/{nf_conntrack_core,nf_nat_core}.c,
net/ipv4/netfilter/ip_tables.c, net/netfilter/nf_tables_core.c.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator
from itertools import takewhile
from typing import Literal, NamedTuple

from lab.explain.conditions import Condition, Doubt
from lab.explain.packet import WITH_PORTS, Host, Packet, loopback
from lab.explain.ruleset import (
    ACTIONS,
    Action,
    Base,
    Chain,
    Hook,
    Jump,
    Masquerade,
    NoEffect,
    NoTrack,
    Part,
    Redirect,
    Reject,
    RestoreMark,
    Rule,
    RuleSet,
    SaveMark,
    SetMark,
    SetZone,
    Spread,
    Table,
    Tproxy,
    Translate,
    UnknownAction,
    Verdict,
    VerdictMap,
)

CONNTRACK, NAT_DST, NAT_SRC = -200, -100, 100
"""Priorities at which the kernel itself looks at a packet; nat chains run inside NAT, whatever priority they name."""

MOST_FATES = 256
MOST_STEPS = 200_000
MOST_JUMPS = 64
MOST_ENDS = 16
"""How many ends of a DNAT range are followed one by one."""

End = Literal["left", "delivered", "dropped", "rejected", "undecided"]


class Step(NamedTuple):
    """One rule (or, with ``rule`` None, the policy) that a packet met.

    ``matched`` is False for a rule that was passed by; then ``failed`` says which conditions did not hold, as
    ``CONDITION (what the packet has)``. ``effect`` says in a word what a matching rule did.
    """

    table: Table
    chain: str
    base: Base
    rule: Rule | None
    matched: bool
    effect: str = ""
    failed: tuple[tuple[str, str], ...] = ()

    @property
    def decided(self) -> bool:
        return self.matched and self.rule is not None and self.rule.decides

    @property
    def text(self) -> str:
        return self.rule.text if self.rule is not None else self.base.shown


class Pass(NamedTuple):
    """A packet's way through one hook."""

    hook: Hook
    before: Packet
    after: Packet
    steps: tuple[Step, ...]


class Fate(NamedTuple):
    """One thing that can become of a packet.

    ``end``: it ``left`` by ``packet.oif``, was ``delivered`` here (to ``packet.tproxy`` or ``packet.dport``), ``dropped``,
    ``rejected`` (``why`` is the answer), or is ``undecided`` (``why`` says what is not known). ``assumed`` are the doubts that
    were answered to come here, ``chance`` the probability of the random choices among them.
    """

    end: End
    packet: Packet
    passes: tuple[Pass, ...]
    why: str = ""
    assumed: tuple[str, ...] = ()
    chance: float = 1.0

    @property
    def key(self) -> tuple[object, ...]:
        """What two fates have in common if it does not matter which of them comes true."""
        p = self.packet
        if self.end == "undecided":
            return ("undecided", self.why)
        where = (p.src, p.dst, p.sport, p.dport, p.tproxy, p.zone or 0)
        return (self.end, self.why if self.end == "rejected" else "", *where)


def send(packet: Packet, rules: RuleSet, host: Host, *, why: bool = False, every: bool = False) -> tuple[Fate, ...]:
    """A packet that this machine sends: output, postrouting, and over ``lo`` also prerouting and input.

    Args:
        packet: without ``oif`` the route of its destination decides.
        why: also remember rules that did not match.
        every: give all courses, also those that end alike.
    """
    return Walker(rules, host).send(packet, why=why, every=every)


def receive(packet: Packet, rules: RuleSet, host: Host, *, why: bool = False, every: bool = False) -> tuple[Fate, ...]:
    """A packet that arrives by ``packet.iif``: prerouting, then input, or forward and postrouting."""
    return Walker(rules, host).receive(packet, why=why, every=every)


class Walker:
    """One rule set on one machine, for many packets: what depends on the rules alone is found out once, and so is each walk."""

    def __init__(self, rules: RuleSet, host: Host) -> None:
        self.rules, self.host = rules, host
        self._tracks: dict[str, bool] = {}
        self._stages: dict[tuple[Hook, str], list[_Stage]] = {}
        self._nat: dict[tuple[Hook, str], list[tuple[Table, Chain, Base]]] = {}
        self._conditions: dict[int, tuple[Condition, ...]] = {}  # by identity: the rules live as long as this does
        self._fates: dict[tuple[Packet, bool, bool, bool], tuple[Fate, ...]] = {}

    def send(self, packet: Packet, *, why: bool = False, every: bool = False) -> tuple[Fate, ...]:
        """See `send`."""
        return self._walked(packet, True, why, every)

    def receive(self, packet: Packet, *, why: bool = False, every: bool = False) -> tuple[Fate, ...]:
        """See `receive`."""
        return self._walked(packet, False, why, every)

    def _walked(self, packet: Packet, out: bool, why: bool, every: bool) -> tuple[Fate, ...]:
        key = (packet, out, why, every)
        found = self._fates.get(key)
        if found is None:
            walk = _Walk(self, why, every)
            if out:
                fates = walk.sent(packet._replace(oif=packet.oif or self.host.route(packet.dst), iif=""))
            else:
                fates = walk.received(packet._replace(oif="", uid=None, gid=None))
            found = self._fates[key] = tuple(fates if every else _merged(fates))
        return found

    def tracks(self, family: str) -> bool:
        """Whether the kernel tracks connections of a family here."""
        if family not in self._tracks:
            self._tracks[family] = self.rules.tracks(family)
        return self._tracks[family]

    def stages(self, hook: Hook, family: str) -> list[_Stage]:
        """What a packet meets at a hook, in order: chains that are no nat chains, tracking, and nat as one."""
        found = self._stages.get((hook, family))
        if found is None:
            found = self._stages[hook, family] = self._ordered(hook, family)
        return found

    def nat_chains(self, hook: Hook, family: str) -> list[tuple[Table, Chain, Base]]:
        """The nat chains of a hook, in order."""
        found = self._nat.get((hook, family))
        if found is None:
            bases = self.rules.bases(hook, family)
            found = self._nat[hook, family] = [entry for entry in bases if entry[2].kind == "nat"]
        return found

    def conditions(self, rule: Rule) -> tuple[Condition, ...]:
        """What a rule asks before its first action."""
        found = self._conditions.get(id(rule))
        if found is None:
            found = tuple(takewhile(lambda part: not isinstance(part, ACTIONS), rule.parts))  # type: ignore[arg-type]
            self._conditions[id(rule)] = found
        return found

    def _ordered(self, hook: Hook, family: str) -> list[_Stage]:
        entries: list[tuple[int, int, _Stage]] = [
            (base.priority, 1, (table, chain, base))
            for table, chain, base in self.rules.bases(hook, family)
            if base.kind != "nat"
        ]
        tracks = self.tracks(family)
        if tracks and hook in ("prerouting", "output"):
            entries.append((CONNTRACK, 0, "conntrack"))
        if tracks and hook != "forward" and self.rules.has_nat(family):
            entries.append((NAT_DST if hook in ("prerouting", "output") else NAT_SRC, 0, "nat"))
        entries.sort(key=lambda entry: entry[:2])
        return [stage for _, _, stage in entries]


def certain(fates: Iterable[Fate]) -> Fate | None:
    """The fate if there is only one, or all agree in what matters; None if they differ or one is undecided."""
    found = list(fates)
    if not found or any(f.end == "undecided" for f in found):
        return None
    return found[0] if len({f.key for f in found}) == 1 else None


def doubts(fates: Iterable[Fate]) -> tuple[str, ...]:
    """What is not known, by name, once each."""
    named: dict[str, None] = {}
    for fate in fates:
        for reason in fate.assumed:
            named.setdefault(reason.removeprefix("not "), None)
        if fate.end == "undecided":
            named.setdefault(fate.why, None)
    return tuple(named)


def _merged(fates: Iterable[Fate]) -> Iterator[Fate]:
    """Fates that do not differ in what matters become one, with the sum of their chances."""
    found: dict[tuple[object, ...], Fate] = {}
    for fate in fates:
        same = found.get(fate.key)
        if same is None:
            found[fate.key] = fate
        else:
            assumed = tuple(a for a in same.assumed if a in fate.assumed)
            found[fate.key] = same._replace(chance=same.chance + fate.chance, assumed=assumed)
    if len(found) == 1:
        # Whatever was doubtful, everything leads here.
        yield next(iter(found.values()))._replace(assumed=())
        return
    yield from found.values()


_Stage = tuple[Table, Chain, Base] | Literal["conntrack", "nat"]
_Trail = tuple["_Trail", Step] | None


class _Course(NamedTuple):
    """A possible course of a packet so far. ``trail`` are the steps of this hook, newest outermost."""

    packet: Packet
    trail: _Trail = None
    assumed: tuple[str, ...] = ()
    chance: float = 1.0
    passes: tuple[Pass, ...] = ()

    def seen(self, step: Step) -> _Course:
        return _Course(self.packet, (self.trail, step), self.assumed, self.chance, self.passes)

    def carrying(self, packet: Packet) -> _Course:
        """The course of a packet that has changed. Spelled out, as is `seen`: _replace takes four times as long."""
        return _Course(packet, self.trail, self.assumed, self.chance, self.passes)


class _Ended(NamedTuple):
    """A course at the end of a base chain: ``verdict`` is accept, drop, reject or undecided. ``bound``: NAT was set up."""

    course: _Course
    verdict: Literal["accept", "drop", "reject", "undecided"]
    why: str = ""
    bound: bool = False


class _Walk:
    """All walks of one packet. Counts steps, so that a rule set cannot keep us for ever."""

    def __init__(self, walker: Walker, why: bool, every: bool) -> None:
        self.walker, self.host, self.why, self.every = walker, walker.host, why, every
        self.steps = 0

    def sent(self, packet: Packet) -> Iterator[Fate]:
        for after in self.hook("output", _Course(packet)):
            if isinstance(after, Fate):
                yield after
                continue
            here = after.packet
            if here.rerouted:
                here = here._replace(oif=here.rerouted, rerouted="")
            for out in self.hook("postrouting", after.carrying(here)):
                if isinstance(out, Fate):
                    yield out
                elif out.packet.oif != "lo":
                    yield _fate("left", out)
                else:
                    # The loopback device gives the packet back without its socket; the connection stays known.
                    back = out.packet._replace(iif="lo", oif="", uid=None, gid=None)
                    if back.state == "INVALID":  # it has none, so tracking looks at it once more
                        back = back._replace(tracked=False, zone=None)
                    yield from self.received(back, out)

    def received(self, packet: Packet, course: _Course | None = None) -> Iterator[Fate]:
        start = course.carrying(packet) if course else _Course(packet)
        for after in self.hook("prerouting", start):
            if isinstance(after, Fate):
                yield after
                continue
            here = after.packet
            if here.iif != "lo" and loopback(here.dst):
                yield _fate("dropped", after, "a loopback address from outside (martian)")
                continue
            local = here.iif == "lo" or self.host.is_local(here.dst)
            if local is None:
                local = True  # a dump alone: what arrives is for this machine
            if not local and here.mark in self.host.local_marks:
                local = True
            if local:
                for end in self.hook("input", after):
                    yield end if isinstance(end, Fate) else _fate("delivered", end)
            elif here.tproxy is not None:
                yield _fate("dropped", after, "a socket has it, but no route brings it here")
            elif not self.host.forwarding:
                yield _fate("dropped", after, "not an address of this machine, which does not forward")
            else:
                routed = here._replace(oif=self.host.route(here.dst))
                for forwarded in self.hook("forward", after.carrying(routed)):
                    if isinstance(forwarded, Fate):
                        yield forwarded
                        continue
                    for end in self.hook("postrouting", forwarded):
                        yield end if isinstance(end, Fate) else _fate("left", end)

    def hook(self, hook: Hook, course: _Course) -> Iterator[_Course | Fate]:
        """All courses through one hook that go on; a Fate where the packet ends here."""
        before = course.packet
        courses = [course._replace(trail=None)]
        for stage in self.walker.stages(hook, before.family):
            going: list[_Course] = []
            for now in courses:
                if isinstance(stage, tuple):
                    table, chain, base = stage
                    ends: Iterable[_Ended] = self.chain(table, chain, base, now)
                    if hook == "output" and base.kind == "route":
                        ends = [self.rerouted(end, now.packet) for end in ends]
                elif stage == "conntrack":
                    going.append(now.carrying(_track(now.packet)))
                    continue
                else:
                    ends = self.nat(hook, now)
                for end in ends:
                    if end.verdict == "accept":
                        going.append(end.course)
                    else:
                        finished = _close(hook, before, end.course)
                        kind: End = {"drop": "dropped", "reject": "rejected"}.get(end.verdict, "undecided")  # type: ignore[assignment]
                        yield _fate(kind, finished, end.why)
            courses = going if self.every else _fewer(going)
            if len(courses) > MOST_FATES:
                yield _fate("undecided", courses[0], f"more than {MOST_FATES} possible ways through {hook}")
                return
        for now in courses:
            yield _close(hook, before, now)

    def rerouted(self, end: _Ended, before: Packet) -> _Ended:
        """A chain of type route (mangle OUTPUT) looks for a new route if it changed what a route depends on."""
        after = end.course.packet
        if end.verdict != "accept" or (after.mark, after.src, after.dst) == (before.mark, before.src, before.dst):
            return end
        return self.routed(end)

    def routed(self, end: _Ended) -> _Ended:
        """A new route for a packet of the output hook; none leads out for a loopback source (route.c: __mkroute_output)."""
        packet = end.course.packet
        interface = self.host.route(packet.dst, packet.mark)
        if interface != "lo" and packet.family == "ipv4" and loopback(packet.src):
            return _Ended(end.course, "drop", "a loopback source has no route out of this machine")
        return end._replace(course=_change(end.course, rerouted=interface))

    def nat(self, hook: Hook, course: _Course) -> Iterator[_Ended]:
        """The first packet of a connection meets the nat chains of a hook until one of them binds it."""
        packet = course.packet
        destination = hook in ("prerouting", "output")
        done = packet.dnat_done if destination else packet.snat_done
        if done or not packet.tracked or packet.state not in ("NEW", "RELATED"):
            yield _Ended(course, "accept")
            return
        open_ = [course]
        for table, chain, base in self.walker.nat_chains(hook, packet.family):
            unbound: list[_Course] = []
            for now in open_:
                for end in self.chain(table, chain, base, now):
                    if end.verdict != "accept":
                        yield end
                    elif end.bound:
                        bound = end._replace(course=_set_up(end.course, destination))
                        moved = hook == "output" and bound.course.packet.dst != packet.dst
                        yield self.routed(bound) if moved else bound
                    else:
                        unbound.append(end.course)
            open_ = unbound
        for now in open_:
            yield _Ended(_set_up(now, destination), "accept")

    def chain(self, table: Table, chain: Chain, base: Base, course: _Course) -> Iterator[_Ended]:
        """All courses through one base chain."""
        work: list[tuple[_Course, Chain, int, _Callers]] = [(course, chain, 0, ())]
        while work:
            now, here, index, callers = work.pop()
            self.steps += 1
            if self.steps > MOST_STEPS:
                yield _Ended(now, "undecided", f"more than {MOST_STEPS} rules were met")
                return
            if index >= len(here.rules):
                if callers:
                    work.append((now, *callers[-1], callers[:-1]))
                else:
                    yield self._policy(table, base, chain, now)
                continue
            rule = here.rules[index]
            if not self.why and self.passes_by(rule, now.packet):
                work.append((now, here, index + 1, callers))
                continue
            for after, control in self._rule(table, base, here, rule, now):
                if control is None:
                    work.append((after, here, index + 1, callers))
                elif isinstance(control, _Ended):
                    yield control
                elif isinstance(control, Jump):
                    target = table.chains.get(control.to)
                    if target is None:
                        yield _Ended(after, "undecided", f"chain {control.to} of table {table.name} is not in the dump")
                    elif len(callers) >= MOST_JUMPS:
                        yield _Ended(after, "undecided", f"jumps deeper than {MOST_JUMPS}: a loop of chains?")
                    else:
                        work.append((after, target, 0, callers if control.goto else (*callers, (here, index + 1))))
                elif callers:
                    work.append((after, *callers[-1], callers[:-1]))
                else:
                    yield self._policy(table, base, chain, after)

    def passes_by(self, rule: Rule, packet: Packet) -> bool:
        """Whether a condition before the rule's first action surely does not hold."""
        return any(condition.check(packet, self.host) is False for condition in self.walker.conditions(rule))

    def _policy(self, table: Table, base: Base, chain: Chain, course: _Course) -> _Ended:
        step = Step(table, chain.name, base, None, True, base.policy)
        return _Ended(course.seen(step), base.policy)

    def _rule(
        self, table: Table, base: Base, chain: Chain, rule: Rule, course: _Course
    ) -> list[tuple[_Course, _Control]]:
        """What a rule does to a course; more than one result where it asks what nobody knows."""
        results: list[tuple[_Course, _Control]] = []
        open_ = [(course, 0)]
        while open_:
            now, index = open_.pop()
            run = index
            while run < len(rule.parts) and not isinstance(rule.parts[run], ACTIONS):
                run += 1
            answers = [part.check(now.packet, self.host) for part in rule.parts[index:run]]  # type: ignore[union-attr]
            if False in answers:
                if self.why:
                    failed = tuple(
                        (part.text, part.found(now.packet, self.host))  # type: ignore[union-attr]
                        for part, answer in zip(rule.parts[index:run], answers, strict=True)
                        if answer is False
                    )
                    now = now.seen(Step(table, chain.name, base, rule, False, "", failed))
                results.append((now, None))
                continue
            found = [answer for answer in answers if isinstance(answer, Doubt)]
            if found and not self.every and all(isinstance(part, NoEffect) for part in rule.parts[run:]):
                results.append((now.seen(Step(table, chain.name, base, rule, True, "no effect")), None))
                continue
            if found:
                unmatched, now = _both(now, found)
                if self.why:
                    failed = tuple((doubt.reason, "assumed not") for doubt in found)
                    unmatched = unmatched.seen(Step(table, chain.name, base, rule, False, "", failed))
                results.append((unmatched, None))
            for after, rest, control in self._actions(base, rule, run, now):
                if control is _MISSED:
                    if self.why:
                        failed = ((rule.text, f"no element for {after.packet.shown()}"),)
                        after = after.seen(Step(table, chain.name, base, rule, False, "", failed))
                    results.append((after, None))
                elif rest is None:
                    results.append((after.seen(Step(table, chain.name, base, rule, True, _word(control))), control))
                    if isinstance(control, _Ended):
                        results[-1] = (after, control._replace(course=results[-1][0]))
                else:
                    open_.append((after, rest))
        return results

    def _actions(
        self, base: Base, rule: Rule, index: int, course: _Course
    ) -> Iterator[tuple[_Course, int | None, _Control]]:
        """Does a rule's actions from ``index`` on. A number in the result: a condition comes there, still to be asked."""
        now = course
        while index < len(rule.parts):
            part = rule.parts[index]
            if not isinstance(part, ACTIONS):
                yield now, index, None
                return
            index += 1
            if isinstance(part, NoEffect) or _other_family(part, now.packet):
                continue
            if isinstance(part, VerdictMap):
                for after, control in self._vmap(part, now):
                    yield after, None, control
                return
            if isinstance(part, Spread):
                for share, action in part.actions:
                    chosen = now._replace(chance=now.chance * share)
                    after = chosen if len(part.actions) == 1 else _assume(chosen, f"{rule.text}: chance {share:.3g}")
                    yield from self._translated(base, action, after)
                return
            if isinstance(part, Redirect | Translate | Masquerade):
                yield from self._translated(base, part, now)
                return
            if isinstance(part, Tproxy):
                ended = self._tproxy(part, now)
                if ended is not None:
                    yield ended
                    return
                now = _change(now, tproxy=part.port, mark=(now.packet.mark & ~part.mask) ^ part.value)
                if part.ends:
                    yield now, None, _Ended(now, "accept")
                    return
                continue
            control = _control(part, now)
            if control is not None:
                yield now, None, control
                return
            now = now.carrying(_effect(part, now.packet))
        yield now, None, None

    def _vmap(self, part: VerdictMap, course: _Course) -> Iterator[tuple[_Course, _Control]]:
        """Without an element for the packet the rule does not match (linux: net/netfilter/nft_lookup.c, NFT_BREAK)."""
        for conditions, action in part.entries:
            answers = [c.check(course.packet, self.host) for c in conditions]
            if any(answer is False for answer in answers):
                continue
            found = [answer for answer in answers if isinstance(answer, Doubt)]
            matched = course
            if found:
                course, matched = _both(course, found)
            yield matched, _control(action, matched)
            if not found:
                return
        yield course, _MISSED

    def _tproxy(self, part: Tproxy, course: _Course) -> tuple[_Course, None, _Control] | None:
        """None where a socket takes the packet."""
        listeners = self.host.listeners
        if listeners is None or (course.packet.proto, part.port) in listeners:
            return None
        return (course, None, _Ended(course, "drop", f"no socket listens on {part.port}") if part.ends else None)

    def _translated(self, base: Base, action: Action, course: _Course) -> Iterator[tuple[_Course, None, _Control]]:
        """A binding of the connection; its translation is the packet's from here on."""
        packet = course.packet
        for after in _bindings(action, packet, base.hook, self.host):
            if isinstance(after, str):
                yield course, None, _Ended(course, "drop" if after == _NOWHERE else "undecided", after)
            else:
                now = course.carrying(after)
                yield now, None, _Ended(now, "accept", bound=True)


_Callers = tuple[tuple[Chain, int], ...]
_Control = Verdict | Jump | _Ended | None

_MISSED = Jump("")
"""What a verdict map gives that has no element for the packet."""

_NOWHERE = "the interface has no address to redirect to"


def _control(part: Part, course: _Course) -> _Control:
    """What ends the rule; None if its next action follows."""
    if isinstance(part, Jump):
        return part
    if isinstance(part, Verdict):
        if part.kind == "return":
            return part
        if part.kind == "queue":
            return _Ended(course, "undecided", "a program in user space decides (queue)")
        return _Ended(course, part.kind)
    if isinstance(part, Reject):
        return _Ended(course, "reject", part.answer)
    if isinstance(part, UnknownAction):
        return _Ended(course, "undecided", f"{part.text}: {part.why}")
    return None


def _other_family(part: Part, packet: Packet) -> bool:
    """A translation that names the other family does nothing (nft_nat.c: nft_nat_inet_eval)."""
    if isinstance(part, Spread):
        return any(_other_family(action, packet) for _, action in part.actions)
    return isinstance(part, Translate) and part.family not in (None, packet.family)


def _word(control: _Control) -> str:
    if isinstance(control, _Ended):
        if control.bound:
            return f"now {control.course.packet.shown()}"
        return control.verdict
    if isinstance(control, Jump):
        return f"{'goto' if control.goto else 'jump'} {control.to}"
    return control.kind if control is not None else "continue"


def _effect(part: Part, packet: Packet) -> Packet:
    """What a packet is after an action that lets it go on."""
    if isinstance(part, SetMark):
        if part.of == "packet":
            return packet._replace(mark=(packet.mark & ~part.mask) ^ part.value)
        if packet.connected:
            return packet._replace(ctmark=(packet.ctmark & ~part.mask) ^ part.value)
    elif isinstance(part, SaveMark):
        if packet.connected:
            return packet._replace(ctmark=(packet.ctmark & ~part.ctmask) ^ (packet.mark & part.nfmask))
    elif isinstance(part, RestoreMark):
        if packet.connected:
            return packet._replace(mark=(packet.mark & ~part.nfmask) ^ (packet.ctmark & part.ctmask))
    elif isinstance(part, SetZone):
        # The template sits where the connection will; the first one stays.
        if packet.tracked or packet.zone is not None or (packet.untracked and not part.retracks):
            return packet
        return packet._replace(zone=part.number, untracked=False)
    elif isinstance(part, NoTrack) and not packet.tracked and packet.zone is None:
        return packet._replace(untracked=True)
    return packet


def _bindings(action: Action, packet: Packet, hook: Hook, host: Host) -> Iterator[Packet | str]:
    """The packet as a NAT action makes it, for each end that it may choose; a text where that cannot be said."""
    if isinstance(action, Redirect):
        if hook == "output":
            address = "127.0.0.1" if packet.family == "ipv4" else "::1"
        else:
            own = host.primary(packet.iif, packet.family)
            if own is None and host.addresses is not None:
                yield _NOWHERE
                return
            address = own or packet.dst
        yield from _with_port(packet._replace(dst=address), "dst", action.ports)
        return
    if isinstance(action, Masquerade):
        yield from _with_port(packet._replace(src=_own_address(packet, host)), "src", action.ports)
        return
    assert isinstance(action, Translate)
    ends = [(address, ports) for first, last, ports in action.ends for address in _between(first, last)]
    if len(ends) > MOST_ENDS:
        yield f"one of {len(ends)} addresses is chosen"
        return
    for end, ports in ends:
        if action.what == "dst":
            yield from _with_port(packet._replace(dst=end or packet.dst), "dst", ports)
        else:
            yield from _with_port(packet._replace(src=end or packet.src), "src", ports)


def _own_address(packet: Packet, host: Host) -> str:
    """What MASQUERADE takes: the address of the interface, which on lo is another one's (inet_select_addr), or in IPv6 the
    destination itself (RFC 6724, rule 1). The packet's own source where nothing is known."""
    if packet.oif != "lo":
        return host.primary(packet.oif, packet.family) or packet.src
    if packet.family == "ipv6":
        return packet.dst if host.is_local(packet.dst) else packet.src
    others = (a for name, own in (host.addresses or {}).items() if name != "lo" for a in own if ":" not in a)
    return next(others, packet.src)


def _between(first: str | None, last: str | None) -> Iterator[str | None]:
    if first is None or last is None or first == last:
        yield first
        return
    low = ipaddress.ip_address(first)
    count = int(ipaddress.ip_address(last)) - int(low) + 1
    yield from (str(low + n) for n in range(min(count, MOST_ENDS + 1)))


def _with_port(packet: Packet, side: Literal["src", "dst"], ports: tuple[int, int] | None) -> Iterator[Packet | str]:
    """A port in the range stays (nf_nat_core.c: l4proto_in_range); else one of the range is taken."""
    own = packet.dport if side == "dst" else packet.sport
    if ports is None or packet.proto not in WITH_PORTS or ports[0] <= own <= ports[1]:
        yield packet
    elif ports[0] == ports[1]:
        yield packet._replace(dport=ports[0]) if side == "dst" else packet._replace(sport=ports[0])
    else:
        yield f"one of the ports {ports[0]}-{ports[1]} is chosen"


def _set_up(course: _Course, destination: bool) -> _Course:
    packet = course.packet
    src, sport, dst, dport = packet.original or (packet.src, packet.sport, packet.dst, packet.dport)
    if destination:
        changed = (packet.dst, packet.dport) != (dst, dport)
        return _change(course, dnat_done=True, dnat=packet.dnat or changed)
    changed = (packet.src, packet.sport) != (src, sport)
    return _change(course, snat_done=True, snat=packet.snat or changed)


def _track(packet: Packet) -> Packet:
    """Connection tracking: over lo the connection is known already."""
    if packet.tracked or packet.untracked:
        return packet
    original = (packet.src, packet.sport, packet.dst, packet.dport)
    if packet.state == "INVALID":
        return packet._replace(tracked=True, zone=None)
    return packet._replace(tracked=True, original=packet.original or original)


def _change(course: _Course, **fields: object) -> _Course:
    return course.carrying(course.packet._replace(**fields))  # type: ignore[arg-type]


def _assume(course: _Course, reason: str) -> _Course:
    return course if reason in course.assumed else course._replace(assumed=(*course.assumed, reason))


def _both(course: _Course, found: list[Doubt]) -> tuple[_Course, _Course]:
    """The course with the doubts answered no (as a whole), and yes."""
    chance: float | None = 1.0
    for doubt in found:
        chance = None if chance is None or doubt.chance is None else chance * doubt.chance
    no = yes = course
    for doubt in found:
        no, yes = _assume(no, f"not {doubt.reason}"), _assume(yes, doubt.reason)
    if chance is not None:
        no, yes = no._replace(chance=no.chance * (1 - chance)), yes._replace(chance=yes.chance * chance)
    return no, yes


def _fewer(courses: list[_Course]) -> list[_Course]:
    """Courses whose packets are the same go on as one."""
    if len(courses) < 2:
        return courses
    found: dict[Packet, _Course] = {}
    for course in courses:
        same = found.get(course.packet)
        if same is None:
            found[course.packet] = course
        else:
            assumed = tuple(a for a in same.assumed if a in course.assumed)
            found[course.packet] = same._replace(chance=same.chance + course.chance, assumed=assumed)
    return list(found.values())


def _close(hook: Hook, before: Packet, course: _Course) -> _Course:
    steps: list[Step] = []
    trail = course.trail
    while trail is not None:
        trail, step = trail
        steps.append(step)
    passed = Pass(hook, before, course.packet, tuple(reversed(steps)))
    return _Course(course.packet, None, course.assumed, course.chance, (*course.passes, passed))


def _fate(end: End, course: _Course, why: str = "") -> Fate:
    return Fate(end, course.packet, course.passes, why, course.assumed, course.chance)

"""Link objects: what they do to which interface. Pure: no I/O.

A link lies between two places, or between a place and all others (``*``). What the kernel does without netem is done:

- MTU: of a place's own interface for ``*``; of the path through the router for two places, whose senders then learn it
  the way they do on the Internet (ICMP "fragmentation needed", RFC 1191; "packet too big", RFC 8201);
- cut and loss: packets are dropped in the router, all or at random, without a word to the sender;
- rate: a token bucket (tbf) on both ends for ``*``, a class of its own (htb) on the router's way out for two places.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from lab.errors import InputError
from lab.manifests.model import Link

TABLE = "sidecarlab-links"
EVERYWHERE = "*"

_SMALLEST_MTU, _SMALLEST_MTU6, _LARGEST_MTU = 68, 1280, 65535  # RFC 791, RFC 8200, the kernel's veth
_ALL = 1_000_000  # a share is in millionths


class Place(Protocol):
    """What must be known of a place (see lab.fabric.plan.Place)."""

    @property
    def name(self) -> str: ...
    @property
    def addresses(self) -> tuple[str, ...]: ...
    @property
    def router(self) -> str: ...
    @property
    def interface(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Selection:
    """Packets in the forwarding of one router: by interface, and by address where places share one. Empty: any."""

    incoming: str = ""
    outgoing: str = ""
    sources: tuple[str, ...] = ()
    destinations: tuple[str, ...] = ()
    not_incoming: str = ""


@dataclass(frozen=True, slots=True)
class Drop:
    """``share`` millionths of the selected packets are dropped; ``stage`` is the netfilter hook."""

    router: str
    stage: Literal["prerouting", "forward", "postrouting"]
    selection: Selection
    share: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """All that leaves ``interface`` of the namespace ``place`` is limited to ``rate`` bits a second."""

    place: str
    interface: str
    rate: int


@dataclass(frozen=True, slots=True)
class RateClass:
    """The selected packets leave ``interface`` of ``router`` through the class 1:``minor``, ``rate`` bits a second."""

    router: str
    interface: str
    minor: int
    selection: Selection
    rate: int


@dataclass(frozen=True, slots=True)
class PathMTU:
    """In ``router``, packets from ``source`` to ``destination`` leave by ``interface`` with this MTU."""

    router: str
    source: str
    destination: str
    interface: str
    mtu: int


@dataclass(frozen=True, slots=True)
class Effects:
    """All that the links of a mesh do. ``mtus`` is by place: of its interface and the router's end of the same link."""

    drops: tuple[Drop, ...] = ()
    buckets: tuple[Bucket, ...] = ()
    classes: tuple[RateClass, ...] = ()
    paths: tuple[PathMTU, ...] = ()
    mtus: tuple[tuple[str, int], ...] = ()

    def mtu(self, place: str) -> int:
        """The MTU of a place's link in bytes; 0 where nobody set it."""
        return dict(self.mtus).get(place, 0)


def effects(
    links: Iterable[Link], places: Sequence[Place], aliases: Mapping[str, str], uplinks: Mapping[str, str]
) -> Effects:
    """What ``links`` do.

    Args:
        links: the Link objects.
        places: every pod and external host.
        aliases: what a Link calls a place by another name than its own: external hosts.
        uplinks: by router, its interface towards the other router.

    Raises:
        InputError: a link names no place, or asks for what cannot be.
    """
    by_name = {p.name: p for p in places}
    drops: list[Drop] = []
    buckets: dict[tuple[str, str], Bucket] = {}
    classes: list[RateClass] = []
    paths: list[PathMTU] = []
    mtus: dict[str, int] = {}
    minors: dict[tuple[str, str], int] = {}
    for link in links:
        ends = [_resolve(link, name, by_name, aliases) for name in link.between]
        _check(link, places)
        one, other = ends
        if one is not None and one == other:
            raise InputError(
                f'Link "{link.meta.name}" joins {link.between[0]} with itself', str(link.meta.source),
                next_step="Name two places, or one and *",
            )  # fmt: skip
        share = _ALL if link.cut else round(link.loss_percent * _ALL / 100)
        if one is not None and other is not None:
            for source, target in ((one, other), (other, one)):
                hops = list(_hops(source, target, uplinks))
                if share:
                    router, _, selection = hops[0]
                    drops.append(Drop(router, "forward", selection, share))
                if link.rate_bits:
                    router, interface, selection = hops[-1]
                    minor = minors[router, interface] = minors.get((router, interface), 0) + 1
                    classes.append(RateClass(router, interface, minor, selection, link.rate_bits))
                if link.mtu:
                    router, interface, _ = hops[-1]
                    pairs = [(a, b) for a in source.addresses for b in target.addresses if (":" in a) == (":" in b)]
                    paths += [PathMTU(router, a, b, interface, link.mtu) for a, b in pairs]
            continue
        for place in [p for p in (one, other) if p is not None] or list(places):
            if link.mtu:
                mtus[place.name] = min(link.mtu, mtus.get(place.name, link.mtu))
            if link.rate_bits:
                for where, interface in ((place.router, place.interface), (place.name, "eth0")):
                    slower = buckets.get((where, interface))
                    if slower is None or slower.rate > link.rate_bits:
                        buckets[where, interface] = Bucket(where, interface, link.rate_bits)
        if share:
            drops += _drops_of(one or other, share, uplinks)
    limited = {(b.place, b.interface) for b in buckets.values()}
    for c in classes:
        if (c.router, c.interface) in limited:
            raise InputError(
                "two Links limit the rate of one interface",
                f"{c.interface} in {c.router}",
                "one is between two places and one is between a place and *",
                "Keep one of them",
            )
    return Effects(tuple(drops), tuple(buckets.values()), tuple(classes), tuple(paths), tuple(mtus.items()))


def _resolve(link: Link, name: str, by_name: Mapping[str, Place], aliases: Mapping[str, str]) -> Place | None:
    if name == EVERYWHERE:
        return None
    place = by_name.get(aliases.get(name, name))
    if place is None:
        raise InputError(
            f'Link "{link.meta.name}" names "{name}"',
            str(link.meta.source),
            "no pod and no external host is called so",
            "Write a pod as POD.NAMESPACE, an external host by its metadata.name, all of them as *",
        )
    return place


def _check(link: Link, places: Sequence[Place]) -> None:
    where = str(link.meta.source)
    if link.mtu:
        lowest = _SMALLEST_MTU6 if any(":" in a for p in places for a in p.addresses) else _SMALLEST_MTU
        if not lowest <= link.mtu <= _LARGEST_MTU:
            raise InputError(
                f'Link "{link.meta.name}" has an MTU of {link.mtu}',
                where,
                f"it must be {lowest} to {_LARGEST_MTU}",
                "Correct spec.mtu.",
            )
    if not 0 <= link.loss_percent <= 100:
        what = f'Link "{link.meta.name}" loses {link.loss_percent} %'
        raise InputError(what, where, "it must be 0 to 100", "Correct spec.loss.")
    if link.rate_bits < 0:
        raise InputError(f'Link "{link.meta.name}" has a rate below 0', where, "", "Correct spec.rate.")


def _hops(source: Place, target: Place, uplinks: Mapping[str, str]) -> Iterable[tuple[str, str, Selection]]:
    """(router, its interface out, selection) of each router on the way, in order."""
    if source.router == target.router:
        yield source.router, target.interface, Selection(incoming=source.interface, outgoing=target.interface)
        return
    up, down = uplinks[source.router], uplinks[target.router]
    yield (
        source.router,
        up,
        Selection(incoming=source.interface, outgoing=up, destinations=target.addresses),
    )
    yield (
        target.router,
        target.interface,
        Selection(incoming=down, outgoing=target.interface, sources=source.addresses),
    )


def _drops_of(place: Place | None, share: int, uplinks: Mapping[str, str]) -> list[Drop]:
    if place is not None:
        return [
            Drop(place.router, "prerouting", Selection(incoming=place.interface), share),
            Drop(place.router, "postrouting", Selection(outgoing=place.interface), share),
        ]
    # Between all places: each packet once, in the first router that forwards it.
    return [Drop(router, "forward", Selection(not_incoming=up), share) for router, up in uplinks.items()]


# --- rules -------------------------------------------------------------------------------------------


def nft_document(all_effects: Effects, router: str) -> str:
    """The table of ``router``, replacing an older one in the same transaction; it may be empty."""
    chains: dict[str, list[str]] = {"prerouting": [], "forward": [], "postrouting": []}
    for c in _classes(all_effects, router):
        chains["forward"] += [f"{m} meta priority set 1:{c.minor:x}" for m in _nft_matches(c.selection)]
    for d in _drops(all_effects, router):
        chance = "" if d.share >= _ALL else f"numgen random mod {_ALL} < {d.share} "
        chains[d.stage] += [f"{m} {chance}drop" for m in _nft_matches(d.selection)]
    lines = [f"table inet {TABLE}", f"delete table inet {TABLE}"]
    if any(chains.values()):
        lines.append(f"table inet {TABLE} {{")
        for hook, rules in chains.items():
            if rules:
                priority = "raw" if hook == "prerouting" else "mangle"
                head = f"    type filter hook {hook} priority {priority}; policy accept;"
                lines += [f"  chain {hook} {{", head, *(f"    {r}" for r in rules), "  }"]
        lines.append("}")
    return "\n".join([*lines, ""])


def legacy_document(all_effects: Effects, router: str, version: int) -> str:
    """The same for ``iptables-legacy-restore`` (or ip6tables): its mangle table."""
    lines = ["*mangle"] + [f":{c} ACCEPT [0:0]" for c in ("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING")]
    for c in _classes(all_effects, router):
        lines += [
            f"-A FORWARD {m} -j CLASSIFY --set-class 1:{c.minor:x}" for m in _legacy_matches(c.selection, version)
        ]
    for d in _drops(all_effects, router):
        chance = "" if d.share >= _ALL else f" -m statistic --mode random --probability {d.share / _ALL:.6f}"
        lines += [f"-A {d.stage.upper()} {m}{chance} -j DROP" for m in _legacy_matches(d.selection, version)]
    return "\n".join([*lines, "COMMIT", ""])


def _classes(all_effects: Effects, router: str) -> list[RateClass]:
    return [c for c in all_effects.classes if c.router == router]


def _drops(all_effects: Effects, router: str) -> list[Drop]:
    return [d for d in all_effects.drops if d.router == router]


def _nft_matches(s: Selection) -> list[str]:
    parts = []
    if s.incoming:
        parts.append(f'iifname "{s.incoming}"')
    if s.not_incoming:
        parts.append(f'iifname != "{s.not_incoming}"')
    if s.outgoing:
        parts.append(f'oifname "{s.outgoing}"')
    if not s.sources and not s.destinations:
        return [" ".join(parts)]
    matches = []
    for version, name in ((4, "ip"), (6, "ip6")):
        addresses = []
        for field, given in (("saddr", s.sources), ("daddr", s.destinations)):
            of_family = [a for a in given if (":" in a) == (version == 6)]
            if of_family:
                addresses.append(f"{name} {field} {{ {', '.join(of_family)} }}")
        if addresses:
            matches.append(" ".join([*parts, *addresses]))
    return matches


def _legacy_matches(s: Selection, version: int) -> list[str]:
    parts = []
    if s.incoming:
        parts.append(f"-i {s.incoming}")
    if s.not_incoming:
        parts.append(f"! -i {s.not_incoming}")
    if s.outgoing:
        parts.append(f"-o {s.outgoing}")
    if not s.sources and not s.destinations:
        return [" ".join(parts)]
    matches = []
    for flag, given in (("-s", s.sources), ("-d", s.destinations)):
        matches += [" ".join([*parts, f"{flag} {a}"]) for a in given if (":" in a) == (version == 6)]
    return matches

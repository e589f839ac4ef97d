"""Predictions from dumps alone: rules, an Envoy's configuration, or both, of one machine about which nothing else is known."""

from __future__ import annotations

import dataclasses
import ipaddress
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from lab.errors import InputError
from lab.explain import counterfactual, iptables_save, nft_text, xds
from lab.explain.counterfactual import Candidate
from lab.explain.explained import Explained
from lab.explain.journey import Journey, arrive, at_proxy, follow
from lab.explain.packet import NOTHING, Host, Packet
from lab.explain.predict import Flow, verdict
from lab.explain.ruleset import RuleSet
from lab.explain.upstream import Resolve
from lab.explain.walk import Walker
from lab.explain.world import Payload, Place, Transit
from lab.explain.xds import Config, Json
from lab.manifests.files import read_bytes
from lab.verdict import From, To, Verdict

HERE = "this machine"
_MAX_BYTES = 256 << 20  # of a dump: an Envoy's of ten thousand clusters has some 100 MiB
OUTBOUND, INBOUND = 15001, 15006
UNNAMED = {4: "192.0.2.1", 6: "2001:db8::1"}
CLIENT = {4: "192.0.2.2", 6: "2001:db8::2"}
"""Stand for addresses that nobody gave: of the documentation ranges, so that no rule means them (RFC 5737, RFC 3849)."""


class Dumps(NamedTuple):
    """What was given. ``rules`` or ``config`` may be missing; ``sets`` are members of ipsets by name."""

    rules: RuleSet | None = None
    config: Config | None = None
    sets: Mapping[str, frozenset[str]] = NOTHING


class Asked(NamedTuple):
    """The flow in question. ``source`` is where it comes from, ``address`` where it goes; empty: not known."""

    host: str
    port: int
    payload: Payload
    protocol: str = "http"
    direction: Literal["in", "out"] = "out"
    uid: int = 1000
    gid: int | None = None
    source: str = ""
    address: str = ""
    proxy_uid: int = 1337


def read(rules: Sequence[str | Path] = (), config: str | Path | None = None, sets: Sequence[str | Path] = ()) -> Dumps:
    """Reads the files.

    Raises:
        InputError: a file cannot be read, is cut off or is something else.
    """
    found = RuleSet()
    for file in rules:
        text = _text(file)
        native = nft_text.looks_like(text)
        found = found.joined(nft_text.parse(text, str(file)) if native else iptables_save.parse(text, None, str(file)))
    parsed: Config | None = None
    if config is not None:
        try:
            document = json.loads(_text(config))
        except ValueError as error:
            raise InputError(
                "the config_dump is no JSON",
                str(config),
                str(error),
                "Is it whole? Take it with /config_dump?include_eds",
            ) from None
        parsed = xds.from_any(document, str(config))
    members: dict[str, set[str]] = {}
    for file in sets:
        for name, member in _ipset(_text(file), str(file)):
            members.setdefault(name, set()).add(member)
    return Dumps(found if rules else None, parsed, {name: frozenset(m) for name, m in members.items()})


def _text(file: str | Path) -> str:
    return read_bytes(file, _MAX_BYTES, pipe=True).decode("utf-8", "replace")


def _ipset(text: str, file: str) -> list[tuple[str, str]]:
    """Members of ``ipset save``."""
    found: list[tuple[str, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0] in ("create", "-N") or line.startswith("#"):
            continue
        if words[0] not in ("add", "-A") or len(words) < 3:
            raise InputError("cannot read a set", f"{file}:{number}", repr(line[:60]), "Give what `ipset save` printed")
        found.append((words[1], words[2]))
    return found


class DumpWorld:
    """One machine, and nothing around it."""

    busy = False

    def __init__(self, dumps: Dumps, asked: Asked) -> None:
        self._dumps = dumps
        rules = dumps.rules or RuleSet()
        host = Host(None, sets={**rules.sets, **dumps.sets})
        version = 6 if ":" in _address(asked) else 4
        own = asked.source if asked.direction == "out" and asked.source else UNNAMED[version]
        self._place = Place(
            HERE, host, rules, (own,), None, meshed=dumps.config is not None, proxy_uid=asked.proxy_uid,
            proxy_gid=asked.proxy_uid,
        )  # fmt: skip
        self._walker = Walker(rules, host)

    def place(self, _name: str) -> Place:
        return self._place

    def walker(self, _name: str) -> Walker:
        return self._walker

    def envoy(self, _name: str) -> Config | None:
        return self._dumps.config

    def transit(self, packet: Packet, _source: str) -> tuple[Transit, ...]:
        return (Transit(None, packet),)

    def lookup(self, _place: str) -> Resolve:
        return lambda _host: None


def explain(dumps: Dumps, asked: Asked, *, why: bool = False, changes: bool = True) -> Explained:
    """The prediction from dumps, with what would change it if ``changes``.

    Raises:
        InputError: neither rules nor configuration, or no address for what is asked.
    """
    if dumps.rules is None and dumps.config is None:
        raise InputError("nothing to explain from", next_step="Give --iptables-save, --config-dump or --file")
    address = asked.address or _known_address(dumps.config, asked) or _address(asked)
    asked = asked._replace(address=address)
    world = DumpWorld(dumps, asked)
    journeys = _journeys(world, dumps, asked, why)
    inbound = asked.direction == "in"
    flow = Flow(
        source=From(None, asked.uid, asked.source or None) if inbound else From(HERE, asked.uid),
        to=To(asked.host, address, asked.port or None, asked.protocol),
        observed=not inbound,
        pods=frozenset({HERE}) if inbound else frozenset(),
    )
    found = verdict(flow, journeys)
    if dumps.rules is None:
        found = dataclasses.replace(
            found,
            outbound=dataclasses.replace(found.outbound, rule=None) if found.outbound else None,
            inbound=dataclasses.replace(found.inbound, rule=None) if found.inbound else None,
        )
    others = counterfactual.find(found, _changes(dumps, asked, journeys)) if changes else ()
    notes = dumps.rules.unread if dumps.rules else ()
    return Explained(found, journeys, notes=notes, counterfactuals=others)


def _changes(dumps: Dumps, asked: Asked, journeys: Sequence[Journey]) -> Iterator[Candidate]:
    """Other users, and the rule set without each rule that decided."""

    def again(dumps: Dumps, asked: Asked) -> Callable[[], Verdict]:
        return lambda: explain(dumps, asked, changes=False).verdict

    rules = dumps.rules
    first = counterfactual.shortened(journeys)
    if rules is None or first is None:
        return
    if asked.direction == "out":
        for text, uid in counterfactual.uids(rules, asked.uid):
            yield text, again(dumps, asked._replace(uid=uid, gid=None))
    for fate, hooks in ((first.sent, ("output", "postrouting")), (first.received, ("prerouting", "input"))):
        if fate is not None:
            for rule, less in counterfactual.without_rules(rules, fate, hooks):
                yield f"there were no rule {rule.text!r}", again(dumps._replace(rules=less), asked)


def _journeys(world: DumpWorld, dumps: Dumps, asked: Asked, why: bool) -> tuple[Journey, ...]:
    six = ":" in asked.address
    other = UNNAMED[6 if six else 4]
    proto = {"udp": 17, "dns": 17, "icmp": 58 if six else 1}.get(asked.protocol, 6)
    gid = asked.uid if asked.gid is None else asked.gid
    port = asked.port or (53 if asked.protocol == "dns" else 0)
    if asked.direction == "in":
        packet = Packet(proto, asked.source or CLIENT[6 if six else 4], asked.address, 0, port)
        if dumps.rules is None:
            return at_proxy(world, HERE, packet, _port(dumps.config, "INBOUND", INBOUND), asked.payload, inbound=True)
        return arrive(world, HERE, packet, asked.payload, why=why)
    source = asked.source or (asked.address if world.place(HERE).host.is_local(asked.address) else other)
    packet = Packet(proto, source, asked.address, 0, port, uid=asked.uid, gid=gid)
    if dumps.rules is None:
        return at_proxy(world, HERE, packet, _port(dumps.config, "OUTBOUND", OUTBOUND), asked.payload, inbound=False)
    return follow(world, HERE, packet, asked.payload, why=why)


def _port(config: Config | None, direction: str, usual: int) -> int:
    """The port of the listener that takes captured connections."""
    for listener in (config.listeners if config else {}).values():
        bound = listener.get("bind_to_port") is not False and listener.get("traffic_direction") == direction
        where = xds.socket_address(listener.get("address"))
        if bound and where is not None and (direction == "INBOUND" or listener.get("use_original_dst")):
            return where[1]
    return usual


def _address(asked: Asked) -> str:
    """The address of what is asked; of a name that nothing resolves, one that stands for it."""
    for text in (asked.address, asked.host):
        try:
            return str(ipaddress.ip_address(text))
        except ValueError:
            continue
    return UNNAMED[6 if ":" in asked.source else 4]


def _known_address(config: Config | None, asked: Asked) -> str | None:
    """A name's address as far as the configuration tells: a virtual host that has the name and an address as its domains, or a
    listener of a cluster for that host."""
    if config is None or asked.direction == "in":
        return None
    host = asked.host.lower()
    names = {str(asked.port), *(name for name in config.routes if name.endswith(f":{asked.port}"))}
    for name in names & set(config.routes):
        for virtual in config.routes[name].get("virtual_hosts", ()):
            domains = [str(d).lower() for d in virtual.get("domains", ())]
            if host in domains:
                found = next((d for d in domains if _is_address(d)), None)
                if found is not None:
                    return found.strip("[]")
    for listener in config.listeners.values():
        where = xds.socket_address(listener.get("address"))
        specific = where is not None and where[1] == asked.port and where[0] not in ("0.0.0.0", "::")
        if (
            specific
            and where is not None
            and any(_leads_to(chain, host) for chain in listener.get("filter_chains", ()))
        ):
            return where[0]
    return None


def _leads_to(chain: Json, host: str) -> bool:
    """Whether a chain's TCP proxy goes to a cluster of that host (``outbound|PORT|SUBSET|HOST``)."""
    for filter_ in chain.get("filters", ()):
        cluster = str((filter_.get("typed_config") or {}).get("cluster", ""))
        owner = cluster.rpartition("|")[2]
        if owner == host or owner.startswith(f"{host}."):
            return True
    return False


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        return False
    return True

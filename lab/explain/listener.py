"""Which listener takes a connection, what its listener filters find out, and which filter chain is chosen.

Sources: envoyproxy/envoy: source/common/listener_manager/{connection_handler_impl,filter_chain_manager_impl}.cc,
source/extensions/filters/listener/{tls_inspector,http_inspector}.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from lab.explain.flow import Connection
from lab.explain.packet import loopback
from lab.explain.xds import Config, Json, seconds, socket_address, type_of


class Detected(NamedTuple):
    """What a listener knows of a connection: transport protocol, application protocols, server name.

    ``waits``: a filter waits for bytes that do not come.
    """

    transport: str
    protocols: tuple[str, ...] = ()
    sni: str = ""
    waits: bool = False


class Passed(NamedTuple):
    """Something that was looked at and not taken, and why."""

    what: str
    name: str
    why: str


class Chosen(NamedTuple):
    """The listener and its filter chain; ``chain`` None: no chain fits. ``doubts`` name what is not evaluated."""

    listener: Json
    detected: Detected
    chain: Json | None
    passed: tuple[Passed, ...] = ()
    doubts: tuple[str, ...] = ()


def find(config: Config, connection: Connection) -> Json | None:
    """The listener that a connection to ``connection.port`` ends at: the bound one, or, if that one hands connections on by
    their original destination, the one whose address that is (exact, else any address). None: nobody listens."""
    bound = [x for x in config.listeners.values() if x.get("bind_to_port") is not False]
    six = ":" in connection.dst
    taken = _at(bound, connection.dst, connection.port, six)
    if taken is None or not taken.get("use_original_dst"):
        return taken
    return _at(config.listeners.values(), connection.dst, connection.dport, six) or taken


def _at(listeners: Iterable[Json], address: str, port: int, six: bool) -> Json | None:
    """The listener at an address and port: exact, else the wildcard of the family, else (for IPv4) a dual-stack ``::``."""
    wildcards: dict[str, Json] = {}
    for listener in listeners:
        for own in _addresses(listener):
            found = socket_address(own)
            if found is None or found[1] != port:
                continue
            if found[0] == address:
                return listener
            if found[0] in ("0.0.0.0", "::"):
                both = found[0] == "::" and bool(own["socket_address"].get("ipv4_compat"))
                wildcards.setdefault("compat" if both and not six else found[0], listener)
    return wildcards.get("::") if six else wildcards.get("0.0.0.0") or wildcards.get("compat")


def _addresses(listener: Json) -> Iterable[Json]:
    if "address" in listener:
        yield listener["address"]
    for more in listener.get("additional_addresses", ()):
        yield more.get("address", {})


def choose(listener: Json, connection: Connection) -> Chosen:
    """Runs the listener filters on paper and picks the filter chain."""
    detected, doubts = inspect(listener, connection)
    if "filter_chain_matcher" in listener:
        doubts = (*doubts, f"listener {listener.get('name', '')}: filter_chain_matcher is not evaluated")
    chain, passed = pick(listener, connection, detected)
    return Chosen(listener, detected, chain, tuple(passed), doubts)


def inspect(listener: Json, connection: Connection) -> tuple[Detected, tuple[str, ...]]:
    """What the listener filters find out of the first bytes."""
    transport, sni = "", ""
    protocols: tuple[str, ...] = ()
    doubts: list[str] = []
    silent = connection.first_bytes == "silent"
    waits = False
    for filter_ in listener.get("listener_filters", ()):
        if disabled(filter_.get("filter_disabled"), connection.dport):
            continue
        kind = type_of(filter_) or str(filter_.get("name", "")).rpartition(".")[2]
        kind = kind.replace("_", "").lower()
        if silent and kind in ("tlsinspector", "httpinspector"):
            # Without a time limit it waits for ever.
            waits = waits or seconds(listener.get("listener_filters_timeout", "15s")) == 0
        elif kind == "tlsinspector":
            if connection.tls is not None:
                transport, sni, protocols = "tls", connection.tls.sni, connection.tls.alpn
        elif kind == "httpinspector":
            if transport in ("", "raw_buffer"):
                protocols = {"http1": ("http/1.1",), "h2": ("h2c",)}.get(connection.first_bytes, protocols)
        elif kind not in ("originaldst", "originalsrc", "metadataexchange", "setfilterstate"):
            doubts.append(f"listener filter {filter_.get('name', kind)} is not evaluated")
    return Detected(transport or "raw_buffer", tuple(protocols), sni.lower(), waits), tuple(doubts)


def disabled(predicate: Json | None, port: int) -> bool:
    """A listener filter's ``filter_disabled`` (ListenerFilterChainMatchPredicate)."""
    if not predicate:
        return False
    if "any_match" in predicate:
        return bool(predicate["any_match"])
    if "not_match" in predicate:
        return not disabled(predicate["not_match"], port)
    if "or_match" in predicate:
        return any(disabled(rule, port) for rule in predicate["or_match"].get("rules", ()))
    if "and_match" in predicate:
        return all(disabled(rule, port) for rule in predicate["and_match"].get("rules", ()))
    span = predicate.get("destination_port_range", {})
    return int(span.get("start", 0)) <= port < int(span.get("end", 0))


def pick(listener: Json, connection: Connection, detected: Detected) -> tuple[Json | None, list[Passed]]:
    """The filter chain, by Envoy's rule: one criterion after the other, the most specific value wins, and no way back.

    Chains that fall away are told with the criterion by which they did.
    """
    chains: list[Json] = list(listener.get("filter_chains", ()))
    default: Json | None = listener.get("default_filter_chain")
    passed: list[Passed] = []
    if len(chains) == 1 and not _match(chains[0]):
        return chains[0], passed
    for criterion in _CRITERIA:
        kept = criterion.narrow(chains, connection, detected)
        passed += [
            Passed("filter chain", str(chain.get("name", "")), criterion.why(chain, connection, detected))
            for chain in chains
            if not any(chain is other for other in kept)
        ]
        chains = kept
        if not chains:
            return default, passed
    return chains[0], passed


def _match(chain: Json) -> Json:
    return chain.get("filter_chain_match") or {}


class _Criterion:
    """One of the things that filter chains are told apart by. ``key`` is its field, ``of`` the connection's value for it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def wanted(self, chain: Json) -> Sequence[Any]:
        value = _match(chain).get(self.name)
        if value is None or value == [] or value == 0 or value == "":
            return ()
        return value if isinstance(value, list) else [value]

    def ranks(self, chain: Json, connection: Connection, detected: Detected) -> int | None:
        """How specific a chain's fitting value is: higher wins, 0 is no wish, None does not fit."""
        raise NotImplementedError

    def narrow(self, chains: list[Json], connection: Connection, detected: Detected) -> list[Json]:
        ranked = [(self.ranks(chain, connection, detected), chain) for chain in chains]
        best = max((rank for rank, _ in ranked if rank is not None), default=None)
        return [chain for rank, chain in ranked if rank is not None and rank == best]

    def why(self, chain: Json, connection: Connection, detected: Detected) -> str:
        wanted = self.wanted(chain)
        own = self.own(connection, detected)
        if not wanted:
            return f"a chain with {self.name} {own} goes first"
        return f"{self.name} {_shown(wanted)}: the connection has {own or 'none'}"

    def own(self, connection: Connection, detected: Detected) -> str:
        raise NotImplementedError


class _DestinationPort(_Criterion):
    def ranks(self, chain: Json, connection: Connection, _detected: Detected) -> int | None:
        wanted = self.wanted(chain)
        if not wanted:
            return 0
        return 1 if int(wanted[0]) == connection.dport else None

    def own(self, connection: Connection, _detected: Detected) -> str:
        return str(connection.dport)


class _Prefixes(_Criterion):
    """An address in one of the ranges; the longest range wins."""

    def __init__(self, name: str, source: bool) -> None:
        super().__init__(name)
        self.source = source

    def address(self, connection: Connection) -> str:
        return connection.src if self.source else connection.dst

    def ranks(self, chain: Json, connection: Connection, _detected: Detected) -> int | None:
        wanted = self.wanted(chain)
        if not wanted:
            return 0
        lengths = [int(w.get("prefix_len", 0)) + 1 for w in wanted if _inside(self.address(connection), w)]
        return max(lengths, default=None)

    def own(self, connection: Connection, _detected: Detected) -> str:
        return self.address(connection)


class _ServerName(_Criterion):
    """The exact name, else the longest wildcard, else no wish."""

    def ranks(self, chain: Json, _connection: Connection, detected: Detected) -> int | None:
        wanted = self.wanted(chain)
        if not wanted:
            return 0
        best: int | None = None
        for name in wanted:
            name = str(name).lower()
            if name == detected.sni and detected.sni:
                return 1 << 20
            suffix = name.removeprefix("*")
            if name.startswith("*.") and detected.sni.endswith(suffix) and len(detected.sni) > len(suffix):
                best = max(best or 0, len(suffix))
        return best

    def own(self, _connection: Connection, detected: Detected) -> str:
        return detected.sni


class _Transport(_Criterion):
    def ranks(self, chain: Json, _connection: Connection, detected: Detected) -> int | None:
        wanted = self.wanted(chain)
        if not wanted:
            return 0
        return 1 if wanted[0] == detected.transport else None

    def own(self, _connection: Connection, detected: Detected) -> str:
        return detected.transport


class _Protocols(_Criterion):
    """The first of the connection's application protocols that any chain wants."""

    def ranks(self, chain: Json, _connection: Connection, detected: Detected) -> int | None:
        wanted = self.wanted(chain)
        if not wanted:
            return 0
        found = [len(detected.protocols) - n for n, own in enumerate(detected.protocols) if own in wanted]
        return max(found, default=None)

    def own(self, _connection: Connection, detected: Detected) -> str:
        return _shown(detected.protocols)


class _SourceType(_Criterion):
    def ranks(self, chain: Json, connection: Connection, _detected: Detected) -> int | None:
        wanted = [w for w in self.wanted(chain) if w not in ("ANY", 0)]
        if not wanted:
            return 0
        local = loopback(connection.src) or connection.src == connection.dst
        return 1 if (wanted[0] in ("SAME_IP_OR_LOOPBACK", "LOCAL", 1)) == local else None

    def own(self, connection: Connection, _detected: Detected) -> str:
        return "local" if loopback(connection.src) or connection.src == connection.dst else "external"


class _SourcePorts(_Criterion):
    def ranks(self, chain: Json, connection: Connection, _detected: Detected) -> int | None:
        wanted = self.wanted(chain)
        if not wanted:
            return 0
        return 1 if connection.sport in wanted else None

    def own(self, connection: Connection, _detected: Detected) -> str:
        return str(connection.sport)


_CRITERIA: tuple[_Criterion, ...] = (
    _DestinationPort("destination_port"),
    _Prefixes("prefix_ranges", source=False),
    _ServerName("server_names"),
    _Transport("transport_protocol"),
    _Protocols("application_protocols"),
    _Prefixes("direct_source_prefix_ranges", source=True),
    _SourceType("source_type"),
    _Prefixes("source_prefix_ranges", source=True),
    _SourcePorts("source_ports"),
)


def _inside(address: str, prefix: Mapping[str, Any]) -> bool:
    try:
        network = ipaddress.ip_network(
            f"{prefix.get('address_prefix', '')}/{int(prefix.get('prefix_len', 0))}", strict=False
        )
    except ValueError:
        return False
    own = ipaddress.ip_address(address)
    return own.version == network.version and own in network


def _shown(values: Iterable[Any]) -> str:
    return ", ".join(
        f"{v.get('address_prefix')}/{v.get('prefix_len', 0)}" if isinstance(v, Mapping) else str(v) for v in values
    )

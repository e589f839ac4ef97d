"""One run: look, decide, change, prove.

    present rules   differ   flags          action
    none of ours    -        -              apply
    ours            no       -              nothing: counters survive
    ours            no       --force-apply  replace under guard rules
    ours            yes      -              error with the difference, nothing is touched
    ours            yes      --reconcile    replace under guard rules
    any             any      --cleanup-only remove, nothing is created

Native nftables replace in one transaction whenever something differs. The table follows the reference's
(istio/istio: tools/istio-iptables/pkg/capture/run.go, executeCommands) with two deviations: what it lets fail half-way
(chains exist) is refused before anything is touched, and --force-apply works.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from . import edits, native, restore, routes, rules, state, turn, xtables
from .canonical import jump
from .config import DOCKER_RESOLVER, Config
from .edits import TableEdit
from .errors import InitError, LockHeld
from .log import Log
from .model import Family, RuleSet
from .tools import Tools, failure

FAMILIES: tuple[Family, Family] = ("ipv4", "ipv6")
DOCKER_CHAIN = "DOCKER_OUTPUT"
TRIES = 5
"""How often rules are read and replaced where somebody who takes no turns changes them in between."""
SAVERS: dict[str, dict[Family, str]] = {
    "legacy": {"ipv4": "iptables-legacy", "ipv6": "ip6tables-legacy"},
    "nft": {"ipv4": "iptables-nft", "ipv6": "ip6tables-nft"},
}


class Result:
    """What a run did.

    ``action`` is what became of the rules: applied, unchanged, reconciled, replaced, cleaned or skipped. ``routing`` is
    what was added or removed beside them: policy rules, routes, ``::6``.
    """

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.action = "skipped"
        self.drift: list[state.Drift] = []
        self.routing: list[str] = []
        self.validated: bool | None = None
        self.docker_resolver = False

    def document(self) -> dict[str, object]:
        """For ``--json``."""
        return {
            "backend": self.backend,
            "action": self.action,
            "drift": [
                {
                    "family": drift.family,
                    "table": drift.table,
                    "chain": drift.chain,
                    "kind": drift.kind,
                    "expected": list(drift.expected),
                    "actual": list(drift.actual),
                }
                for drift in self.drift
            ],
            "routing": self.routing,
            "docker_resolver": self.docker_resolver,
            "validated": self.validated,
        }


def run(config: Config, environ: Mapping[str, str], log: Log) -> Result:
    """Everything but ``--dry-run``.

    Raises:
        InitError: with the exit code of the failure.
    """
    tools = tools_for(config, environ, log)
    result = Result(config.backend)
    try:
        _run(config, tools, result, log)
    finally:
        if log.debugging and not config.skip_rule_apply:
            _log_state(tools)
    return result


def _run(config: Config, tools: Tools, result: Result, log: Log) -> None:
    if not config.skip_rule_apply:
        # Errors of the routes' numbers come before any rule is touched.
        policy = routes.numbers(config)
        log.debug(f"policy routing: {policy}")
        with turn.taken(config.lock_wait, log):
            if config.backend == "native-nft":
                _native(config, tools, result)
            else:
                _xtables(config, tools, result)
            result.routing = (routes.remove if config.cleanup_only else routes.configure)(config, log)
        log.info(f"{result.backend}: {result.action}")
    if config.run_validation:
        from . import proof

        proof.run(config, tools, result.backend)
        result.validated = True


def _log_state(tools: Tools) -> None:
    """The rules as they are at the end, also after an error (the reference logs them always; that is two programs more)."""
    for kind, families in SAVERS.items():
        for family, name in families.items():
            if xtables.may_hold_rules(kind, family) and tools.find(f"{name}-save"):
                tools.log.debug(f"final state, {kind} {family}:\n{tools.run([f'{name}-save']).out}")
    if _native_tables(_nft_tables()) and tools.find("nft"):
        tools.log.debug(f"final state, native nftables:\n{tools.run(['nft', 'list', 'ruleset', 'inet']).out}")


def tools_for(config: Config, environ: Mapping[str, str], log: Log) -> Tools:
    """How commands are run with these settings."""
    lock_file = config.network_namespace if config.cni_mode else ""
    return Tools(log, config.lock_wait, lock_file, config.network_namespace, config.cni_mode, environ)


# --- iptables -------------------------------------------------------------------------------

Backend = xtables.Restore


def _cleanup_everywhere(config: Config, tools: Tools, result: Result) -> None:
    """--cleanup-only without a back end by name: whoever left rules of ours here, they go."""
    from . import detect
    from .nftables import NFTables

    built = rules.build(config)
    cleaned = []
    for kind, backend in (("legacy", "legacy-restore"), ("nft", "nft")):
        dumps = {family: _save(tools, kind, family, sure=True) for family in FAMILIES}
        mark = config.inbound_tproxy_mark
        made = {family: edits.cleanup(built.family(family), dumps[family], mark) for family in FAMILIES}
        if any(made.values()):
            xtables.Restore(detect.choose(backend, bool(made["ipv6"]), tools), tools).change(made)
            cleaned.append(kind)
    if _native_tables(_nft_tables()):
        NFTables(tools, config.cni_mode).cleanup()
        cleaned.append("native-nft")
    result.backend, result.action = ",".join(cleaned) or config.backend, "cleaned"


def _xtables(config: Config, tools: Tools, result: Result) -> None:
    if config.cleanup_only and config.backend == "auto":
        _cleanup_everywhere(config, tools, result)
        return
    backend = _backend(config, tools)
    result.backend = backend.name
    dumps = {family: backend.dump(family) for family in FAMILIES}
    config = with_docker(config, tools, backend.kinds["ipv4"], dumps["ipv4"])
    result.docker_resolver = config.docker_resolver
    built = rules.build(config)
    _warn_of_others(tools, backend.kinds)
    if config.cleanup_only:
        mark = config.inbound_tproxy_mark
        backend.change({family: edits.cleanup(built.family(family), dumps[family], mark) for family in FAMILIES})
        result.action = "cleaned"
        return
    if not any(dump.any_of_ours() for dump in dumps.values()):
        _warn_of_foreign(built, dumps, tools.log)
        left = {family: TableEdit("filter", edits.guards_left(dumps[family])) for family in FAMILIES}
        backend.change({family: [*edits.apply(built.family(family)), left[family]] for family in FAMILIES})
        result.action = "applied"
        return
    result.drift = _differences(backend, config, built, dumps)
    result.drift += [drift for family in FAMILIES for drift in _guards_left(family, dumps[family])]
    if not result.drift and not config.force_apply:
        # Older than ours, or for some addresses only: no drift, but it decides.
        _warn_of_foreign(built, dumps, tools.log)
        result.action = "unchanged"
        return
    for drift in result.drift:
        tools.log.warn(f"rules differ\n{drift.diff()}")
    if config.reconcile or config.force_apply:
        _replace(backend, config, built, dumps, result.drift, tools.log)
        result.action = "reconciled" if result.drift else "replaced"
        return
    _apply_beside(backend, built, dumps, result)


def _apply_beside(backend: Backend, built: RuleSet, dumps: Mapping[Family, state.Dump], result: Result) -> None:
    """Without --reconcile: what is there stays, so ours can only be added if no chain is in the way."""
    taken = [
        f"{family} {edit.table} {chain}"
        for family in FAMILIES
        for edit in edits.apply(built.family(family))
        for chain in edit.new
        if chain in dumps[family].tables.get(edit.table, {})
    ]
    if taken:
        count = len(result.drift)
        raise InitError(
            f"rules of an earlier run differ from the wanted ones in {count} chain{'s' if count != 1 else ''}",
            _named(result.drift),
            "Use --reconcile to mend them, or --cleanup-only first",
        )
    backend.change({family: edits.apply(built.family(family)) for family in FAMILIES})
    result.action = "applied"


def _replace(
    backend: Backend,
    config: Config,
    built: RuleSet,
    dumps: Mapping[Family, state.Dump],
    drifts: Sequence[state.Drift],
    log: Log,
) -> None:
    touched = [family for family in FAMILIES if any(drift.family == family for drift in drifts)]
    if not touched or config.force_apply:
        touched = [family for family in FAMILIES if built.family(family) or dumps[family].any_of_ours()]
    front = {
        family: {(drift.table, drift.chain) for drift in drifts if drift.kind == "in-front" and drift.family == family}
        for family in touched
    }
    with _guarded(backend, touched, dumps, log):
        for left in reversed(range(TRIES)):
            # Read again: the guard rules have shifted the positions in filter.
            present = {family: backend.dump(family) for family in touched}
            mark = config.inbound_tproxy_mark
            try:
                backend.change(
                    {
                        family: edits.replace_all(built.family(family), present[family], front[family], mark)
                        for family in touched
                    }
                )
            except LockHeld:
                raise
            except InitError as error:
                failed = str(error)
                if all(backend.dump(family).tables == present[family].tables for family in touched):
                    raise
            else:
                again = _differences(backend, config, built, {family: backend.dump(family) for family in touched})
                if not again:
                    return
                failed = f"the rules differ again right after they were mended: {_named(again)}"
            if not left:
                raise InitError(f"somebody else changes rules at the same time, {TRIES} tries", failed, "Run it again")
            log.info(f"somebody else changes rules at the same time, trying again: {failed}")


def _differences(
    backend: Backend, config: Config, built: RuleSet, dumps: Mapping[Family, state.Dump]
) -> list[state.Drift]:
    found = [
        drift
        for family, dump in dumps.items()
        for drift in state.compare(family, built.family(family), dump, partial(backend.ages, family))
    ]
    return found + (_behind_docker(dumps["ipv4"]) if config.docker_resolver and "ipv4" in dumps else [])


def _named(drifts: Sequence[state.Drift]) -> str:
    return "; ".join(f"{drift.family} {drift.table} {drift.chain} {drift.kind}" for drift in drifts)


@contextmanager
def _guarded(
    backend: Backend, families: Sequence[Family], dumps: Mapping[Family, state.Dump], log: Log
) -> Iterator[None]:
    """Drops all TCP and UDP while the body runs; a polite signal waits until the guards are gone again."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    log.info("setting up guard rules")
    try:
        try:
            backend.change({family: [edits.guard(dumps[family])] for family in families})
            yield
        finally:
            log.info("removing guard rules")
            with ExitStack() as every:
                # Each, also if another one fails.
                for family in families:
                    every.callback(_unguard, backend, family)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _unguard(backend: Backend, family: Family) -> None:
    backend.change({family: [edits.unguard(backend.dump(family))]})


def _backend(config: Config, tools: Tools) -> Backend:
    from . import detect

    # The sandbox is for commands: libiptc would lock the node and ask its name services from this process.
    name = "legacy-restore" if config.cni_mode and config.backend == "legacy" else config.backend
    binaries = detect.choose(name, config.ipv6, tools)
    restore = xtables.Restore(binaries, tools, config.comments)
    if name not in ("auto", "legacy") or set(restore.kinds.values()) != {"legacy"} or config.cni_mode:
        return restore
    try:
        from .libiptc import LibIPTC
    except ImportError as error:
        tools.log.info(f"python-iptables is not usable ({error}), using the restore tool")
        return xtables.Restore(detect.choose("legacy-restore", config.ipv6, tools), tools, config.comments)
    from . import lock

    return LibIPTC(binaries, tools, config.comments, lock.path(tools.environ))


# --- nftables -------------------------------------------------------------------------------


def _native(config: Config, tools: Tools, result: Result) -> None:
    from .nftables import NFTables

    backend = NFTables(tools, config.cni_mode, config.comments)
    present = backend.present()
    if config.cleanup_only:
        if present:
            backend.cleanup()
        result.action = "cleaned"
        return
    config = with_docker(config, tools)
    result.docker_resolver = config.docker_resolver
    backend = backend._replace(ahead=config.docker_resolver)
    built = native.build(config)
    _warn_of_others(tools, {})
    if present:
        result.drift = backend.compare(built)
        if not result.drift and not config.force_apply:
            result.action = "unchanged"
            return
        for drift in result.drift:
            tools.log.warn(f"rules differ\n{drift.diff()}")
    backend.apply(built, present)
    result.action = ("reconciled" if result.drift else "replaced") if present else "applied"


# --- what else is in the namespace ----------------------------------------------------------


def with_docker(
    config: Config, tools: Tools, kind: xtables.Kind | None = None, dump: state.Dump | None = None
) -> Config:
    """``config`` with ``docker_resolver`` set if Docker's resolver is listed and its jump is in OUTPUT already.

    With capture-all nothing is changed, as no list says that it is meant: the loop that this makes is warned of.
    ``dump`` are the present rules of ``kind``, if they were read already. Reading needs root.
    """
    if not config.captures_dns or not (config.capture_all_dns or DOCKER_RESOLVER in config.dns_servers_v4):
        return config
    if (dump is not None and _jumps_to_docker(dump)) or any(
        _jumps_to_docker(_save(tools, other, "ipv4")) for other in SAVERS if dump is None or other != kind
    ):
        if config.capture_all_dns:
            tools.log.warn(
                "OUTPUT jumps to DOCKER_OUTPUT: Docker forwards external names from inside this network namespace, so "
                "that --capture-all-dns sends its queries back to the agent, in a loop; leave it out, the servers of "
                "resolv.conf are captured without it"
            )
            return config
        tools.log.warn(
            "deviation from the reference: OUTPUT already jumps to DOCKER_OUTPUT and 127.0.0.11 is a listed server, so "
            "our OUTPUT rules go in front, and its replies to the agent get conntrack zone 1"
        )
        return config._replace(docker_resolver=True)
    return config


def _guards_left(family: Family, dump: state.Dump) -> list[state.Drift]:
    """A run that was killed has left its guard rules: nothing passes until they are gone."""
    found = edits.guards_left(dump)
    return [
        state.Drift(
            family, "filter", chain, "unexpected", (), tuple(one.text for one in reversed(found) if one.chain == chain)
        )
        for chain in dict.fromkeys(one.chain for one in found)
    ]


def _behind_docker(dump: state.Dump) -> list[state.Drift]:
    """Our jump is there, but Docker's comes first and would take the query."""
    found = [text for text in dump.chain("nat", "OUTPUT") if jump(text) in (DOCKER_CHAIN, "ISTIO_OUTPUT")]
    targets = [jump(text) for text in found]
    if "ISTIO_OUTPUT" not in targets or targets.index("ISTIO_OUTPUT") < targets.index(DOCKER_CHAIN):
        return []
    return [
        state.Drift(
            "ipv4",
            "nat",
            "OUTPUT",
            "in-front",
            tuple(sorted(found, key=lambda text: jump(text) == DOCKER_CHAIN)),
            tuple(found),
        )
    ]


def _jumps_to_docker(dump: state.Dump) -> bool:
    return any(jump(text) == DOCKER_CHAIN for text in dump.chain("nat", "OUTPUT"))


def _save(tools: Tools, kind: str, family: Family, nft: xtables.NFTTables = None, sure: bool = False) -> state.Dump:
    """Rules of some back end, empty where it has none; unless ``sure``, also where it cannot be read.

    Raises:
        InitError: ``sure``, and there may be rules that cannot be read.
    """
    name = SAVERS[kind][family]
    if not xtables.may_hold_rules(kind, family, nft) or not (sure or tools.find(f"{name}-save")):
        return state.Dump()
    result = tools.run([f"{name}-save"])
    if result.code and sure:
        raise failure(f"cannot read the rules with {name}-save", result)
    return state.parse(result.out) if result.code == 0 else state.Dump()


def _warn_of_others(tools: Tools, mine: Mapping[Family, xtables.Kind]) -> None:
    """Rules of ours in another back end than that of the family act too, whatever this run does."""
    nft = _nft_tables()
    if mine:
        found = _native_tables(nft)
        if found:
            tools.log.warn(
                f"native nftables rules are present too: {', '.join(found)}; --native-nftables --cleanup-only removes them"
            )
    for kind in SAVERS:
        others = [family for family in FAMILIES if mine.get(family) != kind]
        if any(_save(tools, kind, family, nft).any_of_ours() for family in others):
            tools.log.warn(
                f"{kind} iptables rules of an earlier run are present too; --backend {kind} --cleanup-only removes them"
            )


def _nft_tables() -> xtables.NFTTables:
    from .netlink import nft_tables

    try:
        return nft_tables()
    except OSError:
        return None


def _native_tables(tables: xtables.NFTTables) -> list[str]:
    return [name for family, name in tables or () if family == "inet" and name in native.TABLES]


def _warn_of_foreign(built: RuleSet, dumps: Mapping[Family, state.Dump], log: Log) -> None:
    """Of what decides in front of our rules, or will once they are appended."""
    for family in FAMILIES:
        for (table, chain), here in state.placed(built.family(family)).items():
            if chain.startswith(state.OURS):
                continue
            want, have = [restore.body(rule) for rule in here], dumps[family].chain(table, chain)
            if not dumps[family].any_of_ours():
                have = [*want, *have] if all(rule.position for rule in here) else [*have, *want]
            for index in state.deciding_ahead(want, have, dumps[family].tables.get(table, {})):
                log.warn(f"a foreign rule decides in front of ours: {family} {table} {chain} {have[index]}")

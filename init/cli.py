"""The program: flags and environment in, rules applied, an exit code out.

Exit codes: 0 done; 1 configuration, tool or kernel error; 126 validation failed; 255 wrong flags.
Order of a run: istio/istio: tools/istio-iptables/pkg/cmd/root.go.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from . import edits, environment, flags, native, restore, rules, state, surprises
from .config import DOCKER_RESOLVER, Config, from_flags, validate
from .errors import InitError, UsageError
from .log import Log, level_of, opened, put, targets_of
from .model import Rule


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Runs once in the network namespace of the calling process.

    Args:
        argv: arguments without the program's name; those of the process by default.
        environ: environment variables; those of the process by default. Twins are read from here only.

    Returns:
        The exit code. Never raises SystemExit.
    """
    argv = sys.argv[1:] if argv is None else argv
    environ = os.environ if environ is None else environ
    log = Log()
    try:
        parsed = flags.parse(argv, environ)
        if parsed.help:
            _say(flags.usage())
            return 0
        log = _log(parsed)
        return _run(parsed, environ, log)
    except InitError as error:
        log.error(str(error))
        return error.exit_code
    except OSError as error:
        log.error(f"unexpected system error: {error}")
        return 1
    except KeyboardInterrupt:
        log.error("interrupted")
        return 1


def configure(parsed: flags.Parsed, environ: Mapping[str, str], log: Log) -> Config:
    """The complete, checked configuration; says what is surprising about it.

    Raises:
        InitError: a bad setting, or with ``--strict`` a misread one.
    """
    config = environment.fill(from_flags(parsed, environ), parsed, environ)
    validate(config, parsed.text("force-iptables-binary"))
    found = surprises.find(config, parsed)
    for surprise in found:
        log.warn(surprise.text)
    severe = [surprise.text for surprise in found if surprise.severe]
    if config.strict and severe:
        raise InitError("refused by --strict", "; ".join(severe))
    return config


def _log(parsed: flags.Parsed) -> Log:
    clean = parsed.switch("dry-run") or parsed.switch("json")
    try:
        level = level_of(parsed.text("log_output_level"))
        as_json = flags.parse_bool(parsed.text("log_as_json") or "false")
    except ValueError as error:
        raise UsageError("invalid log option", str(error)) from None
    return Log(level, as_json, opened(targets_of(parsed.strings("log_target"), clean)))


def _run(parsed: flags.Parsed, environ: Mapping[str, str], log: Log) -> int:
    config = configure(parsed, environ, log)
    if log.informing:
        log.info(f"settings:\n{config.lines()}")
    if config.dry_run:
        return _dry_run(config, environ, log)
    from .program import run

    result = run(config, environ, log)
    if config.json:
        report = json.dumps({**result.document(), "warnings": log.warnings}, indent=2)
        _say(f"{report}\n", "Only the report is lost: the run is done")
    return 0


def _say(text: str, comfort: str = "") -> None:
    """Writes to standard output. Raises InitError where it is closed, full, or a pipe that nobody reads any more."""
    try:
        if sys.stdout is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        put(sys.stdout, text)
    except OSError as error:
        raise InitError("cannot write to standard output", error.strerror or str(error), comfort) from None


def _dry_run(config: Config, environ: Mapping[str, str], log: Log) -> int:
    document: dict[str, Any]
    if config.skip_rule_apply:
        return 0
    if DOCKER_RESOLVER in config.dns_servers_v4 and os.geteuid() == 0:
        from .program import tools_for, with_docker

        config = with_docker(config, tools_for(config, environ, log))
    if config.cleanup_only:
        document, text = _cleanup_dry_run(config)
    elif config.backend == "native-nft":
        built = native.build(config)
        text = native.script(built, config.comments, config.docker_resolver)
        document = {"backend": "native-nft", "script": text, "rules": _described(built, "inet")}
    else:
        both = rules.build(config)
        text = restore.dry_run(both, config.comments)
        if config.dry_run_file:
            ipv4, ipv6 = restore.document(both.ipv4), restore.document(both.ipv6)
            _write_transcript(config, [*ipv4.splitlines(), *ipv6.splitlines()])
        described = _described(both.ipv4, "ipv4") + _described(both.ipv6, "ipv6")
        documents = {
            "ipv4": restore.document(both.ipv4, config.comments),
            "ipv6": restore.document(both.ipv6, config.comments),
        }
        document = {"backend": config.backend, "documents": documents, "rules": described}
    if config.json:
        text = json.dumps({"action": "dry-run", **document, "warnings": log.warnings}, indent=2) + "\n"
    _say(text)
    return 0


def _cleanup_dry_run(config: Config) -> tuple[dict[str, Any], str]:
    """What removes the rules of this configuration. A real run removes what it finds, other leftovers of ours included."""
    if config.backend == "native-nft":
        text = native.cleanup()
        return {"backend": "native-nft", "script": text, "rules": []}, text
    both = rules.build(config)
    documents = {}
    for family in ("ipv4", "ipv6"):
        built = both.ipv4 if family == "ipv4" else both.ipv6
        dump = state.Dump()
        dump.tables = state.wanted(built)
        documents[family] = edits.document(edits.cleanup(built, dump))
    text = "".join(f"# {family}\n{document}" for family, document in documents.items() if document)
    if config.dry_run_file:
        _write_transcript(config, _cleanup_calls(both.ipv4, "iptables") + _cleanup_calls(both.ipv6, "ip6tables"))
    return {"backend": config.backend, "documents": documents, "rules": []}, text


def _cleanup_calls(built: Sequence[Rule], tool: str) -> list[str]:
    """The reference's calls: jumps to our chains and rules of built-in ones from last to first, then our chains."""
    calls = []
    chains: dict[tuple[str, str], None] = {}
    for rule in reversed(built):
        ours, to = rule.chain.startswith(state.OURS), getattr(rule.target, "to", "")
        if not ours or str(to).startswith(state.OURS):
            calls.append(f"{tool} -t {rule.table} -D {rule.chain} {restore.body(rule)}")
        if ours:
            chains[rule.table, rule.chain] = None
    for table, chain in chains:
        calls += [f"{tool} -t {table} -F {chain}", f"{tool} -t {table} -X {chain}"]
    return calls


def _described(built: Sequence[Rule], family: str) -> list[dict[str, object]]:
    render = native.body if family == "inet" else restore.body
    return [
        {
            "family": family,
            "table": rule.table,
            "chain": rule.chain,
            "position": rule.position,
            "text": render(rule),
            "comment": rule.comment,
        }
        for rule in built
    ]


def _write_transcript(config: Config, calls: Sequence[str]) -> None:
    """What the reference's stub would have called (istio/istio: tools/istio-iptables/pkg/dependencies/stub.go)."""
    lines = ["iptables-save", "ip6tables-save", *calls, "iptables-save"]
    lines += ["ip6tables-save"] if config.ipv6 else []
    try:
        descriptor = os.open(config.dry_run_file, os.O_WRONLY | os.O_CREAT, 0o644)
    except OSError as error:
        raise InitError(f"unable to open dry run output file {config.dry_run_file}", error.strerror or "") from None
    try:
        os.write(descriptor, "".join(f"{line}\n" for line in lines).encode())
    finally:
        os.close(descriptor)

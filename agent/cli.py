"""The command line: proxy, request, wait, version, istio-iptables, istio-clean-iptables.

Source: istio/istio: pilot/cmd/pilot-agent/app/.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

from agent import __version__
from agent.errors import AgentError, UsageError
from agent.flags import Flag, Parsed, parse, usage
from agent.log import LogOptions, configure

COMMANDS = {
    "proxy": "XDS proxy agent: bootstrap, Envoy, xDS proxy, SDS, DNS and status of one proxy",
    "request": "Makes an HTTP request to Envoy's admin port (METHOD PATH [BODY])",
    "wait": "Waits until the proxy is ready",
    "version": "Prints the version",
    "istio-iptables": "Sets up the traffic rules (runs python -m init)",
    "istio-clean-iptables": "Removes the traffic rules (runs python -m init)",
}


VERSION_FLAGS = (Flag("short", False, "Only the version; -s"), Flag("output", "", "yaml or json; -o"))


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Runs one command; may be called in a forked child that has a single thread.

    Args:
        argv: arguments without the program's name, by default the process's.
        environ: the environment, by default the process's.

    Returns:
        0, or 255 after an error that is printed in one line.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    environment = dict(os.environ if environ is None else environ)
    try:
        return _dispatch(arguments, environment)
    except AgentError as error:
        logging.getLogger("default").debug("exiting", exc_info=True)
        _print(sys.stderr, f"Error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _print(stream: TextIO, text: str) -> None:
    stream.write(f"{text}\n")
    stream.flush()


def _dispatch(arguments: list[str], environment: Mapping[str, str]) -> int:
    index = next((i for i, item in enumerate(arguments) if not item.startswith("-")), None)
    if index is None:
        _print(sys.stdout, _help())
        return 0
    command, rest = arguments[index], arguments[:index] + arguments[index + 1 :]
    if command in ("istio-iptables", "istio-clean-iptables"):
        return _init(command, rest)
    if command == "help":
        _print(sys.stdout, _help())
        return 0
    if command not in COMMANDS:
        raise UsageError(f'unknown command "{command}" for "pilot-agent"')
    if command == "proxy":
        return _proxy(rest, environment)
    if command == "request":
        from agent import request

        return _usage("request METHOD PATH [BODY]", request.FLAGS) if _asks_help(rest) else request.request(rest)
    if command == "wait":
        from agent import wait

        return _usage("wait", wait.FLAGS) if _asks_help(rest) else wait.wait(rest)
    return _usage("version", VERSION_FLAGS) if _asks_help(rest) else _version(rest)


def _asks_help(arguments: Sequence[str]) -> bool:
    return "--help" in arguments or "-h" in arguments


def _usage(line: str, flags: Sequence[Flag]) -> int:
    _print(sys.stdout, f"Usage: python -m agent {line} [flags]\n\n{usage(flags)}")
    return 0


def _long(item: str) -> str:
    """``-s`` and ``-o``, ``-ojson``, ``-o=json`` as their long forms."""
    if item == "-s":
        return "--short"
    if not item.startswith("-o"):
        return item
    value = item.removeprefix("-o").removeprefix("=")
    return f"--output={value}" if value else "--output"


def _help() -> str:
    lines = [f"  {name:<22} {text}" for name, text in COMMANDS.items()]
    return "\n".join(["Usage: python -m agent COMMAND [flags]", "", "Commands:", *lines])


def _init(command: str, rest: list[str]) -> int:
    """Becomes `python -m init`: the two packages do not import each other."""
    clean = ["--cleanup-only"] if command == "istio-clean-iptables" else []
    os.execv(sys.executable, [sys.executable, "-m", "init", *clean, *rest])


def _proxy(rest: Sequence[str], environment: Mapping[str, str]) -> int:
    from agent import options
    from agent.proxy_config import to_dict

    if _asks_help(rest):
        return _usage("proxy [TYPE]", options.PROXY_FLAGS)
    parsed = parse(rest, options.PROXY_FLAGS, ignore_unknown=True)
    dry = parsed.boolean("dry-run")
    configure(_log_options(parsed, dry))
    log = logging.getLogger("default")
    if not dry:
        for name, value in sorted(parsed.values.items()):
            shown = str(value).lower() if isinstance(value, bool) else value
            log.info('FLAG: --%s="%s"', name, shown)
        log.info("Version %s", __version__)
    resolved = options.resolve(parsed, environment)
    log.info("Proxy role ips=%s type=%s id=%s", list(resolved.addresses), resolved.proxy_type, resolved.id)
    log.info("Effective config: %s", json.dumps(to_dict(resolved.config), sort_keys=True))
    if dry:
        from agent.run import dry_run

        _print(sys.stdout, json.dumps(dry_run(resolved), indent=2))
        return 0
    from agent.run import run_proxy

    run_proxy(resolved)
    return 0


def _log_options(parsed: Parsed, dry: bool) -> LogOptions:
    # A dry run prints one JSON document on stdout, so nothing else may be there.
    targets = ("stderr",) if dry else tuple(filter(None, parsed.string("log_target").split(",")))
    level = "default:warn" if dry else parsed.string("log_output_level")
    return LogOptions(level, parsed.boolean("log_as_json"), targets or ("stdout",))


def _version(rest: Sequence[str]) -> int:
    parsed = parse([_long(item) for item in rest], VERSION_FLAGS, ignore_unknown=False)
    output = parsed.string("output")
    if output not in ("", "json", "yaml"):
        raise UsageError("--output must be 'yaml' or 'json'")
    info = {"version": __version__, "python": ".".join(map(str, sys.version_info[:3]))}
    if output == "json":
        _print(sys.stdout, json.dumps({"clientVersion": info}, indent=2))
    elif output == "yaml":
        _print(sys.stdout, "\n".join(["clientVersion:", *(f"  {key}: {value}" for key, value in info.items())]))
    elif parsed.boolean("short"):
        _print(sys.stdout, __version__)
    else:
        _print(sys.stdout, f"version: {__version__} (python {info['python']})")
    return 0

"""Command lines as Go's pflag reads them: ``--name=value``, ``--name value``, ``--bool``, unknown flags skipped.

argparse lets an unknown flag's value become the proxy's type; Istio's parser does not.
Source: spf13/pflag: flag.go (stripUnknownFlagValue), istio/istio: pilot/cmd/pilot-agent/app/cmd.go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent.environment import parse_bool, parse_int
from agent.errors import UsageError

Value = str | int | bool


@dataclass(frozen=True)
class Flag:
    """One flag; the type of `default` is the type of its values."""

    name: str
    default: Value
    help: str


@dataclass(frozen=True)
class Parsed:
    """Flag values by name, and what is not a flag."""

    values: Mapping[str, Value]
    arguments: Sequence[str]

    def string(self, name: str) -> str:
        return str(self.values[name])

    def integer(self, name: str) -> int:
        value = self.values[name]
        assert isinstance(value, int)
        return value

    def boolean(self, name: str) -> bool:
        return bool(self.values[name])


def parse(arguments: Sequence[str], flags: Sequence[Flag], *, ignore_unknown: bool) -> Parsed:
    """Parses a command line without the program's name.

    Raises:
        UsageError: a value is missing or does not fit, or (unless `ignore_unknown`) a flag is unknown.
    """
    known = {flag.name: flag for flag in flags}
    values: dict[str, Value] = {flag.name: flag.default for flag in flags}
    rest: list[str] = []
    queue = list(arguments)
    while queue:
        item = queue.pop(0)
        if item == "--":
            rest += queue
            break
        if not item.startswith("-") or item == "-":
            rest.append(item)
            continue
        name, separator, value = item.lstrip("-").partition("=")
        flag = known.get(name) if item.startswith("--") else None
        if flag is None:
            if not ignore_unknown:
                raise UsageError(f"unknown flag: {item.partition('=')[0]}")
            if not separator and queue and not queue[0].startswith("-"):
                queue.pop(0)
            continue
        if not separator:
            if isinstance(flag.default, bool):
                value = "true"
            elif queue:
                value = queue.pop(0)
            else:
                raise UsageError(f"flag needs an argument: --{name}")
        values[name] = _convert(flag, value)
    return Parsed(values, rest)


def _convert(flag: Flag, value: str) -> Value:
    try:
        if isinstance(flag.default, bool):
            return parse_bool(value)
        return parse_int(value) if isinstance(flag.default, int) else value
    except ValueError as error:
        raise UsageError(f'invalid argument "{value}" for "--{flag.name}" flag', error) from None


def usage(flags: Sequence[Flag]) -> str:
    """One line for each flag."""
    width = max(len(flag.name) for flag in flags) + 4
    return "\n".join(f"  {'--' + flag.name:<{width}} {flag.help} (default {_shown(flag.default)})" for flag in flags)


def _shown(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value) if value == "" else str(value)

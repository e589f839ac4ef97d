"""The command line: flags, environment twins, defaults and how values are read.

Grammar, as pflag has it: ``--flag value``, ``--flag=value``, ``-f value``, ``-fvalue``, ``-f=value``; a bool takes
its value only after ``=``; ``--`` ends flags; other words are ignored by the reference (only the leading
``istio-iptables`` of an injected container is expected).

Precedence: default < environment twin < extra environment variable < command line. A twin that is set but empty
counts as set; one that does not parse leaves the zero value of its type, not the default, and says nothing: that is
what ``Parsed.misread`` lists.

Source: istio/istio: tools/istio-iptables/pkg/cmd/root.go, pkg/flag/flag.go; spf13/pflag.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from .errors import UsageError

Kind = Literal["string", "bool", "uint16", "duration", "strings"]
Value = str | bool | int | float | tuple[str, ...]

_TRUE = frozenset({"1", "t", "T", "TRUE", "true", "True"})
_FALSE = frozenset({"0", "f", "F", "FALSE", "false", "False"})
_DURATION_PART = re.compile(r"([0-9]*\.?[0-9]*)(ns|us|µs|μs|ms|s|m|h)")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


class Flag(NamedTuple):
    """One flag. ``twin`` says whether the upper-cased name is read from the environment."""

    name: str
    short: str
    kind: Kind
    default: Value
    help: str
    extra_env: str = ""
    twin: bool = True
    choices: tuple[str, ...] = ()

    @property
    def env(self) -> str:
        return self.name.upper().replace("-", "_") if self.twin else ""


def _own(name: str, kind: Kind, default: Value, text: str, choices: tuple[str, ...] = ()) -> Flag:
    """A flag that the reference does not have: it never reads the environment, which proxyMetadata fills."""
    return Flag(name, "", kind, default, text, twin=False, choices=choices)


FLAGS: tuple[Flag, ...] = (
    Flag("envoy-port", "p", "string", "15001", "port of Envoy that takes outbound TCP", twin=False),
    Flag("inbound-capture-port", "z", "string", "15006", "port of Envoy that takes inbound TCP"),
    Flag("inbound-tunnel-port", "e", "string", "15008", "HBONE port, never redirected"),
    Flag(
        "proxy-uid",
        "u",
        "string",
        "",
        "comma list of UIDs whose traffic is not redirected (default: that of ENVOY_USER, else 1337)",
    ),
    Flag(
        "proxy-gid", "g", "string", "", "comma list of GIDs whose traffic is not redirected (default: as --proxy-uid)"
    ),
    Flag("istio-inbound-interception-mode", "m", "string", "", "TPROXY, or anything else for REDIRECT"),
    Flag(
        "istio-inbound-ports", "b", "string", "", "inbound ports to redirect: a comma list, * for all, empty for none"
    ),
    Flag(
        "istio-local-exclude-ports",
        "d",
        "string",
        "",
        "inbound ports not to redirect; only with --istio-inbound-ports *",
    ),
    Flag("istio-exclude-interfaces", "c", "string", "", "interfaces that are ignored in both directions"),
    Flag(
        "istio-service-cidr",
        "i",
        "string",
        "",
        "outbound ranges to redirect: a comma list of CIDRs, * for all, empty for none",
    ),
    Flag("istio-service-exclude-cidr", "x", "string", "", "outbound ranges not to redirect"),
    Flag("istio-outbound-ports", "q", "string", "", "outbound TCP ports that are always redirected"),
    Flag(
        "istio-local-outbound-ports-exclude", "o", "string", "", "outbound TCP and UDP ports that are never redirected"
    ),
    Flag("kube-virt-interfaces", "k", "string", "", "virtual interfaces whose incoming traffic is treated as outbound"),
    Flag("istio-inbound-tproxy-mark", "t", "string", "1337", "packet mark of TPROXY"),
    Flag("istio-inbound-tproxy-route-table", "r", "string", "133", "routing table of TPROXY"),
    Flag("dry-run", "n", "bool", False, "print the rules, touch nothing, need no root"),
    Flag("iptables-probe-port", "", "uint16", 15002, "port that the validator dials"),
    Flag("probe-timeout", "", "duration", 5.0, "time that the validator has"),
    Flag("skip-rule-apply", "", "bool", False, "no detection, no rules, no routes"),
    Flag("run-validation", "", "bool", False, "prove with a packet that the rules redirect"),
    Flag("redirect-dns", "", "bool", False, "capture DNS for the agent", extra_env="ISTIO_META_DNS_CAPTURE"),
    Flag("drop-invalid", "", "bool", False, "drop packets that conntrack calls INVALID", extra_env="INVALID_DROP"),
    Flag(
        "dual-stack",
        "",
        "bool",
        False,
        "look for an IPv6 address behind a first IPv4 one",
        extra_env="ISTIO_DUAL_STACK",
    ),
    Flag("capture-all-dns", "", "bool", False, "capture every flow to port 53; only with --redirect-dns"),
    Flag("network-namespace", "", "string", "", "path of a network namespace, used as xtables lock file in CNI mode"),
    Flag("cni-mode", "", "bool", False, "the host's file system with the pod's network: run the tools in a sandbox"),
    Flag("reconcile", "", "bool", False, "mend rules that differ, under guard rules"),
    Flag("cleanup-only", "", "bool", False, "remove everything, create nothing"),
    Flag("force-apply", "", "bool", False, "write the rules anew even if they are already right"),
    Flag("native-nftables", "", "bool", False, "same as --backend native-nft"),
    Flag("force-iptables-binary", "", "string", "", "legacy or nft; same as --backend"),
    Flag("log_target", "", "strings", ("stderr",), "where log lines go: stdout, stderr or a path", twin=False),
    Flag("log_as_json", "", "bool", False, "log lines as JSON", twin=False),
    Flag(
        "log_output_level",
        "",
        "string",
        "default:info",
        "scope:level list; debug, info, warn, error, fatal, none",
        twin=False,
    ),
    Flag("log_stacktrace_level", "", "string", "default:none", "accepted, there are no stack traces", twin=False),
    Flag("log_caller", "", "string", "", "accepted, lines carry no caller", twin=False),
    Flag("vklog", "", "string", "", "accepted, there is no klog", twin=False),
    _own("ipv6", "string", "auto", "replaces the detection of IPv6", ("auto", "on", "off")),
    _own("dns-servers", "string", "", "comma list of DNS servers in place of those in /etc/resolv.conf; may be empty"),
    _own(
        "backend", "string", "auto", "how rules are applied", ("auto", "legacy", "legacy-restore", "nft", "native-nft")
    ),
    _own("comments", "bool", False, "say on each rule what it is for"),
    _own("strict", "bool", False, "a value that would be silently misread is an error"),
    _own("json", "bool", False, "one JSON document on stdout"),
    _own("lock-wait", "duration", 30.0, "how long to wait for another run, and for the xtables lock"),
)

BY_NAME: Mapping[str, Flag] = {flag.name: flag for flag in FLAGS}
BY_SHORT: Mapping[str, Flag] = {flag.short: flag for flag in FLAGS if flag.short}


class Parsed:
    """Values by flag name, which of them the user gave (``given``), and what the environment got wrong."""

    def __init__(self) -> None:
        self.values: dict[str, Value] = {flag.name: flag.default for flag in FLAGS}
        self.given: set[str] = set()
        self.misread: list[str] = []
        self.words: list[str] = []
        self.help = False

    def text(self, name: str) -> str:
        return str(self.values[name])

    def switch(self, name: str) -> bool:
        return bool(self.values[name])

    def number(self, name: str) -> int:
        value = self.values[name]
        assert isinstance(value, int)
        return value

    def seconds(self, name: str) -> float:
        value = self.values[name]
        assert isinstance(value, int | float)
        return float(value)

    def strings(self, name: str) -> tuple[str, ...]:
        value = self.values[name]
        assert isinstance(value, tuple)
        return value


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Parsed:
    """Reads the environment, then the command line.

    Raises:
        UsageError: unknown flag, missing or bad value (exit 255).
    """
    parsed = Parsed()
    for flag in FLAGS:
        for variable in (flag.env, flag.extra_env):
            if variable and variable in environ:
                _from_environment(parsed, flag, variable, environ[variable])
    _from_arguments(parsed, list(argv))
    return parsed


def usage() -> str:
    """The text of ``--help``."""
    lines = [
        "Sets up the rules that send a pod's traffic through its sidecar.",
        "",
        "Usage: python -m init [flags]",
        "",
    ]
    for flag in FLAGS:
        short = f"-{flag.short}, " if flag.short else "    "
        kind = "" if flag.kind == "bool" else f" {'|'.join(flag.choices) if flag.choices else flag.kind}"
        env = ", ".join(name for name in (flag.env, flag.extra_env) if name)
        default = _show(flag.default)
        notes = "".join((f" (default {default})" if default else "", f" [{env}]" if env else ""))
        lines.append(f"  {short}--{flag.name}{kind}\n        {flag.help}{notes}")
    return "\n".join(lines) + "\n"


def parse_bool(text: str) -> bool:
    """Go's strconv.ParseBool. Raises ValueError."""
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError(f"{text!r} is not a bool (1, t, true, 0, f, false)")


def parse_duration(text: str) -> float:
    """Go's time.ParseDuration, in seconds: ``5s``, ``1m30s``, ``250ms``; a bare 0 is allowed. Raises ValueError."""
    sign, rest = (-1.0, text[1:]) if text.startswith("-") else (1.0, text.removeprefix("+"))
    if rest == "0":
        return 0.0
    total, position = 0.0, 0
    while position < len(rest):
        part = _DURATION_PART.match(rest, position)
        if part is None or part.group(1) in ("", "."):
            break
        total += float(part.group(1)) * _SECONDS[part.group(2)]
        position = part.end()
    if not rest or position < len(rest):
        raise ValueError(f"{text!r} is not a duration such as 5s or 250ms")
    if total > 2**63 / 1e9:
        raise ValueError(f"{text!r} is longer than a duration can be")
    return sign * total


def parse_uint16(text: str) -> int:
    """Go's strconv.ParseUint(s, 0, 16): decimal, 0x, 0o, 0b or a leading 0 for octal, ``_`` between digits. Raises ValueError."""
    plain = re.sub(r"(?<=[0-9a-zA-Z])_(?=[0-9a-zA-Z])", "", text)
    if not re.fullmatch(r"0[xX][0-9a-fA-F]+|0[oO]?[0-7]+|0[bB][01]+|0|[1-9][0-9]*", plain):
        raise ValueError(f"{text!r} is not a number from 0 to 65535")
    digits = "0o" + plain[1:] if re.fullmatch(r"0[0-7]+", plain) else plain
    value = int(digits, 0)
    if value > 0xFFFF:
        raise OverflowError(f"{text!r} is not a number from 0 to 65535")
    return value


def _read(flag: Flag, text: str) -> Value:
    if flag.kind == "bool":
        return parse_bool(text)
    if flag.kind == "duration":
        return parse_duration(text)
    if flag.kind == "uint16":
        return parse_uint16(text)
    if flag.choices and text not in flag.choices:
        raise ValueError(f"{text!r} is not one of {', '.join(flag.choices)}")
    return text


def _from_environment(parsed: Parsed, flag: Flag, variable: str, text: str) -> None:
    try:
        parsed.values[flag.name] = _read(flag, text)
    except OverflowError as error:
        # ParseUint gives the largest value together with its error, and the flag keeps it.
        parsed.values[flag.name] = 0xFFFF
        parsed.misread.append(f"{variable}: {error}; it is taken as 65535")
    except ValueError as error:
        zero: Value = {"bool": False, "uint16": 0, "duration": 0.0}.get(flag.kind, "")
        parsed.values[flag.name] = zero
        parsed.misread.append(f"{variable}: {error}; it is taken as {_show(zero, plain=True)}")
    parsed.given.add(flag.name)


def _from_arguments(parsed: Parsed, words: list[str]) -> None:
    while words:
        word = words.pop(0)
        if word == "--":
            parsed.words.extend(words)
            return
        if word.startswith("--"):
            name, equals, text = word[2:].partition("=")
            if name == "help":
                parsed.help = True
                continue
            flag = BY_NAME.get(name)
            if flag is None:
                raise UsageError(f"unknown flag: --{name}", "", _closest(name))
            if not equals:
                if flag.kind == "bool":
                    text = "true"
                elif words:
                    text = words.pop(0)
                else:
                    raise UsageError(f"flag needs an argument: --{name}")
            _assign(parsed, flag, f"--{name}", text)
        elif word.startswith("-") and len(word) > 1:
            _shorthands(parsed, word[1:], words)
        else:
            parsed.words.append(word)


def _shorthands(parsed: Parsed, letters: str, words: list[str]) -> None:
    whole = letters
    while letters:
        letter, letters = letters[0], letters[1:]
        if letter == "h":
            parsed.help = True
            continue
        flag = BY_SHORT.get(letter)
        if flag is None:
            raise UsageError(f"unknown shorthand flag: {letter!r} in -{whole}")
        if letters.startswith("="):
            text, letters = letters[1:], ""
        elif flag.kind == "bool":
            text = "true"
        elif letters:
            text, letters = letters, ""
        elif words:
            text = words.pop(0)
        else:
            raise UsageError(f"flag needs an argument: {letter!r} in -{whole}")
        _assign(parsed, flag, f"-{letter}", text)


def _assign(parsed: Parsed, flag: Flag, shown: str, text: str) -> None:
    try:
        value = _read(flag, text)
    except (ValueError, OverflowError) as error:
        raise UsageError(f"invalid argument {text!r} for {shown}", str(error)) from None
    if flag.kind == "strings":
        kept = parsed.values[flag.name] if flag.name in parsed.given else ()
        assert isinstance(kept, tuple)
        assert isinstance(value, str)
        # A target is taken whole, as pflag's StringArray does: a path may hold a comma.
        value = (*kept, value)
    parsed.values[flag.name] = value
    parsed.given.add(flag.name)


def _closest(name: str) -> str:
    import difflib

    found = difflib.get_close_matches(name, BY_NAME, n=1)
    return f"Did you mean --{found[0]}?" if found else ""


def _show(value: Value, plain: bool = False) -> str:
    if isinstance(value, tuple):
        return ",".join(value)
    if isinstance(value, bool):
        return str(value).lower() if plain or value else ""
    if isinstance(value, float):
        return f"{value:g}s"
    return str(value)

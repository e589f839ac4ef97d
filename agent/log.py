"""Logging as Istio's agents do it: tab-separated lines or JSON objects, a level for each scope.

Source: istio/istio: pkg/log/options.go, pkg/log/config.go.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from agent.errors import UsageError

NONE = logging.CRITICAL + 10
LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
    "none": NONE,
}
_NAMES = {
    logging.DEBUG: "debug",
    logging.INFO: "info",
    logging.WARNING: "warn",
    logging.ERROR: "error",
    logging.CRITICAL: "fatal",
}
DEFAULT_LEVELS = "default:info,grpc:none"


@dataclass(frozen=True)
class LogOptions:
    """The ``--log_*`` flags."""

    output_level: str = DEFAULT_LEVELS
    as_json: bool = False
    targets: Sequence[str] = ("stdout",)


def _stamp(record: logging.LogRecord) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{whole}.{int(record.created % 1 * 1_000_000):06d}Z"


def _one_line(record: logging.LogRecord) -> str:
    message = record.getMessage()
    if record.exc_info and record.exc_info[1] is not None:
        message = f"{message}: {type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
    return message.replace("\n", "\\n")


class TextFormatter(logging.Formatter):
    """``time<TAB>level<TAB>scope<TAB>message``; the scope ``default`` is left out."""

    def format(self, record: logging.LogRecord) -> str:
        scope = "" if record.name in ("default", "root") else f"{record.name}\t"
        return f"{_stamp(record)}\t{_NAMES.get(record.levelno, 'info')}\t{scope}{_one_line(record)}"


class JSONFormatter(logging.Formatter):
    """One JSON object a line with level, time, scope and msg."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {"level": _NAMES.get(record.levelno, "info"), "time": _stamp(record)}
        if record.name not in ("default", "root"):
            entry["scope"] = record.name
        entry["msg"] = _one_line(record)
        return json.dumps(entry)


def parse_levels(text: str) -> dict[str, int]:
    """``default:info,dns:debug`` -> level of each scope; a bare level is that of ``default``.

    Raises:
        UsageError: a level is unknown.
    """
    levels: dict[str, int] = {}
    for item in filter(None, text.split(",")):
        scope, separator, level = item.partition(":")
        if not separator:
            scope, level = "default", item
        if level not in LEVELS:
            raise UsageError(f'invalid output level "{item}"', "", f"Levels are {' '.join(LEVELS)}")
        levels[scope] = LEVELS[level]
    return levels


def configure(options: LogOptions) -> None:
    """Installs handlers and levels on the root logger, replacing what was there.

    Raises:
        UsageError: a level or a target cannot be used.
    """
    levels = parse_levels(options.output_level)
    handlers: list[logging.Handler] = []
    for target in options.targets:
        if target in ("stdout", "stderr"):
            handlers.append(logging.StreamHandler(getattr(sys, target)))
            continue
        try:
            handlers.append(logging.FileHandler(target))
        except OSError as error:
            raise UsageError(f'log target "{target}"', error) from None
    formatter = JSONFormatter() if options.as_json else TextFormatter()
    root = logging.getLogger()
    root.handlers[:] = handlers
    for handler in handlers:
        handler.setFormatter(formatter)
    everything = levels.pop("all", None)
    root.setLevel(everything if everything is not None else levels.get("default", logging.INFO))
    if everything is None:
        for scope, level in levels.items():
            logging.getLogger(scope).setLevel(level)
    logging.getLogger("asyncio").setLevel(logging.WARNING)  # it logs its own start-up

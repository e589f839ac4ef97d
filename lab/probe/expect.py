"""Compares a verdict with what a TrafficTest expects: any subset of a verdict.

Objects compare by the keys that are expected, lists as sets, null must be null. A rule is expected in iptables' words
(legacy and nft alike); ``native_nft`` inside it says the same rule as the native nft back end has it.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any


def differences(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Where a verdict is not as expected: (path of the key, explanation). Empty if it is.

    Args:
        expected: as written in the test.
        actual: ``Verdict.to_dict()``.
    """
    found: list[tuple[str, str]] = []
    _compare(expected, actual, "", found)
    return found


def sentence(path: str, explanation: str) -> str:
    return f"{path}: {explanation}"


def _compare(expected: Any, actual: Any, path: str, found: list[tuple[str, str]]) -> None:
    if isinstance(expected, Mapping):
        if not isinstance(actual, Mapping):
            found.append((path, f"expected {_show(expected)}, but {_nothing(actual)}"))
            return
        if path.rpartition(".")[2] == "rule":
            expected = _in_words_of(str(actual.get("backend")), expected)
            if not expected:
                found.append((path, "is expected in the words of iptables alone; add native_nft: {chain, text} to it"))
        for key, value in expected.items():
            where = f"{path}.{key}" if path else str(key)
            if key not in actual:
                close = difflib.get_close_matches(str(key), [str(k) for k in actual], 1)
                hint = f'; did you mean "{close[0]}"?' if close else ""
                found.append((where, f"a verdict has no such key{hint}"))
            else:
                _compare(value, actual[key], where, found)
    elif isinstance(expected, Sequence) and not isinstance(expected, str):
        if not isinstance(actual, Sequence) or isinstance(actual, str):
            found.append((path, f"expected {_show(expected)}, but {_nothing(actual)}"))
            return
        missing = [e for e in expected if not any(_matches(e, a) for a in actual)]
        more = [a for a in actual if not any(_matches(e, a) for e in expected)]
        parts = [f"{_show(missing)} is missing"] if missing else []
        parts += [f"{_show(more)} is too much"] if more else []
        if parts:
            found.append((path, ", ".join(parts)))
    elif not _same(expected, actual):
        hint = ""
        if expected is not None and actual is not None and str(expected) == str(actual):
            hint = f" ({_kind(expected)}, not {_kind(actual)}: see the quotes)"
        found.append((path, f"expected {_show(expected)}, got {_show(actual)}{hint}"))


def _in_words_of(backend: str, rule: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is expected of a rule on this back end; empty if the test does not say it."""
    common = {key: value for key, value in rule.items() if key in ("family", "backend")}
    if backend == "native-nft":
        words = rule.get("native_nft", {})
        return common | words if words or len(common) == len(rule) else {}
    return {key: value for key, value in rule.items() if key != "native_nft"}


def _matches(expected: Any, actual: Any) -> bool:
    found: list[tuple[str, str]] = []
    _compare(expected, actual, "", found)
    return not found


def _same(expected: Any, actual: Any) -> bool:
    # True == 1 in Python, not in a manifest.
    return bool(expected == actual) and isinstance(expected, bool) == isinstance(actual, bool)


def _nothing(actual: Any) -> str:
    return "there is none (null)" if actual is None else f"it is {_show(actual)}"


def _kind(value: Any) -> str:
    return "text" if isinstance(value, str) else "a number" if isinstance(value, int | float) else type(value).__name__


def _show(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 200 else text[:197] + "..."

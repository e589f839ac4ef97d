"""Compares a prediction with what was observed, and judges a prediction by what its test expects. Pure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lab.verdict import Verdict

_STRICT = (
    "outbound.captured",
    "outbound.redirected_to",
    "envoy.listener",
    "envoy.filter_chain",
    "envoy.route",
    "envoy.virtual_host",
    "envoy.route_name",
    "envoy.cluster",
    "envoy.response_flags",
    "envoy.details",
    "inbound.pod",
    "inbound.captured",
    "inbound.redirected_to",
    "inbound.listener",
    "inbound.filter_chain",
    "inbound.cluster",
    "inbound.route",
    "inbound.route_name",
    "inbound.response_flags",
    "inbound.details",
    "inbound.peer_seen_by_app",
    "dns.captured",
    "dns.redirected_to",
    "dns.answered_by",
    "dns.rcode",
    "dns.name",
    "wire.left_pod",
    "outcome.result",
    "outcome.status",
    "outcome.grpc_status",
    "to.address",
)
"""Keys of which both sides must say the same, null included (where the object that holds them is there on both)."""

_WHERE_BOTH = (
    "outbound.rule",
    "inbound.rule",
    "dns.rule",
    "dns.answers",
    "dns.zone",
    "envoy.endpoint",
    "inbound.endpoint",
    "envoy.upstream.captured",
    "envoy.upstream.redirected_to",
    "tls.downstream",
    "tls.upstream",
    "tls.peer_san",
)
"""Keys that one side may be silent about: an observer that saw no evidence, a prediction with several endpoints."""


class Difference(NamedTuple):
    key: str
    predicted: Any
    observed: Any

    def __str__(self) -> str:
        return f"{self.key}: predicted {_shown(self.predicted)}, observed {_shown(self.observed)}"


def differences(predicted: Verdict, observed: Verdict) -> list[Difference]:
    """Where a prediction and an observation contradict each other.

    What the prediction leaves undecided, and what was not observed, contradicts nothing.
    """
    one, other = predicted.to_dict(), observed.to_dict()
    if observed.outcome is None or (predicted.undecided and predicted.outcome is None):
        strict: tuple[str, ...] = ()
        lenient: tuple[str, ...] = (*_STRICT, *_WHERE_BOTH)
    else:
        strict, lenient = _STRICT, _WHERE_BOTH
    if predicted.outcome is None:
        strict = tuple(key for key in strict if not key.startswith("outcome."))
    if observed.inbound is None and predicted.inbound is not None and not predicted.inbound.captured:
        # Nothing tells of a flow that a pod without capture let pass and no program answered.
        strict = tuple(key for key in strict if not key.startswith("inbound."))
    if observed.inbound is None and observed.envoy is not None and "UF" in (observed.envoy.response_flags or ""):
        # A connection that failed in its handshake is not named by its maker's log, so nobody looks for its other end.
        strict = tuple(key for key in strict if not key.startswith("inbound."))
    if _still_open(predicted, observed):
        strict = tuple(key for key in strict if key not in _OF_A_LINE)
    found: list[Difference] = []
    for key in strict:
        here, there = _at(one, key), _at(other, key)
        if here is _ABSENT and there is _ABSENT:
            continue
        if _ABSENT in (here, there) and not (predicted.undecided or key.startswith(("wire.", "dns."))):
            # One side has no such object at all, e.g. no Envoy in the path.
            here, there = (None if x is _ABSENT else x for x in (here, there))
        if _ABSENT in (here, there) or (predicted.undecided and here is None):
            continue
        if _plain(here) != _plain(there):
            found.append(Difference(key, here, there))
    for key in lenient:
        here, there = _at(one, key), _at(other, key)
        if here is _ABSENT or there is _ABSENT or here is None or there is None:
            continue
        if _comparable(key, here) != _comparable(key, there):
            found.append(Difference(key, here, there))
    return found


_OF_A_LINE = (
    "inbound.listener",
    "inbound.filter_chain",
    "inbound.cluster",
    "inbound.response_flags",
    "inbound.details",
)


def _still_open(predicted: Verdict, observed: Verdict) -> bool:
    """A TCP proxy writes its line when the connection ends, and an HTTP proxy keeps its connections to it."""
    here, there = predicted.inbound, observed.inbound
    if here is None or there is None or not there.captured or there.listener is not None:
        return False
    kept = predicted.envoy is not None and predicted.envoy.route is not None
    return kept and here.captured is True and here.route is None


def judged(
    predicted: Verdict, differing: Callable[[Mapping[str, Any], Mapping[str, Any]], list[tuple[str, str]]]
) -> Verdict:
    """The prediction with ``passed`` set, by what its test expects.

    Keys that no prediction has (what packets carried, what the far side read in detail) are not judged; where something is
    undecided that the expectation asks for, the prediction is skipped and says so.

    Args:
        differing: `lab.probe.expect.differences`.
    """
    actual = predicted.to_dict()
    wrong = [(path, why) for path, why in differing(predicted.expected, actual) if not _unpredictable(path, actual)]
    if wrong and predicted.undecided and all(_value(actual, path) is None for path, _ in wrong):
        return dataclasses.replace(predicted, passed=None, skipped=f"undecided: {'; '.join(predicted.undecided)}")
    return dataclasses.replace(predicted, passed=not wrong, differences=tuple(f"{p}: {w}" for p, w in wrong))


def _unpredictable(path: str, actual: Mapping[str, Any]) -> bool:
    first, _, rest = path.partition(".")
    if first in ("source_port", "seconds", "evidence", "proof") or path.startswith("wire.packets"):
        return True
    if first == "far_side":
        held = actual.get("far_side")
        return held is None or (bool(rest) and _value(held, rest) is None)
    return first == "inbound" and rest == "peer_seen_by_app" and actual.get("outcome") is None


def _value(tree: Any, path: str) -> Any:
    for key in path.split("."):
        if not isinstance(tree, Mapping):
            return None
        tree = tree.get(key)
    return tree


class _Absent:
    pass


_ABSENT: Any = _Absent()


def _at(tree: Mapping[str, Any], path: str) -> Any:
    """The value at a path; `_ABSENT` if an object on the way is null."""
    now: Any = tree
    for key in path.split("."):
        if now is None or not isinstance(now, Mapping):
            return _ABSENT
        now = now.get(key)
    return now


def _plain(value: Any) -> Any:
    """Empty words of an access log are the same as none. What libraries for TLS and DNS call a failure is not predicted."""
    if isinstance(value, str):
        value = _LIBRARIES.sub("", value)
    return None if value in ("", "-") else value


def _comparable(key: str, value: Any) -> Any:
    if key.endswith(".rule") and isinstance(value, Mapping):
        # A prediction for an unknown back end names none.
        return value.get("chain"), value.get("position"), value.get("text")
    if isinstance(value, list):
        return sorted(map(str, value))
    return value


_LIBRARIES = re.compile(r"\|TLS_error:.*?TLS_error_end|\{cares_[^}]*\}")


def _shown(value: Any) -> str:
    if isinstance(value, Mapping) and "text" in value:
        return f"{value.get('chain')} {value.get('position')}: {value['text']}"
    return "null" if value is None else str(value)

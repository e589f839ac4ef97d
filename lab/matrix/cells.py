"""One field of a matrix: a predicted verdict in a word, and what is worth knowing about it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lab.explain.predict import CHANCE
from lab.matrix.targets import Target
from lab.verdict import Verdict

How = Literal["mtls", "tls", "plaintext", "passthrough", "direct", "blocked", "failed", "undecided"]
"""``mtls``, ``tls``, ``plaintext``: captured by the client's proxy, which sends it to a cluster of the mesh, and what is on the
wire. ``passthrough``: captured, and sent on as it came. ``direct``: no proxy of the client has it. ``blocked``: a proxy ends it
without asking anybody. ``failed``: nothing answers at its end. ``undecided``: it depends on what is not known."""

PASSTHROUGH = ("PassthroughCluster", "AllowAnyDynamicDNSCluster")
"""Clusters for what no ServiceEntry and no Service declares; the second one looks up the Host header."""
BLACK_HOLE = "BlackHoleCluster"
_WORDS: Mapping[str, str] = {"mtls": "mTLS", "tls": "TLS"}


@dataclass(frozen=True, slots=True)
class Cell:
    """A flow from one source to one target. ``source`` is ``POD.NAMESPACE`` or an ExternalHost's name.

    ``reaches``: the client gets an answer that is no error; None if that is not known. ``wire``: what is seen between the two ends
    (``mtls``, ``tls``, ``plaintext``), None if nothing comes so far. ``far`` is the pod that has it in the end, ``far_captured``
    whether that pod's proxy takes it. ``blocked_by`` is the pod whose proxy ended it. ``ways``: all that ``how``
    can be. ``courses``: where it is not the same each time.
    """

    source: str
    target: Target
    how: How
    reaches: bool | None
    verdict: Verdict
    wire: Literal["mtls", "tls", "plaintext"] | None = None
    far: str | None = None
    far_captured: bool | None = None
    blocked_by: str | None = None
    ways: tuple[How, ...] = ()
    courses: tuple[tuple[tuple[str, Any], ...], ...] = ()
    sentence: str = ""

    @property
    def captured(self) -> bool | None:
        return self.verdict.outbound.captured if self.verdict.outbound else None

    @property
    def cluster(self) -> str | None:
        return self.verdict.envoy.cluster if self.verdict.envoy else None

    @property
    def flags(self) -> str | None:
        """Response flags of the proxy that ended it, else of the client's."""
        far, near = self.verdict.inbound, self.verdict.envoy
        if self.blocked_by is not None and far is not None and self.blocked_by == far.pod and far.response_flags:
            return far.response_flags
        return near.response_flags if near else None

    @property
    def ending(self) -> str:
        """How it ended, in few words: ``502``, ``closed UH``, ``refused``."""
        outcome = self.verdict.outcome
        if outcome is None:
            ends = (dict(course) for course in self.courses)
            return " or ".join(dict.fromkeys(str(end["status"] or end["result"]) for end in ends)) or "?"
        flags = self.flags
        grpc = f"gRPC {outcome.grpc_status}" if outcome.grpc_status else None
        said = grpc or (str(outcome.status) if outcome.status is not None else outcome.result)
        return f"{said} {flags}" if flags and flags != "-" else said

    @property
    def word(self) -> str:
        """As a table writes it."""
        word = _WORDS.get(self.how, self.how)
        if self.how == "blocked":
            away = f" at {self.blocked_by}" if self.blocked_by not in (None, self.source) else ""
            return f"blocked {self.ending}{away}"
        if self.how == "failed":
            return f"failed {self.ending}"
        if self.how == "undecided":
            return " or ".join(_WORDS.get(way, way) for way in self.ways) if len(self.ways) > 1 else "undecided"
        if self.reaches is None and len(self.courses) > 1:
            return f"{word}, varies"
        return word if self.reaches else f"{word}, {self.ending}"

    @property
    def told(self) -> str:
        """The same with what does not fit into a table: what is on the wire, another cluster than the target's."""
        word = self.word
        if self.how in ("passthrough", "direct") and self.wire is not None:
            word += f" ({_WORDS.get(self.wire, self.wire)})"
        return f"{word} via {self.via}" if self.via else word

    @property
    def clusters(self) -> tuple[str, ...]:
        """The clusters that the client's proxy may choose; mostly it is one."""
        if not self.captured:
            return ()
        named = (dict(course).get("cluster") for course in self.courses) if self.courses else (self.cluster,)
        return tuple(dict.fromkeys(name for name in named if name))

    @property
    def via(self) -> str | None:
        """The clusters, where they are not the one that belongs to the target: a subset, another host."""
        usual = f"outbound|{self.target.port}||{self.target.host}"
        others = [name for name in self.clusters if name not in (BLACK_HOLE, *PASSTHROUGH)]
        return None if others in ([], [usual]) else " or ".join(others)

    def to_json(self) -> dict[str, Any]:
        v = self.verdict
        near, outcome = v.envoy, v.outcome
        return {
            "from": self.source,
            "to": {**self.target.to_json(), "address": v.to.address},
            "how": self.how,
            "ways": list(self.ways),
            "reaches": self.reaches,
            "wire": self.wire,
            "captured": self.captured,
            "listener": near.listener if near else None,
            "route": near.route_name if near else None,
            "virtual_host": near.virtual_host if near else None,
            "cluster": self.cluster,
            "endpoint": near.endpoint if near else None,
            "far": None if self.far is None else {"pod": self.far, "captured": self.far_captured},
            "blocked_by": self.blocked_by,
            "result": outcome.result if outcome else None,
            "status": outcome.status if outcome else None,
            "grpc_status": outcome.grpc_status if outcome else None,
            "flags": self.flags,
            "courses": [dict(course) for course in self.courses],
            "undecided": list(v.undecided),
            "sentence": self.sentence,
        }


def cell(
    source: str,
    target: Target,
    verdict: Verdict,
    courses: Sequence[Mapping[str, Any]] = (),
    parts: Sequence[Verdict] = (),
    sentence: str = "",
) -> Cell:
    """The field of a flow.

    Args:
        courses: all that can become of the flow, each with its chance (`lab.explain.predict.distribution`).
        parts: the verdict of each of them, if they are several.
    """
    hows = tuple(dict.fromkeys(_how(part) for part in parts or (verdict,)))
    reached = {_reaches(part) for part in parts or (verdict,)}
    known = all(text.startswith(CHANCE) for text in verdict.undecided)
    how = hows[0] if len(hows) == 1 and (known or verdict.outcome is not None) else "undecided"
    if how == "undecided" and not parts and verdict.outcome is None:
        how = _path(verdict) or "undecided"
    far = verdict.inbound
    return Cell(
        source=source,
        target=target,
        how=how,
        reaches=next(iter(reached)) if len(reached) == 1 else None,
        verdict=verdict,
        wire=_wire(verdict) if how not in ("blocked", "failed", "undecided") else None,
        far=far.pod if far else None,
        far_captured=far.captured if far else None,
        blocked_by=_blocked_by(verdict) if how == "blocked" else None,
        ways=hows if how == "undecided" else (how,),
        courses=tuple(tuple(course.items()) for course in courses) if len(courses) > 1 else (),
        sentence=sentence,
    )


def _reaches(verdict: Verdict) -> bool | None:
    return verdict.outcome.result == "ok" if verdict.outcome else None


def _how(verdict: Verdict) -> How:
    if verdict.outcome is None:
        return _path(verdict) or "undecided"
    if verdict.outcome.result == "ok":
        return _path(verdict) or "direct"
    if _blocked_by(verdict) is not None:
        return "blocked"
    return (_path(verdict) or "failed") if _answered(verdict) else "failed"


def _answered(verdict: Verdict) -> bool:
    """Whether an error is the answer of a program at the end, and not of a proxy on the way."""
    return verdict.outcome is not None and verdict.outcome.result == "http-error" and verdict.far_side is not None


def _path(verdict: Verdict) -> How | None:
    """The way that a flow takes, wherever it ends; None if it is not known."""
    if verdict.outbound is not None and verdict.outbound.captured is None:
        return None
    if verdict.outbound is None or not verdict.outbound.captured:
        return "direct"
    if verdict.envoy is None:
        return None
    if verdict.envoy.cluster in PASSTHROUGH:
        return "passthrough"
    return _wire(verdict)


def _wire(verdict: Verdict) -> Literal["mtls", "tls", "plaintext"] | None:
    if verdict.tls.upstream is not None:
        far = verdict.inbound
        return "mtls" if far is not None and far.captured and verdict.tls.downstream is not None else "tls"
    if verdict.wire is not None and not verdict.wire.left_pod and verdict.inbound is None:
        return None
    return "tls" if verdict.to.protocol == "tls" else "plaintext"


def _blocked_by(verdict: Verdict) -> str | None:
    """The pod whose proxy ended the flow without a connection to anybody."""
    near, far = verdict.envoy, verdict.inbound
    if near is not None and near.cluster in (None, BLACK_HOLE) and near.endpoint is None:
        return verdict.source.pod
    waited = verdict.outcome is not None and verdict.outcome.result == "timeout"
    if far is not None and far.captured and far.endpoint is None and not waited:
        return far.pod  # a TCP proxy has named its cluster when the TLS handshake fails
    return None

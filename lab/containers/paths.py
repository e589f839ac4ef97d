"""Where the containers of one mesh meet: a volume that proxies and probers write to and the tests read. Pure."""

from __future__ import annotations

from pathlib import Path

EVIDENCE = Path("/evidence")
LOCK = EVIDENCE / "tests.lock"
"""Held by the one run of tests that may be under way."""


def prober_socket(pod: str) -> Path:
    """Where a pod's prober answers."""
    return EVIDENCE / f"{pod}.sock"


def evidence_file(pod: str) -> Path:
    """Envoy's evidence lines of a pod (node metadata ``SIDECARLAB_EVIDENCE``)."""
    return EVIDENCE / f"{pod}.jsonl"

"""Doubts about what a DestinationRule's TLS verifies.

Source: istio/istio: pkg/config/analysis/analyzers/destinationrule/ca-certificates.go.
"""

from __future__ import annotations

from collections.abc import Iterator

from lab.manifests.analysis.finding import Finding, mapping, maps
from lab.manifests.model import Mesh, RawConfig


def findings(mesh: Mesh) -> Iterator[Finding]:
    for rule in mesh.destination_rules:
        yield from _unverified(rule)


def _unverified(rule: RawConfig) -> Iterator[Finding]:
    """IST0128 and IST0129."""
    policy = mapping(rule.spec.get("trafficPolicy"))
    places: list[tuple[str, tuple[str | int, ...], object]] = [
        ("IST0128", ("spec", "trafficPolicy", "tls"), policy.get("tls"))
    ]
    places += [
        ("IST0129", ("spec", "trafficPolicy", "portLevelSettings", index, "tls"), setting.get("tls"))
        for index, setting in enumerate(maps(policy.get("portLevelSettings")))
    ]
    for code, path, written in places:
        tls = mapping(written)
        known = tls.get("caCertificates") or (tls.get("credentialName") and "workloadSelector" in rule.spec)
        if tls.get("mode") in ("SIMPLE", "MUTUAL") and not known and not tls.get("insecureSkipVerify"):
            yield Finding(
                code,
                rule.kind,
                rule.meta,
                path,
                f"mode {tls['mode']} without caCertificates: the server is verified by the CAs of the system alone",
            )

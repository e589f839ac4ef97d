"""What ``COMPLIANCE_POLICY`` leaves of TLS on the agent's connections to discovery and to the certificate authority.

gRPC has no setting for versions and key exchanges, so these connections go through `agent.tls_relay` then.
Source: istio/istio: pkg/model/fips.go (EnforceGoCompliance), pkg/features/security.go, pilot/pkg/grpc/tls.go.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from agent.environment import Environment

log = logging.getLogger("default")

VARIABLE = "COMPLIANCE_POLICY"
CIPHERS = (
    "ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-RSA-AES128-GCM-SHA256:"
    "ECDHE-ECDSA-AES256-GCM-SHA384:ECDHE-RSA-AES256-GCM-SHA384"
)
SUITES = "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384"
TLS_1_2, TLS_1_3 = 0x0303, 0x0304


@dataclass(frozen=True)
class Policy:
    """Versions as on the wire; key exchanges as OpenSSL names them. Cipher suites are the same for all policies."""

    minimum: int
    maximum: int
    groups: str


POLICIES = {
    "fips-140-2": Policy(TLS_1_2, TLS_1_2, "P-256"),
    "fips-140-3": Policy(TLS_1_2, TLS_1_3, "P-256:P-384"),
    "pqc": Policy(TLS_1_3, TLS_1_3, "X25519MLKEM768"),
}
FOR_ENVOYS_GRPC = ("fips-140-2", "fips-140-3")


def policy(environment: Environment) -> Policy | None:
    """The policy in force; a name that nobody knows is none, with a warning."""
    name = environment.string(VARIABLE)
    if name and name not in POLICIES:
        log.warning('unknown compliance policy: "%s"', name)
    return POLICIES.get(name)

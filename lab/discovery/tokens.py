"""Service account tokens: JWTs as Kubernetes projects them into pods, signed by the lab's own key.

The lab has no Kubernetes API, so discovery issues them itself, over its control socket, and checks them on 15012.
Claims: kubernetes/kubernetes: pkg/serviceaccount/claims.go; audience: istio/istio: pilot/pkg/features (``istio-ca``).
"""

from __future__ import annotations

import base64
import binascii
import json
import time
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature

AUDIENCE = "istio-ca"
ISSUER = "https://kubernetes.default.svc.cluster.local"
LIFETIME = 43200
"""Seconds; expirationSeconds of the injected token volume (istio/istio: injection-template.yaml)."""

_WIDTH = 32  # bytes of one P-256 coordinate in a JWS signature (RFC 7518, 3.4)


class TokenError(ValueError):
    """A token that is not accepted; the text says why."""


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except (binascii.Error, ValueError) as e:
        raise TokenError(f"not base64url: {e}") from None


class TokenIssuer:
    """Signs and verifies ES256 tokens with one key."""

    def __init__(self, key: ec.EllipticCurvePrivateKey | None = None) -> None:
        self._key = key or ec.generate_private_key(ec.SECP256R1())

    def issue(self, namespace: str, account: str, *, audience: str = AUDIENCE, seconds: int = LIFETIME) -> str:
        """A token of ``system:serviceaccount:NS:ACCOUNT``, valid for ``seconds``."""
        now = int(time.time())
        claims = {
            "aud": [audience],
            "exp": now + seconds,
            "iat": now,
            "nbf": now,
            "iss": ISSUER,
            "sub": f"system:serviceaccount:{namespace}:{account}",
            "kubernetes.io": {"namespace": namespace, "serviceaccount": {"name": account}},
        }
        head = _encode(json.dumps({"alg": "ES256", "typ": "JWT"}).encode())
        signed = f"{head}.{_encode(json.dumps(claims).encode())}"
        r, s = decode_dss_signature(self._key.sign(signed.encode(), ec.ECDSA(hashes.SHA256())))
        return f"{signed}.{_encode(r.to_bytes(_WIDTH, 'big') + s.to_bytes(_WIDTH, 'big'))}"

    def verify(self, token: str, audience: str = AUDIENCE) -> tuple[str, str]:
        """(namespace, service account) of a valid token. Raises TokenError."""
        parts = token.split(".")
        if len(parts) != 3:
            raise TokenError("not a JWT")
        try:
            head, claims = json.loads(_decode(parts[0])), json.loads(_decode(parts[1]))
        except ValueError as e:
            raise TokenError(f"cannot read the JWT: {e}") from None
        signature = _decode(parts[2])
        if not isinstance(head, dict) or head.get("alg") != "ES256" or len(signature) != 2 * _WIDTH:
            raise TokenError("not signed with ES256")
        r, s = int.from_bytes(signature[:_WIDTH], "big"), int.from_bytes(signature[_WIDTH:], "big")
        try:
            self._key.public_key().verify(
                encode_dss_signature(r, s), f"{parts[0]}.{parts[1]}".encode(), ec.ECDSA(hashes.SHA256())
            )
        except InvalidSignature:
            raise TokenError("the signature is not of this control plane's key") from None
        return self._account(claims, audience)

    @staticmethod
    def _account(claims: Any, audience: str) -> tuple[str, str]:
        if not isinstance(claims, dict):
            raise TokenError("the claims are no object")
        now = time.time()
        if float(claims.get("exp", 0)) <= now:
            raise TokenError("the token is expired")
        if float(claims.get("nbf", 0)) > now + 60:
            raise TokenError("the token is not valid yet")
        audiences = claims.get("aud")
        if audience not in (audiences if isinstance(audiences, list) else [audiences]):
            raise TokenError(f"the token is not for audience {audience}")
        subject = str(claims.get("sub", "")).split(":")
        if len(subject) != 4 or subject[:2] != ["system", "serviceaccount"]:
            raise TokenError("the subject is no service account")
        return subject[2], subject[3]

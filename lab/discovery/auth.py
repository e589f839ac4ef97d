"""Who is on the other end of the secure port, and whether it may have what its node asks for.

Sources: istio/istio: pilot/pkg/xds/auth.go, security/pkg/server/ca/authenticate/.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc

from lab.discovery.ca import parse_spiffe_id, spiffe_id
from lab.discovery.node import Node
from lab.discovery.tokens import TokenError, TokenIssuer


class Unauthenticated(ValueError):
    """Nobody vouches for the peer."""

    code = grpc.StatusCode.UNAUTHENTICATED


class Forbidden(ValueError):
    """The peer is somebody else than its node says, or may not see what it asks for."""

    code = grpc.StatusCode.PERMISSION_DENIED


class Authenticator:
    """Identities of a peer of the secure port: its client certificate, else its bearer token.

    ``certificate_identities`` maps a peer name to the SPIFFE ids of the certificate it presented, None for a peer that
    did not come through the secure port.
    """

    def __init__(
        self,
        trust_domain: str,
        issuer: TokenIssuer,
        certificate_identities: Callable[[str], Sequence[str] | None],
    ) -> None:
        self._trust_domain, self._issuer = trust_domain, issuer
        self._certificate = certificate_identities

    def secure(self, peer: str) -> bool:
        return self._certificate(peer) is not None

    def identify(self, context: Any) -> list[str]:
        """SPIFFE ids of the caller. Raises Unauthenticated."""
        found = self._certificate(context.peer())
        if found is None:
            raise Unauthenticated("not on the secure port")
        if found:
            return list(found)
        metadata = dict(context.invocation_metadata() or ())
        authorization = str(metadata.get("authorization", ""))
        if not authorization:
            raise Unauthenticated("neither a client certificate nor a bearer token")
        return self.bearer(authorization)

    def bearer(self, authorization: str) -> list[str]:
        """SPIFFE ids of who sends this ``Authorization`` header. Raises Unauthenticated."""
        kind, _, token = authorization.partition(" ")
        if kind.lower() != "bearer" or not token:
            raise Unauthenticated("no bearer token")
        try:
            namespace, account = self._issuer.verify(token.strip())
        except TokenError as e:
            raise Unauthenticated(f"bearer token: {e}") from None
        return [spiffe_id(self._trust_domain, namespace, account)]


def authorize(node: Node, identities: Sequence[str]) -> None:
    """One identity must be of the node's namespace and, if it names one, its service account. Raises Forbidden."""
    account = node.text("SERVICE_ACCOUNT")
    for identity in identities:
        parsed = parse_spiffe_id(identity)
        if parsed is not None and parsed[1] == node.namespace and account in ("", parsed[2]):
            return
    raise Forbidden(f"authorization failed: no identities ({', '.join(identities)}) matched {node.namespace}/{account}")

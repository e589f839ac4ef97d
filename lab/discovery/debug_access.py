"""Who may see debug pages: everything for the machine itself and the root namespace, little for anybody else.

Source: istio/istio: pilot/pkg/xds/debug.go (allowAuthenticatedOrLocalhost, AuthorizeDebugRequest), pilot/pkg/xds/debuggen.go
(activeNamespaceDebuggers); with ENABLE_DEBUG_ENDPOINT_AUTH, the default.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from lab.discovery.auth import Authenticator, Forbidden
from lab.discovery.ca import parse_spiffe_id

FOR_EVERYBODY = frozenset(("config_dump", "ndsz", "edsz"))
"""Pages that others than the root namespace may see, of proxies of their own namespace."""


def visible(page: str, namespace: str, root_namespace: str, identities: Sequence[str]) -> str:
    """The namespace whose proxies somebody of ``namespace`` may see on a page, empty for all. Raises Forbidden."""
    if namespace == root_namespace:
        return ""
    if not namespace or page not in FOR_EVERYBODY:
        who = next(iter(identities), "")
        raise Forbidden(f'the debug info is not available for current identity: "{who}"')
    return namespace


def over_http(
    authenticator: Authenticator, root_namespace: str, page: str, *, peer: str, listen: str, authorization: str
) -> str:
    """As `visible`, for a request from the address ``peer`` to ``listen`` with that ``Authorization`` header.

    Who asks from a loopback address sees all without a token, and so does who asks from the very address that is asked:
    nobody else can have that one, and the lab's control plane has no port on 127.0.0.1, as the node has several addresses.

    Raises:
        Unauthenticated: no valid token.
        Forbidden: a token of a namespace that may not see that page.
    """
    address = ipaddress.ip_address(peer.partition("%")[0])
    if address.is_loopback or address == ipaddress.ip_address(listen):
        return ""
    identities = authenticator.bearer(authorization)
    found = next((parsed for parsed in map(parse_spiffe_id, identities) if parsed is not None), None)
    return visible(page, found[1] if found else "", root_namespace, identities)

"""Who may see debug pages over HTTP."""

from __future__ import annotations

import pytest

from lab.discovery.auth import Authenticator, Forbidden, Unauthenticated
from lab.discovery.debug_access import over_http
from lab.discovery.tokens import TokenIssuer

ISSUER = TokenIssuer()
AUTHENTICATOR = Authenticator("td.example", ISSUER, lambda _: None)


def seen(
    page: str, token: str = "", peer: str = "10.244.1.2", listen: str = "10.96.0.11", root: str = "istio-root"
) -> str:
    authorization = f"Bearer {token}" if token else ""
    return over_http(AUTHENTICATOR, root, page, peer=peer, listen=listen, authorization=authorization)


@pytest.mark.parametrize(
    ("peer", "listen"),
    [
        ("127.0.0.1", "10.96.0.11"),
        ("127.9.9.9", "127.0.0.5"),
        ("::1", "fd00::b"),
        ("10.96.0.11", "10.96.0.11"),
        ("fd00::b", "FD00::B"),
    ],
)
def test_the_machine_itself_sees_all(peer: str, listen: str) -> None:
    assert seen("configz", peer=peer, listen=listen) == ""


@pytest.mark.parametrize("page", ["configz", "ndsz"])
@pytest.mark.parametrize(
    "token",
    [
        "",
        "nonsense",
        TokenIssuer().issue("istio-root", "x"),
        ISSUER.issue("istio-root", "x", seconds=-1),
        ISSUER.issue("istio-root", "x", audience="other"),
    ],
    ids=["none", "no JWT", "of another key", "expired", "of another audience"],
)
def test_others_need_a_token_that_holds(page: str, token: str) -> None:
    with pytest.raises(Unauthenticated):
        seen(page, token)


def test_the_root_namespace_sees_all() -> None:
    assert seen("configz", ISSUER.issue("istio-root", "x")) == ""
    assert seen("ndsz", ISSUER.issue("istio-root", "x")) == ""


def test_others_see_some_pages_of_their_own_namespace() -> None:
    token = ISSUER.issue("shop", "x")
    for page in ("config_dump", "ndsz", "edsz"):
        assert seen(page, token) == "shop"
    for page in ("configz", "syncz", "registryz", "list", "sidecarz", "clusterz"):
        with pytest.raises(Forbidden):
            seen(page, token)

"""Where an answer sends its client on to. Source: Go: net/http client.go (redirectBehavior, Client.do)."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from urllib.parse import SplitResult, urljoin, urlsplit

from agent.http import Response
from agent.http_client import HTTPError, Target

MAX_REDIRECTS = 10
_FOLLOWED = frozenset((301, 302, 303, 307, 308))


def location(answer: Response, target: Target, path: str) -> SplitResult | None:
    """The whole URL that `answer` names; None if there is nothing to follow.

    Raises:
        HTTPError: it is no URL.
    """
    named = answer.header("location")
    if answer.status not in _FOLLOWED or not named:
        return None
    scheme = "http" if target.tls is None else "https"
    try:
        url = urlsplit(urljoin(f"{scheme}://{target.authority}{path}", named))
        _ = url.port
    except ValueError as error:
        raise HTTPError(f'failed to parse Location header "{named}": {error}') from None
    return url


def is_absolute(answer: Response) -> bool:
    """True if the Location has a host of its own, which then is the next request's ``Host``."""
    return bool(urlsplit(answer.header("location")).netloc)


def followed(url: SplitResult, source: str, tls: Callable[[], ssl.SSLContext]) -> tuple[Target, str]:
    """The target, and the path with its query, of a URL.

    Raises:
        HTTPError: its scheme is neither http nor https.
    """
    if url.scheme not in ("http", "https"):
        raise HTTPError(f'unsupported protocol scheme "{url.scheme}"')
    https = url.scheme == "https"
    target = Target(url.hostname or "", url.port or (443 if https else 80), source, tls() if https else None)
    return target, (url.path or "/") + (f"?{url.query}" if url.query else "")

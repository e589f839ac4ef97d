"""Envoy's admin interface, and the agent's one HTTP client."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import aiohttp


class HTTPClient:
    """A lazily made aiohttp session that never goes through a proxy of the environment."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            import aiohttp

            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(force_close=True, ttl_dns_cache=0), auto_decompress=True, trust_env=False
            )
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


class AdminError(Exception):
    """Envoy's admin interface did not answer, or not with success."""


class AdminClient:
    """Requests to ``http://localhost:<proxyAdminPort>``."""

    def __init__(self, client: HTTPClient, localhost: str, port: int) -> None:
        self._client = client
        self._base = f"http://[{localhost}]:{port}" if ":" in localhost else f"http://{localhost}:{port}"

    async def request(self, method: str, path: str, timeout: float) -> str:
        """The body of a successful answer.

        Args:
            method: GET or POST.
            path: with its query.
            timeout: seconds for the whole exchange.

        Raises:
            AdminError: no answer in time, or a status other than 200.
        """
        import aiohttp
        from yarl import URL

        url = URL(self._base + path, encoded=True)
        try:
            limit = aiohttp.ClientTimeout(total=timeout)
            async with self._client.session.request(method, url, timeout=limit) as response:
                text = await response.text()
                if response.status != 200:
                    raise AdminError(f"{method} {path}: status {response.status}")
                return text
        except asyncio.TimeoutError:
            raise AdminError(f"{method} {path}: no answer within {timeout:g}s") from None
        except aiohttp.ClientError as error:
            raise AdminError(f"{method} {path}: {error}") from None


def parse_stats(text: str) -> dict[str, int]:
    """Lines ``name: value`` of Envoy's /stats; other lines are skipped."""
    values: dict[str, int] = {}
    for line in text.splitlines():
        name, separator, value = line.partition(": ")
        if separator and value.strip().lstrip("-").isdigit():
            values[name] = int(value)
    return values

"""Envoy's admin interface."""

from __future__ import annotations

from agent.http_client import HTTPError, Target, fetch


class AdminError(Exception):
    """Envoy's admin interface did not answer, or not with success."""


class AdminClient:
    """Requests to ``http://<localhost>:<proxyAdminPort>``."""

    def __init__(self, localhost: str, port: int) -> None:
        self._target = Target(localhost, port)

    async def request(self, method: str, path: str, timeout: float) -> str:
        """The body of a successful answer.

        Args:
            method: GET or POST.
            path: with its query, encoded.
            timeout: seconds for the whole exchange.

        Raises:
            AdminError: no answer in time, or a status other than 200.
        """
        try:
            response = await fetch(self._target, method, path, timeout=timeout)
        except HTTPError as error:
            raise AdminError(f"{method} {path}: {error}") from None
        if response.status != 200:
            raise AdminError(f"{method} {path}: status {response.status}")
        return response.body.decode("utf-8", "replace")


def parse_stats(text: str) -> dict[str, int]:
    """Lines ``name: value`` of Envoy's /stats; other lines are skipped."""
    values: dict[str, int] = {}
    for line in text.splitlines():
        name, separator, value = line.partition(": ")
        if separator and value.strip().lstrip("-").isdigit():
            values[name] = int(value)
    return values

"""The control socket: JSON lines over a Unix socket, one answer per question.

status                              what every proxy was sent, acknowledged and refused
reload                              reads the manifests again; what changed is pushed
wait {timeout, nodes}               returns when every proxy has answered everything (and ``nodes`` are connected)
token {namespace, account, seconds} a service account token, as the Kubernetes API would issue it
root                                the root certificate of the mesh, PEM
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from lab.discovery.ads import DiscoveryServer
from lab.discovery.ca import CertificateAuthority
from lab.discovery.tokens import LIFETIME, TokenIssuer
from lab.errors import InputError
from lab.manifests import model


class Control:
    """JSON lines over a Unix socket: status, reload, wait."""

    def __init__(
        self,
        server: DiscoveryServer,
        load: Callable[[], model.Mesh],
        issuer: TokenIssuer,
        authority: CertificateAuthority,
    ) -> None:
        self.server, self.load, self.issuer, self.authority = server, load, issuer, authority

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                try:
                    request = json.loads(line)
                    answer = await self.answer(request)
                except (ValueError, KeyError, TypeError) as e:
                    answer = {"error": f"bad request: {e}"}
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        op = request["op"]
        if op == "status":
            return self.server.status()
        if op == "reload":
            try:
                mesh = await asyncio.to_thread(self.load)
            except InputError as e:
                return {"error": str(e)}
            self.server.update(mesh)
            return {"ok": True}
        if op == "wait":
            nodes = set(request.get("nodes") or ())
            settled = await self.server.settled(float(request.get("timeout", 10.0)), nodes)
            return {"settled": settled, **self.server.status()}
        if op == "token":
            seconds = int(request.get("seconds") or LIFETIME)
            return {"token": self.issuer.issue(str(request["namespace"]), str(request["account"]), seconds=seconds)}
        if op == "root":
            return {"root": self.authority.root_pem}
        return {"error": f"unknown op {op!r}"}

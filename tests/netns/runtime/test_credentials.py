"""What the lab mounts into a pod for its proxy, as discovery issues it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from runtime_lab import Lab

from lab.discovery.ads import DiscoveryServer
from lab.discovery.ca import CertificateAuthority
from lab.discovery.control import Control
from lab.discovery.tokens import TokenIssuer
from lab.errors import LabError
from lab.fabric import paths
from lab.manifests.load import load_text
from lab.manifests.model import Pod
from lab.runtime import files
from lab.supervisor.credentials import Credentials

pytestmark = pytest.mark.root

Run = Callable[[Coroutine[Any, Any, None]], None]

MESH = load_text("""
apiVersion: v1
kind: Namespace
metadata: {name: shop, labels: {istio-injection: enabled}}
---
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: shop}
spec: {serviceAccountName: till, containers: [{name: app}]}
""")
POD = MESH.pods[0]


class Issuing(Control):
    """Discovery's control socket, which tells when a token was asked for."""

    def __init__(self) -> None:
        super().__init__(DiscoveryServer(MESH), lambda: MESH, TokenIssuer(), CertificateAuthority())
        self.issued: asyncio.Queue[str] = asyncio.Queue()

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        answer = await super().answer(request)
        if "token" in answer:
            self.issued.put_nowait(str(answer["token"]))
        return answer


@dataclass(frozen=True)
class Mounted:
    token: Path
    root: Path


def mounts(lab: Lab) -> Mounted:
    directory = paths.pod_dir(lab.name, POD.name)
    found = Mounted(directory / files.TOKEN, directory / files.ROOT_CERT)
    found.token.parent.mkdir(parents=True)
    found.root.parent.mkdir(parents=True)
    return found


def test_a_pod_gets_a_token_of_its_account_and_the_root_certificate(lab: Lab, run: Run) -> None:
    mounted = mounts(lab)

    async def scenario() -> None:
        control = Issuing()
        async with await asyncio.start_unix_server(control.serve, str(files.discovery_socket(lab.name))):
            await Credentials(lab.name).mount(POD)
        assert control.issuer.verify(mounted.token.read_text()) == ("shop", "till")
        assert mounted.root.read_text() == control.authority.root_pem
        told = mounted.token.stat()
        assert (told.st_uid, told.st_gid, told.st_mode & 0o777) == (1337, 1337, 0o640)
        assert mounted.root.stat().st_mode & 0o777 == 0o644

    run(scenario())


def test_tokens_are_replaced_before_they_end(lab: Lab, run: Run) -> None:
    mounted = mounts(lab)

    def never(pod: Pod, error: LabError) -> None:
        raise AssertionError(f"{pod.name}: {error}")

    async def scenario() -> None:
        control = Issuing()
        async with await asyncio.start_unix_server(control.serve, str(files.discovery_socket(lab.name))):
            credentials = Credentials(lab.name, lifetime=1)
            await credentials.mount(POD)
            first = await control.issued.get()
            keeping = asyncio.create_task(credentials.keep(lambda: [POD], never))
            second = await control.issued.get()
            await control.issued.get()  # the second is in place before the third is asked for
            keeping.cancel()
        assert mounted.token.read_text() == second
        assert first != second
        assert not list(mounted.token.parent.glob(".*")), "something was left beside the token"

    run(scenario())


def test_a_discovery_that_is_gone_is_told_and_asked_again(lab: Lab, run: Run) -> None:
    mounts(lab)

    async def scenario() -> None:
        failures: asyncio.Queue[str] = asyncio.Queue()
        credentials = Credentials(lab.name, lifetime=1)
        keeping = asyncio.create_task(credentials.keep(lambda: [POD], lambda pod, _: failures.put_nowait(pod.name)))
        assert [await failures.get(), await failures.get()] == ["web.shop", "web.shop"]
        keeping.cancel()

    run(scenario())

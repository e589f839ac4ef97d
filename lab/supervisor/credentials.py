"""What a kubelet mounts into a pod for its proxy: a service account token, and the mesh's root certificate.

Discovery issues both, as there is no Kubernetes API. Volumes ``istio-token`` and ``istiod-ca-cert`` of istio/istio:
manifests/charts/istio-control/istio-discovery/files/injection-template.yaml.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from lab.errors import LabError
from lab.fabric import paths
from lab.manifests.model import Pod
from lab.runtime import files
from lab.runtime.identity import PROXY_UID
from lab.runtime.lines import ask

LIFETIME = 43200
"""Seconds; expirationSeconds of the injected volume."""

_RENEWED = 0.8
"""Part of its lifetime after which a token is replaced (kubernetes/kubernetes: pkg/kubelet/token/token_manager.go)."""


class Credentials:
    """Those of one lab's pods."""

    def __init__(self, lab: str, lifetime: int = LIFETIME) -> None:
        """``lifetime`` of tokens in seconds."""
        self._lab, self._lifetime = lab, lifetime

    async def mount(self, pod: Pod) -> None:
        """Writes both for a pod, or replaces them. Discovery must be ready.

        Raises:
            LabError: discovery does not give them.
        """
        directory = paths.pod_dir(self._lab, pod.name)
        account = {"namespace": pod.meta.namespace, "account": pod.service_account}
        token = await self._asked("token", {"op": "token", **account, "seconds": self._lifetime})
        root = await self._asked("root", {"op": "root"})
        _replace(directory / files.TOKEN, token, 0o640)
        _replace(directory / files.ROOT_CERT, root, 0o644)

    async def keep(self, pods: Callable[[], Iterable[Pod]], failed: Callable[[Pod, LabError], None]) -> None:
        """Replaces in time, for ever, those of the pods that there are then. What fails is told, and tried again the next time."""
        while True:
            await asyncio.sleep(self._lifetime * _RENEWED)
            for pod in list(pods()):
                try:
                    await self.mount(pod)
                except LabError as e:
                    failed(pod, e)

    async def _asked(self, key: str, question: dict[str, object]) -> str:
        answer = await ask(files.discovery_socket(self._lab), question)
        if key not in answer:
            raise LabError(f"discovery gives no {key}", why=str(answer.get("error")))
        return str(answer[key])


def _replace(path: Path, text: str, mode: int) -> None:
    """At once, so that nobody reads half of it; for the proxy and its group."""
    new = path.with_name(f".{path.name}")
    with suppress(FileNotFoundError):
        new.unlink()
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "w") as file:
        os.fchown(descriptor, PROXY_UID, PROXY_UID)
        os.fchmod(descriptor, mode)
        file.write(text)
    new.rename(path)

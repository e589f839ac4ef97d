"""Schema of retries, as VirtualServices and MeshConfig have them (istio/api: networking/v1alpha3/virtual_service.proto)."""

from __future__ import annotations

from lab.manifests.schema.base import Duration, PositiveDuration, Spec


class HTTPRetry(Spec):
    attempts: int = 0
    per_try_timeout: Duration | None = None
    retry_on: str = ""
    retry_remote_localities: bool | None = None
    retry_ignore_previous_hosts: bool | None = None
    backoff: PositiveDuration | None = None

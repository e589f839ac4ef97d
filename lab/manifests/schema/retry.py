"""Schema of retries, as VirtualServices and MeshConfig have them.

Source: istio/api: networking/v1alpha3/virtual_service.proto;
rules of istio/istio: pkg/config/validation/agent/validation.go (ValidateHTTPRetry).
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Self

from pydantic import Field, model_validator

from lab.manifests.problems import did_you_mean
from lab.manifests.schema.base import Milliseconds, Spec, words

_CONDITIONS = words(
    "5xx gateway-error reset reset-before-request connect-failure retriable-4xx refused-stream retriable-status-codes"
    " retriable-headers envoy-ratelimited http3-post-connect-failure cancelled deadline-exceeded internal"
    " resource-exhausted unavailable"
)


class HTTPRetry(Spec):
    attempts: Annotated[int, Field(ge=0)] = 0
    per_try_timeout: Milliseconds | None = None
    retry_on: str = ""
    retry_remote_localities: bool | None = None
    retry_ignore_previous_hosts: bool | None = None
    backoff: Milliseconds | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        told = (self.per_try_timeout, self.retry_on or None, self.retry_remote_localities)
        if not self.attempts and any(value is not None for value in told):
            raise ValueError("attempts 0 switches retries off: nothing else may be said about them")
        for word in self.retry_on.split(",") if self.retry_on else ():
            if word not in _CONDITIONS and word not in {str(status.value) for status in HTTPStatus}:
                raise ValueError(f'retryOn does not know "{word}". {did_you_mean(word, _CONDITIONS)}'.rstrip())
        return self

"""Schemas of what a kubelet does with a container: probes, and hooks of its life. Source: kubernetes/api: core/v1/types.go."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from lab.manifests.schema.base import Int32, Port, Spec, TargetPort, words


class HTTPHeader(Spec):
    name: str
    value: str = ""


class HTTPGetAction(Spec):
    port: TargetPort
    path: str = "/"
    host: str = ""
    scheme: Literal["HTTP", "HTTPS"] = "HTTP"
    http_headers: list[HTTPHeader] = Field(default_factory=list)


class TCPSocketAction(Spec):
    port: TargetPort
    host: str = ""


class GRPCAction(Spec):
    port: Port
    service: str = ""


class ExecAction(Spec):
    command: list[str] = Field(default_factory=list)


class SleepAction(Spec):
    seconds: Annotated[int, Field(ge=0, le=2**63 - 1)]


class Handler(Spec):
    """What the kubelet asks: exactly one of the subclass's ``KINDS``."""

    KINDS: ClassVar[tuple[str, ...]]

    exec: ExecAction | None = None
    http_get: HTTPGetAction | None = None
    tcp_socket: TCPSocketAction | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if sum(getattr(self, kind) is not None for kind in self.KINDS) != 1:
            names = [type(self).model_fields[kind].alias or kind for kind in self.KINDS]
            raise ValueError(f"exactly one of {', '.join(names[:-1])} and {names[-1]} is needed")
        return self


class Probe(Handler):
    BOOKKEEPING = words(
        "initialDelaySeconds periodSeconds successThreshold failureThreshold terminationGracePeriodSeconds"
    )
    KINDS = ("exec", "http_get", "tcp_socket", "grpc")

    grpc: GRPCAction | None = None
    timeout_seconds: Int32 = 1


class LifecycleHandler(Handler):
    KINDS = ("exec", "http_get", "tcp_socket", "sleep")

    sleep: SleepAction | None = None


class Lifecycle(Spec):
    UNUSED = words("stopSignal")

    post_start: LifecycleHandler | None = None
    pre_stop: LifecycleHandler | None = None

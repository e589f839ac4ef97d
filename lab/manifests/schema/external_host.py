"""Schema of our own kind ExternalHost: a machine outside the mesh."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from lab.manifests.schema.base import Host, IPAddress, Port, Spec
from lab.manifests.schema.metadata import Object


class ExternalPort(Spec):
    port: Port
    protocol: Literal["http", "https", "tls", "tcp", "udp", "grpc"]
    name: str = ""


class ExternalHostSpec(Spec):
    """A machine outside the mesh."""

    hosts: Annotated[list[Host], Field(min_length=1, description="names that cluster DNS resolves to this machine")]
    addresses: list[IPAddress] = Field(default_factory=list, description="its addresses; chosen by the lab if empty")
    ports: Annotated[list[ExternalPort], Field(min_length=1, description="where its echo app listens")]

    @model_validator(mode="after")
    def _whole(self) -> Self:
        seen = set()
        for port in self.ports:
            key = (port.port, port.protocol == "udp")
            if key in seen:
                raise ValueError(f"port {port.port} is used twice")
            seen.add(key)
        return self


class ExternalHost(Object):
    spec: ExternalHostSpec

"""Schema of PeerAuthentication.

Source: istio/api: security/v1beta1/peer_authentication.proto; rules of istio/istio: pkg/config/validation/validation.go.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from lab.manifests.schema.base import Spec
from lab.manifests.schema.config import STATUS, PodSelector
from lab.manifests.schema.metadata import Object


class MutualTLS(Spec):
    mode: Literal["UNSET", "DISABLE", "PERMISSIVE", "STRICT"] = "UNSET"


class PeerAuthenticationSpec(Spec):
    selector: PodSelector | None = None
    mtls: MutualTLS = Field(default_factory=MutualTLS)
    port_level_mtls: dict[str, MutualTLS] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        for port in self.port_level_mtls:
            if not port.isdigit() or not 0 < int(port) < 65536:
                raise ValueError(f'"{port}" in portLevelMtls is no port number')
        if self.port_level_mtls and not (self.selector and self.selector.match_labels):
            raise ValueError("portLevelMtls needs a selector")
        return self


class PeerAuthentication(Object):
    BOOKKEEPING = STATUS

    spec: PeerAuthenticationSpec = Field(default_factory=PeerAuthenticationSpec)

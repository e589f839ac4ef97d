"""Schema of locality load balancing, as DestinationRules and MeshConfig have it.

Source: istio/api: networking/v1alpha3/destination_rule.proto.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from lab.manifests.schema.base import Spec

Percent = Annotated[int, Field(ge=0, le=100)]


class Distribute(Spec):
    from_: str = Field(alias="from")
    to: dict[str, Percent]


class Failover(Spec):
    from_: str = Field(alias="from")
    to: str


class LocalityLoadBalancerSetting(Spec):
    distribute: list[Distribute] = Field(default_factory=list)
    failover: list[Failover] = Field(default_factory=list)
    failover_priority: list[str] = Field(default_factory=list)
    enabled: bool | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.distribute and (self.failover or self.failover_priority):
            raise ValueError("distribute excludes failover and failoverPriority")
        topology = [f"topology.kubernetes.io/{part}" for part in ("region", "zone")] + ["topology.istio.io/subzone"]
        if self.failover and set(topology) & set(self.failover_priority):
            raise ValueError("failover excludes topology labels in failoverPriority")
        for pair in self.failover:
            if pair.from_ == pair.to or any(sign in pair.from_ + pair.to for sign in "/*"):
                raise ValueError("failover is from one region to another, without zones and wildcards")
        for entry in self.distribute:
            if sum(entry.to.values()) != 100:
                raise ValueError(f"the weights of distribute from {entry.from_} must add up to 100")
        return self

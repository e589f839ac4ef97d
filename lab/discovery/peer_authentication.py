"""PeerAuthentication: which mTLS mode a workload's port has.

Sources: istio/istio: pilot/pkg/security/authn/policy_applier.go, pilot/pkg/model/authentication.go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from lab.manifests import model


@dataclass(frozen=True, slots=True)
class Effective:
    """The mode of a workload and of those of its target ports that have their own."""

    mode: model.MTLSMode = "PERMISSIVE"
    ports: Mapping[int, model.MTLSMode] = field(default_factory=dict)

    def for_port(self, port: int) -> model.MTLSMode:
        return self.ports.get(port, self.mode)


class PeerAuthentications:
    """Index of the policies that were read, oldest first."""

    def __init__(self, policies: Iterable[model.PeerAuthentication], root: str) -> None:
        self._root = root
        self._by_namespace: dict[str, list[model.PeerAuthentication]] = {}
        wide: dict[str, model.PeerAuthentication] = {}
        for policy in sorted(policies, key=lambda p: (p.meta.created, p.meta.name, p.meta.namespace, p.meta.order)):
            namespace = policy.meta.namespace
            if policy.selector:
                # a selector in the root namespace has no effect at all
                if namespace != root:
                    self._by_namespace.setdefault(namespace, []).append(policy)
            else:
                wide.setdefault(namespace, policy)
        self._wide = wide
        mesh = wide.get(root)
        self._mesh: model.MTLSMode = mesh.mode if mesh and mesh.mode != "UNSET" else "PERMISSIVE"

    def namespace_mode(self, namespace: str) -> model.MTLSMode:
        """The mode of a namespace without its workload policies (what auto-mTLS of clients looks at)."""
        policy = self._wide.get(namespace)
        if policy is None or policy.mode == "UNSET" or namespace == self._root:
            return self._mesh
        return policy.mode

    def effective(self, namespace: str, labels: Mapping[str, str]) -> Effective:
        """The modes of one workload: the narrowest policy that says something wins, UNSET inherits."""
        mode = self.namespace_mode(namespace)
        for policy in self._by_namespace.get(namespace, ()):
            if all(labels.get(k) == v for k, v in (policy.selector or {}).items()):
                mode = mode if policy.mode == "UNSET" else policy.mode
                ports = {port: mode if own == "UNSET" else own for port, own in policy.port_modes.items()}
                return Effective(mode, ports)
        return Effective(mode)

"""What a doubt is, and what those who look for doubts share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lab.manifests.model import Level, Mesh, Meta


@dataclass(frozen=True, slots=True)
class Finding:
    """A doubt about one object, and the path of what it is about; ``code`` is what ``istioctl analyze`` calls it."""

    code: str
    kind: str
    meta: Meta
    path: tuple[str | int, ...]
    message: str
    level: Level = "warning"


def maps(value: object) -> list[Mapping[str, object]]:
    """The mappings in a list as written; nothing else is one."""
    return [entry for entry in value if isinstance(entry, Mapping)] if isinstance(value, list) else []


def mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def strings(value: object) -> list[str]:
    return [str(entry) for entry in value] if isinstance(value, list) else []


def full_name(host: str, namespace: str, suffix: str) -> str:
    """A host of a rule in full: a name without a dot is a service of the rule's namespace."""
    return host if "." in host or host.startswith("*") else f"{host}.{namespace}.svc.{suffix}"


def selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether a selector of labels alone selects what has ``labels``."""
    return all(labels.get(key) == value for key, value in selector.items())


def meet(mesh: Mesh, one: Meta, one_to: Sequence[str], other: Meta, other_to: Sequence[str]) -> bool:
    """Whether some namespace sees both of two exported objects."""
    reach = []
    for meta, values in ((one, one_to), (other, other_to)):
        own = {meta.namespace if value == "." else value for value in values or ("*",)}
        reach.append({namespace.meta.name for namespace in mesh.namespaces} if "*" in own else own)
    return bool(reach[0] & reach[1])

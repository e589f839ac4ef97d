"""Host names and wildcards (istio/istio: pkg/config/host/name.go)."""

from __future__ import annotations

from collections.abc import Iterable


def is_wildcard(name: str) -> bool:
    return name.startswith("*")


def subset_of(name: str, other: str) -> bool:
    """Whether every host that ``name`` stands for is one that ``other`` stands for."""
    if not is_wildcard(other):
        return name == other
    if is_wildcard(name):
        return len(name) >= len(other) and name[1:].endswith(other[1:])
    return name.endswith(other[1:])


def matches(a: str, b: str) -> bool:
    """Whether one of the two covers the other."""
    return subset_of(a, b) or subset_of(b, a)


def most_specific(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate that covers ``name`` most narrowly: the exact one, else the longest wildcard."""
    best: str | None = None
    for candidate in candidates:
        if candidate == name:
            return candidate
        if is_wildcard(candidate) and subset_of(name, candidate) and (best is None or len(candidate) > len(best)):
            best = candidate
    return best


def resolve_short(name: str, namespace: str, suffix: str) -> str:
    """A name without a dot is a Service of ``namespace``; ``*`` and everything else stays."""
    if "." in name or is_wildcard(name):
        return name
    return f"{name}.{namespace}.svc.{suffix}"


def alternatives(host: str, proxy_domain: str) -> list[str]:
    """Other names by which a client in ``proxy_domain`` (``NS.svc.SUFFIX``) may call a host.

    The absolute form with a trailing dot, and of a Service shorter ones; the bare name only from its own namespace
    (istio/istio: pilot/pkg/networking/core/httproute.go: GenerateAltVirtualHosts).
    """
    absolute = [f"{host}."]
    namespace, _, rest = proxy_domain.partition(".")
    if not rest or not host.endswith("." + rest):
        return absolute
    unique = host.removesuffix("." + rest)  # name.namespace
    zone = rest.split(".")[0]  # svc
    name, _, owner = unique.partition(".")
    if owner == namespace:
        return [*absolute, name, f"{unique}.{zone}", unique]
    return [*absolute, unique, f"{unique}.{zone}"]

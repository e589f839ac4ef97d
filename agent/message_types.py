"""Finds protobuf descriptors by name, and loads the modules of Envoy's API that they are in when one is first met.

All of that API would take more memory than the agent has, and who asks wants a handful of messages.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from google.protobuf import descriptor_pool

_ROOTS = ("envoy", "udpa", "xds", "validate")


class MessageTypes:
    """The part of a descriptor pool that json_format and gRPC's reflection ask; lookups raise KeyError."""

    def __init__(self) -> None:
        self._pool = descriptor_pool.Default()

    def FindMessageTypeByName(self, name: str) -> Any:
        try:
            return self._pool.FindMessageTypeByName(name)
        except KeyError:
            _load_package_of(name)
        return self._pool.FindMessageTypeByName(name)

    def FindFileContainingSymbol(self, name: str) -> Any:
        try:
            return self._pool.FindFileContainingSymbol(name)
        except KeyError:
            _load_package_of(name)
        return self._pool.FindFileContainingSymbol(name)

    def FindFileByName(self, name: str) -> Any:
        try:
            return self._pool.FindFileByName(name)
        except KeyError:
            _import(name.removesuffix(".proto").replace("/", ".") + "_pb2")
        return self._pool.FindFileByName(name)

    def FindExtensionByNumber(self, message: Any, number: int) -> Any:
        return self._pool.FindExtensionByNumber(message, number)

    def FindAllExtensions(self, message: Any) -> Any:
        return self._pool.FindAllExtensions(message)


def _load_package_of(name: str) -> None:
    """Imports the modules of the innermost package around ``envoy.config.cluster.v3.Cluster.LbPolicy`` and the like."""
    while name := name.rpartition(".")[0]:
        package = _import(name)
        if package is None:
            continue
        for module in pkgutil.iter_modules(getattr(package, "__path__", [])):
            if module.name.endswith("_pb2"):
                importlib.import_module(f"{name}.{module.name}")
        return


def _import(name: str) -> Any:
    """A module of Envoy's API; None for anything else."""
    parts = name.split(".")
    if parts[0] not in _ROOTS or not all(part.isidentifier() for part in parts):
        return None
    try:
        return importlib.import_module(name)
    except ImportError:
        return None

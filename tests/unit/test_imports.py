"""Who may import whom (docs/architecture.md): every import of every module, also a lazy one or one for types alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("agent", "init", "lab")

_ERRORS = ("lab.errors", "lab.notify")
_MANIFESTS = (*_ERRORS, "lab.manifests")
_ALONE = ("agent", "init")  # each runs alone in its container
_RUNTIME = (*_MANIFESTS, *_ALONE, "lab.fabric", "lab.runtime")

RULES: dict[str, tuple[str, ...]] = {
    "agent": ("agent",),
    "init": ("init",),
    "lab": (),  # the package itself holds nothing
    "lab.errors": (),
    "lab.notify": (),
    "lab.output": _ERRORS,
    "lab.verdict": (),
    "lab.manifests": _MANIFESTS,
    "lab.apps": (*_ERRORS, "lab.apps"),
    "lab.graph": (*_MANIFESTS, "lab.verdict", "lab.graph"),
    "lab.discovery": (*_MANIFESTS, *_ALONE, "lab.discovery"),
    "lab.fabric": (*_MANIFESTS, *_ALONE, "lab.fabric"),
    "lab.explain": (*_MANIFESTS, *_ALONE, "lab.verdict", "lab.explain"),
    "lab.runtime": _RUNTIME,
    "lab.trace": (*_RUNTIME, "lab.verdict", "lab.trace"),
    "lab.capture": ("lab.errors", "lab.trace", "lab.capture"),
    "lab.probe": (*_RUNTIME, "lab.verdict", "lab.trace", "lab.capture", "lab.probe"),
    "lab.containers": PACKAGES,
    "lab.proxyconfig": PACKAGES,
    "lab.show": PACKAGES,
    "lab.supervisor": PACKAGES,
    "lab.lifecycle": PACKAGES,
    "lab.changing": PACKAGES,
    "lab.verify": PACKAGES,
    "lab.explaining": PACKAGES,
    "lab.dumpworld": PACKAGES,
    "lab.tracing": PACKAGES,
    "lab.capturing": PACKAGES,
    "lab.whatif": PACKAGES,
    "lab.asking": PACKAGES,
    "lab.proofs": PACKAGES,
    "lab.matrix": PACKAGES,
    "lab.memory": PACKAGES,
    "lab.cli": PACKAGES,
    "lab.__main__": PACKAGES,
}
"""Room -> the rooms that its modules may import. A module's room is the longest name here that begins its own."""


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_name(path): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
    if "__pycache__" not in path.parts
}


def within(module: str, room: str) -> bool:
    return module == room or module.startswith(f"{room}.")


def room_of(module: str) -> str:
    """The room of a module; ``lab`` is the room of the package's own file alone."""
    rooms = [room for room in RULES if within(module, room) and (room != "lab" or module == "lab")]
    return max(rooms, key=len, default="")


def imports(module: str, text: str, modules: Collection[str], is_package: bool = False) -> Iterator[tuple[int, str]]:
    """Line and full name of each of our modules that a module's text imports, anywhere in it."""
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = module.split(".")
                up = here[: len(here) - node.level + is_package]
                base = ".".join([*up, *([base] if base else [])])
            # `from lab import errors` imports a module, `from lab.errors import InputError` a name in one.
            names = [f"{base}.{a.name}" if f"{base}.{a.name}" in modules else base for a in node.names]
        elif isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            first = node.args[0]
            if called in ("import_module", "__import__") and isinstance(first, ast.Constant):
                names = [str(first.value)]
        for name in names:
            if name.partition(".")[0] in PACKAGES:
                yield node.lineno, name


def violations(module: str, text: str, modules: Collection[str], is_package: bool = False) -> list[str]:
    """What a module may not import: ``MODULE:LINE imports NAME``."""
    allowed = RULES[room_of(module)]
    return [
        f"{module}:{line} imports {name}"
        for line, name in imports(module, text, modules, is_package)
        if name != "lab" and not any(within(name, room) for room in allowed)
    ]


def test_every_module_has_a_room() -> None:
    assert [m for m in MODULES if not room_of(m)] == []


def test_every_room_exists() -> None:
    assert [room for room in RULES if room not in MODULES] == []


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_only_what_its_room_may(module: str) -> None:
    path = MODULES[module]
    assert violations(module, path.read_text(), MODULES, path.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("module", "text", "found"),
    [
        ("init.rules", "import lab.errors", "init.rules:1 imports lab.errors"),
        ("init.rules", "from agent import cli", "init.rules:1 imports agent"),
        ("agent.envoy", "from init.rules import build", "agent.envoy:1 imports init.rules"),
        ("lab.manifests.load", "from lab.fabric import plan", "lab.manifests.load:1 imports lab.fabric"),
        ("lab.apps.echo", "\nfrom lab import manifests", "lab.apps.echo:2 imports lab.manifests"),
        ("lab.apps.echo", "import init.rules as r", "lab.apps.echo:1 imports init.rules"),
        ("lab.discovery.server", "from lab.fabric.plan import plan", "lab.discovery.server:1 imports lab.fabric.plan"),
        ("lab.runtime.pod", "def f():\n    import lab.trace.rules", "lab.runtime.pod:2 imports lab.trace.rules"),
        (
            "lab.fabric.plan",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from lab.runtime.pod import Pod",
            "lab.fabric.plan:3 imports lab.runtime.pod",
        ),
        (
            "lab.trace.rules",
            "try:\n    from ..probe import driver\nexcept ImportError: ...",
            "lab.trace.rules:2 imports lab.probe",
        ),
        ("lab.errors", "from .manifests import model", "lab.errors:1 imports lab.manifests.model"),
        ("lab.graph", "import importlib\nimportlib.import_module('lab.cli')", "lab.graph:2 imports lab.cli"),
        ("lab.graph", "__import__('agent')", "lab.graph:1 imports agent"),
    ],
)
def test_a_planted_import_is_found(module: str, text: str, found: str) -> None:
    assert violations(module, text, {"lab.manifests", "lab.manifests.model"}) == [found]


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("lab.apps.echo", "from lab import errors, notify\nimport lab\nimport asyncio"),
        ("lab.probe.driver", "from ..trace import rules\nfrom . import judge\nfrom lab.runtime import enter"),
        ("lab.cli", "def f():\n    import lab.probe.runner, agent.cli, init.cli"),
        ("lab.discovery.labels", "import laboratory\nfrom agentlib import x"),
        ("lab.runtime.zygote", "import importlib\nimportlib.import_module(name)"),  # a name that it is given
    ],
)
def test_an_allowed_import_is_not_found(module: str, text: str) -> None:
    assert violations(module, text, {"lab.errors", "lab.notify"}) == []


def test_a_packages_own_file_resolves_relative_imports_from_itself() -> None:
    assert violations("lab.apps", "from . import echo\nfrom .. import cli", {"lab.cli"}, True) == [
        "lab.apps:2 imports lab.cli"
    ]


HEAVY = ("scapy", "docker", "grpc", "pyroute2", "iptc", "h11", "pydantic", "uvloop", "cryptography", "dns")


@pytest.mark.parametrize("module", ["lab.cli", "lab.fabric.record", "init.cli"])
def test_a_start_is_light(module: str) -> None:
    """``lab --help`` answers at once, and ``lab down`` works where the rest of the installation is broken."""
    code = f"import sys, {module}; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.strip() == "[]"

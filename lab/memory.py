"""What ``lab explain`` remembers of manifests between two runs: the mesh, and what was generated from it.

Reading, checking and generating costs half a second, most of it imports; a question asked twice should not pay for it twice.
A memory is one file in the user's cache directory (XDG_CACHE_HOME). Its name is a digest of every manifest's text, of this
program's own files and of Python's version, so that nothing old is ever used; a memory that others could have written is not read.
``SIDECARLAB_CACHE=off`` turns it off.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from lab.manifests.model import Mesh

T = TypeVar("T")

KEPT = 16
_PACKAGES = ("lab", "init", "agent")


class Memory:
    """What is known of one set of manifest files. `get` makes what is not known yet, `save` keeps all of it."""

    def __init__(self, files: Sequence[str], file: Path | None) -> None:
        self._files = list(files)
        self._file = file
        self._known: dict[str, Any] = _read(file) if file is not None else {}
        self._changed = False

    @classmethod
    def of(cls, files: Sequence[str]) -> Memory:
        """The memory of these manifests; an empty one without a place to keep it."""
        directory = _directory()
        digest = _digest(files) if directory is not None else None
        return cls(files, directory / f"{digest}.pickle" if directory is not None and digest is not None else None)

    def get(self, key: str, make: Callable[[], T]) -> T:
        """What is remembered under ``key``, else what ``make`` gives."""
        if key not in self._known:
            self._known[key] = make()
            self._changed = True
        found: T = self._known[key]
        return found

    def mesh(self) -> Mesh:
        """The mesh of the files.

        Raises:
            InputError: they are no valid manifests.
        """

        def load() -> Mesh:
            from lab.manifests.load import load

            return load(self._files)

        return self.get("mesh", load)

    def save(self) -> None:
        """Keeps what is new. A cache that cannot be written is no error."""
        if self._file is None or not self._changed:
            return
        temporary = self._file.with_suffix(f".{os.getpid()}")
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(temporary, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as out:
                pickle.dump(self._known, out, protocol=pickle.HIGHEST_PROTOCOL)
            os.replace(temporary, self._file)
            _forget_old(self._file.parent)
        except (OSError, pickle.PicklingError):
            temporary.unlink(missing_ok=True)


def _directory() -> Path | None:
    if os.environ.get("SIDECARLAB_CACHE", "").lower() in ("off", "0", "no", "false"):
        return None
    base = os.environ.get("XDG_CACHE_HOME") or (
        os.path.join(os.environ["HOME"], ".cache") if "HOME" in os.environ else ""
    )
    return Path(base) / "sidecarlab" / "explain" if os.path.isabs(base) else None


def _digest(files: Sequence[str]) -> str | None:
    """None where a file cannot be read: the loader then says why."""
    found = hashlib.blake2b(repr(sys.version_info).encode(), digest_size=20)
    for path in _own_files():
        entry = path.stat()
        found.update(f"{path}\0{entry.st_mtime_ns}\0{entry.st_size}\0".encode())
    try:
        for path in _manifests(files):
            found.update(f"{path}\0".encode())
            found.update(path.read_bytes())
    except OSError:
        return None
    return found.hexdigest()


def _own_files() -> Iterator[Path]:
    root = Path(__file__).parents[1]
    for package in _PACKAGES:
        yield from sorted((root / package).rglob("*.py"))


def _manifests(files: Sequence[str]) -> Iterator[Path]:
    """The files that the loader reads of these arguments."""
    for name in files:
        path = Path(name)
        if path.is_dir():
            yield from sorted(p for p in path.iterdir() if p.suffix in (".yaml", ".yml"))
        else:
            yield path


def _read(file: Path) -> dict[str, Any]:
    try:
        with open(file, "rb") as source:
            entry = os.fstat(source.fileno())
            # Unpickling runs what is in the file, so it must be the user's own.
            if entry.st_uid != os.geteuid() or entry.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return {}
            found = pickle.load(source)
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError, IndexError, TypeError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _forget_old(directory: Path) -> None:
    """Keeps the newest `KEPT` memories."""
    held = sorted(directory.glob("*.pickle"), key=lambda p: p.stat().st_mtime, reverse=True)
    for old in held[KEPT:]:
        old.unlink(missing_ok=True)

"""What is remembered of manifests between two runs: the mesh, and what was generated from it.

Reading, checking and generating costs half a second, most of it imports; what is asked twice should not pay for it twice.
A memory is one file in the user's cache directory (XDG_CACHE_HOME). It begins with all that its answers depend on: every
manifest's name and text, this program's own files, Python's version and the state of the directories that it takes packages from.
Nothing of it is used unless that is, byte for byte, what is there now. A memory that others could have written is not read.
``SIDECARLAB_CACHE=off`` turns it off.
"""

from __future__ import annotations

import os
import pickle
import stat
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from lab.errors import InputError
from lab.manifests.files import MAX_BYTES, read_bytes

if TYPE_CHECKING:
    from lab.manifests.model import Mesh

T = TypeVar("T")

KEPT = 32
"""So many sets of manifests are remembered."""

_PACKAGES = ("lab", "init", "agent")
_SUFFIX = ".memory"


class Memory:
    """What is known of one set of manifest files. `get` makes what is not known yet, `save` keeps all of it."""

    def __init__(self, files: Sequence[str], directory: str | None = None) -> None:
        """``directory``: where memories are kept, None for nowhere."""
        self._files = list(files)
        self._depends = _depends(files) if directory is not None else None
        self._file = None
        self._known: dict[str, Any] = {}
        self._kept: dict[str, bytes] = {}  # as pickles: a question needs few of them
        self._changed = False
        if directory is not None and self._depends is not None:
            self._file = os.path.join(directory, f"{zlib.crc32(self._depends):08x}{_SUFFIX}")
            self._kept = _read(self._file, self._depends)

    @classmethod
    def of(cls, files: Sequence[str]) -> Memory:
        """The memory of these manifests; an empty one without a place to keep it."""
        return cls(files, _directory())

    def get(self, key: str, make: Callable[[], T]) -> T:
        """What is remembered under ``key``, else what ``make`` gives."""
        if key not in self._known:
            self._known[key] = self._recall(key, make)
        found: T = self._known[key]
        return found

    def _recall(self, key: str, make: Callable[[], T]) -> T:
        if key in self._kept:
            try:
                known: T = pickle.loads(self._kept[key])
            except Exception:  # unpickling a damaged file may raise anything, and costs time alone
                pass
            else:
                return known
        self._changed = True
        self._kept.pop(key, None)
        return make()

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
        if _depends(self._files) != self._depends:
            return  # changed while they were read: nobody knows which of both this is
        directory = os.path.dirname(self._file)
        temporary = f"{self._file}.{os.getpid()}"
        try:
            for key, value in self._known.items():
                if key not in self._kept:
                    self._kept[key] = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
            os.makedirs(directory, mode=0o700, exist_ok=True)
            with open(temporary, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as out:
                pickle.dump(self._depends, out, pickle.HIGHEST_PROTOCOL)
                pickle.dump(self._kept, out, pickle.HIGHEST_PROTOCOL)
            os.replace(temporary, self._file)
            _forget_old(directory)
        except (OSError, pickle.PicklingError):
            try:
                os.unlink(temporary)
            except OSError:
                pass


def mesh_of(files: Sequence[str]) -> Mesh:
    """The mesh of manifest files, as `lab.manifests.load.load` reads it; remembered.

    Raises:
        InputError: they are no valid manifests.
    """
    memory = Memory.of(files)
    found = memory.mesh()
    memory.save()
    return found


def _directory() -> str | None:
    """Where memories are kept. None if that is another user's: sudo may keep HOME, and root's files would be in the way there."""
    if os.environ.get("SIDECARLAB_CACHE", "").lower() in ("off", "0", "no", "false"):
        return None
    home = os.environ.get("HOME", "")
    base = os.environ.get("XDG_CACHE_HOME") or (os.path.join(home, ".cache") if os.path.isdir(home) else "")
    if not os.path.isabs(base):
        return None
    directory = os.path.join(base, "sidecarlab", "explain")
    there = directory
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    try:
        return directory if os.stat(there).st_uid == os.geteuid() else None
    except OSError:
        return None


def _depends(files: Sequence[str]) -> bytes | None:
    """Everything that a mesh and what is generated of it depend on. None where a file cannot be read: the loader then says why."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    try:
        # The first file's real name is the lab's.
        found = [repr((sys.version, list(files), [os.path.realpath(name) for name in files[:1]])).encode()]
        for package in _PACKAGES:
            found += _states(os.path.join(root, package))
        for directory in sys.path:
            if os.path.basename(directory) in ("site-packages", "dist-packages") and os.path.isdir(directory):
                found.append(_state(directory, os.stat(directory)))
        for path in _manifests(files):
            text = read_bytes(path, MAX_BYTES)
            found.append(f"{path}\0{len(text)}\0".encode() + text)
    except (OSError, ValueError, InputError):  # ValueError: a name with a null byte
        return None
    return b"\n".join(found)


def _states(directory: str) -> Iterator[bytes]:
    """The states of the Python files below a directory."""
    with os.scandir(directory) as entries:
        for entry in sorted(entries, key=lambda e: e.name):
            if entry.name.endswith(".py"):
                yield _state(entry.path, entry.stat())
            elif entry.name != "__pycache__" and entry.is_dir():
                yield from _states(entry.path)


def _state(path: str, entry: os.stat_result) -> bytes:
    return f"{path}\0{entry.st_mtime_ns}\0{entry.st_size}".encode()


def _manifests(files: Sequence[str]) -> Iterator[str]:
    """The files that the loader reads of these arguments."""
    for name in files:
        if os.path.isdir(name):
            inside = sorted(os.path.join(name, n) for n in os.listdir(name) if n.endswith((".yaml", ".yml")))
            yield from filter(os.path.isfile, inside)
        else:
            yield name


def _read(file: str, depends: bytes) -> dict[str, bytes]:
    try:
        # Not to wait for somebody who writes into a FIFO.
        with open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as source:
            entry = os.fstat(source.fileno())
            if not (stat.S_ISREG(entry.st_mode) and _own(entry) and _own(os.stat(os.path.dirname(file)))):
                return {}
            if pickle.load(source) != depends:
                return {}
            found = pickle.load(source)
    except Exception:  # unpickling a damaged file may raise anything, and costs time alone
        return {}
    return found if isinstance(found, dict) else {}


def _own(entry: os.stat_result) -> bool:
    """Unpickling runs what is in a file, so it must be the user's own, and nobody else able to put one in its place."""
    return entry.st_uid == os.geteuid() and not entry.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _forget_old(directory: str) -> None:
    """Keeps the newest `KEPT` memories."""
    with os.scandir(directory) as entries:
        held = sorted((entry.stat().st_mtime_ns, entry.path) for entry in entries)
    for _, old in held[:-KEPT]:
        os.unlink(old)

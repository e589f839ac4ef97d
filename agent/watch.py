"""Watching files for change with inotify, through symbolic links and Kubernetes' ``..data`` swaps.

Source of what counts as a change: istio/istio: security/pkg/nodeagent/cache/secretcache.go (handleFileWatch).
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import struct
from collections.abc import Callable

log = logging.getLogger("cache")

_CLOEXEC_NONBLOCK = os.O_CLOEXEC | os.O_NONBLOCK
# IN_CLOSE_WRITE | IN_MOVED_FROM | IN_MOVED_TO | IN_CREATE | IN_DELETE | IN_DELETE_SELF | IN_MOVE_SELF
_MASK = 0x008 | 0x040 | 0x080 | 0x100 | 0x200 | 0x400 | 0x800
_EVENT = struct.Struct("iIII")

Signature = tuple[int, int, int, int] | None


def _signature(path: str) -> Signature:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


def _directories(path: str) -> set[str]:
    """Directories in which a change may change what `path` is: those of it, of its links and of its target."""
    path = os.path.abspath(path)
    found = {os.path.dirname(path), os.path.dirname(os.path.realpath(path))}
    part = path
    while part != "/":
        if os.path.islink(part) and part not in ("/var", "/tmp", "/usr"):
            found.add(os.path.dirname(part))
        part = os.path.dirname(part)
    return found


class FileWatcher:
    """Calls back when a watched file was written, replaced, removed or created."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = -1
        self._watches: dict[str, int] = {}
        self._files: dict[tuple[str, str], tuple[Signature, Callable[[], None]]] = {}

    def watch(self, path: str, key: str, changed: Callable[[], None]) -> None:
        """Watches a file once for each `key`.

        Raises:
            OSError: its directory cannot be watched.
        """
        if (path, key) in self._files:
            return
        if self._fd < 0:
            self._fd = self._libc.inotify_init1(_CLOEXEC_NONBLOCK)
            if self._fd < 0:
                raise OSError(ctypes.get_errno(), "inotify_init1")
            asyncio.get_running_loop().add_reader(self._fd, self._readable)
        self._files[path, key] = (_signature(path), changed)
        log.info("adding watcher for file certificate %s", path)
        self._add_directories(path)

    def _add_directories(self, path: str) -> None:
        for directory in _directories(path):
            if directory in self._watches:
                continue
            number = self._libc.inotify_add_watch(self._fd, os.fsencode(directory), _MASK)
            if number < 0:
                raise OSError(ctypes.get_errno(), f"inotify_add_watch {directory}")
            self._watches[directory] = number

    def _readable(self) -> None:
        try:
            data = os.read(self._fd, 65536)
        except BlockingIOError:
            return
        position = 0
        gone: set[int] = set()
        while position < len(data):
            number, mask, _, length = _EVENT.unpack_from(data, position)
            position += _EVENT.size + length
            if mask & 0x8000:  # IN_IGNORED: the directory itself is gone
                gone.add(number)
        self._watches = {path: number for path, number in self._watches.items() if number not in gone}
        for (path, key), (before, changed) in list(self._files.items()):
            now = _signature(path)
            if now == before:
                continue
            self._files[path, key] = (now, changed)
            try:
                self._add_directories(path)
            except OSError as error:
                log.warning("cannot watch %s: %s", path, error)
            if now is not None:
                changed()

    def close(self) -> None:
        if self._fd >= 0:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
        self._watches.clear()
        self._files.clear()

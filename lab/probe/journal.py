"""Follows JSON-lines files while others write them: Envoy's evidence, cluster DNS's queries.

One inotify instance watches the directories (inotify(7)), so a file may appear later, and nobody polls.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import struct
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lab.runtime import kernel

_IN_MODIFY = 0x2
_IN_MOVED_TO = 0x80
_IN_CREATE = 0x100
_EVENT = struct.Struct("=iIII")

Line = dict[str, Any]


class File:
    """The whole lines of one file, in order. What is no JSON object is left out."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self.path = path
        self.lines: list[Line] = []
        self._offset = 0
        self._rest = b""
        if from_end:
            with suppress(OSError):
                self._offset = path.stat().st_size

    def read(self) -> bool:
        """Takes what was written since; whether there was a whole line."""
        try:
            with self.path.open("rb") as f:
                f.seek(self._offset)
                data = f.read()
        except OSError:
            return False
        self._offset += len(data)
        *whole, self._rest = (self._rest + data).split(b"\n")
        before = len(self.lines)
        for line in whole:
            try:
                parsed = json.loads(line)
            except ValueError:
                continue
            if isinstance(parsed, dict):
                self.lines.append(parsed)
        return len(self.lines) > before


class Journal:
    """Several files, followed from their present end. Lives in one event loop."""

    def __init__(self) -> None:
        libc = kernel.libc()
        self._fd = kernel.check(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC), "inotify_init1")
        self._directories: dict[int, Path] = {}
        self._files: dict[Path, File] = {}
        self._waiting: defaultdict[Path, set[asyncio.Future[None]]] = defaultdict(set)
        asyncio.get_running_loop().add_reader(self._fd, self._readable)

    def follow(self, path: Path) -> File:
        """The file at ``path``, which need not exist yet; its directory must.

        Raises:
            OSError: the directory cannot be watched.
        """
        file = self._files.get(path)
        if file is None:
            flags = ctypes.c_uint32(_IN_MODIFY | _IN_MOVED_TO | _IN_CREATE)
            number = kernel.check(
                kernel.libc().inotify_add_watch(self._fd, os.fsencode(path.parent), flags), str(path.parent)
            )
            self._directories[number] = path.parent
            self._files[path] = file = File(path, from_end=True)
        return file

    def mark(self, path: Path) -> int:
        """The number of lines so far: `find` looks at later ones."""
        file = self.follow(path)
        file.read()
        return len(file.lines)

    def lines(self, path: Path) -> list[Line]:
        """All lines so far."""
        file = self.follow(path)
        file.read()
        return file.lines

    async def find(self, path: Path, wanted: Callable[[Line], bool], since: int, wait: float) -> Line | None:
        """The newest line after mark ``since`` that is ``wanted``; waits up to ``wait`` seconds for one."""
        file = self.follow(path)
        deadline = asyncio.get_running_loop().time() + wait
        file.read()
        while True:
            end = len(file.lines)
            found = next((line for line in reversed(file.lines[since:end]) if wanted(line)), None)
            since = end
            left = deadline - asyncio.get_running_loop().time()
            if found is not None or left <= 0:
                return found
            await self._change(path, left)

    async def _change(self, path: Path, seconds: float) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiting[path].add(waiter)
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(waiter, seconds)
        finally:
            self._waiting[path].discard(waiter)

    def _readable(self) -> None:
        touched: set[Path] = set()
        with suppress(BlockingIOError):
            while data := os.read(self._fd, 1 << 16):
                offset = 0
                while offset < len(data):
                    number, _, _, size = _EVENT.unpack_from(data, offset)
                    name = data[offset + _EVENT.size : offset + _EVENT.size + size].rstrip(b"\0")
                    offset += _EVENT.size + size
                    directory = self._directories.get(number)
                    if directory is not None:
                        touched.add(directory / os.fsdecode(name))
        for path in touched & self._files.keys():
            if self._files[path].read():
                for waiter in self._waiting[path]:
                    if not waiter.done():
                        waiter.set_result(None)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)

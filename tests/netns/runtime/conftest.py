"""A lab of one test, and a runner with a deadline."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from runtime_lab import Lab

from lab.fabric import paths, record
from lab.fabric.record import Record


@pytest.fixture
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    name = f"slt-{os.getpid()}-rt{abs(hash(request.node.nodeid)) % 100000}"
    known = Record.create(name)
    try:
        yield Lab(name, known)
    finally:
        known.close()
        record.down(name)
        assert not paths.run_dir(name).exists()


@pytest.fixture
def run() -> Callable[[Coroutine[Any, Any, None]], None]:
    """Runs a coroutine with a deadline: a test that waits for an event that never comes fails by name."""

    def runner(coroutine: Coroutine[Any, Any, None]) -> None:
        async def bounded() -> None:
            await asyncio.wait_for(coroutine, 20)

        asyncio.run(bounded())

    return runner

"""Worlds for the agent's namespace tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from agent_place import World


@pytest.fixture
def world() -> Iterator[Callable[..., World]]:
    """Makes worlds, and takes them down at the end of the test."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    made: list[World] = []

    def make(**options: Any) -> World:
        made.append(World(**options))
        return made[-1]

    yield make
    for one in made:
        one.close()

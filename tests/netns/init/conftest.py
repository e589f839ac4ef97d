"""Fixtures for the tests of init."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from init_pod import Net, net


@pytest.fixture
def pods() -> Iterator[Net]:
    """A fresh pod with its peer."""
    with net() as made:
        yield made

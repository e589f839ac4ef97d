"""What every test shares: a skip with its reason where root is missing, and a look at what a test left behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from hypothesis import settings

# The same examples in every run; `make fuzz` tries others.
settings.register_profile("fixed", derandomize=True)
if not any(name.startswith("SIDECARLAB_FUZZ") for name in os.environ):
    settings.load_profile("fixed")


def pytest_configure() -> None:
    # A shell starts what it puts into the background with SIGINT ignored, and every child would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def as_user() -> Callable[[int], list[str]]:
    """The words in front of a command that runs it as that user, who may read a checkout below /root and nothing more."""

    def words(user: int) -> list[str]:
        only = "-all,+dac_read_search"
        return ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups",
                f"--bounding-set={only}", f"--inh-caps={only}", f"--ambient-caps={only}"]  # fmt: skip

    return words


THREADED = ("discovery",)
"""Rooms below tests/netns whose tests run gRPC in this process."""
FORKING = ("test_agent_envoy.py",)
"""Files elsewhere that fork this process."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # A child forked from a process in which gRPC has run may abort, or wait for ever for a lock that a thread of gRPC
    # held. Most tests in namespaces enter them by a fork, so they come before anything that uses gRPC.
    items.sort(key=lambda item: not _forks(item))
    if os.geteuid() == 0:
        return
    for item in items:
        if item.get_closest_marker("root"):
            item.add_marker(pytest.mark.skip(reason="makes network namespaces: needs root"))


def _forks(item: pytest.Item) -> bool:
    parts = item.path.parts
    return item.path.name in FORKING or ("netns" in parts and not any(room in parts for room in THREADED))

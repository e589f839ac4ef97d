"""Interrupts held back while something must come to its end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def held(on_interrupt: Callable[[], None] = lambda: None) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP take effect when the block ends, each once; ``on_interrupt`` is called at once.

    Whoever is impatient presses Ctrl-C twice, and the second one must not stop what the first one began. Ignored
    signals stay ignored. Outside the main thread nothing happens: Python delivers no signal there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []

    def hold(number: int, _frame: FrameType | None) -> None:
        pending.append(number)
        on_interrupt()

    before = {number: signal.getsignal(number) for number in _INTERRUPTS}
    kept = {number: handler for number, handler in before.items() if handler not in (None, signal.SIG_IGN)}
    try:
        for number in kept:
            signal.signal(number, hold)
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
        for delivered in dict.fromkeys(pending):
            signal.raise_signal(delivered)

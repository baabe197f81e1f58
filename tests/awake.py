"""Limits of time for tests, on machines that are loaded or stop a process for a while."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_TICK = 0.2  # seconds


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """What is inside takes less than so many seconds. Where this process was stopped from outside
    meanwhile, as `kill -STOP` does, and went on again, the time in which it ran counts. For use on
    the main thread."""
    over, went_on, gaps = threading.Event(), [], []

    def watch() -> None:
        last = time.monotonic()
        while not over.wait(_TICK):
            now = time.monotonic()
            gaps.append(max(0.0, now - last - 2 * _TICK))
            last = now

    before = signal.signal(signal.SIGCONT, lambda *_: went_on.append(True))
    start = time.monotonic()
    thread = threading.Thread(target=watch, name="awake", daemon=True)
    thread.start()
    try:
        yield
        took = time.monotonic() - start
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGCONT, before)
    assert took - (sum(gaps) if went_on else 0.0) < seconds


def until(condition: Callable[[], object], seconds: float = 5.0, pause: float = 0.02) -> bool:
    """Wait for a condition, so many seconds of looking for it at most; whether it came true."""
    for _ in range(max(1, round(seconds / pause))):
        if condition():
            return True
        time.sleep(pause)
    return bool(condition())

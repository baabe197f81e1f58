"""A time limit for what can't be asked to stop."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class Late(BaseException):
    """The time is over; no `Exception`, since what is stopped may catch those."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Stop the statements inside, in the main thread, once so many seconds have passed.

    Raises:
        Late: when they have. Python raises it between two of its own instructions, again each
            second, since it can be lost where exceptions are ignored.
    """

    def stop(*_: object) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)

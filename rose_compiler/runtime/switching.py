"""How soon a thread that is busy in Python lets another one run.

The interpreter has one interval for all threads, and several runs may be under way at a time: it is
put back when the last of them ends.
"""

from __future__ import annotations

import sys
import threading
import weakref
from typing import Any

#: Seconds of the interval while thread lanes are at work. The interpreter's own 5 ms would be the
#: price of every hand-off beside a thread that is busy in Python.
INTERVAL = 2e-4

_lock = threading.Lock()
_runs: weakref.WeakSet[Any] = weakref.WeakSet()
_before: float | None = None  # while it is not the interpreter's own


def hasten(run: Any) -> None:
    """A run with thread lanes begins."""
    global _before
    with _lock:
        _runs.add(run)
        if _before is None:
            _before = sys.getswitchinterval()
            sys.setswitchinterval(min(_before, INTERVAL))


def relax(run: Any) -> None:
    """It has ended. Again: does nothing more, and what Ctrl-C has kept from being done is done."""
    global _before
    with _lock:
        _runs.discard(run)
        if not _runs and _before is not None:
            sys.setswitchinterval(_before)
            _before = None

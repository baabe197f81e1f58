"""Calls from several threads take turns, but none waits for a call that waits for it."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

#: How often a thread that waits for its turn looks at the one that has it, and how often in a row
#: that one has to be found where it was: it then waits itself, maybe for this very thread.
POLL_S = 0.05
PATIENCE = 20


class Turn:
    """A lock that one thread may hold several times over, and knows who holds it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._holder = (0, 0)  # by Python's count of threads, and the system's
        self._waits = False  # a call was found to wait

    def take(self, *, wait: bool) -> bool:
        """Get the turn. False where it is another thread's, unless that one comes to an end with
        ``wait``; once such a one was found to wait itself, nobody waits for the next ones."""
        if not self._lock.acquire(blocking=False) and not (wait and self._waited_for()):
            return False
        self._holder = threading.get_ident(), threading.get_native_id()
        return True

    def give(self) -> None:
        """Let it go, as often as it was taken."""
        self._lock.release()

    def _waited_for(self) -> bool:
        seen: Any = None
        times = 0
        while not self._waits:
            if self._lock.acquire(timeout=POLL_S):
                return True
            now = _doing(*self._holder)
            times = times + 1 if now == seen else 0
            seen = now
            self._waits = times >= PATIENCE
        return False


def _doing(ident: int, native: int) -> tuple[Any, ...]:
    """What a thread does: where it is, and the time that it has taken."""
    frame = sys._current_frames().get(ident)
    where = None if frame is None else (id(frame), frame.f_lasti)
    try:
        # the state of the thread, and the ticks it ran in user code and in the system
        fields = Path(f"/proc/self/task/{native}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return (ident, where)
    return (ident, where, fields[0], *fields[11:13])

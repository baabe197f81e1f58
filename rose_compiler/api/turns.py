"""Calls from several threads take turns, but none waits for a call that waits for it."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

#: How often a thread that waits for its turn looks at the one that has it, and how often in a row
#: that one has to be found where it was, and with how little of that time spent on a core: it then
#: waits itself, maybe for this very thread.
POLL_S = 0.05
PATIENCE = 20
BUSY = 0.2


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
        began, times = 0.0, 0
        while not self._waits:
            if self._lock.acquire(timeout=POLL_S):
                return True
            ident, native = self._holder
            now, spent = (ident, _where(ident)), _spent_s(native)
            if now != seen or times >= PATIENCE:
                seen, began, times = now, spent, 0
                continue
            times += 1
            self._waits = times >= PATIENCE and spent - began <= BUSY * times * POLL_S
        return False


def _where(ident: int) -> tuple[tuple[int, int], ...]:
    """Where a thread is, in all functions that it is in: one that waits a little over and over
    again calls anew each time, from the same place."""
    found = []
    frame = sys._current_frames().get(ident)
    while frame is not None:
        found.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


def _spent_s(native: int) -> float:
    """Seconds that a thread ran in user code and in the system; 0 where that is not known."""
    try:
        fields = Path(f"/proc/self/task/{native}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

"""CPU time of this process, its threads and its children, and when to look at it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

#: Seconds between two samples at least.
LEAST_S = 200e-6
#: Reading the clocks takes at most this share of the time. Each read is a system call: what follows
#: it finds caches emptied, so that all of it costs several times what the read itself takes.
SHARE = 0.002


def children() -> tuple[int, ...]:
    """The processes that this one has started and that still run (Linux; none elsewhere)."""
    found: list[int] = []
    for listing in Path("/proc/self/task").glob("*/children"):
        try:
            found += [int(pid) for pid in listing.read_text(encoding="ascii").split()]
        except (OSError, ValueError):
            continue
    return tuple(sorted(set(found)))


def clock_of(pid: int) -> Callable[[], float] | None:
    """A function that tells the CPU seconds of another process, or ``None`` without a way to.

    Linux has a clock for each process, whose number ``clock_getcpuclockid(3)`` makes of the
    process's; where that fails, ``/proc/PID/stat`` counts in ticks of ``SC_CLK_TCK`` (10 ms).
    """
    number = (~pid << 3) | 2

    def clock() -> float:
        try:
            return time.clock_gettime(number)
        except OSError:
            return 0.0

    try:
        time.clock_gettime(number)
    except (OSError, AttributeError, OverflowError):
        return _ticks_of(pid)
    return clock


def _ticks_of(pid: int) -> Callable[[], float] | None:
    path = Path(f"/proc/{pid}/stat")
    second = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0

    def clock() -> float:
        try:
            return parse_stat(path.read_text(encoding="ascii", errors="replace")) / second
        except (OSError, ValueError, IndexError):
            return 0.0

    return clock if second and path.exists() else None


def parse_stat(text: str) -> int:
    """Ticks of CPU time, user and system, from a line of ``/proc/PID/stat`` (``proc(5)``).

    The second field, the command in brackets, may hold blanks and brackets.
    """
    fields = text.rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


class Clocks:
    """The CPU clocks of one profiled iteration: this thread, this process and its children."""

    def __init__(self, pids: Sequence[int] | None = None) -> None:
        found = children() if pids is None else pids
        self.children = [c for pid in found if (c := clock_of(pid)) is not None]

    def pause(self, taken_s: float) -> float:
        """Seconds until the next sample, after one that took ``taken_s``."""
        return max(LEAST_S, taken_s / SHARE)

    def read(self) -> tuple[float, float, float]:
        """CPU seconds of this thread, of this process, and of its children together."""
        return time.thread_time(), time.process_time(), sum(c() for c in self.children)

"""How busy a device was over time, from CPU times of threads and processes.

The GPU's side is in :mod:`rose_compiler.runtime.kernels`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from rose_compiler.base.machine import Machine
from rose_compiler.base.profile import Activity

#: Below this share of one core nothing counts as running: the clocks and the kernel's own work.
RESIDENT = 0.02


def busy_cores(
    samples: Sequence[tuple[float, float, float, float]], machine: Machine
) -> list[Activity]:
    """The cores' activity between samples (time, CPU seconds of thread, process and children).

    CPU time is counted when the scheduler looks, so that a short interval may hold more of it than
    the cores can give; shares are capped at 1.
    """
    found = []
    for (start, _, mine, theirs), (end, _, mine_after, theirs_after) in pairwise(samples):
        if end <= start:
            continue
        cores = (mine_after - mine + theirs_after - theirs) / (end - start)
        share = min(1.0, max(0.0, cores / machine.cores))
        found.append(Activity(start, end, "cpu", share, cores > RESIDENT))
    return found


def share_of(intervals: Sequence[tuple[float, float]], activity: Sequence[Activity]) -> list[float]:
    """The mean activity over each interval; 1 where nothing is known of it."""
    starts = [a.start_s for a in activity]
    found = []
    for start, end in intervals:
        at = max(0, bisect_right(starts, start) - 1)
        weight = total = 0.0
        while at < len(activity) and activity[at].start_s < end:
            part = min(end, activity[at].end_s) - max(start, activity[at].start_s)
            if part > 0:
                weight += part
                total += part * activity[at].share
            at += 1
        found.append(total / weight if weight > 0 else 1.0)
    return found

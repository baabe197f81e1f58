"""How busy a device was over time, from CPU times of threads and processes.

The GPU's side is in :mod:`rose_compiler.runtime.kernels`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from rose_compiler.base.machine import Machine
from rose_compiler.base.profile import Activity

#: Below this share of one core nothing counts as running: the clocks and the kernel's own work.
RESIDENT = 0.02
#: What is shorter than this many seconds is not told from its neighbours.
LEAST_S = 2e-4
#: Seconds that what all operations do together counts for, beside what is seen of one.
PRIOR_S = 2e-4

#: CPU seconds of a thread, of its process and of its children, at a point in time.
Sample = tuple[float, float, float, float]
#: What a thread did: from when to when, and its name.
Piece = tuple[float, float, str]


def refined(samples: Sequence[Sample], pieces: Sequence[Piece]) -> list[Sample]:
    """Samples, and estimates of more where a long piece begins or ends.

    Between two samples CPU time goes to what ran by how long it did and by how busy it is: each
    name has one rate, found by least squares over all intervals; where little was seen of one, its
    rate is near that of all together. What the samples say of their intervals stays as it is.
    """
    if len(samples) < 3:
        return list(samples)
    ran = _one_by_one(samples[0][0], samples[-1][0], pieces)
    column = {name: k for k, name in enumerate(dict.fromkeys(name for _, _, name in ran))}
    clocks = np.asarray(samples)
    seconds = np.zeros((len(samples) - 1, len(column)))
    parts: list[list[Piece]] = [[] for _ in range(len(samples) - 1)]
    at = 0
    for k, (first, last) in enumerate(pairwise(clocks[:, 0])):
        while at < len(ran) and ran[at][1] <= first:
            at += 1
        inside = at  # the last piece of an interval may go on in the next one
        while inside < len(ran) and ran[inside][0] < last:
            start, end, name = ran[inside]
            inside += 1
            part = max(start, first), min(end, last), name
            seconds[k, column[name]] += part[1] - part[0]
            parts[k].append(part)
    used = np.diff(clocks[:, 1:], axis=0)
    mean = used.sum(axis=0) / max(seconds.sum(), 1e-12)
    left = np.vstack([seconds, PRIOR_S * np.eye(len(column))])
    right = np.vstack([used, PRIOR_S * np.tile(mean, (len(column), 1))])
    rates = np.linalg.lstsq(left, right, rcond=None)[0].clip(min=1e-9)
    found = [samples[0]]
    for k, there in enumerate(parts):
        weights = np.asarray([(end - start) * rates[column[name]] for start, end, name in there])
        if len(there) > 1:
            shares = weights.cumsum(axis=0) / weights.sum(axis=0)
            for (_, end, _), share in zip(there[:-1], shares[:-1], strict=True):
                estimate = clocks[k, 1:] + share * used[k]
                found.append((end, *map(float, estimate)))  # type: ignore[arg-type]
        found.append(samples[k + 1])
    return found


def _one_by_one(start: float, end: float, pieces: Sequence[Piece]) -> list[Piece]:
    """The time from ``start`` to ``end`` in pieces, neighbours of one name joined; what lies
    between the long ones has no name."""
    found: list[Piece] = []
    at = start
    for first, last, name in [*sorted(p for p in pieces if p[1] - p[0] >= LEAST_S), (end, end, "")]:
        first = min(max(first, at), end)
        last = min(last, end)
        for piece in ((at, first, ""), (first, last, name)):
            if piece[1] <= piece[0]:
                continue
            if found and found[-1][2] == piece[2]:
                piece = found.pop()[0], piece[1], piece[2]
            found.append(piece)
        at = max(at, last)
    return found


def busy_cores(samples: Sequence[Sample], machine: Machine) -> list[Activity]:
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

"""What operations take on so many cores, each by itself: the points that responses are fitted to.

Iterations run in program order, in which nothing runs beside anything, with every side held to so
many cores and threads. What waits for another process's threads in a fight for cores has none of it
here, and an operation that gains nothing from a second core shows that.

A call of a component in a process is a round trip there. What the component takes for it hangs on
the cores; handing the call over, waking the process, and taking the result in do not, and are
hidden where the side that is woken has work of its own meanwhile. So they are told apart.
"""

from __future__ import annotations

import math
import os
import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from rose_compiler.base.errors import RoseError
from rose_compiler.base.profile import Profile, Timeline
from rose_compiler.tune.branches import Alone, HandOffs, alone_in

#: Iterations at each number of cores; the first only lets threads start.
RUNS = 3

#: Of each call of an iteration, by lane: when it began, when it ran in its process (start, end),
#: and when its result was here.
Calls = Mapping[str, Sequence[tuple[float, float, float, float]]]


class Points:
    """Goes through the numbers of cores: 3 to 4 of them, or fewer where there are fewer."""

    def __init__(self, cores: frozenset[int]) -> None:
        self._cores = sorted(cores)
        n = len(self._cores)
        counts = sorted({1, math.ceil(n / 4), math.ceil(n / 2), n})
        self._todo = deque((count, run) for count in counts for run in range(RUNS))
        self._found: dict[int, list[tuple[Profile, Calls]]] = {count: [] for count in counts}
        self._calls: Calls = {}  # of the latest iteration
        self._before: dict[str, tuple[Any, frozenset[int]]] = {}

    @property
    def count(self) -> int | None:
        """The number of cores of the next iteration; None when all have been gone through."""
        return self._todo[0][0] if self._todo else None

    @property
    def levels(self) -> int:
        """How many numbers of cores there are."""
        return len(self._found)

    def took(self, profile: Profile) -> bool:
        """One iteration with :attr:`count` cores was profiled; whether it was the last."""
        count, run = self._todo.popleft()
        if run:
            self._found[count].append((profile, self._calls))
        return not self._todo

    def responses(self, beside: Timeline | None) -> tuple[Alone, HandOffs]:
        """The responses of all operations that were seen, and what calls take besides: those that
        run on lanes of their own in the iteration ``beside``."""
        lanes: dict[str, set[str]] = {}
        for span in beside.spans if beside is not None else ():
            lanes.setdefault(span.lane, set()).add(span.op)
        inside: dict[int, list[dict[str, float]]] = {}
        sent: dict[str, list[float]] = {}
        taken: dict[str, list[float]] = {}
        for count, found in self._found.items():
            for profile, calls in found:
                known: dict[str, float] = {}
                for lane, made in calls.items():
                    for op, times in _by_op(profile.timeline, lanes.get(lane, set()), made).items():
                        known[op] = statistics.median(end - start for _, start, end, _ in times)
                        sent.setdefault(op, []).append(
                            statistics.median(start - began for began, start, _, _ in times)
                        )
                        taken.setdefault(op, []).append(
                            statistics.median(here - end for _, _, end, here in times)
                        )
                inside.setdefault(count, []).append(known)
        profiles = {count: [profile for profile, _ in of] for count, of in self._found.items()}
        hand_offs = {op: (min(sent[op]), min(taken[op])) for op in sent}
        return alone_in(profiles, inside), hand_offs

    def outside(self) -> float:
        """Seconds of an iteration that are in no operation: loops, hand-offs, the emitted code."""
        left = [
            profile.iteration_s[-1] - sum(span.duration_s for span in profile.timeline.spans)
            for found in self._found.values()
            for profile, _ in found
            if profile.timeline is not None
        ]
        return max(0.0, min(left, default=0.0))

    @contextmanager
    def held(self, processes: Mapping[str, Any]) -> Iterator[None]:
        """Hold this thread and the processes of components, by lane, to :attr:`count` cores, as far
        as the system allows: this side to the first ones, the others to the last. Their calls are
        timed."""
        count = self.count
        assert count is not None
        before, threads = os.sched_getaffinity(0), torch.get_num_threads()
        calls: dict[str, list[tuple[float, float, float, float]]] = {}
        try:
            with suppress(OSError):
                os.sched_setaffinity(0, self._cores[:count])
            torch.set_num_threads(count)
            for name, component in processes.items():
                with suppress(RoseError, OSError):  # its calls will say what is wrong
                    if name not in self._before:
                        held = frozenset(os.sched_getaffinity(component.pid))
                        self._before[name] = component, held
                    component.rose_limit(frozenset(self._cores[-count:]), count)
                component.rose_calls = calls[name] = []
            yield
            self._calls = calls
        finally:
            for component in processes.values():
                component.rose_calls = None
            torch.set_num_threads(threads)
            os.sched_setaffinity(0, before)

    def release(self) -> None:
        """Let the processes have their cores and threads back."""
        before, self._before = self._before, {}
        for component, cores in before.values():
            with suppress(RoseError, OSError):
                component.rose_limit(cores, component.rose_threads)


def _by_op(
    timeline: Timeline | None,
    ops: set[str],
    calls: Sequence[tuple[float, float, float, float]],
) -> dict[str, list[tuple[float, float, float, float]]]:
    """The calls of one component by operation; none where it is not clear which is which."""
    spans = [] if timeline is None else [span for span in timeline.spans if span.op in ops]
    found: dict[str, list[tuple[float, float, float, float]]] = {}
    if len(spans) == len(calls):
        for span, call in zip(sorted(spans, key=lambda s: s.start_s), calls, strict=True):
            found.setdefault(span.op, []).append(call)
    return found

"""What operations take on so many cores, each by itself: the points that responses are fitted to.

Iterations run in program order, in which nothing runs beside anything, with every side held to so
many cores and threads. What waits for another process's threads in a fight for cores has none of it
here, and an operation that gains nothing from a second core shows that.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch

from rose_compiler.base.errors import RoseError
from rose_compiler.base.profile import Profile
from rose_compiler.tune.branches import Alone, alone_in

#: Iterations at each number of cores; the first only lets threads start.
RUNS = 3


class Points:
    """Goes through the numbers of cores: 3 to 4 of them, or fewer where there are fewer."""

    def __init__(self, cores: frozenset[int]) -> None:
        self._cores = sorted(cores)
        n = len(self._cores)
        counts = sorted({1, math.ceil(n / 4), math.ceil(n / 2), n})
        self._todo = deque((count, run) for count in counts for run in range(RUNS))
        self._found: dict[int, list[Profile]] = {count: [] for count in counts}
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
            self._found[count].append(profile)
        return not self._todo

    def alone(self) -> Alone:
        """The responses of all operations that were seen."""
        return alone_in(self._found)

    def outside(self) -> float:
        """Seconds of an iteration that are in no operation: loops, hand-offs, the emitted code."""
        left = [
            profile.iteration_s[-1] - sum(span.duration_s for span in profile.timeline.spans)
            for profiles in self._found.values()
            for profile in profiles
            if profile.timeline is not None
        ]
        return max(0.0, min(left, default=0.0))

    @contextmanager
    def held(self, processes: Mapping[str, Any]) -> Iterator[None]:
        """Hold this thread and the processes of components to :attr:`count` cores, as far as the
        system allows: this side to the first ones, the others to the last."""
        count = self.count
        assert count is not None
        before, threads = os.sched_getaffinity(0), torch.get_num_threads()
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
            yield
        finally:
            torch.set_num_threads(threads)
            os.sched_setaffinity(0, before)

    def release(self) -> None:
        """Let the processes have their cores and threads back."""
        before, self._before = self._before, {}
        for component, cores in before.values():
            with suppress(RoseError, OSError):
                component.rose_limit(cores, component.rose_threads)

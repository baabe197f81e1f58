"""Takes the ticks of an instrumented function while it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from rose_compiler.base.profile import Span
from rose_compiler.runtime.activity import Sample
from rose_compiler.runtime.clocks import Clocks

#: Seconds for which the list of child processes is taken to hold.
CHILDREN_S = 5.0
#: Ticks of which one is chosen to take samples at: operations are then met at random, and not what
#: follows upon the longest.
CHOICE = 32


@dataclass(frozen=True)
class Raw:
    """What one iteration left: marks ticked, their times (one more at either end), CPU samples."""

    marks: tuple[int, ...]
    times: tuple[float, ...]
    samples: tuple[Sample, ...]


class Recorder:
    """Takes the ticks of an instrumented function: a time each, now and then CPU times too, at two
    ticks that follow upon each other, so that some operations are seen alone."""

    def __init__(self) -> None:
        #: Also called with each tick, for as long as it is set when an iteration begins.
        self.look: Callable[[int], object] | None = None
        self.tick: Callable[[int], None] = self._make()

    def raw(self) -> Raw:
        """What was recorded since ``begin``."""
        return Raw(tuple(self.marks), tuple(self.times), tuple(self.samples))

    def _make(self) -> Callable[[int], None]:
        self.marks: list[int] = []
        self.times: list[float] = []
        self.samples: list[Sample] = []
        self._due = 0.0
        self._clocks: Clocks | None = None
        self._since = 0.0
        self._ahead = 0  # ticks until the pair of samples that is due; -1 between the two
        self._drawn = 1
        mark, at, now = self.marks.append, self.times.append, perf_counter
        due = float("inf")

        def tick(k: int) -> None:
            nonlocal due
            time = now()
            mark(k)
            at(time)
            if time > due:
                due = self._seldom(k, time)

        def begin() -> None:
            nonlocal due
            self.prepare()
            self.marks.clear()
            self.times.clear()
            self.samples.clear()
            self._ahead = self._drawn % CHOICE
            self._due = self._sample(now())
            due = self._due if self.look is None else 0.0
            at(now())

        self.begin = begin
        return tick

    def prepare(self) -> None:
        """Look for child processes, unless that was done a moment ago. It takes as long as many
        ticks, so it is done in front of what is timed."""
        if self._clocks is None or perf_counter() - self._since > CHILDREN_S:
            self._clocks, self._since = Clocks(), perf_counter()

    def end(self) -> None:
        """Take the last sample."""
        now = perf_counter()
        self.times.append(now)
        self._sample(now)

    def _seldom(self, k: int, time: float) -> float:
        """What most ticks leave out; the time behind which it is due again."""
        if time > self._due:
            self._due = self._pair(time)
        if self.look is None:
            return self._due
        self.look(k)
        return 0.0

    def _pair(self, time: float) -> float:
        """A sample at the tick that was chosen and at the next one; when another one is due."""
        if self._ahead > 0:
            self._ahead -= 1
            return time
        after = self._sample(time)
        if self._ahead == 0:
            self._ahead = -1
            return time
        # Park and Miller's generator (CACM 31, 1988): no state of the user's is touched
        self._drawn = self._drawn * 48271 % 0x7FFFFFFF
        self._ahead = self._drawn % CHOICE
        return 2 * after - time

    def _sample(self, time: float) -> float:
        assert self._clocks is not None
        self.samples.append((time, *self._clocks.read()))
        now = perf_counter()
        return now + self._clocks.pause(now - time)


def record(recorder: Recorder, runtime: Any, call: Callable[[], Any]) -> tuple[Any, Sequence[Span]]:
    """Run an instrumented function once; its result, and what the lanes ran meanwhile.

    ``runtime`` is the :class:`~rose_compiler.runtime.support.Runtime` that it runs on.
    """
    with runtime.recording() as spans:
        recorder.begin()
        result = call()
        recorder.end()
    return result, spans

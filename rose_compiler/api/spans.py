"""How many trips of a training loop are run together, so that they can overlap.

Between two runs lanes are drained, types of values are compared with those that were seen, and
another schedule may be tried. So a run has a number of trips that costs little overlap at its ends,
and takes no longer than an iteration of a loop with its own rollout would.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rose_compiler.api.unit import Unit

#: Trips that are watched together: what a trip hands to the next is seen to be used.
WATCHED = 2
#: Trips that run together, at most; with two stages a sixteenth of the overlap is lost.
TOGETHER = 16
#: Runs that a loop of known length is cut into at least, where schedules are compared.
RUNS = 160
#: Seconds that they may take together, by what a watched trip took, which is slower.
SECONDS = 2.0


class Spans:
    """Decides for one loop how many of its trips come next; ``least`` at any rate, once they were
    watched."""

    def __init__(self, unit: Unit, least: int = 1) -> None:
        self.unit = unit
        self.least = least
        self._watched = False
        self._settled = False  # their number stays the same, so that times can be compared

    def expect(self, trips: int) -> None:
        """The loop is about to make this many trips."""
        if self._settled:
            return
        self.unit.together = TOGETHER
        if self.unit.options.tune and self.unit.options.decision is None:
            # tuning takes a share of all trips, and compares many runs
            self.unit.together = max(self.least, min(TOGETHER, trips // RUNS))

    def next(self, values: Mapping[str, Any]) -> int:
        """How many trips to run from here, with these values for the first of them."""
        self._watched = self.unit.watches(values)
        if self._watched:
            return WATCHED
        # an arm that runs for the first time may change the type of what is handed on
        return 1 if self.unit.watch.held else self.unit.together

    @contextmanager
    def timed(self, trips: int) -> Iterator[None]:
        """Learn from the first trips how long one is."""
        started = time.perf_counter()
        yield
        if self._watched and not self._settled:
            self._settled = True
            each = (time.perf_counter() - started) / trips
            most = max(2, int(SECONDS / max(each, 1e-9)))
            self.unit.together = min(self.unit.together, most)

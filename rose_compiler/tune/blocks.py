"""Two arrangements compared by blocks of iterations, where changing from one to the other costs.

What needs a new process can't be changed for every trial. So both take turns in blocks, in the
order ABBA, which has one change a pair and hits both alike with a drift of the machine. Neighbours
are compared, and a bootstrap interval over the pairs decides.
"""

from __future__ import annotations

import statistics
from typing import Protocol

from rose_compiler.base.remarks import Blocker
from rose_compiler.tune.stats import Interval, median_interval, paired_ratios

#: Pairs of blocks after which it is decided, and up to how many where a gain shows in the median,
#: but not beyond doubt.
PAIRS, MOST_PAIRS = 4, 8
#: Iterations of a block, and their seconds, at least.
LEAST, LEAST_S = 8, 0.5
#: Iterations behind a change that are not compared: caches are cold.
COLD = 2
#: By how much the median must win, the interval lying above 1 besides.
MARGIN = 0.01


class Budget(Protocol):
    """What a comparison may take of the time for tuning."""

    def spend(self, seconds: float, iterations: int | None = 1) -> None:
        """It took so long: an iteration, or None, something else that lasted so long."""

    def allows(self, seconds: float) -> bool:
        """Whether it may take so many seconds more."""


def least_s(iteration_s: float = 0.0) -> float:
    """Seconds that a comparison takes at least which decides for what is new, where an iteration
    takes ``iteration_s`` under both."""
    return 2 * PAIRS * max(LEAST_S, LEAST * iteration_s) + PAIRS * COLD * iteration_s


def spent(what: str) -> Blocker:
    """Why something is not compared, or not to the end."""
    return Blocker(
        "switched-off", f"{what}: the time for tuning is over", "a larger `tune_budget=`"
    )


class Blocks:
    """Alternates between what is in force, ``new`` False, and what might replace it, ``new`` True.

    Ask :attr:`new` what the next iteration is to run under, then tell :meth:`record` its seconds.
    """

    def __init__(self) -> None:
        self.won: bool | None = None
        #: Whether it was stopped because the time for tuning was over.
        self.late = False
        self._scores: tuple[list[float], list[float]] = ([], [])
        self._open: list[float] = []
        self._order = self._turn()
        self._cold = 0

    @staticmethod
    def _turn() -> list[bool]:
        return [False, True, True, False]

    @property
    def decided(self) -> bool:
        """Whether :attr:`won` says which of the two is to stay."""
        return self.won is not None

    @property
    def cold(self) -> int:
        """How many iterations from here on are not compared."""
        return self._cold

    @property
    def new(self) -> bool:
        """What the next iteration is to run under; the winner once that is decided."""
        return self.won if self.won is not None else self._order[0]

    @property
    def speedups(self) -> list[float]:
        """Of each pair: the seconds of what was in force over those of what might replace it."""
        return paired_ratios(*self._scores)

    @property
    def interval(self) -> Interval:
        """The median of :attr:`speedups`; raises ``ValueError`` before there is a pair."""
        return median_interval(self.speedups)

    def seconds(self, new: bool) -> float:
        """The median of an iteration over the blocks of one of the two."""
        return statistics.median(self._scores[new])

    def record(self, seconds: float) -> None:
        """An iteration took so long under :attr:`new`."""
        if self.decided:
            return
        if self._cold:
            self._cold -= 1
            return
        self._open.append(seconds)
        if len(self._open) < LEAST or sum(self._open) < LEAST_S:
            return
        new = self._order.pop(0)
        self._scores[new].append(statistics.median(self._open))
        self._open = []
        if not self._order:
            self._judge()
            self._order = self._turn()
        self._cold = COLD if self.new != new else 0

    def stop(self, late: bool = False) -> None:
        """No more blocks: what is known decides, and what was in force stays where in doubt.
        ``late``: the time for tuning is over."""
        if not self.decided:
            self.won = len(self.speedups) >= PAIRS and self._wins
            self.late = late

    @property
    def _wins(self) -> bool:
        found = self.interval
        return found.low > 1.0 and found.median >= 1.0 + MARGIN

    def _judge(self) -> None:
        found, pairs = self.interval, len(self.speedups)
        if max(self.speedups) < 1.0 and found.median < 0.95:
            self.won = False  # hopeless
        elif pairs >= PAIRS:
            doubt = found.median >= 1.0 + MARGIN and not self._wins
            if not doubt or pairs >= MOST_PAIRS:
                self.won = self._wins

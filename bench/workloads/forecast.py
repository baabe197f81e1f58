"""What is predicted of an iteration, held against iterations next to those that were profiled."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any

#: Iterations that are profiled at least, each between two that are not.
ROUNDS = 7
#: There are more of them, as far as they fit into so many seconds: single iterations of a training
#: differ by 10% and more, on a machine that does nothing else.
SECONDS, MOST = 10.0, 31


@dataclass(frozen=True)
class Forecast:
    """Seconds an iteration: as ``compiled.cost`` predicts it, and as its neighbours took; medians.
    ``ratios`` has each prediction over the mean of its two neighbours."""

    predicted: float
    measured: float
    ratios: tuple[float, ...] = ()

    @property
    def error(self) -> float:
        """How many times too long the prediction is, the median."""
        return statistics.median(self.ratios or [self.predicted / self.measured])


def forecast(
    function: Any, step: Callable[[], object], rounds: int = ROUNDS, clock: Any = perf_counter
) -> Forecast | None:
    """Profile ``rounds`` iterations or more in turn with others; None where the user's own
    statements run.

    A loop that trains step by step is scheduled, and profiled, some trips at a time: what is
    predicted of them is taken as their share of the iteration that they were profiled in.
    """
    until = float(clock()) + SECONDS
    before = _profiled(function)
    taken, measured = list[float](), [_seconds(step, clock)]
    while len(taken) < rounds or (len(taken) < MOST and clock() < until):
        function.profile_next()
        taken.append(_seconds(step, clock))
        if len(taken) == 1 and _profiled(function) == before:
            return None
        measured.append(_seconds(step, clock))
    cost = function.cost
    share = cost.prediction.seconds / cost.measured_s
    predicted = [share * seconds for seconds in taken]
    beside = [(a + b) / 2 for a, b in pairwise(measured)]
    ratios = tuple(p / m for p, m in zip(predicted, beside, strict=True))
    return Forecast(statistics.median(predicted), statistics.median(measured), ratios)


def _profiled(function: Any) -> int:
    return len(function.profile.iteration_s)


def _seconds(step: Callable[[], object], clock: Any) -> float:
    start = float(clock())
    step()
    return float(clock()) - start

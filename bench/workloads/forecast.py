"""What is predicted of an iteration, held against iterations next to those that were profiled."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

#: Iterations that are profiled, each between two that are not.
ROUNDS = 7


@dataclass(frozen=True)
class Forecast:
    """Seconds an iteration: as ``compiled.cost`` predicts it, and as its neighbours took."""

    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """How many times too long the prediction is."""
        return self.predicted / self.measured


def forecast(
    function: Any, step: Callable[[], object], rounds: int = ROUNDS, clock: Any = perf_counter
) -> Forecast | None:
    """Profile some iterations in turn with others; None where the user's own statements run.

    A loop that trains step by step is scheduled, and profiled, some trips at a time: what is
    predicted of them is taken as their share of the iteration that they were profiled in.
    """
    predicted, measured = [], [_seconds(step, clock)]
    for _ in range(rounds):
        before = function.profile
        function.profile_next()
        taken = _seconds(step, clock)
        if function.profile is before or function.profile is None:
            return None
        cost = function.cost
        predicted.append(taken * cost.prediction.seconds / cost.measured_s)
        measured.append(_seconds(step, clock))
    return Forecast(statistics.median(predicted), statistics.median(measured))


def _seconds(step: Callable[[], object], clock: Any) -> float:
    start = float(clock())
    step()
    return float(clock()) - start

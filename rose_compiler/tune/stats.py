"""Medians of ratios with bootstrap intervals: how two schedules are compared."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rose_compiler.base.decision import Decision

#: Noise of a trial, as a share, below which it is not believed to lie.
LEAST_NOISE = 0.01


@dataclass
class Trial:
    """Consecutive iterations of one candidate: seconds and work of each."""

    candidate: int
    seconds: list[float] = field(default_factory=list)
    work: list[float] = field(default_factory=list)

    @property
    def score(self) -> float:
        """Seconds per unit of work, the median over iterations (the lower one of two): one slow
        iteration does not decide."""
        return statistics.median_low(
            s / max(w, 1e-12) for s, w in zip(self.seconds, self.work, strict=True)
        )


@dataclass(frozen=True)
class Interval:
    """A median and the ends of its 95% bootstrap interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def median_interval(values: Sequence[float], *, rounds: int = 1000, seed: int = 0) -> Interval:
    """The median of some values with a percentile-bootstrap 95% interval (Efron, 1979).

    Raises:
        ValueError: without values.
    """
    if not values:
        raise ValueError("no values")
    data = np.asarray(values, dtype=float)
    generator = np.random.default_rng(seed)
    draws = generator.integers(0, len(data), size=(rounds, len(data)))
    medians = np.median(data[draws], axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return Interval(float(np.median(data)), float(low), float(high))


def paired_ratios(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Ratios ``first / second`` of trials that ran side by side."""
    return [a / b for a, b in zip(first, second, strict=False)]


@dataclass(frozen=True)
class Report:
    """What was found of one candidate. ``speedup`` is eager's time over its own, where they met."""

    decision: Decision | None
    trials: int
    seconds_per_work: float | None
    speedup: Interval | None
    verdict: str

    @classmethod
    def of(
        cls,
        decision: Decision | None,
        trials: Sequence[Trial],
        ratios: Sequence[float] | None,
        verdict: str,
    ) -> Report:
        """From a candidate's trials and eager's time over its own in pairs."""
        score = statistics.median(t.score for t in trials) if trials else None
        speedup = median_interval(ratios) if ratios else None
        return cls(decision, len(trials), score, speedup, verdict)


def noise_of(candidates: Iterable[Sequence[Trial]]) -> float | None:
    """The standard deviation of log scores of one candidate's trials; ``None`` while there are
    fewer than three of any."""
    apart = []
    for trials in candidates:
        if len(trials) >= 3:
            logs = [math.log(max(t.score, 1e-12)) for t in trials]
            middle = statistics.median(logs)
            apart += [abs(value - middle) for value in logs]
    if not apart:
        return None
    # 1.4826 makes the median absolute deviation of normal data their standard deviation
    return max(LEAST_NOISE, 1.4826 * statistics.median(apart))

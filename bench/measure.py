"""Paired timing of variants of a training iteration, and the capacity of the machine.

Variants are compared as live trainings in alternation (ABBA): a trial is as many consecutive
iterations as last at least half a second, its score the seconds a unit of work took, and only
neighbouring trials are compared.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

MIN_TRIAL = 0.5


@dataclass(frozen=True)
class Ratio:
    """A ratio of times with its bootstrap 95% interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def bootstrap(values: Sequence[float], resamples: int = 4000, seed: int = 0) -> Ratio:
    """Median of `values` with the percentile bootstrap's 95% interval of the median."""
    data = np.asarray(values, dtype=float)
    rng = np.random.default_rng(seed)
    medians = np.median(data[rng.integers(0, len(data), (resamples, len(data)))], axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return Ratio(float(np.median(data)), float(low), float(high))


def trial(step: Callable[[], float], min_seconds: float = MIN_TRIAL) -> float:
    """Seconds per unit of work over consecutive steps lasting `min_seconds`; `step` returns units."""
    units, start = 0.0, perf_counter()
    while True:
        units += step()
        elapsed = perf_counter() - start
        if elapsed >= min_seconds:
            return elapsed / units


def abba(
    variants: Mapping[str, Callable[[], float]], pairs: int, min_seconds: float = MIN_TRIAL
) -> dict[str, list[float]]:
    """Scores by variant, `pairs` each: rounds run forwards and backwards in turn.

    Round r of one variant neighbours round r of every other, so ratios by index are paired.
    """
    scores: dict[str, list[float]] = {name: [] for name in variants}
    order = list(variants)
    for r in range(pairs):
        for name in order if r % 2 == 0 else reversed(order):
            scores[name].append(trial(variants[name], min_seconds))
    return scores


def ratio(scores: Mapping[str, Sequence[float]], slow: str, fast: str) -> Ratio:
    """How many times faster `fast` is than `slow`, from paired scores."""
    return bootstrap([a / b for a, b in zip(scores[slow], scores[fast], strict=True)])


_COPY = """
import sys, time
{setup}
for _ in range(3): f()
print("ready", flush=True)
sys.stdin.readline()
n, t = 0, time.perf_counter()
while time.perf_counter() - t < {seconds}:
    f(); n += 1
print(n / (time.perf_counter() - t), flush=True)
"""


def rates(setups: Sequence[str], seconds: float = 1.0) -> list[float]:
    """Calls a second of each set-up's `f()`, all at once, a process each."""
    procs = [
        subprocess.Popen(
            [sys.executable, "-c", _COPY.format(setup=s, seconds=seconds)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
        for s in setups
    ]
    for p in procs:
        assert p.stdout is not None
        p.stdout.readline()
    for p in procs:
        assert p.stdin is not None
        p.stdin.write("\n")
        p.stdin.flush()
    return [float(p.communicate()[0].strip()) for p in procs]


def capacity(setup: str, repeats: int = 3) -> float:
    """Work two single-core copies of `setup`'s `f()` do together, in units of one alone."""
    alone = [rates([setup])[0] for _ in range(repeats)]
    both = [sum(rates([setup, setup])) for _ in range(repeats)]
    return float(np.median(both) / np.median(alone))

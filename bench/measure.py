"""Paired timing of variants of a training iteration, and the capacity of the machine.

Variants are compared as live trainings in alternation (ABBA): a trial is as many consecutive
iterations as last at least half a second, its score the seconds an iteration took, and only
neighbouring trials are compared.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from time import perf_counter, sleep

import numpy as np

from bench.quiet import Bystanders

#: Seconds a trial lasts at least.
MIN_TRIAL = 0.5
#: Copies that run at once to measure capacity.
COPIES = 2
#: Share of all cores that other processes may take during a trial.
NOISE = 0.08

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Estimate:
    """A median with its bootstrap 95% interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def bootstrap(values: Sequence[float], resamples: int = 4000, seed: int = 0) -> Estimate:
    """Median of `values` with the percentile bootstrap's 95% interval of the median."""
    data = np.asarray(values, dtype=float)
    rng = np.random.default_rng(seed)
    medians = np.median(data[rng.integers(0, len(data), (resamples, len(data)))], axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return Estimate(float(np.median(data)), float(low), float(high))


def trial(step: Callable[[], object], min_seconds: float = MIN_TRIAL) -> float:
    """Seconds a step takes, over consecutive steps that last at least `min_seconds`."""
    count, start = 0, perf_counter()
    while True:
        step()
        count += 1
        elapsed = perf_counter() - start
        if elapsed >= min_seconds:
            return elapsed / count


@dataclass
class Scores:
    """Seconds a step, by variant, paired by index. `noisy` of all trials ran beside other load;
    `repeated` trials did so too, and were run again."""

    seconds: dict[str, list[float]]
    noisy: int = 0
    repeated: int = 0


def abba(
    variants: Mapping[str, Callable[[], object]],
    pairs: int,
    min_seconds: float = MIN_TRIAL,
    again: int | None = None,
) -> Scores:
    """Scores of `pairs` trials of each variant: rounds run forwards and backwards in turn.

    Trial r of one variant neighbours trial r of every other, so ratios by index are paired. A
    trial during which other processes took more than `NOISE` of the machine is run again, as long
    as no more than half as many trials again are run, or than `again`.
    """
    scores: dict[str, list[float]] = {name: [] for name in variants}
    order = list(variants)
    bystanders, noisy = Bystanders(), 0
    most = pairs * len(variants) // 2
    if again is not None:
        most = min(most, again)
    repeated = 0
    for r in range(pairs):
        for name in order if r % 2 == 0 else reversed(order):
            while True:
                bystanders.start()
                score = trial(variants[name], min_seconds)
                loud = bystanders.share() > NOISE
                if not loud or repeated == most:
                    break
                repeated += 1
            noisy += loud
            scores[name].append(score)
    return Scores(scores, noisy, repeated)


def fastest(variants: Mapping[str, Callable[[], object]], pairs: int, min_seconds: float) -> str:
    """The variant with the least median score, after one warm-up step of each."""
    if len(variants) == 1:
        return next(iter(variants))
    for step in variants.values():
        step()
    scores = abba(variants, pairs, min_seconds).seconds
    return min(scores, key=lambda name: float(np.median(scores[name])))


def ratio(slow: Sequence[float], fast: Sequence[float]) -> Estimate:
    """How many times faster `fast` is than `slow`, from scores paired by index."""
    return bootstrap([a / b for a, b in zip(slow, fast, strict=True)])


def bounds(work: Sequence[float], capacity: float, critical_path: float) -> list[float]:
    """Least possible seconds an iteration, trial by trial: max(critical path, work / capacity).

    `work`: seconds an iteration takes with everything on one core. `capacity`: how much work the
    cores do together, in units of one alone; noise may put it above their number. `critical_path`:
    seconds of what must follow upon each other.
    """
    capacity = min(capacity, COPIES)
    return [max(critical_path, seconds / capacity) for seconds in work]


def room_used(base: Sequence[float], fast: Sequence[float], bound: Sequence[float]) -> Estimate:
    """Which share of the way from `base` to the bound `fast` has gone, from medians.

    The interval resamples trials, the same ones of all three.
    """
    data = np.asarray([base, fast, bound], dtype=float)
    rng = np.random.default_rng(0)
    count = data.shape[1]
    drawn = np.median(data[:, rng.integers(0, count, (4000, count))], axis=2)
    shares = (drawn[0] - drawn[1]) / (drawn[0] - drawn[2])
    middle = np.median(data, axis=1)
    low, high = np.percentile(shares, [2.5, 97.5])
    return Estimate(
        float((middle[0] - middle[1]) / (middle[0] - middle[2])), float(low), float(high)
    )


_COPY = """
import select, sys, time
{setup}
f()
print("ready", flush=True)
sys.stdin.readline()
ends = [time.perf_counter()]
while not select.select([sys.stdin], [], [], 0)[0]:
    f()
    ends.append(time.perf_counter())
print(*ends[: max(2, len(ends) - 1)], flush=True)
"""


def rates(setups: Sequence[str], seconds: float = 1.0) -> list[float]:
    """Calls a second of each set-up's `f()`, all at once, a process each.

    A process's last call does not count: others may have stopped by then. `seconds` should hold
    several calls.
    """
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _COPY.format(setup=setup)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for setup in setups
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RuntimeError("a copy of the operation did not start")
        for _ in range(2):  # begin, end
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
            sleep(seconds)
            seconds = 0
        found = []
        for process in processes:
            ends = [float(x) for x in process.communicate(timeout=60)[0].split()]
            found.append((len(ends) - 1) / (ends[-1] - ends[0]))
        return found
    finally:
        for process in processes:
            process.kill()
            process.wait()


def capacity(setup: str, repeats: int = 3, seconds: float = 1.0, retries: int = 2) -> Estimate:
    """Work that two single-core copies of `setup`'s `f()` do together, in units of one alone.

    Repeated, `retries` times in all, where other processes took part of the machine.
    """
    found: list[float] = []
    bystanders = Bystanders()
    while len(found) < repeats:
        bystanders.start()
        (alone,) = rates([setup], seconds)
        both = sum(rates([setup] * COPIES, seconds))
        if bystanders.share() > NOISE and retries > 0:
            retries -= 1
            continue
        found.append(both / alone)
    return bootstrap(found)


def machine() -> str:
    """Cores, processor and versions, on one line."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    parts = [f"{_cores()} cores of {model}", f"Python {platform.python_version()}"]
    for name in ("torch", "gymnasium", "mujoco", "envpool"):
        try:
            parts.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(parts)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

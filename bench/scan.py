"""Generalized advantages over time, compiled against the loop as written: ``python -m bench.scan``.

For each shape (steps x environments) and both numerics: seconds of the eager loop and of the
compiled one once its recurrence is compiled to C, the ratio of paired trials with a 95% interval,
and the greatest difference. A call goes through about a thousand steps, so that what calling costs
is spread over them. Torch has the threads that it takes by itself: its own operations on rows of
these sizes run on one.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rose_compiler
from bench.measure import abba, bootstrap, ratio
from rose_compiler.base.decision import Decision

SHAPES = ((2048, 1), (128, 4096), (64, 32))
GOAL = 20.0
#: Seconds that compiling the recurrence to C is waited for.
PATIENCE_S = 10.0


@dataclass
class Rollout:
    """What an iteration has collected, time first: shapes (steps, envs)."""

    steps: int
    repeats: int
    rewards: Tensor
    values: Tensor
    dones: Tensor
    advantages: Tensor

    @classmethod
    def random(cls, steps: int, envs: int) -> Rollout:
        """A rollout of random numbers; one trip in twenty ends an episode."""
        g = torch.Generator().manual_seed(steps)
        dones = (torch.rand(steps, envs, generator=g) < 0.05).float()
        rewards, values = (torch.randn(steps, envs, generator=g) for _ in range(2))
        return cls(steps, max(1, 1024 // steps), rewards, values, dones, torch.zeros(steps, envs))


def advantages(buf: Rollout, gamma: float, lam: float, next_value: Tensor) -> Tensor:
    """Generalized advantage estimates (Schulman et al. 2016, equation 16), a step at a time."""
    last = torch.zeros_like(next_value)
    for t in reversed(range(buf.steps)):
        following = next_value if t == buf.steps - 1 else buf.values[t + 1]
        alive = 1.0 - buf.dones[t]
        delta = buf.rewards[t] + gamma * following * alive - buf.values[t]
        last = delta + gamma * lam * alive * last
        buf.advantages[t] = last
    return last


def several(buf: Rollout, gamma: float, lam: float, next_value: Tensor) -> Tensor:
    """The estimates of a few rollouts, so that the cost of a call is spread over them."""
    last = next_value
    for _ in range(buf.repeats):
        last = advantages(buf, gamma, lam, next_value)
    return last


def compiled(numerics: str, folder: Path) -> Any:
    """The loop compiled, without a search: there is one schedule."""
    path = folder / "decision.json"
    Decision().save(path)
    return rose_compiler.compile(several, numerics=numerics, tune=path)


def difference(fn: Callable[..., Any], steps: int, envs: int) -> float:
    """How far a form is from the loop at most, relative to the larger of 1 and the value."""
    found, expected = Rollout.random(steps, envs), Rollout.random(steps, envs)
    next_value = torch.randn(envs, generator=torch.Generator().manual_seed(1))
    fn(found, 0.99, 0.95, next_value)
    advantages(expected, 0.99, 0.95, next_value)
    scale = expected.advantages.abs().clamp(min=1.0)
    return float(((found.advantages - expected.advantages).abs() / scale).max())


def row(steps: int, envs: int, numerics: str, pairs: int, seconds: float, folder: Path) -> str:
    """One line of the table."""
    buf, next_value = Rollout.random(steps, envs), torch.zeros(envs)
    fast = compiled(numerics, folder)
    given = (buf, 0.99, 0.95, next_value)
    for _ in range(3):  # the first call is watched, the second is built
        fast(*given)
    until = time.monotonic() + PATIENCE_S
    while "native-scan" not in (remarks := fast.explain()) and time.monotonic() < until:
        for _ in range(20):
            fast(*given)
    assert "scan [scan]" in remarks, remarks
    how = "C" if "native-scan" in remarks else "numpy"
    variants = {"eager": lambda: several(*given), "compiled": lambda: fast(*given)}
    scores = abba(variants, pairs, seconds)
    slow, quick = ([s / buf.repeats for s in scores.seconds[name]] for name in variants)
    gain, off = ratio(slow, quick), difference(fast, steps, envs)
    verdict = "goal met" if gain.high >= GOAL and off <= 1e-6 else f"under {GOAL:.0f}x"
    return (
        f"{steps:5d} x {envs:<5d} {numerics:8} {bootstrap(slow).median * 1e3:8.2f} ms "
        f"{bootstrap(quick).median * 1e3:8.3f} ms   {gain!s:>24}x   {off:.1e}   "
        f"{verdict}, {how}   noisy {scores.noisy}/{2 * pairs}"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=15, help="trials of each variant")
    parser.add_argument("--seconds", type=float, default=0.5, help="least length of a trial")
    chosen = parser.parse_args()
    print(
        f"{'shape':13} {'numerics':8} {'eager':>11} {'compiled':>11}   {'times as fast':>25}   off"
    )
    with tempfile.TemporaryDirectory() as folder:
        for steps, envs in SHAPES:
            for numerics in ("bitwise", "close"):
                args = (steps, envs, numerics, chosen.pairs, chosen.seconds, Path(folder))
                print(row(*args), flush=True)


if __name__ == "__main__":
    main()

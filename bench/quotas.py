"""Core quotas for real: ``python -m bench.quotas [--pairs 15]``.

A simulator in a process and a policy in this one advance two halves of a batch in turn, so that
one simulates while the other acts. Unmanaged, the numeric libraries of both start a thread for
every core, as they do by default, and fight. The loop is compiled: the tuner finds the schedule and
the quotas, each side with cores of its own and as many threads. Then it is compared in pairs with
the loop as written, and with the same overlap on threads that nobody bounds.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import rose_compiler
from bench.measure import abba, bootstrap, machine, ratio
from rose_compiler.base.decision import Decision
from rose_compiler.runtime.hosts.hosted import Hosted

HALVES = 2


@dataclass(frozen=True)
class Sizes:
    """Environments in a half, numbers in a state, substeps of a step, steps of an iteration."""

    envs: int = 256
    width: int = 192
    substeps: int = 20
    hidden: int = 768
    steps: int = 4


class Simulator:
    """Environments made of tensors, in two halves; its dynamics are dense, so threads pay off."""

    def __init__(self, sizes: Sizes) -> None:
        torch.manual_seed(0)
        self._substeps = sizes.substeps
        self._dynamics = torch.randn(sizes.width, sizes.width) / sizes.width**0.5
        self._state = [torch.zeros(sizes.envs, sizes.width) for _ in range(HALVES)]

    def step(self, half: int, action: torch.Tensor) -> torch.Tensor:
        """Observations of one half after its action: (envs, width), float32."""
        state = self._state[half]
        with torch.no_grad():
            for _ in range(self._substeps):
                state = torch.tanh(state @ self._dynamics + action)
        self._state[half] = state
        return state


def make_policy(sizes: Sizes) -> nn.Module:
    """The policy, the same for every variant."""
    torch.manual_seed(1)
    return nn.Sequential(
        *(nn.Linear(sizes.width, sizes.hidden), nn.Tanh()),
        *(nn.Linear(sizes.hidden, sizes.hidden), nn.Tanh()),
        *(nn.Linear(sizes.hidden, sizes.width), nn.Tanh()),
    )


def iteration(
    policy: nn.Module, sim: Hosted, first: torch.Tensor, second: torch.Tensor, steps: int
) -> torch.Tensor:
    """Advance both halves by ``steps`` steps; the last observations of both."""
    with torch.no_grad():
        for _ in range(steps):
            action = policy(first)
            first = sim.step(0, action)
            action_2 = policy(second)
            second = sim.step(1, action_2)
        last = torch.cat((first, second))
    return last


class Loop:
    """One live loop with a simulator's process of its own."""

    def __init__(self, sizes: Sizes, step: Callable[..., torch.Tensor], stack: ExitStack) -> None:
        self.sim = stack.enter_context(
            rose_compiler.hosted(partial(Simulator, sizes), threads=None, timeout=300.0)
        )
        self.sim.ready()
        start = torch.zeros(sizes.envs, sizes.width)
        self._step = partial(step, make_policy(sizes), self.sim, start, start, sizes.steps)

    def iteration(self) -> torch.Tensor:
        """Run one iteration."""
        return self._step()


def fixed(decision: Decision, folder: str) -> Any:
    """The loop compiled to one schedule, without tuning."""
    path = os.path.join(folder, "decision.json")
    decision.save(path)
    return rose_compiler.compile(iteration, tune=path)


def main(argv: list[str] | None = None) -> int:
    """Tune, then compare in pairs; the exit status is 1 below 1.15x over unmanaged threads."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--trial", type=float, default=0.5, help="seconds a trial lasts at least")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds that tuning may take")
    parser.add_argument("--small", action="store_true", help="sizes that only try the command")
    options = parser.parse_args(argv)
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        print("one core can't be divided")
        return 0
    sizes = Sizes(16, 16, 2, 16, 2) if options.small else Sizes()
    threads = torch.get_num_threads()
    torch.set_num_threads(cores)
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, threads)
        folder = stack.enter_context(TemporaryDirectory())
        overlap = fixed(Decision(hosted=True), folder)
        tuned = rose_compiler.compile(iteration, tune_budget=options.budget)
        stack.callback(overlap.close)
        stack.callback(tuned.close)
        live = Loop(sizes, tuned, stack)
        began = time.perf_counter()
        while not tuned.settled:
            live.iteration()
        print(tuned.explain(width=100))
        print(f"tuned for {time.perf_counter() - began:.0f} s: [{tuned.decision}]")
        plan = tuned.quota_plan
        variants: dict[str, Callable[[], object]] = {
            "as written, unmanaged": Loop(sizes, iteration, stack).iteration,
            "overlapped, unmanaged": Loop(sizes, overlap, stack).iteration,
            "compiled, quotas found": live.iteration,
        }
        for step in variants.values():
            step()
            step()
        scores = abba(variants, options.pairs, options.trial)
    mine = scores.seconds["compiled, quotas found"]
    table = Table("", "ms an iteration", "compiled is faster by", title=machine())
    for name, seconds in scores.seconds.items():
        gain = ratio(seconds, mine)
        table.add_row(name, str(bootstrap([1e3 * s for s in seconds])), str(gain))
    Console().print(table)
    print(f"{scores.noisy} trials ran beside other load")
    if tuned.decision.cores and plan.predicted_s is not None:
        error = bootstrap([100 * (plan.predicted_s / s - 1) for s in mine])
        print(f"predicted {1e3 * plan.predicted_s:.1f} ms, which is off by {error} %")
    best = min(
        "as written, unmanaged", "overlapped, unmanaged", key=lambda n: min(scores.seconds[n])
    )
    return int(ratio(scores.seconds[best], mine).median < 1.15)


if __name__ == "__main__":
    raise SystemExit(main())

"""Core quotas for real: ``python -m bench.quotas [--pairs 15]``.

A simulator in a process and a policy in this one advance two halves of a batch in turn, so that
one simulates while the other acts. Unmanaged, the numeric libraries of both start a thread for
every core, as they do by default, and fight. With quotas each side has the cores that the tuner
found, and as many threads. All variants are live at once and are compared in pairs; "in turn" does
the same work without overlap, with all cores for whoever runs.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from bench.measure import abba, bootstrap, machine, ratio
from rose_compiler.base.machine import Schedule, Task, detect_cpu
from rose_compiler.base.quota import THREADS, QuotaPlan
from rose_compiler.runtime.hosts import ProcessHost
from rose_compiler.runtime.quotas import Cores
from rose_compiler.tune.slack import Tuned, tune

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
        self._sizes = sizes
        self._dynamics = torch.randn(sizes.width, sizes.width) / sizes.width**0.5
        self._state = [torch.randn(sizes.envs, sizes.width) for _ in range(HALVES)]

    def step(self, half: int, action: bytes) -> tuple[bytes, float, float]:
        """Observations of one half after its action, and when the step began and ended."""
        began = time.perf_counter()
        push = torch.frombuffer(bytearray(action), dtype=torch.float32)
        state = self._state[half]
        push = push.reshape(state.shape)
        with torch.no_grad():
            for _ in range(self._sizes.substeps):
                state = torch.tanh(state @ self._dynamics + push)
        self._state[half] = state
        return state.numpy().tobytes(), began, time.perf_counter()


def build(sizes: Sizes) -> Simulator:
    """The simulator's factory."""
    return Simulator(sizes)


class Loop:
    """One live training-like loop: a simulator's process and a policy in this one."""

    def __init__(self, sizes: Sizes, plan: QuotaPlan | None) -> None:
        self._sizes = sizes
        self._stack = ExitStack()
        self._applied = None if plan is None else self._stack.enter_context(Cores().apply(plan))
        threads = dict.fromkeys(THREADS, str(len(os.sched_getaffinity(0))))
        environment = threads if self._applied is None else self._applied.environment("sim")
        self.host = ProcessHost(
            partial(build, sizes), name="sim", environment=environment, timeout=120.0
        )
        self._stack.callback(self.host.close)
        if self._applied is not None:
            self._applied.started("sim", self.host.pid)
        self.host.ready()
        torch.manual_seed(1)
        self._policy = nn.Sequential(
            nn.Linear(sizes.width, sizes.hidden),
            nn.Tanh(),
            nn.Linear(sizes.hidden, sizes.hidden),
            nn.Tanh(),
            nn.Linear(sizes.hidden, sizes.width),
            nn.Tanh(),
        )
        self._obs = [np.zeros((sizes.envs, sizes.width), np.float32) for _ in range(HALVES)]
        self.schedule = Schedule(0.0)

    def iteration(self, overlapped: bool = True) -> None:
        """One iteration; :attr:`schedule` says when each step and each act ran."""
        with self._entered():
            self._run(overlapped)

    def close(self) -> None:
        """End the simulator's process."""
        self._stack.close()

    def _entered(self) -> AbstractContextManager[Any]:
        if self._applied is None:
            torch.set_num_threads(len(os.sched_getaffinity(0)))
            return nullcontext()
        return self._applied.entered("policy")

    def _run(self, overlapped: bool) -> None:
        origin = time.perf_counter()
        start: dict[str, float] = {}
        end: dict[str, float] = {}
        pending: list[Any] = [None] * HALVES
        for t in range(self._sizes.steps + 1):
            for half in range(HALVES):
                if pending[half] is not None:
                    data, began, ended = self.host.wait(pending[half])
                    start[f"step {t - 1} {half}"] = began - origin
                    end[f"step {t - 1} {half}"] = ended - origin
                    self._obs[half] = np.frombuffer(data, np.float32).reshape(self._obs[half].shape)
                if t == self._sizes.steps:
                    continue
                start[f"act {t} {half}"] = time.perf_counter() - origin
                with torch.no_grad():
                    action = self._policy(torch.from_numpy(self._obs[half].copy()))
                end[f"act {t} {half}"] = time.perf_counter() - origin
                pending[half] = self.host.submit("step", half, action.numpy().tobytes())
                if not overlapped:
                    self.host.wait(pending[half])
        self.schedule = Schedule(time.perf_counter() - origin, start, end)


def tasks(steps: int) -> list[Task]:
    """The loop as a graph of branches."""
    found: list[Task] = []
    for t in range(steps):
        for half in range(HALVES):
            before = (f"step {t - 1} {half}",) if t else ()
            found.append(Task(f"act {t} {half}", "policy", 0.0, after=before))
            found.append(Task(f"step {t} {half}", "sim", 0.0, after=(f"act {t} {half}",)))
    return found


def find(sizes: Sizes) -> tuple[QuotaPlan, Tuned]:
    """The quotas that the tuner finds on this machine, each tried in a process of its own."""
    cpu = detect_cpu()

    def measure(chunks: Mapping[str, int]) -> Schedule:
        loop = Loop(sizes, QuotaPlan.divide("cores", cpu, chunks))
        try:
            loop.iteration()  # warm up
            runs = []
            for _ in range(3):
                loop.iteration()
                runs.append(loop.schedule)
            return min(runs, key=lambda run: run.makespan)
        finally:
            loop.close()

    tuned = tune(tasks(sizes.steps), measure, cpu.cores, lanes=["sim", "policy"])
    plan = QuotaPlan.divide(
        "cores", cpu, tuned.chunks, why=tuned.why(), predicted_s=tuned.predicted_s
    )
    return plan, tuned


def main(argv: list[str] | None = None) -> int:
    """Tune, then compare in pairs; the exit status is 1 below 1.15x over unmanaged threads."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--trial", type=float, default=0.5, help="seconds a trial lasts at least")
    parser.add_argument("--small", action="store_true", help="sizes that only try the command")
    options = parser.parse_args(argv)
    if len(os.sched_getaffinity(0)) < 2:
        print("one core can't be divided")
        return 0
    sizes = Sizes(16, 16, 2, 16, 2) if options.small else Sizes()
    threads = torch.get_num_threads()
    plan, tuned = find(sizes)
    print(plan.explain())
    print(f"found with {tuned.iterations} measured iterations")
    unmanaged, managed = Loop(sizes, None), Loop(sizes, plan)
    variants: dict[str, Callable[[], object]] = {
        "unmanaged": unmanaged.iteration,
        "quotas": managed.iteration,
        "in turn": partial(unmanaged.iteration, False),
    }
    try:
        for step in variants.values():
            step()
        scores = abba(variants, options.pairs, options.trial)
    finally:
        unmanaged.close()
        managed.close()
        torch.set_num_threads(threads)
    table = Table("", "ms an iteration", "quotas are faster by", title=machine())
    for name, seconds in scores.seconds.items():
        gain = ratio(seconds, scores.seconds["quotas"])
        table.add_row(name, str(bootstrap([1e3 * s for s in seconds])), str(gain))
    Console().print(table)
    print(f"{scores.noisy} trials ran beside other load")
    return int(ratio(scores.seconds["unmanaged"], scores.seconds["quotas"]).median < 1.15)


if __name__ == "__main__":
    raise SystemExit(main())

"""A loop that neither tiling nor deferring helps, pipelined: ``python -m bench.pipeline``.

A robot in one piece is stepped by a component of the user's; a policy follows it, and what was seen
is encoded, with a state of its own that goes from trip to trip, and kept. Nothing of it is a batch,
and the encoder's trips depend on each other. The tuner is left to find the schedule; then eager and
compiled run in turn (ABBA), from the same start, and have to end in the same bits.

Printed are the times, the paired ratio with its 95% interval, what bounds the trips (ResMII,
RecMII) and the emitted loop.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import rose_compiler
from bench.measure import abba, bootstrap, ratio
from rose_compiler.base.decision import Decision

WIDTH = 512
TRIPS = 100


class Arm:
    """A component of the user's: dynamics of a state that only it holds."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(1)
        self.x = torch.randn(16, WIDTH, generator=g)
        self.a = torch.randn(WIDTH, WIDTH, generator=g) / WIDTH**0.5

    @rose_compiler.component(reads=["self"], writes=["self"])
    def move(self, action: Tensor) -> Tensor:
        """One step of the arm: action and what is seen are (16, WIDTH)."""
        for _ in range(2):
            self.x = torch.tanh(0.9 * self.x @ self.a + 0.1 * action)
        return self.x.clone()


class Watching:
    """The loop: policy, arm, encoder with a memory, a record of it."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        self.arm = Arm()
        self.policy = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.encoder = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.memory = torch.zeros(16, WIDTH)
        self.trips = TRIPS

    def iteration(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """``trips`` steps from what is seen, ``x``; the last of it, and the record."""
        kept: list[Tensor] = []
        with torch.no_grad():
            for _ in range(self.trips):
                action = self.policy(x)
                x = self.arm.move(action)
                code = self.encoder(x)
                self.memory.mul_(0.9).add_(code)
                kept.append(torch.tanh(self.memory).mean(0))
        return x, kept


def main() -> None:
    """Tune, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--pairs", type=int, default=15, help="pairs of trials")
    parser.add_argument("--trial", type=float, default=0.5, help="least seconds of a trial")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of tuning")
    given = parser.parse_args()
    torch.set_num_threads(1)
    watching = Watching()
    x = torch.ones(16, WIDTH)
    with rose_compiler.knobs(cache=False):
        fast = rose_compiler.compile(
            watching.iteration, numerics="bitwise", tune_budget=given.budget
        )
        began = time.perf_counter()
        x, _ = fast(x)
        while not fast.settled and time.perf_counter() - began < 2 * given.budget:
            x, _ = fast(x)
        print(fast.explain(width=110))
        fast.close()
        pipelined = next((one for one in tried(fast) if one.pipeline), None)
        if pipelined is None:
            print("no pipelined schedule was proposed")
            return
        print(f"\n[{pipelined}] against the loop as written:")
        compare(pipelined, given.pairs, given.trial)


def tried(fast: rose_compiler.Compiled) -> list[Decision]:
    """The schedules that tuning saw."""
    assert fast._last is not None
    chooser = fast._last.unit.tuning()._chooser
    return [] if chooser is None else [one for one in chooser.candidates if one is not None]


class Run:
    """One variant: where it is, and how many iterations it has made."""

    def __init__(self, watching: Watching, fn: Callable[[Tensor], tuple[Tensor, list[Tensor]]]):
        self.watching, self.fn = watching, fn
        self.x = torch.ones(16, WIDTH)
        self.kept: list[Tensor] = []
        self.count = 0

    def step(self) -> None:
        """One iteration more."""
        self.x, self.kept = self.fn(self.x)
        self.count += 1

    @property
    def bits(self) -> list[Tensor]:
        """All that can be seen."""
        return [self.x, self.watching.memory, self.watching.arm.x, *self.kept]


def compare(decision: Decision, pairs: int, trial_s: float) -> None:
    """Eager and a schedule in turn, and their bits."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "decision.json"
        decision.save(path)
        watching, plain = Watching(), Watching()
        fast = rose_compiler.compile(watching.iteration, numerics="bitwise", tune=path)
    eager, compiled = Run(plain, plain.iteration), Run(watching, fast)
    for one in (eager, compiled):
        for _ in range(6):  # the first is watched, three are profiled
            one.step()
    scores = abba({"eager": eager.step, "pipelined": compiled.step}, pairs, trial_s)
    for name, each in scores.seconds.items():
        print(f"{name}: {1e3 * bootstrap(each).median:.1f} ms an iteration of {TRIPS} trips")
    gain = ratio(scores.seconds["eager"], scores.seconds["pipelined"])
    model = fast.cost
    print(f"eager / pipelined: {gain} in {pairs} pairs, {scores.noisy} trials beside other load")
    print(
        f"predicted {1e3 * model.prediction.seconds:.1f} ms, measured while profiled "
        f"{1e3 * model.measured_s:.1f} ms"
    )
    while eager.count != compiled.count:
        min(eager, compiled, key=lambda one: one.count).step()
    same = len(eager.bits) == len(compiled.bits) and all(
        map(torch.equal, eager.bits, compiled.bits)
    )
    print(f"after {eager.count} iterations of each the bits are {'equal' if same else 'NOT equal'}")
    print("\n" + "\n".join(str(r.why) for r in model.remarks(pipelined=True)))
    print("\n" + fast.source)
    fast.close()


if __name__ == "__main__":
    main()

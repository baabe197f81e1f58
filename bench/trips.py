"""A whole off-policy training whose trips take a third of a millisecond: `python -m bench.trips`.

One call holds the loop over iterations. Its trips are so short that whatever is done about each of
them shows. Chunks of the loop as written and of the compiled one run in turn, and neighbours are
compared. The compiled loop has settled by then: it must not be below 0.98 times the speed of the
loop as written.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import rose_compiler
from bench import measure


class Plane:
    """Points on a plane that an action moves."""

    def __init__(self, rows: int) -> None:
        self.x = torch.zeros(rows, 2)

    def step(self, action: Tensor) -> tuple[Tensor, Tensor]:
        """Move; where the points are, and how far from the middle, negative."""
        self.x = self.x * 0.9 + 0.1 * action
        return self.x, -self.x.square().sum(1)


def train(net: Any, optimizer: Any, plane: Plane, obs: Tensor, steps: int) -> Tensor:
    """Act, store nothing, and update at once: the least that trains."""
    for _ in range(steps):
        with torch.no_grad():
            action = torch.tanh(net(obs))
        obs, reward = plane.step(action)
        loss = (net(obs).sum(1) - reward).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return obs


class Training:
    """One live training of :func:`train`."""

    def __init__(self, fn: Any, trips: int) -> None:
        torch.manual_seed(0)
        self.fn, self.trips = fn, trips
        self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-3)
        self.plane, self.obs = Plane(16), torch.zeros(16, 2)

    def __call__(self) -> None:
        """A chunk of trips."""
        self.obs = self.fn(self.net, self.optimizer, self.plane, self.obs, self.trips)


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="bench.trips", description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--trips", type=int, default=1000, help="trips a call")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    compiled = rose_compiler.compile(train)
    eager, fast = Training(train, args.trips), Training(compiled, args.trips)
    for _ in range(200):
        fast()
        if compiled.settled:
            break
    eager()
    scores = measure.abba({"eager": eager, "compiled": fast}, args.pairs, 0.5).seconds
    ratio = measure.ratio(scores["eager"], scores["compiled"])
    console = Console()
    micro = {k: 1e6 * sorted(v)[len(v) // 2] / args.trips for k, v in scores.items()}
    console.print(
        f"a trip: eager {micro['eager']:.0f} µs, compiled {micro['compiled']:.0f} µs; "
        f"speed {ratio} times eager's (never below 0.98); settled: {compiled.settled}, "
        f"[{compiled.decision}]",
        markup=False,
        highlight=False,
    )
    if not (eager.obs.numel() and torch.isfinite(fast.obs).all()):
        raise SystemExit("the training has come apart")
    console.print(measure.machine(), highlight=False)
    compiled.close()


if __name__ == "__main__":
    main()

"""The quota tuner against exhaustive search: ``python -m bench.branches [--graphs 200]``.

Random graphs of branches run on a virtual H200, each lane on SMs of its own. Exhaustive search
would simulate an iteration for every way of giving the 16 chunks to the lanes. The tuner sees what
a real iteration would show it, starts and ends. What counts as its evaluations is every plan that
it measured an iteration of, or predicted one of by its curves.

The optimum is that of all plans. They are simulated in the order of a bound, the time without any
contention for memory, up to where the bound alone is above the best: no later one can be better.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.progress import track
from rich.table import Table

from rose_compiler.base.gpu import GpuRun, Kernel, simulate_gpu
from rose_compiler.base.machine import load_machine
from rose_compiler.base.quota import QuotaPlan
from rose_compiler.tune.critical import timing
from rose_compiler.tune.slack import tune

MACHINE = load_machine("h200")
#: The share of all plans that the tuner may look at.
SHARE = 0.05


def graph(seed: int) -> list[Kernel]:
    """A random graph: stages of parallel branches between joins, with some edges across."""
    rng = random.Random(seed)
    lanes = [f"lane{k}" for k in range(rng.choice([3, 4, 4, 4, 5]))]
    kernels: list[Kernel] = []

    def add(lane: str, after: tuple[str, ...]) -> str:
        name = f"k{len(kernels)}"
        kernels.append(
            Kernel(
                name,
                lane,
                work_s=rng.uniform(0.2, 3.0),
                demand=rng.choice([16, 40, 64, 100, 132]),
                after=after,
                serial=rng.uniform(0.0, 0.4),
                bandwidth=rng.choice([0.0, 0.0, 0.1, 0.3]),
            )
        )
        return name

    joined: tuple[str, ...] = ()
    for _ in range(rng.randint(1, 4)):
        ends: list[str] = []
        for lane in rng.sample(lanes, rng.randint(2, len(lanes))):
            last: tuple[str, ...] = joined
            for _ in range(rng.randint(1, 3)):
                last = (add(lane, last),)
                if rng.random() < 0.2 and ends:
                    last = (*last, rng.choice(ends))
            ends.append(last[0])
        joined = tuple(ends)
    for lane in lanes:
        if all(kernel.lane != lane for kernel in kernels):
            add(lane, ())
    return kernels


def run(kernels: list[Kernel], chunks: dict[str, int]) -> GpuRun:
    """One iteration in simulated time."""
    plan = QuotaPlan.divide("green-context", MACHINE, chunks)
    return simulate_gpu(kernels, plan.virtual_gpu())


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way of giving ``total`` chunks to ``parts`` lanes, at least one each."""
    for cuts in itertools.combinations(range(1, total), parts - 1):
        edges = (0, *cuts, total)
        yield tuple(b - a for a, b in itertools.pairwise(edges))


def optimum(kernels: list[Kernel], lanes: list[str]) -> float:
    """The least time of an iteration over all plans."""
    chunk = MACHINE.chunk
    took = {
        k.name: [0.0] + [k.work_s / k.speed(c * chunk) for c in range(1, MACHINE.chunks + 1)]
        for k in kernels
    }
    bounds = []
    for parts in compositions(MACHINE.chunks, len(lanes)):
        chunks = dict(zip(lanes, parts, strict=True))
        alone = timing(kernels, {k.name: took[k.name][chunks[k.lane]] for k in kernels})
        bounds.append((alone.makespan, parts))
    best = float("inf")
    for bound, parts in sorted(bounds):
        if bound >= best:
            break
        best = min(best, run(kernels, dict(zip(lanes, parts, strict=True))).makespan)
    return best


@dataclass(frozen=True)
class Comparison:
    """What the tuner reached of the optimum, and how many of all plans it looked at: measured
    ``iterations`` of, and those with the ones that it predicted only, ``plans``."""

    excess: float
    equal: float
    iterations: int
    plans: int
    exhaustive: int


def compare(seed: int) -> Comparison:
    """Tune one graph, and search it exhaustively."""
    kernels = graph(seed)
    lanes = list(dict.fromkeys(kernel.lane for kernel in kernels))
    exhaustive = math.comb(MACHINE.chunks - 1, len(lanes) - 1)
    most = int(SHARE * exhaustive)
    tuned = tune(
        kernels,
        lambda chunks: run(kernels, dict(chunks)),
        MACHINE.chunks,
        points=3 if most < 10 else 4,
        plans=most,
    )
    best = optimum(kernels, lanes)
    return Comparison(
        tuned.measured_s / best - 1,
        tuned.equal_s / best - 1,
        tuned.iterations,
        tuned.plans,
        exhaustive,
    )


def main(argv: list[str] | None = None) -> int:
    """Print the table; the exit status is 1 outside 2% of the optimum or above 5% of all plans."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--graphs", type=int, default=200)
    options = parser.parse_args(argv)
    found = [compare(seed) for seed in track(range(options.graphs), "graphs", transient=True)]
    excess = sorted(c.excess for c in found)
    cost = sorted(c.plans / c.exhaustive for c in found)
    table = Table("", "median", "worst", title=f"{len(found)} random branch graphs, virtual H200")
    for name, values in (
        ("above the optimum: tuned", excess),
        ("above the optimum: equal quotas", sorted(c.equal for c in found)),
        ("plans measured / all", sorted(c.iterations / c.exhaustive for c in found)),
        ("plans measured or predicted / all", cost),
    ):
        table.add_row(name, f"{values[len(values) // 2]:.2%}", f"{values[-1]:.2%}")
    Console().print(table)
    print(f"within 2%: {sum(e <= 0.02 for e in excess)} of {len(found)}")
    return int(excess[-1] > 0.02 or cost[-1] > SHARE)


if __name__ == "__main__":
    raise SystemExit(main())

"""Predicted against measured time of a PPO iteration: `python -m bench.predict`.

For each schedule: the median of iterations that were not profiled; what the model says from the
schedule's own profile, and from the profile of program order alone (a forecast, before the
schedule has run, scaled by what program order took without profiling, with its interval; or
unknown, where the profile does not stand for those iterations); and the lower bound. The goals are
ratios within 10% for the own profile and within 25% for the forecast.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from tempfile import NamedTemporaryFile
from time import perf_counter

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import rose_compiler
from bench import measure
from bench.loops import SHAPES, Setup, iteration, make
from rose_compiler.api.costing import CostModel, forecast
from rose_compiler.base.decision import Decision
from rose_compiler.tune.forecasts import forecast_of

#: Program order first: the others are forecast from its profile.
DECISIONS = (
    Decision(),
    Decision(groups=2, late="shadow"),
    Decision(groups=2, late="shadow", defer=True),
    Decision(groups=1, late="shadow"),
)


class Measured:
    """One schedule of a training: its profile, and its iterations without profiling."""

    def __init__(self, setup: Setup, decision: Decision, iterations: int) -> None:
        with NamedTemporaryFile("w", suffix=".json") as file:
            decision.save(file.name)
            compiled = rose_compiler.compile(iteration, tune=file.name)
        seconds = []
        for _ in range(2):
            setup.run(compiled)
        # in turn, so that what disturbs the one disturbs the other
        for k in range(2 * iterations):
            compiled.profile_next(k % 2)
            start = perf_counter()
            setup.run(compiled)
            if k % 2 == 0:
                seconds.append(perf_counter() - start)
        unit = compiled._last.unit
        self.last = unit.profiling.last
        self.shards = max((len(s) for s in unit.shards().values()), default=1)
        self.seconds = float(np.median(seconds))
        self.cost: CostModel = compiled.cost
        compiled.close()


def table(shape: str, iterations: int, steps: int | None, explain: bool, out: Console) -> Table:
    """Measure one shape."""
    cfg = SHAPES[shape] if steps is None else replace(SHAPES[shape], num_steps=steps)
    setup = make(cfg)
    found = Table(title=f"PPO, shape {shape}: an iteration, ms", title_justify="left")
    for name in ("schedule", "measured", "predicted", "ratio", "forecast", "ratio", "bound"):
        found.add_column(name, justify="left" if name == "schedule" else "right")
    try:
        base: Measured | None = None
        for decision in DECISIONS:
            one = Measured(setup, decision, iterations)
            base = base or one
            assert one.last.plan is not None
            ahead = forecast(
                base.last.profile, base.last.program, one.last.plan, one.last.machine, one.shards
            )
            own = one.cost.prediction.seconds
            made = forecast_of(ahead, base.cost.prediction.seconds, base.seconds)
            told = ("unknown", "-")
            if made is not None:
                low, middle, high = (f"{1e3 * s:.0f}" for s in (made.low, made.seconds, made.high))
                told = (f"{middle} ({low} to {high})", f"{made.seconds / one.seconds:.2f}")
            found.add_row(
                str(decision),
                f"{1e3 * one.seconds:.1f}",
                f"{1e3 * own:.1f}",
                f"{own / one.seconds:.2f}",
                *told,
                f"{1e3 * one.cost.bound.seconds:.1f}",
            )
            if explain:
                out.print(f"\n[{decision}]", one.cost.render(out.width), markup=False)
    finally:
        setup.close()
    return found


def main(argv: list[str] | None = None) -> None:
    """Measure and print a table a shape."""
    parser = argparse.ArgumentParser(prog="bench.predict", description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", default="c,d", help="names, with commas")
    parser.add_argument("--iterations", type=int, default=7)
    parser.add_argument("--steps", type=int, help="rollout steps, the shape's own by default")
    parser.add_argument("--explain", action="store_true", help="print the formulas too")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    console = Console()
    if console.width < 120:
        console = Console(width=120)
    for shape in args.shapes.split(","):
        console.print(table(shape, args.iterations, args.steps, args.explain, console))
    console.print(measure.machine(), highlight=False)


if __name__ == "__main__":
    main()

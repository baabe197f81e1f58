"""Where the device is idle in a PPO iteration: `python -m bench.windows`.

Prints the windows of low activity of PPO on HalfCheetah (shape c unless told), as the loop is
written and as it is compiled.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from tempfile import NamedTemporaryFile

import torch
from rich.console import Console

import rose_compiler
from bench import measure
from bench.loops import SHAPES, Setup, iteration, make
from rose_compiler.base.decision import Decision
from rose_compiler.tune.windows import Windows

#: The schedule shown as compiled, unless it is searched for.
DECISION = Decision(groups=2, late="shadow", rollout_threads=1)


def of(setup: Setup, decision: Decision | None) -> Windows:
    """The windows of a training under one schedule; `None` searches for it."""
    with NamedTemporaryFile("w", suffix=".json") as file:
        if decision is not None:
            decision.save(file.name)
        compiled = rose_compiler.compile(iteration, tune=decision is None or file.name)
    try:
        for _ in range(5):
            setup.run(compiled)
        while not compiled.settled:
            setup.run(compiled)
        for _ in range(5):
            setup.run(compiled)
        found: Windows = compiled.windows()
        return found
    finally:
        compiled.close()


def main(argv: list[str] | None = None) -> None:
    """Train, profile and print the tables."""
    parser = argparse.ArgumentParser(prog="bench.windows", description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="c", choices=sorted(SHAPES))
    parser.add_argument("--steps", type=int, help="rollout steps, the shape's own by default")
    parser.add_argument("--threads", type=int, default=1, help="torch's intra-operation threads")
    parser.add_argument("--search", action="store_true", help="search for the schedule")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    shape = SHAPES[args.shape]
    if args.steps is not None:
        shape = replace(shape, num_steps=args.steps)
    console = Console()
    if console.width < 150:
        console = Console(width=150)
    setup = make(shape)
    try:
        before = of(setup, Decision())
        console.print(before.table(f"PPO, shape {args.shape}, in program order"))
        after = of(setup, None if args.search else DECISION)
        console.print(after.table(f"PPO, shape {args.shape}, compiled"))
    finally:
        setup.close()
    console.print(measure.machine(), highlight=False)


if __name__ == "__main__":
    main()

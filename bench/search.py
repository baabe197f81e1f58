"""Which schedules windows speak for: `python -m bench.search [--only ppo-c,sac]`.

Each workload's iteration is profiled in program order, with one torch thread so that other load
matters little, and the fastest of a few is taken. Nothing is tuned. `--record FOLDER` writes what
was seen as JSON, the space as on `--threads` cores: `tests/tune/test_search.py` holds the winners
of `python -m bench.workloads` against such files.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console

import rose_compiler
from bench.workloads.base import Workload
from bench.workloads.registry import workloads
from rose_compiler.api.searching import evidence
from rose_compiler.base.decision import Decision
from rose_compiler.base.profile import Profile
from rose_compiler.tune.search import LEAST_UNUSED, Evidence, propose

NUMERICS = ("close", "bitwise")


@dataclass(frozen=True)
class Base:
    """One profiled iteration in program order, as the search asks for it."""

    profile: Profile
    program: Any
    machine: Any

    @property
    def iteration_s(self) -> tuple[float, ...]:
        """Seconds of the iteration."""
        return self.profile.iteration_s


def fastest(workload: Workload, repeats: int) -> Profile:
    """The fastest of some profiled iterations in program order."""
    training = workload.make()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "decision.json"
        Decision().save(path)
        function = rose_compiler.compile(training.fn, tune=str(path))
    training.closers.insert(0, function.close)
    try:
        for _ in range(3):
            training.run(function)
        found = []
        for _ in range(repeats):
            function.profile_next(1)
            training.run(function)
            found.append(function._last.unit.profiling.last.latest)
    finally:
        training.close()
    return min(found, key=lambda profile: profile.iteration_s[-1])


def seen(
    workload: Workload, profile: Profile, numerics: str, threads: int
) -> tuple[list[Decision], Evidence]:
    """The space of schedules on so many torch threads, and what a profile says of them."""
    training = workload.make()
    function = rose_compiler.compile(training.fn, numerics=numerics, iterations=100_000)
    training.closers.insert(0, function.close)
    try:
        training.run(function)
        unit = function._last.unit
        torch.set_num_threads(threads)
        tuning = unit.tuning()
        torch.set_num_threads(1)
        tuning.by_windows = False
        training.run(function)
        measured = unit.profiling.of[Decision()]
        base: Any = Base(profile, measured.program, measured.machine)
        unit.profiling.of[Decision()] = base
        space = tuning.untried
        return space, evidence(unit, base, tuning, space)
    finally:
        training.close()


def kept(found: Evidence) -> Evidence:
    """The evidence without windows so small that they decide nothing."""
    least = 0.1 * LEAST_UNUSED * found.iteration_s
    return replace(found, rooms=tuple(r for r in found.rooms if r.unused_s >= least))


def main(argv: Sequence[str] | None = None) -> None:
    """Print what would be tried, and record it if asked."""
    parser = argparse.ArgumentParser(prog="bench.search", description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="names of workloads, with commas between")
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--record", type=Path)
    args = parser.parse_args(argv)
    console = Console(soft_wrap=True, highlight=False)
    named = [name for name in args.only.split(",") if name] or list(workloads())
    torch.set_num_threads(1)
    for name in named:
        profile = fastest(workloads()[name], args.repeats)
        for numerics in NUMERICS:
            with rose_compiler.knobs(cache=False):
                space, found = seen(workloads()[name], profile, numerics, args.threads)
            found = kept(found)
            tried, left = propose(space, found)
            console.print(f"{name}, {numerics}: {1e3 * found.iteration_s:.1f} ms", markup=False)
            for one in tried:
                console.print(f"  [{one.decision}] {one}", markup=False)
            for out in left:
                console.print(f"  not {out.blocker.why}", markup=False)
            if args.record is not None:
                data = {"space": [d.to_dict() for d in space], "evidence": found.to_dict()}
                path = args.record / f"{name}-{numerics}.json"
                path.write_text(json.dumps(data) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

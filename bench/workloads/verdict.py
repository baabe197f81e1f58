"""Where the obvious transformation loses: what the compiler settled on, and what it says."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from dataclasses import dataclass

import torch

import rose_compiler
from bench import measure
from bench.measure import Estimate
from bench.workloads.base import Workload
from bench.workloads.measuring import Effort, Say, tuned
from bench.workloads.report import FLOOR
from rose_compiler.base.decision import Decision


@dataclass(frozen=True)
class Verdict:
    """`obvious` is eager's time over that of two groups with late work in the shadow, taken without
    asking; `gain` the same of what was settled on."""

    name: str
    about: str
    obvious: Estimate
    gain: Estimate
    decision: str
    remarks: list[str]

    @property
    def held(self) -> bool:
        """Eager or better; the interval's upper end decides."""
        return self.gain.high >= FLOOR

    def text(self) -> str:
        """A paragraph in Markdown."""
        lines = [
            f"**{self.name}** ({self.about}): {'held' if self.held else 'missed'};"
            f" E0 / close {self.gain}, E0 / obvious {self.obvious}",
            f"- {self.decision}",
            *(f"- {line}" for line in self.remarks),
        ]
        return "\n".join(lines)


def verdict(workload: Workload, effort: Effort, say: Say) -> Verdict:
    """Tune one workload, and run the obvious schedule beside it."""
    threads = torch.get_num_threads()
    with ExitStack() as stack:
        stack.enter_context(rose_compiler.knobs(cache=False))
        stack.callback(torch.set_num_threads, threads)
        trainings = [workload.make() for _ in range(3)]
        for training in trainings:
            stack.callback(training.close)
        eager, free, forced = trainings
        say("tuning")
        chosen = tuned(free.fn, free, effort.budget)
        torch.set_num_threads(threads)
        obvious = _obvious(stack)
        beside = tuned(forced.fn, forced, effort.budget, tune=obvious)

        def as_written() -> None:
            torch.set_num_threads(threads)
            eager.run()

        say(f"{effort.pairs} trials of each")
        variants = {"E0": as_written, "close": chosen.step, "obvious": beside.step}
        for step in variants.values():
            step()
        scores = measure.abba(variants, effort.pairs, effort.trial).seconds
        return Verdict(
            workload.name,
            workload.about,
            measure.ratio(scores["E0"], scores["obvious"]),
            measure.ratio(scores["E0"], scores["close"]),
            chosen.decision,
            _why(chosen.function),
        )


def _obvious(stack: ExitStack) -> str:
    from pathlib import Path
    from tempfile import TemporaryDirectory

    path = Path(stack.enter_context(TemporaryDirectory())) / "decision.json"
    Decision(groups=2, late="shadow", lanes="thread", defer=True).save(path)
    return str(path)


def _why(function: rose_compiler.Compiled) -> list[str]:
    """The remarks of tuning on what was not kept."""
    text = function.explain(width=10_000)
    lines = [line.strip() for line in text.splitlines()]
    wanted = [
        following for line, following in itertools.pairwise(lines) if line.startswith("tune [")
    ]
    return wanted[:4]

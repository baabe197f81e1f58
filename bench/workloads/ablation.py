"""What each pass brings, and what the choice of candidates does."""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch

import rose_compiler
from bench import measure
from bench.measure import Estimate
from bench.workloads.base import Workload
from bench.workloads.measuring import PATIENCE, RUN, Compiled, Effort, Say, Step, tuned
from bench.workloads.report import markdown
from rose_compiler.base.decision import Decision
from rose_compiler.passes.pipeline import ORDER
from rose_compiler.tune.chooser import Chooser

RANDOM = "random candidates"


@dataclass(frozen=True)
class Ablated:
    """One thing left out. `gain`: how many times longer an iteration takes without it; None where
    the code that runs is the same."""

    workload: str
    without: str
    gain: Estimate | None
    decision: str


def ablate(workload: Workload, effort: Effort, say: Say) -> list[Ablated]:
    """Each pass off in turn under the schedule that was settled on, and other candidates."""
    threads = torch.get_num_threads()
    with ExitStack() as stack, TemporaryDirectory() as folder:
        stack.enter_context(rose_compiler.knobs(cache=False))
        stack.callback(torch.set_num_threads, threads)
        path = Path(folder) / "decision.json"

        def fresh(passes: tuple[str, ...], tune: object) -> Compiled:
            torch.set_num_threads(threads)
            training = workload.make()
            stack.callback(training.close)
            # passes that were off when a schedule was built stay off in it
            with rose_compiler.knobs(passes=passes):
                return tuned(training.fn, training, effort.budget, tune=tune)

        say("tuning")
        full = fresh((), True)
        full.function.decision.save(path)
        base = fresh((), path)
        variants: dict[str, Step] = {"all": base.step}
        same = []
        for name in (entry.one.name for entry in ORDER if not entry.one.required):
            say(f"without {name}")
            one = fresh((f"-{name}",), path)
            if one.function.source == base.function.source:
                same.append(name)
            else:
                variants[name] = one.step
        say(RANDOM)
        other, decision = _random(workload, effort, threads, stack)
        variants[RANDOM] = other
        for step in variants.values():
            step()
        say(f"{effort.pairs} trials of each of {len(variants)} variants")
        scores = measure.abba(variants, effort.pairs, effort.trial).seconds
        found = [
            Ablated(workload.name, name, measure.ratio(scores[name], scores["all"]), full.decision)
            for name in variants
            if name not in ("all", RANDOM)
        ]
        found += [Ablated(workload.name, name, None, full.decision) for name in same]
        gain = measure.ratio(scores[RANDOM], scores["all"])
        return [*found, Ablated(workload.name, RANDOM, gain, decision)]


def _random(workload: Workload, effort: Effort, threads: int, stack: ExitStack) -> tuple[Step, str]:
    """A training tuned over as many candidates as the package's own, drawn from all there are."""
    torch.set_num_threads(threads)
    training = workload.make()
    stack.callback(training.close)
    function = rose_compiler.compile(training.fn, tune_budget=effort.budget, iterations=RUN)
    training.closers.insert(0, function.close)
    training.run(function)
    tuning = function._last.unit.tuning()
    chooser = tuning._chooser
    rng = random.Random(0)
    made: list[Decision | None] = [c for c in chooser.candidates if c is None]
    while len(made) < len(chooser.candidates):
        one = Decision(
            groups=rng.choice([0, 2, 4]),
            late=rng.choice(["shadow", "inline"]),
            defer=rng.random() < 0.5,
            lanes=rng.choice(["native", "thread", "inline"]),
            rollout_threads=rng.choice([None, 1, threads]),
            update_threads=rng.choice([None, 1, threads]),
            fuse=rng.random() < 0.5,
        )
        if one not in made:
            made.append(one)
    tuning.by_windows = False
    tuning._chooser = Chooser(made, budget_s=effort.budget)

    def step() -> None:
        torch.set_num_threads(threads)
        training.run(function)

    start = perf_counter()
    while not function.settled and perf_counter() - start < PATIENCE * effort.budget:
        step()
    return step, function.explain(width=10_000).split("\n")[0].partition(": ")[2]


def table(found: list[Ablated]) -> str:
    """Ratios: an iteration without it over one with it."""
    body = [[a.workload, a.without, "same code" if a.gain is None else str(a.gain)] for a in found]
    told = [
        f"- {a.workload}, {'all' if a.without != RANDOM else RANDOM}: {a.decision}" for a in found
    ]
    table = markdown(("workload", "without", "times as long"), body)
    return "\n".join([table, "", *dict.fromkeys(told)])

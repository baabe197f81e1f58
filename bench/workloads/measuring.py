"""Measures one workload: every column, from trainings that alternate."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch._inductor.async_compile import shutdown_compile_workers

import rose_compiler
from bench import measure
from bench.handwritten import Clock
from bench.limits import Late, within
from bench.measure import Estimate
from bench.workloads.base import Function, Size, Training, Workload
from bench.workloads.forecast import Forecast, forecast

Say = Callable[[str], None]
Step = Callable[[], object]

#: Part of the time for tuning after which a training that has not settled is not waited for.
PATIENCE = 1.25
#: Iterations that the compiler is told the run will have: a training, not this measurement. Without
#: it a function that is itself a loop of steps which train is taken for the whole run when it is
#: called for the first time, and is not tuned in the calls that follow.
RUN = 100_000


@dataclass(frozen=True)
class Effort:
    """How long to measure: trials of each variant, seconds a trial, trials to choose by, seconds of
    tuning for each compiled training (a quarter of them in bitwise mode, with fewer schedules to
    try), how capacity is measured, seconds that `torch.compile` by hand may take, and seconds for
    the whole row: where they run short, there are fewer trials, but at least `FEWEST`."""

    pairs: int = 15
    trial: float = measure.MIN_TRIAL
    selection: int = 3
    budget: float = 120.0
    capacity_repeats: int = 2
    capacity_seconds: float = 2.0
    compiling: float = 90.0
    row: float = 250.0


QUICK = Effort(3, 0.1, 1, 10.0, 1, 1.0, 20.0, 75.0)
#: Trials of each variant that a row has at least, if as many are asked for.
FEWEST = 7


@dataclass
class Row:
    """What one workload gave. Scores are seconds an iteration, by variant, paired by index."""

    name: str
    about: str
    scores: dict[str, list[float]]
    bound: list[float]
    capacity: Estimate
    critical_path: float
    forecast: Forecast | None
    tuned: dict[str, float]
    chosen: dict[str, str]
    absent: dict[str, str] = field(default_factory=dict)
    noisy: float = 0.0
    repeated: int = 0
    took: float = 0.0
    notes: list[str] = field(default_factory=list)

    def ratio(self, slow: str, fast: str) -> Estimate | None:
        """How many times faster `fast` is than `slow`; None where one is absent."""
        if slow not in self.scores or fast not in self.scores:
            return None
        return measure.ratio(self.scores[slow], self.scores[fast])

    def room(self) -> Estimate:
        """E1 / bound."""
        return measure.ratio(self.scores["E1"], self.bound)

    def room_used(self) -> Estimate | None:
        """Percent of the way from E1 to the bound; None where E1 / bound is under 1.1."""
        if "close" not in self.scores or self.room().median < 1.1:
            return None
        used = measure.room_used(self.scores["E1"], self.scores["close"], self.bound)
        return Estimate(100 * used.median, 100 * used.low, 100 * used.high)

    def median(self, name: str) -> float | None:
        """Seconds an iteration."""
        return float(np.median(self.scores[name])) if name in self.scores else None


@dataclass
class Compiled:
    """A compiled training that has settled."""

    function: Any
    step: Step
    tuned: float
    decision: str


def tuned(
    fn: Function, training: Training, budget: float, *, numerics: str = "close", tune: Any = True
) -> Compiled:
    """Compile `fn` and train until tuning is over; torch's thread count is the default's."""
    threads = torch.get_num_threads()
    function = rose_compiler.compile(
        fn, numerics=numerics, tune=tune, tune_budget=budget, iterations=RUN
    )
    training.closers.insert(0, function.close)

    def step() -> None:
        torch.set_num_threads(threads)  # a compiled function is specialized to it
        training.run(function)

    start = perf_counter()
    step()
    # the first schedule that is settled on meets its compiled form some seconds later
    while not function._last.unit.tuning().over and perf_counter() - start < PATIENCE * budget:
        step()
    took = perf_counter() - start
    for _ in range(4):  # what settled is profiled in its first iterations
        step()
    return Compiled(function, step, took, _in_force(function))


def _in_force(function: Any) -> str:
    """The schedule that was settled on, in words."""
    head: str = function.explain(width=10_000).split("\n")[0]
    return head.partition(": ")[2]


class Bench:
    """Trainings of one workload, closed together."""

    def __init__(self, workload: Workload, effort: Effort, say: Say) -> None:
        self.workload, self.effort, self.say = workload, effort, say
        self.threads = torch.get_num_threads()
        self.counts = sorted({1, self.threads})
        self.stack = ExitStack()
        self.variants: dict[str, Step] = {}
        self.chosen: dict[str, str] = {}
        self.absent: dict[str, str] = {}
        self.tuned: dict[str, float] = {}
        self.notes: list[str] = []
        self.function: Any = None  # compiled, in close numerics
        self.best_threads = self.threads
        self.start = perf_counter()

    @property
    def left(self) -> float:
        """Seconds that are left for the row."""
        return self.effort.row - (perf_counter() - self.start)

    def fresh(self, size: Size = Size()) -> Training:  # noqa: B008
        """A new training."""
        training = self.workload.make(size)
        self.stack.callback(training.close)
        return training

    def fastest(self, options: dict[str, Step]) -> str:
        """The name of the fastest option."""
        return measure.fastest(options, self.effort.selection, self.effort.trial)

    def step(self, training: Training, fn: Function, threads: int | None = None) -> Step:
        """An iteration by `fn`, with so many torch threads from its start."""

        def run() -> None:
            torch.set_num_threads(threads or self.threads)
            training.run(fn)

        return run

    # -- the columns -----------------------------------------------------------------------------

    def as_written(self) -> None:
        """E0."""
        training = self.fresh()
        self.variants["E0"] = self.step(training, training.fn)

    def sequential(self) -> None:
        """E1."""
        self.say("choosing E1")
        makers = {"": self.fresh(), **{k: make() for k, make in self.workload.simulators().items()}}
        for name, training in makers.items():
            if name:
                self.stack.callback(training.close)
        pairs = [(r, u) for r in self.counts for u in self.counts]
        if self.workload.interleaved:
            pairs = [(n, n) for n in self.counts]
        options = {
            f"{label + ', ' if label else ''}torch threads {r} and {u}": self.step(
                training, self.workload.sequential(r, u), r
            )
            for label, training in makers.items()
            for r, u in pairs
        }
        name = self.fastest(options)
        self.variants["E1"], self.chosen["E1"] = options[name], name
        self.best_threads = int(name.rpartition(" ")[2])

    def by_hand(self) -> None:
        """C."""
        self.say("compiling by hand (C)")
        start = perf_counter()
        try:
            training = self.fresh()
            fn = self.workload.by_hand(training)
            if fn is None:
                self.absent["C"] = "none is written"
                return
            # another thread count would compile everything again, so it is the one of E1's update
            threads = self.best_threads
            step = self.step(training, fn, threads)
            with warnings.catch_warnings(), within(self.effort.compiling):
                warnings.simplefilter("ignore")
                for _ in range(2):
                    step()
        except Late:
            # what it began would go on beside the measurements
            torch._dynamo.reset()
            shutdown_compile_workers()
            self.absent["C"] = f"torch.compile took more than {self.effort.compiling:.0f} s"
            return
        except Exception as error:
            self.absent["C"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"
            return
        self.tuned["C"] = perf_counter() - start
        self.variants["C"], self.chosen["C"] = step, f"torch threads {threads}"

    def overlapped(self) -> None:
        """H."""
        functions = self.workload.overlapped()
        if not functions:
            self.absent["H"] = "none is written"
            return
        self.say("choosing H")
        training = self.fresh()
        options = {k: self.step(training, fn, 1) for k, fn in functions.items()}
        name = self.fastest(options)
        self.variants["H"], self.chosen["H"] = options[name], name

    def compiled(self, numerics: str) -> Compiled | None:
        """The compiled training in one of both numerics."""
        self.say(f"tuning, {numerics}")
        torch.set_num_threads(self.threads)
        training = self.fresh()
        budget = self.effort.budget
        if numerics == "bitwise":
            budget = max(min(budget / 4, self.left / 3), 5.0)
        try:
            found = tuned(training.fn, training, budget, numerics=numerics)
        except rose_compiler.RoseError as error:
            self.absent[numerics] = str(error).splitlines()[0]
            return None
        self.variants[numerics] = found.step
        self.tuned[numerics] = found.tuned
        self.chosen[numerics] = found.decision
        if not found.function.settled:
            self.notes.append(f"{numerics} had not settled within {PATIENCE} budgets")
        if numerics == "close":
            self.function = found.function
        return found

    def work(self) -> tuple[Clock, list[float]]:
        """Everything on one core, and the chain that nothing shortens."""
        lean = self.fresh(Size(one_core=True))
        self.variants["work"] = self.step(lean, self.workload.timed(1, Clock()), 1)
        clock, part, seconds = Clock(), self.fresh(Size(part=True)), list[float]()
        run = self.step(part, self.workload.timed(1, clock), 1)

        def chain() -> None:
            clock.total.clear()
            run()
            seconds.append(sum(clock.total.get(p, 0.0) for p in self.workload.chain))

        self.variants["chain"] = chain
        return clock, seconds

    def shortest_tail(self) -> float:
        """The least time of what follows the rollout."""
        self.say("the critical path")
        training = self.fresh(Size(one_core=True))
        found = []
        for n in self.counts:
            clock = Clock()
            run = self.step(training, self.workload.timed(n, clock), n)
            run()
            seconds = []
            for _ in range(self.effort.selection):
                clock.total.clear()
                run()
                seconds.append(sum(clock.total.get(p, 0.0) for p in self.workload.tail))
            found.append(float(np.median(seconds)))
        return min(found)


def measure_row(workload: Workload, effort: Effort, say: Say) -> Row:
    """Measure one workload; `say` is told what goes on."""
    bench = Bench(workload, effort, say)
    with bench.stack, rose_compiler.knobs(cache=False):
        try:
            return _measure(bench)
        finally:
            torch.set_num_threads(bench.threads)


def _measure(bench: Bench) -> Row:
    workload, effort = bench.workload, bench.effort
    bench.say("capacity")
    copy = f"from bench.workloads.measuring import single_core; f = single_core({workload.name!r})"
    # no second attempts beside other load: starting the copies takes longer than measuring
    capacity = measure.capacity(copy, effort.capacity_repeats, effort.capacity_seconds, retries=0)
    bench.as_written()
    bench.sequential()
    bench.by_hand()
    bench.overlapped()
    bench.compiled("close")
    bench.compiled("bitwise")
    tail = bench.shortest_tail()
    _, chain = bench.work()
    seconds = 0.0
    for step in bench.variants.values():
        before = perf_counter()
        step()
        seconds += max(effort.trial, perf_counter() - before)
    chain.clear()
    pairs = min(effort.pairs, max(FEWEST, int(bench.left / seconds)))
    if pairs < effort.pairs:
        bench.notes.append(f"{pairs} trials of each in the time for a row")
    bench.say(f"{pairs} trials of each of {len(bench.variants)} variants")
    again = max(0, int((bench.left - pairs * seconds) / seconds * len(bench.variants)))
    measured = measure.abba(bench.variants, pairs, effort.trial, again)
    scores = measured.seconds
    made = None if bench.function is None else forecast(bench.function, bench.variants["close"])
    steps = float(np.median(chain))
    critical = max(steps, tail) if workload.interleaved else steps + tail
    return Row(
        workload.name,
        workload.about,
        scores,
        measure.bounds(scores["work"], capacity.median, critical),
        capacity,
        critical,
        made,
        bench.tuned,
        bench.chosen,
        bench.absent,
        measured.noisy / (pairs * len(bench.variants)),
        measured.repeated,
        perf_counter() - bench.start,
        bench.notes,
    )


def single_core(name: str) -> Step:
    """An iteration of a workload with all its work on one core, as a function without arguments."""
    from bench.workloads.registry import workloads

    torch.set_num_threads(1)
    workload = workloads()[name]
    training = workload.make(Size(one_core=True))
    fn = workload.timed(1, Clock())
    return lambda: training.run(fn)

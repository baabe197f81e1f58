"""PPO on HalfCheetah, as written and compiled: `python -m bench.ppo_mujoco`.

Four shapes, each with these variants, all real trainings that alternate:

E0        the loop as written, default thread counts, over `ShardedEnv` where there are shards
E1        the best sequential variant: a torch thread count for either phase, and for EnvPool also
          one pool with two threads
H         the best overlap written by hand (bench/handwritten.py)
compiled  `rose_compiler.compile(iteration)`, once it has settled

Rollout times are those of iterations without update epochs: collection, values, log-probabilities
and advantages. The compiled rollout has the decision that the whole iteration settled on.
The bound is max(critical path, work / c): work is H's code with everything on one core, c how much
two cores do of that very work together, the critical path the largest shard's acting and stepping
and then the update at its best thread count. All of it with torch's own kernels: an update that
Inductor compiled takes less, so the compiled loop may beat this bound.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import rose_compiler
from bench import measure
from bench.handwritten import Clock, Overlap, overlapped, sequential
from bench.loops import SHAPES, Config, Setup, iteration, make
from bench.measure import Estimate

SETTLE = 180.0


@dataclass(frozen=True)
class Effort:
    """How long to measure: trials of each variant, seconds a trial, and the same to choose by."""

    pairs: int = 15
    trial: float = measure.MIN_TRIAL
    selection: int = 3
    capacity_repeats: int = 3
    capacity_seconds: float = 3.0
    compiled: bool = True


QUICK = Effort(pairs=3, trial=0.1, selection=1, capacity_repeats=1, capacity_seconds=1.0)


@dataclass
class Result:
    """What one shape gave. Scores are seconds an iteration by variant, paired by index."""

    shape: str
    config: Config
    capacity: Estimate
    critical_path: float
    scores: dict[str, list[float]]
    bound: list[float]
    chosen: dict[str, str]
    noisy: float
    tuned: float | None = None

    def ratio(self, slow: str, fast: str) -> Estimate | None:
        """How many times faster `fast` is than `slow`; None where one was not measured."""
        if slow not in self.scores or fast not in self.scores:
            return None
        return measure.ratio(self.scores[slow], self.scores[fast])

    def room(self) -> Estimate:
        """E1 / bound."""
        return measure.ratio(self.scores["E1"], self.bound)

    def room_used(self, fast: str) -> Estimate | None:
        """(E1 - fast) / (E1 - bound), in percent; None where E1 / bound is under 1.1."""
        if self.room().median < 1.1:
            return None
        used = measure.room_used(self.scores["E1"], self.scores[fast], self.bound)
        return Estimate(100 * used.median, 100 * used.low, 100 * used.high)


@dataclass
class _Phases:
    """Steps a set-up by H's code and keeps what chosen phases of every step took."""

    setup: Setup
    how: Overlap
    phases: tuple[str, ...]
    seconds: list[float] = field(default_factory=list)

    def __call__(self) -> None:
        clock = Clock()
        self.setup.run(overlapped(self.how, clock))
        self.seconds.append(sum(clock.total[phase] for phase in self.phases))


def measure_shape(shape: str, effort: Effort, say: Callable[[str], None]) -> Result:
    """Measure one shape; `say` is told what goes on."""
    # no early stop: every iteration is to hold the same work
    cfg = replace(SHAPES[shape], target_kl=math.inf)
    rollout = replace(cfg, epochs=0)
    default = torch.get_num_threads()
    with ExitStack() as stack:

        def fresh(config: Config = cfg, **options: Any) -> Setup:
            setup = make(config, **options)
            stack.callback(setup.close)
            return setup

        try:
            return _measure(shape, cfg, rollout, default, fresh, effort, say)
        finally:
            torch.set_num_threads(default)


def _measure(
    shape: str,
    cfg: Config,
    rollout: Config,
    default: int,
    fresh: Callable[..., Setup],
    effort: Effort,
    say: Callable[[str], None],
) -> Result:
    say("capacity")
    copy = f"from bench.handwritten import single_core; f = single_core({shape!r})"
    capacity = measure.capacity(copy, effort.capacity_repeats, effort.capacity_seconds)

    say("choosing E1")
    e1_setup, e1_threads, e1_name = _choose_e1(cfg, default, fresh, effort)
    say("choosing H")
    h_setup = fresh()
    how, tail = _choose_h(cfg, default, h_setup, effort)
    h = overlapped(how)
    e0_setup, e0 = fresh(), sequential(default, default)
    variants: dict[str, Callable[[], object]] = {
        "E0": lambda: e0_setup.run(e0),
        "E1": lambda: e1_setup.run(sequential(*e1_threads)),
        "H": lambda: h_setup.run(h),
        "E0 rollout": lambda: e0_setup.run(e0, rollout),
        "E1 rollout": lambda: e1_setup.run(sequential(*e1_threads), rollout),
        "H rollout": lambda: h_setup.run(h, rollout),
    }
    chosen = {"E1": e1_name, "H": f"{how.values} values, {_threads(1, how.update_threads)}"}

    say("tuning the compiled loop")
    compiled = _compiled(cfg, rollout, default, fresh) if effort.compiled else None
    if compiled is not None:
        variants |= compiled.variants
        chosen["compiled"] = compiled.decision

    alone = Overlap(groups=1)
    work_setup = fresh(shards=1, hosts="inline")
    largest = -(-cfg.num_envs // cfg.shards)
    chain_setup = fresh(replace(rollout, num_envs=largest, shards=1, hosts="inline"))
    chain = _Phases(chain_setup, alone, ("act", "wait"))
    work = overlapped(alone)
    variants |= {"work": lambda: work_setup.run(work), "chain": chain}

    for step in variants.values():
        step()
    chain.seconds.clear()
    say(f"{effort.pairs} trials of each variant")
    measured = measure.abba(variants, effort.pairs, effort.trial)
    scores = measured.seconds
    critical = float(np.median(chain.seconds)) + tail
    return Result(
        shape,
        cfg,
        capacity,
        critical,
        scores,
        measure.bounds(scores["work"], capacity.median, critical),
        chosen,
        measured.noisy / (effort.pairs * len(variants)),
        None if compiled is None else compiled.tuned,
    )


def _choose_e1(
    cfg: Config, default: int, fresh: Callable[..., Setup], effort: Effort
) -> tuple[Setup, tuple[int, int], str]:
    simulators = {f"{cfg.shards} shards": fresh()}
    if cfg.simulator == "envpool":
        simulators["one pool of 2 threads"] = fresh(shards=1, threads=2)
    counts = sorted({1, default})
    options = {
        f"{label}, {_threads(r, u)}": (setup, (r, u))
        for label, setup in simulators.items()
        for r in counts
        for u in counts
    }
    name = measure.fastest(
        {name: _stepper(setup, threads) for name, (setup, threads) in options.items()},
        effort.selection,
        effort.trial,
    )
    return *options[name], name


def _stepper(setup: Setup, threads: tuple[int, int]) -> Callable[[], None]:
    return lambda: setup.run(sequential(*threads))


def _choose_h(cfg: Config, default: int, setup: Setup, effort: Effort) -> tuple[Overlap, float]:
    """The best arrangement, and the least time that advantages and updates took in any."""
    options = {
        str(how): _Phases(setup, how, ("gae", "update"))
        for values in ("deferred", "shadow")
        for threads in sorted({1, default})
        for how in [Overlap(min(2, cfg.shards), values, 1, threads)]
    }
    name = measure.fastest(options, effort.selection, effort.trial)
    tail = min(float(np.median(phases.seconds)) for phases in options.values())
    return options[name].how, tail


def _threads(rollout: int, update: int) -> str:
    return f"torch threads {rollout} and {update}"


@dataclass
class _CompiledVariants:
    variants: dict[str, Callable[[], object]]
    decision: str
    tuned: float


def _compiled(
    cfg: Config, rollout: Config, default: int, fresh: Callable[..., Setup]
) -> _CompiledVariants | None:
    """The compiled loop, settled; None as long as the package can't compile."""
    if not hasattr(rose_compiler, "compile"):
        return None
    setup = fresh()

    def stepper(fn: Any, config: Config) -> Callable[[], None]:
        def step() -> None:
            torch.set_num_threads(default)  # a compiled function is specialized to it
            setup.run(fn, config)

        return step

    whole = rose_compiler.compile(iteration)
    step = stepper(whole, cfg)
    tuned = _settle(whole, step)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "decision.json"
        whole.decision.save(path)
        part = rose_compiler.compile(iteration, tune=path)
    step_part = stepper(part, rollout)
    _settle(part, step_part)
    variants: dict[str, Callable[[], object]] = {"compiled": step, "compiled rollout": step_part}
    return _CompiledVariants(variants, str(whole.decision), tuned)


def _settle(compiled: Any, step: Callable[[], None]) -> float:
    """Train until tuning is over, at most three minutes; the seconds it took."""
    start = perf_counter()
    step()
    while not compiled.settled and perf_counter() - start < SETTLE:
        step()
    return perf_counter() - start


TIMES = (
    *("E0", "E1", "H", "compiled"),
    *("E0 rollout", "E1 rollout", "H rollout", "compiled rollout"),
)
RATIOS = (
    *(("E1", "H"), ("E0", "compiled"), ("E1", "compiled"), ("H", "compiled")),
    *(("E1 rollout", "H rollout"), ("E1 rollout", "compiled rollout")),
    ("H rollout", "compiled rollout"),
)


def table(results: list[Result]) -> Table:
    """A column a shape: times, then ratios of neighbouring trials with their intervals."""
    made = Table(title="PPO on HalfCheetah", title_justify="left")
    made.add_column("")
    for r in results:
        made.add_column(r.shape, justify="right")
    for name in TIMES:
        made.add_row(
            f"{name}, ms",
            *(_milliseconds(r.scores[name]) if name in r.scores else "-" for r in results),
        )
    made.add_row("bound, ms", *(_milliseconds(r.bound) for r in results), end_section=True)
    made.add_row("E1 / bound", *(str(r.room()) for r in results))
    for slow, fast in RATIOS:
        cells = (r.ratio(slow, fast) for r in results)
        made.add_row(f"{slow} / {fast}", *("-" if x is None else str(x) for x in cells))
    for fast in ("H", "compiled"):
        made.add_row(f"room used by {fast}, %", *(_share(r, fast) for r in results))
    made.add_row("tuned, s", *("-" if r.tuned is None else f"{r.tuned:.0f}" for r in results))
    return made


def _milliseconds(scores: list[float]) -> str:
    return f"{1e3 * float(np.median(scores)):.0f}"


def _share(r: Result, fast: str) -> str:
    if fast not in r.scores:
        return "-"
    used = r.room_used(fast)
    return "no room" if used is None else f"{used.median:.0f} [{used.low:.0f}, {used.high:.0f}]"


def main(argv: list[str] | None = None) -> None:
    """Measure, print the table and, if asked, save every score."""
    parser = argparse.ArgumentParser(prog="bench.ppo_mujoco", description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", default="a,b,c,d", help="which, comma-separated")
    parser.add_argument("--pairs", type=int, default=None, help="trials of each variant (15)")
    parser.add_argument("--quick", action="store_true", help="few short trials: a smoke test")
    parser.add_argument("--baselines", action="store_true", help="leave the compiler out")
    parser.add_argument("--json", type=Path, default=None, help="save everything measured")
    args = parser.parse_args(argv)
    shapes = [s.strip() for s in args.shapes.split(",")]
    if unknown := [s for s in shapes if s not in SHAPES]:
        parser.error(f"no shape {unknown[0]!r}; there are {', '.join(SHAPES)}")
    effort = QUICK if args.quick else Effort()
    if args.pairs is not None:
        effort = replace(effort, pairs=args.pairs)
    effort = replace(effort, compiled=not args.baselines)

    status = Console(stderr=True)
    console = Console()
    if console.width < 110:
        console = Console(width=110)
    results = []
    for shape in shapes:
        with status.status(shape) as line:
            results.append(
                measure_shape(shape, effort, lambda what, s=shape: line.update(f"{s}: {what}"))  # type: ignore[misc]
            )
        if args.json is not None:  # after each shape: a long run that is cut short keeps the rest
            args.json.write_text(json.dumps(_data(results), indent=1) + "\n", encoding="utf-8")
    console.print(table(results))
    for r in results:
        console.print(_describe(r), highlight=False)
    console.print(measure.machine(), highlight=False)


def _describe(r: Result) -> str:
    cfg = r.config
    choices = "; ".join(f"{name}: {what}" for name, what in r.chosen.items())
    return (
        f"{r.shape}: {cfg.simulator} {cfg.num_envs} x {cfg.num_steps} in {cfg.shards} shards "
        f"({cfg.hosts}), MLP {cfg.layers}x{cfg.hidden}, {cfg.epochs} epochs x {cfg.minibatches}; "
        f"capacity {r.capacity}, critical path {1e3 * r.critical_path:.0f} ms, "
        f"work {1e3 * float(np.median(r.scores['work'])):.0f} ms; {choices}; "
        f"{r.noisy:.0%} of trials beside other load"
    )


def _data(results: list[Result]) -> dict[str, Any]:
    return {"machine": measure.machine(), "shapes": [asdict(r) for r in results]}


if __name__ == "__main__":
    main()

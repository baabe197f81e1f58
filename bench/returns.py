"""Return curves of HalfCheetah, eager against compiled in ``numerics="close"``, over some seeds.

    python -m bench.returns [--seeds 5] [--iterations 64] [--out docs/returns.png]

One ulp of an action grows to percents within 64 steps of HalfCheetah, so the two trainings of a
seed part, and a single pair of curves says nothing. What has to hold is that the compiled curves
are drawn from where eager's are drawn from. The schedule is fixed (no tuning): every group of
shards acts alone, late work is deferred. A few minutes on one core.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from scipy import stats

import rose_compiler
from bench import loops, measure
from bench.envs import ACT, OBS, make_env
from rose_compiler.base.decision import Decision
from rose_compiler.sim import ShardedEnv

matplotlib.use("Agg")
from matplotlib import pyplot as plt

Array = NDArray[np.float64]

#: Two rows a group: products of two rows differ in bits from those of eight.
CONFIG = loops.Config(8, 128, 64, 2, 4, 8, 4, hosts="inline")
DECISION = Decision(groups=4, late="shadow", defer=True, lanes="thread")
#: Steps of an episode. HalfCheetah never ends one by itself, so all environments end together.
EPISODE = 200
#: Passes without which a run would say nothing about rewrites.
PASSES = frozenset({"hoist", "split", "tile_batch", "defer"})
#: Episodes at the end of a curve that count as what was learned.
LAST = 10


@dataclass(frozen=True)
class Training:
    """One training: mean returns of the episodes that ended together, in order, and a digest of
    the parameters after each iteration."""

    returns: Array
    digests: tuple[bytes, ...]


@dataclass(frozen=True)
class Verdict:
    """How some curves compare with eager's.

    ``inside``: share of their points inside eager's spread, which holds 95% of the points of
    further curves of the same distribution. ``mean_inside``: that share for the mean of the curves.
    ``p``: of an exact permutation test on the returns at the end.
    """

    inside: float
    mean_inside: float
    p: float

    @property
    def holds(self) -> bool:
        """Whether the curves lie inside eager's spread."""
        return self.inside >= 0.9 and self.mean_inside >= 0.95 and self.p >= 0.05


def spread(curves: Array) -> tuple[Array, Array]:
    """Pointwise 95% prediction interval for one more curve, of (curves, points).

    For n draws of a normal distribution with mean m and deviation s:
    m ± t(0.975, n-1) s sqrt(1 + 1/n).
    """
    n = len(curves)
    mean, deviation = curves.mean(axis=0), curves.std(axis=0, ddof=1)
    half = stats.t.ppf(0.975, n - 1) * deviation * np.sqrt(1 + 1 / n)
    return mean - half, mean + half


def judge(eager: Array, compiled: Array) -> Verdict:
    """Compare curves of shape (seeds, points)."""
    low, high = spread(eager)
    mean = compiled.mean(axis=0)
    last = min(LAST, eager.shape[1])
    ends = eager[:, -last:].mean(axis=1), compiled[:, -last:].mean(axis=1)
    test = stats.permutation_test(
        ends, lambda a, b: a.mean() - b.mean(), permutation_type="independent", n_resamples=np.inf
    )
    return Verdict(
        float(((compiled >= low) & (compiled <= high)).mean()),
        float(((mean >= low) & (mean <= high)).mean()),
        float(test.pvalue),
    )


def start(cfg: loops.Config, seed: int, episode: int = EPISODE) -> loops.Setup:
    """A live training with everything random derived from the seed."""
    torch.manual_seed(seed)
    factory = partial(make_env, episode)
    envs = ShardedEnv.split([factory] * cfg.num_envs, shards=cfg.shards, hosts=cfg.hosts)
    agent = loops.Agent(OBS, ACT, cfg.hidden, cfg.layers)
    optimizer = torch.optim.Adam(agent.parameters(), lr=cfg.lr, eps=1e-5)
    obs = torch.as_tensor(envs.reset(seed=seed)[0], dtype=torch.float32)
    buffers = loops.Buffers(cfg, OBS, ACT)
    return loops.Setup(cfg, agent, optimizer, envs, buffers, obs, torch.zeros(cfg.num_envs))


def train(setup: loops.Setup, fn: Any, iterations: int) -> Training:
    """Train for some iterations and close the simulator."""
    digests = []
    for _ in range(iterations):
        setup.run(fn)
        digests.append(b"".join(p.detach().numpy().tobytes() for p in setup.agent.parameters()))
    setup.close()
    count = setup.cfg.num_envs
    ended = len(setup.log) // count * count
    returns = np.array(setup.log[:ended], dtype=np.float64).reshape(-1, count).mean(axis=1)
    return Training(returns, tuple(digests))


def compiled_loop(path: Path) -> Any:
    """The loop, compiled for the fixed schedule."""
    DECISION.save(path)
    return rose_compiler.compile(loops.iteration, numerics="close", tune=path)


def missing_passes(compiled: Any) -> frozenset[str]:
    """Passes of :data:`PASSES` that did nothing in the schedule in force."""
    text = compiled.explain()
    return frozenset(name for name in PASSES if f"[{name}]" not in text.split("Missed")[0])


def parted(a: Training, b: Training) -> int | None:
    """The first iteration, from 1, after which the parameters differ in bits."""
    pairs = enumerate(zip(a.digests, b.digests, strict=True), 1)
    return next((i for i, (x, y) in pairs if x != y), None)


def run(seeds: int, iterations: int, cfg: loops.Config = CONFIG, episode: int = EPISODE) -> Any:
    """All trainings: eager ones, compiled ones, and what did nothing of what was asked for."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # sums differ in bits with the thread count; that is not the question
    eager, compiled, missing = [], [], frozenset[str]()
    try:
        with Progress(console=Console(stderr=True)) as bar, tempfile.TemporaryDirectory() as folder:
            task = bar.add_task("training", total=2 * seeds)
            for seed in range(1, seeds + 1):
                eager.append(train(start(cfg, seed, episode), loops.iteration, iterations))
                bar.advance(task)
                fn = compiled_loop(Path(folder) / "decision.json")
                compiled.append(train(start(cfg, seed, episode), fn, iterations))
                missing |= missing_passes(fn)
                fn.close()
                bar.advance(task)
    finally:
        torch.set_num_threads(before)
    return eager, compiled, missing


def stacked(trainings: Sequence[Training]) -> Array:
    return np.stack([t.returns for t in trainings])


def draw(eager: Array, compiled: Array, steps: int, out: Path) -> None:
    """A picture of both, over environment steps; ``steps`` are those of a point of a curve."""
    x = (np.arange(eager.shape[1]) + 1) * steps / 1000
    low, high = spread(eager)
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    axes.fill_between(x, low, high, color="0.87", label="eager, 95% of further curves")
    for curves, color, name in ((eager, "0.45", "eager"), (compiled, "tab:red", "compiled")):
        for k, curve in enumerate(curves):
            axes.plot(x, curve, color=color, lw=0.8, label=name if k == 0 else None)
    for curves, style, name in ((eager, "k-", "eager, mean"), (compiled, "r--", "compiled, mean")):
        axes.plot(x, curves.mean(axis=0), style, lw=1.8, label=name)
    axes.set_xlabel("environment steps, thousands")
    axes.set_ylabel(f"return of {EPISODE} steps")
    axes.set_title(f"PPO on HalfCheetah-v5, {len(eager)} seeds, eager and compiled (close)")
    axes.legend(loc="upper left", fontsize=8, ncols=2)
    axes.margins(x=0.01)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    """Train, print a table and the verdict, draw the picture."""
    parser = argparse.ArgumentParser(prog="bench.returns", description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("docs/returns.png"))
    args = parser.parse_args(argv)
    if args.seeds < 2:
        parser.error("--seeds: a spread takes two seeds or more")
    steps = CONFIG.num_steps * CONFIG.num_envs * args.iterations
    if steps < LAST * (EPISODE + 1) * CONFIG.num_envs:
        parser.error(f"--iterations: fewer than {LAST} episodes of {EPISODE} steps would end")
    eager, compiled, missing = run(args.seeds, args.iterations)
    console = Console(width=100)
    if missing:
        console.print(f"No answer: {', '.join(sorted(missing))} did nothing here.")
        raise SystemExit(1)
    table = Table(title=f"mean return of the last {LAST} episodes", title_justify="left")
    for name in ("seed", "eager", "compiled", "parameters part after iteration"):
        table.add_column(name, justify="right")
    for seed, (a, b) in enumerate(zip(eager, compiled, strict=True), 1):
        ends = (f"{t.returns[-LAST:].mean():.1f}" for t in (a, b))
        table.add_row(str(seed), *ends, str(parted(a, b) or "never"))
    console.print(table)
    verdict = judge(stacked(eager), stacked(compiled))
    answer = "lie" if verdict.holds else "do NOT lie"
    console.print(
        f"The compiled curves {answer} inside eager's spread: {verdict.inside:.0%} of their points "
        f"(95% expected), {verdict.mean_inside:.0%} of their mean's; permutation test on the last "
        f"{LAST} episodes p = {verdict.p:.2f}.",
        highlight=False,
    )
    # the step after an episode's last one is the reset
    draw(stacked(eager), stacked(compiled), (EPISODE + 1) * CONFIG.num_envs, args.out)
    console.print(f"{args.out}\n{measure.machine()}", highlight=False, markup=False)


if __name__ == "__main__":
    main()

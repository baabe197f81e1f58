"""Prints and measures what `ppo_mujoco.py` shows: programs, remarks, a table and a picture."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for bench, which is not installed
from bench import measure

matplotlib.use("Agg")
from matplotlib import pyplot as plt


@dataclass
class Curve:
    """A training: per iteration, seconds since its start and returns of episodes that ended."""

    steps_per_iteration: int
    seconds: list[float] = field(default_factory=list)
    returns: list[list[float]] = field(default_factory=list)
    settled: float | None = None  # seconds after which the schedule was chosen

    def points(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Environment steps, seconds and mean of the returns, where episodes ended."""
        ended = [i for i, returns in enumerate(self.returns) if returns]
        steps = np.array([(i + 1) * self.steps_per_iteration for i in ended])
        means = np.array([np.mean(self.returns[i]) for i in ended])
        return steps, np.array(self.seconds)[ended], means


def print_program(console: Console, title: str, text: str, note: str) -> None:
    """Python on a rule with a title, and below it where the rest is."""
    console.rule(title, align="left")
    console.print(Syntax(text, "python", background_color="default", word_wrap=True))
    console.print(note, style="dim", highlight=False)


def loop_around(text: str, needle: str, start: str = "") -> str:
    """The innermost `for` statement that holds a line with `needle`, behind a line with `start`.

    Where no such line is, because the user's own statements run as they are, all behind `start`.
    """
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(start))
    at = next((i for i in range(first, len(lines)) if needle in lines[i]), None)
    if at is None:
        return "\n".join(lines[first:])
    depth = _indent(lines[at])
    head = next(
        i
        for i in range(at, first, -1)
        if _indent(lines[i]) < depth and lines[i].lstrip().startswith("for ")
    )
    outer = _indent(lines[head])
    end = next(
        (i for i in range(head + 1, len(lines)) if lines[i].strip() and _indent(lines[i]) <= outer),
        len(lines),
    )
    return "\n".join(line[outer:] for line in lines[head:end])


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def signatures(dump: str, called_in: str) -> str:
    """The operations that a piece of a dump calls, as the dump's head declares them."""
    found = []
    for block in dump.split("\n\n"):
        lines = block.splitlines()
        name = next((line for line in lines if line.startswith("def ")), "")[4:].partition("(")[0]
        if lines[0].startswith("@op") and f" {name}(" in called_in:
            body = [line for line in lines[1:] if not line.startswith("def ")]
            more = len([line for line in body if not line.lstrip().startswith("#")]) - 1
            comments = [line for line in body if line.lstrip().startswith("#")]
            rest = f"    ...  # {more} torch calls" if more > 0 else "    ..."
            found.append("\n".join([*(_short(line) for line in lines[:2]), *comments, rest]))
    return "\n\n".join(found)


def _short(line: str, width: int = 96) -> str:
    return line if len(line) <= width else line[: width - 2] + " …"


def show(fast: Any, console: Console) -> None:
    """The captured program, the emitted code and the remarks."""
    dump = fast.ir("captured")
    loop = loop_around(dump, "env_step(", start="def iteration(")
    text = signatures(dump, loop) + "\n\n" + loop
    print_program(console, "captured: the rollout", text, 'all of it: compiled.ir("captured")')
    loop = loop_around(fast.source, "env_step", start="def run(")
    print_program(console, "emitted: the rollout", loop, "all of it: compiled.source")
    console.rule("compiled.explain()", align="left")
    console.print(fast.explain(width=console.width), markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Effort:
    """How long to measure: trials of each variant, seconds a trial, copies to load the cores."""

    pairs: int = 12
    trial: float = 0.5
    capacity_repeats: int = 2
    capacity_seconds: float = 2.0
    capacity_retries: int = 1


Step = Callable[[], object]


def compare(
    *,
    eager: Step,
    sequential: Mapping[str, Step],
    compiled: Step,
    work: Mapping[str, Step],
    capacity_of: str,
    critical_path: float,
    steps: int,
    effort: Effort,
) -> tuple[Table, str]:
    """Measure in alternation: a table, and how to read it. A call is an iteration of `steps` steps.

    E0 is `eager`, E1 the fastest of `sequential`. `work` are iterations on one core in one process;
    the fastest counts. `capacity_of` sets up one of those, for processes of its own.
    `critical_path` is in seconds an iteration.
    """
    capacity = measure.capacity(
        capacity_of, effort.capacity_repeats, effort.capacity_seconds, effort.capacity_retries
    )
    best = measure.fastest(sequential, 1, effort.trial)
    leanest = measure.fastest(work, 1, effort.trial)
    variants = {"E0": eager, "E1": sequential[best], "compiled": compiled, "work": work[leanest]}
    for step in variants.values():
        step()
    measured = measure.abba(variants, effort.pairs, effort.trial)
    seconds = measured.seconds
    bound = measure.bounds(seconds["work"], capacity.median, critical_path)

    work_ms = 1e3 * float(np.median(seconds.pop("work")))

    table = Table()
    table.add_column("")
    for name in ("steps/s", "times E0", "times E1", "share of bound"):
        table.add_column(name, justify="right")
    for name, taken in {**seconds, "bound": bound}.items():
        table.add_row(
            name,
            f"{steps / float(np.median(taken)):,.0f}",
            *(
                str(measure.ratio(slow, taken)) if slow is not taken else "1"
                for slow in (seconds["E0"], seconds["E1"], bound)
            ),
        )
    trials = effort.pairs * len(variants)
    notes = (
        f"E0: as written. E1: as written, {best}.\n"
        f"Medians of {effort.pairs} neighbouring trials [bootstrap 95% interval], "
        f"{measured.noisy} of {trials} trials beside other load.\n"
        f"Bound: an iteration takes at least its critical path, {1e3 * critical_path:.0f} ms, and "
        f"at least its work on one core, {work_ms:.0f} ms ({leanest}), divided by the "
        f"{capacity.median:.2f} cores' worth that this machine does at once.\n{measure.machine()}"
    )
    return table, notes


def draw(curves: Mapping[str, Sequence[Curve]], episode: int, title: str, path: Path) -> None:
    """Learning curves against environment steps and against wall time, side by side.

    `curves` are the trainings of each name, a seed each, as long as each other. The time is that
    of the first one, in which schedules are tried.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), sharey=True, layout="constrained")
    styles = ({"color": "tab:gray"}, {"color": "tab:red"})
    for (name, seeds), style in zip(curves.items(), styles, strict=True):
        steps, seconds, _ = seeds[0].points()
        # episodes of all seeds end in the same iterations, as they are only ever truncated
        returns = np.stack([curve.points()[2] for curve in seeds])
        for axis, x in ((left, steps / 1000), (right, seconds)):
            axis.fill_between(x, returns.min(0), returns.max(0), alpha=0.15, lw=0, **style)
            axis.plot(x, returns.T, lw=0.5, alpha=0.6, **style)
            axis.plot(x, returns.mean(0), lw=2, label=name, **style)
        if seeds[0].settled is not None:
            right.axvspan(0, seeds[0].settled, alpha=0.06, lw=0, label="schedules tried", **style)
    left.set_xlabel("environment steps (thousands)")
    right.set_xlabel("wall time of the first seed (s), tuning included")
    left.set_ylabel(f"return of an episode of {episode} steps")
    for axis in (left, right):
        axis.set_xlim(left=0)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(loc="upper left", frameon=False)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=140)
    plt.close(figure)

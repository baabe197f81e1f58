"""Published workloads on the virtual GPU: ``python -m bench.replay [--write docs/replay.md]``.

Four schedules of each row of ``bench/data/stage_times.csv``: sequential, the pipeline of two halves
that today's systems write by hand, stage one (windows) and stage two (windows and quotas).
Throughput is relative to sequential. What is not published is assumed, and every number is a range
over the assumptions (``bench/replay_assumptions.py`` has them with their sources): the middle, each
assumption at its two ends with the others in the middle, and random points between the ends.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench import virtual
from bench.replay_assumptions import NAMES, RANGES, Assumptions
from bench.replay_model import Replay
from bench.replay_rows import Row, rows

#: What Rose's paper reports over the best systems: throughput, and SM activity in points.
BAND, POINTS = (1.20, 1.92), (23.8, 39.3)
SCHEDULES = ("sequential", "two halves by hand", "stage one", "stage two")


@dataclass(frozen=True)
class Point:
    """One set of assumptions: throughput relative to sequential and activity, by schedule."""

    throughput: tuple[float, ...]
    activity: tuple[float, ...]
    what: str
    assumed: Assumptions = field(default_factory=Assumptions)

    @property
    def gain(self) -> float:
        """Stage two over the better of the two that exist today."""
        return self.throughput[3] / max(self.throughput[:2])

    @property
    def over_by_hand(self) -> float:
        """Stage two over the pipeline of two halves."""
        return self.throughput[3] / self.throughput[1]

    @property
    def points(self) -> float:
        """Points of SM activity that stage two has above the better of those two."""
        today = 0 if self.throughput[0] >= self.throughput[1] else 1
        return 100 * (self.activity[3] - self.activity[today])

    @property
    def by_quotas(self) -> float:
        """Stage two over stage one."""
        return self.throughput[3] / self.throughput[2]


def point(row: Row, assumed: Assumptions) -> Point:
    """Simulate all four schedules."""
    replay = Replay(row, assumed)
    found = [replay.sequential(), replay.by_hand(), replay.stage_one()[0], replay.stage_two()]
    return Point(
        tuple(found[0].time / one.time for one in found),
        tuple(one.activity for one in found),
        found[3].what,
        assumed,
    )


@dataclass(frozen=True)
class Outcome:
    """A row over all its assumptions. ``ends`` has each one's two ends."""

    row: Row
    middle: Point
    ends: dict[str, tuple[Point, Point]]
    samples: tuple[Point, ...]

    @property
    def all(self) -> tuple[Point, ...]:
        """Every point."""
        return (self.middle, *(p for pair in self.ends.values() for p in pair), *self.samples)

    def gains(self) -> tuple[float, float]:
        """Least and greatest gain."""
        gains = [p.gain for p in self.all]
        return min(gains), max(gains)

    def decides(self) -> tuple[str, float, float]:
        """The assumption that alone moves the gain most, and the gain at its two ends."""
        name = max(self.ends, key=lambda n: abs(self.ends[n][0].gain - self.ends[n][1].gain))
        return name, self.ends[name][0].gain, self.ends[name][1].gain

    def verdict(self) -> str:
        """Where the row lies beside the published band, and what decides it."""
        low, high = self.gains()
        if self.row.no_gain:
            held = "held" if high < 1.02 else f"not held: up to {high:.2f}x"
            return f"no gain, predicted in advance: {held}"
        name, at_low, at_high = self.decides()
        one = RANGES[name]
        why = f"{name} decides: {at_low:.2f}x at {one.low:g}, {at_high:.2f}x at {one.high:g}"
        if high < BAND[0]:
            return f"below the band; {why}"
        if low > BAND[1]:
            return f"above the band; {why}"
        return f"inside the band; {why}" if low >= BAND[0] else f"reaches into the band; {why}"


def study(row: Row, samples: int) -> Outcome:
    """Simulate a row at the middle, at the ends and at random points."""
    middle = Assumptions()
    names = row.assumed()
    ends = {
        name: (
            point(row, _with(middle, {name: RANGES[name].low})),
            point(row, _with(middle, {name: RANGES[name].high})),
        )
        for name in names
    }
    rng = random.Random(row.id)
    drawn = []
    for _ in range(samples):
        values = {name: rng.uniform(RANGES[name].low, RANGES[name].high) for name in names}
        if "apart" in values:
            values["apart"] = float(rng.random() < 0.5)
        drawn.append(point(row, _with(middle, values)))
    return Outcome(row, point(row, middle), ends, tuple(drawn))


def _with(assumed: Assumptions, values: dict[str, float]) -> Assumptions:
    return Assumptions(**{name: values.get(name, getattr(assumed, name)) for name in NAMES})


def _range(values: Sequence[float], middle: float, form: str = ".2f") -> str:
    return f"{middle:{form}} [{min(values):{form}}, {max(values):{form}}]"


def cells(outcome: Outcome) -> list[str]:
    """One line of the table."""
    every, middle = outcome.all, outcome.middle
    found = [outcome.row.id]
    found += [_range([p.throughput[k] for p in every], middle.throughput[k]) for k in (1, 2, 3)]
    found.append(_range([p.over_by_hand for p in every], middle.over_by_hand))
    found.append(_range([p.gain for p in every], middle.gain))
    found += [
        _range([100 * p.activity[k] for p in every], 100 * middle.activity[k], ".0f")
        for k in (0, 1, 2, 3)
    ]
    found.append(_range([p.points for p in every], middle.points, "+.0f"))
    return found


HEADINGS = (
    "row",
    "by hand",
    "stage one",
    "stage two",
    "stage two / by hand",
    "stage two / best of today",
    "activity: sequential, %",
    "by hand",
    "stage one",
    "stage two",
    "points",
)


def markdown(outcomes: Sequence[Outcome], left_out: Sequence[Row], samples: int) -> str:
    """The page."""
    lines = [
        "# Replay of published workloads",
        "",
        "Printed by `python -m bench.replay --write docs/replay.md`; do not edit. Nothing here was",
        "measured on a GPU: the stage times are published ones, and the schedules run in simulated",
        "time on the virtual GPU of [quotas](quotas.md).",
        "",
        "Throughput is relative to the sequential schedule. Each number is the middle of the",
        "assumptions, then the range over them: each at its ends alone, and "
        f"{samples} random points.",
        "Stages that ran on several GPUs are replayed as if they shared one.",
        "",
        f"Rose reports {BAND[0]:.2f} to {BAND[1]:.2f}x over the best systems, and SM activity up",
        f"by {POINTS[0]} to {POINTS[1]}",
        'points. "Best of today" is the faster of sequential and two halves by hand.',
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "|" + "---|" * len(HEADINGS),
    ]
    lines += ["| " + " | ".join(cells(one)) + " |" for one in outcomes]
    lines += ["", "## Beside the published band", ""]
    lines += ["| row | verdict | fastest schedule in the middle |", "|---|---|---|"]
    lines += [f"| {o.row.id} | {o.verdict()} | {o.middle.what} |" for o in outcomes]
    every = [p for o in outcomes for p in o.all]
    helped = [p for p in every if p.by_quotas > 1.005]
    apart = sum(p.assumed.apart > 0 for p in helped)
    most = max((p.by_quotas for p in every), default=1.0)
    lines += [
        "",
        f"Stage two adds to stage one in {len(helped)} of {len(every)} simulated points, by up to "
        f"{most:.2f}x;",
        f"in {apart} of them the simulator has to live in a process of its own, where sharing",
        "replaces taking turns. Where a row lands outside the band, the verdict names",
        "the assumption that moves it most and how far; none was chosen with the band in view.",
        "",
        "## Rows",
        "",
        "| row | workload | published on | replayed on | note | source |",
        "|---|---|---|---|---|---|",
    ]
    for row in [*(o.row for o in outcomes), *left_out]:
        note = "; ".join(filter(None, [row.note, row.why_not and f"left out: {row.why_not}"]))
        parts = (row.id, row.workload, row.hardware, row.machine, note, row.source)
        lines.append("| " + " | ".join(parts) + " |")
    lines += [
        "",
        "## Assumptions",
        "",
        "| name | low | middle | high | what, and from where |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {one.low:g} | {one.middle:g} | {one.high:g} | {one.source} |"
        for name, one in RANGES.items()
    ]
    lines += [
        "",
        "Also: a batch in parts costs the SM-seconds of the whole, and the part of a call that the",
        "batch does not shorten (`sim_fixed`, `infer_fixed`) is paid for each part; a simulator on",
        "the CPU fills its cores; what is the same on every step is hoisted by stage one; training",
        "runs alone on the whole device, with 5% of its time without a kernel. Stage one chooses",
        "among 1, 2 and 4 shards, late work in windows and a priority for the simulator's stream,",
        "by predicted time; the simulator's stream is in the same process unless `apart` is 1.",
        "",
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Print the tables; ``--write`` makes the page of them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rows", default="", help="ids, comma-separated; all by default")
    parser.add_argument("--samples", type=int, default=16, help="random points a row")
    parser.add_argument("--write", metavar="FILE", help="write the page there")
    parser.add_argument(
        "--clock",
        type=int,
        default=0,
        metavar="N",
        help="also hold the predictor against N iterations in real time (bench.virtual)",
    )
    options = parser.parse_args(argv)
    known = {row.id: row for row in rows()}
    names = options.rows.split(",") if options.rows else list(known)
    for name in names:
        if name not in known:
            parser.error(f"no row {name!r}; there are {', '.join(known)}")
    chosen = [known[name] for name in names]
    console = Console()
    for row in chosen:
        if row.no_gain:
            stage = max(row.published, key=lambda name: row.published[name])
            console.print(f"predicted in advance: no gain for {row.id}, {stage} takes it all")
    replayed = [row for row in chosen if row.why_not is None]
    outcomes = [
        study(row, options.samples)
        for row in track(replayed, "rows", console=console, transient=True)
    ]
    left_out = [row for row in chosen if row.why_not is not None]
    table = Table(*HEADINGS, title="throughput relative to sequential; SM activity in %")
    for one in outcomes:
        table.add_row(*cells(one))
    console.print(table)
    for one in outcomes:
        console.print(f"{one.row.id}: {one.verdict()}")
    for row in left_out:
        console.print(f"{row.id}: left out, {row.why_not}")
    if options.write:
        Path(options.write).write_text(markdown(outcomes, left_out, options.samples), "utf-8")
    if options.clock:
        console.print("predicted in simulated time, and by the clock on the virtual device:")
        return virtual.main(["--iterations", str(options.clock)])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Moves quota from branches that wait to the one they wait for.

A graph of branches is a list of tasks: a lane runs its own in order, ``after`` are the joins. The
tuner measures a few iterations at different quotas, fits the response of every task, and shifts
chunks until the predicted iteration stops shrinking. What it predicts with is the longest path
through the graph under the fitted times. The longest paths through each task under some quotas
bound every later prediction from below, so that only quotas that shorten all of these are predicted
at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rose_compiler.base.machine import Schedule, Task
from rose_compiler.tune.critical import lane_slack, longest_through, timing
from rose_compiler.tune.response import Response, fit

#: Least relative gain that is worth another prediction or another measured iteration.
WORTH = 1e-3

Quotas = Mapping[str, int]
Measure = Callable[[Quotas], Schedule]


@dataclass(frozen=True)
class Move:
    """``chunks`` went from one lane to another; ``predicted_s`` is the iteration's time after."""

    source: str
    target: str
    chunks: int
    predicted_s: float


@dataclass(frozen=True)
class Tuned:
    """Quotas in chunks by lane, and how they were found.

    ``measured_s`` is the best measured iteration, with these quotas; ``equal_s`` the one with
    equal quotas. ``iterations`` counts measured iterations, ``predictions`` predicted ones, and
    ``plans`` the plans that either was about.
    """

    chunks: Quotas
    predicted_s: float
    measured_s: float
    equal_s: float
    iterations: int
    predictions: int
    plans: int
    slack: Mapping[str, float]  # of each lane under these quotas
    curves: Mapping[str, Response] = field(default_factory=dict)
    moves: tuple[Move, ...] = ()

    def why(self) -> dict[str, str]:
        """A note on each lane, for ``QuotaPlan.explain``."""
        return {
            lane: "critical" if slack <= WORTH * self.predicted_s else f"slack {slack:.3g} s"
            for lane, slack in self.slack.items()
        }


def tune(
    tasks: Sequence[Task],
    measure: Measure,
    chunks: int,
    *,
    lanes: Sequence[str] | None = None,
    points: int = 4,
    rounds: int = 6,
    plans: int | None = None,
) -> Tuned:
    """Find quotas for ``lanes``, by default all those of ``tasks``; others are left alone.

    ``measure(quotas)`` runs one iteration under quotas in chunks and says when each task started
    and ended. ``chunks`` is how many there are to give; every lane gets at least one. ``points``,
    3 to 5, iterations are measured to fit the curves, then at most ``rounds`` more: one for each
    plan, which corrects the curves before the next, and the rest for single chunks moved from
    measured slack, since contention for memory is in no curve. ``plans`` bounds how many plans are
    measured or predicted in all, whichever comes first.

    Raises ``ValueError`` for fewer chunks than lanes or a number of points out of range.
    """
    if not 3 <= points <= 5:
        raise ValueError(f"a response is fitted from 3 to 5 points, not {points}")
    lanes = list(lanes or dict.fromkeys(task.lane for task in tasks))
    if chunks < len(lanes):
        raise ValueError(f"{chunks} chunks are not enough for {len(lanes)} lanes")
    seen: dict[tuple[int, ...], Schedule] = {}
    history: dict[str, list[tuple[float, float]]] = {task.name: [] for task in tasks}

    def run(quotas: Quotas) -> Schedule:
        done = seen[tuple(quotas[lane] for lane in lanes)] = measure(quotas)
        for task in tasks:
            taken = done.end[task.name] - done.start[task.name]
            # a lane without a quota counts as one with the same all the time
            history[task.name].append((float(quotas.get(task.lane, chunks)), taken))
        return done

    profile = profile_quotas(lanes, chunks, points)
    for quotas in profile:
        if tuple(quotas[lane] for lane in lanes) not in seen:
            run(quotas)
    equal = seen[tuple(profile[0][lane] for lane in lanes)].makespan
    predictions = 0
    looked = set(seen)
    moves: tuple[Move, ...] = ()
    while True:
        curves = {name: fit(known) for name, known in history.items()}
        measured = sorted(seen, key=lambda key: seen[key].makespan)
        planner = Planner(tasks, curves, chunks, lanes)
        starts = [dict(zip(lanes, key, strict=True)) for key in measured]
        quotas = planner.improve(*starts, more=None if plans is None else plans - len(looked))
        predictions += planner.predictions
        looked |= planner.predicted.keys()
        moves += planner.moves
        key = tuple(quotas[lane] for lane in lanes)
        best = min(done.makespan for done in seen.values())
        worth = planner.predicted[key] < best * (1 - WORTH)
        if key in seen or rounds == 0 or not worth:
            break
        rounds -= 1
        run(quotas)
    while rounds > 0:
        key = _fastest(seen)
        probe = _next_move(tasks, dict(zip(lanes, key, strict=True)), seen)
        if probe is None:
            break
        key = tuple(probe[lane] for lane in lanes)
        if key not in looked and len(looked) == plans:
            break
        looked.add(key)
        rounds -= 1
        run(probe)
    key = _fastest(seen)
    quotas = dict(zip(lanes, key, strict=True))
    final = timing(tasks, planner.seconds(quotas))
    return Tuned(
        quotas,
        final.makespan,
        seen[key].makespan,
        equal,
        len(seen),
        predictions,
        len(looked),
        lane_slack(tasks, final),
        curves,
        moves,
    )


def drift(tuned: Tuned, tasks: Sequence[Task], schedule: Schedule) -> dict[str, float]:
    """How far each lane's work is off what its curves say at its quota, as a share; 0.1 is 10%
    longer. Durations move as a policy learns: quotas are found anew when it is much.
    """
    expected: dict[str, float] = {}
    taken: dict[str, float] = {}
    whole = max(tuned.chunks.values(), default=1)
    for task in tasks:
        curve = tuned.curves[task.name]
        units = tuned.chunks.get(task.lane, whole)
        expected[task.lane] = expected.get(task.lane, 0.0) + curve.seconds(units)
        duration = schedule.end[task.name] - schedule.start[task.name]
        taken[task.lane] = taken.get(task.lane, 0.0) + duration
    return {lane: taken[lane] / most - 1 for lane, most in expected.items() if most > 0}


def _next_move(
    tasks: Sequence[Task], quotas: Quotas, seen: Mapping[tuple[int, ...], Schedule]
) -> dict[str, int] | None:
    """One chunk from the lane that waits longest to one on the critical path; None if none is new.

    By the measured times under ``quotas``.
    """
    done = seen[tuple(quotas.values())]
    timed = timing(
        tasks, {task.name: done.end[task.name] - done.start[task.name] for task in tasks}
    )
    slack = {lane: s for lane, s in lane_slack(tasks, timed).items() if lane in quotas}
    lane_of = {task.name: task.lane for task in tasks}
    on_path: dict[str, float] = {}
    for name in timed.path:
        lane = lane_of[name]
        if lane not in quotas:
            continue
        on_path[lane] = on_path.get(lane, 0.0) + timed.end[name] - timed.start[name]
    for source in sorted(slack, key=lambda lane: -slack[lane]):
        # ordered by what a chunk more would save if all the work were parallel
        for target in sorted(on_path, key=lambda lane: -on_path[lane] / (quotas[lane] + 1)):
            moved = {**quotas, source: quotas[source] - 1, target: quotas[target] + 1}
            if source != target and quotas[source] > 1 and tuple(moved.values()) not in seen:
                return moved
    return None


def _fastest(seen: Mapping[tuple[int, ...], Schedule]) -> tuple[int, ...]:
    return min(seen, key=lambda key: seen[key].makespan)


def profile_quotas(lanes: Sequence[str], chunks: int, points: int) -> list[dict[str, int]]:
    """Quotas to measure: equal ones, then each lane small, middling and large in turn."""
    equal = apportion(dict.fromkeys(lanes, 1.0), chunks)
    pattern = [1.0, 4.0, 2.0, 8.0][: points - 1]
    plans = [equal]
    for shift in range(points - 1):
        weights = {
            lane: pattern[(place + shift) % len(pattern)] for place, lane in enumerate(lanes)
        }
        plans.append(apportion(weights, chunks))
    return plans


def apportion(weights: Mapping[str, float], chunks: int) -> dict[str, int]:
    """Whole chunks in proportion to the weights, at least one each, by largest remainders."""
    spare = chunks - len(weights)
    total = sum(weights.values())
    exact = {name: spare * weight / total for name, weight in weights.items()}
    given = {name: 1 + int(part) for name, part in exact.items()}
    left = chunks - sum(given.values())
    for name in sorted(exact, key=lambda n: int(exact[n]) - exact[n])[:left]:
        given[name] += 1
    return given


class Planner:
    """Searches quotas under fitted curves. ``predicted`` holds what was predicted, by quotas."""

    def __init__(
        self,
        tasks: Sequence[Task],
        curves: Mapping[str, Response],
        chunks: int,
        lanes: Sequence[str],
        worth: float = WORTH,
    ) -> None:
        self._tasks = tasks
        self._worth = worth
        self._lanes = list(lanes)
        self._chunks = chunks
        self._table = {task.name: self._row(task.lane, curves[task.name]) for task in tasks}
        self._lane_of = {task.name: task.lane for task in tasks}
        #: seconds of a known path by lane and chunks: the path's time is the sum over lanes
        self._paths: dict[tuple[str, ...], dict[str, list[float]]] = {}
        self.predicted: dict[tuple[int, ...], float] = {}
        self.moves: tuple[Move, ...] = ()

    @property
    def predictions(self) -> int:
        """How many iterations were predicted."""
        return len(self.predicted)

    def seconds(self, quotas: Quotas) -> dict[str, float]:
        """Fitted time of each task."""
        return {name: row[quotas.get(self._lane_of[name], 0)] for name, row in self._table.items()}

    def predict(self, quotas: Quotas) -> float:
        """The iteration's time; the longest paths are remembered."""
        key = self._key(quotas)
        if key not in self.predicted:
            self.predicted[key], paths = longest_through(self._tasks, self.seconds(quotas))
            for path in paths:
                self._remember(path)
        return self.predicted[key]

    def improve(self, *starts: Quotas, more: int | None = None) -> dict[str, int]:
        """The quotas with the least predicted time that moves from ``starts`` lead to; ``more``
        bounds how many others are predicted on the way."""
        times = [self.predict(start) for start in starts]
        most = None if more is None else len(self.predicted) + more
        least = min(times)
        best = dict(starts[times.index(least)])
        while True:
            # several starts: moves between two lanes can get stuck where three would have to change
            ends = [self._descend(start) for start in (best, *starts)]
            at = min(ends, key=self._bound)
            bound = self._bound(at)[0]
            if bound >= least * (1 - self._worth):
                return best
            if len(self.predicted) == most and self._key(at) not in self.predicted:
                return best
            value = self.predict(at)
            if value < least:
                self._log(best, at, value)
                best, least = at, value
            if value <= bound * (1 + 1e-9) and value > least:
                return best

    def needed(self, quotas: Quotas) -> dict[str, int]:
        """The least chunks of each lane that keep the predicted time, the others as they are."""
        whole = self.predict(quotas)
        found = {}
        for lane in self._lanes:
            count = quotas[lane]
            while count > 1 and self.predict({**quotas, lane: count - 1}) <= whole:
                count -= 1
            found[lane] = count
        return found

    def _key(self, quotas: Quotas) -> tuple[int, ...]:
        return tuple(quotas[lane] for lane in self._lanes)

    def _descend(self, start: Quotas) -> dict[str, int]:
        """Move chunks between two lanes while the longest known path gets shorter."""
        at, value = dict(start), self._bound(start)
        while True:
            best: dict[str, int] | None = None
            for source in self._lanes:
                for target in self._lanes:
                    for count in range(1, at[source] if source != target else 1):
                        moved = {**at, source: at[source] - count, target: at[target] + count}
                        found = self._bound(moved)
                        if found < value:
                            best, value = moved, found
            if best is None:
                return at
            at = best

    def _row(self, lane: str, curve: Response) -> list[float]:
        """Seconds by chunks; at 0 what a lane without a quota takes."""
        whole = curve.seconds(self._chunks)
        if lane not in self._lanes:
            return [whole] * (self._chunks + 1)
        return [whole] + [curve.seconds(count) for count in range(1, self._chunks + 1)]

    def _bound(self, quotas: Quotas) -> tuple[float, ...]:
        """Times of the known paths, longest first: a shorter second longest breaks ties."""
        times = [
            sum(row[quotas.get(lane, 0)] for lane, row in by_lane.items())
            for by_lane in self._paths.values()
        ]
        return tuple(sorted(times, reverse=True))

    def _remember(self, path: tuple[str, ...]) -> None:
        if path in self._paths:
            return
        by_lane: dict[str, list[float]] = {}
        for name in path:
            row = by_lane.setdefault(self._lane_of[name], [0.0] * (self._chunks + 1))
            for count, seconds in enumerate(self._table[name]):
                row[count] += seconds
        self._paths[path] = by_lane

    def _log(self, before: Quotas, after: Quotas, predicted: float) -> None:
        given = {lane: after[lane] - before[lane] for lane in self._lanes}
        source = min(given, key=lambda lane: given[lane])
        target = max(given, key=lambda lane: given[lane])
        self.moves += (Move(source, target, given[target], predicted),)
